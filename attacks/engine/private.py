"""What clients keep to themselves, estimated from what they show.

Where whole networks are trained and a part is never uploaded, the attacker trains one on public
data around the part that is, and how far that moves tells how far a client's own may lie from it
(see `joint`). Under a split protocol some defenses never upload the client's first
stages, so that after training they are no longer the broadcast ones, and an attack that inverts
the broadcast ones understates the leak. But the server's layers were trained on the clients'
activations: whatever the clients did, it must suit them. Then each victim's stages and its images
are estimated together, and the attacks get the activations as the broadcast stages would have
made them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from attacks.engine.encoding import Encoding
from attacks.engine.observation import (
    SMASHED,
    OwnValues,
    Release,
    SplitView,
    find_random_layer,
    split_view,
    withheld,
)
from attacks.engine.optimisers import minimise_in_chunks
from bench.api import Context, RandomLayer, SmashedNoise, State
from bench.toolkit.batches import soft_cross_entropy

STEPS = (100, 300)
"""Steps of the surrogates' training: the clients' own number is not known."""
_BATCH, _SEED = 32, 0
_ARRIVED = 0.7
"""Share of the steps after which the server's layers stand where they were seen."""
_NOISES = (0.3, 0.1, 0.03, 0.01)
"""Noise of the joint fit, falling, in units of the activations' standard deviation."""
_LOOSE = 2.0
"""Prior deviation of a withheld coordinate, in units of the surrogate's root mean square drift."""
_APART = 2.5
"""Prior deviation of what a client kept of a whole network, in units of the surrogate's root mean
square drift: a client's data is its own, and it trained for long."""
_OUTSIDE = 0.02
"""Deviation allowed to pixels outside [0, 1]: withheld stages leave brightness and contrast open,
and this settles most of it."""
_EVALUATIONS, _HISTORY, _LEAST_GAIN = 150, 30, 1e-5


def with_private_parts(releases: list[Release], ctx: Context) -> list[Release]:
    """The releases as if what the victims kept were broadcast, every one by itself.

    Without smashed data: `before` has, in the coordinates that all victims withheld, values from
    `STEPS[0]` steps on public labelled data around the others, and `own` tells what the victims may
    have trained from around these. Unchanged in the first round, and where the defense has
    variables of its own.

    With smashed data: as if the victims' first stages were the broadcast ones. The first step's
    smashed data is q + f(x) - g(x): f are the broadcast stages, g the victim's and x its images,
    both estimated, so that errors of x count by the difference of f and g alone. What the fit
    leaves open is listed among the mechanisms, as noise on smashed data. `before` has the
    estimated head where it was withheld too, unless the defense has variables of its own.
    Returned unchanged in the first round, where every coordinate of the stages was uploaded, and
    where the broadcast stages explain the activations best.

    Surrogate stages are trained on public labelled data below the server's layers, from the
    broadcast ones and in the withheld coordinates alone; of several trainings the one counts
    under which images explain the activations best. From there every victim's stages and images
    are fitted jointly, with a Gaussian prior of images (`Frame`), kept in [0, 1], and one of the
    withheld coordinates, centred on the surrogate and as wide as it drifted, tensor by tensor.
    A fixed seed draws the training batches, so that an attack may ask twice; `ctx.rng` is left
    alone. Raises NonFiniteError for smashed data, naming the client.
    Source: surrogates: Gao, Zhang, PCAT, USENIX Security 2023; the joint fit: Erdogan, Kupcu,
    Cicek, UnSplit, WPES 2022. Departures: the path of the server's layers, the priors, and the
    broadcast stages as a common frame.
    """
    estimates = [_remember(one, ctx) for one in releases]
    kept = {n for one in estimates if one.own is not None for n in one.own.sizes}
    sizes = {n: v.numel() for n, v in estimates[-1].before.items() if n in kept}
    return [
        one if one.own is None else replace(one, own=replace(one.own, sizes=sizes))
        for one in estimates
    ]


