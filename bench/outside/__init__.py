"""Outside attacks: what the server saw of one cell as plain files and as an `nn.Module`, and scores
of what somebody's own program rebuilt from them."""

from __future__ import annotations

from bench.outside.exports import (
    Exported,
    NetworkModule,
    OpenExport,
    export,
    open_export,
)
from bench.outside.scores import (
    Against,
    Beside,
    OutsideAnswer,
    Scored,
    score_files,
)

__all__ = [
    "Against",
    "Beside",
    "Exported",
    "NetworkModule",
    "OpenExport",
    "OutsideAnswer",
    "Scored",
    "export",
    "open_export",
    "score_files",
]
