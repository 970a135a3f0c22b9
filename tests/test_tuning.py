"""`leakbench tune`: the strongest settings that lose just so much accuracy."""

import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import suite as suites
from bench import tuning
from bench.contract.defense import Strength
from bench.data import load_dataset
from bench.errors import UserError
from bench.records import FlagCode, Row
from bench.registry import Registry
from bench.suite import Suite, grid
from bench.tuning import Search, searches, write_tuned
from tests.conftest import require
from tests.made_rows import flag, interval, row
from tests.small_folders import leakbench

TWO_TASKS = """
name = "two"
version = 1
description = "Two tasks."
seeds = [0, 1]
checkpoints = ["init", "final"]
budget = 10

[protocol]
name = "fedavg"
clients = 4
rounds = 1
local_steps = 1
batch = 8
lr = 0.1

[[tasks]]
dataset = "digits"
model = "lenet"

[[tasks]]
dataset = "photos"
model = "lenet"

[[threats]]
name = "server"
victims = 2
batch = 1

[[defenses]]
name = "none"

[[defenses]]
name = "gaussian"
settings = { noise_multiplier = [0.1, 1.0], clip_norm = [1.0, 5.0] }

[[defenses]]
name = "standalone"
tasks = [1]

[[attacks]]
name = "prior_only"
"""


@pytest.fixture
def two(tmp_path: Path) -> Suite:
    path = tmp_path / "two.toml"
    path.write_text(TWO_TASKS)
    return suites.read_suite(str(path))


def player(
    lost: Callable[[float], float], asked: list[Suite] | None = None
) -> Callable[[Suite], Sequence[Row]]:
    """Trainings of which a noise multiplier loses so much; more than .8 is chance."""

    def play(suite: Suite) -> list[Row]:
        if asked is not None:
            asked.append(suite)
        rows = []
        for place, task in enumerate(suite.tasks):
            for defense in suite.defenses:
                if defense.tasks is not None and place not in defense.tasks:
                    continue
                for settings in grid(defense.settings):
                    noise = settings.get("noise_multiplier")
                    cost = 0.0 if noise is None else lost(noise)
                    rows.append(
                        row(
                            defense.name, dataset=task.dataset, model=task.model,
                            dataset_settings=task.dataset_settings, settings=settings,
                            accuracy=interval(0.9 - cost), accuracy_drop=interval(cost),
                            attacks={}, worst=None, leaks=None,
                            protocol_settings=suite.protocol_of(task),
                            flags=(flag(FlagCode.AT_CHANCE),) if cost > 0.8 else (),
                        )
                    )  # fmt: skip
        return rows

    return play


def test_settings_are_chosen_on_other_samples_and_seeds_than_they_are_reported_on(
    two: Suite, registry: Registry
) -> None:
    asked: list[Suite] = []
    tuning.tune(two, registry, player(lambda noise: 0.05 * noise, asked), steps=0)
    (suite,) = asked
    assert not set(suite.seeds) & set(two.seeds)
    assert all(t.dataset_settings["validation"] is True for t in suite.tasks)
    whole = load_dataset("digits", seed=3)
    part = load_dataset("digits", seed=3, options={"validation": True})
    kept = {x.numpy().tobytes() for x in part.train_x}
    held = {x.numpy().tobytes() for x in part.test_x}
    assert not kept & held
    assert kept | held == {x.numpy().tobytes() for x in whole.train_x}
    assert len(part.test_x) == len(whole.train_x) // 5


def test_the_strongest_value_that_loses_little_enough_is_found(
    two: Suite, registry: Registry
) -> None:
    tuned = tuning.tune(two, registry, player(lambda noise: 0.05 * noise), steps=12)
    assert [(s.defense, s.task, s.settings) for s in tuned] == [
        ("gaussian", task, {"clip_norm": clip}) for task in (0, 1) for clip in (1.0, 5.0)
    ]
    for search in tuned:
        for loss, noise in ((0.01, 0.2), (0.05, 1.0), (0.1, 2.0)):
            assert search.best(loss) == pytest.approx(noise, rel=0.02)


