"""Notebooks run, show what they were saved with, and are fit to be committed.

After a change, save them anew with what they show now: python -m tests.test_notebooks
"""

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient runs the notebooks")
nbformat = pytest.importorskip("nbformat", reason="nbformat reads the notebooks")
pytest.importorskip("ipykernel", reason="ipykernel is what the notebooks run in")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES, MOST_PIXELS, LIMIT_S = 300_000, 700, 280
TOLERANCE = 0.02
"""Of figures, relative beyond 1, as in `leakbench verify`: other processors round differently."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
_ELAPSED = re.compile(r" in \d+ s\.")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LOCAL = re.compile(r"(?:/tmp|/home|/root|/Users|/var|/work|/usr|/opt|/mnt|/private)/|[A-Z]:\\\\")


def executed(path: Path, folder: Path) -> Any:
    """The notebook as it is after running it in a copy of what it needs of the repository."""
    for part in ("notebooks", "results/quick"):
        shutil.copytree(ROOT / part, folder / part, dirs_exist_ok=True)
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.joinpath("kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    notebook = nbformat.read(path, as_version=4)
    os.environ["JUPYTER_PATH"] = str(folder / "jupyter")
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    environment["OMP_NUM_THREADS"] = "1"
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(folder / "notebooks")}},
    )  # fmt: skip
    client.execute(env=environment)
    return tidied(notebook)


def tidied(notebook: Any) -> Any:
    """The notebook without what differs between two equal runs: elapsed seconds, chunks of
    streams, colours of terminals, versions of the kernel."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        outputs: list[Any] = []
        for output in cell.outputs:
            last = outputs[-1] if outputs else None
            if output.output_type == "stream" and last and last.get("name") == output.name:
                last.text += output.text
                continue
            if "data" in output:
                output.metadata = {}
                for kind in {"text/plain", "text/html"} & set(output.data):
                    output.data[kind] = _ELAPSED.sub(".", _ANSI.sub("", output.data[kind]))
            outputs.append(output)
        cell.outputs = outputs
    return notebook


def shown(cell: Any) -> str:
    """All text that a cell shows, with spaces as one."""
    pieces = [o.text if "text" in o else o.data.get("text/plain", "") for o in cell.outputs]
    return " ".join("\n".join(pieces).split())


def agree(saved: str, now: str) -> bool:
    """Whether two texts are equal but for numbers within the tolerance."""
    if _NUMBER.sub("#", saved) != _NUMBER.sub("#", now):
        return False
    pairs = zip(_NUMBER.findall(saved), _NUMBER.findall(now), strict=True)
    return all(abs(float(a) - float(b)) <= TOLERANCE * max(1.0, abs(float(a))) for a, b in pairs)


def pixels_wide(png: str) -> int:
    import base64

    return int.from_bytes(base64.b64decode(png)[16:20], "big")


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 4


@pytest.mark.parametrize(("saved", "now", "same"), [
    ("SSIM 0.50 of 8", "SSIM 0.51 of 8", True),
    ("SSIM 0.50 of 8", "SSIM 0.53 of 8", False),
    ("SSIM 0.50 of 8", "SSIM 0.50 of 9", False),
    ("gaussian first", "spm first", False),
    ("epsilon 1000", "epsilon 1019", True),
    ("epsilon inf", "epsilon 10", False),
])  # fmt: skip
def test_texts_agree_within_the_tolerance_alone(saved: str, now: str, same: bool) -> None:
    assert agree(saved, now) is same


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_fit_to_be_committed(path: Path) -> None:
    text = path.read_text()
    assert len(text.encode()) < MOST_BYTES
    assert not _LOCAL.search(text), f"{path.name} shows a path of the machine it ran on"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", f"noise in {path.name}: {output.text}"
            png = output.get("data", {}).get("image/png")
            assert png is None or pixels_wide(png) <= MOST_PIXELS
    assert any("image/png" in o.get("data", {}) for c in code for o in c.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_shows_what_it_was_saved_with_and_leaves_nothing_behind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", "")
    now = executed(path, tmp_path)
    saved = nbformat.read(path, as_version=4)
    for before, after in zip(saved.cells, now.cells, strict=True):
        if before.cell_type == "code":
            assert agree(shown(before), shown(after)), (
                f"{path.name}, cell {before.execution_count}\nsaved: {shown(before)}\n"
                f"now:   {shown(after)}"
            )
            kinds = [[o.output_type for o in c.outputs] for c in (before, after)]
            assert kinds[0] == kinds[1]
    there = {p.name for p in (tmp_path / "notebooks").rglob("*") if "__pycache__" not in p.parts}
    assert there == {p.name for p in (ROOT / "notebooks").iterdir()}


if __name__ == "__main__":
    for path in [Path(a) for a in sys.argv[1:]] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path.resolve(), Path(folder)), path)
