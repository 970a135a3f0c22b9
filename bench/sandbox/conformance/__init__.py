"""Conformance of plugins: what a defense or attack must do before its figures mean anything."""
