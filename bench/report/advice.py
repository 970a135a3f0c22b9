"""What a table of the leaderboard says to use, in three sentences: what leaks least, what it costs,
how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.report.costs import COSTS
from bench.report.overview import Head, Overview, Verdict, any_one_seed, epsilon_words, times
from bench.report.verdicts import CONTROL, UNDEFENDED


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What one table says.

    Attributes:
        head: The table.
        defense: The one to use; None where there is none to name.
        verdict: Its setting, leakage and costs.
        sentences: At most three.
    """

    head: Head
    defense: str | None = None
    verdict: Verdict | None = None
    sentences: tuple[str, ...]


def advise(summary: Overview) -> list[Advice]:
    """Return what each table of an overview says: of the settings that lose little enough accuracy,
    the least leaky one."""
    return [_advise(summary, place, head) for place, head in enumerate(summary.heads)]


def _advise(summary: Overview, place: int, head: Head) -> Advice:
    named = {line.defense: line.verdicts[place] for line in summary.lines}
    bare = named.pop(UNDEFENDED, None)
    known = [(name, v) for name, v in named.items() if v.leak is not None]
    points = f"{100 * summary.loss:g} points of accuracy"
    if bare is not None and bare.leak is not None and bare.leak < CONTROL:
        reason = f"Attacks recover little here without a defense ({bare.leakage})"
        return Advice(head=head, sentences=(f"{reason}: what one adds cannot be told.",))
    if not known:
        return Advice(head=head, sentences=(f"No attacked defense loses at most {points} here.",))
    known.sort(key=lambda pair: pair[1].leak or 0.0)
    name, best = known[0]
    without = "" if bare is None else f" (without a defense {bare.leakage})"
    return Advice(
        head=head,
        defense=name,
        verdict=best,
        sentences=(
            f"At a loss of {points} {name} leaks least: {best.leakage}{without}.",
            f"It costs {_costs(best)}; {_proof(best)}.",
            " ".join(_sureness(best, known[1:])),
        ),
    )


def _costs(verdict: Verdict) -> str:
    multiples = [
        f"{times(value)} the {COSTS[name].title}"
        for name, value in verdict.costs.items()
        if value is not None
    ]
    points = "unknown accuracy" if verdict.drop is None else f"{verdict.drop_text} points"
    return ", ".join([points, *multiples])


def _proof(verdict: Verdict) -> str:
    epsilon = None if verdict.row is None else verdict.row.eps_record
    if epsilon is None or epsilon == math.inf:
        return "nothing is proven of it"
    worth, number = epsilon_words(epsilon).split()
    return f"its epsilon of {number} is {worth}"


def _sureness(best: Verdict, others: Sequence[tuple[str, Verdict]]) -> Iterator[str]:
    tied = [name for name, v in others if v.marks.best]
    if best.doubts:
        sure = next((f"{name} ({v.leakage})" for name, v in others if not v.doubts), None)
        least = f", and {sure} is the least without such doubt" if sure else ""
        yield f"It may leak more: {'; '.join(best.doubts)}{least}."
    elif not others:
        yield "It is the only one."
    elif not best.marks.best:
        yield "No test tells it from the others."
    elif tied:
        yield f"The test does not tell {', '.join(tied)} from it."
    else:
        yield "The test tells it from all others."
    if best.marks.undefended:
        yield "Nor does it tell it from no defense."
    if any_one_seed([best.row]):
        yield "One training: others may differ."
