"""Whether a plugin's class keeps its side of the contract: words, settings, declared roles."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from bench.contract.defense import Defense
from bench.contract.hooks import ROLES
from bench.sandbox.findings import Broken, NotChecked, require
from bench.sandbox.hooked import HookError, name_errors

Case = tuple[str, Callable[[], Any]]
"""A check by name; see `bench.sandbox.conformance.plugins`."""
Rebuild = Callable[[Mapping[str, Any]], Defense]
"""Makes a defense from settings."""
LEFT_OUT = "left out by --fast"
"""Why a check is skipped by who asked for a fast examination."""
_RECOVERED = Literal["images", "labels", "counts"]
_DECLARED: Mapping[str, Any] = {
    "requires": frozenset[Literal["smashed", "cut"]] | None,
    "owns": frozenset[Literal[ROLES]] | None,  # type: ignore[valid-type]
    "recovers": Annotated[frozenset[_RECOVERED], Field(min_length=1)] | None,
    "zero_strength": Mapping[str, Any] | None,
}
"""What a class declares, if it does."""
_BAD_NUMBERS = (float("nan"), -1.0, float("-inf"))


def skip(reason: str) -> Any:
    """A check that does not apply."""
    raise NotChecked(reason)


def class_cases(cls: type, settings: Mapping[str, Any]) -> list[Case]:
    """Docstring, settings, class attributes and refused values of a defense or attack."""
    return [
        ("docstring", partial(check_docstring, cls)),
        ("settings", partial(check_settings, cls)),
        ("declarations", partial(check_declarations, cls)),
        ("bad settings", partial(check_refusals, cls, settings)),
    ]


def check_docstring(cls: type) -> str:
    """Whether the docstring says in a sentence what the plugin does, and names each setting."""
    own = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    require(bool(own), f"{cls.__name__} has no docstring of its own.")
    first = own.split("\n")[0]
    require(
        len(first) >= 10 and first.rstrip().endswith((".", ":")),
        f"the docstring's first line is '{first}', no sentence.",
    )
    texts = [c.__doc__ or "" for c in cls.__mro__ if c is not object]
    words = " ".join([*texts, getattr(cls, "__init__").__doc__ or ""])  # noqa: B009 (mypy)
    unnamed = [p for p in inspect.signature(cls).parameters if p not in words]
    require(not unnamed, f"the docstring does not say what the setting {', '.join(unnamed)} means.")
    return first


def check_settings(cls: type) -> str:
    """Whether every setting is a keyword with a type that can be read."""
    for key, parameter in inspect.signature(cls).parameters.items():
        require(
            parameter.kind is parameter.KEYWORD_ONLY,
            f"the setting {key} is no keyword-only argument.",
        )
        require(
            parameter.annotation is not parameter.empty,
            f"the setting {key} has no annotation, so suites' values are not checked.",
        )
    try:
        with name_errors("__init__", cls):  # an annotation that is no type is the plugin's defect
            signature = inspect.signature(cls, eval_str=True)
    except HookError as error:
        raise Broken(f"the settings' annotations cannot be read: {error.error}.") from error
    return ", ".join(str(p) for p in signature.parameters.values())


def check_declarations(cls: type) -> str:
    """Whether class attributes are of the kind that is read."""
    for attribute, kind in _DECLARED.items():
        value: object = getattr(cls, attribute, None)
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(strict=True))
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise Broken(f"{attribute} is {value!r}: {problem}.", attribute) from None
    return ""


def check_refusals(cls: type, settings: Mapping[str, Any]) -> str:
    """Whether the constructor refuses numbers that cannot be meant, with ValueError.

    Of a setting that is a float, NaN must be refused, and -1 or -inf (one of them, since a
    setting may be negative, but hardly infinite).
    """
    parameters = inspect.signature(cls, eval_str=True).parameters.values()
    kinds = {p.name: p.annotation for p in parameters}
    floats = [n for n, kind in kinds.items() if _takes(kind, 0.5) and not _takes(kind, "text")]
    if not floats:
        raise NotChecked("it has no setting that is a float")
    for key in floats:
        accepted = [bad for bad in _BAD_NUMBERS if _accepts(cls, settings, key, bad)]
        require(
            accepted in ([], [-1.0], [float("-inf")]),
            f"{key} = {accepted[0] if accepted else ''} is taken without a word.",
        )
    return ""


def _accepts(cls: type, settings: Mapping[str, Any], key: str, bad: float) -> bool:
    try:
        with name_errors("__init__", cls):
            cls(**{**settings, key: bad})
    except HookError as error:
        require(error.refuses, f"{key} = {bad} is answered by {error}.")
        return False
    return True


def _takes(annotation: Any, value: object) -> bool:
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True)).validate_python(value)
    except (PydanticUserError, ValidationError):  # the first of an annotation for no plain value
        return False
    return True


def check_strength(defense: Defense, settings: Mapping[str, Any], rebuild: Rebuild) -> str:
    """Whether a defense with settings says which of them `leakbench tune` searches, and whether
    that can be set to both ends."""
    cls, strength = type(defense), defense.strength
    parameters = inspect.signature(cls).parameters
    if strength is None:
        declares = any("strength" in vars(c) for c in cls.__mro__[: cls.__mro__.index(Defense)])
        why = "it has settings, but does not say which of them trades accuracy for protection."
        require(declares or not parameters, why)
        return "none declared: leakbench tune leaves the settings as they are"
    setting, weak, strong = strength.setting, strength.weak, strength.strong
    require(setting in parameters, f"it has no setting '{setting}' to be its strength.")
    require(
        weak > 0 and strong > 0 and weak != strong,
        f"its strength goes from {weak!r} to {strong!r}, expected two different values > 0.",
    )
    for value in (weak, strong):
        try:
            rebuild({**settings, setting: value})
        except ValueError as error:
            raise Broken(f"it refuses {setting}={value:g}: {error}") from None
    return f"{setting} from {weak:g} to {strong:g}"
