"""Outside attacks: what the server saw of one cell as plain files, and scores of what somebody's
own program rebuilt from them."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.contract.attack import Reconstruction
from bench.errors import UserError
from bench.harness.attack import floors_of, truth_of
from bench.harness.environment import Environment, dataset_of
from bench.harness.store import Store, write_whole
from bench.metrics.intervals import Interval, interval_of
from bench.metrics.named import FLOOR_SUFFIX, range_of
from bench.metrics.score import score
from bench.names import did_you_mean
from bench.protocols.export import earlier_path, load_seen, load_truth, save_seen
from bench.records import Cell, Run, read_json, to_json
from bench.report.choosing import find

ANSWERS = ("images", "labels", "label_counts", "failed")
_ROUNDING = 1e-6
"""By which an image may leave [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files of an export.

    Attributes:
        tensors: What the server saw in the last observed round.
        text: What the tensors are, and public facts.
        public: Samples that the threat grants.
    """

    tensors: Path
    text: Path
    public: Path


@dataclass(frozen=True, kw_only=True)
class OutsideFigure:
    """One metric of an outside attack.

    Attributes:
        interval: Mean over victims.
        floor: Of what needs no leak, None where there is none.
        floor_class_mean: The same given the true label.
        own: Mean of leakbench's own attack.
    """

    interval: Interval
    floor: float | None
    floor_class_mean: float | None
    own: float | None


@dataclass(frozen=True, kw_only=True)
class Scored:
    """An outside attack's answer, scored.

    Attributes:
        cell: What was attacked.
        victims: How many.
        samples: Of each victim.
        failed: Victims without an answer, scored as the mean public image.
        values: Metric -> one figure per victim.
        floors: The same of what needs no leak.
        figures: Metric -> means, with those of leakbench's own attack.
    """

    cell: Cell
    victims: int
    samples: int
    failed: int
    values: Mapping[str, list[float]]
    floors: Mapping[str, list[float]]
    figures: Mapping[str, OutsideFigure]

    def to_dict(self) -> dict[str, Any]:
        figures: dict[str, dict[str, float | None]] = {
            name: {
                **f.interval.to_dict(),
                "floor": f.floor,
                f"floor{FLOOR_SUFFIX}": f.floor_class_mean,
                "own": f.own,
            }
            for name, f in self.figures.items()
        }
        return {
            "cell": self.cell.key,
            "name": self.cell.name,
            "attack": self.cell.label,
            "victims": self.victims,
            "samples": self.samples,
            "failed": self.failed,
            "figures": figures,
            "values": dict(self.values),
            "floors": dict(self.floors),
        }


def export(folder: Path, cell: str, out: Path, env: Environment) -> Exported:
    """Write what the server saw in a cell's observation: OUT.safetensors and OUT.json, each earlier
    round in OUT-earlier-0 and so on, and the public samples that its threat grants:
    OUT-public.safetensors. Never the truth.

    Args:
        folder: The result folder.
        cell: See `bench.report.choosing.find`.
        out: The files' name without an ending; existing ones are replaced.
        env: Where data sets lie.

    Raises:
        UserError: For a cell that is none or has no observation, and for an `out` with a dot in
            its name.
    """
    name = out.name.removesuffix(".safetensors").removesuffix(".json")
    if not name or "." in name:
        raise UserError(f"--out must be a file name without dots, such as seen, got '{out}'.")
    base = out.with_name(name)
    chosen = find(Run.read(folder).cells, cell)
    files, samples = _observation(folder, chosen)
    seen = load_seen(files.with_name(f"{files.name}-seen"))
    dataset = dataset_of(chosen.job.train, env)
    threat = chosen.job.threat
    facts = {
        "cell": chosen.key,
        "dataset": chosen.dataset,
        "class_names": list(dataset.class_names),
        "categorical": [list(pair) for pair in dataset.categorical],
        "checkpoint": chosen.checkpoint,
        "threat": threat.model_dump(),
        "answer": {
            "images": [len(seen.clients), samples, *dataset.shape],
            "labels": [len(seen.clients), samples],
            "label_counts": [len(seen.clients), dataset.classes],
        },
    }
    paths = Exported(
        tensors=base.with_name(f"{name}.safetensors"),
        text=base.with_name(f"{name}.json"),
        public=base.with_name(f"{name}-public.safetensors"),
    )
    aux = slice(None, threat.aux)
    public = {"x": dataset.aux_x[aux].contiguous(), "y": dataset.aux_y[aux].contiguous()}
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base.parent, prefix=".export") as place:
            temporary = Path(place) / "seen"
            save_seen(seen, temporary)
            save_file(public, Path(place) / "public.safetensors")
            text = json.loads(temporary.with_suffix(".json").read_text())
            for number in range(len(seen.earlier)):
                for ending in (".safetensors", ".json"):
                    made, goal = earlier_path(temporary, number), earlier_path(base, number)
                    os.replace(f"{made}{ending}", f"{goal}{ending}")
            os.replace(temporary.with_suffix(".safetensors"), paths.tensors)
            os.replace(Path(place) / "public.safetensors", paths.public)
        write_whole(paths.text, to_json(text | facts))
    except OSError as error:
        raise UserError(f"cannot write {base} ({error.strerror or error}).") from error
    return paths


def score_file(folder: Path, cell: str, reconstruction: Path, env: Environment) -> Scored:
    """Score a reconstruction exactly as leakbench's own attacks are.

    Args:
        folder: The result folder.
        cell: See `bench.report.choosing.find`, or an exported FILE or FILE.json, which holds its
            cell's key.
        reconstruction: A safetensors or npz file with any of images [V, K, ...], labels [V, K] and
            label_counts [V, C], and failed, bool [V], for victims without an answer; K may be left
            out where it is 1.
        env: Where data sets lie.

    Returns:
        Figures per metric, with floors and leakbench's own attack beside them.

    Raises:
        UserError: With one sentence for anything else.
    """
    chosen = find(Run.read(folder).cells, _cell_text(cell))
    files, _ = _observation(folder, chosen)
    dataset = dataset_of(chosen.job.train, env)
    truth = truth_of(chosen.job, dataset, _truth_beside(files))
    answer = _answer(_tensors(reconstruction), truth["x"], truth["y"], dataset.classes)
    scores = score(answer, **truth)
    lowest = floors_of(chosen.job, dataset, truth)
    record = Store(folder).read("attack", chosen.key)
    own = record.values if record and record.status == "done" else {}
    figures = {}
    for name, values in scores.values.items():
        interval = interval_of([np.array(values)], range_of(name))
        assert interval is not None
        figures[name] = OutsideFigure(
            interval=interval,
            floor=_mean(lowest.get(name)),
            floor_class_mean=_mean(lowest.get(f"{name}{FLOOR_SUFFIX}")),
            own=_mean(own.get(name)),
        )
    shown = {k: v for k, v in lowest.items() if k.removesuffix(FLOOR_SUFFIX) in scores.values}
    victims, samples = truth["y"].shape
    return Scored(
        cell=chosen,
        victims=victims,
        samples=samples,
        failed=scores.failed,
        values=scores.values,
        floors=shown,
        figures=figures,
    )


def _truth_beside(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}-truth.safetensors")


def _mean(values: list[float] | None) -> float | None:
    return None if values is None else float(np.mean(values))


def _cell_text(cell: str) -> str:
    """The key in an exported file, or the text itself if it is no such file."""
    path = Path(cell)
    if not path.name:  # "", "." and "/" name no file
        return cell
    base = path.with_suffix("") if path.suffix in (".json", ".safetensors") else path
    exported = base.with_name(f"{base.name}.json")
    if not os.path.isfile(exported):  # unlike Path.is_file, False for names too long to be one
        return cell
    try:
        key = read_json(exported)["cell"]
    except (OSError, UserError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{exported} is no export of leakbench: it names no cell.") from error
    return str(key)


def _observation(folder: Path, cell: Cell) -> tuple[Path, int]:
    """Stem of the files of a cell's observation, and its samples per victim. Raises UserError if
    there is none."""
    key = cell.train_key
    record = Store(folder).read("train", key)
    if record is None or record.status != "done":
        why = "it has not run" if record is None else f"{record.status}: {record.reason}"
        raise UserError(f"cell {cell.name} has no observation: its training is not done ({why}).")
    look = record.observations.get(cell.checkpoint, {}).get(cell.threat)
    if look is None or look.status != "done":
        reason = "its training's record names none" if look is None else look.reason
        raise UserError(f"cell {cell.name} has no observation: {reason}.")
    stem = Store(folder).artifacts(key) / f"{cell.checkpoint}-{cell.threat}"
    path = _truth_beside(stem)
    if not path.is_file():
        raise UserError(
            f"{folder} holds no artifacts of cell {cell.name} ({path.name} is missing)."
        )
    return stem, int(load_truth(path).y.shape[1])


# --- an outside program's answer ------------------------------------------------------------


_UNREADABLE = (
    OSError,
    EOFError,
    TypeError,
    ValueError,
    SafetensorError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What damaged files and foreign ones raise; TypeError: numbers that torch has no type for."""


def _tensors(path: Path) -> dict[str, Tensor]:
    """A file's arrays; code in it is never run. Raises UserError if it cannot be read."""
    if path.suffix not in (".safetensors", ".npz"):
        raise UserError(f"a reconstruction is a .safetensors or .npz file, got {path.name}.")
    try:
        if path.suffix == ".safetensors":
            found: dict[str, Tensor] = load_file(path)
        else:
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise UserError("it holds one array without a name, not those of numpy.savez.")
            with loaded as arrays:
                found = {name: _tensor(name, arrays[name]) for name in arrays.files}
    except _UNREADABLE as error:
        raise UserError(f"cannot read {path}: {error}") from error
    for name in found:
        if name not in ANSWERS:
            raise UserError(did_you_mean("array", name, ANSWERS, where=str(path)))
    if not set(found) - {"failed"}:
        raise UserError(f"{path} holds no images, labels or label_counts.")
    return found


def _tensor(name: str, array: Any) -> Tensor:
    if not isinstance(array, np.ndarray):  # a zip file's other members are bytes
        raise UserError(f"{name} is no array.")
    if array.dtype.kind not in "fiub":
        raise UserError(f"{name} must hold numbers, got {array.dtype}.")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))


