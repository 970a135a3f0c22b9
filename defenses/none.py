"""No defense: the floor that everything is compared with."""

from __future__ import annotations

from bench.api import Defense


class NoDefense(Defense):
    """Uploads go out as they are."""

    is_reference = True
