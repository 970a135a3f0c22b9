"""Gradient matching: how well candidate images and labels explain the uploads that were seen.

One objective for every defense: the negative log-likelihood of the observed upload under the
defense's public mechanisms (Kerckhoffs), plus, where there is noise, a Gaussian prior fitted on
public data. Without noise it is the squared distance of gradients (DLG, Eq. 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from attacks.engine.lbfgs import Evaluate
from bench.api import UPLOAD_KINDS, Context, Kind, Seen, State, as_kind
from bench.privacy.events import (
    Clip,
    GaussianNoise,
    LaplaceNoise,
    Mechanism,
    SignPerturbation,
)
from bench.toolkit.batches import class_means, soft_cross_entropy
from bench.toolkit.vectors import flatten


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Uploads of V victims as one kind: values and presence, [V, ...] by name."""

    kind: Kind
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


def noise_of(seen: Seen) -> Mechanism | None:
    """The last mechanism that makes uploads random, or None if all are deterministic."""
    noises: list[Mechanism] = []
    for mechanism in mechanisms_of(seen):
        match mechanism:
            case GaussianNoise(std=level) | LaplaceNoise(scale=level):
                noises += [mechanism] if level > 0 else []
            case SignPerturbation():
                noises.append(mechanism)
    return noises[-1] if noises else None


