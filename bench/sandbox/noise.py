"""Whether what a defense draws is what `mechanisms` declares.

What left a hook is held against what the declared mechanism samples of what entered it. A level
counts as wrong if it is off by more than TOLERANCE beyond what chance allows at FALSE_ALARM; every
test of a check shares that bound. That draws are independent is tested as far as correlation shows
it, between draws at any one distance, which takes in uploads of one length after another; not seen
are draws that depend on each other without being correlated, those whose distance changes, and
rare ones. A level that float32 rounds away is skipped, never passed.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from scipy import stats
from scipy.fft import next_fast_len
from torch import Tensor

from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS, Part, State, as_kind
from bench.protocols.federation import RoundResult
from bench.sandbox.findings import Broken, NotChecked

FALSE_ALARM = 1e-6
"""Chance that an honest plugin fails any test of this file."""
TOLERANCE = 0.02
"""Relative error of a noise level that is let pass."""
_TESTS = 20
_Z = float(stats.norm.isf(FALSE_ALARM / _TESTS / 2))
ROUNDING = 1e-4
"""Relative error that float32 may make over a round."""
_SEEN_FROM = 50
"""Times the rounding, the std that a test can see."""
_RARE = 1000
"""Fewer kept or flipped signs coincide at some distance by chance."""
_SHAPE_SAMPLES = 20_000
"""Of a shape's test: more would find what float32 rounds off."""
_DRAWS = 8
"""Draws of the declared mechanism for each value that was sent."""
_OUTLIERS = 10
"""Values beyond all declared draws that are no chance: one is so with probability 1 / 9."""
_VALUES = 400_000
"""Values of a mechanism's test, about."""
_BINS = 64


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What entered a hook and what left it, by name; base: variables an upload is relative to."""

    given: Mapping[str, Part]
    sent: Mapping[str, Part]
    base: State | None = None


def pairs_of_round(result: RoundResult, kind: str) -> dict[str, list[Pair]]:
    """The watched clients' uploads before and after their defense, expressed as the mechanism's
    kind."""
    pairs = {}
    for client, plain in result.trained.items():
        base = result.received[client]
        express = partial(as_kind, kind=kind, base=base, lr=result.lr)  # type: ignore[arg-type]
        given = express(plain).parts
        sent = [express(m).parts for m in result.sent[client] if m.kind in UPLOAD_KINDS]
        pairs[client] = [Pair(given=given, sent=parts, base=base) for parts in sent]
    return pairs


def checks_of(
    mechanisms: Sequence[Mechanism],
    pairs_of: Callable[[str], Sequence[Pair]],
    *,
    most: int = _VALUES,
) -> list[tuple[str, Callable[[], str]]]:
    """One check per declared mechanism, with its name: it says what was seen, or raises Broken or
    NotChecked.

    Args:
        mechanisms: As declared.
        pairs_of: Gives many pairs by what a mechanism acts on.
        most: Values that are looked at, about.
    """
    layers = Counter(_channel(m) for m in mechanisms if not _scales(m))

    def check(mechanism: Mechanism) -> str:
        if layers[_channel(mechanism)] > 1:
            raise NotChecked(
                "several mechanisms act on it one after another; check each defense alone"
            )
        if mechanism.remembers:
            raise NotChecked("it follows from what a client remembers of earlier rounds")
        if mechanism.random and type(mechanism).sample is Mechanism.sample:
            raise NotChecked("it does not say what it samples")
        pairs = pairs_of(mechanism.of)
        if not pairs:
            raise NotChecked(f"no {mechanism.of} left a client in the checked rounds")
        if _scales(mechanism):
            return _scaling(mechanism, pairs)
        clips = [m for m in mechanisms if _scales(m) and m.of == mechanism.of]
        return _compare_draws(mechanism, clips, pairs, most)

    return [(f"declared {type(m).__name__} of {m.of}", partial(check, m)) for m in mechanisms]


def _channel(mechanism: Mechanism) -> str:
    return "upload" if mechanism.of in UPLOAD_KINDS else mechanism.of


def _scales(mechanism: Mechanism) -> bool:
    """Whether it scales whole rows and does nothing else."""
    return mechanism.shrinkage(torch.zeros(1, 1)) is not None


# --- what entered and what left ---------------------------------------------------------------


def _rows(
    pair: Pair, of: str, clips: Sequence[Mechanism] = ()
) -> tuple[Tensor, Tensor, Tensor, State | None]:
    """A pair as rows [P, ...], float64 on the CPU: an upload is one row, of smashed data a sample
    is one. What entered, clipped and 0 where it was not sent; what left; which values were sent;
    and the variables that an upload is relative to."""
    names = [n for n in pair.sent if n in pair.given]
    there = {n: pair.sent[n].presence() & pair.given[n].presence() for n in names}
    base = None
    if of in UPLOAD_KINDS:
        entered = _flat([torch.where(there[n], pair.given[n].values, 0.0) for n in names])[None]
        sent = _flat([pair.sent[n].values for n in names])[None]
        present = torch.cat([there[n].flatten() for n in names])[None]
        base = None if pair.base is None else {n: pair.base[n].cpu() for n in names}
    else:
        (name,) = names
        entered, sent = (p[name].values.detach().double() for p in (pair.given, pair.sent))
        present = there[name]
    entered = entered.cpu()
    for clip in clips:
        entered = clip.apply(entered)
    return entered, sent.cpu(), present.cpu(), base


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Tensors end to end, float64."""
    return torch.cat([p.detach().double().flatten() for p in parts] or [torch.zeros(0)])


