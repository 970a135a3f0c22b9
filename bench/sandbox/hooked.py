"""A defense whose hooks are called through a wrapper, which names the hook that goes wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.contract.defense import Defense, fresh
from bench.contract.hooks import HOOKS, Hook, members_of, overrides
from bench.foreign import MOST_TEXT, Escaped, contain, in_one_line, place_of

Around = Callable[[Hook, Callable[..., Any], tuple[Any, ...]], Any]
"""(hook, the hook itself, its arguments) -> the answer."""


class PluginFault(Exception):
    """A plugin's own mistake, and the name of the hook that made it."""

    hook: str


class HookError(PluginFault):
    """A hook that raised.

    Attributes:
        error: The plugin's own error.
        place: File and line of the plugin, "" where none of its lines was reached.
    """

    def __init__(self, hook: str, error: BaseException, *plugins: object) -> None:
        self.hook = hook
        self.error = error = error.error if isinstance(error, Escaped) else error
        kinds = (p if isinstance(p, type) else type(p) for p in plugins)
        self.place = place_of(error, {kind.__module__.partition(".")[0] for kind in kinds})
        text = in_one_line(error, MOST_TEXT - len(f"{hook} raised "))
        super().__init__(f"{hook} raised {text}{f' ({self.place})' if self.place else ''}")

    @property
    def refuses(self) -> bool:
        """Whether it is the contract's way to refuse an input: a ValueError."""
        return isinstance(self.error, ValueError)


class WrongAnswer(PluginFault):
    """A hook that returned what it may not."""

    def __init__(self, hook: str, problem: str) -> None:
        super().__init__(f"{hook} {problem}")
        self.hook = hook


@contextmanager
def name_errors(
    hook: str, *plugins: object, lets: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Whatever the plugins' code raises inside becomes a HookError, but for what is let pass."""
    passed: tuple[type[Exception], ...] = (PluginFault, *lets)
    try:
        with contain():
            yield
    except passed:
        raise
    except Exception as error:  # whatever a plugin's code brings about is its own defect
        raise HookError(hook, error, *plugins) from error


def hook(defense: Defense, around: Around, hooks: tuple[Hook, ...] = HOOKS) -> Defense:
    """A copy of the defense whose hooks are called through `around`, but for those that another
    of its hooks calls. Errors inside a hook are HookErrors."""
    copy = fresh(defense)
    cls, plugins = type(copy), members_of(copy)
    inside = False

    def wrapped(hook: Hook) -> Callable[..., Any]:
        method = getattr(cls, hook.name)

        def outermost(*arguments: Any) -> Any:
            nonlocal inside
            inside = True
            try:
                with name_errors(hook.name, *plugins):
                    return method(*arguments)
            finally:
                inside = False

        def call(self: Defense, *arguments: Any, **by_name: Any) -> Any:
            arguments = hook.positional(arguments, by_name)
            if inside:
                return method(self, *arguments)
            return around(hook, partial(outermost, self), arguments)

        return call

    own = {"__module__": cls.__module__, **{h.name: wrapped(h) for h in hooks}}
    copy.__class__ = type(cls.__name__, (cls,), own)
    return copy


def guard(defense: Defense) -> Defense:
    """A copy that is as fast as the defense itself: errors of its hooks are HookErrors, and the
    first answer of each is checked (WrongAnswer)."""
    checked: set[str] = set()

    def around(hook: Hook, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        result = call(*arguments)
        if hook.name not in checked:
            check(hook, arguments, result)
            checked.add(hook.name)
        return result

    return hook(defense, around, tuple(h for h in HOOKS if overrides(defense, h.name)))


def check(hook: Hook, arguments: tuple[Any, ...], result: Any) -> None:
    """Raises WrongAnswer for an answer that the hook may not give."""
    if (problem := hook.check(arguments, result)) is not None:
        raise WrongAnswer(hook.name, problem)
