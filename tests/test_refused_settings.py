"""Settings that the shipped plugins refuse, each with one sentence that names it."""

import math
from typing import Any

import pytest

from bench.errors import UserError
from bench.registry import PluginKind, Registry
from tests.conftest import require

NOISE: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": 1.0}
BOUNDED: dict[str, Any] = {"epsilon": 1.0, "bound": 1.0}
SMASHED: dict[str, Any] = {"clip": 1.0, "smashed_std": 0.0, "label_std": 0.0}
GIVEN: dict[str, dict[str, Any]] = {
    "gaussian": NOISE,
    "laplace": NOISE,
    "local_dp": {"clip_norm": 1.0, "sensitivity": 1.0, "epsilon": 1.0},
    "dp_sgd": NOISE,
    "dp_fedavg": NOISE,
    "dp_fedavg_central": {**NOISE, "expected": 4},
    "dp_ftrl": {**NOISE, "expected": 4, "period": 2},
    "duchi": BOUNDED,
    "pm_piecewise": BOUNDED,
    "pnpm": BOUNDED,
    "sun_adaptive": {"epsilon": 1.0},
    "spm": {"epsilon": 1.0},
    "ms_pafl": {"epsilon": 1.0},
    "splitfed_dp": {"epsilon": 1.0, "smashed_clip": 1.0, "update_clip": 1.0},
    "dp_cutmix": {"patches": 6, "group": 3, **SMASHED},
    "vanilla_cutmix": {"positions": 4, "group": 2},
}
"""Good settings, of which a case changes some."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gaussian", {"clip_norm": 0.0}, r"clip_norm must be > 0 and finite \(L2 norm .*\), got 0\.0"),
    ("gaussian", {"noise_multiplier": math.nan}, "noise_multiplier must be >= 0 .* got nan"),
    ("laplace", {"clip_norm": 0.0}, r"clip_norm must be > 0 and finite \(L1 norm"),
    ("laplace", {"noise_multiplier": math.nan}, "noise_multiplier must be >= 0 .* got nan"),
    ("local_dp", {"sensitivity": 0.0}, r"sensitivity must be > 0"),
    ("local_dp", {"delta": 1.0}, r"delta must lie in \(0, 1"),
    ("dp_sgd", {"noise_multiplier": -1.0}, r"noise_multiplier must be >= 0 .* got -1\.0"),
    ("dp_sgd", {"clip_norm": 0.0}, r"clip_norm must be > 0 .* got 0\.0"),
    ("dp_fedavg", {"shared_by": 0}, r"shared_by must be >= 1 \(clients of a round\), got 0"),
    ("dp_fedavg_central", {"quantile": 1.0}, r"quantile must lie in \(0, 1\)"),
    ("dp_fedavg_central", {"expected": 0}, r"expected must be >= 1 \(clients of a round\), got 0"),
    ("dp_ftrl", {"period": 0}, "period must be >= 1"),
    ("soteria", {"percentile": 101.0}, r"percentile must lie in \[0, 100\]"),
    ("precode", {"width": 0}, r"width must lie in \[1, 10000\]"),
    ("precode", {"weight": -1.0}, "weight must be >= 0"),
    ("outpost", {"prune": 100.0}, r"prune must lie in \[0, 100\)"),
    ("outpost", {"beta": -1.0}, "beta must be >= 0"),
    ("censor", {"tries": 0}, r"tries must lie in \[1, 1000\]"),
    ("censor", {"variant": "true"}, "variant must be printed or orthogonal, got 'true'"),
    ("duchi", {"epsilon": 0.0}, r"epsilon must lie in \(0, 700\]"),
    ("pm_piecewise", {"epsilon": math.nan}, r"epsilon must lie in \(0, 700\]"),
    ("pnpm", {"epsilon": 701.0}, r"epsilon must lie in \(0, 700\]"),
    ("duchi", {"bound": 0.0}, "bound must be > 0"),
    ("pnpm", {"bound": math.inf}, "bound must be > 0 and finite"),
    ("duchi", {"target": "labels"}, "target must be update, gradient or weights, got 'labels'"),
    ("pm_piecewise", {"dimensions": "some"}, "dimensions must be each or sampled, got 'some'"),
    (
        "pm_piecewise",
        {"dimensions": "sampled", "target": "weights"},
        "target must be update or gradient with dimensions = 'sampled'",
    ),
    ("sun_adaptive", {"epsilon": -1.0}, r"epsilon must lie in \(0, 700\]"),
    ("sun_adaptive", {"slack": 0.0}, "slack must be > 0"),
    ("sun_adaptive", {"floor": 0.0}, "floor must be > 0"),
    ("sun_adaptive", {"max_radius": 0.001}, r"max_radius must be >= 0\.01 and finite"),
    ("lg_fedavg", {"keep": 0.0}, r"keep must lie in \(0, 1\]"),
    ("lg_fedavg", {"keep": 1.5}, r"keep must lie in \(0, 1\]"),
    ("splitfed_dp", {"epsilon": 0.0}, "^epsilon must be > 0"),
    ("splitfed_dp", {"update_epsilon": -1.0}, r"^update_epsilon must be > 0.* got -1\.0"),
    ("splitfed_dp", {"update_epsilon": 1e-320}, "^update_epsilon must leave the noise finite"),
    ("splitfed_dp", {"smashed_clip": 0.0}, "smashed_clip must be > 0"),
    ("splitfed_dp", {"update_clip": math.inf}, "update_clip must be > 0 and finite"),
    ("splitfed_dp", {"delta": 1.0}, r"delta must lie in \(0, 1\)"),
    ("splitfed_dp", {"update_noise": "uniform"}, "update_noise must be gaussian or laplace"),
    ("splitfed_pm", {"sends": "masks"}, "sends must be probabilities or bits"),
    ("depthfl", {"weight": -1.0}, "weight must be >= 0 and finite"),
    ("depthfl", {"distillation": math.inf}, "distillation must be >= 0 and finite"),
    ("ms_pafl", {"epsilon": 0.0}, r"epsilon must be > 0 .* got 0\.0"),
    ("ms_pafl", {"delta": 1.0}, r"delta must lie in \(0, 1\), got 1\.0"),
    ("ms_pafl", {"check_in": 1.5}, r"check_in must lie in \[0, 1\].* got 1\.5"),
    ("ms_pafl", {"check_in": "a"}, r"check_in must be numbers.* got 'a'"),
    ("ms_pafl", {"private": -0.1}, r"private must lie in \[0, 1\].* got -0\.1"),
    ("ms_pafl", {"sampling": "all"}, "sampling must be wor or wr, got 'all'"),
    ("ms_pafl", {"clip_norm": 0.0}, r"clip_norm must be > 0 .* got 0\.0"),
    ("pm_sfl", {"clip": 0.0}, r"clip must lie in \(0, 0\.5\)"),
    ("pm_sfl", {"clip": 0.5}, r"clip must lie in \(0, 0\.5\)"),
    ("pm_sfl", {"variant": "paper"}, "variant must be corrected or printed, got 'paper'"),
    ("pm_sfl", {"lr_scale": 0.0}, "lr_scale must be > 0"),
    ("pm_sfl", {"personal": 1.1}, r"personal must lie in \[0, 1\]"),
    ("pm_sfl", {"agreement_rounds": -1}, "agreement_rounds must be >= 0"),
    ("pm_sfl", {"growth_rounds": 0}, "growth_rounds must be >= 1"),
    ("pm_sfl", {"noise": "laplace"}, "noise must be none, local, mask or smashed"),
    ("pm_sfl", {"noise": "mask"}, r"epsilon must be > 0 \(budget of noise 'mask'\), got None"),
    ("pm_sfl", {"noise": "local", "epsilon": -1.0}, "epsilon must be > 0"),
    ("pm_sfl", {"epsilon": 1.0}, "epsilon needs a noise"),
    ("pm_sfl", {"delta": 0.0}, r"delta must lie in \(0, 1\)"),
    ("pm_sfl", {"local_steps": 0}, "local_steps must be >= 1"),
    ("pm_sfl", {"clip_norm": 0.0}, "clip_norm must be > 0"),
    ("quantise", {"how": "ternary"}, "how must be one of qsgd, sign, int8, stochastic, nf4, fp4"),
    ("quantise", {"how": "sign", "bits": 2}, "bits must be 1 with how = sign"),
    ("quantise", {"how": "nf4", "bits": 8}, "bits must be 4 with how = nf4"),
    ("sparse_vector", {"fraction": 0.0}, r"fraction must lie in \(0, 1\]"),
    ("sparse_vector", {"gamma": 0.0}, "gamma must be > 0"),
    ("sparse_vector", {"tau": -1.0}, r"tau must be >= 0"),
    ("sparse_vector", {"clip": "both"}, "clip must be after or before"),
    ("quantise", {"how": "qsgd", "bits": 1}, r"bits must lie in \[2, 16\] with how = qsgd"),
    ("quantise", {"how": "stochastic", "bits": 17}, r"bits must lie in \[1, 16\]"),
    ("selective_shield", {"tau": 1.1}, r"tau must lie in \[0, 1\], got 1\.1"),
    ("selective_shield", {"tau": [0.5, 1.5]}, r"tau must lie in \[0, 1\], got 1\.5"),
    ("selective_shield", {"tau": []}, "got an empty list"),
    ("selective_shield", {"rho": -0.1}, r"rho must lie in \[0, 1\], got -0\.1"),
    ("selective_shield", {"score": "fisher"}, "score must be eq12, eq3 or update, got 'fisher'"),
    ("selective_shield", {"noise_scale": "K"}, "noise_scale must be times_K, plain or div_K"),
    ("selective_shield", {"average": "mean"}, "average must be count or all, got 'mean'"),
    ("selective_shield", {"parameters": "tiny"}, "parameters must be additive or standard"),
    ("selective_shield", {"noise_multiplier": -1.0}, r"noise_multiplier must be >= 0 .* got -1\.0"),
    ("selective_shield", {"clip_norm": 0.0}, r"clip_norm must be > 0 .* got 0\.0"),
    ("secure_aggregation", {"clip": 0.0}, "clip must be > 0"),
    ("secure_aggregation", {"levels": 0}, r"levels must lie in \[1, 4294967296\), got 0"),
    ("secure_aggregation", {"dropout": 1.0}, r"dropout must lie in \[0, 1\)"),
    ("secure_aggregation", {"threshold": 0.0}, r"threshold must lie in \(0, 1\]"),
    ("dp_cutmix", {"patches": 0, "group": 1}, r"patches must be >= 1 .*, got 0\."),
    ("dp_cutmix", {"group": 0}, r"group must be >= 1 \(clients mixed together\), got 0\."),
    ("dp_cutmix", {"group": 7}, r"group must lie in \[1, 6\] \(a patch for each .*\), got 7\."),
    ("dp_cutmix", {"clip": 0.0}, r"clip must be > 0 \(width .*\), got 0\.0\."),
    ("dp_cutmix", {"low": math.inf}, "low must be finite"),
    ("dp_cutmix", {"smashed_std": -0.1}, r"smashed_std must be >= 0 .*, got -0\.1\."),
    ("dp_cutmix", {"label_std": math.nan}, r"label_std must be >= 0 .*, got nan\."),
    ("dp_cutmix", {"noise": "eq2"}, "noise must be eq1 or b3, got 'eq2'"),
    ("dp_cutmix", {"mixing": "even"}, "mixing must be uniform or dirichlet, got 'even'"),
    ("dp_cutmix", {"alpha": 0.0}, r"alpha must lie in \[0\.01, 1000000\] .*, got 0\.0\."),
    ("dp_cutmix", {"smashed_size": 0}, r"smashed_size must be >= 1 .*, got 0\."),
    ("vanilla_cutmix", {"positions": 0}, r"positions must be a square number >= 1 .*, got 0\."),
    ("vanilla_cutmix", {"positions": -4}, r"positions must be a square number >= 1 .*, got -4\."),
    ("vanilla_cutmix", {"positions": 8}, r"positions must be a square number >= 1 .*, got 8\."),
    ("vanilla_cutmix", {"group": 5}, r"group must lie in \[1, 4\] .*, got 5\."),
    ("vanilla_cutmix", {"alpha": math.nan}, r"alpha must lie in \[0\.01, 1000000\] .*, got nan\."),
]


BY_ATTACKS: list[tuple[str, dict[str, Any], str]] = [
    ("decoder", {"steps": -1}, "steps must be >= 0"),
    ("dlg", {"history": 0}, "history"),
    ("ilrg", {"shrink": -1.0}, "shrink must be >= 0"),
    ("ilrg", {"refine": -1}, "refine must be >= 0"),
    ("inverting_gradients", {"restarts": -1}, "restarts must be >= 0"),
    ("inverting_gradients", {"lr": 0.0}, "lr must be > 0"),
    ("inverting_gradients", {"total_variation": -1.0}, "total_variation must be >= 0"),
    ("ridge", {"rows": 0}, "rows must be >= 1"),
]


@pytest.mark.parametrize(
    ("kind", "name", "changes", "message"),
    [*(("defense", *case) for case in REFUSED), *(("attack", *case) for case in BY_ATTACKS)],
)
def test_a_bad_setting_is_refused_by_the_class(
    registry: Registry, kind: PluginKind, name: str, changes: dict[str, Any], message: str
) -> None:
    made = require(registry.get(kind, name).cls)
    with pytest.raises(ValueError, match=message) as refused:
        made(**{**GIVEN.get(name, {}), **changes})
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError):  # by the constructor, or before by a setting's type
        getattr(registry, kind)(name, {**GIVEN.get(name, {}), **changes})
