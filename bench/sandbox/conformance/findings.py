"""What a check found, and the one place where a plugin's error becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]


class HookError(Exception):
    """A hook that raised. hook: its name; the cause is the plugin's own error."""

    def __init__(self, hook: str, error: BaseException) -> None:
        text = " ".join(str(error).split())
        super().__init__(f"{hook} raised {type(error).__name__}: {text}"[:400])
        self.hook, self.error = hook, error


class WrongAnswer(Exception):
    """A hook that returned what it may not. problem: one clause that follows the hook's name."""

    def __init__(self, hook: str, problem: str) -> None:
        super().__init__(f"{hook} {problem}")
        self.hook = hook


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check. reason: of a failure or skip, one sentence; of a pass, what was seen if that
    tells something. change: what to change after a failure. hook: where, "" for the class."""

    name: str
    status: Status
    reason: str = ""
    change: str = ""
    hook: str = ""


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """All findings on one plugin with one setting."""

    kind: str
    name: str
    settings: Mapping[str, Any]
    findings: Sequence[Finding]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(f.status != "failed" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def passed(name: str, reason: str = "") -> Finding:
    return Finding(name=name, status="passed", reason=reason)


def failed(name: str, reason: str, change: str, hook: str = "") -> Finding:
    return Finding(name=name, status="failed", reason=reason, change=change, hook=hook)


def skipped(name: str, reason: str) -> Finding:
    return Finding(name=name, status="skipped", reason=reason)


def guarded(name: str, check: Callable[[], Sequence[Finding]]) -> list[Finding]:
    """The check's findings; an error of the plugin is a failure of that name, never a traceback."""
    try:
        return list(check())
    except WrongAnswer as error:
        return [failed(name, f"{error}.", "Return what bench/api.py says of it.", error.hook)]
    except HookError as error:
        return [failed(name, f"{error}.", "Mend the error in this hook.", error.hook)]
    except Exception as error:  # whatever else a plugin's code brings about is its own defect
        found = HookError("the run", error)
        return [failed(name, f"{found}.", "Make the plugin work in this run.", "")]
