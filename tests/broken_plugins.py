"""Plugins that are broken on purpose, and what `leakbench check` finds in a plugin's text."""

from collections.abc import Callable
from pathlib import Path

from bench.sandbox.conformance.plugins import progress
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


def broken(doc: str, *lines: str, head: str = "", **hooks: str) -> str:
    """A defense by its docstring, further lines of its class, and the bodies of its hooks."""
    body = [f'"""{doc}"""', *lines]
    for hook, code in hooks.items():
        body.append(f"def {hook}({ARGUMENTS[hook]}):")
        body += [f"    {line}" for line in code.strip("\n").split("\n")]
    return head + "\nclass Broken(Defense):\n" + "".join(f"    {line}\n" for line in body)


ARGUMENTS = {
    "upload": "self, messages, local, client",
    "say": "self, when, client, local, round",
    "aggregate": "self, server, messages",
    "mechanisms": "self",
    "guarantee": "self, facts",
}
HALF = (
    "return [replace_values(m, {n: p.values * 0.5 for n, p in m.parts.items()}) for m in messages]"
)
SCALED = """def __init__(self, *, scale: float = 1.0):
        self.scale = scale"""


def noisy(doc: str, noise: str, *declared: str, proven: str = "", head: str = "") -> str:
    """A defense that adds noise and declares mechanisms and a Gaussian event."""
    hooks = {"mechanisms": f"return ({', '.join(declared)},)"}
    if proven:
        hooks["guarantee"] = f'return (Gaussian({proven}, unit="record"),)'
    return broken(
        doc, head=head, upload=f"return noised(messages, local, client, {noise})", **hooks
    )


def flipping(doc: str, shape: str, chance: float) -> str:
    """A defense that flips signs with a chance, and declares another way."""
    signs = f"""torch.where(
        torch.rand({shape}, generator=client.rng["defense"]) < {chance}, 1.0, -1.0)"""
    upload = f"""
out = []
for m in messages:
    u = as_kind(m, "update", base=local.broadcast, lr=local.lr)
    out.append(replace_values(u, {{n: p.values * {signs} for n, p in u.parts.items()}}))
return out"""
    declared = 'return (SignPerturbation(of="update", keep=0.8, low=1.0, high=1.0),)'
    return broken(doc, upload=upload, mechanisms=declared)


def telling(doc: str, kind: str, values: str) -> str:
    """A defense that tells the server something."""
    return broken(doc, say=f"""
if when != "upload":
    return []
return [Message(kind="{kind}", sender=client.id, receiver="server", round=round,
                parts={{"note": Part(values={values})}})]""")  # fmt: skip


def noise(std: float) -> str:
    return f'GaussianNoise(of="update", std={std})'


