"""R-GAP: one sample layer by layer, from the head back to the image, by linear equations."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, unfold
from torch.nn.grad import conv2d_input

from attacks.engine.clients import is_plain, names_of
from attacks.engine.observation import (
    gradient_estimate,
    lawless,
    network_weights,
    parse_view,
    unusable,
)
from attacks.engine.samples import samples_of, standardise
from bench.api import Attack, Context, Layer, Reconstruction, Seen, State

_PROBES = 16
"""Public samples on which activations are recognised."""
_LARGEST = 2**27
"""Coefficients of a layer's equations, of which several matrices are held in float64."""
_SOLVES, _ITERATIONS = 3, 8
"""A solution with two refinements; power iterations for the extreme eigenvalues."""
_WEIGHT = 10
"""Of the gradient's equations, whose right side has no error of later layers: their Frobenius norm,
where that of the others is 1. For the network of the published figure 10 is worth 13 dB."""
_RIDGE, _RANK = 1e-14, 1e-10
"""Added to the normal matrix; share of its largest eigenvalue that counts as 0."""
_AGREE = 0.01
"""Relative residual from which a layer's equations contradict each other."""
_EDGE, _TINY = 1e-12, 1e-200
"""Least distance of a sigmoid's or tanh's value from its bounds, for a finite inverse; least
divisor."""

Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""Its inverse, and its slope where its value is a."""


class Unsuited(ValueError):
    """The equations do not pass this network; the text is a clause that says why."""


class RGAP(Attack):
    """Exact for one sample, one step, and a chain of layers with invertible activations.

    The head's gradient gives its input a, and with its weight the loss's gradient k by that. From
    the last layer back: z is the inverse activation of a, delta = k phi'(z), and the layer's input
    x is the float64 least squares solution of W * x = z - b and
    dW[o, c, t] = sum_p delta[o, p] x[c, stride p + t]. Then a = x and k = W' delta.
    Coordinates that were not sent drop their equations. Labels are not needed. A victim is failed
    whose equations lack rank or contradict each other; so are all at ReLU, pooling, normalisation
    or skips.
    Source: Zhu, Blaschko, arXiv:2010.07733, Alg. 1. Departures: k from the head's bias gradient,
    activations recognised from values, Cholesky with refinement, and the equations' weights.
    """

    recovers = frozenset({"images"})
    source = "Zhu, Blaschko, arXiv:2010.07733, Alg. 1"

    def applies(self, seen: Seen) -> str | None:
        release = parse_view(seen)[-1]
        if reason := unusable(release) or lawless(release):
            return reason
        if release.samples > 1 or release.steps > 1:
            used = f"{release.samples} sample(s) in {release.steps} step(s) were used"
            return f"its equations hold for one sample in one step, but {used}"
        if release.noise is not None or release.bounds is not None:
            return "its equations need gradients without noise or rounding"
        if seen.const or not set(seen.before) <= set(release.uploads[0].parts):
            return "its equations need the gradient of every layer"
        return None

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        release, mean = parse_view(seen)[-1], ctx.aux_x.double().mean(dim=0).flatten().cpu()
        weights = {n: v.double() for n, v in network_weights(release, ctx).items()}
        try:
            layers, activations = _chain(weights, seen, ctx)
        except Unsuited as reason:
            failed = torch.ones(len(release.clients), dtype=torch.bool)
            images = samples_of(mean.expand(len(failed), -1), ctx)
            return Reconstruction(images=images, failed=failed, notes=(f"handed over: {reason}",))
        sent = gradient_estimate(release)
        gradient = {
            n: (v.to(ctx.device), sent.present[n].to(ctx.device)) for n, v in sent.values.items()
        }
        (dw, shown), (db, whole) = (gradient[n] for n in ctx.network.head)
        db = torch.where(whole, db, 0.0)
        strength = (db.square()[..., None] * shown).sum(dim=1)
        a = (db[..., None] * torch.where(shown, dw, 0.0)).sum(dim=1) / strength.clamp_min(_TINY)
        k = db @ weights[ctx.network.head[0]]
        solved, worst = whole.all(dim=1) & (strength > 0).all(dim=1), (math.inf, "no layer")
        for layer, (invert, slope) in zip(layers[-2::-1], activations[::-1], strict=True):
            z, delta = invert(a), k * slope(a)
            a, k, ranks, least, far = _invert_layer(
                layer, weights, z, delta, *gradient[f"{layer.name}.weight"], ctx.rng
            )
            solved &= (ranks == a.shape[1]) & (far < _AGREE)
            said = f"{layer.name}, rank {int(ranks.min())} of {a.shape[1]}"
            said += f", smallest singular value {float(least.min()):.1e}"
            worst = min(worst, (float(least.min()), said))
        scale, shift = standardise(seen, ctx, f"{layers[0].name}.weight")
        x = torch.where(solved[:, None].cpu(), (a.cpu() - shift) / scale, mean)
        images = samples_of(x, ctx)
        note = f"worst layer: {worst[1]}"
        return Reconstruction(images=images, failed=~solved.cpu(), notes=(note,))


def _chain(weights: State, seen: Seen, ctx: Context) -> tuple[list[Layer], list[Activation]]:
    """Layers in order, and the activation after each but the head. Raises Unsuited."""
    if ctx.network.normalises:
        raise Unsuited("batch statistics tie the values of a layer together")
    probes = ctx.aux_x[:_PROBES].to(ctx.device).double()
    buffers = {n: v.to(ctx.device) for n, v in seen.buffers.items()}
    with torch.no_grad():
        _, layers = ctx.network.trace(weights, probes, buffers=buffers)
    fits = [n for n in layers if is_plain(n) and n.input.ndim == (4 if n.kind == "conv" else 2)]
    if sorted(name for layer in fits for name in names_of(layer)) != sorted(weights):
        raise Unsuited("the network is no chain of linear layers and plain convolutions")
    activations = []
    for layer, after in pairwise(layers):
        phi = _recognise(layer.output.flatten(1), after.input.flatten(1))
        if phi is None:
            raise Unsuited(f"what follows {layer.name} cannot be inverted")
        activations.append(phi)
    sizes = [(n.input[0].numel(), n.output[0].numel()) for n in layers]
    if sizes[0][0] != probes[0].numel():
        raise Unsuited("its first layer does not take the sample")
    if max((before * max(before, after) for before, after in sizes[:-1]), default=0) > _LARGEST:
        raise Unsuited(f"the equations of a layer have more than {_LARGEST} coefficients")
    return layers, activations


def _recognise(z: Tensor, a: Tensor) -> Activation | None:
    """The invertible activation that makes a [N, F] of z, or None."""
    if a.shape != z.shape:
        return None
    low = z < 0
    ratio = float((a * z)[low].sum() / z[low].square().sum()) if bool(low.any()) else 1.0
    if ratio > 0 and torch.allclose(a, torch.where(low, ratio * z, z)):
        return lambda a: torch.where(a < 0, a / ratio, a), lambda a: torch.where(a < 0, ratio, 1.0)
    if torch.allclose(a, z.sigmoid()):
        return lambda a: a.logit(_EDGE), lambda a: a * (1 - a)
    if torch.allclose(a, z.tanh()):
        return lambda a: a.clamp(_EDGE - 1, 1 - _EDGE).atanh(), lambda a: 1 - a.square()
    return None


def _invert_layer(
    layer: Layer, weights: State, z: Tensor, delta: Tensor, gradient: Tensor, present: Tensor,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Input of a layer, a linear one as a convolution of one pixel, by least squares.

    Args:
        z, delta: The layer's output and the loss's gradient by it [V, O * h' * w'].
        gradient: By the weight [V, *weight.shape], of which `present` was sent.
        rng: For the starts of power iterations.

    Returns:
        Input x and the loss's gradient by it [V, C * H * W]; rank of the weighted equations [V],
        their smallest singular value [V]; the larger relative residual of the two kinds [V].
    """
    weight, conv = weights[f"{layer.name}.weight"], layer.kind == "conv"
    module: Any = layer.module
    how = {"stride": module.stride, "padding": module.padding} if conv else {}
    pixel = () if conv else (1, 1)
    inputs, outputs = ((*t.shape[1:], *pixel) for t in (layer.input, layer.output))
    weight = weight.view(*weight.shape, *pixel)
    size, channels = math.prod(inputs), inputs[0]
    z, delta = (t.view(-1, *outputs) for t in (z, delta))
    if f"{layer.name}.bias" in weights:
        z = z - weights[f"{layer.name}.bias"][:, None, None]
    unit = torch.eye(size, dtype=z.dtype, device=z.device)
    passed = conv2d(unit.view(size, *inputs), weight, **how).flatten(1)  # [C H W, O h' w']
    passed, right = (t / passed.norm() for t in (passed, z.flatten(1)))
    forward = passed @ passed.mT + _RIDGE * unit
    pixels = unit[: size // channels, : size // channels].view(-1, 1, *inputs[1:])
    windows = unfold(pixels, weight.shape[2:], **how)  # [H W, h w, h' w']
    answers = []
    for victim, slope in enumerate(delta.flatten(2)):
        there, known = (
            t[victim].view_as(weight).flatten(2).transpose(0, 1) for t in (present, gradient)
        )  # [C, O, h w]
        moved = torch.einsum("nkp,op->okn", windows, slope) * there[..., None]
        moved, known = moved.flatten(1, 2), torch.where(there, known, 0.0).flatten(1)[..., None]
        moved, known = (t * _WEIGHT / moved.norm().clamp_min(_TINY) for t in (moved, known))
        normal = forward.clone()
        blocks = normal.view(channels, size // channels, channels, -1).diagonal(dim1=0, dim2=2)
        blocks += (moved.mT @ moved).permute(1, 2, 0)
        answers.append(_least_squares(normal, passed, right[victim, :, None], moved, known, rng))
    x, ranks, least, far = (torch.stack(each) for each in zip(*answers, strict=True))
    k = conv2d_input((len(x), *inputs), weight, delta, **how)
    return x, k.flatten(1), ranks, least, far


def _least_squares(
    normal: Tensor, passed: Tensor, right: Tensor, moved: Tensor, known: Tensor,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x [N], rank, smallest singular value and larger relative residual of the equations
    passed' x = right and, by channel, moved x_c = known, from their normal matrix [N, N]."""
    factor, x = torch.linalg.cholesky(normal), torch.zeros_like(normal[:, :1])
    for _ in range(_SOLVES):
        one, other = right - passed.mT @ x, known - moved @ x.view(len(moved), -1, 1)
        step = passed @ one + (moved.mT @ other).flatten()[:, None]
        x = x + torch.cholesky_solve(step, factor)
    pairs = ((one, right), (other, known))
    far = torch.stack([rest.norm() / side.norm().clamp_min(_TINY) for rest, side in pairs]).max()
    low = high = torch.randn(len(normal), 1, generator=rng).to(normal)
    for _ in range(_ITERATIONS):
        low, high = torch.cholesky_solve(low / low.norm(), factor), normal @ (high / high.norm())
    least, most, rank = 1 / low.norm(), high.norm(), torch.tensor(len(normal))
    if least < _RANK * most:
        rank = (torch.linalg.eigvalsh(normal) > _RANK * most).sum()
    return x[:, 0], rank.to(x.device), least.sqrt(), far
