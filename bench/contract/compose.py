"""Two defenses as one: `a+b`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.contract.defense import Client, Defense, Local, Loss, Mixture, Party, Server
from bench.contract.events import Event, Facts, Formula, Round
from bench.contract.mechanisms import BernoulliMask, Mechanism
from bench.contract.messages import UPLOAD_KINDS, Message, Part, Stage, State
from bench.contract.network import NetworkView
from bench.errors import UserError

ROLES = ("variables", "gradient", "joins", "batch", "mix", "aggregate")


class Composed(Defense):
    """Defenses applied in order. A role in `owns` has one owner; all other hooks chain.

    Never a reference, whatever its members are. Raises UserError if two members own the same
    role, or if noise would be added to bits that an earlier member samples, naming both.
    """

    def __init__(self, members: Mapping[str, Defense]) -> None:
        self.members = dict(members)
        self._owner: dict[str, Defense] = {}
        names: dict[str, str] = {}
        for name, member in self.members.items():
            for role in sorted(member.owns):
                if role not in ROLES:
                    raise UserError(f"defense '{name}' owns '{role}'; roles: {', '.join(ROLES)}.")
                if role in names:
                    raise UserError(
                        f"defenses '{names[role]}' and '{name}' both own the role '{role}', "
                        "so they cannot be combined."
                    )
                names[role], self._owner[role] = name, member
        _refuse_noise_on_bits(self.members)
        self._plain = Defense()
        self.requires = frozenset().union(*(m.requires for m in self.members.values()))
        self.owns = frozenset(names)
        self.together = max(m.together for m in self.members.values())
        self.source = " + ".join(m.source for m in self.members.values() if m.source)

    def _by(self, role: str) -> Defense:
        return self._owner.get(role, self._plain)

    @property
    def variant(self) -> str:
        return "+".join(m.variant for m in self.members.values() if m.variant)

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        parties: dict[str, Party] = {}
        for name, member in self.members.items():
            for party, value in member.third_parties(seed).items():
                if party in parties:
                    raise UserError(f"defense '{name}' brings a second third party '{party}'.")
                parties[party] = value
        return parties

    def extra_parameters(
        self, network: NetworkView, params: State, stages: Sequence[str], rng: torch.Generator
    ) -> State:
        found: dict[str, Tensor] = {}
        for member in self.members.values():
            found |= member.extra_parameters(network, params, stages, rng)
        return found

    def variables(
        self, params: State, on_clients: Sequence[str], rng: torch.Generator
    ) -> tuple[State, State]:
        return self._by("variables").variables(params, on_clients, rng)

    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        drawn: dict[str, Tensor] = {}
        for member in self.members.values():
            drawn |= member.draw(variables, const, rng)
        return drawn

    def receive(self, state: State, const: State) -> State:
        return self._by("variables").receive(state, const)

    def realize(self, variables: State, const: State, draw: State) -> State:
        return self._by("variables").realize(variables, const, draw)

    def mean_realize(self, variables: State, const: State) -> State:
        return self._by("variables").mean_realize(variables, const)

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        return self._by("gradient").gradient(loss, variables, x, y, draw)

    def inspects(self, client: Client) -> bool:
        return any(member.inspects(client) for member in self.members.values())

    def inspect(self, loss: Loss, variables: State, x: Tensor, y: Tensor) -> State:
        found: dict[str, Tensor] = {}
        for member in self.members.values():
            found |= member.inspect(loss, variables, x, y)
        return found

    def joins(self, client: Client, sampled: bool) -> bool:
        return self._by("joins").joins(client, sampled)

    def batch(self, client: Client, size: int) -> Tensor | None:
        return self._by("batch").batch(client, size)

    def say(self, when: Stage, client: Client, local: Local | None, round: int) -> list[Message]:
        return [m for d in self.members.values() for m in d.say(when, client, local, round)]

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        for member in self.members.values():
            member.hear(when, client, heard)

    def smashed(self, q: Tensor, client: Client) -> Part:
        part = Part(values=q)
        for member in self.members.values():
            after = member.smashed(part.values, client)
            if part.present is not None:  # what one member withheld, the next cannot send
                after = replace(after, present=part.present & after.presence())
            part = after
        return part

    def labels(self, y: Tensor, client: Client) -> Tensor:
        for member in self.members.values():
            y = member.labels(y, client)
        return y

    def features_grad(self, g: Tensor, client: Client) -> Tensor:
        for member in self.members.values():
            g = member.features_grad(g, client)
        return g

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        for member in self.members.values():
            messages = member.upload(messages, local, client)
        return messages

    def finish_uploads(self, uploads: Mapping[str, list[Message]]) -> Mapping[str, list[Message]]:
        for member in self.members.values():
            uploads = member.finish_uploads(uploads)
        return uploads

    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture] | None:
        return self._by("mix").mix(uploads, heard)

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        return self._by("aggregate").aggregate(server, messages)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return tuple(m for d in self.members.values() for m in d.mechanisms())

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        return tuple(m for d in self.members.values() for m in d.mechanisms_in(round))

    def public_plans(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        found = [plans for d in self.members.values() if (plans := d.public_plans(messages))]
        most = max((len(plans) for plans in found), default=0)
        return [{k: v for p in found for k, v in p[i % len(p)].items()} for i in range(most)]

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Events of all members, which the ledger adds up: a valid bound, not a tight one,
        since what comes after a private mechanism is post-processing."""
        return tuple(e for d in self.members.values() for e in d.guarantee(facts))

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {
            f"{name}.{key}": value
            for name, member in self.members.items()
            for key, value in member.constants(facts).items()
        }

    def paper_formulas(self, facts: Facts) -> tuple[Formula, ...]:
        return tuple(
            replace(formula, name=f"{name}: {formula.name}")
            for name, member in self.members.items()
            for formula in member.paper_formulas(facts)
        )


def _refuse_noise_on_bits(members: Mapping[str, Defense]) -> None:
    sampler = None
    for name, member in members.items():
        acting = [m for m in member.mechanisms() if m.of in UPLOAD_KINDS]
        if sampler and any(not isinstance(m, BernoulliMask) for m in acting):
            raise UserError(
                f"defense '{name}' perturbs uploads of which '{sampler}' has made sampled bits or "
                f"probabilities; combine them as '{name}+{sampler}'."
            )
        if any(isinstance(m, BernoulliMask) for m in acting):
            sampler = name
