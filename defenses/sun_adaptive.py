"""LDP-FL by Sun et al.: Duchi's mechanism on the weights, whose values may be shuffled.

What the server then knows of a coordinate is which values were sent and how often. As each is one
of two public points, that is the number of clients that sent the upper one, and the mean of the
values tells just as much. So each upload arrives hidden, and the server notes the mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from bench.api import (
    SERVER,
    SUM,
    UPLOAD_KINDS,
    AdaptiveTwoPoint,
    Client,
    Event,
    Facts,
    Local,
    Message,
    Part,
    Sealed,
    Server,
    State,
    Summed,
)
from bench.toolkit.aggregation import filled, mean_over_present
from bench.toolkit.settings import Limits, check_number
from bench.toolkit.vectors import replace_values, showing
from defenses.bounded_ldp import Duchi, Target

_CLIENTS = "clients"
"""Of an attacker's rehearsal: how many clients' mean one of its own stands for."""
_BYTES = 8
"""Of a value that travels by itself: itself and its place, 32 bits each."""


@dataclass(kw_only=True, eq=False)
class SunAdaptive(Duchi):
    """LDP-FL: Duchi's mechanism on the weights, in a range of its own for each tensor.

    w in [c-r, c+r] becomes c +- r (E+1)/(E-1), with the plus sign with probability
    ((w-c)(E-1) + r(E+1)) / (2r(E+1)).

    Args:
        epsilon: Budget of one value, in (0, 700].
        slack: Radius over the largest distance of a broadcast weight from the tensor's mean,
            > 0; at 1 a weight that training moves outwards from the edge is clipped back to it.
        floor: Least radius, > 0; a tensor of equal values, e.g. fresh biases, has no spread.
        max_radius: Largest radius, >= floor; without it every round's noise widens the next
            one's range by (E+1)/(E-1), so that training diverges.
        shuffled: Whether clients split their upload and send every value by itself through a
            shuffler, as LDP-FL has it: the server reads per coordinate how many clients sent the
            upper of the two values, and not which.

    Departures. LDP-FL's c and r are set per layer and public, how is left to experience; here
    they follow the broadcast weights (slack, floor and max_radius are ours), since a range from
    a client's own weights would tell of them unprotected. The broadcast is what the server
    already has, so c and r cost no privacy. Clipping biases weights outside of the range towards
    the centre, by their distance from it. Where values are shuffled, it is taken for granted that
    they are, by a shuffler that tells nothing; LDP-FL has each sent after a random delay.
    Source: Sun, Qian, Chen, "LDP-FL", IJCAI 2021, arXiv:2007.15789.
    """

    source = "Sun, Qian, Chen, arXiv:2007.15789"
    bound: float = field(init=False)
    target: Target = field(init=False, default="weights")
    slack: Annotated[float, Limits("radius over the spread of the broadcast", above=0)] = 1.5
    floor: Annotated[float, Limits("least radius", above=0)] = 0.01
    max_radius: float = 0.1
    shuffled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("max_radius", self.max_radius, "from floor on", least=self.floor)
        self.bound = self.max_radius
        if self.shuffled:
            self.only_sums, self.owns = True, frozenset({"aggregate"})

    def _range(self, broadcast: Tensor) -> tuple[float, float]:
        return self.mechanisms()[0].interval(broadcast)

    def mechanisms(self) -> tuple[AdaptiveTwoPoint]:
        told = AdaptiveTwoPoint(
            of=self.target,
            epsilon=self.epsilon,
            radius=self.bound,
            slack=self.slack,
            floor=self.floor,
        )
        return (told,)

    # --- splitting and shuffling --------------------------------------------------------------
    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        if not self.shuffled:
            return super().upload(messages, local, client)
        released = [super().upload(messages, local, client)]
        if _CLIENTS not in client.plan:
            return [split_up(m) for m in released[0]]
        while len(released) < client.plan[_CLIENTS]:
            released.append(super().upload(messages, local, client))
        return [_mean(same) for same in zip(*released, strict=True)]

    def public_plans(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """An attacker rehearses the mean with one client, in the place of as many as sent."""
        count = sum(map(is_split_up, messages))
        return ({_CLIENTS: count},) if self.shuffled and count else ()

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        return mean_of_split_up(server, messages) if self.shuffled else None

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Shuffled: all counts of a round depend on a record, so that they compose as before."""
        summed = (Summed(what="the clients' perturbed values"),) if self.shuffled else ()
        return (*super().guarantee(facts), *summed)

    def constants(self, facts: Facts) -> dict[str, float | str]:
        """Shuffled: with what Theorem 3.1 of Feldman et al. proves for one value."""
        constants = super().constants(facts)
        if self.shuffled:
            constants["eps_one_value_shuffled"] = compute_shuffled_epsilon(
                self.epsilon, clients=facts.sampled, delta=facts.delta
            )
        return constants


