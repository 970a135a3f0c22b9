"""The HTML page: what stands in it, that it stands alone, and that no name can break out of it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from skimage.metrics import structural_similarity
from typer.testing import CliRunner

from bench import suite as suites
from bench.cli import app
from bench.cli.reports import publish
from bench.errors import UserError
from bench.harness import launch, runner
from bench.harness.environment import Environment, registry_for
from bench.harness.plan import expand
from bench.harness.store import Store
from bench.metrics.intervals import Interval
from bench.metrics.named import METRICS
from bench.protocols.settings import ProtocolSettings
from bench.records import (
    AttackEntry,
    AuditSummary,
    Convergence,
    DoubledScore,
    Flag,
    FlagCode,
    LedgerWords,
    PlannedTraining,
    Row,
    Run,
    WorstCase,
    to_json,
)
from bench.report import (
    boards,
    charts,
    columns,
    explain,
    html,
    leaderboard,
    pictures,
    plots,
    site,
    svg,
    tables,
    terminal,
    verdicts,
)
from bench.report.files import Files
from bench.report.text import markdown, to_leaderboard_json
from tests.conftest import TINY

SCHEMA = json.loads(Path(leaderboard.__file__).with_name("schema.json").read_text())
ROOT = Path(__file__).parents[1]
HOSTILE = "<img src=x onerror=alert(1)></script><!--<script>alert(2)</script>\"' " + "w" * 300


def interval(mean: float, width: float = 0.05) -> Interval:
    return Interval(mean=mean, lo=mean - width, hi=mean + width)


def attack(ssim: float | None = 0.5, **more: Any) -> AttackEntry:
    """An attack's entry; without an SSIM one that is not applicable. Metrics may be given by their
    names."""
    done = ssim is not None
    scores = {} if ssim is None else {"ssim": interval(ssim)}
    scores |= {m: more.pop(m) for m in METRICS if m in more}
    return AttackEntry(
        **{
            "status": "done" if done else "not_applicable",
            "reason": None if done else "nothing to attack",
            "threat": "server", "is_floor": False, "n": 8 if done else 0, "failed": 0,
            "scores": scores, "floor": {"ssim": 0.2, "ssim_class_mean": 0.7} if done else {},
            "seconds": 1.5 if done else None, "gradient_evaluations": 200 if done else None,
            "budget": 200 if done else None, **more,
        }
    )  # fmt: skip


def row(defense: str = "none", rank: int | None = 1, ssim: float = 0.5, **more: Any) -> Row:
    """A row of a leaderboard."""
    return Row(
        **{
            "suite": "toy v1", "protocol": "fedavg", "protocol_settings": PROTOCOL,
            "dataset": "digits", "model": "lenet", "defense": defense, "variant": "",
            "settings": {}, "checkpoint": "init", "threat": "server: one round of 8 clients",
            "seeds": (0,), "accuracy": interval(0.9), "eps_claimed": None, "eps_record": math.inf,
            "ledger": LedgerWords(words=("One.", "Two.", "Three."), reasons=("Why.",)),
            "delta": 1e-5, "unit": None, "bytes_up": 1200.0, "bytes_down": 3.4e6,
            "client_seconds": 0.05, "attacks": {"dlg": attack(ssim)},
            "worst": worst(interval(ssim)), "flags": (), "rank": rank, **more,
        }
    )  # fmt: skip


def worst(found: Interval, metric: Any = "ssim", attack_: str = "dlg") -> WorstCase:
    return WorstCase(attack=attack_, metric=metric, interval=found)


def flag(code: FlagCode, subject: str = "", **values: float | str) -> Flag:
    return Flag(code=code, subject=subject, values=values)


def other(text: str) -> Flag:
    """A flag of which nothing is known but its sentence."""
    return flag(FlagCode.OTHER, text=text)


PROTOCOL = ProtocolSettings(name="fedavg", clients=3, lr=0.1, local_steps=1)


SUITE = suites.Suite.model_validate(tomllib.loads(TINY))


def run_of(name: str = "toy", description: str = "A toy.", **more: Any) -> Run:
    return Run(
        **{
            "suite": SUITE.model_copy(update={"name": name, "description": description}),
            "trainings": (), "command": "leakbench run toy", "device": "cpu",
            "versions": {"python": "3.12", "leakbench": "9.9"}, **more,
        }
    )  # fmt: skip


def page(*rows: Any, run: Run | None = None, album: Any = None) -> str:
    return html.page(rows, run or run_of(), album or pictures.none("none were kept"))


class Tags(HTMLParser):
    """Start tags with attributes, and the text of blocks by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def blocks(text: str, kind: str) -> list[Any]:
    """JSON blocks of a class."""
    found = re.findall(rf'<script type="application/json" class="{kind}">(.*?)</script>', text)
    return [json.loads(f) for f in found]


def as_json(rows: Any) -> Any:
    """As leaderboard.json has them."""
    return json.loads(to_leaderboard_json(rows))


