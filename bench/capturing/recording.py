"""What a server sees of one client's round in a training loop that is not leakbench's.

    client = bench.capture(net, public=(public_x, public_y))
    loss_of(net(x), y).backward()
    client.gradient(x, y)
    client.save("seen")

It writes the files that `leakbench export` writes, and the truth apart: FILE-truth.safetensors.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bench import models
from bench.capturing.explaining import explain_difference
from bench.contract.attack import Seen
from bench.contract.defense import Defense
from bench.contract.events import Event, Round
from bench.contract.messages import SERVER, Kind, Message, Part, State
from bench.errors import UserError
from bench.models import ModuleNetwork
from bench.outside.exports import Exported, base_of, truth_beside, write_view
from bench.privacy.ledger import explain, record_epsilon
from bench.protocols.export import save_truth
from bench.protocols.observe import Truth
from bench.registry import discover

Samples = tuple[Tensor, Tensor]
"""Samples [N, ...] and their labels, int64 [N]."""
_BEYOND = 1e-6
"""By which a pixel may leave [0, 1]."""
_OVERSHOOT = 0.5
"""By which it may, with a warning, before mean and std are asked for."""


@dataclass(frozen=True)
class Noised:
    """What was done to an upload: the leakbench defense that does the same.

    Attributes:
        name: Of the defense.
        settings: Its settings.
        events: What the whole run released so far, for the ledger.
        claimed: Epsilon by the library's own accountant.
        unit: Of that, in words.
        delta: At which epsilons are told.
        divisor: By how many samples the library divides the sum of a batch's gradients, None for
            the batch's own number.
    """

    name: str
    settings: Mapping[str, Any]
    events: Sequence[Event] = ()
    claimed: float | None = None
    unit: str = "record"
    delta: float = 1e-5
    divisor: float | None = None

    def build(self, plugins: tuple[Path, ...]) -> Defense:
        """Return the defense. Raises UserError for one that needs leakbench's own loop."""
        defense = discover(plugins).defense(self.name, self.settings)
        if {"variables", "direction"} & defense.owns:
            raise UserError(
                f"defense {self.name} trains variables of its own, or moves them in its own way, "
                "which no loop but leakbench's does; capture takes defenses of gradients and "
                "uploads."
            )
        return defense

    def ledger(self) -> dict[str, Any]:
        """Return the ledger's figures on the events: the proven epsilon of replacing a record, what
        the library claims, and a sentence per event."""
        return {
            "eps_record": record_epsilon(self.events, self.delta),
            "eps_claimed": self.claimed,
            "unit": self.unit,
            "delta": self.delta,
            "reasons": [explain(event) for event in self.events],
        }


