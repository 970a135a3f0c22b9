"""Modules of `docs/`, which no package holds."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "docs"))

import canaries
import controls
import formulas
import hooks
import parameter_efficient
import printed

__all__ = ["canaries", "controls", "formulas", "hooks", "parameter_efficient", "printed"]
