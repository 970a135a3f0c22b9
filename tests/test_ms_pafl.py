"""MS-PAFL: who takes part, what is sent and proven, and where its claims stop holding."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.api import SERVER, Client, Facts, Message, Part, Server
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account
from bench.protocols.evaluate import Reached
from bench.registry import discover
from bench.seeding import generator
from defenses import ms_pafl_theorems as theorems
from defenses.ms_pafl import MSPAFL, check_in_table, private_coordinates
from tests.conftest import context_for, federation_of, network_for, require, seen_under
from tests.docs_modules import formulas
from tests.oracle import assert_reference, reference_cases
from tests.oracle import ms_pafl as oracle
from tests.uploads import (
    assert_moments,
    assert_share,
    distance,
    error_of,
    make_client,
    play,
    upload_of,
)

ORACLE = reference_cases("ms_pafl")
FACTS = Facts(parameters=100, rounds=20, clients=100, batch=5, records=125, local_steps=5,
              participations=12, delta=1e-4)  # fmt: skip


def a_client(n: int = 20, name: str = "client-0") -> Client:
    return make_client(name, x=torch.zeros(n, 3), y=torch.zeros(n, dtype=torch.int64))


def sent(defense: MSPAFL, end: Tensor) -> Part:
    out = upload_of(defense, end, generator(0, "ms_pafl"))
    assert out.kind == "weights"
    return out.parts["p"]


# --- who takes part ------------------------------------------------------------------------------


def test_check_in_is_given_by_client_and_round_and_followed() -> None:
    assert check_in_table(0.5) == ((0.5,),)
    assert check_in_table("0.1,0.9") == ((0.1, 0.9),)
    defense = MSPAFL(epsilon=0.5, check_in="0.2,0.7;1")
    for i, p in enumerate((0.2, 0.7)):
        client = a_client(name=f"client-{i}")
        joined = torch.tensor([defense.joins(client, sampled=False) for _ in range(4000)])
        assert_share(joined[::2], p)
        assert bool(joined[1::2].all())


def test_an_observed_round_has_the_victims_whatever_the_coin_says(digits: Dataset) -> None:
    seen, truth = seen_under(digits, network_for(digits), MSPAFL(epsilon=0.5, check_in=0.01),
                             victims=5)  # fmt: skip
    assert len(seen.clients) == 5
    assert truth.x.shape[:2] == (5, 1)


# --- data subsampling ----------------------------------------------------------------------------


def test_batches_without_replacement_are_distinct_over_a_round() -> None:
    defense, client = MSPAFL(epsilon=0.5, sampling="wor"), a_client(20)
    rounds = []
    for number in range(2):
        defense.say("round", client, None, number)
        rounds.append(torch.cat([defense.batch(client, 5) for _ in range(4)]))
        assert sorted(rounds[-1].tolist()) == list(range(20))
    assert rounds[0].tolist() != rounds[1].tolist()
    defense.say("round", client, None, 2)
    more = torch.cat([defense.batch(client, 8) for _ in range(3)])
    assert len(more) == 24
    assert sorted(set(more.tolist())) == list(range(20))  # q = 1: none is left out


def test_each_round_starts_its_own_subsample() -> None:
    """Without a fresh one a record's chance would depend on the rounds before."""
    defense, client, hits = MSPAFL(epsilon=0.5), a_client(20), []
    for number in range(2000):
        defense.say("round", client, None, number)
        drawn = torch.cat([defense.batch(client, 3) for _ in range(2)])
        hits.append(int((drawn == 0).sum()))
    assert_share(torch.tensor(hits), 6 / 20)


def test_sampling_with_replacement_draws_from_all_records_each_time() -> None:
    defense, client = MSPAFL(epsilon=0.5, sampling="wr"), a_client(20)
    drawn = torch.stack([defense.batch(client, 5) for _ in range(4000)])
    assert_share((drawn == 0).any(dim=1), 1 - (1 - 1 / 20) ** 5)
    assert bool((drawn.sort(dim=1).values.diff(dim=1) == 0).any())


