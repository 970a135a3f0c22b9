"""What refutes a record: the job that run.json gives it, its training, and the other records.

A record that passes may still be invented. Only a rerun speaks for it: see `leakbench verify`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.errors import UserError
from bench.metrics.named import FLOOR_SUFFIX, METRICS, range_of
from bench.records import outcomes
from bench.records.jobs import TrainJob, canonical
from bench.records.run import Cell, PlannedTraining

Claims = Iterator[tuple[bool, str]]
"""What must hold, each with a clause that says what is wrong otherwise."""
_ROUNDING = 1e-5
"""Relative for figures beyond 1: processors differ by less."""


def check_training(record: outcomes.TrainOutcome, planned: PlannedTraining, devices: str) -> None:
    """Raise UserError if a training's record does not fit its job. devices: of run.json."""
    job = planned.job
    claims = _record_claims(record, planned.key, record.inputs == job, devices)
    _refuse(f"train record {planned.key} ({job.name})", claims)
    if isinstance(record, outcomes.TrainRecord):
        _refuse(f"train record {planned.key} ({job.name})", _training_claims(record, job))


def check_attack(
    record: outcomes.AttackOutcome, cell: Cell, trained: outcomes.TrainOutcome | None, devices: str
) -> None:
    """Raise UserError if an attack's record does not fit its job on that training."""
    what = f"attack record {cell.key} ({cell.name}, seed {cell.seed})"
    same = record.inputs == outcomes.AttackInputs.of(cell.job)
    _refuse(what, _record_claims(record, cell.key, same, devices))
    _refuse(what, iter([(record.train == cell.train_key, f"its training is {record.train}")]))
    if isinstance(record, outcomes.AttackRecord) and record.is_scored:
        _refuse(what, _attack_claims(record, cell, trained))


def _refuse(what: str, claims: Claims) -> None:
    for holds, words in claims:
        if not holds:
            raise UserError(f"{what} contradicts its run: {words}.")


def _record_claims(record: outcomes.Record, key: str, same_job: bool, devices: str) -> Claims:
    yield record.key == key, f"it is record {record.key or 'without a key'}"
    yield same_job, "its inputs are not those of its job in run.json"
    if isinstance(record, outcomes.TrainRecord | outcomes.AttackRecord):
        here = not devices or record.device in devices.split(", ")
        yield here, f"it ran on {record.device}, not on {devices}"
        yield 0 <= record.seconds < math.inf, f"it took {record.seconds} seconds"


def _training_claims(record: outcomes.TrainRecord, job: TrainJob) -> Claims:
    clients, played = job.protocol.clients, record.rounds_played
    planned = job.protocol.rounds
    enough = played == planned or (record.diverged is not None and played <= planned)
    yield enough, f"{played} rounds were played of {planned}"
    facts, ledger = record.facts, record.ledger
    for name, fact, known in (
        ("rounds", facts.rounds, max(1, played)),
        ("clients", facts.clients, clients),
        ("participation", facts.participation, job.protocol.participation),
        ("batch", facts.batch, job.protocol.batch),
        ("delta", facts.delta, job.delta),
    ):
        yield fact == known, f"its ledger counts {name} {fact}, not {known}"
    yield ledger.delta == job.delta, f"its epsilon is for delta {ledger.delta}"
    yield ledger.eps_record >= 0, f"its proven epsilon is {ledger.eps_record}"
    claimed = ledger.eps_claimed
    yield claimed is None or claimed >= 0, f"its claimed epsilon is {claimed}"
    for name in ("bytes_up", "bytes_down", "client_seconds"):
        yield 0 <= getattr(record, name) < math.inf, f"{name} is {getattr(record, name)}"
    chances = [record.class_chance, record.personal_chance, record.personal_accuracy]
    shares = [v for v in (*chances, *record.personal_accuracies) if v is not None]
    yield all(0 <= v <= 1 for v in shares), "a share of its test samples is not in [0, 1]"
    own = [v for v in record.personal_accuracies if v is not None]
    mean = sum(own) / len(own) if own else record.personal_accuracy
    yield _near(mean, record.personal_accuracy), f"its clients' accuracies have the mean {mean}"
    yield len(record.personal_accuracies) in (0, clients), f"it has accuracies of not {clients}"
    yield record.keeping_clients <= clients, f"{record.keeping_clients} clients kept something"
    variant = job.settings.get("variant", record.variant)
    yield record.variant == variant, f"its variant is {record.variant}, not {variant}"
    late = [p.rounds for p in record.course if p.rounds > played]
    yield not late, f"its course has round {late} of {played}"
    if isinstance(record.audit, outcomes.AuditSummary):
        yield record.audit.draws == job.audit, f"its audit has {record.audit.draws} draws"
        yield record.audit.eps_audited >= 0, f"its audit found {record.audit.eps_audited}"
    asked = any(t.membership for t in job.threats)
    yield asked == (record.membership is not None), "it measured membership, or not, unasked"
    known_threats = {t.name for t in job.threats}
    observed = record.observations
    yield observed.keys() == set(job.checkpoints), f"it was observed at {', '.join(observed)}"
    for name in {threat for looks in observed.values() for threat in looks} - known_threats:
        yield False, f"it was observed under {name}, which is none of its threats"


