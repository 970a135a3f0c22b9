"""Texts that come from files and plugins, written so that the reader of each format takes them for
nothing but text: a function per format, which all writers use. (`bench.records.text` writes JSON.)
"""

import re
from contextlib import suppress
from typing import Any

from markupsafe import Markup

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but for tab and line feed
    "\u202a-\u202e\u2066-\u2069"  # what turns the direction of writing
    "\ud800-\udfff]"  # halves of characters
)
_MARKDOWN = {ord(c): f"&#{ord(c)};" for c in "<|`\\{"}
_STAR = re.compile(r"\*(?=\S)")
_BRACKET = re.compile(r"\](?=[(\[:])")
_ENTITY = re.compile(r"&(?=#?\w+;)")
_UNDERSCORE = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])|~(?=~)")
_BLOCK = re.compile(r"[#>\-+=~:\[!]|\d+(?=[.)])")
_FORMULA = "=+-@＝＋－＠"
_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "ε": r"$\varepsilon$",
    "–": "--",
    "−": r"$-$",
    "×": r"$\times$",
    "…": r"\dots{}",
    "·": r"$\cdot$",
}


def visible(text: str) -> str:
    """The text, for a terminal too: what would steer its reader, as control characters and those
    that turn the direction of writing do, stands there as its number; lines stay lines."""
    if text.isprintable():  # nearly all of them, and the pattern's are not
        return text
    text = text.replace("\r\n", "\n")
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same without line breaks, which end a table's row or a list's entry."""
    return " ".join(visible(text).splitlines())


def markdown(text: str) -> str:
    """One line of text within Markdown, in a table's cell as well: no HTML, code, link, emphasis,
    attribute or block begins in it. Brackets and underscores stay where they mean nothing."""
    return _inline(one_line(text)).strip()


def _inline(line: str) -> str:
    text = _ENTITY.sub("&amp;", line).translate(_MARKDOWN)
    text = _BRACKET.sub("&#93;", _STAR.sub("&#42;", text))
    return _UNDERSCORE.sub(lambda match: f"&#{ord(match[0][0])};" * len(match[0]), text)


def markdown_paragraph(text: str) -> str:
    """Escape a text at the beginning of a line, which may hold `code`."""
    pieces = re.split(r"(?<!`)`([^`]+)`(?!`)", one_line(text))
    body = "".join(markdown_code(p) if i % 2 else _inline(p) for i, p in enumerate(pieces)).strip()
    begins = _BLOCK.match(body)
    if begins is None:
        return body
    return "".join(f"&#{ord(c)};" for c in begins[0]) + body[begins.end() :]


def markdown_code(text: str) -> str:
    """Return one line of code as a Markdown span that nothing in it ends."""
    code = one_line(text).strip()
    fence = "`" * (1 + max(map(len, re.findall("`+", code)), default=0))
    space = " " if code[:1] == "`" or code[-1:] == "`" or not code else ""
    return f"{fence}{space}{code}{space}{fence}"


def csv_cell(value: Any) -> Any:
    """A cell that no spreadsheet computes: a text that begins as a formula does gets an apostrophe
    before it. Numbers stay numbers, as texts too."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    first = text.lstrip()
    if len(first) < 2 or first[0] not in _FORMULA:
        return text
    with suppress(ValueError):
        float(first)
        return text
    return f"'{text}"


def escape_value(value: Any) -> Any:
    """A value before a template escapes it."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def latex(text: str) -> str:
    """Text that LaTeX sets as it stands."""
    return "".join(_LATEX.get(c, c) for c in one_line(text))
