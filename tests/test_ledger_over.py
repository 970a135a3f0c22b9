"""The ledger over a setting or a fact: `leakbench ledger --over`, and the function behind it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.registry import Registry
from bench.report.accounts import Account, accounts_over
from tests.docs_modules import formulas

PAPER = {"parameters": 14, "clients": 100, "records": 325, "batch": 13, "local_steps": 5}
"""MS-PAFL's experiment: N = 100, Q = 5, and q = 13 * 5 / 325 = .2."""
FACTS = ",".join(f"{k}={v}" for k, v in PAPER.items())


def ms_pafl(registry: Registry, **over: list[Any]) -> list[Account]:
    return accounts_over(registry, "ms_pafl", settings={"epsilon": 1.0}, facts=PAPER, over=over)


def column(accounts: list[Account], head: str) -> list[float | None]:
    return list(formulas.columns(accounts)[head])


def leakbench(*arguments: str, columns: int = 80) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["ledger", *arguments], env={"COLUMNS": str(columns)})
    return done.exit_code, done.stdout + done.stderr


def test_a_table_has_the_published_formulas_at_every_place(registry: Registry) -> None:
    """CLAIMS: Corollary 1 is .0480 at p = .1, q = .2 and 2 q epsilon at p = 1 but for delta';
    Theorem 3 with c_0 = .494 gives .781 and 1.105 at p = 1 and 50 and 100 rounds, Theorem 4 36.84
    at 100."""
    chances = ms_pafl(registry, check_in=[0.1, 1])
    assert column(chances, "Eq. 20 (Corollary 1)") == pytest.approx([0.0480116, 0.4], rel=1e-5)
    assert column(chances, "Eq. 20 (Corollary 1) delta")[0] == pytest.approx(9.45e-6, rel=1e-3)
    runs = ms_pafl(registry, check_in=[1], rounds=[50, 100])
    assert column(runs, "Eq. 22 (Theorem 3)") == pytest.approx([0.781, 1.105], rel=1e-3)
    assert column(runs, "Eq. 23 (Theorem 4)")[1] == pytest.approx(36.84, rel=1e-3)
    assert column(runs, "claimed epsilon") == column(runs, "Eq. 23 (Theorem 4)")
    assert column(runs, "proven epsilon") == column(runs, "Eq. 22 (Theorem 3) really")


def test_several_keys_make_every_combination_the_last_running_fastest(registry: Registry) -> None:
    table = ms_pafl(registry, sampling=["wor", "wr"], batch=[1, 5, 13])
    places = [{"sampling": s, "batch": b} for s in ("wor", "wr") for b in (1, 5, 13)]
    assert [account.place for account in table] == places
    totals = column(table, "Eq. 23 (Theorem 4)")
    assert totals[:3] == sorted(totals[:3], key=float)  # type: ignore[arg-type]
    # Remark 2: q with replacement is never above that without, and is it where a round draws once.
    assert all(wr < wor for wor, wr in zip(totals[:3], totals[3:], strict=True))  # type: ignore[operator]


def test_each_line_is_what_the_command_says_at_that_place() -> None:
    given = ("ms_pafl", "--set", "epsilon=0.5", "--json")
    lines = json.loads(leakbench(*given, "--facts", FACTS, "--over", "rounds=1,10")[1])["lines"]
    assert [line.pop("over") for line in lines] == [{"rounds": 1}, {"rounds": 10}]
    for rounds, line in zip((1, 10), lines, strict=True):
        alone = json.loads(leakbench(*given, "--facts", f"{FACTS},rounds={rounds}")[1])
        assert line | {"defense": "ms_pafl"} == alone


def test_a_terminal_of_80_columns_shows_all_numbers() -> None:
    over = ("--over", "epsilon=0.25,0.5,1", "--over", "check_in=0.1,0.5")
    code, text = leakbench("ms_pafl", "--facts", FACTS, *over, columns=80)
    assert code == 0
    shown = text.split("claimed epsilon:")[0].splitlines()
    assert max(map(len, shown)) <= 80
    lines = json.loads(leakbench("ms_pafl", "--facts", FACTS, *over, "--json")[1])["lines"]
    assert list(lines[0]["over"]) == ["epsilon", "check_in"]
    assert len(lines) == 6
    words = text.split()
    for line in lines:
        for name in ("eps_claimed", "claim_delta", "eps_record"):
            assert f"{float(line[name]):.4g}" in words
    assert "claimed epsilon: the paper's formula, per record" in text


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no /dev/full here")
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_output_on_a_full_device_ends_with_one_sentence(json: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", "from bench.cli import main; main()", "ledger", "none", *json]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "leakbench: cannot write (No space left on device).\n"


def test_what_no_place_has_is_no_column(registry: Registry) -> None:
    heads = list(formulas.columns(ms_pafl(registry, rounds=[1, 2])))
    assert heads[:4] == ["rounds", "claimed epsilon", "claimed delta", "proven epsilon"]
    assert "Theorem 2 really" not in heads
    code, text = leakbench("none", "--over", "rounds=1,2")
    assert code == 0
    assert text.split()[:7] == ["proven", "epsilon", "rounds", "1", "inf", "2", "inf"]
    assert "claimed" not in text


def test_a_formula_whose_name_has_the_fact_in_it_stays_one_column(registry: Registry) -> None:
    accounts = accounts_over(
        registry,
        "selective_shield",
        settings={"noise_multiplier": 2.0},
        facts={"parameters": 1},
        over={"clients": [2, 9]},
    )
    assert not formulas.columns(accounts).isna().any(axis=None)


def test_a_name_of_a_setting_and_a_fact_says_which(registry: Registry) -> None:
    facts = ms_pafl(registry, **{"facts.delta": [1e-6, 1e-4]})
    assert [a.entry.delta for a in facts] == [1e-6, 1e-4]
    settings = ms_pafl(registry, **{"settings.delta": [1e-6, 1e-4]})
    assert [a.entry.delta for a in settings] == [1e-5, 1e-5]
    first, second = column(settings, "Eq. 6 (Lemma 1)")
    assert first != second


def test_members_of_a_composed_defense_are_varied_by_their_names(registry: Registry) -> None:
    accounts = accounts_over(
        registry,
        "spm+selective_shield",
        settings={"spm.epsilon": 1.0},
        facts={"parameters": 10},
        over={"selective_shield.noise_multiplier": [1.0, 2.0]},
    )
    assert len(accounts) == 2
