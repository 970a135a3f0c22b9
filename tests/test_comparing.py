"""Two rows on the same victims: what is compared, and the command."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.harness.store import Store
from bench.protocols.settings import ProtocolSettings, TaskSettings, ThreatSettings
from bench.records import (
    AttackJob,
    AttackOutcome,
    Cell,
    FlagCode,
    NoResult,
    PlannedTraining,
    TrainJob,
    attack_job,
    to_json,
)
from bench.records import Run as RunOf
from bench.records.outcomes import AttackInputs
from bench.report import comparison, leaderboard
from bench.report.comparison import RowComparison
from bench.report.explain import sentence
from bench.seeding import numpy_generator
from bench.suite import AttackSettings, DefenseSettings, Suite
from tests.made_records import attacked_for, trained_for

# --- result folders ---------------------------------------------------------------------------

PROTOCOL = ProtocolSettings(name="fedavg", clients=10, local_steps=1)


class Folder:
    """A result folder written record by record."""

    def __init__(self, folder: Path, *, threats: Sequence[str] = ("server",)) -> None:
        self.folder = folder
        self.threats = tuple(ThreatSettings(name=t, victims=8) for t in threats)
        self.trainings: list[PlannedTraining] = []
        self.attacks: dict[str, AttackSettings] = {}
        self.store = Store(folder)

    def row(
        self, defense: str, seed: int, attacks: Mapping[str, Any], *, correct: int = 90,
        floors: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
        diverged: str | None = None,
        dataset: str = "digits", **settings: Any,
    ) -> None:  # fmt: skip
        """attacks: name or name@threat -> SSIM per victim, with judged losses beside them where
        they are a pair; values by metric; or a status. floors: per victim, or that by threat."""
        scores = [v[0] if isinstance(v, tuple) else v for v in attacks.values()]
        scores = [next(iter(v.values())) if isinstance(v, dict) else v for v in scores]
        victims = next((len(v) for v in scores if not isinstance(v, str)), 8)
        threats = tuple(t.model_copy(update={"victims": victims}) for t in self.threats)
        job = TrainJob(
            task=TaskSettings(dataset=dataset, model="mlp_spm"), protocol=PROTOCOL, defense=defense,
            settings=settings, threats=threats, checkpoints=("final",), delta=1e-5, seed=seed,
        )  # fmt: skip
        key = f"{len(self.trainings):024x}"
        cells = []
        for name, given_values in attacks.items():
            label, _, threat = name.partition("@")
            asked = AttackSettings(name=label, threat=threat or "server")
            self.attacks[label] = asked
            cell = f"{len(self.trainings) * 100 + len(cells) + 10**6:024x}"
            made = attack_job(job, self.suite(), {label: asked}, label, "final")
            cells.append(Cell(key=cell, train_key=key, job=made))
            floor = floors[asked.threat] if isinstance(floors, Mapping) else floors
            record = self.record(made, key, given_values, floor)
            self.store.write("attack", cell, record)
        self.trainings.append(PlannedTraining(key=key, job=job, cells=tuple(cells)))
        self.store.write("train", key, trained_for(job, correct=correct, diverged=diverged))

    @staticmethod
    def record(
        job: AttackJob, train: str, given: Any, floors: Sequence[float] | None
    ) -> AttackOutcome:
        if isinstance(given, str):
            same: dict[str, Any] = {"inputs": AttackInputs.of(job), "train": train}
            return NoResult(status=given, reason="so it is", **same)  # type: ignore[arg-type]
        given, judged = given if isinstance(given, tuple) else (given, None)
        values = given if isinstance(given, dict) else {"ssim": given}
        n = len(next(iter(values.values())))
        floor = list(floors or [job.train.seed / 100 + i / 1000 for i in range(n)])
        return attacked_for(
            job, train, values=values, victims=n, floors=dict.fromkeys(values, floor),
            judged=judged, is_floor=job.label == "prior_only",
        )  # fmt: skip

    def suite(self) -> Suite:
        return Suite(
            name="made", version=1, threats=list(self.threats), checkpoints=["final"],
            protocol=PROTOCOL, tasks=[TaskSettings(dataset="digits", model="mlp_spm")],
            defenses=[DefenseSettings(name="none")], attacks=list(self.attacks.values()),
        )  # fmt: skip

    def done(self) -> Path:
        run = RunOf(suite=self.suite(), trainings=tuple(self.trainings))
        (self.folder / "run.json").write_text(to_json(run))
        return self.folder

    def compared(self, one: str = "a", two: str = "b", **asked: Any) -> RowComparison:
        return comparison.compare_rows(self.done(), one, two, **asked)[0]


def means_of(compared: RowComparison) -> tuple[float | None, float | None]:
    return compared.first.leak, compared.second.leak


@pytest.fixture
def made(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_difference_is_of_the_worst_case_per_victim_in_normalised_leakage(made: Folder) -> None:
    floors = [0.0, 0.2]
    made.row("a", 0, {"dlg": [0.9, 0.1], "ridge": [0.2, 0.3]}, correct=80, floors=floors)
    made.row("b", 0, {"dlg": [0.4, 0.1], "ridge": [0.5, 0.1]}, correct=90, floors=floors)
    compared = made.compared()
    # the mean baseline is .1, so that .9 is the whole way
    assert means_of(compared) == pytest.approx(((0.9 + 0.1) / 2 / 0.9, (0.5 - 0.1) / 2 / 0.9))
    assert compared.difference.interval.mean == pytest.approx(0.3 / 0.9)
    assert compared.drop is not None
    assert compared.drop.mean == pytest.approx(0.1)
    other = made.compared("b", "a")
    assert other.difference.interval.mean == pytest.approx(-compared.difference.interval.mean)
    assert other.difference.p == compared.difference.p


def test_a_smaller_error_is_the_larger_leak(made: Folder) -> None:
    made.row("a", 0, {"dlg": {"mse": [1.0, 4.0]}, "ridge": {"mse": [2.0, 2.0]}}, floors=[5.0, 5.0])
    made.row("b", 0, {"dlg": {"mse": [3.0, 3.0]}, "ridge": {"mse": [5.0, 5.0]}}, floors=[5.0, 5.0])
    assert made.compared().difference.interval.mean == pytest.approx((3.0 - 1.5) / 5)


def test_only_seeds_that_both_rows_have_count(made: Folder) -> None:
    for seed in (0, 1, 2):
        made.row("a", seed, {"dlg": [0.5 + seed / 10, 0.6]}, floors=[0.0, 0.0])
    made.row("b", 0, {"dlg": [0.4, 0.4]}, floors=[0.0, 0.0])
    made.row("b", 2, {"dlg": [0.4, 0.4]}, correct=70, floors=[0.0, 0.0])
    compared = made.compared()
    assert compared.difference.seed_means == pytest.approx((0.15, 0.25))
    assert compared.drop is not None
    assert compared.drop.mean == pytest.approx(-0.1)


def test_a_row_with_a_failed_attack_is_never_best(made: Folder) -> None:
    for seed in (0, 1):
        made.row("a", seed, {"dlg": [0.9] * 4, "ridge": [0.2] * 4})
        made.row("b", seed, {"dlg": "failed", "ridge": [0.1] * 4})
        made.row("c", seed, {"dlg": [0.5] * 4, "ridge": [0.1] * 4})
    assert shown_marks(made) == {"b": "", "c": "*", "a": ""}


def test_an_attack_that_is_not_applicable_to_one_row_does_not_threaten_it(made: Folder) -> None:
    made.row("a", 0, {"dlg": "not_applicable", "ridge": [0.2, 0.3]}, floors=[0.0, 0.0])
    made.row("b", 0, {"dlg": [0.9, 0.9], "ridge": [0.1, 0.1]}, floors=[0.0, 0.0])
    assert means_of(made.compared()) == pytest.approx((0.25, 0.9))


def test_rows_are_compared_under_the_threat_where_each_leaks_most(tmp_path: Path) -> None:
    """Under threat batch the scores are larger, but what looks at nothing has nearly as much."""
    floors = {"server": [0.1] * 8, "batch": [0.4] * 8}
    made = Folder(tmp_path, threats=("server", "batch"))
    made.row("none", 0, {"dlg": [0.9] * 8, "ridge@batch": [0.9] * 8}, floors=floors)
    made.row("a", 0, {"dlg": [0.4] * 8, "ridge@batch": [0.2] * 8}, floors=floors)
    made.row("b", 0, {"dlg": [0.2] * 8, "ridge@batch": [0.42] * 8}, floors=floors)
    made.row("c", 0, {"dlg": [0.05] * 8, "ridge@batch": [0.7] * 8}, floors=floors)
    rows = leaderboard.rows(made.done())
    assert [(r.defense, r.leaks and r.leaks.threat) for r in rows] == [
        ("b", "server"), ("a", "server"), ("c", "batch"), ("none", "server"),
    ]  # fmt: skip
    assert [round(r.leak or 0.0, 3) for r in rows] == [0.111, 0.333, 0.5, 0.889]
    assert made.compared("a", "c").difference.interval.mean == pytest.approx(0.333 - 0.5, abs=1e-3)


def test_other_victims_are_not_paired(made: Folder) -> None:
    figures = [0.1, 0.9, 0.4, 0.6]
    made.row("a", 0, {"dlg": figures}, floors=[0.0, 0.1, 0.0, 0.1])
    made.row("b", 0, {"dlg": [v + 0.05 for v in figures]}, floors=[0.0, 0.1, 0.0, 0.1])
    made.row("c", 0, {"dlg": [v + 0.05 for v in figures]}, floors=[0.05] * 3 + [0.1])
    assert made.compared("a", "b").difference.p < 0.2
    assert made.compared("a", "c").difference.p > 0.5


def test_rows_are_named_by_as_many_settings_as_tell_them_apart(made: Folder) -> None:
    made.row("none", 0, {"dlg": [0.9, 0.9]})
    made.row("spm", 0, {"dlg": [0.5, 0.5]}, epsilon=1.0, clip=[1, 2], variant="printed")
    made.row("spm", 0, {"dlg": [0.4, 0.5]}, epsilon=10000.0, clip=[1, 2], variant="printed")
    made.row("laplace", 0, {"dlg": [0.4, 0.5]}, dataset="photos")
    for text in ("spm(epsilon=1e+04, clip=[1, 2], variant=printed)", "spm:epsilon=1e4,clip=[1,2]",
                 "spm(epsilon=10000)"):  # fmt: skip
        assert made.compared("none", text).second.settings["epsilon"] == 10000.0
    for one, two, problem in (
        ("none", "spm", r"'spm' fits 2 rows .*, spm\(epsilon=1, clip=\[1, 2\], variant=printed"),
        ("none", "spmm", "Unknown row 'spmm'. Did you mean 'spm'?"),
        ("none", "spm:epsilon=3", r"Unknown row 'spm:epsilon=3'\. .*Known: spm\(epsilon=1,"),
        ("none", "none", "are the same row, none"),
        ("none", "laplace", "no table holds both 'none' and 'laplace'"),
    ):
        with pytest.raises(ValueError, match=problem):
            made.compared(one, two)


def shown_marks(made: Folder) -> dict[str, str]:
    return {r.defense: r.marks.text for r in leaderboard.rows(made.done())}


def test_marks_say_which_rows_the_test_does_not_separate(made: Folder) -> None:
    """a and b differ less than victims do, c from both, and d hardly from no defense."""
    rng = numpy_generator(0, "tied")
    means = {"none": 0.85, "d": 0.84, "c": 0.6, "b": 0.21, "a": 0.2}
    for seed in (0, 1, 2):
        for defense, leak in means.items():
            made.row(defense, seed, {"dlg": (leak + rng.normal(0, 0.05, size=8)).tolist()})
    assert shown_marks(made) == {"a": "*", "b": "*", "c": "", "d": "=", "none": ""}


def test_compare_agrees_with_the_marks_of_every_row(made: Folder) -> None:
    rng = numpy_generator(0, "agree")
    for seed in (0, 1, 2):
        for place in range(8):
            figures = (0.1 + 0.07 * place + rng.normal(0, 0.12, size=6)).clip(0, 1).tolist()
            name, setting = ("none", {}) if place == 7 else ("spm", {"epsilon": float(place)})
            made.row(name, seed, {"dlg": figures}, floors=[0.0] * 6, **setting)
    rows = leaderboard.rows(made.done())
    best, bare = rows[0], next(r for r in rows if r.defense == "none")
    for row in rows:
        if row not in (best, bare):
            assert row.marks.best != made.compared(best.setting, row.setting).difference.separated
        if row is not bare:
            compared = made.compared(row.setting, "none")
            less = compared.difference.separated and compared.difference.interval.mean < 0
            assert row.marks.undefended != less


def test_trainings_that_waver_do_not_separate_rows(made: Folder) -> None:
    for seed, gap in ((0, 0.3), (1, 0.02), (2, -0.05)):
        made.row("a", seed, {"dlg": [0.3] * 8})
        made.row("b", seed, {"dlg": [0.3 + gap] * 8})
    assert shown_marks(made) == {"a": "*", "b": "*"}
    assert made.compared().verdict == "not separated"


def test_leakage_is_of_the_attackers_selection_and_compare_too(made: Folder) -> None:
    """a's best answer by the truth is never selected: it is not trusted to be best, and b, the only
    one that is, has nothing to be compared with."""
    low, high, middle = [0.2] * 8, [0.9] * 8, [0.5 + i / 100 for i in range(8)]
    made.row("a", 0, {"dlg": (low, [1.0] * 8), "ridge": (high, [2.0] * 8)}, floors=[0.0] * 8)
    made.row("b", 0, {"dlg": (middle, [1.0] * 8), "ridge": (low, [2.0] * 8)}, floors=[0.0] * 8)
    first, second = leaderboard.rows(made.done())
    assert (first.defense, first.marks.best, second.marks.best) == ("a", False, False)
    assert first.choice is not None
    assert first.worst is not None
    assert (first.choice.attack, first.choice.interval.mean) == ("dlg", pytest.approx(0.2))
    assert (first.worst.attack, first.worst.interval.mean) == ("ridge", pytest.approx(0.9))
    assert not any(f.code == FlagCode.BY_BOUND for f in first.flags)
    assert means_of(made.compared()) == pytest.approx((0.2, 0.535))
    made.row("c", 0, {"dlg": low, "ridge": high}, floors=[0.0] * 8)
    assert means_of(made.compared("a", "c")) == pytest.approx((0.2, 0.9))
    (last,) = [r for r in leaderboard.rows(made.folder) if r.defense == "c"]
    assert [f.code for f in last.flags] == [FlagCode.BY_BOUND]


def test_a_table_whose_undefended_row_leaks_nothing_marks_nothing(made: Folder) -> None:
    floors = [0.2] * 8
    made.row("none", 0, {"dlg": [0.35 + i / 1000 for i in range(8)]}, floors=floors)
    made.row("spm", 0, {"dlg": [0.21] * 8}, floors=floors)
    for row in leaderboard.rows(made.done()):
        assert row.marks.text == ""
        (flag,) = [f for f in row.flags if f.code == FlagCode.CONTROL_FAILED]
        assert sentence(flag).startswith("attacks do not work here without a defense (leak 0.19)")
    made.row("none", 1, {"dlg": [0.9] * 8}, floors=floors)
    assert any(r.marks.text for r in leaderboard.rows(made.done()))


# --- the command ------------------------------------------------------------------------------


def compare(*arguments: str, columns: int = 80) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": str(columns)})
    return result.exit_code, result.stdout + result.stderr


def test_the_command_prints_within_80_columns_and_as_strict_json(made: Folder) -> None:
    rng = numpy_generator(0, "printed")
    for seed in (0, 1, 2):
        for name, leak in (("none", 0.9), ("spm", 0.5)):
            values = (leak + rng.normal(0, 0.02, size=8)).tolist()
            given_settings: dict[str, Any] = {} if name == "none" else {"epsilon": 1.5}
            attacks = {"dlg": values, "ilrg": {"lnacc": values}}
            made.row(name, seed, attacks, **given_settings)
    out = str(made.done())
    code, text = compare(out, "none", "spm")
    assert code == 0, text
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "second spm(epsilon=1.5): leakage 0." in flat
    assert "8 victims" not in flat
    assert "victims 8 in each of 3 seeds" in flat
    assert "p < 0.001 (adjusted for 1 comparisons; alone < 0.001)" in flat
    assert "verdict separated" in flat
    code, text = compare(out, "none", "spm", "--json")
    assert code == 0, text
    (document,) = json.loads(text)
    assert document["title"] == "fedavg of 10 clients · digits · mlp_spm · final round"
    assert len(document["seed_means"]) == 3
    assert "NaN" not in text


MISSING_ROW = "compare takes two rows, A and B: leakbench report DIR --details lists them."


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), MISSING_ROW),
        (("a",), MISSING_ROW),
        (("a", "b", "--checkpoint=finale"), "Unknown checkpoint 'finale'. Did you mean 'final'?"),
    ],
)
def test_bad_input_ends_with_one_sentence(
    arguments: tuple[str, ...], problem: str, made: Folder
) -> None:
    made.row("a", 0, {"dlg": [0.1, 0.2]})
    code, text = compare(str(made.done()), *arguments, columns=300)
    assert code == 2
    assert problem in text


def test_a_row_without_a_common_seed_is_not_said_to_be_tied(made: Folder) -> None:
    made.row("a", 0, {"dlg": [0.1] * 8}, floors=[0.0] * 8)
    made.row("b", 1, {"dlg": [0.9] * 8}, floors=[0.0] * 8)
    for seed in (0, 1):
        made.row("none", seed, {"dlg": [0.95] * 8}, floors=[0.0] * 8)
    assert shown_marks(made) == {"a": "*", "b": "", "none": ""}
