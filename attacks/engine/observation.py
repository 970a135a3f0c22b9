"""What was seen of a round, parsed once: all that the engine reads of a `Seen`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, cast

import torch
from torch import Tensor

from bench.api import (
    UPLOAD_KINDS,
    Context,
    Kind,
    Mechanism,
    Message,
    NetworkView,
    Part,
    RandomLayer,
    Seen,
    State,
    as_kind,
    without_law,
)
from bench.toolkit.patches import patch_map

SMASHED: Final = "smashed"
SLOPES, PATCHES = "smashed_gradient", "patches"
"""Kinds of the messages, and names of the one part, with cut-layer activations and the gradient
returned for them; kind of a mixer's, one part per client."""
LABELS, FEATURES, FEATURES_GRADIENT = "labels", "features", "features_gradient"
_TINY = 1e-30
_TO_CLIENTS = (SLOPES, FEATURES)

BySample = list[tuple[Tensor, Tensor]]
"""Step by step, values [V, B, ...] of every victim's samples and which of them were sent."""


@dataclass(kw_only=True, eq=False)
class Release:
    """One observed round.

    Attributes:
        seen: What it was parsed from.
        before: The state that the victims started from, as far as it is known.
        after: The state after the round, or None where the party does not learn it.
        uploads: One of each victim, or none.
        by_sample: What has a value for every sample, by kind of message.
        mechanisms: The public ones.
        samples: Per victim.
        batch: Samples of a step.
        steps: Local steps.
        of_epoch: Of these, so many have the samples of an epoch (see `unite`).
        epoch: 0, or which later local epoch of its round this is (see `link`).
        in_order: Whether all steps have the samples in one order.
        own: What the victims kept to themselves (see `private`), or None.
        estimate: What `with_private_parts` made of it, and for whom.
    """

    seen: Seen
    before: State
    after: State | None
    uploads: tuple[Message, ...]
    by_sample: dict[str, BySample]
    mechanisms: tuple[Mechanism, ...]
    samples: int
    batch: int
    steps: int
    of_epoch: int = 1
    epoch: int = 0
    in_order: bool = False
    own: OwnValues | None = None
    estimate: tuple[Context, Release] | None = field(default=None, init=False, repr=False)

    @property
    def round(self) -> int:
        """From 0."""
        kind = SMASHED if SMASHED in self.by_sample else self.seen.upload_kind()
        sent = self.seen.of(self.clients[0], kind) if kind else ()
        return sent[0].round if sent else 0

    @property
    def clients(self) -> tuple[str, ...]:
        return self.seen.clients

    @property
    def lr(self) -> float:
        return float(self.seen.known["lr"])

    @property
    def step(self) -> float:
        """Learning rate times local steps."""
        return self.lr * self.steps

    @property
    def kind(self) -> Kind | None:
        """Of the uploads."""
        return cast(Kind, self.uploads[0].kind) if self.uploads else None

    @property
    def sealed(self) -> list[dict[str, Tensor]]:
        """Which coordinates each victim encrypted, bool by name."""
        return [{n: s.covers for n, s in u.sealed.items()} for u in self.uploads]

    @cached_property
    def acting(self) -> list[Mechanism]:
        """The public mechanisms that act on uploads, in the order in which they do. One by which
        scores are sent as they are does not: `observe` reads the scores."""
        return [m for m in self.mechanisms if m.of in UPLOAD_KINDS and m != self.plain_scores]

    @property
    def plain_scores(self) -> Mechanism | None:
        """The mechanism by which what stands for scores is itself sent, or None."""
        return next((m for m in self.mechanisms if m.scores and not m.random), None)

    @property
    def noise(self) -> Mechanism | None:
        """The last mechanism that makes uploads random, or else the last that leaves them vague;
        None if neither does."""
        acting = self.acting[::-1]
        return next((m for m in acting if m.random), next((m for m in acting if m.vague), None))

    @property
    def bounds(self) -> Mechanism | None:
        """The last mechanism that draws nothing and tells in which interval a value lies, where
        nothing is random; else None."""
        if self.noise is not None:
            return None
        return next((m for m in reversed(self.acting) if m.tells_interval), None)

    @property
    def granted(self) -> Tensor | None:
        """Labels int64 [V, K] if the threat grants them or if they were sent in the clear."""
        if (truth := self.seen.known.get("truth_labels")) is not None:
            return torch.tensor(truth)
        soft = self.soft_labels
        return soft.argmax(dim=-1) if soft is not None and in_the_clear(soft) else None

    @property
    def soft_labels(self) -> Tensor | None:
        """Soft labels [V, B, C] of the first step as they were sent, or None."""
        return self.by_sample[LABELS][0][0] if LABELS in self.by_sample else None

    @property
    def playable(self) -> Seen:
        """What a rehearsal of the round begins from."""
        known = {**self.seen.known, "batch": self.batch}
        return replace(self.seen, before=self.before, known=known)

    def same_start(self, other: Release) -> bool:
        """Whether two releases of a run begin from one state."""
        return all(torch.equal(v, other.before[n]) for n, v in self.before.items())


