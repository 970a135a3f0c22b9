"""Data sets by Hugging Face's library `datasets`: of its hub, or local ones that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.arrays import check_memory
from bench.data.dataset import (
    Dataset,
    carve,
    carve_clients,
    check_side,
    classes_of,
    flat,
    from_arrays,
    from_features,
    numbered,
    split,
)
from bench.data.files import eight_bits
from bench.errors import UserError
from bench.extensions import in_one_line
from bench.names import did_you_mean
from bench.seeding import numpy_generator

_READERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


def hf(
    *,
    path: Path,
    seed: int,
    data_dir: Path | None = None,
    download: bool = False,
    column: str | list[str] | None = None,
    label: str = "label",
    client_column: str | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    size: int | None = None,
    gray: bool = False,
) -> Dataset:
    """A data set by Hugging Face's `datasets`: `hf:OWNER/NAME`, or `hf:PATH` of a folder or file.

    A fifth of the training split is auxiliary, and without a split `test` another fifth is test: of
    every class, or, with `client_column`, of the clients. It needs `leakbench[hf]`. What is not on
    this machine is fetched with --download alone, into `DATA_DIR/hf`.

    Args:
        path: Name on the hub; or a folder, as `save_to_disk` writes it or of files that the library
            knows, or a file (.parquet, .csv, .json, .jsonl).
        column: Of the images, or of lists of floats (records [F] or signals [channels, length]), or
            several of numbers, which make a table; None: the only column of images.
        label: Column of the labels, whole numbers or texts.
        client_column: Column that says whose a sample is, numbers or texts.
        train_split: Name of the split for training.
        test_split: Of the one for tests; None: `test` if there is one.
        config: Name of the data set's configuration, where it has several.
        revision: Commit or tag on the hub, so that later changes of it change nothing.
        size: Side to which images are cropped in their centre and resized; None: as they are.
        gray: Whether images are made gray.

    Raises:
        UserError: If the library or the data is not there, or a split or column is not as named.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "hf:NAME needs the library datasets: install leakbench with its extra, leakbench[hf]."
        ) from error
    name = f"hf:{path}"
    cache = None if data_dir is None or path.exists() else str(data_dir / "hf")
    with _network(datasets, allowed=download):
        try:
            splits = _load(datasets, path, config, revision, cache)
        except UserError:
            raise
        except Exception as error:  # the library raises what its own and other readers do
            hint = "" if download or path.exists() else " Add --download to fetch it."
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"cannot load {name}: {reason}{hint}") from error
    if test_split is None and "test" in splits:
        test_split = "test"
    names = [train_split] if test_split is None else [train_split, test_split]
    _check_known("split", name, names, list(splits))
    tables = [splits[s] for s in names]
    chosen = column or _only_images(tables[0], name)
    _check_known("column", name, filter(None, [client_column]), tables[0].column_names)
    for table in tables:
        inputs = [chosen] if isinstance(chosen, str) else chosen
        _check_known("column", name, [*inputs, label], table.column_names)
    x = [_samples(t, chosen, f"column {chosen} of {name}", size=size, gray=gray) for t in tables]
    y, class_names = _labels(tables, label, name)
    owners = None if client_column is None else _clients(tables[0], client_column, name)
    rng = numpy_generator(seed, "split", "hf")
    if len(tables) == 1:
        if owners is None:
            test, train = carve(y[0], fractions=(0.2,), rng=rng)
        else:
            test, train = carve_clients(owners, fractions=(0.2,), rng=rng)
            owners = owners[train]
        x, y = [x[0][train], x[0][test]], [y[0][train], y[0][test]]
    make: Callable[..., Dataset] = from_arrays if x[0].dtype == np.uint8 else from_features
    return split(name, x[0], y[0], class_names, rng, make=make, test=(x[1], y[1]), clients=owners)


@contextmanager
def _network(datasets: Any, *, allowed: bool) -> Iterator[None]:
    """Set whether Hugging Face's libraries may use the network inside, and show bars of progress:
    they read their environment's variables at import, which may have been long ago."""
    if allowed:
        yield
        return
    from huggingface_hub import constants

    places: tuple[Any, ...] = (constants, datasets.config)
    before = [place.HF_HUB_OFFLINE for place in places]
    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
        if bars:
            datasets.enable_progress_bars()


