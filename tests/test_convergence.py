"""Whether an attack had converged: measured at twice its budget where nothing defends."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from skimage.metrics import structural_similarity

from bench.contract.compose import Composed
from bench.harness.store import Store
from bench.records import Run as WholeRun
from bench.records import read_json, to_json
from bench.registry import Registry
from bench.report import leaderboard, terminal
from bench.report.frames import to_csv
from bench.report.text import markdown
from tests.board import board
from tests.conftest import Run

# --- convergence ------------------------------------------------------------------------------

SPENDERS = """
import torch
from bench.contract.attack import Attack, Reconstruction
from bench.contract.defense import Defense

def exact(seen):
    "The sample [V, 1, ...] behind one gradient of a first linear layer that has a bias."
    sent, _ = seen.stack(seen.upload_kind(), seen.clients)
    rows, bias = sent["hidden1.linear.weight"], sent["hidden1.linear.bias"]
    victims, best = torch.arange(len(bias)), bias.abs().argmax(dim=1)
    return (rows[victims, best] / bias[victims, best, None]).view(-1, 1, 1, 16, 16)

class Slow(Attack):
    "Half-way from gray to the sample at a budget of 5, there at 10."
    def run(self, seen, ctx):
        images = 0.5 + (exact(seen) - 0.5) * min(1.0, ctx.budget / 10)
        return Reconstruction(images=images, evaluations=7 * ctx.budget)

class Quick(Attack):
    "As near at any budget."
    def run(self, seen, ctx):
        images = 0.5 + (exact(seen) - 0.5) / 2
        return Reconstruction(images=images, evaluations=ctx.budget)

class SlowIfUndefended(Slow):
    "Slow, and fails where there is a defense."
    def run(self, seen, ctx):
        if seen.known["defense"]["name"] != "none":
            raise RuntimeError("boom")
        return super().run(seen, ctx)

class SlowOrNotAtAll(Slow):
    "Slow, and does not apply where there is a defense."
    def applies(self, seen):
        return None if seen.known["defense"]["name"] == "none" else "there is a defense"

class Draws(Attack):
    "Random images, and marks on all that it got."
    def run(self, seen, ctx):
        assert not hasattr(self, "ran") and "ran" not in seen.known
        self.ran = seen.known["ran"] = True
        assert float(ctx.aux_x.min()) >= 0
        ctx.aux_x.sub_(2)
        images = torch.rand(len(seen.clients), 1, *ctx.network.shape, generator=ctx.rng)
        return Reconstruction(images=images, evaluations=1)

class Breaks(Attack):
    "Cannot make use of a budget of 10."
    def run(self, seen, ctx):
        if ctx.budget == 10:
            raise RuntimeError("too much")
        return Reconstruction(images=exact(seen) / 2, evaluations=9)

class AlsoOpen(Defense):
    "A second undefended protocol."
    is_reference = True
