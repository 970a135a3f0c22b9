"""The suite `full`: what it must hold, and that its settings fit its networks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bench import models
from bench import suite as suites
from bench.contract.defense import Defense
from bench.harness.plan import Plan, expand
from bench.registry import Registry

SHAPES = {"mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32),
          "cifar100": (3, 32, 32)}  # fmt: skip


@pytest.fixture(scope="module")
def full() -> suites.Suite:
    return suites.read_suite("full")


@pytest.fixture(scope="module")
def plan(full: suites.Suite) -> Plan:
    return expand(full, {"seed": 0})


def test_full_has_every_defense_and_attack_on_four_data_sets_under_three_protocols(
    full: suites.Suite, plan: Plan, registry: Registry
) -> None:
    assert {d.name for d in full.defenses} == set(registry.names("defense"))
    assert {a.name for a in full.attacks} == set(registry.names("attack"))
    where = {(j.protocol.name, j.task.dataset) for j in plan.trainings}
    assert where == {(p, d) for p in ("fedsgd", "fedavg", "splitfed") for d in SHAPES}
    assert len(full.seeds) == 3
    assert set(full.checkpoints) == {"init", "final", "training"}


def test_every_defense_meets_every_attack_that_can_apply_to_it_somewhere(
    plan: Plan, registry: Registry
) -> None:
    met = {(c.train.defense, c.attack) for c in plan.cells}
    flat_alone = {"analytic"}  # needs a linear first layer, which nothing with patches has
    for defense in registry.names("defense"):
        missing = {a for a in registry.names("attack") if (defense, a) not in met}
        assert missing <= flat_alone, defense


def test_no_training_of_full_is_not_applicable_from_the_start(
    plan: Plan, registry: Registry
) -> None:
    built: dict[str, Defense] = {}
    for job in plan.trainings:
        setting = f"{job.defense} {dict(job.settings)}"
        if setting not in built:
            built[setting] = registry.defense(job.defense, job.settings)
        defense = built[setting]
        assert not defense.requires or job.protocol.cuts, job.defense
        assert "mix" not in defense.owns or len(job.protocol.cuts) == 1, job.defense
        assert defense.together <= min(t.victims for t in job.threats)


def test_full_trains_as_many_steps_under_every_protocol(plan: Plan) -> None:
    assert {j.protocol.rounds * (j.protocol.local_steps or 1) for j in plan.trainings} == {600}


def test_patches_positions_and_sizes_of_full_are_those_of_the_smashed_data(
    plan: Plan,
) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for job in plan.trainings:
        told = {k: v for k, v in job.settings.items()
                if k in ("patches", "positions", "smashed_size")}  # fmt: skip
        if not told:
            continue
        where = f"{job.task.dataset} {job.task.model} {job.protocol.cuts}"
        if where not in shapes:
            network = models.build(
                job.task.model, shape=SHAPES[job.task.dataset], classes=10,
                settings=job.task.model_settings,
            )  # fmt: skip
            (cut,) = job.protocol.cuts
            sample = torch.zeros(2, *SHAPES[job.task.dataset])
            params = network.init(torch.Generator().manual_seed(0))
            shapes[where] = tuple(network.run(params, sample, last=cut, mode="train").shape[1:])
        shape = shapes[where]
        assert told.get("smashed_size", math.prod(shape)) == math.prod(shape), where
        if len(shape) == 2:  # tokens
            assert {told.get("patches", shape[0]), told.get("positions", shape[0])} == {shape[0]}
        elif len(shape) == 3:
            assert told.get("positions", shape[1] * shape[2]) == shape[1] * shape[2], where
            grid = math.isqrt(told.get("patches", 1))
            assert grid * grid == told.get("patches", 1)
            assert shape[1] % grid == 0, where
        else:
            assert not {"patches", "positions"} & set(told), where


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_task_of_full_trains_and_is_attacked_undefended(
    tmp_path: Path, data_dir: Path, full: suites.Suite
) -> None:
    from typer.testing import CliRunner

    from bench.cli import app

    sizes = {"train_size": 400, "test_size": 100}
    # One attack: to judge an answer takes a minute of a deep network, for every attack alike.
    changes = ["protocol.rounds=1", "protocol.batch=8", "budget=2", "audit=0", "seeds=[0]",
               "threat.aux=60", "threats.2.rounds=2", "threats.3.batch=4",
               "attacks.2.budget=2"]  # fmt: skip
    changes += [f"threats.{i}.victims=2" for i, threat in enumerate(full.threats)
                if threat.name != "as_trained"]  # fmt: skip
    changes += [f"attacks.{i}.settings={{rows=40}}" for i, attack in enumerate(full.attacks)
                if attack.name in ("ridge", "decoder")]  # fmt: skip
    changes += [f"tasks.{i}.dataset_settings.{k}={v}" for i in range(len(full.tasks))
                for k, v in sizes.items()]  # fmt: skip
    arguments = ["run", "full", "--out", str(tmp_path), "--data-dir", str(data_dir), "--jobs", "0",
                 "--only", "defense=none"]  # fmt: skip
    arguments += [x for c in changes for x in ("--set", c)]
    for checkpoint, attack in (("final", "idlg"), ("training", "ilrg")):
        some = ["--only", f"checkpoint={checkpoint}", "--only", f"attack={attack}"]
        result = CliRunner().invoke(app, [*arguments, *some])
        assert result.exit_code == 0, result.output
    records = [json.loads(p.read_text()) for p in (tmp_path / "records").rglob("*.json")]
    assert len({r["inputs"]["protocol"]["name"] for r in records if "train" not in r}) == 3
    fedsgd = 9  # its rounds alone are attacked as they were
    assert sum("attack" in r["inputs"] for r in records) == len(full.tasks) + fedsgd
