"""leakbench: what privacy defenses for federated and split learning really protect, and what
they cost."""

__version__ = "0.1.0"
