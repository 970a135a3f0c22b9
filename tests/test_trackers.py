"""Rows in MLflow and W&B, read back from a local folder by what these libraries bring."""

from __future__ import annotations

import json
import math
import struct
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest

import bench
from bench.records import Run
from bench.report import leaderboard
from bench.report.trackers import tracked
from bench.results import Results

ROOT = Path(__file__).parents[1]
PICK = {"defense": "spm", "checkpoint": "final"}
"""Rows of a published run that the tests send."""


@pytest.fixture(scope="module")
def results() -> Results:
    return bench.load(ROOT / "results" / "quick")


def wanted(results: Results) -> dict[str, dict[str, Any]]:
    """By its setting, what the JSON of each row that is sent says."""
    rows = [r for r in results.rows if all(r[k] == v for k, v in PICK.items())]
    assert len(rows) >= 2
    names = [f"{r['defense']}({', '.join(f'{k}={v}' for k, v in r['settings'].items())})"
             for r in rows]  # fmt: skip
    return dict(zip(names, rows, strict=True))


def check(row: dict[str, Any], metrics: dict[str, float], tags: dict[str, str]) -> None:
    """That the figures of a row in JSON are among the metrics by the names of pandas' columns."""
    assert metrics["accuracy"] == row["accuracy"]["mean"]
    assert metrics["accuracy_lo"] == row["accuracy"]["lo"]
    assert metrics["rank"] == row["rank"]
    assert metrics["leak"] == row["leak"]
    assert metrics["worst_ssim"] == row["worst"]["ssim"]["mean"]
    assert metrics["eps_record"] == math.inf
    assert row["eps_record"] == "inf"
    for name, entry in row["attacks"].items():
        if entry["ssim"] is not None:
            assert metrics[f"{name.replace('@', '/')}_ssim"] == entry["ssim"]["mean"]
    assert tags["worst_attack"] == row["worst"]["attack"]
    assert tags["seeds"] == "0 1 2"
    assert tags["command"].startswith("leakbench run quick")
    assert tags["versions.torch"][0].isdigit()
    assert len(tags["key"]) == 24


def test_mlflow_has_a_run_per_row_and_no_second_one(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    ids = results.to_mlflow(tracking_uri=tmp_path / "runs", **PICK)
    again = results.to_mlflow(tracking_uri=(tmp_path / "runs").as_uri(), **PICK)
    assert again == ids
    client = MlflowClient(tracking_uri=(tmp_path / "runs").as_uri())
    (experiment,) = (e for e in client.search_experiments() if e.name == "quick v8")
    found = client.search_runs([experiment.experiment_id])
    rows = wanted(results)
    assert {r.info.run_id for r in found} == set(ids)
    assert len(ids) == len(set(ids)) == len(rows)
    for made in found:
        assert made.info.status == "FINISHED"
        given = made.data.params
        (name,) = (n for n in rows if made.info.run_name.startswith(n))
        row = rows[name]
        for field in ("suite", "protocol", "dataset", "model", "defense", "checkpoint"):
            assert given[field] == row[field]
        assert float(given["settings.epsilon"]) == row["settings"]["epsilon"]
        assert int(given["protocol_settings.clients"]) == row["protocol_settings"]["clients"]
        check(row, made.data.metrics, made.data.tags)
    results.to_mlflow(tracking_uri=tmp_path / "runs", experiment="mine", **PICK)
    assert client.get_experiment_by_name("mine") is not None


def test_what_mlflow_refuses_is_one_error_of_the_user(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with pytest.raises(ValueError, match="MLflow took no runs of experiment 'x'"):
        results.to_mlflow(tracking_uri="nonsense://here", experiment="x", **PICK)


def records(path: Path) -> Iterator[Any]:
    """What an offline run of W&B recorded: a log of chunks in blocks of 32 KiB, after a header of 7
    bytes; a chunk has 4 bytes of check sum, 2 of length, 1 of type (1 whole, 4 last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_has_a_run_per_row(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DIR", str(tmp_path / "other"))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    ids = results.to_wandb(project="mine", folder=tmp_path / "here", **PICK)
    rows = wanted(results)
    assert len(set(ids)) == len(rows)
    found = sorted((tmp_path / "here").glob("wandb/offline-run-*/run-*.wandb"))
    assert len(found) == len(rows)
    for path in found:
        config: dict[str, Any] = {}
        summary: dict[str, Any] = {}
        for record in records(path):
            if record.HasField("run"):
                run = record.run
                config |= {u.key: json.loads(u.value_json) for u in run.config.update}
            for update in record.summary.update:
                summary[update.key or update.nested_key[0]] = json.loads(update.value_json)
        assert run.run_id in ids
        assert (run.project, run.run_group) == ("mine", "quick v8")
        (name,) = (n for n in rows if run.display_name.startswith(n))
        assert config["settings"] == rows[name]["settings"]
        given = rows[name]["protocol_settings"]["clients"]
        assert config["protocol_settings"]["clients"] == given
        assert config["tags"]["key"] == run.run_id
        metrics = {k.replace("@", "/"): float(v) for k, v in summary.items() if k[0] != "_"}
        check(rows[name], metrics, config["tags"])


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_without_the_library_one_sentence_says_what_to_install(
    results: Results, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"pip install 'leakbench\[{package}\]'"):
        getattr(results, f"to_{package}")()


def test_every_number_and_text_of_the_frame_is_sent_by_its_column(results: Results) -> None:
    rows = leaderboard.load(results.folder)
    sent = tracked(rows, Run.read(results.folder))
    frame = results.leaderboard()
    assert len(sent) == len(frame) == len({t.key for t in sent})
    for made, (_, line) in zip(sent, frame.iterrows(), strict=True):
        for column, value in line.items():
            if pandas.isna(value) or value == "":
                assert column not in made.metrics
            elif isinstance(value, (str, bool)):
                assert str(value) in (made.tags.get(column), made.parameters.get(column)), column
            else:
                assert made.metrics[str(column)] == value, column


def test_rows_that_are_not_finished_are_left_out_with_a_warning(results: Results) -> None:
    run, (first, second, *_) = Run.read(results.folder), leaderboard.load(results.folder)
    name, entry = next(iter(first.attacks.items()))
    stopped = replace(first, attacks={**first.attacks, name: replace(entry, status="pending")})
    with pytest.warns(UserWarning, match="1 of 2 rows are left out"):
        (kept,) = tracked([stopped, second], run)
    assert kept.name.startswith(second.setting)
    with pytest.raises(ValueError, match="no row is finished"):
        tracked([stopped], run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tracked([first, second], run)) == 2
