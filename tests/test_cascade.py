"""Costly attacks spare the victims that cheaper ones have rebuilt."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench import suite as suites
from bench.contract.attack import Reconstruction
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.harness import launch
from bench.harness.cascade import EXPLAINED, Earlier, is_separable, of_victims, spare
from bench.harness.environment import Environment
from bench.harness.plan import Plan, expand
from bench.harness.store import Store
from bench.records import RECONSTRUCTION, AttackRecord, Run
from bench.report.entries import select_answers
from bench.submission.rerunning import with_earlier
from defenses.cutmix import CutMix
from defenses.none import NoDefense
from defenses.sparsifiers import TopK
from tests.conftest import network_for, seen_under
from tests.runs import made, timeless

PLUGINS = '''
import torch
from attacks.analytic import Analytic
from bench.api import Attack, Reconstruction

class Half(Analytic):
    """Rebuilds the first victim and loses the others."""
    def run(self, seen, ctx):
        answer = super().run(seen, ctx)
        answer.images[1:] = 0.5
        return answer

class Counts(Attack):
    """Says whom it was given."""
    recovers = frozenset({"images", "labels"})
    def run(self, seen, ctx):
        shape = (len(seen.clients), 1)
        return Reconstruction(
            images=torch.zeros(*shape, *ctx.network.shape),
            labels=torch.zeros(shape, dtype=torch.int64),
            label_counts=torch.eye(10, dtype=torch.int64)[[0] * len(seen.clients)],
            loss=torch.zeros(len(seen.clients)),
            evaluations=7 * len(seen.clients),
            notes=(f"was given {' and '.join(seen.clients)}",),
        )
'''
REBUILT = 0.98
"""Least SSIM of an answer that is as good as the image."""
CHEAP, COSTLY = '[[attacks]]\nname = "ilrg"', '[[attacks]]\nname = "prior_only"'


@pytest.fixture
def plugins(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "cascading.py"
    path.write_text(PLUGINS)
    return (path,)


def cascade(tiny: Callable[..., Path], cheap: str, costly: str, after: str) -> Path:
    ending = f'[[attacks]]\nname = "{costly}"\nafter = [{after}]'
    first = f'[[attacks]]\nname = "{cheap}"'
    return tiny(**{CHEAP: first, COSTLY: ending, "epsilon = [0.5, 2.0]": "epsilon = 0.5"})


def records(folder: Path) -> dict[tuple[str, str], AttackRecord]:
    """Records of seed 0 at init by defense's setting and attack."""
    store, found = Store(folder), {}
    for cell in Run.read(folder).cells:
        record = store.read("attack", cell.key)
        if cell.checkpoint == "init" and isinstance(record, AttackRecord):
            found[cell.setting, cell.attack] = record
    return found


def test_what_was_rebuilt_is_not_attacked_again_and_what_was_not_is(
    run: Any, tiny: Callable[..., Path], plugins: tuple[Path, ...]
) -> None:
    suite = cascade(tiny, "analytic", "counts", '"analytic"')
    store, report = run(suite, plugins=plugins, only={"checkpoint": "init"})
    assert report.failures == []
    made = records(store.folder)
    cheap, spared = made["none", "analytic"], made["none", "counts"]
    assert min(cheap.values["ssim"]) >= REBUILT
    for metric in ("ssim", "mse", "psnr"):
        assert spared.values[metric] == cheap.values[metric]
    assert (spared.gradient_evaluations, spared.judged) == (0, cheap.judged)
    assert spared.notes == (
        "2 of 2 victims were spared, since analytic explained what was seen of them but for 1e-06: "
        "the figures are those of that answer",
    )
    defended = made["spm(epsilon=0.5)", "counts"]
    assert defended.gradient_evaluations == 14
    assert defended.notes[0].count(" and ") == 1


