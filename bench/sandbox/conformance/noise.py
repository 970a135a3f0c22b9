"""Whether the noise that a defense draws is the noise that `mechanisms` declares.

Residuals of real uploads (what left the hook less what entered it, clipped as declared) are held
against the declared law. A level counts as wrong if it is off by more than TOLERANCE beyond what
chance allows at FALSE_ALARM; every test of a check shares that bound. That noise and flipped signs
are independent is tested as far as correlation shows it, between draws at any one distance, which
takes in uploads of one length after another; not seen are draws that depend on each other without
being correlated, and those whose distance changes; of sampled bits the means alone are tested. A
level that float32 rounds away is skipped, never passed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from scipy import stats
from torch import Tensor

from bench.contract.mechanisms import (
    BernoulliMask,
    Clip,
    GaussianNoise,
    LabelNoise,
    LaplaceNoise,
    Mechanism,
    SignPerturbation,
    SmashedNoise,
)
from bench.contract.messages import UPLOAD_KINDS, Message, Part, State, as_kind
from bench.sandbox.conformance.findings import Finding, failed, passed, skipped
from bench.sandbox.conformance.spying import flat
from bench.toolkit.vectors import clip

FALSE_ALARM = 1e-6
"""Chance that an honest plugin fails any test of this file."""
TOLERANCE = 0.02
"""Relative error of a noise level that is let pass."""
_TESTS = 20
_Z = float(stats.norm.isf(FALSE_ALARM / _TESTS / 2))
_ROUNDING = 1e-4
_SEEN_FROM = 50
"""Times the rounding, the std that a test can see."""
_RARE = 1000
"""Fewer kept or flipped signs coincide at some distance by chance."""
_SHAPE_SAMPLES = 20_000
"""Of a shape's test: more would find what float32 rounds off."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What entered a hook and what left it. broadcast: variables that the upload is relative to;
    lr: learning rate; end: where training ended."""

    given: Mapping[str, Part]
    sent: Mapping[str, Part]
    end: State | None = None


def upload_pair(message: Message, out: Message, *, base: State, lr: float, kind: str,
                end: State) -> Pair:  # fmt: skip
    """An upload before and after the defense, both expressed as the mechanism's kind."""
    return Pair(
        given=as_kind(message, kind, base=base, lr=lr).parts,  # type: ignore[arg-type]
        sent=as_kind(out, kind, base=base, lr=lr).parts,  # type: ignore[arg-type]
        end=end,
    )


def check_mechanisms(
    mechanisms: Sequence[Mechanism],
    pairs_of: Callable[[str], Sequence[Pair]],
    *,
    proof_is_gaussian: bool,
) -> list[Finding]:
    """One finding per declared mechanism. pairs_of: many uploads, smashed data or labels by what
    a mechanism acts on. proof_is_gaussian: whether the ledger's proof rests on Gaussian events,
    so that another law than the declared one is a failure and not a remark."""
    found = []
    layers = Counter(_channel(m) for m in mechanisms if not isinstance(m, Clip))
    for mechanism in mechanisms:
        name = f"declared {type(mechanism).__name__} of {mechanism.of}"
        if layers[_channel(mechanism)] > 1:
            why = "several mechanisms act on it one after another; check each defense alone"
            found.append(skipped(name, why))
            continue
        test = _TESTS_OF.get(type(mechanism))
        pairs = pairs_of(mechanism.of)
        if test is None:
            found.append(skipped(name, "no test for this kind of mechanism"))
        elif not pairs:
            found.append(skipped(name, f"no {mechanism.of} left a client in the checked rounds"))
        else:
            clips = [m for m in mechanisms if isinstance(m, Clip) and m.of == mechanism.of]
            found.append(test(name, mechanism, clips, pairs, proof_is_gaussian))
    return found


def _channel(mechanism: Mechanism) -> str:
    return "upload" if mechanism.of in UPLOAD_KINDS else mechanism.of


# --- residuals --------------------------------------------------------------------------------


def _visible(pair: Pair) -> tuple[Tensor, Tensor]:
    """What entered and what left, where it was sent."""
    names = [n for n in pair.sent if n in pair.given]
    there = {n: pair.sent[n].presence() & pair.given[n].presence() for n in names}
    given = flat([pair.given[n].values[there[n]] for n in names])
    return given, flat([pair.sent[n].values[there[n]] for n in names])