def test_example_rows_follow_the_schema() -> None:
    flags = tuple(flag(code, "dlg", gain=0.1, epsilon=1.0, reason="r", text="t")
                  for code in FlagCode)  # fmt: skip
    rows = [row(flags=flags), row("spm", attacks={"dlg": attack(None)}, worst=None)]
    jsonschema.validate(as_json(rows), SCHEMA)
    assert SCHEMA["$defs"]["flag"]["properties"]["code"]["enum"] == list(FlagCode)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    flags = tuple(flag(code, "dlg", gain=0.1, reason="r", text="t") for code in FlagCode)
    rows = [row(flags=flags, eps_claimed=math.inf), row("b", worst=None)]
    (tmp_path / "leaderboard.json").write_text(to_leaderboard_json(rows))
    assert leaderboard.load(tmp_path) == rows


def test_the_page_stands_alone_and_allows_nothing_but_its_own_style_and_script() -> None:
    text = page(row())
    tags = Tags(text)
    for _, attributes in tags.tags:
        assert not {"src", "style", "onclick", "onload", "onerror"} & set(attributes)
        address = attributes.get("href") or ""
        assert address.startswith(("#", "data:,")) or not address
    assert not re.search(r"https?://|url\(|@import", text)
    policy = next(m for m in tags.all("meta") if m.get("http-equiv"))["content"] or ""
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    for tag, kind in (("style", "style-src"), ("script", "script-src")):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(f.encode()).digest()).decode() for f in found]
        assert f"{kind} " + " ".join(f"'sha256-{d}'" for d in digests) + ";" in policy


def test_the_header_says_how_the_results_were_made_and_how_to_cite_them(tmp_path: Path) -> None:
    rows = [row()]
    path = tmp_path / "leaderboard.json"
    path.write_text(to_leaderboard_json(rows))
    text = page(*rows)
    assert "<code>leakbench run toy</code>" in text
    assert "python 3.12, leakbench 9.9" in text
    assert "intervals cover victims and test samples, not other trainings" in text
    assert hashlib.sha256(path.read_bytes()).hexdigest() in text


def test_tables_have_captions_scopes_and_sortable_heads_with_explanations() -> None:
    text = page(row(), row("spm", rank=2))
    tags = Tags(text)
    assert len(tags.all("caption")) == 1
    heads = [t for t in tags.all("th") if t.get("scope") == "col"]
    assert len(heads) == len([b for b in tags.all("button") if b.get("class") == "sort"]) == 10
    assert [h.get("aria-sort") for h in heads] == ["ascending"] + [None] * 9
    asked = {b["data-note"] for b in tags.all("button") if b.get("class") == "what"}
    assert {"floor", "worst", "proven", "flags", "ssim"} <= asked <= set(explain.COLUMNS)
    assert len([t for t in tags.all("th") if t.get("scope") == "row"]) == 2
    assert {"id": "note", "class": "note", "popover": None} in tags.all("div")
    assert any(p.get("aria-live") == "polite" for p in tags.all("p"))


def test_cells_sort_as_numbers_with_inf_above_and_nothing_where_a_figure_is_missing() -> None:
    (board,) = boards.boards(
        [row("a", eps_claimed=38809.2, unit="client", eps_record=2.5),
         row("b", rank=None, accuracy=None, flags=(flag(FlagCode.AT_CHANCE),))]
    )  # fmt: skip
    values = [[c.value for c in line.cells] for line in board.lines]
    assert values[0] == ["0.9", "38809.2", "2.5", "", "0.5", "0.20", "0.5"]
    assert values[1] == ["", "", "inf", "", "0.5", "0.20", "0.5"]
    assert [line.rank.value for line in board.lines] == ["1", ""]
    assert board.lines[0].cells[1].text == "3.88e4"
    assert 'class="unranked"' in page(*board.rows)


def test_refuted_claims_failed_victims_and_missing_figures_are_marked_with_their_reason() -> None:
    audit = AuditSummary(
        draws=1000, confidence=0.95, eps_audited=4.51, eps_at_least=True,
        verdict_claim="violated", verdict_proof="no proof",
    )  # fmt: skip
    attacks = {
        "dlg": attack(0.5, failed=2),
        "idlg": attack(None, status="failed", reason="RuntimeError: boom"),
        "ridge": attack(None, reason="no smashed data"),
        "decoder": attack(0.1),
    }
    rows = [row("spm", eps_claimed=1.5, unit="coordinate", audit=audit, attacks=attacks),
            row("b", rank=2, attacks={"ridge": attack(0.3), "dlg": attack()})]  # fmt: skip
    (board,) = boards.boards(rows)
    claim, _, audited, dlg, idlg, ridge, decoder = board.lines[0].cells[1:8]
    assert (claim.mark, claim.small) == ("!", "/coordinate")
    assert (audited.text, audited.mark) == ("4.5+", "!")
    assert dlg.mark == "2 failed"
    assert (idlg.text, idlg.reason) == ("failed", "RuntimeError: boom")
    assert (ridge.text, ridge.reason) == ("n/a", "no smashed data")
    assert (dlg.style, decoder.style) == ("h4", "")  # 0.5 over a floor of 0.2; below the floor
    text = page(*rows)
    gaps = text[text.index('id="gaps"') :]
    assert gaps.index("RuntimeError: boom") < gaps.index("no smashed data")
    assert "spm" in gaps[gaps.index("RuntimeError: boom") :][:200]


