"""leakbench: what privacy defenses for federated and split learning really protect, and what
they cost.

    import bench
    results = bench.run("quick", only={"defense": "spm"})
    results.leaderboard()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.capturing.attacking import attack
    from bench.capturing.recording import Capture as capture
    from bench.outside.exports import open_export
    from bench.results import Results, load, run

__version__ = "0.2.0"
__all__ = ["Results", "attack", "capture", "load", "open_export", "run"]
_PLACES = {
    "Results": ("bench.results", "Results"),
    "attack": ("bench.capturing.attacking", "attack"),
    "capture": ("bench.capturing.recording", "Capture"),
    "load": ("bench.results", "load"),
    "open_export": ("bench.outside.exports", "open_export"),
    "run": ("bench.results", "run"),
}
"""Where each name of the Python API is defined, and as what."""


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is first used: `import bench` itself stays light."""
    if name in _PLACES:
        from importlib import import_module

        module, defined = _PLACES[name]
        return getattr(import_module(module), defined)
    raise AttributeError(f"module 'bench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
