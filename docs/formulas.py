"""The formulas that papers print, beside what holds of them: `python docs/formulas.py DEFENSE`.

    python docs/formulas.py DEFENSE [--set k=v] [--facts k=v,...] [--over KEY=a,b,c] [--json]

takes what `leakbench ledger` takes. Docs and tests use the same functions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import singledispatch
from typing import Any

from pandas import DataFrame, isna

from bench import suite
from bench.contract.compose import Composed
from bench.contract.defense import Defense
from bench.contract.events import Facts
from bench.errors import UserError
from bench.privacy.gaussian import best_renyi_epsilon, exact_gaussian_epsilon
from bench.privacy.ledger import computable
from bench.registry import discover
from bench.report.accounts import (
    Account,
    account_of,
    accounts_over,
    check_facts,
    epsilons,
)
from defenses import ms_pafl_theorems as theorems
from defenses.cutmix import DPSL, DPMixSL
from defenses.dp_cutmix import DPCutMix
from defenses.ms_pafl import MSPAFL
from defenses.noised_smashed import PAPER_SMASHED_SIZE, NoisedSmashed, record_uploads
from defenses.pm_sfl import PMSFL
from defenses.pm_sfl_noised import NoisedPMSFL, amplification_gain
from defenses.selective_shield import SelectiveShield
from defenses.splitfed import SplitFedPM
from defenses.spm import SPM, moments, scale_range
from defenses.sun_adaptive import SunAdaptive


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A formula that a paper prints, at a defense's settings and a run's facts.

    Attributes:
        name: What it gives, a noun phrase.
        equation: Where the paper has it, e.g. "Eq. 22".
        value: What it says.
        holds: Sentences on what of it holds for the mechanism, against the server.
        really: What is so in its place, where that is a number.
        delta: At which an epsilon is told.
    """

    name: str
    equation: str
    value: float
    holds: str
    really: float | None = None
    delta: float | None = None


_MIXED = {
    DPCutMix: (
        "Eq. 6",
        "The smashed part holds with lambda = the largest share of patches sent. The label part "
        "does not: a client uploads its label unscaled, and what the server does later amplifies "
        "nothing.",
    ),
    DPSL: (
        "Eq. 4",
        "It holds, loosely: two one-hot labels differ by 2 in squared L2 norm, not by D_y.",
    ),
    DPMixSL: (
        "Eq. 5",
        "It does not hold: the server sees every upload before it is mixed, and the mixture's "
        "noise is scaled with its signal. Nor does Theorem 1's order, Mix below CutMix.",
    ),
}
"""Where the paper bounds the Renyi divergence, and what holds of it."""


@singledispatch
def formulas(d: Defense, facts: Facts) -> tuple[Formula, ...]:
    """The formulas of a defense's paper; none of a defense without a paper."""
    return ()


@formulas.register
def _(d: Composed, facts: Facts) -> tuple[Formula, ...]:
    return tuple(
        Formula(**{**asdict(formula), "name": f"{name}: {formula.name}"})
        for name, member in d.members.items()
        for formula in formulas(member, facts)
    )


