"""No text of a file or a plugin is anything but text to whoever reads what is written."""

import csv
import io
import json
import re
import unicodedata
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from bench.records import Row
from bench.records.rows import rows_to_json
from bench.report import escaping, frames, text
from bench.report.console import PlainConsole
from bench.report.html import page as html_page
from bench.report.overview import by_protocol
from bench.report.pictures import none
from bench.report.terminal import boards, overview
from tests.made_rows import attack, row, run_of
from tests.test_report_html import Tags

RUN = run_of()

PIECES = (
    *("<img src=x onerror=alert(1)>", "</script><!--", "<a href='javascript:1'>", "&lt;b&gt;"),
    *("`code`", "``", "|", "\\|", "\\", "[a](http://b)", "![a](b)", "[a]: http://b"),
    "[red]x[/nope]",
    *("*a*", "**", "_a_", "~~a~~", "# a", "> a", "- a", "1. a", "---", "{: onclick=a}", "[^1]"),
    *("=HYPERLINK(1)", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\r=1", "'=1", "=1", "\n=1"),
    *("\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\x00", "\x08\x08", "\r", "\n", "\r\n", "\x85"),
    *("\u202eabc", "\u2066", "\u200f", "\ud800", "é", "名前", "🙂", " ", "0.5", "-0.5", ":smile:"),
    *("$x_$", "%", "\\input{/etc/passwd}", "^", "~", '"', "[1]", "*2", "}", "{"),
)
NASTY = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=5).map("".join)
INLINE = {"link_open", "image", "code_inline", "html_inline", "em_open", "strong_open", "s_open"}


def board(words: str) -> list[Row]:
    """Two rows of one table with these words wherever a row has some."""
    nasty = row(
        words, settings={words: words}, dataset=words, model=words, suite=words, threat=words,
        observed=words, variant=words, unit=words, eps_claimed=1.0,
        attacks={words: attack(), "dlg": attack(None, reason=words.replace("`", "'"))},
    )  # fmt: skip
    return [nasty, row()]


def is_plain(shown_: str) -> bool:
    """Whether no character steers a terminal or turns the direction of writing."""
    kept = shown_.replace("\n", "").replace("\t", "")
    return not any(
        unicodedata.category(c) in ("Cc", "Cs")
        or unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI")
        for c in kept
    )


@given(NASTY)
def test_a_text_is_seen_as_it_is_and_cleaning_it_again_changes_nothing(words: str) -> None:
    seen = escaping.visible(words)
    assert is_plain(seen)
    assert escaping.visible(seen) == seen
    seen.encode()
    if is_plain(words):
        assert seen == words


# --- terminal -------------------------------------------------------------------------------------


@given(NASTY)
@settings(max_examples=60, deadline=None)
def test_a_terminal_gets_text_alone(words: str) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, width=80, force_terminal=False)
    for table in (*overview(by_protocol(board(words))), *boards(board(words))):
        console.print(table)
    console.print(words)
    assert is_plain(out.getvalue())


def test_markup_and_emoji_are_text_in_a_terminal() -> None:
    out = io.StringIO()
    PlainConsole(file=out, width=80).print("[red]x[/nope] :smile: [link=http://a]b[/link]")
    assert out.getvalue() == "[red]x[/nope] :smile: [link=http://a]b[/link]\n"


# --- Markdown -------------------------------------------------------------------------------------


def inline(source: str) -> tuple[Counter[str], str]:
    """What stands in Markdown, blocks and spans by kind, and its text."""
    kinds, words = Counter[str](), []
    for token in (
        MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(source)
    ):
        kinds[token.type] += 1
        for child in token.children or ():
            kinds[child.type] += 1
            words.append(child.content)
    return kinds, "".join(words)


@given(NASTY)
@example("a\\|b")
@example("a_b_ _c_")
def test_markdown_shows_a_text_as_it_is(words: str) -> None:
    wanted = " ".join(escaping.visible(words).splitlines()).strip()
    kinds, _ = inline(escaping.markdown_paragraph(words.replace("`", "")))
    assert kinds.keys() <= {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
    kinds, told = inline(f"| a | {escaping.markdown(words)} | c |\n|---|---|---|")
    assert not kinds.keys() & INLINE
    assert kinds["th_open"] == 3
    assert told.split() == ["a", *wanted.split(), "c"] or told == f"a{wanted}c"


@given(NASTY)
@settings(max_examples=60, deadline=None)
def test_a_leaderboard_in_markdown_has_the_same_blocks_whatever_its_words(words: str) -> None:
    told = board_in_markdown(words, f"x {words}".replace("`", "'"))
    wanted = board_in_markdown("word", "a")
    blocks = {k for k in (*told, *wanted) if k.endswith("_open")} | INLINE | {"html_block"}
    assert {k: told[k] for k in blocks} == {k: wanted[k] for k in blocks}


def board_in_markdown(words: str, description: str) -> Counter[str]:
    run = replace(
        run_of(description=description), command=words, device=words, versions={"a": words}
    )
    return inline(text.markdown(board(words), run))[0]


# --- CSV ------------------------------------------------------------------------------------------


@given(NASTY)
def test_no_spreadsheet_computes_a_cell(words: str) -> None:
    lines = list(csv.reader(io.StringIO(frames.to_csv(board(words)), newline="")))
    assert {len(line) for line in lines} == {len(lines[0])}
    for line in lines:
        for cell in line:
            first = cell.strip()
            assert is_plain(cell)
            assert len(first) < 2 or first[0] not in "=+-@=" or _is_number(first)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("value", [-0.5, 3, None, True, "-0.5", "+3", "-inf", "1e-5", "-", "none"])
def test_numbers_stay_numbers_in_csv(value: Any) -> None:
    assert escaping.csv_cell(value) == value


# --- HTML -----------------------------------------------------------------------------------------


def elements(words: str) -> tuple[Counter[Any], int]:
    """Count a page's elements with their attributes' names, and its comments."""
    run = replace(
        RUN, command=words, device=words, versions={words: words},
        suite=RUN.suite.model_copy(update={"description": words}),
    )  # fmt: skip
    page = html_page(board(words), run, none(words))
    tags = Counter((tag, *sorted({*names} - {"selected"})) for tag, names in Tags(page).tags)
    for odd in ("wbr", "small"):  # names are broken after underscores and equals signs
        for key in [k for k in tags if k[0] == odd]:
            del tags[key]
    return tags, page.count("<!--")


@given(NASTY.filter(lambda w: len(w.strip()) > 1))
@settings(max_examples=25, deadline=None)
def test_a_page_has_the_same_elements_whatever_its_words(words: str) -> None:
    assert elements(words) == elements("word")


# --- LaTeX and JSON -------------------------------------------------------------------------------


@given(NASTY)
def test_latex_reads_no_command_in_a_text(words: str) -> None:
    shown_ = escaping.latex(words)
    left = re.sub(
        r"\\text\w+{}|\\[&%$#_{}]|\$\\(varepsilon|times|cdot)\$|\$-\$|\\dots{}", "", shown_
    )
    assert not set(left) & set("\\&%$#_{}~^\n\r")
    assert is_plain(shown_)
    tex = text.overview_to_latex(board(words))
    (kinds, *_) = re.findall(r"\\begin{tabular}{([lr]+)}", tex)
    lines = [line for line in tex.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {len(kinds) - 1}


@given(NASTY)
def test_json_holds_every_text(words: str) -> None:
    written = rows_to_json(board(words), lambda f: words)
    written.encode()
    assert json.loads(written)[0]["defense"] == words