@given(st.floats(-3, 1), st.floats(0.1, 3), st.floats(0.001, 0.5))
def test_what_is_found_never_loses_more_and_a_little_stronger_would(
    place: float, steep: float, loss: float
) -> None:
    """For losses that grow with strength; epsilons fall with it."""
    strength = Strength(setting="epsilon", weak=1e4, strong=1e-4)
    search = Search(defense="a", settings={}, strength=strength, task=0)

    def lost(value: float) -> float:
        return 0.5 / (1 + (value / 10**place) ** steep)

    for _ in range(30):
        for value in search.next([loss]):
            search.lost[value] = lost(value)
    best = search.best(loss)
    if best is None:
        assert lost(1e4) > loss
    else:
        assert lost(best) <= loss + 1e-9
        assert best == 1e-4 or lost(best / 1.02) > loss


def test_all_defenses_are_trained_side_by_side_without_attacks_or_audits(
    two: Suite, registry: Registry
) -> None:
    asked: list[Suite] = []
    tuning.tune(two, registry, player(lambda noise: noise / 10, asked), steps=3)
    assert 2 <= len(asked) <= 4
    for suite in asked:
        assert (suite.attacks, suite.audit, suite.checkpoints) == ([], 0, ["final"])
        assert {d.name for d in suite.defenses} == {"none", "gaussian"}
    assert asked[0].defenses[1].settings["noise_multiplier"] == [1e-4, 10.0]


def test_what_does_not_learn_loses_everything(two: Suite, registry: Registry) -> None:
    tuned = tuning.tune(two, registry, player(lambda noise: noise), losses=[0.5, 0.99], steps=8)
    assert tuned[0].lost[10.0] == math.inf
    best = require(tuned[0].best(0.99))
    assert best < 0.81


def test_the_suite_that_comes_of_it_can_be_read_and_says_what_each_setting_loses(
    two: Suite, registry: Registry, tmp_path: Path
) -> None:
    losses = [0.01, 0.05]
    tuned = tuning.tune(two, registry, player(lambda n: 0.02 + 0.1 * n), losses=losses, steps=8)
    text = write_tuned(two, tuned, losses, registry)
    assert "no noise_multiplier loses 1 point or less" in text
    assert "points of accuracy on validation samples; at most 5 were allowed" in text
    assert "(seeds 1001, 1002)." in text
    path = tmp_path / "tuned.toml"
    path.write_text(text)
    made = suites.read_suite(str(path))
    assert made.name == "two_tuned"
    assert [d.name for d in made.defenses] == ["none", "standalone"] + ["gaussian"] * 4
    for defense in made.defenses[2:]:
        (settings,) = grid(defense.settings)
        assert settings["noise_multiplier"] == pytest.approx(0.3, rel=0.05)
    for name in ("tasks", "threats", "attacks", "protocol"):
        assert getattr(made, name) == getattr(two, name)


@pytest.mark.parametrize("name", suites.list_shipped())
def test_every_strength_of_a_shipped_suite_can_be_set_to_both_ends(
    name: str, registry: Registry
) -> None:
    for defense in suites.read_suite(name).defenses:
        strength = tuning.strength_of(defense, registry)
        if strength is None:
            continue
        for settings in grid(defense.settings):
            for value in (strength.weak, strength.strong):
                registry.defense(defense.name, {**settings, strength.setting: value})


def test_a_suite_without_anything_to_tune_or_to_compare_with_is_refused(
    two: Suite, registry: Registry
) -> None:
    bare, gaussian, alone = two.defenses
    with pytest.raises(UserError, match="no defense of suite two declares a strength"):
        searches(two.model_copy(update={"defenses": [bare, alone]}), registry)
    with pytest.raises(UserError, match="task 0 of suite two has no row 'none'"):
        searches(two.model_copy(update={"defenses": [gaussian]}), registry)


def test_the_command_trains_and_writes_a_suite(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("tune", tiny(), "--jobs", "0", "--steps", "1", "--loss", "10,100")
    code, text = leakbench(*arguments)
    assert code == 0, text
    made = tomllib.loads((tmp_path / "tiny_tuned.toml").read_text())
    assert made["name"] == "tiny_tuned"
    assert "Run it: leakbench run tiny_tuned.toml" in text
    code, text = leakbench(*arguments)
    assert (code, "exists; name another file" in text) == (2, True)
