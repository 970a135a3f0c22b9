"""The HTML page: what stands in it, that it stands alone, that no name can break out of it."""

import base64
import hashlib
import math
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import jsonschema
import pytest

from bench.records import Flag, FlagCode, Marks
from bench.records.rows import Convergence
from bench.report import (
    explain,
    frames,
    leaderboard,
    overview,
    tables,
    terminal,
    verdicts,
)
from bench.report.boards import board_of
from bench.report.html import source
from bench.report.papers import Status
from bench.report.text import to_leaderboard_json
from tests.board import SCHEMA
from tests.made_records import audit
from tests.made_rows import (
    PROTOCOL,
    as_json,
    attack,
    block,
    cells_of,
    flag,
    interval,
    page,
    printed,
    row,
    worst,
)

ROOT = Path(__file__).parents[1]


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


def test_example_rows_follow_the_schema() -> None:
    flags = tuple(flag(code, "dlg", gain=0.1, epsilon=1.0, reason="r", text="t")
                  for code in FlagCode)  # fmt: skip
    rows = [row(flags=flags), row("spm", attacks={"dlg": attack(None)}, worst=None)]
    jsonschema.validate(as_json(rows), SCHEMA)
    assert SCHEMA["$defs"]["flag"]["properties"]["code"]["enum"] == list(FlagCode)


def test_the_page_stands_alone_and_allows_nothing_but_its_own_style_and_script() -> None:
    text = page(row())
    tags = Tags(text)
    for _, attributes in tags.tags:
        assert not {"src", "style", "onclick", "onload", "onerror"} & set(attributes)
        address = attributes.get("href") or ""
        assert address.startswith(("#", "data:,")) or not address
    own = text.replace(source("dataTables.min.js"), "")  # which names its makers' site
    assert not re.search(r"https?://|url\(|@import", own)
    policy = next(m for m in tags.all("meta") if m.get("http-equiv"))["content"] or ""
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    for tag, kind in (("style", "style-src"), ("script", "script-src")):
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(f.encode()).digest()).decode() for f in contents]
        assert f"{kind} " + " ".join(f"'sha256-{d}'" for d in digests) + ";" in policy


def test_the_header_says_how_the_results_were_made_and_how_to_cite_them() -> None:
    rows = [row()]
    text = page(*rows)
    assert "<code>leakbench run toy</code>" in text
    assert "python 3.12, leakbench 9.9" in text
    assert "<dd>leakbench 9.9, suite toy v1, leaderboard.json" in text  # which made the run
    assert "(95 % interval over victims, not over other trainings)" in text
    assert hashlib.sha256(to_leaderboard_json(rows).encode()).hexdigest() in text


def test_tables_have_captions_scopes_and_heads_with_explanations() -> None:
    text = page(row(), row("spm"))
    tags = Tags(text)
    assert len(tags.all("caption")) == 2  # with the overview's
    heads = [t for t in tags.all("th") if "data-key" in t]
    assert {t.get("scope") for t in heads} == {"col"}
    shown = {t["data-key"]: t.get("data-from") for t in heads}
    always = [key for key, width in shown.items() if width == "0"]
    assert always == ["defense", "leakage"]  # nobody asked who is recognised
    assert shown["task"] == "640"
    assert shown["dlg SSIM"] is None
    asked = {b["data-note"] for b in tags.all("button") if b.get("class") == "what"}
    explained = block(text, "notes")["columns"]
    heads = {"floor", "leakage", "accuracy drop", "upper bound", "eps proven", "flags", "task"}
    assert heads | {"ssim"} <= asked
    assert asked <= set(explained)
    lines = 2 * len(overview.LOSSES)
    assert len([t for t in tags.all("th") if t.get("scope") == "row"]) == 2 + lines
    assert {"id": "note", "class": "note", "popover": None} in tags.all("div")
    assert any(p.get("aria-live") == "polite" for p in tags.all("p"))


def test_cells_sort_as_numbers_with_inf_above_and_nothing_where_a_figure_is_missing() -> None:
    rows = [row("a", eps_claimed=38809.2, unit="client", eps_record=2.5),
            row("b", accuracy=None, flags=(flag(FlagCode.AT_CHANCE),))]  # fmt: skip
    first, second = cells_of(rows)
    names = ("leakage", "upper bound", "accuracy", "eps claimed", "eps proven", "epsilon", "floor")
    assert [first[n].value for n in names] == [
        "0.375",
        "0.5",
        "0.9",
        "38809.2",
        "2.5",
        "2.5",
        "0.20",
    ]
    assert [second[n].value for n in names] == ["0.375", "0.5", "", "", "inf", "inf", "0.20"]
    assert (first["eps claimed"].text, first["epsilon"].text) == ("3.88e4", "meaningful 2.5")
    useless = [t.get("class") for t in Tags(page(*rows)).all("tr") if "data-i" in t]
    assert useless == [None, "useless"]


