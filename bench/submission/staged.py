"""Runs a sample of a submission or of results again: the code trains in one process and attacks in
another, and what they leave is scored here."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.contract.defense import Defense
from bench.errors import UserError
from bench.files import no_link
from bench.foreign import OverLimit, time_limit
from bench.harness.environment import Environment, dataset_of, plugins_of, shares_of
from bench.harness.executors.task import ATTACKS, TRAININGS, guard
from bench.harness.runner import label_of
from bench.harness.scoring import Scoring
from bench.harness.store import Store
from bench.harness.train import save_public
from bench.protocols.export import TRUTH, load_seen, load_truth, save_truth
from bench.protocols.replay import replay_truth
from bench.records import AttackOutcome, AttackRecord, Kind, TrainJob, TrainOutcome, TrainRecord
from bench.records.files import check_kept, read_outcome
from bench.records.run import RUN_FILES, Cell, Run
from bench.records.submitted import SUBMISSION
from bench.registry import discover
from bench.report.escaping import one_line
from bench.submission.figures import Comparison, compare
from bench.submission.isolation import Isolation, stop
from bench.submission.rerunning import RECORDS, REFUSAL, run_again, with_earlier

_LAST_WORDS = 1000
"""Characters of what a process that failed wrote last."""
_MOST_OUTPUT = 2**24
"""Characters that the code may write in all, about."""
REMADE = "truth"
"""Folder of a rerun with the truth as the seed gives it."""
_TICK_S = 0.1
"""How often a process is asked what it has finished."""
_ONCE_MORE_S = 10.0
"""How long until code that caught `OverLimit` gets it again."""
_EMBEDDED = tuple(
    Path(spec.origin).parent / "datasets" / folder
    for spec in [find_spec("sklearn")]
    if spec is not None and spec.origin is not None
    for folder in ("data", "images")
)
"""Folders of the data sets that need no download."""


def trainings_of(sampled: Sequence[Cell]) -> dict[TrainJob, str]:
    """The trainings that a sample's cells need, each once, and the keys of their records."""
    return {c.job.train: c.train_key for c in sampled}