def _mean(same: Sequence[Message]) -> Message:
    """The mean of several releases of one upload."""
    values = {n: torch.stack([m.parts[n].values for m in same]).mean(dim=0) for n in same[0].parts}
    return replace_values(same[0], values)


def split_up(upload: Message) -> Message:
    """An upload whose values the server gets without learning that they are this client's."""
    nothing = torch.tensor(False)
    sealed = {
        n: Sealed(n_bytes=_BYTES * int(p.presence().sum()), covers=p.told(), box=p)
        for n, p in upload.parts.items()
    }
    hidden = {n: showing(replace(p, absent="kept"), nothing) for n, p in upload.parts.items()}
    return replace(upload, parts=hidden, sealed=sealed)


def is_split_up(message: Message) -> bool:
    """Whether a message is an upload whose values came one by one."""
    return message.kind in UPLOAD_KINDS and bool(message.sealed)


def mean_of_split_up(server: Server, messages: Sequence[Message]) -> State:
    """The new state, the mean of all uploads, which the server notes of those that were split."""
    opened = [_open(m) if is_split_up(m) else m for m in messages]
    mean = mean_over_present(server, [filled(m, base=server.state) for m in opened])
    if arrived := [m for m in messages if is_split_up(m)]:
        assert server.ask is not None
        parts = {}
        for name in dict.fromkeys(n for m in arrived for n in m.sealed):
            covers = [m.sealed[name].covers for m in arrived if name in m.sealed]
            told = torch.stack(covers).any(dim=0)
            parts[name] = Part(values=mean[name], present=None if bool(told.all()) else told)
        noted = replace(arrived[0], kind="weights", sender=SUM, receiver=SERVER, sealed={})
        server.ask(noted.with_parts(parts))
    trained = server.trained or {}
    sent = {n for m in opened if m.kind in UPLOAD_KINDS for n in m.parts}
    return {n: v if n in sent else trained.get(n, v) for n, v in mean.items()}


def _open(message: Message) -> Message:
    parts = {n: s.box for n, s in message.sealed.items()}
    return replace(message, parts=parts, sealed={})


def compute_shuffled_epsilon(epsilon: float, *, clients: int, delta: float) -> float:
    """What shuffling proves for one value of one round, at `delta`; `epsilon` itself where it
    proves no more.

    log(1 + (E-1)/(E+1) (8 sqrt(E log(4/delta)) / sqrt(n) + 8 E / n)) for n clients, all but one
    of whom send honestly, while epsilon <= log(n / (16 log(2/delta))); E = e^epsilon.
    Source: Feldman, McMillan, Talwar, FOCS 2021, arXiv:2012.12803, Theorem 3.1.
    """
    if epsilon > math.log(clients / (16 * math.log(2 / delta))):
        return epsilon
    e = math.exp(epsilon)
    spread = 8 * math.sqrt(e * math.log(4 / delta) / clients) + 8 * e / clients
    return min(epsilon, math.log1p(math.tanh(epsilon / 2) * spread))
