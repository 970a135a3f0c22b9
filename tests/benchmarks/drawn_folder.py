"""A result folder of any size, its figures drawn by a seeded generator: what reports are timed on.

Records hold what those of a run do: the metrics and floors of each kind of attack, notes, a
training's ledger in words, cells that do not apply, a few that failed.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.plan import expand
from bench.harness.store import Store, key_of
from bench.privacy.ledger import Entry
from bench.protocols.settings import ProtocolSettings, TaskSettings, ThreatSettings
from bench.records import (
    AttackJob,
    AttackOutcome,
    Cell,
    DoubledRun,
    NoResult,
    PlannedTraining,
    Run,
    TrainJob,
    TrainRecord,
    to_json,
)
from bench.records.outcomes import AttackInputs
from bench.seeding import numpy_generator
from bench.suite import AttackSettings, DefenseSettings, Suite
from tests.made_records import VERSIONS, attacked_for, audit, trained_for

VICTIMS, CLIENTS, TEST_SAMPLES = 8, 10, 1000
CHECKPOINTS = ("init", "final")
COUNTS = ("leacc", "lnacc", "irec", "label_accuracy")
IMAGES = ("mse", "psnr", "ssim", "success", "recognised")
ATTACKS = ("dlg", "prior_only", "ilrg", "analytic", "inverting_gradients", "ridge", "decoder",
           "idlg", "split_label")  # fmt: skip
ON_COUNTS = ("ilrg", "split_label")
OPTIMISING = ("dlg", "idlg", "inverting_gradients")
DEFENSES: Mapping[str, Mapping[str, Any]] = {
    "gaussian": {"noise_multiplier": 0.02, "clip_norm": 5.0},
    "spm": {"epsilon": 3.9, "variant": "sign_rr", "target": "gradient"},
    "ms_pafl": {"epsilon": 1e4, "noise": "analytic", "clip_norm": 10.0, "check_in": 0.7},
    "selective_shield": {"tau": 0.05, "rho": 0.5, "noise_multiplier": 0.02, "clip_norm": 1.0},
    "dp_sgd": {"noise_multiplier": 1.1, "clip_norm": 1.0},
    "fedml_he": {"ratio": 0.1},
    "pm_sfl": {"lr_scale": 1000.0},
}
FAILED = 0.01
"""Share of attack cells that failed."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much a folder holds: records = tasks x settings x seeds x attacks x 2 checkpoints."""

    tasks: int
    settings: int
    seeds: int = 3
    attacks: int = len(ATTACKS)

    @property
    def rows(self) -> int:
        return self.tasks * self.settings * len(CHECKPOINTS)

    @property
    def records(self) -> int:
        return self.rows * self.seeds * self.attacks

    def suite(self) -> Suite:
        """The undefended setting and so many others on every task."""
        names = itertools.islice(itertools.cycle(DEFENSES), self.settings - 1)
        settings = [
            DefenseSettings(name=name, settings={**DEFENSES[name], "strength": 0.5 + i / 8})
            for i, name in enumerate(names)
        ]
        models = itertools.islice(itertools.cycle(("lenet", "resnet8", "vit_small")), self.tasks)
        return Suite(
            name="drawn", version=1, seeds=list(range(self.seeds)),
            checkpoints=list(CHECKPOINTS), budget=200, audit=1000,
            protocol=ProtocolSettings(name="fedavg", clients=CLIENTS, rounds=30, local_epochs=5.0),
            threats=[
                ThreatSettings(name=name, victims=VICTIMS, batch=batch)
                for name, batch in (("server", 1), ("batch8", 8))
            ],
            tasks=[
                TaskSettings(dataset=f"images_{i // 3}", model=m) for i, m in enumerate(models)
            ],
            defenses=[DefenseSettings(name="none"), *settings],
            attacks=[
                AttackSettings(name=n, threat="batch8" if n in ON_COUNTS else "server")
                for n in ATTACKS[: self.attacks]
            ],
        )  # fmt: skip


