"""The dataset value object and the checks that every loader ends with."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bench.arrays import check_memory
from bench.errors import UserError
from bench.seeding import numpy_generator

Form = Literal["image", "tabular", "signal"]
_DIMENSIONS: Mapping[Form, tuple[str, ...]] = {
    "image": ("channels", "height", "width"),
    "tabular": ("features",),
    "signal": ("channels", "length"),
}
"""Of one sample."""
LEAST_SIDE = 11
"""Of an image: the window of SSIM."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in three disjoint parts: of the clients, for tests, and public.

    Images are float32 [N, channels, height, width] in [0, 1]. Tables are float32 [N, features] and
    signals float32 [N, channels, length], standardised by the mean and std of the public part.
    Labels are int64 [N].

    Attributes:
        train_x: The clients' samples.
        aux_x: Public samples, which the attacker has.
        categorical: Groups of one-hot columns of tabular data, as (first, last + 1).
        train_clients: Whose each training sample is: int64 [N], None where the data has no clients
            of its own.
        aux_clients: The same of the public samples, which are other clients'.
    """

    name: str
    task: Form
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    aux_x: Tensor
    aux_y: Tensor
    class_names: tuple[str, ...]
    categorical: tuple[tuple[int, int], ...] = ()
    train_clients: Tensor | None = None
    aux_clients: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train_x.shape[1:])

    @property
    def classes(self) -> int:
        return len(self.class_names)


def check_dataset(data: object, *, what: str) -> Dataset:
    """The data set itself, which is as `Dataset` says.

    Args:
        what: What an error should call it, such as "dataset mine (mine:load of my-data)".

    Raises:
        UserError: With the first thing that is not.
    """
    if not isinstance(data, Dataset):
        raise UserError(f"{what} must be a bench.data.Dataset, got {type(data).__name__}.")
    if data.task not in _DIMENSIONS:
        raise UserError(f"the task of {what} must be image, tabular or signal, got {data.task!r}.")
    names = data.class_names
    if not (isinstance(names, tuple) and all(isinstance(n, str) for n in names) and len(names) > 1):
        raise UserError(f"class_names of {what} must be two texts or more, got {names!r:.200}.")
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise UserError(f"class_names of {what} has '{twice:.60}' twice.")
    for part in ("train", "test", "aux"):
        _check_samples(data, part, what)
    features = data.shape[0] if data.task == "tabular" else 0
    for group in data.categorical:
        if len(group) != 2 or not 0 <= group[0] < group[1] <= features:
            raise UserError(
                f"categorical of {what} must be ranges (first, last + 1) of its {features} "
                f"columns, got {group}."
            )
        for part in ("train", "test", "aux"):
            columns = getattr(data, f"{part}_x")[:, group[0] : group[1]]
            if not bool(((columns == 0) | (columns == 1)).all() & (columns.sum(dim=1) == 1).all()):
                raise UserError(
                    f"columns {group[0]} to {group[1] - 1} of {what} are said to be one-hot, but "
                    f"{part}_x has rows without exactly one 1 among 0s there."
                )
    if data.train_y.min() == data.train_y.max():
        raise UserError(
            f"the training samples of {what} are all of one class, "
            f"'{names[int(data.train_y[0])]}', so there is nothing to learn."
        )
    return data


def _check_samples(data: Dataset, part: str, what: str) -> None:
    x, y = getattr(data, f"{part}_x"), getattr(data, f"{part}_y")
    form = f"[N, {', '.join(_DIMENSIONS[data.task])}]"
    dimensions = 1 + len(_DIMENSIONS[data.task])
    if not _is(x, torch.float32) or x.ndim != dimensions:
        raise UserError(f"{part}_x of {what} must be float32 {form}, got {_describe(x)}.")
    if not x.numel():
        raise UserError(f"{what} has no {part} samples.")
    if x.shape[1:] != data.train_x.shape[1:]:
        raise UserError(
            f"samples of {what} must have one shape, got {list(data.shape)} in train_x and "
            f"{list(x.shape[1:])} in {part}_x."
        )
    if data.task == "image" and min(x.shape[2:]) < LEAST_SIDE:
        raise UserError(
            f"images of {what} must have sides >= {LEAST_SIDE} (the SSIM window), got "
            f"{list(x.shape[1:])}."
        )
    low, high = (float(v) for v in x.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{part}_x of {what} holds NaN or infinities.")
    if data.task == "image" and (low < 0 or high > 1):
        raise UserError(
            f"images of {what} must lie in [0, 1], got {low:.4g} to {high:.4g} in {part}_x."
        )
    if not _is(y, torch.int64) or y.shape != x.shape[:1]:
        raise UserError(f"{part}_y of {what} must be int64 [{len(x)}], got {_describe(y)}.")
    if int(y.min()) < 0 or int(y.max()) >= data.classes:
        raise UserError(
            f"labels of {what} must lie in 0..{data.classes - 1}, got {int(y.min())} to "
            f"{int(y.max())} in {part}_y."
        )
    clients = getattr(data, f"{part}_clients", None)
    if clients is not None and not (_is(clients, torch.int64) and clients.shape == y.shape):
        raise UserError(
            f"{part}_clients of {what} must be int64 [{len(x)}], got {_describe(clients)}."
        )


def _is(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype


def _describe(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of {value.dtype} {list(value.shape)}"
    return type(value).__name__


def data_folder(name: str, folder: Path | None) -> Path:
    """The folder of what is not embedded, without which the data set cannot be loaded."""
    if folder is None:
        raise UserError(
            f"dataset {name} needs a data folder: give --data-dir DIR or set LEAKBENCH_DATA."
        )
    return folder


Labelled = tuple[np.ndarray, np.ndarray]
"""Samples and labels."""


def from_arrays(
    *,
    name: str,
    train: Labelled,
    test: Labelled,
    aux: Labelled,
    class_names: tuple[str, ...],
    size: int | None = None,
    train_clients: np.ndarray | None = None,
    aux_clients: np.ndarray | None = None,
) -> Dataset:
    """Make a data set of images [N, H, W] or [N, H, W, 1 or 3], uint8 or float in [0, 1].

    Args:
        size: Side to resize to (antialiased bilinear), or None to keep.
        train_clients: Whose each training sample is, whole numbers [N]; None: nobody knows.
        aux_clients: The same of the auxiliary samples.

    Raises:
        UserError: For too small a side.
    """
    return _convert_parts(
        partial(images_to_tensor, size=size),
        {"train": train, "test": test, "aux": aux},
        {"train": train_clients, "aux": aux_clients},
        name=name,
        task="image",
        class_names=class_names,
    )


def from_features(
    *,
    name: str,
    train: Labelled,
    test: Labelled,
    aux: Labelled,
    class_names: tuple[str, ...],
    categorical: tuple[tuple[int, int], ...] = (),
    train_clients: np.ndarray | None = None,
    aux_clients: np.ndarray | None = None,
) -> Dataset:
    """Make a data set of tables [N, F] or signals [N, channels, length], any finite numbers.

    Every feature, or every channel over all times, is standardised by its mean and standard
    deviation in the auxiliary part, which is public; one-hot columns stay as they are.

    Args:
        categorical: Groups of one-hot columns, as (first, last + 1).
        train_clients: Whose each training sample is, whole numbers [N]; None: nobody knows.
        aux_clients: The same of the auxiliary samples.

    Raises:
        UserError: For an auxiliary part without samples, or samples of several shapes.
    """
    public = aux[0].astype(np.float64)
    if not public.size:
        raise UserError(f"dataset {name} has no auxiliary samples, by which it is standardised.")
    for x, _ in (train, test):
        if x.shape[1:] != public.shape[1:]:
            raise UserError(
                f"samples of dataset {name} must have one shape, got {list(public.shape[1:])} and "
                f"{list(x.shape[1:])}."
            )
    axes = (0, *range(2, public.ndim))
    with np.errstate(all="ignore"):
        mean, std = (s(axis=axes, keepdims=True)[0] for s in (public.mean, public.std))
    numeric = np.ones_like(mean, dtype=bool)
    for first, last in categorical:
        numeric[first:last] = False
    mean, std = np.where(numeric, mean, 0), np.where(numeric & (std > 0), std, 1)

    def standardise(x: np.ndarray) -> Tensor:
        with np.errstate(all="ignore"):  # what overflows is found by `check_dataset`
            return torch.from_numpy(((x - mean) / std).astype(np.float32))

    return _convert_parts(
        standardise,
        {"train": train, "test": test, "aux": aux},
        {"train": train_clients, "aux": aux_clients},
        name=name,
        task="tabular" if public.ndim == 2 else "signal",
        class_names=class_names,
        categorical=categorical,
    )


def _convert_parts(
    convert: Callable[[np.ndarray], Tensor],
    parts: Mapping[str, Labelled],
    clients: Mapping[str, np.ndarray | None],
    **more: Any,
) -> Dataset:
    """Make a data set of its parts with labels, and the owners of samples, by the parts' names.
    more: the other fields."""
    for part, (x, y) in parts.items():
        more |= {f"{part}_x": convert(x), f"{part}_y": labels_to_tensor(y)}
    for part, owners in clients.items():
        more[f"{part}_clients"] = None if owners is None else labels_to_tensor(owners)
    return Dataset(**more)


def split(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    class_names: tuple[str, ...],
    rng: np.random.Generator,
    *,
    make: Callable[..., Dataset] = from_features,
    test: Labelled | None = None,
    clients: np.ndarray | None = None,
) -> Dataset:
    """Make a data set whose auxiliary part is a fifth of every class or, with clients, a fifth of
    the clients: public samples never share a client with private ones.

    Args:
        x: Samples.
        y: Their labels.
        make: `from_arrays` or `from_features`, with what is particular to the data.
        test: Test samples and labels; None: another fifth.
        clients: Whose each sample is, whole numbers [N]; None: nobody knows.
    """
    fractions = (0.2, 0.2) if test is None else (0.2,)
    by, part = (y, carve) if clients is None else (clients, carve_clients)
    *tested, aux, train = part(by, fractions=fractions, rng=rng)
    return make(
        name=name,
        train=(x[train], y[train]),
        test=(x[tested[0]], y[tested[0]]) if test is None else test,
        aux=(x[aux], y[aux]),
        class_names=class_names,
        train_clients=None if clients is None else clients[train],
        aux_clients=None if clients is None else clients[aux],
    )


def check_side(size: int) -> None:
    """Raise UserError for a side that images cannot be resized to."""
    if size < LEAST_SIDE:
        raise UserError(f"image size must be >= {LEAST_SIDE} (the SSIM window), got {size}.")


def images_to_tensor(images: np.ndarray, *, size: int | None) -> Tensor:
    """Images [N, H, W(, C)], uint8 or float in [0, 1], as float32 [N, C, size, size]."""
    if size is not None:
        check_side(size)
    x = torch.from_numpy(np.ascontiguousarray(images))
    x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)
    if size is not None and len(x) and x.shape[-2:] != (size, size):
        # torch keeps those that are resized along one side beside the result.
        check_memory(8 * x.shape[0] * x.shape[1] * size**2, f"images of size {size}")
        x = torch.nn.functional.interpolate(
            x, size=(size, size), mode="bilinear", align_corners=False, antialias=True
        )
    return x.clamp(0, 1).contiguous()


def classes_of(
    labels: Sequence[np.ndarray], names: tuple[str, ...] | None, *, place: str
) -> tuple[str, ...]:
    """The names of classes, by default the numbers from 0 to the largest label.

    Args:
        labels: Whole numbers [N] of each part.
        names: What they are called, None where nobody says.
        place: The file that has them.

    Raises:
        UserError: For a label below 0 or without a name, and for one so large that most classes
            would have no sample.
    """
    low = min((int(y.min()) for y in labels if y.size), default=0)
    high = max((int(y.max()) for y in labels if y.size), default=0)
    most = sum(map(len, labels)) if names is None else len(names)
    if low < 0 or high >= max(1, most):
        why = "as many as samples" if names is None else "those that class_names names"
        raise UserError(
            f"labels of {place} must lie in 0..{most - 1}, {why}, got {low} to {high}: it has "
            "labels outside its classes."
        )
    return tuple(map(str, range(high + 1))) if names is None else names


def flat(labels: np.ndarray) -> np.ndarray:
    """Labels [N] of [N] or [N, 1], as MedMNIST and tables have them; others as they are."""
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels


def labels_to_tensor(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(flat(np.asarray(labels)).astype(np.int64))


def validation_part(data: Dataset, seed: int) -> Dataset:
    """Return the data set with a fifth of the clients' samples, drawn by the seed, in place of the
    test samples: what settings are chosen on is never what they are reported on."""
    order = torch.from_numpy(numpy_generator(seed, "validation").permutation(len(data.train_x)))
    held, kept = order[: len(order) // 5].sort().values, order[len(order) // 5 :].sort().values
    return replace(
        data,
        train_x=data.train_x[kept],
        train_y=data.train_y[kept],
        train_clients=None if data.train_clients is None else data.train_clients[kept],
        test_x=data.train_x[held],
        test_y=data.train_y[held],
    )


def carve(
    y: np.ndarray, *, fractions: tuple[float, ...], rng: np.random.Generator
) -> list[np.ndarray]:
    """Part indices class by class.

    Args:
        fractions: About the share of every class in each part.

    Returns:
        Disjoint index arrays, one per fraction, and last one of the rest.
    """
    out: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        cuts = np.round(np.cumsum(fractions) * len(members)).astype(int)
        for bucket, piece in zip(out, np.split(members, cuts), strict=True):
            bucket.append(piece)
    return [rng.permutation(np.concatenate(b)) for b in out]


def carve_clients(
    clients: np.ndarray, *, fractions: tuple[float, ...], rng: np.random.Generator
) -> list[np.ndarray]:
    """Part indices by whole clients, so that no client's samples are in two parts.

    Args:
        clients: Whose each sample is, [N].
        fractions: About the share of the clients in each part; at least one is.

    Returns:
        Disjoint index arrays, one per fraction, and last one of the rest.

    Raises:
        UserError: For fewer clients than parts.
    """
    known = rng.permutation(np.unique(clients))
    if len(known) <= len(fractions):
        raise UserError(
            f"{len(known)} client(s) cannot be parted into {len(fractions) + 1}: public and test "
            "samples are of other clients than those for training."
        )
    sizes = [max(1, round(f * len(known))) for f in fractions]
    parts = np.split(known, np.cumsum(sizes))
    return [rng.permutation(np.flatnonzero(np.isin(clients, p))) for p in parts]


def numbered(clients: np.ndarray) -> np.ndarray:
    """Ids of clients, numbers or texts [N], as int64 [N] in the order of the sorted ids."""
    return np.unique(clients, return_inverse=True)[1].astype(np.int64)
