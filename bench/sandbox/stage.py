"""A defense played on made-up input: a client alone, hook by hook, or all clients in a round.

Audit, conformance and the rehearsals of attackers stand on this. No defense is named here.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.contract.defense import Client, Defense, Local, Submodel
from bench.contract.messages import EVERYONE, SERVER, Message, Part, Stage, State
from bench.protocols.federation import STREAMS, Federation, RoundResult
from bench.protocols.local_training import LocalWork
from bench.seeding import derive_seed, generator

VICTIM = "client-0"
CPU = torch.device("cpu")


# --- a client alone -------------------------------------------------------------------------------


def client_alone(rng: torch.Generator) -> Client:
    """A client without data; all of its streams are `rng`."""
    streams = dict.fromkeys(STREAMS, rng)
    return Client(id=VICTIM, x=torch.zeros(1, 1), y=torch.zeros(1).long(), rng=streams)


def inform_client(defense: Defense, stages: Sequence[Stage], rng: torch.Generator) -> Client:
    """A client alone that has heard the third parties at these stages; they draw anew."""
    client = client_alone(rng)
    parties = defense.third_parties(token(rng))
    roster = [f"client-{i}" for i in range(defense.together)]
    for stage in stages:
        heard = [m for p in parties.values() for m in p.begin(stage, roster, 0, 0)]
        defense.hear(stage, client, [m for m in heard if m.receiver in (VICTIM, EVERYONE)])
    return client


def token(rng: torch.Generator) -> int:
    """A seed drawn from a generator."""
    return int(torch.randint(2**62, (1,), generator=rng))


def train_alone(defense: Defense, params: State, update: State, seed: int) -> tuple[Message, Local]:
    """What one local step of rate 1 hands to `upload` that moved all variables by `update`.

    params: Initial parameters, all of which the client trains.
    """
    held: dict[str, Submodel] = dict.fromkeys(params, "bottom")
    state, const = defense.variables(params, held, generator(seed, "variables"))
    received = defense.receive(state, const)
    local = Local(
        broadcast=received,
        start=received,
        end={n: received[n] + v for n, v in update.items()},
        const=const,
        grad_sum={n: -v for n, v in update.items()},
        lr=1.0,
        steps=1,
    )
    parts = {n: Part(values=v) for n, v in update.items()}
    message = Message(kind="update", sender=VICTIM, receiver=SERVER, round=0, parts=parts)
    return message, local


# --- whole rounds ---------------------------------------------------------------------------------


def play_round(federation: Federation, work: LocalWork, party: str | None = None) -> RoundResult:
    """Play a round in which all clients are sampled, with a log of its messages; of whose, see
    `Federation.play`."""
    everyone = [c.id for c in federation.clients]
    return federation.play(work, everyone, observed=True, party=party)


def with_fresh_secrets(federation: Federation, name: str, seed: int) -> Federation:
    """A fork whose clients and third parties draw anew."""
    parties = federation.defense.third_parties(derive_seed(seed, "parties"))
    return replace(federation.fork(name, seed), parties=dict(parties))