@formulas.register
def _(d: SPM, facts: Facts) -> tuple[Formula, ...]:
    """Variances and errors are of a weight of magnitude 1."""
    e = d.epsilon
    mean, variance = moments(e, d.variant)
    unbiased = d.variant != "printed"
    rivals = rival_variances(e, 1.0)
    signs = e * facts.parameters * facts.releases
    return (
        Formula(
            name="mass of t's density",
            equation="Eq. 4",
            value=1.0,
            really=1 + math.exp(-e),
            holds="It does not normalise. Algorithm 2's threshold E/(E+1) does.",
        ),
        Formula(
            name="mean of t",
            equation="Theorem 1",
            value=1.0,
            really=mean,
            holds=f"Zero bias {'holds for this variant.' if unbiased else _BIASED}",
        ),
        Formula(
            name="variance of an upload",
            equation="Eq. A17",
            value=printed_variance(e),
            really=variance,
            holds="It is the variance of no law: E[t] = 1 was taken under Eq. 4's mass.",
        ),
        *(
            Formula(
                name=f"variance of {name}, which SPM's is said to be below",
                equation="Lemma 1",
                value=rivals[key],
                holds=f"SPM's real variance is {'' if variance < rivals[key] else 'not '}below "
                f"it. {note}",
            )
            for key, name, note in (
                ("pm", "PM", "PM hides magnitudes too."),
                ("pnpm_quoted", "PNPM", "The unbiased variant's is equal to it."),
                ("laplace", "Laplace noise", "Laplace noise hides magnitudes too."),
            )
        ),
        Formula(
            name="epsilon of the uploaded parameters",
            equation="Theorem 2",
            value=e,
            really=signs,
            holds="It holds for one sign, given its magnitude. All signs of the run add up to "
            "the other number, and magnitudes have no DP at any.",
        ),
        Formula(
            name=f"error of the mean of {facts.sampled} uploads, with probability .95",
            equation="Theorem 3",
            value=theorem3_radius(e, uploads=facts.sampled, beta=0.05),
            holds="It holds for this variant up to the printed variance."
            if unbiased
            else f"It does not hold: the error tends to 1/(E+1) = {1 - mean:.6g}, not to 0.",
        ),
    )


@formulas.register
def _(d: SunAdaptive, facts: Facts) -> tuple[Formula, ...]:
    if not d.shuffled:
        return ()
    return (
        Formula(
            name="epsilon of an upload that is split and shuffled",
            equation="Abstract",
            value=d.epsilon,
            really=d.epsilon * facts.parameters * facts.releases,
            holds='That splitting and shuffling "bypasses the curse of dimensionality" does '
            "not follow: the server reads the counts of all coordinates, and one record moves "
            "all of them. It holds for one value; all values of the run add up to the other "
            "number, less what Theorem 3.1 of Feldman et al. saves with very many clients.",
        ),
    )


@formulas.register
def _(d: MSPAFL, facts: Facts) -> tuple[Formula, ...]:
    """Theorems 2 to 4 are held against the exact Gaussian of all uploads: nothing less is
    proven, since the server sees who uploads and the private half remembers records."""
    printed, exact = amplified(d.epsilon, q=d._rate(facts))
    one, one_delta = d._one_round(facts)
    total, total_delta = d._global_model(facts)
    mu = 2 * d.clip_norm / d.std
    run = exact_gaussian_epsilon(mu=mu * math.sqrt(facts.releases), delta=facts.delta)
    late = linear_from(one, delta_tilde=d.delta_tilde) if one > 0 else math.inf
    # For C = 1 as in the paper.
    given = {"epsilon": d.epsilon, "delta": d.delta, "clip_norm": 1.0}
    of_one_client = local_total(p=d._most(), q=d._rate(facts), rounds=facts.rounds, **given)
    return (
        Formula(
            name="std of the noise per public coordinate",
            equation="Eq. 6 (Lemma 1)",
            value=d._std("lemma1"),
            really=d._std("analytic"),
            holds="Proven for epsilon <= 1. It is not the smallest, which is the other number.",
        ),
        Formula(
            name="epsilon of an upload, amplified by its subsample",
            equation="Theorem 1",
            value=printed,
            really=exact,
            holds="It holds for one round without memory and epsilon <= 1. The private half "
            "remembers a record once sampled, so no later round is amplified.",
        ),
        Formula(
            name="probability that check-ins deviate (delta')",
            equation="Theorem 2",
            value=theorems.deviation_probability(beta=d.beta, clients=facts.clients),
            holds="From 1 on the theorem says nothing.",
        ),
        Formula(
            name="epsilon of one round's global model",
            equation="Eq. 20 (Corollary 1)",
            value=one,
            delta=one_delta,
            really=d.local_epsilon,
            holds="It does not hold for small p against the server, which sees who takes part.",
        ),
        Formula(
            name="epsilon of one client over the run",
            equation="Eq. 22 (Theorem 3)",
            value=of_one_client,
            delta=d.delta,
            really=run,
            holds="It does not hold; its constant c_0 by Eq. C.8 depends on the unit of the "
            "weights. Proven is the other number, without amplification, at delta "
            f"{facts.delta:g}.",
        ),
        Formula(
            name="epsilon of the global models of the run",
            equation="Eq. 23 (Theorem 4)",
            value=total,
            delta=total_delta,
            really=run,
            holds="As composition it is right and loose; with Corollary 1 it does not hold for "
            f"rare check-ins. It grows linearly from round {late:.3g} on. The other number is "
            f"at delta {facts.delta:g}.",
        ),
    )


