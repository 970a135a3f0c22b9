"""A result folder of three jobs, made by the command line."""

from pathlib import Path

from typer.testing import CliRunner, Result

from bench.cli import app

SUITE = """
name = "tiny"
version = 1
checkpoints = ["init"]
budget = 5
audit = 0
protocol = { name = "fedavg", clients = 3, rounds = 1, local_steps = 1, batch = 8, lr = 0.1 }
tasks = [{ dataset = "digits", model = "mlp_spm" }]
threats = [{ victims = 2 }]
defenses = [{ name = "none" }]
attacks = [{ name = "ilrg" }, { name = "dlg" }]
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def leakbench(*arguments: object, answer: str | None = None) -> tuple[int, str]:
    """Exit code, and all words that the command line says."""
    environment = {"COLUMNS": "300", "LEAKBENCH_DATA": ""}
    result = CliRunner().invoke(app, [str(a) for a in arguments], env=environment, input=answer)
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


def go(folder: Path, suite_text: str = SUITE) -> Result:
    """Run the suite in the folder, or go on with it."""
    suite = folder.with_suffix(".toml")
    suite.write_text(suite_text)
    return call("run", suite, "--device", "cpu", "--jobs", "0", "--out", folder)


def said(result: Result) -> str:
    return " ".join(result.output.split())