def _attack_claims(
    record: outcomes.AttackRecord, cell: Cell, trained: outcomes.TrainOutcome | None
) -> Claims:
    threat = cell.job.threat
    if not isinstance(trained, outcomes.TrainRecord):
        yield False, f"it is done, and its training is {trained.status if trained else 'missing'}"
        return
    look = trained.observations[cell.checkpoint].get(cell.threat)
    yield look is not None and look.status == "done", "its training was not observed then"
    assert look is not None
    views = record.views
    yield len(views) == look.views, f"it has {len(views)} views of {look.views}"
    yield not views or sum(views) == record.victims, f"its views have {sum(views)} victims"
    if threat.work == "single":
        # A sum over victims is one victim with the samples of all.
        samples = threat.batch * threat.local_steps
        whole = record.victims * record.samples == threat.victims * samples
        yield (
            whole and record.samples >= samples,
            f"it has {record.victims} victims of {record.samples} samples, and its threat "
            f"{threat.victims} of {samples}",
        )
    yield record.victims > 0, "it has no victim"
    yield record.budget == cell.job.budget, f"its budget is {record.budget}"
    yield record.failed <= record.victims, f"{record.failed} of {record.victims} victims failed"
    again = record.doubled
    if again is not None:
        yield again.budget == 2 * cell.job.budget, f"its doubled budget is {again.budget}"
        yield not record.is_floor, "it reads no message, and has a doubled run"
        yield again.gradient_evaluations > 0, "its doubled run spent no gradient evaluation"
    lacking = [m for m in record.values if not m.endswith("_anyone") and m not in record.floors]
    yield not lacking, f"it has no baseline of {', '.join(lacking)}"
    for scores in (record.values, record.floors, again.values if again else {}):
        for name, figures in scores.items():
            metric = name.removesuffix(FLOOR_SUFFIX)
            yield metric in METRICS, f"it has a metric {name}, which there is not"
            lo, hi = range_of(metric)
            if metric.startswith("ssim"):
                lo = -1.0
            wrong = [v for v in figures if not lo - _ROUNDING <= v <= hi + _ROUNDING]
            yield not wrong, f"it has {name} {wrong[:1]}, outside of [{lo:g}, {hi:g}]"
    if record.judged is not None:
        yield not any(map(math.isnan, record.judged)), "a likelihood loss is no number"


def _near(a: float | None, b: float | None) -> bool:
    return a == b or (
        a is not None and b is not None and abs(a - b) <= _ROUNDING * max(1.0, abs(a))
    )


# --- against each other -----------------------------------------------------------------------


def check_together(trainings: Iterable[PlannedTraining], read: Callable[..., Any]) -> None:
    """Raise UserError if records of a run contradict each other.

    All attacks on one observation have the same victims, samples and baselines, also where several
    trainings have the same truth. No two seeds have the same truth or the same baselines. Trainings
    of one task and seed have one test set. An attack reads messages everywhere or nowhere.

    Args:
        trainings: Of the run.
        read: `Store.read` of that run.
    """
    seen = dict[object, tuple[Any, str]]()

    def once(subject: object, value: Any, who: str, words: str) -> None:
        known, first = seen.setdefault(subject, (value, who))
        if known != value and not (
            isinstance(value, list) and all(map(_near, known, value))  # of other processors
        ):
            raise UserError(f"{first} and {who} contradict each other: {words}.")

    for training in trainings:
        job = training.job
        trained = read("train", training.key)
        if not isinstance(trained, outcomes.TrainRecord):
            continue
        task = canonical([job.task, job.protocol])
        tests = (trained.test_samples, trained.class_chance)
        once(("tests", task, job.seed), tests, job.name, "their test sets differ")
        for cell in training.cells:
            record = read("attack", cell.key)
            if not isinstance(record, outcomes.AttackRecord):
                continue
            who = f"{cell.name} (seed {cell.seed})"
            once(("floor", cell.attack), record.is_floor, who, "only one of them reads messages")
            place = (task, cell.checkpoint, cell.threat)
            files = trained.observations[cell.checkpoint][cell.threat].truths
            truth = tuple((trained.hashes or {}).get(name, training.key) for name in files)
            once((truth, *place, "seed"), cell.seed, who, "two seeds have the same private samples")
            sizes = (record.victims, record.samples, record.views)
            once((truth, *place), sizes, who, "their victims on one observation differ")
            for metric, figures in record.floors.items():
                once(
                    (truth, *place, metric), figures, who,
                    f"their {metric} baselines on one observation differ",
                )  # fmt: skip
                if metric in ("ssim", "mse") and len(set(figures)) > 1:
                    once(
                        ("copy", *place, metric, tuple(figures)), cell.seed, who,
                        "two seeds have the same baselines, so one is a copy of the other",
                    )  # fmt: skip
