"""PM-SFL: clients train mask probabilities over frozen random weights and upload sampled masks.

The masks cover the bottom submodel, up to the deepest cut, and the server's copies of those of its
layers that a client with an early cut lacks (Sec. 4.1, 4.3). A client receives theta, trains scores
s = sigma^-1(theta) of the submodel w_b * M with a fresh M ~ Bernoulli(sigma(s)) per step, and
uploads one more fresh mask, one bit per parameter. The server averages the masks (Eq. 5, 7). This
is the headline method, which adds no noise; Theorems 2 and 3 are about noised variants, which are
in `defenses/pm_sfl_noised.py`.

The paper splits a network in two and sends labels to the server, or keeps them (Sec. 2.1) without
saying who then computes the loss. Private labels are our extension: the head stays on the clients,
who train and upload it as ordinary weights, which nothing protects.

Departures: theta is clipped to [clip, 1 - clip] before the scores are taken, since Eq. 5 reaches
0 and 1; a coordinate that nobody sends keeps its theta (Eq. 7 is 0/0 there); tensors of one
dimension keep their initial values as w_b. The paper trains with Adam at 1e-3 (Sec. 6.3); here
everything moves with the protocol's SGD, the scores `lr_scale` times as far, or the scores alone
with Adam (`optimizer`). The paper does not say whether Adam's moments outlive a round: here they
begin at 0 in every round, since a client that is seldom sampled would bring moments of an old
theta. Accuracy is that of the mean mask, w_b * theta; the paper does not say which mask it tests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from bench.api import (
    UPLOAD_KINDS,
    BernoulliMask,
    Client,
    Defense,
    Event,
    Facts,
    Local,
    Mechanism,
    Message,
    Part,
    Round,
    Server,
    State,
    Submodel,
    Unprotected,
)
from bench.toolkit.aggregation import mean_over_present
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, cut_like, gaussian_like, showing, uniform_like

Variant = Literal["corrected", "printed"]
Optimizer = Literal["sgd", "adam"]
Masks = Literal["bottom", "all"]

INDICATOR = "indicator"
PERSONAL = "personal."
_MASK = "mask."
_MEAN, _SQUARE = "mean.", "square."
_BETAS, _FLOOR = (0.9, 0.999), 1e-8
"""Of Adam (Kingma and Ba, arXiv:1412.6980, Algorithm 1)."""
_TINY = 1e-30
"""Keeps the slope of a root finite at 0."""


@dataclass(kw_only=True, eq=False)
class PMSFL(Defense):
    """Trained random masks over frozen weights, uploaded as sampled bits.

    Args:
        clip: c; received probabilities are clipped to [c, 1 - c], 0 < c < .5.
        variant: `corrected` or `printed`, for the score gradient (see `with_slope`).
        lr_scale: Step of the scores over the protocol's learning rate, > 0.
        optimizer: What moves the scores: `sgd`, by lr_scale times the gradient, or `adam`, whose
            learning rate is then lr_scale times the protocol's.
        personal: Final share of masks that a client keeps to itself, in [0, 1].
        agreement_rounds: Rounds before the first personal mask, >= 0.
        growth_rounds: Rounds until the share is reached, >= 1.
        masks: What the masks cover: `bottom`, the bottom submodel (PM-SFL), or `all` that clients
            train, a head or a whole network included. `all` is not PM-SFL: under fedavg it is
            FedPM's training (Isik et al., arXiv:2209.15328).

    Source: PM-SFL, Sec. 4, Algorithm 1.
    """

    owns = frozenset({"variables", "aggregate"})
    strength = None  # masks are drawn: there is no noise to choose
    source = "PM-SFL, Sec. 4, Algorithm 1"
    clip: Annotated[float, Limits("c of [c, 1 - c]", above=0, below=0.5)] = 0.01
    variant: Variant = "corrected"
    lr_scale: Annotated[float, Limits("step of the scores over the protocol's", above=0)] = 1.0
    optimizer: Optimizer = "sgd"
    personal: Annotated[float, Limits("share of masks", least=0, most=1)] = 0.0
    agreement_rounds: Annotated[int, Limits(least=0)] = 5
    growth_rounds: Annotated[int, Limits(least=1)] = 10
    masks: Masks = "bottom"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masks == "bottom":
            self.requires = frozenset({"cut"})
        if self.optimizer == "adam":
            self.owns = self.owns | {"direction"}

    # --- masks over frozen weights --------------------------------------------------------
    def variables(
        self, params: State, on_clients: Mapping[str, Submodel], rng: torch.Generator
    ) -> tuple[State, State]:
        """theta = .5 and frozen weights for what the masks cover; all else as it is."""
        const = {
            n: gaussian_like(params[n], std=math.sqrt(2 / params[n][0].numel()), rng=rng)
            if params[n].dim() > 1  # N(0, 2 / fan_in) (He et al. 2015)
            else params[n]
            for n, submodel in on_clients.items()
            if self.masks == "all" or submodel == "bottom"
        }
        return {n: torch.full_like(p, 0.5) if n in const else p for n, p in params.items()}, const

    def receive(self, state: State, const: State) -> State:
        """s = sigma^-1(clip(theta, c, 1 - c))."""
        return {
            n: torch.logit(v.clamp(self.clip, 1 - self.clip)) if n in const else v
            for n, v in state.items()
        }

    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        masked = {n: v for n, v in variables.items() if n in const}
        return {_MASK + n: uniform_like(v, rng=rng) for n, v in masked.items()}

    def realize(self, variables: State, const: State, draw: State) -> State:
        """w_b * M with M = [u < sigma(s)], or w_b * sigma(s) without a draw (Sec. 4.1)."""
        # Adam, which takes no notice of a factor but beside its floor, gets lr_scale afterwards.
        scale = self.lr_scale if self.optimizer == "sgd" else 1.0
        weights = {}
        for name, value in variables.items():
            if name not in const:
                weights[name] = value
                continue
            mask = torch.sigmoid(value)
            if _MASK + name in draw:
                mask = (draw[_MASK + name] < mask).to(mask)
            through = with_slope(mask, value, variant=self.variant, lr_scale=scale)
            weights[name] = const[name] * through
        return weights

    def direction(
        self, gradient: State, memory: State, step: int, const: State, softness: float = 0.0
    ) -> tuple[State, State]:
        """Under optimizer `adam`, lr_scale times Adam's for the scores. It is nearly a sign at the
        round's first step, so that softness is added to the root below the fraction."""
        if self.optimizer == "sgd":
            return gradient, memory
        moved, kept = dict(gradient), dict(memory)
        for name in (n for n in gradient if n in const):
            g, corrected = gradient[name], []
            for key, beta, value in zip((_MEAN, _SQUARE), _BETAS, (g, g.square()), strict=True):
                before = memory.get(key + name, torch.zeros_like(g))
                kept[key + name] = beta * before + (1 - beta) * value
                corrected.append(kept[key + name] / (1 - beta ** (step + 1)))
            mean, square = corrected
            root = (square + _TINY).sqrt() + _FLOOR
            if softness:
                root = root + softness * (g.square().mean() + _TINY).sqrt()
            moved[name] = self.lr_scale * mean / root
        return moved, kept

    def mean_realize(self, variables: State, const: State) -> State:
        return self.realize(variables, const, {})

    # --- what a client sends ----------------------------------------------------------------
    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        """A fresh mask in place of each upload, whatever its kind, and the indicator I_k of what
        is withheld, since its pattern depends on the data (Sec. 4.2)."""

        def send_masks(plain: Message) -> list[Message]:
            scores = {n: p.values for n, p in plain.parts.items() if n in local.const}
            personal = self._personal(plain.round, local.start, scores, client)
            parts = dict(plain.parts)
            for name, theta in self._release(scores, client).items():
                sent = self._send(parts[name], theta, client)
                parts[name] = showing(sent, ~personal[name]) if name in personal else sent
            told = {PERSONAL + n: Part(values=p.to(scores[n]), bits=1) for n, p in personal.items()}
            pattern = replace(plain, kind=INDICATOR, local_steps=1, parts=told, sealed={})
            return [plain.with_parts(parts), *([pattern] if personal else [])]

        return change_uploads(messages, "weights", local, send_masks)

    def _send(self, part: Part, theta: Tensor, client: Client) -> Part:
        """What goes out for the probabilities theta: a fresh mask (Eq. 5)."""
        mask = (uniform_like(theta, rng=client.rng["defense"]) < theta).to(theta)
        return replace(part, values=mask, bits=1)

    def _release(self, scores: State, client: Client) -> dict[str, Tensor]:
        """The probabilities from which the upload is drawn."""
        return {n: torch.sigmoid(s) for n, s in scores.items()}

    def _personal(
        self, round: int, before: State, after: State, client: Client
    ) -> dict[str, Tensor]:
        """Which masks the client keeps: those it kept before, then by rank up to the share.

        Empty while the share is 0, which is a public matter of the round.
        """
        share = personal_share(
            round,
            share=self.personal,
            agreement_rounds=self.agreement_rounds,
            growth_rounds=self.growth_rounds,
        )
        total = sum(v.numel() for v in after.values())
        count = math.floor(share * total + 1e-9)
        if not count:
            return {}
        held = client.memory.get("pm_sfl.personal", {})
        kept = torch.cat(
            [held.get(n, torch.zeros_like(v, dtype=torch.bool)).flatten() for n, v in after.items()]
        )
        start = torch.cat([before[n].flatten() for n in after])
        _, _, order = rank_changes(start, torch.cat([v.flatten() for v in after.values()]))
        order = torch.cat([order[kept[order]], order[~kept[order]]])
        chosen = torch.zeros_like(kept)
        chosen[order[: max(count, int(kept.sum()))]] = True
        personal = cut_like(chosen, after)
        client.memory["pm_sfl.personal"] = {**held, **personal}
        return personal

    # --- server ---------------------------------------------------------------------------------
    def aggregate(self, server: Server, messages: Sequence[Message]) -> State:
        """Eq. 5 and 7: per coordinate the mean of the masks that were sent, or the old theta;
        Eq. 8 for layers of which the server trained a copy, since not all clients hold them."""
        mean = dict(mean_over_present(server, messages))
        uploads = [m for m in messages if m.kind in UPLOAD_KINDS]
        for name, own in (server.trained or {}).items():
            sent = [m.parts[name] for m in uploads if name in m.parts]
            holders = sum(bool(p.presence().any()) for p in sent)
            if name not in server.const:
                mean[name] = own if not holders else mean[name]
                continue
            share = self._clients_weight(holders, len(uploads))
            mean[name] = (1 - share) * torch.sigmoid(own) + share * mean[name]
        return mean

    def _clients_weight(self, holders: int, joined: int) -> float:
        """Weight of the clients' mean of a layer that `holders` of `joined` clients hold, beside
        the server's copy (Eq. 8)."""
        return holders / max(1, joined)

    # --- what is known and what is proven -------------------------------------------------------
    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        return (self.bits(round),)

    def bits(self, round: Round) -> BernoulliMask:
        """Bits, of the tensors that have frozen weights; a head is sent as it is."""
        tensors = tuple(round.constants) or None
        return BernoulliMask(of="weights", tensors=tensors, clip=self.clip)

    def count_masked(self, facts: Facts) -> int:
        """Parameters that the masks cover."""
        return facts.parameters - (facts.head if self.masks == "bottom" else 0)

    def of_head(self, facts: Facts) -> tuple[Event, ...]:
        """The event of a head that is sent as ordinary weights, if clients hold one."""
        if self.count_masked(facts) == facts.parameters:
            return ()
        return (Unprotected(what="the head's update", why="it is sent as ordinary weights"),)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            Unprotected(
                what="the uploaded masks",
                why="their probabilities are a deterministic function of the data and are clipped "
                "only before training, so one bit can tell two data sets apart",
            ),
            *self.of_head(facts),
        )

    def constants(self, facts: Facts) -> dict[str, float | str]:
        d, clients = self.count_masked(facts), facts.sampled
        return {
            "eq6_bound": d / (4 * clients),
            "collapse_probability_at_0.9": collapse_probability(0.9, clients=clients),
            "log10_c_pow_d": d * math.log10(self.clip),
        }