def _answer(found: Mapping[str, Tensor], x: Tensor, y: Tensor, classes: int) -> Reconstruction:
    victims, samples = y.shape
    failed = found.get("failed")
    if failed is not None and (failed.dtype != torch.bool or tuple(failed.shape) != (victims,)):
        raise UserError(
            f"failed must be bool [{victims}], got {failed.dtype} {list(failed.shape)}."
        )
    lost = torch.zeros(victims, dtype=torch.bool) if failed is None else failed
    images, labels, counts = (found.get(k) for k in ("images", "labels", "label_counts"))
    if images is not None:
        images = _checked_images(_stacked("images", images, x.shape), lost, is_image=x.ndim == 5)
    if labels is not None:
        labels = _whole("labels", _stacked("labels", labels, y.shape))
        if bool(((labels < 0) | (labels >= classes)).any()):
            raise UserError(
                f"labels must lie in 0..{classes - 1}, got {int(labels.min())} to "
                f"{int(labels.max())}."
            )
    if counts is not None:
        if tuple(counts.shape) != (victims, classes):
            raise UserError(
                f"label_counts must have shape [{victims}, {classes}] (victims, classes), got "
                f"{list(counts.shape)}."
            )
        counts = _whole("label_counts", counts)
        if bool((counts < 0).any()) or bool((counts > samples).any()):
            raise UserError(
                f"label_counts must lie in 0..{samples}, got {int(counts.min())} to "
                f"{int(counts.max())}."
            )
    return Reconstruction(images=images, labels=labels, label_counts=counts, failed=failed)


