"""An audit as a table for the terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from bench.report import explain
from bench.sandbox.audit import Audit
from bench.sandbox.hooked import PluginFault

_STYLES = {"violated": "bold red", "consistent": "green"}


def terminal(audit: Audit) -> Iterator[RenderableType]:
    """A row per pair, what was left out, the verdicts, and what they can and cannot mean."""
    what = "one release" if audit.rounds == 1 else f"{audit.rounds} releases together"
    heads = (Column("pair", no_wrap=True), "neighbours for", "epsilon >=", "claim", "proof")
    table = Table(*heads, title=f"Epsilon of {what}", title_justify="left")
    for finding in audit.pairs:
        claim = "" if finding.claim is None else f"{finding.claim:.4g} "
        eps = finding.eps_lower if finding.eps_lower_claim is None else finding.eps_lower_claim
        table.add_row(
            finding.pair,
            ", ".join(finding.units),
            f"{eps:.3g}{'+' if finding.at_least else ''} ({finding.cap:.3g})",
            Text(claim) + _verdict(finding.verdict_claim),
            Text(f"{finding.eps_record:.4g} ") + _verdict(finding.verdict_proof),
        )
    if audit.pairs:
        yield table
        yield Text("\n".join(f"{f.pair}: {f.what}." for f in audit.pairs))
    for skipped in audit.skipped:
        yield Text(f"Not audited, {skipped.channel}: {skipped.why}")
    for finding in audit.pairs:
        if finding.verdict_claim == "violated":
            yield Text(
                f"{finding.pair}: the claimed epsilon {finding.claim:.4g} needs delta >= "
                f"{finding.delta_at_claim:.3g}."
            )
    limit = ", limited by the draws" if audit.eps_at_least else ""
    yield Text.assemble(
        f"One record: epsilon >= {audit.eps_audited:.3g} at delta {audit.delta:g}{limit}. Claim: ",
        _verdict(audit.verdict_claim),
        ". Proof: ",
        _verdict(audit.verdict_proof),
        ".",
    )
    yield Text(explain.LEGEND["audit"].format(confidence=100 * audit.confidence), style="dim")


def failure(fault: PluginFault) -> RenderableType:
    """An audit that a plugin's mistake ended: one failed finding."""
    return Text.assemble(("failed", "bold red"), f" audit: {fault} (hook {fault.hook})")


def _verdict(verdict: str) -> Text:
    return Text(verdict, style=_STYLES.get(verdict, "dim"))
