"""What a suite says about task, protocol and threat."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationInfo,
    model_validator,
)

from bench.errors import UserError
from bench.names import GivenName
from bench.seeding import numpy_generator

TRAINING = "training"
"""The checkpoint of rounds that trained the model, which threats observe that are `as_trained`."""
MOST_RECORDED = 5
"""Rounds of a training that are recorded."""


def _checkpoint(name: str) -> str:
    if name in ("init", "final", TRAINING) or re.fullmatch(r"round-[1-9][0-9]{0,6}", name):
        return name
    raise UserError(
        f"a checkpoint is {TRAINING}, init, final or round-N (after N rounds), got '{name}'."
    )


Checkpoint = Annotated[str, AfterValidator(_checkpoint)]
"""When a round is observed: `init`, before the first; `round-N`, after N rounds; `final`, after the
last; `training`, rounds of the training itself."""


def rounds_before(checkpoint: Checkpoint, rounds: int) -> int:
    """Return how many of a run's `rounds` are played before a checkpoint's, or in all of them."""
    ends = {"init": 0, "final": rounds, TRAINING: rounds}
    return ends[checkpoint] if checkpoint in ends else int(checkpoint.removeprefix("round-"))


def rounds_to_record(rounds: int, seed: int) -> list[int]:
    """Return which of a run's `rounds`, from 0, are recorded: the first, the middle one, the last,
    and two that stay hidden from plugins."""
    known = {0, rounds // 2, rounds - 1}
    others = [number for number in range(rounds) if number not in known]
    secret = min(MOST_RECORDED - len(known), len(others))
    hidden = numpy_generator(seed, "recorded rounds").choice(others, secret, replace=False)
    return sorted(known.union(hidden.tolist()))


def evenly(rounds: int, points: int) -> list[int]:
    """So many rounds spread evenly over a run's, the last one included; all where there are more
    points than rounds."""
    points = min(points, rounds)
    return sorted({round(i * rounds / points) for i in range(1, points + 1)} - {0})


LEAST_DRAWS = 100
"""The fewest draws of an audit, per input of a pair."""
MOST_DRAWS = 10**6
"""The most of them."""
MOST = 10**9
"""What a suite counts, and its seconds, are at most so many."""
RECORDED = {"recorded": True}
"""Context of validating what an older run recorded: its suite may name a thing twice, which is
counted once all the same."""
STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
"""Of what a suite holds: no unknown key, no text or truth value for a number, no NaN."""
_T = TypeVar("_T")
Listed = Annotated[list[_T], Strict(False)]
"""A list, which a script may write as a tuple."""


_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def work_text(*, batch: int, steps: int | None = None, epochs: float | None = None) -> str:
    """Work of a client in one round: batch 32, five epochs."""
    number, unit = (steps, "step") if epochs is None else (epochs, "epoch")
    whole = number is not None and number == int(number) and number < len(_NUMBERS)
    word = _NUMBERS[int(number or 0)] if whole else f"{number:g}"
    return f"batch {batch}, {word} {unit}{'' if number == 1 else 's'}"


def describe_works(by_threat: Mapping[str, str]) -> str:
    """Works of observed rounds in one line, each with its threat's name where there are several:
    batch 1, one step (server); batch 8, one step (batch8)."""
    if len(set(by_threat.values())) <= 1:
        return next(iter(by_threat.values()), "")
    return "; ".join(f"{work} ({name})" for name, work in by_threat.items())


class TaskSettings(BaseModel):
    """A data set with a model.

    Attributes:
        dataset: Name of the data set, `folder:PATH` or `npz:PATH`.
        dataset_settings: Settings of its loader.
        model: Name of the model.
        model_settings: Settings of its builder.
        protocol: Values that replace those of the suite's protocol.
    """

    model_config = STRICT

    dataset: str
    dataset_settings: dict[str, Any] = Field(default_factory=dict)
    model: str
    model_settings: dict[str, Any] = Field(default_factory=dict)
    protocol: dict[str, Any] = Field(default_factory=dict)


class ProtocolSettings(BaseModel):
    """How the model is trained.

    The server averages uploads with equal weights.

    Attributes:
        name: "fedsgd" (one step per round, its gradient is uploaded), "fedavg" (local training, its
            update is uploaded) or "splitfed" (the first stages on the clients, the others on the
            server).
        clients: Number of clients.
        participation: Fraction of them that is sampled per round.
        sampling: "fixed" (that share of the clients, at least one) or "poisson" (every client by
            itself with that probability; a round may be empty).
        rounds: Number of rounds.
        local_steps: Steps of every client per round. Exactly one of `local_steps` and
            `local_epochs` is given, but none for fedsgd.
        local_epochs: Passes over a client's samples per round.
        batch: Local batch size; a client with fewer samples uses all it has.
        lr: Learning rate of plain SGD.
        server_lr: By which the server multiplies its step, which is what it aggregated and
            `server_momentum` of the last round's step; neither for splitfed. Defaults are recorded
            without the keys.
        server_momentum: See `server_lr`.
        partition: How samples are dealt to clients: evenly at random, by label from a Dirichlet
            distribution, in shards of one label, or "natural": each client is one of the data's
            own, such as a writer, drawn by the seed among those that hold as many samples as the
            threats observe.
        alpha: Concentration of the Dirichlet distribution.
        shards: Shards that every client has.
        cut: The last stage on the clients under splitfed, or several that they have in turn.
        labels: Under splitfed, "private" (the head and its loss are on the clients too) or "shared"
            (labels are sent with every batch).
    """

    model_config = STRICT

    name: Literal["fedsgd", "fedavg", "splitfed"] = "fedavg"
    clients: int = Field(10, ge=1, le=MOST)
    participation: float = Field(1.0, gt=0, le=1)
    sampling: Literal["fixed", "poisson"] = "fixed"
    rounds: int = Field(20, ge=1, le=MOST)
    local_steps: int | None = Field(None, ge=1, le=MOST)
    local_epochs: float | None = Field(None, gt=0, le=MOST)
    batch: int = Field(32, ge=1, le=MOST)
    lr: float = Field(0.1, gt=0)
    server_lr: float = Field(1.0, gt=0, exclude_if=partial(operator.eq, 1.0))
    server_momentum: float = Field(0.0, ge=0, lt=1, exclude_if=operator.not_)
    partition: Literal["iid", "dirichlet", "shards", "natural"] = "dirichlet"
    alpha: float = Field(0.5, gt=0)
    shards: int = Field(1, ge=1, le=MOST)
    cut: str | Listed[str] | None = None
    labels: Literal["private", "shared"] = "private"

    @property
    def participants(self) -> int:
        """Clients that the server samples per round, under Poisson sampling on average."""
        return max(1, round(self.participation * self.clients))

    @property
    def cuts(self) -> tuple[str, ...]:
        """Cuts of the clients, in turn; none but under splitfed. Stages that are submodules of a
        user's model may be written as torch does, layer1.0 for layer1/0."""
        cuts = [self.cut] if isinstance(self.cut, str) else self.cut or ()
        return tuple(cut.replace(".", "/") for cut in cuts)

    @property
    def work(self) -> str:
        """What a client does in a round of the training: batch 32, five epochs."""
        steps = 1 if self.name == "fedsgd" else self.local_steps
        return work_text(batch=self.batch, steps=steps, epochs=self.local_epochs)

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
        if self.name == "splitfed" and (self.server_lr != 1 or self.server_momentum):
            raise UserError("splitfed takes no step at the server; leave server_lr/momentum out.")
        return self


