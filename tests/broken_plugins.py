"""Plugins that are broken on purpose, and what `leakbench check` finds in a plugin's text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.sandbox.conformance.plugins import check_plugins
from bench.sandbox.findings import Broken, Conformance, Finding, NotChecked


def outcome_of(check: Callable[[], str]) -> tuple[str, str]:
    """Status and reason of a case."""
    try:
        return "passed", check()
    except NotChecked as error:
        return "skipped", str(error)
    except Broken as error:
        return "failed", error.reason


def failures(conformance: Conformance) -> dict[str, Finding]:
    return {f.name: f for f in conformance.findings if f.status == "failed"}


HEAD = '''
import torch
from dataclasses import replace
from bench.contract.attack import Attack, Reconstruction
from bench.contract.defense import Defense, Strength
from bench.contract.messages import Message, Part, as_kind
from bench.contract.mechanisms import Clip, GaussianNoise, LaplaceNoise, SignPerturbation
from bench.contract.events import Gaussian, Unprotected
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

PRUNED = '''
class Pruned(Defense):
    """Sends some values of the clipped update with Gaussian noise.

    noise_multiplier: std over the clip, >= 0.
    """
    strength = STRENGTH
    def __init__(self, *, noise_multiplier: float = 0.001) -> None:
        if not 0 <= noise_multiplier < float("inf"):
            raise ValueError("noise_multiplier must be >= 0 and finite.")
        self.noise_multiplier = noise_multiplier
    def chosen(self, name, values, client):
        CHOSEN
    def upload(self, messages, local, client):
        out = []
        for message in noised(messages, local, client, std=self.noise_multiplier, norm=1.0):
            plain = as_kind(messages[0], "update", base=local.broadcast, lr=local.lr)
            out.append(message.with_parts({
                n: self.sent(p, self.chosen(n, plain.parts[n].values, client))
                for n, p in message.parts.items()}))
        return out
    def sent(self, part, chosen):
        SENT
    def mechanisms(self):
        return (Clip(of="update", norm=1.0), GaussianNoise(of="update", std=self.noise_multiplier))
    def guarantee(self, facts):
        return (Gaussian(sensitivity=2.0, std=self.noise_multiplier, unit="record",
                         count=facts.releases), EVENTS)
'''
PRESENT = """replace(part, values=torch.where(chosen, part.values, 0.0), present=chosen,
                       absent="ABSENT")"""
LARGEST = "values.abs() >= values.abs().flatten().quantile(0.8)"


def pruned(
    chosen: str, *, sent: str = PRESENT, absent: str = "zero", events: str = "",
    strength: str = 'Strength(setting="noise_multiplier", weak=1e-4, strong=10.0)',
) -> str:  # fmt: skip
    """A defense that adds noise to the values that it chooses to send."""
    filled = PRUNED.replace("CHOSEN", f"return {chosen}").replace("SENT", f"return {sent}")
    return filled.replace("ABSENT", absent).replace("EVENTS", events).replace("STRENGTH", strength)


ZEROED = "replace(part, values=torch.where(chosen, part.values, 0.0))"
PROVES_TOO_MUCH = {
    "the largest, others zero": pruned(LARGEST),
    "the largest, others kept": pruned(LARGEST, absent="kept"),
    "the largest, without a strength": pruned(LARGEST, strength="None"),
    "the largest, others exact zeros": pruned(LARGEST, sent=ZEROED),
    "those above a threshold": pruned("values.abs() > 1e-3"),
    "those above a threshold, others exact zeros": pruned("values.abs() > 1e-3", sent=ZEROED),
    "rows of the classes that a client has": pruned(
        "torch.isin(torch.arange(10), client.y).view(10, *[1] * (values.dim() - 1))"
        ".expand_as(values) if len(values) == 10 else values == values"
    ),
}
"""Defenses whose proof leaves out which values are sent, by what they send."""
PROVES_ENOUGH = {
    "an event for the pattern": pruned(
        LARGEST, events='Unprotected(what="which values are sent", why="it follows from them"),'
    ),
    "every second value": pruned("(torch.arange(values.numel()) % 2 == 0).view(values.shape)"),
    "every second value, others exact zeros": pruned(
        "(torch.arange(values.numel()) % 2 == 0).view(values.shape)", sent=ZEROED
    ),
    "half of the values, drawn": pruned(
        'torch.rand(values.shape, generator=client.rng["defense"]) < 0.5'
    ),
    "the largest of the noised values": pruned(
        "values == values",
        sent=PRESENT.replace("chosen", "part.values.abs() > part.values.abs().median()"),
    ),
}
"""The same whose proof holds."""

DEADLY = '''
import os, time

class Dies(Attack):
    """Takes its process with it."""
    def run(self, seen, ctx):
        os.kill(os.getpid(), 9)

class Sleeps(Attack):
    """Never ends."""
    def run(self, seen, ctx):
        time.sleep(600)
'''
"""Attacks that need their process ended or replaced; `Attack` is imported before."""

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
    "has settings but says nothing of its strength": ("strength", "", '''
class Broken(Defense):
    """Does nothing at all.

    scale: a number.
    """
    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale
'''),
    "has a strength that is no setting": ("strength", "", '''
class Broken(Defense):
    """Does nothing at all."""
    strength = Strength(setting="epsilon", weak=10.0, strong=0.1)
'''),
    "refuses an end of its strength": ("strength", "", '''
class Broken(Defense):
    """Does nothing at all.

    epsilon: in (0, 5].
    """
    strength = Strength(setting="epsilon", weak=10.0, strong=0.1)
    def __init__(self, *, epsilon: float = 1.0) -> None:
        if not 0 < epsilon <= 5:
            raise ValueError("epsilon must lie in (0, 5].")
'''),
    "does not own its role": ("roles", "aggregate", '''
class Broken(Defense):
    """Keeps the state."""
    def aggregate(self, server, messages):
        return dict(server.state)
'''),
}  # fmt: skip


def check_text(tmp_path: Path, text: str, *, fast: bool = False) -> Conformance:
    path = tmp_path / "broken.py"
    path.write_text(HEAD + text)
    (found,) = check_plugins(str(path), {}, fast=fast)
    return found
