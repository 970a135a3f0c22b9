"""Models that users bring: files, entry points, libraries' models and modules in the Python API."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import bench
from attacks.engine.clients import ObservedTraining, Simulated, layered_gradient
from bench.cli import app
from bench.contract.messages import UPLOAD_KINDS
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.harness.environment import Environment
from bench.harness.keys import Code
from bench.harness.launch import local, plan_suite
from bench.models import bare_parameters, build, hand, unwrap
from bench.models.module import ModuleNetwork
from bench.registry import discover
from bench.sandbox.conformance.plugins import check_plugins
from bench.seeding import generator
from bench.suite import Suite
from defenses.none import NoDefense
from tests import strangers
from tests.conftest import context_for, seen_under
from tests.docs_modules import parameter_efficient
from tests.matchers import evidence_for
from tests.uploads import one_hot

FILE = Path(strangers.__file__).relative_to(Path.cwd())
CLASSES = 5
CUT = ("idlg", "split_label")
"""Attacks that are played on a cut network too."""
TINY: dict[str, Any] = {
    "name": "own",
    "version": 1,
    "checkpoints": ["init"],
    "budget": 3,
    "audit": 0,
    "protocol": {"name": "fedsgd", "clients": 3, "rounds": 1, "batch": 8},
    "tasks": [{"dataset": "digits", "model": f"{FILE}:Residual", "model_settings": {"width": 2}}],
    "threats": [{"victims": 2}],
    "defenses": [{"name": "none"}],
    "attacks": [{"name": "prior_only"}],
}


def brought(name: str, shape: tuple[int, ...] | None = None, **settings: Any) -> ModuleNetwork:
    shape = strangers.STRANGERS.get(name, (1, 16, 16)) if shape is None else shape
    network = build(f"{FILE}:{name}", shape=shape, classes=CLASSES, settings=settings)
    assert isinstance(network, ModuleNetwork)
    return network


def prepared(network: ModuleNetwork) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Parameters, four samples, and buffers of 32 others."""
    params = network.init(generator(0, "init"))
    x = torch.rand(36, *network.shape, generator=generator(0, "x"))
    return params, x[:4], network.calibrate(params, x[4:])


