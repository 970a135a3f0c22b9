"""Two rows on the same victims: what is compared, and the command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import bench
from bench.cli.comparing import compare as command
from bench.harness.store import Store
from bench.protocols.settings import ProtocolSettings, TaskSettings, ThreatSettings
from bench.records import (
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
from bench.report import comparison, contenders, leaderboard
from bench.report.explain import sentence
from bench.report.pairs import RowComparison
from bench.seeding import numpy_generator
from bench.suite import AttackSettings, DefenseSettings, Suite
from tests.made_records import attacked, trained

# --- result folders ---------------------------------------------------------------------------

PROTOCOL = ProtocolSettings(name="fedavg", clients=10, local_steps=1)

Values = Mapping[str, Sequence[float]]


class Folder:
    """A result folder written record by record."""

    def __init__(self, folder: Path, *, threats: Sequence[str] = ("server",)) -> None:
        self.folder = folder
        self.threats = tuple(ThreatSettings(name=t, victims=8) for t in threats)
        self.trainings: list[PlannedTraining] = []
        self.attacks: dict[str, AttackSettings] = {}
        self.store = Store(folder)
        self.store.prepare()

    def row(
        self, defense: str, seed: int, attacks: Mapping[str, Any], *, correct: int = 90,
        floors: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
        diverged: str | None = None,
        dataset: str = "digits", **settings: Any,
    ) -> None:  # fmt: skip
        """attacks: name or name@threat -> SSIM per victim, with judged losses beside them where
        they are a pair; values by metric; or a status. floors: per victim, or that by threat."""
        job = TrainJob(
            task=TaskSettings(dataset=dataset, model="mlp_spm"), protocol=PROTOCOL, defense=defense,
            settings=settings, threats=self.threats, checkpoints=("final",), delta=1e-5, seed=seed,
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
            self.store.write("attack", cell, self.record(label, given_values, floor, seed))
        self.trainings.append(PlannedTraining(key=key, job=job, cells=tuple(cells)))
        self.store.write("train", key, trained(correct=correct, diverged=diverged))

    @staticmethod
    def record(label: str, given: Any, floors: Sequence[float] | None, seed: int) -> AttackOutcome:
        if isinstance(given, str):
            return NoResult(status=given, reason="so it is")  # type: ignore[arg-type]
        given, judged = given if isinstance(given, tuple) else (given, None)
        values = given if isinstance(given, dict) else {"ssim": given}
        n = len(next(iter(values.values())))
        floor = list(floors or [seed / 100 + i / 1000 for i in range(n)])
        return attacked(
            values=values,
            victims=n,
            floors={"ssim": floor},
            judged=judged,
            is_floor=label == "prior_only",
        )

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
        return comparison.two_rows(contenders.read(self.done()), one, two, **asked)[0][1]


def test_a_difference_is_the_worst_case_per_victim_of_the_first_minus_that_of_the_second(
    tmp_path: Path,
) -> None:
    made = Folder(tmp_path)
    made.row("a", 0, {"dlg": [0.9, 0.1], "ridge": [0.2, 0.3], "prior_only": [1.0, 1.0]}, correct=80)
    made.row("b", 0, {"dlg": [0.4, 0.1], "ridge": [0.5, 0.1], "prior_only": [1.0, 1.0]}, correct=90)
    found = made.compared()
    assert found.means == pytest.approx((0.6, 0.3))
    assert found.difference.interval.mean == pytest.approx(0.3)
    assert found.accuracy is not None
    assert found.accuracy.mean == pytest.approx(-0.1)
    other = made.compared("b", "a")
    assert other.difference.interval.mean == -found.difference.interval.mean
    assert other.difference.p == found.difference.p
    assert made.compared(attack="ridge").means == pytest.approx((0.25, 0.3))
    assert made.compared(attack="prior_only").difference.interval.mean == 0


def test_a_smaller_error_is_the_larger_leak(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    made.row("a", 0, {"dlg": {"mse": [1.0, 4.0]}, "ridge": {"mse": [2.0, 2.0]}})
    made.row("b", 0, {"dlg": {"mse": [3.0, 3.0]}, "ridge": {"mse": [5.0, 5.0]}})
    found = made.compared()
    assert found.metric == "mse"
    assert found.means == (1.5, 3.0)
    assert found.difference.interval.mean == 1.5


def test_only_seeds_that_both_rows_have_count(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    for seed in (0, 1, 2):
        made.row("a", seed, {"dlg": [0.5 + seed / 10, 0.6]})
    made.row("b", 0, {"dlg": [0.4, 0.4]})
    made.row("b", 2, {"dlg": [0.4, 0.4]}, correct=70)
    found = made.compared()
    assert found.seeds == (0, 2)
    assert found.difference.seed_means == pytest.approx((0.15, 0.25))
    assert found.notes == ("Without seed 1, where one of the two has no figure.",)
    assert found.accuracy is not None
    assert found.accuracy.differences == pytest.approx((0.0, 0.2))


def test_an_attack_that_failed_for_one_row_counts_for_neither_in_that_seed(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    made.row("a", 0, {"dlg": [0.9, 0.9], "ridge": [0.2, 0.3]})
    made.row("a", 1, {"dlg": [0.9, 0.9], "ridge": [0.2, 0.3]})
    made.row("b", 0, {"dlg": "failed", "ridge": [0.1, 0.1]})
    made.row("b", 1, {"dlg": [0.5, 0.5], "ridge": [0.1, 0.1]})
    found = made.compared()
    assert found.difference.seed_means == pytest.approx((0.15, 0.4))
    assert found.notes == ("Without dlg in seed 0, where it gave nothing for one of the two.",)


def test_an_attack_that_is_not_applicable_to_one_row_does_not_threaten_it(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    made.row("a", 0, {"dlg": "not_applicable", "ridge": [0.2, 0.3]})
    made.row("b", 0, {"dlg": [0.9, 0.9], "ridge": [0.1, 0.1]})
    found = made.compared()
    assert found.means == pytest.approx((0.25, 0.9))
    assert found.notes == ()


def test_rows_are_compared_under_the_threat_where_either_leaks_most(tmp_path: Path) -> None:
    made = Folder(tmp_path, threats=("server", "batch"))
    made.row("a", 0, {"dlg": [0.6, 0.6], "ridge@batch": [0.5, 0.3]})
    made.row("b", 0, {"dlg": [0.2, 0.2], "ridge@batch": [0.8, 0.9]})
    for one, two, sign in (("a", "b", -1), ("b", "a", 1)):
        found = made.compared(one, two)
        assert found.threat == "batch"
        assert found.difference.interval.mean == pytest.approx(sign * 0.45)
        assert found.notes == (
            "a leaks most under threat server (ssim 0.6), whose victims are others.",
        )


def test_threats_of_other_floors_are_weighed_by_the_leak_above_them(tmp_path: Path) -> None:
    """Under threat batch the scores are larger, but what looks at nothing has nearly as much."""
    floors = {"server": [0.1] * 8, "batch": [0.4] * 8}
    made = Folder(tmp_path, threats=("server", "batch"))
    made.row("none", 0, {"dlg": [0.9] * 8, "ridge@batch": [0.9] * 8}, floors=floors)
    made.row("a", 0, {"dlg": [0.4] * 8, "ridge@batch": [0.2] * 8}, floors=floors)
    made.row("b", 0, {"dlg": [0.2] * 8, "ridge@batch": [0.42] * 8}, floors=floors)
    made.row("c", 0, {"dlg": [0.05] * 8, "ridge@batch": [0.3] * 8}, floors=floors)
    rows = leaderboard.rows(made.done())
    assert [(r.defense, r.rank, r.ranking and r.ranking.attack) for r in rows] == [
        ("c", 1, "dlg"), ("b", 2, "dlg"), ("a", 3, "dlg"), ("none", 4, "dlg"),
    ]  # fmt: skip
    assert [round(r.leak or 0.0, 3) for r in rows] == [0.0, 0.111, 0.333, 0.889]
    found = made.compared()
    assert found.threat == "server"
    assert found.notes == ()


def test_other_victims_are_refused(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    made.row("a", 0, {"dlg": [0.6, 0.6]}, floors=[0.1, 0.2])
    made.row("b", 0, {"dlg": [0.6, 0.5]}, floors=[0.2, 0.1])
    made.row("c", 0, {"dlg": [0.6, 0.5, 0.4]})
    for other in ("b", "c"):
        with pytest.raises(ValueError, match=r"are not the same samples \(seed 0, threat server"):
            made.compared("a", other)


def test_rows_are_named_by_as_many_settings_as_tell_them_apart(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    made.row("none", 0, {"dlg": [0.9, 0.9]})
    made.row("spm", 0, {"dlg": [0.5, 0.5]}, epsilon=1.0, clip=[1, 2], variant="printed")
    made.row("spm", 0, {"dlg": [0.4, 0.5]}, epsilon=10000.0, clip=[1, 2], variant="printed")
    made.row("laplace", 0, {"dlg": [0.4, 0.5]}, dataset="photos")
    for text in ("spm(epsilon=1e+04, clip=[1, 2], variant=printed)", "spm:epsilon=1e4,clip=[1,2]",
                 "spm(epsilon=10000)"):  # fmt: skip
        assert made.compared("none", text).second.row.settings["epsilon"] == 10000.0
    for one, two, problem in (
        ("none", "spm", r"'spm' fits 2 rows .*, spm\(epsilon=1, clip=\[1, 2\], variant=printed"),
        ("none", "spmm", "Unknown row 'spmm'. Did you mean 'spm'?"),
        ("none", "spm:epsilon=3", r"Unknown row 'spm:epsilon=3'\. .*Known: spm\(epsilon=1,"),
        ("none", "none", "are the same row, none"),
        ("none", "laplace", "no table holds both 'none' and 'laplace'"),
    ):
        with pytest.raises(ValueError, match=problem):
            made.compared(one, two)
    with pytest.raises(ValueError, match=r"Unknown attack 'dgl'\. Did you mean 'dlg'"):
        made.compared("none", "spm:epsilon=1", attack="dgl")
    with pytest.raises(ValueError, match="have no seed in which both have lnacc of dlg"):
        made.compared("none", "spm:epsilon=1", attack="dlg", metric="lnacc")


def test_rows_have_the_ranks_of_the_leaderboard(tmp_path: Path) -> None:
    made = Folder(tmp_path, threats=("server", "batch"))
    rng = numpy_generator(0, "rows")
    for i in range(12):
        for seed in (0, 1):
            attacks: dict[str, Any] = {
                name: rng.uniform(size=4).tolist() for name in ("dlg", "ridge", "idlg@batch")
            }
            if i == 3 and seed == 1:
                attacks |= {"dlg": "failed", "ridge": "not_applicable"}
            made.row("spm", seed, attacks, correct=11 if i == 5 else 80, epsilon=float(i),
                     diverged="it did" if i == 7 else None)  # fmt: skip
    expected = [(r.settings["epsilon"], r.rank) for r in leaderboard.rows(made.done())]
    (table,) = contenders.read(made.folder)
    assert [(c.row.settings["epsilon"], c.rank) for c in table.rows] == expected
    assert sum(c.rank is None for c in table.rows) == 2


def test_a_filter_by_defense_hides_the_others_but_their_ranks_count(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    for defense, leak in (("a", 0.1), ("b", 0.5), ("c", 0.3)):
        for seed in (0, 1):
            made.row(defense, seed, {"dlg": [leak + 0.01 * seed] * 4})
    (table,) = contenders.read(made.done(), only={"defense": "b"})
    assert [(c.row.defense, c.rank) for c in table.rows] == [("b", 3)]
    (table,) = contenders.read(made.folder, only={"seed": "1"})
    assert [(c.row.defense, sorted(c.trainings)) for c in table.rows] == [
        ("a", [1]), ("c", [1]), ("b", [1]),
    ]  # fmt: skip


def shown_ranks(made: Folder) -> list[tuple[str, int | None]]:
    return [(r.defense, r.rank) for r in leaderboard.rows(made.done())]


def test_rows_that_no_test_separates_share_a_rank(tmp_path: Path) -> None:
    """a and b differ less than victims do, c differs from both; ranks count the rows before."""
    made = Folder(tmp_path)
    rng = numpy_generator(0, "tied")
    for seed in (0, 1, 2):
        for defense, leak in (("c", 0.8), ("b", 0.31), ("a", 0.3)):
            made.row(defense, seed, {"dlg": (leak + rng.normal(0, 0.1, size=8)).tolist()})
    assert sorted(shown_ranks(made)) == [("a", 1), ("b", 1), ("c", 3)]


def test_a_row_is_tied_with_the_first_of_its_group_alone(tmp_path: Path) -> None:
    """b is not separated from a nor c from b, but c is from a, so it begins a group."""
    made = Folder(tmp_path)
    noise = numpy_generator(0, "steps").normal(0, 0.1, size=8)
    for defense, leak in (("a", 0.3), ("b", 0.36), ("c", 0.42), ("d", 0.44)):
        made.row(defense, 0, {"dlg": (leak + (defense in "bd") * noise).tolist()})
    pairs = ("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")
    assert [made.compared(*p).verdict == "not separated" for p in pairs] == [
        True, True, False, True,
    ]  # fmt: skip
    assert shown_ranks(made) == [("a", 1), ("b", 1), ("c", 3), ("d", 3)]


def test_trainings_that_waver_do_not_separate_rows(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    for seed, gap in ((0, 0.3), (1, 0.02), (2, -0.05)):
        made.row("a", seed, {"dlg": [0.3] * 8})
        made.row("b", seed, {"dlg": [0.3 + gap] * 8})
    assert shown_ranks(made) == [("a", 1), ("b", 1)]


def test_ranks_follow_the_attackers_choice_and_compare_does_too(tmp_path: Path) -> None:
    """a's best answer by the truth is never chosen; without judged losses it would rank last."""
    made = Folder(tmp_path)
    low, high, middle = [0.2] * 8, [0.9] * 8, [0.5 + i / 100 for i in range(8)]
    made.row("a", 0, {"dlg": (low, [1.0] * 8), "ridge": (high, [2.0] * 8)})
    made.row("b", 0, {"dlg": (middle, [1.0] * 8), "ridge": (low, [2.0] * 8)})
    found = leaderboard.rows(made.done())
    assert [(r.defense, r.rank) for r in found] == [("a", 1), ("b", 2)]
    first = found[0]
    assert first.choice is not None
    assert first.worst is not None
    assert (first.choice.attack, first.choice.interval.mean) == ("dlg", pytest.approx(0.2))
    assert (first.worst.attack, first.worst.interval.mean) == ("ridge", pytest.approx(0.9))
    assert not any(f.code == FlagCode.BY_BOUND for f in first.flags)
    against = made.compared()
    assert against.attack == "attacker's choice"
    assert against.means == pytest.approx((0.2, 0.535))
    made.row("c", 0, {"dlg": low, "ridge": high})
    assert made.compared("a", "c").attack == "upper bound"
    assert made.compared("a", "c").means == pytest.approx((0.9, 0.9))
    (last,) = [r for r in leaderboard.rows(made.folder) if r.defense == "c"]
    assert last.rank == 3
    assert [f.code for f in last.flags] == [FlagCode.BY_BOUND]


