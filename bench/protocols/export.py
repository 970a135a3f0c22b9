"""`Seen` and `Truth` on disk: safetensors plus JSON, a pair of files per release, never pickle.

The last release's pair is complete. Each earlier one's stands beside it, with `-earlier-0`,
`-earlier-1` ... behind the name, and leaves out what the last one has too.
"""

import errno
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.arrays import check_memory
from bench.contract.attack import Seen
from bench.contract.messages import UPLOAD_KINDS, Message, Part, Sealed
from bench.errors import UserError, problem
from bench.files import check_plain, read_bytes
from bench.protocols.observe import Truth
from bench.protocols.view_text import ViewText

FORMAT = 2
TRUTH = "-truth.safetensors"
"""What the names of files with private samples end with."""
PUBLIC = "public"
"""Name of the file, beside what was seen, of the public samples `x` and their labels `y`."""
_PLAIN = ("protocol", "party", "labels", "network", "known")
_HEADER = ("kind", "sender", "receiver", "round", "step", "local_steps")
_STATES = ("initial", "const", "buffers", "before", "after")
_SHARED = ("initial", "const")
"""States that are the same in all releases."""
UNREADABLE = (OSError, SafetensorError, KeyError)
"""What reading a safetensors file raises that is missing, damaged or lacks a tensor."""
_LEAST_PUBLIC = 2
"""Public samples: attacks take their spread."""
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8,
          torch.int8, torch.int16, torch.int32, torch.int64)  # fmt: skip
"""Of tensors that are read; torch computes with no other."""


class DiskFull(OSError):
    """There was no room for what leakbench writes; the text is the system's."""


@contextmanager
def _writing() -> Iterator[None]:
    """Raise a full disk as DiskFull, unlike the same error raised by a plugin."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors reports it as an error of its own, which the text alone tells.
        number = error.errno if isinstance(error, OSError) else None
        texts = ("No space left on device", "Disk quota exceeded")
        if number in (errno.ENOSPC, errno.EDQUOT) or any(t in str(error) for t in texts):
            raise DiskFull(str(error)) from error
        raise


def earlier_path(path: Path, number: int) -> Path:
    """Return the path of the earlier release `number`, from 0, of the observation `path`."""
    return path.with_name(f"{path.name}-earlier-{number}")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that is readable by whom the umask says; left alone, safetensors
    makes one for its owner alone. Raises DiskFull."""
    with _writing():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        mode = path.stat().st_mode
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
        path.chmod(mode)


def save_seen(seen: Seen, path: Path) -> None:
    """Write an observation with all its releases.

    path: Of the last one; .safetensors and .json are put behind its name, which may hold dots.
    """
    for number, release in enumerate(seen.earlier):
        save_release(release, earlier_path(path, number), of_many=True)
    save_release(seen, path, earlier=len(seen.earlier))


def save_release(seen: Seen, path: Path, *, earlier: int = 0, of_many: bool = False) -> None:
    """Write one release alone, as rounds of a run are saved one by one.

    Args:
        seen: The release.
        path: See `save_seen`; of an earlier release `earlier_path`.
        earlier: How many earlier ones stand beside the last one.
        of_many: Whether this is an earlier one.
    """
    tensors: dict[str, Tensor] = {}

    def put(prefix: str, state: Mapping[str, Tensor] | None) -> list[str] | None:
        if state is None:
            return None
        for name, value in state.items():
            tensors[f"{prefix}/{name}"] = value.detach().cpu().contiguous().clone()
        return list(state)

    kept = [s for s in _STATES if not (of_many and s in _SHARED)]
    states = {s: put(s, getattr(seen, s)) for s in kept}
    server = [put(f"server/{i}", s) for i, s in enumerate(seen.server)]
    messages = []
    for i, m in enumerate(seen.messages):
        parts = {}
        for j, (name, part) in enumerate(m.parts.items()):
            told = {} if part.present is None else {"present": part.present}
            put(f"m{i}/{j}", {"values": part.values} | told)
            parts[name] = {"present": bool(told), "bits": part.bits, "absent": part.absent}
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
        "earlier": earlier,
        "states": states,
        "server": server,
        "messages": messages,
    }
    save_tensors(tensors, Path(f"{path}.safetensors"))
    with _writing():
        Path(f"{path}.json").write_text(json.dumps(text, indent=1), encoding="utf-8")


