"""What the server saw of one cell: written as plain files, and opened as an `nn.Module`."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import models
from bench.contract.attack import Seen
from bench.contract.messages import State
from bench.errors import UserError
from bench.harness.environment import Environment, dataset_of, registry_for
from bench.harness.store import Store, write_whole
from bench.models import Network
from bench.protocols.export import load_samples, load_seen, save_seen, save_tensors
from bench.records import Cell, Run, check_kept, read_json, to_json
from bench.report.choosing import find


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files of an export.

    Attributes:
        tensors: What the server saw in the last observed round.
        text: What the tensors are, and public facts.
        public: Samples that the threat grants.
    """

    tensors: Path
    text: Path
    public: Path


def export(folder: Path, cell: str, out: Path, env: Environment, view: int = 0) -> Exported:
    """Write what the server saw in a cell's observation: OUT.safetensors and OUT.json, each earlier
    round in OUT-earlier-0 and so on, and the public samples that its threat grants:
    OUT-public.safetensors. Never the truth.

    Args:
        folder: The result folder.
        cell: See `bench.report.choosing.find`.
        out: The files' name without an ending; existing ones are replaced.
        env: Where data sets lie.
        view: Which view of recorded rounds, from 0.

    Raises:
        UserError: For a cell that is none or has no observation, or no such view, and for an `out`
            with a dot in its name.
    """
    base = base_of(out)
    chosen = find(Run.read(folder).cells, cell)
    files = observation(folder, chosen, view)
    seen = load_seen(files.with_name(f"{files.name}-seen"))
    dataset = dataset_of(chosen.job.train, env)
    threat = chosen.job.threat
    facts = {
        "cell": chosen.key,
        "dataset": chosen.dataset,
        "class_names": list(dataset.class_names),
        "categorical": [list(pair) for pair in dataset.categorical],
        "checkpoint": chosen.checkpoint,
        "view": view,
        "threat": threat.model_dump(),
    }
    aux = slice(None, threat.aux)
    return write_view(base, seen, (dataset.aux_x[aux], dataset.aux_y[aux]), facts)


def base_of(out: Path) -> Path:
    """The name of an export's files without an ending. Raises UserError for one with a dot."""
    base = stem_of(out)
    if not base.name or "." in base.name:
        raise UserError(f"--out must be a file name without dots, such as seen, got '{out}'.")
    return base


def write_view(
    base: Path, seen: Seen, public: tuple[Tensor, Tensor], facts: Mapping[str, Any]
) -> Exported:
    """Write what was seen with public samples and their labels; see `export`.

    Args:
        base: As `base_of` gives it; existing files are replaced.
        facts: What else stands in the text, beside the shapes of an answer.

    Raises:
        UserError: If it cannot be written.
    """
    tensors, text = (base.with_name(base.name + end) for end in (".safetensors", ".json"))
    paths = Exported(tensors=tensors, text=text, public=_public_beside(base))
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base.parent, prefix=".export") as place:
            temporary = Path(place) / base.name
            save_seen(seen, temporary)
            save_tensors({"x": public[0], "y": public[1]}, _public_beside(temporary))
            for file in Path(place).iterdir():
                if file.name == text.name:  # written last, with more in it
                    about = json.loads(file.read_text(encoding="utf-8"))
                else:
                    file.replace(base.with_name(file.name))
        labels = [len(seen.clients), seen.known["samples"]]
        about["answer"] = {
            "images": [*labels, *seen.network["shape"]],
            "labels": labels,
            "label_counts": [len(seen.clients), seen.network["classes"]],
        }
        write_whole(text, to_json(about | facts))
    except OSError as error:
        raise UserError(f"cannot write {base} ({error.strerror or error}).") from error
    return paths


def stem_of(path: Path) -> Path:
    """An export's name without the ending of one of its files."""
    name = path.name.removesuffix(".safetensors").removesuffix(".json")
    return path.with_name(name) if name else path


def _public_beside(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}-public.safetensors")


def public_of(base: Path, seen: Seen) -> tuple[Tensor, Tensor]:
    """The public samples [N, ...] beside an export of what was seen, and their labels. Raises
    UserError if there are none, or none that its network takes."""
    place = _public_beside(base)
    x, y = load_samples(place)
    if list(x.shape[1:]) != list(seen.network["shape"]):
        raise UserError(
            f"{place} holds samples {list(x.shape)}, which the network's samples "
            f"{list(seen.network['shape'])} are not."
        )
    check_labels(place, y, seen)
    return x, y


def check_labels(place: Path, y: Tensor, seen: Seen) -> None:
    """Raise UserError for labels in a file that the observed network does not have."""
    classes = int(seen.network["classes"])
    if y.is_floating_point() or bool(((y < 0) | (y >= classes)).any()):
        raise UserError(f"{place} has labels beyond 0..{classes - 1}, the classes of its network.")


def observation(folder: Path, cell: Cell, view: int = 0) -> Path:
    """Return the stem of the files of a view of a cell's observation. Raises UserError if there is
    none."""
    key = cell.train_key
    record = Store(folder, Run.read(folder)).read("train", key)
    if record is None or record.status != "done":
        why = "it has not run" if record is None else f"{record.status}: {record.reason}"
        raise UserError(f"cell {cell.name} has no observation: its training is not done ({why}).")
    look = record.observations.get(cell.checkpoint, {}).get(cell.threat)
    if look is None or look.status != "done":
        reason = "its training's record names none" if look is None else look.reason
        raise UserError(f"cell {cell.name} has no observation: {reason}.")
    if not 0 <= view < len(look.stems):
        raise UserError(
            f"cell {cell.name} has no view {view}; expected 0 to {len(look.stems) - 1}."
        )
    stem = Store(folder).artifacts(key) / look.stems[view]
    path = truth_beside(stem)
    if not path.is_file():
        raise UserError(
            f"{folder} holds no artifacts of cell {cell.name} ({path.name} is missing)."
        )
    for begins in (f"{stem.name}-seen", path.name):
        check_kept(stem.parent, record, begins)
    return stem