def test_an_attack_that_applies_nowhere_has_no_column_but_is_named() -> None:
    text = page(row(attacks={"dlg": attack(), "analytic": attack(None)}))
    assert "No column for analytic, which applies to no row here: nothing to attack." in text
    assert ">analytic</button>" not in text


@pytest.mark.parametrize(
    ("given", "sentence", "chip", "level", "letter"),
    [
        (flag(FlagCode.CLAIMED_NOT_PROVEN), "epsilon claimed, none proven", "ε not proven",
         "warn", ""),
        (flag(FlagCode.CLAIM_UNIT, "coordinate"), "claim is per coordinate",
         "claim per coordinate", "info", ""),
        (flag(FlagCode.AUDIT_REFUTES_CLAIM, epsilon=4.512),
         "audit refutes the claim: epsilon is at least 4.51", "audit refutes claim", "bad", "V"),
        (flag(FlagCode.AUDIT_REFUTES_PROOF, epsilon=4.512),
         "audit refutes the proof: epsilon is at least 4.51", "audit refutes proof", "bad", "V"),
        (flag(FlagCode.CUT_SHORT, "dlg", gain=0.071),
         "dlg cut short: +0.07 SSIM on the undefended row at twice its budget", "dlg cut short",
         "warn", "B"),
        (flag(FlagCode.BELOW_FLOOR, "dlg"), "strongest attack (dlg) below the floor",
         "below the floor", "warn", "F"),
        (flag(FlagCode.ATTACK_TIMEOUT, "idlg"), "idlg timeout", "idlg timed out", "bad", "T"),
        (flag(FlagCode.ATTACK_FAILED, "idlg"), "idlg failed", "idlg failed", "bad", "X"),
        (flag(FlagCode.TRAINING_FAILED, reason="ValueError: x"), "training failed: ValueError: x",
         "training failed", "bad", "X"),
        (flag(FlagCode.TRAINING_TIMEOUT, reason="600 s"), "training timeout: 600 s",
         "training timed out", "bad", "T"),
        (flag(FlagCode.TRAINING_NOT_APPLICABLE, reason="x"), "training not_applicable: x",
         "not applicable", "info", ""),
        (flag(FlagCode.AUDIT_FAILED, reason="ValueError: x"), "audit failed: ValueError: x",
         "audit failed", "warn", "X"),
        (flag(FlagCode.DIVERGED, reason="weights not finite after round 4"),
         "diverged: weights not finite after round 4", "diverged", "bad", "D"),
        (flag(FlagCode.AT_CHANCE), "accuracy at chance", "accuracy at chance", "bad", "C"),
        (other("a new kind of flag"), "a new kind of flag", "a new kind of flag", "info", ""),
    ],
)  # fmt: skip
def test_every_flag_has_a_chip_its_sentence_and_a_meaning(
    given: Flag, sentence: str, chip: str, level: str, letter: str
) -> None:
    why = explain.FLAGS[given.code].why
    assert (explain.sentence(given), explain.chip(given), given.level) == (sentence, chip, level)
    assert explain.letters([given]) == letter
    assert bool(why) == (given.code != FlagCode.OTHER)
    text = page(row(flags=(given,)))
    assert f'<button class="chip {level}"' in text
    assert f"<dt>{sentence}</dt><dd>{why}</dd>" in text.replace("&#39;", "'")


def test_every_code_has_a_meaning_and_a_letter_that_is_explained() -> None:
    assert set(explain.FLAGS) == set(FlagCode)
    assert {m.letter for m in explain.FLAGS.values()} - {""} == set(explain.LETTERS)
    bare = flag(FlagCode.CUT_SHORT, "dlg")  # a file from elsewhere may lack the gain
    assert explain.sentence(bare) == "cut short dlg"


def test_no_attack_s_name_is_read_as_a_flag() -> None:
    """An attack called diverged_x that ran out of time is no diverged training."""
    named = flag(FlagCode.ATTACK_TIMEOUT, "diverged_x")
    assert not named.costs_rank
    assert explain.letters([named, flag(FlagCode.ATTACK_FAILED, "accuracy at chance")]) == "XT"
    assert [r.rank for r in verdicts.ranked([row(flags=(named,))])] == [1]


def test_an_opened_row_holds_ledger_audit_costs_and_every_metric_without_repeating_itself() -> None:
    grown = Convergence(gain=0.01, budget=200, converged=True)
    noted = attack(0.4, notes=("a note",), convergence=grown, mse=interval(1 / 3))
    rows = [row("a", attacks={"dlg": noted}), row("b", rank=2, attacks={"dlg": noted})]
    (found,) = blocks(page(*rows), "details")
    pieces, (first, second) = found["pieces"], found["rows"]
    assert [pieces[p] for p in first["words"]] == ["One.", "Two.", "Three."]
    assert [pieces[p] for p in first["reasons"]] == ["Why."]
    assert (first["up"], first["down"], first["seeds"]) == (1200.0, 3.4e6, [0])
    entry = first["attacks"]["dlg"]
    assert entry["metrics"]["mse"] == [0.3333, 0.283, 0.383]
    assert (entry["budget"], entry["convergence"]["gain"]) == (200, 0.01)
    assert pieces[entry["notes"][0]] == "a note"
    assert pieces[entry["floor"]] == {"ssim": 0.2, "ssim_class_mean": 0.7}
    assert second == first
    assert pieces.count("One.") == 1


