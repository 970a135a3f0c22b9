"""The page's pictures of what attacks rebuilt, and the report command."""

import base64
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from skimage.metrics import structural_similarity

from bench.cli.reports import publish
from bench.records import (
    Run,
)
from bench.report import (
    leaderboard,
    pictures,
)
from tests.conftest import TINY, changed, run_suite
from tests.made_rows import (
    block,
    interval,
    page,
    row,
)

# --- pictures ---------------------------------------------------------------------------------


TWO_SETTINGS = changed(TINY, {"[0.5, 2.0]": "2.0"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with images of one and of three samples per victim."""
    base = tmp_path_factory.mktemp("report")
    text = TWO_SETTINGS.replace('[[attacks]]\nname = "prior_only"',
                        '[[attacks]]\nname = "prior_only"\nthreat = "three"').replace(
        "victims = 2\n", 'victims = 3\n\n[[threats]]\nname = "three"\nvictims = 3\nbatch = 3\n'
    )  # fmt: skip
    text = text.replace('name = "ilrg"', 'name = "analytic"\nthreat = "server"')
    path = base / "tiny.toml"
    path.write_text(text)
    return finished(path, base / "out")


def finished(suite: Path, out: Path) -> Path:
    return run_suite(suite, out, only={"checkpoint": "init"})[0].folder


def decoded(sprite: str) -> np.ndarray:
    data = base64.b64decode(sprite.removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)))


def cell_of(album: Any, attack_: str, place: int = 0) -> Any:
    return [c for c in album["cells"] if c["attack"].startswith(attack_)][place]


def reconstruction(folder: Path, cell: Any) -> dict[str, torch.Tensor]:
    (named,) = [r for r in leaderboard.rows(folder) if leaderboard.row_id(r) == cell["row"]]
    key = next(
        c.key
        for c in Run.read(folder).cells
        if (c.setting, c.label) == (named.setting, cell["attack"])
    )
    return load_file(folder / "artifacts" / key / "reconstruction.safetensors")


def test_pictures_show_truth_and_reconstruction_of_the_first_victims(folder: Path) -> None:
    album = pictures.collect(folder)
    assert (album["victims"], album["without"], album["unreadable"]) == (8, 0, [])
    assert len(album["cells"]) == 2 * 2
    cell = cell_of(album, "analytic", 1)
    tensors = reconstruction(folder, cell)
    for name in ("truth", "images"):
        strip = decoded(album["sprites"][cell[name]])
        assert strip.shape == (16, 3 * 16)
        expected = (tensors[name][:, 0, 0] * 255).round().numpy()
        assert (np.hstack(list(expected)) == strip).all()
    text = page(*leaderboard.rows(folder), album=album)
    own = block(text, "album")
    assert sorted(c["row"] for c in own["cells"]) == [0, 0, 1, 1]
    assert "The first 8 victims in the run&#39;s order, of the first seed" in text
    assert len(album["sprites"]) < 2 * len(album["cells"])  # one truth for all settings


def test_scores_under_pictures_are_the_records_and_scikit_images(folder: Path) -> None:
    album = pictures.collect(folder)
    single, batch = cell_of(album, "analytic"), cell_of(album, "prior_only")
    assert (single["samples"], batch["samples"]) == (1, 3)
    assert (len(single["scores"]), len(batch["scores"])) == (3, 9)
    for cell in (single, batch):
        tensors = reconstruction(folder, cell)
        pairs = zip(tensors["images"].flatten(0, 1), tensors["truth"].flatten(0, 1), strict=True)
        expected = [
            structural_similarity(
                a[0].double().numpy(), b[0].double().numpy(), data_range=1.0,
                gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
            )
            for a, b in pairs
        ]  # fmt: skip
        assert cell["scores"] == pytest.approx(expected, abs=6e-4)


def test_a_budget_leaves_every_attack_the_same_fewer_victims_then_the_first_attacks(
    folder: Path,
) -> None:
    whole = sum(len(s) for s in pictures.collect(folder)["sprites"])
    fewer = pictures.collect(folder, budget=int(0.75 * whole))
    assert fewer["victims"] < 3
    assert {len(c["scores"]) // c["samples"] for c in fewer["cells"]} == {fewer["victims"]}
    assert len(fewer["cells"]) == 4
    least = pictures.collect(folder, budget=900)
    assert (least["victims"], len(least["cells"]) + least["without"]) == (1, 4)
    assert 0 < least["without"] < 4
    text = page(*leaderboard.rows(folder), album=least)
    assert f"{least['without']} attack cells have no pictures here" in text
    assert "The first victim in the run&#39;s order" in text


def test_large_and_coloured_pictures_are_shrunk_and_keep_their_colours() -> None:
    red = np.zeros((2, 1, 3, 192, 96), dtype=np.float32)
    red[:, :, 0] = 1.0
    strip = decoded(pictures._sprite(red))
    assert strip.shape == (96, 2 * 48, 3)
    assert (strip == [255, 0, 0]).all()


def test_damaged_reconstructions_are_named_and_the_others_shown(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    first, second = sorted(copy.rglob("reconstruction.safetensors"))[:2]
    first.write_bytes(b"no tensors")
    save_file({"images": torch.zeros(2, 1, 1, 16, 16), "truth": torch.zeros(2, 1, 1, 8, 8)}, second)
    album = pictures.collect(copy)
    assert len(album["cells"]) == 2
    assert {u.split("/")[0] for u in album["unreadable"]} == {first.parent.name, second.parent.name}
    assert "Not readable, so not shown" in page(*leaderboard.rows(copy), album=album)


def test_records_are_shown_as_numbers(tmp_path: Path) -> None:
    suite = tmp_path / "records.toml"
    suite.write_text(
        TWO_SETTINGS.replace('"digits"', '"breast_cancer"').replace('"mlp_spm"', '"logistic"')
        .replace('"ilrg"', '"analytic"')
    )  # fmt: skip
    out = finished(suite, tmp_path / "out")
    album = pictures.collect(out)
    assert album["cells"] == []
    record = next(r for r in album["records"] if r["attack"] == "analytic")
    tensors = reconstruction(out, record)
    assert record["features"] == tensors["truth"].shape[-1] == 30
    first = tensors["truth"][:4, 0, :10].numpy()
    assert np.array(record["truth"]) == pytest.approx(first, rel=6e-3)
    own = block(page(*leaderboard.rows(out), album=album), "album")
    assert len(own["records"]) == 2 * 2


def test_a_folder_without_artifacts_says_so(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "artifacts")
    publish(copy, ("html",))
    assert "this result folder holds no reconstructions" in (copy / "report.html").read_text()


# --- the command ------------------------------------------------------------------------------


# --- the wall of strips -----------------------------------------------------------------------


def _album(rows: list[Any], attacks: list[str], truths: list[int]) -> Any:
    sprites = [f"data:image/png;base64,{c}" for c in "ABCDEF"]
    cells = [
        {"row": leaderboard.row_id(r), "attack": a, "samples": 1, "metric": "ssim",
         "scores": [0.5, 0.6], "truth": t, "images": 2 + i}
        for i, (r, a, t) in enumerate(zip(rows, attacks, truths, strict=True))
    ]  # fmt: skip
    return pictures.none("") | {"victims": 2, "sprites": sprites, "cells": cells}


def test_a_wall_has_the_truth_once_and_each_defenses_least_leaking_setting() -> None:
    rows = [
        row("a", 0.3, checkpoint="final", settings={"x": 1}),
        row("a", 0.6, checkpoint="final", settings={"x": 2}),
        row("none", 0.95, checkpoint="final"),
    ]
    ((_, strips),) = pictures.walls(rows, _album(rows, ["dlg"] * 3, [0, 0, 0]))
    assert [s.name for s in strips] == ["truth", "none", "a"]
    assert [s.source[-1] for s in strips] == ["A", "E", "C"]
    assert [s.count for s in strips] == [2, 2, 2]
    assert strips[2].leak == rows[0].leak


def test_a_defense_is_on_the_wall_whatever_accuracy_it_loses() -> None:
    rows = [
        row("a", 0.3, checkpoint="final", accuracy=interval(0.3)),
        row("none", 0.95, checkpoint="final", accuracy=interval(0.9)),
    ]
    ((_, strips),) = pictures.walls(rows, _album(rows, ["dlg"] * 2, [0, 0]))
    assert [s.name for s in strips] == ["truth", "none", "a"]


def test_strips_of_other_victims_and_of_attacks_without_pictures_are_left_out() -> None:
    rows = [row(d, 0.3 + i / 10, checkpoint="final") for i, d in enumerate("abc")]
    ((_, strips),) = pictures.walls(rows, _album(rows, ["dlg", "idlg", "dlg"], [0, 0, 1]))
    assert [s.name for s in strips] == ["truth", "a"]
    assert pictures.walls(rows, pictures.none("none at all")) == []
