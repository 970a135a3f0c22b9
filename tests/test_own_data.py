"""Data sets that users bring: of packages, of publishers' files, with clients, of floats."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench import suite
from bench.cli import app
from bench.data import load_dataset
from bench.data.dataset import Dataset, carve_clients, check_dataset, from_features
from bench.data.partition import Dealing
from bench.errors import UserError
from bench.harness.environment import Environment
from bench.harness.keys import Keys
from bench.harness.plan import Plan, expand
from bench.harness.runner import check
from bench.metrics.floors import floors
from bench.registry import discover
from tests.made_data import leaf, waves, write_har, write_leaf

Install = Callable[..., Path]
LOADER = """
import numpy as np
from bench.data import Dataset, carve, from_features
from bench.seeding import numpy_generator

def load(*, seed, data_dir=None, records: int = 60):
    \"\"\"Records of the package.\"\"\"
    rng = numpy_generator(seed, "mine")
    x, y = rng.standard_normal((records, 5)), np.arange(records) % 3
    test, aux, train = carve(y, fractions=(0.2, 0.2), rng=rng)
    return from_features(
        name="mine", train=(x[train], y[train]), test=(x[test], y[test]), aux=(x[aux], y[aux]),
        class_names=("a", "b", "c"),
    )
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package with data sets on the path; gives its module's file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_data", raising=False)

    def put(text: str = LOADER, **points: str) -> Path:
        info = tmp_path / "my_package-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
        lines = [
            f"{name} = {place}" for name, place in (points or {"mine": "my_data:load"}).items()
        ]
        (info / "entry_points.txt").write_text("\n".join(["[leakbench.datasets]", *lines, ""]))
        (tmp_path / "my_data.py").write_text(text)
        return tmp_path / "my_data.py"

    return put


# --- entry points ---------------------------------------------------------------------------------


def test_a_packages_data_set_loads_by_its_name_with_its_own_settings(install: Install) -> None:
    install()
    data = load_dataset("mine", seed=0, options={"records": 90})
    assert (data.shape, data.classes, data.task) == ((5,), 3, "tabular")
    assert len(data.train_y) + len(data.test_y) + len(data.aux_y) == 90
    with pytest.raises(UserError, match=r"Did you mean 'records'"):
        load_dataset("mine", seed=0, options={"record": 90})
    with pytest.raises(UserError, match=r"Unknown dataset 'mind'.*Did you mean 'mine'"):
        load_dataset("mind", seed=0)


def test_the_list_names_packages_data_sets_broken_ones_with_the_reason_and_taken_names(
    install: Install,
) -> None:
    install(mine="my_data:load", digits="my_data:load", absent="my_data:none", nowhere="no_such:x")
    text = " ".join(
        CliRunner().invoke(app, ["list", "datasets"], env={"COLUMNS": "400"}).stdout.split()
    )
    assert "Records of the package. my_data:load of my-package" in text
    for said in (
        "my_data:load of my-package: the name is taken by a data set of leakbench itself.",
        "my_data:none of my-package: AttributeError",
        "no_such:x of my-package: ModuleNotFoundError",
    ):
        assert said in text
    assert load_dataset("digits", seed=0).task == "image"
    for name, reason in (("absent", "AttributeError"), ("nowhere", "ModuleNotFoundError")):
        with pytest.raises(UserError, match=rf"'{name}' \(.* of my-package\) is broken: {reason}"):
            load_dataset(name, seed=0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("load = 3", r"is broken: TypeError"),
        ("def load(): pass", r"is broken: it must be a function with a keyword argument seed"),
        ("def load(*, seed): return {}", r"must be a bench.data.Dataset, got dict"),
        ("def load(*, seed): return 1 / 0", r"cannot be loaded: ZeroDivisionError"),
    ],
)
def test_a_broken_loader_gets_one_sentence_with_its_origin(
    install: Install, body: str, message: str
) -> None:
    install(body)
    with pytest.raises(UserError, match=rf"\(my_data:load of my-package\) {message}"):
        load_dataset("mine", seed=0)


def sound(**changes: Any) -> Any:
    x, y = torch.rand(6, 3, 16, 16), torch.tensor([0, 1, 2, 0, 1, 2])
    parts = {f"{p}_{k}": v for p in ("train", "test", "aux") for k, v in (("x", x), ("y", y))}
    made = Dataset(name="a", task="image", class_names=("a", "b", "c"), **parts)
    return replace(made, **changes)


