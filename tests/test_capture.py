"""Rounds of one's own training loop are captured as they were, attacked and scored."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import bench
from attacks.engine.clients import ObservedTraining, Simulated
from bench.capturing.attacking import attack_view, choose_answers, leak_of, read_views
from bench.capturing.opacus import noised_by
from bench.capturing.recording import Capture, Noised
from bench.cli import app
from bench.contract.events import Gaussian
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.privacy.ledger import record_epsilon
from bench.protocols.export import load_seen, load_truth
from defenses.dp_sgd import DPSGD
from defenses.none import NoDefense
from tests import strangers

FILE = Path(strangers.__file__).relative_to(Path.cwd())
NAMED = f"{FILE}:Residual"


def residual(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return strangers.Residual(in_channels=1)


def flat(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.Sigmoid(), nn.Linear(32, 10))


@pytest.fixture(scope="module")
def public(digits: Dataset) -> tuple[Tensor, Tensor]:
    return digits.aux_x, digits.aux_y


@pytest.fixture(scope="module")
def private(digits: Dataset) -> tuple[Tensor, Tensor]:
    return digits.train_x[:8], digits.train_y[:8]


Samples = tuple[Tensor, Tensor]


def save_gradient(net: Any, samples: Samples, place: Path, **how: Any) -> Capture:
    """Capture the gradient of a network's loss on samples into the files of a view."""
    client = bench.capture(net, **how)
    cross_entropy(net(samples[0]), samples[1]).backward()
    client.gradient(*samples)
    client.save(place)
    return client


