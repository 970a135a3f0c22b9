"""What several attacks on one observation need is made once, and is the same whoever asks first."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.engine import inverter
from bench.api import Context
from bench.harness import shared
from bench.harness.shared import SharedWork
from bench.protocols.settings import MOST_RECORDED
from tests.conftest import Run


@dataclass(frozen=True)
class _Shadow:
    """Stands for rehearsals: it draws from its stream."""

    rng: torch.Generator

    def __call__(self) -> float:
        return float(torch.rand(1, generator=self.rng))


def _context(seed: int, own: SharedWork | None) -> Context:
    rng = torch.Generator().manual_seed(seed)
    nothing = torch.zeros(1, 1)
    return Context(
        rng=rng, device=torch.device("cpu"), budget=7, aux_x=nothing, aux_y=nothing[0].long(),
        network=None, defense=None, shadow=_Shadow(rng), shared=own,  # type: ignore[arg-type]
    )  # fmt: skip


def _shared(name: str, seed: int = 0) -> SharedWork:
    return SharedWork(observation=(name,), seed=seed, stream=("final", "server"))


def _drawn(ctx: Context) -> tuple[float, float, int]:
    return float(torch.rand(1, generator=ctx.rng)), ctx.shadow(), ctx.budget  # type: ignore[arg-type,return-value]


def test_it_is_made_once_from_a_stream_of_its_own_and_the_attacks_is_left_alone() -> None:
    first, second = (_context(seed, _shared("made once")) for seed in (1, 2))
    made = first.once(("a", 1), _drawn)
    assert second.once(("a", 1), _drawn) is made
    assert made[2] == 0
    for ctx, seed in ((first, 1), (second, 2)):
        fresh = torch.Generator().manual_seed(seed)
        assert torch.equal(torch.rand(3, generator=ctx.rng), torch.rand(3, generator=fresh))


def test_who_asks_first_and_what_was_asked_before_decide_nothing() -> None:
    one = _context(1, _shared("order"))
    forth = [one.once(key, _drawn) for key in (("a",), ("b",))]
    _context(1, _shared("another")).once(("a",), _drawn)
    other = _context(9, _shared("order"))
    back = [other.once(key, _drawn) for key in (("b",), ("a",))]
    assert forth == back[::-1]
    for number in range(9):
        _context(1, _shared(f"view {number}")).once(("a",), _drawn)
    assert shared._cache.cache_info().currsize == MOST_RECORDED  # of a few views: it takes memory
    assert forth[0] != forth[1]


def test_another_observation_key_or_seed_has_its_own() -> None:
    made = _context(1, _shared("x")).once(("a",), _drawn)
    again = _context(1, _shared("y")).once(("a",), _drawn)
    assert again is not made
    assert again == made  # streams are paired over defenses
    assert _context(1, _shared("z", seed=1)).once(("a",), _drawn) != made


def test_without_it_an_attack_makes_its_own() -> None:
    ctx = _context(3, None)
    assert ctx.once(("a",), lambda own: own) is ctx


RIDGE = '\n[[attacks]]\nname = "ridge"\nsettings = { rows = 40 }\n'
DECODER = '\n[[attacks]]\nname = "decoder"\nsettings = { rows = 40, steps = 4 }\n'


@pytest.mark.slow
def test_a_decoder_answers_alike_with_and_without_a_ridge_before_it(
    tiny: Callable[..., Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    build = inverter.Inverter.__init__

    def counted(self: inverter.Inverter, *args: Any, **settings: Any) -> None:
        made.append(1)
        build(self, *args, **settings)

    monkeypatch.setattr(inverter.Inverter, "__init__", counted)
    values, counts = [], []
    for name, attacks in (("alone", DECODER), ("after", RIDGE + DECODER)):
        made.clear()
        suite = tiny(append=attacks, **{'["init", "final"]': '["final"]'})
        store, report = run(suite, out=name, only={"defense": "none"})
        assert report.failures == []
        records = [json.loads(f.read_text()) for f in store.folder.glob("records/attack/*.json")]
        (decoder,) = [r for r in records if r.get("gradient_evaluations")]
        values.append(decoder["values"])
        counts.append(len(made))
    assert values[0] == values[1]
    assert counts == [1, 1]