def test_no_name_reason_or_note_can_break_out_of_the_page() -> None:
    bad = attack(None, status="failed", reason=HOSTILE)
    rows = [
        row(HOSTILE, settings={HOSTILE: HOSTILE}, flags=(other(HOSTILE),), threat=HOSTILE,
            dataset=HOSTILE, attacks={HOSTILE: bad, "dlg": attack(notes=(HOSTILE,))},
            ledger=LedgerWords(words=(HOSTILE,), reasons=(HOSTILE,))),
        row("b", rank=2, dataset=HOSTILE, threat=HOSTILE, attacks={HOSTILE: attack()},
            worst=worst(interval(0.5), attack_=HOSTILE)),
    ]  # fmt: skip
    run = run_of(HOSTILE, HOSTILE, command=HOSTILE, device=HOSTILE)
    album = pictures.none(HOSTILE) | {"unreadable": [HOSTILE]}
    text = page(*rows, run=run, album=album)
    tags = Tags(text)
    assert tags.all("img") == []
    assert len(tags.all("script")) == 4  # notes, one table's details, two scripts
    assert not any(k.startswith("on") for _, attributes in tags.tags for k in attributes)
    assert "<!--" not in text
    (found,) = blocks(text, "details")
    assert found["rows"][0]["flags"] != []
    assert HOSTILE in found["pieces"]


def test_rows_of_every_committed_result_render() -> None:
    found = sorted((ROOT / "results").rglob("leaderboard.json"))
    assert found
    for path in found:
        files = Files(path.parent)
        loaded, text = files.rows, files.text("html")
        assert len(Tags(text).all("tbody")) >= len(tables.tables(loaded))
        assert hashlib.sha256(path.read_bytes()).hexdigest() in text


def first_version() -> dict[str, Any]:
    """A row as the first version wrote it."""
    (old,) = as_json([row()])
    for key in ("schema", "personal_accuracy", "personalised", "audit", "ledger",
                "dataset_settings", "model_settings"):  # fmt: skip
        del old[key]
    for key in ("convergence", "budget", "doubled"):
        del old["attacks"]["dlg"][key]
    del old["worst"]["metric"]
    old["flags"] = ["accuracy at chance", "a sentence of its own"]
    return dict(old)


def test_rows_of_the_first_version_render_in_all_formats(tmp_path: Path) -> None:
    (tmp_path / "leaderboard.json").write_text(json.dumps([first_version()]))
    (tmp_path / "run.json").write_text(to_json(run_of()))
    before = (tmp_path / "leaderboard.json").read_bytes()
    paths = publish(tmp_path, ("html", "md", "csv", "json"))
    assert [p.name for p in paths] == ["report.html", "leaderboard.md", "leaderboard.csv"]
    assert (tmp_path / "leaderboard.json").read_bytes() == before
    assert "neither reconstructions nor a pictures.json" in paths[0].read_text()
    assert "accuracy at chance; a sentence of its own" in paths[1].read_text()


def test_of_a_long_table_the_first_rows_are_laid_out_and_the_others_one_press_away() -> None:
    rows = [row(f"d{i}", i + 1, settings={"i": i}) for i in range(boards.AT_ONCE + 3)]
    text = page(*rows)
    lines = [t for t in Tags(text).all("tr") if "data-i" in t]
    assert [t.get("class") for t in lines] == [None] * boards.AT_ONCE + [" more"] * 3
    assert "Show all rows of this table" in text
    assert "Show all rows of this table" not in page(*rows[:-3])


def test_a_page_without_rows_says_so() -> None:
    assert "nothing has finished yet" in page()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"neither records nor a readable leaderboard\.json"),
        ("{}", "must be a list of rows"),
        ('[{"worst": null, "flags": []}]', "'suite' is missing"),
        ("[3]", "row 1"),
        ("[", "is no readable JSON"),
    ],
)
def test_a_foreign_leaderboard_is_refused_with_what_it_lacks(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "leaderboard.json").write_text(content)
    with pytest.raises(UserError, match=message):
        leaderboard.load(tmp_path)


def test_tables_of_one_title_are_kept_apart_by_what_differs() -> None:
    settings = PROTOCOL.model_copy(update={"lr": 0.2})
    differing = row(rank=1, model_settings={"init": 0.5}, protocol_settings=settings)
    titles = [t for t, _ in tables.tables([row(), differing])]
    start = "fedavg of 3 clients · digits · lenet · init round"
    assert titles == [f"{start} · lr=0.1 · model init=-", f"{start} · lr=0.2 · model init=0.5"]
    assert [t for t, _ in tables.tables([row(), row("spm", rank=2)])] == [start]