def rerun(
    folder: Path,
    sampled: Sequence[Cell],
    *,
    isolation: Isolation,
    env: Environment,
    tolerance: float,
    workers: int,
    timeout_s: float = 3600.0,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[list[Comparison], str | None]:
    """Train and attack again in a temporary folder, and compare every figure that follows from the
    code; what a clock says is not compared.

    The submitted code trains in one process, which has the data set, and attacks in another, which
    has what the server saw; with no isolation and no workers both are this one. The truth is made
    again from the seed, and answers are scored here, where none of the code has run.

    Args:
        folder: The submission, or results.
        sampled: What is run again.
        isolation: What the code may reach.
        env: Device and data folder.
        tolerance: Of means, where figures are not equal.
        workers: Processes, 0 for none.
        timeout_s: Most seconds of all of it.
        tell: Is told what has ended.

    Returns:
        Every figure of the sample, submitted and rerun; and why the rerun did not come to its end,
        where it did not.

    Raises:
        UserError: For data sets that are missing here. What the code, or what it left, is refused
            for is why the rerun did not come to its end.
    """
    cells = with_earlier(Run.read(folder), {c.key for c in sampled})
    for job in trainings_of(cells):
        dataset_of(job, env)

    def play(kind: str, out: Path) -> tuple[Store, str | None]:
        """Train or attack; the records, and how that ended, if not as it should."""
        out.mkdir(exist_ok=True)
        request = {
            "submission": str(folder.resolve()),
            "cells": [c.key for c in cells],
            "kind": kind,
            "out": str(out),
            "device": env.device,
            "data_dir": str(env.data_dir or "") if kind == TRAININGS else "",
            "workers": workers,
        }
        if isolation.bwrap is None and workers == 0:
            run_again(tell, **request)  # type: ignore[arg-type]
            return Store(out / RECORDS), None
        left = Store(out / RECORDS)
        labels = {left.path("train", c.train_key): label_of(c.job.train) for c in cells}
        labels |= {left.path("attack", c.key): label_of(c.job) for c in cells}
        return left, _run_in_process(isolation, request, labels, tell)

    comparisons, first = list[Comparison](), Store(folder)
    try:
        with (
            time_limit(timeout_s, again_s=_ONCE_MORE_S),
            tempfile.TemporaryDirectory(prefix="leakbench-", ignore_cleanup_errors=True) as name,
        ):
            home = Path(name).resolve()
            trained, end = play(TRAININGS, home / TRAININGS)
            made = Store(home / ATTACKS / RECORDS)
            for job, key in trainings_of(cells).items():
                record = _read_made(trained, "train", key)
                mine = [c for c in cells if c.train_key == key]
                if isinstance(record, TrainRecord):
                    comparisons += _hand_on(home, env, mine, record)
                elif record is not None:
                    made.write("train", key, record)
                comparisons += compare(label_of(job), first.read("train", key), record, tolerance)
            if end is None:
                _, end = play(ATTACKS, home / ATTACKS)
            for cell in sampled:
                record = _read_made(trained, "train", cell.train_key)
                answer = _read_made(made, "attack", cell.key)
                if isinstance(record, TrainRecord) and isinstance(answer, AttackRecord):
                    answer = _score(home, env, cell, record, answer)
                scored = first.read("attack", cell.key)
                comparisons += compare(label_of(cell.job), scored, answer, tolerance)
    except UserError as error:
        end = f"The rerun was refused: {error}"
    except OverLimit:
        end = f"The rerun took more than {timeout_s:g} seconds and was stopped (--timeout)."
    return comparisons, end


def _hand_on(
    home: Path, env: Environment, cells: Sequence[Cell], record: TrainRecord
) -> Iterator[Comparison]:
    """Give a training's views to the process that attacks, with public samples and without the
    truth, and make the truth again from the seed.

    Args:
        home: Folder of the rerun.
        env: Where the data set lies.
        cells: The attacks on the training.
        record: Its record, as the process that trained left it.

    Returns:
        Of every view whether the truth that was left is the one that was made again.
    """
    key, attacks = cells[0].train_key, Store(home / ATTACKS / RECORDS)
    source, target = Store(home / TRAININGS / RECORDS).artifacts(key), attacks.artifacts(key)
    check_kept(source, record)
    target.mkdir(parents=True)
    for name in record.files or {}:
        if not name.endswith(TRUTH):
            shutil.copyfile(source / name, target / name)
    job = cells[0].job.train
    dataset = dataset_of(job, env)
    data = [(dataset.train_x[s], dataset.train_y[s]) for s in shares_of(job, dataset)]
    save_public(dataset, job, target)
    attacks.write("train", key, replace(record, files=None, hashes=None))
    installed = discover()
    known = plugins_of(job) <= installed.usable.keys()
    for checkpoint, threat in dict.fromkeys((c.job.checkpoint, c.job.threat.name) for c in cells):
        look = record.observations.get(checkpoint, {}).get(threat)
        for stem in look.stems if look is not None and look.status == "done" else ():
            left = load_truth(source / f"{stem}{TRUTH}")
            truth = replay_truth(
                data,
                load_seen(source / f"{stem}-seen"),
                protocol=job.protocol,
                threat=job.threat(threat),
                checkpoint=checkpoint,
                seed=job.seed,
                defense=installed.defense(job.defense, job.settings) if known else Defense(),
            )
            save_truth(truth, home / REMADE / key / f"{stem}{TRUTH}")
            same = torch.equal(truth.x, left.x) and torch.equal(truth.y, left.y)
            yield Comparison(
                what=label_of(job),
                figure=f"truth of {stem}",
                submitted="as the seed gives it",
                rerun="the same" if same else "other samples",
                verdict="equal" if same else "differs",
            )


def _score(
    home: Path, env: Environment, cell: Cell, trained: TrainRecord, answer: AttackRecord
) -> AttackOutcome:
    """The record of an answer with scores, made in this process."""
    answers = Store(home / ATTACKS / RECORDS).artifacts(cell.key)
    check_kept(answers, answer)
    score = Scoring(
        job=cell.job,
        env=replace(env, plugins=()),
        trained=replace(trained, files=None, hashes=None),
        record=answer,
        observed=home / REMADE / cell.train_key,
        answers=answers,
        artifacts=home / "scored" / cell.key,
    )
    scored = guard(score).record
    assert not isinstance(scored, TrainRecord)
    return scored


def _run_in_process(
    isolation: Isolation,
    request: dict[str, Any],
    labels: dict[Path, str],
    tell: Callable[[str], None],
) -> str | None:
    """Run the code in a process of its own; how that ended, if not as it should. The process, and
    with a sandbox all that it started, is gone afterwards.

    Args:
        isolation: What the code may reach.
        request: See `bench.submission.rerunning.run_again`.
        labels: What to call each job whose record appears at a path.
        tell: Is told of each.

    Raises:
        UserError: With what the process refused.
    """
    out, folder = Path(request["out"]), Path(request["submission"])
    # Not the records: figures that a plugin can read it can give back.
    shown = [p for n in ("source", *RUN_FILES, SUBMISSION) if (p := folder / n).exists()]
    shown += [Path(request["data_dir"])] if request["data_dir"] else []
    pending = [path for path in labels if not os.path.isfile(path)]
    with tempfile.TemporaryFile() as output:
        process = isolation.start(
            [sys.executable, "-m", "bench.submission.rerunning"], output=output, scratch=out,
            shown=shown, hidden=() if request["kind"] == TRAININGS else _EMBEDDED,
            device=request["device"],
        )  # fmt: skip
        try:
            with suppress(BrokenPipeError):  # how it ended says why it does not listen
                assert process.stdin is not None
                with process.stdin as file:
                    file.write(json.dumps(request))
            ended = flooded = False
            while not (ended or flooded):
                time.sleep(_TICK_S)
                # Its number stays its own until `stop` has ended what it started.
                flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
                ended = os.waitid(os.P_PID, process.pid, flags) is not None
                flooded = os.fstat(output.fileno()).st_size > _MOST_OUTPUT
                # Unlike Path.is_file, isfile is False for what the code has closed to others.
                for path in list(filter(os.path.isfile, pending)):
                    pending.remove(path)
                    tell(f"{len(labels) - len(pending)} of {len(labels)}: {labels[path]}")
        finally:
            stop(process)
        code, refusal = process.returncode, out / REFUSAL
        if code == 2 and refusal.is_file() and not refusal.is_symlink():
            with refusal.open(encoding="utf-8", errors="replace") as text:
                raise UserError(one_line(text.read(2000)))
        output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_WORDS))
        last = one_line(output.read().decode(errors="replace"))
        if flooded:
            last = f"it wrote more than {_MOST_OUTPUT:,} characters and was stopped"
    return None if code == 0 else f"The rerun's process ended with {code}: {last}"


def _read_made(made: Store, kind: Kind, key: str) -> TrainOutcome | AttackOutcome | None:
    """A record that a rerun left, None if it left none. Raises UserError for a link in its place,
    which could lead anywhere, and for what is no record."""
    path = Store(no_link(made.folder.parent, made.folder.name)).path(kind, key)
    try:
        return read_outcome(path, kind)
    except FileNotFoundError:
        return None
