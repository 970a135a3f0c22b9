"""Gradient matching: how well candidate images and labels explain the uploads that were seen.

One objective for every defense: the negative log-likelihood of the observed upload under the
defense's public mechanisms (Kerckhoffs), plus, where there is noise, a prior fitted on public
data. Without noise it is the squared distance of gradients (DLG, Eq. 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from attacks.engine.lbfgs import Evaluate
from bench.api import UPLOAD_KINDS, Context, Seen, State, as_kind
from bench.privacy.events import (
    Clip,
    GaussianNoise,
    LaplaceNoise,
    Mechanism,
    SignPerturbation,
)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Uploads of V victims as one kind: values and presence, [V, ...] by name."""

    kind: str
    values: Mapping[str, Tensor]
    present: Mapping[str, Tensor]

    @property
    def square(self) -> Tensor:
        """Squared norm of the visible values, [V]."""
        terms = [
            torch.where(self.present[n], v, 0.0).flatten(1).square().sum(dim=1)
            for n, v in self.values.items()
        ]
        return torch.stack(terms).sum(dim=0)


def mechanisms_of(seen: Seen) -> list[Mechanism]:
    """The defense's public mechanisms, in the order in which they act."""
    return [Mechanism.from_dict(m) for m in seen.known["mechanisms"]]


def observe(seen: Seen, kind: str | None = None, *, dtype: torch.dtype) -> Observation:
    """The victims' uploads converted to `kind` (None: as sent), in `dtype`.

    Raises ValueError if there is none or if a value is not finite, naming the client.
    """
    sent = seen.upload_kind()
    if sent is None:
        raise ValueError("no upload of weights, update or gradient was seen.")
    lr = float(seen.known["lr"])
    base = {n: v.to(dtype) for n, v in seen.before.items()}
    rows = []
    for client in seen.clients:
        message = seen.of(client, sent)[0]
        wide = message.with_parts(
            {
                n: type(p)(values=p.values.to(dtype), present=p.present)
                for n, p in message.parts.items()
            }
        )
        rows.append(as_kind(wide, kind or sent, base=base, lr=lr).parts)
        for name, part in rows[-1].items():
            if not bool(torch.isfinite(part.values[part.presence()]).all()):
                raise ValueError(f"the upload '{name}' of {client} holds non-finite values.")
    return Observation(
        kind=kind or sent,
        values={n: torch.stack([r[n].values for r in rows]) for n in rows[0]},
        present={n: torch.stack([r[n].presence() for r in rows]) for n in rows[0]},
    )


def unusable(seen: Seen) -> str | None:
    """Why the uploads cannot be matched, or None."""
    if not seen.clients:
        return "no client took part in the observed round"
    kind = seen.upload_kind()
    if kind is None:
        return f"no upload of {', '.join(UPLOAD_KINDS)} was seen"
    return None