# --- plots ------------------------------------------------------------------------------------


def chart(view: str, *rows: Any) -> charts.View:
    (board,) = boards.boards(rows)
    return next(v for v in charts.views(board) if v.name == view)


def labelled(drawing: str) -> list[str]:
    return re.findall(r'<text class="tg"[^>]*>([^<]*)</text>', drawing)


def test_the_front_holds_the_ranked_settings_that_none_beats_in_both() -> None:
    rows = [
        row("safe", 1, 0.2, accuracy=interval(0.5)),
        row("good", 2, 0.4, accuracy=interval(0.8)),
        row("beaten", 3, 0.5, accuracy=interval(0.7)),
        row("open", 4, 0.9, accuracy=interval(0.9)),
        row("useless", None, 0.1, accuracy=interval(0.95)),
        row("own", 5, 0.05, accuracy=None, personal_accuracy=interval(0.99), personalised=True),
    ]
    view = chart("leak", *rows)
    drawing = str(view.drawing)
    assert labelled(drawing) == ["1 safe", "2 good", "4 open"]
    marks = re.findall(r'<g class="pt ([^"]*)"[^>]*aria-label="([^;]*);', drawing)
    classes = {name: style.split()[1:] for style, name in marks}
    assert classes["safe"] == ["front"]
    assert classes["beaten"] == []
    assert classes["useless"] == ["muted"]
    assert classes["own"] == ["hollow"]
    assert len(re.findall(r'tabindex="0"', drawing)) == 1
    assert len(re.findall(r'tabindex="-1"', drawing)) == 5
    assert "<title " in drawing
    assert "<desc " in drawing
    assert "class mean" in drawing


def test_points_tell_setting_figures_and_epsilons() -> None:
    drawing = str(chart("leak", row("spm", settings={"epsilon": 1.5}, eps_claimed=1.5,
                                    unit="coordinate")).drawing)  # fmt: skip
    assert (
        'aria-label="spm(epsilon=1.5); rank 1; accuracy 0.900 [0.85, 0.95]; worst SSIM 0.500 '
        '[0.45, 0.55] by dlg; ε claimed 1.5 per coordinate; ε proven inf"'
    ) in drawing


def test_epsilons_without_a_number_stand_in_columns_beside_the_axis() -> None:
    rows = [row("a", 1, eps_claimed=10.0, unit="client", eps_record=100.0),
            row("b", 2, eps_claimed=math.inf, unit="record"), row("c", 3), row("d", 4)]  # fmt: skip
    claimed, proven = (str(chart(v, *rows).drawing) for v in ("claimed", "proven"))
    assert ">no claim</text>" in claimed
    assert ">inf</text>" in claimed
    assert ">no claim</text>" not in proven
    places = re.findall(r"translate\(([\d.]+) ([\d.]+)\)\"><path class=\"ci\"", proven)
    assert len(set(places)) == 4  # equal heights in one column do not hide each other
    assert labelled(claimed) == []  # claims of different units have no front


def test_errors_of_records_are_safer_the_larger_they_are() -> None:
    def record(name: str, rank: int, error: float, accuracy: float) -> Any:
        entry = attack(None, status="done", reason=None, mse=interval(error, error / 2),
                       floor={"mse": 1.0})  # fmt: skip
        return row(name, rank, accuracy=interval(accuracy), attacks={"analytic": entry},
                   worst=worst(interval(error, error / 2), "mse", "analytic"))  # fmt: skip

    rows = [record("safe", 1, 0.5, 0.6), record("beaten", 2, 0.1, 0.5),
            record("open", 3, 1e-8, 0.9)]  # fmt: skip
    view = chart("leak", *rows)
    assert labelled(str(view.drawing)) == ["3 open", "1 safe"]
    assert "safer →" in str(view.drawing)
    (board,) = boards.boards(rows)
    assert board.lines[2].cells[4].text == "1e-8"


def of_records(defense: str = "none", **more: Any) -> Row:
    """A row of an attack that copies records, and of one that guesses."""
    error = Interval(mean=6.68e-17, lo=3.2e-20, hi=1.34e-16)
    copy = attack(None, status="done", reason=None, mse=error,
                  floor={"mse": 0.0873, "mse_class_mean": 4e-3})  # fmt: skip
    guess = replace(copy, scores={"mse": Interval(mean=0.523, lo=0.386, hi=104.2)})
    attacks = {"analytic": copy, "dlg": guess, **more.pop("attacks", {})}
    return row(defense, attacks=attacks, worst=worst(error, "mse", "analytic"), **more)