# --- what is uploaded ----------------------------------------------------------------------------


def test_the_first_half_stays_private() -> None:
    sizes = {"a.weight": (2, 3), "a.bias": (3,), "head.weight": (2,)}
    values = {n: torch.zeros(s) for n, s in sizes.items()}
    half = private_coordinates(values, 0.5)
    flat = torch.cat([m.flatten() for m in half.values()])
    assert flat.tolist() == [True] * 5 + [False] * 6
    assert not any(bool(m.any()) for m in private_coordinates(values, 0.0).values())
    assert all(bool(m.all()) for m in private_coordinates(values, 1.0).values())


@pytest.mark.parametrize("case", [c for c in ORACLE if c["name"].startswith("mspafl_clip")],
                         ids=lambda c: c["name"])  # fmt: skip
def test_the_public_weights_are_clipped(case: Any) -> None:
    given = case["inputs"]
    defense = MSPAFL(epsilon=1e9, noise="analytic", clip_norm=given["C"], private=0.0)
    part = sent(defense, torch.tensor(given["w"], dtype=torch.float64))
    assert part.values.tolist() == pytest.approx(case["expected"]["out"], rel=1e-3, abs=1e-4)


def test_only_the_public_half_is_clipped_noised_and_sent() -> None:
    """The norm is the public half's; the noise has Lemma 1's std."""
    half, defense = 20_000, MSPAFL(epsilon=1.0, clip_norm=2.0)
    part = sent(defense, torch.cat([torch.full((half,), 50.0), torch.full((half,), 3.0)]))
    assert require(part.present).tolist() == [False] * half + [True] * half
    assert bool((part.values[:half] == 0).all())
    std = 2 * 2.0 * math.sqrt(2 * math.log(1.25 / 1e-4)) / 1.0
    assert defense.std == pytest.approx(std)
    assert_moments(part.values[half:], mean=2.0 / math.sqrt(half), variance=std**2)


def test_clients_keep_their_private_half_and_take_the_new_public_one(digits: Dataset) -> None:
    network = network_for(digits)
    sizes = {n: v.numel() for n, v in network.init(generator(0)).items()}
    private = sum(k for n, k in sizes.items() if n.startswith(("block1", "block2")))
    defense = MSPAFL(epsilon=1.0, check_in=1.0, private=private / sum(sizes.values()))
    run = federation_of(digits, network, defense)
    start = {n: v.clone() for n, v in run.state.items()}
    play(run)
    for name, value in run.state.items():
        kept = name.startswith(("block1", "block2"))
        assert torch.equal(value, start[name]) == kept, name
    ones, others = (run.weights_of(run.clients[i]) for i in (0, 1))
    for name, value in ones.items():
        assert torch.equal(value, others[name]) == (not name.startswith(("block1", "block2")))


def test_a_run_has_no_model_of_all_clients(digits: Dataset) -> None:
    run = federation_of(digits, network_for(digits), MSPAFL(epsilon=1.0, check_in=1.0))
    reached = Reached()
    assert reached.everything()
    for client in play(run).joined:
        reached.add(client, run.names_held(client))
    assert not reached.everything()


# --- aggregation ---------------------------------------------------------------------------------


def test_nu_is_the_chance_that_somebody_checks_in_and_off_by_default() -> None:
    messages = [
        Message(kind="weights", sender=f"client-{i}", receiver=SERVER, round=0,
                parts={"w": Part(values=torch.tensor([float(i + 1), 0.0]),
                                 present=torch.tensor([True, False]))})
        for i in range(2)
    ]  # fmt: skip
    server = Server(state={"w": torch.tensor([9.0, 7.0])}, const={}, lr=1.0)
    plain = MSPAFL(epsilon=0.5, check_in="0.1,0.9")
    assert plain.aggregate(server, messages) is None
    assert "aggregate" not in plain.owns
    corrected = MSPAFL(epsilon=0.5, check_in="0.1,0.9", nu_clients=2)
    averaged = require(corrected.aggregate(server, messages))
    assert averaged["w"].tolist() == pytest.approx([1.5 / 0.91, 7.0])


