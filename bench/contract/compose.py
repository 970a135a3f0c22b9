"""Two defenses as one: `a+b`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from bench.contract.defense import Defense
from bench.contract.events import Round
from bench.contract.hooks import HOOKS, ROLES, Hook, overrides
from bench.contract.messages import UPLOAD_KINDS
from bench.errors import UserError


class Composed(Defense):
    """Defenses applied in order. A role in `owns` has one owner; other hooks chain as the table
    `bench.contract.hooks` says.

    Never a reference, whatever its members are. Its events are those of all members, which the
    ledger adds up: a valid bound, not a tight one, since what comes after a private mechanism is
    post-processing.

    Args:
        members: Defenses by name, in the order in which they act.

    Raises:
        UserError: If two members own the same role, if noise would be added to bits that an
            earlier member samples, or if a member changes uploads that an earlier one has sealed;
            it names both.
    """

    def __init__(self, members: Mapping[str, Defense]) -> None:
        self.members = dict(members)
        owners: dict[str, str] = {}
        for name, member in self.members.items():
            for role in sorted(member.owns):
                if role not in ROLES:
                    raise UserError(f"defense '{name}' owns '{role}'; roles: {', '.join(ROLES)}.")
                if role in owners:
                    raise UserError(
                        f"defenses '{owners[role]}' and '{name}' both own the role '{role}', "
                        "so they cannot be combined."
                    )
                owners[role] = name
        _refuse_orders(self.members)
        self.requires = frozenset().union(*(m.requires for m in self.members.values()))
        self.owns = frozenset(owners)
        self.only_sums = any(m.only_sums for m in self.members.values())
        self.forms_model = next(
            (m.forms_model for m in self.members.values() if m.forms_model != "server"), "server"
        )
        self.cycle = math.lcm(*(m.cycle for m in self.members.values()))
        self.together = max(m.together for m in self.members.values())
        self.source = " + ".join(m.source for m in self.members.values() if m.source)

    @property
    def variant(self) -> str:
        return "+".join(m.variant for m in self.members.values() if m.variant)


def _chain(hook: Hook) -> Callable[..., Any]:
    """The hook of a composed defense."""

    def call(self: Composed, *arguments: Any, **named: Any) -> Any:
        return hook.chain(self.members, hook.name, hook.positional(arguments, named))

    call.__name__, call.__qualname__ = hook.name, f"Composed.{hook.name}"
    call.__doc__ = hook.chain.__doc__
    return call


for _hook in HOOKS:
    setattr(Composed, _hook.name, _chain(_hook))


def _refuse_orders(members: Mapping[str, Defense]) -> None:
    """Raise UserError for a member that acts on what an earlier one has sampled or sealed."""
    sampler = sealer = None
    for name, member in members.items():
        acting = [m for m in member.mechanisms_in(Round()) if m.of in UPLOAD_KINDS]
        if sampler and not all(m.scores for m in acting):
            raise UserError(
                f"defense '{name}' perturbs uploads of which '{sampler}' has made sampled bits or "
                f"probabilities; combine them as '{name}+{sampler}'."
            )
        if sealer and overrides(member, "upload"):
            raise UserError(
                f"defense '{name}' comes after '{sealer}', which has sealed every upload, so that "
                f"it would change nothing of the sum that the server reads; combine them as "
                f"'{name}+{sealer}'."
            )
        sampler = name if any(m.scores for m in acting) else sampler
        sealer = name if member.only_sums else sealer
