"""The hooks of a defense in one table: when they are called, how those of `a+b` act together, and
the check of what they return.

`Composed` is made from the table, `leakbench check` and the audit hold answers against it, and the
documentation prints it. What a hook is for stands at its definition in `bench.contract.defense`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.contract import returns
from bench.contract.defense import Defense
from bench.contract.events import Event, Gaussian, Summed
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS, Absent, Message, Part
from bench.contract.returns import Check

Members = Mapping[str, Defense]
Chain = Callable[[Members, str, tuple[Any, ...]], Any]
"""How the members of a composed defense answer a hook's arguments together; its docstring tells."""


# --- how members act together ---------------------------------------------------------------------


def _answers(members: Members, hook: str, arguments: tuple[Any, ...]) -> list[Any]:
    return [getattr(member, hook)(*arguments) for member in members.values()]


def owner(members: Members, hook: str, arguments: tuple[Any, ...]) -> Any:
    """The member that owns the role alone, or the default, as where there is no role."""
    role = BY_NAME[hook].role
    chosen = next((m for m in members.values() if role in m.owns), Defense())
    return getattr(chosen, hook)(*arguments)


def in_turn(members: Members, hook: str, arguments: tuple[Any, ...]) -> Any:
    """Each member gets what the one before it returned."""
    value, *rest = arguments
    for member in members.values():
        value = getattr(member, hook)(value, *rest)
    return value


def uploads_in_turn(members: Members, hook: str, arguments: tuple[Any, ...]) -> list[Message]:
    """Each member gets the uploads that the one before it sends; other messages go with them."""
    messages, *rest = arguments
    beside: list[Message] = []
    for member in members.values():
        sent = getattr(member, hook)(messages, *rest)
        messages = [m for m in sent if m.kind in UPLOAD_KINDS]
        beside += [m for m in sent if m.kind not in UPLOAD_KINDS]
    return messages + beside


def parts_in_turn(members: Members, hook: str, arguments: tuple[Any, ...]) -> Part:
    """Each member gets the values that the one before it sends; what one withheld stays so."""
    values, *rest = arguments
    part = Part(values=values)
    for member in members.values():
        after = getattr(member, hook)(part.values, *rest)
        if part.present is not None:
            absent: Absent = "zero" if "zero" in (part.absent, after.absent) else "kept"
            after = replace(after, present=part.present & after.presence(), absent=absent)
        part = after
    return part


def each(members: Members, hook: str, arguments: tuple[Any, ...]) -> None:
    """Every member is told."""
    _answers(members, hook, arguments)


def some(members: Members, hook: str, arguments: tuple[Any, ...]) -> bool:
    """Whether any member says so."""
    return any(getattr(member, hook)(*arguments) for member in members.values())


def together(members: Members, hook: str, arguments: tuple[Any, ...]) -> Any:
    """All members' answers, one after another."""
    lists = _answers(members, hook, arguments)
    return type(lists[0])(entry for answer in lists for entry in answer) if lists else []


def events(members: Members, hook: str, arguments: tuple[Any, ...]) -> tuple[Event, ...]:
    """All members' events. Noise that one member adds to the uploads is that of a sum, where
    another sums them and none changes them besides, which could leave values without noise."""
    answers = together(members, hook, arguments)
    changing = [m for m in members.values() if overrides(m, "upload")]
    sums = [e for e in answers if isinstance(e, Summed)]
    if len(changing) != 2 or not changing[1].only_sums or len(members_of(changing[0])) > 1:
        return answers
    return tuple(
        replace(e, summed=sums[0]) if sums and isinstance(e, Gaussian) and e.largest else e
        for e in answers
    )


