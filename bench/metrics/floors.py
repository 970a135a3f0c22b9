"""What needs no leak: for each metric the best answer that looks at nothing.

Such an answer is a fixed set of K samples, labels and counts, the same for every victim. Several
are fitted on one half of batches that are drawn from the public samples as the protocol deals
samples to clients, the other half says which of them is the best by each metric, and the victims'
floor is what that one scores. Samples of a batch are matched one to one before they are scored, so
K different samples may beat K copies of the best one. The halves share no sample, since one that
is scored against itself looks perfect.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bench.data.partition import Dealing
from bench.metrics.named import FLOOR_SUFFIX, sign_of
from bench.metrics.recognise import Gallery, share_recognised
from bench.metrics.score import counts_of, image_values, label_values, one_to_one
from bench.seeding import numpy_generator
from bench.toolkit import images
from bench.toolkit.images import WINDOW

LABEL_DRAWS = 1000
"""Batches of labels from which the best counts are found."""
_SAMPLES, _BATCHES = 256, 24
"""Of one half of the drawn batches: at least so many samples and so many batches."""
_SETS, _SINGLES = 6, 24
"""Batches, or single samples, that are tried as answers as they are."""
_MATCHINGS = 6
"""Times that a set is matched and fitted anew."""
_KEPT = 64
"""Fitted answers that a process keeps: attacks on one data set share them."""


@dataclass(frozen=True, kw_only=True)
class Blind:
    """An answer that reads nothing.

    Attributes:
        x: Its samples [K, ...]; with `by_class` the sample of every class [C, ...].
        y: Their labels [K].
        by_class: Whether it takes the true labels and answers each with its class's sample.
    """

    x: Tensor
    y: Tensor
    by_class: bool = False

    def answers(self, y: Tensor) -> Tensor:
        """Its samples [V, K, ...] for victims of labels [V, K]."""
        return self.x[y] if self.by_class else self.x.expand(len(y), *self.x.shape)


def floors(
    *,
    x: Tensor,
    y: Tensor,
    classes: int,
    aux_x: Tensor,
    aux_y: Tensor,
    aux_clients: Tensor | None = None,
    categorical: Sequence[tuple[int, int]] = (),
    dealing: Dealing | None = None,
    granted: bool = False,
    gallery: Gallery | None = None,
) -> dict[str, list[float]]:
    """Return the per-victim floors: what the best answer without any message scores, by metric.

    With the suffix _class_mean it is the best one that is told the true labels.

    Args:
        x: The private samples [V, K, ...].
        y: Their labels [V, K].
        classes: Number of classes.
        aux_x: Public samples [N, ...].
        aux_y: Their labels [N].
        aux_clients: Whose they are, int64 [N], if the data says so.
        categorical: Groups of one-hot columns of tabular data.
        dealing: How samples come to clients, which an attacker knows; None: evenly at random.
        granted: Whether the attacker is told the labels, which then leak nothing.
        gallery: Other images, for what the answers of best SSIM have of `recognised`.
    """
    owners = None
    if aux_clients is not None and dealing is not None and dealing.how == "natural":
        owners = aux_clients.cpu()
    x, y, aux_x, aux_y = (t.cpu() for t in (x, y, aux_x, aux_y))
    content = hashlib.sha256(str(tuple(aux_x.shape)).encode())
    for numbers in (aux_x, aux_y, owners):
        content.update(b"" if numbers is None else numbers.contiguous().numpy().tobytes())
    digest = content.hexdigest()
    known = _Public(aux_x, aux_y, owners, tuple(categorical), classes, dealing, digest)
    best, best_counts = _fit(known, y.shape[1])
    scores: dict[int, dict[str, Tensor]] = {}
    values = {}
    for name, answer in best.items():
        if id(answer) not in scores:
            scores[id(answer)] = _scores(answer, x, y, categorical)
        values[name] = scores[id(answer)][name.removesuffix(FLOOR_SUFFIX)]
        if gallery is not None and name.removesuffix(FLOOR_SUFFIX) == "ssim":
            guess = _match(answer, x, y)[0]
            values[name.replace("ssim", "recognised")] = share_recognised(guess, x, y, gallery)
    truth = counts_of(y, classes)
    for name, counts in best_counts.items():
        values[name] = label_values(counts.expand_as(truth), truth)[name]
    if granted:
        values |= {k: values[k + FLOOR_SUFFIX] for k in values if k + FLOOR_SUFFIX in values}
        right = torch.ones(len(y), dtype=torch.float64)
        values |= dict.fromkeys((*best_counts, "label_accuracy"), right)
    return {k: v.tolist() for k, v in values.items()}


@dataclass(frozen=True)
class _Public:
    """Public samples, and how they are dealt, as a key of a cache: equal by their content."""

    x: Tensor = field(compare=False)
    y: Tensor = field(compare=False)
    owners: Tensor | None = field(compare=False)
    categorical: tuple[tuple[int, int], ...]
    classes: int
    dealing: Dealing | None
    digest: str


@lru_cache(maxsize=_KEPT)
def _fit(public: _Public, samples: int) -> tuple[dict[str, Blind], dict[str, Tensor]]:
    """Fit the best answers that read nothing: by metric of samples, or with _class_mean of samples
    given the labels, an answer; by metric of label counts, counts [C]."""
    rng = numpy_generator(0, "floor", samples)
    labels = torch.from_numpy(_batches_of_labels(public, samples, LABEL_DRAWS, rng))
    number = max(_BATCHES, -(-_SAMPLES // samples))
    known = public.y.numpy()
    members = [rng.permutation(np.flatnonzero(known == c)) for c in range(public.classes)]
    fit, choose = (
        torch.from_numpy(np.array([[rng.choice(half[c]) for c in batch] for batch in some]))
        for half, some in (
            ([m[::2] for m in members], labels[:number].tolist()),
            ([m[1::2] if len(m) > 1 else m for m in members], labels[number : 2 * number].tolist()),
        )
    )
    blind = list(_candidates(public, fit, rng))
    by_class = [
        Blind(x=x, y=torch.arange(public.classes), by_class=True)
        for x in _representatives(public, fit.flatten(), public.y[fit.flatten()], public.classes)
    ]
    counts = _best_counts(counts_of(labels, public.classes), samples)
    likely = torch.repeat_interleave(torch.arange(public.classes), counts["irec"])
    blind += [Blind(x=b.x[likely], y=likely) for b in by_class]
    best = _best(blind, public, choose)
    given = _best([*blind, *by_class], public, choose)
    given.pop("label_accuracy")
    best |= {name + FLOOR_SUFFIX: answer for name, answer in given.items()}
    return best, counts


def _best(blind: Sequence[Blind], public: _Public, batches: Tensor) -> dict[str, Blind]:
    """Return the answer of the best mean score on batches of public samples [D, K], by metric."""
    x, y = public.x[batches], public.y[batches]
    means = [
        {k: float(v.mean()) for k, v in _scores(b, x, y, public.categorical).items()} for b in blind
    ]
    return {
        name: blind[max(range(len(blind)), key=lambda i: sign_of(name) * means[i][name])]
        for name in means[0]
    }


def _scores(
    answer: Blind, x: Tensor, y: Tensor, categorical: Sequence[tuple[int, int]]
) -> dict[str, Tensor]:
    """Return every metric of samples for victims x [V, K, ...], y [V, K]: float64 [V]."""
    guess, order = _match(answer, x, y)
    values = image_values(guess, x, categorical)
    right = y if answer.by_class else answer.y.expand_as(y).gather(1, order)
    return values | {"label_accuracy": (right == y).double().mean(dim=1)}


def _match(answer: Blind, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return an answer's samples in the order of the victims' [V, K, ...], and that order [V,
    K]."""
    guess = answer.answers(y)
    order = one_to_one(guess, x)
    return guess[torch.arange(len(x))[:, None], order], order