@formulas.register
def _(d: PMSFL, facts: Facts) -> tuple[Formula, ...]:
    return (
        Formula(
            name="factor of the score gradient at theta = .5",
            equation="Eq. 4, 17",
            value=0.125,
            really=0.25,
            holds="Too small by the factor sigma(s): the straight-through derivative is "
            "sigma'(s). Every sign is right, the scale is not.",
        ),
        Formula(
            name="bound on the squared error of the mean mask",
            equation="Eq. 6",
            value=d.count_masked(facts) / (4 * facts.sampled),
            holds="It holds.",
        ),
    )


@formulas.register
def _(d: NoisedPMSFL, facts: Facts) -> tuple[Formula, ...]:
    closing = Formula(
        name="epsilon of the sampled bits alone",
        equation="Sec. 5, closing bound",
        value=d._closing_bound(facts),
        holds="It is the pure epsilon of a mask. As a Renyi divergence the bound is no "
        "(epsilon, delta) bound.",
    )
    rules: tuple[Formula, ...] = ()
    match d.noise:
        case "smashed":
            gain = amplification_gain(d.budget, c=d.clip, d=d.count_masked(facts))
            rules = (
                Formula(
                    name="epsilon of one sample's smashed data, amplified",
                    equation="Theorem 2",
                    value=d.budget - gain,
                    really=facts.releases * facts.local_steps * d.budget,
                    holds="It holds for one release, scalar outputs and L1 sensitivity. The "
                    f"amplification gains {gain:.3g}; all releases of the run add up to the "
                    "other number.",
                ),
            )
        case "local":
            rules = (
                Formula(
                    name="std of the noise on a mean score gradient",
                    equation="Eq. 63",
                    value=d._step_multiplier() * d.clip_norm / facts.batch,
                    holds="Appendix E.3 prints c^2 for Gamma^2.",
                ),
                Formula(
                    name="epsilon of a round",
                    equation="Theorem 3a",
                    value=d.budget,
                    really=d._step_epsilons()[1],
                    holds="It holds for adding or removing a record, not for replacing one, "
                    "and does not count rounds.",
                ),
                closing,
            )
        case "mask":
            rules = (
                Formula(
                    name="std of the noise on theta",
                    equation="Eq. 69",
                    value=d._mask_std(1),
                    really=d._mask_std(d.count_masked(facts)),
                    holds="Its sensitivity 1 - 2c is that of one coordinate; the other number "
                    "is the std in use.",
                ),
                Formula(
                    name="epsilon of an upload",
                    equation="Theorem 3b",
                    value=d.budget,
                    really=d._mask_epsilon(facts),
                    holds="As printed it holds at one parameter only, with the noise after "
                    "the clip. `corrected` makes both so.",
                ),
                closing,
            )
    return formulas.dispatch(PMSFL)(d, facts) + rules


@formulas.register
def _(d: SplitFedPM, facts: Facts) -> tuple[Formula, ...]:
    gradient, mean_of_bits = formulas.dispatch(PMSFL)(d, facts)
    return (gradient, mean_of_bits) if d.sends == "bits" else (gradient,)


