"""Public mechanisms: how what leaves a client is disturbed, as everybody may know (Kerckhoffs)."""

from bench.contract.mechanisms.additive import (
    Averaged,
    GaussianNoise,
    LabelNoise,
    LaplaceNoise,
    NoiseFree,
    SmashedNoise,
    average,
)
from bench.contract.mechanisms.base import (
    Clip,
    Mechanism,
    Prepared,
    RandomLayer,
    squared_distance,
    without_law,
)
from bench.contract.mechanisms.bits import BernoulliMask
from bench.contract.mechanisms.bounded import AdaptiveTwoPoint, Piecewise, TwoPoint
from bench.contract.mechanisms.quantised import FixedPoint, Quantised, Sparsified
from bench.contract.mechanisms.signs import SignPerturbation

__all__ = [
    "AdaptiveTwoPoint",
    "Averaged",
    "BernoulliMask",
    "Clip",
    "FixedPoint",
    "GaussianNoise",
    "LabelNoise",
    "LaplaceNoise",
    "Mechanism",
    "NoiseFree",
    "Piecewise",
    "Prepared",
    "Quantised",
    "RandomLayer",
    "SignPerturbation",
    "SmashedNoise",
    "Sparsified",
    "TwoPoint",
    "average",
    "squared_distance",
    "without_law",
]
