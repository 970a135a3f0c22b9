"""Whether a plugin's class keeps its side of the contract: words, settings, declared roles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from bench.contract.attack import Attack
from bench.contract.defense import Defense
from bench.contract.hooks import HOOKS, ROLES, overrides
from bench.sandbox.conformance.findings import Broken, Finding, NotChecked, findings_of
from bench.sandbox.hooked import HookError, named

REQUIRES = ("smashed",)
RECOVERS = ("images", "labels", "counts")
_BAD_NUMBERS = (float("nan"), -1.0, float("-inf"))


def check_class(cls: type, base: type, settings: Mapping[str, Any]) -> list[Finding]:
    """Docstring, settings, class attributes and refused values of a defense or attack."""
    return [
        *findings_of("docstring", lambda: _docstring(cls), cls),
        *findings_of("settings", lambda: _settings(cls), cls),
        *findings_of("declarations", lambda: _declarations(cls, base), cls),
        *findings_of("bad settings", lambda: _refusals(cls, settings), cls),
    ]


def _docstring(cls: type) -> str:
    own = cls.__dict__.get("__doc__")
    if not own or not own.strip():
        raise Broken(
            f"{cls.__name__} has no docstring of its own.",
            "Say in its first line what the plugin does; `leakbench list` prints it.",
        )
    first = inspect.cleandoc(own).split("\n")[0]
    if len(first) < 10 or not first.rstrip().endswith((".", ":")):
        raise Broken(
            f"the docstring's first line is '{first}', no sentence.",
            "Write one sentence that ends with a full stop.",
        )
    texts = [c.__doc__ or "" for c in cls.__mro__ if c is not object]
    words = " ".join([*texts, _constructor(cls).__doc__ or ""])
    unnamed = [p for p in _parameters(cls) if p not in words]
    if unnamed:
        raise Broken(
            f"the docstring does not say what the setting {', '.join(unnamed)} means.",
            "Name every setting with its unit and range.",
        )
    return first


def _constructor(cls: type) -> Callable[..., None]:
    found: Callable[..., None] = inspect.getattr_static(cls, "__init__")
    return found


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    constructor = _constructor(cls)
    if constructor is object.__init__:
        return {}
    return dict(list(inspect.signature(constructor).parameters.items())[1:])


def _settings(cls: type) -> str:
    for key, parameter in _parameters(cls).items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            raise Broken(
                f"the setting {key} is no keyword-only argument.",
                "Write `def __init__(self, *, ...)`, so that suites name every setting.",
                "__init__",
            )
        if parameter.annotation is parameter.empty:
            raise Broken(
                f"the setting {key} has no annotation, so suites' values are not checked.",
                f"Annotate it, e.g. `{key}: float`.",
                "__init__",
            )
    try:
        with named("__init__", cls):  # an annotation that is no type is the plugin's defect
            signature = inspect.signature(cls, eval_str=True)
    except HookError as error:
        raise Broken(
            f"the settings' annotations cannot be read: {error.error}.",
            "Import what the annotations name.",
            "__init__",
        ) from error
    return ", ".join(str(p) for p in signature.parameters.values())


def _declarations(cls: type, base: type) -> str:
    known = {"requires": REQUIRES, "owns": ROLES} if base is Defense else {"recovers": RECOVERS}
    for attribute, allowed in known.items():
        value = getattr(cls, attribute)
        if not isinstance(value, frozenset) or not value <= set(allowed):
            raise Broken(
                f"{attribute} is {value!r}, expected a frozenset of {', '.join(allowed)}.",
                f"Declare {attribute} = frozenset({{...}}).",
                attribute,
            )
    if issubclass(cls, Attack) and not cls.recovers:
        raise Broken(
            "recovers is empty, so that nobody learns what the attack rebuilds.",
            "Declare recovers = frozenset({...}).",
            "recovers",
        )
    zero = getattr(cls, "zero_strength", None)
    if zero is not None and not isinstance(zero, Mapping):
        raise Broken(
            f"zero_strength is {zero!r}, expected settings by name, or None.",
            "Give the settings under which the defense does nothing.",
            "zero_strength",
        )
    return ""


def check_roles(defense: Defense) -> str:
    """Whether every exclusive role whose hook is the defense's own is in `owns`: in a composed
    defense only the owner's hook is called."""
    for hook in HOOKS:
        if hook.role is None or hook.role in defense.owns or not overrides(defense, hook.name):
            continue
        # A hook that is the identity under these settings needs no role.
        if hook.role not in _roles_of_class(type(defense)):
            raise Broken(
                f"the hook {hook.name} is its own, but `owns` lacks '{hook.role}'.",
                f"Add '{hook.role}' to owns, or a+b leaves the hook out.",
                hook.name,
            )
    if not isinstance(defense.together, int) or defense.together < 1:
        raise Broken(
            f"together is {defense.together!r}, expected a whole number >= 1.",
            "Say how many clients must take a step together.",
            "together",
        )
    owned = ", ".join(sorted(defense.owns))
    return f"owns {owned}" if owned else ""


