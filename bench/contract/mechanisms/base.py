"""What every public mechanism says of itself, and those that draw nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bench.errors import UserError

TINY = 1e-30
Base = Tensor | Mapping[str, Tensor] | None
"""Broadcast values that rows [P, ...] belong to: one tensor shaped like a row, or several by
name, whose flattened values one after another are a row; None where they do not matter."""
Law = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Prepared:
    """What was seen, with everything that a likelihood needs of it computed once.

    Attributes:
        law: (sent, *seen) -> (misfit, its derivative by sent), elementwise.
        seen: Tensors [V, ...], one row per victim.
    """

    law: Law
    seen: tuple[Tensor, ...]

    def misfit(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """How badly noise-free values explain what was seen, and the derivative by them."""
        return self.law(sent, *self.seen)

    def __getitem__(self, victims: Any) -> Prepared:
        """The same of some victims, which may repeat."""
        return Prepared(self.law, tuple(t[victims] for t in self.seen))


def squared_distance(seen: Tensor) -> Prepared:
    """The squared distance, which stands for a likelihood where nothing is random."""
    return Prepared(_square, (seen,))


def _square(sent: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    rest = sent - seen
    return rest.square(), 2 * rest


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Base of the public descriptions of how an upload is disturbed.

    A subclass of your own that draws at random gives `misfit` (or `prepared`), without which
    attacks that need its law refuse it, and `sample`, by which conformance checks what a
    defense draws.

    Attributes:
        of: What it acts on.
        tensors: Names of the tensors of an upload that it covers; None: all.
    """

    of: Literal["weights", "update", "gradient", "smashed", "labels"]
    tensors: tuple[str, ...] | None = None
    kinds: ClassVar[dict[str, type[Mechanism]]] = {}
    anneals: ClassVar[bool] = False
    """Whether a descent should begin with more softness than it ends with (see `softness`)."""
    faithful: ClassVar[bool] = True
    """Whether what was seen is, but for noise of mean 0, the value itself."""
    scores: ClassVar[bool] = False
    """Whether the values that it acts on are scores, the logits of what is sent."""

    tells_interval: ClassVar[bool] = False
    """Whether, where it draws nothing, what was seen tells an interval that the value lies in."""
    vague: ClassVar[bool] = False
    """Whether that interval is so wide that a likelihood and a prior compare, not a distance."""
    remembers: ClassVar[bool] = False
    """Whether what is sent also follows from what the client kept of earlier rounds."""
    reads_absent: ClassVar[bool] = False
    """Whether its law takes values that were not sent, as 0, for those too small to be."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Mechanism.kinds[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        """The mechanism as JSON can hold it."""
        fields_ = {"kind": type(self).__name__, **asdict(self)}
        return {n: v for n, v in fields_.items() if n != "tensors" or v is not None}

    def covers(self, name: str) -> bool:
        """Whether it acts on the tensor `name`."""
        return self.tensors is None or name in self.tensors

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Mechanism:
        """Inverse of `to_dict`.

        Raises:
            UserError: For an unknown kind.
        """
        kind = Mechanism.kinds.get(data.get("kind", ""))
        if kind is None:
            raise UserError(
                f"unknown mechanism '{data.get('kind')}'; known: {', '.join(Mechanism.kinds)}."
            )
        names = {f.name for f in fields(kind)}
        values = {k: v for k, v in data.items() if k in names}
        if values.get("tensors") is not None:
            values["tensors"] = tuple(values["tensors"])
        return kind(**values)

    # --- what is drawn ----------------------------------------------------------------------
    @property
    def random(self) -> bool:
        """Whether two releases of the same value differ."""
        return True

    @property
    def variance(self) -> float:
        """Variance of noise that is added to every value, whatever the value; 0 for none."""
        return 0.0

    @property
    def proof(self) -> tuple[str, float] | None:
        """(class of the ledger's event that can rest on it, level: a std, a scale or the
        probability that a sign is kept), None where none can."""
        return None

    @property
    def clips(self) -> bool:
        """Whether `apply` does anything."""
        return type(self).apply is not Mechanism.apply

    def bound_of(self, order: int) -> float | None:
        """Largest norm of that order, 1 or 2, that a row can have after it; None: not bounded."""
        return None

    def apply(self, values: Tensor) -> Tensor:
        """The deterministic part, before anything is drawn, of rows [P, ...]."""
        return values

    def shrinkage(self, values: Tensor) -> Tensor | None:
        """Factors [P] by which `apply` scales whole rows [P, ...], None where it does not."""
        return None

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        """One draw of what is sent for rows [P, ...].

        Args:
            values: Noise-free values; scores where `scores` says so.
            rng: A generator on the CPU, as are the values.
            base: See `Base`.
        """
        if self.random:
            raise NotImplementedError(f"{type(self).__name__} does not say what it samples.")
        return self.apply(values)

    def after_training(self) -> Mechanism:
        """The law given trained variables, which have the noise of the training's steps."""
        return self

    @property
    def spread(self) -> float:
        """Variance of what it adds to a value, averaged over values where it depends on them."""
        return self.variance

    def of_mean(self, count: int) -> Mechanism | None:
        """Its law of the mean of `count` clients' values, None where only the spread is known."""
        return None

    # --- what an attacker makes of it ---------------------------------------------------------
    @property
    def known_law(self) -> bool:
        """Whether `misfit` can be computed."""
        own = type(self)
        gives = own.prepared is not Mechanism.prepared or own.misfit is not Mechanism.misfit
        return gives or not self.random

    def misfit(
        self, sent: Tensor, seen: Tensor, softness: float = 0.0, *, base: Base = None
    ) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood of what was seen for noise-free values, and its derivative.

        Args:
            sent: Noise-free values [P, ...] after `apply`; scores where `scores` says so.
            seen: What was seen of the same coordinates.
            softness: 0 for the true law; above 0 a smoothed form that a descent can follow.
            base: See `Base`.

        Returns:
            Elementwise, up to a constant in `sent`, and its derivative by `sent`. Where nothing
            is random, the squared distance and its derivative.
        """
        return self.prepared(seen, softness, base=base).misfit(sent)

    def softness(self, heat: float = 0.0) -> float:
        """Softness of `misfit` with which attacks compare.

        Args:
            heat: 1 where a descent begins, 0 where it ends and answers are judged.
        """
        return 0.0

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """`misfit` with all that does not change with `sent` computed once.

        Raises:
            NotImplementedError: For a random mechanism that gives no likelihood.
        """
        if type(self).misfit is not Mechanism.misfit:
            return Prepared(
                lambda sent, seen: self.misfit(sent, seen, softness, base=base), (seen,)
            )
        if self.random:
            raise NotImplementedError(f"{type(self).__name__} gives no likelihood.")
        return squared_distance(seen)

    def estimate(self, seen: Tensor, *, base: Tensor | None = None) -> Tensor:
        """A point estimate of the noise-free values, unbiased where possible."""
        return seen

    def gradient(self, seen: Tensor, *, base: Tensor, step: float) -> Tensor:
        """A point estimate of the mean gradient behind what was seen.

        Args:
            seen: Uploaded values as the kind `of`.
            base: Broadcast values of the same coordinates.
            step: Learning rate times local steps.
        """
        value = self.estimate(seen, base=base)
        if self.of == "gradient":
            return value
        return (value if self.of == "update" else value - base) / -step

    def candidates(self, estimate: Tensor, *, base: Tensor, step: float) -> tuple[Tensor, ...]:
        """What the gradient can have been, given what `gradient` returned."""
        return (estimate,)

    def gradient_variance(
        self, estimate: Tensor, *, base: Tensor, step: float, decided: bool = False
    ) -> Tensor | float:
        """Variance of the noise on an estimated gradient.

        Args:
            estimate: What `gradient` returned, or one of its `candidates`.
            base: Broadcast values of the same coordinates.
            step: Learning rate times local steps.
            decided: Whether it is known which of the `candidates` is right.
        """
        return self.spread * (1.0 if self.of == "gradient" else 1 / step) ** 2

    # --- scores ---------------------------------------------------------------------------------
    def received(self, base: Tensor) -> Tensor:
        """The broadcast values as the values that training starts from."""
        return base

    def read(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """(values behind what was sent, bool: which of them it tells), where nothing is random."""
        return sent, torch.ones_like(sent, dtype=torch.bool)


def as_row(base: Base, like: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor | None:
    """`of` every broadcast tensor, [its values, ...], joined as the values of a row of `like`."""
    if base is None:
        return None
    row = torch.cat([of(v) for v in (base.values() if isinstance(base, Mapping) else (base,))])
    if len(row) != like[0].numel():
        raise ValueError(f"{len(row)} broadcast values belong to rows of {like[0].numel()}.")
    return row


def sizes_of(base: Base, like: Tensor) -> list[int]:
    """Numbers of values of the tensors that rows like `like` [P, ...] are made of."""
    return [v.numel() for v in base.values()] if isinstance(base, Mapping) else [like[0].numel()]


def without_law(mechanisms: Sequence[Mechanism]) -> str | None:
    """Why an attack that needs likelihoods cannot attack as it should, or None.

    Args:
        mechanisms: All public mechanisms that act on what the attack matches.
    """
    silent = [type(m).__name__ for m in mechanisms if m.random and not m.known_law]
    if not silent:
        return None
    names = " and ".join(dict.fromkeys(silent))
    verb = "gives" if len(set(silent)) == 1 else "give"
    return (
        f"{names} {verb} no likelihood, so an upload disturbed by it cannot be attacked as it "
        "deserves; add `misfit` to the mechanism"
    )


@dataclass(frozen=True, kw_only=True)
class Clip(Mechanism):
    """The whole vector is scaled down to a norm if it is longer.

    Attributes:
        norm: The largest norm that is left.
        order: Of the norm, 1 or 2.
    """

    norm: float
    order: int = 2
    random = False

    def bound_of(self, order: int) -> float | None:
        return self.norm if order == self.order else None

    def shrinkage(self, values: Tensor) -> Tensor:
        flat = values.flatten(1)
        # The square root's slope is infinite at 0, and 0 is never clipped.
        length = flat.abs().sum(1) if self.order == 1 else (flat.square().sum(1) + TINY).sqrt()
        return (self.norm / length.clamp_min(TINY)).clamp_max(1.0)

    def apply(self, values: Tensor) -> Tensor:
        return values * self.shrinkage(values).view(-1, *[1] * (values.dim() - 1))


@dataclass(frozen=True, kw_only=True)
class RandomLayer(Mechanism):
    """All that the head gets passes a linear layer of the defense's own, then random numbers.

    The gradient of one sample shows what that layer got and the loss's slope by it, however random
    both are. It has no law: attacks on one step look for the numbers.

    Attributes:
        name: Of the layer in the head's stage; `STAGE.name.weight` [O, F] has a bias. Where nobody
            trains it, as under split protocols, nothing is random.
        noise: Of the numbers, from N(0, I) for every sample; a simulated step takes them from a
            variable `STAGE.noise` [B, width].
        width: See `noise`.
    """

    name: str
    noise: str
    width: int

    def find_weight(self, names: Iterable[str]) -> str | None:
        """The name of the layer's weight among those of trained variables, or None."""
        return next((n for n in names if n.endswith(f".{self.name}.weight")), None)
