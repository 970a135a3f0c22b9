"""A network of any torch module: the user's own, or one of a library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.contract.messages import State
from bench.contract.network import LayerKind
from bench.errors import UserError
from bench.foreign import in_one_line
from bench.models.anatomy import SAMPLES, Place, dissect
from bench.models.network import KINDS, Initial, Network, Shape, StaticBatchNorm, drawn

Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel."""
_SEEDS = 4
"""Passes by which it is seen whether a module draws random numbers in training."""


class ModuleNetwork(Network):
    """A network of any module that turns samples [B, *shape] into logits [B, C].

    It runs as it is written. Batch normalisation becomes static (see `StaticBatchNorm`), and
    activations in place are done out of place. Attention takes plain arithmetic, since fused
    kernels have no second derivative. Where all information passes one tensor that a submodule
    gives, the network can be cut: to run from there on, the submodules before are skipped.

    Args:
        make: Makes the module with its initial parameters, drawn from PyTorch's global generator.
        initial: How kinds of modules begin instead.
        without_dropout: Whether to run a module that draws random numbers in training as in
            evaluation, which draws none.
        scale: By which samples are standardised before the module; None: not at all.

    Attributes:
        anatomy: What the module looks like inside.
        constants: Buffers and parameters that are not trained, by what the module calls them.

    Raises:
        UserError: With one sentence for a module that cannot be used.
    """

    def __init__(
        self,
        *,
        name: str,
        settings: Mapping[str, Any],
        shape: Shape,
        classes: int,
        make: Callable[[], nn.Module],
        initial: Initial | None = None,
        without_dropout: bool = False,
        scale: Scale | None = None,
    ) -> None:
        what = f"model {name}"
        self._make, self._initial, self._scale = make, initial, scale
        self._scales: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        module = self._fresh(seed=0)
        with _plain_arithmetic(), torch.random.fork_rng(devices=[]):
            x = torch.rand(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))
            _check_modes(module, self._scaled(x), what, without_dropout=without_dropout)
            self.anatomy = dissect(module.eval(), self._scaled(x), classes, what=what)
        norms = set(self.anatomy.norms.values())
        trained = set(self.anatomy.parameters.values())
        self.constants = {
            name: tensor.detach().clone()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if name not in trained and name.rpartition(".")[0] not in norms
        }
        self._placed: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        super().__init__(
            name=name,
            settings=settings,
            shape=shape,
            classes=classes,
            module=module.to("meta"),
            stages=[place.stage for place in self.anatomy.places],
            parameters=self.anatomy.parameters,
            norms=self.anatomy.norms,
            overwritten=[
                name
                for path, name in self.anatomy.plain.items()
                if path in self.anatomy.overwritten
            ],
        )

    def _fresh(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # not those of other devices
            return _prepared(self._make())

    def check(self) -> None:
        """Raises UserError for a module of which clients' gradients cannot be taken together, or
        no derivative of them."""
        rng = torch.Generator().manual_seed(0)
        params = self.init(rng)
        x = torch.rand(2, 2, *self.shape, generator=rng).requires_grad_()

        def loss(params: State, x: Tensor) -> Tensor:
            return -torch.log_softmax(self.run(params, x, mode="train"), dim=-1)[:, 0].mean()

        try:
            slopes = vmap(grad(loss), in_dims=(None, 0))(params, x)
            torch.autograd.grad(sum(s.square().sum() for s in slopes.values()), x)
        except Exception as error:  # whatever torch says of a foreign module's operations
            raise UserError(
                f"model {self.name} has an operation that cannot be differentiated twice, or not "
                f"for several clients at once by torch.func.vmap: {in_one_line(error)[:160]}"
            ) from error

    def init(self, rng: torch.Generator) -> dict[str, Tensor]:
        """The module's own initial parameters, of PyTorch's global generator seeded by `rng`."""
        if self._initial is not None:
            values = drawn(self._module, self._initial, rng)
        else:
            seed = int(torch.randint(2**31, (), generator=rng))
            values = {n: p.detach().clone() for n, p in self._fresh(seed).named_parameters()}
        return {known: values[inner] for known, inner in self.anatomy.parameters.items()}

    def _segment(self, tensors: State, x: Tensor, low: int, high: int) -> Tensor:
        given = {self._inner[name]: value for name, value in tensors.items()}
        given |= self._constants_like(x)
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if name not in given:  # of stages that do not run
                given[name] = x.new_zeros(()).expand(tensor.shape)
        places = self.anatomy.places
        with contextlib.ExitStack() as stack:
            stack.enter_context(_plain_arithmetic())
            if low:
                for place in places[: low - 1]:
                    if not place.before:
                        blank = x.new_zeros(len(x), *place.shape)
                        stack.enter_context(self._instead(place, blank))
                stack.enter_context(self._instead(places[low - 1], x))
                x = x.new_zeros(len(x), *self.shape)
            x = x if low else self._scaled(x)
            if high == len(places):
                return functional_call(self._module, given, (x,))
            stack.enter_context(self._stopping(places[high - 1]))
            try:
                functional_call(self._module, given, (x,))
            except _Reached as reached:
                return reached.tensor
        raise RuntimeError(f"model {self.name} did not reach {places[high - 1].stage}.")

    def _scaled(self, x: Tensor) -> Tensor:
        """Samples [B, *shape] as the module gets them."""
        if self._scale is None:
            return x
        place = x.device, x.dtype
        if place not in self._scales:
            shape = (-1, *(1,) * (x.ndim - 2))
            self._scales[place] = [x.new_tensor(values).view(shape) for values in self._scale]
        mean, std = self._scales[place]
        return (x - mean) / std

    def _constants_like(self, x: Tensor) -> dict[str, Tensor]:
        """What is not trained, on the device of x and in its precision."""
        place = x.device, x.dtype
        if place not in self._placed:
            self._placed[place] = {
                name: value.to(x.device, x.dtype if value.is_floating_point() else value.dtype)
                for name, value in self.constants.items()
            }
        return self._placed[place]

    @contextlib.contextmanager
    def _instead(self, place: Place, value: Tensor) -> Iterator[None]:
        """A place's tensor is the value, and what leads up to it is not run."""
        module = self._module.get_submodule(place.module)
        if place.before:
            handle = module.register_forward_pre_hook(lambda *_: (value,))
            try:
                yield
            finally:
                handle.remove()
            return
        module.forward = lambda *_, **__: value
        try:
            yield
        finally:
            del module.forward

    @contextlib.contextmanager
    def _stopping(self, place: Place) -> Iterator[None]:
        """A run ends at a place."""

        def reached(_: nn.Module, given: tuple[Tensor, ...], output: Tensor | None = None) -> None:
            raise _Reached(given[0] if output is None else output)

        module = self._module.get_submodule(place.module)
        register = (
            module.register_forward_pre_hook if place.before else module.register_forward_hook
        )
        handle = register(reached)
        try:
            yield
        finally:
            handle.remove()

    def _layers(self) -> Iterator[tuple[str, nn.Module, LayerKind]]:
        # What a module of another kind gets and gives may be anything, and nothing asks for it.
        for path, name in self.anatomy.plain.items():
            module = self._module.get_submodule(path)
            yield name, module, KINDS[type(module)]


class _Reached(Exception):
    """A run has come to the place where it ends."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextlib.contextmanager
def _plain_arithmetic() -> Iterator[None]:
    """Attention without fused kernels, which have neither a second derivative nor vmap."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _prepared(module: nn.Module) -> nn.Module:
    """The module with static batch normalisation and without activations in place."""
    for name, part in list(module.named_modules()):
        if getattr(part, "inplace", False) is True:
            part.inplace = False
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            static = StaticBatchNorm(part.num_features, epsilon=part.eps, affine=part.affine)
            if part.affine:
                static.weight, static.bias = part.weight, part.bias
            module.set_submodule(name, static)
    return module


def _check_modes(module: nn.Module, x: Tensor, what: str, *, without_dropout: bool) -> None:
    """Raises UserError for a module that draws random numbers, or that does something else in
    training than in evaluation, but for batch normalisation."""

    def played(training: bool, seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        with torch.no_grad():
            return module.train(training)(x)

    try:
        still = [played(False, seed) for seed in range(2)]
    except Exception:  # said where the anatomy is read
        return
    if not isinstance(still[0], Tensor):
        return
    if not _equal(*still):
        raise UserError(
            f"{what} draws random numbers in evaluation too; the same parameters and samples must "
            "give the same logits."
        )
    if without_dropout:
        return
    moved = [played(True, seed) for seed in range(_SEEDS)]
    alike = isinstance(moved[0], Tensor) and moved[0].shape == still[0].shape
    if alike and not all(_equal(one, moved[0]) for one in moved):
        raise UserError(
            f"{what} draws random numbers in training{_random_layers(module)}, which would be a "
            "defense that no row tells of: take them out, or set without_dropout = true in "
            "model_settings to train without them."
        )
    if not alike or not _equal(still[0], moved[0]):
        raise UserError(
            f"{what} gives something else in training than in evaluation, and neither batch "
            "normalisation nor dropout is why; it must give logits alike."
        )


def _equal(one: Any, other: Any) -> bool:
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return both and bool(torch.allclose(one, other, rtol=1e-4, atol=1e-5))


def _random_layers(module: nn.Module) -> str:
    """Where dropout is, as far as its classes' names tell."""
    known = ("Dropout", "DropPath", "StochasticDepth")
    found = [n for n, m in module.named_modules() if any(k in type(m).__name__ for k in known)]
    shown = ", ".join(found[:3])
    return f" ({shown}{' and others' if len(found) > 3 else ''})" if found else ""
