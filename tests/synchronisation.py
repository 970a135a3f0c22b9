"""A second device without hardware, and a count of what would make the host wait for it.

Tensors on `second_device()` are computed by the CPU but behave as a GPU's do: they may not be mixed
with the CPU's, and take no generator of it. So a tensor that was made on the wrong device is an
error here as it is there. `watched` records every operation that stops a GPU's pipeline, with the
line that asked for it: reading values back, shapes that depend on values (nonzero, boolean masks,
unique), copies from memory that is not pinned, and libraries that check their result on the host.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

ROOT = Path(__file__).parents[1]
aten = torch.ops.aten

_READS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.unique_dim_consecutive, aten.equal,
    aten.is_nonzero, aten.bincount, aten.isin, aten._linalg_check_errors, aten.linalg_eig,
    aten._linalg_eigh, aten._linalg_svd, aten.linalg_qr, aten.linalg_lstsq, aten.allclose,
}  # fmt: skip
"""Operations after which the host knows something of the values, in CUDA's implementation."""
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_MIXED = {aten.copy_, aten._to_copy, *_INDEXED}
"""Operations that take tensors of both devices; indices are copied first."""


@cache
def second_device() -> torch.device:
    """The device; the first call registers it with torch, which changes what torch takes for the
    accelerator of this process: only where there is no GPU. Raises ImportError where this torch
    cannot have devices written in Python."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    assert not torch.cuda.is_available()
    _setup_privateuseone_for_python_backend("second")
    _LIBRARY.append(torch.library.Library("_", "IMPL"))
    _LIBRARY[0].fallback(_fallback, "PrivateUse1")
    return torch.device("second", 0)


_LIBRARY: list[torch.library.Library] = []
_RESIZED = {torch.arange, torch.linspace, torch.logspace, torch.eye, torch.randperm}
"""Factories that torch composes of an empty tensor and its filling, as it does `one_hot` here."""


class Remote(Tensor):
    """A tensor of the second device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Remote:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=second_device(), requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Remote:
        return Remote(self.held.detach().clone())

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Remote({self.held!r})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    flat, _ = tree_flatten((args, dict(kwargs)))
    here = [t for t in flat if isinstance(t, Tensor) and not isinstance(t, Remote)]
    if any(isinstance(v, torch.Generator) for v in flat):
        raise RuntimeError(f"{func} on the second device was given a generator of the CPU.")
    packet = func.overloadpacket
    if packet not in _MIXED and any(t.ndim > 0 for t in here):
        raise RuntimeError(f"{func} mixes tensors of the second device with the CPU's.")
    _record(func, packet, args, kwargs, flat)
    target = kwargs.get("device")
    wraps = target is None or torch.device(target).type == second_device().type
    given = dict(kwargs)
    if target is not None:
        given["device"] = torch.device("cpu")
    lower = tree_map_only(Remote, lambda t: t.held, (tuple(args), given))
    result = func(*lower[0], **lower[1])
    for t in flat:
        if isinstance(t, Remote) and t.shape != t.held.shape:
            raise RuntimeError(f"{func} gave a tensor of the second device another shape in place.")
    if packet is aten.copy_ and not isinstance(args[0], Remote):
        return args[0]
    known = {id(t.held): t for t in flat if isinstance(t, Remote)}
    if not wraps:
        return result
    return tree_map_only(Tensor, lambda t: known[id(t)] if id(t) in known else Remote(t), result)


def _record(
    func: Any, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], flat: list[Any]
) -> None:
    if not _LOGS:
        return
    waits = packet in _READS
    if packet is aten.repeat_interleave:
        waits = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if packet in _INDEXED:
        indices = [i for i in args[1] if i is not None]
        waits = any(not isinstance(i, Remote) for i in indices)
        masks = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
        # One number behind a mask is filled in without looking.
        fills = packet is not aten.index and args[2].numel() == 1
        waits |= masks and not fills
    if packet is aten._to_copy:
        target = kwargs.get("device")
        moves = target is not None and torch.device(target) != args[0].device
        waits = moves and not kwargs.get("non_blocking")
    if packet is aten.copy_:
        source = args[1]
        moves = isinstance(args[0], Remote) != isinstance(source, Remote)
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        # One number goes along with the kernel's arguments.
        waits = moves and blocking
    if waits:
        for log in _LOGS:
            log[f"{packet} at {_line()}"] += 1


def _line() -> str:
    """File and line of the repository that asked, the innermost one."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a backward pass"


class _Factories(TorchFunctionMode):
    """Makes tensors of Python numbers, and indices of Python lists, as CUDA does: on the CPU, and
    copies them."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor):
            target = given.pop("device", None)
            made = func(*args, **given)
            return made if target is None else made.to(target)
        if func in _RESIZED and torch.device(given.get("device") or "cpu") == second_device():
            return Remote(func(*args, **{**given, "device": "cpu"}))
        if func is torch.nn.functional.one_hot and isinstance(args[0], Remote):
            return Remote(func(args[0].held, *args[1:], **given))
        if func is Tensor.new_tensor:
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **given}).to(args[0].device)
        if func is Tensor.tolist and args[0].device == second_device():
            return args[0].cpu().tolist()
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            where = args[1] if isinstance(args[1], tuple) else (args[1],)
            listed = tuple(torch.tensor(i) if isinstance(i, list) else i for i in where)
            args = (args[0], listed if isinstance(args[1], tuple) else listed[0], *args[2:])
        return func(*args, **given)


_LOGS: list[Counter[str]] = []


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """How often the host would have waited for the device inside, by operation and line."""
    log: Counter[str] = Counter()
    _LOGS.append(log)
    try:
        # On the calling thread, so that a backward pass has a line.
        with _Factories(), torch.autograd.set_multithreading_enabled(False):
            yield log
    finally:
        _LOGS.pop()


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(op, args, kwargs)
