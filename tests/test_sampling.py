"""Which clients take part in a round, and what a threat hears of models."""

from pathlib import Path

import pytest
import torch

import bench
from bench import suite as suites
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.harness.plan import expand
from bench.harness.train import check_company
from bench.protocols.federation import sample_clients
from bench.protocols.settings import ProtocolSettings
from bench.records import Run
from bench.registry import Registry
from bench.seeding import generator
from tests.conftest import TINY, federation_of, network_for
from tests.uploads import assert_moments, assert_share


def test_poisson_sampling_draws_every_client_by_itself(digits: Dataset) -> None:
    ids = [c.id for c in federation_of(digits, network_for(digits), Defense(), clients=5).clients]
    protocol = ProtocolSettings(clients=5, participation=0.3, sampling="poisson", local_steps=1)
    rng = generator(0, "poisson")
    rounds = [sample_clients(ids, protocol, rng) for _ in range(4000)]
    counts = torch.tensor([len(r) for r in rounds])
    assert_moments(counts, mean=1.5, variance=1.05)  # binomial
    assert_share(counts == 0, 0.7**5)
    for client in ("client-0", "client-4"):
        assert_share(torch.tensor([client in r for r in rounds]), 0.3)
    fixed = ProtocolSettings(clients=5, participation=0.3, local_steps=1)
    assert {len(sample_clients(ids, fixed, rng)) for _ in range(20)} == {2}


@pytest.mark.slow
def test_a_run_with_empty_rounds_keeps_its_model_and_goes_on(tmp_path: Path) -> None:
    suite = tmp_path / "tiny.toml"
    text = TINY.replace("rounds = 1", 'rounds = 6\nsampling = "poisson"\nparticipation = 0.1')
    suite.write_text(text)
    results = bench.run(str(suite), out=tmp_path / "run", jobs=0, device="cpu")
    assert not results.leaderboard().empty
    assert Run.read(tmp_path / "run").suite.protocol.sampling == "poisson"


def test_mixing_refuses_rounds_that_may_have_too_few_clients(registry: Registry) -> None:
    plan = expand(suites.read_suite("first", ['protocol.sampling="poisson"']))
    for job in plan.trainings:
        defense = registry.defense(job.defense, job.settings)
        if job.defense == "dp_cutmix":
            with pytest.raises(UserError, match='which sampling "poisson" does not promise'):
                check_company(job, defense)
        else:
            check_company(job, defense)