def with_slope(value: Tensor, scores: Tensor, *, variant: Variant, lr_scale: float) -> Tensor:
    """`value` with lr_scale times a straight-through derivative with respect to the scores.

    corrected: sigma'(s), the derivative of the mean mask. printed: sigma(s) sigma'(s) (Eq. 4,
    17), which treats theta as a factor of its own derivative.
    """
    theta = torch.sigmoid(scores)
    slope = lr_scale * (theta if variant == "corrected" else theta.square() / 2)
    return value.detach() + (slope - slope.detach())


def personal_share(round: int, *, share: float, agreement_rounds: int, growth_rounds: int) -> float:
    """Share of personalised masks in a round: 0 in the agreement rounds, then growing by equal
    steps to `share` (Sec. 4.2 and 6.5.1, which leave the steps open)."""
    grown = (round + 1 - agreement_rounds) / growth_rounds
    return share * min(max(grown, 0.0), 1.0)


def rank_changes(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|change of theta|, whether it crossed .5, and the order in which masks become personal:
    those that crossed first, then the others, each by falling change (Sec. 4.2).

    before, after: scores [D].
    """
    change = (torch.sigmoid(after.double()) - torch.sigmoid(before.double())).abs()
    disagree = before * after < 0
    return change, disagree, (change + disagree).argsort(descending=True, stable=True)


def collapse_probability(theta: float, *, clients: int) -> float:
    """Chance that the mean of masks (Eq. 5) is exactly 0 or 1, where sigma^-1 is infinite."""
    return float(theta**clients + (1 - theta) ** clients)