def write(folder: Path, extent: Extent) -> None:
    """Write run.json and all records; the folder must be new. Not synced to disk, which would take
    longer than all that is timed."""
    rng = numpy_generator(0, "drawn folder")
    store = Store(folder)
    for kind in ("train", "attack"):
        (folder / "records" / kind).mkdir(parents=True)
    plan = expand(extent.suite())
    cells = defaultdict(list)
    for cell in plan.cells:
        cells[cell.train].append(cell)
    keys = (key_of({"number": i}) for i in itertools.count())
    floors: dict[Any, dict[str, list[float]]] = defaultdict(lambda: _floors(rng))
    trainings = []
    for job in plan.trainings:
        key, own = next(keys), floors[str(job.task), job.seed]
        mine = tuple(Cell(key=next(keys), train_key=key, job=cell) for cell in cells[job])
        trainings.append(PlannedTraining(key=key, job=job, cells=mine))
        store.path("train", key).write_text(to_json(replace(_trained(rng, job), key=key)))
        for cell in mine:
            outcome = _attacked(rng, cell.job, key, own)
            store.path("attack", cell.key).write_text(to_json(replace(outcome, key=cell.key)))
    run = Run(suite=plan.suite, trainings=tuple(trainings), command="leakbench run drawn",
              device="cpu", versions=VERSIONS)  # fmt: skip
    (folder / "run.json").write_text(to_json(run))


def _trained(rng: np.random.Generator, job: TrainJob) -> TrainRecord:
    eps = float(10 ** rng.uniform(0, 5))
    ledger = Entry(
        eps_claimed=eps, unit="client", claim_delta=0.0, delta=1e-5,
        eps_record=4 * eps if rng.random() < 0.5 else float("inf"),
        constants={"C": eps / 3, "keep_probability": 0.8, "growth_per_round": 1.1},
        reasons=(f"Gaussian noise of std {eps:.4g} on a clipped update, released 30 times.",
                 "The magnitude of every uploaded value: no DP."),
        words=(f"The paper claims epsilon {eps:.4g} for one client, which is no training record.",
               "Nothing is proven about one training record.",
               "Neither number covers what many records of a client have in common."),
    )  # fmt: skip
    own = tuple(rng.uniform(0.7, 0.95, CLIENTS).tolist())
    return trained_for(
        job, correct=int(rng.integers(700, 950)), test_samples=TEST_SAMPLES, ledger=ledger,
        audit=audit(float(5 * rng.random()), "consistent"), personal_accuracies=own,
        personal_accuracy=sum(own) / CLIENTS,
        bytes_up=1e6 * float(rng.random()), client_seconds=float(rng.random()),
        seconds=float(30 * rng.random()),
    )  # fmt: skip


def _figures(rng: np.random.Generator, names: Sequence[str]) -> dict[str, list[float]]:
    whole = rng.random((len(names), VICTIMS))
    drawn = {n: v.tolist() for n, v in zip(names, whole, strict=True)}
    if "ssim" in drawn:
        drawn["success"] = [float(v > 0.9) for v in drawn["ssim"]]
        drawn["psnr"] = [10 + 40 * v for v in drawn["psnr"]]
    return drawn


def _floors(rng: np.random.Generator) -> dict[str, list[float]]:
    by_class = {f"{n}_class_mean": v for n, v in _figures(rng, IMAGES).items()}
    return {**_figures(rng, IMAGES), **by_class, **_figures(rng, COUNTS)}


def _attacked(
    rng: np.random.Generator, job: AttackJob, train: str, floors: dict[str, list[float]]
) -> AttackOutcome:
    name = job.label
    about: dict[str, Any] = {"inputs": AttackInputs.of(job), "train": train}
    if name == "analytic" and job.train.task.model != "lenet":
        reason = "the network does not begin with a linear layer with bias on the sample"
        return NoResult(status="not_applicable", reason=reason, **about)
    if rng.random() < FAILED:
        reason = "RuntimeError: the loss is not finite"
        return NoResult(status="failed", reason=reason, traceback=reason, **about)
    metrics = COUNTS if name in ON_COUNTS else (*IMAGES, *COUNTS)
    values = {n: floors[n] for n in metrics} if name == "prior_only" else _figures(rng, metrics)
    more: dict[str, Any] = {}
    if name in OPTIMISING:
        more = {"loss": rng.random(VICTIMS).tolist(), "gradient_evaluations": 4800}
    if name in OPTIMISING and job.train.defense == "none":
        more["doubled"] = DoubledRun(budget=400, values=_figures(rng, metrics), seconds=9.5,
                                     gradient_evaluations=9600)  # fmt: skip
    if name in ("ridge", "decoder"):
        more["notes"] = (f"held-out loss {rng.random():.3f} of ridge",)
    return attacked_for(
        job, train, victims=VICTIMS, values=values, floors=floors,
        is_floor=name == "prior_only", seconds=float(5 * rng.random()), **more,
    )  # fmt: skip
