"""What a suite says about task, protocol and threat."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bench.errors import UserError

Checkpoint = Literal["init", "final"]
LEAST_DRAWS = 100
"""Of an audit, per input of a pair."""


class TaskSettings(BaseModel):
    """A dataset with a model; protocol overrides single values of the suite's protocol."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    dataset_settings: dict[str, Any] = Field(default_factory=dict)
    model: str
    model_settings: dict[str, Any] = Field(default_factory=dict)
    protocol: dict[str, Any] = Field(default_factory=dict)


class ProtocolSettings(BaseModel):
    """How the model is trained.

    name: fedsgd (one step per round, gradient uploaded), fedavg (local training, update
    uploaded) or splitfed (the first stages on the clients, the others on the server). clients;
    participation: fraction sampled per round, at least one client. rounds. local_steps or
    local_epochs (exactly one of them, but none for fedsgd). batch: local batch size; a client
    with fewer samples uses all it has. lr: learning rate of plain SGD. partition: iid, dirichlet
    with concentration alpha, or shards, of which every client has so many of one label. The server
    averages uploads with equal weights. splitfed: cut, the last stage on the clients, or several
    that the clients have in turn; labels, private (the head and its loss are on the clients too) or
    shared (labels are sent with every batch).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["fedsgd", "fedavg", "splitfed"] = "fedavg"
    clients: int = Field(10, ge=1)
    participation: float = Field(1.0, gt=0, le=1)
    rounds: int = Field(20, ge=1)
    local_steps: int | None = Field(None, ge=1)
    local_epochs: float | None = Field(None, gt=0)
    batch: int = Field(32, ge=1)
    lr: float = Field(0.1, gt=0)
    partition: Literal["iid", "dirichlet", "shards"] = "dirichlet"
    alpha: float = Field(0.5, gt=0)
    shards: int = Field(1, ge=1)
    cut: str | list[str] | None = None
    labels: Literal["private", "shared"] = "private"

    @property
    def cuts(self) -> tuple[str, ...]:
        """Cuts of the clients, in turn; none but under splitfed."""
        return tuple([self.cut] if isinstance(self.cut, str) else self.cut or ())

    @model_validator(mode="after")
    def _local_work(self) -> ProtocolSettings:
        given = [v for v in (self.local_steps, self.local_epochs) if v is not None]
        if self.name == "fedsgd" and given:
            raise UserError("fedsgd takes one step per round; leave local_steps/epochs out.")
        if self.name != "fedsgd" and len(given) != 1:
            raise UserError(f"{self.name} needs exactly one of local_steps and local_epochs.")
        if self.name == "splitfed" and not self.cut:
            raise UserError("splitfed needs a cut, the last stage on the clients.")
        if self.name != "splitfed" and (self.cut is not None or self.labels != "private"):
            raise UserError(f"{self.name} has no cut and sends no labels; leave both out.")
        return self


class ThreatSettings(BaseModel):
    """What the attacker observes and is granted.

    One round is observed from each checkpoint: `victims` clients, each with local_steps steps
    on batches of `batch` distinct samples. labels: whether the private labels are granted.
    mode: train or eval, how the network normalises in that round (eval uses statistics of
    public data). hears_broadcast: whether the server learns the state after the round, also
    where it aggregated ciphertexts that only a key server can open. aux: number of public
    auxiliary samples, or null for all. Always granted: batch size, steps, learning rate, and the
    defense with its public settings. Of clients that are cut at several places, those with the
    first cut are observed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "server"
    victims: int = Field(8, ge=1)
    batch: int = Field(1, ge=1)
    local_steps: int = Field(1, ge=1)
    labels: bool = False
    mode: Literal["train", "eval"] = "eval"
    aux: int | None = Field(None, ge=1)
    hears_broadcast: bool = True

    def describe(self) -> str:
        """One line for a report's row."""
        labels = "labels granted" if self.labels else "labels unknown"
        aux = "all public data" if self.aux is None else f"{self.aux} public samples"
        unheard = "" if self.hears_broadcast else ", the new state unheard"
        return (
            f"{self.name}: one round of {self.victims} clients, batch {self.batch}, "
            f"{self.local_steps} step(s), {self.mode} mode, {labels}, {aux}{unheard}"
        )
