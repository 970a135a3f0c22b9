"""An exported view, opened: an `nn.Module` that any outside tool can use."""

import copy
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import bench
from bench import models
from bench.capturing.attacking import read_views
from bench.errors import UserError
from bench.harness.environment import Environment
from bench.outside.exports import NetworkModule, OpenExport, export
from bench.results import Results
from tests.test_fuzz import places

HERE = Environment()
SUITE: dict[str, Any] = {
    "name": "opened",
    "version": 1,
    "checkpoints": ["final"],
    "budget": 1,
    "audit": 0,
    "protocol": {
        "name": "fedavg", "clients": 2, "rounds": 2, "local_steps": 1, "batch": 8, "lr": 0.1,
    },
    "tasks": [
        {"dataset": "digits", "model": "resnet18", "model_settings": {"width": 4}},
        {"dataset": "digits", "model": "mlp_spm"},
    ],
    "threats": [
        {"name": "eval", "victims": 1, "rounds": 3},
        {"name": "train", "victims": 1, "batch": 4, "rounds": 2, "mode": "train"},
    ],
    "defenses": [{"name": "none"}],
    "attacks": [{"name": "prior_only"}, {"name": "prior_only", "threat": "train"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A network with normalisation and one without, seen in several rounds of a run."""
    return bench.run(SUITE, out=tmp_path_factory.mktemp("opened") / "run", jobs=0, progress=False)


def opened(results: Results, cell: str, out: Path) -> OpenExport:
    export(results.folder, cell, out, HERE)
    return bench.open_export(out)


@pytest.mark.parametrize("threat", ["eval", "train"])
@pytest.mark.parametrize("model", ["resnet18", "mlp_spm"])
def test_the_module_gives_the_networks_logits_in_every_observed_round(
    results: Results, tmp_path: Path, model: str, threat: str
) -> None:
    found = opened(results, f"{model}/{threat}", tmp_path / "seen")
    about, x = found.seen.network, found.public_x[:5]
    network = models.build(
        about["name"],
        shape=tuple(about["shape"]),
        classes=about["classes"],
        settings=about["settings"],
    )
    assert len(found.earlier) == len(found.seen.earlier) == {"eval": 2, "train": 1}[threat]
    modules = (*found.earlier, found.module)
    for module, seen in zip(modules, found.seen.releases, strict=True):
        assert module.training == (threat == "train")
        for mode in ("train", "eval"):
            logits = module.train(mode == "train")(x)
            wanted = network.apply(seen.before, x, mode=mode, buffers=seen.buffers)
            assert torch.equal(logits, wanted)
        assert list(dict(module.named_parameters())) == list(seen.before)
        assert dict(module.named_buffers()).keys() == seen.buffers.keys()
        state = module.state_dict()
        assert all(torch.equal(state[n], v) for n, v in {**seen.before, **seen.buffers}.items())
    assert bool(found.seen.buffers) == (model == "resnet18")
    first, last = found.earlier[0](x), found.module(x)
    assert not torch.allclose(first, last)  # the rounds are of one run, which trained in between


def test_outside_tools_can_use_the_module_as_any_other(results: Results, tmp_path: Path) -> None:
    found = opened(results, "resnet18/eval", tmp_path / "seen")
    module, x, y = found.module, found.public_x[:3], found.public_y[:3]
    names, values = zip(*module.named_parameters(), strict=True)
    plain = torch.autograd.grad(cross_entropy(module(x), y), values)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(module, weights, (x[None],)), y[None])

    weights = {n: v.detach() for n, v in module.named_parameters()}
    each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    for name, value in zip(names, plain, strict=True):
        torch.testing.assert_close(each[name].mean(dim=0), value, atol=1e-5, rtol=1e-4)
    double = copy.deepcopy(module).double()
    torch.testing.assert_close(double(x.double()).float(), module(x), atol=1e-5, rtol=1e-4)
    zeros = functional_call(module, {n: torch.zeros_like(v) for n, v in weights.items()}, (x,))
    assert not zeros.any()
    assert module(x).any()
    candidate = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(module(candidate), y), candidate)
    assert slope.any()
    trained = torch.optim.SGD(module.parameters(), lr=1e-4)
    before = cross_entropy(module(x), y).item()
    cross_entropy(module(x), y).backward()
    trained.step()
    assert cross_entropy(module(x), y).item() < before


def test_a_federated_gradient_of_the_victim_is_the_modules_own(
    results: Results, tmp_path: Path
) -> None:
    """The loss of the true samples under the module has the gradient that the victim sent."""
    found = opened(results, "resnet18/train", tmp_path / "seen")
    from bench.harness.store import Store
    from bench.protocols.export import load_truth
    from bench.records import Run
    from bench.report.choosing import find

    cell = find(Run.read(results.folder).cells, "resnet18/train")
    folder = Store(results.folder).artifacts(cell.train_key)
    truth = load_truth(folder / "final-train-truth.safetensors")
    module, lr = found.module, found.seen.known["lr"]
    loss = cross_entropy(module(truth.x[0]), truth.y[0])
    slopes = torch.autograd.grad(loss, tuple(module.parameters()))
    (message,) = found.seen.of(found.seen.clients[0], "update")
    for (name, _), slope in zip(module.named_parameters(), slopes, strict=True):
        sent = message.parts[name].values
        torch.testing.assert_close(sent, -lr * slope, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_under_masks_the_module_has_the_mean_weights(tmp_path: Path) -> None:
    """Where the clients train scores: the normalisation statistics that are broadcast are those of
    the module's own weights."""
    suite = SUITE | {
        "protocol": {
            "name": "splitfed", "cut": "layer1", "labels": "shared", "clients": 2, "rounds": 2,
            "local_steps": 1, "batch": 8, "lr": 0.1,
        },
        "tasks": SUITE["tasks"][:1],
        "threats": SUITE["threats"][:1],
        "attacks": SUITE["attacks"][:1],
        "defenses": [{"name": "pm_sfl"}],
    }  # fmt: skip
    results = bench.run(suite, out=tmp_path / "run", jobs=0, progress=False)
    found = opened(results, "resnet18/pm_sfl", tmp_path / "seen")
    weights = dict(found.module.named_parameters())
    assert any(not torch.equal(weights[n], v) for n, v in found.seen.before.items())
    about = found.seen.network
    network = models.build("resnet18", shape=tuple(about["shape"]), classes=about["classes"],
                           settings=about["settings"])  # fmt: skip
    for name, value in network.calibrate(weights, found.public_x).items():
        torch.testing.assert_close(found.seen.buffers[name], value)


def test_what_is_no_export_gets_one_sentence(results: Results, tmp_path: Path) -> None:
    opened(results, "mlp_spm/train", tmp_path / "seen")
    for name in ("seen", "seen.json", "seen.safetensors"):
        assert isinstance(bench.open_export(str(tmp_path / name)).module, NetworkModule)
    for name in ("other", "", ".json", "seen-public"):
        with pytest.raises(ValueError, match="is no complete export"):
            bench.open_export(tmp_path / name)
    text = (tmp_path / "seen.json").read_text()
    (tmp_path / "seen.json").write_text(text.replace('"name": "none"', '"name": "nones"'))
    with pytest.raises(ValueError, match="Did you mean 'none'"):
        bench.open_export(tmp_path / "seen")
    (tmp_path / "seen.json").write_text(text)
    (tmp_path / "seen-public.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no public samples"):
        bench.open_export(tmp_path / "seen")
    shutil.copy(tmp_path / "seen.safetensors", tmp_path / "seen-public.safetensors")
    with pytest.raises(ValueError, match="holds no public samples"):
        bench.open_export(tmp_path / "seen")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": 10}, "labels beyond 0..9"),
        ({"y": -1}, "labels beyond 0..9"),
        ({"x": 8}, "which the network's samples"),
        ({"first": 1}, r"which are not x \[N, ...\] with y \[N\], N >= 2"),
        ({"nan": 1}, "expected finite numbers in float32"),
        ({"double": 1}, r"holds samples torch\.float64; expected"),
        ({"float8": 1}, r"'x' as torch\.float8_e4m3fn, which is not read"),
    ],
)
def test_public_samples_of_another_network_are_refused(
    results: Results, tmp_path: Path, changed: dict[str, int], message: str
) -> None:
    out = tmp_path / "seen"
    export(results.folder, "mlp_spm/eval", out, HERE)
    (place,) = tmp_path.glob("*public*")
    public = load_file(place)
    ((how, value),) = changed.items()
    if how == "y":
        public["y"][3] = value
    elif how == "first":
        public = {name: one[:value] for name, one in public.items()}
    elif how == "nan":
        public["x"][value] = float("nan")
    elif how == "x":
        public["x"] = public["x"][..., :value].contiguous()
    else:
        types = {"double": torch.float64, "float8": torch.float8_e4m3fn}
        public["x"] = public["x"].to(types[how])
    save_file(public, place)
    with pytest.raises(UserError, match=message):
        bench.open_export(out)


@pytest.mark.parametrize(
    ("of", "name", "value", "told"),
    [
        ("network", "shape", ["16", 16], "'network.shape.0'.*got '16'"),
        ("network", "classes", True, "'network.classes'.*got True"),
        ("network", "settings", ".", "'network.settings'.*got '.'"),
        ("known", "batch", "x", "'known.batch'.*got 'x'"),
        ("known", "local_steps", 0, "'known.local_steps'.*greater than or equal to 1, got 0"),
        ("known", "samples", 1.5, "'known.samples'.*got 1.5"),
        ("known", "local_steps", 10**9, "'known.local_steps'.*less than or equal to 10000, got"),
        ("known", "samples", 10**7, "10000000 samples are more than local_steps 1 of batch 1 use"),
        ("known", "summed", 2, "a batch of 1 is no sum over 2 clients"),
        ("known", "truth_labels", [[10]], r"truth_labels' has labels beyond 0\.\.9"),
        ("known", "truth_labels", [[1, 2]], "truth_labels' has not 1 labels of each client"),
        ("known", "lr", float("nan"), "'known.lr'.*got nan"),
        ("known", "lr", 0, "'known.lr'.*greater than 0, got 0"),
        ("network", "shape", [10**9, 10**9], "would take .* GB, but this machine has"),
        ("known", "mode", "test", "'known.mode'.*got 'test'"),
        ("known", "defense", {"name": "none", "settings": "."}, "'known.defense.settings'"),
        ("known", "mechanisms", [{"kind": "GaussianNoise", "of": "update"}], "'known.mechanisms"),
        ("", "network", True, "'network'.*got True"),
        ("", "clients", ["client-0", "nobody"], "no message of client nobody"),
        ("", "categorical", [[1]], "'categorical.0"),
    ],
)
def test_a_view_whose_facts_cannot_be_is_refused(
    results: Results, tmp_path: Path, of: str, name: str, value: Any, told: str
) -> None:
    export(results.folder, "mlp_spm/eval", tmp_path / "seen", HERE)
    (place,) = (p for p in tmp_path.glob("*.json") if "earlier" not in p.name)
    text = json.loads(place.read_text())
    (text[of] if of else text)[name] = value
    place.write_text(json.dumps(text))
    with pytest.raises(UserError, match=rf"seen\.json: .*{told}"):
        bench.open_export(tmp_path / "seen")


def test_uploads_of_what_was_not_broadcast_are_refused(results: Results, tmp_path: Path) -> None:
    export(results.folder, "mlp_spm/eval", tmp_path / "seen", HERE)
    place = tmp_path / "seen.json"
    text = json.loads(place.read_text())
    for message in text["messages"]:
        parts = message["parts"]
        message["parts"] = {f"{name}x": part for name, part in parts.items()}
    place.write_text(json.dumps(text))
    with pytest.raises(UserError, match="which is no variable of that shape"):
        bench.open_export(tmp_path / "seen")


def test_a_view_with_values_that_are_not_finite_is_not_attacked(
    results: Results, tmp_path: Path
) -> None:
    export(results.folder, "mlp_spm/eval", tmp_path / "seen", HERE)
    place = tmp_path / "seen.safetensors"
    tensors = load_file(place)
    name = next(n for n in tensors if n.startswith("m0/"))
    tensors[name].flatten()[3] = float("nan")
    save_file(tensors, place)
    with pytest.raises(UserError, match=r"holds values of the update of client-0, .*not finite"):
        read_views([tmp_path / "seen"])


def changes(folder: Path, draws: random.Random) -> list[object]:
    """Change one or two fields or tensors in the files of a view; what was changed."""
    values = [0, -1, 3, 10**6, 10**9, 10**400, 0.5, 1e-300, 1e308, float("nan"), float("inf"), "",
              "x", "none", "client-0", None, True, [], {}, [1], ["x"], [[0]]]  # fmt: skip
    types = [torch.float64, torch.float16, torch.int64, torch.complex64, torch.float8_e4m3fn]
    made: list[object] = []
    for _ in range(draws.choice((1, 1, 2))):
        if draws.random() < 0.6:
            path = draws.choice(sorted(folder.glob("*.json")))
            text = json.loads(path.read_text())
            *way, key = draws.choice(list(places(text)))
            room = text
            for step in way:
                room = room[step]
            room[key] = draws.choice(values)
            made.append((path.name, way, key, room[key]))
            path.write_text(json.dumps(text))
        else:
            path = draws.choice(sorted(folder.glob("*.safetensors")))
            tensors = load_file(path)
            name = draws.choice(sorted(tensors))
            one = tensors[name]
            other = [one[:0] if one.ndim else one, one.flatten()[:1], torch.stack([one, one]),
                     one.float() * float("nan"), one.to(draws.choice(types))]  # fmt: skip
            tensors[name] = draws.choice(other).contiguous()
            made.append((path.name, name, tensors[name].shape, tensors[name].dtype))
            save_file(tensors, path)
    return made


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_changed_views_are_views_or_a_sentence(
    results: Results, tmp_path: Path, count: int
) -> None:
    whole = {cell: tmp_path / cell.replace("/", "-") for cell in ("mlp_spm/eval", "resnet18/train")}
    for cell, folder in whole.items():
        export(results.folder, cell, folder / "seen", HERE)
    refused, slowest, told = 0, 0.0, set[str]()
    for seed in range(count):
        draws = random.Random(seed)
        place = tmp_path / "changed"
        shutil.copytree(draws.choice(list(whole.values())), place)
        made = changes(place, draws)
        for read in (bench.open_export, lambda path: read_views([path])):
            began = time.monotonic()
            try:
                read(place / "seen")
            except UserError as error:
                refused += 1
                told.add(str(error)[-1])
            except Exception as error:
                raise AssertionError(f"seed {seed}: {made}") from error
            slowest = max(slowest, time.monotonic() - began)
        shutil.rmtree(place)
    assert 0.6 * count < refused < 2 * count
    assert told <= {".", "?"}
    assert slowest < 20
