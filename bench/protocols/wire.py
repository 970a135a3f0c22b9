"""The wire: who sent what to whom in one round, with the bytes it took."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bench.contract.defense import Party
from bench.contract.messages import EVERYONE, FORMER, SERVER, Message, Part

FEATURES, SMASHED_GRADIENT = "features", "smashed_gradient"
"""Kinds of what the server of a split protocol computes and sends to one client."""
_MOST_DELIVERIES = 100_000


class Wire:
    """Delivers messages between clients, third parties and the server, and logs them.

    Values are detached and cloned when sent, so nothing on the wire carries a graph or shares
    storage with a client. The log drops the boxes of sealed parts; the receiver gets them.

    Args:
        keeps: Whether to keep a log, which only an observed round needs.
        party: Of whose messages alone; None: of all.
        most_bytes: Of the messages in the log; beyond them it is emptied, and `logged` says so.
    """

    def __init__(
        self,
        parties: Mapping[str, Party],
        clients: Iterable[str],
        *,
        keeps: bool = True,
        party: str | None = None,
        most_bytes: float = math.inf,
    ) -> None:
        self.keeps, self.party = keeps, party
        self.most_bytes, self.logged = most_bytes, 0
        self.parties = dict(parties)
        self.clients = list(clients)
        self._among = frozenset(self.clients)
        self.log: list[Message] = []
        self.inbox: dict[str, list[Message]] = {n: [] for n in [*self.clients, SERVER, FORMER]}
        self.bytes_up = self.bytes_down = 0
        self.party_seconds = 0.0

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages and whatever third parties answer, until nobody has more to say."""
        queue = deque(messages)
        for _ in range(_MOST_DELIVERIES):
            if not queue:
                return
            queue.extend(self._deliver(queue.popleft()))
        raise RuntimeError(f"third parties still answer each other after {_MOST_DELIVERIES}.")

    def _deliver(self, message: Message) -> list[Message]:
        message = freeze(message)
        known = [*self.inbox, *self.parties, EVERYONE]
        if message.receiver not in known:
            raise ValueError(
                f"message '{message.kind}' of '{message.sender}' is addressed to "
                f"'{message.receiver}', expected one of {', '.join(known)}."
            )
        receivers = [message.receiver]
        if message.receiver == EVERYONE:
            receivers = [n for n in [*self.clients, SERVER] if n != message.sender]
        self.count(message, receivers)
        answers: list[Message] = []
        for name in receivers:
            if name in self.parties:
                began = time.perf_counter()
                answers.extend(self.parties[name].reply(message))
                self.party_seconds += time.perf_counter() - began
            else:
                self.inbox[name].append(message)
        return answers

    def count(self, message: Message, receivers: Sequence[str]) -> None:
        """Count a message's bytes and log it, whoever delivers it."""
        size = message.n_bytes
        if self.keeps and (self.party is None or _concerns(message, self.party)):
            self.logged += size
            # A copy: who receives a message may change it.
            self.log.append(_strip_boxes(freeze(message)))
            if self.logged > self.most_bytes:
                self.log.clear()
        if message.sender in self._among:
            self.bytes_up += size
        self.bytes_down += size * sum(r in self._among for r in receivers)

    def collect(self, name: str) -> list[Message]:
        """The messages waiting for a client or the server, whose inbox they leave."""
        waiting, self.inbox[name] = self.inbox[name], []
        return waiting

    def messages_for(self, party: str) -> tuple[Message, ...]:
        """Logged messages addressed to a party or to everyone, and what it computed and sent."""
        return tuple(m for m in self.log if _concerns(m, party))


def _concerns(message: Message, party: str) -> bool:
    computed = message.sender == party and message.kind in (FEATURES, SMASHED_GRADIENT)
    return computed or message.receiver in (party, EVERYONE)


def freeze(message: Message) -> Message:
    """Copy a message so that they share no storage, except for what is sealed."""
    return message.with_parts({n: _copy(p) for n, p in message.parts.items()})


def _copy(part: Part) -> Part:
    present = None if part.present is None else part.present.detach().clone()
    return replace(part, values=part.values.detach().clone(), present=present)


def _strip_boxes(message: Message) -> Message:
    sealed = message.sealed.items()
    return replace(
        message,
        sealed={n: replace(s, covers=s.covers.detach().clone(), box=None) for n, s in sealed},
    )
