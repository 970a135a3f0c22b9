"""The sandbox: hooks in one table, faults of plugins with their place, made-up clients."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bench.api import Client, Defense, Facts, GaussianNoise, Local, Message, Part
from bench.cli import app
from bench.contract.compose import Composed
from bench.contract.hooks import BY_NAME, HOOKS, ROLES, overrides
from bench.harness.train import _audit
from bench.records.outcomes import AuditFailure
from bench.sandbox.audit import audit
from bench.sandbox.hooked import HookError, PluginFault, WrongAnswer, guard
from bench.sandbox.stage import client_alone, train_alone
from bench.seeding import generator
from tests.conftest import require

# --- the table ------------------------------------------------------------------------------------


def test_the_table_has_every_hook_of_a_defense_in_its_order() -> None:
    public = [
        name
        for name, value in vars(Defense).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert [hook.name for hook in HOOKS] == public
    assert ROLES == ("variables", "gradient", "direction", "joins", "batch", "mix", "aggregate")


@pytest.mark.parametrize("hook", [h.name for h in HOOKS])
def test_a_composed_defense_has_every_hook_from_the_table(hook: str) -> None:
    assert overrides(Composed({"a": Defense()}), hook) is False
    assert getattr(Composed, hook) is not getattr(Defense, hook)
    assert getattr(Composed, hook).__doc__ == BY_NAME[hook].chain.__doc__


class Adds(Defense):
    """Adds a number to everything that passes."""

    def __init__(self, number: float, *, hides: int | None = None) -> None:
        self.number, self.hides = number, hides

    def labels(self, y: Tensor, client: Client) -> Tensor:
        return 2 * y + self.number

    def smashed(self, q: Tensor, client: Client) -> Part:
        present = None
        if self.hides is not None:
            present = torch.arange(q.numel()).view(q.shape) != self.hides
        return Part(values=q + self.number, present=present)

    def inspects(self, client: Client) -> bool:
        return self.number > 1

    def public_plans(self, messages: Any) -> list[dict[str, float]]:
        return [{str(self.number): i} for i in range(int(self.number))]

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {"number": self.number}

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        return self.number, 0.0, "record"

    def mechanisms(self) -> tuple[GaussianNoise, ...]:
        return (GaussianNoise(of="labels", std=self.number),)


def test_members_chain_as_the_table_says() -> None:
    both = Composed({"a": Adds(1, hides=0), "b": Adds(2, hides=1)})
    client, ones = client_alone(generator(0)), torch.ones(1, 3)
    assert both.labels(ones, client).tolist() == [[8, 8, 8]]  # 2 (2 * 1 + 1) + 2, in turn
    part = both.smashed(ones, client)
    assert part.values.tolist() == [[4, 4, 4]]
    assert part.presence().tolist() == [[False, False, True]]  # withheld stays withheld
    assert both.inspects(client)
    assert both.public_plans([]) == [{"1": 0, "2": 0}, {"1": 0, "2": 1}]
    assert both.constants(Facts(parameters=1)) == {"a.number": 1, "b.number": 2}
    assert both.claim(Facts(parameters=1)) is None
    assert [m.std for m in both.mechanisms()] == [1, 2]  # type: ignore[attr-defined]


def test_a_hook_of_a_composed_defense_takes_its_arguments_by_name() -> None:
    client = client_alone(generator(0))
    assert Composed({"a": Adds(1)}).labels(torch.ones(1), client=client).tolist() == [3]


class OwnsBatch(Defense):
    owns = frozenset({"batch"})

    def batch(self, client: Client, size: int) -> Tensor | None:
        return torch.arange(size)


def test_a_role_is_its_owners_wherever_it_stands() -> None:
    client = client_alone(generator(0))
    for members in ({"a": OwnsBatch(), "b": Adds(1)}, {"b": Adds(1), "a": OwnsBatch()}):
        batch = require(Composed(members).batch(client, 2))
        assert batch.tolist() == [0, 1]
    assert Composed({"b": Adds(1)}).batch(client, 2) is None


# --- faults ---------------------------------------------------------------------------------------


class Fails(Defense):
    """Fails in one hook."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        raise self.error  # here


HERE = next(
    i for i, line in enumerate(Path(__file__).read_text().split("\n"), 1) if "# here" in line
)


@pytest.mark.parametrize(
    "error", [TypeError("no"), AttributeError("no"), LookupError("no"), KeyError("no")]
)
def test_a_bug_in_a_hook_ends_an_audit_with_hook_file_and_line(error: Exception) -> None:
    with pytest.raises(HookError, match=f"upload raised {type(error).__name__}") as caught:
        audit(Fails(error), draws=100)
    assert caught.value.hook == "upload"
    assert caught.value.place == f"{Path(__file__).name}, line {HERE}"


