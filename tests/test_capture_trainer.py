"""Steps of the Trainer of Hugging Face's transformers, captured and attacked."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import bench
from bench import models
from bench.capturing.attacking import leak_of
from bench.capturing.trainer import Logits, capture_step
from bench.errors import UserError
from bench.protocols.export import load_seen, load_truth

transformers = pytest.importorskip("transformers", reason="needs leakbench[trainer]")


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    raw = load_digits()
    small = torch.tensor(raw.images / 16, dtype=torch.float32)[:, None]
    return interpolate(small, size=16), torch.tensor(raw.target)


def vit(**more: Any) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        **more,
    )
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    )
    torch.manual_seed(0)
    return transformers.ResNetForImageClassification(config)


class Watched(transformers.Trainer):
    """Keeps what every step began with and was given."""

    steps: list[tuple[nn.Module, dict[str, Tensor]]]

    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        self.steps.append((deepcopy(model), dict(inputs)))
        return super().training_step(model, inputs, *args)


def trained(
    place: Path,
    model: nn.Module,
    *callbacks: Any,
    trainer: Callable[..., Any] = Watched,
    label: Callable[[Tensor], Any] = int,
    **settings: Any,
) -> Any:
    """A training of 3 steps on 2 digits each."""
    x, y = digits()
    rows = [{"pixel_values": a, "labels": label(b)} for a, b in zip(x[:40], y[:40], strict=True)]
    chosen = {"per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 0.01, **settings}
    args = transformers.TrainingArguments(
        output_dir=str(place),
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **chosen,
    )
    made = trainer(model=model, args=args, train_dataset=rows, callbacks=list(callbacks))
    made.steps = []
    made.train()
    return made


def public() -> tuple[Tensor, Tensor]:
    x, y = digits()
    return x[1000:1300], y[1000:1300]


@pytest.mark.parametrize("make", [vit, resnet])
@pytest.mark.parametrize("norm", [0.0, 0.5])
def test_the_gradient_of_the_step_is_captured_with_its_batch_as_the_optimizer_gets_it(
    tmp_path: Path, make: Callable[[], nn.Module], norm: float
) -> None:
    callback = capture_step(tmp_path / "seen", step=1, public=public())
    run = trained(tmp_path, make(), callback, max_grad_norm=norm)
    model, batch = run.steps[1]
    assert not run.model._forward_pre_hooks

    cross_entropy(model(batch["pixel_values"]).logits, batch["labels"]).backward()
    slopes = dict(model.named_parameters())
    length = torch.stack([p.grad.norm() for p in slopes.values()]).norm()
    assert length > 0.5  # so that the clip does something
    factor = norm / length if norm else 1.0

    seen = load_seen(tmp_path / "seen")
    network = models.build(models.hand(Logits(model)), shape=(1, 16, 16), classes=10)
    names = network.anatomy.parameters
    sent = seen.messages[0].parts
    assert seen.messages[0].kind == "gradient"
    assert names.keys() == sent.keys() == seen.before.keys()
    assert len(sent) == len(slopes)
    for known, inner in names.items():
        own = slopes[inner.removeprefix("model.")]
        torch.testing.assert_close(seen.before[known], own.detach(), rtol=0, atol=0)
        torch.testing.assert_close(sent[known].values, factor * own.grad, rtol=1e-4, atol=1e-6)

    truth = load_truth(tmp_path / "seen-truth.safetensors")
    torch.testing.assert_close(truth.x[0], batch["pixel_values"])
    assert truth.y.tolist() == [batch["labels"].tolist()]


@pytest.mark.parametrize("lr", [None, 0.1])
def test_the_attacker_knows_to_which_norm_the_trainer_clips(
    tmp_path: Path, lr: float | None
) -> None:
    callback = capture_step(tmp_path / "seen", public=public(), lr=lr)
    trained(tmp_path, vit(), callback, max_steps=1)  # clips to 1 by default
    known = load_seen(tmp_path / "seen").known
    clip, noise = known["mechanisms"]
    assert (clip["kind"], clip["of"], clip["norm"]) == ("Clip", "update", lr or 1.0)
    assert noise["std"] == 0

    callback = capture_step(tmp_path / "open", public=public())
    trained(tmp_path, vit(), callback, max_steps=1, max_grad_norm=0)
    assert load_seen(tmp_path / "open").known["mechanisms"] == []


@pytest.mark.parametrize(("make", "norm", "least"), [(vit, 1.0, 0.4), (resnet, 0.0, 0.1)])
def test_what_was_captured_can_be_attacked(
    tmp_path: Path, make: Callable[[], nn.Module], norm: float, least: float
) -> None:
    callback = capture_step(tmp_path / "seen", public=public())
    trained(tmp_path, make(), callback, max_steps=1, max_grad_norm=norm)
    model = Logits(make())
    counts, images = bench.attack(tmp_path / "seen", "ilrg", "idlg", model=model, budget=40)
    assert counts.means()["lnacc"] == 1
    assert images.means()["label_accuracy"] == 1
    assert (leak_of(images) or 0) >= least


def test_a_training_is_the_same_whether_it_is_captured_or_not(tmp_path: Path) -> None:
    ends = [
        trained(tmp_path, vit(hidden_dropout_prob=0.1), *callbacks).model.state_dict()
        for callbacks in ([], [capture_step(tmp_path / "seen", step=1, public=public())])
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class Twice(transformers.Trainer):
    """Runs the model a second time in each step."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **more: Any) -> Any:
        model(**inputs)
        return super().compute_loss(model, inputs, *args, **more)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gradient_accumulation_steps": 2}, "got gradient_accumulation_steps=2"),
        ({"bf16": True}, "training in float32.*precision 'bf16' and weights of torch.float32"),
        ({"label_smoothing_factor": 0.1}, "gets pixel_values and labels.*it got pixel_values;"),
        ({"trainer": Twice}, "called 2 times"),
        ({"label": lambda y: torch.eye(10)[y]}, r"int64 \[K\], got torch.float32 \[2, 10\]"),
        ({"label": lambda y: -100}, r"one class >= 0.*from -100"),
    ],
)
def test_a_training_whose_gradient_would_be_another_one_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        trained(tmp_path, vit(), capture_step(tmp_path / "seen", public=public()), **settings)
    assert not list(tmp_path.glob("seen*"))


