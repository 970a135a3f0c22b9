"""The client mod for Flower: on records made here, and in a simulation where Flower is installed.

Flower's pins clash with the project's, so it is installed beside it for these tests alone; see
docs/flower.md for the command.
"""

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bench
from bench.capturing import flower
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.protocols.export import load_seen

ROOT = Path(__file__).parents[1]
INSTALLED = importlib.util.find_spec("flwr") is not None
needs_flower = pytest.mark.skipif(not INSTALLED, reason="Flower is not installed: docs/flower.md")


class Records(dict[str, Any]):
    """What a message of Flower's holds, by the kind of record."""

    @property
    def array_records(self) -> dict[str, Any]:
        return {n: r for n, r in self.items() if n in ("arrays", "fitins.parameters")}

    @property
    def config_records(self) -> dict[str, Any]:
        return {n: r for n, r in self.items() if "config" in n}

    @property
    def metric_records(self) -> dict[str, Any]:
        return {n: r for n, r in self.items() if "metric" in n or "num" in n}


@dataclass
class Message:
    content: Records
    metadata: Any = field(
        default_factory=lambda: SimpleNamespace(message_type="train", group_id="")
    )

    def has_error(self) -> bool:
        return False


def arrays(state: dict[str, Tensor]) -> dict[str, Any]:
    copies = {n: v.clone() for n, v in state.items()}
    return {n: SimpleNamespace(numpy=lambda v=v: v.numpy()) for n, v in copies.items()}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


def context() -> Any:
    return SimpleNamespace(node_config={"partition-id": 3, "num-partitions": 10})


def fit(digits: Dataset, names: list[str] | None = None) -> Any:
    """A client's step on two samples; NumPy clients name arrays by number."""

    def train(msg: Message, _: Any) -> Message:
        net = network()
        (record,) = msg.content.array_records.values()
        values = [torch.from_numpy(array.numpy()) for array in record.values()]
        net.load_state_dict(dict(zip(net.state_dict(), values, strict=True)))
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        cross_entropy(net(digits.train_x[:2]), digits.train_y[:2]).backward()
        sgd.step()
        for array in record.values():  # as Flower's own mods do
            array.numpy()[...] = 0
        state = net.state_dict()
        sent = dict(zip(names or state, state.values(), strict=True))
        return Message(Records(arrays=arrays(sent), metrics={"num-examples": 2}))

    return train


@pytest.mark.parametrize("numbered", [False, True])
def test_a_mod_captures_what_came_and_what_left(
    digits: Dataset, tmp_path: Path, numbered: bool
) -> None:
    state = network().state_dict()
    names = [str(i) for i in range(len(state))] if numbered else list(state)
    mod = flower.capture_mod(
        tmp_path,
        network(),
        public=(digits.aux_x, digits.aux_y),
        data=lambda client, clients: (digits.train_x[:2], digits.train_y[:2]),
    )
    came = Records(
        arrays=arrays(dict(zip(names, state.values(), strict=True))),
        config={"lr": 0.1, "server-round": 4},
    )
    mod(Message(came), context(), fit(digits, names))  # type: ignore[arg-type]
    seen = load_seen(tmp_path / "round-4-client-3")
    assert seen.clients == ("client-3",)
    assert torch.equal(seen.before["1.weight"], state["1.weight"])
    net = network()
    cross_entropy(net(digits.train_x[:2]), digits.train_y[:2]).backward()
    moved = seen.before["1.weight"] - seen.messages[0].parts["1.weight"].values
    assert torch.allclose(moved, 0.1 * net[1].weight.grad, atol=1e-6)
    (attacked,) = bench.attack(tmp_path / "round-4-client-3", "ilrg", model=network())
    assert attacked.means()["lnacc"] == 1.0