def openly(releases: list[Release], ctx: Context) -> list[Release]:
    """Those of which nothing had to be estimated, as of the first round; none where these are
    all."""
    known = [one for one in releases if _remember(one, ctx) is one]
    return known if len(known) < len(releases) else []


def _remember(release: Release, ctx: Context) -> Release:
    """The estimate of one release, made once for an attack and the judge of its answer."""
    if release.estimate is not None:
        other, estimate = release.estimate
        same = (ctx.device, type(ctx.defense)) == (other.device, type(other.defense))
        if same and torch.equal(ctx.aux_x, other.aux_x) and torch.equal(ctx.aux_y, other.aux_y):
            return estimate
    estimate = _estimate(release, ctx)
    release.estimate = ctx, estimate
    return estimate


def _with_draws(release: Release, layer: RandomLayer, name: str) -> Release:
    """The release as if what a random layer drew were values of the client's own, from N(0, I)."""
    drawn = name.removesuffix(f"{layer.name}.weight") + layer.noise
    zeros = release.before[name].new_zeros(release.samples, layer.width)
    own = OwnValues(
        kept={drawn: torch.ones_like(zeros, dtype=torch.bool)[None]},
        centre={drawn: zeros},
        scale={drawn: 1.0},
        sizes={drawn: zeros.numel()},
    )
    mechanisms = tuple(m for m in release.mechanisms if m != layer)
    before = {**release.before, drawn: zeros}
    return replace(release, before=before, own=own, mechanisms=mechanisms)


def _estimate(release: Release, ctx: Context) -> Release:
    if (random := find_random_layer(release)) is not None:
        return _with_draws(release, *random) if release.steps == 1 else release
    if release.epoch or release.round == 0:  # an epoch is of clients that kept nothing
        return release
    if (view := split_view(release, ctx, dtype=torch.float64)) is not None:
        drift = Drift(release, ctx, view)
        best = drift.surrogate() if drift.any else None
        return release if best is None else drift.translate(best)
    if not release.uploads or "variables" in ctx.defense.owns:
        return release
    kept = {n: k.to(ctx.device) for n, k in withheld(release, release.before).items()}
    if not kept:
        return release
    free = {n: k.any(dim=0) for n, k in kept.items()}
    present = {n: v.to(ctx.device) for n, v in release.before.items()}
    trained = _train(release, ctx, present, free, {}, {}, steps=STEPS[0], path=False)
    before, centre, scale = dict(release.before), {}, {}
    for name, by_victim in kept.items():
        everyone = by_victim.all(dim=0)
        estimated = torch.where(everyone, trained[name], present[name])
        moved = (trained[name] - present[name])[free[name]]
        before[name] = estimated.to(before[name])
        centre[name] = trained[name] - estimated
        scale[name] = _APART * float(moved.square().mean().sqrt())
        if torch.equal(everyone, free[name]):
            kept[name] = everyone[None]
    sizes = {n: v.numel() for n, v in centre.items()}
    own = OwnValues(kept=kept, centre=centre, scale=scale, sizes=sizes)
    return replace(release, before=before, own=own)


