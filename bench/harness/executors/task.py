"""What executors carry out, and what they give back."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Container, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from bench.harness.executors.memory import peak
from bench.records import AttackOutcome, NoResult, TrainOutcome, sound_text


class Work(Protocol):
    """A job with all that it needs: called, it gives its record and leaves files in `artifacts`.

    A dataclass, so that it can be sent to another process or machine.
    """

    @property
    def artifacts(self) -> Path: ...

    def __call__(self) -> TrainOutcome | AttackOutcome: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job in the queue.

    Attributes:
        id: Its number in the run.
        label: What to call it in errors.
        work: What to do.
        group: What tasks have in common that a worker keeps at hand, as a training's observations.
    """

    id: int
    label: str
    work: Work
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a job left: its own record, or one that says why it has none.

    Attributes:
        record: The record.
        no_space: Whether it failed since a disk was full, which the next job will not mend.
    """

    record: TrainOutcome | AttackOutcome
    no_space: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome(Ended):
    """The same with the task that it was."""

    task: Task


def next_of(tasks: deque[Task], own: str, others: Container[str]) -> Task:
    """Take the next task out of the queue for a worker: the first of its own group, which it has at
    hand, or else of one that no other worker is at, or else the first.

    Args:
        tasks: At least one.
        own: Group of the worker's last task.
        others: Groups of the other workers' tasks.
    """
    fits = next((t for t in tasks if t.group == own), None)
    chosen = fits or next((t for t in tasks if t.group not in others), None) or tasks[0]
    tasks.remove(chosen)
    return chosen


Executor = Callable[[deque[Task]], Generator[Outcome]]
"""Carries out the queued tasks in their order, and those that are added meanwhile."""


def run_here(tasks: deque[Task]) -> Generator[Outcome]:
    """Run tasks one after another in this process; no limits apply."""
    while tasks:
        task = tasks.popleft()
        yield outcome_of(task, guarded(task.work))


def guarded(work: Work) -> Ended:
    """The one place that catches Exception: a failing job is recorded, the run goes on."""
    try:
        with peak() as memory:
            record = work()
        return Ended(record=replace(record, memory=memory))
    except Exception as error:
        import traceback

        text = sound_text(" ".join(str(error).split()))
        record = NoResult(
            status="failed",
            reason=f"{type(error).__name__}: {text}"[:500],
            traceback=sound_text(traceback.format_exc())[-4000:],
        )
        return Ended(record=record, no_space=_disk_full(error))


def outcome_of(task: Task, ended: Ended) -> Outcome:
    """Of a task that `guarded` carried out."""
    return Outcome(task=task, record=ended.record, no_space=ended.no_space)


def lost(task: Task, status: Literal["failed", "timeout"], reason: str) -> Outcome:
    """Of a task whose worker is no more."""
    return Outcome(task=task, record=NoResult(status=status, reason=reason))


def _disk_full(error: Exception) -> bool:
    """safetensors reports a full disk as an error of its own, told apart by its text alone."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)