def observe(seen: Seen, kind: Kind | None = None, *, dtype: torch.dtype) -> Observation:
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

    samples: per victim (batch * local steps). All tensors are of `dtype` on the
    context's device. `mean` weights stand for defenses that draw their weights at random.
    """

    def __init__(self, seen: Seen, ctx: Context, *, dtype: torch.dtype) -> None:
        self.network, self.defense = ctx.network, ctx.defense
        self.dtype, self.device = dtype, ctx.device
        self.steps, self.batch = int(seen.known["local_steps"]), int(seen.known["batch"])
        self.lr, self.mode = float(seen.known["lr"]), str(seen.known["mode"])
        self.samples = self.steps * self.batch
        self.shape, self.classes = tuple(ctx.network.shape), ctx.network.classes
        move: dict[str, Any] = {"dtype": dtype, "device": ctx.device}
        self.const = {n: v.to(**move) for n, v in seen.const.items()}
        self.buffers = {n: v.to(**move) for n, v in seen.buffers.items()}
        self.start = dict(
            self.defense.receive({n: v.to(**move) for n, v in seen.before.items()}, self.const)
        )
        mechanisms = mechanisms_of(seen)
        self.clips = [m for m in mechanisms if isinstance(m, Clip)]
        self.noise = noise_of(seen)
        self.likelihood = Likelihood(self.noise)
        kind: Kind = mechanisms[-1].of if mechanisms else "gradient"
        seen_as = observe(seen, kind, dtype=dtype)
        self.observation = Observation(
            kind=kind,
            values={n: v.to(ctx.device) for n, v in seen_as.values.items()},
            present={n: v.to(ctx.device) for n, v in seen_as.present.items()},
        )
        self.names = list(self.observation.values)
        self.prepared = self.likelihood.prepare(flatten(self.observation.values))
        visible = flatten(self.observation.present)
        self.visible = None if bool(visible.all()) else visible
        self.frame = Frame.fit(ctx.aux_x.to(**move), ctx.aux_y.to(ctx.device), self.classes)

    # --- what a client with these samples would have sent ------------------------------------
    def gradient(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Mean gradient of one client's local training on x [K, ...], soft labels y [K, C].

        Several local steps are simulated, each on its own slice of the candidates.
        """

        def loss(variables: State, x: Tensor, y: Tensor) -> Tensor:
            weights = self.defense.mean_realize(variables, self.const)
            logits = self.network.apply(weights, x, mode=self.mode, buffers=self.buffers)
            return soft_cross_entropy(logits, y)

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
            length = flat.abs().sum() if clip.order == 1 else (flat.square().sum() + 1e-30).sqrt()
            shrink = torch.clamp(clip.norm / length.clamp_min(1e-30), max=1.0)
            gradient = {n: g * shrink for n, g in gradient.items()}
        if self.observation.kind == "gradient":
            return gradient
        update = {n: scale * g for n, g in gradient.items()}
        if self.observation.kind == "update":
            return update
        return {n: self.start[n] + u for n, u in update.items()}

    def evaluator(
        self, victims: Tensor, labels: Tensor | None = None, *, framed: bool = True
    ) -> Evaluate:
        """The optimiser's view of P problems: flat candidates in, losses and gradients out.

        victims: int [P], whose upload each problem matches. labels: int64 [P, K] that are held
        fixed, or None to optimise label logits that follow the images in the vector. framed:
        whether image vectors are relative to the public prior (see `Frame`) or plain pixels.
        Under noise the prior also weighs in the objective.
        """
        centre = self.centre(len(victims), labels, framed=framed)
        factor = self._factor(labels, framed=framed)

        def sent(z: Tensor, centre: Tensor, y: Tensor) -> Tensor:
            targets = self.labels_in(z) if labels is None else y
            upload = self.sent(self._decode(z, centre, factor), targets)
            return torch.cat([upload[n].flatten() for n in self.names])

        soft = torch.zeros(len(victims), device=self.device)
        if labels is not None:
            soft = torch.nn.functional.one_hot(labels, self.classes).to(self.dtype)
        weighs = framed and self.noise is not None

        def evaluate(z: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
            chosen = victims[problems]
            # The problems are independent, so one backward pass gives each its own gradient.
            uploads, pull, *_ = vjp(lambda z: vmap(sent)(z, centre[problems], soft[problems]), z)
            prepared = tuple(p[chosen] for p in self.prepared)
            terms, slopes = self.likelihood.misfit(uploads.detach().contiguous(), prepared)
            if self.visible is not None:
                visible = self.visible[chosen]
                terms = torch.where(visible, terms, 0.0)
                slopes = torch.where(visible, slopes, 0.0)
            loss, gradient = terms.sum(dim=1), pull(slopes)[0].detach()
            if weighs:
                inner = z[:, : self.pixels]
                loss = loss + inner.square().sum(dim=1) / 2
                gradient = gradient.clone()
                gradient[:, : self.pixels] += inner
            return loss, gradient

        return evaluate

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
        return self._decode(z, centre, self._factor(labels, framed=framed))

    def _factor(self, labels: Tensor | None, *, framed: bool) -> Tensor | None:
        if not framed:
            return None
        return self.frame.total if labels is None else self.frame.within

    def _decode(self, z: Tensor, centre: Tensor, factor: Tensor | None) -> Tensor:
        x = z[..., : self.pixels].reshape(*z.shape[:-1], self.samples, -1)
        if factor is not None:
            x = x @ factor.mT
        return (x + centre).reshape(*z.shape[:-1], self.samples, *self.shape)

    def labels_in(self, z: Tensor) -> Tensor:
        """[..., N] -> soft labels [..., K, C] from the logits behind the images."""
        logits = z[..., self.pixels :].reshape(*z.shape[:-1], self.samples, self.classes)
        return torch.softmax(logits, dim=-1)


class Likelihood:
    """Per coordinate, how badly a noise-free value explains an observed one.

    Without noise the squared distance, else the negative log-likelihood under the mechanism.
    `prepare` turns observed values into constants once, `misfit` compares many times.
    """

    def __init__(self, noise: Mechanism | None) -> None:
        self.noise = noise

    def prepare(self, value: Tensor) -> tuple[Tensor, ...]:
        if not isinstance(self.noise, SignPerturbation):
            return (value,)
        # The magnitude |v| t is taken as Gaussian around |v| E[t]; where it is constant
        # (sign_rr) a thousandth stands for the spread, so that the objective stays smooth.
        magnitude = value.abs() / self.noise.mean_scale
        inverse = 1 / (magnitude * max(self.noise.relative_std, 1e-3)).clamp_min(1e-12)
        return inverse, magnitude * value.sign() * inverse

    def misfit(self, sent: Tensor, prepared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(misfit, its derivative by `sent`), elementwise. The derivative is written out: a
        fifth of an evaluation would go into differentiating this."""
        match self.noise:
            case GaussianNoise(std=std):
                rest = (sent - prepared[0]) / std**2
                return rest.square() * (std**2 / 2), rest
            case LaplaceNoise(scale=scale):
                # |r| / scale, rounded within a tenth of the scale so that L-BFGS can follow.
                rest, soft = sent - prepared[0], 0.1 * scale
                length = (rest.square() + soft**2).sqrt()
                return (length - soft) / scale, rest / (length * scale)
            case SignPerturbation(keep=keep):
                # -log(p exp(-(u-c)^2/2) + (1-p) exp(-(u+c)^2/2)), u and c in units of the
                # spread; a value whose sign is known from elsewhere (a weight near its
                # broadcast) picks its own branch. Where p is 1 to rounding only one is left.
                inverse, centre = prepared
                rest = sent * inverse - centre
                kept = rest.square() / 2 - math.log(keep)
                if keep >= 1:
                    return kept, rest * inverse
                odds = math.log1p(-keep) - math.log(keep) - 2 * (rest + centre) * centre
                flipped = torch.sigmoid(odds)
                return kept - _softplus(odds), (rest + 2 * centre * flipped) * inverse
            case _:
                rest = sent - prepared[0]
                return rest.square(), 2 * rest


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) by one sigmoid and one log, half the time of the library's on a CPU."""
    return x.clamp_min(0) - torch.sigmoid(x.abs()).log()


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Gaussian prior of samples, fitted on public data, as a change of variables.

    x = mean + factor z with z ~ N(0, I): in z the prior's Hessian is the identity, so the prior
    weighs against the likelihood by itself (the more noise, the more it counts) and L-BFGS is
    well conditioned. mean [D], total [D, D]: of all samples; class_means [C, D], within [D, D]:
    given the class. Covariances are shrunk (Ledoit-Wolf), diagonal above 4096 dimensions.
    """

    mean: Tensor
    class_means: Tensor
    total: Tensor
    within: Tensor

    @staticmethod
    def fit(aux_x: Tensor, aux_y: Tensor, classes: int) -> Frame:
        flat = aux_x.flatten(1)
        mean = flat.mean(dim=0)
        means = class_means(flat, aux_y, classes=classes)
        return Frame(
            mean=mean,
            class_means=means,
            total=_factor(flat - mean),
            within=_factor(flat - means[aux_y]),
        )


def _factor(centred: Tensor) -> Tensor:
    """Square root [D, D] of the shrunk covariance of centred samples [N, D]."""
    if centred.shape[1] > 4096:
        return torch.diag(centred.std(dim=0).clamp_min(1e-3))
    from sklearn.covariance import LedoitWolf

    covariance = LedoitWolf(assume_centered=True).fit(centred.double().cpu().numpy()).covariance_
    scaled = torch.from_numpy(covariance)
    ridge = 1e-6 * scaled.diagonal().mean() * torch.eye(len(scaled), dtype=scaled.dtype)
    return torch.linalg.cholesky(scaled + ridge).to(centred)