def _train(
    release: Release,
    ctx: Context,
    present: State,
    free: State,
    first: State,
    const: State,
    *,
    steps: int,
    path: bool,
) -> dict[str, Tensor]:
    """Variables `present` after SGD on public data in the coordinates `free` (bool by name). path:
    the variables `first` move from there to where they were seen, as they did for the clients, or
    stay there."""
    rng = torch.Generator().manual_seed(_SEED)
    aux_x = ctx.aux_x.to(ctx.device)
    aux_y = torch.nn.functional.one_hot(ctx.aux_y, ctx.network.classes).float().to(ctx.device)
    leaves = {n: present[n].detach().clone().requires_grad_() for n in free}
    lr = release.lr
    memory: State = {}
    # All batches are drawn first: a copy to a GPU in every step would make the host wait for it.
    picks = [torch.randint(len(aux_x), (_BATCH,), generator=rng) for _ in range(steps)]
    picked = torch.stack(picks).to(ctx.device)
    for step in range(1, steps + 1):
        share = min(1.0, step / (_ARRIVED * steps)) if path else 1.0
        top = {n: torch.lerp(v, present[n], share) for n, v in first.items()}
        pick = picked[step - 1]
        weights = ctx.defense.mean_realize({**present, **top, **leaves}, const)
        logits = ctx.network.apply(weights, aux_x[pick], mode="train")
        loss = soft_cross_entropy(logits, aux_y[pick])
        slopes = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        moves, memory = ctx.defense.direction(slopes, memory, step - 1, const)
        # Without the path the clients' rate would go on shaking at the end.
        rate = lr if path else lr * (1 + math.cos(math.pi * step / steps)) / 2
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf -= rate * torch.where(free[name], moves[name], 0.0)
    return {**present, **{n: v.detach() for n, v in leaves.items()}}


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """What the clients may have trained.

    Attributes:
        variables: Trained ones, of every tensor that was withheld.
        centre: Network weights of the stages [V, ...]: the surrogate's where the victim withheld
            them, else the broadcast ones.
        scale: Of the prior around the centre [V, ...], 0 where nothing was withheld.
    """

    variables: State
    centre: State
    scale: State


