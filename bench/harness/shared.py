"""What several attacks on one observation need, made once by a worker: behind `Context.once`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from bench.contract.attack import Context
from bench.protocols.settings import MOST_RECORDED
from bench.seeding import generator

T = TypeVar("T")
Key = tuple[str | int, ...]


@lru_cache(maxsize=MOST_RECORDED)
def _cache(observation: tuple[str, ...]) -> dict[Key, Any]:
    """Return the results of one view by key. Only the latest views are kept, since they take memory
    and a worker stays with an observation's attacks."""
    return {}


@dataclass(frozen=True, kw_only=True)
class SharedWork:
    """Of one observation; see `Context.once`.

    Attributes:
        observation: Its place, and what else decides what is made.
        seed: Of its training.
        stream: Names its random stream.
    """

    observation: tuple[str, ...]
    seed: int
    stream: tuple[str | int, ...]

    def __call__(self, ctx: Context, key: Key, make: Callable[[Context], T]) -> T:
        results = _cache(self.observation)
        if key not in results:
            rng = generator(self.seed, "shared", *self.stream, *key)
            # `shadow` is a `Rehearsals`, which draws from a stream as the attack itself does.
            shadow = replace(ctx.shadow, rng=rng)  # type: ignore[type-var]
            results[key] = make(replace(ctx, rng=rng, shadow=shadow, budget=0))
        value: T = results[key]
        return value
