"""The HTML page in a real browser: it sorts, filters, opens and draws, alone and by keyboard.

Skipped where no Chromium is on PATH (or named by LEAKBENCH_CHROMIUM).
"""

import csv
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.records import FlagCode, LedgerWords, Marks
from bench.records.rows import DoubledScore, Recognised
from bench.report import html, leaderboard, pictures
from tests.made_rows import HOSTILE, attack, flag, interval, leaks, other, row, run_of, worst

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
        asked = [u for u in self.asked if not u.startswith((self.address, "data:", "blob:"))]
        assert [u for u in asked if not u.endswith(("/leaderboard.js", "/leaderboard.css"))] == []
        self.context.close()


def names(page: Any) -> list[str]:
    """Defenses of the rows that are shown, in order."""
    defenses: list[str] = page.eval_on_selector_all(
        "#board tbody tr[data-i]", "rows => rows.map(r => r.dataset.defense)"
    )
    return defenses


def heads(page: Any) -> list[str]:
    """Names of the columns that are shown."""
    keys: list[str] = page.eval_on_selector_all(
        "#board thead th", "heads => heads.map(h => h.dataset.key)"
    )
    return keys


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
    page.evaluate("location.hash = 'columns=defense,accuracy,eps claimed'")
    page.wait_for_function("document.querySelectorAll('#board thead th').length === 3")

    def press(key: str, sorts: str = "ascending") -> None:
        head = page.locator(f"#board th[data-key='{key}']")
        head.locator(".dt-column-order").click()
        sync_api.expect(head).to_have_attribute("aria-sort", sorts)

    assert names(page) == ["beta", "alpha", "none", "broken", "alpha"]
    press("eps claimed")
    assert names(page) == ["beta", "alpha", "broken", "none", "alpha"]  # 9, 10, inf, no claims
    press("eps claimed", "descending")
    assert names(page)[:3] == ["broken", "alpha", "beta"]
    press("eps claimed")  # a third press does not drop the order
    press("accuracy")
    assert names(page) == ["alpha", "beta", "none", "alpha", "broken"]
    assert page.url.endswith("#sort=accuracy&columns=defense%2Caccuracy%2Ceps+claimed")
    page.locator(".open").first.click()
    page.locator(".inner").wait_for()
    press("defense")
    above = "inner => inner.closest('tr').previousElementSibling.dataset.defense"
    assert page.locator(".inner").evaluate(above) == "alpha"  # an opened row keeps its details


def test_filters_and_search_are_kept_in_the_address(browser: Any, report: Path, page: Any) -> None:
    count = page.locator(".count")
    assert count.inner_text() == "5 rows"
    page.select_option("select[name=defense]", "alpha")
    assert count.inner_text() == "2 of 5 rows"
    page.select_option("select[name=data]", "photos")
    assert count.inner_text() == "1 of 5 rows"
    link = page.url
    assert link.endswith("#data=photos&defense=alpha")
    page.locator("button[type=reset]").click()
    page.wait_for_function("!location.hash")
    page.fill("input[name=q]", "claim per CLIENT clip")
    assert names(page) == ["beta"]
    page.fill("input[name=q]", "nothing like this")
    assert "No row fits" in page.locator("#board tbody").inner_text()
    page.fill("input[name=q]", "")
    page.check("input[name=useful]")
    assert names(page) == ["beta", "alpha", "none", "alpha"]
    again = Visit(browser, report, "#" + link.split("#")[1])
    assert names(again.page) == ["alpha"]
    assert again.page.locator("select[name=defense]").input_value() == "alpha"
    again.clean()


def test_columns_are_chosen_and_the_rows_that_fit_are_saved_as_csv(page: Any) -> None:
    assert heads(page)[:3] == ["defense", "task", "leakage"]
    page.locator(".chooser summary").click()
    page.uncheck(".choices input[value=task]")
    page.check(".choices input[value='dlg SSIM']")
    assert "task" not in heads(page)
    assert "dlg SSIM" in heads(page)
    assert "columns=defense%2Cleakage" in page.url
    page.select_option("select[name=data]", "digits")
    with page.expect_download() as saved:
        page.locator(".csv").click()
    lines = list(csv.DictReader(saved.value.path().read_text().splitlines()))
    assert [line["defense"] for line in lines] == ["beta clip=1", "alpha", "none", "broken"]
    assert [line["dlg SSIM"] for line in lines] == ["0.3", "0.5", "0.95", "0.1"]
    assert lines[0]["leakage"] == "0.125"
    assert lines[0]["leakage as shown"].startswith("0.1*^ [")


