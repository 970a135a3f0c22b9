"""What executors carry out, and what they give back."""

from collections import deque
from collections.abc import Callable, Container, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from bench.foreign import Left, OverLimit, foreign_code, forget, in_one_line, time_limit
from bench.harness.environment import registry_for
from bench.harness.executors.integrity import OwnFunctions
from bench.harness.executors.memory import peaks
from bench.harness.work import Work
from bench.protocols.export import DiskFull
from bench.records import AttackOutcome, NoResult, TrainOutcome, sound_text

BROKEN = ("failed", "timeout")
"""Statuses of jobs that may have left anything in their process."""
TRAININGS, ATTACKS, SCORES = "trainings", "attacks", "scores"
"""Kinds of tasks, with which the names of their rooms begin; all scores share a room."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job in the queue.

    Attributes:
        label: What to call it in errors.
        work: What to do.
        group: What tasks have in common that a worker keeps at hand, as a training's observations.
        room: Tasks of different rooms never share a process: trainings of one defense, attacks on
            it, or scores. What a plugin changes of its process reaches no other room.
    """

    label: str
    work: Work
    group: str = ""
    room: str = ""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a job left: its own record, or one that says why it has none.

    Attributes:
        record: The record.
        no_space: Whether it failed since a disk was full, which the next job will not mend.
    """

    record: TrainOutcome | AttackOutcome
    no_space: bool = False

    @classmethod
    def lost(cls, reason: str) -> Self:
        """Return the end of a job whose worker died."""
        return cls(record=NoResult(status="failed", reason=reason))

    @classmethod
    def over_time(cls, timeout_s: float) -> Self:
        """Return the end of a job over its time limit."""
        reason = f"over the limit of {timeout_s:g} s"
        return cls(record=NoResult(status="timeout", reason=reason))


def next_of(
    tasks: deque[Task], own: tuple[str, str], others: Container[tuple[str, str]], scores: bool
) -> Task | None:
    """Take the next task out of the queue for a worker: the first of its own room and group, which
    it has at hand, or else of a room and group that no other worker is at, or else the first.

    Args:
        tasks: The queue.
        own: Room and group of the worker's last task.
        others: Those of the other workers' tasks.
        scores: Whether the worker takes scores only; others take none.

    Returns:
        None if there is no task for the worker.
    """
    mine = [t for t in tasks if (t.room == SCORES) == scores]
    fits = next((t for t in mine if (t.room, t.group) == own), None)
    chosen = fits or next((t for t in mine if (t.room, t.group) not in others), None)
    chosen = chosen or next(iter(mine), None)
    if chosen is not None:
        tasks.remove(chosen)
    return chosen


Outcomes: TypeAlias = Generator[tuple[Task, Ended]]
"""Tasks with what they left."""
Executor = Callable[[deque[Task]], Outcomes]
"""Carries out the queued tasks in their order, and those that are added meanwhile."""


def run_here(tasks: deque[Task], timeout_s: float) -> Outcomes:
    """Run tasks one after another in this process.

    A job over the limit of time ends as `timeout` if it comes back to Python, as loops in Python
    do; no other limit applies, and a job that ends this process ends the run.
    """
    import torch

    threads, functions = torch.get_num_threads(), OwnFunctions()
    torch.set_num_threads(1)  # as in a worker, so that figures do not depend on the number of jobs
    try:
        while tasks:
            task = tasks.popleft()
            ended = carry_out(task.work, timeout_s, functions)
            if ended.record.status in BROKEN:
                forget()
            yield task, ended
    finally:
        torch.set_num_threads(threads)


def carry_out(work: Work, timeout_s: float, functions: OwnFunctions) -> Ended:
    """Have a job prepare itself, which is no part of its time, and run it within its limit.

    What goes wrong in preparing goes wrong in the job again.

    functions: Leakbench's, as they were before any plugin file was loaded; completed here.
    """
    with suppress(Exception), foreign_code():
        registry_for((), work.needed)  # installed plugins before files
    functions.add_loaded()
    with suppress(Exception), foreign_code():
        work.prepare()
    limits = False
    try:
        with time_limit(timeout_s) as limits:
            return guard(work, functions)
    except OverLimit:
        if not limits:  # another limit, of the whole run
            raise
        return Ended.over_time(timeout_s)


def guard(work: Work, functions: OwnFunctions | None = None) -> Ended:
    """The one place that catches Exception: a failing job is recorded, the run goes on, and what
    the job changed of this process is put back.

    functions: A job in whose process one of these was replaced has failed.
    """
    left = Left()
    try:
        with foreign_code(left):
            record = work()
    except Exception as error:
        import traceback

        text = in_one_line(error, 500)
        record = NoResult(
            status="failed",
            reason=sound_text(f"{left.reason}. Then {text}" if left.reason else text),
            traceback=sound_text(traceback.format_exc())[-4000:],
        )
        return Ended(record=record, no_space=isinstance(error, DiskFull))
    changed = functions.find_replaced() if functions is not None else None
    wrong = left.reason or (changed and f"{changed} was replaced in the process that measures")
    if wrong is not None:
        record = NoResult(status="failed", reason=sound_text(wrong))
    return Ended(record=replace(record, memory=peaks()))
