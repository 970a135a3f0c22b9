"""What follows from MS-PAFL's mechanism, against which its theorems are held.

p, q, epsilon, delta: see `defenses.ms_pafl_theorems`, whose functions have the paper's own
parameters here. mu: sensitivity over noise std of one upload; as the std is proportional to the
clip norm, mu is free of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.stats import binom, chi2, norm

from bench.privacy.gaussian import (
    classic_gaussian_std,
    exact_gaussian_epsilon,
    gaussian_delta,
)
from defenses import ms_pafl_theorems as theorems
from defenses.ms_pafl import MSPAFL
from tests.docs_modules import formulas

PAPER_CLIENTS, PAPER_BETA, PAPER_DELTA, PAPER_CLIP = 100, 0.25, 1e-4, 1.0
"""Sec. V-A: N, beta, delta and C. delta_tilde is not stated; PAPER_DELTA is used for it too."""


# --- the theorems with the paper's parameters ---------------------------------------------------


def deviation_probability(*, beta: float = PAPER_BETA, clients: int = PAPER_CLIENTS) -> float:
    return theorems.deviation_probability(beta=beta, clients=clients)


def single_round(**given: Any) -> tuple[float, float]:
    paper = {"delta": PAPER_DELTA, "clients": PAPER_CLIENTS, "beta": PAPER_BETA}
    return theorems.single_round(**(paper | given))


def composed(
    epsilon_c: float, delta_c: float, *, rounds: int, delta_tilde: float = PAPER_DELTA
) -> tuple[float, float]:
    return theorems.compose(epsilon_c, delta_c, rounds=rounds, delta_tilde=delta_tilde)


def linear_from(epsilon_c: float) -> float:
    return formulas.linear_from(epsilon_c, delta_tilde=PAPER_DELTA)


def local_total(**given: Any) -> float:
    return theorems.local_total(**({"delta": PAPER_DELTA, "clip_norm": PAPER_CLIP} | given))


def independent_rate(*, records: int, steps: int, batch: int) -> float:
    """q of batches that are each distinct within themselves and drawn afresh, as data loaders
    with reshuffling do over rounds; the paper leaves this case out."""
    return 1 - (1 - min(1.0, batch / records)) ** steps


def noise_ratio(*, epsilon: float, delta: float) -> float:
    """mu of one upload with Lemma 1's std: epsilon / sqrt(2 ln(1.25 / delta))."""
    return 1 / classic_gaussian_std(sensitivity=1.0, epsilon=epsilon, delta=delta)


def noise_std(*, epsilon: float, delta: float, clip_norm: float) -> dict[str, float]:
    """Stds of the defense under Lemma 1 (Eq. 6), the smallest, and what Lemma 1's exactly gives."""
    of: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "clip_norm": clip_norm}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lemma 1 beyond epsilon 1
        lemma1, analytic = MSPAFL(**of), MSPAFL(**of, noise="analytic")
    return {
        "sigma_lemma1": lemma1.std,
        "sigma_minimal": analytic.std,
        "exact_eps_of_lemma1": lemma1.local_epsilon,
        "true_delta_at_eps_l": gaussian_delta(mu=2 * clip_norm / lemma1.std, epsilon=epsilon),
    }


def mean_noise(
    *, epsilon: float, delta: float, coordinates: int, uploads: int, clip_norm: float = PAPER_CLIP
) -> dict[str, float]:
    """Root mean squared noise norm of the mean of `uploads` public halves, Lemma 1's std.

    snr_db_max: an upper bound, since the clean mean has a norm of at most C.
    """
    std = classic_gaussian_std(sensitivity=2 * clip_norm, epsilon=epsilon, delta=delta)
    noise = std * math.sqrt(coordinates / uploads)
    return {"rms_noise_norm": noise, "snr_db_max": 20 * math.log10(clip_norm / noise)}


def claimed(
    *,
    p: float,
    q: float,
    epsilon: float,
    rounds: int,
    delta: float = PAPER_DELTA,
    clients: int = PAPER_CLIENTS,
    beta: float = PAPER_BETA,
    delta_tilde: float = PAPER_DELTA,
) -> tuple[float, float]:
    """(epsilon, delta) that Theorem 4 claims for all global models of `rounds` rounds."""
    one = single_round(p=p, q=q, epsilon=epsilon, delta=delta, clients=clients, beta=beta)
    return composed(*one, rounds=rounds, delta_tilde=delta_tilde)