@formulas.register
def _(d: SelectiveShield, facts: Facts) -> tuple[Formula, ...]:
    clients, sigma = facts.sampled, d.noise_multiplier
    if sigma == 0:
        return ()
    return (
        Formula(
            name=f"std of the noise per coordinate, |K| = {clients}",
            equation="Eq. 21",
            value=d._norm * sigma * math.sqrt(clients),
            really=d.std(clients, d._norm),
            holds="The other number is the std in use, by `noise_scale`.",
        ),
        Formula(
            name="std of the mean update's noise per coordinate",
            equation="Eq. 26",
            value=d._norm * sigma,
            really=d.std(clients, d._norm) / math.sqrt(clients),
            holds="With eta_g = 1, which is FedAvg; the paper says |K|.",
        ),
        Formula(
            name="Renyi divergence of order 2 of an upload",
            equation="Eq. 22",
            value=1 / sigma**2,
            really=upload_rdp(d, 2.0, clients=clients),
            holds="The other number is that of the noise in use when a record is replaced, "
            "which moves the values by 2C; with Eq. 21 as printed Eq. 22 holds from |K| = 4 "
            "on, otherwise it does not.",
        ),
        Formula(
            name=f"epsilon of {facts.releases} rounds",
            equation="Lemma 2, 3",
            value=d.claim(facts)[0],
            holds="The accounting holds for Eq. 22, and so for the noised values given the "
            "masks. The masks have no DP, and the encrypted zone's sum is published.",
        ),
    )


@formulas.register
def _(d: NoisedSmashed, facts: Facts) -> tuple[Formula, ...]:
    """The other numbers are the server's: one-hot labels, and the share of values sent."""
    if d.claim(facts) is None:
        return ()
    equation, holds = next(_MIXED[c] for c in type(d).__mro__ if c in _MIXED)
    rules = []
    for size in dict.fromkeys((PAPER_SMASHED_SIZE, d.smashed_size or PAPER_SMASHED_SIZE)):
        printed, server = d.slope_by_paper(size), d.server_slope(size, facts)
        of = f"of an upload, D_s = {size}"
        rules += [
            Formula(
                name=f"Renyi divergence of order 2 {of}",
                equation=equation,
                value=2 * printed,
                really=2 * server,
                holds=holds,
            ),
            Formula(
                name=f"epsilon at the best order {of}",
                equation=equation,
                value=best_renyi_epsilon(printed, facts.delta)[0],
                delta=facts.delta,
                really=best_renyi_epsilon(server, facts.delta)[0],
                holds="The paper does not compose over the uploads of one record, here "
                f"{record_uploads(facts)}.",
            ),
        ]
    return tuple(rules)


_BIASED = "does not hold for Algorithm 2, whose mean is E/(E+1)."


def printed_variance(epsilon: float) -> float:
    """Eq. A17's (3E + 1/(3E) - 2/3) / (E-1)^2."""
    e = math.exp(-epsilon)
    return (3 * e + e**3 / 3 - 2 * e * e / 3) / math.expm1(-epsilon) ** 2


def rival_variances(epsilon: float, w: float) -> dict[str, float]:
    """Variance of a released w in [-1, 1] under SPM's rivals (Lemma 1, Fig. 2): PM of Wang et al.
    2019, PNPM as the paper quotes it, Duchi et al. 2018, Laplace noise on [-1, 1]."""
    e, half = math.exp(-epsilon), math.exp(-epsilon / 2)
    rest = -math.expm1(-epsilon / 2)
    return {
        "pm": w * w * half / rest + half * (1 + 3 * half) / (3 * rest * rest),
        "pnpm_quoted": 4 * e * (1 + e / 3) / math.expm1(-epsilon) ** 2 * w * w,
        "duchi": scale_range(epsilon, "printed")[1] ** 2 - w * w,
        "laplace": 8 / epsilon**2,
    }


def theorem3_radius(epsilon: float, *, uploads: int, beta: float) -> float:
    """Theorem 3's Bernstein radius for a weight of magnitude 1, with the printed variance."""
    log = math.log(2 / beta)
    linear = log * 2 / 3 * (scale_range(epsilon, "printed")[1] + 1)
    root = math.sqrt(linear**2 + 8 * uploads * log * printed_variance(epsilon))
    return (linear + root) / (2 * uploads)


def amplified(epsilon: float, *, q: float) -> tuple[float, float]:
    """Theorem 1's 2 q epsilon, and the exact ln(1 + q (e^epsilon - 1)) of a stateless round."""
    return 2 * q * epsilon, theorems._log_mix(q, epsilon)


