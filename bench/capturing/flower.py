"""A client mod for Flower that captures what the server sees.

This module does not import Flower. The first mod of a ClientApp is the outermost: a capture that
stands first sees what leaves the client.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bench.capturing.recording import Capture, Samples
from bench.errors import UserError

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict

Mod = Callable[["Message", "Context", Callable[["Message", "Context"], "Message"]], "Message"]


def capture_mod(
    folder: str | Path,
    model: nn.Module,
    *,
    public: Samples,
    data: Callable[[int, int], Samples] | None = None,
    lr: float | None = None,
    batch: int | None = None,
    local_epochs: int = 1,
    rounds: Sequence[int] = (),
    **more: Any,
) -> Mod:
    """A client mod that writes what the server sees of every round of training.

    The files are FOLDER/round-R-client-P, for `leakbench attack` and `bench.attack`. Both of
    Flower's client interfaces are known. Under secure aggregation the upload is masked and nothing
    of one client is written.

    Args:
        folder: Where the files are written.
        model: The network, with any parameters.
        public: Samples that an attacker has, as the model gets them, and their labels.
        data: Gives the samples of the client with that partition-id, of that many partitions: the
            truth, by which attacks are scored. None: the number of samples is read from the reply.
        lr: Learning rate of the clients' plain SGD; None: the message's config has it as "lr".
        batch: Samples of a step; None: all of the client's.
        local_epochs: Passes over the samples in a round.
        rounds: Which rounds are captured, from 1; none: all.
        more: Of `bench.capture`: mean, std, named, model_settings, classes, defense, settings,
            plugins.
    """
    place = Path(folder).resolve()

    def mod(
        msg: Message, ctxt: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        if msg.metadata.message_type != "train":
            return call_next(msg, ctxt)
        # Mods further in change the message: what came is copied before they get it.
        before, records = _arrays(msg.content), msg.content.config_records.values()
        config = {k: v for record in records for k, v in record.items()}
        reply = call_next(msg, ctxt)
        # Flower's older interface has the number in the metadata.
        number = int(config.get("server-round") or msg.metadata.group_id or 0)
        if before is None or reply.has_error() or (rounds and number not in rounds):
            return reply
        who, among = (int(ctxt.node_config[n]) for n in ("partition-id", "num-partitions"))
        after = _arrays(reply.content)
        if after is None:
            warnings.warn(
                f"client {who} sent no plain arrays in round {number}, as under secure "
                "aggregation: nothing of it is captured.",
                stacklevel=2,
            )
            return reply
        own = deepcopy(model).cpu()
        begin = _state(own, before)
        own.load_state_dict(begin)
        rate = config.get("lr") if lr is None else lr
        if rate is None:
            raise UserError("capture_mod needs the clients' learning rate: capture_mod(..., lr=).")
        client = Capture(own, public=public, lr=float(rate), client=f"client-{who}", **more)
        own.load_state_dict(_ends(begin, _state(own, after)))
        x, y = (None, None) if data is None else data(who, among)
        count = _examples(reply.content) if data is None else None
        client.weights(x, y, samples=count, batch=batch, local_epochs=local_epochs)
        client.save(place / f"round-{number}-client-{who}")
        return reply

    return mod


# --- Flower's records ------------------------------------------------------------------------
def _arrays(content: RecordDict) -> dict[str, Tensor] | None:
    """Copy the arrays of a message by name; None unless it has exactly one record of them."""
    records = [record for record in content.array_records.values() if len(record)]
    if len(records) != 1:
        return None
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in records[0].items()}


def _examples(content: RecordDict) -> int:
    """The number of samples that the client tells the server."""
    for record in content.metric_records.values():
        for name in ("num-examples", "num_examples"):
            if name in record:
                return int(record[name])
    raise UserError(
        "the client's reply names no num-examples; give capture_mod the clients' samples: data=."
    )


def _state(model: nn.Module, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arrays as a model's state: by names, by what names end with where a wrapper put something
    before them, or, as NumPy clients send it, by the order of its state."""
    own = model.state_dict()
    numbered = all(name.isdecimal() for name in arrays)
    named: dict[str, Tensor] = dict(zip(own, arrays.values())) if numbered else {}  # noqa: B905
    for name in () if numbered else own:
        ends = [n for n in arrays if f".{n}".endswith(f".{name}") or f".{name}".endswith(f".{n}")]
        if name in arrays or len(ends) == 1:
            named[name] = arrays[name if name in arrays else ends[0]]
    if len(arrays) != len(own) or any(
        n not in named or named[n].shape != v.shape for n, v in own.items()
    ):
        raise UserError(
            f"the clients' {len(arrays)} arrays ({', '.join(list(arrays)[:3])} ...) are not the "
            f"model's state of {len(own)} tensors ({', '.join(list(own)[:3])} ...) by name, shape "
            "and number; capture_mod needs the network that the clients train."
        )
    return named


def _ends(before: Mapping[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays of a reply as weights. A reply that holds updates is recognised by its
    distance from the weights that were sent."""
    moved = [n for n, v in before.items() if v.is_floating_point()]
    length = sum(float(before[n].square().sum()) for n in moved)
    sent = sum(float(after[n].square().sum()) for n in moved)
    along = sum(float((before[n] * after[n]).sum()) for n in moved)
    if sent > 0.25 * length or along > 0.5 * (sent * length) ** 0.5:
        return after
    warnings.warn("the reply is taken as differences of weights, not as weights.", stacklevel=3)
    return {n: before[n] + v if n in moved else v for n, v in after.items()}