def _clipped(pair: Pair, clips: Sequence[Clip]) -> Pair:
    """What entered as the declared clips leave it: the coordinates that were sent, together."""
    given = {
        n: Part(values=p.values.detach().double(), present=pair.sent[n].presence() & p.presence())
        for n, p in pair.given.items()
        if n in pair.sent
    }
    for mechanism in clips:
        if mechanism.of == "smashed":  # sample by sample
            given = {n: replace(p, values=_rows(p.values, mechanism)) for n, p in given.items()}
        elif any(bool(p.presence().any()) for p in given.values()):
            given = clip(given, norm=mechanism.norm, order=mechanism.order)
    return Pair(given=given, sent=pair.sent, end=pair.end)


def _rows(values: Tensor, m: Clip) -> Tensor:
    lengths = torch.linalg.vector_norm(values.flatten(1), ord=m.order, dim=1).clamp_min(1e-30)
    return values * (m.norm / lengths).clamp_max(1.0).view(-1, *[1] * (values.dim() - 1))


def _residuals(pairs: Sequence[Pair], clips: Sequence[Clip]) -> tuple[Tensor, float]:
    """Residuals of all pairs, and the largest size of what entered."""
    rests, size = [], 0.0
    for pair in pairs:
        given, sent = _visible(_clipped(pair, clips))
        rests.append(sent - given)
        size = max(size, float(given.abs().max()) if len(given) else 0.0)
    return torch.cat(rests), size


# --- tests ------------------------------------------------------------------------------------


def _level(
    name: str, rest: Tensor, *, std: float, size: float, what: str
) -> Finding | None:  # fmt: skip
    """A failure if the residuals' mean is not 0, their std not the declared one, or they hang
    together."""
    n = len(rest)
    drawn = float(rest.std()) if n > 1 else 0.0
    slack = _rounding(size)
    change = "Declare what is drawn, or draw what is declared: mechanisms() is what attackers know."
    if std == 0.0:
        if float(rest.abs().max()) > slack:
            return failed(
                name, f"{what} is declared without noise, but values moved by up to "
                f"{float(rest.abs().max()):.4g}.", change, "mechanisms",
            )  # fmt: skip
        return None
    fourth = float((rest - rest.mean()).pow(4).mean())
    chance = _Z * math.sqrt(max(fourth - drawn**4, 0.0) / n) / (2 * max(drawn, 1e-30))
    if abs(drawn - std) > TOLERANCE * std + chance + slack:
        return failed(
            name, f"{what} is declared with a std of {std:.4g}, but {n} draws have "
            f"{drawn:.4g}.", change, "mechanisms",
        )  # fmt: skip
    bias = abs(float(rest.mean()))
    if bias > _Z * drawn / math.sqrt(n) + TOLERANCE * std + slack:
        return failed(
            name, f"{what} has a mean of {bias:.4g}, where 0 is declared.",
            "Clip as declared and add noise of mean 0.", "mechanisms",
        )  # fmt: skip
    return _together(name, rest, what) if std > _SEEN_FROM * slack else None


def _rounding(size: float) -> float:
    """What float32 and a change of the upload's kind may do to values of that size."""
    return _ROUNDING * size + 1e-12


def _together(name: str, rest: Tensor, what: str) -> Finding | None:
    """A failure if draws at some distance, in the order in which they were sent, correlate."""
    n = len(rest)
    centred = rest.double() - rest.double().mean()
    power = float(centred.square().sum())
    if n < 3 or power == 0:
        return None
    # Padded to twice the length, so that the end is not held against the beginning.
    spectrum = torch.fft.rfft(centred, n=2 * n).abs().square()
    correlation = torch.fft.irfft(spectrum, n=2 * n)[1:n] / power
    worst = int(correlation.abs().argmax())
    found = float(correlation[worst])
    chance = float(stats.norm.isf(FALSE_ALARM / _TESTS / 2 / n)) / math.sqrt(n)
    if abs(found) <= TOLERANCE + chance:
        return None
    which = "neighbouring draws" if worst == 0 else f"draws {worst + 1} values apart"
    return failed(
        name, f"{what} is declared independent, but {which} have a correlation of {found:.2g}.",
        "Draw every value of every upload anew.", "mechanisms",
    )  # fmt: skip


