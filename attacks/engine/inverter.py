"""Inversion by ridge regressions on pairs played through the defense: of `ridge`, and the base
of `decoder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.engine.channel import FEATURES, Blocks, Channel, ShadowPairs, by_state, distance
from attacks.engine.observation import SMASHED, parse_view
from attacks.engine.orders import line_up, unite
from attacks.engine.regression import FOLDS, Features, Fit, fit, fit_local
from bench.api import Context, Reconstruction, Seen

NARROW = 2048
"""Width up to which smashed data gets four times the pairs: a regression costs little then."""
DRAWS = 16
"""Most plays of a public image, where each draws other noise on its smashed data."""
SOLVED = 1e-3
"""Loss below which no other regression is tried."""
SHADOWED = 300_000_000
"""Uploaded coordinates (plays * upload size) that shadow rounds may take, beyond one play of
each public image."""


# --- features ---------------------------------------------------------------------------------


def scales(blocks: Blocks) -> dict[str, float]:
    """Root of each block's total variance over the pairs; 1 where nothing varies."""
    powers = {n: float(b.double().var(dim=0).sum().sqrt()) for n, b in blocks.items()}
    return {n: p if p > 1e-12 else 1.0 for n, p in powers.items()}


def feature_sets(blocks: Blocks) -> dict[str, tuple[str, ...]]:
    """Names of blocks that a regression may use together.

    inputs: what linear layers were given, which no label disturbs. raw: the message itself in
    one common scale, best under noise of equal size everywhere. all: every block at unit power.
    """
    inputs = tuple(n for n in blocks if n.startswith("input "))
    raw = tuple(n for n in blocks if not n.startswith("input "))
    if not inputs:
        return {"raw": raw}
    return {"inputs": inputs, "raw": raw, "all": tuple(blocks)}


def join_blocks(blocks: Blocks, choice: str, scale: dict[str, float]) -> Tensor:
    """The chosen set as one float64 matrix [M, F]."""
    names = feature_sets(blocks)[choice]
    common = max((scale[n] for n in names if not n.startswith("presence ")), default=1.0)
    factors = [
        common if choice == "raw" and not n.startswith("presence ") else scale[n] for n in names
    ]
    return torch.cat([blocks[n].double() / f for n, f in zip(names, factors, strict=True)], dim=1)


