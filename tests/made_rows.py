"""Rows of a leaderboard that no run made, and the page of them."""

import base64
import gzip
import io
import json
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from bench import suite as suites
from bench.metrics.intervals import Interval
from bench.metrics.named import METRICS
from bench.protocols.settings import ProtocolSettings
from bench.records import AttackEntry, Flag, FlagCode, LedgerWords, Row, Run, WorstCase
from bench.records.rows import Leaks
from bench.report import (
    html,
    pictures,
    tables,
)
from bench.report.boards import board_of
from bench.report.columns import Shown
from bench.report.text import to_leaderboard_json
from tests.conftest import TINY

HOSTILE = "<img src=x onerror=alert(1)></script><!--<script>alert(2)</script>\"' " + "w" * 300


def interval(mean: float, width: float = 0.05) -> Interval:
    return Interval(mean=mean, lo=mean - width, hi=mean + width)


def attack(ssim: float | None = 0.5, **more: Any) -> AttackEntry:
    """An attack's entry; without an SSIM one that is not applicable. Metrics may be given by their
    names."""
    done = ssim is not None
    scores = {} if ssim is None else {"ssim": interval(ssim)}
    scores |= {m: more.pop(m) for m in METRICS if m in more}
    return AttackEntry(
        **{
            "status": "done" if done else "not_applicable",
            "reason": None if done else "nothing to attack",
            "threat": "server", "is_floor": False, "n": 8 if done else 0, "failed": 0,
            "scores": scores, "floor": {"ssim": 0.2, "ssim_class_mean": 0.7} if done else {},
            "seconds": 1.5 if done else None, "gradient_evaluations": 200 if done else None,
            "budget": 200 if done else None, **more,
        }
    )  # fmt: skip


def row(defense: str = "none", ssim: float = 0.5, **more: Any) -> Row:
    """A row of a leaderboard, whose leakage is that of its choice or upper bound."""
    given = {
        "suite": "toy v1", "protocol": "fedavg", "protocol_settings": PROTOCOL,
        "dataset": "digits", "model": "lenet", "defense": defense, "variant": "",
        "settings": {}, "checkpoint": "init", "threat": "server: one round of 8 clients",
        "seeds": (0,), "accuracy": interval(0.9), "eps_claimed": None, "eps_record": math.inf,
        "ledger": LedgerWords(words=("One.", "Two.", "Three."), reasons=("Why.",)),
        "delta": 1e-5, "unit": None,
        "costs": {"bytes_up": 1200.0, "bytes_down": 3.4e6, "client_seconds": 0.05},
        "attacks": {"dlg": attack(ssim)},
        "worst": worst(interval(ssim)), "flags": (), "accuracies": {0: 0.9},
        "test_samples": 500, **more,
    }  # fmt: skip
    case = given.get("choice") or given["worst"]
    floor = case and given["attacks"][case.attack].floor.get(case.metric)
    if "leaks" not in given and floor is not None:
        perfect = 0.0 if case.metric == "mse" else 1.0
        given["leaks"] = leaks((case.interval.mean - floor) / (perfect - floor))
    return Row(**given)


def leaks(*means: float, spread: float = 0.02, victims: int = 4) -> Leaks:
    """Leakage of victims around a mean per seed."""
    steps = [spread * (i - (victims - 1) / 2) for i in range(victims)]
    by_seed = {seed: tuple(mean + s for s in steps) for seed, mean in enumerate(means)}
    return Leaks(threat="server", floor=0.2, victims=by_seed)


def worst(leakage: Interval, metric: Any = "ssim", attack_: str = "dlg") -> WorstCase:
    return WorstCase(attack=attack_, metric=metric, interval=leakage)


def flag(code: FlagCode, subject: str = "", **values: float | str) -> Flag:
    return Flag(code=code, subject=subject, values=values)


def other(text: str) -> Flag:
    """A flag of which nothing is known but its sentence."""
    return flag(FlagCode.NOT_AS_PUBLISHED, reason=text)


PROTOCOL = ProtocolSettings(name="fedavg", clients=3, lr=0.1, local_steps=1)

SUITE = suites.Suite.model_validate(tomllib.loads(TINY))


def run_of(name: str = "toy", description: str = "A toy.", **more: Any) -> Run:
    return Run(
        **{
            "suite": SUITE.model_copy(update={"name": name, "description": description}),
            "trainings": (), "command": "leakbench run toy", "device": "cpu",
            "versions": {"python": "3.12", "leakbench": "9.9"}, **more,
        }
    )  # fmt: skip


def page(*rows: Any, run: Run | None = None, album: Any = None) -> str:
    return html.page(rows, run or run_of(), album or pictures.none("none were kept"))


def printed(shown: Iterable[Any]) -> str:
    """Return what a terminal of 80 columns shows of tables."""
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(*shown, sep="\n")
    return console.export_text()


def block(text: str, name: str) -> Any:
    """Return what a data block of a page holds."""
    ((kind, written),) = re.findall(
        rf'<script type="application/(json|gzip)" id="{name}">(.*?)</script>', text
    )
    return json.loads(gzip.decompress(base64.b64decode(written)) if kind == "gzip" else written)


def cells_of(rows: Sequence[Row]) -> list[dict[str, Shown]]:
    """Return what the page's leaderboard shows of each row, by column."""
    board = board_of({"": tables.tables(rows)})
    names = [column.name for column in board.columns]
    return [dict(zip(names, line.cells, strict=True)) for line in board.lines]


def as_json(rows: Any) -> Any:
    """As leaderboard.json has them."""
    return json.loads(to_leaderboard_json(rows))
