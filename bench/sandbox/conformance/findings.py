"""What a check found, and the one place where a plugin's fault becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bench.foreign import foreign_code
from bench.sandbox.broken import Broken, NotChecked

Status = Literal["passed", "failed", "skipped"]
LEFT_OUT = "left out by --fast"
"""Why a check is skipped by who asked for a fast examination."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check.

    Attributes:
        reason: Of a failure or skip, one sentence; of a pass, what was seen if that tells
            something.
        change: What to change after a failure.
        hook: Where, "" for the class.
    """

    name: str
    status: Status
    reason: str = ""
    change: str = ""
    hook: str = ""


@dataclass(frozen=True, kw_only=True)
class At:
    """What an examination has come to: a plugin's check. later: plugins of the same file that are
    still to come."""

    kind: str
    name: str
    settings: Mapping[str, Any]
    later: int = 0
    check: str = "its constructor"


listeners: list[Callable[[At | list[Finding]], None]] = []
"""Are told of each check as it begins, and of its findings."""
_at: At | None = None


def _tell(news: At | list[Finding]) -> None:
    for listener in listeners:
        listener(news)


def begin(at: At) -> None:
    """From here on checks are of this plugin."""
    global _at
    _at = at
    _tell(at)


def begin_check(name: str) -> None:
    """From here on what is done belongs to the check of that name."""
    if _at is not None:
        _tell(replace(_at, check=f"the check '{name}'"))


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """All findings on one plugin with one setting, in the order of the checks."""

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
        """The findings as JSON can hold them."""
        return asdict(self) | {"passed": self.passed}


def passed(name: str, reason: str = "") -> Finding:
    """A check that holds."""
    return Finding(name=name, status="passed", reason=reason)


def failed(name: str, reason: str, change: str, hook: str = "") -> Finding:
    """A check that does not hold."""
    return Finding(name=name, status="failed", reason=reason, change=change, hook=hook)


def skipped(name: str, reason: str) -> Finding:
    """A check that does not apply."""
    return Finding(name=name, status="skipped", reason=reason)


def findings_of(
    name: str, check: Callable[[], str | Sequence[Finding]], *plugins: object
) -> list[Finding]:
    """A check's findings; a fault of the plugin is a failure of that name, never a traceback.

    Args:
        check: Returns what was seen, or findings of its own; raises Broken or NotChecked.
        plugins: Whose lines are named where their code raises outside of a hook.
    """
    begin_check(name)
    found = _findings_of(name, check, plugins)
    _tell(found)
    return found


def _findings_of(
    name: str, check: Callable[[], str | Sequence[Finding]], plugins: tuple[object, ...]
) -> list[Finding]:
    # Here, since who waits for a check in another process reads findings alone, without torch.
    from bench.sandbox.hooked import HookError, WrongAnswer, named

    try:
        # What hooks print and change is noticed where they are watched.
        with foreign_code(relays=False), named("the run", *plugins, lets=(Broken, NotChecked)):
            found = check()
    except Broken as error:
        return [failed(name, error.reason, error.change, error.hook)]
    except NotChecked as error:
        return [skipped(name, str(error))]
    except WrongAnswer as error:
        return [failed(name, f"{error}.", "Return what bench/api.py says of it.", error.hook)]
    except HookError as error:
        ours = error.hook == "the run"
        change = "Make the plugin work in this run." if ours else "Mend the error in this hook."
        return [failed(name, f"{error}.", change, "" if ours else error.hook)]
    return [passed(name, found)] if isinstance(found, str) else list(found)
