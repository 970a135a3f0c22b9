"""`leakbench new`: a small working plugin and its test, from templates."""

import keyword
import re
import sys
from importlib.metadata import entry_points, packages_distributions
from importlib.resources import files
from pathlib import Path
from string import Template

from bench.errors import UserError
from bench.harness.store import write_whole
from bench.names import check_known
from bench.registry import GROUPS, snake_case

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z][a-z0-9]*)*")


def write_new(kind: str, name: str, folder: Path) -> tuple[Path, Path]:
    """Write NAME.py and test_NAME.py and return their paths.

    Raises UserError for another kind, a name that cannot be a plugin's, and files that exist.
    """
    check_known("kind of plugin", kind, GROUPS)
    _check_name(name)
    class_name = "".join(word.capitalize() for word in name.split("_"))
    if snake_case(class_name) != name:
        raise UserError(
            f"the name '{name}' would come back as '{snake_case(class_name)}' from the class "
            f"{class_name}; use words of two letters or more."
        )
    plugin, test = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in (plugin, test):
        if path.exists():
            raise UserError(f"{path} exists already; it is left as it is.")
    templates = files("bench") / "submission" / "templates"
    words = {"name": name, "class_name": class_name, "title": class_name}
    for path, file in ((plugin, f"{kind}.py.txt"), (test, f"test_{kind}.py.txt")):
        text = (templates / file).read_text(encoding="utf-8")
        write_whole(path, Template(text).substitute(words))
    return plugin, test


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise UserError(
            f"a plugin's name is snake_case (my_defense: lower-case words, each beginning with a "
            f"letter) and no word of Python, got '{name}'."
        )
    if name in sys.stdlib_module_names or name in packages_distributions():
        raise UserError(f"'{name}' is the name of a Python package, which {name}.py would hide.")
    for kind, group in GROUPS.items():
        if name in entry_points(group=group).names:
            raise UserError(f"'{name}' is the name of a known {kind}; choose another.")


def next_commands(kind: str, plugin: Path, test: Path) -> list[str]:
    """What to type next."""
    return [
        f"leakbench check {plugin}",
        f"pytest {test}",
        f"leakbench run my.toml --plugin {plugin}    # a suite that names the {kind} "
        f"'{plugin.stem}', see CONTRIBUTING.md",
    ]
