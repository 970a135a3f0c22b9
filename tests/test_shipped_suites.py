"""The suites `full` and `reference`: what they hold, and that their settings fit their networks."""

import json
import math
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench import models
from bench import suite as suites
from bench.cli import app
from bench.contract.defense import Defense
from bench.harness.plan import Plan, expand
from bench.harness.store import Store
from bench.protocols.settings import RECORDED
from bench.records import Run
from bench.registry import Registry

RESULTS = Path(__file__).parents[1] / "results"
SHAPES = {"mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32),
          "cifar100": (3, 32, 32)}  # fmt: skip


@pytest.fixture(scope="module")
def full() -> suites.Suite:
    return suites.read_suite("full")


@pytest.fixture(scope="module")
def reference() -> suites.Suite:
    return suites.read_suite("reference")


@pytest.fixture(scope="module")
def full_plan(full: suites.Suite) -> Plan:
    return expand(full, {"seed": 0})


@pytest.fixture(scope="module")
def reference_plan(reference: suites.Suite) -> Plan:
    return expand(reference, {"seed": 0})


def test_they_have_every_defense_and_the_attacks_that_decide(
    full: suites.Suite, reference: suites.Suite, full_plan: Plan, registry: Registry
) -> None:
    thousands = {"dp_fedavg_central", "dp_ftrl"}  # of clients: suite user_level
    special = {"r_gap", "spear", "gdbr", "sme"}
    labels = {"split_label"}  # which reference's clients send
    for suite, defenses, attacks in (
        (full, set(), {"tabular"}),  # its data are images
        (reference, thousands, special | labels),
    ):
        assert set(registry.names("defense")) - {d.name for d in suite.defenses} == defenses
        assert set(registry.names("attack")) - {a.name for a in suite.attacks} == attacks
    assert (len(full.seeds), len(reference.seeds)) == (3, 5)
    assert reference.audit > 0
    assert set(full.checkpoints) == {"init", "final", "training"}
    where = {(j.protocol.name, j.task.dataset) for j in full_plan.trainings}
    assert where == {(p, d) for p in ("fedsgd", "fedavg", "splitfed") for d in SHAPES}


def test_no_training_is_not_applicable_from_the_start(
    full_plan: Plan, reference_plan: Plan, registry: Registry
) -> None:
    built: dict[str, Defense] = {}
    for job in (*full_plan.trainings, *reference_plan.trainings):
        setting = f"{job.defense} {dict(job.settings)}"
        if setting not in built:
            built[setting] = registry.defense(job.defense, job.settings)
        defense = built[setting]
        assert not defense.requires or job.protocol.cuts, job.defense
        assert "mix" not in defense.owns or len(job.protocol.cuts) == 1, job.defense
        assert defense.together <= min(t.victims for t in job.threats)


def test_every_task_of_reference_has_an_undefended_row(reference_plan: Plan) -> None:
    jobs = reference_plan.trainings
    bare = Counter(f"{j.task} {j.protocol}" for j in jobs if j.defense == "none")
    assert bare == Counter({f"{j.task} {j.protocol}" for j in jobs})
    assert len(bare) == 8


# --- full -----------------------------------------------------------------------------------------


def test_every_defense_meets_every_attack_that_can_apply_to_it_somewhere(
    full_plan: Plan, registry: Registry
) -> None:
    met = {(c.train.defense, c.attack) for c in full_plan.cells}
    # Need a linear first layer, or a table, and one step of fedsgd, which nothing with patches has.
    flat_alone = {"analytic", "cocktail_party", "r_gap", "spear", "tabular"}
    for defense in registry.names("defense"):
        missing = {a for a in registry.names("attack") if (defense, a) not in met}
        assert missing <= flat_alone, defense


def test_full_trains_as_many_steps_under_every_protocol(full_plan: Plan) -> None:
    assert {j.protocol.rounds * (j.protocol.local_steps or 1) for j in full_plan.trainings} == {600}


def test_patches_positions_and_sizes_of_full_are_those_of_the_smashed_data(full_plan: Plan) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for job in full_plan.trainings:
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


# --- reference ----------------------------------------------------------------------------------


def test_reference_has_real_data_at_its_own_size_under_both_protocols(reference_plan: Plan) -> None:
    def networks(protocol: str) -> set[tuple[str, str]]:
        jobs = [j for j in reference_plan.trainings if j.protocol.name == protocol]
        return {(j.task.dataset, j.task.model) for j in jobs}

    split = {("mnist", "lenet"), ("cifar10", "cnn_selective_shield")}
    assert networks("splitfed") == split
    assert networks("fedavg") == split | {
        ("mnist", "mlp_spm"),
        ("fashion_mnist", "cnn_selective_shield"),
        ("adult", "logistic"),
        ("adult", "mlp3"),
    }
    assert all("size" not in j.task.dataset_settings for j in reference_plan.trainings)
    assert {j.protocol.labels for j in reference_plan.trainings if j.protocol.cuts} == {"shared"}


def test_reference_attacks_rounds_of_the_training_first_and_one_sample_second(
    reference: suites.Suite,
) -> None:
    seen = [(t.name, t.work, t.batch) for t in reference.threats]
    assert seen == [("as_trained", "as_trained", 1), ("single_sample", "single", 1)]
    assert set(reference.checkpoints) == {"init", "training"}
    trained, single = (
        {a.name for a in reference.attacks if (a.threat or "as_trained") == t} for t, *_ in seen
    )
    assert trained - single == {"cocktail_party"}  # needs more samples than one
    both = {"prior_only", "ilrg", "analytic", "idlg", "ridge", "tabular", "decoder"}
    assert trained & single == both


def test_a_defense_with_a_strength_was_tuned_on_every_task_of_its_own(
    reference: suites.Suite, registry: Registry
) -> None:
    """Each search of the suite that was tuned has at most one setting on the board."""
    given = tomllib.loads((RESULTS / "findings" / "untuned.toml").read_text())
    untuned = suites.Suite.model_validate(given, context=RECORDED)
    same = ("tasks", "threats", "protocol", "budget", "checkpoints")
    assert all(getattr(untuned, name) == getattr(reference, name) for name in same)
    for entry in untuned.defenses:
        strength = registry.defense(entry.name, next(iter(suites.grid(entry.settings)))).strength
        if strength is None:
            continue
        for start in suites.grid(entry.settings):
            others = {k: v for k, v in start.items() if k != strength.setting}
            for task in filter(entry.runs_on, range(len(untuned.tasks))):
                tuned = [
                    d
                    for d in reference.defenses
                    if d.name == entry.name
                    and d.tasks == [task]
                    and {k: v for k, v in d.settings.items() if k != strength.setting} == others
                ]
                assert len(tuned) <= 1
                assert task == 0 or len(tuned) == 1, (entry.name, task)


@pytest.mark.slow
def test_the_published_run_is_of_the_shipped_suite_and_finished(reference: suites.Suite) -> None:
    run = Run.read(RESULTS / "reference")
    assert run.suite.model_copy(update={"seeds": reference.seeds}) == reference
    assert run.plugins == ()
    store = Store(RESULTS / "reference", run)
    for kind, key in run.record_names:
        record = store.read(kind, key)
        assert record is not None
        assert record.status in ("done", "not_applicable"), (kind, key, record.reason)
