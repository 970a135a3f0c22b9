"""Test accuracy of a federation: of the one model, and of what each client has of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.contract.defense import Client
from bench.contract.messages import State
from bench.data.dataset import Dataset
from bench.protocols.federation import Federation

_CHUNK = 1000


@dataclass(frozen=True, kw_only=True)
class Utility:
    """Right answers on the common test set.

    Attributes:
        correct: Right answers of the one model, or None where some of its values came up in no
            upload of the run, so that there is no such model.
        test_samples: Size of the test set.
        class_chance: Share of its commonest class.
        personal_accuracy: Mean of `personal_accuracies`.
        personal_accuracies: Accuracy of each client's own network on test samples weighted to its
            training labels' shares; None for a client none of whose classes is tested.
        personal_chance: Mean accuracy of always guessing a client's commonest class.
        keeping_clients: Clients whose network differs from the one model by what they withheld.
    """

    correct: int | None
    test_samples: int
    class_chance: float
    personal_accuracy: float | None
    personal_accuracies: tuple[float | None, ...]
    personal_chance: float
    keeping_clients: int


def evaluate(federation: Federation, dataset: Dataset, *, has_global: bool) -> Utility:
    """Evaluate every client's network; clients that withheld nothing share one evaluation.

    Normalisation statistics come from public samples.

    has_global: Whether the run's uploads made one model (`Reached`).
    """
    network, device, test_y = federation.network, federation.device, dataset.test_y
    classes = network.classes
    # Once for all networks.
    x, y, aux_x = (t.to(device) for t in (dataset.test_x, test_y, dataset.aux_x))

    def right(weights: State) -> Tensor:
        """Right answers per class, int64 [C]; a network of non-finite weights answers class 0."""
        counts = torch.zeros(classes, dtype=torch.int64, device=device)
        with torch.no_grad():
            buffers = network.calibrate(weights, aux_x)
            for some, labels in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
                logits = network.apply(weights, some, mode="eval", buffers=buffers)
                hit = logits.nan_to_num(0.0).argmax(dim=-1) == labels
                counts.scatter_add_(0, labels, hit.long())
        return counts.cpu()

    common = right(federation.mean_weights())
    tested = test_y.bincount(minlength=classes)
    counts = [c.y.cpu().bincount(minlength=classes) for c in federation.clients]
    shares = [count.double() / count.sum() for count in counts]
    keeping = [c.kept is not None for c in federation.clients]
    personal = [
        _match_accuracy(right(federation.weights_of(c)) if keeps else common, tested, share)
        for c, keeps, share in zip(federation.clients, keeping, shares, strict=True)
    ]
    known = [p for p in personal if p is not None]
    return Utility(
        correct=int(common.sum()) if has_global else None,
        test_samples=len(test_y),
        class_chance=float(tested.max() / len(test_y)),
        personal_accuracy=sum(known) / len(known) if known else None,
        personal_accuracies=tuple(personal),
        personal_chance=sum(float(s.max()) for s in shares) / len(shares),
        keeping_clients=sum(keeping),
    )


@dataclass
class Reached:
    """Which of the coordinates that clients train came up in any upload of a run.

    A model with values that nobody ever uploaded is no model of the federation's: it has no
    accuracy of its own.
    """

    missing: dict[str, Tensor] = field(default_factory=dict)

    def add(self, client: Client, held: Sequence[str]) -> None:
        """Count a client's last upload."""
        for name in held:
            kept = (client.kept or {}).get(name)
            if kept is None:
                kept = torch.zeros((), dtype=torch.bool)
            before = self.missing.get(name)
            self.missing[name] = kept if before is None else before & kept

    def everything(self) -> bool:
        """Return whether nothing is missing; true of a run without uploads, whose model is the
        first."""
        return not any(bool(m.any()) for m in self.missing.values())


def _match_accuracy(right: Tensor, tested: Tensor, share: Tensor) -> float | None:
    """Return sum_c share_c accuracy_c over the classes that are tested, or None if the client has
    none."""
    weight = torch.where(tested > 0, share, 0.0)
    if not float(weight.sum()):
        return None
    accuracy = right.double() / tested.clamp_min(1)
    return float((weight * accuracy).sum() / weight.sum())