def _shape(rest: Tensor, law: str, scale: float) -> bool:
    """Whether the residuals follow the law."""
    sample = rest[torch.linspace(0, len(rest) - 1, min(len(rest), _SHAPE_SAMPLES)).long()]
    cdf = (stats.norm if law == "Gaussian" else stats.laplace)(scale=scale).cdf
    found = stats.kstest(sample.numpy(), cdf)
    # A level within the tolerance moves the cdf by less than a quarter of it.
    chance = math.sqrt(math.log(2 * _TESTS / FALSE_ALARM) / (2 * len(sample)))
    return bool(found.statistic <= TOLERANCE / 4 + chance)


def _additive(
    name: str, law: str, scale: float, rest: Tensor, size: float, proof_is_gaussian: bool
) -> Finding:
    std = scale if law == "Gaussian" else scale * 2**0.5
    wrong = _level(name, rest, std=std, size=size, what=f"{law} noise")
    if wrong is not None:
        return wrong
    if 0 < std <= _SEEN_FROM * _rounding(size):
        return skipped(
            name, f"a std of {std:.4g} cannot be told from rounding beside values of {size:.4g}"
        )  # fmt: skip
    if std > 0 and not _shape(rest, law, scale):
        reason = f"the std is as declared, but the law is not {law}"
        if proof_is_gaussian:
            return failed(
                name, f"{reason}, on which the proof of guarantee() rests.",
                "Declare the law that is drawn, in mechanisms() and guarantee().", "mechanisms",
            )  # fmt: skip
        return skipped(name, f"{reason}; attackers model it so, and no proof rests on it")
    return passed(name, f"std {float(rest.std()):.4g} of {len(rest)} draws, declared {std:.4g}")


def _gaussian(name: str, m: Mechanism, clips: Sequence[Clip], pairs: Sequence[Pair],
              proof: bool) -> Finding:  # fmt: skip
    assert isinstance(m, (GaussianNoise, LabelNoise))
    rest, size = _residuals(pairs, clips)
    return _additive(name, "Gaussian", m.std, rest, size, proof)


def _laplace(name: str, m: Mechanism, clips: Sequence[Clip], pairs: Sequence[Pair],
             proof: bool) -> Finding:  # fmt: skip
    assert isinstance(m, LaplaceNoise)
    rest, size = _residuals(pairs, clips)
    return _additive(name, "Laplace", m.scale, rest, size, True)


def _smashed(name: str, m: Mechanism, clips: Sequence[Clip], pairs: Sequence[Pair],
             proof: bool) -> Finding:  # fmt: skip
    assert isinstance(m, SmashedNoise)
    rests, size = [], 0.0
    for pair in pairs:
        given, sent = _visible(pair)
        if m.low is not None or m.high is not None:
            given = given.clamp(m.low, m.high)
        rests.append(sent - given)
        size = max(size, float(given.abs().max()) if len(given) else 0.0)
    return _additive(name, "Gaussian", m.std, torch.cat(rests), size, proof)


def _clip(name: str, m: Mechanism, clips: Sequence[Clip], pairs: Sequence[Pair],
          proof: bool) -> Finding:  # fmt: skip
    """Along the input the upload has the input's length, or the clip where that is longer: what
    is added to it has mean 0."""
    assert isinstance(m, Clip)
    if m.of == "smashed":
        return skipped(name, "it is part of the noise's test")
    shown, expected, spread = [], [], []
    for pair in pairs:
        given, sent = _visible(pair)
        length = float(torch.linalg.vector_norm(given, ord=m.order)) if len(given) else 0.0
        if length <= m.norm:
            continue
        square = float(given.square().sum())
        shown.append(float(given @ sent) / square * length)
        expected.append(m.norm)
        rest = sent - given * (m.norm / length)
        spread.append(float(rest.std()) / math.sqrt(square) * length if len(rest) > 1 else 0.0)
    if not shown:
        return skipped(name, "no checked upload was longer than the clip")
    mean, chance = sum(shown) / len(shown), _Z * math.hypot(*spread) / len(shown)
    if abs(mean - m.norm) > TOLERANCE * m.norm + chance:
        return failed(
            name, f"uploads longer than the declared clip of {m.norm:.4g} (L{m.order}) come out "
            f"with a length of {mean:.4g} along what was given.",
            "Clip all sent coordinates together to the declared norm, before the noise.", "upload",
        )  # fmt: skip
    return passed(name, f"length {mean:.4g} of {len(shown)} long uploads")


