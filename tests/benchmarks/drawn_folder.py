"""A result folder of any size, its figures drawn by a seeded generator: what reports are timed on.

Records have the shape of those that a run writes (docs/records.md): the metrics and floors of each
kind of attack, notes, a training's ledger in words, cells that do not apply, a few that failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.store import Store, key_of
from bench.records import SCHEMA, Kind
from bench.seeding import numpy_generator

VICTIMS, CLIENTS, TEST_SAMPLES = 8, 10, 1000
CHECKPOINTS = ("init", "final")
COUNTS = ("leacc", "lnacc", "irec", "label_accuracy")
IMAGES = ("mse", "psnr", "ssim", "success", "recognised")
ATTACKS = ("dlg", "prior_only", "ilrg", "analytic", "inverting_gradients", "ridge", "decoder",
           "idlg", "split_label")  # fmt: skip
ON_COUNTS = ("ilrg", "split_label")
OPTIMISING = ("dlg", "idlg", "inverting_gradients")
DEFENSES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "gaussian": {"noise_multiplier": 0.02, "clip_norm": 5.0},
    "spm": {"epsilon": 3.9, "variant": "sign_rr", "target": "gradient"},
    "ms_pafl": {"epsilon": 1e4, "noise": "analytic", "clip_norm": 10.0, "check_in": 0.7},
    "selective_shield": {"tau": 0.05, "rho": 0.5, "noise_multiplier": 0.02, "clip_norm": 1.0},
    "dp_sgd": {"noise_multiplier": 1.1, "clip_norm": 1.0},
    "fedml_he": {"ratio": 0.1},
    "pm_sfl": {"lr_scale": 1000.0},
}
THREATS = [
    {"name": name, "victims": VICTIMS, "batch": batch, "local_steps": 1, "labels": False,
     "mode": "eval", "aux": None, "hears": "every_broadcast"}
    for name, batch in (("server", 1), ("batch8", 8))
]  # fmt: skip
PROTOCOL = {
    "name": "fedavg", "clients": CLIENTS, "participation": 1.0, "rounds": 30, "local_steps": None,
    "local_epochs": 5.0, "batch": 32, "lr": 0.5, "partition": "dirichlet", "alpha": 0.5,
    "shards": 1, "cut": None, "labels": "private",
}  # fmt: skip
VERSIONS = {
    "python": "3.12.3", "leakbench": "0.1.0", "torch": "2.8.0", "torchvision": "0.23.0",
    "numpy": "2.3.2", "scipy": "1.16.1", "opacus": "1.5.4", "scikit-learn": "1.7.1",
}  # fmt: skip
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


def write(folder: Path, extent: Extent) -> None:
    """Write run.json and all records; the folder must be new. Not synced to disk, which would take
    longer than all that is timed."""
    rng = numpy_generator(0, "drawn folder")
    store = Store(folder)
    for kind in ("train", "attack"):
        (folder / "records" / kind).mkdir(parents=True)
    keys = (key_of({"number": i}) for i in range(1 << 40))
    trainings = []
    for task in range(extent.tasks):
        floors = {s: _floors(rng) for s in range(extent.seeds)}
        for defense, settings in _settings(extent.settings):
            for seed in range(extent.seeds):
                key = next(keys)
                training = _training(key, task, defense, settings, seed)
                training["cells"] = list(_cells(keys, ATTACKS[: extent.attacks]))
                trainings.append(training)
                _put(store, "train", key, _trained(rng, training))
                for cell in training["cells"]:
                    record = _attacked(rng, cell, floors[seed], defense, task)
                    _put(store, "attack", cell["key"], {**record, "train": key})
    run = {
        "schema": SCHEMA, "suite": _suite(extent), "command": "leakbench run drawn",
        "device": "cpu", "versions": VERSIONS, "plugins": [], "code": {},
        "trainings": trainings,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run, indent=1))


def _put(store: Store, kind: Kind, key: str, record: Mapping[str, Any]) -> None:
    text = json.dumps({"schema": SCHEMA, "key": key, **record}, indent=1)
    store.path(kind, key).write_text(text)


def _suite(extent: Extent) -> dict[str, Any]:
    return {
        "name": "drawn", "version": 1, "description": "Figures drawn by a seeded generator.",
        "seeds": list(range(extent.seeds)), "checkpoints": list(CHECKPOINTS), "delta": 1e-5,
        "budget": 200, "audit": 1000, "timeout_s": 3600, "protocol": PROTOCOL,
        "threats": THREATS, "defenses": [{"name": n} for n in DEFENSES],
        "tasks": [_task(i) for i in range(extent.tasks)],
        "attacks": [{"name": n, "threat": _threat(n)} for n in ATTACKS[: extent.attacks]],
    }  # fmt: skip


def _settings(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many defense settings, the undefended one first."""
    yield "none", {}
    names = [n for n in DEFENSES if n != "none"]
    for i in range(count - 1):
        name = names[i % len(names)]
        yield name, {**DEFENSES[name], "strength": 0.5 + i / 8}


def _task(number: int) -> dict[str, Any]:
    return {"dataset": f"images_{number // 3}", "dataset_settings": {},
            "model": ("lenet", "resnet8", "vit_small")[number % 3],
            "model_settings": {"init": 0.25}}  # fmt: skip


