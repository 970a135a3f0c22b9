"""What defenses' hooks make of updates, rounds of them, and how far both are from what they should
be."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import binom
from torch import Tensor

from bench.contract.attack import Attack, Context, Reconstruction, Seen
from bench.contract.defense import Client, Defense, Local
from bench.contract.messages import Kind, Message, Part, State, as_kind
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth
from bench.seeding import generator


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_client(name: str = "c", **more: Any) -> Client:
    """A client of one empty sample with all random streams; more: fields in place of these."""
    streams = ("joins", "batch", "defense")
    empty = {"x": torch.zeros(1, 1), "y": torch.zeros(1, dtype=torch.int64)}
    given = {**empty, "rng": {s: generator(0, name, s) for s in streams}, **more}
    return Client(id=name, **given)


def uploads_of(
    defense: Defense, update: State, client: Client, *, base: State | None = None,
    kind: Kind = "update", lr: float = 1.0, steps: int = 1, const: State | None = None,
    round: int = 0,
) -> list[Message]:  # fmt: skip
    """The messages of a client that trained by `update` from `base` (zeros) and sends it as
    `kind`."""
    start = {n: torch.zeros_like(v) for n, v in update.items()} if base is None else base
    local = Local(
        broadcast=start, start=start, end={n: start[n] + v for n, v in update.items()},
        const=const or {}, grad_sum={n: -v / lr for n, v in update.items()}, lr=lr, steps=steps,
    )  # fmt: skip
    sent = Message(
        kind="update", sender=client.id, receiver="server", round=round, local_steps=steps,
        parts={n: Part(values=v) for n, v in update.items()},
    )  # fmt: skip
    return defense.upload([as_kind(sent, kind, base=start, lr=lr)], local, client)


def upload_of(
    defense: Defense, update: Tensor, rng: torch.Generator, *, base: Tensor | None = None,
    plan: Mapping[str, Any] | None = None, **how: Any,
) -> Message:  # fmt: skip
    """The upload of one tensor, named p; how: as of `uploads_of`."""
    client = make_client(rng={"defense": rng}, plan=dict(plan or {}))
    start = None if base is None else {"p": base}
    (upload,) = uploads_of(defense, {"p": update}, client, base=start, **how)
    return upload


def play(run: Federation, *, rounds: int = 1, clients: list[str] | None = None, **work: Any) -> Any:
    """The last of some rounds of all clients; work: fields in place of three steps of fedavg."""
    whole = {"protocol": "fedavg", "batch": 8, "lr": 0.2, "local_steps": 3, **work}
    for _ in range(rounds):
        sampled = [c.id for c in run.clients] if clients is None else clients
        result = run.play(LocalWork(**whole), sampled, observed=True)
    return result


def distance(one: State, other: State) -> float:
    """The largest difference of any value."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one)


def error(answer: Reconstruction, truth: Truth) -> float:
    """Mean squared error of images of which none is failed."""
    assert answer.failed is not None
    assert answer.images is not None
    assert not answer.failed.any()
    return float((answer.images - truth.x).square().mean())


def error_of(attack: Attack, seen: Seen, truth: Truth, ctx: Context) -> float:
    """Mean squared error of an attack's images."""
    images = attack.run(seen, ctx).images
    assert images is not None
    return float((images - truth.x).square().mean())


def one_hot(truth: Truth, classes: int = 10) -> Tensor:
    return torch.nn.functional.one_hot(truth.y, classes).double()


# --- draws: a right mechanism fails once in 1.7 million ------------------------------------------


def assert_moments(draws: Tensor, *, mean: float, variance: float) -> None:
    """Both within 5 standard errors."""
    draws, n = draws.detach().double().flatten(), draws.numel()
    assert abs(float(draws.mean()) - mean) < 5 * math.sqrt(variance / n) + 1e-7
    squares = (draws - mean).square()
    spread = 5 * float(squares.std()) / math.sqrt(n)
    assert abs(float(squares.mean()) - variance) < spread + 1e-5 * variance + 1e-12


def assert_share(hits: Tensor, chance: float) -> None:
    """Of bits or booleans, within 5 standard errors."""
    error = math.sqrt(chance * (1 - chance) / hits.numel())
    assert abs(float(hits.double().mean()) - chance) < 5 * error


def epsilon_of_coins(count: int, epsilon: float, delta: float) -> float:
    """At which so many coins, each right with odds of e^epsilon to one, have their delta: the sum
    over all numbers of wrong coins. No mechanisms of that pure epsilon tell more."""
    chance = 1 / (1 + math.exp(epsilon))
    reach = 40 * math.sqrt(count * chance) + 40  # numbers beyond carry less than 1e-300
    wrong = np.arange(min(count, math.ceil(count * chance + reach)) + 1)
    chances, losses = binom.pmf(wrong, count, chance), (count - 2 * wrong) * epsilon

    def excess(at: float) -> float:
        return float(chances @ -np.expm1(np.minimum(at - losses, 0.0))) - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, count * epsilon, rtol=1e-12))