def union(members: Members, hook: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """All members' answers by name."""
    return {k: v for answer in _answers(members, hook, arguments) for k, v in answer.items()}


def prefix_answers(members: Members, hook: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """All members' answers by name, each with its member's before it."""
    return {
        f"{name}.{key}": value
        for name, member in members.items()
        for key, value in getattr(member, hook)(*arguments).items()
    }


def client_by_client(members: Members, hook: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Each client's plans by all members; a member with fewer gives them in turn."""
    plans = [answer for answer in _answers(members, hook, arguments) if answer]
    most = max(map(len, plans), default=0)
    return [{k: v for p in plans for k, v in p[i % len(p)].items()} for i in range(most)]


# --- the table ------------------------------------------------------------------------------------

When = Literal["set-up", "coordination", "round", "step", "upload", "known", "proven"]
By = Literal["client", "server", "everybody"]


@dataclass(frozen=True)
class Hook:
    """One hook of a defense.

    Attributes:
        name: Of the method of `Defense`.
        when: When it is called; what is known or proven, at any time.
        by: Who computes it; `everybody` where the answer is public.
        chain: How the members of `a+b` answer together.
        check: What is wrong with an answer, if anything is.
        role: The exclusive role that it belongs to, which one member of `a+b` may own.
    """

    name: str
    when: When
    by: By
    chain: Chain
    check: Check
    role: str | None = None

    def positional(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call, those given by name in their places."""
        if not named:
            return arguments
        signature = inspect.signature(getattr(Defense, self.name))
        return signature.bind(None, *arguments, **named).args[1:]


HOOKS: tuple[Hook, ...] = (
    Hook("third_parties", "set-up", "everybody", union, returns.parties),
    Hook("extra_parameters", "set-up", "everybody", union, returns.state),
    Hook("variables", "set-up", "everybody", owner, returns.variables, "variables"),
    Hook("draw", "step", "client", union, returns.state),
    Hook("receive", "round", "client", owner, returns.state_like_first, "variables"),
    Hook("realize", "step", "client", owner, returns.state, "variables"),
    Hook("mean_realize", "known", "everybody", owner, returns.state, "variables"),
    Hook("gradient", "step", "client", owner, returns.gradient, "gradient"),
    Hook("direction", "step", "client", owner, returns.direction, "direction"),
    Hook("inspects", "round", "client", some, returns.instance_of(bool)),
    Hook("inspect", "round", "client", union, returns.state),
    Hook("joins", "round", "client", owner, returns.instance_of(bool), "joins"),
    Hook("batch", "step", "client", owner, returns.batch, "batch"),
    Hook("say", "coordination", "client", together, returns.say),
    Hook("hear", "coordination", "client", each, returns.nothing),
    Hook("smashed", "step", "client", parts_in_turn, returns.smashed),
    Hook("labels", "step", "client", in_turn, returns.tensor_like_first),
    Hook("features_grad", "step", "client", in_turn, returns.tensor_like_first),
    Hook("upload", "upload", "client", uploads_in_turn, returns.upload),
    Hook("mix", "step", "server", owner, returns.mix, "mix"),
    Hook("aggregate", "upload", "server", owner, returns.aggregate, "aggregate"),
    Hook("mechanisms", "known", "everybody", together, returns.all_of(Mechanism)),
    Hook("mechanisms_in", "known", "everybody", together, returns.all_of(Mechanism)),
    Hook("public_plans", "known", "everybody", client_by_client, returns.plans),
    Hook("guarantee", "proven", "everybody", events, returns.all_of(Event)),
    Hook("claim", "proven", "everybody", owner, returns.claim),
    Hook("constants", "proven", "everybody", prefix_answers, returns.constants),
)
"""In the order of `Defense`."""
BY_NAME: Mapping[str, Hook] = {hook.name: hook for hook in HOOKS}
ROLES = tuple(dict.fromkeys(hook.role for hook in HOOKS if hook.role is not None))


def members_of(defense: Defense) -> tuple[Defense, ...]:
    """The members of a composed defense, or the defense itself."""
    return tuple(getattr(defense, "members", {"": defense}).values())


def overrides(defense: Defense, hook: str) -> bool:
    """Whether the defense, or a member of a composed one, has its own version of a hook."""
    own, default = members_of(defense), getattr(Defense, hook)
    return any(getattr(type(member), hook) is not default for member in own)