def test_a_leakage_has_its_signs_and_is_drawn_beside_the_undefended_one() -> None:
    short = flag(FlagCode.CUT_SHORT, "dlg", gain=0.1)
    board = board_of(
        {
            "": tables.tables(
                [row("a", 0.6, flags=(short,), marks=Marks(best=True)), row("none", 1.0)]
            )
        }
    )
    first, bare = board.lines
    assert [line[:3] for line in board.signs] == ["* s", "? m", "One"]  # and one seed
    place = [column.name for column in board.columns].index("leakage")
    assert [line.cells[place].mark for line in (first, bare)] == ["*?", ""]
    assert '<path class="u" d="M100 0v12"/><path d="M' in first.forest
    assert '<path class="m" d="M50 6h0"/>' in first.forest  # .6 over a baseline of .2


def test_the_status_and_paper_of_a_shipped_defense_stand_beside_it() -> None:
    spm, unknown = cells_of([row("spm"), row("a_strangers_own")])
    assert spm["paper"].text == "SPM-FL"
    assert spm["status"].text in get_args(Status)
    assert (unknown["paper"].text, unknown["status"].value) == ("–", "")


def test_refuted_claims_failed_victims_and_missing_figures_are_marked_with_their_reason() -> None:
    attacks = {
        "dlg": attack(0.5, failed=2),
        "idlg": attack(None, status="failed", reason="RuntimeError: boom"),
        "ridge": attack(None, reason="no smashed data"),
        "decoder": attack(0.1),
    }
    rows = [row("spm", eps_claimed=1.5, unit="coordinate", audit=audit(4.51), attacks=attacks),
            row("b", attacks={"ridge": attack(0.3), "dlg": attack()})]  # fmt: skip
    cells, _ = cells_of(rows)
    claim, audited = cells["eps claimed"], cells["eps audited"]
    dlg, idlg, ridge, decoder = (cells[f"{n} SSIM"] for n in attacks)
    assert (claim.mark, claim.small) == ("!", "/coordinate")
    assert (audited.text, audited.mark) == ("4.5+", "!")
    assert dlg.mark == "(2 failed)"
    assert (idlg.text, idlg.reason) == ("failed", "RuntimeError: boom")
    assert (ridge.text, ridge.reason) == ("n/a", "no smashed data")
    assert (dlg.style, decoder.style) == ("h4", "")  # 0.5 over a floor of 0.2; below the floor
    assert block(page(*rows), "notes")["reasons"] == ["RuntimeError: boom", "no smashed data"]


def test_an_attack_that_applies_nowhere_has_no_column_and_one_has_the_metric_of_its_table() -> None:
    records = attack(None, status="done", reason=None, mse=interval(0.3), floor={"mse": 1.0})
    rows = [row(attacks={"dlg": attack(), "analytic": attack(None)}),
            row(dataset="records", attacks={"dlg": records},
                worst=worst(interval(0.3), "mse"))]  # fmt: skip
    images, table = cells_of(rows)
    assert not {name for name in images if name.startswith("analytic")}
    said = "No column for analytic, which applies to no row here: nothing to attack."
    assert said in page(*rows)
    assert (images["dlg SSIM"].text, table["dlg SSIM"].text) == ("0.500", "MSE 0.3")
    assert table["dlg SSIM"].value == ""  # which sorts with no SSIM


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
        (flag(FlagCode.WHOSE_UNKNOWN, "dlg", leak=0.951),
         "dlg reconstructs the clients' samples (leakage 0.95), but not whose each is",
         "dlg: whose is unknown", "warn", "W"),
        (flag(FlagCode.UNDERSTATED, "ridge", leak=0.951),
         "ridge alone leaks 0.95, but worse answers were chosen", "ridge leaks more", "warn", "J"),
        (flag(FlagCode.FIRST_ROUND, "idlg", leak=0.951),
         "the first round alone leaks 0.95 (idlg), though it is one of those seen",
         "first round leaks more", "warn", "R"),
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
    ],
)  # fmt: skip
def test_every_flag_has_a_chip_its_sentence_and_a_meaning(
    given: Flag, sentence: str, chip: str, level: str, letter: str
) -> None:
    why = explain.FLAGS[given.code].why
    assert (explain.sentence(given), explain.chip(given), given.code.level) == (
        sentence,
        chip,
        level,
    )
    assert explain.letters([given]) == letter
    assert why
    text = page(row(flags=(given,)))
    assert f'<span class="chip {level}" title="{sentence}">{chip}</span>' in unescape(text)
    opened = block(text, "details")
    assert [sentence, why] in opened["pieces"]


def test_every_code_has_a_meaning_and_a_letter_that_is_explained() -> None:
    assert set(explain.FLAGS) == set(FlagCode)
    assert {m.letter for m in explain.FLAGS.values()} - {""} == set(explain.LETTERS)
    bare = flag(FlagCode.CUT_SHORT, "dlg")  # a file from elsewhere may lack the gain
    assert explain.sentence(bare) == "cut short dlg"