class Matcher:
    """The objective over candidate images and soft labels for the victims of one `Seen`.

    images: samples per victim (batch * local steps). All tensors are of `dtype` on the
    context's device. `mean` weights stand for defenses that draw their weights at random.
    """

    def __init__(self, seen: Seen, ctx: Context, *, dtype: torch.dtype) -> None:
        self.network, self.defense = ctx.network, ctx.defense
        self.dtype, self.device = dtype, ctx.device
        self.steps, self.batch = int(seen.known["local_steps"]), int(seen.known["batch"])
        self.lr, self.mode = float(seen.known["lr"]), str(seen.known["mode"])
        self.images = self.steps * self.batch
        self.shape, self.classes = tuple(ctx.network.shape), ctx.network.classes
        move: dict[str, Any] = {"dtype": dtype, "device": ctx.device}
        self.const = {n: v.to(**move) for n, v in seen.const.items()}
        self.buffers = {n: v.to(**move) for n, v in seen.buffers.items()}
        self.start = dict(
            self.defense.receive({n: v.to(**move) for n, v in seen.before.items()}, self.const)
        )
        mechanisms = mechanisms_of(seen)
        self.clips = [m for m in mechanisms if isinstance(m, Clip)]
        noises = [m for m in mechanisms if not isinstance(m, Clip)]
        self.noise: Mechanism | None = noises[-1] if noises else None
        kind = mechanisms[-1].of if mechanisms else "gradient"
        seen_as = observe(seen, kind, dtype=dtype)
        self.observation = Observation(
            kind=kind,
            values={n: v.to(ctx.device) for n, v in seen_as.values.items()},
            present={n: v.to(ctx.device) for n, v in seen_as.present.items()},
        )
        self.prior = _Prior.fit(ctx.aux_x.to(**move)) if self.noise is not None else None

    # --- what a client with these samples would have sent ------------------------------------
    def gradient(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Mean gradient of one client's local training on x [K, ...], soft labels y [K, C].

        Several local steps are simulated, each on its own slice of the candidates.
        """

        def loss(variables: State, x: Tensor, y: Tensor) -> Tensor:
            weights = self.defense.mean_realize(variables, self.const)
            logits = self.network.apply(weights, x, mode=self.mode, buffers=self.buffers)
            return -(y * torch.log_softmax(logits, dim=-1)).sum(dim=-1).mean()

        variables: State = self.start
        total: dict[str, Tensor] | None = None
        for step in range(self.steps):
            part = slice(step * self.batch, (step + 1) * self.batch)
            grads = self.defense.gradient(loss, variables, x[part], y[part], {})
            total = dict(grads) if total is None else {n: total[n] + g for n, g in grads.items()}
            if step + 1 < self.steps:
                variables = {n: v - self.lr * grads[n] for n, v in variables.items()}
        assert total is not None
        return {n: g / self.steps for n, g in total.items()}

    def sent(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The upload before noise, in the observation's kind: clips are applied in order."""
        gradient = self.gradient(x, y)
        scale = -self.lr * self.steps
        for clip in self.clips:
            factor = scale if clip.of == "update" else 1.0
            flat = torch.cat([g.flatten() for g in gradient.values()]) * factor
            # The square root's slope is infinite at 0, and 0 is never clipped.
            length = (
                flat.abs().sum() if clip.order == 1 else (flat.square().sum() + 1e-30).sqrt()
            )
            shrink = torch.clamp(clip.norm / length.clamp_min(1e-30), max=1.0)
            gradient = {n: g * shrink for n, g in gradient.items()}
        if self.observation.kind == "gradient":
            return gradient
        update = {n: scale * g for n, g in gradient.items()}
        if self.observation.kind == "update":
            return update
        return {n: self.start[n] + u for n, u in update.items()}

    # --- objective ----------------------------------------------------------------------------
    def distance(self, x: Tensor, y: Tensor, values: State, present: State) -> Tensor:
        """Objective of one victim: x [K, ...], y [K, C], its upload's values and presence."""
        sent = self.sent(x, y)
        total = x.new_zeros(())
        for name, value in values.items():
            term = self.misfit(sent[name], value)
            total = total + torch.where(present[name], term, 0.0).sum()
        if self.prior is not None:
            total = total + self.prior(x)
        return total

    def misfit(self, sent: Tensor, value: Tensor) -> Tensor:
        """Per coordinate: squared distance, or negative log-likelihood under the noise."""
        match self.noise:
            case GaussianNoise(std=std) if std > 0:
                return (sent - value).square() / (2 * std**2)
            case LaplaceNoise(scale=scale) if scale > 0:
                # |r| / scale, rounded within a tenth of the scale so that L-BFGS can follow.
                soft = 0.1 * scale
                return (((sent - value).square() + soft**2).sqrt() - soft) / scale
            case SignPerturbation() as mechanism:
                return _sign_misfit(sent, value, mechanism)
            case _:
                return (sent - value).square()

    def evaluator(self, victims: Tensor, labels: Tensor | None = None) -> Evaluate:
        """The optimiser's view of P problems: flat candidates in, losses and gradients out.

        victims: int [P], whose upload each problem matches. labels: soft labels [P, K, C] that
        are held fixed, or None to optimise label logits that follow the images in the vector.
        """
        values, present = self.observation.values, self.observation.present

        def free(z: Tensor, values: State, present: State) -> Tensor:
            return self.distance(self.images_in(z), self.labels_in(z), values, present)

        def fixed(z: Tensor, values: State, present: State, y: Tensor) -> Tensor:
            return self.distance(self.images_in(z), y, values, present)

        batched = vmap(grad_and_value(free if labels is None else fixed))

        def evaluate(z: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
            chosen = victims[problems]
            extra = () if labels is None else (labels[problems],)
            gradient, loss = batched(
                z,
                {n: v[chosen] for n, v in values.items()},
                {n: v[chosen] for n, v in present.items()},
                *extra,
            )
            return loss.detach(), gradient.detach()

        return evaluate

    @property
    def pixels(self) -> int:
        """Numbers in one problem's images."""
        return self.images * math.prod(self.shape)

    def images_in(self, z: Tensor) -> Tensor:
        """[..., N] -> images [..., K, *shape]."""
        return z[..., : self.pixels].reshape(*z.shape[:-1], self.images, *self.shape)

    def labels_in(self, z: Tensor) -> Tensor:
        """[..., N] -> soft labels [..., K, C] from the logits behind the images."""
        logits = z[..., self.pixels :].reshape(*z.shape[:-1], self.images, self.classes)
        return torch.softmax(logits, dim=-1)


def _sign_misfit(sent: Tensor, value: Tensor, mechanism: SignPerturbation) -> Tensor:
    """-log of the mixture over a kept and a flipped sign, in units of the magnitude's spread.

    The magnitude |v| t is taken as Gaussian around |v| E[t]; a coordinate whose sign is known
    from elsewhere (a weight near its broadcast) picks its own branch. Where the magnitude is
    constant (sign_rr) a thousandth stands for the spread, so that the objective stays smooth.
    """
    magnitude = value.abs() / mechanism.mean_scale
    spread = magnitude * max(mechanism.relative_std, 1e-3)
    spread = spread.clamp_min(1e-12)
    centre = magnitude * value.sign()
    kept = math.log(mechanism.keep) - ((sent - centre) / spread).square() / 2
    flipped = math.log1p(-mechanism.keep) - ((sent + centre) / spread).square() / 2
    return -torch.logaddexp(kept, flipped)


@dataclass(frozen=True, kw_only=True)
class _Prior:
    """Smoothness of public images, or the unit Gaussian of standardised features.

    rate: inverse mean absolute difference of neighbouring pixels, the maximum-likelihood rate
    of a Laplacian; its weight against the likelihood grows with the noise by itself.
    """

    image: bool
    rate: float

    @staticmethod
    def fit(aux: Tensor) -> _Prior:
        if aux.ndim != 4:
            return _Prior(image=False, rate=1.0)
        across = (aux[..., 1:] - aux[..., :-1]).abs().mean()
        down = (aux[..., 1:, :] - aux[..., :-1, :]).abs().mean()
        return _Prior(image=True, rate=float(2 / (across + down).clamp_min(1e-3)))

    def __call__(self, x: Tensor) -> Tensor:
        if not self.image:
            return x.square().sum() / 2
        across = (x[..., 1:] - x[..., :-1]).square()
        down = (x[..., 1:, :] - x[..., :-1, :]).square()
        outside = (x - x.clamp(0, 1)).square().sum() * 100
        rough = (across + 1e-4).sqrt().sum() + (down + 1e-4).sqrt().sum()
        return self.rate * rough + outside
