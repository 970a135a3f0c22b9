"""Membership inference on a training: which samples did a client train on?

The server is handed candidates, of which some are a client's samples and some nobody's, without
being told which. A client's update is close to a mean of its own samples' gradients. So the server
regresses each update on all candidates' gradients: a candidate's coefficient speaks for its
membership. docs/method.md has the steps, and why they are not FedMIA's (Zhu et al.,
arXiv:2402.06289), from which the comparison with the other clients is.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import normalize, one_hot

from bench.contract.messages import SUM, UPLOAD_KINDS, Part, State, as_kind
from bench.data.dataset import Dataset
from bench.protocols.federation import Federation, RoundResult
from bench.protocols.observe import read_messages
from bench.records.outcomes import FALSE_POSITIVES, Membership
from bench.seeding import generator
from bench.toolkit.losses import NetworkLoss

OWN, HELD_OUT = 50, 1000
"""Most candidates among a client's samples, and among held-out samples."""
COORDINATES = 2**14
"""Most coordinates of an update that are read, the same in every round."""
CURVE = (0.001, 0.002, 0.005, FALSE_POSITIVES, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of false positives of which true positives are recorded, if they are `_FEWEST` or more."""
_FEWEST = 10
_AT_ONCE = 50
"""Samples whose gradients are computed at once."""
_NOBODY = ""
"""Whose the held-out samples are."""
_LEAST = 1e-6
"""Smallest eigenvalue that rounding leaves of normalised gradients' products."""


class MembershipInference:
    """Scores pairs of a client and a candidate over the recorded rounds of a training.

    Args:
        federation: Before its first round.
        dataset: Whose test samples nobody trains on.
    """

    def __init__(self, federation: Federation, dataset: Dataset) -> None:
        rng, device = generator(federation.seed, "membership"), federation.device

        def draw(x: Tensor, y: Tensor, most: int) -> tuple[Tensor, Tensor]:
            chosen = torch.randperm(len(y), generator=rng)[:most].to(y.device)
            return x[chosen].to(device), y[chosen].to(device)

        self.candidates = {c.id: draw(c.x, c.y, OWN) for c in federation.clients}
        self.candidates[_NOBODY] = draw(dataset.test_x, dataset.test_y, HELD_OUT)
        self.scores: dict[tuple[str, str], list[Tensor]] = {}

    def add_round(self, federation: Federation, result: RoundResult) -> None:
        """Score each participant's candidates and the held-out ones by a recorded round, which the
        federation has just played."""
        start = federation.defense.receive(result.before, federation.const)
        rng = generator(federation.seed, "membership coordinates")
        drawn = torch.randperm(sum(v.numel() for v in start.values()), generator=rng)[:COORDINATES]
        read = drawn.sort().values.to(federation.device)
        owners = [c.id for c in result.joined]
        sent: dict[str, dict[str, Part]] = {}
        for message in read_messages(federation.defense, result, owners)[0]:
            if message.kind in UPLOAD_KINDS and message.sender in (*owners, SUM):
                upload = as_kind(message, "gradient", base=result.before, lr=result.lr)
                sent.setdefault(message.sender, {}).update(upload.parts)
        flat = {sender: _flatten(parts, start, read) for sender, parts in sent.items()}
        flat = {s: (v, told) for s, (v, told) in flat.items() if v.any() and v.isfinite().all()}
        if not flat or any(c.cut is not None for c in result.joined):
            return
        owners.append(_NOBODY)
        x, y = (torch.cat(v) for v in zip(*(self.candidates[o] for o in owners), strict=True))
        gradients = _compute_gradients(federation, start, x, y, read)
        if not gradients.isfinite().all():
            return
        updates, told = (torch.stack(v) for v in zip(*flat.values(), strict=True))
        shares = torch.zeros(len(updates), len(y), dtype=torch.float64, device=y.device)
        for mask in told.unique(dim=0):
            alike = (told == mask).all(dim=1)
            shares[alike] = infer_shares(gradients[:, mask], updates[alike][:, mask])
        sizes = [len(self.candidates[o][1]) for o in owners]
        for sender, scores in zip(flat, standardise(shares, y).cpu(), strict=True):
            for owner, part in zip(owners, scores.split(sizes), strict=True):
                if owner in (sender, _NOBODY) or sender == SUM:
                    self.scores.setdefault((sender, owner), []).append(part)

    def summarise(self) -> Membership:
        """Return how well the scores tell members from others. Rounds are joined as the sum of a
        pair's scores over the root of their number."""
        scores, members = [], []
        for (_, owner), rounds in self.scores.items():
            scores.append(torch.stack(rounds).sum(dim=0) / math.sqrt(len(rounds)))
            members.append(torch.full(scores[-1].shape, owner != _NOBODY))
        if not scores:
            return Membership(reason="no update of the whole network was seen in the open")
        return trace_curve(torch.cat(scores), torch.cat(members))


def _flatten(parts: Mapping[str, Part], like: State, read: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and whether they are known, at the coordinates that are read."""
    hidden = {n: Part(values=v, present=v.new_zeros(v.shape).bool()) for n, v in like.items()}
    mine = [parts.get(n, part) for n, part in hidden.items()]
    values = [torch.where(p.presence(), p.values, 0.0).flatten() for p in mine]
    told = [p.told().flatten() for p in mine]
    return torch.cat(values)[read], torch.cat(told)[read]


def _compute_gradients(
    federation: Federation, start: State, x: Tensor, y: Tensor, read: Tensor
) -> Tensor:
    """Return each candidate's gradient [N, P] at the broadcast model and the coordinates read."""
    loss = NetworkLoss(
        network=federation.network,
        realize=lambda v: federation.defense.mean_realize(v, federation.const),
        mode="eval",
        buffers=federation.buffers,
    )
    labels = one_hot(y, federation.network.classes).float()
    rows = []
    for some in zip(x[:, None].split(_AT_ONCE), labels[:, None].split(_AT_ONCE), strict=True):
        each = vmap(grad(loss), (None, 0, 0))(start, *some)
        rows.append(torch.cat([g.detach().flatten(1) for g in each.values()], dim=1)[:, read])
    return torch.cat(rows)


def infer_shares(gradients: Tensor, updates: Tensor) -> Tensor:
    """Return the coefficients [J, N] of updates [J, P] regressed on gradients [N, P], each of norm
    1. Each update's ridge penalty is the one under which it is likeliest: small where it is a sum
    of gradients, large where it is mostly noise.

    Source of the likelihood: MacKay, Bayesian Interpolation, Neural Computation 4 (1992).

    >>> infer_shares(torch.eye(3), torch.tensor([[3.0, 0.0, 4.0]])).round(decimals=3).tolist()
    [[0.6, 0.0, 0.8]]
    """
    rows, goals = normalize(gradients, dim=1), normalize(updates, dim=1)
    spectrum, basis = torch.linalg.eigh((rows @ rows.T).double())
    spectrum = spectrum.clamp_min(_LEAST)
    along = (goals @ rows.T).double() @ basis
    within = along.square() / spectrum
    outside = (1 - within.sum(dim=1, keepdim=True)).clamp_min(_LEAST)
    penalties = torch.logspace(-5, 3, 33, dtype=torch.float64, device=rows.device)
    damped = spectrum[:, None] + penalties
    energy = within @ (1 / damped) + outside / penalties
    size, count = rows.shape[1], len(rows)
    cost = size * energy.log() + damped.log().sum(dim=0) + (size - count) * penalties.log()
    best = penalties[cost.argmin(dim=1)]
    return (along / (spectrum + best[:, None])) @ basis.T


def standardise(shares: Tensor, y: Tensor) -> Tensor:
    """Return coefficients [J, N] above the mean of the other clients' (if there are others), in
    standard deviations over the candidates of the same label y [N]."""
    if len(shares) > 1:
        shares = shares - (shares.sum(dim=0) - shares) / (len(shares) - 1)
    scores = torch.zeros_like(shares)
    for label in y.unique():
        same = shares[:, y == label]
        spread = same.std(dim=1, keepdim=True, correction=0).clamp_min(1e-30)
        scores[:, y == label] = (same - same.mean(dim=1, keepdim=True)) / spread
    return scores


def trace_curve(scores: Tensor, members: Tensor) -> Membership:
    """Return how well scores [N] tell members, bool [N], from others."""
    from sklearn.metrics import auc, roc_curve  # takes seconds to import

    others = int((~members).sum())
    if others * FALSE_POSITIVES < _FEWEST:
        reason = f"{FALSE_POSITIVES:.0%} of {others} samples of others are fewer than {_FEWEST}"
        return Membership(reason=reason)
    wrong, right, _ = roc_curve(members.numpy(), scores.numpy(), drop_intermediate=False)
    shares = [share for share in CURVE if share * others >= _FEWEST]
    return Membership(
        members=int(members.sum()),
        others=others,
        auc=float(auc(wrong, right)),
        curve=tuple((share, float(right[wrong <= share].max())) for share in shares),
    )
