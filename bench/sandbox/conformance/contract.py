"""Whether a plugin's class keeps its side of the contract: words, settings, declared roles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from bench.contract.attack import Attack
from bench.contract.compose import ROLES
from bench.contract.defense import Defense
from bench.sandbox.conformance.findings import Finding, HookError, failed, passed, skipped

REQUIRES = ("smashed",)
RECOVERS = ("images", "labels", "counts")
_BAD_NUMBERS = (float("nan"), -1.0, float("-inf"))


def check_class(cls: type, base: type) -> list[Finding]:
    """Docstring, settings and class attributes of a defense or attack."""
    return [
        _docstring(cls),
        _settings(cls),
        _declared_defense(cls) if base is Defense else _declared_attack(cls),
    ]


def _docstring(cls: type) -> Finding:
    name, own = "docstring", cls.__dict__.get("__doc__")
    if not own or not own.strip():
        return failed(
            name, f"{cls.__name__} has no docstring of its own.",
            "Say in its first line what the plugin does; `leakbench list` prints it.",
        )  # fmt: skip
    first = inspect.cleandoc(own).split("\n")[0]
    if len(first) < 10 or not first.rstrip().endswith((".", ":")):
        return failed(
            name, f"the docstring's first line is '{first}', no sentence.",
            "Write one sentence that ends with a full stop.",
        )  # fmt: skip
    unnamed = [p for p in _parameters(cls) if p not in _all_docs(cls)]
    if unnamed:
        return failed(
            name, f"the docstring does not say what the setting {', '.join(unnamed)} means.",
            "Name every setting with its unit and range.",
        )  # fmt: skip
    return passed(name, first)


def _all_docs(cls: type) -> str:
    texts = [c.__doc__ or "" for c in cls.__mro__ if c is not object]
    return " ".join([*texts, _constructor(cls).__doc__ or ""])


def _constructor(cls: type) -> Callable[..., None]:
    found: Callable[..., None] = inspect.getattr_static(cls, "__init__")
    return found


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    constructor = _constructor(cls)
    if constructor is object.__init__:
        return {}
    return dict(list(inspect.signature(constructor).parameters.items())[1:])


def _settings(cls: type) -> Finding:
    name = "settings"
    for key, parameter in _parameters(cls).items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            return failed(
                name, f"the setting {key} is no keyword-only argument.",
                "Write `def __init__(self, *, ...)`, so that suites name every setting.",
                "__init__",
            )  # fmt: skip
        if parameter.annotation is parameter.empty:
            return failed(
                name, f"the setting {key} has no annotation, so suites' values are not checked.",
                f"Annotate it, e.g. `{key}: float`.", "__init__",
            )  # fmt: skip
    try:
        signature = inspect.signature(cls, eval_str=True)
    except Exception as error:  # an annotation that is no type is the plugin's defect
        return failed(
            name, f"the settings' annotations cannot be read: {error}.",
            "Import what the annotations name.", "__init__",
        )  # fmt: skip
    return passed(name, ", ".join(str(p) for p in signature.parameters.values()))


def _declared_defense(cls: type[Defense]) -> Finding:
    name = "declarations"
    for attribute, known in (("requires", REQUIRES), ("owns", ROLES)):
        value = getattr(cls, attribute)
        if not isinstance(value, frozenset) or not value <= set(known):
            return failed(
                name, f"{attribute} is {value!r}, expected a frozenset of {', '.join(known)}.",
                f"Declare {attribute} = frozenset({{...}}).", attribute,
            )  # fmt: skip
    zero = getattr(cls, "zero_strength", None)
    if zero is not None and not isinstance(zero, Mapping):
        return failed(
            name, f"zero_strength is {zero!r}, expected settings by name, or None.",
            "Give the settings under which the defense does nothing.", "zero_strength",
        )  # fmt: skip
    return passed(name)


def _declared_attack(cls: type[Attack]) -> Finding:
    name = "declarations"
    if not isinstance(cls.recovers, frozenset) or not cls.recovers <= set(RECOVERS):
        return failed(
            name,
            f"recovers is {cls.recovers!r}, expected a frozenset of {', '.join(RECOVERS)}.",
            "Declare what the attack rebuilds.", "recovers",
        )  # fmt: skip
    if not cls.recovers:
        return failed(
            name, "recovers is empty, so that nobody learns what the attack rebuilds.",
            "Declare recovers = frozenset({...}).", "recovers",
        )  # fmt: skip
    return passed(name)


def check_roles(defense: Defense, overrides: Callable[[str], bool]) -> Finding:
    """Whether every exclusive role whose hook is the defense's own is in `owns`: in a composed
    defense only the owner's hook is called."""
    hooks = {"variables": ("variables", "receive", "realize", "mean_realize")}
    for role in ROLES:
        for hook in hooks.get(role, (role,)):
            if overrides(hook) and role not in defense.owns:
                # A hook that is the identity under these settings needs no role.
                if role in _roles_of_class(type(defense)):
                    continue
                return failed(
                    "roles", f"the hook {hook} is its own, but `owns` lacks '{role}'.",
                    f"Add '{role}' to owns, or a+b leaves the hook out.", hook,
                )  # fmt: skip
    if not isinstance(defense.together, int) or defense.together < 1:
        return failed(
            "roles", f"together is {defense.together!r}, expected a whole number >= 1.",
            "Say how many clients must take a step together.", "together",
        )  # fmt: skip
    owned = ", ".join(sorted(defense.owns))
    return passed("roles", f"owns {owned}" if owned else "")


def _roles_of_class(cls: type) -> set[str]:
    """Roles that the constructor may give; told by its source."""
    try:
        bases = [c for c in cls.__mro__ if issubclass(c, Defense) and c is not Defense]
        source = "".join(map(inspect.getsource, bases))
    except (OSError, TypeError):
        return set()
    return {role for role in ROLES if f'"{role}"' in source or f"'{role}'" in source}


def check_refusals(cls: type, settings: Mapping[str, Any]) -> list[Finding]:
    """Whether the constructor refuses numbers that cannot be meant, with ValueError.

    Of a setting that is a float, NaN must be refused, and -1 or -inf (one of them, since a
    setting may be negative, but hardly infinite).
    """
    name, found = "bad settings", False
    for key, parameter in inspect.signature(cls, eval_str=True).parameters.items():
        if not _is_float(parameter.annotation):
            continue
        found = True
        outcomes = {}
        for bad in _BAD_NUMBERS:
            try:
                cls(**{**settings, key: bad})
            except ValueError:
                outcomes[str(bad)] = True
            except Exception as error:  # the wrong kind of refusal
                return [failed(
                    name, f"{key} = {bad} is answered by {HookError('__init__', error)}.",
                    f"Raise ValueError that names {key}, its range and the value.", "__init__",
                )]  # fmt: skip
            else:
                outcomes[str(bad)] = False
        if not outcomes["nan"] or not (outcomes["-1.0"] or outcomes["-inf"]):
            taken = next(b for b, refused in outcomes.items() if not refused)
            return [failed(
                name, f"{key} = {taken} is taken without a word.",
                f"Raise ValueError in __init__ unless {key} is in its range; `not x >= 0` also "
                "refuses NaN.", "__init__",
            )]  # fmt: skip
    return [passed(name) if found else skipped(name, "it has no setting that is a float")]


def _is_float(annotation: Any) -> bool:
    if annotation is float:
        return True
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(strict=True))
    except PydanticUserError:  # an annotation for no number
        return False
    return _takes(adapter, 0.5) and not _takes(adapter, "text")


def _takes(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True
