"""Pictures of what attacks rebuilt, small enough to stand in one page.

The victims are the first in the run's order, of the first seed: nobody chose them, and no score
did. Every attack shows the same number of them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.errors import UserError
from bench.harness.store import Store
from bench.records import (
    RECONSTRUCTION,
    AttackRecord,
    Run,
    check_kept,
)
from bench.report.leaderboard import cells_by_row

if TYPE_CHECKING:
    from PIL.Image import Image

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


_HOPELESS = 4
"""Numbers of victims are not tried whose pictures would be so many times the budget, as judged by
the attempt before: every attempt makes pictures up to the budget."""


class TooMuch(Exception):
    """The pictures do not fit the budget. expected: characters per victim that they would have."""

    def __init__(self, expected: float) -> None:
        super().__init__(expected)
        self.expected = expected


@dataclass(frozen=True, kw_only=True)
class _Rebuilt:
    """One attack cell with a reconstruction on disk."""

    row: str
    attack: str
    path: Path
    record: AttackRecord


def none(why: str) -> Pictures:
    """Return no pictures, with the reason that the page gives."""
    return {
        "victims": 0,
        "why": why,
        "without": 0,
        "unreadable": [],
        "sprites": [],
        "cells": [],
        "records": [],
    }


def collect(folder: Path, *, budget: int = BUDGET) -> Pictures:
    """Sprites and scores of every attack with a reconstruction, for as many victims each as the
    budget (characters) allows; where one victim each is too much, of the first attacks alone.

    sprites: PNGs as data URIs. cells: images, {row, attack, truth, images (places in sprites;
    victims side by side, `samples` each), samples, metric, scores}. records: the same of tabular
    records with their numbers. without: attacks left out for want of space. unreadable: files
    that are damaged.
    """
    if not (folder / "artifacts").is_dir():
        return none("this result folder holds no reconstructions")
    sources = list(_sources(folder))
    expected = 0.0
    for victims in VICTIMS[:-1]:
        if expected * victims > _HOPELESS * budget:
            continue
        try:
            return _gather(sources, victims=victims, budget=budget, stop_early=True)
        except TooMuch as error:
            expected = error.expected
    return _gather(sources, victims=VICTIMS[-1], budget=budget, stop_early=False)


def _sources(folder: Path) -> Iterator[_Rebuilt]:
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
            yield _Rebuilt(row=row, attack=cell.label, path=path, record=record)


def _gather(sources: list[_Rebuilt], *, victims: int, budget: int, stop_early: bool) -> Pictures:
    contents = none("") | {"victims": victims}
    places: dict[str, int] = {}
    spent = 0

    def place(sprite: str) -> int:
        nonlocal spent
        if sprite not in places:
            places[sprite] = len(places)
            spent += len(sprite)
        return places[sprite]

    for number, source in enumerate(sources, start=1):
        if spent > budget and not stop_early:
            contents["without"] += 1
            continue
        try:
            images, truth = _read(source, victims)
        except ValueError as error:
            contents["unreadable"].append(str(error))
            continue
        if images.ndim != 5:
            contents["records"].append(_record(source, images, truth))
            continue
        cell = _scores(source, images, truth)
        cell |= {"truth": place(_sprite(truth)), "images": place(_sprite(images))}
        contents["cells"].append(cell)
        if spent > budget and stop_early:
            raise TooMuch(spent * len(sources) / number / victims)
    contents["sprites"] = list(places)
    return contents


def _read(source: _Rebuilt, victims: int) -> tuple[np.ndarray, np.ndarray]:
    """Read images, truth [V, K, ...] of the first victims and samples, float32; ValueError if the
    file is damaged."""
    from safetensors import SafetensorError, safe_open

    path = source.path
    try:
        check_kept(path.parent, source.record, path.name)
        with safe_open(path, framework="np") as file:
            images, truth = (_first(file.get_slice(n), victims) for n in ("images", "truth"))
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(f"{path.parent.name}/{path.name}: {error}") from error
    if images.shape != truth.shape or images.ndim < 3 or not np.isfinite(images).all():
        raise UserError(f"{path.parent.name}/{path.name}: images and truth do not fit together")
    return images, truth


def _first(stored: Any, victims: int) -> np.ndarray:
    """Read the first victims and samples of a stored tensor [V, K, ...], float32."""
    v, k, *_ = stored.get_shape()
    values: np.ndarray = stored[: min(v, victims), : min(k, SAMPLES)].astype(np.float32)
    return values


def _scores(source: _Rebuilt, images: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Return the score of each sample shown: SSIM, or MSE of images below its window."""
    import torch

    from bench.toolkit.images import WINDOW, mse, ssim

    metric = "ssim" if min(images.shape[-2:]) >= WINDOW else "mse"
    recorded = source.record.values.get(metric)
    if recorded is not None and images.shape[1] == source.record.samples == 1:
        scores = recorded[: len(images)]
    else:
        a, b = torch.from_numpy(images), torch.from_numpy(truth)
        each = ssim(a, b) if metric == "ssim" else mse(a, b, sample_dims=3)
        scores = each.flatten().tolist()
    return {
        "row": source.row,
        "attack": source.attack,
        "samples": images.shape[1],
        "metric": metric,
        "scores": [round(float(s), 3 if metric == "ssim" else 6) for s in scores],
    }


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
    return _encode_png(picture)


def _encode_png(picture: Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return _PNG_URI + base64.b64encode(buffer.getvalue()).decode()


def _record(source: _Rebuilt, images: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Return the first features of the first samples, as numbers; scores are MSEs over all
    features."""

    def first(x: np.ndarray) -> list[list[float]]:
        flat = x.reshape(x.shape[0] * x.shape[1], -1)[:RECORDS, :FEATURES]
        return [[float(f"{v:.3g}") for v in sample] for sample in flat]

    squared = np.square(images.astype(np.float64) - truth)
    errors = squared.reshape(images.shape[0] * images.shape[1], -1).mean(axis=1)
    return {
        "row": source.row,
        "attack": source.attack,
        "samples": images.shape[1],
        "features": int(np.prod(images.shape[2:])),
        "images": first(images),
        "truth": first(truth),
        "scores": [float(f"{e:.3g}") for e in errors[:RECORDS]],
    }
