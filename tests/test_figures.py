"""Figures for papers: sized, embedded, the same bytes each time, and true to the rows."""

import hashlib
import itertools
import json
import math
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import bench
from bench.records import FlagCode, Row
from bench.report import figures, leaderboard, paper, plots
from bench.report.marks import with_marks
from bench.report.overview import overview
from bench.results import Results
from tests.conftest import TINY, require
from tests.made_rows import flag, interval, worst
from tests.made_rows import row as board_row
from tests.small_folders import leakbench

ROOT = Path(__file__).parents[1]


def row(name: str, leak: float | None, accuracy: float | None, **changes: Any) -> Row:
    """A row of one attack."""
    case = worst(interval(leak, 0.02)) if leak is not None else None
    own = None if accuracy is None else interval(accuracy, 0.02)
    return board_row(name, **{"worst": case, "accuracy": own, **changes})


ROWS = [
    row("best", 0.3, 0.9, eps_record=3.0, eps_claimed=2.0, unit="client"),
    row("beaten", 0.4, 0.8, eps_claimed=math.inf, unit="record"),
    row("exact", 0.9, 0.95, eps_record=None),
    row("useless", 0.1, 0.1, flags=(flag(FlagCode.AT_CHANCE),)),
    row("silent", None, 0.7),
]


def texts(figure: Any) -> str:
    return "\n".join(t.get_text() for legend in figure.legends for t in legend.get_texts())


def test_a_pareto_figure_shows_every_row_and_its_interval() -> None:
    figure = plots.pareto(ROWS)
    axes = figure.axes[0]
    points = list(axes.containers)
    places = [(c[0].get_xdata()[0], c[0].get_ydata()[0]) for c in points]
    expected = [(0.125, 0.9), (0.25, 0.8), (0.875, 0.95), (0.0, 0.1)]
    assert places == pytest.approx(np.array(expected))
    bars = [b.get_segments()[0] for b in points[0][2]]
    leakage = require(ROWS[0].leak_interval)
    assert bars[0][:, 0].tolist() == pytest.approx([leakage.lo, leakage.hi])
    assert bars[1][:, 1].tolist() == pytest.approx([0.88, 0.92])
    assert points[3][0].get_markerfacecolor() == "white"
    text = texts(figure)
    assert "useless (no use)" in text
    assert "not shown, without a figure: silent" in text


def test_no_two_of_many_settings_look_alike_and_one_defense_has_one_colour() -> None:
    rows = [row(f"d{i % 9}", 0.5, 0.5, settings={"i": i}) for i in range(40)]
    looks = paper.looks(rows, rows)
    assert len(set(looks)) == 40
    assert len({colour for (colour, _), r in zip(looks, rows, strict=True)
                if r.defense == "d0"}) == 1  # fmt: skip


@pytest.mark.parametrize("widest", ["cifar10 vit_small", "fashion_mnist cnn_selective_shield"])
def test_the_heads_of_a_wide_map_do_not_overlap(widest: str) -> None:
    rows = [board_row("secure_aggregation", model_settings={"width": n}) for n in range(14)]
    shown = overview(rows)
    words = [("mnist mlp_spm init",), (f"{widest} final",)] * 7
    heads = (replace(head, words=own) for head, own in zip(shown.heads, words, strict=True))
    drawn = figures.overview_map(replace(shown, heads=tuple(heads)))
    FigureCanvasAgg(drawn).draw()
    boxes = [head.get_window_extent() for head in drawn.axes[0].get_xticklabels()]
    assert len(boxes) == 14
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_the_overviews_map_has_its_texts() -> None:
    shown = overview(with_marks([board_row("a", 0.6), board_row("none", 1.0)]))
    (axes,) = figures.overview_map(shown).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["none", "a"]
    assert [text.get_text() for text in axes.texts] == ["1.0*", "0.5*="]


@pytest.mark.parametrize(("width", "inches"), [("column", 3.3), ("page", 6.9)])
def test_figures_have_a_papers_width_and_8_point_text(width: str, inches: float) -> None:
    figure = plots.pareto(ROWS, width=width)
    assert figure.get_size_inches()[0] == inches
    sizes = {t.get_fontsize() for legend in figure.legends for t in legend.get_texts()}
    sizes |= {t.get_fontsize() for t in figure.axes[0].get_xticklabels()}
    assert sizes == {8.0}
    figure.draw_without_rendering()
    for legend in figure.legends:  # nothing is cut off at the edge
        box = legend.get_window_extent()
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y0 >= -1


def test_figures_leave_matplotlibs_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 30, "text.parse_math": True}):
        figure = plots.pareto(ROWS)
        assert figure.axes[0].xaxis.label.get_fontsize() == 8
    assert dict(matplotlib.rcParams) == before


def test_dollar_signs_in_names_are_text(tmp_path: Path) -> None:
    figure = plots.pareto([row("$\\frac{x$", 0.5, 0.5)])
    assert paper.write(figure, tmp_path / "a", ("png",))[0].is_file()


