"""`leakbench check`: what shipped plugins must pass, and how deliberately broken ones are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from bench.cli import plugins
from bench.contract.defense import Client
from bench.contract.mechanisms import GaussianNoise
from bench.contract.messages import Part
from bench.registry import Registry
from bench.sandbox.conformance.findings import Conformance, Finding
from bench.sandbox.conformance.leaks import _alike
from bench.sandbox.conformance.noise import Pair, check_independence, check_mechanisms
from bench.sandbox.conformance.playground import private_data
from bench.sandbox.conformance.plugins import check, check_plugins
from bench.seeding import generator


def failures(conformance: Conformance) -> dict[str, Finding]:
    return {f.name: f for f in conformance.findings if f.status == "failed"}


# --- broken plugins -------------------------------------------------------------------------------

HEAD = '''
import torch
from dataclasses import replace
from bench.contract.attack import Attack, Reconstruction
from bench.contract.defense import Defense
from bench.contract.messages import Message, Part, as_kind
from bench.contract.mechanisms import Clip, GaussianNoise, LaplaceNoise, SignPerturbation
from bench.contract.events import Gaussian
from bench.toolkit.vectors import clip, gaussian_like, laplace_like, replace_values


def noised(messages, local, client, *, std, norm=1e9, draw=gaussian_like, rng=None):
    """What an honest Gaussian does."""
    out = []
    for message in messages:
        update = as_kind(message, "update", base=local.broadcast, lr=local.lr)
        parts = clip(update.parts, norm=norm)
        stream = rng or client.rng["defense"]
        out.append(replace_values(update, {
            n: p.values + draw(p.values, **{"scale" if draw is laplace_like else "std": std},
                               rng=stream)
            for n, p in parts.items()}))
    return out

'''

BROKEN_DEFENSES = {
    "changes the update in place": ("arguments untouched", "upload", '''
class Broken(Defense):
    """Halves every update."""
    def upload(self, messages, local, client):
        for message in messages:
            for part in message.parts.values():
                part.values.mul_(0.5)
        return messages
'''),
    "moves the global generator": ("global generators untouched", "upload", '''
class Broken(Defense):
    """Adds noise of its own."""
    def upload(self, messages, local, client):
        return [replace_values(m, {n: p.values + torch.randn(p.values.shape)
                                   for n, p in m.parts.items()}) for m in messages]
'''),
    "keeps state": ("no state on self", "rounds", '''
class Broken(Defense):
    """Counts its uploads."""
    def __init__(self):
        self.rounds = 0
    def upload(self, messages, local, client):
        self.rounds += 1
        return messages
'''),
    "sends a sample": ("private data in messages", "say", '''
class Broken(Defense):
    """Tells the server a sample."""
    def say(self, when, client, local, round):
        if when != "upload":
            return []
        return [Message(kind="hello", sender=client.id, receiver="server", round=round,
                        parts={"note": Part(values=3 * client.x[:1] - 1)})]
'''),
    "sends the labels": ("private data in messages", "say", '''
class Broken(Defense):
    """Tells the server its label counts."""
    def say(self, when, client, local, round):
        if when != "upload":
            return []
        counts = torch.bincount(client.y, minlength=10).float()
        return [Message(kind="sizes", sender=client.id, receiver="server", round=round,
                        parts={"sizes": Part(values=counts)})]
'''),
    "declares half of its noise": ("declared GaussianNoise of update", "mechanisms", '''
class Broken(Defense):
    """Adds Gaussian noise."""
    def upload(self, messages, local, client):
        return noised(messages, local, client, std=0.2)
    def mechanisms(self):
        return (GaussianNoise(of="update", std=0.1),)
'''),
    "declares twice its noise": ("declared GaussianNoise of update", "mechanisms", '''
class Broken(Defense):
    """Adds Gaussian noise."""
    def upload(self, messages, local, client):
        return noised(messages, local, client, std=0.05)
    def mechanisms(self):
        return (GaussianNoise(of="update", std=0.1),)
'''),
    "proves by a Gaussian that is Laplace": ("declared GaussianNoise of update", "mechanisms", '''
class Broken(Defense):
    """Adds Laplace noise of the declared std."""
    def upload(self, messages, local, client):
        return noised(messages, local, client, std=0.1 / 2**0.5, norm=1.0, draw=laplace_like)
    def mechanisms(self):
        return (Clip(of="update", norm=1.0), GaussianNoise(of="update", std=0.1))
    def guarantee(self, facts):
        return (Gaussian(sensitivity=2.0, std=0.1, unit="record"),)
'''),
    "clips elsewhere": ("declared Clip of update", "upload", '''
class Broken(Defense):
    """Clips to another norm than it declares."""
    def upload(self, messages, local, client):
        return noised(messages, local, client, std=0.0, norm=2.0)
    def mechanisms(self):
        return (Clip(of="update", norm=1.0), GaussianNoise(of="update", std=0.0))
'''),
    "keeps other signs": ("declared SignPerturbation of update", "mechanisms", '''
class Broken(Defense):
    """Flips signs more often than it declares."""
    def upload(self, messages, local, client):
        out = []
        for m in messages:
            u = as_kind(m, "update", base=local.broadcast, lr=local.lr)
            out.append(replace_values(u, {n: p.values * torch.where(
                torch.rand(p.values.shape, generator=client.rng["defense"]) < 0.7, 1.0, -1.0)
                for n, p in u.parts.items()}))
        return out
    def mechanisms(self):
        return (SignPerturbation(of="update", keep=0.8, low=1.0, high=1.0),)
'''),
    "contradicts itself": ("guarantee agrees with mechanisms", "guarantee", '''
class Broken(Defense):
    """Proves more noise than there is."""
    def upload(self, messages, local, client):
        return noised(messages, local, client, std=0.1, norm=1.0)
    def mechanisms(self):
        return (Clip(of="update", norm=1.0), GaussianNoise(of="update", std=0.1))
    def guarantee(self, facts):
        return (Gaussian(sensitivity=2.0, std=0.4, unit="record"),)
'''),
    "halves its sensitivity": ("guarantee agrees with mechanisms", "guarantee", '''
class Broken(Defense):
    """Forgets that a replaced record moves an update by twice the clip."""
    def upload(self, messages, local, client):
        return noised(messages, local, client, std=0.1, norm=1.0)
    def mechanisms(self):
        return (Clip(of="update", norm=1.0), GaussianNoise(of="update", std=0.1))
    def guarantee(self, facts):
        return (Gaussian(sensitivity=1.0, std=0.1, unit="record"),)
'''),
    "has the wrong shape": ("runs under fedavg", "upload", '''
class Broken(Defense):
    """Flattens what it sends."""
    def upload(self, messages, local, client):
        return [m.with_parts({n: replace(p, values=p.values.flatten())
                              for n, p in m.parts.items()}) for m in messages]
'''),
    "crashes": ("runs under fedavg", "upload", '''
class Broken(Defense):
    """Divides by nothing."""
    def upload(self, messages, local, client):
        return 1 / 0
'''),
    "sends NaN": ("runs under fedavg", "upload", '''
class Broken(Defense):
    """Sends no numbers."""
    def upload(self, messages, local, client):
        return [replace_values(m, {n: p.values * float("nan") for n, p in m.parts.items()})
                for m in messages]
'''),
    "lies about bits": ("runs under fedavg", "upload", '''
class Broken(Defense):
    """Says that it sends one bit per value."""
    def upload(self, messages, local, client):
        return [m.with_parts({n: replace(p, bits=1) for n, p in m.parts.items()})
                for m in messages]
'''),
    "has no annotation": ("settings", "__init__", '''
class Broken(Defense):
    """Takes a scale.

    scale: of nothing.
    """
    def __init__(self, *, scale=1.0):
        self.scale = scale
'''),
    "has no docstring": ("docstring", "", '''
class Broken(Defense):
    pass
'''),
    "takes any number": ("bad settings", "__init__", '''
class Broken(Defense):
    """Takes a scale.

    scale: of nothing.
    """
    def __init__(self, *, scale: float = 1.0):
        self.scale = scale
'''),
    "ignores the seed": ("other draws, other figures", "upload", '''
class Broken(Defense):
    """Draws the same noise for everyone."""
    def upload(self, messages, local, client):
        return noised(messages, local, client, std=0.1, rng=torch.Generator().manual_seed(0))
    def mechanisms(self):
        return (GaussianNoise(of="update", std=0.1),)
'''),
    "is different in every run": ("same seed, same figures (fedavg)", "", '''
class Broken(Defense):
    """Seeds itself from the machine."""
    def upload(self, messages, local, client):
        rng = torch.Generator()
        rng.seed()
        return noised(messages, local, client, std=0.1, rng=rng)
'''),
    "reads what was withheld": ("values that are not present", "aggregate", '''
class Broken(Defense):
    """Sums what it says is withheld."""
    owns = frozenset({"aggregate"})
    def upload(self, messages, local, client):
        return [m.with_parts({n: replace(p, present=torch.zeros_like(p.values, dtype=torch.bool))
                              for n, p in m.parts.items()}) for m in messages]
    def aggregate(self, server, messages):
        ups = [as_kind(m, "weights", base=server.state, lr=server.lr) for m in messages]
        return {n: torch.stack([u.parts[n].values for u in ups]).mean(dim=0)
                for n in server.state}
'''),
    "draws once per row": ("declared GaussianNoise of update", "mechanisms", '''
class Broken(Defense):
    """Adds one draw to all values of a row."""
    def upload(self, messages, local, client):
        def rowwise(values, *, std, rng):
            rows = values.flatten(1) if values.dim() > 1 else values[:, None]
            draw = std * torch.randn(len(rows), 1, generator=rng)
            return draw.expand_as(rows).reshape(values.shape)
        return noised(messages, local, client, std=0.1, draw=rowwise)
    def mechanisms(self):
        return (GaussianNoise(of="update", std=0.1),)
'''),
    "takes its noise back": ("declared GaussianNoise of update", "mechanisms", '''
class Broken(Defense):
    """Every second upload subtracts the noise of the one before."""
    def upload(self, messages, local, client):
        last = client.memory.pop("last", None)
        drawn = []
        def remembered(values, *, std, rng):
            noise = gaussian_like(values, std=std, rng=rng) if last is None else -last[len(drawn)]
            drawn.append(noise)
            return noise
        out = noised(messages, local, client, std=0.1, draw=remembered)
        if last is None:
            client.memory["last"] = drawn
        return out
    def mechanisms(self):
        return (GaussianNoise(of="update", std=0.1),)
'''),
    "flips whole rows": ("declared SignPerturbation of update", "mechanisms", '''
class Broken(Defense):
    """Flips the signs of a row together."""
    def upload(self, messages, local, client):
        out = []
        for m in messages:
            u = as_kind(m, "update", base=local.broadcast, lr=local.lr)
            out.append(replace_values(u, {n: p.values * torch.where(torch.rand(
                len(p.values), *[1] * (p.values.dim() - 1), generator=client.rng["defense"]) < 0.8,
                1.0, -1.0) for n, p in u.parts.items()}))
        return out
    def mechanisms(self):
        return (SignPerturbation(of="update", keep=0.8, low=1.0, high=1.0),)
'''),
    "sends a sample as bytes": ("private data in messages", "say", '''
class Broken(Defense):
    """Tells the server a sample in whole numbers."""
    def say(self, when, client, local, round):
        if when != "upload":
            return []
        return [Message(kind="hello", sender=client.id, receiver="server", round=round,
                        parts={"note": Part(values=(client.x[:1] * 255).byte())})]
'''),
    "does something at zero strength": ("zero strength is no defense", "zero_strength", '''
class Broken(Defense):
    """Shrinks every update.

    scale: added to what is left, >= 0.
    """
    zero_strength = {"scale": 0.0}
    def __init__(self, *, scale: float = 0.5) -> None:
        if not scale >= 0:
            raise ValueError("scale must be >= 0.")
        self.scale = scale
    def upload(self, messages, local, client):
        return [replace_values(m, {n: p.values * 0.5 for n, p in m.parts.items()})
                for m in messages]
'''),
    "does not own its role": ("roles", "aggregate", '''
class Broken(Defense):
    """Keeps the state."""
    def aggregate(self, server, messages):
        return dict(server.state)
'''),
}  # fmt: skip


SLOW = {
    "declares twice its noise", "proves by a Gaussian that is Laplace", "contradicts itself",
    "keeps other signs", "sends the labels", "lies about bits", "takes any number",
    "does something at zero strength", "halves its sensitivity", "clips elsewhere",
    "does not own its role", "has no annotation", "flips whole rows",
    "draws once per row", "sends a sample as bytes",
}  # fmt: skip
"""Kinds of mistakes of which another is found in the fast tests."""


def check_text(tmp_path: Path, text: str) -> Conformance:
    path = tmp_path / "broken.py"
    path.write_text(HEAD + text)
    (found,) = check_plugins(str(path), {})
    return found


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=pytest.mark.slow if w in SLOW else ()) for w in BROKEN_DEFENSES]
)
def test_a_broken_defense_is_found_with_its_hook(tmp_path: Path, what: str) -> None:
    name, hook, text = BROKEN_DEFENSES[what]
    wrong = failures(check_text(tmp_path, text))
    assert name in wrong, wrong
    assert wrong[name].hook == hook
    assert wrong[name].reason.endswith((".", ":"))
    assert wrong[name].change
    assert "Traceback" not in wrong[name].reason


def noise_finding(noise: Tensor, *, std: float, size: float) -> Finding:
    """What is found where `noise` [uploads, values] is added to values of that size."""
    signs = torch.ones(noise.shape[1])
    signs[::2] = -1
    pairs = [
        Pair(given={"w": Part(values=size * signs)}, sent={"w": Part(values=size * signs + n)})
        for n in noise
    ]
    (found,) = check_mechanisms((GaussianNoise(of="update", std=std),), lambda of: pairs)
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "test noise"))


@pytest.mark.parametrize("std", [1e-5, 1e-4, 2e-4, 1e-3])
def test_noise_that_rounding_hides_is_never_passed(std: float) -> None:
    honest = noise_finding(std * drawn(60, 384), std=std, size=0.5)
    nothing = noise_finding(torch.zeros(60, 384), std=std, size=0.5)
    assert honest.status == "skipped"
    assert "cannot be told from rounding" in honest.reason
    assert nothing.status == ("skipped" if std < 5e-5 else "failed")


def test_independent_draws_pass_and_those_that_hang_together_do_not() -> None:
    free = drawn(60, 384)
    assert noise_finding(0.1 * free, std=0.1, size=0.5).status == "passed"
    rows = free[:, ::24].repeat_interleave(24, dim=1)
    columns = free[:, :24].repeat(1, 16)
    pairs = torch.stack([free[:30], -free[:30]], dim=1).flatten(0, 1)
    far = torch.cat([free[:30], free[:30]])
    sums = (free - free.roll(1, dims=0)) / 2**0.5
    for noise, which in (
        (rows, "neighbouring draws"), (columns, "draws 24 values apart"),
        (pairs, "draws 384 values apart"), (far, "draws 11520 values apart"),
        (sums, "draws 384 values apart"),
    ):  # fmt: skip
        # Few distinct draws have a level of their own, which is not what is tested here.
        found = noise_finding(0.1 * noise / noise.std(), std=0.1, size=0.5)
        assert found.status == "failed"
        assert f"declared independent, but {which} have a correlation" in found.reason


def test_honest_draws_of_every_law_are_hardly_ever_called_dependent() -> None:
    rng = generator(1, "test noise")
    for number in range(100):
        normal = torch.randn(5000, generator=rng)
        heavy = torch.empty(5000).exponential_(generator=rng) * normal.sign()
        rare = (torch.rand(23_000, generator=rng) < 0.05).double()
        for rest in (normal, heavy, rare, normal[: 10 + number]):
            check_independence(rest, "noise")  # raises nothing


@pytest.mark.parametrize("scale", [255, 1_000_000, -1000])
def test_private_samples_are_found_as_whole_numbers_and_masks_are_let_pass(scale: int) -> None:
    x, y = private_data(1)[0]
    client = Client(id="client-0", x=x, y=y, rng={})
    sent = x[2:4] * scale
    assert _alike(sent.long(), client)
    assert _alike(sent.abs().clamp(max=255).byte(), client) == (scale == 255)
    for mask in (x[:3] > 0.5, x[:3] > 2, torch.ones(3, 256, dtype=torch.int64), drawn(3, 256)):
        assert not _alike(mask, client)


def test_stacked_mechanisms_are_left_to_the_checks_of_each(registry: Registry) -> None:
    settings = {"none.a": 1}
    with pytest.raises(ValueError, match="setting"):
        check(registry, "defense", "none+spm", settings)
    settings = {"gaussian.noise_multiplier": 0.1, "gaussian.clip_norm": 1.0, "spm.epsilon": 1.0}
    found = check(registry, "defense", "gaussian+spm", settings)
    assert not failures(found)
    stacked = [f for f in found.findings if "one after another" in f.reason]
    assert [f.status for f in stacked] == ["skipped"] * 3


def test_a_crash_names_the_hook_and_the_error(tmp_path: Path) -> None:
    wrong = failures(check_text(tmp_path, BROKEN_DEFENSES["crashes"][2]))
    line = 1 + (HEAD + BROKEN_DEFENSES["crashes"][2]).split("\n").index("        return 1 / 0")
    assert wrong["runs under fedavg"].reason == (
        f"upload raised ZeroDivisionError: division by zero (broken.py, line {line})."
    )


BROKEN_ATTACKS = {
    "gives NaN": ("runs on fedavg, lenet, batch 1", '''
class Broken(Attack):
    """Gives no numbers."""
    recovers = frozenset({"images"})
    def run(self, seen, ctx):
        return Reconstruction(images=torch.full((2, 1, *ctx.network.shape), float("nan")))
'''),
    "has the wrong shape": ("runs on fedavg, lenet, batch 1", '''
class Broken(Attack):
    """Forgets the samples."""
    recovers = frozenset({"labels"})
    def run(self, seen, ctx):
        return Reconstruction(labels=torch.zeros(len(seen.clients), dtype=torch.int64))
'''),
    "promises more than it gives": ("runs on fedavg, lenet, batch 1", '''
class Broken(Attack):
    """Gives nothing."""
    recovers = frozenset({"images"})
    def run(self, seen, ctx):
        return Reconstruction()
'''),
    "changes what was seen": ("arguments untouched", '''
class Broken(Attack):
    """Changes the broadcast."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        next(iter(seen.before.values())).add_(1.0)
        return Reconstruction(label_counts=torch.zeros(2, 10, dtype=torch.int64))
