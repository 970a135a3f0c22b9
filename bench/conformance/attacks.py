"""See `bench.conformance`."""

from bench.sandbox.conformance.attacks import context, scenes

__all__ = ["context", "scenes"]
