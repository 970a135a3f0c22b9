"""What flags and columns mean, in words that stand beside them on the page."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.records import Flag, FlagCode, Row

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
COLUMNS: Mapping[str, str] = _WORDS["columns"]
"""By the `note` of a column."""
COSTS: Mapping[str, str] = _WORDS["costs"]
"""By the name of a column of the overview."""
NO_LEAKAGE: Mapping[str, str] = _WORDS["no_leakage"]
"""By what stands in the overview in place of a leakage."""
LEGEND: Mapping[str, str] = _WORDS["legend"]
"""Above the tables, where it occurs."""
OVERVIEW: Mapping[str, str] = _WORDS["overview"]
"""Above overviews, where it occurs."""
MARKS: Mapping[str, str] = _WORDS["marks"]
"""By sign."""
FIGURES: Mapping[str, str] = _WORDS["figures"]
"""By name: what the figures on a page show."""
MEASURES: Mapping[str, str] = _WORDS["measures"]
"""By name: the axis of what is measured over the rounds."""
LETTERS: Mapping[str, str] = _WORDS["letters"]
"""At a row's end in the terminal."""


@dataclass(frozen=True)
class Meaning:
    """What a kind of flag says.

    Attributes:
        chip: A few words; {subject} stands for the attack or unit that the flag is about.
        text: The whole sentence, with the flag's values.
        why: What it means for a reader.
        letter: Key of LETTERS, "" where the terminal leaves it to the files.
        doubt: Why the leakage may be more than it shows, "" where it is not.
    """

    chip: str
    text: str
    why: str
    letter: str
    doubt: str = ""


FLAGS: Mapping[FlagCode, Meaning] = {
    FlagCode(code): Meaning(**meaning) for code, meaning in _WORDS["flags"].items()
}
"""By code."""
_CHIP = 40
"""Most characters of a chip."""


def sentence(flag: Flag) -> str:
    """Return the whole flag in words."""
    return _fill(FLAGS[flag.code].text, flag)


def chip(flag: Flag) -> str:
    """Return the flag in a few words."""
    text = _fill(FLAGS[flag.code].chip, flag)
    return text if len(text) <= _CHIP else f"{text[: _CHIP - 1]}…"


def letters(flags: Sequence[Flag]) -> str:
    """Return the letters of a row's flags, each once, in the order of LETTERS."""
    used = {FLAGS[f.code].letter for f in flags}
    return "".join(letter for letter in LETTERS if letter in used)


def _fill(template: str, flag: Flag) -> str:
    try:
        return template.format(**{**flag.values, "subject": flag.subject})
    except (KeyError, ValueError):  # a file from elsewhere may lack a value
        return " ".join([flag.code.replace("_", " "), flag.subject]).strip()


def interval_words(rows: Sequence[Row]) -> str:
    """Return what the rows' intervals are over."""
    return " or ".join(dict.fromkeys(f"95 % interval over {r.interval_over}" for r in rows))