class Drift:
    """The estimate for one release.

    Attributes:
        kept: See `withheld`, of the stages up to the cut and of a private head.
        any: Whether a coordinate of the stages was withheld.
    """

    def __init__(self, release: Release, ctx: Context, view: SplitView) -> None:
        seen = release.seen
        self.release, self.ctx, self.view = release, ctx, view
        self.network, self.head = ctx.network, ctx.network.head
        self.const = {n: v.to(ctx.device) for n, v in seen.const.items()}
        before = {n: v.to(ctx.device) for n, v in release.before.items()}
        self.start = dict(ctx.defense.receive(before, self.const))
        self.broadcast = self._stages(self.start)
        own = [*self.broadcast, *(self.head if seen.labels == "private" else ())]
        self.kept = {n: k.to(ctx.device) for n, k in withheld(release, own).items()}
        self.any = bool(set(self.kept) & set(self.broadcast))
        samples = view.values.shape[1]
        self.encoding = Encoding(ctx, samples=samples, dtype=torch.float64, framed=True)
        self.spread = float(view.values[view.present].std(correction=0))

    def _stages(self, variables: State) -> dict[str, Tensor]:
        """Float64 network weights up to the cut, without the defense's randomness."""
        weights = self.ctx.defense.mean_realize(variables, self.const)
        below = self.view.below(self.network, weights)
        return {n: v.detach().double() for n, v in below.items()}

    # --- surrogates -------------------------------------------------------------------------
    def surrogate(self) -> Surrogate | None:
        """The one that explains the activations best, or None if the broadcast stages do."""
        trained = [self.train(steps, path=path) for steps in STEPS for path in (True, False)]
        tried = [self.around(variables) for variables in (self.start, *trained)]
        # Of the best images under each as it is.
        fits = [self._fit(replace(one, scale={}), noises=(0.1,))[1].mean() for one in tried]
        losses = torch.tensor([float(loss) for loss in fits], dtype=torch.float64)
        best = int(losses.nan_to_num(math.inf).argmin())
        return tried[best] if best else None

    def train(self, steps: int, *, path: bool) -> dict[str, Tensor]:
        """Variables after SGD on public data in the withheld coordinates. path: the server's
        layers move from where they began to where they were seen, as they did for the clients,
        or stay there."""
        first = {
            n: self.release.seen.initial[n].to(v)
            for n, v in self.start.items()
            if n not in self.kept and n not in self.const and n not in self.broadcast
        }
        free = {n: k.any(dim=0) for n, k in self.kept.items()}
        return _train(
            self.release, self.ctx, self.start, free, first, self.const, steps=steps, path=path
        )

    def around(self, variables: State) -> Surrogate:
        """The surrogate that has these variables in place of the broadcast ones."""
        weights = self._stages(variables)
        victims = len(self.release.clients)
        centre, scale = {}, {}
        for name, value in self.broadcast.items():
            kept = self.kept.get(name)
            if kept is None:
                centre[name] = value.expand(victims, *value.shape)
                continue
            drift = weights[name] - value
            free = kept.any(dim=0)
            rms = (drift[free].square().sum() / free.sum().clamp_min(1)).sqrt()
            centre[name] = torch.where(kept, weights[name], value)
            scale[name] = kept * (_LOOSE * rms)
        return Surrogate(variables={n: variables[n] for n in self.kept}, centre=centre, scale=scale)

    # --- images and stages ------------------------------------------------------------------
    def translate(self, one: Surrogate) -> Release:
        """See `with_private_parts`."""
        release = self.release
        vectors, _ = self._fit(one, noises=_NOISES)
        images, stages = self._decode(vectors, one, slice(None))
        victims = len(release.clients)
        same = {n: v.expand(victims, *v.shape) for n, v in self.broadcast.items()}
        with torch.no_grad():
            own = self._cut(stages, images)
            move = self._cut(same, images) - own
        left = (own - self.view.values)[self.view.present].square().mean() - self.view.std**2
        (values, present), *later = release.by_sample[SMASHED]
        smashed = [(values + move.to(values), present), *later]
        std = max(math.sqrt(max(float(left), 0.0)), _NOISES[-1] * self.spread)
        # Where a defense has variables of its own, the broadcast is not what was trained here.
        plain = "variables" not in self.ctx.defense.owns
        head = {n: v.to(release.before[n]) for n, v in one.variables.items() if n in self.head}
        return replace(
            release,
            by_sample={**release.by_sample, SMASHED: smashed},
            mechanisms=(*release.mechanisms, SmashedNoise(of=SMASHED, std=std)),
            before={**release.before, **(head if plain else {})},
        )

    def _fit(self, one: Surrogate, *, noises: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Vectors [V, N] of images and stages, and their losses [V]."""
        width = sum(v[0].numel() for v in one.scale.values())
        victims, width = len(self.release.clients), self.encoding.pixels + width
        start = self.view.values.new_zeros(victims, width)
        losses = start.new_empty(len(start))
        for share in noises:
            std = max(share * self.spread, self.view.std)
            start, losses, _ = minimise_in_chunks(
                partial(self._evaluate, one, std),
                start,
                numbers_each=24 * start.shape[1],
                evaluations=_EVALUATIONS,
                history=_HISTORY,
                least_gain=_LEAST_GAIN,
            )
        return start, losses

    def _evaluate(
        self, one: Surrogate, std: float, z: Tensor, victims: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            images, stages = self._decode(z, one, victims)
            rest = self._cut(stages, images) - self.view.values[victims]
            rest = torch.where(self.view.present[victims], rest, 0.0)
            loss = rest.flatten(1).square().sum(dim=1) / (2 * std**2)
            loss = loss + z.square().sum(dim=1) / 2
            if self.encoding.image:
                outside = (images - images.clamp(0, 1)).flatten(1).square().sum(dim=1)
                loss = loss + outside / (2 * _OUTSIDE**2)
            return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]

    def _decode(
        self, z: Tensor, one: Surrogate, rows: Tensor | slice
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Images [P, B, *shape] and stages [P, ...] of vectors [P, N] for the victims `rows`."""
        images, at = self.encoding.images(z, None), self.encoding.pixels
        stages = {n: v[rows] for n, v in one.centre.items()}
        for name, scale in one.scale.items():
            width = scale[0].numel()
            moved = z[:, at : at + width].view(-1, *scale.shape[1:]) * scale[rows]
            stages[name] = stages[name] + moved
            at += width
        return images, stages

    def _cut(self, stages: State, images: Tensor) -> Tensor:
        """Activations before noise [P, B, ...], every victim's under its own stages."""
        return vmap(partial(self.view.make, self.network))(stages, images)
