"""leakbench: what privacy defenses for federated and split learning really protect, and what
they cost.

    import bench
    results = bench.run("quick", only={"defense": "spm"})
    results.leaderboard()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.outside import open_export
    from bench.results import Results, load, run

__version__ = "0.2.0"
__all__ = ["Results", "load", "open_export", "run"]


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is first used: `import bench` itself stays light."""
    if name == "open_export":
        from bench import outside

        return outside.open_export
    if name in __all__:
        from bench import results

        return getattr(results, name)
    raise AttributeError(f"module 'bench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