def test_weights_in_half_precision_are_refused(tmp_path: Path) -> None:
    callback = capture_step(tmp_path / "seen", public=public())
    with pytest.raises(UserError, match=r"weights of torch\.bfloat16"):
        trained(tmp_path, vit().to(torch.bfloat16), callback)


@pytest.mark.parametrize("devices", [{"world_size": 2, "n_gpu": 1}, {"world_size": 1, "n_gpu": 2}])
def test_several_devices_are_refused(tmp_path: Path, devices: dict[str, int]) -> None:
    callback: Any = capture_step(tmp_path / "seen", public=public())
    args = SimpleNamespace(gradient_accumulation_steps=1, **devices)
    with pytest.raises(UserError, match=r"on one device, got 2; CUDA_VISIBLE_DEVICES=0"):
        callback.on_train_begin(args, None, None, model=vit())


def test_a_defense_beside_the_trainers_own_clip_is_refused(tmp_path: Path) -> None:
    settings = {"noise_multiplier": 0.1, "clip_norm": 1.0}
    callback = capture_step(tmp_path / "seen", public=public(), defense="dp_sgd", settings=settings)
    with pytest.raises(UserError, match="give max_grad_norm=0 beside a defense"):
        trained(tmp_path, vit(), callback)
    trained(tmp_path, vit(), callback, max_grad_norm=0)
    assert load_seen(tmp_path / "seen").known["defense"]["name"] == "dp_sgd"


def test_a_step_that_never_comes_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ended after 3 steps, and step=3 is the one after 3"):
        trained(tmp_path, vit(), capture_step(tmp_path / "seen", step=3, public=public()))
    with pytest.raises(UserError, match="step must be >= 0"):
        capture_step(tmp_path / "seen", step=-1, public=public())
