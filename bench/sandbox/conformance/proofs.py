"""Whether what a defense declares and proves holds of what it sends: what enters and leaves its
hooks, which values of an upload are sent, and the cases on both."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench.contract.compose import Composed
from bench.contract.defense import Defense, fresh
from bench.contract.events import Event, Facts, Gaussian, Laplace, RandomisedResponse, Round
from bench.contract.hooks import overrides
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS, Message, Part
from bench.privacy.ledger import account
from bench.sandbox.audit import Audit, audit
from bench.sandbox.conformance.contract import LEFT_OUT, Case, Rebuild, skip
from bench.sandbox.conformance.playground import (
    BATCH,
    CLASSES,
    SAMPLES,
    Ground,
    company,
    play,
    private_data,
)
from bench.sandbox.conformance.watching import Watch, watch_defense
from bench.sandbox.findings import Broken, NotChecked, require
from bench.sandbox.hooked import PluginFault
from bench.sandbox.noise import Pair, checks_of, pairs_of_round
from bench.seeding import generator

_ROUNDS, _LABEL_ROUNDS, _STEPS = 4, 40, 8
_DRAWS = 20
"""Of the client's stream, for which values are sent: a coin that is the same for as many, and the
other way round for other data, is one of 10^12."""
_LONG_LR = 1e4
"""A learning rate whose uploads are beyond every clip."""
_FAR = 1e6
"""A coordinate beyond every clip."""


def mechanisms_on(ground: Ground, defense: Defense) -> tuple[Mechanism, ...]:
    """The public mechanisms of the rounds that pairs come from. What a mechanism does before the
    upload is in what enters it, as a learning rate of 0 says."""
    parameters = ground.network().n_parameters
    known = Round(lr=0.0, parameters=parameters, uploads=1, clients=company(defense), batch=BATCH)
    return fresh(defense).mechanisms_in(known)


def pairs_of(defense: Defense, of: str, *, split: Ground, whole: Ground) -> Sequence[Pair]:
    """Pairs of uploads in that kind, of smashed data or of labels.

    Args:
        split: The ground on which smashed data and labels are sent.
        whole: The one of whole rounds, of one step each.
    """
    if of in ("smashed", "labels"):
        return _play_pairs(defense, of, split)
    if "gradient" in defense.owns and not overrides(defense, "upload"):
        return _steps(defense, whole)
    rounds = list(play(defense, whole, rounds=_ROUNDS).results)
    if any(float(m.apply(torch.full((1, 1000), _FAR))[0, 0]) < _FAR
           for m in defense.mechanisms_in(Round()) if m.of == of):  # fmt: skip
        rounds += play(defense, whole, rounds=1, draws=1, lr=_LONG_LR).results
    return [p for r in rounds for pairs in pairs_of_round(r, of).values() for p in pairs]


def _play_pairs(defense: Defense, hook: str, ground: Ground) -> list[Pair]:
    pairs: list[Pair] = []
    masked = hook == "smashed" and overrides(defense, "third_parties")
    unwatched = fresh(defense)

    def listen(arguments: tuple[Any, ...], result: Any) -> None:
        given, client = arguments
        if masked:  # by what a third party dealt; of 0 every mask leaves 0
            given = torch.zeros_like(given)
            result = unwatched.smashed(given, client)
        part = result if isinstance(result, Part) else Part(values=result)
        sent = Part(values=part.values.detach().double(), present=part.present)
        given = Part(values=given.detach().double())
        pairs.append(Pair(given={hook: given}, sent={hook: sent}))

    try:
        rounds = _ROUNDS if hook == "smashed" else _LABEL_ROUNDS
        play(defense, ground, watch=Watch(listeners={hook: listen}), rounds=rounds)
    except PluginFault:
        if not pairs:
            raise
    return pairs


def _steps(defense: Defense, ground: Ground) -> list[Pair]:
    """Gradients with and without their draw, which by contract is without noise."""
    defense, (x, y) = watch_defense(defense, Watch()), private_data(1)[0]
    federation = ground.federation(defense, ground.network(), [(x, y)] * defense.together)
    variables = defense.receive(federation.state, federation.const)
    batch = x[:BATCH], torch.nn.functional.one_hot(y[:BATCH], CLASSES).float()
    rng, pairs = generator(0, "conformance steps"), []
    for _ in range(_STEPS):
        draw = defense.draw(variables, federation.const, rng)
        loss = federation.loss("train", draw)
        plain, noised = (defense.gradient(loss, variables, *batch, d) for d in ({}, draw))
        given, sent = ({n: Part(values=v.detach()) for n, v in g.items()} for g in (plain, noised))
        pairs.append(Pair(given=given, sent=sent))
    return pairs


# --- which values are sent ------------------------------------------------------------------------


def _of_rounds(defense: Defense, ground: Ground) -> Iterator[tuple[Tensor, Tensor]]:
    """Bool [draws, N] of a first round with one client's data and with another's, for every client;
    nothing where the first draw sends the same values of both."""

    def play_shifted(draw: int, shift: int) -> dict[str, Tensor]:
        run = play(defense, ground, draws=draw, rounds=1, shift=shift)
        used = run.results[0].used
        uploads = (m for m in run.seen[0] if m.kind in UPLOAD_KINDS and m.sender in used)
        return {m.sender: _presence(m) for m in uploads}

    one, other = play_shifted(1, 0), play_shifted(1, 1)
    if all(torch.equal(v, other[c]) for c, v in one.items() if c in other):
        return
    draws = range(2, _DRAWS + 1)
    ones = [one, *(play_shifted(draw, 0) for draw in draws)]
    others = [other, *(play_shifted(draw, 1) for draw in draws)]
    for client, first in one.items():
        if all(client in r and r[client].shape == first.shape for r in (*ones, *others)):
            yield torch.stack([r[client] for r in ones]), torch.stack([r[client] for r in others])


def _presence(message: Message) -> Tensor:
    """Bool [N]: which values were sent. An exact zero among values that hardly repeat was not."""
    parts = message.parts.values()
    sent = torch.cat([p.presence().flatten() for p in parts])
    values = torch.cat([p.values.flatten() for p in parts])
    others = values[sent & (values != 0)]
    return sent & (values != 0) if 2 * len(others.unique()) > len(others) else sent


AUDIT_DRAWS, AUDIT_CONFIDENCE = 500, 1 - 1e-6
_SAME = 1e-6


def proof_cases(
    defense: Defense,
    settings: Mapping[str, Any],
    rebuild: Rebuild,
    grounds: Sequence[Ground],
    *,
    fast: bool,
) -> Iterator[Case]:
    """The checks of mechanisms and guarantee, on the grounds on which the defense runs. fast:
    without those that draw often."""
    split, whole = ([g for g in grounds if bool(g.cut) is cut] for cut in (True, False))
    ground = whole[0] if whole else split[-1]
    left_out = partial(skip, LEFT_OUT)
    noise = partial(noise_cases, defense, (split or whole)[-1], ground)
    proof = partial(check_audit, defense, settings, rebuild)
    yield "guarantee agrees with mechanisms", partial(check_guarantee, defense)
    yield "which values are sent", partial(check_sent_values, defense, settings, rebuild, ground)
    yield "declared noise", left_out if fast else noise
    yield "audit of the proof", left_out if fast else proof


def noise_cases(defense: Defense, split: Ground, whole: Ground) -> list[Case]:
    """A case for every declared mechanism; see `checks_of`."""
    mechanisms = mechanisms_on(whole, defense)
    if not mechanisms:
        raise NotChecked("mechanisms() declares none")
    return list(checks_of(mechanisms, cache(partial(pairs_of, defense, split=split, whole=whole))))


# --- the guarantee ------------------------------------------------------------------------------


def _facts(defense: Defense) -> Facts:
    return Facts(parameters=1000, clients=company(defense), batch=BATCH, records=SAMPLES)


def check_guarantee(defense: Defense) -> str:
    """Whether every event's level of noise is one that `mechanisms` declares, and whether its
    sensitivity covers the declared clip."""
    facts = _facts(defense)
    events = defense.guarantee(facts)
    defense.claim(facts)
    defense.constants(facts)
    in_round = Round(clients=facts.sampled, batch=facts.batch, parameters=facts.parameters)
    declared = [*defense.mechanisms_in(Round()), *defense.mechanisms_in(in_round)]
    if not events:
        raise NotChecked("guarantee() reports no event, so nothing is proven")
    for event in events:
        # Where the gradient is the defense's, clips are of samples of local steps, not of uploads.
        wrong = _contradiction(event, declared, late="gradient" not in defense.owns)
        require(wrong is None, wrong or "")
    return ", ".join(type(e).__name__ for e in events)


def _contradiction(event: Event, declared: Sequence[Mechanism], *, late: bool) -> str | None:
    """late: whether clips are of whole uploads."""
    law = type(event).__name__
    match event:
        case Gaussian(std=level) | Laplace(scale=level):
            pass
        case RandomisedResponse(epsilon=epsilon):
            level = 1 / (1 + math.exp(-epsilon))
        case _:
            return None
    if not declared:
        return (
            f"guarantee() rests on {law} of {level:.4g}, but mechanisms() tell attackers of none."
        )
    levels = [(m, m.proof[1]) for m in declared if m.proof is not None and m.proof[0] == law]
    mine = [m for m, other in levels if math.isclose(other, level, rel_tol=_SAME)]
    if levels and not mine:
        others = ", ".join(dict.fromkeys(f"{other:.4g}" for _, other in levels))
        return f"guarantee() says {law} of {level:.4g}, but mechanisms() declare {others}."
    if not late or isinstance(event, RandomisedResponse):
        return None
    # Replacing a record moves a clipped upload by up to twice the clip.
    sensitivity, order = event.sensitivity, 2 if isinstance(event, Gaussian) else 1
    if event.unit != "record" or sensitivity == 0:
        return None
    says = f"guarantee() says a sensitivity of {sensitivity:.4g}"
    for noise in mine:
        if noise.of not in (*UPLOAD_KINDS, "smashed") or noise.clips:
            continue
        norms = [b for m in declared if m.of == noise.of and (b := m.bound_of(order)) is not None]
        if not norms and math.isfinite(sensitivity):
            return f"{says}, but mechanisms() declare no clip of order {order} that would bound it."
        if norms and sensitivity < 2 * min(norms) * (1 - _SAME):
            return (
                f"{says} for a record, but replacing one moves an upload clipped to "
                f"{min(norms):.4g} by up to {2 * min(norms):.4g}."
            )
    return None


# --- the proof ------------------------------------------------------------------------------------


def _strongest(
    defense: Defense, settings: Mapping[str, Any], rebuild: Rebuild
) -> tuple[Defense, str]:
    """The defense where its strength, or that of every member, is strongest, and what is set."""
    members = defense.members if isinstance(defense, Composed) else {"": defense}
    ends = {
        f"{name}.{m.strength.setting}".lstrip("."): m.strength.strong
        for name, m in members.items()
        if m.strength is not None
    }
    if not ends:
        return defense, ""
    try:
        strong = rebuild({**settings, **ends})
    except ValueError as error:
        raise NotChecked(f"it cannot be made as strong as it says: {error}") from None
    return strong, " at " + ", ".join(f"{name}={value:g}" for name, value in ends.items())


def _proven(defense: Defense) -> float:
    """The smallest epsilon that is proven for a record, under some protocol."""
    facts = [replace(_facts(defense), split=s) for s in (False, True)]
    return min(account(defense, f).eps_record for f in facts)


def check_sent_values(
    defense: Defense, settings: Mapping[str, Any], rebuild: Rebuild, ground: Ground
) -> str:
    """Whether data chooses which values are sent, which noise on them does not hide: a proof has to
    count that. Compared are rounds of different data, over several draws."""
    strong, at = _strongest(defense, settings, rebuild)
    epsilon = _proven(strong)
    if epsilon == math.inf:
        raise NotChecked(f"nothing is proven for a record{at}")
    for one, other in _of_rounds(strong, ground):
        # What is sent in all draws of an input, or in none.
        fixed = (one == one[0]).all(dim=0) & (other == other[0]).all(dim=0)
        if chosen := int((fixed & (one[0] != other[0])).sum()):
            raise Broken(
                f"guarantee() proves an epsilon of {epsilon:.4g} for a record, but which "
                f"values are sent follows from the data without noise: {chosen} of "
                f"{len(fixed)} values are always sent for one input and never for another."
            )
    return "which values are sent does not follow from the data"


def check_audit(defense: Defense, settings: Mapping[str, Any], rebuild: Rebuild) -> str:
    """A short audit of one release against the proof, at the given settings and where the defense
    is strongest. A claim that it refutes is told, since it may be the paper's; so is that."""
    strong, at = _strongest(defense, settings, rebuild)
    provable = {at: d for at, d in {"": defense, at: strong}.items() if _proven(d) < math.inf}
    if not provable:
        raise NotChecked("nothing is proven for a record, so nothing can be refuted")
    audits = {at: _audit(setting, at) for at, setting in provable.items()}
    if not any(a.pairs for a in audits.values()):
        skips = next(iter(audits.values())).skipped
        raise NotChecked("; ".join(f"{s.channel}: {s.why}" for s in skips))
    tested, untested = [], []
    for at, made in audits.items():
        compared = [f for f in made.pairs if f.verdict_proof == "consistent"]
        if any(f.eps_record < f.cap for f in compared):
            claim = "" if made.verdict_claim != "violated" else "; it refutes the claim"
            tested.append(
                f"consistent{at}, epsilon of one release >= {made.eps_audited:.3g}{claim}"
            )
        elif compared:
            least = min(compared, key=lambda f: f.eps_record)
            untested.append(
                f"not testable{at}: {least.draws} draws refute no proof above "
                f"{least.cap:.3g}, and it says {least.eps_record:.4g}"
            )
    if not tested:
        raise NotChecked("; ".join(untested) or "no audited input differs in one record")
    return "; ".join([*tested, *untested])


def _audit(defense: Defense, at: str) -> Audit:
    """The audit; Broken if it refutes the proof."""
    made = audit(fresh(defense), draws=AUDIT_DRAWS, confidence=AUDIT_CONFIDENCE)
    if made.verdict_proof == "violated":
        violated = (f for f in made.pairs if f.verdict_proof == "violated")
        worst = max(violated, key=lambda f: f.eps_lower)
        raise Broken(
            f"one release through the real hooks{at} shows an epsilon of at least "
            f"{worst.eps_lower:.4g} ({worst.pair}), but guarantee() proves {worst.eps_record:.4g}."
        )
    return made
