"""MS-PAFL: clients check in by chance, keep half of their model and noise the other half.

A round: client i takes part with probability p_i, trains on subsampled batches, keeps its
private parameters, clips the public ones AS WEIGHTS to norm C (Eq. 15), adds Gaussian noise
(Eq. 16) and uploads them. The server averages (Eq. 17). Recombination (Eq. 18) is not here: what
a client withheld the protocol puts back at the start of its next round, in
`Federation._begin_at` of `bench/protocols/federation.py`.

Where the paper contradicts itself: an empty round keeps the old model (Eq. 17 divides by 0);
Eq. 17's correction nu is off unless asked for, since it is unbiased only for equal p_i and
empty rounds counted as 0; the next round starts from the new public half, not Eq. 18's old one.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from bench.api import (
    UPLOAD_KINDS,
    Client,
    Clip,
    Defense,
    Event,
    Facts,
    Gaussian,
    GaussianNoise,
    Local,
    Mechanism,
    Message,
    Server,
    State,
    Strength,
    Withheld,
)
from bench.privacy.gaussian import classic_gaussian_std, exact_gaussian_epsilon, gaussian_std
from bench.toolkit.aggregation import mean_over_present
from bench.toolkit.settings import Limits, check_number
from bench.toolkit.vectors import change_uploads, clip, gaussian_like, replace_values, showing
from defenses import ms_pafl_theorems as theorems

Noise = Literal["lemma1", "analytic"]
Sampling = Literal["wor", "wr"]
_ROUND, _QUEUE = "ms_pafl.round", "ms_pafl.queue"


@dataclass(kw_only=True, eq=False)
class MSPAFL(Defense):
    """Check-in, subsampling, and noise on the public parameters alone.

    Args:
        epsilon: Local budget of one upload, > 0, for which Lemma 1 calibrates the noise (its
            sensitivity is 2 clip_norm).
        delta: Of the same budget, in (0, 1).
        noise: `lemma1`, std 2C sqrt(2 ln(1.25/delta))/epsilon, proven for epsilon <= 1;
            `analytic`, the smallest std that keeps the budget at any epsilon.
        clip_norm: C, L2 norm of the public weights, > 0.
        check_in: See `check_in_table`; it takes the place of the suite's participation.
        sampling: A round's batches together: `wor` (distinct samples, until all were drawn) or
            `wr` (every sample drawn from all).
        private: See `private_coordinates`.
        nu_clients: N of Eq. 17's correction, 0 to leave it out.
        beta: Of Theorem 2, > 0; for the paper's claim alone.
        delta_tilde: Of Theorem 4, in (0, 1); for the paper's claim alone.

    An observed round is the server's view of clients that did check in, with distinct samples.

    Source: MS-PAFL, Algorithm 1, Eq. 14-18.
    """

    owns = frozenset({"joins", "batch"})
    strength = Strength(setting="epsilon", weak=1e6, strong=0.01)
    source = "MS-PAFL, Algorithm 1"
    epsilon: Annotated[float, Limits("budget of one upload", above=0)]
    delta: Annotated[float, Limits(above=0, below=1)] = 1e-4
    noise: Noise = "lemma1"
    clip_norm: Annotated[float, Limits("L2 norm of the public weights", above=0)] = 1.0
    check_in: float | str = 0.5
    sampling: Sampling = "wor"
    private: Annotated[float, Limits("share of parameters", least=0, most=1)] = 0.5
    nu_clients: Annotated[int, Limits("N of Eq. 17", least=0)] = 0
    beta: float = 0.25
    delta_tilde: Annotated[float, Limits(above=0, below=1)] = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta != math.inf:
            check_number("beta", self.beta, "Theorem 2", above=0)
        self.table = check_in_table(self.check_in)
        if self.nu_clients:
            self.owns = self.owns | {"aggregate"}
        exact = self.local_epsilon
        if self.noise == "lemma1" and exact > self.epsilon:
            warnings.warn(
                f"epsilon {self.epsilon:g} is beyond Lemma 1, which is proven up to 1: its noise "
                f'of std {self.std:.4g} gives epsilon {exact:.4g}; noise = "analytic", of std '
                f"{self._std('analytic'):.4g}, keeps {self.epsilon:g}.",
                stacklevel=3,
            )

    def _std(self, noise: str) -> float:
        rule = classic_gaussian_std if noise == "lemma1" else gaussian_std
        return rule(sensitivity=2 * self.clip_norm, epsilon=self.epsilon, delta=self.delta)

    @property
    def std(self) -> float:
        """The noise's standard deviation per public coordinate."""
        return self._std(self.noise)

    @property
    def local_epsilon(self) -> float:
        """Exact epsilon of one upload at `delta`."""
        return exact_gaussian_epsilon(mu=2 * self.clip_norm / self.std, delta=self.delta)

    @property
    def variant(self) -> str:
        return "printed" if self.noise == "lemma1" else "corrected"

    # --- client: check in, subsample, split, clip, noise -----------------------------------------
    def joins(self, client: Client, sampled: bool) -> bool:
        """Eq. 14, a coin of the client's own; the server's sampling is not asked."""
        client.memory.pop(_QUEUE, None)  # a round's subsample is drawn afresh
        number = client.memory.get(_ROUND, 0)
        client.memory[_ROUND] = number + 1
        chance = torch.rand((), generator=client.rng["joins"])
        return bool(chance < self.probability(int(client.id.rsplit("-", 1)[1]), number))

    def probability(self, client: int, round: int) -> float:
        """p of a client in a round, both numbered from 0."""
        row = self.table[round % len(self.table)]
        return row[client % len(row)]

    def batch(self, client: Client, size: int) -> Tensor:
        """Sec. III-B: a batch of the round's subsample."""
        rng, records = client.rng["batch"], len(client.y)
        if self.sampling == "wr":
            return torch.randint(records, (size,), generator=rng)
        size = min(size, records)
        queue = client.memory.get(_QUEUE, torch.empty(0, dtype=torch.int64))
        if len(queue) < size:
            order = torch.randperm(records, generator=rng)
            queue = torch.cat([queue, order[~torch.isin(order, queue)]])
        client.memory[_QUEUE] = queue[size:]
        return queue[:size]

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        kept = private_coordinates(local.broadcast, self.private)
        return change_uploads(messages, "weights", local, lambda m: self._publish(m, kept, client))

    def _publish(self, weights: Message, kept: Mapping[str, Tensor], client: Client) -> Message:
        """The public half, clipped as weights (Eq. 15) and noised (Eq. 16)."""
        public = {n: showing(p, ~kept[n]) for n, p in weights.parts.items()}
        if not any(bool(p.presence().any()) for p in public.values()):
            return weights.with_parts(public)
        noised = {}
        for name, part in clip(public, norm=self.clip_norm).items():
            noise = gaussian_like(part.values, std=self.std, rng=client.rng["defense"])
            noised[name] = torch.where(part.presence(), part.values + noise, 0.0)
        return replace_values(weights.with_parts(public), noised)

    # --- server -------------------------------------------------------------------------------
    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        """Eq. 17 with nu where asked for, else the plain mean."""
        if not self.nu_clients:
            return None
        number = next((m.round for m in messages), 0)
        nu = theorems.correction([self.probability(i, number) for i in range(self.nu_clients)])
        mean = mean_over_present(server, messages)
        sent = {n: torch.zeros_like(v, dtype=torch.bool) for n, v in mean.items()}
        for message in messages:
            if message.kind in UPLOAD_KINDS:
                for name, part in message.parts.items():
                    sent[name] |= part.presence()
        base = dict(server.trained or {})
        return {
            n: torch.where(sent[n], v / nu, base.get(n, v) if not sent[n].any() else v)
            for n, v in mean.items()
        }

    # --- what is known and what is proven -------------------------------------------------------
    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (Clip(of="weights", norm=self.clip_norm), GaussianNoise(of="weights", std=self.std))

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """The exact Gaussian over the uploads that happened, with no amplification: the server
        sees who uploads, and a record once sampled stays in the private half and moves later
        uploads (CLAIMS: Theorems 2-4 are violated)."""
        moves, count = 2 * self.clip_norm, facts.releases
        noised = Gaussian(sensitivity=moves, std=self.std, unit="record", count=count)
        return (noised, Withheld(what="the private parameters"))

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """Theorem 4 for the global model over all rounds, with the largest check-in probability;
        infinite where its delta reaches 1, since that claims nothing."""
        epsilon, delta = self._global_model(facts)
        return (epsilon, delta, "record") if delta < 1 else (math.inf, 1.0, "record")

    def _one_round(self, facts: Facts) -> tuple[float, float]:
        """(epsilon_c, delta_c) of Corollary 1 at the largest check-in probability."""
        return theorems.single_round(
            p=self._most(),
            q=self._rate(facts),
            epsilon=self.epsilon,
            delta=self.delta,
            clients=facts.clients,
            beta=self.beta,
        )

    def _global_model(self, facts: Facts) -> tuple[float, float]:
        """(epsilon, delta) of Theorem 4 over all rounds."""
        one = self._one_round(facts)
        return theorems.compose(*one, rounds=facts.rounds, delta_tilde=self.delta_tilde)

    def _most(self) -> float:
        return max(p for row in self.table for p in row)

    def _rate(self, facts: Facts) -> float:
        """q of Eq. 11 for the smallest client."""
        draws = facts.local_steps * min(facts.batch, facts.records)
        replacement = self.sampling == "wr"
        return theorems.sampling_rate(records=facts.records, draws=draws, replacement=replacement)

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {"noise_std": self.std, "sampling_rate": self._rate(facts)}


def check_in_table(text: float | str) -> tuple[tuple[float, ...], ...]:
    """Check-in probabilities by round and client: `0.5`, `"0.1,0.9"` for clients in turn,
    `"0.1,0.9;0.5"` with rounds in turn. Raises ValueError for one outside [0, 1]."""
    rows = []
    for row in str(text).split(";"):
        try:
            values = tuple(float(v) for v in row.split(","))
        except ValueError:
            raise ValueError(
                f"check_in must be numbers, `,` between clients and `;` between rounds, "
                f"got '{text}'."
            ) from None
        for value in values:
            check_number("check_in", value, "probabilities", least=0, most=1)
        rows.append(values)
    return tuple(rows)


def private_coordinates(values: State, private: float) -> dict[str, Tensor]:
    """Which coordinates stay with the client, bool by name: a share in [0, 1], the first in the
    order of the parameters, rounded down (Sec. V-A: the first half)."""
    left = math.floor(private * sum(v.numel() for v in values.values()) + 1e-9)
    out = {}
    for name, value in values.items():
        out[name] = (torch.arange(value.numel(), device=value.device) < left).view(value.shape)
        left = max(0, left - value.numel())
    return out
