"""`leakbench verify`: whether figures of a submission come out of its own code again, and those of
results out of leakbench's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import models
from bench.errors import UserError
from bench.harness.environment import plugins_of, versions
from bench.harness.keys import Code
from bench.harness.plan import expand
from bench.harness.runner import label_of
from bench.harness.store import Store
from bench.privacy.ledger import account
from bench.records import RUN, AttackRecord, Cell, Run, TrainRecord, check_kept, check_together
from bench.records.submitted import Submission, is_submission, read_submission
from bench.registry import discover
from bench.seeding import generator
from bench.submission.documents import check_files, check_suite, inside
from bench.submission.figures import Comparison, compare
from bench.submission.packing import cells_of


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A folder whose files are as they were written; nothing of it was executed.

    Attributes:
        submission: What it says of itself; None of results, which need leakbench's plugins alone.
        run: How it was made.
        store: Its records.
        code: Files that a rerun will execute.
    """

    submission: Submission | None
    run: Run
    store: Store
    code: list[str]


def open_folder(folder: Path) -> Opened:
    """Check a folder's files and read it. Executes nothing.

    Raises UserError naming the first file that is not as it was written.
    """
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}.")
    submission = None
    if is_submission(folder):
        check_files(folder)
        submission = read_submission(folder)
    run = Run.read(folder)
    if run.plugins and submission is None:
        raise UserError(
            f"{folder} was made with files that it does not hold ({', '.join(run.plugins)}): "
            "only a submission can be run again by others."
        )
    names = dict.fromkeys(s.file for s in (submission.plugins if submission else ()) if s.file)
    # A model that is a file is code too, wherever it lies.
    models_of = dict.fromkeys(models.named.file_of(t.job.task.model) for t in run.trainings)
    code = [*names, *(str(file) for file in models_of if file is not None)]
    opened = Opened(submission=submission, run=run, store=Store(folder, run), code=code)
    for kind, key in run.record_names:
        record = opened.store.read(kind, key)
        if record is None:
            raise UserError(f"{RUN} names the {kind} record {key}, which is missing.")
        if (place := opened.store.artifacts(key)).is_dir():
            check_kept(place, record)
    check_together(run.trainings, opened.store.read)
    check_suite(run)
    for name in names:
        inside(folder, name)
    return opened


def candidates(opened: Opened, only: Mapping[str, str] | None = None) -> list[Cell]:
    """All cells that a sample is drawn from, whatever their status: of a submission those of an
    attack, or those of a defense and of the undefended rows that it is compared with.

    Args:
        opened: The folder.
        only: As of `leakbench run`.

    Raises:
        UserError: For a filter that the run's suite does not know.
    """
    cells, made = opened.run.cells, opened.submission
    if made is not None:
        cells = [c for t in opened.run.trainings for c in cells_of(t, made.kind, made.name)]
    wanted = set(expand(opened.run.suite, only).cells) if only else {c.job for c in cells}
    return [c for c in cells if c.job in wanted]


def sample(
    opened: Opened,
    *,
    seed: int,
    count: int = 3,
    trainings: int | None = None,
    only: Mapping[str, str] | None = None,
) -> list[Cell]:
    """So many candidates drawn without replacement, all of them if there are no more, in their
    order; the first draw is a row of the submitted plugin.

    Args:
        opened: The folder.
        seed: Of the draw.
        count: Cells.
        trainings: In place of cells so many trainings, with all candidates on them.
        only: As of `candidates`.

    Raises:
        UserError: If there is no cell.
    """
    made, groups = opened.submission, dict[str, list[Cell]]()
    for cell in candidates(opened, only):
        groups.setdefault(cell.key if trainings is None else cell.train_key, []).append(cell)
    drawn = list(groups.values())
    defense = made.name if made is not None and made.kind == "defense" else None
    own = [i for i, (cell, *_) in enumerate(drawn) if defense in (None, cell.defense)]
    if not own:
        what = "these results" if made is None else f"the submission of '{made.name}'"
        raise UserError(f"{what} holds no such cell to rerun, so nothing of it can be verified.")
    rng = generator(seed, "verify")
    first = own[int(torch.randint(len(own), (), generator=rng))]
    others = [i for i in torch.randperm(len(drawn), generator=rng).tolist() if i != first]
    number = count if trainings is None else trainings
    return [cell for i in sorted([first, *others[: number - 1]]) for cell in drawn[i]]


def same_environment(opened: Opened, device: str) -> bool:
    """Whether versions and device are those that it was made with, so that figures should be
    equal."""
    run, made = opened.run, opened.submission
    before = dict(run.versions) | {"device": run.device} if made is None else made.environment
    now = versions() | {"device": device}
    return all(before.get(k) == v for k, v in now.items())


def find_changed_code(opened: Opened, sampled: Sequence[Cell]) -> list[str]:
    """What of leakbench's code that a sample needs is not that of the run, which may be older."""
    registry = discover()
    plugins = {plugin for c in sampled for plugin in plugins_of(c.job)}
    now = Code(registry).of(plugins & registry.usable.keys())
    return [name for name, code in now.items() if opened.run.code.get(name, code) != code]


# --- without a rerun ----------------------------------------------------------------------------

_ROUNDING = 1e-4
"""Of epsilons that another machine computed."""
_EPSILONS = ("ledger.eps_claimed", "ledger.eps_record", "ledger.unit")


def recompute(opened: Opened) -> list[Comparison]:
    """Compare epsilons with those that follow from a training's facts, and what reads no message
    with its plugin, as far as leakbench's own plugins go. None of the folder's code runs.
    """
    registry, store = discover(), opened.store
    comparisons: list[Comparison] = []
    for training in opened.run.trainings:
        trained = store.read("train", training.key)
        if not isinstance(trained, TrainRecord):
            continue
        job = training.job
        if plugins_of(job) <= registry.usable.keys():
            ledger = account(registry.defense(job.defense, job.settings), trained.facts)
            pairs = compare(label_of(job), trained, replace(trained, ledger=ledger), _ROUNDING)
            comparisons += (c for c in pairs if c.figure in _EPSILONS)
        for cell in training.cells:
            scored = store.read("attack", cell.key)
            if isinstance(scored, AttackRecord) and ("attack", cell.attack) in registry.usable:
                attack = registry.attack(cell.attack, cell.job.settings)
                remade = replace(scored, is_floor=attack.is_floor)
                pairs = compare(label_of(cell.job), scored, remade, _ROUNDING)
                comparisons += (c for c in pairs if c.figure == "is_floor")
    return comparisons