SPOILED = torch.rand(6, 3, 16, 16).index_put((torch.tensor(0),), torch.tensor(float("nan")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "text"}, r"image, tabular or signal, got 'text'"),
        ({"class_names": ["a", "b", "c"]}, r"class_names of it must be two texts or more"),
        (
            {"train_x": np.zeros((6, 3, 16, 16), np.float32)},
            r"train_x of it .* got ndarray of float32",
        ),
        (
            {"test_x": torch.rand(6, 3, 16, 16).double()},
            r"test_x of it must be float32 \[N, channels",
        ),
        ({"aux_x": torch.rand(6, 16, 16)}, r"aux_x of it must be .* got Tensor .* \[6, 16, 16\]"),
        ({"test_x": torch.rand(0, 3, 16, 16)}, r"it has no test samples"),
        (
            {"aux_x": torch.rand(6, 3, 16, 17)},
            r"one shape, got \[3, 16, 16\] in train_x and \[3, 16, 17\]",
        ),
        ({"train_x": SPOILED}, r"train_x of it holds NaN"),
        ({"test_x": 255 * torch.ones(6, 3, 16, 16)}, r"lie in \[0, 1\], got 255 to 255 in test_x"),
        (
            {"train_y": torch.zeros(6)},
            r"train_y of it must be int64 \[6\], got Tensor of torch.float",
        ),
        ({"train_y": torch.zeros(5, dtype=torch.int64)}, r"must be int64 \[6\]"),
        ({"aux_y": torch.full((6,), 3)}, r"labels of it must lie in 0..2, got 3 to 3 in aux_y"),
        ({"train_clients": torch.zeros(6)}, r"train_clients of it must be int64 \[6\]"),
        ({"train_x": torch.rand(6, 3, 16, 10)}, r"sides >= 11 .* got \[3, 16, 10\]"),
        ({"train_y": torch.ones(6, dtype=torch.int64)}, r"all of one class, 'b', so there is noth"),
        ({"class_names": ("a", "b", "a")}, r"class_names of it has 'a' twice"),
        ({"categorical": ((0, 2),)}, r"ranges .* of its 0 columns, got \(0, 2\)"),
        ({"categorical": ((2,),)}, r"ranges .* of its 0 columns, got \(2,\)"),
    ],
)
def test_what_is_wrong_with_a_data_set_is_said_in_one_sentence(
    changes: dict[str, Any], message: str
) -> None:
    assert check_dataset(sound(), what="it").shape == (3, 16, 16)
    with pytest.raises(UserError, match=message):
        check_dataset(sound(**changes), what="it")


def planned(folder: Path, dataset: str, **protocol: object) -> Plan:
    lines = {"name": '"fedavg"', "clients": 3, "rounds": 1, "local_steps": 1, "batch": 2} | protocol
    (folder / "suite.toml").write_text(
        'name = "own"\nversion = 1\ncheckpoints = ["init"]\naudit = 0\n\n[protocol]\n'
        + "".join(f"{k} = {v}\n" for k, v in lines.items())
        + f'\n[[tasks]]\ndataset = "{dataset}"\nmodel = "mlp_spm"\n\n[[threats]]\nvictims = 2\n'
        'batch = 4\n\n[[defenses]]\nname = "none"\n\n[[attacks]]\nname = "prior_only"\n'
    )
    return expand(suite.load(folder / "suite.toml"))


def test_files_decide_a_trainings_key_by_their_content_and_names_alone(tmp_path: Path) -> None:
    """Copied elsewhere, or later, they are the same; in another class's folder they are not."""
    registry, seen = discover(), []

    def key(folder: str) -> str:
        job = planned(tmp_path, f"folder:{tmp_path / folder}").trainings[0]
        return Keys(registry, Environment())._read_fingerprint(job.task.dataset)

    for name in ("cats/a.png", "cats/b.png", "dogs/c.png"):
        file = tmp_path / "here" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
    seen.append(key("here"))
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)
    os.utime(tmp_path / "there" / "cats" / "a.png", (0, 0))
    assert key("there") == seen[0]
    (tmp_path / "there" / "dogs" / "c.png").write_bytes(b"dogs/d.png")
    seen.append(key("there"))
    (tmp_path / "here" / "cats" / "b.png").rename(tmp_path / "here" / "dogs" / "b.png")
    seen.append(key("here"))
    assert len(set(seen)) == 3


