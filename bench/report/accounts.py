"""The ledger of a defense, at one setting and set of facts, and over several.

What `leakbench ledger` prints and documentation draws, without either.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from bench.arguments import check_arguments
from bench.contract.defense import Defense
from bench.contract.events import Facts
from bench.errors import UserError
from bench.names import did_you_mean
from bench.privacy.entry import Entry
from bench.privacy.ledger import account, computable
from bench.registry import Registry

if TYPE_CHECKING:
    from pandas import DataFrame

_FACTS = [f.name for f in fields(Facts)]


@dataclass(frozen=True, kw_only=True)
class Account:
    """What the ledger says of a defense setting over a run with some facts; `place`: the values of
    the keys that were varied."""

    defense: Defense
    facts: Facts
    entry: Entry
    place: Mapping[str, Any] = field(default_factory=dict)


def epsilons(accounts: Sequence[Account]) -> DataFrame:
    """Return a line for every account: the varied values, then those of the columns of `meanings`
    that have a number."""
    from pandas import DataFrame

    lines = [
        {
            **account.place,
            "claimed epsilon": account.entry.eps_claimed,
            "claimed delta": account.entry.claim_delta,
            "proven epsilon": account.entry.eps_record,
        }
        for account in accounts
    ]
    return DataFrame(lines, dtype=object).dropna(axis="columns", how="all")


def meanings(accounts: Sequence[Account]) -> dict[str, str]:
    """Return what the columns of epsilons are."""
    units = dict.fromkeys(a.entry.unit for a in accounts if a.entry.unit)
    return {
        "claimed epsilon": f"the paper's formula, per {' or '.join(units)}",
        "claimed delta": "at which the paper claims it",
        "proven epsilon": "for one training record over the whole run, at the fact delta",
    }


def account_of(defense: Defense, facts: Facts, *, name: str) -> Account:
    """Return what the ledger says of a defense setting over a run with some facts.

    Args:
        name: What an error should call the defense.

    Raises:
        UserError: For facts that the defense refuses, or numbers that floating point cannot hold.
    """
    with computable(defense, facts):
        try:
            defense.guarantee(facts)
        except UserError:
            raise
        except ValueError as error:  # by which a plugin may refuse facts, and is a bug elsewhere
            raise UserError(f"{name} has no ledger at these facts: {error}") from error
    return Account(defense=defense, facts=facts, entry=account(defense, facts))


def accounts_over(
    registry: Registry,
    defense: str,
    *,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    over: Mapping[str, Sequence[Any]],
) -> list[Account]:
    """Return what the ledger says at every combination of some values, the last key's running
    fastest.

    Args:
        defense: Its name, or a+b.
        settings: Of the defense, by name; what is varied may be left out.
        facts: By name, as `check_facts` takes them; likewise.
        over: Values by key: the name of a setting or of a fact, or `settings.NAME` and `facts.NAME`
            where both have it.

    Raises:
        UserError: For an unknown key or one that is not clear, and as `account_of` does.
    """
    places = [_section_of(registry, defense, key) for key in over]
    accounts = []
    for values in product(*over.values()):
        given = {"settings": dict(settings), "facts": dict(facts)}
        for (section, name), value in zip(places, values, strict=True):
            given[section][name] = value
        built = registry.defense(defense, given["settings"])
        account = account_of(built, check_facts(given["facts"]), name=defense)
        accounts.append(replace(account, place=dict(zip(over, values, strict=True))))
    return accounts


def check_facts(given: Mapping[str, Any]) -> Facts:
    """Return the facts of a run by name, checked.

    Raises:
        UserError: For an unknown fact, a value of the wrong type or range, or no `parameters`.
    """
    facts = Facts(**check_arguments(Facts, given, what="the ledger", kind="fact"))
    if "records" in given and facts.batch > facts.records:
        raise UserError(
            f"fact batch must be <= records={facts.records} (samples of the smallest client), "
            f"got {facts.batch}."
        )
    return facts


def _section_of(registry: Registry, defense: str, key: str) -> tuple[str, str]:
    """Return whether a key is of `settings` or `facts`, and its name there."""
    members = {member: registry.get("defense", member).cls for member in defense.split("+")}
    settings = [
        name if len(members) == 1 else f"{member}.{name}"
        for member, cls in members.items()
        for name in inspect.signature(cls or Defense).parameters
    ]
    known = {"settings": settings, "facts": _FACTS}
    matches = [(s, n) for s, names in known.items() for n in names if key in (n, f"{s}.{n}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(
            f"{key} is a setting of {defense} and a fact: write settings.{key} or facts.{key}."
        )
    names = dict.fromkeys([*settings, *_FACTS])
    raise UserError(did_you_mean(f"setting of {defense} or fact", key, list(names)))
