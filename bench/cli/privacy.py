"""`leakbench ledger` and `audit`: what an epsilon means and whether the code keeps it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from bench.cli.options import AsJson, DefenseSet, PluginFile, console, plain_errors, setting_of
from bench.errors import UserError


def ledger(
    defense: Annotated[str, typer.Argument(help="A defense, or a+b.")],
    set_: DefenseSet = None,
    facts: Annotated[
        str,
        typer.Option(
            "--facts",
            help="parameters=N,rounds=T,clients=n,participation=p,batch=b,records=m,delta=d",
        ),
    ] = "parameters=1",
    as_json: AsJson = False,
    plugin: PluginFile = None,
) -> None:
    """Print claim, proof and mechanism constants of a defense setting, without training."""
    with plain_errors():
        from bench import suite
        from bench.contract.events import Facts
        from bench.harness.store import to_json
        from bench.privacy.ledger import account

        built = setting_of(defense, set_, plugin)
        given = _facts(suite.parse_pairs([f for f in facts.split(",") if f], "--facts"))
        known = Facts(**given)
        entry = account(built, known)
    document = {"defense": defense, "variant": built.variant, "facts": asdict(known)}
    document |= asdict(entry)
    if as_json:
        typer.echo(to_json(document))
        return
    unit = f" per {entry.unit}" if entry.unit else ""
    delta = f" at delta {entry.claim_delta:g}" if entry.claim_delta else ""
    claimed = "none" if entry.eps_claimed is None else f"{entry.eps_claimed:.6g}{unit}{delta}"
    console.print(f"claimed epsilon: {claimed}", highlight=False)
    console.print(
        f"proven epsilon for one training record, whole run, delta {entry.delta:g}: "
        f"{entry.eps_record:.6g}",
        highlight=False,
        soft_wrap=True,
    )
    for sentence in entry.words:
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    for reason in entry.reasons:
        console.print(f"- {reason}", highlight=False, soft_wrap=True, markup=False)
    for key, value in entry.constants.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        console.print(f"{key} = {shown}", highlight=False, markup=False)


def audit(
    defense: Annotated[str, typer.Argument(help="A defense, or a+b.")],
    set_: DefenseSet = None,
    draws: Annotated[int, typer.Option("--draws", help="Per input of a pair.")] = 4000,
    confidence: Annotated[
        float, typer.Option("--confidence", help="That no finding is wrong.")
    ] = 0.95,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    parameters: Annotated[
        int, typer.Option("--parameters", help="Coordinates of the audited tensors.")
    ] = 16,
    as_json: AsJson = False,
    plugin: PluginFile = None,
) -> None:
    """Attack a defense setting's epsilon: certified lower bounds against claim and proof. A hook
    that fails ends it with exit code 1."""
    with plain_errors():
        from bench.harness.store import to_json
        from bench.report import audits
        from bench.sandbox.audit import audit as audit_of
        from bench.sandbox.hooked import PluginFault

        built = setting_of(defense, set_, plugin)
        document = {"defense": defense, "variant": built.variant}
        try:
            found = audit_of(
                built, draws=draws, confidence=confidence, seed=seed, parameters=parameters
            )
        except PluginFault as fault:
            if as_json:
                typer.echo(to_json(document | {"failed": str(fault), "hook": fault.hook}))
            else:
                console.print(audits.failure(fault), highlight=False)
            raise typer.Exit(1) from None
    if as_json:
        typer.echo(to_json(document | found.to_dict()))
        return
    for block in audits.terminal(found):
        console.print(block, highlight=False)


def _facts(pairs: dict[str, Any]) -> dict[str, Any]:
    """Checked names and types of --facts."""
    from dataclasses import fields

    from bench.contract.events import Facts
    from bench.names import did_you_mean

    known = {f.name for f in fields(Facts)}
    floats = {"participation", "delta"}
    for key, value in pairs.items():
        if key not in known:
            raise UserError(did_you_mean("fact", key, sorted(known)))
        flag = isinstance(value, bool)
        right = flag if key in ("split", "broadcast") else isinstance(value, int) and not flag
        if not (right or (key in floats and isinstance(value, float))):
            expected = "true or false" if key in ("split", "broadcast") else "a whole number"
            expected = "a number" if key in floats else expected
            raise UserError(f"fact {key} must be {expected}, got {value!r}.")
    return pairs
