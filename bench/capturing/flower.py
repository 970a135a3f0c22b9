"""Client mods for Flower: one captures what the server sees, one runs a leakbench defense.

Flower is imported where a mod runs, so this module can be imported without it. The first mod of a
ClientApp is the outermost: a capture that stands first sees what leaves the client.
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
from bench.contract.compose import Composed
from bench.contract.defense import Client, Defense, Local
from bench.contract.messages import SERVER, Part, as_kind
from bench.contract.messages import Message as Upload
from bench.errors import UserError
from bench.registry import discover
from bench.seeding import generator

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict

Mod = Callable[["Message", "Context", Callable[["Message", "Context"], "Message"]], "Message"]
_MEMORY = "leakbench"
"""The record of a client's state in which a defense keeps its notes."""
_LEFT_TO_THE_LOOP = (
    *("variables", "receive", "realize", "mean_realize", "extra_parameters", "third_parties"),
    *("draw", "gradient", "direction", "inspects", "joins", "batch", "say", "hear", "smashed"),
    *("labels", "features_grad", "mix", "aggregate"),
)
"""Hooks that need leakbench's own loop: Flower's clients train by themselves."""


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
        before, config = _arrays(msg.content), _config(msg)
        reply = call_next(msg, ctxt)
        number = _round(msg, config)
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
        client = Capture(
            own,
            public=public,
            lr=float(rate),
            client=f"client-{who}",
            **more,
        )
        own.load_state_dict(_ends(begin, _state(own, after)))
        x, y = (None, None) if data is None else data(who, among)
        count = _examples(reply.content) if data is None else None
        client.weights(x, y, samples=count, batch=batch, local_epochs=local_epochs)
        client.save(place / f"round-{number}-client-{who}")
        return reply

    return mod


def defense_mod(
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    seed: int,
    lr: float,
    local_steps: int,
    plugins: Sequence[str | Path] = (),
) -> Mod:
    """A client mod that runs a leakbench defense on what the client uploads.

    Args:
        name: Of a defense, or a+b, that changes uploads and nothing else.
        settings: Of the defense.
        seed: Decides its noise, by round and client, whatever process runs the client.
        lr: Learning rate of the clients' plain SGD.
        local_steps: Steps that a client takes in a round.
        plugins: Python files with the defense, where it is not installed.

    Raises:
        UserError: For an unknown defense or setting, or one that needs leakbench's own loop.
    """
    defense = discover(tuple(map(Path, plugins))).defense(name, settings or {})
    members = defense.members if isinstance(defense, Composed) else {name: defense}
    for member, part in members.items():
        needed = [h for h in _LEFT_TO_THE_LOOP if getattr(type(part), h) is not getattr(Defense, h)]
        if needed or part.together > 1 or part.requires:
            raise UserError(
                f"defense {member} cannot run as a Flower mod: it does more than change uploads "
                f"({', '.join(needed) or 'it needs several clients at once'})."
            )

    def mod(
        msg: Message, ctxt: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        before = _arrays(msg.content) if msg.metadata.message_type == "train" else None
        config = _config(msg)
        reply = call_next(msg, ctxt)
        if before is None or reply.has_error():
            return reply
        after = _arrays(reply.content)
        if after is None:
            raise UserError(f"defense {name}: the client's reply has no plain arrays to change.")
        number = _round(msg, config)
        who = f"client-{ctxt.node_config['partition-id']}"
        client = Client(
            id=who,
            x=torch.empty(0),
            y=torch.empty(0, dtype=torch.int64),
            rng={"defense": generator(seed, "flower", number, who, "defense")},
            memory=_recall(ctxt),
        )
        # What is not trained by steps, such as counters, is sent as it is.
        names = [n for n, v in after.items() if v.is_floating_point()]
        base, end = ({n: s[n] for n in names} for s in (before, after))
        local = Local(
            broadcast=base,
            start=base,
            end=end,
            const={},
            grad_sum={n: (base[n] - end[n]) / lr for n in names},
            lr=lr,
            steps=local_steps,
        )
        upload = Upload(
            kind="weights",
            sender=who,
            receiver=SERVER,
            round=number,
            local_steps=local_steps,
            parts={n: Part(values=v) for n, v in end.items()},
        )
        sent = defense.upload([upload], local, client)
        if len(sent) != 1 or sent[0].sealed:
            raise UserError(f"defense {name} sends more than one plain upload, Flower takes one.")
        parts = as_kind(sent[0], "weights", base=base, lr=lr).parts
        if any(not bool(p.told().all()) for p in parts.values()):
            raise UserError(f"defense {name} withholds coordinates, which Flower's arrays cannot.")
        # An update of 0 is sent as the weights that came.
        weights = {n: torch.where(p.presence(), p.values, base[n]) for n, p in parts.items()}
        _replace(reply.content, {**after, **weights})
        _remember(ctxt, client.memory)
        return reply

    return mod


# --- Flower's records ------------------------------------------------------------------------
def _arrays(content: RecordDict) -> dict[str, Tensor] | None:
    """Copy the arrays of a message by name; None unless it has exactly one record of them."""
    records = [record for record in content.array_records.values() if len(record)]
    if len(records) != 1:
        return None
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in records[0].items()}


def _config(msg: Message) -> dict[str, Any]:
    """Return all entries of the message's configs."""
    return {k: v for record in msg.content.config_records.values() for k, v in record.items()}


def _round(msg: Message, config: Mapping[str, Any]) -> int:
    """Number of the round: in the config, or of Flower's older interface in the metadata."""
    return int(config.get("server-round") or msg.metadata.group_id or 0)


def _examples(content: RecordDict) -> int:
    """The number of samples that the client tells the server."""
    for record in content.metric_records.values():
        for name in ("num-examples", "num_examples"):
            if name in record:
                return int(record[name])
    raise UserError(
        "the client's reply names no num-examples; give capture_mod the clients' samples: data=."
    )


def _replace(content: RecordDict, arrays: Mapping[str, Tensor]) -> None:
    """Put arrays in the place of the reply's own."""
    from flwr.app import Array, ArrayRecord

    (name,) = (n for n, record in content.array_records.items() if len(record))
    content[name] = ArrayRecord({n: Array(v.numpy()) for n, v in arrays.items()})


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


def _recall(ctxt: Context) -> dict[str, Any]:
    """Return a defense's notes in a client's state, which follows the client between processes."""
    if _MEMORY not in ctxt.state:
        return {}
    memory: dict[str, Any] = {}
    for path, array in ctxt.state.array_records[_MEMORY].items():
        name, _, inner = path.partition("/")
        value = torch.from_numpy(array.numpy().copy())
        if inner:
            memory.setdefault(name, {})[inner] = value
        else:
            memory[name] = value
    return memory


def _remember(ctxt: Context, memory: Mapping[str, Any]) -> None:
    from flwr.app import Array, ArrayRecord

    flat: dict[str, Tensor] = {}
    for name, value in memory.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        for key, tensor in inner.items():
            if not isinstance(tensor, Tensor):
                raise UserError(f"a defense's note '{name}' is no tensor, which a mod cannot keep.")
            flat[f"{name}/{key}" if key else name] = tensor
    if flat:
        ctxt.state[_MEMORY] = ArrayRecord({n: Array(v.numpy()) for n, v in flat.items()})