def noise_of(mechanism: Mechanism, clips: Sequence[Mechanism], pair: Pair) -> Tensor:
    """What was sent of an upload less what the mechanisms make of it without noise, 0 where
    nothing was sent."""
    entered, sent, there, _ = _rows(pair, mechanism.of, clips)
    return torch.where(there, sent - mechanism.apply(entered), 0.0)[0]


# --- tests ------------------------------------------------------------------------------------


def _compare_draws(
    mechanism: Mechanism, clips: Sequence[Mechanism], pairs: Sequence[Pair], most: int
) -> str:
    mechanism, rng = mechanism.after_training(), torch.Generator().manual_seed(0)
    looked_at, total = [], 0
    for pair in pairs:
        entered, sent, there, base = _rows(pair, mechanism.of, clips)
        drawn = [mechanism.sample(entered, rng, base=base) for _ in range(_DRAWS)]
        centre = torch.sigmoid(entered) if mechanism.scores else mechanism.apply(entered)
        looked_at.append((centre[there], sent[there], torch.stack([d[there] for d in drawn])))
        total += len(sent[there])
        if total > most:
            break
    centre, sent, draw = (torch.cat(values, dim=-1) for values in zip(*looked_at, strict=True))
    if not len(sent):
        raise NotChecked(f"no {mechanism.of} left a client in the checked rounds")
    slack = ROUNDING * float(centre.abs().max()) + 1e-12
    rest, expected = sent - centre, draw - centre
    std = float(expected.std()) if mechanism.random else 0.0
    _level(rest, expected, std=std, slack=slack, random=mechanism.random)
    if mechanism.random and std <= _SEEN_FROM * slack:
        size = float(centre.abs().max())
        raise NotChecked(
            f"a std of {std:.4g} cannot be told from rounding beside values of {size:.4g}"
        )
    if std > 0:
        # A sign, or a bit, is drawn relative to that of the value.
        sign = torch.where(centre - (0.5 if mechanism.scores else 0.0) < 0, -1.0, 1.0)
        views: dict[str, tuple[Tensor, Tensor, Tensor | None, float]] = {
            "noise": (rest, expected, centre, slack),
            "noise along the value": (rest * sign, expected * sign, centre * sign, slack),
        }
        if mechanism.variance == 0:  # what is added whatever the value is no share of it
            some = centre != 0
            whole = centre[some]
            views["share of the value"] = sent[some] / whole, draw[:, some] / whole, None, 1e-3
        for what, (left, declared, by, rounding) in views.items():
            if by is not None:
                check_independence(_standardise(left, declared, by, slack), what)
            _shape(left, declared, what, rounding)
    return f"std {float(rest.std()):.4g} of {len(rest)} draws, declared {std:.4g}"


def _level(rest: Tensor, expected: Tensor, *, std: float, slack: float, random: bool) -> None:
    """A failure if the residuals' mean or std is not that of the declared draws."""
    n, mean = len(rest), expected.mean()
    # About the declared mean: of two values, equally far from it, the spread is then no chance.
    drawn = float((rest - mean).square().mean().sqrt())
    if std == 0.0:
        moved = (rest - expected[0]).abs()
        if int((moved > slack).sum()) < (_OUTLIERS if random else 1):
            return
        most = float(moved.max())
        raise Broken(f"it is declared without noise, but values are off by up to {most:.4g}.")
    # Of a law of rare large draws a sample may hold none: then those declared say what chance does.
    fourth = max(float((v - mean).pow(4).mean()) for v in (rest, expected))
    # The declared draws are as many times more, with chance of their own.
    more = math.sqrt(1 + 1 / len(expected))
    spread = max(drawn, std)
    chance = more * _Z * math.sqrt(max(fourth - drawn**4, 0.0) / n) / (2 * spread)
    if abs(drawn - std) > TOLERANCE * std + chance + slack:
        own = float(rest.std()) if n > 1 else 0.0
        raise Broken(f"it is declared with a std of {std:.4g}, but {n} draws have {own:.4g}.")
    bias = abs(float(rest.mean() - mean))
    if bias > more * _Z * spread / math.sqrt(n) + TOLERANCE * std + slack:
        raise Broken(f"the mean of {n} draws is off by {bias:.4g}.")