def test_nu_under_splitfed_leaves_the_servers_own_layers_alone(digits: Dataset) -> None:
    network = network_for(digits)
    split = {"protocol": "splitfed", "cuts": ("block1",)}
    runs = [
        federation_of(digits, network, MSPAFL(epsilon=1.0, check_in=1.0, nu_clients=n), **split)
        for n in (0, 4)  # nu = 1: every client checks in
    ]
    for run in runs:
        play(run, protocol="splitfed")
    assert distance(runs[0].state, runs[1].state) < 1e-6


# --- attacks -------------------------------------------------------------------------------------


def test_records_are_rebuilt_from_the_public_weights_where_noise_is_small() -> None:
    """Logistic regression, batch 1, the clip binding: the attacker models it."""
    data = load_dataset("breast_cancer", seed=0)
    network, attack, errors = network_for(data, "logistic"), discover().attack("idlg", {}), []
    for epsilon, noise, budget in ((1e7, "analytic", 100), (1.0, "lemma1", 50)):
        defense = MSPAFL(epsilon=epsilon, noise=noise, clip_norm=0.5, private=0.5)  # type: ignore[arg-type]
        seen, truth = seen_under(data, network, defense, victims=4, lr=0.1)
        context = context_for(data, network, defense, budget=budget)
        errors.append(error_of(attack, seen, truth, context))
    assert errors[0] < 0.05 * float(truth.x.square().mean())
    assert errors[1] > 10 * errors[0]


# --- ledger --------------------------------------------------------------------------------------


def test_the_proof_counts_uploads_exactly_and_no_amplification() -> None:
    defense = MSPAFL(epsilon=1.0, check_in=0.5)
    entry = account(defense, FACTS)
    assert entry.eps_record == pytest.approx(
        exact_gaussian_epsilon(mu=math.sqrt(12) * 2 / defense.std, delta=1e-4)
    )
    assert entry.unit == "record"
    assert entry.claim_delta is not None
    p, q = 0.5, 0.2
    off = 2 * math.exp(-2 * 0.25**2 * 100)
    one = math.log1p(p / (1 - off) * math.expm1(2 * q))
    theorem4 = math.sqrt(2 * 20 * math.log(1e4)) * one + 20 * one * math.expm1(one)
    assert entry.eps_claimed == pytest.approx(theorem4)
    assert entry.claim_delta == pytest.approx(20 * (off + p * q * 1e-4 / (1 - off)) + 1e-4)