@pytest.mark.slow
def test_of_some_victims_the_others_are_attacked(
    run: Any, tiny: Callable[..., Path], plugins: tuple[Path, ...]
) -> None:
    store, _ = run(cascade(tiny, "half", "counts", '"half"'), plugins=plugins)
    made = records(store.folder)
    half, counts = made["none", "half"], made["none", "counts"]
    assert half.values["ssim"][0] >= REBUILT > half.values["ssim"][1]
    assert counts.gradient_evaluations == 7
    assert " and " not in counts.notes[0]
    assert counts.values["ssim"][0] == half.values["ssim"][0]
    assert counts.values["ssim"][1] != half.values["ssim"][1]
    assert counts.judged is not None
    assert half.judged is not None
    assert counts.judged[0] == half.judged[0]
    first, second = (
        load_file(store.artifacts(record.key) / RECONSTRUCTION)["images"]
        for record in (half, counts)
    )
    assert torch.equal(first[0], second[0])
    assert float(second[1].abs().max()) == 0


def test_who_is_spared_follows_from_what_the_attacker_sees(digits: Dataset) -> None:
    seen, _ = seen_under(digits, network_for(digits), NoDefense(), clients=3)

    def by(unexplained: list[float] | None) -> list[int]:
        earlier = Earlier(
            label="any", answer=Reconstruction(), unexplained=unexplained, judged=[0.0] * 3
        )
        return sorted(spare([earlier], seen, NoDefense()).by)

    assert by([EXPLAINED / 2, EXPLAINED * 2, float("inf")]) == [0]
    assert by(None) == []


@pytest.mark.slow
def test_a_run_that_goes_on_makes_what_is_missing_and_nothing_twice(
    run: Any, tiny: Callable[..., Path], plugins: tuple[Path, ...]
) -> None:
    suite = cascade(tiny, "half", "counts", '"half"')
    store, first = run(suite, plugins=plugins)
    before = {p: timeless(json.loads(p.read_text())) for p in store.folder.glob("records/*/*.json")}
    found = records(store.folder)
    for attack in ("half", "counts"):
        store.path("attack", found["none", attack].key).unlink()
    store.path("attack", found["spm(epsilon=0.5)", "half"].key).unlink()
    _, second = run(suite, plugins=plugins)
    assert (second.ran, second.cached) == (3, first.ran - 3)
    assert before == {
        p: timeless(json.loads(p.read_text())) for p in store.folder.glob("records/*/*.json")
    }


@pytest.mark.slow
def test_the_upper_bound_loses_no_more_than_what_counts_as_rebuilt(
    run: Any, tiny: Callable[..., Path]
) -> None:
    """The same attacks with and without the cascade."""
    bounds = []
    for out, after in (("all", ""), ("cascade", '"analytic"')):
        store, _ = run(cascade(tiny, "analytic", "dlg", after), out=out)
        found: dict[str, dict[str, AttackRecord]] = {}
        for (setting, attack), record in records(store.folder).items():
            found.setdefault(setting, {})[attack] = record
        bounds.append({s: select_answers(r, "ssim", by_truth=True) for s, r in found.items()})
    whole, part = bounds
    assert whole.keys() == part.keys()
    for setting, answers in whole.items():
        other = part[setting]
        assert answers is not None
        assert other is not None
        assert (answers[0] - other[0]).max() <= 1 - REBUILT