def _signs(name: str, m: Mechanism, clips: Sequence[Clip], pairs: Sequence[Pair],
           proof: bool) -> Finding:  # fmt: skip
    assert isinstance(m, SignPerturbation)
    factors = []
    for pair in pairs:
        given, sent = _visible(pair)
        factors.append((sent / given)[given != 0])
    factor = torch.cat(factors)
    n, kept = len(factor), int((factor > 0).sum())
    share, sizes = kept / n, factor.abs()
    chance = _Z * math.sqrt(max(m.keep * (1 - m.keep), 1.0 / n) / n)
    change = "Declare the keep probability and range that are drawn."
    if abs(share - m.keep) > chance + 1e-9:
        return failed(
            name, f"signs are declared to be kept with probability {m.keep:.4g}, but {share:.4g} "
            f"of {n} were.", change, "mechanisms",
        )  # fmt: skip
    low, high = float(sizes.min()), float(sizes.max())
    if low < m.low * (1 - 1e-3) or high > m.high * (1 + 1e-3):
        return failed(
            name, f"magnitudes are declared to grow by [{m.low:.4g}, {m.high:.4g}], but "
            f"[{low:.4g}, {high:.4g}] was drawn.", change, "mechanisms",
        )  # fmt: skip
    if m.high > m.low:
        off = abs(float(sizes.mean()) - m.mean_scale)
        if off > _Z * (m.high - m.low) / math.sqrt(12 * n) + 1e-3 * m.high:
            return failed(
                name, f"magnitudes are declared uniform on [{m.low:.4g}, {m.high:.4g}], but their "
                f"mean is {float(sizes.mean()):.4g}.", change, "mechanisms",
            )  # fmt: skip
    if min(kept, n - kept) >= _RARE:
        wrong = _together(name, (factor > 0).double(), "which signs are kept")
        if wrong is not None:
            return wrong
    return passed(name, f"{share:.4g} of {n} signs kept, declared {m.keep:.4g}")


def _bits(name: str, m: Mechanism, clips: Sequence[Clip], pairs: Sequence[Pair],
          proof: bool) -> Finding:  # fmt: skip
    assert isinstance(m, BernoulliMask)
    sent, chances = [], []
    for pair in pairs:
        assert pair.end is not None
        for key, part in pair.sent.items():
            there = part.presence()
            sent.append(part.values[there])
            chances.append(torch.sigmoid(pair.end[key].double())[there])
    bits, p = flat(sent), flat(chances)
    if not m.sampled:
        if float((bits - p).abs().max()) > 1e-5:
            return failed(
                name, "what is sent is not the declared probability sigmoid(score).",
                "Send the probabilities, or declare sampled = True.", "mechanisms",
            )  # fmt: skip
        return passed(name, f"{len(bits)} probabilities")
    if not bool(((bits == 0) | (bits == 1)).all()):
        return failed(
            name, "values other than the declared bits 0 and 1 are sent.",
            "Send Bernoulli(sigmoid(score)) bits, or declare sampled = False.", "mechanisms",
        )  # fmt: skip
    # Two directions: all bits together, and towards the likelier value.
    for weight in (torch.ones_like(p), p - 0.5):
        off = float((weight * (bits - p)).sum())
        chance = _Z * math.sqrt(float((weight.square() * p * (1 - p)).sum()))
        if abs(off) > chance + TOLERANCE * float((weight.abs() * p).sum()):
            return failed(
                name, f"the bits' mean is {float(bits.mean()):.4g}, but their declared "
                f"probabilities have {float(p.mean()):.4g}.",
                "Draw every bit with probability sigmoid(score).", "mechanisms",
            )  # fmt: skip
    return passed(name, f"{len(bits)} bits")


_Test = Callable[[str, Mechanism, Sequence[Clip], Sequence[Pair], bool], Finding]
_TESTS_OF: Mapping[type[Mechanism], _Test] = {
    Clip: _clip,
    GaussianNoise: _gaussian,
    LabelNoise: _gaussian,
    LaplaceNoise: _laplace,
    SmashedNoise: _smashed,
    SignPerturbation: _signs,
    BernoulliMask: _bits,
}