def test_a_budget_beyond_the_lemma_is_warned_of_with_the_right_noise() -> None:
    with pytest.warns(UserWarning, match=r"beyond Lemma 1.* gives epsilon 10\.62.*0\.9105.* 10"):
        loud = MSPAFL(epsilon=10.0)
    assert loud.std == pytest.approx(0.868722, rel=1e-5)
    assert loud.local_epsilon == pytest.approx(10.6209, rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MSPAFL(epsilon=1.0)
        MSPAFL(epsilon=10.0, noise="analytic")


MU = oracle.noise_ratio(epsilon=1.0, delta=1e-4)


def _q(i: dict[str, Any]) -> dict[str, Any]:
    facts = Facts(parameters=1, records=i["D"], local_steps=i["Q"], batch=i["b"])
    wor, wr = (
        MSPAFL(epsilon=0.5, sampling=s).constants(facts)["sampling_rate"]  # type: ignore[arg-type]
        for s in ("wor", "wr")
    )
    return {"q_wor": wor, "q_wr": wr}


def _amplified(i: dict[str, Any]) -> dict[str, Any]:
    printed, exact = formulas.amplified(i["eps_l"], q=i["q"])
    return {"printed": printed, "exact": exact, "holds": printed >= exact}


def _fig3(i: dict[str, Any]) -> dict[str, Any]:
    rounds = [oracle.single_round(p=i["p"], q=i["q"], epsilon=e) for e in i["eps_l"]]
    return {"eps_c": [e for e, _ in rounds], "delta_c": rounds[0][1]}


def _fig4(i: dict[str, Any]) -> dict[str, Any]:
    of = {"p": i["p"], "q": i["q"], "epsilon": i["eps_l"], "delta_tilde": i["delta_tilde"]}
    totals = [oracle.claimed(**of, rounds=t) for t in i["T"]]
    return {"eps": [e for e, _ in totals], "total_delta": [d for _, d in totals]}


def _thm3(i: dict[str, Any]) -> dict[str, Any]:
    mu = oracle.noise_ratio(epsilon=i["eps_l"], delta=i["delta"])
    return {
        "thm3": oracle.local_total(
            p=i["p"], q=i["q"], epsilon=i["eps_l"], rounds=i["T"], delta=i["delta"]
        ),
        "unamplified_exact": oracle.unamplified_epsilon(
            mu=mu, uploads=i["T"], delta=i["delta"]
        ),
    }  # fmt: skip


def _server_view(i: dict[str, Any]) -> dict[str, Any]:
    """At p = 1 beside what is proven without amplification."""
    of = {"p": i["p"], "q": i["q"], "epsilon": i["eps_l"], "rounds": i["T"]}
    total, delta = oracle.claimed(**of)
    safe = oracle.unamplified_epsilon(mu=MU, uploads=i["T"], delta=delta)
    proven = {"safe_eps_same_delta": safe} if i["p"] == 1 else {}
    return {"thm4": total, "total_delta": delta, "thm3": oracle.local_total(**of), **proven}


def _cor1(i: dict[str, Any]) -> dict[str, Any]:
    eps_c, delta_c = oracle.single_round(p=i["p"], q=i["q"], epsilon=i["eps_l"])
    of = {"p": i["p"], "q": i["q"], "mu": MU}
    return {
        "eps_c": eps_c,
        "delta_c": delta_c,
        "true_delta_server": oracle.visible_round_delta(eps_c, **of),
    }


def _state(i: dict[str, Any]) -> dict[str, Any]:
    thm3 = oracle.local_total(p=i["p"], q=i["q"], epsilon=i["eps_l"], rounds=i["T"])
    lower = oracle.memory_delta(thm3, q=i["q"], mu=MU, uploads=i["T"])
    return {"eps_thm3": thm3, "delta_lower_at_thm3": lower}


def _thm4_state(i: dict[str, Any]) -> dict[str, Any]:
    total, allowed = oracle.claimed(p=i["p"], q=i["q"], epsilon=i["eps_l"], rounds=i["T"])
    lower = oracle.memory_delta_visible(total, p=i["p"], q=i["q"], mu=MU, rounds=i["T"])
    return {
        "eps_thm4": total,
        "delta_allowed": allowed,
        "delta_lower": lower,
        "violated": lower > allowed,
    }


def _nu(i: dict[str, Any]) -> dict[str, Any]:
    return {"nu": theorems.correction([0.1] * 100 if i["p"] == "100 x 0.1" else i["p"])}


COMPUTE: dict[str, Any] = {
    "mspafl_delta_prime": lambda i: {
        "delta_prime": theorems.deviation_probability(beta=i["beta"], clients=i["N"])
    },
    "mspafl_sigma": lambda i: oracle.noise_std(
        epsilon=i["eps_l"], delta=i["delta"], clip_norm=i["C"]
    ),
    "mspafl_q_": _q,
    "mspafl_thm1": _amplified,
    "mspafl_fig3": _fig3,
    "mspafl_fig4": _fig4,
    "mspafl_linear": lambda i: {
        "T": [formulas.linear_from(e, delta_tilde=oracle.PAPER_DELTA) for e in i["eps_c"]]
    },
    "mspafl_c0": lambda i: {
        f"c0_C{c:g}": formulas.theorem3_constant(delta=i["delta"], clip_norm=c) for c in (1.0, 10.0)
    },
    "mspafl_thm3_q": _thm3,
    "mspafl_server_view": _server_view,
    "mspafl_cor1": _cor1,
    "mspafl_private_half_state": _state,
    "mspafl_thm4_state": _thm4_state,
    "mspafl_nu": _nu,
}
CASES = reference_cases("ms_pafl", elsewhere=("mspafl_clip",))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    assert_reference(case, COMPUTE, whole=True)


# --- where claims hold and fail -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "rounds", "violated"), [(0.05, 200, True), (0.01, 1000, True), (0.1, 100, False)]
)
def test_theorem_4_is_violated_for_rare_check_ins_with_memory(
    p: float, rounds: int, violated: bool
) -> None:
    """p = .05 takes the weighted statistic: the sum of the last uploads just misses it."""
    epsilon, allowed = oracle.claimed(p=p, q=0.2, epsilon=1.0, rounds=rounds)
    lower = oracle.memory_delta_visible(
        epsilon, p=p, q=0.2, mu=MU, rounds=rounds, statistic="weighted"
    )
    assert (lower > allowed) == violated


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 2.5, 100.0, 700.0, 5000.0])
def test_claims_do_not_overflow_at_large_budgets(epsilon: float) -> None:
    one, delta = oracle.single_round(p=0.5, q=1.0, epsilon=epsilon)
    assert 0 < one <= 2 * epsilon
    if epsilon >= 100:
        assert one == pytest.approx(2 * epsilon + math.log(0.5), rel=1e-5)
    total, summed = oracle.claimed(p=0.5, q=1.0, epsilon=epsilon, rounds=10)
    assert total >= 10 * one * min(one, 1.0)
    assert summed == pytest.approx(10 * delta + 1e-4)
    assert formulas.amplified(epsilon, q=0.2)[1] <= epsilon


