"""What a user can mend ends in one sentence and exit code 2; a bug shows its traceback."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bench.cli import app
from bench.errors import UserError
from bench.report import accounts
from bench.toolkit.memory import gpu_share
from bench.toolkit.processes import GPU_SHARE
from tests.conftest import TINY

PLUGIN = '''
from bench.api import Defense


class Picky(Defense):
    """Refuses some of its settings, and breaks on others."""

    def __init__(self, *, share: float = 0.5) -> None:
        if share > 1:
            raise ValueError(f"share must be <= 1, got {share}.")
        if share < 0:
            raise RuntimeError("a bug of the plugin")

    def guarantee(self, facts):
        raise ValueError(f"rounds must be even, got {facts.rounds}.")
'''


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"LEAKBENCH_DATA": ""})


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "picky.py").write_text(PLUGIN)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "broken.toml").write_text("name = ")
    (tmp_path / "empty").mkdir()
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "run.json").write_text("{")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "run.json").write_text("{}")
    return tmp_path


SET = "run HERE/tiny.toml --jobs 0 --out HERE/out --set"
OVER = "ledger ms_pafl --set epsilon=1 --over"
SITE = "site --out HERE/site"
SWEEP = "sweep HERE/tiny.toml --out HERE/out --over"
BAD = [
    ("run quik", "Did you mean 'quick'"),
    ("run HERE/broken.toml", "is no valid TOML"),
    ("run HERE/empty", "no such suite file"),
    ("plan none.toml", "no such suite file"),
    (f"{SET} budget=0", "got 0"),
    (f"{SET} seeds=[0,0,0]", "0 is named twice in seeds"),
    (f"{SET} defenses=[{{name='none'}},{{name='none'}}]", "none is named twice in the defenses"),
    (f"{SET} colour=red", "unknown key 'colour'"),
    (f"{SET} protocol.lr=-1", "protocol.lr: input should be greater"),
    (f"{SET} protocol.clients=2000", "training samples"),
    (f"{SET} tasks.0.protocol.lr=-1", "lr: input should be greater"),
    (f"{SET} tasks.0.protocol.lrate=1", "key 'tasks.0.protocol.lrate'"),
    (f"{SET} threats.0.victims=9", "observes 9 victims"),
    (f'{SET} checkpoints=["round-7"]', "checkpoint round-7 lies beyond the 1 rounds of digits"),
    (f'{SET} checkpoints=["round-0"]', "init, final or round-N (after N rounds), got 'round-0'"),
    (f'{SET} checkpoints=["round-1"] --set threats.0.rounds=3',
     "observes 3 rounds, but checkpoint round-1 has 2 states"),
    (f"{SET} tasks.0.dataset=digit", "Did you mean 'digits'"),
    (f"{SET} tasks.0.dataset=mnist", "--data-dir"),
    (f"{SET} tasks.0.dataset_settings.size=big", "setting size of dataset digits"),
    (f"{SET} tasks.0.dataset_settings.size=8", ">= 11"),
    (f"{SET} tasks.0.model=lenett", "Did you mean 'lenet'"),
    (f"{SET} tasks.0.model=resnet18 --set tasks.0.model_settings.width=true",
     "setting width of model resnet18"),
    (f"{SET} tasks.0.dataset=breast_cancer --set tasks.0.model=lenet", "takes images"),
    (f"{SET} defenses.0.name=gausian", "Did you mean 'gaussian'"),
    ("run quick --set attacks.0.settings.restarts=-1", "restarts must be >= 0"),
    ("run quick --set attacks.0.settings.start=black", "setting start of attack"),
    ("run quick --only defense=duchi", "Unknown defense 'duchi' in"),
    ("run quick --device tpu", "device must be auto, cpu or cuda, got 'tpu'"),
    ("run quick --data-dir /no/such/folder", "no such data folder"),
    ("run quick --plugin /no/plugin.py", "no such plugin file"),
    ("run HERE/tiny.toml --out HERE/tiny.toml/out", "cannot write results to"),
    ("run quick --shard 3", "--shard takes i/n, as 1/8, got '3'"),
    ("run quick --shard 0/3", "shard 0/3 does not exist"),
    ("plan quick --shard 90/99", "shard 90/99 is empty: the plan has 14 trainings"),
    ("plan HERE/tiny.toml --costs HERE/empty", "holds no records"),
    (f"{SWEEP} threat.rounds", "--over takes key=value,value,..., at least two values"),
    (f"{SWEEP} threat.rounds=3", "at least two values, got 'threat.rounds=3'"),
    (f"{SWEEP} threat.rounds=1,3,3", "--over threat.rounds names a value twice, got '1,3,3'"),
    (f"{SWEEP} threat.round=1,2", "unknown key 'threats.0.round'"),
    (f"{SWEEP} threat.rounds=1,50", "observes 50 rounds, but checkpoint final has 2 states"),
    (f"{SWEEP} threat.rounds=1,2 --figures pgn", "png"),
    *((f"tune HERE/tiny.toml --loss={loss}",
       f"--loss takes different points of accuracy, as 1,5,10, got '{loss}'.")
      for loss in ("", "a", "1,1", "-1", "101")),
    ("list defences", "Did you mean 'defenses'"),
    ("ledger spm", "needs the setting(s) epsilon"),
    ("ledger spm --set epsilon=-1", "epsilon must lie in (0, 700]"),
    ("ledger spm --set epsilon=much", "setting epsilon of defense 'spm'"),
    ("ledger spm --set epsilon", "--set takes key=value"),
    ("ledger spm --set epsilon=1 --facts rounds=1.5", "input should be a valid integer"),
    ("ledger spm --set epsilon=1 --facts round=1", "Did you mean 'rounds'"),
    ("ledger picky --plugin HERE/picky.py --set share=2.0", "must be <= 1"),
    ("ledger picky --plugin HERE/picky.py --facts parameters=1,rounds=3",
     "picky has no ledger at these facts: rounds must be even, got 3."),
    ("ledger none --facts rounds=10", "needs the fact(s) parameters"),
    ("ledger none --facts parameters=0", "must be >= 1"),
    ("ledger dp_sl --set clip=1e200 --set smashed_std=1 --set label_std=1",
     "cannot be computed in floating point with clip=1e+200"),
    ("ledger none --facts parameters=10000000000000000", "parameters"),
    ("ledger dp_sgd --set noise_multiplier=inf --set clip_norm=1", "noise_multiplier"),
    ("ledger gaussian --set noise_multiplier=1 --set clip_norm=inf", "clip_norm"),
    (f"{OVER} chek_in=0.1,1", "Unknown setting of ms_pafl or fact 'chek_in'. Did you mean"),
    (f"{OVER} delta=0.1,0.2", "write settings.delta or facts.delta"),
    (f"{OVER} rounds=10", "at least two values, got 'rounds=10'"),
    (f"{OVER} rounds", "at least two values, got 'rounds'"),
    (f"{OVER} rounds=1,1,2", "--over rounds names a value twice, got '1,1,2'"),
    (f"{OVER} rounds=1,2 --over rounds=3,4", "--over rounds is given twice"),
    (f"{OVER} rounds=1,many",
     "fact rounds of the ledger: input should be a valid integer, got 'many'"),
    (f"{OVER} rounds=1,0", "fact rounds must be >= 1, got 0"),
    (f"{OVER} check_in=0.1,2", "check_in must lie in [0, 1]"),
    ("audit none --draws 1", "draws must be >= 100"),
    ("audit spmm", "Did you mean 'spm'"),
    ("audit spm --set epsilon=-1", "epsilon must"),
    ("report /no/such/folder", "is no result folder"),
    ("report HERE/empty", "run.json"),
    ("report HERE/spoilt", "run.json"),
    pytest.param("check HERE/none.py", "HERE/none.py", marks=pytest.mark.slow),  # a process
    *((f"check spm --timeout {limit}", "--timeout must be between 1 and 1e6 seconds")
      for limit in ("0", "nan", "inf", "-1", "1e300")),
    (f"{SITE} HERE/absent", "no such folder of results"),
    (f"{SITE} HERE/empty", "holds no result folder of leakbench (no run.json)"),
    (f"{SITE} HERE/spoilt", "is no readable JSON"),
    (f"{SITE} HERE/hollow", "must hold a suite and its trainings"),
    ("merge HERE/absent --out HERE/merged", "is no result folder"),
    ("verify /no/such/folder", "no such folder"),
    ("report HERE/empty --format htm", "Did you mean 'html'"),
    ("new defence my_defense --dir HERE/empty", "Did you mean 'defense'"),
    ("new defense spm --dir HERE/empty", "name of a known defense"),
    ("new defense ilrg --dir HERE/empty", "name of a known attack"),
    ("new defense class --dir HERE/empty", "no word of Python"),
    ("new defense MyDefense --dir HERE/empty", "snake_case"),
    ("new defense my-defense --dir HERE/empty", "snake_case"),
    ("new defense ../my_defense --dir HERE/empty", "snake_case"),
    ("new defense 2nd --dir HERE/empty", "snake_case"),
    ("new attack random --dir HERE/empty", "name of a Python package"),
    ("new attack torch --dir HERE/empty", "name of a Python package"),
    ("new attack a_b --dir HERE/empty", "would come back as"),
]  # fmt: skip
"""Commands with HERE for the test's folder, and words of the sentence."""


@pytest.mark.parametrize(("command", "sentence"), BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    command: str, sentence: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    before = sorted(here.rglob("*"))
    done = call(*command.replace("HERE", str(here)).split())
    *runs, line = done.stderr.replace(str(here), "HERE").splitlines()
    assert done.exit_code == 2, done.output
    assert runs == ["Runs HERE/picky.py with your rights."] * ("--plugin HERE" in command)
    assert line.startswith("leakbench: ")
    assert sentence in line
    assert not done.stdout
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("share", ["x", "0", "1.5"])
def test_a_share_of_a_gpu_is_a_number_up_to_1(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_SHARE, share)
    with pytest.raises(UserError, match=r"must be a number in \(0, 1\]"):
        gpu_share()


def test_a_bug_keeps_its_traceback_and_exits_with_1(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(accounts, "account", broken)
    done = call("ledger", "none")
    assert done.exit_code == 1
    assert type(done.exception) is ValueError
    plugin = call("ledger", "picky", "--plugin", str(here / "picky.py"), "--set", "share=-1.0")
    assert plugin.exit_code == 1
    assert type(plugin.exception) is RuntimeError