def test_a_gradient_is_captured_with_the_state_before_it(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = residual(), private
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    client = bench.capture(net, public=public, named=NAMED)
    cross_entropy(net(x), y).backward()
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    client.gradient(x, y)
    client.save(tmp_path / "seen")
    seen, truth = load_seen(tmp_path / "seen"), load_truth(tmp_path / "seen-truth.safetensors")
    (message,) = seen.messages
    own = dict(net.named_parameters())
    for known, inner in client.network.anatomy.parameters.items():
        assert torch.equal(seen.before[known], before[inner])
        assert torch.equal(message.parts[known].values, own[inner].grad)
    assert torch.equal(truth.x[0], x)
    assert torch.equal(truth.y[0], y)
    assert seen.known["mode"] == "train"
    # What the attacker simulates from the files alone is what was sent.
    found = client.network.run(seen.before, truth.x[0], mode="train")
    loss = cross_entropy(found, truth.y[0])
    assert torch.allclose(loss, cross_entropy(residual()(x), y))


def test_local_training_is_captured_by_where_it_ended(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = flat(), private
    client = bench.capture(net, public=public, lr=0.1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for some in torch.arange(8).split(3):  # the last step of an epoch has two samples
            sgd.zero_grad()
            cross_entropy(net(x[some]), y[some]).backward()
            sgd.step()
    client.weights(x, y, batch=3, local_epochs=2)
    client.save(tmp_path / "seen")
    seen = load_seen(tmp_path / "seen")
    assert seen.known["local_steps"] == 6
    assert seen.protocol == "fedavg"
    # The true samples in their order explain the upload: what an attack matches is what was done.
    work = ObservedTraining(
        start=seen.before, const={}, buffers={}, steps=6, batch=3, lr=0.1, mode="train"
    )
    targets = torch.eye(10)[y]
    found = Simulated(client.network, NoDefense(), work)(x[None], targets[None])
    for name, part in seen.messages[0].parts.items():
        sent = (seen.before[name] - part.values) / (0.1 * 6)
        assert torch.allclose(found[name][0], sent, atol=1e-5)


def test_running_statistics_are_what_evaluation_normalises_by(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = residual(), private
    net.train()(public[0][:64])
    net.eval()
    client = save_gradient(net, (x, y), tmp_path / "seen", public=public, named=NAMED)
    seen = load_seen(tmp_path / "seen")
    logits = client.network.apply(seen.before, x, mode="eval", buffers=seen.buffers)
    assert torch.allclose(logits, net(x), atol=1e-5)


def test_an_attack_rebuilds_the_samples_of_a_loop_that_is_not_ours(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    """Standardised samples too: what is rebuilt are the pixels."""
    net, (x, y) = flat(), private
    scaled, known = (x[:1] - 0.3) / 0.4, ((public[0] - 0.3) / 0.4, public[1])
    save_gradient(net, (scaled, y[:1]), tmp_path / "seen", public=known, mean=0.3, std=0.4)
    analytic, floor = bench.attack(tmp_path / "seen", "analytic", model=net), None
    assert analytic[0].means()["ssim"] > 0.99
    assert leak_of(analytic[0]) > 0.99  # type: ignore[operator]
    assert torch.allclose(load_truth(tmp_path / "seen-truth.safetensors").x[0], x[:1], atol=1e-6)
    (floor,) = bench.attack(tmp_path / "seen", "prior_only", model=net)
    assert leak_of(floor) < 0.5  # type: ignore[operator]
    assert choose_answers([analytic[0], floor]) == ["analytic"]


def test_clients_that_began_alike_are_attacked_together(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    x, y = private
    for number in range(3):
        net = flat(seed=number // 2)  # the third began elsewhere
        own, place = (x[[number]], y[[number]]), tmp_path / f"seen-{number}"
        save_gradient(net, own, place, public=public, client=f"client-{number}")
    files = [tmp_path / f"seen-{number}" for number in range(3)]
    # A handed model is named after its numbers, so the first two are of one name.
    views = read_views(files)
    assert [view.seen.clients for view in views] == [("client-0", "client-1"), ("client-2",)]
    found = bench.attack(files[:2], "analytic", model=flat())
    assert found[0].scores is not None
    assert min(found[0].scores.values["ssim"]) > 0.99


@pytest.fixture(scope="module")
def noised(
    public: Samples, private: Samples, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Any]:
    """A step of Opacus, captured."""
    net, (x, y) = flat(), private
    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    net, sgd, loader = engine.make_private(
        module=net, optimizer=sgd, data_loader=loader, noise_multiplier=0.5, max_grad_norm=0.1
    )
    client = bench.capture(net, public=public)
    some = torch.arange(6)  # a Poisson sample is rarely of the expected size
    cross_entropy(net(x[some]), y[some]).backward()
    sgd.step()
    client.gradient(x[some], y[some], noised=noised_by(sgd, engine.accountant))
    place = tmp_path_factory.mktemp("opacus") / "seen"
    client.save(place)
    return place, client, engine


def test_opacus_noise_is_the_mechanism_and_its_history_the_ledgers(
    noised: tuple[Path, Any, Any], private: Samples
) -> None:
    place, client, engine = noised
    seen = load_seen(place)
    assert seen.known["defense"] == {
        "name": "dp_sgd",
        "settings": {"noise_multiplier": 0.5, "clip_norm": 0.1},
    }
    (mechanism,) = seen.known["mechanisms"]
    assert mechanism["std"] == pytest.approx(0.5 * 0.1 / 6)
    # Less the mean of the clipped gradients, what was sent is the noise that the mechanism says.
    x, y = (v[:6] for v in private)
    work = ObservedTraining(
        start=seen.before, const={}, buffers={}, steps=1, batch=6, lr=1.0, mode="train"
    )
    defense = DPSGD(noise_multiplier=0.5, clip_norm=0.1)
    clean = Simulated(client.network, defense, work)(x[None], torch.eye(10)[y][None])
    sent = seen.messages[0].parts
    noise = torch.cat([(sent[n].values - clean[n][0]).flatten() for n in clean])
    # Of N values the deviation is known to 1 / sqrt(2 N): four of these.
    assert float(noise.std()) == pytest.approx(0.5 * 0.1 / 6, rel=4 / (2 * len(noise)) ** 0.5)
    told = json.loads(place.with_suffix(".json").read_text())["privacy"]
    assert told["eps_claimed"] == pytest.approx(engine.accountant.get_epsilon(1e-5))
    event = Gaussian(sensitivity=0.2, std=0.05, unit="record", count=1)
    assert told["eps_record"] == pytest.approx(record_epsilon([event], 1e-5))


def test_the_command_shows_scores_choice_and_epsilon(
    noised: tuple[Path, Any, Any], public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = residual(), private
    save_gradient(net, (x[:2], y[:2]), tmp_path / "seen", public=public, named=NAMED)
    asked = ["attack", str(tmp_path / "seen"), "--attack", "ilrg", "--attack", "split_label"]
    out = ["--out", str(tmp_path / "made")]
    shown = CliRunner().invoke(app, [*asked, *out])
    assert shown.exit_code == 0, shown.output
    assert "1 client, 2 samples each" not in shown.output
    assert "ilrg" in shown.output
    assert "split_label does not apply: " in shown.output
    assert (tmp_path / "made-ilrg.safetensors").is_file()
    told = CliRunner().invoke(app, [*asked, "--json"])
    (found,) = json.loads(told.stdout)
    assert found["attacks"][0]["values"]["lnacc"] == [1.0]
    lost = CliRunner().invoke(app, ["attack", str(noised[0]), "--attack", "ilrg"])
    assert lost.exit_code == 0, lost.output  # this process holds the model still
    assert "By the library's accountant: epsilon" in lost.output
    other = CliRunner().invoke(
        app, ["attack", str(tmp_path / "seen"), "--attack", "ilrg", "--model", f"{FILE}:Sensing"]
    )
    assert other.exit_code == 2
    assert "cannot be made" in other.output
    other = CliRunner().invoke(
        app, ["attack", str(tmp_path / "seen"), "--attack", "ilrg", "--model", f"{FILE}:Attentive"]
    )
    assert other.exit_code == 2
    assert "is not the one that was seen: its parameter" in " ".join(other.output.split())


@pytest.mark.slow
def test_the_pages_programs_run_as_they_stand(tmp_path: Path) -> None:
    text = (Path("docs") / "capture.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    for name, block in zip(("net.py", "plain.py", "private.py"), blocks, strict=False):
        (tmp_path / name).write_text(block)
    env = os.environ | {"PYTHONPATH": str(Path.cwd())}
    for name, shown in (
        ("plain.py", r"idlg +1\.000 "),
        ("private.py", r"By the library's accountant: epsilon 268 "),
    ):
        subprocess.run([sys.executable, name], cwd=tmp_path, env=env, check=True)
        command = [sys.executable, "-m", "bench.cli", "attack", "--attack", "idlg"]
        stem = {"plain.py": "seen", "private.py": "private"}[name]
        made = subprocess.run(
            [*command, stem], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
        )
        assert re.search(shown, made.stdout), made.stdout


def test_a_network_that_only_another_process_held_is_asked_for(
    public: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bench.capture(flat(), public=public, lr=0.1)
    client.weights(samples=2)
    client.save(tmp_path / "seen")
    monkeypatch.setattr("bench.models.named._handed", {})
    found = CliRunner().invoke(app, ["attack", str(tmp_path / "seen"), "--attack", "ilrg"])
    assert found.exit_code == 2
    assert "give --model FILE.py:Net" in " ".join(found.output.split())


def test_without_the_truth_nothing_is_scored(public: Samples, tmp_path: Path) -> None:
    net = flat()
    client = bench.capture(net, public=public, lr=0.1)
    client.weights(samples=2)
    client.save(tmp_path / "seen")
    (found,) = bench.attack(tmp_path / "seen", "prior_only", model=net)
    assert found.scores is None
    assert found.answer is not None
    assert found.means() == {}


def test_a_gradient_of_another_loss_is_warned_of(public: Samples, private: Samples) -> None:
    net, (x, y) = flat(), private
    client = bench.capture(net, public=public)
    (2 * cross_entropy(net(x), y)).backward()
    with pytest.warns(UserWarning, match=r"differ by 100% of its length.* 2 times as long"):
        client.gradient(x, y)
    # The same under a clip that is told; the clipped gradient itself is explained.
    clip = Noised("gaussian", {"noise_multiplier": 0.0, "clip_norm": 0.1})
    net.zero_grad()
    cross_entropy(net(x), y, label_smoothing=0.5).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    with pytest.warns(UserWarning, match="is not what the told training makes of these samples"):
        client.gradient(x, y, noised=clip)
    net.zero_grad()
    cross_entropy(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    client.gradient(x, y, noised=clip)


SGD = torch.optim.SGD
TRAININGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "plain in batches": ({"batch": 3, "epochs": 4}, None),
    "momentum": ({"momentum": 0.9, "batch": 4, "epochs": 3}, "momentum"),
    "adam": ({"make": torch.optim.Adam, "lr": 0.01}, "as by Adam"),
    "decay": ({"weight_decay": 0.5}, "as of weight decay"),
    "proximal": ({"near": 3.0, "epochs": 6}, "a proximal term"),
    "clip": ({"clip": 0.1}, r"0\.\d+ times as long .* a clip"),
    "schedule": ({"decays": 0.3, "batch": 4, "epochs": 4}, "another learning rate"),
    "other rate": ({"told": 1.0}, "0.1 times as long"),
    "head alone": ({"only": "3."}, r"'1.weight' and 1 others did not move"),
    "nothing": ({"only": "none"}, "Nothing moved"),
}


@pytest.mark.parametrize("name", list(TRAININGS))
def test_a_training_that_attacks_do_not_simulate_is_warned_of(
    name: str, public: Samples, private: Samples, tmp_path: Path
) -> None:
    """Several epochs in random orders are explained, whatever the order was."""
    (x, y), (more, cause) = private, TRAININGS[name]
    asked = {"make": SGD, "lr": 0.1, "batch": 8, "epochs": 1, **more}
    net, rng = flat(), torch.Generator().manual_seed(3)
    begin = [p.detach().clone() for p in net.parameters()]
    client = bench.capture(net, public=public, lr=asked.get("told", asked["lr"]))
    trained = [p for n, p in net.named_parameters() if n.startswith(asked.get("only", ""))]
    options = {n: asked[n] for n in ("momentum", "weight_decay") if n in asked}
    steps = asked["make"](trained or [torch.zeros(1)], lr=asked["lr"], **options)
    for epoch in range(asked["epochs"]):
        for group in steps.param_groups:
            group["lr"] = asked["lr"] * asked.get("decays", 1.0) ** epoch
        for some in torch.randperm(8, generator=rng).split(asked["batch"]):
            net.zero_grad()
            near = sum((p - b).square().sum() for p, b in zip(net.parameters(), begin, strict=True))
            (cross_entropy(net(x[some]), y[some]) + asked.get("near", 0.0) / 2 * near).backward()
            if "clip" in asked:
                nn.utils.clip_grad_norm_(net.parameters(), asked["clip"])
            steps.step()
    done = {"batch": asked["batch"], "local_epochs": asked["epochs"]}
    if cause is None:
        client.weights(x, y, **done)
    else:
        with pytest.warns(UserWarning, match=cause):
            client.weights(x, y, **done)
    client.save(tmp_path / "seen")
    (made,) = bench.attack(tmp_path / "seen", "prior_only", model=flat())
    assert (made.unexplained is None) == (leak_of(made) is not None) == (cause is None)
    if name in ("plain", "momentum", "nothing"):  # the command says what the API returns
        asked = ["attack", str(tmp_path / "seen"), "--attack", "prior_only"]
        shown = CliRunner().invoke(app, [*asked, "--model", f"{FILE}:flat"])
        assert ("not attacked" in shown.output) == (cause is not None), shown.output


def test_noise_and_clips_that_are_told_are_no_other_training(
    public: Samples, private: Samples
) -> None:
    net, (x, y) = flat(), private
    settings = {"noise_multiplier": 1.0, "clip_norm": 0.1}
    client = bench.capture(net, public=public, defense="gaussian", settings=settings)
    cross_entropy(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    for p in net.parameters():
        assert p.grad is not None
        p.grad += 0.1 * torch.randn(p.grad.shape, generator=torch.Generator().manual_seed(0))
    client.gradient(x, y)


def test_another_network_at_the_attack_does_not_explain_what_was_seen(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = flat(), private
    net[1].requires_grad_(False)  # what is frozen is in the view
    save_gradient(net, (x[:1], y[:1]), tmp_path / "seen", public=public)
    for act, frozen, explained in ((nn.Sigmoid(), 1.0, True), (nn.ReLU(), 1.0, False)):
        other = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), act, nn.Linear(32, 10))
        other[1].requires_grad_(False).weight *= frozen
        (made,) = bench.attack(tmp_path / "seen", "prior_only", model=other)
        assert (made.unexplained is None) == explained


def test_a_view_whose_buffers_are_of_another_network_is_refused(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = residual(), private
    save_gradient(net, (x, y), tmp_path / "seen", public=public, named=NAMED)
    (view,) = read_views([tmp_path / "seen"])
    name = next(n for n in view.seen.buffers if n.endswith(".mean"))
    buffers = {**view.seen.buffers, name: torch.zeros(3)}
    other = replace(view, seen=replace(view.seen, buffers=buffers))
    with pytest.raises(UserError, match=rf"its buffer '{name}' is \[4\], what was seen has \[3\]"):
        attack_view(other, ["ilrg"])


def test_an_attack_that_fails_ends_alone(
    public: Samples, private: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, (x, y) = flat(), private
    named = f"{FILE}:flat"
    save_gradient(net, (x[:1], y[:1]), tmp_path / "seen", public=public, named=named, classes=10)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("attacks.ilrg.ILRG.run", broken)
    asked = ["attack", str(tmp_path / "seen"), "--quick"]
    shown = CliRunner().invoke(app, [*asked, "--attack", "ilrg", "--attack", "analytic"])
    assert shown.exit_code == 1
    assert "ilrg failed: RuntimeError: out of order" in shown.output
    assert "Traceback" in shown.output
    assert "seen: analytic (2 of 2)" in shown.output
    assert re.search(r"analytic +1\.000", shown.output)
    assert "1 client, 1 sample of 1x16x16, sent as gradient" in shown.output


@pytest.mark.parametrize(("few", "scale"), [(2, 1.0), (5, 1.0), (20, 0.0)])
def test_few_public_samples_suffice_and_constant_ones(
    few: int, scale: float, public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = flat(), private
    known = scale * public[0][:few], public[1][:few]
    save_gradient(net, (x[:1], y[:1]), tmp_path / "seen", public=known, classes=10)
    made = bench.attack(tmp_path / "seen", "idlg", "ilrg", model=net, budget=60)
    assert [one.reason for one in made] == [None, None]


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda n: torch.compile(n, backend="eager")])
def test_wrapped_models_are_captured_as_what_they_wrap(
    wrap: Any, public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = wrap(flat()), private
    save_gradient(net, (x[:1], y[:1]), tmp_path / "seen", public=public)
    (made,) = bench.attack(tmp_path / "seen", "analytic", model=flat())
    assert made.means()["ssim"] > 0.99


LABELS: dict[str, tuple[Any, str | None]] = {
    "[K, 1]": (lambda y: y[:, None], None),
    "one-hot": (lambda y: torch.eye(10)[y], r"must be classes, int64 \[N\].*give y.argmax\(1\)"),
    "beyond": (lambda y: y + 8, r"must lie in 0\.\.9, got .*give classes= if there are more"),
    "ignored": (lambda y: y.where(y > 3, -100), r"must lie in 0\.\.9, got -100 to"),
    "none": (lambda y: y[:0], r"must be \[K, 1, 16, 16\] with K labels"),
}


@pytest.mark.parametrize("form", list(LABELS))
def test_labels_of_other_forms_are_read_or_refused(
    form: str, public: Samples, private: Samples
) -> None:
    net, (x, y) = flat(), private
    client = bench.capture(net, public=(public[0].numpy(), public[1][:, None].numpy()))
    cross_entropy(net(x), y).backward()
    make, sentence = LABELS[form]
    if sentence is None:
        client.gradient(x, make(y))
        return
    with pytest.raises(UserError, match=sentence):
        client.gradient(x, make(y))
    with pytest.raises(UserError, match="Poisson sampling"):
        client.gradient(x[:0], y[:0])


def test_a_frozen_layer_made_anew_is_captured_as_the_model_has_it(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    net, (x, y) = strangers.Attentive(classes=10, in_channels=1), private
    save_gradient(net, (x[:1], y[:1]), tmp_path / "seen", public=public, named=f"{FILE}:Attentive")
    (made,) = bench.attack(tmp_path / "seen", "prior_only")
    assert made.unexplained is None


def test_opacus_edges_are_refused_or_infinite(public: Samples, private: Samples) -> None:
    net, (x, y) = flat(), private
    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    sgd = SGD(net.parameters(), lr=0.1)
    made, private_sgd, _ = engine.make_private(
        module=net, optimizer=sgd, data_loader=loader, noise_multiplier=0.0, max_grad_norm=1.0
    )
    cross_entropy(made(x), y).backward()
    with pytest.raises(UserError, match=r"call it after optimizer.step\(\)"):
        noised_by(private_sgd, engine.accountant)
    private_sgd.step()
    assert noised_by(private_sgd, engine.accountant).ledger()["eps_claimed"] == float("inf")


def test_what_cannot_be_captured_is_refused_in_one_sentence(
    public: Samples, private: Samples, tmp_path: Path
) -> None:
    net, (x, y) = flat(), private
    client = bench.capture(net, public=public)
    for wrong, sentence in (
        (lambda: client.save(tmp_path / "seen"), "nothing was recorded"),
        (lambda: client.gradient(x, y), "no parameter has a gradient; call loss.backward"),
        (lambda: client.weights(x, y), "needs the learning rate"),
        (lambda: bench.capture(net, public=(3 * public[0], public[1])), r"must lie in \[0, 1\]"),
        (lambda: bench.capture(net, public=public, defense="spm"), "needs the setting"),
        (lambda: bench.capture(net, public=public, defense="pm_sfl"), "variables of its own"),
        (lambda: bench.capture(net, public=public, named=NAMED), "must make the same model"),
        (lambda: bench.capture(nn.LazyLinear(10), public=public), "pass a batch through it"),
        (lambda: bench.capture(net, public=(public[0], public[1] // 2)), "give classes= if"),
        (lambda: bench.capture(net, public=public, named="mlp3"), "named must say how"),
    ):
        with pytest.raises(UserError, match=sentence):
            wrong()
    cross_entropy(net(x), y).backward()
    with pytest.raises(UserError, match=r"samples must be \[K, 1, 16, 16\] with K labels"):
        client.gradient(x[:, :, :8], y)
    with pytest.raises(UserError, match="1 files were given, but 2 files of their truth"):
        bench.attack(tmp_path / "seen", "ilrg", truths=["one", "two"])
