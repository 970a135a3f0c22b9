"""MS-PAFL's Theorems 2 and 4 as the paper prints them, and what they need.

p: chance that a client checks in. q: chance that a round's subsample holds a given record.
epsilon, delta: local budget of one upload.
"""

import math
from collections.abc import Sequence


def sampling_rate(*, records: int, draws: int, replacement: bool) -> float:
    """Eq. 11: chance that a given record is among a round's draws, cut at 1 without replacement."""
    return 1 - (1 - 1 / records) ** draws if replacement else min(1.0, draws / records)


def deviation_probability(*, beta: float, clients: int) -> float:
    """Theorem 2's delta' = 2 exp(-2 beta^2 N). From 1 on, the theorem says nothing."""
    return 2 * math.exp(-2 * beta**2 * clients)


def single_round(
    *, p: float, q: float, epsilon: float, delta: float, clients: int, beta: float
) -> tuple[float, float]:
    """(epsilon_c, delta_c) of Corollary 1 (Eq. 20); (inf, 1) where delta' >= 1.

    beta is a free parameter of the proof, so few clients need a larger one than the paper's.
    """
    off = deviation_probability(beta=beta, clients=clients)
    if off >= 1:
        return math.inf, 1.0
    return _log_mix(p / (1 - off), 2 * q * epsilon), off + p * q * delta / (1 - off)


def compose(
    epsilon_c: float, delta_c: float, *, rounds: int, delta_tilde: float
) -> tuple[float, float]:
    """Theorem 4 (Eq. 23) over `rounds` rounds; inf where it overflows. delta is not cut at 1."""
    if rounds == 0 or epsilon_c == 0:
        return 0.0, rounds * delta_c + delta_tilde
    root = math.sqrt(2 * rounds * math.log(1 / delta_tilde)) * epsilon_c
    return root + rounds * epsilon_c * _expm1(epsilon_c), rounds * delta_c + delta_tilde


def correction(p: Sequence[float]) -> float:
    """nu of Eq. 17, the chance that somebody checks in; one p a client."""
    return -math.expm1(sum(math.log1p(-v) if v < 1 else -math.inf for v in p))


def _log_mix(a: float, x: float) -> float:
    """ln(1 + a (e^x - 1)) for a, x >= 0, without overflow."""
    if a == 0:
        return 0.0
    if x <= 1:
        return math.log1p(a * math.expm1(x))
    return x + math.log(math.exp(-x) - a * math.expm1(-x))


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 709 else math.inf