'''),
    "uses the global generator": ("global generators untouched", '''
class Broken(Attack):
    """Guesses."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        return Reconstruction(label_counts=torch.randint(9, (2, 10)))
'''),
    "is different in every run": ("same seed, same answer", '''
COUNT = [0]
class Broken(Attack):
    """Guesses by turns."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        COUNT[0] += 1
        return Reconstruction(label_counts=torch.full((2, 10), COUNT[0]))
'''),
    "ignores its budget": ("budget", '''
class Broken(Attack):
    """Spends what it likes."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        return Reconstruction(label_counts=torch.zeros(2, 10, dtype=torch.int64),
                              evaluations=1000)
'''),
    "fixes its device": ("device", '''
class Broken(Attack):
    """Wants a GPU."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        return Reconstruction(label_counts=torch.zeros(2, 10).cuda())
'''),
    "reads a file": ("runs on fedavg, lenet, batch 1", '''
class Broken(Attack):
    """Looks for the truth beside it."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        open("init-server-truth.safetensors")
'''),
    "never applies": ("runs anywhere", '''
class Broken(Attack):
    """Could not run if it wanted to."""
    recovers = frozenset({"counts"})
    def applies(self, seen):
        return "not today"
    def run(self, seen, ctx):
        raise RuntimeError("never reached")
'''),
    "gives no reason": ("runs on fedavg, lenet, batch 1", '''
class Broken(Attack):
    """Applies where it likes."""
    recovers = frozenset({"counts"})
    def applies(self, seen):
        return False
'''),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN_ATTACKS)
def test_a_broken_attack_is_found(tmp_path: Path, what: str) -> None:
    name, text = BROKEN_ATTACKS[what]
    wrong = failures(check_text(tmp_path, text))
    assert name in wrong, wrong
    assert wrong[name].change


# --- the command ----------------------------------------------------------------------------------

APP = typer.Typer()
APP.command()(plugins.check)
APP.command()(plugins.new)  # two commands, so that names are needed
run = CliRunner()


def test_the_command_tells_failures_as_table_and_json(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(HEAD + BROKEN_DEFENSES["crashes"][2])
    result = run.invoke(APP, ["check", str(path)], env={"COLUMNS": "160"})
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stdout
    assert "hook upload" in result.stdout
    result = run.invoke(APP, ["check", str(path), "--json"])
    assert result.exit_code == 1
    (document,) = json.loads(result.stdout)
    assert document["passed"] is False
    assert {f["status"] for f in document["findings"]} == {"passed", "failed", "skipped"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gausian"], "Did you mean 'gaussian'"),
        (["gaussian"], "needs the setting(s)"),
        (["spm", "--set", "epsilon=-1"], "epsilon must lie in"),
        (["nothing.py"], "no such plugin file"),
    ],
)
def test_bad_input_of_check_gets_one_sentence(arguments: list[str], message: str) -> None:
    result = run.invoke(APP, ["check", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_file_that_does_not_load_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_the_kind")
    result = run.invoke(APP, ["check", str(path)])
    assert result.exit_code == 2
    assert "nothing_of_the_kind" in result.stderr


def test_global_generators_are_left_as_they_were(registry: Registry) -> None:
    before = torch.get_rng_state()
    check(registry, "attack", "prior_only", {})
    assert torch.equal(before, torch.get_rng_state())
