"""Small data sets in the files that publishers ship."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

HAR_CHANNELS = (
    *("body_acc_x", "body_acc_y", "body_acc_z", "body_gyro_x", "body_gyro_y", "body_gyro_z"),
    *("total_acc_x", "total_acc_y", "total_acc_z"),
)


def waves(
    people: Iterable[int], *, each: int, channels: int = 9, length: int = 128, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals [N, channels, length] of six classes, labels and whose they are, [N]: waves of a
    class's frequency at a person's height, with noise."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(list(people), each)
    y = np.tile(np.arange(each) % 6, len(owner) // each)
    time = np.arange(length) / length
    shift = rng.uniform(0, 2 * np.pi, (len(y), channels, 1))
    wave = np.sin(2 * np.pi * (1 + y)[:, None, None] * time + shift)
    level = 3 + np.arange(channels)[:, None] + 0.1 * owner[:, None, None]
    return level + wave + 0.2 * rng.standard_normal(wave.shape), y, owner


def write_har(
    folder: Path, *, train: Iterable[int] = range(1, 11), test: Iterable[int] = (11, 12),
    each: int = 12,
) -> None:  # fmt: skip
    """UCI HAR's files for a few subjects, under the publisher's folder name."""
    for seed, (part, people) in enumerate((("train", train), ("test", test))):
        x, y, owner = waves(people, each=each, seed=seed)
        place = folder / "uci_har" / "UCI HAR Dataset" / part
        (place / "Inertial Signals").mkdir(parents=True)
        for i, channel in enumerate(HAR_CHANNELS):
            # The publisher's columns are parted by one or two spaces, two before a positive number.
            lines = ["".join(f"{v: 16.7e}" for v in row) for row in x[:, i]]
            (place / "Inertial Signals" / f"{channel}_{part}.txt").write_text(
                "\n".join(lines) + "\n"
            )
        (place / f"y_{part}.txt").write_text("".join(f"{v + 1}\n" for v in y))
        (place / f"subject_{part}.txt").write_text("".join(f"{v}\n" for v in owner))


def leaf(writers: Iterable[str], *, each: int = 12, skewed: bool = False) -> dict[str, Any]:
    """One of LEAF's files: digits of 28 x 28, background 1, no two alike.

    Args:
        writers: Names, f0000, f0001 and so on.
        skewed: Whether every writer writes one digit alone.
    """
    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.target))
    data = {}
    for user in writers:
        number = int(user[1:])
        kind, place = (
            (order[raw.target[order] == number % 10], number // 10) if skewed else (order, number)
        )
        chosen = kind[place * each : (place + 1) * each]
        images = np.kron(raw.images[chosen], np.ones((1, 3, 3)))
        images = 1 - np.pad(images, ((0, 0), (2, 2), (2, 2))) / 16
        data[user] = {
            "x": images.reshape(each, -1).round(4).tolist(),
            "y": raw.target[chosen].tolist(),
        }
    return {"users": [*data], "num_samples": [each] * len(data), "user_data": data}


def write_leaf(folder: Path, parts: dict[str, dict[str, Any]]) -> None:
    """LEAF's JSON files, by their place under `femnist`."""
    for name, content in parts.items():
        place = folder / "femnist" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(content))
