"""Finds defenses and attacks: entry points of installed packages, and single files.

A plugin that cannot be loaded or whose name is taken stays listed with the reason, and harms
no other.
"""

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.arguments import check_arguments
from bench.contract.attack import Attack, Judge
from bench.contract.compose import Composed
from bench.contract.defense import Defense
from bench.errors import UserError
from bench.extensions import BrokenImport, load_entry_point, load_file, origin_of
from bench.foreign import contain
from bench.names import GROUPS, PluginKind, did_you_mean

_BASES: Mapping[PluginKind, type] = {"defense": Defense, "attack": Attack}
JUDGES = "leakbench.judges"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A plugin that was found.

    Attributes:
        origin: Its entry point with the package that has it, or its file.
    """

    name: str
    kind: PluginKind
    origin: str
    cls: type | None = None
    broken: str | None = None

    @property
    def summary(self) -> str:
        """First line of the class's docstring."""
        doc = inspect.getdoc(self.cls) if self.cls else None
        return (doc or "").strip().split("\n")[0]


@dataclass(kw_only=True)
class Registry:
    """All plugins by kind and name, plus those that cannot be used."""

    usable: dict[tuple[PluginKind, str], Plugin] = field(default_factory=dict)
    broken: list[Plugin] = field(default_factory=list)

    def names(self, kind: PluginKind) -> list[str]:
        return sorted(n for k, n in self.usable if k == kind)

    def get(self, kind: PluginKind, name: str, *, where: str = "") -> Plugin:
        """Return the plugin of that name.

        Raises:
            UserError: With the nearest known name, or with the reason if it is known but broken.
        """
        if (usable := self.usable.get((kind, name))) is not None:
            return usable
        for plugin in self.broken:
            if (plugin.kind, plugin.name) == (kind, name):
                raise UserError(f"{kind} '{name}' ({plugin.origin}) is broken: {plugin.broken}")
        raise UserError(did_you_mean(kind, name, self.names(kind), where=where))

    def defense(self, name: str, settings: Mapping[str, Any], *, where: str = "") -> Defense:
        """Build a defense; `a+b` composes several.

        Args:
            name: Of the defense, or of several with plus signs between them.
            settings: Arguments of its constructor, of several as `a.key`, `b.key`.
            where: Of what file or suite an error should speak.

        Raises:
            UserError: For an unknown name or setting, or a value of the wrong type or range.
        """
        if "+" not in name:
            return self._make("defense", name, settings, where)
        members: dict[str, Defense] = {}
        names = name.split("+")
        own: dict[str, dict[str, Any]] = {member: {} for member in names}
        for setting, value in settings.items():
            member, dot, key = setting.partition(".")
            if not dot or member not in own:
                raise UserError(
                    f"setting '{setting}' of {name} must be written MEMBER.key with a member of "
                    f"{', '.join(names)}."
                )
            own[member][key] = value
        for member in names:
            if member in members:
                raise UserError(f"defense '{name}' names '{member}' twice.")
            members[member] = self._make("defense", member, own[member], where)
        return Composed(members)

    def attack(self, name: str, settings: Mapping[str, Any], *, where: str = "") -> Attack:
        """Build an attack, as `defense` does a defense."""
        return self._make("attack", name, settings, where)

    def _make(self, kind: PluginKind, name: str, settings: Mapping[str, Any], where: str) -> Any:
        cls = self.get(kind, name, where=where).cls
        assert cls is not None
        checked = check_arguments(cls, settings, what=f"{kind} '{name}'", where=where)
        try:
            with contain():
                return cls(**checked)
        except ValueError as error:  # the constructor refuses a setting's value
            raise UserError(str(error)) from error

    def add(self, plugin: Plugin) -> None:
        """Register a plugin; a second one of the same name is listed as clashing."""
        key = (plugin.kind, plugin.name)
        if plugin.broken is None and key in self.usable:
            reason = f"the name is taken by {self.usable[key].origin}."
            plugin = replace(plugin, cls=None, broken=reason)
        if plugin.broken is None:
            self.usable[key] = plugin
        else:
            self.broken.append(plugin)


def discover(
    files: tuple[Path, ...] = (), needed: Collection[tuple[PluginKind, str]] | None = None
) -> Registry:
    """Return everything installed, then the given files.

    Args:
        files: Python files, all of which are executed.
        needed: Kind and name of the installed plugins to import; None for all.

    Raises:
        UserError: For a file that does not exist or that defines no plugin, and where something
            hides a package of leakbench's own.
    """
    _check_hidden()
    registry = Registry()
    for kind, group in GROUPS.items():
        for point in sorted(entry_points(group=group), key=lambda p: p.name):
            if needed is None or (kind, point.name) in needed:
                registry.add(_load(kind, point))
    for path in files:
        for plugin in _from_file(path):
            registry.add(plugin)
    return registry


@cache
def _check_hidden() -> None:
    """Raise UserError where a folder or file beside a script hides leakbench's package."""
    home = Path(__file__).parents[1]
    for point in entry_points(group=JUDGES):
        own = point.dist is not None and point.dist.name == "leakbench"
        for top in {point.module.partition(".")[0], "defenses"} if own else ():
            spec = find_spec(top)
            place = Path(spec.origin) if spec is not None and spec.origin else None
            if place is not None and home not in place.parents:
                culprit = place.parent if place.name == "__init__.py" else place
                raise UserError(
                    f"{culprit} hides leakbench's package '{top}', since Python looks there first: "
                    "rename it, or start from another folder."
                )


@cache
def judge() -> Judge:
    """Return the installed judge of attacks' answers."""
    (point,) = entry_points(group=JUDGES)
    instance: Judge = point.load()()
    return instance


def _load(kind: PluginKind, point: EntryPoint) -> Plugin:
    base, plugin = _BASES[kind], Plugin(name=point.name, kind=kind, origin=origin_of(point))
    try:
        cls = load_entry_point(
            point,
            lambda value: inspect.isclass(value) and issubclass(value, base),
            f"a subclass of bench.api.{base.__name__}",
        )
    except BrokenImport as error:
        return replace(plugin, broken=str(error))
    return replace(plugin, cls=cls)


def _from_file(path: Path) -> list[Plugin]:
    if not path.is_file():
        raise UserError(f"no such plugin file: {path}.")
    try:
        module = load_file(path)
    except BrokenImport as error:
        plugin = Plugin(name=path.stem, kind="defense", origin=str(path), broken=str(error))
        return [plugin, replace(plugin, kind="attack")]
    plugins = []
    for kind, base in _BASES.items():
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, base) and cls.__module__ == module.__name__:
                name = snake_case(cls.__name__)
                if not name.startswith("_"):
                    plugins.append(Plugin(name=name, kind=kind, origin=str(path), cls=cls))
    if not plugins:
        raise UserError(f"{path} defines no subclass of bench.api.Defense or bench.api.Attack.")
    return plugins


def snake_case(name: str) -> str:
    """MyDefense -> my_defense, DPCutMix -> dp_cut_mix."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return spaced.lower()