# --- batches as clients have them --------------------------------------------------------------


def _batches_of_labels(
    public: _Public, samples: int, number: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw labels [number, samples] of batches, each of one client: of the data's own clients those
    that hold as many samples as those of the run, of all if none does; a client with fewer than a
    batch repeats some."""
    known, dealing = public.y.numpy(), public.dealing
    if public.owners is not None and dealing is not None:
        owners = public.owners.numpy()
        shares = [np.flatnonzero(owners == owner) for owner in np.unique(owners)]
        shares = [s for s in shares if len(s) >= dealing.least] or shares
        chosen = [shares[i] for i in rng.integers(len(shares), size=number)]
        return np.stack([known[rng.choice(s, samples, replace=len(s) < samples)] for s in chosen])
    if dealing is None or dealing.how == "natural":
        return rng.choice(known, size=(number, samples))
    size = max(2000, 20 * dealing.clients * max(samples, dealing.least))
    batches: list[np.ndarray] = []
    while len(batches) < number:
        labels = rng.choice(known, size=size)
        shares = [s for s in dealing.deal(labels, rng) if len(s) >= samples]
        batches += [labels[rng.choice(s, size=samples, replace=False)] for s in shares]
        size *= 1 if shares else 2
    return np.stack(batches[:number])


# --- answers that are tried --------------------------------------------------------------------


def _candidates(public: _Public, batches: Tensor, rng: np.random.Generator) -> Iterator[Blind]:
    """Yield answers fitted to batches of public samples [D, K]."""
    samples = batches.shape[1]
    flat = batches.flatten()
    commonest = _commonest(public.y[flat], torch.zeros_like(flat), 1).expand(samples)
    for x in _representatives(public, flat, torch.zeros_like(flat), 1):
        yield Blind(x=x.expand(samples, *x.shape[1:]), y=commonest)
    if samples > 1:
        slots = _match_slots(public, batches)
        labels = _commonest(public.y[flat], slots, samples)
        for x in _representatives(public, flat, slots, samples):
            yield Blind(x=x, y=labels)
    tried = rng.permutation(len(batches))[: _SETS if samples > 1 else _SINGLES]
    for batch in batches[torch.from_numpy(tried)]:
        yield Blind(x=public.x[batch], y=public.y[batch])


def _match_slots(public: _Public, batches: Tensor) -> Tensor:
    """Return which of K places each sample of batches [D, K] is matched with, int64 [D * K]. Every
    place holds the mean of its samples: Lloyd's algorithm with one sample of a batch per place."""
    samples = batches.shape[1]
    x = public.x[batches]
    places, order = x[0], torch.empty_like(batches)
    for _ in range(_MATCHINGS):
        order = one_to_one(places.expand_as(x), x)
        places = _slot_means(x.flatten(0, 1), order.flatten(), samples)
    return order.flatten()


def _representatives(
    public: _Public, chosen: Tensor, slots: Tensor, count: int
) -> Iterator[Tensor]:
    """One sample per slot [count, ...], in several ways: of least squared error, and of the best
    PSNR, SSIM, or attributes. chosen: places of public samples [N]; slots: theirs."""
    x = public.x[chosen]
    mean = _slot_means(x, slots, count)
    yield mean
    if x.ndim == 4:
        yield _best_psnr(x, slots, mean)
        if min(x.shape[-2:]) >= WINDOW:
            yield images.most_similar(x, slots, mean)
    if public.categorical:
        yield _typical(x, slots, mean, public.categorical)


def _slot_means(x: Tensor, slots: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """Weighted mean of the samples of every slot [count, ...]; of all for a slot without any."""
    weights = torch.ones(len(x)) if weights is None else weights
    shape = (-1, *[1] * (x.ndim - 1))
    weighted = x.double() * weights.double().view(shape)
    sums = torch.zeros(count, *x.shape[1:], dtype=torch.float64).index_add_(0, slots, weighted)
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, slots, weights.double())
    means = sums / total.clamp_min(1e-300).view(shape)
    means[total == 0] = x.double().mean(dim=0)
    return means.to(x.dtype)


def _best_psnr(x: Tensor, slots: Tensor, start: Tensor) -> Tensor:
    """A stationary point of the mean logarithm of squared errors: a mean weighted by the inverse
    of each sample's error, found by repeating."""
    guess = start
    for _ in range(_MATCHINGS):
        error = images.mse(guess[slots], x, sample_dims=x.ndim - 1)
        guess = _slot_means(x, slots, len(start), 1 / error.clamp_min(1e-6))
    return guess


def _typical(
    x: Tensor, slots: Tensor, mean: Tensor, categorical: Sequence[tuple[int, int]]
) -> Tensor:
    """Return the means with the commonest value of every attribute."""
    typical = mean.clone()
    for first, last in categorical:
        value = x[:, first:last].argmax(dim=1)
        for slot, most in enumerate(_commonest(value, slots, len(mean)).tolist()):
            owner = (value == most).nonzero()[0, 0]
            typical[slot, first:last] = x[owner, first:last]
    return typical


def _commonest(values: Tensor, slots: Tensor, count: int) -> Tensor:
    """The commonest of the values of every slot, int64 [count]; of all for a slot without any."""
    kinds = int(values.max()) + 1
    table = torch.bincount(slots * kinds + values, minlength=count * kinds).view(count, kinds)
    table = torch.where(table.sum(dim=1, keepdim=True) > 0, table, table.sum(dim=0))
    return table.argmax(dim=1)


# --- counts -------------------------------------------------------------------------------------


def _best_counts(truth: Tensor, samples: int) -> dict[str, Tensor]:
    """Return the constant counts [C] of the largest mean of each metric over true counts [D, C].

    LnAcc and LeAcc are sums over classes, so each class has its commonest count, and is present
    where it mostly is. Recall gains P(count >= j) from the j-th guess of a class, which falls with
    j, so the K largest gains are the best K guesses.
    """
    classes = truth.shape[1]
    at_least = torch.stack([(truth >= j).double().mean(dim=0) for j in range(1, samples + 1)])
    order = torch.argsort(at_least.flatten(), descending=True, stable=True)[:samples]
    return {
        "leacc": (at_least[0] > 0.5).long(),
        "lnacc": torch.mode(truth, dim=0).values,
        "irec": torch.bincount(order % classes, minlength=classes),
    }
