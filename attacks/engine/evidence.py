"""What was seen of the victims, as the terms of an objective."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Literal, cast

import torch
from torch import Tensor

from attacks.engine import terms
from attacks.engine.clients import Clients, Spread, moves
from attacks.engine.observation import (
    SMASHED,
    ObservedUploads,
    Release,
    SplitView,
    find_opened,
    find_opened_mean,
    gradient_estimate,
    observe,
    split_view,
)
from attacks.engine.optimisers import column
from attacks.engine.orders import Orders
from bench.api import Context, GaussianNoise, Kind, Mechanism, SmashedNoise

Distance = Literal["likelihood", "cosine"]
_TINY = 1e-30
_EXACT = 1e-3
"""Noise that stands for none beside a noisy channel, in units of the upload's root mean square."""
_MANY = 4
"""Releases from which a descent begins with some of them."""


class Evidence:
    """Uploads and smashed data of the victims, weighed against each other.

    The releases tell of the same samples with randomness of their own, so that their terms add up:
    every earlier one is evidence by itself, of which this one has the terms and sums too.

    The objective is the negative log-likelihood of what was observed under the defense's public
    mechanisms (Kerckhoffs). Without noise it is the squared distance of gradients (DLG, Eq. 3).
    The cosine distance of gradients is the alternative. Smashed data, where it was seen, is
    matched jointly, but for uploads of steps under random weights that nobody knows. A channel
    without noise is exact, so that a noisy one adds nothing to it: a noisy upload beside exact
    smashed data is dropped, and an exact upload beside noisy smashed data gets a noise far below
    it. So does exact smashed data of which a part is missing, since only the prior can fill that
    in.

    Args:
        releases: Oldest first, with what clients kept to themselves estimated (see
            `with_private_parts`).
        ctx: The attack's.
        dtype: Of all tensors, on the context's device.
        distance: `likelihood` (squared distance without noise) or `cosine` of the uploads.
        share: Weight of one release's cosine; None: such that those of all releases are averaged.
        arranged: Whether candidates' samples stand as the last release's first epoch used them.
        steps: How many steps of all samples replace a client's several local steps where only its
            upload was seen. They begin between the broadcast and such a part of the way to where
            the client ended. None: the local steps are simulated.
            Source: of one step, Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023.
        known: Other releases with their candidate clients, which those from the same state share.

    Attributes:
        earlier: Of the releases before the last, each by itself.
        clients: Candidate clients.
        view: What was seen at the cut, or None.
        returned: The gradient by the slopes that the server returned, or None.
        noise: What makes the uploads random, or None.
        bounds: What tells intervals of their values where nothing is random, or None.
        spread: How activations move with the defense's random weights, or None.
        uploads: What the victims uploaded, or None where it adds nothing.
        own: Terms of the objective about this release.
        terms: Those of all releases.
        sums: Terms about all victims together, likewise.
    """

    def __init__(
        self,
        releases: Sequence[Release],
        ctx: Context,
        *,
        dtype: torch.dtype,
        distance: Distance = "likelihood",
        share: float | None = None,
        arranged: bool = True,
        steps: int | None = None,
        known: list[tuple[Release, Clients]] | None = None,
    ) -> None:
        *before, release = releases
        self.release, self.ctx, self.dtype, self.distance = release, ctx, dtype, distance
        share = 1 / len(releases) if share is None else share
        known = [] if known is None else known
        alone = partial(Evidence, ctx=ctx, dtype=dtype, distance=distance, steps=steps)
        self.earlier = [alone([r], share=share, arranged=False, known=known) for r in before]
        alike = next((c for other, c in known if release.same_start(other)), None)
        replaced = steps is not None and release.steps > 1 and SMASHED not in release.by_sample
        self.steps = steps if replaced else None
        trained = release if self.steps is None else _unite_steps(release, self.steps)
        self.clients = alike or Clients(trained, ctx, dtype=dtype)
        self.clients.shared = alike is not None
        known.append((release, self.clients))
        # Beside coordinates that were opened, and are exact, noised ones add nothing.
        zone = find_opened(release)
        mechanisms = [] if zone else release.acting
        self.noise: Mechanism | None = None if zone else release.noise
        self.view = split_view(release, ctx, dtype=dtype)
        self.returned = None if self.view is None else self.clients.returned_gradient(self.view)
        self.spread: Spread | None = None
        if self.view is not None:
            self.spread = self.clients.spread(self.view, ctx.aux_x, least=_EXACT)
        self.bounds = None if zone else release.bounds
        names = None if self.returned is None else set(self.returned.start)
        if self.noise is not None and self.noise.tensors is not None and distance == "likelihood":
            covered = set(self.noise.tensors)  # what is sent without noise has no place in its law
            names = covered if names is None else names & covered
        kind = cast(Kind, mechanisms[-1].of) if mechanisms else "gradient"
        observation = self._observe(kind, zone, names)
        if observation is not None and "summed" in release.seen.known and self.noise is not None:
            # A sum's noise, as of numbers of fixed point, may be too small to look for.
            least = _EXACT * observation.rms
            if self.noise.faithful and 0 < self.noise.spread <= least**2:
                self.noise = None
        if self.view is not None and distance == "likelihood":
            self.view, observation = self._weigh_together(self.view, observation)
        self.uploads: terms.Uploads | None = None
        self.terms: list[terms.Term] = []
        self.sums: list[terms.UploadSum] = []
        if observation is not None:
            self.uploads = terms.Uploads(
                clients=self.clients,
                observation=observation,
                returned=self.returned,
                clips=moves(mechanisms) if distance == "likelihood" else (),
                law=self.noise,
                bounds=self.bounds if distance == "likelihood" else None,
                own=release.own if distance == "likelihood" else None,
                shift=None if self.steps is None else self._find_shift(observation, self.steps),
            )
            # Steps use samples in an order that is not known, or, under a split protocol, on
            # server stages that move in a way that is not simulated, which counts as noise alike.
            batch, samples = self.clients.batch, self.clients.samples
            several = release.steps * batch > samples
            if samples > batch and (several or not arranged or self.view is not None):
                victims, sent = len(release.clients), self.uploads.in_order
                self.uploads.orders = Orders(victims, self.clients, ctx, first=arranged, sent=sent)
            if distance == "cosine":
                self.terms.append(terms.upload_cosine(self.uploads, share))
            else:
                self.terms.append(terms.UploadLikelihood(self.uploads))
            shared = find_opened_mean(release, dtype=dtype)
            if shared is not None and distance == "likelihood":
                covers = {n: c.to(ctx.device) for n, c in shared[0].items()}
                mean = shared[1].to(ctx.device)
                self.sums.append(terms.UploadSum(uploads=self.uploads, covers=covers, mean=mean))
        if self.view is not None:
            self.terms.append(self._build_smashed_term(self.view))
        self.own = self.terms
        self.terms = [t for one in self.earlier for t in one.terms] + self.own
        self.sums = [s for one in self.earlier for s in one.sums] + self.sums

    # --- what was seen --------------------------------------------------------------------------
    def _observe(
        self, kind: Kind, zone: dict[str, Tensor], names: set[str] | None
    ) -> ObservedUploads | None:
        """Uploads as `kind`, of the tensors `names` alone (None: of all), or None."""
        if not self.release.uploads:
            return None
        if self.release.of_epoch > 1 and self.returned is None:  # steps of which each used a part
            return None
        if self.distance == "cosine":
            sent = gradient_estimate(self.release, dtype=self.dtype)
        else:
            law = self.noise or self.bounds
            absent = law is not None and law.reads_absent
            sent = observe(self.release, kind, dtype=self.dtype, absent=absent)
        if zone:
            shown = {n: p & zone.get(n, p.new_zeros(())) for n, p in sent.present.items()}
            sent = replace(sent, present=shown)
        # With the returned slopes the first stages' upload needs no labels, and the head's tells
        # nothing of the images that the features do not.
        kept = [n for n in sent.values if names is None or n in names]
        # An upload of nothing would be the unit of the smashed data's distance, 0.
        if self.view is not None and not any(bool(sent.present[n].any()) for n in kept):
            return None
        device = self.ctx.device
        return ObservedUploads(
            kind=sent.kind,
            values={n: sent.values[n].to(device) for n in kept},
            present={n: sent.present[n].to(device) for n in kept},
        )

    def _find_shift(self, sent: ObservedUploads, steps: int) -> dict[str, Tensor]:
        """From the broadcast to where each victim ended, over `steps`; 0 where nothing was seen."""
        part = -self.release.step / steps
        return {n: part * torch.where(sent.present[n], g, 0.0) for n, g in sent.values.items()}

    def _weigh_together(
        self, view: SplitView, observation: ObservedUploads | None
    ) -> tuple[SplitView, ObservedUploads | None]:
        """Smashed data and upload in one likelihood; `noise` with them."""
        if not view.noises and not bool(view.present.all()):
            square = _square(view) / view.present.flatten(1).sum(dim=1).clamp_min(1)
            rms = float(square.mean().sqrt())
            exact = SmashedNoise(of=SMASHED, std=_EXACT * max(rms, _TINY))
            view = replace(view, mechanisms=(*view.mechanisms, exact))
        # A step under drawn weights is no function of the mean ones: as many coordinates as an
        # upload has, which move together, would outvote the activations and mean nothing.
        if self.spread is not None or (not view.noises and self.noise is not None):
            self.noise, observation = None, None
        elif view.noises and self.noise is None and observation is not None:
            std = _EXACT * max(observation.rms, _TINY)
            self.noise = GaussianNoise(of=observation.kind, std=std)
        return view, observation

    # --- terms ----------------------------------------------------------------------------------
    def _build_smashed_term(self, view: SplitView) -> terms.Term:
        law = terms.weigh_distance(view, self.unit(view))
        # One noise has its own law; several, and drawn weights, go by their variance.
        noises = view.noises if self.distance == "likelihood" else ()
        if noises and ((self.spread is None and len(noises) == 1) or view.std == 0):
            law = terms.likelihood(view, noises[-1])
        elif self.spread is not None and self.distance == "likelihood":
            precision = self.spread.precision(view.std**2)
            if precision is not None and bool(view.present.all()):
                law = terms.joint_distance(view, precision)
        return terms.build_smashed_term(self.clients, view, law)

    def unit(self, view: SplitView) -> Tensor:
        """[V, 1, ...], weight of the squared distance of smashed data: that of its noise, or as
        much as the upload's."""
        square = _square(view)
        if self._drawn and self.distance == "likelihood":
            variance = view.std**2 + (0.0 if self.spread is None else self.spread.variance)
            each = torch.as_tensor(1 / (2 * variance)).to(square)
            return each.expand(len(square), 1, *view.values.shape[2:])
        if self.uploads is None:
            scale = torch.ones_like(square)
        elif self.orders is not None:  # exact beside uploads whose order counts as noise
            size = view.present.flatten(1).sum(dim=1).clamp_min(1)
            scale = size / (2 * _EXACT**2 * square.clamp_min(_TINY))
        elif self.distance == "cosine":
            scale = 1 / square.clamp_min(_TINY)
        else:
            # A client may have withheld all that others sent.
            unit = self.uploads.observation.square
            scale = torch.where(unit > 0, unit / square.clamp_min(_TINY), 1.0)
        return column(scale, view.values)

    # --- what it amounts to ---------------------------------------------------------------------
    @property
    def noisy(self) -> bool:
        """Whether the objective is a likelihood with noise, so that a prior weighs in and no
        loss is known to be the least."""
        own = self.noise is not None or self._drawn or self.orders is not None
        return own or any(e.noisy for e in self.earlier)

    @property
    def orders(self) -> Orders | None:
        """Guesses of the order in which this release's steps used the samples, if it is unknown."""
        return None if self.uploads is None else self.uploads.orders

    @property
    def costly(self) -> bool:
        """Whether there are many uploads, each from a state of its own, so that none shares the
        evaluations of another."""
        sent = [one for one in releases_of(self) if one.uploads is not None]
        return len({id(one.clients) for one in sent}) == len(sent) >= _MANY

    @property
    def anneals(self) -> bool:
        """Whether a likelihood of uploads is to be softened at first."""
        own = self.noise is not None and self.noise.anneals
        return own or any(e.anneals for e in self.earlier)

    @property
    def _drawn(self) -> bool:
        """Whether smashed data is random, by its noise or the defense's weights."""
        return self.view is not None and (bool(self.view.noises) or self.spread is not None)

    @cached_property
    def square(self) -> Tensor:
        """[V], the unit of the objective without noise: |upload|^2, once more for smashed data, of
        all releases."""
        if self.distance == "cosine":
            return torch.ones(len(self.release.clients), dtype=self.dtype, device=self.ctx.device)
        if self.uploads is not None:
            own = self.uploads.observation.square * (1 if self.view is None else 2)
        else:
            assert self.view is not None
            own = _square(self.view)
        return sum((e.square for e in self.earlier), start=own)

    @cached_property
    def silent(self) -> Tensor:
        """Bool [V]: nothing but zeros was seen of the victim, so nothing can be matched."""
        upload = 0.0 if self.uploads is None else self.uploads.observation.square
        smashed = 0.0 if self.view is None else _square(self.view)
        own = torch.as_tensor(upload + smashed == 0, device=self.ctx.device) & (not self.sums)
        for one in self.earlier:
            own = own & one.silent
        return own


def some_terms(evidence: Evidence, share: float) -> list[terms.Term]:
    """Terms of about this share of the releases, evenly from the first on."""
    if share >= 1:
        return evidence.terms
    return [term for one in releases_of(evidence)[:: round(1 / share)] for term in one.own]


def releases_of(evidence: Evidence) -> list[Evidence]:
    """Every release by itself, oldest first."""
    return [*evidence.earlier, evidence]


def keeping(evidence: Evidence) -> list[terms.Uploads]:
    """Uploads of the releases whose clients kept something to themselves."""
    uploads = [one.uploads for one in releases_of(evidence)]
    return [u for u in uploads if u is not None and u.own is not None]


def _unite_steps(release: Release, steps: int) -> Release:
    """The release as if its clients had made so many steps, each of all their samples."""
    known = {k: v for k, v in release.seen.known.items() if k != "summed"}
    known["lr"] = release.step / steps
    seen = replace(release.seen, known=known)
    return replace(release, seen=seen, steps=steps, batch=release.samples)


def _square(view: SplitView) -> Tensor:
    """Squared norm [V] of smashed data, of the victims' own part."""
    return torch.where(view.present, view.values, 0.0).flatten(1).square().sum(dim=1)