def local_total(
    *, p: float, q: float, epsilon: float, rounds: int, delta: float, clip_norm: float
) -> float:
    """MS-PAFL's Theorem 3 (Eq. 22): claimed epsilon of one client at `delta`; inf at q = 1."""
    if p * rounds == 0:
        return 0.0
    if q >= 1:
        return math.inf
    constant = theorem3_constant(delta=delta, clip_norm=clip_norm)
    return constant * q * epsilon * math.sqrt(p * rounds / (1 - q))


def theorem3_constant(*, delta: float, clip_norm: float) -> float:
    """Theorem 3's constant by Eq. C.8, which depends on the unit of the weights."""
    return math.sqrt(math.log(1 / delta) / math.log(1.25 / delta)) / (2 * clip_norm)


def linear_from(epsilon_c: float, *, delta_tilde: float) -> float:
    """Rounds beyond which Eq. 23's linear term exceeds its sqrt(T) term."""
    return 2 * math.log(1 / delta_tilde) / theorems._expm1(epsilon_c) ** 2


def upload_rdp(d: SelectiveShield, alpha: float, *, clients: int, moved: float = 2.0) -> float:
    """Renyi divergence of order alpha of one upload as the server gets it; moved: by how many C a
    record moves it, 2 when it is replaced and 1 when it is added or removed."""
    return alpha * (moved * d._norm / d.std(clients, d._norm)) ** 2 / 2


# --- tables and text ------------------------------------------------------------------------------


def columns(accounts: Sequence[Account]) -> DataFrame:
    """The ledger's columns, and of every formula what the paper prints, what is so in its place and
    at which delta; without those that no place has."""
    lines = []
    for account in accounts:
        line: dict[str, float | None] = {}
        for head, formula in _by_head(formulas(account.defense, account.facts)).items():
            line |= {head: formula.value, f"{head} really": formula.really}
            line[f"{head} delta"] = formula.delta
        lines.append(line)
    made = DataFrame(lines, dtype=object).dropna(axis="columns", how="all")
    return epsilons(accounts).join(made)


def _by_head(some: Sequence[Formula]) -> dict[str, Formula]:
    """Formulas by the equation that has them, numbered where it has several."""
    by_equation: dict[str, Formula] = {}
    for formula in some:
        same = sum(f.equation == formula.equation for f in by_equation.values())
        by_equation[f"{formula.equation} ({same + 1})" if same else formula.equation] = formula
    return by_equation


def lines(some: Sequence[Formula]) -> Iterator[str]:
    """Formulas as text."""
    if not some:
        yield "The paper has no formula at this setting."
    for formula in some:
        really = "" if formula.really is None else f" (really {formula.really:.6g})"
        delta = "" if formula.delta is None else f" at delta {formula.delta:.3g}"
        yield f"{formula.equation}, {formula.name}{delta}: {formula.value:.6g}{really}"
        yield f"    {formula.holds}"


def main(arguments: Sequence[str]) -> str:
    """What the command prints. Raises UserError for what `leakbench ledger` would refuse."""
    parser = argparse.ArgumentParser(description="What a paper prints, and what holds of it.")
    parser.add_argument("defense")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--facts", default="parameters=1")
    parser.add_argument("--over", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    registry = discover()
    settings = suite.parse_pairs(asked.set, "--set")
    known = suite.parse_pairs([f for f in asked.facts.split(",") if f], "--facts")
    if not asked.over:
        facts = check_facts(known)
        account = account_of(registry.defense(asked.defense, settings), facts, name=asked.defense)
        with computable(account.defense, facts):
            some = formulas(account.defense, facts)
        return json.dumps([asdict(f) for f in some]) if asked.json else "\n".join(lines(some))
    over: dict[str, list[Any]] = {}
    for text in asked.over:
        key, _, values = text.partition("=")
        over[key] = [suite.parse_value(v) for v in values.split(",")]
    table = accounts_over(registry, asked.defense, settings=settings, facts=known, over=over)
    made = columns(table)
    rows = [list(made)]
    for line in made.to_dict("records"):
        place = (str(line.pop(key)) for key in over)
        rows.append([*place, *("-" if isna(v) else f"{v:.4g}" for v in line.values())])
    return "\n".join(" | ".join(row) for row in rows)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"formulas: {error}")