def test_errors_of_records_read_the_same_in_markdown_and_page_and_are_explained() -> None:
    rows = [of_records()]
    text = markdown(rows, run_of())
    exact = "6.68e-17 [3.2e-20, 1.3e-16]"
    assert f"| {exact} | 0.523 [0.39, 1e2] | MSE 0.09/4e-3 | MSE {exact} analytic |" in text
    ((line,),) = [b.lines for b in boards.boards(rows)]
    shown = [(c.text, c.small) for c in line.cells if "[" in c.small][1:]
    assert shown == [("6.68e-17", "[3.2e-20, 1.3e-16]"), ("0.523", "[0.39, 1e2]"),
                     ("MSE 6.68e-17", "[3.2e-20, 1.3e-16] analytic")]  # fmt: skip
    for legend in (text, terminal.legend(rows)):
        assert "MSE (of records" in legend
        assert "higher is safer, 0 is a perfect copy" in legend
    for legend in (markdown([row()], run_of()), terminal.legend([row()])):
        assert "MSE" not in legend
    mixed = [row(), of_records(dataset="adult")]  # no column of all rows together is an MSE
    assert "MSE (of records" in terminal.legend(mixed)


def test_errors_of_records_fit_80_columns_without_becoming_zero() -> None:
    copy = of_records().attacks["analytic"]
    counts = attack(None, status="done", reason=None, lnacc=interval(0.5))
    made = of_records(
        "ms_pafl", settings={"epsilon": 100.0, "noise": "analytic", "check_in": 0.7},
        personalised=True, personal_accuracy=interval(0.8), eps_claimed=8.33e12, unit="record",
        flags=(flag(FlagCode.DIVERGED, reason="weights not finite"), flag(FlagCode.AT_CHANCE)),
        attacks={"idlg": copy, "ridge": copy, "ilrg": counts},
    )  # fmt: skip
    (table,) = terminal.shown([made])
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table)
    text = console.export_text()
    assert "floor 0.09/4e-3" in text
    (first,) = [line.split() for line in text.splitlines() if "8.33e+12/re" in line]
    assert first[-6:] == ["7e-17", "0.52", "7e-17", "7e-17", "0.50", "DC"]
    texts = [columns.two_digits(v, "mse") for v in (0.0, 0.00999, 0.01, 99.0, 1234.0, 1e-100)]
    assert texts == ["0", "1e-2", "0.01", "99.00", "1.2e3", "1e-100"]


def test_a_part_of_a_suite_shows_the_seeds_that_were_run() -> None:
    jobs = expand(SUITE.model_copy(update={"seeds": [0, 1, 2]})).trainings
    planned = {j.seed: PlannedTraining(key="0" * 24, job=j, cells=()) for j in jobs}
    run = run_of(trainings=(planned[2], planned[2]))
    assert "Device: cpu, seeds [2]" in markdown([row()], run)
    shown = page(row(), run=run)
    assert "<dt>Seeds</dt><dd>2 (intervals cover victims" in shown
    run = run_of(trainings=(planned[2], planned[0]))
    assert "<dt>Seeds</dt><dd>0, 2</dd>" in page(row(), run=run)
    entry = site.Published(name="a", run=run, rows=[], files={})
    assert "seeds 0, 2" in site.index([entry])