CHEAP_OF_QUICK = ("analytic", "ridge", "idlg")
GOES_AFTER = {
    "decoder": CHEAP_OF_QUICK[:2],
    "idlg": CHEAP_OF_QUICK[:1],
    "inverting_gradients": CHEAP_OF_QUICK,
    "dlg": CHEAP_OF_QUICK,
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_on_quick_the_upper_bound_loses_less_than_two_hundredths_of_any_victim(
    tmp_path: Path,
) -> None:
    bounds = []
    for goes_after in ({}, GOES_AFTER):
        suite = suites.read_suite("quick")
        others = [a.name for a in suite.attacks if a.name not in CHEAP_OF_QUICK]
        order = [*CHEAP_OF_QUICK, *others]
        attacks = [
            a.model_copy(update={"after": goes_after.get(a.name, ())})
            for a in sorted(suite.attacks, key=lambda a: order.index(a.name))
        ]
        changed = suite.model_copy(update={"attacks": attacks, "audit": 0})
        plan, keys = launch.plan_suite(changed, {}, Environment())
        store = Store(tmp_path / str(len(goes_after)))
        report = made(plan, keys, store, launch.local(plan, keys.env, workers=1))
        assert report.failures == []
        found: dict[tuple[str, str, str], dict[str, AttackRecord]] = {}
        for cell in Run.read(store.folder).cells:
            record = store.read("attack", cell.key)
            if isinstance(record, AttackRecord):
                place = (f"{cell.protocol}/{cell.model}/{cell.setting}", cell.checkpoint)
                found.setdefault((*place, cell.threat), {})[cell.attack] = record
        bounds.append({p: select_answers(r, "ssim", by_truth=True) for p, r in found.items()})
    whole, part = bounds
    assert whole.keys() == part.keys()
    for place, answers in whole.items():
        other = part[place]
        if answers is not None:
            assert other is not None
            assert (answers[0] - other[0]).max() <= 1 - REBUILT, place


def test_attacks_that_go_before_are_planned_with_the_one_that_is_asked_for(
    tiny: Callable[..., Path],
) -> None:
    suite = suites.read_suite(str(cascade(tiny, "analytic", "dlg", '"analytic"')))
    plan = expand(suite, {"attack": "dlg", "defense": "none", "checkpoint": "init"})
    assert [c.attack for c in plan.cells] == ["analytic", "dlg"]
    assert plan.cells[1].after == (plan.cells[0],)
    alone = suites.read_suite(str(cascade(tiny, "analytic", "dlg", "")))
    free = expand(alone, {"attack": "dlg", "defense": "none", "checkpoint": "init"}).cells
    assert "after" not in free[0].inputs()
    assert free[0] != plan.cells[1]
    with pytest.raises(ValueError, match="dlg/init is planned without what it goes after"):
        Plan(suite=suite, trainings=plan.trainings, cells=plan.cells[1:])


def test_what_is_verified_of_a_cascade_is_run_with_what_goes_before(
    run: Any, tiny: Callable[..., Path]
) -> None:
    store, _ = run(
        cascade(tiny, "analytic", "dlg", '"analytic"'),
        only={"defense": "none", "checkpoint": "final"},
    )
    made = Run.read(store.folder)
    first, drawn = (next(c for c in made.cells if c.attack == name) for name in ("analytic", "dlg"))
    assert with_earlier(made, {drawn.key}) == [first, drawn]
    assert with_earlier(made, {first.key}) == [first]


@pytest.mark.parametrize(
    ("cheap", "after", "sentence"),
    [
        ("analytic", '"analytik"', "Did you mean 'analytic'"),
        ("analytic", '"dlg"', "attacks above dlg under threat server"),
        ("analytic", '"analytic", "analytic"', "named twice in what attack dlg goes after"),
        ('analytic"\ncheckpoints = ["init"]\n#"', '"analytic"', "which does not run at final."),
        ('analytic"\nthreat = "other"\n#"', '"analytic"', "attacks above dlg under threat server"),
    ],
)
def test_an_attack_that_cannot_go_after_another_is_refused(
    tiny: Callable[..., Path], cheap: str, after: str, sentence: str
) -> None:
    path = cascade(tiny, cheap, "dlg", after)
    path.write_text(
        path.read_text().replace(
            "[[threats]]\nvictims = 2\n",
            '[[threats]]\nname = "server"\nvictims = 2\n[[threats]]\nname = "other"\n',
        )
    )
    with pytest.raises(UserError, match=sentence):
        suites.read_suite(str(path))


@pytest.mark.parametrize(
    ("defense", "protocol", "expected"),
    [
        (NoDefense(), "fedavg", True),
        (TopK(keep=0.1), "fedavg", False),
        (CutMix(patches=16, group=2), "splitfed", False),
    ],
)
def test_victims_are_apart_where_each_ones_messages_tell_all_of_it(
    digits: Dataset, defense: Defense, protocol: str, expected: bool
) -> None:
    split = protocol == "splitfed"
    network = network_for(digits, "vit_small" if split else "mlp_spm")
    cut = {"cut": "embed", "labels": "private"} if split else None
    seen, _ = seen_under(
        digits, network, defense, clients=4, protocol=protocol, split=cut, rounds=1
    )
    assert is_separable(seen, defense) is expected
    some = of_victims(seen, [2, 0])
    assert some.clients == (seen.clients[2], seen.clients[0])
    assert some.messages == seen.messages