def test_a_packages_loader_and_its_files_decide_a_trainings_key_and_no_other(
    install: Install, tmp_path: Path
) -> None:
    registry, env = discover(), Environment(data_dir=tmp_path)

    def keys() -> tuple[str, str]:
        made = [planned(tmp_path, name) for name in ("mine", "digits")]
        mine, digits = (Keys(registry, env).train(p.trainings[0]) for p in made)
        return mine, digits

    without = Keys(registry, env).train(planned(tmp_path, "digits").trainings[0])
    path = install()
    before = keys()
    assert before[1] == without
    path.write_text(LOADER + "# as before\n")
    assert keys() == before
    path.write_text(LOADER.replace("standard_normal", "random"))
    assert keys()[0] != before[0]
    path.write_text(LOADER)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "records.csv").write_text("1,2\n")
    assert keys()[0] != before[0]
    assert keys()[1] == without


# --- publishers' files ----------------------------------------------------------------------------


def owners(data: Dataset) -> tuple[set[int], set[int]]:
    assert data.train_clients is not None
    assert data.aux_clients is not None
    return set(data.train_clients.tolist()), set(data.aux_clients.tolist())


def rows(x: torch.Tensor) -> set[bytes]:
    return {r.numpy().tobytes() for r in x}


WRITERS = [f"f{i:04d}" for i in range(15)]


def test_femnist_is_split_by_writers(tmp_path: Path) -> None:
    files = {"all_data_0.json": leaf(WRITERS[:9]), "all_data_1.json": leaf(WRITERS[9:])}
    write_leaf(tmp_path, files)
    of = {
        np.float32(x).tobytes(): writer
        for content in files.values()
        for writer in content["users"]
        for x in content["user_data"][writer]["x"]
    }
    data = load_dataset("femnist", seed=0, data_dir=tmp_path)
    assert (data.shape, data.classes) == ((1, 28, 28), 62)
    assert [data.class_names[i] for i in (0, 9, 10, 35, 36, 61)] == ["0", "9", "A", "Z", "a", "z"]
    writers = [{of[row] for row in rows(x)} for x in (data.train_x, data.test_x, data.aux_x)]
    assert [len(w) for w in writers] == [9, 3, 3]
    assert set.union(*writers) == set(WRITERS)
    train, aux = owners(data)
    assert (len(train), len(aux), train & aux) == (9, 3, set())
    assert data.train_clients is not None
    for one in train:  # a client is one writer
        held = data.train_x[data.train_clients == one]
        assert len({of[row] for row in rows(held)}) == 1
    fewer = load_dataset("femnist", seed=0, data_dir=tmp_path, options={"writers": 5})
    assert len(fewer.train_y) == 3 * 12
    other = load_dataset("femnist", seed=1, data_dir=tmp_path)
    assert rows(other.train_x) != rows(data.train_x)


def test_femnists_folders_train_and_test_are_read_together(tmp_path: Path) -> None:
    write_leaf(tmp_path, {"train/a.json": leaf(WRITERS), "test/a.json": leaf(WRITERS[:3])})
    data = load_dataset("femnist", seed=0, data_dir=tmp_path)
    assert [len(o) for o in owners(data)] == [9, 3]
    assert len(data.train_y) + len(data.test_y) + len(data.aux_y) == 18 * 12