def test_a_masked_upload_is_not_captured_and_that_is_said(digits: Dataset, tmp_path: Path) -> None:
    mod = flower.capture_mod(tmp_path, network(), public=(digits.aux_x, digits.aux_y), lr=0.1)
    came = Records(arrays=arrays(network().state_dict()), config={"server-round": 1})
    masked = Message(Records(arrays={}, config={"stage": "collect_masked_vectors"}))
    with pytest.warns(UserWarning, match="client 3 sent no plain arrays in round 1"):
        reply = mod(Message(came), context(), lambda *_: masked)  # type: ignore[arg-type,return-value]
    assert reply is masked
    assert list(tmp_path.iterdir()) == []


REPLIES: dict[str, tuple[Any, str | None]] = {
    "prefixed, in another order": (
        lambda after, before: {f"m.{n}": after[n] for n in sorted(after, reverse=True)}, None,
    ),
    "a delta": (
        lambda after, before: {n: after[n] - before[n] for n in after}, "differences of weights",
    ),
    "the body frozen": (
        lambda after, before: {n: after[n] if n[0] == "3" else before[n] for n in after},
        r"'1.weight' and 3 others did not move",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", list(REPLIES))
def test_replies_of_other_forms_are_read_or_warned_of(
    digits: Dataset, tmp_path: Path, form: str
) -> None:
    state, (change, warning) = network().state_dict(), REPLIES[form]
    x, y = digits.train_x[:2], digits.train_y[:2]
    public = digits.aux_x, digits.aux_y
    mod = flower.capture_mod(tmp_path, network(), public=public, lr=0.1, data=lambda *_: (x, y))

    def train(msg: Message, ctxt: Any) -> Message:
        reply = fit(digits)(msg, ctxt)
        after = {n: torch.from_numpy(a.numpy()) for n, a in reply.content["arrays"].items()}
        reply.content["arrays"] = arrays(change(after, state))
        return reply

    came = Message(Records(arrays=arrays(state), config={"server-round": 1}))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mod(came, context(), train)  # type: ignore[arg-type]
    texts = [str(one.message) for one in said if issubclass(one.category, UserWarning)]
    assert (not texts) if warning is None else any(re.search(warning, t) for t in texts), texts
    net = network()
    cross_entropy(net(x), y).backward()
    seen = load_seen(tmp_path / "round-1-client-3")
    moved = seen.before["1.weight"] - seen.messages[0].parts["1.weight"].values
    if form != "the body frozen":
        assert torch.allclose(moved, 0.1 * net[1].weight.grad, atol=1e-6)


def test_another_network_than_the_clients_is_refused(digits: Dataset, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    public = digits.aux_x, digits.aux_y
    came = Message(Records(arrays=arrays(network().state_dict()), config={"server-round": 1}))
    for net, more, sentence in (
        (
            other,
            {"lr": 0.1},
            r"the clients' 9 arrays \(.*\) are not the model's state of 2 tensors",
        ),
        (network(), {}, r"needs the clients' learning rate: capture_mod\(..., lr=\)"),
    ):
        mod = flower.capture_mod(tmp_path, net, public=public, **more)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=sentence):
            mod(came, context(), fit(digits))  # type: ignore[arg-type]


def programs() -> list[str]:
    """The programs of the tutorial, in order."""
    text = (ROOT / "docs" / "flower.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


@needs_flower
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_clients_of_a_real_simulation_are_captured_and_attacked(tmp_path: Path) -> None:
    """The tutorial's programs as they stand there."""
    for name, text in zip(("simulation.py", "attack.py"), programs(), strict=True):
        (tmp_path / name).write_text(text)
    env = os.environ | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(tmp_path / "home"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }

    def run(name: str) -> str:
        made = subprocess.run(
            [sys.executable, name], cwd=tmp_path, env=env, text=True, capture_output=True
        )
        assert made.returncode == 0, made.stderr[-3000:]
        return made.stdout

    run("simulation.py")
    files = sorted((tmp_path / "seen").glob("round-1-client-?.json"))
    assert len(files) == 10
    shown = run("attack.py")
    assert re.search(r"idlg on 10 clients: SSIM 0\.[6-9]", shown), shown
