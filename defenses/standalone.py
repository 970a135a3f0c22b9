"""Standalone: no client uploads what it trained, so each one's network is its own."""

from bench.api import Client, Defense, Event, Facts, Local, Message, Withheld


class Standalone(Defense):
    """Nothing that a client trains is uploaded; it trains alone, from its own last values.

    There is no common model under fedavg and fedsgd. Under a split protocol smashed data still
    goes up at every step, and the server trains the one upper part with it for all clients.
    Source: the baseline of PM-SFL, Sec. 6.2, for split protocols.
    """

    source = "PM-SFL, Sec. 6.2 (Standalone)"

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        return []

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Of the upload alone; the ledger adds a split protocol's smashed data."""
        return (Withheld(what="what the client trains"),)