CLIP = 'Clip(of="update", norm=1.0)'
DECLARED = "declared GaussianNoise of update"
BROKEN_DEFENSES = {
    "changes the update in place": ("arguments untouched", "upload", broken(
        "Halves every update.", upload="""
for message in messages:
    for part in message.parts.values():
        part.values.mul_(0.5)
return messages""")),
    "moves the global generator": ("global generators untouched", "upload", broken(
        "Adds noise of its own.", upload="""
return [replace_values(m, {n: p.values + torch.randn(p.values.shape) for n, p in m.parts.items()})
        for m in messages]""")),
    "keeps state": ("no state on self", "rounds", broken(
        "Counts its uploads.", "rounds = 0", upload="self.rounds += 1\nreturn messages")),
    "sends a sample": ("private data in messages", "say",
        telling("Tells the server a sample.", "hello", "3 * client.x[:1] - 1")),
    "sends the labels": ("private data in messages", "say",
        telling("Tells the server its label counts.", "sizes",
                "torch.bincount(client.y, minlength=10).float()")),
    "declares half of its noise": (DECLARED, "mechanisms",
        noisy("Adds Gaussian noise.", "std=0.2", noise(0.1))),
    "proves by a Gaussian that is Laplace": (DECLARED, "mechanisms",
        noisy("Adds Laplace noise of the declared std.",
              "std=0.1 / 2**0.5, norm=1.0, draw=laplace_like", CLIP, noise(0.1),
              proven="sensitivity=2.0, std=0.1")),
    "clips elsewhere": ("declared Clip of update", "upload",
        noisy("Clips to another norm than it declares.", "std=0.0, norm=2.0", CLIP, noise(0.0))),
    "keeps other signs": ("declared SignPerturbation of update", "mechanisms",
        flipping("Flips signs more often than it declares.", "p.values.shape", 0.7)),
    "contradicts itself": ("guarantee agrees with mechanisms", "guarantee",
        noisy("Proves more noise than there is.", "std=0.1, norm=1.0", CLIP, noise(0.1),
              proven="sensitivity=2.0, std=0.4")),
    "halves its sensitivity": ("guarantee agrees with mechanisms", "guarantee",
        noisy("Forgets that a replaced record moves an update by twice the clip.",
              "std=0.1, norm=1.0", CLIP, noise(0.1), proven="sensitivity=1.0, std=0.1")),
    "has the wrong shape": ("runs under fedavg", "upload", broken(
        "Flattens what it sends.", upload="""
return [m.with_parts({n: replace(p, values=p.values.flatten()) for n, p in m.parts.items()})
        for m in messages]""")),
    "crashes": ("runs under fedavg", "upload",
        broken("Divides by nothing.", upload="return 1 / 0")),
    "sends NaN": ("runs under fedavg", "upload",
        broken("Sends no numbers.", upload=HALF.replace("0.5", 'float("nan")'))),
    "lies about bits": ("runs under fedavg", "upload", broken(
        "Says that it sends one bit per value.", upload="""
return [m.with_parts({n: replace(p, bits=1) for n, p in m.parts.items()}) for m in messages]""")),
    "has no annotation": ("settings", "__init__",
        broken("Takes a scale, of nothing.", SCALED.replace(": float", ""))),
    "has no docstring": ("docstring", "", "class Broken(Defense):\n    pass\n"),
    "takes any number": ("bad settings", "__init__",
        broken("Takes a scale, of nothing.", SCALED)),
    "ignores the seed": ("other draws, other figures", "upload",
        noisy("Draws the same noise for everyone.",
              "std=0.1, rng=torch.Generator().manual_seed(0)", noise(0.1))),
    "is different in every run": ("same seed, same figures (fedavg)", "", broken(
        "Seeds itself from the machine.", upload="""
rng = torch.Generator()
rng.seed()
return noised(messages, local, client, std=0.1, rng=rng)""")),
    "reads what was withheld": ("values that are not present", "aggregate", broken(
        "Sums what it says is withheld.", 'owns = frozenset({"aggregate"})', upload="""
return [m.with_parts({n: replace(p, present=torch.zeros_like(p.values, dtype=torch.bool))
                      for n, p in m.parts.items()}) for m in messages]""", aggregate="""
ups = [as_kind(m, "weights", base=server.state, lr=server.lr) for m in messages]
return {n: torch.stack([u.parts[n].values for u in ups]).mean(dim=0) for n in server.state}""")),
    "takes its noise back": (DECLARED, "mechanisms", broken(
        "Every second upload subtracts the noise of the one before.", upload="""
last = client.memory.pop("last", None)
drawn = []
def remembered(values, *, std, rng):
    noise = gaussian_like(values, std=std, rng=rng) if last is None else -last[len(drawn)]
    drawn.append(noise)
    return noise
out = noised(messages, local, client, std=0.1, draw=remembered)
if last is None:
    client.memory["last"] = drawn
return out""", mechanisms=f"return ({noise(0.1)},)")),
    "flips whole rows": ("declared SignPerturbation of update", "mechanisms",
        flipping("Flips the signs of a row together.",
                 "len(p.values), *[1] * (p.values.dim() - 1)", 0.8)),
    "does something at zero strength": ("zero strength is no defense", "zero_strength", broken(
        "Shrinks every update, whatever the scale.", 'zero_strength = {"scale": 0.0}',
        """def __init__(self, *, scale: float = 0.5) -> None:
        if not scale >= 0:
            raise ValueError("scale must be >= 0.")""", upload=HALF)),
    "has settings but says nothing of its strength": ("strength", "",
        broken("Does nothing at all, by a scale.", SCALED)),
    "has a strength that is no setting": ("strength", "", broken(
        "Does nothing at all.", 'strength = Strength(setting="epsilon", weak=10.0, strong=0.1)')),
    "refuses an end of its strength": ("strength", "", broken(
        "Does nothing at all, with an epsilon in (0, 5].",
        'strength = Strength(setting="epsilon", weak=10.0, strong=0.1)',
        """def __init__(self, *, epsilon: float = 1.0) -> None:
        if not 0 < epsilon <= 5:
            raise ValueError("epsilon must lie in (0, 5].")""")),
    "does not own its role": ("composed with the identity (fedsgd)", "owns",
        broken("Keeps the state.", aggregate="return dict(server.state)")),
}  # fmt: skip
"""Check, hook and source of a defense by its mistake."""


def check_text(
    tmp_path: Path, text: str, *, fast: bool = False, until: str | None = None
) -> Conformance:
    """Check the plugin of a text, all of it or until a check of that name has failed."""
    path = tmp_path / "broken.py"
    path.write_text(HEAD + text)
    for _, conformance in progress(str(path), {}, fast=fast, dataset=None):
        if until in failures(conformance):
            break
    return conformance
