"""What a job is, for its cost: the features by which jobs are held against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Stage = Literal["train", "attack"]
Features = Mapping[str, str]


def _text(settings: Mapping[str, Any]) -> str:
    return ",".join(f"{k}={settings[k]}" for k in sorted(settings))


def _threat(threat: Mapping[str, Any]) -> str:
    return f"{threat['victims']}x{threat['batch']}x{threat['local_steps']}"


def _setup(inputs: Mapping[str, Any], device: str) -> dict[str, str]:
    """What matters to a training as to the attacks on it."""
    task, protocol = inputs["task"], inputs["protocol"]
    cut = protocol["cut"]
    split = f"{cut if isinstance(cut, str) else '+'.join(cut or [])}/{protocol['labels']}"
    return {
        "device": device.split(":")[0],
        "protocol": protocol["name"],
        "channel": split if cut else "whole",
        "model": f"{task['model']}({_text(task['model_settings'])})",
        "data": f"{task['dataset']}({_text(task['dataset_settings'])})",
        "defense": inputs["defense"],
        "settings": _text(inputs["settings"]),
    }


def training_features(inputs: Mapping[str, Any], device: str) -> dict[str, str]:
    """What the cost of a training depends on, but for its rounds. inputs: `TrainJob.inputs`."""
    protocol = inputs["protocol"]
    steps, epochs = protocol["local_steps"], protocol["local_epochs"]
    local = f"{epochs:g} epochs" if epochs else f"{steps or 1} steps"
    return _setup(inputs, device) | {
        "clients": str(protocol["clients"]),
        "participation": f"{protocol['participation']:g}",
        "batch": str(protocol["batch"]),
        "local": local,
        "threats": " ".join(_threat(t) for t in inputs["threats"]),
        "checkpoints": " ".join(inputs["checkpoints"]),
        "audit": str(inputs["audit"]),
    }


def attack_features(
    inputs: Mapping[str, Any], training: Mapping[str, Any], device: str
) -> dict[str, str]:
    """What the cost of a cell depends on, but for its budget. inputs: `AttackCell.inputs`;
    training: those of its training."""
    (threat,) = (t for t in training["threats"] if t["name"] == inputs["threat"])
    return _setup(training, device) | {
        "attack": inputs["attack"],
        "options": _text(inputs["settings"]),
        "checkpoint": inputs["checkpoint"],
        "threat": f"{_threat(threat)} aux {threat['aux']}",
    }


def round_size(inputs: Mapping[str, Any], steps: float) -> float:
    """Samples of all clients' steps in a round."""
    protocol = inputs["protocol"]
    taking_part = max(1, round(protocol["participation"] * protocol["clients"]))
    return float(taking_part * steps * protocol["batch"])


def threat_size(inputs: Mapping[str, Any], training: Mapping[str, Any]) -> float:
    (threat,) = (t for t in training["threats"] if t["name"] == inputs["threat"])
    return float(threat["victims"] * threat["batch"] * threat["local_steps"])