class ThreatSettings(BaseModel):
    """What the attacker observes and is granted.

    Batch size, steps, learning rate and the defense with its public settings are always granted. Of
    clients that are cut at several places, those with the first cut are observed.

    Attributes:
        name: The name by which attacks ask for it; its observations' files are named after it.
        victims: Clients that are observed.
        rounds: Rounds in which the same samples of the victims are seen: spread evenly from the
            first state to the checkpoint's; at init that many from the first state, each with fresh
            randomness. One: the checkpoint's alone.
        work: "single" (a round of its own, of `batch`, `local_steps` and `local_epochs` below) or
            "as_trained": rounds that trained the model, of all that took part, at the checkpoint
            "training". In older runs also "trained": a round of its own with that work.
        batch: Distinct samples of each step.
        local_steps: Steps of each victim in a local epoch, on distinct samples.
        local_epochs: Passes over these samples, each in an order of its own.
        labels: Whether the private labels are granted.
        mode: How the network normalises in that round; eval uses statistics of public data.
        aux: Number of public samples, None for all.
        hears: What the server learns of models: "addressed", what the protocol tells it (the model
            of every observed round, and the next one where it forms it), or "every_broadcast", the
            next one also where a key server or the clients form it.
        membership: Whether it is measured which samples the server can tell a client trained on
            (only "as_trained"). A suite that does not ask for it is recorded without the key.
    """

    model_config = STRICT

    name: GivenName = "server"
    victims: int = Field(8, ge=1, le=MOST)
    rounds: int = Field(1, ge=1, le=MOST)
    work: Literal["single", "as_trained", "trained"] = "single"
    batch: int = Field(1, ge=1, le=MOST)
    local_steps: int = Field(1, ge=1, le=MOST)
    local_epochs: int = Field(1, ge=1, le=MOST)
    labels: bool = False
    mode: Literal["train", "eval"] = "eval"
    aux: int | None = Field(None, ge=1, le=MOST)
    hears: Literal["addressed", "every_broadcast"] = "addressed"
    membership: bool = Field(False, exclude_if=operator.not_)

    @property
    def recorded(self) -> bool:
        """Whether rounds are observed that trained the model."""
        return self.work == "as_trained"

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        """Rounds of the training are in training mode."""
        if isinstance(value, Mapping) and value.get("work") == "as_trained":
            return {"mode": "train", **value}
        return value

    @model_validator(mode="after")
    def _one_source_of_work(self, info: ValidationInfo) -> ThreatSettings:
        if self.work == "trained" and info.context != RECORDED:
            raise UserError(
                f'threat {self.name}: work "trained" is gone; "as_trained" observes rounds of '
                "the training itself."
            )
        if self.membership and not self.recorded:
            raise UserError(f'threat {self.name}: membership needs work = "as_trained".')
        own = ("victims", "rounds", "batch", "local_steps", "local_epochs")
        given = [n for n in own if getattr(self, n) != type(self).model_fields[n].default]
        if self.recorded and (given or self.mode != "train"):
            raise UserError(
                f"threat {self.name} observes the training's own rounds, clients, batches and "
                f"mode; leave {', '.join(given or ['mode'])} out."
            )
        return self

    def schedule(self, rounds: int) -> list[int]:
        """After how many rounds each observed one is played, for a checkpoint after `rounds` of
        them; the last is the checkpoint's own."""
        if self.rounds == 1:
            return [rounds]
        return [round(i * rounds / (self.rounds - 1)) for i in range(self.rounds)]

    def describe_work(self, protocol: ProtocolSettings) -> str:
        """Return what a victim does in an observed round: batch 1, one step; of several rounds with
        their number: batch 1, one step, in 11 rounds."""
        if self.recorded:
            return f"rounds of the training: {protocol.work}"
        text = work_text(batch=self.batch, steps=self.local_steps)
        if self.local_epochs > 1:
            text += f" in each of {self.local_epochs} epochs"
        if self.work == "trained":
            text = protocol.work
        return text if self.rounds == 1 else f"{text}, in {self.rounds} rounds"

    def describe(self) -> str:
        """One line for a report's row."""
        labels = "labels granted" if self.labels else "labels unknown"
        aux = "all public data" if self.aux is None else f"{self.aux} public samples"
        heard = "" if self.hears == "addressed" else ", every broadcast heard"
        rounds = "one round" if self.rounds == 1 else f"{self.rounds} rounds"
        work = f"batch {self.batch}, {self.local_steps} step(s)"
        if self.local_epochs > 1:
            work += f" in each of {self.local_epochs} epochs"
        if self.work == "trained":
            work = "batch and steps of the training"
        observed = f"{rounds} of {self.victims} clients, {work}"
        if self.recorded:
            observed = f"up to {MOST_RECORDED} rounds of the training, all that took part"
        return f"{self.name}: {observed}, {self.mode} mode, {labels}, {aux}{heard}"
