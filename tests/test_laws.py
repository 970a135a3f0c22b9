"""Attacks take the laws of mechanisms as they are declared, and refuse those without one."""

import ast
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.analytic import Analytic
from attacks.decoder import Decoder
from attacks.dlg import DLG
from attacks.idlg import IDLG
from attacks.ilrg import ILRG
from attacks.inverting_gradients import InvertingGradients
from attacks.ridge import Ridge
from bench.api import Client, Defense, Local, Mechanism, Message, Prepared
from bench.contract.attack import Attack, Seen
from bench.data.dataset import Dataset
from bench.registry import Registry
from bench.toolkit.vectors import replace_values
from tests.conftest import context_for, network_for, require, seen_under
from tests.matchers import evidence_for

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class _Doubling(Mechanism):
    """v -> v or 2 v, with probability 1/2 each."""


@dataclass(frozen=True, kw_only=True)
class _DoublingWithLaw(_Doubling):
    """The same, with a smooth stand-in for its likelihood: the nearer of the two."""

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Any = None) -> Prepared:
        def nearer(sent: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
            one, two = sent - seen, sent - seen / 2
            rest = torch.where(one.abs() < two.abs(), one, two)
            return rest.square() / 2, rest

        return Prepared(nearer, (seen,))


class Doubling(Defense):
    """A plugin's defense with a mechanism of its own."""

    def __init__(self, kind: type[Mechanism]) -> None:
        self.kind = kind

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        out = []
        for message in messages:
            values = {}
            for name, part in message.parts.items():
                twice = torch.rand(part.values.shape, generator=client.rng["defense"]) < 0.5
                values[name] = part.values * (1 + twice.to(part.values))
            out.append(replace_values(message, values))
        return out

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (self.kind(of="update"),)


OWN = (_Doubling, _DoublingWithLaw)
for _kind in OWN:
    del Mechanism.kinds[_kind.__name__]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's mechanisms are known to these tests alone."""
    for kind in OWN:
        monkeypatch.setitem(Mechanism.kinds, kind.__name__, kind)


def doubled(digits: Dataset, kind: type[Mechanism], model: str = "lenet") -> tuple[Seen, Defense]:
    defense = Doubling(kind)
    seen, _ = seen_under(digits, network_for(digits, model), defense, clients=2)
    return seen, defense


@pytest.mark.parametrize("attack", [DLG(), IDLG(), InvertingGradients(), Analytic(), ILRG()])
def test_a_random_mechanism_without_a_law_is_refused_by_attacks_that_need_one(
    digits: Dataset, attack: Attack
) -> None:
    seen, _ = doubled(digits, _Doubling, "mlp3")
    assert "_Doubling gives no likelihood" in str(attack.applies(seen))
    known, _ = doubled(digits, _DoublingWithLaw, "mlp3")
    assert attack.applies(known) is None
    for rehearsing in (Ridge(), Decoder()):
        assert rehearsing.applies(seen) is None


def test_dlg_descends_the_law_that_a_plugin_declares(digits: Dataset) -> None:
    seen, defense = doubled(digits, _DoublingWithLaw)
    evidence = evidence_for(seen, context_for(digits, network_for(digits), defense))
    assert evidence.noisy
    assert isinstance(require(evidence.uploads).law, _DoublingWithLaw)
    ctx = context_for(digits, network_for(digits), defense, budget=20)
    answer = DLG(restarts=0).run(seen, ctx)
    assert bool(torch.isfinite(require(answer.images)).all())


def test_smashed_data_is_refused_without_a_law_too(digits: Dataset) -> None:
    seen, _ = seen_under(
        digits, network_for(digits), Defense(), clients=2, protocol="splitfed",
        split={"cut": "block1", "labels": "private"},
    )  # fmt: skip
    assert DLG().applies(seen) is None
    unknown = {**seen.known, "mechanisms": [_Doubling(of="smashed").to_dict()]}
    assert "gives no likelihood" in str(DLG().applies(replace(seen, known=unknown)))


BOUNDED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("duchi", {"epsilon": 20.0, "bound": 0.2}),
    ("pm_piecewise", {"epsilon": 20.0, "bound": 0.2}),
    ("pm_piecewise", {"epsilon": 400.0, "bound": 0.2, "dimensions": "sampled"}),
    ("pnpm", {"epsilon": 5.0, "bound": 0.2}),
    ("sun_adaptive", {"epsilon": 20.0}),
    ("sun_adaptive", {"epsilon": 20.0, "shuffled": True}),
    ("laplace", {"noise_multiplier": 0.001, "clip_norm": 5.0}),
)


@pytest.mark.parametrize("attack", [DLG(restarts=0), InvertingGradients(restarts=0), ILRG()])
@pytest.mark.parametrize(("name", "given"), BOUNDED)
def test_attacks_descend_the_laws_of_values_released_one_by_one(
    digits: Dataset, registry: Registry, attack: Attack, name: str, given: dict[str, Any]
) -> None:
    network, defense = network_for(digits), registry.defense(name, given)
    seen, _ = seen_under(digits, network, defense, clients=2)
    assert attack.applies(seen) is None
    answer = attack.run(seen, context_for(digits, network, defense, budget=3))
    assert answer.loss is None or bool(torch.isfinite(answer.loss).all())
    assert not bool(require(answer.failed).any())


# --- imports --------------------------------------------------------------------------------------


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    return {n for n in names if n.startswith("attacks")}


def _modules() -> dict[str, set[str]]:
    return {
        ".".join(p.relative_to(ROOT).with_suffix("").parts): _imports(p)
        for p in sorted((ROOT / "attacks").rglob("*.py"))
    }


def test_no_attack_imports_another_and_the_engine_imports_none() -> None:
    for module, imported in _modules().items():
        others = {n for n in imported if not n.startswith("attacks.engine")}
        assert not others, f"{module} imports {others}"


def test_the_engine_has_no_import_circle() -> None:
    order = list(TopologicalSorter(_modules()).static_order())
    assert order.index("attacks.engine.terms") < order.index("attacks.engine.matching")