def _load(
    datasets: Any, path: Path, config: str | None, revision: str | None, cache: str | None
) -> dict[str, Any]:
    """Load the tables by the name of their split."""
    if path.is_dir() and any((path / n).is_file() for n in ("dataset_dict.json", "state.json")):
        splits = datasets.load_from_disk(str(path))
        return {"train": splits} if isinstance(splits, datasets.Dataset) else dict(splits)
    if path.is_file():
        if path.suffix not in _READERS:
            raise UserError(
                f"hf:{path} must be a folder or a file {', '.join(_READERS)}, or a name on the hub."
            )
        return dict(datasets.load_dataset(_READERS[path.suffix], data_files=str(path)))
    place = str(path) if path.exists() else path.as_posix()
    return dict(datasets.load_dataset(place, config, revision=revision, cache_dir=cache))


def _check_known(what: str, name: str, items: Iterable[str], known: Sequence[str]) -> None:
    for item in items:
        if item not in known:
            raise UserError(did_you_mean(f"{what} of {name}", item, known))


def _only_images(table: Any, name: str) -> str:
    images = [c for c, feature in table.features.items() if type(feature).__name__ == "Image"]
    if len(images) != 1:
        raise UserError(
            f"{name} has {len(images)} columns of images; name the samples' by dataset_settings = "
            f"{{ column = ... }}, one or several of {', '.join(table.column_names)}."
        )
    return str(images[0])


def _samples(
    table: Any, column: str | list[str], what: str, *, size: int | None, gray: bool
) -> np.ndarray:
    """Images uint8 [N, H, W(, 3)], or floats [N, F] or [N, channels, length]."""
    if isinstance(column, list):
        columns = [_array(table, c, what) for c in column]
        if any(c.ndim != 1 or c.dtype.kind not in "fiub" for c in columns):
            raise UserError(f"{what} must each hold one number per row.")
        return np.stack(columns, axis=1).astype(np.float64)
    if type(table.features[column]).__name__ == "Image":
        return _images(table[column], what, size=size, gray=gray)
    x = _array(table, column, what)
    if x.dtype.kind not in "fiu" or x.ndim not in (2, 3):
        raise UserError(
            f"{what} must hold images, or lists of numbers [F] or [channels, length] of one "
            f"length, got {x.dtype} {list(x.shape)}."
        )
    return x.astype(np.float64)


def _array(table: Any, column: str, what: str) -> np.ndarray:
    try:
        return np.array(table[column][:])
    except ValueError as error:
        raise UserError(f"{what} must hold lists of one length ({error}).") from error


def _images(images: Any, what: str, *, size: int | None, gray: bool) -> np.ndarray:
    from PIL import ImageOps

    if size is not None:
        check_side(size)
        check_memory(len(images) * size**2 * 3, f"images of size {size}")
    pixels = []
    for number in range(len(images)):
        try:
            image = images[number]
            plain = None if image is None else eight_bits(image)
        except Exception as error:  # a damaged file makes Pillow's readers raise whatever they hit
            reason = error if isinstance(error, UserError) else in_one_line(error)
            raise UserError(f"image {number} of {what} cannot be read ({reason}).") from error
        if plain is None:
            raise UserError(f"image {number} of {what} is missing.")
        copy = plain.convert("L" if gray or plain.mode in ("1", "L") else "RGB")
        pixels.append(np.asarray(copy if size is None else ImageOps.fit(copy, (size, size))))
    shapes = {x.shape for x in pixels}
    if len(shapes) > 1:
        raise UserError(
            f"{what} has images of {len(shapes)} shapes, such as "
            f"{' and '.join(str(list(s)) for s in sorted(shapes)[:2])}; give dataset_settings "
            "size = ... (and gray = true for gray ones among coloured ones)."
        )
    return np.stack(pixels)


def _labels(
    tables: Sequence[Any], column: str, name: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return labels [N] of each table, and the names of the classes."""
    each = [flat(_array(t, column, f"column {column} of {name}")) for t in tables]
    if all(y.dtype.kind == "U" for y in each):
        texts = np.unique(np.concatenate(each))
        return [np.searchsorted(texts, y) for y in each], tuple(map(str, texts))
    if any(y.ndim != 1 or y.dtype.kind not in "iub" for y in each):
        raise UserError(
            f"column {column} of {name} must hold whole numbers or texts, the labels, got "
            f"{each[0].dtype} {list(each[0].shape)}."
        )
    names = getattr(tables[0].features[column], "names", None)
    class_names = None if names is None else tuple(map(str, names))
    classes = classes_of(each, class_names, place=f"column {column} of {name}")
    return [y.astype(np.int64) for y in each], classes


def _clients(table: Any, column: str, name: str) -> np.ndarray:
    ids = _array(table, column, f"column {column} of {name}")
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise UserError(
            f"column {column} of {name} must hold whole numbers or texts, whose each sample is, "
            f"got {ids.dtype} {list(ids.shape)}."
        )
    return numbered(ids)
