"""One training with its observations and its account of privacy: what a worker does first.

The record is returned; the driver writes it. Artifacts are written here, to a folder of the job's
own, which the driver puts in its place with the record.
"""

import math
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch

from bench.contract.attack import Seen
from bench.contract.defense import Defense, unmet
from bench.contract.events import Facts
from bench.contract.messages import State
from bench.data.dataset import Dataset
from bench.errors import UnfitError, UserError
from bench.harness.environment import network_of, not_applicable, shares_of, versions
from bench.harness.membership import MembershipInference
from bench.harness.work import Work
from bench.privacy.ledger import account
from bench.protocols import export
from bench.protocols.evaluate import Reached, Utility, evaluate
from bench.protocols.federation import (
    PARTICIPATION,
    UPLOADED,
    Federation,
    RoundResult,
    RoundSeconds,
    sample_clients,
)
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import MOST_BYTES, Truth, observe, record_round
from bench.protocols.settings import (
    TRAINING,
    Checkpoint,
    ThreatSettings,
    evenly,
    rounds_before,
    rounds_to_record,
)
from bench.protocols.split import start_federation
from bench.records import TrainJob, outcomes, sound_text
from bench.sandbox.declared import MessageCheck
from bench.seeding import generator
from bench.toolkit.precision import whole_float32

