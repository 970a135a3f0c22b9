"""Rows of a published folder that are not their paper's method, as its errata.toml lists them."""

from pathlib import Path

import pytest

from bench.errors import UserError
from bench.records.files import read_toml
from bench.report.errata import ERRATA, Errata, with_errata
from bench.report.explain import letters, sentence
from bench.report.marks import with_marks
from bench.report.overview import by_protocol, legend, overview
from tests.made_rows import interval, row

TEXT = """[[rows]]
defense = "b"
protocol = "fedavg"
reason = "its masks covered the classifier too"
"""
RESULTS = Path(__file__).parents[1] / "results"


def test_listed_rows_are_flagged_and_marked_and_no_others(tmp_path: Path) -> None:
    rows = [
        row(name, 0.4, accuracy=interval(0.9), settings={"own": name}) for name in ("a", "b", "a+b")
    ]
    bare = row("none", 1.0, accuracy=interval(0.9))
    assert with_errata(rows, tmp_path) == rows
    (tmp_path / ERRATA).write_text(TEXT)
    flagged = with_errata(with_marks([*rows, bare]), tmp_path)
    assert [letters(r.flags) for r in flagged] == ["", "M", "M", ""]
    (flag,) = flagged[1].flags
    assert sentence(flag) == "not the paper's own method: its masks covered the classifier too"
    cells = {line.defense: line.verdicts[0].signs for line in overview(flagged).lines}
    assert cells == {"a": "*=", "b": "*=†", "a+b": "*=†", "none": "*"}
    costly = with_errata(
        with_marks([row("b", 0.4, accuracy=interval(0.5), accuracies={0: 0.5}), bare]), tmp_path
    )
    lines = {line.defense: line.verdicts[0].text for line in overview(costly).lines}
    assert lines["b"] == "−40pt†"
    assert "†" in " ".join(legend(by_protocol(flagged)))
    assert "†" not in " ".join(legend(by_protocol([*rows, bare])))
    split = row("b", 0.4, protocol="splitfed")
    assert with_errata([split], tmp_path) == [split]


def test_a_row_known_to_be_attacked_too_weakly_is_doubted(tmp_path: Path) -> None:
    text = TEXT.replace("[[rows]]\n", '[[rows]]\ncode = "weak_attack"\nmodel = "lenet"\n')
    (tmp_path / ERRATA).write_text(text)
    rows = [row("b", 0.1, model=m, accuracy=interval(0.9)) for m in ("lenet", "mlp3")]
    (flagged, other) = with_errata(rows, tmp_path)
    assert letters(flagged.flags) == "A"
    assert sentence(flagged.flags[0]).startswith("attacked too weakly: its masks")
    assert other.flags == ()
    bare = [row("none", 1.0, model=m, accuracy=interval(0.9)) for m in ("lenet", "mlp3")]
    lines = {line.defense: line for line in overview(with_marks([flagged, other, *bare])).lines}
    assert ["?" in v.signs for v in lines["b"].verdicts] == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows = 3", "errata.toml: .*rows"),
        ('[[rows]]\ndefense = "b"\nwhy = ""', "errata.toml: .*"),
        ("[[rows", "errata.toml is no readable TOML"),
    ],
)
def test_a_file_that_is_no_list_of_rows_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / ERRATA).write_text(text)
    with pytest.raises(UserError, match=message):
        with_errata([row()], tmp_path)


@pytest.mark.parametrize("place", sorted(RESULTS.rglob(ERRATA)), ids=lambda p: p.parent.name)
def test_committed_errata_are_readable_and_their_rows_exist(place: Path) -> None:
    from bench.report import leaderboard

    errata = read_toml(place, Errata).rows
    rows = leaderboard.load(place.parent)
    assert errata
    for erratum in errata:
        assert any(erratum.flag in row.flags for row in rows)