def test_attacks_without_room_in_a_terminal_have_a_table_below_and_no_flag_is_lost() -> None:
    names = [f"no{i:02}" for i in range(16)]
    attacks = {n: attack(i / 100) for i, n in enumerate(names)}
    made = row(
        "gaussian",
        rank=1,
        attacks=attacks,
        worst=None,
        flags=(flag(FlagCode.AT_CHANCE), flag(FlagCode.AUDIT_REFUTES_CLAIM)),
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    found = terminal.shown([made])
    for table in found:
        console.print(table)
    lines = console.export_text().splitlines()
    assert len(found) > 1
    text = " ".join(lines)
    assert all(n in text for n in names)
    figures = [line.split() for line in lines if " gaussian " in line]
    assert figures[0][-1] == "CV"
    shown = [f for line in figures for f in line if f.startswith("0.") and len(f) == 4]
    assert shown[-16:] == [f"{i / 100:.2f}" for i in range(16)]


def test_an_error_of_several_lines_stays_in_its_row_of_the_markdown_table() -> None:
    reason = "ValueError: a|b\nsecond line\r\nthird"
    attacks = {"dlg": attack(), "idlg": attack(None, status="failed", reason=reason)}
    rows = [row(flags=(flag(FlagCode.AUDIT_FAILED, reason=reason),), attacks=attacks)]
    lines = markdown(rows, run_of()).splitlines()
    body = lines[lines.index(next(line for line in lines if line.startswith("| ---"))) + 1]
    assert body.endswith("audit failed: ValueError: a\\|b second line third |")
    assert lines[-1] == "- idlg failed: ValueError: a|b second line third (none)"


def test_leakage_is_drawn_against_the_budgets_of_all_suites() -> None:
    def reference(budget: int, ssim: float, again: float) -> Any:
        doubled = DoubledScore(budget=2 * budget, ssim=interval(again))
        entry = attack(ssim, budget=budget, doubled=doubled)
        return row(suite=f"b{budget} v1", attacks={"dlg": entry, "idlg": attack(0.3)})

    rows = [reference(100, 0.5, 0.6), reference(300, 0.7, 0.8)]
    first, second = boards.boards(rows)
    view = charts.budget_view(first, rows)
    assert view is not None
    assert [line[:3] for line in view.table[1:]] == [
        ("dlg", "100", "0.500"), ("dlg", "200", "0.600"), ("dlg", "300", "0.700"),
        ("dlg", "600", "0.800"),
    ]  # fmt: skip
    assert str(view.drawing).count('class="pt') == 4
    assert charts.budget_view(second, rows[1:]) is not None
    assert charts.budget_view(*(lambda b: (b, b.rows))(boards.boards([row()])[0])) is None
    assert "Its figures as a table" in page(*rows)


def test_labels_never_cover_points_or_each_other() -> None:
    rows = [row(f"defense_{i}", i + 1, 0.5 + i / 500, accuracy=interval(0.5 + i / 500))
            for i in range(30)]  # fmt: skip
    drawing = str(chart("leak", *rows).drawing)
    tags = re.findall(r'<text class="tg"[^>]* x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">'
                      r"([^<]*)<", drawing)  # fmt: skip
    boxes = []
    for x, y, anchor, text in tags:
        length = 5.9 * len(text)
        left = float(x) - {"start": 0.0, "end": length, "middle": length / 2}[anchor]
        boxes.append((left, float(y) - 9, left + length, float(y) + 3))
    assert 1 < len(boxes) < 30
    assert not any(svg._overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_floors_that_lie_close_together_have_their_names_apart() -> None:
    floors = attack(0.9, floor={"ssim": 0.22, "ssim_class_mean": 0.24})
    drawing = str(chart("leak", row(ssim=0.9, attacks={"dlg": floors})).drawing)
    names = re.findall(r'<text class="flt" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<', drawing)
    assert [n for *_, n in names] == ["mean image", "class mean"]
    (x, y, _), (other_x, other_y, _) = names
    assert abs(float(x) - float(other_x)) > 12 or abs(float(y) - float(other_y)) >= 12


def test_ticks_are_round_numbers_inside_the_axis() -> None:
    axis = plots.Scale(label="", lo=0.83, hi=0.97)
    assert [t for _, t in axis.ticks()] == ["0.85", "0.90", "0.95"]
    wide = plots.Scale(label="", lo=1e-8, hi=1e4, log=True)
    assert [t for _, t in wide.ticks()] == ["1e-8", "1e-6", "1e-4", "1e-2", "1", "1e2", "1e4"]


# --- pictures ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with images of one and of three samples per victim."""
    base = tmp_path_factory.mktemp("report")
    text = TINY.replace('[[attacks]]\nname = "prior_only"',
                        '[[attacks]]\nname = "prior_only"\nthreat = "three"').replace(
        "victims = 2\n", 'victims = 3\n\n[[threats]]\nname = "three"\nvictims = 3\nbatch = 3\n'
    )  # fmt: skip
    text += '\n[[attacks]]\nname = "analytic"\nthreat = "server"\n'
    path = base / "tiny.toml"
    path.write_text(text)
    return finished(path, base / "out")


def finished(suite: Path, out: Path) -> Path:
    env = Environment()
    plan = expand(suites.load(str(suite)), {"checkpoint": "init"})
    store = Store(out)
    store.prepare()
    keys = runner.Keys(registry_for(()), env)
    executor = launch.local(plan, env, workers=0)
    report = runner.run(plan, store, keys, executor=executor, command=["leakbench", "run", "tiny"])
    assert report.failures == []
    return out


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
    album = pictures.load(folder)
    assert (album["victims"], album["without"], album["unreadable"]) == (8, 0, [])
    assert len(album["cells"]) == 3 * 2
    cell = cell_of(album, "analytic", 1)
    found = reconstruction(folder, cell)
    for name in ("truth", "images"):
        strip = decoded(album["sprites"][cell[name]])
        assert strip.shape == (16, 3 * 16)
        expected = (found[name][:, 0, 0] * 255).round().numpy()
        assert (np.hstack(list(expected)) == strip).all()
    text = page(*leaderboard.rows(folder), album=album)
    (own,) = blocks(text, "pictures")
    assert sorted(c["row"] for c in own["cells"]) == [0, 0, 1, 1, 2, 2]
    assert "The first 8 victims in the run&#39;s order, of the first seed" in text
    assert len(album["sprites"]) < 2 * len(album["cells"])  # one truth for all settings


def test_scores_under_pictures_are_the_records_and_scikit_images(folder: Path) -> None:
    album = pictures.load(folder)
    single, batch = cell_of(album, "analytic"), cell_of(album, "prior_only")
    assert (single["samples"], batch["samples"]) == (1, 3)
    assert (len(single["scores"]), len(batch["scores"])) == (3, 9)
    for cell in (single, batch):
        found = reconstruction(folder, cell)
        pairs = zip(found["images"].flatten(0, 1), found["truth"].flatten(0, 1), strict=True)
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
    assert len(fewer["cells"]) == 6
    least = pictures.collect(folder, budget=900)
    assert (least["victims"], len(least["cells"]) + least["without"]) == (1, 6)
    assert 0 < least["without"] < 6
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
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    first, second = sorted(copy.rglob("reconstruction.safetensors"))[:2]
    first.write_bytes(b"no tensors")
    save_file({"images": torch.zeros(2, 1, 1, 16, 16), "truth": torch.zeros(2, 1, 1, 8, 8)}, second)
    album = pictures.load(copy)
    assert len(album["cells"]) == 4
    assert {u.split("/")[0] for u in album["unreadable"]} == {first.parent.name, second.parent.name}
    assert "Not readable, so not shown" in page(*leaderboard.rows(copy), album=album)


def test_records_are_shown_as_numbers(tmp_path: Path) -> None:
    suite = tmp_path / "records.toml"
    suite.write_text(
        TINY.replace('"digits"', '"breast_cancer"').replace('"mlp_spm"', '"logistic"')
        .replace('"ilrg"', '"analytic"')
    )  # fmt: skip
    out = finished(suite, tmp_path / "out")
    album = pictures.load(out)
    assert album["cells"] == []
    record = next(r for r in album["records"] if r["attack"] == "analytic")
    found = reconstruction(out, record)
    assert record["features"] == found["truth"].shape[-1] == 30
    assert np.array(record["truth"]) == pytest.approx(found["truth"][:4, 0, :10].numpy(), rel=6e-3)
    (own,) = blocks(page(*leaderboard.rows(out), album=album), "pictures")
    assert len(own["records"]) == 3 * 2


def test_kept_pictures_come_back_without_artifacts(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    result = CliRunner().invoke(app, ["report", str(copy), "--format", "html,json",
                                      "--keep-pictures"])  # fmt: skip
    assert result.exit_code == 0, result.stderr
    first = (copy / "report.html").read_text()
    shutil.rmtree(copy / "artifacts")
    shutil.rmtree(copy / "records")
    publish(copy, ("html",))
    assert (copy / "report.html").read_text() == first
    (copy / "pictures.json").unlink()
    publish(copy, ("html",))
    assert "neither reconstructions nor a pictures.json" in (copy / "report.html").read_text()


def spoiled(**changes: Any) -> dict[str, Any]:
    """A record's entry of a pictures.json, with changes."""
    return {"row": "r", "attack": "analytic", "samples": 1, "features": 2, "images": [[0.5, 1]],
            "truth": [[0.25, 1]], "scores": [0.1], **changes}  # fmt: skip


def test_a_kept_pictures_file_with_records_is_read_as_it_was_written(
    folder: Path, tmp_path: Path
) -> None:
    album = pictures.load(folder) | {"records": [spoiled()], "unreadable": ["x: damaged"]}
    (tmp_path / "pictures.json").write_text(to_json(album))
    assert pictures.load(tmp_path) == album


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.update(schema=2),
        lambda a: a.update(sprites=["https://example.org/x.png"] * 99),
        lambda a: a.update(sprites=['data:image/png;base64,AA" onerror="x'] * 99),
        lambda a: a.update(sprites=[]),
        lambda a: a["cells"][0].update(truth="0"),
        lambda a: a["cells"][0].update(scores=[]),
        lambda a: a["cells"][0].pop("row"),
        lambda a: a["cells"][0].update(samples=0),
        lambda a: a["cells"][0].update(scores=["1"]),
        lambda a: a["cells"][0].update(metric="psnr"),
        lambda a: a["cells"][0].update(truth=True),
        lambda a: a.update(cells=["x"]),
        lambda a: a.update(victims="x"),
        lambda a: a.update(victims=True),
        lambda a: a.update(without=-1),
        lambda a: a.update(why=["x"]),
        lambda a: a.update(unreadable="x"),
        lambda a: a.update(unreadable=[1]),
        lambda a: a.update(sprites={s: s for s in a["sprites"]}),
        lambda a: a.update(records={}),
        lambda a: a.update(records=[spoiled(features="9")]),
        lambda a: a.update(records=[spoiled(scores=[])]),
        lambda a: a.update(records=[spoiled(images=[])]),
        lambda a: a.update(records=[spoiled(truth=[["x"]])]),
    ],
)
def test_a_foreign_pictures_file_is_refused(
    spoil: Callable[[Any], Any], folder: Path, tmp_path: Path
) -> None:
    album = pictures.load(folder)
    spoil(album)
    (tmp_path / "pictures.json").write_text(to_json(album))
    with pytest.raises(ValueError, match=r"is no pictures\.json of leakbench"):
        pictures.load(tmp_path)


# --- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "htm"), "Did you mean 'html'"),
        (("--format", "md", "--keep-pictures"), "--keep-pictures needs the format html"),
    ],
)
def test_bad_options_of_report_get_one_sentence(
    arguments: tuple[str, ...], message: str, folder: Path
) -> None:
    result = CliRunner().invoke(app, ["report", str(folder), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_rows_made_from_records_carry_ledger_budget_and_doubled_and_follow_the_schema(
    folder: Path,
) -> None:
    rows = leaderboard.rows(folder)
    jsonschema.validate(as_json(rows), SCHEMA)
    assert all(r.ledger and len(r.ledger.words) == 3 and r.ledger.reasons for r in rows)
    assert {r.attacks["analytic"].budget for r in rows} == {5}
    assert len({leaderboard.row_id(r) for r in rows}) == len(rows)