# --- the inverter -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some of the victims' samples with the answer of the regression that serves them.

    Attributes:
        rows: Which samples, int64 [M'].
        predicted: Their images, [M', P].
        pairs: What the fit was trained on.
        left_out: Each pair's image by a fit without it, [R, P].
        judged: Pairs like the samples, bool [R].
        loss: Of their left-out images.
    """

    rows: Tensor
    predicted: Tensor
    pairs: ShadowPairs
    left_out: Tensor
    judged: Tensor
    loss: float


class Inverter:
    """Ridge regressions from a channel to images, on pairs played through the defense.

    How a network turns an image into a gradient depends on the label. So the victims' labels are
    read first (by a ridge classifier, unless granted), and for each of them all public images
    are played under that label. Every class of images has its own intercept in that regression:
    the less the message says, the closer the answer is to the label's class mean. Where labels
    cannot be read well enough, or that would cost too many plays, one regression serves all.

    Smashed data that lies on a grid over the image, such as tokens, is also inverted place by
    place (`fit_local`), and by a regression from those answers to the whole image: the one of
    least left-out loss is the answer.

    Args:
        channel: What is inverted.
        ctx: The attack's.
        rows: Pairs per regression.
        others: Of releases that began from other states, whose labels and answers are united with
            this one's (see `unite`).
    """

    def __init__(
        self, channel: Channel, ctx: Context, *, rows: int, others: Sequence[Inverter] = ()
    ) -> None:
        self.channel, self.ctx, self.rows = channel, ctx, rows
        self.shape = tuple(ctx.network.shape)
        self.variance = float(ctx.aux_x.double().var(dim=0).mean())
        # Smashed data is cheap to play and mostly narrow; a large network's uploads are neither.
        width = sum(b.shape[1] for b in channel.blocks.values())
        narrow = channel.per_sample and width <= NARROW
        limit = rows if channel.per_sample else min(rows, SHADOWED // channel.sent)
        limit *= 4 if narrow else 1
        most = DRAWS if channel.per_sample and channel.random else 4
        self.group = min(most, max(1, limit // len(ctx.aux_x)))
        self.pooled = channel.pairs(group=self.group)
        self.scale = scales(self.pooled.blocks)
        self.samples = len(next(iter(channel.blocks.values())))
        pooled = self._decompose(self.pooled, self.pooled.turn)
        self.reading = self._read(pooled) if channel.labels is None else None
        self.labels, self.accuracy = self._read_labels([*others, self])
        self.pieces = self._pieces(pooled)
        if others:
            self.pieces = [self._unite(piece, others) for piece in self.pieces]

    def predict(self) -> tuple[Tensor, Tensor]:
        """Images [M, *shape] and expected loss [M] of the victims' samples."""
        images = torch.empty(self.samples, *self.shape, dtype=torch.float64, device=self.ctx.device)
        loss = torch.empty(self.samples, device=self.ctx.device)
        for piece in self.pieces:
            images[piece.rows] = piece.predicted.double().view(-1, *self.shape)
            loss[piece.rows] = piece.loss
        return images.float(), loss

    def standard(self, blocks: Blocks) -> Blocks:
        """The blocks centred on the public pairs, each block's features at unit mean square."""
        out = {}
        for name, value in blocks.items():
            reference = self.pooled.blocks[name]
            unit = self.scale[name] / reference.shape[1] ** 0.5
            out[name] = (value - reference.mean(dim=0)) / unit
        return out

    # --- labels --------------------------------------------------------------------------------
    def _read(self, decomposed: Mapping[str, Features]) -> tuple[Tensor, Tensor]:
        """Scores of classes by the feature set that errs least on left-out images: of the victims'
        samples [M, C], and of the public images as they are, each by a regression without it."""
        pairs = self.pooled
        target = torch.nn.functional.one_hot(pairs.y, self.ctx.network.classes).double()

        def wrong(left_out: Tensor) -> Tensor:
            return (left_out.argmax(dim=1) != pairs.y[pairs.real]).double().mean()

        fits = {
            choice: fit(features, target, judged=pairs.real, judge=wrong)
            for choice, features in decomposed.items()
        }
        choice = min(fits, key=lambda c: fits[c].loss)
        victims = join_blocks(self.channel.blocks, choice, self.scale)
        return fits[choice](victims, 0), fits[choice].left_out[pairs.real]

    def _read_labels(self, all_: Sequence[Inverter]) -> tuple[Tensor, float]:
        """Labels int64 [M] by the scores of all inverters together, and the share that is right
        on public images left out."""
        if self.reading is None:
            assert self.channel.labels is not None
            return self.channel.labels, 1.0
        shape = self.reading[1].shape
        alike = [r for i in all_ if (r := i.reading) is not None and r[1].shape == shape]
        victims, public = (torch.stack(t).sum(dim=0) for t in zip(*alike, strict=True))
        right = public.argmax(dim=1) == self.pooled.y[self.pooled.real]
        return victims.argmax(dim=1), float(right.double().mean())

    # --- several states ------------------------------------------------------------------------
    def _unite(self, piece: Piece, others: Sequence[Inverter]) -> Piece:
        """The piece with the answers that other states give to the same samples.

        What is left out of one regression is left out of all, and so their errors can be compared:
        answers are averaged, each pixel by the inverse of its mean squared error on public images,
        where its own place was sent and where it was not; then a line brings the average, which is
        as pale as each, to the truth.
        """
        truth = piece.pairs.x.flatten(1).double()
        public, victims = [], []  # weights, and what they weigh
        for inverter in (self, *others):
            for one in (piece,) if inverter is self else inverter.pieces:
                # Learnt from the same images in the same order?
                both = [(vars(one.pairs)[n], vars(piece.pairs)[n]) for n in ("y", "own", "turn")]
                same = all(a.shape == b.shape and bool((a == b).all()) for a, b in both)
                if same and bool(torch.isin(piece.rows, one.rows).all()):
                    of_pairs, of_victims = inverter._precision(one)
                    mine = (one.rows[:, None] == piece.rows).long().argmax(dim=0)
                    public.append((of_pairs, one.left_out))
                    victims.append((of_victims[mine], one.predicted.double()[mine]))
        left_out, predicted = _weigh_mean(public), _weigh_mean(victims)
        mean = truth[piece.judged].mean(dim=0)
        told, known = (t[piece.judged] - mean for t in (left_out, truth))
        slope = (told * known).sum() / told.square().sum().clamp_min(1e-30)
        left_out, predicted = (mean + slope * (t - mean) for t in (left_out, predicted))
        loss = float(self._judge(piece.pairs, piece.judged)(left_out[piece.judged]))
        if loss >= piece.loss:
            return piece
        return replace(piece, left_out=left_out, predicted=predicted, loss=loss)

    def _precision(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """One over the mean squared error of left-out images, for every pixel of the pairs [R, P]
        and of the victims' samples [M', P]; where places of smashed data are sent or not, a pixel
        has one for each case."""
        truth = piece.pairs.x.flatten(1).double()
        square = (piece.left_out - truth).square()[piece.judged]
        usual = square.mean(dim=0)
        sent = self._share_sent(piece.pairs.blocks)
        if sent is None:
            precise = 1 / usual.clamp_min(1e-12)
            return precise.expand_as(truth), precise.expand(len(piece.rows), -1)
        cases = []
        for case in (sent[piece.judged], 1 - sent[piece.judged]):
            count = case.sum(dim=0)
            error = (square * case).sum(dim=0) / count.clamp_min(1e-9)
            cases.append(1 / torch.where(count >= 1, error, usual).clamp_min(1e-12))
        theirs = self._share_sent(self.channel.blocks)
        assert theirs is not None
        there, absent = cases
        of_pairs, of_victims = (t * there + (1 - t) * absent for t in (sent, theirs[piece.rows]))
        return of_pairs, of_victims

    def _share_sent(self, blocks: Blocks) -> Tensor | None:
        """The share of each pixel's place in smashed data that was sent [M, P], or None where all
        was, or where it has no places that cut the image into blocks."""
        grid = self.channel.grid(blocks)
        if grid is None or grid.present is None or not grid.tiles(self.shape):
            return None
        high, wide = (n // cells for n, cells in zip(self.shape[1:], grid.size, strict=True))
        pixels = grid.present.repeat_interleave(high, dim=2).repeat_interleave(wide, dim=3)
        return pixels.expand(-1, self.shape[0], -1, -1).flatten(1).double()

    # --- regressions ---------------------------------------------------------------------------
    def _pieces(self, decomposed: Mapping[str, Features]) -> list[Piece]:
        everything = torch.arange(self.samples, device=self.ctx.device)
        pooled, _ = self._best(self.pooled, everything, decomposed, 0)
        sets = tuple(decomposed)
        if self.channel.per_sample:
            return [self._by_place(pooled)]
        labels = self.labels.unique()
        if len(labels) * len(self.ctx.aux_x) * self.channel.sent > SHADOWED:
            return [pooled]
        pieces: list[Piece] = []
        for label in labels.tolist():
            rows = everything[self.labels == label]
            # Mirrored images add little to a regression of its own; draws of noise do.
            group = self.group if self.channel.random else 1
            pairs = self.channel.pairs(group=group, label=label)
            strata = pairs.own * 4 + pairs.turn
            piece, choice = self._best(pairs, rows, self._decompose(pairs, strata, sets), 4 * label)
            sets = (choice,)  # one label settles the set for all: trying costs a fit each
            if not self._promise(piece, pooled, label):
                piece = replace(pooled, rows=rows, predicted=pooled.predicted[rows])
            pieces.append(piece)
        return pieces

    def _by_place(self, flat: Piece) -> Piece:
        """`flat`, the regression that all places share, or a flat one on top of this one's
        left-out answers: whichever loses least."""
        pairs, shown = flat.pairs, f"presence {SMASHED}"
        if flat.loss < SOLVED or len(pairs.x) < 2 * FOLDS * pairs.group:
            return flat
        seen = self.channel.grid(pairs.blocks)
        victims = self.channel.grid(self.channel.blocks)
        if seen is None or victims is None or not seen.tiles(self.shape):
            return flat
        left_out, predicted, loss = fit_local(
            seen,
            pairs.x,
            victims,
            group=pairs.group,
            turn=pairs.turn,
            judged=flat.judged,
            judge=self._judge(pairs, flat.judged),
        )
        local = replace(
            flat, predicted=predicted.flatten(1), left_out=left_out.flatten(1), loss=loss
        )
        if local.loss < SOLVED:
            return local
        features, targets = {"local": local.left_out}, {"local": local.predicted}
        if shown in pairs.blocks:
            features[shown], targets[shown] = pairs.blocks[shown], self.channel.blocks[shown]
        scale = scales(features)
        joined = join_blocks(features, "raw", scale)
        decomposed = Features(joined, group=pairs.group, strata=pairs.turn)
        stacked = self._fit(decomposed, pairs, flat.judged)
        above = replace(
            flat,
            predicted=stacked(join_blocks(targets, "raw", scale), 0),
            left_out=stacked.left_out,
            loss=stacked.loss,
        )
        return min((flat, local, above), key=lambda piece: piece.loss)

    def _judge(self, pairs: ShadowPairs, judged: Tensor) -> Callable[[Tensor], Tensor]:
        truth = pairs.x[judged]

        def judge(left_out: Tensor) -> Tensor:
            guess = left_out.float().view_as(truth)
            return distance(guess, truth, variance=self.variance).mean()

        return judge

    def _fit(self, features: Features, pairs: ShadowPairs, judged: Tensor) -> Fit:
        """The regression of the pairs' images on their features."""
        return fit(features, pairs.x.flatten(1), judged=judged, judge=self._judge(pairs, judged))

    def _decompose(
        self, pairs: ShadowPairs, strata: Tensor, sets: Sequence[str] = ()
    ) -> dict[str, Features]:
        """The pairs' features by feature set, of all unless `sets` are given."""
        blocks, group = pairs.blocks, pairs.group
        return {
            n: Features(join_blocks(blocks, n, self.scale), group=group, strata=strata)
            for n in sets or feature_sets(blocks)
        }

    def _best(
        self, pairs: ShadowPairs, rows: Tensor, decomposed: Mapping[str, Features], stratum: int
    ) -> tuple[Piece, str]:
        judged = pairs.real if bool(pairs.real.any()) else torch.ones_like(pairs.real)
        pieces = {}
        for choice, features in decomposed.items():
            fitted = self._fit(features, pairs, judged)
            victims = join_blocks(self.channel.blocks, choice, self.scale)[rows]
            pieces[choice] = Piece(
                rows=rows,
                predicted=fitted(victims, stratum),
                pairs=pairs,
                left_out=fitted.left_out,
                judged=judged,
                loss=fitted.loss,
            )
        choice = min(pieces, key=lambda c: pieces[c].loss)
        return pieces[choice], choice

    def _promise(self, piece: Piece, pooled: Piece, label: int) -> bool:
        """Whether the label's own regression promises no more loss than the shared one.

        A label read wrongly is charged with the class's mean image on images of other classes.
        """
        own = (pooled.pairs.y == label) & pooled.judged
        others = pooled.pairs.x[(pooled.pairs.y != label) & pooled.judged]
        if not bool(own.any()) or len(others) == 0:
            return True
        guess = pooled.left_out[own].float().view(-1, *self.shape)
        shared = float(distance(guess, pooled.pairs.x[own], variance=self.variance).mean())
        mean = pooled.pairs.x[own].mean(dim=0).expand_as(others)
        wrong = float(distance(mean, others, variance=self.variance).mean())
        return self.accuracy * piece.loss + (1 - self.accuracy) * wrong <= shared


def _weigh_mean(answers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Of (weights, values), number by number."""
    weight = torch.stack([w for w, _ in answers]).sum(dim=0)
    return torch.stack([w * v for w, v in answers]).sum(dim=0) / weight


def inverter_of(seen: Seen, ctx: Context, *, rows: int) -> Inverter:
    """Regressions on all releases, those from other states united with the last state's; the same
    for every attack on what was seen."""

    def make(ctx: Context) -> Inverter:
        releases = [unite(one, ctx) for one in parse_view(seen)]
        *before, last = by_state(line_up(releases, ctx))
        others = [Inverter(Channel(some, ctx), ctx, rows=rows) for some in before]
        return Inverter(Channel(last, ctx), ctx, rows=rows, others=others)

    return ctx.once(("inverter", rows, FEATURES), make)


def reconstruction(
    images: Tensor,
    loss: Tensor,
    inverter: Inverter,
    *,
    evaluations: int = 0,
    notes: tuple[str, ...] = (),
) -> Reconstruction:
    """Samples in rows -> one answer per victim."""
    victims = len(inverter.channel.releases[-1].clients)
    if images.ndim == 4:
        images = images.clamp(0, 1)
    return Reconstruction(
        images=images.view(victims, -1, *inverter.shape).cpu(),
        labels=inverter.labels.view(victims, -1).cpu(),
        loss=loss.view(victims, -1).mean(dim=1).cpu(),
        evaluations=evaluations,
        notes=notes,
    )
