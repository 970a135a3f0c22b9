"""Gradient matching: how well candidate images and labels explain what was seen.

One objective for every defense: the negative log-likelihood of the observed upload under the
defense's public mechanisms (Kerckhoffs), plus, where there is noise, a Gaussian prior fitted on
public data. Without noise it is the squared distance of gradients (DLG, Eq. 3). The cosine
distance of gradients is the alternative. Smashed data, where it was seen, is matched jointly,
as the broadcast stages would have made it (see `private`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from attacks.engine.estimate import gradient_estimate
from attacks.engine.gradients import Layered, Returned, Simulated, Work, as_vector, layered
from attacks.engine.lbfgs import Evaluate
from attacks.engine.likelihood import Likelihood
from attacks.engine.observation import (
    Observation,
    SplitView,
    kind_of,
    mechanisms_of,
    noise_of,
    observe,
    opened,
    split_view,
)
from attacks.engine.prior import Frame
from attacks.engine.private import with_private_parts
from attacks.engine.products import Products
from bench.api import (
    BernoulliMask,
    Clip,
    Context,
    GaussianNoise,
    Kind,
    LaplaceNoise,
    Seen,
    SignPerturbation,
    State,
)
from bench.toolkit.vectors import flatten

Distance = Literal["likelihood", "cosine"]
Layers = Literal["even", "relative"]
_TINY = 1e-30
_SPREAD_SAMPLES, _SPREAD_DRAWS, _SPREAD_SEED = 64, 16, 0
"""Public samples and draws of a defense's random weights that show how far activations move."""
_EXACT = 1e-3
"""Noise that stands for none beside a noisy channel, in units of the upload's root mean square."""
_DRAWN = 1.0
"""What mean weights leave unexplained of an upload made under drawn ones, in the same unit."""


