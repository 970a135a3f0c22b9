"""The HTML page in a real browser: it sorts, filters, opens and draws, alone and by keyboard.

Skipped where no Chromium is on PATH (or named by LEAKBENCH_CHROMIUM).
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.records import FlagCode, LedgerWords, Marks
from bench.records.rows import DoubledScore
from bench.report import boards, html, leaderboard, pictures
from tests.made_rows import HOSTILE, attack, flag, interval, other, row, run_of, worst

sync_api = pytest.importorskip("playwright.sync_api")

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update",
             "--disable-sync"]  # fmt: skip


def chromium() -> str | None:
    named = os.environ.get("LEAKBENCH_CHROMIUM")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} on PATH")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield running
        running.close()


class Visit:
    """A page with what it said, asked for and popped up."""

    def __init__(self, browser: Any, path: Path, hash_: str = "", **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1300, "height": 900}, **options}
        )
        self.page = self.context.new_page()
        self.address = path.as_uri()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text))
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on("dialog", lambda d: (self.said.append(f"dialog {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(self.address + hash_)

    def clean(self) -> None:
        """Nothing went wrong and nothing was asked for but the file itself."""
        assert self.said == []
        own = (self.address, "data:")
        assert [u for u in self.asked if not u.startswith(own)] == []
        self.context.close()


def names(page: Any) -> list[str]:
    """Defenses of the first table's rows that are shown, in order."""
    shown = "#t1 tbody tr[data-i]:not([hidden])"
    defenses: list[str] = page.eval_on_selector_all(shown, "rows => rows.map(r => r.dataset.d)")
    return defenses


def toy_rows() -> list[Any]:
    """Two tables; numbers whose order as text is another one, an infinite and a missing one."""
    doubled = DoubledScore(budget=400, ssim=interval(0.97))
    return [
        row("beta", 0.3, accuracy=interval(0.8), eps_claimed=9.0, unit="client", eps_record=2.0,
            settings={"clip": 1.0}, flags=(flag(FlagCode.CLAIM_UNIT, "client"),),
            marks=Marks(best=True), accuracy_drop=interval(0.1)),
        row("alpha", 0.5, accuracy=interval(0.7), eps_claimed=10.0, unit="client",
            attacks={"dlg": attack(0.5), "idlg": attack(None, status="failed", reason="boom")}),
        row("none", 0.95, attacks={"dlg": attack(0.95, doubled=doubled), "idlg": attack(0.9)}),
        row("broken", 0.1, accuracy=None, eps_claimed=math.inf, unit="record",
            flags=(flag(FlagCode.DIVERGED, reason="weights not finite after round 3"),)),
        row("alpha", 0.4, dataset="photos", checkpoint="final"),
    ]  # fmt: skip


def toy_pictures(rows: list[Any]) -> Any:
    rng = np.random.default_rng(0)
    truth = pictures._sprite(rng.random((2, 1, 1, 16, 16)))
    album = pictures.none("") | {"victims": 2, "sprites": [truth]}
    for place, entry in enumerate(rows[:3]):
        album["sprites"].append(pictures._sprite(rng.random((2, 1, 1, 16, 16))))
        album["cells"].append({
            "row": leaderboard.row_id(entry), "attack": "dlg", "samples": 1, "metric": "ssim",
            "scores": [0.31, 0.5], "truth": 0, "images": place + 1,
        })  # fmt: skip
    album["records"].append({
        "row": leaderboard.row_id(rows[3]), "attack": "dlg", "samples": 1, "features": 30,
        "truth": [[1.5, -2.0]], "images": [[1.25, 0.5]], "scores": [0.125],
    })  # fmt: skip
    return album


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = toy_rows()
    path = tmp_path_factory.mktemp("browser") / "report.html"
    path.write_text(html.page(rows, run_of(), toy_pictures(rows)))
    return path


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    """The made-up report, in which nothing may go wrong."""
    visit = Visit(browser, report)
    yield visit.page
    visit.clean()


