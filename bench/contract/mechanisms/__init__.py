"""Public mechanisms: how what leaves a client is disturbed, as everybody may know (Kerckhoffs)."""

from bench.contract.mechanisms.additive import Averaged as Averaged
from bench.contract.mechanisms.additive import GaussianNoise as GaussianNoise
from bench.contract.mechanisms.additive import LabelNoise as LabelNoise
from bench.contract.mechanisms.additive import LaplaceNoise as LaplaceNoise
from bench.contract.mechanisms.additive import NoiseFree as NoiseFree
from bench.contract.mechanisms.additive import SmashedNoise as SmashedNoise
from bench.contract.mechanisms.additive import average as average
from bench.contract.mechanisms.base import Base as Base
from bench.contract.mechanisms.base import Clip as Clip
from bench.contract.mechanisms.base import Mechanism as Mechanism
from bench.contract.mechanisms.base import Prepared as Prepared
from bench.contract.mechanisms.base import RandomLayer as RandomLayer
from bench.contract.mechanisms.base import as_row as as_row
from bench.contract.mechanisms.base import sizes_of as sizes_of
from bench.contract.mechanisms.base import squared_distance as squared_distance
from bench.contract.mechanisms.base import without_law as without_law
from bench.contract.mechanisms.bits import BernoulliMask as BernoulliMask
from bench.contract.mechanisms.bounded import AdaptiveTwoPoint as AdaptiveTwoPoint
from bench.contract.mechanisms.bounded import Piecewise as Piecewise
from bench.contract.mechanisms.bounded import TwoPoint as TwoPoint
from bench.contract.mechanisms.quantised import FixedPoint as FixedPoint
from bench.contract.mechanisms.quantised import Quantised as Quantised
from bench.contract.mechanisms.quantised import Sparsified as Sparsified
from bench.contract.mechanisms.signs import SignPerturbation as SignPerturbation
