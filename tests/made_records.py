"""Records made up for tests, whole as a run writes them."""

from dataclasses import replace
from typing import Any

from bench.contract.events import Facts
from bench.privacy.ledger import Entry
from bench.records import AttackJob, AttackRecord, AuditSummary, TrainJob, TrainRecord
from bench.records.outcomes import AttackInputs, Observation

VERSIONS = {"python": "3.11", "leakbench": "0.1.0", "torch": "2.0"}
LEDGER = Entry(
    eps_claimed=None,
    unit=None,
    claim_delta=None,
    eps_record=float("inf"),
    delta=1e-5,
    constants={},
    reasons=("Nothing is randomised.",),
)
TRAINED = TrainRecord(
    variant="",
    correct=90,
    test_samples=100,
    class_chance=0.1,
    personal_accuracy=0.6,
    personal_accuracies=(0.5, 0.7),
    personal_chance=0.2,
    diverged=None,
    rounds_played=3,
    bytes_up=1.0,
    bytes_down=1.0,
    client_seconds=1.0,
    facts=Facts(parameters=10),
    ledger=LEDGER,
    observations={"init": {"server": Observation(status="done", stem="init-server")}},
    parameters=10,
    seconds=1.0,
    device="cpu",
    versions=VERSIONS,
)
ATTACKED = AttackRecord(
    victims=1,
    samples=1,
    failed=0,
    is_floor=False,
    values={"ssim": [0.5]},
    floors={"ssim": [0.2]},
    gradient_evaluations=0,
    seconds=1.0,
    notes=(),
    loss=None,
    device="cpu",
    versions=VERSIONS,
)


def trained(**changes: Any) -> TrainRecord:
    """A training that is done."""
    return replace(TRAINED, **changes)


def attacked(**changes: Any) -> AttackRecord:
    """An attack that is done; `values` as lists of one length."""
    if "values" in changes and "victims" not in changes:
        victims = len(next(iter(changes["values"].values()), []))
        changes = {"victims": victims, "floors": {"ssim": [0.2] * victims}} | changes
    return replace(ATTACKED, **changes)


def audit(epsilon: float, claim: Any = "violated", proof: Any = "no proof") -> AuditSummary:
    """An audit that found at least this much, and its verdicts."""
    return AuditSummary(
        draws=1000, confidence=0.95, eps_audited=epsilon, eps_at_least=True, verdict_claim=claim,
        verdict_proof=proof,
    )  # fmt: skip


def trained_for(job: TrainJob, **changes: Any) -> TrainRecord:
    """A training that is done as its job asks."""
    protocol = job.protocol
    facts = Facts(
        parameters=10, rounds=protocol.rounds, clients=protocol.clients, batch=protocol.batch,
        participation=protocol.participation, delta=job.delta,
    )  # fmt: skip
    looks = {
        c: {t.name: Observation(status="done", stem=f"{c}-{t.name}") for t in job.threats}
        for c in job.checkpoints
    }
    fitting: dict[str, Any] = {
        "rounds_played": protocol.rounds, "facts": facts, "personal_accuracies": (),
        "variant": str(job.settings.get("variant", "")),
        "ledger": replace(LEDGER, delta=job.delta), "observations": looks, "inputs": job,
    }  # fmt: skip
    return trained(**fitting | changes)


def attacked_for(job: AttackJob, train: str, **changes: Any) -> AttackRecord:
    """An attack that is done as its job asks; train: key of its training's record."""
    samples = job.threat.batch * job.threat.local_steps
    fitting = {"inputs": AttackInputs.of(job), "budget": job.budget, "samples": samples}
    return attacked(**fitting | {"train": train} | changes)
