"""What a check of a plugin finds, and how one ends that does not pass."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


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
    status: Literal["passed", "failed", "skipped"]
    reason: str = ""
    change: str = ""
    hook: str = ""


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """All findings on one plugin with one setting, in the order of the checks."""

    kind: str
    name: str
    settings: Mapping[str, Any]
    findings: Sequence[Finding] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(f.status != "failed" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The findings as JSON can hold them."""
        return asdict(self) | {"passed": self.passed}


class Broken(Exception):
    """A check that a plugin fails: what is wrong, and in which hook, where that is not the check's
    own (`bench.sandbox.conformance.plugins`)."""

    def __init__(self, reason: str, hook: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.hook = reason, hook


class NotChecked(Exception):
    """A check that does not apply; the text is the reason."""


def require(holds: bool, reason: str, hook: str | None = None) -> None:
    """Raise Broken unless something holds."""
    if not holds:
        raise Broken(reason, hook)
