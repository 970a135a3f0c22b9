"""What a job is, for its cost: the features by which jobs are held against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.protocols.settings import MOST_RECORDED, ThreatSettings
from bench.records import AttackJob, TrainJob

Features = Mapping[str, str]


def _text(settings: Mapping[str, Any]) -> str:
    return ",".join(f"{k}={settings[k]}" for k in sorted(settings))


def _threat(threat: ThreatSettings) -> str:
    several = "" if threat.rounds == 1 else f" in {threat.rounds} rounds"
    if threat.recorded:
        return "as trained"
    if threat.work == "trained":
        return f"{threat.victims} as trained{several}"
    epochs = "" if threat.local_epochs == 1 else f"x{threat.local_epochs}"
    return f"{threat.victims}x{threat.batch}x{threat.local_steps}{epochs}{several}"


def _setup(job: TrainJob, device: str) -> dict[str, str]:
    """What matters to a training as to the attacks on it."""
    task, protocol = job.task, job.protocol
    return {
        "device": device.split(":")[0],
        "protocol": protocol.name,
        "channel": f"{'+'.join(protocol.cuts)}/{protocol.labels}" if protocol.cuts else "whole",
        "model": f"{task.model}({_text(task.model_settings)})",
        "data": f"{task.dataset}({_text(task.dataset_settings)})",
        "defense": job.defense,
        "settings": _text(job.settings),
    }


def training_features(job: TrainJob, device: str) -> dict[str, str]:
    """What the cost of a training depends on, but for its rounds."""
    protocol = job.protocol
    steps, epochs = protocol.local_steps, protocol.local_epochs
    return _setup(job, device) | {
        "clients": str(protocol.clients),
        "participation": f"{protocol.participation:g}",
        "batch": str(protocol.batch),
        "local": f"{epochs:g} epochs" if epochs else f"{steps or 1} steps",
        "threats": " ".join(_threat(t) for t in job.threats),
        "checkpoints": " ".join(job.checkpoints),
        "audit": str(job.audit),
    }


def attack_features(job: AttackJob, device: str) -> dict[str, str]:
    """What the cost of an attack depends on, but for its budget."""
    return _setup(job.train, device) | {
        "attack": job.attack,
        "options": _text(job.settings),
        "checkpoint": job.checkpoint,
        "threat": f"{_threat(job.threat)} aux {job.threat.aux}",
    }


def round_size(job: TrainJob, steps: float) -> float:
    """Samples of all clients' steps in a round."""
    return float(job.protocol.participants * steps * job.protocol.batch)


def threat_size(job: AttackJob) -> float:
    """Samples that an attack rebuilds, counted in every round."""
    threat, protocol = job.threat, job.train.protocol
    if threat.recorded:
        return MOST_RECORDED * round_size(job.train, protocol.local_steps or 1)
    return float(threat.victims * threat.batch * threat.local_steps * threat.rounds)
