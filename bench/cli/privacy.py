"""`leakbench ledger` and `audit`: what an epsilon means and whether the code keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.errors import UserError

if TYPE_CHECKING:
    from bench.report.accounts import Account


def ledger(
    defense: Annotated[str, typer.Argument(help="A defense, or a+b.")],
    set_: options.DefenseSet = None,
    facts: Annotated[
        str,
        typer.Option(
            help="parameters=N,rounds=T,clients=n,participation=p,batch=b,records=m,delta=d"
        ),
    ] = "parameters=1",
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="key=value,value,...: a table over a setting or a fact; of several keys, over "
            "their combinations."
        ),
    ] = None,
    as_json: options.AsJson = False,
    plugin: options.PluginFile = None,
) -> None:
    """Print claim, proof and mechanism constants of a defense setting, without training."""
    with options.plain_errors():
        from bench.report import accounts

        registry = options.registry_of(plugin)
        settings = options.pairs_of(set_, "--set")
        known = options.pairs_of([f for f in facts.split(",") if f], "--facts")
        table = accounts.accounts_over(
            registry, defense, settings=settings, facts=known, over=_parse_over(over or ())
        )
    if as_json:
        lines = [{"over": account.place, **_document(account)} for account in table]
        document = {"lines": lines} if over else _document(table[0])
        options.print_json({"defense": defense, **document})
    elif over:
        _print_table(table)
    else:
        entry = table[0].entry
        for line in [*entry.words, *(f"- {reason}" for reason in entry.reasons)]:
            options.say(line)
        for key, value in entry.constants.items():
            options.say(f"{key} = {value:.6g}" if isinstance(value, float) else f"{key} = {value}")


def _parse_over(over: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values by key of every --over."""
    from bench import suite

    varied: dict[str, list[Any]] = {}
    for text in over:
        key, texts = options.values_over(text)
        if key in varied:
            raise UserError(f"--over {key} is given twice.")
        varied[key] = [suite.parse_value(t) for t in texts]
    return varied


def _document(account: Account) -> dict[str, Any]:
    facts = asdict(account.facts)
    return {"variant": account.defense.variant, "facts": facts, **asdict(account.entry)}


def _print_table(accounts: Sequence[Account]) -> None:
    """Print the table in as many parts as the terminal's width needs, and explain its columns."""
    from bench.report.accounts import epsilons, meanings

    frame = epsilons(accounts).set_index(list(accounts[0].place))
    shown = frame.map(lambda value: "-" if value is None else f"{value:.4g}")
    text = shown.to_string(line_width=options.console.width, sparsify=False)
    explained = (f"{n}: {meaning}" for n, meaning in meanings(accounts).items() if n in frame)
    for line in [text, "", *explained]:
        options.say(line)


def audit(
    defense: Annotated[str, typer.Argument(help="A defense, or a+b.")],
    set_: options.DefenseSet = None,
    draws: Annotated[int, typer.Option(help="Per input of a pair.")] = 4000,
    seed: int = 0,
    rounds: Annotated[int, typer.Option(help="Releases of a draw: audits their composition.")] = 1,
    as_json: options.AsJson = False,
    plugin: options.PluginFile = None,
) -> None:
    """Attack a defense setting's epsilon: certified lower bounds against claim and proof. A hook
    that fails ends it with exit code 1."""
    with options.plain_errors():
        from bench.report import audits
        from bench.sandbox.audit import audit as audit_of
        from bench.sandbox.hooked import PluginFault

        settings = options.pairs_of(set_, "--set")
        built = options.registry_of(plugin).defense(defense, settings)
        document = {"defense": defense, "variant": built.variant}
        try:
            result = audit_of(built, draws=draws, seed=seed, rounds=rounds)
        except PluginFault as fault:
            if as_json:
                options.print_json(document | {"failed": str(fault), "hook": fault.hook})
            else:
                options.console.print(audits.failure(fault))
            raise typer.Exit(1) from None
    if as_json:
        options.print_json(document | asdict(result))
        return
    for block in audits.terminal(result):
        options.console.print(block)