@dataclass(kw_only=True)
class OwnValues:
    """What the victims of one release trained from in place of what they received, as far as it
    can be told: a Gaussian prior, and what was found under it.

    Attributes:
        kept: Where a victim has values of its own, bool [V, ...] by name, or [1, ...] where it is
            the same for all.
        centre: Of their moves from what was received [...].
        scale: Deviations of the moves from there, by name.
        sizes: Numbers by name of all that any release's victims kept, in whose order they stand.
        found: The moves in units of these deviations [V, numbers]; None: not looked for.
    """

    kept: State
    centre: State
    scale: Mapping[str, float]
    sizes: Mapping[str, int]
    found: Tensor | None = None

    def moves(self, units: Tensor, victims: Tensor) -> dict[str, Tensor]:
        """Moves [P, ...] by name, 0 where nothing was kept, of units [P, numbers] for the victims
        int64 [P]."""
        pieces = dict(zip(self.sizes, units.split(list(self.sizes.values()), dim=1), strict=True))
        moved = {}
        for name, centre in self.centre.items():
            kept = self.kept[name]
            kept = kept if len(kept) == 1 else kept[victims]
            move = centre.to(units) + self.scale[name] * pieces[name].view(-1, *centre.shape)
            moved[name] = torch.where(kept, move, 0.0)
        return moved


_PARSED: deque[tuple[list[int], Release]] = deque(maxlen=128)
"""The last ones, each after `_versions` of what it was parsed from: an attack and the likelihood
score of its answer ask for the same."""
_SAME = ("messages", "known", "before", "after", "const", "buffers")


def parse_view(seen: Seen) -> list[Release]:
    """Return every release of an observation, oldest first. One that was parsed before is returned
    again, unless a message has been written to since."""
    releases = []
    for one in seen.releases:
        if _PARSED and _PARSED[0][1].seen.initial is not one.initial:  # of another observation
            _PARSED.clear()
        versions = _versions(one)
        matches = (
            release
            for known, release in _PARSED
            if release.clients == one.clients
            and known == versions
            and all(getattr(release.seen, n) is getattr(one, n) for n in _SAME)
        )
        release = next(matches, None)
        if release is None:
            release = parse(one)
            _PARSED.append((versions, release))
        releases.append(release)
    return releases


def _versions(seen: Seen) -> list[int]:
    """How often the values of each message were written to."""
    return [p.values._version for m in seen.messages for p in m.parts.values()]


def parse(seen: Seen) -> Release:
    """One release.

    Where a mixer told the server which patches a client contributed, the others are absent from its
    smashed data: there is at most noise.
    """
    known, kind, sent = seen.known, seen.upload_kind(), {}
    for message in seen.messages:
        client = message.receiver if message.kind in _TO_CLIENTS else message.sender
        sent[message.kind, message.step, client] = message
    by_sample: dict[str, BySample] = {}
    for name in (SMASHED, SLOPES, LABELS, FEATURES, FEATURES_GRADIENT):
        for step in range(int(known["local_steps"])):
            messages = [sent.get((name, step, client)) for client in seen.clients]
            parts = [m.parts[name] for m in messages if m is not None]
            if not parts or len(parts) < len(messages):
                break
            values, present = _stack(parts)
            if name == SMASHED:
                present = _own_patches(seen, values, present, step)
            by_sample.setdefault(name, []).append((values, present))
    given = [Mechanism.from_dict(m) for m in known["mechanisms"]]
    release = Release(
        seen=seen,
        before=seen.before,
        after=seen.after,
        uploads=tuple(seen.of(client, kind)[0] for client in seen.clients) if kind else (),
        by_sample=by_sample,
        mechanisms=tuple(
            m for m in given if not isinstance(m, RandomLayer) or m.find_weight(seen.before)
        ),
        samples=int(known["samples"]),
        batch=int(known["batch"]),
        steps=int(known["local_steps"]),
    )
    return _read_random_layer(release) if release.samples * release.steps == 1 else release