def test_columns_sort_as_numbers_inf_above_all_and_missing_last(page: Any) -> None:
    heads = [c.head for c in boards.boards(toy_rows())[0].columns]

    def press(title: str) -> str | None:
        head = page.locator("#t1 thead th").nth(heads.index(title))
        head.locator(".sort").click()
        sort: str | None = head.get_attribute("aria-sort")
        return sort

    assert names(page) == ["beta", "alpha", "none", "broken"]
    assert press("ε claimed") == "ascending"
    assert names(page) == ["beta", "alpha", "broken", "none"]  # 9, 10, inf, no claim
    assert press("ε claimed") == "descending"
    assert names(page) == ["broken", "alpha", "beta", "none"]
    press("accuracy")
    assert names(page) == ["alpha", "beta", "none", "broken"]
    press("defense")
    assert names(page) == ["alpha", "beta", "broken", "none"]
    assert page.locator("#t1 [aria-sort]").count() == 1
    page.locator("#t1 .open").first.click()
    press("defense")
    opened = page.locator("#t1 tr.detail").evaluate("d => d.previousElementSibling.dataset.d")
    assert opened == "alpha"  # an opened row keeps its details


def test_filters_hold_for_all_tables_and_are_kept_in_the_address(
    browser: Any, report: Path, page: Any
) -> None:
    count = page.locator(".count")
    assert count.inner_text() == "5 rows in 2 tables"
    page.select_option("select[name=defense]", "alpha")
    assert count.inner_text() == "2 of 5 rows, in 2 tables"
    page.select_option("select[name=dataset]", "photos")
    assert count.inner_text() == "1 of 5 rows, in 1 table"
    assert not page.locator("#t1").is_visible()
    assert not page.locator(".contents [data-board=t1]").is_visible()
    link = page.url
    assert link.endswith("#dataset=photos&defense=alpha")
    page.locator("button[type=reset]").click()
    page.wait_for_function("!location.hash")
    page.fill("input[name=q]", "claim per CLIENT clip")
    assert names(page) == ["beta"]
    page.fill("input[name=q]", "nothing like this")
    assert "None of 5 rows fits" in count.inner_text()
    page.fill("input[name=q]", "")
    page.check("input[name=useful]")
    assert names(page) == ["beta", "alpha", "none"]
    again = Visit(browser, report, "#" + link.split("#")[1])
    assert again.page.locator(".count").inner_text() == "1 of 5 rows, in 1 table"
    assert again.page.locator("select[name=defense]").input_value() == "alpha"
    again.page.evaluate("location.hash = 'useful=1'")
    again.page.wait_for_function("document.querySelector('.count').textContent.startsWith('4 of')")
    again.page.locator(".contents a").nth(1).click()
    assert again.page.url.endswith("#useful=1&at=t2")
    assert again.page.locator("#t2 h2").evaluate("h => h === document.activeElement")
    again.clean()


def test_a_row_opens_and_closes_by_keyboard_and_gives_the_focus_back(page: Any) -> None:
    button = page.locator("#t1 .open").nth(1)
    button.focus()
    page.keyboard.press("Enter")
    detail = page.locator("#t1 tr.detail")
    assert button.get_attribute("aria-expanded") == "true"
    assert button.get_attribute("aria-controls") == detail.get_attribute("id")
    text = detail.inner_text()
    for words in ("One.", "1.2 kB", "3.4 MB", "failed: boom", "server: one round of 8 clients",
                  "No audit was made", "floor 0.2/0.7"):  # fmt: skip
        assert words in text, words
    detail.locator("summary").first.focus()
    page.keyboard.press("Escape")
    assert detail.count() == 0
    assert button.evaluate("b => b === document.activeElement")
    button.click()
    detail.locator(".close").click()
    assert button.get_attribute("aria-expanded") == "false"
    assert button.evaluate("b => b === document.activeElement")


def test_pictures_are_drawn_when_opened_with_words_for_each(page: Any) -> None:
    assert page.locator("img:not(.plot)").count() == 0
    page.locator("#t1 .open").first.click()
    assert page.locator("img:not(.plot)").count() == 0
    summary = page.locator("#t1 .pictures summary").first
    summary.focus()
    page.keyboard.press("Enter")
    drawn = "[...document.querySelectorAll('img:not(.plot)')]"
    page.wait_for_function(f"{drawn}.length === 4 && {drawn}.every(i => i.naturalWidth === 16)")
    words = [i.get_attribute("alt") for i in page.locator("img:not(.plot)").all()]
    assert words == ["Truth, victim 1", "Truth, victim 2", "dlg, victim 1, SSIM 0.31",
                     "dlg, victim 2, SSIM 0.50"]  # fmt: skip
    sources = {i.get_attribute("src") for i in page.locator("img:not(.plot)").all()}
    assert len(sources) == 4
    page.keyboard.press("Escape")
    assert not page.locator("img:not(.plot)").first.is_visible()
    assert summary.evaluate("s => s === document.activeElement")
    page.locator("#t1 .compare summary").click()
    rows = page.locator("#t1 .compare tbody tr")
    rows.first.wait_for()  # drawn when the event of its opening is handled, after the click
    assert [r.split("\n")[0] for r in rows.locator("th").all_inner_texts()] == [
        "Truth", "* beta", "alpha", "none",
    ]  # fmt: skip
    page.locator("#t1 .open").nth(3).click()
    page.locator("#t1 .pictures summary").last.click()
    page.locator("#t1 tr.detail").last.get_by_text("First 2 of 30 features").wait_for()


