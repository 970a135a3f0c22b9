"""Keys of records: hashes of all that decides a job's figures.

A training's key holds its settings, the data set's files, the kind of device, and the code that
`bench.harness.train`, the defense and the loader of an installed package's data set reach by
imports; an attack's holds its training's key, its own settings, and the code that
`bench.harness.attack`, the attack and the judge of its answer reach. An attack's record names the
code that scored it, so that other metrics need no attack again. Versions of libraries are in the
records, not in their keys.
"""

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path

from bench import data, models
from bench.extensions import FILE_MODULE
from bench.files import sha256
from bench.harness.environment import Environment
from bench.harness.plan import Plan
from bench.harness.sources import Sources
from bench.harness.store import key_of
from bench.records import SCHEMA, AttackJob, TrainJob
from bench.registry import PluginKind, Registry, judge

TRAINING = "bench.harness.train"
ATTACKING = "bench.harness.attack"
SCORING = "bench.harness.scoring"


class Code:
    """Hashes of the code that is on disk: leakbench's own and that of plugins."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._reach, self._foreign = cache(self._reach_plugin), cache(self._reach_foreign)
        modules = [p.cls.__module__ for p in registry.usable.values() if p.cls is not None]
        modules.append(type(judge()).__module__)
        packages = {m.partition(".")[0] for m in modules if not m.startswith(FILE_MODULE)}
        self._packages = {"bench", *packages}
        self._sources = Sources(self._packages)

    @cached_property
    def training(self) -> str:
        """Hash of the code that trains, observes and accounts for privacy in leakbench itself."""
        return _hash(self._sources.reach(TRAINING))

    @cached_property
    def attacking(self) -> str:
        """Hash of the code that attacks an observation and judges the answer in leakbench."""
        judging = self._sources.reach(type(judge()).__module__)
        return _hash({**self._sources.reach(ATTACKING), **judging})

    @cached_property
    def scoring(self) -> str:
        """Hash of the code that scores answers."""
        return _hash(self._sources.reach(SCORING))

    def plugin(self, kind: PluginKind, name: str) -> str:
        """Hash a plugin, `a+b` too, with all that it reaches by imports, leakbench's toolkit too.

        Raises:
            UserError: If there is no such plugin.
        """
        return "+".join(_hash(self._reach(kind, part)) for part in name.split("+"))

    def model(self, name: str) -> str:
        """Hash a model that is a file or an entry point, with all that it reaches; "" for others:
        the training's code or a library's version covers them.

        Raises:
            UserError: For a file that cannot be loaded.
        """
        module, file = models.named.module_of(name), models.named.file_of(name)
        if module is None:
            return ""
        digests = self._foreign(module, None if file is None else file.resolve().parent)
        return _hash(_placeless(digests, module)) if digests else ""

    def package(self, kind: PluginKind, name: str) -> str:
        """Hash a plugin with what it reaches outside leakbench: what must be installed to run
        it."""
        digests = self._reach(kind, name)
        return "syntax:" + _hash({m: d for m, d in digests.items() if not m.startswith("bench.")})

    def dataset(self, name: str) -> str | None:
        """Hash the loader of a data set of an installed package, with all that it reaches; None for
        leakbench's own, which `training` reaches."""
        point = None if name in data.LOADERS else data.foreign().get(name)
        return None if point is None else _hash(self._foreign(point.module))

    def _reach_foreign(self, module: str, folder: Path | None = None) -> dict[str, str]:
        """Hash what a module outside the plugins reaches. Its package is followed only for this
        module: an installed package must not change any other key."""
        top = module.partition(".")[0]
        return Sources({*self._packages, top}).reach(module, folder=folder)

    def of_plan(self, plan: Plan) -> dict[str, str]:
        """Return the hashes of all code that decides the plan's figures, by what it belongs to."""
        defenses: set[tuple[PluginKind, str]] = {("defense", j.defense) for j in plan.trainings}
        return self.of(defenses | {("attack", c.attack) for c in plan.cells})

    def of(self, plugins: Iterable[tuple[PluginKind, str]]) -> dict[str, str]:
        """Return the hashes of leakbench and of the plugins (kind, name), by name."""
        hashes = {f"{kind} {name}": self.plugin(kind, name) for kind, name in sorted(plugins)}
        own = {"train": self.training, "attack": self.attacking, "score": self.scoring}
        return hashes | {"leakbench": _hash(own)}

    def _reach_plugin(self, kind: PluginKind, name: str) -> dict[str, str]:
        cls = self.registry.get(kind, name).cls
        assert cls is not None
        module = cls.__module__
        if not module.startswith(FILE_MODULE):
            return self._sources.reach(module)
        folder = Path(inspect.getfile(cls)).parent
        return _placeless(self._sources.reach(module, folder=folder), module)


class Keys:
    """Store keys of a plan's jobs under one environment; each is computed once."""

    def __init__(self, registry: Registry, env: Environment) -> None:
        self.registry, self.env = registry, env
        self.code = Code(registry)
        self._fingerprint = cache(self._read_fingerprint)
        self._trainings: dict[TrainJob, str] = {}

    def train(self, job: TrainJob) -> str:
        """Key of a training's record."""
        if job not in self._trainings:
            inputs = {
                "schema": SCHEMA,
                "code": self.code.training,
                "plugin": self.code.plugin("defense", job.defense),
                "device": self.env.device.split(":")[0],
                "model": self.code.model(job.task.model),
                "data": self._fingerprint(job.task.dataset),
                "loader": self.code.dataset(job.task.dataset),
                **job.inputs(),
            }
            self._trainings[job] = key_of(inputs)
        return self._trainings[job]

    def attack(self, cell: AttackJob) -> str:
        """Key of an attack's record."""
        inputs = {
            "train": self.train(cell.train),
            "code": self.code.attacking,
            "plugin": self.code.plugin("attack", cell.attack),
            "earlier": [self.attack(a) for a in cell.after],
            **cell.inputs(),
        }
        return key_of(inputs)

    def _read_fingerprint(self, dataset: str) -> str:
        """Hash the content of the user's files behind a data set, whenever and wherever they were
        copied; "" if embedded."""
        own = dataset.partition(":")[2]
        root = Path(own) if own else None
        if root is None and self.env.data_dir and data.has_files(dataset):
            root = self.env.data_dir / dataset
        if root is None:
            return ""
        paths = [p for p in (root, *sorted(root.rglob("*"))) if p.is_file()]
        facts = [(p.relative_to(root).as_posix(), sha256(p.resolve())) for p in paths]
        return hashlib.sha256(repr(facts).encode()).hexdigest() if facts else ""


def _placeless(digests: Mapping[str, str], root: str) -> dict[str, str]:
    """Digests of modules; of a file and its neighbours without the part of their names that tells
    where they lie, which decides nothing."""
    own = {m: m.partition(".")[2] for m in digests if m.startswith(FILE_MODULE)} | {root: ""}
    own = own if root.startswith(FILE_MODULE) else {}
    return {own.get(m, m): digest for m, digest in digests.items()}


def _hash(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()
