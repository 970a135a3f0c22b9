"""What executors carry out, and what they give back."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.harness.executors.memory import peak

Record = dict[str, Any]


class Work(Protocol):
    """A job with all that it needs: called, it gives its record and leaves files in `artifacts`.

    A dataclass of `bench.jobs`, so that it can be sent to another process or machine.
    """

    @property
    def artifacts(self) -> Path: ...

    def __call__(self) -> Record: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """label: what to call it in errors."""

    id: int
    label: str
    work: Work


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """record: the job's own, or one of status failed (error, dead worker) or timeout.

    no_space: the job failed since a disk was full, which the next job will not mend.
    """

    task: Task
    record: Record
    no_space: bool = False


Executor = Callable[[deque[Task]], Generator[Outcome]]
"""Carries out the queued tasks in their order, and those that are added meanwhile."""


def run_here(tasks: deque[Task]) -> Generator[Outcome]:
    """Run tasks one after another in this process; no limits apply."""
    while tasks:
        task = tasks.popleft()
        yield outcome_of(task, guarded(task.work))


def guarded(work: Work) -> Record:
    """The one place that catches Exception: a failing cell is recorded, the run goes on."""
    try:
        with peak() as memory:
            record = work()
        return record | {"memory": memory}
    except Exception as error:
        import traceback

        text = " ".join(str(error).split())
        return {
            "status": "failed",
            "reason": f"{type(error).__name__}: {text}"[:500],
            "traceback": traceback.format_exc()[-4000:],
            "no_space": _disk_full(error),
        }


def outcome_of(task: Task, record: Record) -> Outcome:
    """From what `guarded` gave."""
    return Outcome(task=task, record=record, no_space=record.pop("no_space", False))


def lost(task: Task, status: str, reason: str) -> Outcome:
    """Of a task whose worker is no more."""
    return Outcome(task=task, record={"status": status, "reason": reason})


def _disk_full(error: Exception) -> bool:
    """safetensors reports a full disk as an error of its own, told apart by its text alone."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)