@pytest.mark.slow
def test_bytes_are_the_same_each_time_and_fonts_are_truetype(tmp_path: Path) -> None:
    paths = paper.write(plots.pareto(ROWS), tmp_path / "one" / "a", ("pdf", "png", "svg"))
    here = [hashlib.sha256(p.read_bytes()).hexdigest() for p in paths]
    code = (
        "import hashlib, sys; from pathlib import Path;"
        "from tests.test_figures import ROWS, plots, paper;"
        "ps = paper.write(plots.pareto(ROWS), Path(sys.argv[1]) / 'a', ('pdf', 'png', 'svg'));"
        "assert 'matplotlib.pyplot' not in sys.modules;"
        "print(*[hashlib.sha256(p.read_bytes()).hexdigest() for p in ps])"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "three")], check=True,
                           cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert ended.stdout.split() == here
    pdf = (tmp_path / "one" / "a.pdf").read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf
    assert re.search(rb"/MediaBox \[ ?0 0 237\.6 ", pdf)  # 3.3 inches of 72 points
    notebook = plots.pareto(ROWS)._repr_png_()
    assert notebook.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p: plots.pareto([row("a", None, 0.5)]), "nothing to draw"),
        (lambda p: plots.pareto(ROWS, width="wide"), "width must be column or page"),
        (lambda p: paper.write(plots.pareto(ROWS), p / "a", ("pgn",)), "Did you mean 'png'?"),
    ],
)
def test_what_cannot_be_drawn_says_why(tmp_path: Path, draw: Any, message: str) -> None:
    (tmp_path / "f").write_text("a file where a folder should be")
    with pytest.raises(ValueError, match=re.escape(message)):
        draw(tmp_path)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    suite = tomllib.loads(TINY)
    suite["attacks"] = [{"name": "dlg", "checkpoints": ["init"]}, {"name": "prior_only"}]
    suite["budget"] = 2
    folder = tmp_path_factory.mktemp("figures") / "run"
    return bench.run(suite, only={"defense": "none"}, out=folder, jobs=0, progress=False)


def test_a_folders_figures_have_telling_names(results: Results) -> None:
    rows = leaderboard.load(results.folder)
    more = [*rows, *(replace(rows[0], settings={"strength": n}) for n in range(2))]
    paths = figures.write_figures(more, results.folder, ("png",))
    # Two settings at the other checkpoint are too few for a plot of their own.
    own = f"fedavg-digits-mlp_spm-{rows[0].checkpoint}-pareto.png"
    assert [p.name for p in paths] == ["fedavg-overview.png", own]
    assert sorted((results.folder / "figures").iterdir()) == sorted(paths)


def test_other_figures_are_written_by_name(results: Results, tmp_path: Path) -> None:
    made = {"pareto": plots.pareto(ROWS), "over_leak": plots.pareto(ROWS)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "of_table", lambda *_: made)
        rows = leaderboard.load(results.folder)[:1]
        for more, written in (((), "pareto"), (["over_leak"], "pareto over_leak")):
            paths = figures.write_figures(rows, tmp_path, ("svg",), more)
            assert [p.stem.rpartition("-")[2] for p in paths] == ["overview", *written.split()]
    with pytest.raises(ValueError, match="Did you mean 'over_leak'"):
        results.write_figures("svg", more=["over_leaks"])


def test_three_settings_have_plots() -> None:
    few = [row("none", 0.9, 0.9), row("b", 0.4, 0.8)]
    more = [*few, row("c", 0.3, 0.7)]
    assert "pareto" not in figures.of_table(few, few)
    assert "pareto" in figures.of_table(more, more)


def test_a_defense_has_one_colour_in_all_plots_of_a_report() -> None:
    one, other = [row("none", 0.9, 0.9), row("z", 0.4, 0.8)], [row("a", 0.4, 0.8)]
    alone = [colour for colour, _ in paper.looks(one, one)]
    among = [colour for colour, _ in paper.looks(one, [*one, *other])]
    assert alone == [paper.GREY, paper.COLOURS[0]]
    assert among == [paper.GREY, paper.COLOURS[1]]


def test_pictures_show_the_records_images_in_the_runs_order(results: Results) -> None:
    figure = results.pictures(attack="dlg", checkpoint="init", defense="none", victims=2)
    strips = [axes.images[0].get_array() for axes in figure.axes]
    shown = [image[:, 1:-1] for strip in strips for image in np.split(strip, 2, axis=1)]
    cells = json.loads((results.folder / "run.json").read_text())["trainings"][0]["cells"]
    key = next(c["key"] for c in cells if c["attack"] == "dlg")
    from safetensors.torch import load_file

    tensors = load_file(results.folder / "artifacts" / key / "reconstruction.safetensors")
    expected = [*tensors["truth"].flatten(0, 1), *tensors["images"].flatten(0, 1)]
    assert len(shown) == 4
    assert all((s == e[0].numpy()).all() for s, e in zip(shown, expected, strict=True))
    record = json.loads((results.folder / "records" / "attack" / f"{key}.json").read_text())
    under = [t.get_text() for axes in figure.axes for t in axes.get_xticklabels()]
    assert under == [f"{v:.2f}" for v in record["values"]["ssim"]]


def test_the_command_writes_the_figures_of_a_folder(results: Results, tmp_path: Path) -> None:
    code, text = leakbench(
        "report", results.folder, "--format", "md", "--figures", "png", "--out", tmp_path
    )
    assert code == 0, text
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["fedavg-overview.png"]


def test_too_many_pictures_ask_for_a_filter(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.report.grids.MOST_LINES", 2)
    with pytest.raises(ValueError, match="but a page holds 2: give dataset, checkpoint"):
        results.pictures()