def test_files_that_are_not_leafs_are_refused_with_the_reason(tmp_path: Path) -> None:
    def refused(message: str, content: object, name: str) -> None:
        write_leaf(tmp_path / name, {"all_data_0.json": content})  # type: ignore[dict-item]
        with pytest.raises(UserError, match=message):
            load_dataset("femnist", seed=0, data_dir=tmp_path / name)

    with pytest.raises(UserError, match=r"holds neither LEAF's all_data_\*\.json"):
        load_dataset("femnist", seed=0, data_dir=tmp_path)
    good = leaf(WRITERS)
    one = good["user_data"][WRITERS[0]]
    other = good | {"user_data": good["user_data"] | {WRITERS[0]: one | {"y": one["y"][1:]}}}
    refused(r"all_data_0\.json is truncated or not in LEAF's format", {"users": ["a"]}, "keys")
    refused(r"ValueError: x must be 12 lists of 784 numbers and y 12", other, "count")
    wide = good | {"user_data": good["user_data"] | {WRITERS[0]: one | {"y": [62] * 12}}}
    refused(r"y must be whole numbers in 0..61", wide, "label")
    large = good | {"user_data": good["user_data"] | {WRITERS[0]: one | {"x": [[10**400] * 784]}}}
    refused(r"OverflowError: int too large", large, "large")
    os.mkfifo(tmp_path / "large" / "femnist" / "all_data_1.json")
    (tmp_path / "large" / "femnist" / "all_data_0.json").write_text(json.dumps(good))
    with pytest.raises(UserError, match=r"all_data_1\.json is no plain file"):
        load_dataset("femnist", seed=0, data_dir=tmp_path / "large")
    (tmp_path / "keys" / "femnist" / "all_data_0.json").write_text('{"users": [')
    with pytest.raises(UserError, match=r"truncated"):
        load_dataset("femnist", seed=0, data_dir=tmp_path / "keys")


def test_uci_har_keeps_subjects_apart_and_standardises_by_the_public_ones(tmp_path: Path) -> None:
    write_har(tmp_path)
    data = load_dataset("uci_har", seed=0, data_dir=tmp_path)
    assert (data.shape, data.classes, data.task) == ((9, 128), 6, "signal")
    assert [len(o) for o in owners(data)] == [8, 2]
    train, aux = owners(data)
    assert train | aux == set(range(1, 11))
    assert data.aux_x.mean(dim=(0, 2)).abs().max() < 1e-5
    assert (data.aux_x.std(dim=(0, 2), correction=0) - 1).abs().max() < 1e-4
    # The same windows as in the files: their levels by channel differ by 1 before standardising.
    raw, y, _ = waves((11, 12), each=12, seed=1)
    assert data.test_y.tolist() == y.tolist()
    held = np.corrcoef(data.test_x[5].flatten(1).numpy(), raw[5])[:9, 9:]
    assert np.allclose(held.diagonal(), 1, atol=1e-5)
    place = tmp_path / "uci_har" / "UCI HAR Dataset" / "train"
    (place / "y_train.txt").write_text("1\n2\n")
    with pytest.raises(UserError, match=r"120 windows, 2 labels and 120 subjects"):
        load_dataset("uci_har", seed=0, data_dir=tmp_path)
    (place / "Inertial Signals" / "body_acc_x_train.txt").write_text(" 1.0 2.0\n")
    with pytest.raises(UserError, match=r"rows of 128 finite number\(s\)"):
        load_dataset("uci_har", seed=0, data_dir=tmp_path)
    with pytest.raises(UserError, match=r"no such file: .*body_acc_x_train\.txt"):
        load_dataset("uci_har", seed=0, data_dir=tmp_path / "uci_har")


def test_svhn_and_stl10_are_read_from_their_publishers_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scipy.io import savemat
    from torchvision import datasets

    for reader in (datasets.SVHN, datasets.STL10):  # the made files have other checksums
        monkeypatch.setattr(reader, "_check_integrity", lambda self: True)
    rng = np.random.default_rng(0)
    (tmp_path / "svhn").mkdir()
    kept = {}
    for part, count in (("train", 40), ("test", 10)):
        x = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
        kept[part] = x
        y = (np.arange(count, dtype=np.uint8) % 10 + 1)[:, None]  # 10 stands for the digit 0
        savemat(tmp_path / "svhn" / f"{part}_32x32.mat", {"X": x, "y": y})
    data = load_dataset("svhn", seed=0, data_dir=tmp_path)
    assert (data.shape, data.class_names) == ((3, 32, 32), tuple("0123456789"))
    expected = kept["test"].transpose(3, 2, 0, 1) / np.float32(255)
    assert rows(data.test_x) == rows(torch.from_numpy(expected))
    place = next(i for i in range(10) if torch.equal(data.test_x[i], torch.from_numpy(expected[9])))
    assert int(data.test_y[place]) == 0
    folder = tmp_path / "stl10" / "stl10_binary"
    folder.mkdir(parents=True)
    names = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    (folder / "class_names.txt").write_text("\n".join(names) + "\n")
    (folder / "fold_indices.txt").write_text("0 1\n")
    for part, count in (("train", 40), ("test", 10)):
        x = rng.integers(0, 256, (count, 3, 96, 96), dtype=np.uint8)  # columns first
        kept[part] = x
        x.tofile(folder / f"{part}_X.bin")
        (np.arange(count, dtype=np.uint8) % 10 + 1).tofile(folder / f"{part}_y.bin")
    data = load_dataset("stl10", seed=0, data_dir=tmp_path)
    assert (data.shape, data.class_names) == ((3, 96, 96), tuple(names))
    upright = kept["test"].transpose(0, 1, 3, 2) / np.float32(255)
    assert rows(data.test_x) == rows(torch.from_numpy(np.ascontiguousarray(upright)))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"svhn is not in .*--download"):
        load_dataset("svhn", seed=0, data_dir=tmp_path)