EXPLODED = 100.0
"""A training whose weights' norm grew by this factor counts as diverged, as does one with a
value that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Training(Work):
    """One training, as executors carry it out; it leaves what the server saw, and the truth."""

    job: TrainJob

    @whole_float32()
    def __call__(self) -> outcomes.TrainOutcome:
        """Train, observe at each checkpoint, account; see `docs/records.md` for the record."""
        try:
            return _train(self)
        except UnfitError as error:
            return not_applicable(str(error).rstrip("."))


def _train(work: Training) -> outcomes.TrainOutcome:
    began = time.perf_counter()
    job, env = work.job, work.env
    dataset = work.data()
    network = network_of(job, dataset.shape, dataset.classes)
    defense = work.registry().defense(job.defense, job.settings)
    device = torch.device(env.device)
    protocol = job.protocol
    if (lack := unmet(defense, cut=bool(protocol.cuts))) is not None:
        return not_applicable(lack)
    if "mix" in defense.owns and len(set(protocol.cuts)) > 1:
        return not_applicable("clients that are cut at different places cannot be mixed")
    shares = shares_of(job, dataset)
    federation = start_federation(
        protocol.name,
        network=network,
        cuts=protocol.cuts,
        labels=protocol.labels,
        server_lr=protocol.server_lr,
        server_momentum=protocol.server_momentum,
        defense=defense,
        data=[(dataset.train_x[s], dataset.train_y[s]) for s in shares],
        seed=job.seed,
        device=device,
    )
    observations: dict[str, dict[str, outcomes.Observation]] = {}
    declared = MessageCheck(defense, job.seed, protocol.batch, federation.clients, protocol.rounds)
    recorder = Recorder(work, federation, dataset, declared)
    own = [t for t in job.threats if not t.recorded]
    places = {c: rounds_before(c, protocol.rounds) for c in job.checkpoints if c != TRAINING}
    measured = set(evenly(protocol.rounds, job.course) if job.course else ())
    measured |= {after for c, after in places.items() if c not in ("init", "final")}

    def look(played: int) -> None:
        """Save what is to be observed after `played` rounds: at checkpoints everything, and for
        later checkpoints their earlier releases that begin here."""
        for checkpoint, after in places.items():
            for threat in own if checkpoint != "init" and after > played else ():
                for number, begins in enumerate(threat.schedule(after)[:-1]):
                    if begins == played:
                        recorder.release(threat, checkpoint, number)
            if after == played and diverged is None:
                observations[checkpoint] = {t.name: recorder.observe(t, checkpoint) for t in own}

    sampling = generator(job.seed, PARTICIPATION)
    local = LocalWork.of(protocol)

    def facts() -> Facts:
        """Return the facts of the training so far."""
        return Facts(
            parameters=max(
                sum(federation.state[n].numel() for n in federation.names_held(c))
                for c in federation.clients
            ),
            head=sum(federation.state[n].numel() for n in federation.head),
            rounds=rounds,
            clients=protocol.clients,
            participation=protocol.participation,
            batch=protocol.batch,
            records=min(len(s) for s in shares),
            local_steps=max(local.steps(len(s)) for s in shares),
            participations=max(federation.uploads.values(), default=0),
            fewest=federation.fewest,
            split=bool(protocol.cuts),
            broadcast=any(t.hears == "every_broadcast" for t in job.threats),
            delta=job.delta,
        )

    def utility() -> Utility:
        return evaluate(federation, dataset, has_global=reached.everything())

    up = down = rounds = client_rounds = 0
    spent = RoundSeconds()
    uploaded = torch.zeros(len(UPLOADED), dtype=torch.float64, device=device)
    reached = Reached()
    course: list[outcomes.CoursePoint] = []
    diverged: str | None = None
    norm_before = _norm(federation.state)
    look(0)
    for _ in range(protocol.rounds):
        ids = [client.id for client in federation.clients]
        sampled = sample_clients(ids, protocol, sampling)
        result = recorder.play(local, sampled)
        rounds += 1
        up += result.wire.bytes_up
        down += result.wire.bytes_down
        spent += result.seconds
        uploaded += result.uploaded
        client_rounds += len(result.joined)
        for client in result.joined:
            reached.add(client, federation.names_held(client))
        diverged = _divergence(federation.state, norm_before, rounds)
        if diverged and "not finite" in diverged:
            break
        look(rounds)
        if rounds in measured:
            figures, entry = utility(), account(defense, facts())
            point = outcomes.CoursePoint(
                rounds=rounds,
                correct=figures.correct,
                personal_accuracies=figures.personal_accuracies,
                eps_claimed=entry.eps_claimed,
                eps_record=entry.eps_record,
            )
            course.append(point)
    if diverged is None:
        observations[TRAINING] = recorder.observations()
    if any(look.status == "done" for looks in observations.values() for look in looks.values()):
        save_public(dataset, job, work.artifacts)
    for checkpoint in set(job.checkpoints) - observations.keys():
        missing = outcomes.Observation(
            status="not_applicable", reason=f"training diverged ({diverged})"
        )
        threats = own if checkpoint != TRAINING else recorder.threats
        observations[checkpoint] = {t.name: missing for t in threats}
        for left in work.artifacts.glob(f"{checkpoint}-*"):  # releases that nothing will read
            left.unlink()
    happened = facts()
    return outcomes.TrainRecord(
        variant=defense.variant,
        **vars(utility()),
        diverged=diverged,
        rounds_played=rounds,
        bytes_up=up / rounds,
        bytes_down=down / rounds,
        client_seconds=(spent.training + spent.uploading) / max(1, client_rounds),
        facts=happened,
        ledger=account(defense, happened),
        audit=_audit(defense, job),
        observations={c: observations[c] for c in job.checkpoints},
        course=tuple(course),
        undeclared=declared.reasons(),
        membership=recorder.inference.summarise() if recorder.inference else None,
        workings=outcomes.Workings(
            **dict(zip(UPLOADED, (uploaded / uploaded.sum().clamp_min(1)).tolist(), strict=True)),
            training=spent.training / rounds,
            parties=spent.parties / rounds,
            aggregation=spent.aggregation / rounds,
        ),
        parameters=network.n_parameters,
        seconds=time.perf_counter() - began,
        device=str(device),
        versions=versions(),
    )


def _audit(defense: Defense, job: TrainJob) -> outcomes.AuditSummary | outcomes.AuditFailure | None:
    """Audit one release; None if the suite asks for no audit."""
    if not job.audit:
        return None
    from bench.sandbox.audit import audit
    from bench.sandbox.hooked import PluginFault

    try:
        result = audit(defense, draws=job.audit, seed=job.seed)
    except PluginFault as fault:  # a training must not be lost to a hook that only the audit trips
        return outcomes.AuditFailure(reason=sound_text(str(fault)))
    told = {field.name for field in fields(outcomes.AuditSummary)}
    return outcomes.AuditSummary(**{n: v for n, v in vars(result).items() if n in told})


def check_company(job: TrainJob, defense: Defense) -> None:
    """Raise UserError if fewer clients take part, or are observed, than the defense needs to act
    together."""
    protocol = job.protocol
    if unmet(defense, cut=bool(protocol.cuts)):
        return  # not applicable, which is no error
    needs = f"{job.defense} needs {defense.together} clients"
    if protocol.sampling == "poisson" and defense.together > 1:
        other = 'sampling "poisson" does not promise; use "fixed".'
        raise UserError(f"{needs} in every round, which {other}")
    if protocol.participants < defense.together:
        part = f"{protocol.participants} of {protocol.clients} take part"
        share = f"participation {protocol.participation:g}"
        raise UserError(f"{needs} in every round, but {part} ({share}).")
    for threat in job.threats:
        if not threat.recorded and threat.victims < defense.together:
            seen = f"threat {threat.name} observes {threat.victims}"
            raise UserError(f"{needs} that take part together, but {seen}.")


def _norm(state: State) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in state.values()))


def _divergence(state: State, before: float, rounds: int) -> str | None:
    norm = _norm(state)
    if not math.isfinite(norm):
        return f"weights not finite after round {rounds}"
    if norm > EXPLODED * max(before, 1e-12):
        return f"weights grew {norm / before:.3g}-fold after round {rounds}"
    return None


def save_public(dataset: Dataset, job: TrainJob, artifacts: Path) -> None:
    """Write the public samples that attackers are granted, as many as any threat grants."""
    granted = [len(dataset.aux_y) if t.aux is None else t.aux for t in job.threats]
    most = slice(None, max(granted))
    public = {"x": dataset.aux_x[most], "y": dataset.aux_y[most]}
    export.save_tensors(public, artifacts / f"{export.PUBLIC}.safetensors")


class Recorder:
    """Plays rounds of a training, or on forks of it, and keeps what the server sees of them.

    Args:
        work: The training; what the server saw, and the truth, go to its folder.
        federation: Its state.
        dataset: Its data.
        declared: Is shown every round.
    """

    def __init__(
        self, work: Training, federation: Federation, dataset: Dataset, declared: MessageCheck
    ) -> None:
        self.job, self.artifacts, job = work.job, work.artifacts, work.job
        self.federation, self.dataset, self.declared = federation, dataset, declared
        self.known = {"name": job.defense, "settings": dict(job.settings)}
        self.threats = [t for t in job.threats if t.recorded]
        self.numbers = rounds_to_record(job.protocol.rounds, job.seed) if self.threats else []
        self.views = dict.fromkeys((t.name for t in self.threats), 0)
        self.left_out: dict[str, None] = {}
        asked = any(t.membership for t in self.threats)
        self.inference = MembershipInference(federation, dataset) if asked else None

    def play(self, work: LocalWork, sampled: list[str]) -> RoundResult:
        """Play a round of the training; a log of its messages changes nothing of it."""
        federation = self.federation
        if federation.round not in self.numbers:
            result = federation.play(work, sampled, watched=self.declared.choose_watched(sampled))
            self.declared.check_round(federation, result, "training")
            return result
        public = self.dataset.aux_x.to(federation.device)
        buffers = federation.network.calibrate(federation.mean_weights(), public)
        result = federation.play(work, sampled, observed=True, most_bytes=MOST_BYTES)
        self.declared.check_round(federation, result, "recorded")
        federation = replace(federation, buffers=buffers)
        for threat in self.threats:
            views, reasons = record_round(federation, result, self.job.protocol, threat, self.known)
            self.left_out |= dict.fromkeys(reasons)
            for number, (seen, truth) in enumerate(views, start=self.views[threat.name]):
                self.declared.note_aggregation(seen)
                stem = outcomes.Observation.view_stem(f"{TRAINING}-{threat.name}", number)
                export.save_release(seen, self.artifacts / f"{stem}-seen")
                export.save_truth(truth, self.artifacts / f"{stem}{export.TRUTH}")
            self.views[threat.name] += len(views)
        if self.inference:
            self.inference.add_round(federation, result)
        return result

    def observations(self) -> dict[str, outcomes.Observation]:
        """Return the observation of each threat."""
        reason = f"not attacked: {'; '.join(self.left_out)}" if self.left_out else None
        none = reason or "no client took part in a recorded round"
        return {
            name: outcomes.Observation(
                status="done", reason=reason, stem=f"{TRAINING}-{name}", views=views
            )
            if views
            else outcomes.Observation(status="not_applicable", reason=none)
            for name, views in self.views.items()
        }

    def observe(self, threat: ThreatSettings, checkpoint: Checkpoint) -> outcomes.Observation:
        """Save the last release of a checkpoint's observation and the truth; at init, whose
        releases all begin in the present state, the others too."""
        if checkpoint == "init":
            for number in range(threat.rounds - 1):
                self.release(threat, checkpoint, number)
        seen, truth = self.release(threat, checkpoint)
        if not seen.clients:
            return outcomes.Observation(status="not_applicable", reason="no client checked in")
        stem = f"{checkpoint}-{threat.name}"
        export.save_truth(truth, self.artifacts / f"{stem}{export.TRUTH}")
        return outcomes.Observation(status="done", stem=stem)

    def release(
        self, threat: ThreatSettings, checkpoint: Checkpoint, number: int | None = None
    ) -> tuple[Seen, Truth]:
        """Play one observed round and save at once what was seen; number: see `observe`."""
        seen, truth = observe(
            self.federation,
            protocol=self.job.protocol,
            threat=threat,
            aux_x=self.dataset.aux_x,
            defense_known=self.known,
            names=(checkpoint,),
            earlier=number,
            look=partial(self.declared.check_round, where="of its own"),
        )
        self.declared.note_aggregation(seen)
        path = self.artifacts / f"{checkpoint}-{threat.name}-seen"
        if number is None:
            export.save_release(seen, path, earlier=threat.rounds - 1)
        else:
            export.save_release(seen, export.earlier_path(path, number), of_many=True)
        return seen, truth
