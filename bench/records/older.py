"""Files of earlier versions as the present one has them.

Rows of schema 1 have no `schema`, flags as sentences, and a worst case that may name no metric:
this is the only code that reads a sentence. The first runs of schema 1 know no audit, and restrict
an attack by the names of data sets where later ones say which tasks.
"""

from __future__ import annotations

import re
from typing import Any

from bench.protocols.settings import named_work, work_text
from bench.records.flags import FlagCode

_SENTENCES = (
    (r"training failed: (?P<reason>.*)", FlagCode.TRAINING_FAILED),
    (r"training timeout: (?P<reason>.*)", FlagCode.TRAINING_TIMEOUT),
    (r"training not_applicable: (?P<reason>.*)", FlagCode.TRAINING_NOT_APPLICABLE),
    (r"diverged: (?P<reason>.*)", FlagCode.DIVERGED),
    (r"accuracy at chance", FlagCode.AT_CHANCE),
    (r"epsilon claimed, none proven", FlagCode.CLAIMED_NOT_PROVEN),
    (r"claim is per (?P<subject>\w+)", FlagCode.CLAIM_UNIT),
    (
        r"audit refutes the claim: epsilon is at least (?P<epsilon>[\d.]+)",
        FlagCode.AUDIT_REFUTES_CLAIM,
    ),
    (
        r"audit refutes the proof: epsilon is at least (?P<epsilon>[\d.]+)",
        FlagCode.AUDIT_REFUTES_PROOF,
    ),
    (r"audit failed: (?P<reason>.*)", FlagCode.AUDIT_FAILED),
    (r"(?P<subject>\S+) cut short: (?P<gain>[+-][\d.]+) SSIM .*", FlagCode.CUT_SHORT),
    (r"strongest attack \((?P<subject>\S+)\) below the floor", FlagCode.BELOW_FLOOR),
    (r"(?P<subject>\S+) failed", FlagCode.ATTACK_FAILED),
    (r"(?P<subject>\S+) timeout", FlagCode.ATTACK_TIMEOUT),
)


def row_of_first(row: dict[str, Any]) -> dict[str, Any]:
    """A row of schema 1 as one of schema 2; what is wrong in it stays for the validation."""
    whole = dict(row)
    if isinstance(whole.get("flags"), list):
        whole["flags"] = [_flag(f) for f in whole["flags"]]
    if isinstance(whole.get("worst"), dict):
        whole["worst"] = {"metric": "ssim", **whole["worst"]}
    return whole


def observed_of(threats: Any) -> str:
    """What the observed rounds of a row hold, whose threats are sentences alone."""
    found = re.findall(r"(?:^|; )([^:;]*): .*?batch (\d+), (\d+) step\(s\)", str(threats))
    return named_work({name: work_text(batch=int(b), steps=int(s)) for name, b, s in found})


def suite_of_first(suite: Any) -> Any:
    """A run's suite as the present version has it."""
    if not isinstance(suite, dict):
        return suite
    suite = {"audit": 0, **suite}
    if isinstance(suite.get("attacks"), list):
        suite["attacks"] = [_by_tasks(a, suite.get("tasks")) for a in suite["attacks"]]
    return suite


def _by_tasks(attack: Any, tasks: Any) -> Any:
    if not isinstance(attack, dict) or "datasets" not in attack or not isinstance(tasks, list):
        return attack
    names = attack["datasets"]
    places = [
        i
        for i, t in enumerate(tasks)
        if names and isinstance(t, dict) and t.get("dataset") in names
    ]
    kept = {k: v for k, v in attack.items() if k != "datasets"}
    return kept | {"tasks": places} if names else kept


def _flag(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    for pattern, code in _SENTENCES:
        found = re.fullmatch(pattern, text, re.DOTALL)
        if found:
            parts: dict[str, Any] = found.groupdict()
            subject = parts.pop("subject", "")
            values = {
                k: v if k == "reason" else _number(v) for k, v in parts.items() if v is not None
            }
            return {"code": code.value, "subject": subject, "values": values}
    return {"code": FlagCode.OTHER.value, "values": {"text": text}}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
