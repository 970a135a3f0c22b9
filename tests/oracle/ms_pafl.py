"""What follows from MS-PAFL's mechanism, against which its theorems are held.

p, q, epsilon, delta: see `defenses.ms_pafl_theorems`, whose functions have the paper's own
parameters here. mu: sensitivity over noise std of one upload; as the std is proportional to the
clip norm, mu is free of it.
"""

import math
import warnings
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

from bench.privacy.gaussian import classic_gaussian_std, exact_gaussian_epsilon, gaussian_delta
from defenses import ms_pafl_theorems as theorems
from defenses.ms_pafl import MSPAFL
from tests.docs_modules import formulas

PAPER_CLIENTS, PAPER_BETA, PAPER_DELTA, PAPER_CLIP = 100, 0.25, 1e-4, 1.0
"""Sec. V-A: N, beta, delta and C. delta_tilde is not stated; PAPER_DELTA is used for it too."""


# --- the theorems with the paper's parameters ---------------------------------------------------


def single_round(**given: Any) -> tuple[float, float]:
    paper = {"delta": PAPER_DELTA, "clients": PAPER_CLIENTS, "beta": PAPER_BETA}
    return theorems.single_round(**(paper | given))


def local_total(**given: Any) -> float:
    return formulas.local_total(**({"delta": PAPER_DELTA, "clip_norm": PAPER_CLIP} | given))


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


def claimed(*, rounds: int, delta_tilde: float = PAPER_DELTA, **given: Any) -> tuple[float, float]:
    """(epsilon, delta) that Theorem 4 claims for all global models of `rounds` rounds."""
    return theorems.compose(*single_round(**given), rounds=rounds, delta_tilde=delta_tilde)


def unamplified_epsilon(*, mu: float, uploads: int, delta: float = PAPER_DELTA) -> float:
    """Exact epsilon of `uploads` uploads that all hold the record: proven, whatever q."""
    return exact_gaussian_epsilon(mu=mu * math.sqrt(uploads), delta=delta)


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


def visible_round_delta(epsilon: float, *, p: float, q: float, mu: float) -> float:
    """delta at `epsilon` of one round of a client whose check-in the server sees, worst pair: its
    public half moves by 2C when the record is sampled."""
    return p * mixture_delta([1 - q, q], [0.0, mu], epsilon=epsilon)


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
