"""What a table of the leaderboard says to use, in three sentences: what leaks least, what it costs,
how sure that is."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.report.columns import epsilon_text
from bench.report.costs import COSTS
from bench.report.overview import Head, Overview, Verdict, epsilon_words, ranked, times
from bench.report.verdicts import CONTROL, UNDEFENDED

_LEAST_GAIN = 0.05
"""Leakage by which a defense must be below the undefended one to be called better."""


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
    the least leaky one that is not known to leak more than it shows."""
    return [_advise(summary, place, head) for place, head in enumerate(summary.heads)]


def _advise(summary: Overview, place: int, head: Head) -> Advice:
    ran = dict(ranked(summary, place))
    known = {name: v for name, v in ran.items() if v.leak is not None}
    bare = known.pop(UNDEFENDED, None)
    points = f"{100 * summary.loss:g} points of accuracy"
    if bare is not None and (bare.leak or 0.0) < CONTROL:
        reason = f"Attacks recover little here without a defense ({bare.leakage})"
        return Advice(head=head, sentences=(f"{reason}: what one adds cannot be told.",))
    if not known:
        attacked = ran.keys() - {UNDEFENDED}
        words = f"No attacked defense loses at most {points}" if attacked else "No defense was run"
        return Advice(head=head, sentences=(f"{words} here.",))
    (name, best), *others = known.items()
    without = "" if bare is None else f"; without a defense {_leakage(bare)}"
    least = f"{name} leaks least: {_leakage(best)}{without}"
    gain = 1.0 if bare is None else (bare.leak or 0.0) - (best.leak or 0.0)
    separate = not best.marks.undefended and gain >= _LEAST_GAIN
    alike = f"No defense that loses at most {points} clearly leaks less than none here; {least}"
    return Advice(
        head=head,
        defense=name,
        verdict=best,
        sentences=(
            f"Of the defenses that lose at most {points}, {least}." if separate else f"{alike}.",
            f"It costs {_costs(best, summary.loss)}; {_proof(best)}.",
            " ".join(_sureness(best, others)),
        ),
    )


def _leakage(verdict: Verdict) -> str:
    """0.4 [0.1, 0.8], 6/24 recognised."""
    recognised = "" if verdict.recognised == "–" else f", {verdict.recognised} recognised"
    return verdict.leakage + recognised


def _costs(verdict: Verdict, loss: float) -> str:
    costs = verdict.costs.items()
    multiples = [f"{times(v)} the {COSTS[name].title}" for name, v in costs if v is not None]
    points = "unknown accuracy" if verdict.drop is None else f"{verdict.drop_text} points"
    over = f" (more than {100 * loss:g} is not excluded)" if verdict.over else ""
    return ", ".join([points + over, *multiples])


def _proof(verdict: Verdict) -> str:
    row = verdict.row
    if row is None or row.eps_record is None or row.eps_record == math.inf:
        claim = "" if row is None or row.eps_claimed is None else epsilon_text(row.eps_claimed)
        return f"it claims an epsilon of {claim}, none is proven" if claim else "nothing is proven"
    worth, number = epsilon_words(row.eps_record).split()
    return f"its epsilon of {number} is {worth}"


def _sureness(best: Verdict, others: Sequence[tuple[str, Verdict]]) -> Iterator[str]:
    tied = [name for name, v in others if v.marks.best]
    less = [(n, v) for n, v in others if v.doubts and (v.leak or 0.0) < (best.leak or 0.0)]
    if best.doubts:
        yield f"It may leak more: {'; '.join(best.doubts)}."
    elif not others:
        yield "No other one loses so little."
    elif not best.marks.best:
        yield "No test separates it from the others."
    elif tied:
        yield f"Statistically tied with it: {', '.join(tied)}."
    else:
        yield f"A paired test separates it from all others{' but these' if less else ''}."
    if less and not best.doubts:
        names = ", ".join(f"{name} ({_leakage(v)})" for name, v in less)
        doubts = dict.fromkeys(doubt for _, v in less for doubt in v.doubts)
        yield f"Less is shown, but more may leak: {names}: {'; '.join(doubts)}."
    row = best.row
    if row is not None and row.leaks is not None:
        victims, seeds = sum(map(len, row.leaks.victims.values())), len(row.seeds)
        of = f"{seeds} trainings" if seeds > 1 else "one training: others may differ"
        yield f"Measured on {victims} victims of {of}."
