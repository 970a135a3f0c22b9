"""How training samples are dealt to clients."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How samples come to clients, which is public.

    Attributes:
        how: Evenly at random, by label from a Dirichlet distribution, in shards of one label, or as
            the data's own clients have them.
        clients: Their number.
        alpha: Concentration of the Dirichlet distribution.
        each: Shards that every client has.
        least: Samples that every client has at least, as far as there are so many.
    """

    how: Literal["iid", "dirichlet", "shards", "natural"]
    clients: int
    alpha: float = 1.0
    each: int = 1
    least: int = 1

    def deal(
        self, labels: np.ndarray, rng: np.random.Generator, owners: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Disjoint index arrays, one per client.

        Args:
            owners: Whose each sample is, int64 [N], if the data says so.

        Raises:
            UserError: For too few samples, or too few clients of the data's own.
        """
        if self.how == "natural":
            return natural(owners, clients=self.clients, least=self.least, rng=rng)
        if self.how == "iid":
            return iid(labels, clients=self.clients, rng=rng)
        if self.how == "shards":
            return shards(labels, clients=self.clients, each=self.each, rng=rng)
        least = min(self.least, len(labels) // self.clients)
        return dirichlet(labels, clients=self.clients, alpha=self.alpha, rng=rng, minimum=least)


def iid(labels: np.ndarray, *, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Equal random shares: one index array per client, whose sizes differ by at most one."""
    _check(labels, clients)
    return [np.sort(p) for p in np.array_split(rng.permutation(len(labels)), clients)]


def dirichlet(
    labels: np.ndarray, *, clients: int, alpha: float, rng: np.random.Generator, minimum: int = 1
) -> list[np.ndarray]:
    """Label-skewed shares: every class is dealt by proportions from a Dirichlet distribution.

    A client that drew fewer than `minimum` takes from the largest, so that any alpha and number of
    clients works; redrawing until all are large enough may never end. NumPy's Dirichlet is used:
    the packages that offer the partition as a whole bring a data-loading framework with them.
    Source: Hsu, Qi, Brown, arXiv:1909.06335.

    Returns:
        Disjoint index arrays that cover all samples, one per client.

    Raises:
        UserError: If there are too few samples.
    """
    _check(labels, clients * minimum)
    shares: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        proportions = rng.dirichlet(np.full(clients, alpha))
        cuts = np.floor(np.cumsum(proportions)[:-1] * len(members)).astype(int)
        for share, piece in zip(shares, np.split(members, cuts), strict=True):
            share.extend(piece.tolist())
    for share in shares:
        while len(share) < minimum:
            donor = max(shares, key=len)
            share.append(donor.pop(int(rng.integers(len(donor)))))
    return [np.sort(np.array(s, dtype=np.int64)) for s in shares]


def shards(
    labels: np.ndarray, *, clients: int, each: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Deal shares of a few labels.

    Samples sorted by label are cut into clients * each shards, of which every client is dealt
    `each`, so that it has hardly more labels than that. Sizes differ by at most `each`.
    Source: McMahan et al., arXiv:1602.05629.
    """
    _check(labels, clients * each)
    order = rng.permutation(len(labels))
    by_label = order[np.argsort(labels[order], kind="stable")]
    pieces = np.array_split(by_label, clients * each)
    dealt = rng.permutation(clients * each).reshape(clients, each)
    return [np.sort(np.concatenate([pieces[i] for i in mine])) for mine in dealt]


def natural(
    owners: np.ndarray | None, *, clients: int, least: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return what each of `clients` of the data's own clients holds, drawn among those of
    `enough`."""
    chosen = rng.choice(enough(owners, clients=clients, least=least), size=clients, replace=False)
    return [np.flatnonzero(owners == owner) for owner in chosen]


def enough(owners: np.ndarray | None, *, clients: int, least: int) -> np.ndarray:
    """Return those of the data's own clients that hold at least `least` samples.

    Raises:
        UserError: If the data does not say whose its samples are, or there are fewer than
            `clients`.
    """
    if owners is None:
        raise UserError(
            'partition = "natural" takes the data\'s own clients, but this data set does not say '
            "whose its samples are."
        )
    known, counts = np.unique(owners, return_counts=True)
    large = known[counts >= least]
    if len(large) < clients:
        raise UserError(
            f"{len(large)} of the data's own {len(known)} clients hold at least {least} training "
            f"sample(s), as the threats need, but clients = {clients}."
        )
    return large


def _check(labels: np.ndarray, needed: int) -> None:
    if needed < 1 or len(labels) < needed:
        raise UserError(
            f"{len(labels)} training samples cannot be dealt out: {needed} are needed at least."
        )