def test_a_bug_in_a_member_of_a_composed_defense_is_found_as_well() -> None:
    with pytest.raises(HookError, match="upload raised TypeError") as caught:
        audit(Composed({"none": Defense(), "fails": Fails(TypeError("no"))}), draws=100)
    assert caught.value.place == f"{Path(__file__).name}, line {HERE}"


@pytest.mark.parametrize("hook", ["smashed", "labels", "claim", "guarantee", "hear", "aggregate"])
def test_no_hook_that_an_audit_calls_may_fail_unseen(hook: str) -> None:
    def fails(self: Defense, *arguments: Any) -> Any:
        raise AttributeError("no")

    broken = type("Broken", (Defense,), {hook: fails})()
    with pytest.raises(HookError, match=f"{hook} raised AttributeError"):
        audit(broken, draws=100)


class TakesFour(Defense):
    """Refuses smashed data whose size it cannot part."""

    requires = frozenset({"smashed"})

    def smashed(self, q: Tensor, client: Client) -> Part:
        if q[0].numel() % 4 or q.dim() != 3:
            raise ValueError("smashed data must be tokens in fours.")
        return Part(values=q + torch.rand(q.shape, generator=client.rng["defense"]))


def test_smashed_data_that_a_hook_refuses_by_a_value_error_is_given_in_another_shape() -> None:
    audited = audit(TakesFour(), draws=100)
    assert "smashed data" in {pair.pair for pair in audited.pairs}


class SendsNothing(Defense):
    """Returns what it may not."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> Any:
        return None


def test_what_a_hook_may_not_return_ends_an_audit() -> None:
    with pytest.raises(WrongAnswer, match="upload returned None, expected a list of Message"):
        audit(SendsNothing(), draws=100)


def test_a_guarded_defense_says_and_draws_what_the_defense_does() -> None:
    plain = Adds(3, hides=1)
    same = guard(plain)
    assert [overrides(same, h.name) for h in HOOKS] == [overrides(plain, h.name) for h in HOOKS]
    assert isinstance(same, Adds)
    client = client_alone(generator(0))
    assert torch.equal(same.labels(torch.ones(2), client), plain.labels(torch.ones(2), client))


BROKEN = '''
from bench.api import Defense


class Broken(Defense):
    """Fails when it uploads."""

    def upload(self, messages, local, client):
        return messages.nothing
'''


def test_the_command_shows_a_bug_as_one_failed_finding(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    asked = ["audit", "broken", "--plugin", str(path), "--draws", "100"]
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert shown.exit_code == 1
    assert shown.stdout.startswith("failed audit: upload raised AttributeError")
    assert "(broken.py, line 9) (hook upload)" in shown.output
    told = CliRunner().invoke(app, [*asked, "--json"])
    assert told.exit_code == 1
    assert json.loads(told.stdout)["hook"] == "upload"
    assert "line 9" in json.loads(told.stdout)["failed"]


# --- a client alone -------------------------------------------------------------------------------


def test_an_upload_alone_is_what_one_step_of_rate_1_would_send() -> None:
    params = {"w": torch.arange(3.0)}
    message, local = train_alone(Defense(), params, {"w": torch.ones(3)}, 0)
    assert torch.equal(local.end["w"], params["w"] + 1)
    assert torch.equal(local.broadcast["w"] - local.lr * local.grad_sum["w"], local.end["w"])
    assert torch.equal(message.parts["w"].values, torch.ones(3))
    assert isinstance(HookError("x", ValueError()), PluginFault)


def test_a_training_records_a_failed_audit_with_its_reason_and_goes_on() -> None:
    job: Any = SimpleNamespace(audit=100, seed=0)
    failure = _audit(Fails(KeyError("no")), job)
    assert isinstance(failure, AuditFailure)
    assert failure.reason == f"upload raised KeyError: 'no' ({Path(__file__).name}, line {HERE})"


class SendsNaN(Defense):
    """Sends NaN in half of its uploads."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        late = torch.rand((), generator=client.rng["defense"]) > 0.5
        values = {n: p.values / (0.0 if late else 1.0) for n, p in messages[0].parts.items()}
        parts = {n: Part(values=v - v + 1) for n, v in values.items()}
        return [messages[0].with_parts(parts)]


def test_values_that_are_not_finite_in_any_draw_end_an_audit() -> None:
    with pytest.raises(WrongAnswer, match="NaN or infinite"):
        audit(SendsNaN(), draws=100)