def test_flags_columns_and_failures_explain_themselves_and_close_by_escape(page: Any) -> None:
    note = page.locator("#note")
    for selector, words in (
        ("#t1 tbody .chip", "do not compare it with claims"),
        ("#t1 [data-note=floor]", "The no-information baseline"),
        ("#t1 .why", "boom"),
    ):
        button = page.locator(selector).first
        button.focus()
        page.keyboard.press("Enter")
        assert words in note.inner_text()
        page.keyboard.press("Escape")
        assert not note.is_visible()
        assert button.evaluate("b => b === document.activeElement")


def test_a_long_table_shows_its_first_rows_as_sorted_and_filtered_until_asked_for_all(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.report.html.AT_ONCE", 5)
    count = 10
    rows = [row(f"d{i}", 0.3 + i / 1000, settings={"even": i % 2 == 0}) for i in range(count)]
    path = tmp_path / "long.html"
    path.write_text(html.page(rows, run_of(), pictures.none("")))
    visit = Visit(browser, path)
    page = visit.page

    def visible() -> list[str]:
        names: list[str] = page.eval_on_selector_all(
            "#t1 tr[data-i]", "rows => rows.filter(r => r.checkVisibility()).map(r => r.dataset.d)"
        )
        return names

    assert visible() == [f"d{i}" for i in range(5)]
    assert page.locator(".count").inner_text() == f"{count} rows in 1 table"
    for _ in range(2):
        page.locator("#t1 .sort:text-is('leakage')").click()
    assert visible() == [f"d{i}" for i in range(count - 1, 4, -1)]
    page.fill("input[name=q]", "even=False")
    assert len(visible()) == count // 2
    assert not page.locator("#t1 .rest").is_visible()
    page.locator("button[type=reset]").click()
    page.locator("#t1 .all").click()
    assert len(visible()) == count
    assert page.evaluate("document.activeElement.closest('tr').dataset.d") == "d4"
    visit.clean()


def test_a_phone_scrolls_tables_in_their_own_box_and_not_the_page(
    browser: Any, report: Path
) -> None:
    visit = Visit(browser, report, viewport={"width": 360, "height": 740})
    page = visit.page
    page.locator("#t1 .open").first.click()
    page.locator("#t1 .pictures summary").first.click()
    page.locator("#t1 .compare summary").click()
    page.locator(".guide summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    box = page.locator("#t1 .scroll")
    assert box.evaluate("b => b.scrollWidth > b.clientWidth")
    box.evaluate("b => { b.scrollLeft = 300; }")
    name, edge = (
        page.locator(s).bounding_box()["x"] for s in ("#t1 .open >> nth=0", "#t1 .scroll")
    )
    assert 0 <= name - edge < 30  # the setting stays in sight
    assert page.locator("#t1 .inner").bounding_box()["width"] <= 360
    visit.clean()


def test_hostile_names_run_nothing_and_ask_for_nothing(browser: Any, tmp_path: Path) -> None:
    bad = attack(None, status="failed", reason=HOSTILE)
    rows = [
        row(HOSTILE, settings={HOSTILE: HOSTILE}, flags=(other(HOSTILE),), threat=HOSTILE,
            dataset=HOSTILE,
            attacks={HOSTILE: bad, "dlg": attack(notes=(HOSTILE,))},
            ledger=LedgerWords(words=(HOSTILE,), reasons=(HOSTILE,))),
        *(row(d, dataset=HOSTILE, threat=HOSTILE, attacks={HOSTILE: attack()},
              worst=worst(interval(0.5), attack_=HOSTILE)) for d in "bcd"),
    ]  # fmt: skip
    album = toy_pictures(rows + rows)
    for cell in album["cells"] + album["records"]:
        cell["attack"] = HOSTILE
        cell["row"] = leaderboard.row_id(rows[0])
    path = tmp_path / "hostile.html"
    path.write_text(html.page(rows, run_of(HOSTILE, HOSTILE, command=HOSTILE), album))
    visit = Visit(browser, path, "#q=%3Cimg%20src%3Dx%20onerror%3Dalert(3)%3E&at=%3Cb%3E",
                  viewport={"width": 360, "height": 740})  # fmt: skip
    page = visit.page
    page.locator("button[type=reset]").click()
    page.locator(".open").first.click()
    for summary in page.locator("#t1 summary").all():
        summary.click()
    page.locator("#t1 tbody .chip").first.click()
    assert HOSTILE.strip() in page.locator("#note").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("img[src=x]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    visit.clean()


def test_print_leaves_controls_out_and_shows_whole_tables(page: Any) -> None:
    page.emulate_media(media="print")
    assert not page.locator(".filters").is_visible()
    assert page.locator("#t1 .scroll").evaluate("b => getComputedStyle(b).overflowX") == "visible"


def test_without_scripts_the_tables_are_complete(browser: Any, report: Path) -> None:
    visit = Visit(browser, report, java_script_enabled=False)
    assert visit.page.locator("#t1 tr[data-i]").count() == 4
    assert not visit.page.locator(".filters").is_visible()
    assert "need JavaScript" in visit.page.locator(".noscript").inner_text()
    visit.clean()


def test_another_loss_of_accuracy_is_chosen_by_keyboard_and_changes_the_figures(
    page: Any,
) -> None:

    def cell(defense: str) -> str:
        lines = page.locator("#overview tbody:visible tr")
        line = lines.filter(has=page.locator(f"th:text-is('{defense}')"))
        text: str = line.locator("td").first.inner_text()
        return text.strip()

    assert cell("beta") == "−10pt"  # .8 against .9
    page.locator("#overview input").nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#overview input").nth(2).is_checked()
    assert cell("beta") == "0.1 [0.0, 0.7] *=^"  # four victims of one seed separate no rows
    assert page.locator("#overview tbody:visible").count() == 1


def test_a_figure_of_the_overview_leads_to_its_row(page: Any) -> None:
    page.locator("#overview tbody:visible tr").last.locator("td a").first.click()
    page.wait_for_function("location.hash === '#t1-2'")
    assert page.locator("tr:target").get_attribute("data-d") == "none"
    box = page.locator("tr:target").bounding_box()
    assert 0 <= box["y"] <= 900


# --- for everybody ----------------------------------------------------------------------------


WIDTHS = (390, 1280, 1600)


@pytest.fixture
def pages(report: Path, committed_site: Path) -> dict[str, Path]:
    """A made-up report with every kind of row, the report of `results/quick`, and a site."""
    return {
        "toy": report,
        "quick": committed_site / "quick" / "report.html",
        "site": committed_site / "index.html",
        "defense": committed_site / "quick" / "defense" / "spm.html",
    }


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [
        # The made-up page has all that the others have, and colours do not differ by width.
        ("toy", "light", 390),
        ("toy", "dark", 1280),
        pytest.param("toy", "light", 1280, marks=pytest.mark.slow),
        pytest.param("toy", "light", 1600, marks=pytest.mark.slow),
        pytest.param("quick", "light", 390, marks=pytest.mark.slow),
        pytest.param("site", "dark", 1280, marks=pytest.mark.slow),
        pytest.param("defense", "dark", 1280, marks=pytest.mark.slow),
    ],
)
def test_axe_finds_nothing_wrong_in_light_and_dark_at_any_width(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    size = {"width": width, "height": 900}
    visit = Visit(browser, pages[name], viewport=size, color_scheme=scheme)
    visit.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    if name != "site":
        visit.page.locator("#t1 .open").first.click()
    violations = axe.run(visit.page).response["violations"]
    assert [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in violations] == []
    visit.clean()


@pytest.mark.parametrize("name", ["toy", "quick", "site", "defense"])
def test_the_overview_is_in_view_and_no_page_is_wider_than_the_screen(
    browser: Any, pages: dict[str, Path], name: str
) -> None:
    visit = Visit(browser, pages[name])
    for width in WIDTHS:
        visit.page.set_viewport_size({"width": width, "height": 900})
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        box = visit.page.locator(".overview table").first.bounding_box()
        assert box["y"] < 900 or name in ("site", "defense")  # which say first what they hold
        if name == "toy":
            assert visit.page.locator("#overview").bounding_box()["y"] < 400
            shown = visit.page.locator("#overview tbody:visible")
            assert (shown.count(), shown.locator("tr").count()) == (1, 4)
            assert shown.locator("tr").last.locator("th").inner_text() == "none"
    visit.clean()