def find_random_layer(release: Release) -> tuple[RandomLayer, str] | None:
    """The mechanism and the name of its layer's weight, or None."""
    layers = (m for m in release.mechanisms if isinstance(m, RandomLayer))
    return next(((m, str(m.find_weight(release.before))) for m in layers), None)


def _read_random_layer(release: Release) -> Release:
    """The release with what a random layer's gradients show of its only sample: the head's input
    as smashed data, and the loss's slope by it. What comes after is random, and not compared."""
    random = find_random_layer(release)
    if random is None or len(release.acting) > 1 or not release.uploads:
        return release
    layer, name = random
    bias = name.removesuffix("weight") + "bias"
    sent = [as_kind(u, "gradient", base=release.before, lr=release.lr) for u in release.uploads]
    if not all({name, bias} <= set(u.parts) for u in sent):
        return release
    each = [_stack([u.parts[n] for u in sent]) for n in (name, bias)]
    if not all(bool(there.all()) for _, there in each):
        return release
    weight, slope = (values.double() for values, _ in each)
    given = (slope[:, None] @ weight) / slope.square().sum(dim=1)[:, None, None].clamp_min(_TINY)
    back = slope[:, None] @ release.before[name].double()
    told = [[(v, torch.ones_like(v, dtype=torch.bool))] for v in (given, back)]
    return replace(
        release,
        by_sample={**release.by_sample, SMASHED: told[0], SLOPES: told[1]},
        mechanisms=tuple(m for m in release.mechanisms if m != layer),
    )