def _threat(attack: str) -> str:
    return "batch8" if attack in ON_COUNTS else "server"


def _training(
    key: str, task: int, defense: str, settings: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    return {
        "key": key,
        "task": _task(task),
        "protocol": PROTOCOL, "defense": defense, "settings": settings, "threats": THREATS,
        "checkpoints": list(CHECKPOINTS), "delta": 1e-5, "seed": seed, "audit": 1000,
    }  # fmt: skip


def _cells(keys: Iterator[str], attacks: Sequence[str]) -> Iterator[dict[str, Any]]:
    for checkpoint in CHECKPOINTS:
        for name in attacks:
            yield {
                "key": next(keys), "label": name, "attack": name, "checkpoint": checkpoint,
                "threat": _threat(name),
            }  # fmt: skip


def _trained(rng: np.random.Generator, training: Mapping[str, Any]) -> dict[str, Any]:
    own: list[float | None] = rng.uniform(0.7, 0.95, CLIENTS).tolist()
    if rng.random() < 0.1:
        own[int(rng.integers(CLIENTS))] = None  # none of its classes is tested
    known = [v for v in own if v is not None]
    eps = float(10 ** rng.uniform(0, 5))
    protected = rng.random() < 0.5
    claim = f"The paper claims epsilon {eps:.4g} for one client, which is not a training record."
    return {
        "status": "done", "reason": None, "variant": training["settings"].get("variant", ""),
        "correct": int(rng.integers(700, 950)), "test_samples": TEST_SAMPLES,
        "class_chance": 0.1, "personal_accuracies": own,
        "personal_accuracy": sum(known) / len(known),
        "personal_chance": 0.38, "keeping_clients": int(rng.integers(3)), "diverged": None,
        "rounds_played": 30, "bytes_up": 1e6 * float(rng.random()), "bytes_down": 378640.0,
        "client_seconds": float(rng.random()),
        "facts": {"parameters": 9466, "rounds": 30, "clients": CLIENTS, "participation": 1.0,
                  "batch": 32, "records": 48, "local_steps": 25, "participations": 30,
                  "fewest": 1, "split": False, "broadcast": True, "delta": 1e-5},
        "ledger": {
            "eps_claimed": eps, "unit": "client", "claim_delta": 0.0,
            "eps_record": 4 * eps if protected else "inf", "delta": 1e-5,
            "constants": {"C": eps / 3, "keep_probability": 0.8, "growth_per_round": 1.1},
            "reasons": [f"Gaussian noise of std {eps:.4g} on a clipped update, released 30 times.",
                        "The magnitude of every uploaded value: no DP."],
            "words": [claim, "Nothing is proven about one training record.",
                      "Neither number covers what many records of a client have in common."],
        },
        "audit": {"status": "done", "reason": None, "draws": 1000, "confidence": 0.95,
                  "eps_audited": float(5 * rng.random()), "eps_at_least": True,
                  "verdict_claim": "consistent", "verdict_proof": "no proof"},
        "observations": {c: {t["name"]: {"status": "done", "reason": None,
                                         "stem": f"{c}-{t['name']}"} for t in THREATS}
                         for c in CHECKPOINTS},
        "parameters": 9466, "seconds": float(30 * rng.random()), "device": "cpu",
        "versions": VERSIONS,
        "inputs": {k: training[k] for k in ("task", "protocol", "defense", "settings", "threats",
                                            "checkpoints", "delta", "seed", "audit")},
    }  # fmt: skip


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
    rng: np.random.Generator, cell: Mapping[str, Any], floors: Mapping[str, list[float]],
    defense: str, task: int,
) -> dict[str, Any]:  # fmt: skip
    name = cell["label"]
    inputs = {"attack": name, "settings": {}, "threat": cell["threat"],
              "checkpoint": cell["checkpoint"], "budget": 200}  # fmt: skip
    if name == "analytic" and task % 3:
        reason = "the network does not begin with a linear layer with bias on the sample"
        return {"status": "not_applicable", "reason": reason, "inputs": inputs}
    if rng.random() < FAILED:
        reason = "RuntimeError: the loss is not finite"
        return {"status": "failed", "reason": reason, "traceback": reason, "inputs": inputs}
    metrics = COUNTS if name in ON_COUNTS else (*IMAGES, *COUNTS)
    values = {n: floors[n] for n in metrics} if name == "prior_only" else _figures(rng, metrics)
    optimises = name in OPTIMISING
    again = {"budget": 400, "values": _figures(rng, metrics), "gradient_evaluations": 9600,
             "seconds": 9.5} if optimises and defense == "none" else None  # fmt: skip
    notes = [f"held-out loss {rng.random():.3f} of ridge"] if name in ("ridge", "decoder") else []
    return {
        "status": "done", "reason": None, "victims": VICTIMS,
        "samples": 8 if name in ON_COUNTS else 1, "failed": 0, "is_floor": name == "prior_only",
        "budget": 200, "values": values, "floors": floors,
        "loss": rng.random(VICTIMS).tolist() if optimises else None,
        "gradient_evaluations": 4800 if optimises else 0, "notes": notes, "device": "cpu",
        "versions": VERSIONS, "doubled": again, "seconds": float(5 * rng.random()),
        "inputs": inputs,
    }  # fmt: skip
