"""What a worker does: one training with its observations, or one attack cell.

Both return the record as a plain dict; the driver writes it. Artifacts are written here, to a
folder of the job's own, which the driver puts in its place with the record.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench import data, models, registry
from bench.api import Attack, Context, Defense, Reconstruction, Seen, State, fresh
from bench.data.dataset import Dataset
from bench.data.partition import dirichlet, iid, shards
from bench.metrics.score import floors, score
from bench.privacy.events import Facts
from bench.privacy.ledger import account
from bench.protocols.evaluate import Reached, evaluate
from bench.protocols.export import load_seen, load_truth, save_seen, save_truth
from bench.protocols.federation import Federation, Work
from bench.protocols.observe import observe, play_shadow
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.protocols.split import start_federation
from bench.seeding import generator, numpy_generator
from bench.suite import AttackCell, TrainJob

DATASETS_KEPT = 4
"""How many data sets a process keeps: a plan's seeds take turns, each with a split of its own."""
EXPLODED = 100.0
"""A training whose weights' norm grew by this factor counts as diverged, as does one with a
value that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where jobs run: device, data folder, plugin files."""

    device: str = "cpu"
    data_dir: Path | None = None
    download: bool = False
    plugins: tuple[Path, ...] = ()


def versions() -> dict[str, str]:
    """Versions of everything that moves a number."""
    packages = ("leakbench", "torch", "torchvision", "numpy", "scipy", "opacus", "scikit-learn")
    return {"python": platform.python_version(), **{p: version(p) for p in packages}}


@cache
def plugins(files: tuple[Path, ...]) -> registry.Registry:
    return registry.discover(files)


@lru_cache(maxsize=DATASETS_KEPT)
def _dataset(
    name: str, settings: tuple[tuple[str, Any], ...], seed: int, data_dir: Path | None,
    download: bool,
) -> Dataset:  # fmt: skip
    return data.load(name, seed=seed, data_dir=data_dir, download=download, options=dict(settings))


def dataset_of(job: TrainJob, env: Environment) -> Dataset:
    settings = tuple(sorted(job.task.dataset_settings.items()))
    return _dataset(job.task.dataset, settings, job.seed, env.data_dir, env.download)