def _standardise(left: Tensor, declared: Tensor, by: Tensor, slack: float) -> Tensor:
    """`left` without the mean and std that the declared draws have beside values like `by`. A std
    below `slack` is rounding, and counts as `slack`."""
    edges = by.quantile(torch.linspace(0, 1, _BINS + 1, dtype=by.dtype)[1:-1]).unique()
    groups = torch.bucketize(by, edges, right=True)
    count = torch.bincount(groups, minlength=len(edges) + 1).clamp_min(1)
    mean = torch.zeros(len(count), dtype=by.dtype).index_add_(0, groups, declared.mean(0)) / count
    away = (declared - mean[groups]).square().mean(0)
    variance = torch.zeros_like(mean).index_add_(0, groups, away) / count
    return (left - mean[groups]) / variance.clamp_min(slack**2).sqrt()[groups]


def check_independence(rest: Tensor, what: str) -> None:
    """A failure if draws at some distance, in the order in which they were sent, correlate."""
    n = len(rest)
    centred = rest.double() - rest.double().mean()
    power = float(centred.square().sum())
    if n < 3 or power == 0:
        return
    tail = n * float(centred.pow(4).sum()) / power**2
    if tail > 10 and n < _RARE * tail:
        return
    # Padded to twice the length, so that the end is not held against the beginning.
    padded = next_fast_len(2 * n)
    spectrum = torch.fft.rfft(centred, n=padded).abs().square()
    correlation = torch.fft.irfft(spectrum, n=padded)[1:n] / power
    worst = int(correlation.abs().argmax())
    highest = float(correlation[worst])
    chance = float(stats.norm.isf(FALSE_ALARM / _TESTS / 2 / n)) / math.sqrt(n)
    if abs(highest) <= TOLERANCE + chance:
        return
    which = "neighbouring draws" if worst == 0 else f"draws {worst + 1} values apart"
    raise Broken(
        f"{what} is declared independent, but {which} have a correlation of {highest:.2g}."
    )


def _shape(left: Tensor, declared: Tensor, what: str, rounding: float) -> None:
    """A failure if the law differs from that of the declared draws (Kolmogorov-Smirnov)."""
    if not len(left):
        return
    some = torch.linspace(0, len(left) - 1, min(len(left), _SHAPE_SAMPLES)).long()
    one, many = left[some], declared[:, some].flatten()
    outliers = int(((one < many.min() - rounding) | (one > many.max() + rounding)).sum())
    # Equal values that were rounded differently stay so close that a little noise hides it.
    rng = torch.Generator().manual_seed(0)
    one, many = (v + rounding * torch.randn(v.shape, generator=rng) for v in (one, many))
    distance = stats.ks_2samp(one.numpy(), many.numpy(), method="asymp").statistic
    # A level within the tolerance moves the cdf by less than a quarter of it.
    weight = 1 / len(one) + 1 / len(many)
    chance = math.sqrt(math.log(2 * _TESTS / FALSE_ALARM) / 2 * weight)
    if outliers < _OUTLIERS and distance <= TOLERANCE / 4 + chance:
        return
    how = f"has {outliers} values beyond" if outliers >= _OUTLIERS else "does not follow"
    raise Broken(
        f"the std is as declared, but the law is not: the {what} of {len(left)} draws {how} "
        "what it would be."
    )


def _scaling(mechanism: Mechanism, pairs: Sequence[Pair]) -> str:
    """Along what the mechanism leaves of a long upload lies that itself: what is added to it has
    mean 0."""
    if mechanism.of not in UPLOAD_KINDS:
        raise NotChecked("it is part of the noise's test")
    lengths, spread = [], []
    for pair in pairs:
        given, sent, there, _ = _rows(pair, mechanism.of)
        left = mechanism.apply(given)
        square = float(left.square().sum())
        if square == 0 or torch.equal(left, given):
            continue
        lengths.append(float(left[there] @ sent[there]) / square)
        rest = sent[there] - left[there]
        spread.append(float(rest.std()) / math.sqrt(square) if len(rest) > 1 else 0.0)
    if not lengths:
        raise NotChecked("no checked upload was longer than the clip")
    mean, chance = sum(lengths) / len(lengths), _Z * math.hypot(*spread) / len(lengths)
    if abs(mean - 1) > TOLERANCE + chance:
        raise Broken(
            f"uploads that the declared {mechanism} shortens come out {mean:.4g} times as long, "
            "along what was given.",
            "upload",
        )
    return f"{mean:.4g} of the declared length, of {len(lengths)} long uploads"