MAKERS: dict[str, Any] = strangers.HANDLED | {
    "Residual": lambda classes: strangers.Residual(classes, in_channels=2),
    "Plain": lambda classes: strangers.Plain(classes, in_channels=1, image_size=12),
    "Attentive": lambda classes: strangers.Attentive(classes, in_channels=1),
    "Sensing": lambda classes: strangers.Sensing((3, 32), n_classes=classes),
    "Tied": lambda classes: strangers.Tied(classes, in_features=7),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the older weight_norm
@pytest.mark.parametrize("name", MAKERS)
def test_a_module_runs_as_it_is(name: str) -> None:
    """Logits and gradients in training are those of the module that nobody touched."""
    network = brought(name)
    network.check()
    torch.manual_seed(0)
    module = unwrap(MAKERS[name](CLASSES)).train()
    x, y = torch.rand(8, *network.shape, generator=generator(0, "x")), torch.arange(8) % CLASSES
    module(x)  # gives lazy layers their shapes
    own = bare_parameters(module)
    inner = network.anatomy.parameters
    params = {k: own[n].detach().clone() for k, n in inner.items()}
    assert {n for n, p in own.items() if p.requires_grad} == set(
        network.anatomy.parameters.values()
    )
    with torch.no_grad():
        for name, value in network.constants.items():
            if name in own:
                own[name].copy_(value)
    leaves = {n: v.clone().requires_grad_() for n, v in params.items()}
    buffers = network.calibrate(params, x)
    cases = [(leaves, "train")] + ([(params, "eval")] if not network.normalises else [])
    for state, mode in cases:
        made = network.run(state, x, mode=mode, buffers=buffers)
        assert torch.allclose(made, module.train(mode == "train")(x), atol=1e-5)
    cross_entropy(module.train()(x), y).backward()
    slopes = torch.autograd.grad(
        cross_entropy(network.run(leaves, x, mode="train"), y), list(leaves.values())
    )
    for known, slope in zip(leaves, slopes, strict=True):
        grad = own[inner[known]].grad
        assert grad is not None
        assert torch.allclose(slope, grad, atol=1e-5)


def test_a_network_that_runs_otherwise_than_its_module_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, right = brought("Residual"), ModuleNetwork._segment
    monkeypatch.setattr(ModuleNetwork, "_segment", lambda *args: 1.01 * right(*args))
    with pytest.raises(UserError, match="has other gradients among several clients than by itself"):
        network.check()


def test_constants_that_were_seen_are_used(tmp_path: Path) -> None:
    """A frozen layer made anew has other numbers than the one that a client held."""
    network = build(f"{FILE}:frozen_body", shape=(1, 16, 16), classes=CLASSES)
    params, x = network.init(generator(0, "init")), torch.rand(4, 1, 16, 16)
    buffers = network.calibrate(params, x)
    moved = buffers | {"constant/0.weight": 2 * buffers["constant/0.weight"]}
    one, other = (network.run(params, x, buffers=b, mode="train") for b in (buffers, moved))
    assert not torch.allclose(one, other)
    assert torch.equal(one, network.run(params, x, mode="train"))


def test_a_model_of_several_files_finds_its_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "nets" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    parts = package / "leakbench_test_parts.py"
    parts.write_text("from torch import nn\ndef first(n):\n    return nn.Linear(n, 8)\n")
    (package.parent / "common.py").write_text("WIDTH = 8\n")
    body = "from torch import nn\ndef net(num_classes, in_features):\n    return nn.Sequential("
    body += "nn.Flatten(), first(in_features), nn.Linear(WIDTH, num_classes))\n"
    for name, lines in {
        "relative": "from ..common import WIDTH\nfrom .leakbench_test_parts import first\n",
        "sibling": "from leakbench_test_parts import first\nWIDTH = 8\n",
    }.items():
        file = package / f"{name}.py"
        file.write_text(lines + body)
        network = build(f"{file}:net", shape=(1, 4, 4), classes=3)
        assert network.n_parameters == 17 * 8 + 9 * 3
        before = Code(discover()).model(f"{file}:net")
        parts.write_text(parts.read_text().replace("n, 8)", "n, 8, True)"))
        assert Code(discover()).model(f"{file}:net") != before
        parts.write_text(parts.read_text().replace("n, 8, True)", "n, 8)"))


@pytest.mark.parametrize("name", list(strangers.STRANGERS))
def test_each_stage_runs_on_its_own_parameters_and_the_stage_before(name: str) -> None:
    network = brought(name)
    params, x, buffers = prepared(network)
    logits, between = network.apply(params, x, buffers=buffers), x
    assert network.stages[-1] == "head"
    assert all("." not in stage for stage in network.stages)
    for stage in network.stages:
        mine = {n: v for n, v in params.items() if n.startswith(f"{stage}.")}
        own = {n: v for n, v in buffers.items() if n.startswith(f"{stage}.")}
        between = network.run(mine, between, first=stage, last=stage, buffers=own)
        until = network.run(params, x, last=stage, buffers=buffers)
        assert torch.allclose(between, until, atol=1e-5)
        below = {n: v for n, v in params.items() if n not in mine}
        if mine and stage == "head":
            assert set(network.head) == set(mine)
            features = network.features(below, x, buffers=buffers)
            by_hand = features @ params[network.head[0]].T + params[network.head[1]]
            assert torch.allclose(torch.log_softmax(by_hand, 1), torch.log_softmax(logits, 1))
    assert torch.allclose(between, logits, atol=1e-5)


def test_stages_are_submodules_that_all_information_passes() -> None:
    assert brought("Residual").stages == (
        *("conv1", "bn1", "layer1/0", "layer1", "layer2", "head_input", "head"),
    )
    # Between the two uses of `again` no cut is possible: both sides would need its weights.
    tied = brought("Tied")
    assert tied.stages == ("first", "head_input", "head")
    assert [n for n in tied.init(generator(0, "init")) if n.startswith("head_input")] == [
        *(f"head_input./{layer}.{n}" for layer in ("again", "between") for n in ("weight", "bias"))
    ]


@pytest.mark.parametrize("name", list(strangers.STRANGERS))
def test_clients_run_together_and_one_by_one_alike(name: str) -> None:
    network = brought(name)
    params, x, buffers = prepared(network)
    cut = network.cuts[0]
    together = vmap(lambda x: network.run(params, x[None], last=cut, buffers=buffers)[0])(x)
    alone = network.run(params, x, last=cut, buffers=buffers)
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("name", list(strangers.STRANGERS))
def test_the_fast_gradients_are_the_general_ones_with_their_derivatives(name: str) -> None:
    network = brought(name)
    params, _, buffers = prepared(network)
    # In double precision, so that a gradient of a gradient is held to more than its rounding.
    params, buffers = ({k: v.double() for k, v in d.items()} for d in (params, buffers))
    training = ObservedTraining(
        start=params, const={}, buffers=buffers, steps=1, batch=2, lr=0.1, mode="eval"
    )
    fast = layered_gradient(network, NoDefense(), training)
    knows = name in ("Residual", "Plain", "Tied")
    assert (fast is not None) == knows
    if fast is None:
        return
    x = torch.rand(3, 2, *network.shape, generator=generator(1, "x"), dtype=torch.float64)
    y = torch.eye(CLASSES, dtype=torch.float64)[torch.arange(6).view(3, 2) % CLASSES]
    x.requires_grad_()
    slopes = []
    for way in (fast, Simulated(network, NoDefense(), training)):
        found = way(x, y)
        assert set(found) == set(params)
        (slope,) = torch.autograd.grad(sum(g.pow(2).sum() for g in found.values()), x)
        slopes.append((found, slope))
    for known in params:
        assert torch.allclose(slopes[0][0][known], slopes[1][0][known], atol=1e-8), known
    assert torch.allclose(slopes[0][1], slopes[1][1], atol=1e-8)


def test_a_module_keeps_its_own_initial_parameters_drawn_from_the_seed() -> None:
    network, before = brought("Attentive"), torch.random.get_rng_state()
    one, again = (network.init(generator(0, "init")) for _ in range(2))
    other = network.init(generator(1, "init"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[n], again[n]) for n in one)
    positions = next(n for n in one if n.endswith("positions"))
    assert 0.05 < float(one[positions].std()) < 0.2  # 0.1, as the module itself says
    assert not torch.equal(one[positions], other[positions])
    assert not any(n.startswith(("frozen.weight", "frozen.bias")) for n in one)
    bounded = brought("Attentive", init=0.01).init(generator(0, "init"))
    assert float(bounded[positions].abs().max()) <= 0.01


REFUSED = {
    "dropping": r"draws random numbers in training \(1\), .* set without_dropout = true",
    "Cosine": "has no linear head: its logits must be the output of a torch.nn.Linear",
    "Probe": "passes no gradient from its samples to its logits",
    "Coded": r"reads columns 1 as codes .* so no attack can look for them",
    "scripted": "is or has a scripted or traced module",
    "spectral": "changes its buffer '3.parametrizations.weight.0._[uv]' in a training pass",
    "diverged": "gives logits that are not finite, as '1.weight' is not",
    "all_frozen": "has no parameter that is trained, so it sends nothing to attack",
    "narrow": r"must be made|logits of shape \[3, 5\], got \[3, 3\]",
    "Noisy": "draws random numbers in evaluation too",
    "TwoFaced": "gives something else in training than in evaluation",
    "failing": "cannot be made with num_classes=5: RuntimeError: no such weights",
    "number": "must give a torch.nn.Module, got int",
    "shared": "must be a class or function that makes a torch.nn.Module, got Linear",
    "Residul": "Unknown class or function 'Residul' in .*Did you mean 'Residual'",
    "a-b": "a model of a file is FILE.py:NAME",
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_used_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        brought(name, shape=(7,) if name == "Coded" else None)


def test_dropout_is_left_out_where_the_suite_says_so() -> None:
    network = brought("dropping", without_dropout=True)
    params, x, _ = prepared(network)
    still, training = (network.apply(params, x, mode=mode) for mode in ("eval", "train"))
    assert torch.equal(still, training)
    with pytest.raises(UserError, match="must be true or false, got 'yes'"):
        brought("dropping", without_dropout="yes")


def test_samples_are_standardised_before_a_module_that_expects_it() -> None:
    plain = brought("Residual")
    scaled = brought("Residual", mean=[0.4, 0.5], std=0.25)
    params, x, _ = prepared(plain)
    by_hand = (x - torch.tensor([0.4, 0.5]).view(2, 1, 1)) / 0.25
    expected = plain.apply(params, by_hand, mode="train")
    assert torch.allclose(scaled.apply(params, x, mode="train"), expected, atol=1e-5)
    for wrong in ({"mean": 0.5}, {"mean": [0.5], "std": 1.0}, {"mean": 0.5, "std": 0}):
        with pytest.raises(UserError, match=r"mean and std of model .* must be given together"):
            brought("Residual", **wrong)


def test_a_module_that_clients_cannot_run_together_is_refused_before_a_run() -> None:
    with pytest.raises(UserError, match=r"not for several clients at once by torch.func.vmap"):
        brought("Rounded").check()


def test_wrong_settings_shapes_and_files_get_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown setting of .*'widht'.*Did you mean 'width'"):
        brought("Residual", widht=3)
    with pytest.raises(UserError, match=r"cannot take samples of shape \[7\]"):
        brought("Residual", shape=(7,), in_channels=3)
    with pytest.raises(UserError, match=r"no such file: missing\.py"):
        build("missing.py:Net", shape=(1, 16, 16), classes=2)
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    with pytest.raises(UserError, match="cannot be loaded: ModuleNotFoundError"):
        build(f"{broken}:Net", shape=(1, 16, 16), classes=2)
    with pytest.raises(UserError, match=r"Unknown model 'lenett'\. Did you mean 'lenet'"):
        build("lenett", shape=(1, 16, 16), classes=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "code", "told"),
    [
        ("Residual", ["--set", "width=2"], 0,
         ["layer1/0", "cut in two it gives the same logits"]),
        ("Attentive", [], 0, ["clients' gradients, taken together, are those of the module"]),
        ("Residual", ["--dataset", "breast_cancer", "--set", "in_channels=3"], 1,
         ["cannot take samples of shape [30]"]),
    ],
)  # fmt: skip
def test_check_tells_of_a_model_what_it_can_and_cannot(
    name: str, more: list[str], code: int, told: list[str]
) -> None:
    checked = CliRunner().invoke(app, ["check", f"{FILE}:{name}", *more])
    assert checked.exit_code == code
    text = " ".join(checked.output.split())
    assert all(one in text for one in told), text


@pytest.mark.parametrize(
    ("name", "settings", "more", "reason"),
    [
        ("Rounded", {}, {}, "not for several clients at once"),
        ("Residual", {"in_channels": 3}, {"dataset": "breast_cancer"},
         "cannot take samples of shape [30]"),
    ],
)  # fmt: skip
def test_check_reports_a_model_that_cannot_be_used(
    name: str, settings: dict[str, Any], more: dict[str, str], reason: str
) -> None:
    (conformance,) = check_plugins(f"{FILE}:{name}", settings, **more)
    assert not conformance.passed
    assert reason in " ".join(finding.reason for finding in conformance.findings)


def test_a_data_set_is_for_checking_models_alone() -> None:
    with pytest.raises(UserError, match="--dataset is for models; 'none' is a defense"):
        list(check_plugins("none", {}, dataset="digits"))


def test_check_notices_cuts_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = ModuleNetwork._segment

    def leaking(self: ModuleNetwork, *args: Any) -> Tensor:
        return cut(self, *args) + (0.1 if args[3] else 0.0)

    monkeypatch.setattr(ModuleNetwork, "_segment", leaking)
    (found,) = check_plugins(f"{FILE}:Residual", {"width": 2}, dataset="digits")
    assert "cut in two it gives the same logits" in [
        f.name for f in found.findings if f.status == "failed"
    ]


def test_layers_whose_products_are_not_their_gradients_go_the_general_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ModuleNetwork.trace

    def wrong(self: ModuleNetwork, *args: Any, **more: Any) -> Any:
        logits, layers = right(self, *args, **more)
        return logits, [replace(layer, input=2 * layer.input) for layer in layers]

    monkeypatch.setattr(ModuleNetwork, "trace", wrong)
    assert list(brought("Plain")._layers()) == []


def test_models_of_libraries_are_found_by_name() -> None:
    network = build("torchvision:resnet18", shape=(3, 32, 32), classes=CLASSES)
    assert {"layer1/0", "layer1", "layer4"} <= set(network.cuts)
    assert network.n_parameters == 11_176_512 + CLASSES * 513
    small = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    network = build("timm:vit_tiny_patch16_224", shape=(1, 16, 16), classes=CLASSES, settings=small)
    assert {"blocks/0", "blocks"} <= set(network.cuts)
    network.check()
    for name, sentence in {
        "torchvision:resnet19": "Did you mean 'resnet1",
        "timm:vit_tinny": "Unknown model of timm 'vit_tinny'. Nearest: ",
        "torchvision:resnet18": r"takes images of 3 channels, got samples of shape \[1, 16, 16\]",
    }.items():
        with pytest.raises(UserError, match=sentence):
            build(name, shape=(1, 16, 16), classes=2)


def test_an_installed_package_brings_models_without_a_change_of_leakbench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "nets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[leakbench.models]\nflat_net = their_nets:flat\nlost_net = their_nets:lost\n"
    )
    source = tmp_path / "their_nets.py"
    source.write_text(
        "from torch import nn\n"
        "def flat(num_classes, in_features):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    network = build("flat_net", shape=(1, 16, 16), classes=CLASSES)
    assert network.stages == ("0", "head")
    with pytest.raises(UserError, match=r"model lost_net \(their_nets:lost of nets\) is broken"):
        build("lost_net", shape=(1, 16, 16), classes=CLASSES)
    before = Code(discover()).model("flat_net")
    source.write_text(f"# of another day\n{source.read_text()}")
    assert Code(discover()).model("flat_net") == before
    source.write_text(source.read_text().replace("nn.Flatten(), ", "nn.Flatten(), nn.Tanh(), "))
    assert Code(discover()).model("flat_net") != before != ""
    sys.modules.pop("their_nets", None)


def test_the_code_of_a_file_decides_the_keys_of_its_trainings(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(FILE.read_text())
    suite = TINY | {"tasks": [{"dataset": "digits", "model": f"{file}:Residual"}]}

    def key() -> str:
        plan, keys = plan_suite(Suite.model_validate(suite), {}, Environment())
        return keys.train(plan.trainings[0])

    before = key()
    file.write_text(f"# a comment\n{file.read_text()}")
    assert key() == before
    file.write_text(file.read_text().replace("F.relu(out, inplace=True)", "torch.tanh(out)"))
    assert key() != before


@pytest.mark.slow
def test_every_attack_runs_on_a_users_module_whole_and_cut(tmp_path: Path) -> None:
    names = discover().names("attack")
    cut = {"name": "splitfed", "cut": "layer1.0", "local_steps": 1}
    task = TINY["tasks"][0]
    suite = TINY | {
        "tasks": [task, task | {"protocol": cut}],
        "attacks": [{"name": n, "tasks": [0, 1] if n in CUT else [0]} for n in names],
    }
    results = bench.run(suite, out=tmp_path, jobs=0, progress=False)
    assert results.failures == []
    whole, split = results.rows
    done = {n for r in (whole, split) for n, a in r["attacks"].items() if a["status"] == "done"}
    linear = {"analytic", "cocktail_party", "spear", "tabular"}  # read a first linear layer
    assert done == set(names) - linear
    assert all(split["attacks"][name]["status"] == "done" for name in CUT)
    assert "does not begin with a linear layer" in whole["attacks"]["analytic"]["reason"]
    assert split["protocol_settings"]["cut"] == "layer1.0"


def test_the_python_api_takes_a_module_with_the_parameters_that_it_has(tmp_path: Path) -> None:
    module = strangers.Residual(in_channels=1, width=2)
    with torch.no_grad():
        module.linear.bias.fill_(0.25)
    results = bench.run(TINY, model=module, out=tmp_path, progress=False)
    assert results.failures == []
    name = results.rows[0]["model"]
    assert name.startswith("handed:Residual-")
    params = build(name, shape=(1, 16, 16), classes=10).init(generator(3, "init"))
    assert bool((params["head.bias"] == 0.25).all())
    suite = Suite.model_validate(TINY | {"tasks": [{"dataset": "digits", "model": name}]})
    plan, _ = plan_suite(suite, {}, Environment())
    with pytest.raises(UserError, match="held by this process alone"):
        local(plan, Environment(), workers=2)
    assert hand(nn.Linear(2, 2)) != hand(nn.Linear(2, 2))
    with pytest.raises(UserError, match="was handed to another process"):
        build("handed:Net-000000000000", shape=(1, 16, 16), classes=2)


@pytest.mark.parametrize(
    ("train", "sent"),
    [
        ("all", {"body/1.weight", "body/1.bias", "body/3.weight", "body/3.bias"}),
        ("head", set()),
        ("adapters", {"body/1.a", "body/1.b", "body/3.a", "body/3.b"}),
    ],
)
def test_of_a_network_trained_in_part_only_that_part_is_sent_and_attacked(
    tmp_path: Path, digits: Dataset, train: str, sent: set[str]
) -> None:
    """A run's bytes are those of the trained values, and its attack rebuilds from these alone."""
    file = Path(parameter_efficient.__file__).relative_to(Path.cwd())
    model = {"model": f"{file}:Perceptron", "model_settings": {"train": train, "rank": 2}}
    fedavg = {"name": "fedavg", "clients": 3, "rounds": 2, "local_steps": 2, "lr": 0.5}
    suite = TINY | {
        "protocol": fedavg,
        "tasks": [{"dataset": "digits", **model}],
        "attacks": [{"name": "idlg"}, {"name": "ilrg"}],
    }
    results = bench.run(suite, out=tmp_path, jobs=0, progress=False)
    assert results.failures == []
    network = build(model["model"], shape=(1, 16, 16), classes=10,
                    settings=model["model_settings"])  # fmt: skip
    assert isinstance(network, ModuleNetwork)
    seen, truth = seen_under(digits, network, NoDefense(), clients=2)
    uploads = [m for m in seen.messages if m.kind in UPLOAD_KINDS]
    trained = sent | {"head.weight", "head.bias"}
    assert all(set(m.parts) == trained for m in uploads)
    assert results.rows[0]["bytes_up"] == 3 * uploads[0].n_bytes
    evidence = evidence_for(seen, context_for(digits, network, NoDefense()), dtype=torch.float64)
    assert evidence.uploads is not None
    assert set(evidence.uploads.names) == trained
    missed = evidence.uploads.misfit(truth.x.double(), one_hot(truth), torch.arange(2))
    assert float(missed.detach().max()) < 1e-9
