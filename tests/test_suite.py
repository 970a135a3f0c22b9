"""Suites: expansion, overrides, and what a wrong file gets to hear."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from bench import suite as suites
from bench.errors import UserError
from bench.harness.plan import expand
from tests.small_folders import leakbench


def test_shipped_suites_load_and_describe_themselves() -> None:
    assert {"quick", "spm"} <= set(suites.list_shipped())
    for name in suites.list_shipped():
        loaded = suites.read_suite(name)
        assert loaded.name == name
        assert loaded.description


def test_editors_get_a_schema_that_fits_the_shipped_files_and_no_unknown_key() -> None:
    code, text = leakbench("list", "suites", "--schema")
    assert code == 0, text
    validator = jsonschema.validators.validator_for(json.loads(text))(json.loads(text))
    for file in Path(suites.__file__).with_name("suites").glob("*.toml"):
        validator.validate(tomllib.loads(file.read_text()))
    found = [e.message for e in validator.iter_errors({"name": "a", "version": 1, "sead": 0})]
    assert any("'sead' was unexpected" in message for message in found)
    assert leakbench("list", "--schema")[0] == 2


def test_quick_runs_every_attack_and_the_shipped_suites_every_defense(registry) -> None:  # type: ignore[no-untyped-def]
    quick = suites.read_suite("quick")
    # split_label reads the gradients of private heads; here labels are sent, as in the papers. The
    # others came after the suite's version, whose published run stays complete.
    without = {"split_label", "r_gap", "spear", "cocktail_party", "gdbr", "sme", "tabular"}
    assert {a.name for a in quick.attacks} == set(registry.names("attack")) - without
    larger = [suites.read_suite(name) for name in ("attacks", "full", "reference")]
    assert without < {a.name for s in larger for a in s.attacks}
    shipped = [suites.read_suite(name) for name in suites.list_shipped()]
    named = {n for s in shipped for d in s.defenses for n in d.name.split("+")}
    assert named == set(registry.names("defense"))


@pytest.mark.parametrize("name", ["pm_sfl", "pm_sfl_paper", "dp_cutmix", "dp_cutmix_paper"])
def test_split_suites_mix_no_more_clients_than_take_part(name: str, registry) -> None:  # type: ignore[no-untyped-def]
    plan = expand(suites.read_suite(name))
    for job in plan.trainings:
        defense = registry.defense(job.defense, job.settings)
        assert job.protocol.name == "splitfed" or "smashed" not in defense.requires
        assert all(defense.together <= t.victims for t in job.threats)
        assert defense.together <= job.protocol.participants


def test_lists_expand_to_a_grid_and_filters_narrow_it(tiny: Callable[..., Path]) -> None:
    suite = suites.read_suite(str(tiny()))
    plan = expand(suite)
    assert [dict(j.settings) for j in plan.trainings] == [{}, {"epsilon": 0.5}, {"epsilon": 2.0}]
    assert len(plan.cells) == 3 * 2 * 2
    narrow = expand(suite, {"defense": "spm", "checkpoint": "init", "attack": "ilrg"})
    assert len(narrow.trainings) == 2
    assert len(narrow.cells) == 2


def test_a_filter_by_task_tells_tasks_of_one_dataset_apart() -> None:
    suite = suites.read_suite("pm_sfl")
    cuts = {place: {j.protocol.cuts for j in expand(suite, {"task": place}).trainings}
            for place in (0, 2)}  # fmt: skip
    assert cuts == {0: {("block2",)}, 2: {("block1", "block2", "hidden")}}


def test_an_attack_may_be_kept_to_some_checkpoints(tiny: Callable[..., Path]) -> None:
    text = 'name = "ilrg"\ncheckpoints = ["final"]'
    plan = expand(suites.read_suite(str(tiny(**{'name = "ilrg"': text}))))
    where = {(c.attack, c.checkpoint) for c in plan.cells}
    assert where == {("ilrg", "final"), ("prior_only", "init"), ("prior_only", "final")}
    wrong = tiny(**{'name = "ilrg"': text, '["init", "final"]': '["init"]'})
    with pytest.raises(ValueError, match=r"ilrg is to run at checkpoint final, but .* init"):
        suites.read_suite(str(wrong))


def test_an_attack_may_be_kept_to_some_tasks(tiny: Callable[..., Path]) -> None:
    two = '[[tasks]]\ndataset = "photos"\nmodel = "mlp_spm"\n\n[[threats]]'
    text = 'name = "ilrg"\ntasks = [1]'
    plan = expand(suites.read_suite(str(tiny(**{"[[threats]]": two, 'name = "ilrg"': text}))))
    where = {(c.attack, c.train.task.dataset) for c in plan.cells}
    assert where == {("ilrg", "photos"), ("prior_only", "photos"), ("prior_only", "digits")}
    with pytest.raises(ValueError, match="ilrg is to run on task 1, but the suite has"):
        suites.read_suite(str(tiny(**{'name = "ilrg"': text})))


def test_overrides_reach_nested_values_and_win_over_tasks() -> None:
    suite = suites.read_suite("quick", ["protocol.rounds=3", "seeds=[4, 5]", "threats.0.victims=2"])
    assert all(suite.protocol_of(t).rounds == 3 for t in suite.tasks)
    assert suite.seeds == [4, 5]
    assert suite.threats[0].victims == 2


def test_an_attacks_own_budget_takes_the_place_of_the_suites(tiny: Callable[..., Path]) -> None:
    path = str(tiny())
    budgets = {c.attack: c.budget for c in expand(suites.read_suite(path)).cells}
    assert budgets == {"ilrg": 5, "prior_only": 5}
    changed = expand(suites.read_suite(path, ["attacks.0.budget=50"])).cells
    assert {c.attack: c.inputs()["budget"] for c in changed} == {"ilrg": 50, "prior_only": 5}


def test_an_attack_under_two_threats_gets_two_columns(tiny: Callable[..., Path]) -> None:
    path = tiny(
        append='\n[[attacks]]\nname = "ilrg"\nthreat = "big"\n'
        '\n[[threats]]\nname = "big"\nvictims = 2\nbatch = 4\n'
    )
    labels = {c.label for c in expand(suites.read_suite(str(path))).cells}
    assert labels == {"ilrg@server", "ilrg@big", "prior_only"}


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ({"budget = 5": "budgets = 5"}, r"tiny\.toml: unknown key 'budgets'"),
        ({"budget = 5": "budget = 'x'"}, r"budget: input should be a valid integer.*got 'x'"),
        (
            {'name = "ilrg"': 'name = "ilrg"\nbudget = 0'},
            r"attacks\.0\.budget: .*greater than or equal to 1, got 0",
        ),
        ({"version = 1\n": ""}, r"the key 'version' is missing"),
        ({"local_steps = 1": "local_steps = 1\nlocal_epochs = 1"}, r"needs exactly one"),
        ({'name = "fedavg"': 'name = "fedsgd"'}, r"fedsgd takes one step per round"),
        ({'name = "ilrg"': 'name = "ilrg"\nthreat = "servr"'}, r"Did you mean 'server'"),
        ({'name = "ilrg"': 'name = "ilrg"\ncheckpoints = ["training"]'}, "observes init, final"),
        ({'["init", "final"]': '["training"]'}, "needs a threat whose"),
        ({"victims = 2": 'work = "as_trained"\nvictims = 2'}, "leave victims out"),
        ({"victims = 2": 'work = "as_trained"\nmode = "eval"'}, "leave mode out"),
        ({"victims = 2": 'work = "trained"'}, '"as_trained" observes rounds of the training'),
    ],
)
def test_wrong_suites_get_one_clear_sentence(
    tiny: Callable[..., Path], replace: dict[str, str], message: str
) -> None:
    path = tiny(**replace)
    with pytest.raises(UserError, match=message):
        suites.read_suite(str(path))


def test_wrong_names_filters_and_overrides_are_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"has no place '7'"):
        suites.read_suite("quick", ["threats.7.victims=2"])
    suite = suites.read_suite(str(tiny()))
    with pytest.raises(ValueError, match=r"Did you mean 'defense'"):
        expand(suite, {"defence": "spm"})
    with pytest.raises(ValueError, match=r"Unknown defense 'spn' in suite tiny.*mean 'spm'"):
        expand(suite, {"defense": "none,spn"})
    for key, value in (("seed", "0,9"), ("task", 7), ("checkpoint", "round-3"), ("attack", "dlg")):
        with pytest.raises(ValueError, match=rf"Unknown {key} '.*' in suite tiny"):
            expand(suite, {key: value})
    apart = suite.model_copy(update={
        "tasks": [*suite.tasks, suite.tasks[0]],
        "defenses": [suite.defenses[0].model_copy(update={"tasks": [0]}), suite.defenses[1]],
    })  # fmt: skip
    with pytest.raises(ValueError, match=r"leaves nothing of suite tiny"):
        expand(apart, {"defense": suite.defenses[0].name, "task": 1})
