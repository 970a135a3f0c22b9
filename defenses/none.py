"""No defense: the floor that everything is compared with."""

from bench.api import Defense


class NoDefense(Defense):
    """Uploads go out as they are."""

    is_reference = True
