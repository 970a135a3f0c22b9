"""All that a plugin imports: the contract between leakbench and its defenses and attacks.

A defense is a `Defense`: hooks where something leaves a client or is decided, each with an
identity default. An attack is an `Attack`: it gets what a curious server saw (`Seen`) and a
`Context`, never the private data. `bench.contract` has the parts.
"""

from bench.contract.attack import Attack as Attack
from bench.contract.attack import Context as Context
from bench.contract.attack import Judge as Judge
from bench.contract.attack import Reconstruction as Reconstruction
from bench.contract.attack import Seen as Seen
from bench.contract.defense import Client as Client
from bench.contract.defense import Defense as Defense
from bench.contract.defense import FloatOrInf as FloatOrInf
from bench.contract.defense import Local as Local
from bench.contract.defense import Loss as Loss
from bench.contract.defense import Mixture as Mixture
from bench.contract.defense import ModelFormer as ModelFormer
from bench.contract.defense import Party as Party
from bench.contract.defense import Server as Server
from bench.contract.defense import Strength as Strength
from bench.contract.defense import Submodel as Submodel
from bench.contract.defense import fresh as fresh
from bench.contract.events import Encrypted as Encrypted
from bench.contract.events import Event as Event
from bench.contract.events import Facts as Facts
from bench.contract.events import Gaussian as Gaussian
from bench.contract.events import Laplace as Laplace
from bench.contract.events import RandomisedResponse as RandomisedResponse
from bench.contract.events import Round as Round
from bench.contract.events import Summed as Summed
from bench.contract.events import Unit as Unit
from bench.contract.events import Unprotected as Unprotected
from bench.contract.events import Withheld as Withheld
from bench.contract.mechanisms import AdaptiveTwoPoint as AdaptiveTwoPoint
from bench.contract.mechanisms import Base as Base
from bench.contract.mechanisms import BernoulliMask as BernoulliMask
from bench.contract.mechanisms import Clip as Clip
from bench.contract.mechanisms import FixedPoint as FixedPoint
from bench.contract.mechanisms import GaussianNoise as GaussianNoise
from bench.contract.mechanisms import LabelNoise as LabelNoise
from bench.contract.mechanisms import LaplaceNoise as LaplaceNoise
from bench.contract.mechanisms import Mechanism as Mechanism
from bench.contract.mechanisms import Piecewise as Piecewise
from bench.contract.mechanisms import Prepared as Prepared
from bench.contract.mechanisms import Quantised as Quantised
from bench.contract.mechanisms import RandomLayer as RandomLayer
from bench.contract.mechanisms import SignPerturbation as SignPerturbation
from bench.contract.mechanisms import SmashedNoise as SmashedNoise
from bench.contract.mechanisms import Sparsified as Sparsified
from bench.contract.mechanisms import TwoPoint as TwoPoint
from bench.contract.mechanisms import as_row as as_row
from bench.contract.mechanisms import sizes_of as sizes_of
from bench.contract.mechanisms import squared_distance as squared_distance
from bench.contract.mechanisms import without_law as without_law
from bench.contract.messages import EVERYONE as EVERYONE
from bench.contract.messages import FORMER as FORMER
from bench.contract.messages import SERVER as SERVER
from bench.contract.messages import SUM as SUM
from bench.contract.messages import UPLOAD_KINDS as UPLOAD_KINDS
from bench.contract.messages import Kind as Kind
from bench.contract.messages import Message as Message
from bench.contract.messages import Part as Part
from bench.contract.messages import Sealed as Sealed
from bench.contract.messages import Stage as Stage
from bench.contract.messages import State as State
from bench.contract.messages import as_kind as as_kind
from bench.contract.messages import detached as detached
from bench.contract.network import Layer as Layer
from bench.contract.network import NetworkView as NetworkView
