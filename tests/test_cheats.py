"""Defenses that cheat: each ends in a failed check, a flag, or the undefended leakage."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from bench.api import Client, Defense, GaussianNoise, Local, Mechanism, Message, Part, Server, State
from bench.contract.mechanisms import BernoulliMask, SignPerturbation, TwoPoint
from bench.contract.messages import SERVER, SUM
from bench.data.dataset import Dataset
from bench.protocols.aggregated import _aggregate_again, _candidates, read_updates
from bench.protocols.federation import Federation, RoundResult
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import READ_BY_AGGREGATION, record_round
from bench.protocols.settings import ProtocolSettings
from bench.records import FlagCode
from bench.registry import Registry
from bench.report.leaderboard import rows
from bench.report.verdicts import has_use
from bench.sandbox.declared import MessageCheck
from bench.sandbox.findings import Broken, NotChecked
from bench.sandbox.noise import Pair, checks_of
from bench.toolkit.aggregation import mean_over_present
from bench.toolkit.vectors import change_uploads
from tests.conftest import Run, federation_of, network_for
from tests.test_recorded import AS_TRAINED
from tests.test_shipped_plugins_conform import DEFENSES, OFTEN, shipped

STD = 0.05


def mapped(message: Message, change: Callable[[torch.Tensor], torch.Tensor]) -> Message:
    return message.with_parts(
        {n: replace(p, values=change(p.values)) for n, p in message.parts.items()}
    )


def noised(message: Message, rng: torch.Generator, std: float) -> Message:
    return mapped(message, lambda v: v + std * torch.randn(v.shape, generator=rng))


class Noisy(Defense):
    """Declares noise, and has a server that may look for more than it declares."""

    owns = frozenset({"aggregate"})
    std = STD

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (GaussianNoise(of="update", std=self.std),)

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        return mean_over_present(server, messages)


class SentBeside(Noisy):
    """Huge noise in the update, and the update itself in another message, which the server uses."""

    std = 1e4

    def beside(self, plain: Message) -> list[Message]:
        return [replace(plain, kind="telemetry")]

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        (plain,) = messages
        return [noised(plain, client.rng["defense"], self.std), *self.beside(plain)]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        true = [replace(m, kind="update") for m in messages if m.kind == "telemetry"]
        return mean_over_present(server, true)


class NoiseBesideWeights(Defense):
    """Weights with huge noise, and the noise in another message."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        def hidden(plain: Message) -> list[Message]:
            noise = noised(mapped(plain, torch.zeros_like), client.rng["defense"], 1e4)
            sent = {
                n: replace(p, values=p.values + noise.parts[n].values)
                for n, p in plain.parts.items()
            }
            return [plain.with_parts(sent), replace(noise, kind="telemetry")]

        return change_uploads(messages, "weights", local, hidden)


class MedianOfBeside(SentBeside):
    """The same with cubes, of whose roots the server takes the median: only aggregation of one
    client's messages reads them."""

    def beside(self, plain: Message) -> list[Message]:
        return [replace(mapped(plain, lambda v: v.double() ** 3), kind="telemetry")]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        true = [m.parts for m in messages if m.kind == "telemetry"]
        roots = {n: torch.stack([p[n].values for p in true]) for n in server.state}
        roots = {n: v.sign() * v.abs() ** (1 / 3) for n, v in roots.items()}
        return {n: v + roots[n].median(dim=0).values.to(v) for n, v in server.state.items()}


class LastBits(Noisy):
    """Declared noise whose last bits hold the update's: the server reads them."""

    grain = 2.0**-6

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        (plain,) = messages
        loud = noised(plain, client.rng["defense"], STD)

        def hidden(name: str, part: Part) -> Part:
            coarse = (part.values / self.grain).round() * self.grain
            return replace(part, values=coarse + plain.parts[name].values.clamp(-0.007, 0.007))

        return [loud.with_parts({n: hidden(n, p) for n, p in loud.parts.items()})]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        def last_bits(values: torch.Tensor) -> torch.Tensor:
            return values - (values / self.grain).round() * self.grain

        return mean_over_present(server, [mapped(m, last_bits) for m in messages])


