"""See `bench.conformance`."""

from bench.sandbox.conformance.plugins import check_plugins

__all__ = ["check_plugins"]
