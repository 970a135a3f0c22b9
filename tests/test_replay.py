"""The truth behind a view follows from the seed, without the training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.contract.defense import Defense
from bench.errors import UserError
from bench.harness.environment import Environment, dataset_of, shares_of
from bench.protocols.export import TRUTH, load_seen, load_truth
from bench.protocols.replay import replay_truth
from bench.records import Run, TrainRecord
from bench.registry import Registry
from tests.conftest import Run as RunIt
from tests.test_recorded import RECORDED

DEFENSES = """
[[defenses]]
name = "top_k"
settings = { keep = 0.1 }

[[defenses]]
name = "ms_pafl"
settings = { epsilon = 100.0, clip_norm = 10.0, check_in = 0.6, sampling = "wr" }

[[defenses]]
name = "ms_pafl"
settings = { epsilon = 100.0, noise = "analytic", clip_norm = 10.0, check_in = 0.6 }

[[defenses]]
name = "secure_aggregation"
settings = { dropout = 0.2 }
"""
SPLIT = {
    'name = "fedavg"': 'name = "splitfed"\ncut = "block1"\nlabels = "shared"',
    'model = "mlp_spm"': 'model = "lenet"',
}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["fedavg", "splitfed"])
def test_the_truth_of_every_view_is_made_again_from_the_seed(
    run: RunIt, tiny: Callable[..., Path], registry: Registry, protocol: str
) -> None:
    """Of defenses that draw clients and batches themselves, too."""
    more = {"rounds = 1": "rounds = 6\nparticipation = 0.75", "batch = 8": "batch = 3",
            "local_steps = 1": "local_steps = 2"}  # fmt: skip
    split = protocol == "splitfed"
    suite = tiny(append=RECORDED + ("" if split else DEFENSES), **more, **(SPLIT if split else {}))
    only = {
        "attack": "prior_only",
        "defense": "none" if split else "none,top_k,ms_pafl,secure_aggregation",
    }
    store, report = run(suite, only=only)
    assert not report.failures
    seen_stems = 0
    for training in Run.read(store.folder).trainings:
        record, job = store.read("train", training.key), training.job
        assert isinstance(record, TrainRecord)
        dataset = dataset_of(job, Environment())
        data = [(dataset.train_x[s], dataset.train_y[s]) for s in shares_of(job, dataset)]
        for checkpoint, threats in record.observations.items():
            for threat, look in threats.items():
                for stem in look.stems if look.status == "done" else ():
                    folder = store.artifacts(training.key)
                    seen = load_seen(folder / f"{stem}-seen")
                    made = replay_truth(
                        data, seen, protocol=job.protocol, threat=job.threat(threat),
                        checkpoint=checkpoint, seed=job.seed,  # type: ignore[arg-type]
                        defense=registry.defense(job.defense, job.settings),
                    )  # fmt: skip
                    true = load_truth(folder / f"{stem}{TRUTH}")
                    assert torch.equal(made.x, true.x), (job.defense, stem)
                    assert torch.equal(made.y, true.y)
                    seen_stems += 1
    assert seen_stems > (6 if split else 20)


def test_views_of_other_clients_or_rounds_are_refused(
    run: RunIt, tiny: Callable[..., Path]
) -> None:
    store, _ = run(tiny(), only={"defense": "none", "attack": "prior_only"})
    (training,) = Run.read(store.folder).trainings
    job, dataset = training.job, dataset_of(training.job, Environment())
    seen = load_seen(store.artifacts(training.key) / "init-server-seen")
    data = [(dataset.train_x[s], dataset.train_y[s]) for s in shares_of(job, dataset)]

    def replay(seen: object, checkpoint: str = "init") -> None:
        replay_truth(
            data, seen, protocol=job.protocol, threat=job.threats[0],  # type: ignore[arg-type]
            checkpoint=checkpoint, seed=job.seed, defense=Defense(),  # type: ignore[arg-type]
        )  # fmt: skip

    replay(seen)
    for clients in (("client-0", "client-0"), ("client-99",), ()):
        with pytest.raises(UserError, match="the run has no such victims"):
            replay(replace(seen, clients=clients))
    with pytest.raises(UserError, match="the victims did not use 100000 samples"):
        replay(replace(seen, known={**seen.known, "samples": 100_000}))
    late = replace(seen, messages=tuple(replace(m, round=5) for m in seen.messages))
    with pytest.raises(UserError, match="round 5 is none that is recorded"):
        replay(late, "training")