"""

Cell = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]


@pytest.fixture
def spenders(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "spenders.py"
    path.write_text(SPENDERS)
    return (path,)


def listed(*attacks: str) -> str:
    return "".join(f'\n[[attacks]]\nname = "{n}"\n' for n in attacks)


def each_cell(store: Store, act: Cell) -> None:
    """act(training, cell, record) on every attack record, which is then written back."""
    for training in read_json(store.folder / "run.json")["trainings"]:
        for cell in training["cells"]:
            path = store.path("attack", cell["key"])
            record = json.loads(path.read_text())
            act(training, cell, record)
            path.write_text(to_json(record))


def codes(folder: Path) -> list[str]:
    """The letters at the end of each row."""
    table, *_ = terminal.boards(leaderboard.rows(folder))
    return [str(cell) for cell in table.columns[-1].cells]


@pytest.mark.slow
def test_convergence_is_the_ssim_gained_from_twice_the_budget_where_nothing_defends(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    seeds = {"version = 1": "version = 1\nseeds = [0, 1]", "[0.5, 2.0]": "2.0"}
    suite = tiny(append=listed("slow", "quick", "draws"), **seeds)
    only = {"checkpoint": "init"}
    store, report = run(suite, plugins=spenders, only=only)
    assert report.failures == []
    doubled: dict[tuple[str, str, int], Any] = {}

    def collect(training: dict[str, Any], cell: dict[str, Any], record: dict[str, Any]) -> None:
        doubled[training["defense"], cell["label"], training["seed"]] = record["doubled"]
        if cell["label"] == "draws" and record["doubled"]:  # the same draws, untouched inputs
            assert record["doubled"]["values"] == record["values"]
        assert record["budget"] == 5
        record["floors"]["ssim"] = [0.0] * record["victims"]
        if cell["label"] == "slow":
            assert record["gradient_evaluations"] == 35

    each_cell(store, collect)
    ran_twice = {k[:2] for k, v in doubled.items() if v is not None}
    assert ran_twice == {("none", "slow"), ("none", "quick"), ("none", "draws")}
    gains = []
    for training in read_json(store.folder / "run.json")["trainings"]:
        if training["defense"] != "none":
            continue
        again = doubled["none", "slow", training["seed"]]
        assert (again["budget"], again["gradient_evaluations"]) == (10, 70)
        assert again["seconds"] > 0
        truth = load_file(store.artifacts(training["key"]) / "init-server-truth.safetensors")["x"]
        assert again["values"]["ssim"] == pytest.approx([1.0] * len(truth), abs=1e-3)
        for x in truth.double().numpy()[:, 0, 0]:
            half_way = 0.5 + (x - 0.5) / 2
            gains.append(1 - structural_similarity(
                x, half_way, data_range=1.0, gaussian_weights=True, sigma=1.5,
                use_sample_covariance=False,
            ))  # fmt: skip
    expected = sum(gains) / 4
    assert len(gains) == 4
    assert expected > 0.02
    rows = board(store.folder)
    assert {r["defense"] for r in rows} == {"none", "spm"}
    for row in rows:
        slow, quick = row["attacks"]["slow"], row["attacks"]["quick"]
        assert slow["convergence"] == {
            "gain": pytest.approx(expected, abs=1e-3), "budget": 5, "converged": False,
        }  # fmt: skip
        assert quick["convergence"] == {
            "gain": pytest.approx(0, abs=1e-9), "budget": 5, "converged": True,
        }  # fmt: skip
        gain = slow["convergence"]["gain"]
        flag = f"slow cut short: +{gain:.2f} SSIM on the undefended row at twice its budget"
        assert [f for f in row["flags"] if "cut short" in f] == [flag]
    undefended = next(r for r in rows if r["defense"] == "none")
    assert undefended["attacks"]["slow"]["ssim"]["mean"] == pytest.approx(1 - expected, abs=1e-3)
    assert all("B" in letters for letters in codes(store.folder))
    assert "B: an attack was cut short" in terminal.legend(leaderboard.rows(store.folder))
    shown = markdown(leaderboard.rows(store.folder), WholeRun.read(store.folder))
    assert "slow cut short" in shown
    for line in csv.DictReader(to_csv(leaderboard.rows(store.folder)).splitlines()):
        told = line["gain_at_twice_budget"]
        if line["attack"] in ("slow", "quick", "draws"):
            wanted = expected if line["attack"] == "slow" else 0
            assert float(told) == pytest.approx(wanted, abs=1e-3)
        else:
            assert told == ""
    run_file = store.folder / "run.json"
    whole = read_json(run_file)
    defended = [t for t in whole["trainings"] if t["defense"] != "none"]
    run_file.write_text(to_json(whole | {"trainings": defended}))
    entries = [r["attacks"]["slow"] for r in board(store.folder)]
    assert [(e["status"], e["convergence"]) for e in entries] == [("done", None)]


def test_entries_without_figures_are_not_flagged_as_cut_short(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    names = ("slow_if_undefended", "slow_or_not_at_all", "breaks")
    suite = tiny(append=listed(*names), **{"[0.5, 2.0]": "2.0"})
    only = {"checkpoint": "init", "attack": ",".join(names)}
    store, report = run(suite, plugins=spenders, only=only)
    rows = board(store.folder)
    for row in rows:
        cut = [f.split()[0] for f in row["flags"] if "cut short" in f]
        defended = row["defense"] != "none"
        assert cut == ([] if defended else ["slow_if_undefended", "slow_or_not_at_all"])
        assert not row["attacks"]["slow_or_not_at_all"]["convergence"]["converged"]
        assert row["attacks"]["breaks"]["convergence"] is None
        assert row["attacks"]["breaks"]["status"] == ("done" if defended else "failed")
    assert "failed: RuntimeError: too much" in [reason for _, reason in report.failures]


@pytest.mark.slow
def test_convergence_is_taken_from_the_first_reference_of_the_same_network_and_checkpoint(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    suite = tiny(
        append=listed("quick")
        + '\n[[tasks]]\ndataset = "digits"\nmodel = "mlp_spm"\nprotocol = { lr = 0.2 }\n'
        + '\n[[defenses]]\nname = "also_open"\n',
        **{"version = 1": "version = 1\nseeds = [0, 1]"},
    )
    store, report = run(suite, plugins=spenders, only={"attack": "quick"})
    assert report.failures == []
    gains = {
        (0.1, "init"): ([0.00, 0.04], [0.07, 0.05]),  # 0.04 over both victims and both seeds
        (0.1, "final"): ([0.03, 0.01], [0.01, 0.01]),
        (0.2, "init"): ([-0.3, -0.1], [0.0, 0.0]),
    }

    def invent(training: dict[str, Any], cell: dict[str, Any], record: dict[str, Any]) -> None:
        reference = training["defense"] in ("none", "also_open")
        assert (record["doubled"] is not None) == reference
        record["floors"]["ssim"] = [0.0] * record["victims"]
        if not reference:
            return
        where = (training["protocol"]["lr"], cell["checkpoint"])
        if where not in gains:  # as on data without SSIM
            del record["values"]["ssim"], record["doubled"]["values"]["ssim"]
            return
        gain = gains[where][training["seed"]] if training["defense"] == "none" else [0.5, 0.5]
        record["values"]["ssim"] = [0.4, 0.3]
        record["doubled"]["values"]["ssim"] = [0.4 + gain[0], 0.3 + gain[1]]

    each_cell(store, invent)
    rows = board(store.folder)
    assert len(rows) == 2 * 2 * 4
    expected = {(0.1, "init"): 0.04, (0.1, "final"): 0.015, (0.2, "init"): -0.1}
    for row in rows:
        where = (row["protocol_settings"]["lr"], row["checkpoint"])
        convergence = row["attacks"]["quick"]["convergence"]
        if where in expected:
            assert convergence["gain"] == pytest.approx(expected[where])
            assert convergence["converged"] == (where != (0.1, "init"))
        else:
            assert convergence is None
        cut = [f for f in row["flags"] if "cut short" in f]
        flag = "quick cut short: +0.04 SSIM on the undefended row at twice its budget"
        assert cut == ([flag] if where == (0.1, "init") else [])


def test_a_defense_composed_of_references_is_none_itself(registry: Registry) -> None:
    undefended = registry.defense("none", {})
    assert undefended.is_reference
    assert not Composed({"none": undefended}).is_reference
    assert not registry.defense("none+spm", {"spm.epsilon": 1.0}).is_reference
    for name in registry.names("defense"):
        assert registry.get("defense", name).cls.is_reference == (name == "none")  # type: ignore[union-attr]
