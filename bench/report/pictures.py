"""Pictures of what attacks rebuilt, small enough to stand in one page.

The victims are the first in the run's order, of the first seed: nobody chose them, and no score
did. Every attack shows the same number of them.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import UserError
from bench.harness.store import Store
from bench.records import RECONSTRUCTION, AttackOutcome, AttackRecord, Row, Run, check_kept
from bench.report.leaderboard import cells_by_row, row_id
from bench.report.overview import Overview, overview

BUDGET = 8_000_000
"""Characters of all pictures together, as they stand in the page."""
VICTIMS = (8, 6, 4, 3, 2, 1)
"""Numbers of victims per attack to try, the first that fits is taken."""
SAMPLES = 8
"""Most samples of one victim's batch that are shown."""
LARGEST_SIDE = 96
"""Larger images are shrunk to this; scores are of the originals."""
FEATURES, RECORDS = 10, 4
"""Features of a tabular record, and victims, that are shown as numbers."""
_PNG_URI = "data:image/png;base64,"
Pictures = dict[str, Any]


_Source = tuple[str, str, Path, AttackRecord]
"""An attack cell with a reconstruction on disk: its row, its attack, the file and the record."""


def none(why: str) -> Pictures:
    """Return no pictures, with the reason that the page gives."""
    lists: Pictures = {name: [] for name in ("unreadable", "sprites", "cells", "records")}
    return {"victims": 0, "why": why, "without": 0, **lists}


def collect(folder: Path, *, budget: int = BUDGET) -> Pictures:
    """Sprites and scores of every attack with a reconstruction, for as many victims each as the
    budget (characters) allows; where one victim each is too much, of the first attacks alone.

    sprites: PNGs as data URIs. cells: images, {row, attack, truth, images (places in sprites;
    victims side by side, `samples` each), samples, metric, scores}. records: the same of tabular
    records with their numbers. without: attacks left out for want of space. unreadable: files
    that are damaged.
    """
    if not (folder / "artifacts").is_dir():
        return none("this result folder holds no reconstructions; its command makes them")
    sources = list(_sources(folder))
    single = _gather(sources, victims=1, budget=budget)
    size = sum(map(len, single["sprites"]))
    victims = next((v for v in VICTIMS if v * size <= budget), 1)
    return single if victims == 1 else _gather(sources, victims=victims, budget=budget)


def _sources(folder: Path) -> Iterator[_Source]:
    """Yield attack cells with a reconstruction, the first seed of each row, in the run's order."""
    run = Run.read(folder)
    store = Store(folder, run)
    known = set()
    for row, cell in cells_by_row(run):
        path = store.artifacts(cell.key) / RECONSTRUCTION
        if (row, cell.label) in known or not path.is_file():
            continue
        record = store.read("attack", cell.key)
        if isinstance(record, AttackRecord):
            known.add((row, cell.label))
            yield row, cell.label, path, record


def _gather(sources: Sequence[_Source], *, victims: int, budget: int) -> Pictures:
    contents = none("") | {"victims": victims}
    places: dict[str, int] = {}
    for row, attack, path, record in sources:
        if sum(map(len, places)) > budget:
            contents["without"] += 1
            continue
        try:
            images, truth = read_pair(path, record, victims, SAMPLES)
        except ValueError as error:
            contents["unreadable"].append(str(error))
            continue
        cell = {"row": row, "attack": attack, "samples": images.shape[1]}
        if images.ndim != 5:
            contents["records"].append(cell | _record(images, truth))
            continue
        cell |= _scores(record, images, truth)
        for name, pixels in (("truth", truth), ("images", images)):
            cell[name] = places.setdefault(_sprite(pixels), len(places))
        contents["cells"].append(cell)
    contents["sprites"] = list(places)
    return contents