def test_claims_grow_with_everything_that_leaks() -> None:
    base: dict[str, Any] = {"p": 0.3, "q": 0.2, "epsilon": 1.0, "rounds": 10}
    for name, more in (("p", 0.4), ("q", 0.3), ("epsilon", 1.1), ("rounds", 11)):
        epsilon, delta = oracle.claimed(**base)
        larger, more_delta = oracle.claimed(**(base | {name: more}))
        assert larger > epsilon
        assert more_delta >= delta


def test_few_clients_make_the_hoeffding_bound_void() -> None:
    assert oracle.claimed(p=0.5, q=0.2, epsilon=1.0, clients=5, rounds=1)[0] == math.inf
    assert oracle.claimed(p=0.5, q=0.2, epsilon=1.0, clients=5, beta=1.0, rounds=1)[0] < 2


def test_no_check_in_and_no_round_cost_nothing() -> None:
    assert oracle.claimed(p=0.0, q=0.2, epsilon=900.0, rounds=10)[0] == 0
    assert oracle.claimed(p=0.5, q=0.2, epsilon=1.0, rounds=0)[0] == 0
    assert oracle.local_total(p=0.0, q=1.0, epsilon=1.0, rounds=10) == 0
    assert oracle.local_total(p=0.5, q=1.0, epsilon=1.0, rounds=10) == math.inf


def test_a_sampling_rate_never_exceeds_one() -> None:
    for replacement in (False, True):
        rate = theorems.sampling_rate(records=10, draws=60, replacement=replacement)
        assert 0.99 < rate <= 1


def test_the_correction_counts_a_client_that_always_comes() -> None:
    assert theorems.correction([1.0, 0.3]) == 1