def first_order_step(
    *,
    p: float,
    q: float,
    epsilon: float,
    clients: int = PAPER_CLIENTS,
    beta: float = PAPER_BETA,
) -> dict[str, float]:
    """Both sides of Eq. 21 (a), which states lhs <= rhs; e^x - 1 >= x makes it false."""
    weight = p / (1 - deviation_probability(beta=beta, clients=clients))
    exponent = 2 * q * epsilon
    return {"lhs": weight * math.expm1(exponent), "rhs": weight * exponent}


def rounds_within(delta_c: float, *, target: float = PAPER_DELTA) -> int:
    """Largest T with T delta_c <= target."""
    return math.floor(target / delta_c)


def c0_scale_free(*, delta: float = PAPER_DELTA) -> float:
    """The constant with the sensitivity cancelled in Eq. C.2 and its factor 1/2 restored."""
    return math.sqrt(2 * math.log(1 / delta) / math.log(1.25 / delta))


def subsampled_epsilon(*, q: float, mu: float, rounds: int, delta: float = PAPER_DELTA) -> float:
    """Epsilon of stateless Poisson-subsampled rounds: Renyi orders 2..256, Balle's conversion.

    What an accountant would state if the private half did not remember (`memory_delta`).
    """
    from opacus.accountants.analysis import rdp

    orders = list(range(2, 257))
    values = rdp.compute_rdp(q=q, noise_multiplier=1 / mu, steps=rounds, orders=orders)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns when the best order is at an end
        return float(rdp.get_privacy_spent(orders=orders, rdp=values, delta=delta)[0])


def unamplified_epsilon(*, mu: float, uploads: int, delta: float = PAPER_DELTA) -> float:
    """Exact epsilon of `uploads` uploads that all hold the record: proven, whatever q."""
    return exact_gaussian_epsilon(mu=mu * math.sqrt(uploads), delta=delta)


def server_view_delta(epsilon: float, *, p: float, mu: float, rounds: int) -> float:
    """Safe delta at `epsilon` for a server that sees who uploads, over the chance of checking in.

    A client's number of uploads is binomial, and each counts in full: q is void.
    """
    chances = binom.pmf(np.arange(rounds + 1), rounds, p)
    return sum(
        float(w) * gaussian_delta(mu=mu * math.sqrt(k), epsilon=epsilon)
        for k, w in enumerate(chances)
        if w > 0
    )


def server_view_epsilon(*, p: float, mu: float, rounds: int, delta: float = PAPER_DELTA) -> float:
    """Smallest epsilon >= 0 whose `server_view_delta` is `delta`."""

    def excess(epsilon: float) -> float:
        return server_view_delta(epsilon, p=p, mu=mu, rounds=rounds) - delta

    if excess(0.0) <= 0:
        return 0.0
    most = unamplified_epsilon(mu=mu, uploads=rounds, delta=delta)
    if excess(most) >= 0:  # p = 1, where both are equal
        return most
    return float(brentq(excess, 0.0, most, xtol=1e-12))


def mixture_delta(weights: ArrayLike, shifts: ArrayLike, *, epsilon: float) -> float:
    """delta at `epsilon` >= 0 of sum_i weights_i N(shifts_i, 1) from N(0, 1); shifts >= 0.

    The likelihood ratio grows with the outcome, so the worst event is a half-line.
    """
    w, m = (np.asarray(v, dtype=np.float64) for v in (weights, shifts))
    w, m = w[w > 0], m[w > 0]
    moved = m > 0
    if not moved.any():
        return 0.0
    constant = np.log(w) - m * m / 2

    def excess(x: float) -> float:
        return float(np.logaddexp.reduce(constant + m * x)) - epsilon

    # All exponents are <= epsilon at `low`; one term alone reaches e^epsilon at `high`.
    middle, slope = m[moved] / 2, 1 / m[moved]
    low = float((epsilon * slope + middle).min())
    high = float(((epsilon - np.log(w[moved])) * slope + middle).min())
    x = float(brentq(excess, low - 1e-9, high + 1e-9, xtol=1e-13))
    # e^epsilon only ever meets a tail that makes up for it.
    lost = math.exp(epsilon + float(norm.logsf(x)))
    return max(0.0, float(w @ norm.sf(x - m)) - lost)


def visible_round_delta(
    epsilon: float, *, p: float, q: float, mu: float, uploads: int = 1
) -> float:
    """delta at `epsilon` of one round of a client whose check-in shows, worst pair: its public
    half moves by 2C when the record is sampled.

    uploads: 1, the server sees each upload; n, only the mean of n of known number.
    """
    return p * mixture_delta([1 - q, q], [0.0, mu / math.sqrt(uploads)], epsilon=epsilon)