# --- own arrays -----------------------------------------------------------------------------------


def write_features(path: Path, **changes: object) -> Path:
    x, y, _ = waves(range(10), each=6, channels=3, length=20)
    arrays: dict[str, Any] = {
        "train_x": x, "train_y": y, "test_x": x[:12] + 1, "test_y": y[:12],
    } | changes  # fmt: skip
    np.savez(path, **arrays)
    return path


def test_an_npz_file_holds_signals_or_a_table(tmp_path: Path) -> None:
    data = load_dataset(f"npz:{write_features(tmp_path / 'signals.npz')}", seed=0)
    assert (data.task, data.shape, data.classes) == ("signal", (3, 20), 6)
    assert data.aux_x.mean(dim=(0, 2)).abs().max() < 1e-5
    table = np.random.default_rng(0).standard_normal((60, 5))
    table[:, 3:] = np.eye(2)[np.arange(60) % 2]
    path = write_features(
        tmp_path / "table.npz",
        train_x=table, test_x=table[:12], categorical=np.array([[3, 5]]),
        class_names=np.array(list("abcdef")),
    )  # fmt: skip
    data = load_dataset(f"npz:{path}", seed=0)
    assert (data.task, data.shape, data.categorical) == ("tabular", (5,), ((3, 5),))
    assert data.class_names == tuple("abcdef")
    assert torch.equal(data.train_x[:, 3:].sum(dim=1), torch.ones(len(data.train_x)))
    assert data.aux_x[:, :3].mean(dim=0).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_x": np.zeros((60, 3, 20), int)}, r"train_x of .* must be floating-point numbers"),
        ({"test_x": np.zeros((12, 3, 20, 2))}, r"test_x of .*\[N, features\] or \[N, channels, l"),
        ({"test_x": np.zeros((12, 3, 21))}, r"must have one shape, got \[3, 20\] and \[3, 21\]"),
        ({"test_x": np.zeros((12, 5))}, r"must have one shape, got \[3, 20\] and \[5\]"),
        ({"train_y": np.zeros(60)}, r"train_y of .* must be 60 integers"),
        ({"train_x": np.full((60, 3, 20), np.nan)}, r"holds NaN"),
        ({"train_clients": np.zeros(60)}, r"train_clients of .* must be 60 integers or texts"),
        ({"train_clients": np.zeros(60, int)}, r"1 client\(s\) cannot be parted into 2"),
        ({"categorical": np.array([[0, 2]])}, r"columns of a table"),
    ],
)
def test_wrong_arrays_get_one_clear_sentence(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_features(tmp_path / "a.npz", **changes)
    with pytest.raises(UserError, match=message):
        load_dataset(f"npz:{path}", seed=0)


# --- clients of the data's own --------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    clients=st.integers(1, 8),
    least=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=80)
