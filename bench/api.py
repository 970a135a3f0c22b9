"""All that a plugin imports: the contract between leakbench and its defenses and attacks.

A defense is a `Defense`: hooks where something leaves a client or is decided, each with an
identity default. An attack is an `Attack`: it gets what a curious server saw (`Seen`) and a
`Context`, never the private data. `bench.contract` has the parts.
"""

from bench.contract.attack import (
    Attack,
    Context,
    Reconstruction,
    Seen,
)
from bench.contract.defense import (
    Client,
    Defense,
    Local,
    Loss,
    Mixture,
    Party,
    Server,
    fresh,
)
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
    Prepared,
    SignPerturbation,
    SmashedNoise,
    squared_distance,
    without_law,
)
from bench.contract.messages import (
    EVERYONE,
    SERVER,
    UPLOAD_KINDS,
    Kind,
    Message,
    Part,
    Sealed,
    Stage,
    State,
    as_kind,
    detached,
)
from bench.contract.network import (
    Layer,
    NetworkView,
)

__all__ = [
    "EVERYONE",
    "SERVER",
    "UPLOAD_KINDS",
    "Attack",
    "BernoulliMask",
    "Client",
    "Clip",
    "Context",
    "Defense",
    "Encrypted",
    "Event",
    "Facts",
    "Gaussian",
    "GaussianNoise",
    "Kind",
    "LabelNoise",
    "Laplace",
    "LaplaceNoise",
    "Layer",
    "Local",
    "Loss",
    "Mechanism",
    "Message",
    "Mixture",
    "NetworkView",
    "Part",
    "Party",
    "Prepared",
    "RandomisedResponse",
    "Reconstruction",
    "Round",
    "Sealed",
    "Seen",
    "Server",
    "SignPerturbation",
    "SmashedNoise",
    "Stage",
    "State",
    "Unit",
    "Unprotected",
    "Withheld",
    "as_kind",
    "detached",
    "fresh",
    "squared_distance",
    "without_law",
]
