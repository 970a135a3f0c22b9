"""Membership inference: known answers, its place in records and rows, and nothing where unasked."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
from bench.errors import UserError
from bench.harness.membership import infer_shares, standardise, trace_curve
from bench.protocols.settings import ThreatSettings
from bench.records.outcomes import Membership
from bench.report import figures
from bench.report.columns import columns_of
from tests.conftest import TINY, changed

MEASURED = 'victims = 2\n\n[[threats]]\nname = "run"\nwork = "as_trained"\nmembership = true'
SUITE = changed(
    TINY.partition("[[attacks]]")[0],
    {
        '["init", "final"]': '["training"]',
        "clients = 3": 'clients = 22\nparticipation = 0.3\npartition = "iid"',
        "batch = 8": "batch = 100",
        "victims = 2": MEASURED,
        'name = "spm"\nsettings = { epsilon = [0.5, 2.0] }':
            'name = "dp_fedavg"\nsettings = { noise_multiplier = 50.0, clip_norm = 1.0 }\n\n'
            '[[defenses]]\nname = "secure_aggregation"',
    },
)  # fmt: skip
"""One step of all samples of a client, which are about 50."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> bench.Results:
    folder = tmp_path_factory.mktemp("membership")
    (folder / "suite.toml").write_text(SUITE)
    return bench.run(folder / "suite.toml", out=folder / "out", jobs=0)


def test_a_step_without_noise_tells_every_member(results: bench.Results) -> None:
    bare, noised = (
        next(r for r in results.rows if r["defense"] == name) for name in ("none", "dp_fedavg")
    )
    assert bare["membership"]["rate"]["mean"] > 0.95
    assert bare["membership"]["bound"] is None
    # Under noise that proves a small epsilon the attack guesses: 350 members at 1 % are 3 +- 2.
    bound = math.exp(noised["eps_record"]) * 0.01 + noised["delta"]
    assert noised["membership"]["bound"] == pytest.approx(bound)
    assert noised["membership"]["rate"]["mean"] <= 0.035
    assert noised["membership"]["curve"]["0.5"] == pytest.approx(0.5, abs=0.1)


def test_too_few_others_are_a_reason_and_no_figure(results: bench.Results) -> None:
    summed = next(r for r in results.rows if r["defense"] == "secure_aggregation")
    assert summed["membership"]["rate"] is None
    assert "fewer than 10" in summed["membership"]["reason"]


def test_tables_and_figures_show_it_where_it_was_measured(results: bench.Results) -> None:
    frame = results.leaderboard(wide=True)
    assert frame["membership"].max() > 0.95
    rows = results._rows()
    assert "membership" in [column.name for column in columns_of(rows)]
    assert "membership" in figures.of_table(rows, rows)


def test_coefficients_are_those_of_least_squares_without_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    gradients = torch.randn(40, 300, generator=rng)
    weights = torch.zeros(2, 40)
    weights[0, :5], weights[1, 20:30] = 1.0, 2.0
    updates = weights @ gradients
    shares = infer_shares(gradients, updates)
    expected = weights * gradients.norm(dim=1) / updates.norm(dim=1, keepdim=True)
    assert torch.allclose(shares.float(), expected, atol=1e-3)


def test_noise_raises_the_penalty_towards_the_cosine() -> None:
    rng = torch.Generator().manual_seed(0)
    gradients, noise = (torch.randn(n, 300, generator=rng) for n in (40, 1))
    (shares,) = infer_shares(gradients, noise)
    cosine = torch.nn.functional.cosine_similarity(gradients, noise)
    assert np.corrcoef(shares, cosine)[0, 1] > 0.95


def test_scores_compare_with_other_clients_and_the_same_label() -> None:
    shares = torch.tensor([[1.0, 3.0, 5.0, 5.0], [0.0, 0.0, 4.0, 6.0]], dtype=torch.float64)
    scores = standardise(shares, torch.tensor([0, 0, 1, 1]))
    assert scores.tolist() == [[-1.0, 1.0, 1.0, -1.0], [1.0, -1.0, -1.0, 1.0]]


def test_guessing_tells_one_member_in_a_hundred() -> None:
    rng = torch.Generator().manual_seed(0)
    members = torch.arange(12000) < 2000
    guessed = trace_curve(torch.rand(12000, generator=rng), members)
    curve = dict(guessed.curve)
    assert (guessed.members, guessed.others) == (2000, 10000)
    assert guessed.auc == pytest.approx(0.5, abs=0.03)
    # The threshold has an error of its own: 2000 at 1 % are 20 +- 4.9.
    assert abs(2000 * curve[0.01] - 20) < 3 * math.sqrt(20 * 1.2)
    assert 0.001 in curve  # which needs 10,000 others


def test_a_suite_that_does_not_ask_has_no_trace_of_it(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text(SUITE.replace("\nmembership = true", ""))
    plain = bench.run(tmp_path / "suite.toml", out=tmp_path / "out", jobs=0, only={"seed": 0})
    texts = [p.read_text() for p in (tmp_path / "out").rglob("*.json")]
    assert not any("membership" in text for text in texts)
    assert all("membership" not in row for row in plain.rows)
    assert "membership" not in plain.leaderboard(wide=True)
    assert "membership" not in ThreatSettings(work="as_trained").model_dump()


def test_it_is_measured_in_rounds_of_the_training_alone() -> None:
    with pytest.raises(ValueError, match='membership needs work = "as_trained"'):
        ThreatSettings(membership=True)


@pytest.mark.parametrize(
    "damage",
    [
        {"curve": ((0.01, 0.5), (0.02, 0.4))},
        {"curve": ((0.02, 0.5),)},
        {"auc": 1.5},
        {"reason": "none"},
        {"members": 0},
    ],
)
def test_a_record_with_an_impossible_curve_is_refused(damage: dict[str, object]) -> None:
    sound = {"members": 5, "others": 1000, "auc": 0.6, "curve": ((0.01, 0.2),)}
    assert json.dumps(Membership(**sound).curve)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="rising curve"):
        Membership(**sound | damage)  # type: ignore[arg-type]