def test_a_phone_shows_the_defense_its_leakage_and_who_is_recognised(
    browser: Any, tmp_path: Path
) -> None:
    seen = leaks(0.5)
    rows = [row("a", leaks=replace(seen, recognised=Recognised(count=1, of=4, baseline=0)))]
    path = tmp_path / "phone.html"
    path.write_text(html.page(rows, run_of(), pictures.none("")))
    visit = Visit(browser, path, viewport={"width": 390, "height": 800})
    assert heads(visit.page) == ["defense", "leakage", "recognised"]
    below = visit.page.locator("#board th .narrow")
    assert below.inner_text() == "digits · lenet · fedavg · init round"
    visit.page.set_viewport_size({"width": 1280, "height": 800})
    visit.page.wait_for_function("document.querySelectorAll('#board thead th').length > 3")
    assert not below.is_visible()
    assert {"task", "accuracy drop", "epsilon", "bytes", "client time"} <= set(heads(visit.page))
    box = visit.page.locator(".leaderboard .scroll")
    assert box.evaluate("b => b.scrollWidth <= b.clientWidth")  # costs are in view
    visit.clean()


def test_a_row_opens_and_closes_by_keyboard_and_gives_the_focus_back(page: Any) -> None:
    button = page.locator(".open").nth(1)
    button.focus()
    page.keyboard.press("Enter")
    detail = page.locator(".inner")
    detail.wait_for()
    assert button.get_attribute("aria-expanded") == "true"
    assert button.get_attribute("aria-controls") == detail.get_attribute("id")
    text = detail.inner_text()
    for words in ("One.", "1.2 kB", "3.4 MB", "failed: boom", "server: one round of 8 clients",
                  "No audit was made", "baseline 0.2/0.7"):  # fmt: skip
        assert words in text, words
    detail.locator("summary").first.focus()
    page.keyboard.press("Escape")
    assert detail.count() == 0
    assert button.evaluate("b => b === document.activeElement")
    button.click()
    detail.locator(".close").click()
    assert button.get_attribute("aria-expanded") == "false"
    assert button.evaluate("b => b === document.activeElement")


def test_a_link_leads_to_its_row_on_any_page_of_a_long_table(browser: Any, tmp_path: Path) -> None:
    rows = [row(f"d{i}", 0.3 + i / 1000, settings={"even": i % 2 == 0}) for i in range(60)]
    path = tmp_path / "long.html"
    path.write_text(html.page(rows, run_of(), pictures.none("")))
    visit = Visit(browser, path)
    page = visit.page
    assert names(page) == [f"d{i}" for i in range(50)]
    name = f"row={leaderboard.row_id(rows[55])[:12]}"
    page.evaluate(f"location.hash = '{name}'")
    row_ = page.locator(f"[id='{name}']")
    row_.wait_for()
    assert names(page) == [f"d{i}" for i in range(50, 60)]
    assert 0 <= row_.bounding_box()["y"] <= 900
    page.locator(".inner").wait_for()  # it is opened
    page.locator(".inner .link").click()
    page.locator("#note").wait_for()
    assert page.url.endswith(f"#{name}")
    page.fill("input[name=q]", "even=False")
    assert len(names(page)) == 30
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.locator("button[type=reset]").evaluate("b => b.click()")
    page.wait_for_function("document.querySelectorAll('#board tr[data-i]').length === 60")
    visit.clean()