def _roles_of_class(cls: type) -> set[str]:
    """Roles that the constructor may give; told by its source."""
    try:
        bases = [c for c in cls.__mro__ if issubclass(c, Defense) and c is not Defense]
        source = "".join(map(inspect.getsource, bases))
    except (OSError, TypeError):
        return set()
    return {role for role in ROLES if f'"{role}"' in source or f"'{role}'" in source}


def _refusals(cls: type, settings: Mapping[str, Any]) -> str:
    """Whether the constructor refuses numbers that cannot be meant, with ValueError.

    Of a setting that is a float, NaN must be refused, and -1 or -inf (one of them, since a
    setting may be negative, but hardly infinite).
    """
    floats = [
        key
        for key, parameter in inspect.signature(cls, eval_str=True).parameters.items()
        if _is_float(parameter.annotation)
    ]
    if not floats:
        raise NotChecked("it has no setting that is a float")
    for key in floats:
        taken = {str(bad): _takes_setting(cls, settings, key, bad) for bad in _BAD_NUMBERS}
        if taken["nan"] or (taken["-1.0"] and taken["-inf"]):
            raise Broken(
                f"{key} = {next(bad for bad, is_taken in taken.items() if is_taken)} is taken "
                "without a word.",
                f"Raise ValueError in __init__ unless {key} is in its range; `not x >= 0` also "
                "refuses NaN.",
                "__init__",
            )
    return ""


def _takes_setting(cls: type, settings: Mapping[str, Any], key: str, bad: float) -> bool:
    try:
        with named("__init__", cls):
            cls(**{**settings, key: bad})
    except HookError as error:
        if not error.refuses:
            raise Broken(
                f"{key} = {bad} is answered by {error}.",
                f"Raise ValueError that names {key}, its range and the value.",
                "__init__",
            ) from error
        return False
    return True


def _is_float(annotation: Any) -> bool:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(strict=True))
    except PydanticUserError:  # an annotation for no number
        return False
    return _is_valid(adapter, 0.5) and not _is_valid(adapter, "text")


def _is_valid(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def check_strength(
    defense: Defense,
    settings: Mapping[str, Any],
    rebuild: Callable[[Mapping[str, Any]], Defense],
) -> str:
    """Whether a defense with settings says which of them `leakbench tune` searches, and whether
    that can be set to both ends."""
    strength, own = defense.strength, type(defense).__mro__
    advice = "Declare a Strength of one of its settings, or strength = None."
    declared = any("strength" in vars(cls) for cls in own[: own.index(Defense)])
    if strength is None and _parameters(type(defense)) and not declared:
        raise Broken(
            "it has settings, but does not say which of them trades accuracy for protection.",
            advice,
        )
    if strength is None:
        return "none declared: leakbench tune leaves the settings as they are"
    if strength.setting not in _parameters(type(defense)):
        raise Broken(f"it has no setting '{strength.setting}' to be its strength.", advice)
    if not (strength.weak > 0 and strength.strong > 0 and strength.weak != strength.strong):
        raise Broken(
            f"its strength goes from {strength.weak!r} to {strength.strong!r}, expected two "
            "different values > 0.",
            advice,
        )
    for value in (strength.weak, strength.strong):
        try:
            rebuild({**settings, strength.setting: value})
        except ValueError as error:
            raise Broken(f"it refuses {strength.setting}={value:g}: {error}", advice) from None
    return f"{strength.setting} from {strength.weak:g} to {strength.strong:g}"