def network_of(job: TrainJob, dataset: Dataset) -> models.Network:
    return models.build(
        job.task.model,
        shape=dataset.shape,
        classes=dataset.classes,
        settings=job.task.model_settings,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """`run_training` as executors carry it out. dataset: as `dataset_of` gives it, or None to load
    it where the job runs."""

    job: TrainJob
    env: Environment
    artifacts: Path
    dataset: Dataset | None = None

    def __call__(self) -> dict[str, Any]:
        return run_training(self.job, self.env, self.artifacts, dataset=self.dataset)


@dataclass(frozen=True, kw_only=True)
class Attacking:
    """`run_attack` as executors carry it out; dataset as in `Training`."""

    cell: AttackCell
    env: Environment
    trained: Mapping[str, Any]
    observed: Path
    artifacts: Path
    dataset: Dataset | None = None

    @property
    def job(self) -> TrainJob:
        return self.cell.train

    def __call__(self) -> dict[str, Any]:
        return run_attack(
            self.cell, self.env, self.trained, self.observed, self.artifacts, dataset=self.dataset
        )


# --- training ---------------------------------------------------------------------------------


def run_training(
    job: TrainJob, env: Environment, artifacts: Path, *, dataset: Dataset | None = None
) -> dict[str, Any]:
    """Train, observe at each checkpoint, account. See `docs/records.md` for the record."""
    began = time.perf_counter()
    dataset = dataset_of(job, env) if dataset is None else dataset
    network = network_of(job, dataset)
    defense = plugins(env.plugins).defense(job.defense, job.settings)
    device = torch.device(env.device)
    missing = defense.requires - ({"smashed"} if job.protocol.cuts else set())
    if missing:
        return _not_applicable(f"no {', '.join(sorted(missing))} data leaves the client")
    if "mix" in defense.owns and len(set(job.protocol.cuts)) > 1:
        return _not_applicable("clients that are cut at different places cannot be mixed")
    shares = _shares(job, dataset)
    federation = start_federation(
        job.protocol.name,
        network=network,
        cuts=job.protocol.cuts,
        labels=job.protocol.labels,
        defense=defense,
        data=[(dataset.train_x[s], dataset.train_y[s]) for s in shares],
        seed=job.seed,
        device=device,
    )
    observations: dict[str, dict[str, Any]] = {}

    def look(checkpoint: str) -> None:
        if checkpoint in job.checkpoints:
            observations[checkpoint] = {
                t.name: _observe(federation, job, t, checkpoint, dataset, artifacts)
                for t in job.threats
            }

    look("init")
    norm_before = _norm(federation.state)
    protocol = job.protocol
    work = Work(
        protocol=protocol.name,
        batch=protocol.batch,
        lr=protocol.lr,
        local_steps=1 if protocol.name == "fedsgd" else protocol.local_steps,
        local_epochs=protocol.local_epochs,
    )
    up = down = 0
    seconds = 0.0
    client_rounds = 0
    reached = Reached()
    diverged: str | None = None
    sampling = generator(job.seed, "participation")
    rounds = 0
    for _ in range(protocol.rounds):
        result = federation.play(work, _sample(federation, protocol, sampling))
        rounds += 1
        up += result.wire.bytes_up
        down += result.wire.bytes_down
        seconds += result.client_seconds
        client_rounds += len(result.joined)
        for client in result.joined:
            reached.add(client, federation.held(client))
        diverged = _diverged(federation.state, norm_before, rounds)
        if diverged and "not finite" in diverged:
            break
    if diverged is None:
        look("final")
    elif "final" in job.checkpoints:
        reason = f"training diverged ({diverged})"
        observations["final"] = {
            t.name: {"status": "not_applicable", "reason": reason} for t in job.threats
        }
    utility = evaluate(
        federation, test_x=dataset.test_x, test_y=dataset.test_y, aux_x=dataset.aux_x,
        has_global=reached.everything(),
    )  # fmt: skip
    facts = Facts(
        parameters=max(
            sum(federation.state[n].numel() for n in federation.held(c)) for c in federation.clients
        ),
        rounds=rounds,
        clients=protocol.clients,
        participation=protocol.participation,
        batch=protocol.batch,
        records=min(len(s) for s in shares),
        local_steps=max(work.steps(len(s)) for s in shares),
        participations=max(federation.uploads.values(), default=0),
        fewest=federation.fewest,
        split=bool(job.protocol.cuts),
        broadcast=any(t.hears_broadcast for t in job.threats),
        delta=job.delta,
    )
    return {
        "status": "done",
        "reason": None,
        "variant": defense.variant,
        **utility.to_dict(),
        "diverged": diverged,
        "rounds_played": rounds,
        "bytes_up": up / rounds,
        "bytes_down": down / rounds,
        "client_seconds": seconds / max(1, client_rounds),
        "facts": asdict(facts),
        "ledger": asdict(account(defense, facts)),
        "audit": _audited(defense, job),
        "observations": observations,
        "parameters": network.n_parameters,
        "seconds": time.perf_counter() - began,
        "device": str(device),
        "versions": versions(),
    }


def _audited(defense: Defense, job: TrainJob) -> dict[str, Any] | None:
    """Summary of the empirical audit of one release; None if the suite asks for none."""
    if not job.audit:
        return None
    from bench.protocols.audit import audit

    try:
        found = audit(fresh(defense), draws=job.audit, seed=job.seed)
    except Exception as error:  # a training must not be lost to a hook that only the audit trips
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    whole = found.to_dict()
    kept = ("draws", "confidence", "eps_audited", "eps_at_least", "verdict_claim", "verdict_proof")
    return {"status": "done", "reason": None, **{k: whole[k] for k in kept}}


def _shares(job: TrainJob, dataset: Dataset) -> list[Any]:
    labels = dataset.train_y.numpy()
    rng = numpy_generator(job.seed, "partition", job.task.dataset)
    clients = job.protocol.clients
    if job.protocol.partition == "iid":
        return iid(labels, clients=clients, rng=rng)
    if job.protocol.partition == "shards":
        return shards(labels, clients=clients, each=job.protocol.shards, rng=rng)
    least = max(t.batch * t.local_steps for t in job.threats)
    least = min(least, len(labels) // clients)
    return dirichlet(labels, clients=clients, alpha=job.protocol.alpha, rng=rng, minimum=least)


def check_company(job: TrainJob, defense: Defense) -> None:
    """Raises ValueError if fewer clients take part, or are observed, than the defense needs to
    act together."""
    protocol = job.protocol
    if "smashed" in defense.requires and not protocol.cuts:
        return  # not applicable, which is no error
    present = _participants(protocol)
    if present < defense.together:
        raise ValueError(
            f"{job.defense} needs {defense.together} clients in every round, but {present} of "
            f"{protocol.clients} take part (participation {protocol.participation:g})."
        )
    for threat in job.threats:
        if threat.victims < defense.together:
            raise ValueError(
                f"{job.defense} needs {defense.together} clients that take part together, but "
                f"threat {threat.name} observes {threat.victims}."
            )


def _participants(protocol: ProtocolSettings) -> int:
    """Clients that the server samples per round."""
    return max(1, round(protocol.participation * protocol.clients))


def _sample(federation: Federation, protocol: ProtocolSettings, rng: torch.Generator) -> list[str]:
    """The round's clients, drawn without replacement."""
    ids = [c.id for c in federation.clients]
    count = _participants(protocol)
    return [ids[i] for i in torch.randperm(len(ids), generator=rng)[:count].sort().values]


def _norm(state: State) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in state.values()))


