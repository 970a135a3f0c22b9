"""`Seen` and `Truth` on disk: one safetensors file plus one JSON file, never pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.messages import Message, Part, Sealed
from bench.errors import UserError
from bench.protocols.observe import Truth

FORMAT = 1
_PLAIN = ("protocol", "party", "labels", "network", "known")
_HEADER = ("kind", "sender", "receiver", "round", "step", "local_steps")
_STATES = ("initial", "const", "buffers", "before", "after")


def save_seen(seen: Seen, path: Path) -> None:
    """Write `path` with .safetensors and with .json behind its name, which may hold dots itself."""
    tensors: dict[str, Tensor] = {}

    def put(prefix: str, state: Mapping[str, Tensor] | None) -> list[str] | None:
        if state is None:
            return None
        for name, value in state.items():
            tensors[f"{prefix}/{name}"] = value.detach().cpu().contiguous().clone()
        return list(state)

    states = {s: put(s, getattr(seen, s)) for s in _STATES}
    server = [put(f"server/{i}", s) for i, s in enumerate(seen.server)]
    messages = []
    for i, m in enumerate(seen.messages):
        parts = {}
        for j, (name, part) in enumerate(m.parts.items()):
            put(f"m{i}/{j}", {"values": part.values})
            if part.present is not None:
                put(f"m{i}/{j}", {"present": part.present})
            parts[name] = {"present": part.present is not None, "bits": part.bits}
        sealed = {}
        for j, (name, box) in enumerate(m.sealed.items()):
            put(f"m{i}/s{j}", {"covers": box.covers})
            sealed[name] = {"n_bytes": box.n_bytes}
        header = {name: getattr(m, name) for name in _HEADER}
        messages.append(header | {"parts": parts, "sealed": sealed})
    text = {
        "format": FORMAT,
        **{name: getattr(seen, name) for name in _PLAIN},
        "clients": list(seen.clients),
        "states": states,
        "server": server,
        "messages": messages,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, f"{path}.safetensors")
    Path(f"{path}.json").write_text(json.dumps(text, indent=1))


def load_seen(path: Path) -> Seen:
    """Read what `save_seen` wrote.

    Raises:
        UserError: For a file that is missing or no export.
    """
    text, tensors = _read(path)

    def get(prefix: str, names: list[str] | None) -> dict[str, Tensor] | None:
        return None if names is None else {n: tensors[f"{prefix}/{n}"] for n in names}

    messages = []
    for i, m in enumerate(text.pop("messages")):
        parts = {
            name: Part(
                values=tensors[f"m{i}/{j}/values"],
                present=tensors[f"m{i}/{j}/present"] if info["present"] else None,
                bits=info["bits"],
            )
            for j, (name, info) in enumerate(m.pop("parts").items())
        }
        sealed = {
            name: Sealed(n_bytes=info["n_bytes"], covers=tensors[f"m{i}/s{j}/covers"])
            for j, (name, info) in enumerate(m.pop("sealed").items())
        }
        messages.append(Message(**m, parts=parts, sealed=sealed))
    states = {s: get(s, text["states"][s]) for s in _STATES}
    return Seen(
        **{name: text[name] for name in _PLAIN},
        clients=tuple(text["clients"]),
        messages=tuple(messages),
        server=tuple(get(f"server/{i}", n) or {} for i, n in enumerate(text["server"])),
        initial=states["initial"] or {},
        const=states["const"] or {},
        buffers=states["buffers"] or {},
        before=states["before"] or {},
        after=states["after"],
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        text = json.loads(Path(f"{path}.json").read_text())
        if text.get("format") != FORMAT:
            raise UserError(f"{path}.json has format {text.get('format')!r}, expected {FORMAT}.")
        return text, load_file(f"{path}.safetensors")
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise UserError(f"{path} is no complete export of what was seen ({error}).") from error


def save_truth(truth: Truth, path: Path) -> None:
    """Write the private samples beside, not inside, what was seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x": truth.x.contiguous(), "y": truth.y.contiguous()}, path)


def load_truth(path: Path) -> Truth:
    """Read what `save_truth` wrote.

    Raises:
        UserError: For a file that is missing or holds no truth.
    """
    try:
        tensors = load_file(path)
        return Truth(x=tensors["x"], y=tensors["y"])
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path} does not hold the truth of an observation ({error}).") from error