def visible_round_epsilon(*, p: float, q: float, mu: float, delta: float) -> float:
    """Smallest epsilon >= 0 whose `visible_round_delta` is `delta`."""

    def excess(epsilon: float) -> float:
        return visible_round_delta(epsilon, p=p, q=q, mu=mu) - delta

    if excess(0.0) <= 0:
        return 0.0
    most = exact_gaussian_epsilon(mu=mu, delta=delta)
    return float(brentq(excess, 0.0, most, xtol=1e-12)) if excess(most) < 0 else most


def absent_upload_delta(epsilon: float, *, coordinates: int, uploads: int) -> float:
    """delta at `epsilon` of the mean of n noisy uploads from that of n - 1, clean weights all 0.

    Eq. B.4 allows q delta for this pair, whose variances differ by n / (n - 1). In units of the
    second mean's std, its squared norm is chi-square with `coordinates` degrees of freedom; the
    first's is that times (n - 1) / n.
    """
    narrow = uploads / (uploads - 1)
    cut = (coordinates * math.log(narrow) - 2 * epsilon) / (narrow - 1)
    if cut <= 0:
        return 0.0
    gain = float(chi2.cdf(narrow * cut, coordinates))
    return max(0.0, gain - math.exp(epsilon) * float(chi2.cdf(cut, coordinates)))


Statistic = Literal["last", "weighted"]


def memory_delta(
    epsilon: float, *, q: float, mu: float, uploads: int, statistic: Statistic = "last"
) -> float:
    """Lower bound on the delta of a client whose private half never forgets a sampled record.

    Toy client: from the first round whose subsample holds the record on, the clipped public half
    is moved by 2C. Any statistic of the uploads bounds delta from below; these are normal given
    the first round: `last`, the sum of the last j uploads, best j; `weighted`, the sum with
    weights 1 - (1 - q)^t, the chance of being moved by round t. `weighted` comes closer.
    """
    if uploads == 0:
        return 0.0
    t = np.arange(1, uploads + 1)
    chances = np.append(q * (1 - q) ** (t - 1), (1 - q) ** uploads)

    def delta(weights: NDArray[np.floating]) -> float:
        moved = np.append(np.cumsum(weights[::-1])[::-1], 0.0)
        return mixture_delta(chances, mu * moved / np.linalg.norm(weights), epsilon=epsilon)

    if statistic == "weighted":
        return delta(1 - (1 - q) ** t)
    return max(delta((t > uploads - j).astype(float)) for j in t)


def memory_delta_visible(
    epsilon: float, *, p: float, q: float, mu: float, rounds: int, statistic: Statistic = "last"
) -> float:
    """`memory_delta` over the binomial number of uploads, which the server sees."""
    total = 0.0
    for n, chance in enumerate(binom.pmf(np.arange(rounds + 1), rounds, p)):
        if chance > 1e-12:  # what is left out makes the lower bound lower
            total += float(chance) * memory_delta(
                epsilon, q=q, mu=mu, uploads=n, statistic=statistic
            )
    return total


def stateless_delta(
    epsilon: float, *, q: float, mu: float, rounds: int, interval: float = 2e-5
) -> tuple[float, float]:
    """(lower, upper) bound on the delta of `rounds` subsampled rounds without memory.

    interval: of the lower bound's privacy loss grid; the upper bound needs but a coarse one.
    """
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    def delta(pessimistic: bool, grid: float) -> float:
        one = from_gaussian_mechanism(
            1 / mu, sampling_prob=q, value_discretization_interval=grid,
            pessimistic_estimate=pessimistic, use_connect_dots=pessimistic,
        )  # fmt: skip
        return float(one.self_compose(rounds).get_delta_for_epsilon(epsilon))

    return delta(False, interval), delta(True, 1e-4)


def expected_weights(p: Sequence[float]) -> list[float]:
    """Expected coefficient of each client's upload in Eq. 17, an empty round counted as 0.

    Unbiased if all are 1 / N. Client i's is p_i / nu times the mean of 1 / (1 + others).
    """
    out = []
    for i, own in enumerate(p):
        others = np.ones(1)  # law of the number of others that check in
        for chance in (*p[:i], *p[i + 1 :]):
            others = np.convolve(others, [1 - chance, chance])
        share = float(others @ (1 / np.arange(1, len(others) + 1)))
        out.append(own * share / theorems.correction(p))
    return out