def test_a_table_whose_undefended_row_leaks_nothing_ranks_nothing(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    floors = [0.2] * 8
    made.row("none", 0, {"dlg": [0.35 + i / 1000 for i in range(8)]}, floors=floors)
    made.row("spm", 0, {"dlg": [0.21] * 8}, floors=floors)
    for row in leaderboard.rows(made.done()):
        assert row.rank is None
        (flag,) = [f for f in row.flags if f.code == FlagCode.CONTROL_FAILED]
        assert sentence(flag).startswith("attacks do not work here without a defense (leak 0.19)")
    made.row("none", 1, {"dlg": [0.9] * 8}, floors=floors)
    assert all(r.rank for r in leaderboard.rows(made.done()))


def test_p_of_a_pair_is_not_adjusted_for_the_other_rows_of_its_table(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    for i in range(8):
        made.row("spm", 0, {"dlg": [i / 10 + v / 1000 for v in range(8)]}, epsilon=float(i))
    pair = made.compared("spm:epsilon=0", "spm:epsilon=1")
    assert pair.difference.p == pytest.approx(2 / 2**8)
    assert pair.verdict == "separated here"


def test_separated_needs_seeds_that_agree(tmp_path: Path) -> None:
    made = Folder(tmp_path)
    rng = numpy_generator(0, "noise")
    for seed in range(4):
        noise = rng.normal(0, 0.01, size=8)
        made.row("a", seed, {"dlg": (0.5 + noise).tolist()})
        made.row("b", seed, {"dlg": [0.3] * 8})
        made.row("c", seed, {"dlg": (0.3 - 0.15 * (seed > 1) + noise).tolist()})
    found = made.compared("a", "b")
    assert found.verdict == "separated"
    wavering = made.compared("b", "c")
    assert wavering.difference.p < 0.001
    assert wavering.difference.p_seeds is not None
    assert wavering.difference.p_seeds > 0.05
    assert wavering.verdict != "separated"
    share = wavering.difference.variances
    assert share is not None
    assert share.seed_share is not None
    assert share.seed_share > 0.9


def test_sixty_rows_of_three_seeds_take_seconds_and_each_record_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.harness.store.os.fsync", lambda handle: None)
    made = Folder(tmp_path)
    rng = numpy_generator(0, "many")
    for i in range(60):
        for seed in range(3):
            made.row("spm", seed, {"dlg": rng.uniform(size=8).tolist()}, epsilon=float(i))
    made.done()
    read: list[str] = []
    original = Store.read

    def counted(self: Store, kind: Any, key: str) -> dict[str, Any] | None:
        read.append(f"{kind} {key}")
        return original(self, kind, key)

    monkeypatch.setattr(Store, "read", counted)
    began = time.process_time()
    tables = contenders.read(made.folder)
    (pair,) = comparison.two_rows(tables, "spm:epsilon=0", "spm:epsilon=59")
    assert time.process_time() - began < 10
    assert pair[1].seeds == (0, 1, 2)
    assert len(read) == len(set(read)) == 360


# --- the command ------------------------------------------------------------------------------


def compare(*arguments: str, columns: int = 80) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    return result.exit_code, result.stdout + result.stderr


def test_the_command_prints_within_80_columns_and_as_strict_json(tmp_path: Path) -> None:
    made = Folder(tmp_path)
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
    assert "second spm(epsilon=1.5): upper bound SSIM 0." in flat
    assert ": the first leaks more" in flat
    assert "8 victims in each of 3 seeds (0, 1, 2), threat server" in flat
    assert "verdict separated" in flat
    code, text = compare(out, "none", "spm", "--attack", "ilrg", "--json", "--only", "seed=1")
    assert code == 0, text
    (found,) = json.loads(text)
    assert found["table"] == "fedavg of 10 clients · digits · mlp_spm · final round"
    assert (found["metric"], found["seeds"], found["seed_std"]) == ("lnacc", [1], None)
    assert "NaN" not in text


@pytest.mark.slow
def test_rows_of_a_real_run_have_the_same_victims(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite = tiny(
        append='[[attacks]]\nname = "analytic"\n',
        **{"rounds = 1": "rounds = 4", "lr = 0.1": "lr = 0.3",
           "version = 1": "version = 1\nseeds = [0, 1]"},
    )  # fmt: skip
    bench.run(suite, out=tmp_path / "out", jobs=0, progress=False)
    for checkpoint in ("init", "final"):
        tables = contenders.read(tmp_path / "out", checkpoint=checkpoint)
        ((_, pair),) = comparison.two_rows(tables, "none", "spm:epsilon=0.5")
        assert pair.seeds == (0, 1)
        assert pair.difference.interval.mean > 0
        (rows,) = tables
        expected = [r for r in leaderboard.rows(tmp_path / "out") if r.checkpoint == checkpoint]
        assert [(c.row.defense, c.row.settings, c.rank) for c in rows.rows] == [
            (r.defense, r.settings, r.rank) for r in expected
        ]


MISSING_ROW = "compare takes two rows, A and B: leakbench report DIR --details lists them."


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), MISSING_ROW),
        (("a",), MISSING_ROW),
        (("a", "b", "--only", "colour=red"), "Unknown key 'colour' in --only."),
        (("a", "b", "--only", "dataset=mnist"), "Unknown dataset 'mnist'."),
        (("a", "b", "--checkpoint=finale"), "Unknown checkpoint 'finale'. Did you mean 'final'?"),
        (("a", "b", "--metric", "sim"), "Unknown metric 'sim'. Did you mean 'ssim'?"),
    ],
)
def test_bad_input_ends_with_one_sentence(
    arguments: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    made = Folder(tmp_path)
    made.row("a", 0, {"dlg": [0.1, 0.2]})
    code, text = compare(str(made.done()), *arguments, columns=300)
    assert code == 2
    assert problem in text


def test_a_leaderboard_without_records_has_no_victims_to_compare() -> None:
    folder = str(Path(__file__).parents[1] / "results" / "attacks")
    code, text = compare(folder, "none", "spm", columns=300)
    assert code == 2
    assert "comparing needs the records of every victim" in text
