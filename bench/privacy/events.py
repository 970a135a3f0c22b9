"""Events and mechanisms under the name by which earlier plugins import them; now `bench.api`."""

from bench.contract.events import (
    Encrypted,
    Event,
    Facts,
    Gaussian,
    Laplace,
    RandomisedResponse,
    Round,
    Unit,
    Unprotected,
    Withheld,
)
from bench.contract.mechanisms import (
    BernoulliMask,
    Clip,
    GaussianNoise,
    LabelNoise,
    LaplaceNoise,
    Mechanism,
    SignPerturbation,
    SmashedNoise,
)

__all__ = [
    "BernoulliMask",
    "Clip",
    "Encrypted",
    "Event",
    "Facts",
    "Gaussian",
    "GaussianNoise",
    "LabelNoise",
    "Laplace",
    "LaplaceNoise",
    "Mechanism",
    "RandomisedResponse",
    "Round",
    "SignPerturbation",
    "SmashedNoise",
    "Unit",
    "Unprotected",
    "Withheld",
]
