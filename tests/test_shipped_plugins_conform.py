"""Every shipped defense and attack passes `leakbench check`, with settings of shipped suites."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import pytest

from bench.registry import PluginKind, Registry
from bench.sandbox.conformance.plugins import check

CLIPPED_STD = {"noise_multiplier": 0.02, "clip_norm": 5.0}
DP_SPLIT = {"clip": 4.0, "low": -2.0, "smashed_std": 0.1, "label_std": 0.1}
# Settings of the shipped suites, but for fewer rows of the attacks that learn; a plugin that is not
# named here is checked without any.
DEFENSES: Mapping[str, Mapping[str, Any]] = {
    "gaussian": CLIPPED_STD,
    "laplace": {"noise_multiplier": 0.0002, "clip_norm": 100.0},
    "local_dp": {"clip_norm": 5.0, "sensitivity": 0.1, "epsilon": 5.0},
    "spm": {"epsilon": 3.9, "variant": "unbiased"},
    "duchi": {"epsilon": 3.9, "bound": 0.1, "target": "weights"},
    "pm_piecewise": {"epsilon": 3.9, "bound": 1.0, "target": "weights"},
    "pnpm": {"epsilon": 3.9, "bound": 1.0, "target": "weights"},
    "sun_adaptive": {"epsilon": 3.9},
    "dp_fedavg": {"noise_multiplier": 12.79, "clip_norm": 0.1, "shared_by": 20},
    "dp_fedavg_central": {
        "noise_multiplier": 2.0,
        "clip_norm": 0.1,
        "expected": 4,
        "quantile": 0.5,
    },
    "dp_ftrl": {"noise_multiplier": 4.0, "clip_norm": 0.2, "expected": 4, "period": 2},
    "dp_sgd": {"noise_multiplier": 3.0, "clip_norm": 1.0},
    "top_k": {"keep": 0.1},
    "quantise": {"how": "stochastic"},
    "sparse_vector": {"noise_var": 20.0, "gamma": 0.01},
    "fedml_he": {"share": 0.1},
    "mask_crypt": {"share": 0.1},
    "ms_pafl": {"epsilon": 10000.0, "noise": "analytic", "clip_norm": 10.0, "check_in": 0.7},
    "selective_shield": {"tau": 0.05, "rho": 0.5, "noise_multiplier": 0.02, "clip_norm": 1.0},
    "splitfed_pm": {"lr_scale": 3000.0},
    "splitfed_dp": {"epsilon": 5.0, "smashed_clip": 1.0, "update_clip": 0.001},
    "pm_sfl": {"lr_scale": 1000.0},
    "cutmix": {"patches": 16, "group": 2},
    "mixup": {"group": 2},
    "cutout": {"patches": 16, "group": 2},
    "vanilla_cutmix": {"positions": 64, "group": 2},
    "dp_cutmix": {"patches": 16, "group": 2, **DP_SPLIT},
    "dp_mixsl": {"group": 2, **DP_SPLIT},
    "dp_sl": DP_SPLIT,
}
ATTACKS: Mapping[str, Mapping[str, Any]] = {"decoder": {"rows": 24}, "ridge": {"rows": 24}}


FAST = pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
OFTEN = {
    *("gaussian", "top_k", "ms_pafl", "pm_sfl", "dp_cutmix", "depthfl", "selective_shield"),
    "secure_aggregation",
}
"""Defenses of which the default tests run the check: together they use every hook."""


def failures(
    registry: Registry, kind: PluginKind, name: str, settings: Mapping[str, Any], *, fast: bool
) -> list[str]:
    findings = check(registry, kind, name, settings, fast=fast).findings
    return [f"{f.name}: {f.reason}" for f in findings if f.status == "failed"]


def shipped(group: str) -> list[str]:
    """Names of leakbench's own entry points, whether they can be loaded or not."""
    own = (p for p in entry_points(group=group) if p.dist and p.dist.name == "leakbench")
    return sorted(p.name for p in own)


@FAST
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow)
        for n in shipped("leakbench.defenses")
    ],
)
def test_every_shipped_defense_conforms(registry: Registry, name: str, fast: bool) -> None:
    assert failures(registry, "defense", name, DEFENSES.get(name, {}), fast=fast) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pm_piecewise", {"epsilon": 60.0, "bound": 1.0, "dimensions": "sampled"}),
        ("sun_adaptive", {"epsilon": 3.9, "shuffled": True}),
    ],
)
def test_rivals_of_spm_conform_as_their_own_papers_have_them(
    registry: Registry, name: str, settings: dict[str, Any]
) -> None:
    assert failures(registry, "defense", name, settings, fast=False) == []


@FAST
@pytest.mark.parametrize("name", shipped("leakbench.attacks"))
def test_every_shipped_attack_conforms(registry: Registry, name: str, fast: bool) -> None:
    assert failures(registry, "attack", name, ATTACKS.get(name, {}), fast=fast) == []


def test_settings_are_those_of_shipped_plugins() -> None:
    assert set(DEFENSES) <= set(shipped("leakbench.defenses"))
    assert set(ATTACKS) <= set(shipped("leakbench.attacks"))
