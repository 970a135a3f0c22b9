"""Data sets by Hugging Face's library, from files that are made here."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.data import load_dataset
from bench.errors import UserError
from tests.made_data import waves


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The library, with its cache in a folder of the test's own, and no network."""
    datasets = pytest.importorskip("datasets", reason="leakbench[hf] is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    return datasets


def images(library: Any, count: int, *, seed: int, side: int = 16) -> Any:
    from PIL import Image

    rng = np.random.default_rng(seed)
    return library.Dataset.from_dict(
        {
            "picture": [
                Image.fromarray(rng.integers(0, 256, (side, side), dtype=np.uint8))
                for _ in range(count)
            ],
            "label": [i % 3 for i in range(count)],
            "writer": [f"w{i // 6}" for i in range(count)],
        },
        features=library.Features(
            picture=library.Image(),
            label=library.ClassLabel(names=["a", "b", "c"]),
            writer=library.Value("string"),
        ),
    )


def test_a_folder_of_images_with_splits_loads(library: Any, tmp_path: Path) -> None:
    made = library.DatasetDict(train=images(library, 60, seed=0), test=images(library, 12, seed=1))
    made.save_to_disk(str(tmp_path / "set"))
    data = load_dataset(f"hf:{tmp_path / 'set'}", seed=0)
    assert (data.task, data.shape, data.class_names) == ("image", (1, 16, 16), ("a", "b", "c"))
    assert (len(data.train_y), len(data.aux_y), len(data.test_y)) == (48, 12, 12)
    assert data.train_clients is None
    first = torch.from_numpy(np.asarray(made["test"][0]["picture"]) / np.float32(255))
    assert torch.equal(data.test_x[0, 0], first)
    assert data.test_y.tolist() == [i % 3 for i in range(12)]
    options = {"client_column": "writer", "size": 12}
    data = load_dataset(f"hf:{tmp_path / 'set'}", seed=0, options=options)
    assert data.shape == (1, 12, 12)
    assert data.train_clients is not None
    assert data.aux_clients is not None
    assert len(data.train_clients.unique()) == 8
    assert not set(data.train_clients.tolist()) & set(data.aux_clients.tolist())


def test_a_file_of_signals_or_of_columns_loads(library: Any, tmp_path: Path) -> None:
    x, y, whose = waves(range(10), each=6, channels=3, length=20)
    columns = {"signal": x.tolist(), "activity": [f"act {v}" for v in y], "who": whose.tolist()}
    columns |= {"one": x[:, 0, 0].tolist(), "two": list(range(60))}
    library.Dataset.from_dict(columns).to_parquet(str(tmp_path / "a.parquet"))
    name = f"hf:{tmp_path / 'a.parquet'}"
    label = {"label": "activity", "client_column": "who"}
    data = load_dataset(name, seed=0, options={"column": "signal", **label})
    assert (data.task, data.shape) == ("signal", (3, 20))
    assert data.class_names == tuple(f"act {i}" for i in range(6))
    # Without a split for tests these are of other people than training, as the public ones are.
    assert (len(data.train_y), len(data.test_y)) == (36, 12)
    assert data.train_clients is not None
    assert len(data.train_clients.unique()) == 6
    table = load_dataset(name, seed=0, options={"column": ["one", "two"], "label": "activity"})
    assert (table.task, table.shape) == ("tabular", (2,))
    assert table.aux_x.mean(dim=0).abs().max() < 1e-5


def test_what_is_not_there_is_said_and_nothing_is_fetched(library: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"cannot load hf:some/where: .* Add --download to fetch it"
    ):
        load_dataset("hf:some/where", seed=0, data_dir=tmp_path)
    from huggingface_hub import constants

    assert not constants.HF_HUB_OFFLINE  # as it was
    images(library, 30, seed=0).save_to_disk(str(tmp_path / "set"))
    for options, message in (
        ({"label": "labels"}, r"Unknown column of hf:.* 'labels'.* Did you mean 'label'"),
        ({"test_split": "tests"}, r"Unknown split of hf:.* 'tests'"),
        ({"column": "writer"}, r"column writer of .* must hold images, or lists of numbers"),
        ({"column": ["label", "writer"]}, r"must each hold one number per row"),
        (
            {"label": "picture", "column": ["label"]},
            r"column picture of .* must hold whole numbers",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load_dataset(f"hf:{tmp_path / 'set'}", seed=0, options=options)
    (tmp_path / "half.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"cannot load hf:.*half\.parquet"):
        load_dataset(f"hf:{tmp_path / 'half.parquet'}", seed=0)
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.csv").write_text("a,b,label\n" + "1,2.5,x\n3,4.5,y\n" * 10)
    table = {"column": ["a", "b"]}
    assert load_dataset(f"hf:{folder}", seed=0, options=table).class_names == ("x", "y")
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=r"^hf:.*a\.txt must be a folder or a file \.parquet"):
        load_dataset(f"hf:{tmp_path / 'a.txt'}", seed=0)


def test_images_of_several_sizes_need_one(library: Any, tmp_path: Path) -> None:
    both = [images(library, 15, seed=0), images(library, 15, seed=1, side=20)]
    library.concatenate_datasets(both).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(UserError, match=r"images of 2 shapes, such as \[16, 16\] and \[20, 20\]"):
        load_dataset(f"hf:{tmp_path / 'set'}", seed=0)
    data = load_dataset(f"hf:{tmp_path / 'set'}", seed=0, options={"size": 16})
    assert data.shape == (1, 16, 16)


def test_without_the_library_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"install leakbench with its extra, leakbench\[hf\]"):
        load_dataset("hf:a/b", seed=0)
