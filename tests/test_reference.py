"""The suite `reference`: what it must hold for its board to be cited."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from bench import suite as suites
from bench.harness.plan import Plan, expand
from bench.harness.store import Store
from bench.protocols.settings import RECORDED
from bench.records import Run, TrainJob
from bench.registry import Registry
from bench.report.overview import LOSSES

RESULTS = Path(__file__).parents[1] / "results" / "reference"


@pytest.fixture(scope="module")
def reference() -> suites.Suite:
    return suites.read_suite("reference")


@pytest.fixture(scope="module")
def plan(reference: suites.Suite) -> Plan:
    return expand(reference, {"seed": 0})


def test_it_has_every_defense_every_attack_and_three_seeds(
    reference: suites.Suite, registry: Registry
) -> None:
    assert {d.name for d in reference.defenses} == set(registry.names("defense"))
    assert {a.name for a in reference.attacks} == set(registry.names("attack"))
    assert len(reference.seeds) == 3
    assert reference.audit > 0


def test_it_has_the_networks_that_were_asked_for_under_both_protocols(plan: Plan) -> None:
    def networks(protocol: str) -> set[tuple[str, str]]:
        jobs = [j for j in plan.trainings if j.protocol.name == protocol]
        return {(j.task.dataset, j.task.model) for j in jobs}

    split = {
        ("mnist", "mlp3"),
        ("mnist", "lenet"),
        ("fashion_mnist", "cnn_selective_shield"),
        ("cifar10", "lenet"),
        ("cifar10", "vit_small"),
        ("adult", "mlp3"),
    }
    assert networks("splitfed") == split
    assert networks("fedavg") == split - {("mnist", "mlp3")} | {
        ("mnist", "mlp_spm"),
        ("adult", "logistic"),  # which has nowhere to be cut
    }
    private = {
        (j.task.dataset, j.task.model)
        for j in plan.trainings
        if j.protocol.name == "splitfed" and j.protocol.labels == "private"
    }
    assert private == {("mnist", "lenet")}  # the variant: all papers send labels


def test_every_attack_sees_one_release_the_whole_run_and_the_trained_work(
    reference: suites.Suite,
) -> None:
    seen = {t.name: (t.rounds, t.work, t.batch) for t in reference.threats}
    assert seen == {
        "release": (1, "single", 1),
        "whole": (3, "single", 1),
        "as_trained": (1, "as_trained", 1),
    }
    for threat in reference.threats:
        names = {a.name for a in reference.attacks if a.threat == threat.name}
        assert names == {a.name for a in reference.attacks}


def test_every_task_has_an_undefended_row_and_defenses_that_can_run(
    plan: Plan, registry: Registry
) -> None:
    by_task: dict[str, list[TrainJob]] = {}
    for job in plan.trainings:
        by_task.setdefault(f"{job.task} {job.protocol}", []).append(job)
        defense = registry.defense(job.defense, job.settings)
        assert not defense.requires or job.protocol.cuts, job.defense
        assert defense.together <= min(t.victims for t in job.threats)
    assert len(by_task) == 14
    for jobs in by_task.values():
        assert [j.defense for j in jobs].count("none") == 1


@pytest.mark.slow
def test_a_defense_with_a_strength_was_tuned_on_every_task_of_its_own(
    registry: Registry,
) -> None:
    """The suite that was tuned for version 1 has the same tasks and attacks as its published run;
    of each of its searches the board has at most one setting per loss."""
    given = tomllib.loads((RESULTS / "untuned.toml").read_text())
    untuned = suites.Suite.model_validate(given, context=RECORDED)
    reference = Run.read(RESULTS).suite
    same = ("tasks", "attacks", "protocol", "budget", "checkpoints")
    assert all(getattr(untuned, name) == getattr(reference, name) for name in same)
    for entry in untuned.defenses:
        strength = registry.defense(entry.name, next(iter(suites.grid(entry.settings)))).strength
        if strength is None:
            continue
        for given in suites.grid(entry.settings):
            others = {k: v for k, v in given.items() if k != strength.setting}
            for task in filter(entry.runs_on, range(len(untuned.tasks))):
                tuned = [
                    d
                    for d in reference.defenses
                    if d.name == entry.name
                    and d.tasks == [task]
                    and {k: v for k, v in d.settings.items() if k != strength.setting} == others
                ]
                assert len(tuned) <= len(LOSSES)


@pytest.mark.slow
def test_the_published_run_is_version_1_and_finished() -> None:
    run = Run.read(RESULTS)
    assert (run.suite.version, run.plugins) == (1, ())
    store = Store(RESULTS)
    for kind, key in run.record_names:
        record = store.read(kind, key)
        assert record is not None
        assert record.status in ("done", "not_applicable"), (kind, key, record.reason)
