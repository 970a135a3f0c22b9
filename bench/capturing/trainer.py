"""What a server sees of one step inside the `Trainer` of Hugging Face's transformers.

Trainer(model, args, train_dataset=own, callbacks=[capture_step("seen", public=(x, y))])
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from bench.capturing.recording import Capture, Noised, Samples
from bench.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Logits(nn.Module):
    """A model of transformers as a module that turns samples into logits.

    Args:
        model: Gives an object with `.logits` [B, C]. Its parameters are this module's as well.
        samples: What the model calls the samples.
    """

    def __init__(self, model: nn.Module, *, samples: str = "pixel_values") -> None:
        super().__init__()
        self.model, self._samples = model, samples

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model(**{self._samples: x}).logits)


def capture_step(
    out: str | Path,
    *,
    public: Samples,
    step: int = 0,
    samples: str = "pixel_values",
    labels: str = "labels",
    **capture: Any,
) -> TrainerCallback:
    """A callback that captures one step of a Trainer: the gradient that its optimizer gets.

    The Trainer clips that to its `max_grad_norm` (1 by default) before; the attacker knows the
    norm, as of the defense `gaussian` without noise.

    Args:
        out: Where it is saved, as by `Capture.save`.
        public: Samples that an attacker has, and their labels, as for `bench.capture`.
        step: How many steps of the optimizer lie before it.
        samples, labels: What the model calls its samples [K, ...] and labels, int64 [K]. Its loss
            must be their mean cross entropy.
        capture: More of what `bench.capture` takes: `classes`, `mean`, `named` and so on. What
            `named` makes must be wrapped in `Logits`.

    Raises:
        UserError: During the training, for one of which the gradient is not that of one batch in
            float32: accumulated gradients, several devices, mixed precision, a model that is
            called more than once in a step or gets more than samples and labels. Also if it
            ends before the step.
        ModuleNotFoundError: Without transformers.
    """
    from transformers import TrainerCallback

    class StepCallback(_Step, TrainerCallback):
        pass

    return StepCallback(Path(out), step, samples, labels, {"public": public, **capture})


class _Step:
    """The events of a Trainer at which something is recorded."""

    def __init__(
        self, out: Path, step: int, samples: str, labels: str, capture: Mapping[str, Any]
    ) -> None:
        if step < 0:
            raise UserError(f"step must be >= 0 (steps that lie before it), got {step}.")
        self._out, self._step, self._samples, self._labels = out, step, samples, labels
        self._capture = capture
        self._client: Capture | None = None
        self._given: list[dict[str, Any]] = []
        self._hook: Any = None
        self._saved = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Refuses at once what cannot be captured."""
        from accelerate.state import AcceleratorState

        model: nn.Module = more["model"]
        if args.gradient_accumulation_steps > 1:
            raise UserError(
                "capture_step takes steps of one batch, got gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}; set it to 1 and raise the batch size."
            )
        if args.world_size > 1 or args.n_gpu > 1:
            raise UserError(
                "capture_step takes a training on one device, got "
                f"{max(args.world_size, args.n_gpu)}; CUDA_VISIBLE_DEVICES=0 leaves one."
            )
        # Not of the arguments alone: `accelerate launch` sets it as well.
        mixed = AcceleratorState().mixed_precision
        kinds = {p.dtype for p in model.parameters()}
        if mixed != "no" or kinds != {torch.float32}:
            raise UserError(
                "capture_step takes a training in float32, in which attacks compute gradients, got "
                f"mixed precision '{mixed}' and weights of {', '.join(sorted(map(str, kinds)))}."
            )
        if _clip_norm(args) is not None and self._capture.get("defense", "none") != "none":
            raise UserError(
                f"the Trainer clips after the defense {self._capture['defense']}, to max_grad_norm="
                f"{args.max_grad_norm}; give max_grad_norm=0 beside a defense."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Copies the state before the step, and listens to what the model gets."""
        if state.global_step != self._step or self._saved:
            return
        model: nn.Module = more["model"]
        with torch.random.fork_rng():  # also of the GPU, so that the training draws as ever
            self._client = Capture(Logits(model, samples=self._samples), **self._capture)
        self._given = []
        self._hook = model.register_forward_pre_hook(
            lambda _, __, given: self._given.append(given), with_kwargs=True
        )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Records the gradients, clipped if they are, and saves them."""
        if self._client is None:
            return
        self._hook.remove()
        x, y = self._batch()
        norm = _clip_norm(args)
        clipped = None
        if norm is not None:
            # The defense clips updates: the gradient times the learning rate, 1 if none is given.
            norm *= self._capture.get("lr") or 1.0
            clipped = Noised("gaussian", {"noise_multiplier": 0.0, "clip_norm": norm})
        self._client.gradient(x, y, noised=clipped)
        self._client.save(self._out)
        self._client, self._saved = None, True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Raises UserError if there was no such step."""
        if not self._saved:
            raise UserError(
                f"nothing was captured: the training ended after {state.global_step} steps, and "
                f"step={self._step} is the one after {self._step}."
            )

    def _batch(self) -> tuple[Tensor, Tensor]:
        """What the model got in the step."""
        if len(self._given) != 1:
            raise UserError(
                "capture_step takes steps in which the model is called once, but it was called "
                f"{len(self._given)} times."
            )
        given = {n: v for n, v in self._given[0].items() if isinstance(v, Tensor)}
        given.pop("num_items_in_batch", None)  # K, by which some losses divide
        if given.keys() != {self._samples, self._labels}:
            raise UserError(
                f"capture_step takes a model that gets {self._samples} and {self._labels} and "
                f"computes its loss itself, but it got {', '.join(given) or 'no tensor'}; samples= "
                "and labels= rename them, and label_smoothing_factor and compute_loss_func keep "
                "labels from the model."
            )
        y = given[self._labels]
        if y.ndim != 1 or y.is_floating_point() or int(y.min()) < 0:
            raise UserError(
                f"{self._labels} must be one class >= 0 for each sample, int64 [K], got {y.dtype} "
                f"{list(y.shape)}{'' if y.is_floating_point() else f' from {int(y.min())}'}."
            )
        return given[self._samples], y


def _clip_norm(args: TrainingArguments) -> float | None:
    """To which the Trainer clips the gradient of all parameters, None where it does not."""
    norm = args.max_grad_norm
    return norm if norm is not None and 0 < norm < math.inf else None
