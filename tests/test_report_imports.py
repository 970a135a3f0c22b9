"""Reports are made without torch, whose import takes longer than most of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_report_without_pictures_imports_neither_torch_nor_scipy_nor_pandas() -> None:
    code = (
        "import sys, bench.report.files, bench.report.html, bench.report.terminal; "
        "assert not {'torch', 'scipy', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
