"""What is named twice is refused, and what older folders name twice counts once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench
from bench import suite as suites
from bench.errors import UserError
from bench.harness.merge import merge
from bench.harness.plan import expand
from bench.records import Run
from bench.report import leaderboard
from tests.test_merge import edit, small_suite, write_part

NONE: dict[str, Any] = {"name": "none"}
TASK: dict[str, Any] = {"dataset": "digits", "model": "mlp_spm"}
SPM: dict[str, Any] = {"name": "spm", "settings": {"epsilon": [0.5, 2.0]}}
REPEATS: dict[str, tuple[dict[str, Any], str]] = {
    "a seed": ({"seeds": [0, 0, 0]}, "0 is named twice in seeds"),
    "a checkpoint": ({"checkpoints": ["final", "final"]}, "final is named twice in checkpoints"),
    "a setting's value": (
        {"defenses": [NONE, {"name": "spm", "settings": {"epsilon": [0.1, 0.1]}}]},
        "spm(epsilon=0.1) is named twice in the defenses of task 0 (digits with mlp_spm)",
    ),
    "a whole number and the same as a float": (
        {"defenses": [{"name": "spm", "settings": {"epsilon": [1, 1.0]}}]},
        "spm(epsilon=1.0) is named twice",
    ),
    "a defense": ({"defenses": [NONE, NONE]}, "none is named twice in the defenses of task 0"),
    "a defense's settings in another order": (
        {"defenses": [
            {"name": "gaussian", "settings": {"noise_multiplier": 0.1, "clip_norm": 1.0}},
            {"name": "gaussian", "settings": {"clip_norm": 1.0, "noise_multiplier": 0.1}},
        ]},
        "gaussian(clip_norm=1.0, noise_multiplier=0.1) is named twice",
    ),
    "entries whose grids meet": (
        {"defenses": [SPM, {"name": "spm", "settings": {"epsilon": [4.0, 2.0]}}]},
        "spm(epsilon=2.0) is named twice",
    ),
    "entries that meet on one task": (
        {"tasks": [TASK, {**TASK, "model": "lenet"}],
         "defenses": [{"name": "none", "tasks": [1]}, NONE]},
        "none is named twice in the defenses of task 1 (digits with lenet)",
    ),
    "a task": ({"tasks": [TASK, TASK]}, "digits with mlp_spm is named twice in tasks"),
    "a task that sets what the suite does": (
        {"tasks": [TASK, {**TASK, "protocol": {"rounds": 1}}]},
        "digits with mlp_spm is named twice in tasks",
    ),
    "a task's place": (
        {"defenses": [{"name": "none", "tasks": [0, 0]}]}, "0 is named twice in the tasks of none",
    ),
    "an attack": ({"attacks": [{"name": "ilrg"}] * 2}, "ilrg is listed twice under threat server"),
    "an attack, once with its threat": (
        {"attacks": [{"name": "ilrg"}, {"name": "ilrg", "threat": "server"}]}, "is listed twice",
    ),
    "an attack's checkpoint": (
        {"attacks": [{"name": "ilrg", "checkpoints": ["init", "init"]}]},
        "init is named twice in the checkpoints of attack ilrg",
    ),
    "a threat": ({"threats": [{"victims": 2}, {"victims": 2}]}, "threat names must differ"),
}  # fmt: skip


@pytest.mark.parametrize("what", REPEATS)
def test_a_repeat_is_refused_with_its_name(what: str, tmp_path: Path) -> None:
    changes, sentence = REPEATS[what]
    given = small_suite(checkpoints=["init", "final"]).model_dump() | changes
    with pytest.raises(UserError) as refused:
        bench.run(given, jobs=0, out=tmp_path / "out")
    assert sentence in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_what_is_named_once_is_no_repeat() -> None:
    apart = small_suite(
        tasks=[TASK, {**TASK, "protocol": {"rounds": 2}}, {**TASK, "model": "lenet"}],
        defenses=[{"name": "none", "tasks": [0]}, {"name": "none", "tasks": [1, 2]}, SPM],
        attacks=[{"name": "ilrg"}, {"name": "prior_only"}],
    )
    assert len(expand(apart).trainings) == 3 * 3 * 2


def test_a_repeat_in_only_is_refused(tiny: Callable[..., Path]) -> None:
    suite = suites.read_suite(str(tiny()))
    for only in ({"seed": "0,0"}, {"seed": [0, 0]}, {"defense": "spm, spm"}):
        with pytest.raises(UserError, match="is named twice in --only"):
            expand(suite, only)
    assert len(expand(suite, {"defense": "spm,none"}).trainings) == 3


def test_a_suites_copy_with_repeats_is_refused_by_the_python_api(tmp_path: Path) -> None:
    copied = small_suite().model_copy(update={"seeds": [0, 0]})
    with pytest.raises(UserError, match="0 is named twice in seeds"):
        bench.run(copied, jobs=0, out=tmp_path / "out")


# --- folders that are read ------------------------------------------------------------------------


def counts(folder: Path) -> list[tuple[str, tuple[int, ...], dict[str, int]]]:
    """Setting, seeds and victims per attack of every row."""
    rows = leaderboard.rows(folder)
    return [(r.setting, r.seeds, {n: a.n for n, a in r.attacks.items()}) for r in rows]


def as_an_older_run(run: dict[str, Any]) -> None:
    """As a version without the refusal listed a suite with repeats."""
    run["suite"]["seeds"] *= 2
    run["suite"]["checkpoints"] *= 2
    run["suite"]["defenses"] *= 2
    run["suite"]["tasks"] *= 2
    for training in run["trainings"]:
        training["cells"] *= 3
    run["trainings"] *= 2


def test_an_older_run_with_repeats_loads_and_counts_every_victim_once(tmp_path: Path) -> None:
    folder = write_part(tmp_path / "p")
    before = leaderboard.rows(folder)
    assert counts(folder)[0][1:] == ((0, 1), {"ilrg": 4, "prior_only": 4})
    edit(folder, as_an_older_run)
    assert leaderboard.rows(folder) == before
    merge([folder, folder], tmp_path / "out")
    assert leaderboard.rows(tmp_path / "out") == before


def test_folders_that_share_a_seed_count_its_victims_once(tmp_path: Path) -> None:
    one = write_part(tmp_path / "a", suite=small_suite(seeds=[0, 1]))
    two = write_part(tmp_path / "b", suite=small_suite(seeds=[1, 2]))
    merge([one, two], tmp_path / "out")
    assert counts(tmp_path / "out")[0][1:] == ((0, 1, 2), {"ilrg": 6, "prior_only": 6})


def test_one_record_is_not_read_as_two_seeds_nor_two_as_one(tmp_path: Path) -> None:
    def seeds_share_a_record(run: dict[str, Any]) -> None:
        other = json.loads(json.dumps(run["trainings"][0]))
        other["seed"] = 7
        run["trainings"].append(other)

    def seeds_share_a_cells_record(run: dict[str, Any]) -> None:
        first = run["trainings"][0]["cells"]
        next(t for t in run["trainings"] if t["seed"] == 1)["cells"][0]["key"] = first[0]["key"]

    def a_seed_has_two_records(run: dict[str, Any]) -> None:
        other = json.loads(json.dumps(run["trainings"][0]))
        for number, place in enumerate([other, *other["cells"]]):
            place["key"] = f"{number:024x}"
        run["trainings"].append(other)

    def a_cell_has_two_records(run: dict[str, Any]) -> None:
        cells = run["trainings"][0]["cells"]
        cells.append(cells[0] | {"key": "0" * 24})

    for number, (change, sentence) in enumerate((
        (seeds_share_a_record, "which is another's too"),
        (seeds_share_a_cells_record, "which is another's too"),
        (a_seed_has_two_records, "a second record"),
        (a_cell_has_two_records, "a second record"),
    )):  # fmt: skip
        folder = edit(write_part(tmp_path / str(number)), change)
        with pytest.raises(UserError, match=sentence):
            Run.read(folder)
        with pytest.raises(UserError, match=sentence):
            merge([folder], tmp_path / "out")
