"""The ledger at extreme settings and facts: a number, or one sentence that names the value."""

import inspect
import math
import time
import warnings
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.api import FloatOrInf
from bench.arguments import check_arguments
from bench.cli import app
from bench.contract.defense import Defense
from bench.contract.events import Facts
from bench.errors import UserError
from bench.privacy.ledger import account, computable, gaussian_epsilon, subsampled_gaussian_epsilon
from bench.registry import discover
from tests.conftest import require
from tests.docs_modules import formulas

REGISTRY = discover()
FLOATS = (0.0, 5e-324, 1e-300, 1e-30, 1e-6, 0.25, 0.999999, 1.0, 50.0, 1e6, 1e30, 1e300, math.inf)
WHOLE = (0, 1, 2, 4, 9, 1000, 10**12, 10**15, 10**18)
FACTS: dict[str, tuple[Any, ...]] = {
    "int": WHOLE,
    "int | None": (None, 1, 10**12),
    "float": (5e-324, 1e-300, 1e-5, 0.3, 0.999999, 1.0),
    "bool": (False, True),
}


def numeric(name: str) -> dict[str, type]:
    """The numeric settings of a defense, with what they are."""
    cls = require(REGISTRY.get("defense", name).cls)
    parameters = inspect.signature(cls, eval_str=True).parameters.values()
    kinds = {p.name: str(p.annotation) for p in parameters}
    return {
        n: int if "int" in k and "float" not in k else float
        for n, k in kinds.items()
        if "int" in k or "float" in k
    }


def needed(name: str) -> dict[str, Any]:
    """Ordinary values of the settings without a default."""
    cls = require(REGISTRY.get("defense", name).cls)
    missing = [n for n, p in inspect.signature(cls).parameters.items() if p.default is p.empty]
    kinds = numeric(name)
    return {n: 1.0 if kinds[n] is float else {"group": 2}.get(n, 4) for n in missing}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, Any], dict[str, Any]]:
    name = draw(st.sampled_from(REGISTRY.names("defense")))
    kinds = numeric(name)
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), unique=True)) if kinds else []
    given_ = {n: draw(st.sampled_from(FLOATS if kinds[n] is float else WHOLE)) for n in chosen}
    known = {f.name: str(f.type) for f in fields(Facts)}
    facts = draw(st.lists(st.sampled_from(sorted(known)), unique=True))
    return name, needed(name) | given_, {n: draw(st.sampled_from(FACTS[known[n]])) for n in facts}


@given(case=cases())
@settings(deadline=None, max_examples=250, suppress_health_check=list(HealthCheck))
def test_every_defense_ends_in_a_number_or_a_sentence_within_a_second(
    case: tuple[str, dict[str, Any], dict[str, Any]],
) -> None:
    name, chosen, known = case
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UserWarning)  # a defense's own words
        try:
            facts = Facts(**({"parameters": 1} | known))
            defense = REGISTRY.defense(name, chosen)
            entry = account(defense, facts)
            with computable(defense, facts):
                derived = formulas.formulas(defense, facts)
        except UserError as error:
            sentence = str(error)
        else:
            sentence = ""
            numbers = [entry.eps_record, entry.eps_claimed, *entry.constants.values()]
            numbers += [v for f in derived for v in (f.value, f.really)]
            assert not any(isinstance(v, float) and math.isnan(v) for v in numbers), entry
            assert entry.eps_record >= 0
    assert time.process_time() - began < 1
    if sentence:
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert any(n in sentence for n in [*chosen, *known, *numeric(name)]), sentence


class Overflowing(Defense):
    """Its constant is beyond float64."""

    def __init__(self, *, level: FloatOrInf, other: float = 2.0) -> None:
        self.level, self.other = level, other

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {"square": self.level**2, "nothing": self.level - self.level}


@pytest.mark.parametrize("level", [1e300, math.inf])
def test_a_sentence_names_the_setting_that_overflows(level: float) -> None:
    assert check_arguments(Overflowing, {"level": level}, what="x")
    with pytest.raises(UserError, match=rf"with level={level:g}\.".replace("+", r"\+")):
        account(Overflowing(level=level), Facts(parameters=1))


def test_no_step_costs_nothing_and_endless_noise_neither() -> None:
    for epsilon in (gaussian_epsilon, lambda **k: subsampled_gaussian_epsilon(rate=0.1, **k)):
        assert epsilon(noise_multiplier=1.0, steps=0, delta=1e-5) == 0
        assert epsilon(noise_multiplier=math.inf, steps=10, delta=1e-5) == 0
        assert epsilon(noise_multiplier=1e-300, steps=10, delta=1e-5) == math.inf


def test_a_claim_without_a_finite_value_does_not_read_as_infinity() -> None:
    few = "parameters=10,clients=20,rounds=10"
    done = CliRunner().invoke(app, ["ledger", "ms_pafl", "--set", "epsilon=0.5", "--facts", few])
    assert done.exit_code == 0
    assert "The paper's formula gives no finite epsilon" in done.stdout
    assert "at delta 1" not in done.stdout.split("Proven")[0]
