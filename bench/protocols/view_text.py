"""The JSON of a view, as `save_seen` and `write_view` make it, checked for what its readers use.

Files of views come from other people, and are edited by hand. Whatever is wrong in one is told
here, with its place in the file, and not by the attack that stumbles on it.
"""

import json
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, Strict, TypeAdapter, field_validator

from bench.contract.mechanisms import Mechanism
from bench.contract.messages import Absent
from bench.errors import UserError

Size = Annotated[int, Strict(), Field(ge=1, le=10**9)]
Steps = Annotated[int, Strict(), Field(ge=1, le=10**4)]
"""Each is computed one after the other, in every try."""
Number = Annotated[int, Strict(), Field(ge=0, le=10**9)]
Taken = Annotated[int, Strict(), Field(ge=0, le=10**4)]
"""Steps behind a message."""
Label = Annotated[int, Strict()]
Epsilon = Annotated[float, AllowInfNan(True)]
"""Strict JSON has "inf" as a text."""
Switch = Annotated[bool, Strict()]


class _Text(BaseModel):
    """What else stands there is left alone: plugins and other versions may add to it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class PartText(_Text):
    """See `bench.contract.messages.Part`; `present`: whether the file has the pattern."""

    present: Switch
    bits: Annotated[int, Strict(), Field(ge=1, le=64)]
    absent: Absent = "kept"  # not in files before 0.2.0


class SealedText(_Text):
    """See `bench.contract.messages.Sealed`."""

    n_bytes: Number


class MessageText(_Text):
    """See `bench.contract.messages.Message`."""

    kind: str
    sender: str
    receiver: str
    round: Number
    step: Number
    local_steps: Taken
    parts: dict[str, PartText]
    sealed: dict[str, SealedText]


class NetworkText(_Text):
    """What `Network.describe` tells."""

    name: str
    settings: dict[str, Any]
    shape: Annotated[list[Size], Field(min_length=1, max_length=8)]
    classes: Size
    head: list[str]


class DefenseText(_Text):
    """A defense by name, and its public settings."""

    name: str
    settings: dict[str, Any]


class KnownText(_Text):
    """What the threat grants."""

    batch: Size
    local_steps: Steps
    samples: Size
    lr: Annotated[float, Strict(), Field(gt=0, le=1e9)]
    mode: Literal["train", "eval"]
    defense: DefenseText
    mechanisms: list[dict[str, Any]]
    cut: str = ""
    summed: Size = 1
    truth_labels: list[list[Label]] = Field(default=[])

    @field_validator("mechanisms")
    @classmethod
    def _as_they_are_made(cls, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Check the mechanisms of leakbench; a plugin's may not be loaded yet, and the attack
        checks them."""
        for entry in given:
            kind = Mechanism.kinds.get(str(entry.get("kind")))
            if kind is None:
                continue
            own = {f.name: entry[f.name] for f in fields(kind) if f.name in entry}
            if any(value != value for value in own.values()):
                raise UserError(f"{entry['kind']} has a setting that is no number")
            TypeAdapter(kind).validate_json(json.dumps(own), strict=True)
        return given


class PrivacyText(_Text):
    """What the ledger told of a captured run."""

    eps_record: Epsilon
    eps_claimed: Epsilon | None
    delta: Annotated[float, Strict()]
    unit: str
    reasons: list[str]


class ViewText(_Text):
    """One release.

    Attributes:
        earlier: How many releases stand beside it.
        states: Names of the tensors of each state; None where the party does not learn it.
        server: The same of the server's variables before each step.
        categorical: Column ranges of one-hot columns.
        privacy: Of captured runs with noise.
    """

    protocol: str
    party: str
    labels: Literal["private", "shared"]
    network: NetworkText
    known: KnownText
    clients: list[str]
    earlier: Number = 0
    states: dict[str, list[str] | None]
    server: list[list[str] | None]
    messages: list[MessageText]
    categorical: list[tuple[Number, Number]] = Field(default=[])
    privacy: PrivacyText | None = None

    @field_validator("messages")
    @classmethod
    def _of_every_client(cls, given: list[MessageText], info: Any) -> list[MessageText]:
        """Either all clients sent something or, under `standalone`, none did."""
        clients = set(info.data.get("clients", ()))
        silent = clients - {m.sender for m in given}
        if silent and silent != clients:
            raise UserError(f"there is no message of client {min(silent)}")
        return given