class Matcher:
    """The objective over candidate images and soft labels for the victims of one `Seen`.

    dtype: of all tensors, on the context's device. distance: `likelihood` (squared distance
    without noise) or `cosine`. layers: `even`, or `relative`: every tensor's squared distance
    in units of its own observed square (likelihood without noise only). total_variation: weight
    of the images' mean absolute differences between neighbours; under `cosine` it grows with the
    share of noise in the upload. bounded: plain images stay in [0, 1] by a cosine of the
    optimised vector. samples: per victim (batch * local steps). draws: where a defense draws its
    weights at random, expectation of the smashed data's distance over so many draws; 0: mean
    weights stand for the drawn ones, and what they leave unexplained counts as noise.
    """

    def __init__(
        self,
        seen: Seen,
        ctx: Context,
        *,
        dtype: torch.dtype,
        distance: Distance = "likelihood",
        layers: Layers = "even",
        total_variation: float = 0.0,
        bounded: bool = False,
        draws: int = 0,
    ) -> None:
        seen = with_private_parts(seen, ctx)
        self.seen, self.ctx, self.dtype, self.device = seen, ctx, dtype, ctx.device
        self.network, self.distance, self.layers = ctx.network, distance, layers
        self.bounded = bounded and len(ctx.network.shape) == 3
        steps, self.batch = int(seen.known["local_steps"]), int(seen.known["batch"])
        self.samples = steps * self.batch
        self.shape, self.classes = tuple(ctx.network.shape), ctx.network.classes
        move: dict[str, Any] = {"dtype": dtype, "device": ctx.device}
        const = {n: v.to(**move) for n, v in seen.const.items()}
        before = {n: v.to(**move) for n, v in seen.before.items()}
        self.start = dict(ctx.defense.receive(before, const))
        self.work = Work(
            start=self.start,
            const=const,
            buffers={n: v.to(**move) for n, v in seen.buffers.items()},
            steps=steps,
            batch=self.batch,
            lr=float(seen.known["lr"]),
            mode=str(seen.known["mode"]),
        )
        self.gradients = layered(ctx.network, ctx.defense, self.work) or Simulated(
            ctx.network, ctx.defense, self.work
        )
        # Beside coordinates that were opened, and are exact, noised ones add nothing.
        self.opened = opened(seen)
        mechanisms = [] if self.opened else mechanisms_of(seen)
        self.clips = [m for m in mechanisms if isinstance(m, Clip)]
        self.noise = None if self.opened else noise_of(seen)
        self.split = split_view(seen, dtype=dtype, device=ctx.device)
        self.returned: Returned | None = None
        if self.split is not None and self.split.slopes is not None:
            self.returned = Returned(
                ctx.network, ctx.defense, self.work, self.split.cut, sent=self.split.sent
            )
        self.observation = self._observed(kind_of(mechanisms[-1]) if mechanisms else "gradient")
        if self.split is not None and distance == "likelihood":
            self._weigh_channels(self.split)
        self.draws = draws if self.spread is not None else 0
        self.likelihood = Likelihood(self.noise)
        self.variation = total_variation * self._noise_share()

    # --- what was seen --------------------------------------------------------------------------
    def _observed(self, kind: Kind) -> Observation | None:
        if self.seen.upload_kind() is None:
            return None
        if self.distance == "cosine":
            found = gradient_estimate(self.seen, dtype=self.dtype)
        else:
            found = observe(self.seen, kind, dtype=self.dtype)
        if self.opened:
            shown = {n: p & self.opened.get(n, p.new_zeros(())) for n, p in found.present.items()}
            found = replace(found, present=shown)
        # With the returned slopes the first stages' upload needs no labels, and the head's tells
        # nothing of the images that the features do not.
        names = [n for n in found.values if self.returned is None or n in self.returned.start]
        # An upload of nothing would be the unit of the smashed data's distance, 0.
        if self.split is not None and not any(bool(found.present[n].any()) for n in names):
            return None
        return Observation(
            kind=found.kind,
            values={n: found.values[n].to(self.device) for n in names},
            present={n: found.present[n].to(self.device) for n in names},
        )

    def _weigh_channels(self, split: SplitView) -> None:
        """Smashed data and upload in one likelihood. A channel without noise is exact, so that a
        noisy one adds nothing to it: a noisy upload beside exact smashed data is dropped, and
        an exact upload beside noisy smashed data gets a noise far below it. So does exact
        smashed data of which a part is missing, since only the prior can fill that in."""
        if split.std == 0 and not bool(split.present.all()):
            square = self._smashed_square() / split.present.flatten(1).sum(dim=1).clamp_min(1)
            rms = float(square.mean().sqrt())
            split = self.split = replace(split, std=_EXACT * max(rms, _TINY))
        random = split.std > 0 or self.spread is not None
        if not random and self.noise is not None:
            self.noise, self.observation = None, None
        elif random and self.noise is None and self.observation is not None:
            size = sum(v[0].numel() for v in self.observation.values.values())
            rms = float((self.observation.square.mean() / size).sqrt())
            # A step under drawn weights is no exact function of the mean ones.
            share = _EXACT if self.spread is None else _DRAWN
            self.noise = GaussianNoise(of=self.observation.kind, std=share * max(rms, _TINY))

    @property
    def noisy(self) -> bool:
        """Whether the objective is a likelihood with noise, so that a prior weighs in and no
        loss is known to be the least."""
        random = self.split is not None and (self.split.std > 0 or self.spread is not None)
        return self.noise is not None or random

    @cached_property
    def spread(self) -> Tensor | None:
        """Variance of every activation of a sample over the defense's random weights, around
        that of the mean weights, [...], on public samples; None where weights are not random."""
        if self.split is None or not self._realised(1):
            return None
        few = self.ctx.aux_x[:_SPREAD_SAMPLES].to(dtype=self.dtype, device=self.device)
        with torch.no_grad():
            centre = self._cut(self.weights, few)
            apart = [self._cut(w, few) - centre for w in self._realised(_SPREAD_DRAWS)]
        variance = torch.stack(apart).square().mean(dim=(0, 1))
        # An activation that hardly moves there may move elsewhere.
        return variance.clamp_min(_EXACT * float(variance.mean()))

    def _realised(self, count: int) -> list[State]:
        """Network weights of `count` draws of the defense's randomness, always the same ones;
        empty where it draws nothing for its weights."""
        if "variables" not in self.ctx.defense.owns:
            return []
        rng = torch.Generator().manual_seed(_SPREAD_SEED)
        defense, const = self.ctx.defense, self.work.const
        cpu = {n: v.detach().cpu() for n, v in self.start.items()}
        found = []
        for _ in range(count):
            draw = defense.draw(cpu, {n: v.cpu() for n, v in const.items()}, rng)
            if not draw:
                return []
            moved = {n: v.to(dtype=self.dtype, device=self.device) for n, v in draw.items()}
            found.append(defense.realize(self.start, const, moved))
        return found

    def _cut(self, weights: State, x: Tensor) -> Tensor:
        """Activations before noise of samples x [N, *shape]."""
        assert self.split is not None
        return self.split.sent(
            self.network.run(
                weights, x, last=self.split.cut, mode=self.work.mode, buffers=self.work.buffers
            )
        )

    @cached_property
    def victims(self) -> int:
        return len(self.seen.clients)

    @cached_property
    def visible(self) -> Tensor | None:
        """Bool [V, D] of the upload's coordinates, or None if all are."""
        assert self.observation is not None
        visible = flatten(self.observation.present)
        return None if bool(visible.all()) else visible

    @cached_property
    def prepared(self) -> tuple[Tensor, ...]:
        """The upload's vectors [V, D] as the distance needs them."""
        assert self.observation is not None
        values = flatten(self.observation.values)
        if self.visible is not None:
            values = torch.where(self.visible, values, 0.0)
        return (values,) if self.distance == "cosine" else self.likelihood.prepare(values)

    @cached_property
    def weight(self) -> Tensor | None:
        """[V, D] weights of squared distances, or None for 1."""
        if self.layers == "even" or self.noise is not None or self.observation is None:
            return None
        pieces = []
        for name, value in self.observation.values.items():
            seen = torch.where(self.observation.present[name], value, 0.0).flatten(1)
            square = seen.square().sum(dim=1, keepdim=True)
            # A tensor that was all zero says only that: give it the mean weight, not infinity.
            pieces.append(torch.where(square > 0, 1 / square.clamp_min(_TINY), 0.0).expand_as(seen))
        weight = torch.cat(pieces, dim=1)
        return weight * (self.observation.square / len(pieces))[:, None]

    @cached_property
    def square(self) -> Tensor:
        """[V], the unit of the objective without noise: |upload|^2, once more for smashed data."""
        if self.distance == "cosine":
            return torch.ones(self.victims, dtype=self.dtype, device=self.device)
        if self.observation is not None:
            return self.observation.square * (1 if self.split is None else 2)
        return self._smashed_square()

    @cached_property
    def silent(self) -> Tensor:
        """Bool [V]: nothing but zeros was seen of the victim, so nothing can be matched."""
        upload = 0.0 if self.observation is None else self.observation.square
        smashed = 0.0 if self.split is None else self._smashed_square()
        return torch.as_tensor(upload + smashed == 0, device=self.device)

    def _smashed_square(self) -> Tensor:
        assert self.split is not None
        value = torch.where(self.split.present, self.split.values, 0.0)
        return value.flatten(1).square().sum(dim=1)

    @cached_property
    def smashed_unit(self) -> Tensor:
        """[V, 1, ...], weight of the squared distance of smashed data: that of its noise, or as
        much as the upload's."""
        assert self.split is not None
        square = self._smashed_square()
        noisy = self.split.std > 0 or self.spread is not None
        if noisy and self.distance == "likelihood":
            variance = self.split.std**2 + (0.0 if self.spread is None else self.spread)
            each = torch.as_tensor(1 / (2 * variance)).to(square)
            return each.expand(len(square), 1, *self.split.values.shape[2:])
        return _column(self._smashed_scale(square), self.split.values)

    def _smashed_scale(self, square: Tensor) -> Tensor:
        if self.observation is None:
            return torch.ones(self.victims, dtype=self.dtype, device=self.device)
        if self.distance == "cosine":
            return 1 / square.clamp_min(_TINY)
        # A client may have withheld all that others sent.
        unit = self.observation.square
        return torch.where(unit > 0, unit / square.clamp_min(_TINY), 1.0)

    def _noise_share(self) -> float:
        """|upload|^2 by the part of it that is no noise, at most 100: how much more a prior
        should weigh (the noise's level is public)."""
        if self.distance != "cosine" or self.noise is None or self.observation is None:
            return 1.0
        match self.noise:
            case SignPerturbation(of="weights"):
                return 1.0  # not additive: the signs follow the broadcast
            case SignPerturbation(keep=keep, relative_std=spread):
                signal = (2 * keep - 1) ** 2 / (1 + spread**2)
            case GaussianNoise(std=std):
                signal = 1 - self._share_of(std**2)
            case LaplaceNoise(scale=scale):
                signal = 1 - self._share_of(2 * scale**2)
            case BernoulliMask(clip=clip):
                signal = 1 - self._share_of_bits(clip)
        return 1 / max(signal, 0.01)

    def _share_of(self, variance: float) -> float:
        """Mean share of noise of `variance` per coordinate in the upload's square."""
        assert self.noise is not None
        sent = observe(self.seen, kind_of(self.noise), dtype=torch.float64)
        coordinates = sum(int(p[0].sum()) for p in sent.present.values())
        return coordinates * variance / max(float(sent.square.mean()), _TINY)

    def _share_of_bits(self, clip: float) -> float:
        """Mean share of the bits' variance in the square of the gradient estimated from them."""
        assert self.observation is not None
        step = self.work.lr * self.work.steps
        variance = 0.0
        for name in self.observation.values:
            theta = self.seen.before[name].double().clamp(clip, 1 - clip)
            variance += float((1 / (theta * (1 - theta))).sum()) / step**2
        return variance / max(float(self.observation.square.mean()), _TINY)

    @cached_property
    def frame(self) -> Frame:
        """The prior; costly above a thousand dimensions, so made when first needed."""
        aux_x = self.ctx.aux_x.to(dtype=self.dtype, device=self.device)
        return Frame.fit(aux_x, self.ctx.aux_y.to(self.device), self.classes)

    # --- what clients with these samples would have sent ----------------------------------------
    def uploads(self, x: Tensor, y: Tensor, victims: Tensor | None = None) -> dict[str, Tensor]:
        """Uploads before noise in the observation's kind, clips applied in order.

        x [P, K, *shape], soft labels y [P, K, C] -> [P, ...] by name, for the names observed.
        victims: int [P], whose returned slopes are used in place of the labels (split protocols).
        """
        assert self.observation is not None
        if self.returned is not None and victims is not None:
            assert self.split is not None
            assert self.split.slopes is not None
            gradient = self.returned(x, self.split.slopes[victims], y)
        else:
            gradient = self.gradients(x, y)
        kind = self.observation.kind
        scale = -self.work.lr * self.work.steps
        if self.distance == "likelihood":
            for clip in self.clips:
                gradient = self._clipped(gradient, clip, victims)
        found = {n: gradient[n] for n in self.observation.values}
        if kind == "gradient":
            return found
        update = {n: scale * g for n, g in found.items()}
        return update if kind == "update" else {n: self.start[n] + u for n, u in update.items()}

    def _clipped(self, gradient: State, clip: Clip, victims: Tensor | None) -> dict[str, Tensor]:
        """Gradients [P, ...] whose gradient, update or weights, as the clip has it, were scaled
        down to its norm over the coordinates that the victims sent."""
        assert self.observation is not None
        scale = -self.work.lr * self.work.steps
        slope = 1.0 if clip.of == "gradient" else scale
        base = self.start if clip.of == "weights" else {}
        sent, shown = {}, []
        for name, g in gradient.items():
            sent[name] = slope * g + base[name] if base else slope * g
            present = self.observation.present.get(name)
            if present is None or self._all_present:
                shown.append(sent[name].flatten(1))
                continue
            rows = present.any(dim=0, keepdim=True) if victims is None else present[victims]
            shown.append(torch.where(rows, sent[name], 0.0).flatten(1))
        flat = torch.cat(shown, dim=1)
        # The square root's slope is infinite at 0, and 0 is never clipped.
        length = flat.abs().sum(1) if clip.order == 1 else (flat.square().sum(1) + _TINY).sqrt()
        shrink = torch.clamp(clip.norm / length.clamp_min(_TINY), max=1.0)
        return {
            n: (v * _column(shrink, v) - (base[n] if base else 0.0)) / slope
            for n, v in sent.items()
        }

    @cached_property
    def _all_present(self) -> bool:
        assert self.observation is not None
        return all(bool(p.all()) for p in self.observation.present.values())

    def activations(self, x: Tensor) -> list[Tensor]:
        """The first step's smashed data before noise, x [P, K, *shape] -> [P, B, ...]: under the
        mean weights, or under every one of `draws` draws of them."""
        first = x[:, : self.batch]
        return [
            self._cut(weights, first.flatten(0, 1)).unflatten(0, first.shape[:2])
            for weights in self._tried
        ]

    @cached_property
    def _tried(self) -> list[State]:
        return self._realised(self.draws) if self.draws else [self.weights]

    @cached_property
    def weights(self) -> State:
        """The network's weights without the defense's randomness."""
        return self.ctx.defense.mean_realize(self.start, self.work.const)

    # --- the objective ----------------------------------------------------------------------------
    def evaluator(
        self, victims: Tensor, labels: Tensor | None = None, *, framed: bool = True
    ) -> Evaluate:
        """The optimiser's view of P problems: flat candidates in, losses and gradients out.

        victims: int [P], whose upload each problem matches. labels: int64 [P, K] that are held
        fixed, or None to optimise label logits that follow the images in the vector. framed:
        whether image vectors are relative to the public prior (see `Frame`) or plain pixels.
        Under noise the prior also weighs in the likelihood.
        """
        centre = self.centre(len(victims), labels, framed=framed)
        factor = self._factor(labels, framed=framed)
        weighs = framed and self.noisy and self.distance == "likelihood"
        cache: dict[str, Any] = {}

        def constants(problems: Tensor) -> dict[str, Any]:
            """What was seen of the problems' victims. It changes when problems leave alone, as
            `problems` being another object tells (see `Evaluate`): a GPU would stop at a
            comparison of values."""
            if cache.get("problems") is not problems:
                cache.update(problems=problems, chosen=self._chosen(victims[problems]))
            return cache["chosen"]

        def evaluate(z: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                x = self._decode(z, centre[problems], factor)
                y = (
                    self.labels_in(z)
                    if labels is None
                    else torch.nn.functional.one_hot(labels[problems], self.classes).to(z)
                )
                loss, outputs, slopes = self._misfit(x, y, constants(problems))
                if self.variation and len(self.shape) == 3:
                    rough = self.variation * _variation(x)
                    loss = loss + rough.detach()
                    outputs, slopes = [*outputs, rough], [*slopes, torch.ones_like(rough)]
            # The problems are independent, so one backward pass gives each its own gradient.
            gradient = torch.autograd.grad(outputs, z, slopes)[0]
            if weighs:
                inner = z.detach()[:, : self.pixels]
                loss = loss + inner.square().sum(dim=1) / 2
                gradient[:, : self.pixels] += inner
            return loss, gradient

        return evaluate

    def losses(self, x: Tensor, y: Tensor, victims: Tensor) -> Tensor:
        """The distance alone, [P], of samples x [P, K, *shape] with soft labels y [P, K, C] to
        what was seen of the victims int [P]."""
        return self._misfit(x, y, self._chosen(victims))[0].detach()

    def _chosen(self, victims: Tensor) -> dict[str, Any]:
        """What was seen of P victims, int [P], as `_misfit` needs it."""
        chosen: dict[str, Any] = {"victims": victims, "shown": None, "weight": None}
        if self.observation is not None and (
            self.distance == "likelihood" or self.products is None
        ):
            chosen["prepared"] = tuple(p[victims] for p in self.prepared)
            if self.visible is not None:
                chosen["shown"] = self.visible[victims].to(self.dtype)
            if self.weight is not None:
                chosen["weight"] = self.weight[victims]
        if self.split is not None:
            chosen["smashed"] = self.split.values[victims], self.split.present[victims]
        return chosen

    def _misfit(
        self, x: Tensor, y: Tensor, chosen: dict[str, Any]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Losses [P], and differentiable outputs with the losses' derivatives by them."""
        loss = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        outputs: list[Tensor] = []
        slopes: list[Tensor] = []
        if self.observation is not None:
            if self.distance == "cosine":
                away = 1 - self._cosine(x, y, chosen)
                loss, outputs = loss + away.detach(), [away]
                slopes = [torch.ones_like(away)]
            else:
                sent = self.uploads(x, y, chosen["victims"])
                uploads = as_vector(sent, list(self.observation.values))
                terms, slope = self.likelihood.misfit(uploads.detach(), chosen["prepared"])
                for factor in (chosen["shown"], chosen["weight"]):
                    if factor is not None:
                        terms, slope = terms * factor, slope * factor
                loss, outputs, slopes = loss + terms.sum(dim=1), [uploads], [slope]
        if self.split is not None:
            values, present = chosen["smashed"]
            unit = self.smashed_unit[chosen["victims"]]
            cuts = self.activations(x)
            for cut in cuts:
                rest = torch.where(present, cut.detach() - values, 0.0)
                weighed = rest * (unit / len(cuts))
                loss = loss + (weighed * rest).flatten(1).sum(dim=1)
                outputs, slopes = [*outputs, cut], [*slopes, 2 * weighed]
        return loss, outputs, slopes

    def _cosine(self, x: Tensor, y: Tensor, chosen: dict[str, Any]) -> Tensor:
        """Cosine of the angle between visible values, [P]. Source: Inverting Gradients, Eq. 4."""
        assert self.observation is not None
        if self.products is not None:
            inner, square = self.products(x, y, chosen["victims"])
        else:
            sent = self.uploads(x, y, chosen["victims"])
            uploads = as_vector(sent, list(self.observation.values))
            if chosen["shown"] is not None:
                uploads = uploads * chosen["shown"]
            inner = (uploads * chosen["prepared"][0]).sum(dim=1)
            square = uploads.square().sum(dim=1)
        seen = self.observation.square[chosen["victims"]].clamp_min(_TINY)
        return inner / ((square + _TINY) * seen).sqrt()

    @cached_property
    def products(self) -> Products | None:
        """Inner products layer by layer, where every coordinate of every layer was seen."""
        seen = self.observation
        if not isinstance(self.gradients, Layered) or seen is None or self.visible is not None:
            return None
        if set(seen.values) != set(self.start):
            return None
        return Products(self.gradients, seen.values, samples=self.samples)

    @property
    def working_numbers(self) -> int:
        """Estimated numbers that one problem's evaluation holds: gradients and slopes, and
        activations as a multiple of the pixels."""
        return 6 * sum(v.numel() for v in self.start.values()) + 256 * self.pixels

    # --- candidates as vectors ------------------------------------------------------------------
    @property
    def pixels(self) -> int:
        """Numbers in one problem's images."""
        return self.samples * math.prod(self.shape)

    def centre(self, problems: int, labels: Tensor | None, *, framed: bool) -> Tensor:
        """What an image vector is relative to, [P, K, D]: 0 for plain pixels, else the mean
        public image, of the class where labels int64 [P, K] are known."""
        if not framed:
            width = math.prod(self.shape)
            return torch.zeros(problems, self.samples, width, dtype=self.dtype, device=self.device)
        if labels is None:
            return self.frame.mean.expand(problems, self.samples, -1)
        return self.frame.class_means[labels]

    def images(self, z: Tensor, labels: Tensor | None, *, framed: bool) -> Tensor:
        """Optimised vectors [P, N] -> images [P, K, *shape]."""
        centre = self.centre(len(z), labels, framed=framed)
        return self._decode(z.to(self.dtype), centre, self._factor(labels, framed=framed))

    def vectors(self, x: Tensor) -> Tensor:
        """Plain images [P, K * D] as the optimiser's vectors."""
        if not self.bounded:
            return x
        return torch.arccos(1 - 2 * x.clamp(0.001, 0.999)) / math.pi

    def _factor(self, labels: Tensor | None, *, framed: bool) -> Tensor | None:
        if not framed:
            return None
        return self.frame.total if labels is None else self.frame.within

    def _decode(self, z: Tensor, centre: Tensor, factor: Tensor | None) -> Tensor:
        x = z[..., : self.pixels].reshape(*z.shape[:-1], self.samples, -1)
        if factor is not None:
            x = x @ factor.mT
        elif self.bounded:
            x = (1 - torch.cos(math.pi * x)) / 2
        return (x + centre).reshape(*z.shape[:-1], self.samples, *self.shape)

    def labels_in(self, z: Tensor) -> Tensor:
        """[..., N] -> soft labels [..., K, C] from the logits behind the images."""
        logits = z[..., self.pixels :].reshape(*z.shape[:-1], self.samples, self.classes)
        return torch.softmax(logits, dim=-1)


def _column(values: Tensor, like: Tensor) -> Tensor:
    """[P] -> [P, 1, ...] with the dimensions of `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _variation(x: Tensor) -> Tensor:
    """Anisotropic total variation per pixel of images [P, K, C, H, W] -> [P]."""
    across = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(dim=1)
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(dim=1)
    return across + down