def test_no_attack_s_name_is_read_as_a_flag() -> None:
    """An attack called diverged_x that ran out of time is no diverged training."""
    named = flag(FlagCode.ATTACK_TIMEOUT, "diverged_x")
    assert not named.code.costs_rank
    assert explain.letters([named, flag(FlagCode.ATTACK_FAILED, "accuracy at chance")]) == "XT"
    assert verdicts.has_use(row(flags=(named,)))


def test_an_opened_row_holds_ledger_audit_costs_and_every_metric_without_repeating_itself() -> None:
    grown = Convergence(gain=0.01, budget=200, converged=True)
    noted = attack(0.4, notes=("a note",), convergence=grown, mse=interval(1 / 3))
    rows = [row("a", attacks={"dlg": noted}), row("b", attacks={"dlg": noted})]
    details = block(page(*rows), "details")
    pieces, (first, second) = details["pieces"], details["rows"]
    assert [pieces[p] for p in first["words"]] == ["One.", "Two.", "Three."]
    assert [pieces[p] for p in first["reasons"]] == ["Why."]
    assert (first["costs"], first["seeds"]) == (
        [
            ["sent up per round", "1.2 kB"],
            ["sent down per round", "3.4 MB"],
            ["client seconds per round", "0.05"],
        ],
        [0],
    )
    entry = first["attacks"]["dlg"]
    assert entry["metrics"]["mse"] == [0.3333, 0.283, 0.383]
    assert (entry["budget"], entry["convergence"]["gain"]) == (200, 0.01)
    assert pieces[entry["notes"][0]] == "a note"
    assert pieces[entry["floor"]] == {"ssim": 0.2, "ssim_class_mean": 0.7}
    assert second == first
    assert pieces.count("One.") == 1


def test_rows_of_committed_results_render(committed_site: Path) -> None:
    for name in ("quick", "as_trained_data"):
        text = (committed_site / name / "report.html").read_text()
        rows = leaderboard.load(ROOT / "results" / name)
        assert len([t for t in Tags(text).all("tr") if "data-i" in t]) == len(rows)
        assert len(re.findall(r'<section class="board"', text)) == len(tables.tables(rows))
        assert len(text) < 3_000_000


def test_the_page_sorts_by_the_figures_of_the_frame_and_shows_those_of_the_terminal() -> None:
    rows = leaderboard.load(ROOT / "results" / "quick")
    board = board_of({"": tables.tables(rows)})
    frame = frames.leaderboard([line.row for line in board.lines])
    names = [column.name for column in board.columns]
    own = {"leakage": "leakage", "accuracy": "accuracy", "accuracy drop": "accuracy_drop",
           "eps proven": "eps_record", "recognised": "recognised"}  # fmt: skip
    for column, key in own.items():
        shown = [line.cells[names.index(column)].value for line in board.lines]
        expected = frame[key].astype(float).fillna(math.nan)
        assert [float(v or "nan") for v in shown] == pytest.approx(expected, rel=1e-5, nan_ok=True)
    verdicts_ = {v.row.setting: v for o in overview.by_protocol(rows)
                 for line in o.lines for v in line.verdicts if v.row}  # fmt: skip
    terminal_ = printed(terminal.overview(overview.by_protocol(rows)))
    assert all(v.drop_text in terminal_ for v in verdicts_.values())


def test_a_filter_has_every_value_once_and_threats_one_by_one() -> None:
    rows = [row("a", threat="server: one; batch8: two"), row("b|c", threat="ser|ver: one")]
    filters = board_of({"": tables.tables(rows)}).filters
    assert filters["threat"] == ["server", "batch8", "ser/ver"]
    assert filters["defense"] == ["a", "b/c"]


def test_a_page_without_rows_says_so() -> None:
    assert "nothing has finished yet" in page()


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("digits", "digits"),
        ("folder:/home/me/faces", "folder:faces"),
        ("folder:faces/", "folder:faces"),
        ("npz:C:\\me\\sensors.npz", "npz:sensors.npz"),
    ],
)
def test_titles_have_no_paths(dataset: str, name: str) -> None:
    ((title, _),) = tables.tables([row("none", dataset=dataset)])
    assert f" · {name} · " in title
    assert "me" not in title.replace(name, "")


def test_tables_of_two_folders_of_one_name_are_kept_apart() -> None:
    rows = [row("none", dataset=f"folder:/{place}/faces") for place in "ab"]
    titles = [title for title, _ in tables.tables(rows)]
    assert [t.rpartition(" · ")[2] for t in titles] == [
        "dataset=folder:/a/faces",
        "dataset=folder:/b/faces",
    ]


def test_tables_of_one_title_are_kept_apart_by_what_differs() -> None:
    settings = PROTOCOL.model_copy(update={"lr": 0.2})
    differing = row(model_settings={"init": 0.5}, protocol_settings=settings)
    titles = [t for t, _ in tables.tables([row(), differing])]
    start = "fedavg of 3 clients · digits · lenet · init round"
    assert titles == [f"{start} · lr=0.1 · model init=-", f"{start} · lr=0.2 · model init=0.5"]
    assert [t for t, _ in tables.tables([row(), row("spm")])] == [start]