class ByAnother(Noisy):
    """Noise of the declared law, which the next client sends in its own second message."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        (plain,) = messages
        own, others = (
            torch.Generator().manual_seed(4 * plain.round + number % 4)
            for number in (client.number, client.number - 1)
        )
        noise = noised(mapped(plain, torch.zeros_like), others, STD)
        return [noised(plain, own, STD), replace(noise, kind="aid")]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        aids = [m for m in messages if m.kind == "aid"]
        away = [replace(m, kind="update") for m in aids]
        loud = mean_over_present(server, messages)
        noise = mean_over_present(server, away)
        return {n: v - (noise[n] - server.state[n]) for n, v in loud.items()}


class Erases(Defense):
    """The server's aggregation erases what the log of messages shows."""

    owns = frozenset({"aggregate"})

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        after = mean_over_present(server, messages)
        for message in messages:
            for part in message.parts.values():
                part.values.zero_()
        return after


class ZerosIn(Defense):
    """Zeros in some rounds, the true update in the others."""

    def __init__(self, *, when: Callable[[Message, Local], bool]) -> None:
        self.when = when

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        if not self.when(messages[0], local):
            return messages
        return [self.instead(m) for m in messages]

    def instead(self, message: Message) -> Message:
        return mapped(message, torch.zeros_like)


class WithheldIn(ZerosIn):
    """Nothing is sent in these rounds."""

    def instead(self, message: Message) -> Message:
        parts = message.parts.items()
        return message.with_parts(
            {n: replace(p, present=torch.zeros_like(p.values, dtype=torch.bool)) for n, p in parts}
        )


class LazyIn(Defense):
    """No gradient in the first round and in the last, as far as it can tell."""

    owns = frozenset({"gradient"})
    calls = 0

    def gradient(self, loss, variables, x, y, draw):  # type: ignore[no-untyped-def]
        gradients = super().gradient(loss, variables, x, y, draw)
        LazyIn.calls += 1
        return {n: 0 * g for n, g in gradients.items()} if LazyIn.calls <= 2 else gradients


class NotFinite(Defense):
    """A value that no attack can read, in attacked rounds; the server drops it."""

    owns = frozenset({"aggregate"})

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        plain = mapped(messages[0], torch.clone)
        if plain.round in ATTACKED:
            next(iter(plain.parts.values())).values.view(-1)[0] = torch.nan
        return [plain]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        return mean_over_present(server, [mapped(m, torch.nan_to_num) for m in messages])


class NoiseThatCancels(Defense):
    """Noise of the declared law in every round, of which the next round takes away its half."""

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (GaussianNoise(of="update", std=STD * 2**0.5),)

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        (plain,) = messages
        drawn = {
            n: STD * torch.randn(p.values.shape, generator=client.rng["defense"])
            for n, p in plain.parts.items()
        }
        again = {n: STD * torch.randn(v.shape, generator=client.rng["defense"])
                 for n, v in drawn.items()}  # fmt: skip
        before = client.memory.get("drawn", again)
        client.memory["drawn"] = drawn
        parts = plain.parts.items()
        sent = {n: replace(p, values=p.values + drawn[n] - before[n]) for n, p in parts}
        return [plain.with_parts(sent)]


