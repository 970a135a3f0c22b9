"""Accuracy, leak and epsilon over the rounds of a training."""

from dataclasses import replace
from pathlib import Path

import pytest

import bench
from bench.errors import UserError
from bench.protocols.settings import ThreatSettings, evenly, rounds_before
from bench.report import figures
from bench.report.plots import courses
from bench.report.tables import tables
from tests.conftest import TINY, changed

SUITE = changed(
    TINY,
    {
        '["init", "final"]': '["init", "round-3", "final"]\ncourse = 3',
        "rounds = 1": "rounds = 6",
        "clients = 3": "clients = 2",
        "mlp_spm": "logistic",
        "victims = 2": 'victims = 2\n\n[[threats]]\nname = "run"\nvictims = 2\nrounds = 3',
        'name = "spm"\nsettings = { epsilon = [0.5, 2.0] }':
            'name = "gaussian"\nsettings = { noise_multiplier = 1.0, clip_norm = 1.0 }',
        'name = "ilrg"': 'name = "analytic"',
        'name = "prior_only"': 'name = "analytic"\nthreat = "run"',
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> bench.Results:
    folder = tmp_path_factory.mktemp("course")
    suite = folder / "suite.toml"
    suite.write_text(SUITE)
    return bench.run(suite, out=folder / "out", jobs=0)


def test_accuracy_and_epsilon_are_measured_over_the_rounds(results: bench.Results) -> None:
    last = next(r for r in results.rows if r["defense"] == "gaussian")
    noised = {point["rounds"]: point for point in last["course"]}
    assert list(noised) == [2, 3, 4, 6]  # a third of the run each, and the checkpoints
    epsilons = [point["eps_record"] for point in noised.values()]
    assert epsilons == sorted(set(epsilons))
    assert noised[6]["eps_record"] == last["eps_record"]
    assert noised[6]["accuracy"]["mean"] == last["accuracy"]["mean"]
    assert noised[2]["eps_record"] == pytest.approx(
        _epsilon_of(noise_multiplier=1.0, clip_norm=1.0, rounds=2)
    )


def _epsilon_of(*, rounds: int, **settings: float) -> float:
    from bench.contract.events import Facts
    from bench.privacy.ledger import account
    from bench.registry import discover

    facts = Facts(parameters=1, rounds=rounds, clients=2, participations=rounds)
    return account(discover().defense("gaussian", settings), facts).eps_record


def test_a_round_in_between_is_attacked_like_the_first_and_the_last(results: bench.Results) -> None:
    bare = {r["checkpoint"]: r["leakage"] for r in results.rows if r["defense"] == "none"}
    assert list(bare) == ["init", "round-3", "final"]
    # One sample, a first dense layer with bias: solved exactly.
    assert all(leakage["mean"] > 0.9 for leakage in bare.values())
    titles = [title for title, _ in tables(results._files.rows)]
    assert [t.rpartition(" · ")[2] for t in titles] == [
        "init round",
        "after 3 rounds",
        "final round",
    ]
    observed = {r["checkpoint"]: r["observed"] for r in results.rows}
    assert observed["round-3"] == observed["final"] != ""


def test_a_report_draws_what_was_measured_beside_the_last_rounds_table(
    results: bench.Results, tmp_path: Path
) -> None:
    rows = results._files.rows
    by_checkpoint = {members[0].checkpoint: members for _, members in tables(rows)}
    drawn = {
        c: [n for n in figures.of_table(members, rows) if n.startswith("over")]
        for c, members in by_checkpoint.items()
    }
    assert drawn == {
        "init": [],
        "round-3": [],
        "final": ["over_accuracy", "over_leak", "over_eps_record", "over_eps_claimed"],
    }
    figure = results.plot_course("leak", checkpoint="final")
    assert len(figure.axes[0].containers) == 2
    with pytest.raises(UserError, match="has accuracy, leak, eps_record, eps_claimed over its"):
        results.plot_course("ssim", checkpoint="final")


def test_a_run_that_was_measured_once_has_no_course(results: bench.Results) -> None:
    rows = [replace(r, course=r.course[-1:]) for r in results._files.rows]
    final = [r for r in rows if r.checkpoint == "final"]
    assert courses(final, final) == {}


def test_rounds_are_spread_evenly_and_end_with_the_last() -> None:
    assert evenly(10, 4) == [2, 5, 8, 10]
    assert evenly(3, 10) == [1, 2, 3]
    assert [rounds_before(c, 9) for c in ("init", "round-4", "final")] == [0, 4, 9]
    assert ThreatSettings(rounds=3).schedule(rounds_before("round-4", 9)) == [0, 2, 4]


@pytest.mark.slow
def test_uploads_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    bare, *_ = SUITE.partition("[[defenses]]")
    suite = tmp_path / "suite.toml"
    suite.write_text(
        bare
        + """
[[defenses]]
name = "none"

[[defenses]]
name = "ms_pafl"
settings = { epsilon = 1.0, private = 0.5, check_in = 1.0 }

[[defenses]]
name = "fedml_he"
settings = { share = 0.25 }
"""
    )
    made = bench.run(
        suite,
        out=tmp_path / "out",
        jobs=0,
        overrides={"protocol.rounds": 1, "checkpoints": ["init"]},
    )
    by_defense = {r["defense"]: r["workings"] for r in made.rows}
    shares = {d: [w[n] for n in ("clear", "sealed", "withheld")] for d, w in by_defense.items()}
    assert shares["none"] == [1.0, 0.0, 0.0]
    assert shares["ms_pafl"] == pytest.approx([0.5, 0.0, 0.5], abs=0.001)
    assert shares["fedml_he"] == pytest.approx([0.75, 0.25, 0.0], abs=0.001)
    assert by_defense["fedml_he"]["parties"] > 0 == by_defense["none"]["parties"]


@pytest.mark.slow
def test_a_task_that_no_attack_names_is_trained_and_not_observed(tmp_path: Path) -> None:
    bare, _, rest = SUITE.partition("[[threats]]")
    suite = tmp_path / "suite.toml"
    single = '[[tasks]]\ndataset = "digits"\nmodel = "mlp3"\nprotocol = { clients = 1 }\n\n'
    text = f"{bare}{single}[[threats]]{rest}".replace(
        'name = "analytic"', 'name = "analytic"\ntasks = [0]'
    )
    suite.write_text(text)  # its threats have two victims
    made = bench.run(
        suite,
        out=tmp_path / "out",
        jobs=0,
        only={"defense": "none"},
        overrides={"protocol.rounds": 3, "checkpoints": ["final"]},
    )
    alone = next(r for r in made.rows if r["protocol_settings"]["clients"] == 1)
    assert alone["attacks"] == {}
    assert alone["accuracy"] is not None