def _stack(parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Values and presence [V, ...]."""
    values = torch.stack([p.values for p in parts])
    if all(p.present is None for p in parts):
        return values, torch.ones_like(values, dtype=torch.bool)
    return values, torch.stack([p.presence() for p in parts])


def _own_patches(seen: Seen, values: Tensor, present: Tensor, step: int) -> Tensor:
    """Presence [V, B, ...] of smashed data less the patches of other clients."""
    patches = {
        name: part.values
        for m in seen.messages
        if m.kind == PATCHES and m.step == step
        for name, part in m.parts.items()
    }
    if not set(seen.clients) <= set(patches):
        return present
    maps = [patch_map(patches[c].bool(), v) for c, v in zip(seen.clients, values, strict=True)]
    return present & torch.stack(maps)


class NonFiniteError(ValueError):
    """What was seen holds values that are not finite, which nothing can be compared with."""


def require_finite(name: str, release: Release, values: Tensor, present: Tensor) -> None:
    """Raise NonFiniteError, naming the client, unless all present values [V, ...] are finite."""
    broken = ~values.isfinite() & present
    if bool(broken.any()):
        client = release.clients[int(broken.view(len(broken), -1).any(dim=1).nonzero()[0])]
        raise NonFiniteError(f"{name} of {client} holds non-finite values.")


# --- uploads ----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class ObservedUploads:
    """Uploads of V victims as one kind: values and presence, [V, ...] by name."""

    kind: Kind
    values: Mapping[str, Tensor]
    present: Mapping[str, Tensor]

    @cached_property
    def square(self) -> Tensor:
        """Squared norm of the visible values, [V]."""
        terms = [
            torch.where(self.present[n], v, 0.0).flatten(1).square().sum(dim=1)
            for n, v in self.values.items()
        ]
        return torch.stack(terms).sum(dim=0)

    @property
    def rms(self) -> float:
        """Root mean square of all values."""
        size = sum(v[0].numel() for v in self.values.values())
        return float((self.square.mean() / size).sqrt())


def observe(
    release: Release, kind: Kind | None = None, *, dtype: torch.dtype, absent: bool = False
) -> ObservedUploads:
    """The victims' uploads converted to `kind` (None: as sent), in `dtype`.

    absent: Whether to show as 0 what was not sent because it is small, for a law that takes it so.
    Raises ValueError if there is none, and NonFiniteError, naming the client.
    """
    scores, const = release.plain_scores, release.seen.const
    if not release.uploads:
        raise ValueError("no upload of weights, update or gradient was seen.")
    sent = release.uploads[0]  # stands for all, with values [V, ...]
    base, parts = {n: v.to(dtype) for n, v in release.before.items()}, {}
    for name, part in sent.parts.items():
        values, present = _stack([u.parts[name] for u in release.uploads])
        there = None if bool(present.all()) else present
        parts[name] = replace(part, values=values.to(dtype), present=there)
    if scores is not None:
        base = {n: scores.received(v) if n in const else v for n, v in base.items()}
        for name in set(parts) & set(const):
            values, told = scores.read(parts[name].values)  # of those that it tells
            parts[name] = Part(values=values, present=parts[name].presence() & told)
    zone = find_opened(release)
    if zone and release.after is not None:  # as the state after the round shows it
        plain = as_kind(sent.with_parts(parts), "weights", base=base, lr=release.lr)
        sent, parts = plain, dict(plain.parts)
        for name, covers in zone.items():
            after, part = release.after[name].to(parts[name].values), parts[name]
            parts[name] = Part(
                values=torch.where(covers, after, part.values), present=part.presence() | covers
            )
    kind = kind or release.kind
    assert kind is not None
    shown = as_kind(sent.with_parts(parts), kind, base=base, lr=release.lr).parts
    for name, part in shown.items():
        require_finite(f"the upload '{name}'", release, part.values, part.presence())
    if absent:
        shown = {
            n: p if p.absent != "zero" or p.present is None
            else Part(values=torch.where(p.present, p.values, 0.0))
            for n, p in shown.items()
        }  # fmt: skip
    return ObservedUploads(
        kind=kind,
        values={n: p.values for n, p in shown.items()},
        present={n: p.presence() for n, p in shown.items()},
    )


def gradient_estimate(release: Release, *, dtype: torch.dtype = torch.float64) -> ObservedUploads:
    """Mean gradient of every victim as well as the public mechanisms allow, [V, ...] by name.

    Additive noise is unbiased and left, and so is a clip. Where what was sent is not the value
    itself (perturbed signs, drawn bits), the mechanism's own estimate is taken.
    """
    plain = observe(release, "gradient", dtype=dtype)
    unlike = [m for m in release.acting if not m.faithful]
    if not unlike:
        return plain
    mechanism = unlike[-1]
    sent = observe(release, cast(Kind, mechanism.of), dtype=dtype)
    values = {
        name: mechanism.gradient(value, base=release.before[name].to(dtype), step=release.step)
        if mechanism.covers(name)
        else plain.values[name]
        for name, value in sent.values.items()
    }
    return ObservedUploads(kind="gradient", values=values, present=sent.present)


def _senders(release: Release) -> set[str]:
    """Of all uploads of the round, the victims' and others'."""
    return {m.sender for m in release.seen.messages if m.kind == release.kind}


def find_opened(release: Release) -> dict[str, Tensor]:
    """Encrypted coordinates of the only client that uploaded, bool by name: the sum that was
    opened is its own, and the state after the round tells it. Empty for several clients, and
    where the server does not learn that state."""
    if release.after is None or len(release.sealed) != 1 or len(_senders(release)) != 1:
        return {}
    return {n: covers for n, covers in release.sealed[0].items() if n in release.after}


def find_opened_mean(
    release: Release, *, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor] | None:
    """Which coordinates all victims encrypted, bool by name, and the mean update there [M], where
    the state after the round shows it: several clients took part, all of them victims. None
    where it does not, or where what was sent in the open shows that the server takes no mean."""
    boxes, after = release.sealed, release.after
    if after is None or len(boxes) < 2 or _senders(release) != set(release.clients):
        return None
    covers = {
        n: torch.stack([b[n] for b in boxes]).all(dim=0)
        for n in boxes[0]
        if n in after and all(n in b for b in boxes)
    }
    covers = {n: c for n, c in covers.items() if bool(c.any())}
    if not covers:
        return None
    moved = {n: (v - release.before[n]).to(dtype) for n, v in after.items()}
    shown = observe(release, "update", dtype=dtype)
    for name, value in shown.values.items():
        everyone = shown.present[name].all(dim=0)
        expected = value.mean(dim=0)[everyone]
        if not torch.allclose(moved[name][everyone], expected, rtol=1e-3, atol=1e-6):
            return None
    return covers, torch.cat([moved[n][c] for n, c in covers.items()])


def withheld(release: Release, names: Iterable[str]) -> dict[str, Tensor]:
    """Which coordinates each client kept to itself at the observed upload: bool [V, ...] by
    name, for those of `names` of which anyone kept any. Sealed ones were sent."""
    kept = {}
    for name in names:
        rows = [torch.ones_like(release.before[name], dtype=torch.bool) for _ in release.clients]
        for victim, message in enumerate(release.uploads):
            if name in message.parts:
                rows[victim] = rows[victim] & ~message.parts[name].told()
            if name in message.sealed:
                rows[victim] = rows[victim] & ~message.sealed[name].covers
        if any(bool(row.any()) for row in rows):
            kept[name] = torch.stack(rows)
    return kept


# --- smashed data ------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class SplitView:
    """What a split protocol's server knows of V victims' first step, and what it answered in each.

    Attributes:
        cut: Stage after which the activations were sent.
        values: Smashed data [V, B, ...].
        present: Which of it are the victims' own, bool [V, B, ...].
        slopes: The loss's gradient by every step's smashed data that the server returned
            [V, steps, B, ...], 0 where nothing was sent, or None.
        mechanisms: Public ones that act on it, in the order in which they do.
        mode: Of normalisation.
        buffers: Its statistics.
    """

    cut: str
    values: Tensor
    present: Tensor
    slopes: Tensor | None
    mechanisms: tuple[Mechanism, ...]
    mode: str
    buffers: State

    @property
    def noises(self) -> tuple[Mechanism, ...]:
        """The mechanisms that make it random."""
        return tuple(m for m in self.mechanisms if m.random)

    @property
    def std(self) -> float:
        """Standard deviation of all its noise."""
        return math.sqrt(sum(m.variance for m in self.noises))

    def activations_sent(self, q: Tensor) -> Tensor:
        """Activations [B, ...] as they were before noise."""
        for mechanism in self.mechanisms:
            q = mechanism.apply(q)
        return q

    def below(self, network: NetworkView, state: State) -> dict[str, Tensor]:
        """Of a state, the tensors of the stages up to the cut."""
        stages = network.cuts[: network.cuts.index(self.cut) + 1]
        return {n: v for n, v in state.items() if n.startswith(tuple(f"{s}." for s in stages))}

    def make(
        self, network: NetworkView, weights: State, x: Tensor, mode: str | None = None
    ) -> Tensor:
        """Activations before noise of samples x [N, *shape]."""
        mode = mode or self.mode
        q = network.run(weights, x, last=self.cut, mode=mode, buffers=self.buffers)
        return self.activations_sent(q)


def read_smashed(release: Release) -> BySample:
    """See `Release.by_sample`; empty where no smashed data was seen. Raises NonFiniteError."""
    sent = release.by_sample.get(SMASHED, [])
    for values, present in sent:
        require_finite("the smashed data", release, values, present)
    return sent


def split_view(release: Release, ctx: Context, *, dtype: torch.dtype) -> SplitView | None:
    """See `SplitView`; None where no smashed data was seen. Raises as `read_smashed`."""
    sent, device = read_smashed(release), ctx.device
    if not sent:
        return None
    values, present = sent[0][0].to(device, dtype), sent[0][1].to(device)
    returned = [
        torch.where(there.to(device), slopes.to(values), 0.0)
        for (slopes, _), (_, there) in zip(release.by_sample.get(SLOPES, []), sent, strict=False)
    ]
    return SplitView(
        cut=str(release.seen.known.get("cut", ctx.network.cuts[-1])),
        values=values,
        present=present,
        slopes=torch.stack(returned, dim=1) if len(returned) == release.steps else None,
        mechanisms=tuple(m for m in release.mechanisms if m.of == SMASHED),
        mode=str(release.seen.known["mode"]),
        buffers={n: v.to(device, dtype) for n, v in release.seen.buffers.items()},
    )


def in_the_clear(labels: Tensor) -> bool:
    """Whether soft labels are plain: nothing but 0 and 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def network_weights(release: Release, ctx: Context) -> dict[str, Tensor]:
    """The network's weights as broadcast, without the defense's randomness."""
    params = {n: v.to(ctx.device) for n, v in release.before.items()}
    const = {n: v.to(ctx.device) for n, v in release.seen.const.items()}
    return dict(ctx.defense.mean_realize(ctx.defense.receive(params, const), const))


# --- why an attack does not apply ---------------------------------------------------------------
def unusable(release: Release) -> str | None:
    """Why the uploads cannot be matched, or None."""
    if not release.clients:
        return "no client took part in the observed round"
    if not release.uploads:
        return f"no upload of {', '.join(UPLOAD_KINDS)} was seen"
    parts = [p for u in release.uploads for p in u.parts.values()]
    visible = any(p.present is None or bool(p.present.any()) for p in parts)
    if (
        not visible
        and not find_opened(release)
        and find_opened_mean(release, dtype=torch.float64) is None
    ):
        return "no coordinate of any upload is visible"
    return None


def nothing_to_match(release: Release) -> str | None:
    """Why neither uploads nor smashed data can be matched, or None."""
    return None if SMASHED in release.by_sample else unusable(release)


def lawless(release: Release) -> str | None:
    """Why what was seen cannot be compared with candidates as it deserves, or None."""
    acting = [m for m in release.mechanisms if m.of in (*UPLOAD_KINDS, SMASHED)]
    one_step = release.steps == 1  # whose draws are looked for (see `with_private_parts`)
    return without_law([m for m in acting if not (one_step and isinstance(m, RandomLayer))])
