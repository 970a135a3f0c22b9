"""`leakbench ledger` and `audit`: what an epsilon means and whether the code keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.errors import UserError

if TYPE_CHECKING:
    from bench.contract.events import Formula
    from bench.privacy.ledger import Entry


def ledger(
    defense: Annotated[str, typer.Argument(help="A defense, or a+b.")],
    set_: options.DefenseSet = None,
    facts: Annotated[
        str,
        typer.Option(
            "--facts",
            help="parameters=N,rounds=T,clients=n,participation=p,batch=b,records=m,delta=d",
        ),
    ] = "parameters=1",
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's own formulas, and what holds of them.")
    ] = False,
    as_json: options.AsJson = False,
    plugin: options.PluginFile = None,
) -> None:
    """Print claim, proof and mechanism constants of a defense setting, without training."""
    with options.plain_errors():
        from bench import suite
        from bench.contract.events import Facts
        from bench.privacy.ledger import account, computable
        from bench.records import to_json

        built = options.setting_of(defense, set_, plugin)
        known = Facts(**_facts(suite.parse_pairs([f for f in facts.split(",") if f], "--facts")))
        with computable(built, known), _refused_facts(defense):
            built.guarantee(known)
            formulas = built.paper_formulas(known) if paper else ()
        entry = account(built, known)
    document = {"defense": defense, "variant": built.variant, "facts": asdict(known)}
    document |= asdict(entry) | ({"paper": [asdict(f) for f in formulas]} if paper else {})
    if as_json:
        typer.echo(to_json(document))
        return
    for line in _formula_lines(formulas) if paper else _entry_lines(entry):
        options.say(line)


@contextmanager
def _refused_facts(defense: str) -> Iterator[None]:
    """A plugin may refuse facts by ValueError, which anywhere else is a bug."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{defense} has no ledger at these facts: {error}") from error


def _entry_lines(entry: Entry) -> Iterator[str]:
    unit = f" per {entry.unit}" if entry.unit else ""
    delta = f" at delta {entry.claim_delta:g}" if entry.claim_delta else ""
    if entry.eps_claimed is None:
        claimed = "none"
    elif entry.eps_claimed == float("inf"):
        claimed = f"no finite value{unit} by the paper's formula"
    else:
        claimed = f"{entry.eps_claimed:.6g}{unit}{delta}"
    yield f"claimed epsilon: {claimed}"
    yield (
        f"proven epsilon for one training record, whole run, delta {entry.delta:g}: "
        f"{entry.eps_record:.6g}"
    )
    yield from entry.words
    yield from (f"- {reason}" for reason in entry.reasons)
    for key, value in entry.constants.items():
        yield f"{key} = {value:.6g}" if isinstance(value, float) else f"{key} = {value}"


def _formula_lines(formulas: Sequence[Formula]) -> Iterator[str]:
    if not formulas:
        yield "The paper has no formula at this setting."
    for formula in formulas:
        really = "" if formula.really is None else f" (really {formula.really:.6g})"
        yield f"{formula.equation}, {formula.name}: {formula.value:.6g}{really}"
        yield f"    {formula.holds}"


def audit(
    defense: Annotated[str, typer.Argument(help="A defense, or a+b.")],
    set_: options.DefenseSet = None,
    draws: Annotated[int, typer.Option("--draws", help="Per input of a pair.")] = 4000,
    confidence: Annotated[
        float, typer.Option("--confidence", help="That no finding is wrong.")
    ] = 0.95,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    parameters: Annotated[
        int, typer.Option("--parameters", help="Coordinates of the audited tensors.")
    ] = 16,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Releases of a draw: audits their composition.")
    ] = 1,
    as_json: options.AsJson = False,
    plugin: options.PluginFile = None,
) -> None:
    """Attack a defense setting's epsilon: certified lower bounds against claim and proof. A hook
    that fails ends it with exit code 1."""
    with options.plain_errors():
        from bench.records import to_json
        from bench.report import audits
        from bench.sandbox.audit import audit as audit_of
        from bench.sandbox.hooked import PluginFault

        built = options.setting_of(defense, set_, plugin)
        document = {"defense": defense, "variant": built.variant}
        try:
            found = audit_of(
                built,
                draws=draws,
                confidence=confidence,
                seed=seed,
                parameters=parameters,
                rounds=rounds,
            )
        except PluginFault as fault:
            if as_json:
                typer.echo(to_json(document | {"failed": str(fault), "hook": fault.hook}))
            else:
                options.console.print(audits.failure(fault), highlight=False)
            raise typer.Exit(1) from None
    if as_json:
        typer.echo(to_json(document | found.to_dict()))
        return
    for block in audits.terminal(found):
        options.console.print(block, highlight=False)


_KINDS = {"bool": ("true or false", bool), "float": ("a number", int, float)}
"""What facts of a type take; others take whole numbers."""


def _facts(pairs: dict[str, Any]) -> dict[str, Any]:
    """Checked names and types of --facts."""
    from dataclasses import fields

    from bench.contract.events import Facts
    from bench.names import did_you_mean

    known = {f.name: f.type for f in fields(Facts)}
    for key, value in pairs.items():
        if key not in known:
            raise UserError(did_you_mean("fact", key, sorted(known)))
        expected, *types = _KINDS.get(str(known[key]), ("a whole number", int))
        if type(value) not in types:
            raise UserError(f"fact {key} must be {expected}, got {value!r}.")
    if "parameters" not in pairs:
        raise UserError("--facts needs parameters=N (trained coordinates uploaded per round).")
    return pairs
