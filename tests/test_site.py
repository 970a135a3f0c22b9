"""The static site of several result folders."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path

import pytest

from bench.errors import UserError
from bench.records import read_json
from bench.records.submitted import digest_of, verification_path
from bench.registry import Registry, discover
from bench.report import leaderboard, site
from bench.report.files import Files
from bench.report.subjects import subjects
from tests.small_folders import leakbench

RESULTS = Path(__file__).parents[1] / "results"
load = cache(leaderboard.load)


@cache
def _text(path: Path) -> str:
    return path.read_text()


def test_every_result_folder_has_its_report_and_files(committed_site: Path) -> None:
    source = committed_site.with_name("results")
    names = {p.parent.relative_to(source).as_posix() for p in source.rglob("run.json.gz")}
    front = (committed_site / "index.html").read_text()
    for name in names:
        for file in ("report.html", *site.FILES):
            assert f'href="{name}/{file}"' in front
            assert (committed_site / name / file).stat().st_size > 0


def test_the_leaderboard_opens_the_site_and_the_widest_run_comes_first(
    committed_site: Path,
) -> None:
    front = (committed_site / "index.html").read_text()
    assert front.index('id="board"') < front.index('class="subjects"') < front.index('id="run-1"')
    count = sum(len(load(RESULTS / name)) for name in ("quick", "as_trained_data"))
    assert front.count("<tr data-i=") == count
    shown = [int(n) for n in re.findall(r'<span class="dim">(\d+) rows', front)]
    assert shown == sorted(shown, reverse=True)
    assert front.index('id="run-1"') < front.index('id="sweep-of-1"')


def test_every_link_of_the_front_leads_somewhere_and_nothing_else_is_loaded(
    committed_site: Path,
) -> None:
    front = (committed_site / "index.html").read_text()
    for address in re.findall(r'href="([^"]*)"', front):
        if address.startswith("#"):
            assert f'id="{address[1:]}"' in front
        elif not address.startswith("data:"):
            file, _, fragment = address.partition("#")
            assert (committed_site / file).is_file(), address
            assert not fragment or f'id="{fragment}"' in _text(committed_site / file), address
    assert re.findall(r'<script src="([^"]*)"', front) == ["leaderboard.js"]
    below = (committed_site / "quick" / "report.html").read_text()
    assert re.findall(r'<script src="([^"]*)"', below) == ["../leaderboard.js"]
    plots = r'<img class="plot" alt="[^"]*" src="data:image/png;base64,[^"]*">'
    assert not re.search(r"<img|https?://", re.sub(plots, "", front))


def test_a_defense_an_attack_and_data_have_pages_with_their_rows_of_all_runs(
    committed_site: Path,
) -> None:
    spm, ridge, digits = (
        (committed_site / page).read_text()
        for page in ("defense/spm.html", "attack/ridge.html", "data/digits.html")
    )
    assert "Sign perturbation of the upload." in spm  # the class
    assert "the text also says &#34;two fixed values" in spm  # its module
    assert "Privacy budget of one sign" in spm  # its settings
    assert '<a href="https://doi.org/10.3390/electronics13204091">SPM-FL: A Federated' in spm
    assert set(re.findall(r'data-defense="([^"]*)"', spm)) == {"spm", "none"}
    runs = set(re.findall(r'href="../([^"]*)/report.html#row=', spm))
    assert "quick" in runs
    keys = set(re.findall(r'data-key="([^"]*)"', ridge))
    assert {"ridge@server SSIM", "ridge@as_trained SSIM"} <= keys
    assert not {"idlg@server SSIM", "decoder SSIM"} & keys
    decided = [
        row for name in ("quick", "as_trained_data") for row in load(RESULTS / name)
        if any(label.startswith("ridge@") for label in row.attacks)
        and (row.defense == "none" or (row.ranking and row.ranking.attack.startswith("ridge@")))
    ]  # fmt: skip
    assert ridge.count("<tr data-i=") == len(decided) > 0
    assert set(re.findall(r'#t\d+">([^ ]*) · ', digits)) == {"digits"}


def test_what_is_not_installed_has_a_page_without_a_description() -> None:
    rows = [replace(r, defense="gone") for r in load(RESULTS / "quick")]
    pages = subjects(rows, discover())
    (gone,) = pages["defense"]
    assert (gone.name, gone.file, gone.paragraphs) == ("gone", "defense/gone.html", ())
    assert gone.rows_of(rows) == rows


def test_what_needs_no_leak_is_no_attack_where_it_is_not_applicable_either() -> None:
    first, *rows = load(RESULTS / "quick")
    silent = {
        name: replace(entry, status="not_applicable", reason="nothing is sent", is_floor=False)
        for name, entry in first.attacks.items()
    }
    without = replace(first, attacks=silent)
    names = {s.name for s in subjects([without, *rows], discover())["attack"]}
    assert "dlg" in names
    assert "prior_only" not in names


def test_two_names_never_come_to_one_file() -> None:
    rows = load(RESULTS / "quick")
    named = [replace(rows[0], dataset=d) for d in ("npz:a/b", "npz:a:b", "npz_a_b", "digits")]
    files = [s.file for s in subjects(named, Registry())["data"]]
    assert len(set(files)) == 4
    assert all(file.count("/") == 1 and ".." not in file for file in files)


@pytest.mark.slow
def test_parts_of_a_run_are_not_shown_beside_it(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "quick", tmp_path / "results" / "quick")
    shutil.copytree(RESULTS / "quick", tmp_path / "results" / "quick" / "parts" / "1")
    pages = site.write(tmp_path / "results", tmp_path / "site")
    assert [p.parent.name for p in pages] == ["site", "quick"]


@pytest.mark.slow
def test_the_site_of_all_committed_results_is_small(tmp_path: Path) -> None:
    site.write(RESULTS, tmp_path / "site")
    sizes = {p: p.stat().st_size for p in (tmp_path / "site").rglob("*") if p.is_file()}
    assert sum(sizes.values()) < 20_000_000
    assert sizes[tmp_path / "site" / "reference" / "report.html"] < 5_000_000


@pytest.mark.slow
def test_submitted_rows_stand_apart_until_they_are_verified(tmp_path: Path) -> None:
    mine = tmp_path / "results" / "a_submission"
    shutil.copytree(RESULTS / "as_trained_data", mine)
    shutil.copytree(RESULTS / "as_trained_data", tmp_path / "results" / "later")
    document = {
        "schema": 1, "kind": "defense", "name": "mine", "author": "<b>Me</b>",
        "date": "2026-11-24", "leakbench": "0.2.0", "command": "leakbench run reference",
        "settings": [], "failed_cells": [], "environment": {},
        "plugins": [
            {"kind": "defense", "name": "mine", "file": None, "origin": "", "sources": ""}
        ],
    }  # fmt: skip
    (mine / "submission.json").write_text(json.dumps(document))
    (mine / "manifest.json").write_text("{}")

    def front() -> str:
        return site.write(tmp_path / "results", tmp_path / "site")[0].read_text()

    page = front()
    assert page.index("later/report.html") < page.index("a_submission/report.html")
    assert "Submitted by &lt;b&gt;Me&lt;/b&gt; on 2026-11-24" in page
    assert page.count("no part of the board") == page.count("submitted, unverified") == 1
    assert page.count("<dd>Unverified: nobody made these figures again") == 2
    count = len(load(RESULTS / "as_trained_data"))
    assert page.count("<tr data-i=") == count  # the submitted rows are not in the leaderboard
    rerun = {"digest": digest_of(mine), "date": "2026-11-25", "cells": 5,
             "seed": 7, "passed": True}  # fmt: skip
    beside = verification_path(mine)
    beside.write_text(json.dumps(rerun))
    page = front()
    assert "<dd>Verified on 2026-11-25: 5 drawn cells" in page
    assert page.count("<tr data-i=") == 2 * count
    assert "no part of the board" not in page
    for change in ({"passed": False}, {"digest": "0" * 64}):
        beside.write_text(json.dumps(rerun | change))
        assert "no part of the board" in front()
    beside.write_text(json.dumps(rerun | {"date": "today"}))
    with pytest.raises(UserError, match=r"a_submission.verified.json: 'date'"):
        front()


def test_names_from_outside_are_escaped_and_a_part_of_a_suite_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "a <b> & 'c'"
    shutil.copytree(RESULTS / "as_trained_data", folder)
    run = read_json(folder / "run.json.gz")
    run["suite"]["description"] = "<script>alert(1)</script>"
    run["trainings"].pop()
    (folder / "run.json").write_text(json.dumps(run))
    front = site.write(tmp_path / "results", tmp_path / "site")[0].read_text()
    assert "<script>alert" not in front
    assert "<b>" not in front
    assert 'href="a%20%3Cb%3E%20%26%20%27c%27/report.html"' in front
    assert f"<dt>Missing</dt><dd>{escape(Files(folder).missing[0])}</dd>" in front


def test_an_earlier_site_is_replaced_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    source, out = str(RESULTS / "as_trained_data"), tmp_path / "out"
    assert leakbench("site", source, "--out", str(out))[0] == 0
    (out / "as_trained_data" / "report.html").write_text("old")
    code, text = leakbench("site", source, "--out", str(out))
    assert code == 0, text
    assert "1 reports. Open" in text
    assert (out / "as_trained_data" / "report.html").read_text() != "old"
    other = tmp_path / "other"
    other.mkdir()
    (other / "index.html").write_text("<html>mine</html>")
    code, text = leakbench("site", source, "--out", str(other))
    assert code == 2
    assert "must be a new folder, an empty one or an earlier site" in text
    assert (other / "index.html").read_text() == "<html>mine</html>"


def test_a_site_inside_of_its_results_is_refused(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "quick", tmp_path / "quick")
    code, text = leakbench("site", str(tmp_path), "--out", str(tmp_path / "site"))
    assert code == 2
    assert "must lie outside of the results" in text


# --- sweeps: leakage over the value that was varied -----------------------------------------------


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no column 'over'"):
        site.sweeps(tmp_path)


def test_the_site_shows_the_committed_sweeps_and_has_their_tables(committed_site: Path) -> None:
    page = (committed_site / "index.html").read_text()
    # Three tables over batch and over rounds; one over local steps, batches and evaluations.
    assert page.count('alt="Leakage over ') == 9
    assert 'alt="Leakage over threat.batch: fedavg-digits-lenet-final"' in page
    over = {"batch": "threat.batch", "rounds": "threat.rounds", "budget": "budget",
            "local_steps": "protocol.local_steps", "training_batch": "protocol.batch"}  # fmt: skip
    for name, key in over.items():
        assert f"Leakage over {key} <span" in page
        table = (committed_site / "curves" / name / "sweep.csv").read_text()
        assert table == (RESULTS / "curves" / name / "sweep.csv").read_text()