def test_a_natural_client_is_one_of_the_datas_own_and_whole(
    sizes: list[int], clients: int, least: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    whose = rng.permutation(np.repeat(np.arange(len(sizes)) * 7, sizes))
    dealing = Dealing(how="natural", clients=clients, least=least)
    labels = np.zeros(len(whose), int)
    if sum(s >= least for s in sizes) < clients:
        with pytest.raises(UserError, match=rf"clients hold at least {least} training sample"):
            dealing.deal(labels, rng, whose)
        return
    shares = dealing.deal(labels, rng, whose)
    dealt = [set(whose[s].tolist()) for s in shares]
    assert all(len(d) == 1 for d in dealt)
    assert len(set.union(*dealt)) == len(shares) == clients
    for share, (one,) in zip(shares, dealt, strict=True):
        assert share.tolist() == np.flatnonzero(whose == one).tolist()
        assert len(share) >= least


@given(clients=st.lists(st.integers(0, 12), min_size=3, max_size=60), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_parts_by_clients_share_none_and_cover_all(clients: list[int], seed: int) -> None:
    known = set(clients)
    rng = np.random.default_rng(seed)
    if len(known) < 3:
        with pytest.raises(UserError, match="cannot be parted into 3"):
            carve_clients(np.array(clients), fractions=(0.2, 0.2), rng=rng)
        return
    parts = carve_clients(np.array(clients), fractions=(0.2, 0.2), rng=rng)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(clients)))
    held = [{clients[i] for i in part} for part in parts]
    assert all(held)
    assert sum(map(len, held)) == len(known)


def test_clients_may_be_named_by_texts_and_public_ones_are_others(tmp_path: Path) -> None:
    names = np.array([f"person {i}" for i in np.repeat(range(10), 6)])
    path = write_features(tmp_path / "a.npz", train_clients=names)
    data = load_dataset(f"npz:{path}", seed=0)
    train, aux = owners(data)
    assert (len(train), len(aux), train & aux) == (8, 2, set())
    pixels = np.zeros((60, 16, 16), np.uint8)
    images = tmp_path / "images.npz"
    np.savez(
        images, train_images=pixels, train_labels=np.arange(60) % 3, train_clients=names,
        test_images=pixels, test_labels=np.arange(60) % 3,
    )  # fmt: skip
    assert [len(o) for o in owners(load_dataset(f"npz:{images}", seed=0))] == [8, 2]


def test_too_few_own_clients_end_a_run_before_it_begins(tmp_path: Path) -> None:
    registry, env = discover(), Environment()
    natural = {"partition": '"natural"'}
    with pytest.raises(UserError, match=r"own: digits: .* does not say whose its samples are"):
        check(planned(tmp_path, "digits", **natural), registry, env)
    names = np.repeat(range(10), 6)
    path = write_features(tmp_path / "a.npz", train_clients=names)
    check(planned(tmp_path, f"npz:{path}", clients=8, **natural), registry, env)
    with pytest.raises(UserError, match=r"8 of the data's own 8 clients .* but clients = 9"):
        check(planned(tmp_path, f"npz:{path}", clients=9, **natural), registry, env)


def test_the_floor_knows_how_alike_the_labels_of_a_public_client_are() -> None:
    """Where everyone has one class alone, naming the same class K times is often all right; where
    labels are mixed, it never is."""
    rng = np.random.default_rng(0)
    whose = np.repeat(np.arange(60), 8)
    y = torch.from_numpy(whose % 6)
    x = torch.from_numpy(rng.standard_normal((480, 4))).float()
    given = {"classes": 6, "aux_x": x, "aux_y": y, "aux_clients": torch.from_numpy(whose)}
    private = {"x": x[:96].view(12, 8, 4), "y": y[:96].view(12, 8)}
    dealing = Dealing(how="natural", clients=5, least=8)
    own = floors(**private, **given, dealing=dealing)
    mixed = floors(**private, **given, dealing=None)
    # Of one-class clients no class is present more often than not, so the best count is none.
    assert own["leacc"] == pytest.approx([5 / 6] * 12)
    assert mixed["leacc"] == pytest.approx([1 / 6] * 12)
    unknown = {k: v for k, v in given.items() if k != "aux_clients"}
    assert floors(**private, **unknown, dealing=dealing) == mixed


def test_a_constant_column_is_no_division_by_zero() -> None:
    data = from_features(
        name="one", train=(np.ones((3, 2)), np.arange(3) % 2), test=(np.ones((2, 2)), np.arange(2)),
        aux=(np.ones((2, 2)), np.arange(2)), class_names=("a", "b"),
    )  # fmt: skip
    assert torch.equal(data.train_x, torch.zeros(3, 2))