def read_pair(
    path: Path, record: AttackOutcome | None, victims: int, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Read the reconstructions and the truth [V, K, ...], float32, of some victims and samples.

    Args:
        path: Of the file.
        record: Of the attack that left it; None leaves out the check of its hash.
        victims: Most victims.
        samples: Most samples of each.

    Raises:
        UserError: If the file is damaged or was changed.
    """
    from safetensors import SafetensorError, safe_open

    name = f"{path.parent.name}/{path.name}"
    try:
        if record is not None:
            check_kept(path.parent, record, path.name)
        with safe_open(path, framework="np") as file:
            images, truth = (
                part[: min(victims, v), : min(samples, k)].astype(np.float32)
                for part in map(file.get_slice, ("images", "truth"))
                for v, k, *_ in [part.get_shape()]
            )
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(f"{name}: {error}") from error
    if images.shape != truth.shape or images.ndim < 3 or not np.isfinite(images).all():
        raise UserError(f"{name}: images and truth do not fit together")
    return images, truth


def _scores(record: AttackRecord, images: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Return the score of each sample shown: SSIM, or MSE of images below its window."""
    import torch

    from bench.toolkit.images import WINDOW, mse, ssim

    metric = "ssim" if min(images.shape[-2:]) >= WINDOW else "mse"
    recorded = record.values.get(metric)
    if recorded is not None and images.shape[1] == record.samples == 1:
        scores = recorded[: len(images)]
    else:
        a, b = torch.from_numpy(images), torch.from_numpy(truth)
        each = ssim(a, b) if metric == "ssim" else mse(a, b, sample_dims=3)
        scores = each.flatten().tolist()
    digits = 3 if metric == "ssim" else 6
    return {"metric": metric, "scores": [round(float(score), digits) for score in scores]}


def _sprite(images: np.ndarray) -> str:
    """Return images [V, K, C, H, W] in [0, 1], side by side in one PNG, as a data URI."""
    from PIL import Image

    channels, height, width = images.shape[-3:]
    flat = images.reshape(-1, channels, height, width)
    if channels not in (1, 3):  # no colours that a reader would know: their mean
        flat = flat.mean(axis=1, keepdims=True)
    strip = np.concatenate(list(flat), axis=-1).transpose(1, 2, 0)
    pixels = (strip.clip(0, 1) * 255).round().astype(np.uint8)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    shrink = LARGEST_SIDE / max(height, width)
    if shrink < 1:
        size = (len(flat) * round(width * shrink), round(height * shrink))
        picture = picture.resize(size, Image.Resampling.BOX)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return _PNG_URI + base64.b64encode(buffer.getvalue()).decode()


def _record(images: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Return the first features of the first samples, as numbers; scores are MSEs over all
    features."""

    def first(x: np.ndarray) -> list[list[float]]:
        flat = x.reshape(x.shape[0] * x.shape[1], -1)[:RECORDS, :FEATURES]
        return [[float(f"{v:.3g}") for v in sample] for sample in flat]

    squared = np.square(images.astype(np.float64) - truth)
    errors = squared.reshape(images.shape[0] * images.shape[1], -1).mean(axis=1)
    return {
        "features": int(np.prod(images.shape[2:])),
        "images": first(images),
        "truth": first(truth),
        "scores": [float(f"{e:.3g}") for e in errors[:RECORDS]],
    }


# --- in one look ------------------------------------------------------------------------------

MOST_WALLS = 6
"""Tables that are shown: a page that opens with more is no look."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Pictures side by side. count: how many. attack: Who rebuilt them, "" for the truth."""

    name: str
    source: str
    count: int
    attack: str = ""
    leak: float | None = None


def walls(rows: Sequence[Row], pictures: Pictures) -> list[tuple[str, list[Strip]]]:
    """Return the title and strips, the truth first, of each table at its last round with pictures:
    each defense's least leaky setting, reconstructed by the attack that ranks it. Strips of victims
    other than the first strip's are left out."""
    final = [r for r in rows if r.checkpoint == "final"] or list(rows)
    summary = overview(final, 1.0)
    made = ((h.title, _strips(summary, i, pictures)) for i, h in enumerate(summary.heads))
    return [(title, strips) for title, strips in made if strips][:MOST_WALLS]


def _strips(summary: Overview, place: int, pictures: Pictures) -> list[Strip]:
    cells = {(c["row"], c["attack"]): c for c in pictures["cells"]}
    sprites, truth = pictures["sprites"], None
    strips: list[Strip] = []
    for line in summary.lines:
        row = line.verdicts[place].row
        case = None if row is None else row.ranking
        cell = None if row is None or case is None else cells.get((row_id(row), case.attack))
        if cell is None or row is None or case is None or truth not in (None, cell["truth"]):
            continue
        count = len(cell["scores"])
        if truth is None:
            truth = cell["truth"]
            strips.append(Strip(name="truth", source=sprites[truth], count=count))
        source = sprites[cell["images"]]
        strips.append(
            Strip(name=line.defense, source=source, count=count, attack=case.attack, leak=row.leak)
        )
    return strips