def load_seen(path: Path, *, most_bytes: int | None = None) -> Seen:
    """Read what `save_seen` wrote. Tensors stay on disk until they are used.

    Args:
        path: See `save_seen`.
        most_bytes: Of all releases together; where they have more, the last and some of the
            others are read, spread evenly.

    Raises:
        UserError: For a file that is missing or no export.
    """
    last, count = _load_release(path)
    chosen: Iterable[int] = range(count)
    if most_bytes is not None:
        fitting = max(0, most_bytes // Path(f"{path}.safetensors").stat().st_size - 1)
        if fitting < count:
            chosen = (i * count // fitting for i in range(fitting))
    earlier = [_load_release(earlier_path(path, i))[0] for i in chosen]
    for r in earlier:
        if (r.protocol, r.network, r.clients) != (last.protocol, last.network, last.clients):
            raise UserError(f"{path} has an earlier release of another network or other clients.")
        _check_shapes(path, r.before, last.before)
    shared = {name: getattr(last, name) for name in _SHARED}
    return replace(last, earlier=tuple(replace(r, **shared) for r in earlier))


def _load_release(path: Path) -> tuple[Seen, int]:
    """Load one release, and the number of earlier ones. Raises UserError for a broken file."""
    try:
        text = json.loads(read_bytes(f"{path}.json", links=True))
        view = ViewText.model_validate(text)
        if text.get("format") != FORMAT:
            raise UserError(f"{path}.json has format {text.get('format')!r}, expected {FORMAT}.")
        seen = _release_of(text, view, load_tensors(f"{path}.safetensors"))
    except UserError:
        raise
    except ValidationError as error:
        raise UserError(f"{path}.json: {problem(error)}") from error
    except (*UNREADABLE, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no complete export of what was seen ({error}).") from error
    wrong = _contradiction(seen) or _contradictory_message(seen)
    if wrong is not None:
        raise UserError(f"{path}.json: {wrong}.")
    every = len(seen.clients) * seen.known["samples"]
    size = math.prod(seen.network["shape"]) + seen.network["classes"]
    check_memory(4.0 * every * size, f"{path}.json: the samples that were seen")
    parameters = sum(v.numel() for v in seen.before.values())
    steps = seen.known["local_steps"]
    check_memory(4.0 * parameters * steps, f"{path}.json: the local steps that were seen")
    return seen, view.earlier


def _release_of(text: Mapping[str, Any], view: ViewText, tensors: Mapping[str, Tensor]) -> Seen:
    """Return a release from its whole text, the same checked, and its tensors."""

    def get(prefix: str, names: Sequence[str] | None) -> dict[str, Tensor] | None:
        return None if names is None else {n: tensors[f"{prefix}/{n}"] for n in names}

    messages = []
    for i, m in enumerate(view.messages):
        parts = {
            name: Part(
                values=tensors[f"m{i}/{j}/values"],
                present=tensors[f"m{i}/{j}/present"] if part.present else None,
                bits=part.bits,
                absent=part.absent,
            )
            for j, (name, part) in enumerate(m.parts.items())
        }
        sealed = {
            name: Sealed(n_bytes=box.n_bytes, covers=tensors[f"m{i}/s{j}/covers"])
            for j, (name, box) in enumerate(m.sealed.items())
        }
        header = {name: getattr(m, name) for name in _HEADER}
        messages.append(Message(**header, parts=parts, sealed=sealed))
    states: dict[str, Any] = {s: get(s, view.states.get(s)) or {} for s in _STATES if s != "after"}
    return Seen(
        protocol=view.protocol,
        party=view.party,
        labels=view.labels,
        network=text["network"],
        known=text["known"],  # as the file has it: defenses and threats add to what is known
        clients=tuple(view.clients),
        messages=tuple(messages),
        after=get("after", view.states.get("after")),
        server=tuple(get(f"server/{i}", n) or {} for i, n in enumerate(view.server)),
        **states,
    )


def _check_shapes(path: Path, state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Raise UserError for a state with other variables, or of other shapes."""
    shapes = [{n: list(v.shape) for n, v in first.items()} for first in (state, other)]
    for name in {**shapes[0], **shapes[1]}:
        first, second = (which.get(name, "none") for which in shapes)
        if first != second:
            raise UserError(f"{path} has variable '{name}' as {first} and, elsewhere, as {second}.")


def _contradiction(seen: Seen) -> str | None:
    """Return which of a view's numbers contradicts its others."""
    known, last = seen.known, seen.network["classes"] - 1
    samples, batch, summed = known["samples"], known["batch"], known.get("summed", 1)
    labels = known.get("truth_labels", [])
    if len(set(seen.clients)) < len(seen.clients):
        return "a client is named twice"
    if samples > batch * known["local_steps"]:
        steps = known["local_steps"]
        return f"{samples} samples are more than local_steps {steps} of batch {batch} use"
    if batch % summed:
        return f"a batch of {batch} is no sum over {summed} clients"
    if any(not 0 <= label <= last for row in labels for label in row):
        return f"'known.truth_labels' has labels beyond 0..{last}"
    if any(len(row) != samples for row in labels):
        return f"'known.truth_labels' has not {samples} labels of each client"
    return None


def _contradictory_message(seen: Seen) -> str | None:
    """Return what no run can give: a pattern that is not of its values, a part of an upload that is
    of no variable that was broadcast, or uploads of different variables."""
    first: dict[str, set[str]] = {}
    for message in seen.messages:
        for name, part in message.parts.items():
            present = part.presence()
            if present.shape != part.values.shape or present.dtype != torch.bool:
                return f"the pattern of part '{name}' of {message.sender} is none"
        if message.kind not in UPLOAD_KINDS:
            continue
        if message.local_steps < 1:
            return f"the upload of {message.sender} is of no local step"
        sent = first.setdefault(message.kind, set(message.parts))
        if (odd := next(iter(sent ^ set(message.parts)), None)) is not None:
            return f"some, but not all, uploads have a part '{odd}'"
        for name, part in message.parts.items():
            if name not in seen.before or seen.before[name].shape != part.values.shape:
                return (
                    f"the upload of {message.sender} has a part '{name}' {list(part.values.shape)}"
                    ", which is no variable of that shape"
                )
    return None


def load_tensors(path: Path | str) -> dict[str, Tensor]:
    """Read a safetensors file of kinds of number that torch computes with. Raises UserError for
    others, and `UNREADABLE` for a file that cannot be read."""
    check_plain(path, links=True)
    tensors = load_file(path)
    odd = next((n for n, value in tensors.items() if value.dtype not in _TYPES), None)
    if odd is not None:
        raise UserError(f"{path} has tensor '{odd}' as {tensors[odd].dtype}, which is not read.")
    return tensors


def _load_pair(path: Path, what: str) -> tuple[Tensor, Tensor]:
    """Read samples `x` and their labels `y`. Raises UserError, which says that the file is not
    `what`."""
    try:
        tensors = load_tensors(path)
        return tensors["x"], tensors["y"]
    except UNREADABLE as error:
        raise UserError(f"{path} {what} ({error}).") from error


def load_samples(path: Path) -> tuple[Tensor, Tensor]:
    """Read public samples `x` and their labels `y`. Raises UserError for a file that holds none
    that attacks can use."""
    x, y = _load_pair(path, "holds no public samples")
    if y.ndim != 1 or x.shape[:1] != y.shape or len(y) < _LEAST_PUBLIC:
        raise UserError(
            f"{path} holds samples {list(x.shape)} with labels {list(y.shape)}, which are not x "
            f"[N, ...] with y [N], N >= {_LEAST_PUBLIC}."
        )
    if x.dtype != torch.float32 or not x.isfinite().all():
        raise UserError(f"{path} holds samples {x.dtype}; expected finite numbers in float32.")
    return x, y


def save_truth(truth: Truth, path: Path) -> None:
    """Write the private samples beside, not inside, what was seen."""
    save_tensors({"x": truth.x, "y": truth.y}, path)


def load_truth(path: Path) -> Truth:
    """Read what `save_truth` wrote.

    Raises:
        UserError: For a file that is missing or holds no truth.
    """
    x, y = _load_pair(path, "does not hold the truth of an observation")
    truth = Truth(x=x, y=y)
    if truth.y.ndim != 2 or truth.x.shape[:2] != truth.y.shape:
        raise UserError(
            f"{path} does not hold the truth of an observation: x {list(truth.x.shape)} are no "
            f"samples [V, K, ...] of labels {list(truth.y.shape)}."
        )
    return truth