def _diverged(state: State, before: float, rounds: int) -> str | None:
    norm = _norm(state)
    if not math.isfinite(norm):
        return f"weights not finite after round {rounds}"
    if norm > EXPLODED * max(before, 1e-12):
        return f"weights grew {norm / before:.3g}-fold after round {rounds}"
    return None


def _observe(
    federation: Federation,
    job: TrainJob,
    threat: ThreatSettings,
    checkpoint: str,
    dataset: Dataset,
    artifacts: Path,
) -> dict[str, Any]:
    known = {"name": job.defense, "settings": dict(job.settings)}
    seen, truth = observe(
        federation,
        protocol=job.protocol,
        threat=threat,
        aux_x=dataset.aux_x,
        defense_known=known,
        names=(checkpoint,),
    )
    if not seen.clients:
        return {"status": "not_applicable", "reason": "no client checked in"}
    stem = f"{checkpoint}-{threat.name}"
    save_seen(seen, artifacts / f"{stem}-seen")
    save_truth(truth, artifacts / f"{stem}-truth.safetensors")
    return {"status": "done", "reason": None, "stem": stem}


# --- attack -----------------------------------------------------------------------------------


def run_attack(
    cell: AttackCell, env: Environment, trained: Mapping[str, Any], observed: Path,
    artifacts: Path, *, dataset: Dataset | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Attack one observation and score it. trained: the training's record; observed: its
    artifact folder. The attack gets the reloaded export; the truth is read after it returns.

    An attack that spends gradient evaluations on images of the reference defense runs a second
    time at twice its budget, scored under `doubled`: whether it had converged. The record's
    other figures, `seconds` included, are those of the first run."""
    if trained["status"] != "done":
        return _not_applicable(f"the training is {trained['status']}: {trained['reason']}")
    look = trained["observations"][cell.checkpoint][cell.threat.name]
    if look["status"] != "done":
        return _not_applicable(look["reason"])
    began = time.perf_counter()
    found = plugins(env.plugins)
    attack = found.attack(cell.attack, cell.settings)
    defense = found.defense(cell.train.defense, cell.train.settings)
    stem = observed / look["stem"]
    seen = load_seen(stem.with_name(f"{stem.name}-seen"))
    reason = attack.applies(seen)
    if reason is not None:
        return _not_applicable(reason)
    dataset = dataset_of(cell.train, env) if dataset is None else dataset
    answer = _answer(cell, env, dataset, attack, seen, budget=cell.budget)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    optimises = answer.evaluations > 0 and answer.images is not None
    again = None
    if defense.is_reference and not attack.is_floor and optimises:
        # All is rebuilt, so that the second run differs from the first in its budget alone.
        anew = found.attack(cell.attack, cell.settings)
        seen = load_seen(stem.with_name(f"{stem.name}-seen"))
        again = _answer(cell, env, dataset, anew, seen, budget=2 * cell.budget)
    again_seconds = time.perf_counter() - began
    truth = _truth(cell, dataset, stem)
    doubled = None if again is None else {
        "budget": 2 * cell.budget,
        "values": score(again, **truth).values,
        "gradient_evaluations": again.evaluations,
        "seconds": again_seconds,
    }  # fmt: skip
    return _scored(cell, env, attack, answer, dataset, truth, artifacts) | {
        "doubled": doubled,
        "seconds": seconds,
    }


def _answer(
    cell: AttackCell, env: Environment, dataset: Dataset, attack: Attack, seen: Seen, *, budget: int
) -> Reconstruction:
    """One run of the attack; every run of a cell makes the same draws, so starts are paired."""
    defense = plugins(env.plugins).defense(cell.train.defense, cell.train.settings)
    answer = attack.run(seen, _context(cell, env, dataset, defense, seen, budget=budget))
    if not isinstance(answer, Reconstruction):
        raise TypeError(
            f"attack '{cell.attack}' must return a Reconstruction, got {type(answer).__name__}."
        )
    return answer


def _context(
    cell: AttackCell,
    env: Environment,
    dataset: Dataset,
    defense: Defense,
    seen: Seen,
    *,
    budget: int,
) -> Context:
    device = torch.device(env.device)
    network = network_of(cell.train, dataset)
    rng = generator(cell.train.seed, "attack", cell.label, cell.checkpoint, cell.threat.name)
    aux = slice(None, cell.threat.aux)
    return Context(
        rng=rng,
        device=device,
        budget=budget,
        aux_x=dataset.aux_x[aux].clone(),
        aux_y=dataset.aux_y[aux].clone(),
        network=network,
        defense=defense,
        shadow=lambda x, y, before=None: play_shadow(
            seen if before is None else replace(seen, before=before),
            network=network,
            defense=fresh(defense),
            x=x,
            y=y,
            rng=rng,
            device=device,
        ),
    )


def _truth(cell: AttackCell, dataset: Dataset, stem: Path) -> dict[str, Any]:
    """What `score` compares an answer with: the truth, and the attacker's public data."""
    truth = load_truth(stem.with_name(f"{stem.name}-truth.safetensors"))
    return {
        "x": truth.x,
        "y": truth.y,
        "classes": dataset.classes,
        "aux_x": dataset.aux_x[: cell.threat.aux],
        "categorical": dataset.categorical,
    }


def _scored(
    cell: AttackCell,
    env: Environment,
    attack: Attack,
    answer: Reconstruction,
    dataset: Dataset,
    truth: Mapping[str, Any],
    artifacts: Path,
) -> dict[str, Any]:
    scores = score(answer, **truth)
    floor = floors(**truth, aux_y=dataset.aux_y[: cell.threat.aux])
    victims, samples = truth["y"].shape
    if scores.images is not None:
        artifacts.mkdir(parents=True, exist_ok=True)
        save_file(
            {"images": scores.images.contiguous(), "truth": truth["x"].contiguous()},
            artifacts / "reconstruction.safetensors",
        )
    return {
        "status": "done",
        "reason": None,
        "victims": victims,
        "samples": samples,
        "failed": scores.failed,
        "is_floor": attack.is_floor,
        "budget": cell.budget,
        "values": scores.values,
        "floors": floor,
        "loss": None if answer.loss is None else [float(v) for v in answer.loss],
        "gradient_evaluations": answer.evaluations,
        "notes": list(answer.notes),
        "device": env.device,
        "versions": versions(),
    }


def _not_applicable(reason: str) -> dict[str, Any]:
    return {"status": "not_applicable", "reason": reason}