class Capture:
    """One client's round: what it began with, what it sent, and apart from that its samples.

    Args:
        model: The network as the client begins the round with it. Its state is copied at once.
        public: Samples that an attacker has, of the same kind as the client's but not the client's,
            as the model gets them, with their labels.
        classes: Number of classes; by default one more than the largest public label.
        lr: Learning rate of the client's plain SGD; needed for `weights` alone.
        mean, std: Of each channel, or one number for all, by which images in [0, 1] were
            standardised before the model. The attacker knows them.
        named: How the model can be built again by `leakbench attack`: FILE.py:Net,
            torchvision:resnet18 and so on, as a suite names it; by default it has to be given
            there or handed over.
        model_settings: Of that.
        defense: Name of the leakbench defense that does what the client does to its upload.
        settings: Of the defense.
        client: Its name.
        plugins: Python files with the defense, where it is not installed.

    Raises:
        UserError: For a model that cannot be attacked (see docs/models.md), or samples that are no
            images in [0, 1] after `mean` and `std` are undone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        public: Samples,
        classes: int | None = None,
        lr: float | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        named: str | None = None,
        model_settings: Mapping[str, Any] | None = None,
        defense: str = "none",
        settings: Mapping[str, Any] | None = None,
        client: str = "client-0",
        plugins: Sequence[str | Path] = (),
    ) -> None:
        given, model = model, models.unwrap(model)
        self._model, self._lr, self._client = model, lr, client
        self._plugins, self._noised = tuple(map(Path, plugins)), Noised(defense, settings or {})
        self._defense: Defense = self._noised.build(self._plugins)
        scale = {} if mean is None and std is None else {"mean": _plain(mean), "std": _plain(std)}
        x, y = (torch.as_tensor(t).detach().cpu() for t in public)
        if named in models.BUILDERS:
            raise UserError(f"named must say how your model is made; '{named}' is leakbench's own.")
        self._classes_told = classes is not None
        self._classes = int(y.max()) + 1 if classes is None else classes
        if any(is_lazy(p) for p in model.parameters()):
            raise UserError("the model has lazy layers: pass a batch through it before capture.")
        handed = models.hand(given)
        self._scale, self.network = scale, self._build(handed, x, scale)
        self.network.check()
        self._described = self.network.describe()
        if named is not None:
            network = self._build(named, x, {**(model_settings or {}), **scale})
            theirs, ours = network.anatomy, self.network.anatomy
            if (theirs.parameters, theirs.norms) != (ours.parameters, ours.norms):
                raise UserError(
                    f"model {named} is not the captured one, which has other parameters or "
                    "normalisations in training; named and model_settings must make the same model."
                )
            self._described = network.describe()
        own = models.named.get_held(handed)
        assert own is not None
        self._before = self._named(dict(own.named_parameters()))
        self._public = self._unscale(x), self._labels(y, "the public samples")
        self._mode: Literal["train", "eval"] = "train" if model.training else "eval"
        self._buffers = self._statistics(own)
        self._seen: Seen | None = None
        self._truth: Truth | None = None

    def _build(self, name: str, x: Tensor, settings: Mapping[str, Any]) -> ModuleNetwork:
        shape, settings = tuple(x.shape[1:]), {**settings, "without_dropout": True}
        try:
            network = models.build(name, shape=shape, classes=self._classes, settings=settings)
        except UserError as error:
            if self._classes_told:
                raise
            raise UserError(
                f"{error} The number of classes, {self._classes}, is that of the public labels; "
                "give classes= if there are more."
            ) from error
        assert isinstance(network, ModuleNetwork)
        return network

    def gradient(self, x: Tensor, y: Tensor, *, noised: Noised | None = None) -> None:
        """Record the model's present gradients as what the client sends.

        Args:
            x: The client's samples [K, ...], as the model got them in one batch.
            y: Their labels, int64 [K].
            noised: What a library did to the gradients, instead of `defense` and `settings` (see
                `bench.capturing.opacus`).

        Raises:
            UserError: If no parameter has a gradient, or for samples that do not fit.
        """
        own = models.bare_parameters(self._model)
        slopes = {n: p.grad for n, p in own.items() if p.grad is not None}
        truth = self._truth_of(x, y)
        if not slopes:
            raise UserError("no parameter has a gradient; call loss.backward() before gradient().")
        if noised is not None:
            self._noised, self._defense = noised, noised.build(self._plugins)
        scale = 1.0 if self._noised.divisor is None else self._noised.divisor / len(y)
        values = {
            known: scale * slopes.get(inner, torch.zeros_like(own[inner])).detach().cpu()
            for known, inner in self.network.anatomy.parameters.items()
        }
        self._record("gradient", values, truth, count=len(y), batch=len(y), steps=1)

    def weights(
        self,
        x: Tensor | None = None,
        y: Tensor | None = None,
        *,
        samples: int | None = None,
        batch: int | None = None,
        local_epochs: int = 1,
    ) -> None:
        """Record the model's present parameters as what the client sends after its local training.

        Args:
            x: The client's samples [K, ...], as the model got them. None where they are not at
                hand: then nothing can be scored.
            y: Their labels, int64 [K].
            samples: K, where they are not at hand.
            batch: Samples of a step, the last of an epoch may have fewer; None: all of them.
            local_epochs: Passes over the samples.

        Raises:
            UserError: Without `lr`, or for samples that do not fit.
        """
        truth = None if x is None or y is None else self._truth_of(x, y)
        count = samples if truth is None else truth.y.shape[1]
        if self._lr is None:
            raise UserError("weights() needs the learning rate: bench.capture(..., lr=0.1).")
        if count is None or (x is None) != (y is None):
            raise UserError("weights() needs the samples with their labels, or samples=K.")
        batch = count if batch is None else min(batch, count)
        if count < 1 or batch < 1 or local_epochs < 1:
            raise UserError(
                f"samples, batch and local_epochs must be >= 1, got {count}, {batch} and "
                f"{local_epochs}."
            )
        steps = local_epochs * -(-count // batch)
        values = self._named(models.bare_parameters(self._model))
        self._record("weights", values, truth, count=count, batch=batch, steps=steps)

    def save(self, out: str | Path) -> Exported:
        """Write what was recorded: OUT.safetensors, OUT.json, OUT-public.safetensors, and the truth
        apart, if it is known: OUT-truth.safetensors.

        Raises:
            UserError: If nothing was recorded or it cannot be written.
        """
        if self._seen is None:
            raise UserError("nothing was recorded; call gradient() or weights() before save().")
        base = base_of(Path(out))
        names = [str(i) for i in range(self.network.classes)]
        facts: dict[str, Any] = {"class_names": names, "categorical": []}
        if self._noised.events:
            facts["privacy"] = self._noised.ledger()
        written = write_view(base, self._seen, self._public, facts)
        if self._truth is not None:
            save_truth(self._truth, truth_beside(base))
        return written

    # --- how things are kept ----------------------------------------------------------------
    def _named(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the model's tensors by the names that the network has for them."""
        names = self.network.anatomy.parameters
        return {known: own[n].detach().cpu().clone() for known, n in names.items()}

    def _truth_of(self, x: Tensor, y: Tensor) -> Truth:
        x, labels = torch.as_tensor(x), self._labels(y, "the client's samples")
        if tuple(x.shape[1:]) != self.network.shape or len(x) != len(labels):
            raise UserError(
                f"the client's samples must be [K, {', '.join(map(str, self.network.shape))}] with "
                f"K labels, got {list(x.shape)} and {list(labels.shape)}."
            )
        if len(labels) == 0:
            raise UserError("the client's batch is empty, as Poisson sampling makes some: skip it.")
        return Truth(x=self._unscale(x)[None], y=labels[None])

    def _labels(self, y: Tensor, whose: str) -> Tensor:
        """Labels int64 [N], from 0 to classes - 1."""
        y = torch.as_tensor(y).detach().cpu()
        shape = list(y.shape)
        if y.ndim == 2 and shape[1] == 1:
            y = y[:, 0]
        if y.ndim != 1 or y.is_floating_point():
            raise UserError(
                f"labels of {whose} must be classes, int64 [N], got {y.dtype} {shape}; of one-hot "
                "labels give y.argmax(1), mixed ones cannot be attacked."
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self._classes:
            raise UserError(
                f"labels of {whose} must lie in 0..{self._classes - 1}, got {int(y.min())} to "
                f"{int(y.max())}; give classes= if there are more, and leave samples out that the "
                "loss ignores."
            )
        return y.long()

    def _record(
        self, kind: Kind, values: State, truth: Truth | None, *, count: int, batch: int, steps: int
    ) -> None:
        lr = 1.0 if self._lr is None else self._lr
        size = sum(v.numel() for v in values.values())
        round = Round(clients=1, batch=batch, local_steps=steps, lr=lr, parameters=size)
        parts = {n: Part(values=v) for n, v in values.items()}
        message = Message(
            kind=kind, sender=self._client, receiver=SERVER, round=0, local_steps=steps, parts=parts
        )
        self._truth = truth
        self._seen = Seen(
            protocol="fedsgd" if kind == "gradient" else "fedavg",
            party=SERVER,
            network=self._described,
            initial=self._before,
            const={},
            before=self._before,
            after=None,
            messages=(message,),
            clients=(self._client,),
            known={
                "batch": batch,
                "local_steps": steps,
                "samples": count,
                "lr": lr,
                "mode": self._mode,
                "threat": f"captured: one round, batch {batch}, {steps} step(s)",
                "defense": {"name": self._noised.name, "settings": dict(self._noised.settings)},
                "mechanisms": [m.to_dict() for m in self._defense.mechanisms_in(round)],
            },
            buffers=self._buffers,
        )
        if truth is None:
            return
        cause = explain_difference(self._seen, truth, network=self.network, defense=self._defense)
        if cause is not None:
            warnings.warn(cause, stacklevel=3)

    def _statistics(self, module: nn.Module) -> dict[str, Tensor]:
        """Constants, and statistics of batch normalisation: the running ones in evaluation, else
        those of public samples."""
        buffers = self.network.calibrate(self._before, self._public[0])
        if self._mode == "train":
            return buffers
        for known, inner in self.network.anatomy.norms.items():
            norm = module.get_submodule(inner)
            mean, var = norm.running_mean, norm.running_var
            if not (isinstance(mean, Tensor) and isinstance(var, Tensor)):
                raise UserError(
                    f"the batch normalisation {inner} keeps no running estimates, so evaluation "
                    "normalises by the batch; capture the model in training mode."
                )
            buffers |= {f"{known}.mean": mean.clone(), f"{known}.var": var.clone()}
        return buffers

    def _unscale(self, x: Tensor) -> Tensor:
        """Return samples in [0, 1], if they are images, as the attacker looks for them."""
        x = x.detach().float().cpu()
        if self._scale:
            places = (-1, *(1,) * (x.ndim - 2))
            mean, std = (x.new_tensor(self._scale[n]).view(places) for n in ("mean", "std"))
            x = x * std + mean
        if x.ndim != 4 or len(x) == 0:
            return x
        lowest, highest = float(x.min()), float(x.max())
        excess = max(-lowest, highest - 1)
        undone = " after mean and std are undone" if self._scale else ""
        text = f"images must lie in [0, 1], got {lowest:.3g} to {highest:.3g}{undone}"
        if excess > _OVERSHOOT:
            raise UserError(f"{text}; give the mean and std by which they were standardised.")
        if excess > _BEYOND:
            warnings.warn(
                f"{text}, as resized, erased or half-precision images do: what lies beyond by up "
                f"to {excess:.2g} is cut off, which the attacks then cannot find.",
                stacklevel=4,
            )
        return x.clamp(0, 1)


def _plain(value: float | Sequence[float] | None) -> float | list[float] | None:
    if value is None or isinstance(value, int | float):
        return value
    return [float(v) for v in value]
