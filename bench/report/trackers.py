"""Finished rows in experiment trackers, MLflow and W&B: one run per row."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.records import Row, Run, plain
from bench.report.frames import line_of
from bench.report.leaderboard import row_id

_NAMED = ("suite", "protocol", "dataset", "model", "defense", "checkpoint")
_SETTINGS = ("protocol_settings", "dataset_settings", "model_settings", "settings")
"""Fields of a row that are its parameters: those that its key is made of."""
_REFUSED = re.compile(r"[^\w\-. :/]")
"""What MLflow takes in no name of a metric, such as the @ of an attack under two threats."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A row as a tracker has it.

    Attributes:
        key: The row's, the same whenever it is sent.
        name: spm(epsilon=1.5) fedavg digits lenet final.
        parameters: What was run, by the names of leaderboard.json; settings are dictionaries.
        metrics: Every number that `Results.leaderboard` has of the row, by its column; infinite
            where nothing is proven.
        tags: Texts of these columns, the key, the seeds, the command, and every version.
    """

    key: str
    name: str
    parameters: Mapping[str, Any]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


def tracked(rows: Sequence[Row], run: Run) -> list[Tracked]:
    """The finished ones of some rows of a run; of others a warning tells.

    Raises:
        UserError: If none is finished.
    """
    done = [r for r in rows if all(e.status != "pending" for e in r.attacks.values())]
    if not done:
        raise UserError("no row is finished: the command that began the run goes on with it.")
    if len(done) < len(rows):
        warnings.warn(
            f"{len(rows) - len(done)} of {len(rows)} rows are left out: their run has not come to "
            "all of their attacks.",
            stacklevel=3,
        )
    return [_tracked(row, run) for row in done]


def _tracked(row: Row, run: Run) -> Tracked:
    line = line_of(row)
    numbers = {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    texts = {n: str(v) for n, v in line.items() if n not in numbers and v not in (None, "")}
    key = row_id(row)
    return Tracked(
        key=key,
        name=f"{row.setting} {row.where}",
        parameters={n: plain(getattr(row, n)) for n in (*_NAMED, *_SETTINGS)},
        metrics={n: v for n, v in numbers.items() if not math.isnan(v)},
        tags={n: t for n, t in texts.items() if n not in _NAMED}
        | {"key": key, "command": run.command, "device": run.device}
        | {f"versions.{name}": version for name, version in run.versions.items()},
    )


def to_mlflow(
    rows: Sequence[Tracked], *, experiment: str, tracking_uri: str | Path | None
) -> list[str]:
    """See `bench.results.Results.to_mlflow`."""
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise _missing("mlflow", error) from error
    uri = tracking_uri.resolve().as_uri() if isinstance(tracking_uri, Path) else tracking_uri
    try:
        client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else client.create_experiment(experiment)
        ids = []
        for row in rows:
            found = client.search_runs([place], f"tags.key = '{row.key}'", max_results=1)
            made = found[0] if found else client.create_run(place, run_name=row.name)
            now = int(time.time() * 1000)
            client.log_batch(
                made.info.run_id,
                metrics=[
                    Metric(_REFUSED.sub("/", name), value, now, 0)
                    for name, value in row.metrics.items()
                ],
                params=[Param(name, str(value)) for name, value in _flat(row.parameters).items()],
                tags=[RunTag(name, text) for name, text in row.tags.items()],
            )
            client.set_terminated(made.info.run_id)
            ids.append(made.info.run_id)
    except MlflowException as error:
        raise UserError(f"MLflow took no runs of experiment '{experiment}': {error}") from error
    return ids


def _flat(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """settings.epsilon in place of a dictionary."""
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def to_wandb(
    rows: Sequence[Tracked], *, project: str, entity: str | None, folder: Path | None
) -> list[str]:
    """See `bench.results.Results.to_wandb`."""
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", error) from error
    try:
        if folder is not None:  # in place of a missing one W&B takes another
            folder.mkdir(parents=True, exist_ok=True)
        for row in rows:
            with wandb.init(
                project=project,
                entity=entity,
                dir=folder,
                id=row.key,
                name=row.name,
                group=row.parameters["suite"],
                config={**row.parameters, "tags": dict(row.tags)},
                resume="allow",
                settings=wandb.Settings(console="off", disable_git=True, save_code=False),
            ) as made:
                made.summary.update(dict(row.metrics))
    except (OSError, wandb.Error) as error:
        raise UserError(f"W&B took no runs of project '{project}': {error}") from error
    return [row.key for row in rows]


def _missing(package: str, error: ImportError) -> UserError:
    return UserError(
        f"the package {package} cannot be imported ({error}): pip install 'leakbench[{package}]'."
    )