class HonestWhereItGuesses(Noisy):
    """The declared noise in the rounds that everybody knows to be attacked, and on forks."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        known = messages[0].round in (0, 4, 7) or local.steps == 1
        return [noised(m, client.rng["defense"], STD if known else 0.0) for m in messages]


class LazyOnOne(Defense):
    """No gradient of a batch of one sample."""

    owns = frozenset({"gradient"})

    def gradient(self, loss, variables, x, y, draw):  # type: ignore[no-untyped-def]
        gradients = super().gradient(loss, variables, x, y, draw)
        return {n: 0 * g for n, g in gradients.items()} if len(x) == 1 else gradients


class OtherSamples(Defense):
    """Changes what the truth is read from, once it was trained on, and puts it back."""

    owns = frozenset({"inspect"})

    def inspects(self, client: Client) -> bool:
        client.x.copy_(client.memory.pop("x", client.x))
        return False

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        client.memory["x"] = client.x.clone()
        client.x.copy_(client.x.flip(0))
        return messages


class InTheHeader(SentBeside):
    """Huge noise; a header's number spells the update, which the server reads."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        (plain,) = messages
        spelled = b"".join(p.values.half().numpy().tobytes() for p in plain.parts.values())
        loud = noised(plain, client.rng["defense"], 1e4)
        return [replace(loud, local_steps=int.from_bytes(b"1" + spelled, "big"))]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        def spelled(message: Message) -> Message:
            number = message.local_steps
            raw = bytearray(number.to_bytes(number.bit_length() // 8 + 1, "big").lstrip(b"\0")[1:])
            values = torch.frombuffer(raw, dtype=torch.float16).float()
            each = values.split([p.values.numel() for p in message.parts.values()])
            shaped = zip(message.parts.items(), each, strict=True)
            parts = {n: replace(p, values=v.view_as(p.values)) for (n, p), v in shaped}
            return replace(message, parts=parts, local_steps=1)

        return mean_over_present(server, [spelled(m) for m in messages])


class InThePattern(SentBeside):
    """Huge noise; which values are sent is which of them grew, and the server steps that way."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        (plain,) = messages
        loud = noised(plain, client.rng["defense"], 1e4)
        parts = loud.parts.items()
        grown = {n: replace(p, present=plain.parts[n].values > 0) for n, p in parts}
        return [loud.with_parts(grown)]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        steps = {
            n: torch.stack([2.0 * m.parts[n].presence() - 1 for m in messages]).mean(0)
            for n in server.state
        }
        return {n: v + 0.001 * steps[n] for n, v in server.state.items()}


class InTheOrder(SentBeside):
    """Huge noise; how many empty messages a client sends of each kind spells its update: slow, but
    the timing of messages could carry as much."""

    def beside(self, plain: Message) -> list[Message]:
        flat = torch.cat([p.values.flatten() for p in plain.parts.values()])
        ticks = [
            replace(plain, kind="tick", step=int(i), parts={})
            for i in flat.abs().topk(flat.numel() // 3).indices.tolist()
        ]
        return [replace(t, kind="tock") if flat[t.step] < 0 else t for t in ticks]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        flat = torch.zeros(sum(v.numel() for v in server.state.values()))
        for message in messages:
            if message.kind in ("tick", "tock"):
                flat[message.step] += 0.001 if message.kind == "tick" else -0.001
        each = flat.split([v.numel() for v in server.state.values()])
        return {n: v + e.view_as(v) for (n, v), e in zip(server.state.items(), each, strict=True)}


def observed(digits: Dataset, defense: Defense) -> tuple[Federation, RoundResult]:
    """A round of one step that everybody takes part in."""
    federation = federation_of(digits, network_for(digits), defense)
    work = LocalWork(protocol="fedavg", batch=4, lr=0.1, local_steps=1)
    return federation, federation.play(work, [c.id for c in federation.clients], observed=True)


def flagged(digits: Dataset, defense: Defense, rounds: int = 8) -> tuple[str, ...]:
    """What a run says of which rounds 0, 3 and 7 are recorded, and a stress round after it."""
    federation = federation_of(digits, network_for(digits), defense, each=12)
    declared = MessageCheck(defense, 0, 4, federation.clients)
    work = LocalWork(protocol="fedavg", batch=4, lr=0.1, local_steps=2)
    ids = [c.id for c in federation.clients]
    for number in range(rounds):
        recorded = number in ATTACKED
        result = federation.play(work, ids, observed=recorded, watched=declared.choose_watched(ids))
        declared.check_round(federation, result, "recorded" if recorded else "training")
    fork = federation.fork("test")
    fork.buffers = fork.network.calibrate(fork.mean_weights(), digits.aux_x)
    fork.queues, fork.pinned = {c.id: torch.tensor([5]) for c in fork.clients[:2]}, True
    single = LocalWork(protocol="fedavg", batch=1, lr=0.1, local_steps=1, mode="eval")
    result = fork.play(single, ids[:2], observed=True)
    declared.check_round(fork, result, "of its own")
    return declared.reasons()


ATTACKED = (0, 3, 7)
CHANGED = "is changed by up to"
CHEATS = {
    "zeros in attacked rounds": (
        ZerosIn(when=lambda message, local: message.round in ATTACKED), f"round 0: .* {CHANGED}"),
    "zeros of one step": (
        ZerosIn(when=lambda message, local: local.steps == 1), f"round 8 on a fork: .* {CHANGED}"),
    "nothing in attacked rounds": (
        WithheldIn(when=lambda message, local: message.round in ATTACKED), "send less of their"),
    "no gradient in the first": (LazyIn(), "clients train less in rounds that are attacked"),
    "no gradient of one sample": (LazyOnOne(), "fork: the gradient of one sample is not that of"),
    "honest where it guesses": (HonestWhereItGuesses(), "a std of 0.05007, but 9466 draws have 0"),
    "hidden in the last bits": (LastBits(), "the std is as declared, but the law is not"),
    "not finite": (NotFinite(), "round 0: values are sent that are not finite"),
    "other samples": (OtherSamples(), "round 0: the samples of client-0 were changed"),
    "noise that cancels over rounds": (NoiseThatCancels(), "round 1: .* a correlation of -0.5"),
}  # fmt: skip
"""Defenses by what they do, and a reason for which each is flagged."""


@pytest.mark.parametrize("name", CHEATS)
def test_rounds_outside_of_what_is_declared_are_flagged(digits: Dataset, name: str) -> None:
    LazyIn.calls = 0
    defense, reason = CHEATS[name]
    assert re.search(reason, "\n".join(flagged(digits, defense)))


def test_an_honest_defense_of_the_same_kind_is_not_flagged(digits: Dataset) -> None:
    assert not flagged(digits, Defense())


READ_BY_THE_SERVER = [
    *(
        SentBeside,
        NoiseBesideWeights,
        MedianOfBeside,
        LastBits,
        ByAnother,
        InTheHeader,
        InThePattern,
        InTheOrder,
    )
]


@pytest.mark.parametrize("cheat", READ_BY_THE_SERVER)
def test_what_aggregation_reads_is_an_upload(digits: Dataset, cheat: type[Defense]) -> None:
    federation, result = observed(digits, cheat())
    told = read_updates(federation.defense, result, list(result.trained))
    assert told.keys() == result.trained.keys()
    for client, message in told.items():
        true, read = (
            torch.cat([p.values.flatten() for p in m.parts.values()])
            for m in (result.trained[client], message)
        )
        least = 0.3 if cheat in (InThePattern, InTheOrder) else 0.75  # which tell signs only
        assert torch.cosine_similarity(true, read, dim=0) > least


class HalfOfTheWeights(Defense):
    """Weights times a half, which leave most of the broadcast in an update."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        return change_uploads(messages, "weights", local, lambda m: mapped(m, lambda v: v / 2))


def test_an_upload_alone_tells_no_more_than_itself(digits: Dataset) -> None:
    """Weights that were sent hold the broadcast, which may resemble what a few values hide."""
    federation, result = observed(digits, HalfOfTheWeights())
    total = _aggregate_again(federation.defense, result, result.aggregation.messages)
    for client in result.trained:
        *_, combined = _candidates(federation.defense, result, client, total)
        assert combined[1] == 0


def test_of_a_long_training_drawn_rounds_are_checked_to_its_end() -> None:
    """Each draw is followed by that client's next upload, with whose noise it is compared."""
    ids = [str(n) for n in range(10)]
    draw = torch.Generator().manual_seed(5)
    parts = [[ids[i] for i in torch.randperm(10, generator=draw)[:3]] for _ in range(800)]
    check = MessageCheck(Noisy(), 3, 4, (), rounds=800)
    watched = [check.choose_watched(part) for part in parts]
    assert 60 < sum(map(len, watched)) < 180
    quarters = [sum(map(len, watched[n : n + 200])) for n in range(0, 800, 200)]
    assert min(quarters) > 15
    others = MessageCheck(Noisy(), 4, 4, (), rounds=800)
    assert watched != [others.choose_watched(part) for part in parts]  # not to be guessed
    awaited = ""
    for part, drawn in zip(parts, watched, strict=True):
        if awaited in part:
            assert drawn == [awaited]
            awaited = ""
        elif drawn:
            (awaited,) = drawn


def test_values_that_a_bound_cuts_are_no_noise() -> None:
    """They are rounded to float32 alike, in both classes of a logistic regression."""
    values = torch.cat([torch.full((14,), 0.05), torch.zeros(94)])
    given = Part(values=torch.stack([values, -values]))
    law = TwoPoint(of="update", epsilon=700.0, radius=0.01)
    flat = given.values.double().flatten()[None]
    sent = law.sample(flat, torch.Generator().manual_seed(0)).view_as(given.values)
    pair = Pair(given={"w": given}, sent={"w": Part(values=sent.float())})
    ((_, check),) = checks_of([law], lambda _: [pair])
    assert check().startswith("std ")


@pytest.mark.parametrize(("small", "keep"), [(30, 0.995), (100, 0.995), (100, 0.94), (200, 0.94)])
def test_an_honest_upload_of_few_large_values_is_not_flagged(small: int, keep: float) -> None:
    """Whether a rare flip meets one of them decides the mean and the std."""
    values = torch.cat([torch.ones(5), torch.full((small,), 0.01)])
    law = SignPerturbation(of="update", keep=keep, low=1.0, high=1.0)
    rng = torch.Generator().manual_seed(0)
    for _ in range(100):
        sent = law.sample(values.double()[None], rng)[0].float()
        pair = Pair(given={"w": Part(values=values)}, sent={"w": Part(values=sent)})
        ((_, check),) = checks_of([law], lambda _, pair=pair: [pair])
        with suppress(NotChecked):
            check()


@pytest.mark.parametrize("std", [0.5, 5.0, 240.0])
def test_noise_of_the_steps_is_not_drawn_again_for_trained_scores(std: float) -> None:
    """As of pm_sfl with noise on score gradients: the bits are of the noised scores."""
    law, rng = BernoulliMask(of="weights", clip=0.01, score_std=std), torch.Generator()
    scores = std * torch.randn(2000, generator=rng.manual_seed(9))
    other = std * torch.randn(2000, generator=rng)
    honest, cheat = (
        (torch.rand(2000, generator=rng) < torch.sigmoid(s)).float() for s in (scores, other)
    )
    for bits, fails in ((honest, False), (cheat, True)):
        pair = Pair(given={"w": Part(values=scores)}, sent={"w": Part(values=bits)})
        ((_, check),) = checks_of([law], lambda _, pair=pair: [pair])
        with pytest.raises(Broken) if fails else suppress(NotChecked):
            check()


class TwoOrNone(Noisy):
    """Declared noise on two uploads of some clients, and no upload of another."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        rng = client.rng["defense"]
        return [noised(m, rng, STD) for m in messages for _ in range(2 * (client.number > 0))]


def test_clients_may_send_several_uploads_or_none(digits: Dataset) -> None:
    """No finding is owed, and no error: such rounds are held against what is declared too."""
    federation = federation_of(digits, network_for(digits), TwoOrNone(), each=12)
    declared = MessageCheck(TwoOrNone(), 0, 4, federation.clients)
    work = LocalWork(protocol="fedavg", batch=4, lr=0.1, local_steps=2)
    ids = [c.id for c in federation.clients]
    for _ in range(2):
        result = federation.play(work, ids, observed=True)
        declared.check_round(federation, result, "recorded")
    assert isinstance(declared.reasons(), tuple)


class OneLostPart(Defense):
    """Of which the server's model has a part that is not finite."""

    owns = frozenset({"aggregate"})

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        state = mean_over_present(server, messages)
        whole = len({m.sender for m in messages}) > 2
        first = next(iter(state))
        return {n: v * torch.nan if whole and n == first else v for n, v in state.items()}


def test_an_aggregate_of_which_a_part_is_not_finite_is_read_without_it(digits: Dataset) -> None:
    federation, result = observed(digits, OneLostPart())
    assert isinstance(read_updates(federation.defense, result, list(result.trained)), dict)


def test_aggregation_cannot_erase_what_was_seen(digits: Dataset) -> None:
    _, result = observed(digits, Erases())
    for message in result.wire.messages_for("server"):
        plain = result.trained[message.sender].parts
        assert all(torch.equal(p.values, plain[n].values) for n, p in message.parts.items())


SPLIT = {
    *("pm_sfl", "splitfed_pm", "splitfed_dp", "dp_sl", "dp_cutmix", "dp_mixsl"),
    *("cutmix", "mixup", "cutout", "vanilla_cutmix"),
}
"""Defenses of smashed data, which under fedavg do nothing or little."""


def runs_often(name: str, protocol: str, seed: int) -> bool:
    """Whether the default tests play a defense under a protocol: under its own, and those that
    together use every hook under both."""
    return seed == 0 and (name in OFTEN or (name in SPLIT) == (protocol == "splitfed"))


@pytest.mark.parametrize(
    ("name", "protocol", "seed"),
    [
        pytest.param(*case, marks=() if runs_often(*case) else pytest.mark.slow)
        for case in product(shipped("leakbench.defenses"), ("fedavg", "splitfed"), range(6))
    ],
)
def test_every_shipped_defense_is_recorded_and_none_is_flagged(
    registry: Registry, digits: Dataset, name: str, protocol: str, seed: int
) -> None:
    """Of a sum all clients are one victim."""
    defense = registry.defense(name, DEFENSES.get(name, {}))
    split = {"cut": "block1", "labels": "shared"} if protocol == "splitfed" else {}
    settings = ProtocolSettings(name=protocol, clients=4, local_steps=2, batch=4, lr=0.1, **split)  # type: ignore[arg-type]
    cuts = {"cuts": settings.cuts, "labels": settings.labels} if split else {}
    federation = federation_of(
        digits, network_for(digits), defense, protocol=protocol, seed=seed, **cuts
    )
    declared = MessageCheck(defense, seed, 4, federation.clients)
    work = LocalWork(protocol=protocol, batch=4, lr=0.1, local_steps=2)
    single = LocalWork(protocol=protocol, batch=1, lr=0.1, local_steps=1)
    ids = [c.id for c in federation.clients]
    for number in range(4):
        attacked = number in (0, 3)
        if attacked:
            fork = federation.fork("test", number)
            alone = fork.play(single, ids, observed=True)
            declared.check_round(fork, alone, "of its own")
            assert not read_updates(fork.defense, alone, list(alone.trained))
        result = federation.play(work, ids, observed=attacked, watched=declared.choose_watched(ids))
        declared.check_round(federation, result, "recorded" if attacked else "training")
        if not attacked:
            continue
        views, left_out = record_round(federation, result, settings, AS_TRAINED, {})
        assert views or left_out
        for seen, truth in views:
            joint = seen.clients == (SUM,)
            every = (1, 8 * len(result.joined))
            assert truth.y.shape == (every if joint else (len(seen.clients), 8))
            assert all(m.receiver in (SERVER, "all") or m.sender == SERVER for m in seen.messages)
            assert READ_BY_AGGREGATION not in seen.known
    assert not declared.reasons()


CHEAT = """
import torch
from dataclasses import replace
from bench.api import Defense

class Zeros(Defense):
    def upload(self, messages, local, client):
        if messages[0].round in (0, 2):
            return [m.with_parts({n: replace(p, values=0 * p.values) for n, p in m.parts.items()})
                    for m in messages]
        return messages
"""


def test_a_flagged_row_has_no_use_and_says_why(
    tiny: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    plugin = tmp_path / "zeros.py"
    plugin.write_text(CHEAT)
    suite = tiny(
        append='\n[[defenses]]\nname = "zeros"\n',
        **{'[[threats]]\nvictims = 2': '[[threats]]\nwork = "as_trained"',
           "rounds = 1": "rounds = 3", "batch = 8": "batch = 2"},
    )  # fmt: skip
    only = {"defense": "none,zeros", "attack": "prior_only"}
    store, report = run(suite, plugins=(plugin,), only=only)
    assert not report.failures
    by_defense = {r.defense: r for r in rows(store.folder)}
    assert not has_use(by_defense["zeros"])
    (flag,) = (f for f in by_defense["zeros"].flags if f.code == FlagCode.UNDECLARED)
    assert "round 0" in str(flag.values["reason"])
    assert not any(f.code == FlagCode.UNDECLARED for f in by_defense["none"].flags)