def test_pictures_are_drawn_when_opened_with_words_for_each(page: Any) -> None:
    images = page.locator(".inner img")
    page.locator(".open").first.click()
    page.locator(".inner").wait_for()
    assert images.count() == 0
    summary = page.locator(".pictures summary").first
    summary.focus()
    page.keyboard.press("Enter")
    drawn = "[...document.querySelectorAll('.inner img')]"
    page.wait_for_function(f"{drawn}.length === 4 && {drawn}.every(i => i.naturalWidth === 16)")
    words = [i.get_attribute("alt") for i in images.all()]
    assert words == ["Truth, victim 1", "Truth, victim 2", "dlg, victim 1, SSIM 0.31",
                     "dlg, victim 2, SSIM 0.50"]  # fmt: skip
    assert len({i.get_attribute("src") for i in images.all()}) == 4
    page.keyboard.press("Escape")
    assert not images.first.is_visible()
    assert summary.evaluate("s => s === document.activeElement")
    page.locator("#t1 .compare summary").click()
    rows = page.locator("#t1 .compare tbody tr")
    rows.first.wait_for()  # drawn when the event of its opening is handled, after the click
    assert [r.split("\n")[0] for r in rows.locator("th").all_inner_texts()] == [
        "Truth", "beta", "alpha", "none",
    ]  # fmt: skip
    page.locator(".open").nth(3).click()
    page.locator(".pictures summary").last.click()
    page.locator(".inner").last.get_by_text("First 2 of 30 features").wait_for()


def test_columns_and_failures_explain_themselves_and_close_by_escape(page: Any) -> None:
    page.evaluate("location.hash = 'columns=defense,floor,idlg SSIM'")
    page.locator(".why").first.wait_for()
    note = page.locator("#note")
    for selector, words in (("[data-note=floor]", "The no-information baseline"), (".why", "boom")):
        button = page.locator(selector).first
        button.focus()
        page.keyboard.press("Enter")
        assert words in note.inner_text()
        page.keyboard.press("Escape")
        assert not note.is_visible()
        assert button.evaluate("b => b === document.activeElement")
    assert page.locator("[aria-sort]").count() == 0  # asking what a column means sorts nothing


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
    for summary in page.locator("summary:visible").all():
        summary.click()
    page.locator(".choices input").last.check()
    assert HOSTILE.strip() in page.locator(".inner").inner_text()
    assert page.locator("img[src=x]").count() == 0
    wide = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .grid')
        && e.getBoundingClientRect().right > 361).map(e => e.outerHTML.slice(0, 90))"""
    assert page.evaluate(wide) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    visit.clean()


def test_print_leaves_controls_out_and_shows_whole_tables(page: Any) -> None:
    page.emulate_media(media="print")
    assert not page.locator(".filters").is_visible()
    box = page.locator(".leaderboard .scroll")
    assert box.evaluate("b => getComputedStyle(b).overflowX") == "visible"


def test_without_scripts_the_tables_are_complete(browser: Any, report: Path) -> None:
    visit = Visit(browser, report, java_script_enabled=False)
    assert visit.page.locator("tr[data-i]").count() == 5
    assert visit.page.locator("#board thead th").count() > 15
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
    page.locator("#overview tbody:visible tr").first.locator("td a").first.click()
    page.locator("tr.target").wait_for()
    assert page.locator("tr.target").get_attribute("data-defense") == "none"
    assert 0 <= page.locator("tr.target").bounding_box()["y"] <= 900


# --- for everybody ----------------------------------------------------------------------------


WIDTHS = (390, 1280, 1600)


@pytest.fixture
def pages(report: Path, committed_site: Path) -> dict[str, Path]:
    """A made-up report with every kind of row, the report of `results/quick`, and a site."""
    return {
        "toy": report,
        "quick": committed_site / "quick" / "report.html",
        "site": committed_site / "index.html",
        "defense": committed_site / "defense" / "spm.html",
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
    if name in ("toy", "quick"):
        visit.page.locator(".open").first.click()
        visit.page.locator(".inner").wait_for()
    violations = axe.run(visit.page).response["violations"]
    assert [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in violations] == []
    visit.clean()


@pytest.mark.parametrize("name", ["toy", "quick", "site", "defense"])
def test_the_leaderboard_is_in_view_and_no_page_is_wider_than_the_screen(
    browser: Any, pages: dict[str, Path], name: str
) -> None:
    visit = Visit(browser, pages[name])
    for width in WIDTHS:
        visit.page.set_viewport_size({"width": width, "height": 900})
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert visit.page.locator("#board thead").bounding_box()["y"] < 1000
        box = visit.page.locator(".leaderboard .scroll")
        assert box.evaluate("b => b.scrollWidth <= b.clientWidth")
    visit.clean()
