"""A report of 2,000 rows: how long it takes to make, how large it is, how fast it opens.

    uv run pytest tests/benchmarks/test_report_speed.py --benchmark-only -s

Rows are those of a drawn folder (drawn_folder.py) of one seed: 20 tables of 100 settings, or two
of 1,000. Opening is measured in headless Chromium, from the
navigation to the first frame after `load` (skipped without a browser), and as the CPU time of
its renderer, which a neighbour's load does not stretch; scrolling as the longest
gap between two frames while the page moves by a screen per frame from top to bottom. Printed, not
asserted: a machine under load would make any bound a coin toss.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report import html, leaderboard, pictures
from bench.report.text import to_leaderboard_json
from tests.benchmarks.drawn_folder import Extent, write
from tests.made_rows import run_of

ROWS = 2000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    from tests.test_report_browser import ARGUMENTS, chromium

    path = chromium()
    if path is None:
        pytest.skip("no Chromium on PATH")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield running
        running.close()


SCROLL = """() => new Promise((done) => {
  const gaps = [];
  let last = performance.now();
  const step = (now) => {
    gaps.push(now - last);
    last = now;
    scrollBy(0, innerHeight);
    if (scrollY + innerHeight + 2 < document.documentElement.scrollHeight && gaps.length < 400) {
      requestAnimationFrame(step);
    } else {
      gaps.sort((a, b) => a - b);
      done({ frames: gaps.length, median: gaps[gaps.length >> 1],
             p95: gaps[Math.floor(gaps.length * 0.95)], longest: gaps[gaps.length - 1] });
    }
  };
  requestAnimationFrame(step);
})"""
OPENED = """() => new Promise((done) => requestAnimationFrame(() => setTimeout(() =>
  done(performance.now()))))"""


def renderers(browser: Any) -> float:
    """CPU seconds of all renderer processes so far."""
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return sum(float(p["cpuTime"]) for p in processes if p["type"] == "renderer")


@pytest.mark.parametrize("per_table", [100, 1000])
def test_report_of_two_thousand_rows(
    benchmark: Any, browser: Any, tmp_path: Path, per_table: int
) -> None:
    extent = Extent(tasks=ROWS // 2 // per_table, settings=per_table, seeds=1)
    write(tmp_path / "results", extent)
    rows = leaderboard.load(tmp_path / "results")
    began = time.process_time()
    text = benchmark.pedantic(
        lambda: html.page(rows, run_of(), pictures.none("none were kept")), rounds=1
    )
    made = time.process_time() - began
    started = time.process_time()
    to_leaderboard_json(rows)
    as_json = time.process_time() - started
    path = tmp_path / "report.html"
    path.write_text(text)
    opened, spent = [], []
    for _ in range(3):
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        before = renderers(browser)
        page.goto(path.as_uri())
        opened.append(page.evaluate(OPENED))
        spent.append(1000 * (renderers(browser) - before))
        nodes = page.evaluate("document.querySelectorAll('*').length")
        if len(opened) < 3:
            page.close()
    timed = {}
    for name, action in (
        ("filter", "document.querySelector('[name=q]').value = 'spm';"
                   "document.querySelector('form').dispatchEvent(new Event('input'))"),
        ("reset", "document.querySelector('[name=q]').value = '';"
                  "document.querySelector('form').dispatchEvent(new Event('input'))"),
        ("sort", "document.querySelectorAll('.dt-column-order')[2].click()"),
        ("open a row", "document.querySelector('#board .open').click()"),
    ):  # fmt: skip
        timed[name] = page.evaluate(
            f"() => {{ const t = performance.now(); {action}; document.body.offsetHeight;"
            " return performance.now() - t; }"
        )
    scrolled = page.evaluate(SCROLL)
    page.close()
    print(
        f"\n{ROWS} rows, {per_table} a table: {len(text) / 1e6:.1f} MB, {nodes:,} elements; opened "
        f"in {min(opened):.0f} ms (of {', '.join(f'{o:.0f}' for o in opened)}), "
        f"{min(spent):.0f} ms of CPU; "
        + ", ".join(f"{k} {v:.0f} ms" for k, v in timed.items())
        + f"; scrolling: {scrolled['frames']} frames, median {scrolled['median']:.0f} ms, "
        f"95 % below {scrolled['p95']:.0f} ms, longest {scrolled['longest']:.0f} ms; "
        f"made in {made:.1f} s of CPU, {as_json:.1f} s of it the leaderboard's JSON for its hash"
    )