def _stacked(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """[V, K, ...]; K = 1 may have been left out."""
    if shape[1] == 1 and tuple(value.shape) == (shape[0], *shape[2:]):
        value = value.unsqueeze(1)
    if value.shape != shape:
        raise UserError(
            f"{name} must have shape {list(shape)} (victims, samples each, one sample), got "
            f"{list(value.shape)}."
        )
    return value


def _whole(name: str, value: Tensor) -> Tensor:
    if value.is_floating_point() or value.dtype == torch.bool:
        raise UserError(f"{name} must be whole numbers, got {value.dtype}.")
    return value.long()


def _checked_images(images: Tensor, lost: Tensor, *, is_image: bool) -> Tensor:
    if not images.is_floating_point():
        hint = " of bytes divided by 255" if images.dtype == torch.uint8 else ""
        raise UserError(f"images must be floating-point numbers{hint}, got {images.dtype}.")
    bad = ~torch.isfinite(images).flatten(1).all(dim=1) & ~lost
    if bool(bad.any()):
        which = ", ".join(str(int(i)) for i in bad.nonzero().flatten())
        raise UserError(
            f"images of victim(s) {which} hold NaN or infinities; mark victims without an answer "
            "in a bool array 'failed'."
        )
    kept = images[~lost]
    if is_image and kept.numel():
        low, high = float(kept.min()), float(kept.max())
        if low < -_ROUNDING or high > 1 + _ROUNDING:
            raise UserError(f"images must lie in [0, 1], got values from {low:.4g} to {high:.4g}.")
    return images