def truth_beside(stem: Path) -> Path:
    """Return where the truth of the observation of that stem lies."""
    return stem.with_name(f"{stem.name}-truth.safetensors")


# --- opened again -----------------------------------------------------------------------------


class NetworkModule(nn.Module):
    """A network with its numbers, for tools that take an `nn.Module`.

    Parameters and buffers have the network's own names, so `state_dict`, `named_parameters`,
    `torch.func.functional_call` and `torch.autograd.grad` work as for any other module. `train()`
    normalises by the batch, `eval()` by the buffers; a network without batch normalisation is the
    same in both. There are no running estimates: a call changes nothing.

    Args:
        network: Gives the logits.
        weights: Its parameters by name, copied.
        buffers: Its normalisation statistics by name, copied; may be empty.
    """

    def __init__(self, network: Network, weights: State, buffers: State) -> None:
        super().__init__()
        self._network = network
        parameters = {n: nn.Parameter(v.detach().clone()) for n, v in weights.items()}
        statistics = {n: nn.Buffer(v.detach().clone()) for n, v in buffers.items()}
        for name, value in (parameters | statistics).items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            setattr(place, last, value)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of samples x [B, *shape].

        Raises ValueError in eval mode if the network normalises and has no buffers.
        """
        weights = dict(self.named_parameters(remove_duplicate=False))
        buffers = dict(self.named_buffers(remove_duplicate=False)) or None
        mode = "train" if self.training else "eval"
        return self._network.apply(weights, x, mode=mode, buffers=buffers)


@dataclass(frozen=True, kw_only=True)
class OpenExport:
    """An export, opened.

    Attributes:
        seen: The observed round as leakbench's own attacks get it: messages, states, what is known;
            `seen.earlier` has the rounds before it.
        about: FILE.json: the class names, shapes of the answer and the rest.
        public_x: Public samples that the threat grants [N, ...].
        public_y: Their labels, int64 [N].
        module: The network with the weights and buffers that the clients began the observed round
            with, in the mode that they trained in. Under a defense that draws the weights (masks)
            these are the mean ones.
        earlier: The same of each round of `seen.earlier`.
    """

    seen: Seen
    about: Mapping[str, Any]
    public_x: Tensor
    public_y: Tensor
    module: NetworkModule
    earlier: tuple[NetworkModule, ...]


def open_export(path: str | Path, *, plugins: Sequence[str | Path] = ()) -> OpenExport:
    """Open what `leakbench export DIR CELL --out FILE` wrote.

    Args:
        path: FILE, with or without an ending.
        plugins: Python files with the defense that the clients ran, where it is not installed.

    Raises:
        UserError: For files that are missing or no export, and for an unknown defense.
    """
    base = stem_of(Path(path))
    seen = load_seen(base)
    x, y = public_of(base, seen)
    about = read_json(base.with_name(f"{base.name}.json"), links=True)
    network, files = network_of(seen, x), tuple(map(Path, plugins))
    modules = tuple(_module(release, network, files) for release in seen.releases)
    return OpenExport(
        seen=seen, about=about, public_x=x, public_y=y, module=modules[-1], earlier=modules[:-1]
    )


def _module(seen: Seen, network: Network, plugins: tuple[Path, ...]) -> NetworkModule:
    """The network as the clients of one observed round began with it."""
    named = seen.known["defense"]
    defense = registry_for(plugins).defense(named["name"], named["settings"])
    weights = defense.mean_realize(defense.receive(seen.before, seen.const), seen.const)
    own = network.init(torch.Generator())  # what a defense adds is no parameter of the network
    module = NetworkModule(network, {n: weights[n] for n in own}, seen.buffers)
    return module.train(seen.known["mode"] == "train")


def network_of(seen: Seen, public_x: Tensor, model: str | nn.Module | None = None) -> Network:
    """Return the network that was seen. Raises UserError for another one.

    model: What makes it, as a suite names it, or itself; None: as the view's file says.
    """
    about = seen.network
    settings = dict(about["settings"])
    name = str(about["name"])
    if isinstance(model, nn.Module):
        name = models.hand(model)
        settings = {k: v for k, v in settings.items() if k in ("mean", "std", "without_dropout")}
    elif model is not None:
        name = model
    elif models.named.is_handed(name) and models.named.get_held(name) is None:
        raise UserError(
            "the view was captured without `named`, so its file does not say what makes the "
            "network: give --model FILE.py:Net, in Python model=."
        )
    network = models.build(
        name, shape=tuple(about["shape"]), classes=int(about["classes"]), settings=settings
    )
    own = network.init(torch.Generator())
    buffers = network.calibrate(own, public_x)
    known = {**seen.before, **{n: v for n, v in seen.buffers.items() if n in buffers}}
    for part, value in {**own, **{n: v for n, v in buffers.items() if n in known}}.items():
        there = list(known[part].shape) if part in known else "none"
        if there != list(value.shape):
            kind = "parameter" if part in own else "buffer"
            raise UserError(
                f"model {name} is not the one that was seen: its {kind} '{part}' is "
                f"{list(value.shape)}, what was seen has {there}."
            )
    return network
