"""`docs/formulas.py`: what the five papers print, and what holds of it."""

import json
import math
from typing import Any

import pytest

from bench.contract.events import Facts
from bench.registry import Registry
from tests.docs_modules import formulas as module

FACTS = Facts(parameters=1000, rounds=10, clients=10, batch=5, records=50, local_steps=2)
NOISED: dict[str, Any] = {"clip": 0.2, "smashed_std": 0.25, "label_std": 0.25}
PAPERS: dict[str, dict[str, Any]] = {
    "spm": {"epsilon": 1.9},
    "pm_sfl": {"noise": "mask", "epsilon": 1.0},
    "dp_cutmix": {"patches": 64, "group": 10, **NOISED},
    "ms_pafl": {"epsilon": 1.0},
    "selective_shield": {"noise_multiplier": 2.0},
}


def formulas(registry: Registry, name: str, facts: Facts = FACTS, **more: Any) -> list[Any]:
    return list(module.formulas(registry.defense(name, PAPERS[name] | more), facts))


def by_equation(printed: list[Any], equation: str) -> Any:
    return next(f for f in printed if f.equation == equation)


@pytest.mark.parametrize("name", PAPERS)
def test_each_paper_prints_formulas_with_a_sentence_on_what_holds(
    registry: Registry, name: str
) -> None:
    printed = formulas(registry, name)
    assert len(printed) >= 2
    for formula in printed:
        assert formula.name
        assert formula.equation
        assert not math.isnan(formula.value)
        assert formula.holds.endswith(".")
    assert len({(f.equation, f.name) for f in printed}) == len(printed)


STD = math.sqrt(16 / 255)
REFERENCE: tuple[tuple[str, Facts, dict[str, Any], str, float | None, float | None], ...] = (
    ("spm", FACTS, {}, "Theorem 1", None, 0.869892),
    ("pm_sfl", Facts(parameters=1, rounds=100, local_steps=5), {"noise": "smashed", "clip": 0.1},
     "Theorem 2", 0.934702, 500.0),
    ("pm_sfl", Facts(parameters=100), {"clip": 0.1, "variant": "printed"}, "Theorem 3b", None,
     13.7449),
    ("dp_cutmix", FACTS, {"smashed_std": STD, "label_std": STD}, "Eq. 6", 2.86875, 33.2695),
    ("selective_shield", FACTS, {}, "Lemma 2, 3", 8.07836, None),
)  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "settings", "equation", "value", "really"), REFERENCE)
def test_printed_and_real_values_are_those_of_the_reference(
    registry: Registry, name: str, facts: Facts, settings: dict[str, Any], equation: str,
    value: float | None, really: float | None,
) -> None:  # fmt: skip
    """CLAIMS: SPM at 1.9; PM-SFL's Theorem 2 at d = 1 and 3b at d = 100; Eq. 6 at n = 10, T = 10
    rounds of sigma = 2."""
    formula = by_equation(formulas(registry, name, facts, **settings), equation)
    assert value is None or formula.value == pytest.approx(value, rel=1e-5)
    assert really is None or formula.really == pytest.approx(really, rel=1e-5)


@pytest.mark.parametrize("epsilon", [0.01, 100.0, 700.0])
def test_formulas_neither_overflow_nor_fail_at_extreme_budgets(
    registry: Registry, epsilon: float
) -> None:
    for name in ("spm", "pm_sfl", "ms_pafl"):
        for formula in formulas(registry, name, epsilon=epsilon):
            assert not math.isnan(formula.value), (name, formula)


def test_settings_of_which_the_paper_says_nothing_have_no_formula(registry: Registry) -> None:
    assert module.formulas(registry.defense("none", {}), FACTS) == ()
    quiet = formulas(registry, "dp_cutmix", smashed_std=0.0, label_std=0.0)
    assert quiet == []
    assert formulas(registry, "selective_shield", noise_multiplier=0.0) == []
    probabilities = registry.defense("splitfed_pm", {"sends": "probabilities"})
    assert [f.equation for f in module.formulas(probabilities, FACTS)] == ["Eq. 4, 17"]


def test_a_composed_defense_prints_all_members_formulas_by_name(registry: Registry) -> None:
    both = registry.defense("spm+selective_shield", {"spm.epsilon": 1.0})
    names = [f.name for f in module.formulas(both, FACTS)]
    assert len(names) == len(formulas(registry, "spm")) + len(
        formulas(registry, "selective_shield")
    )
    assert {n.split(":")[0] for n in names} == {"spm", "selective_shield"}


def test_the_script_prints_formulas_as_text_and_json() -> None:
    arguments = ("spm", "--set", "epsilon=1.9", "--facts", "parameters=1000")
    text = module.main(arguments)
    assert "Eq. A17, variance of an upload: 0.601337 (really 0.636279)" in text
    assert "It is the variance of no law" in text
    printed = {f["equation"]: f for f in json.loads(module.main([*arguments, "--json"]))}
    assert printed["Theorem 2"] == {
        "name": "epsilon of the uploaded parameters",
        "equation": "Theorem 2",
        "value": 1.9,
        "really": 1900.0,
        "holds": printed["Theorem 2"]["holds"],
        "delta": None,
    }
    assert module.main(["none"]) == "The paper has no formula at this setting."
    over = module.main(["ms_pafl", "--set", "epsilon=1", "--over", "rounds=1,2"]).splitlines()
    assert over[0].startswith("rounds | claimed epsilon")
    assert [line.split(" | ")[0] for line in over[1:]] == ["1", "2"]
