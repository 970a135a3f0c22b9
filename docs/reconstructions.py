"""The reconstructions on the front page: `python docs/reconstructions.py FOLDER`.

FOLDER is the result folder, with its artifacts, of

    leakbench run quick --only task=0 --only seed=0 --only checkpoint=final --device cpu

Writes docs/img/NAME.png, the first eight victims side by side, for the truth and for each defense
of `SHOWN`, reconstructed by the attack that ranks its row. Prints each row's leakage and attack.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import leaderboard
from bench.report.pictures import collect, walls

IMAGES = Path(__file__).parent / "img"
SHOWN = ("truth", "none", "spm", "gaussian")


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    rows = [r for r in leaderboard.load(folder) if r.checkpoint == "final"]
    ((title, strips),) = walls(rows, collect(folder))
    print(title)
    IMAGES.mkdir(exist_ok=True)
    for strip in strips:
        if strip.name in SHOWN:
            (IMAGES / f"{strip.name}.png").write_bytes(
                base64.b64decode(strip.source.partition(",")[2])
            )
            leakage = "" if strip.leak is None else f"leakage {strip.leak:.2f} by {strip.attack}"
            print(f"{strip.name}: {strip.count} images {leakage}")


if __name__ == "__main__":
    main(sys.argv[1:])
