"""Datasets, splits and partitions."""

import itertools
import os
import zipfile
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from bench.data import builtin, load_dataset
from bench.data.dataset import Dataset, images_to_tensor
from bench.data.partition import dirichlet, iid, shards


def rows(x: torch.Tensor) -> set[bytes]:
    return {r.numpy().tobytes() for r in x}


@pytest.mark.parametrize("name", ["digits", "photos", "breast_cancer"])
def test_embedded_sets_load_with_disjoint_parts(name: str, request: pytest.FixtureRequest) -> None:
    once_loaded = name in ("digits", "photos")
    data = request.getfixturevalue(name) if once_loaded else load_dataset(name, seed=0)
    parts = [rows(x) for x in (data.train_x, data.test_x, data.aux_x)]
    for i in range(3):
        for j in range(i):
            assert not parts[i] & parts[j]
    for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        assert len(x) == len(y) > 0
        assert set(y.tolist()) <= set(range(data.classes))
    if data.task == "image":
        assert data.train_x.min() >= 0
        assert data.train_x.max() <= 1


def test_the_seed_decides_the_split(digits: Dataset) -> None:
    again, other = load_dataset("digits", seed=0), load_dataset("digits", seed=1)
    assert torch.equal(digits.train_x, again.train_x)
    assert not torch.equal(digits.train_x, other.train_x)


def fit(form: np.ndarray, sequence: np.ndarray) -> int:
    """How many of a form's labels stand in the sequence's order."""
    matcher = SequenceMatcher(None, sequence.tolist(), form.tolist(), autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())


def test_forms_of_digits_begin_where_the_sequence_of_labels_begins_anew() -> None:
    labels = load_digits().target
    sequence = labels[:130]
    forms = np.split(labels, builtin.FORMS[1:])
    assert all(120 < len(form) <= 130 for form in forms)
    assert sum(len(form) - fit(form, sequence) for form in forms) <= 1
    for one, two in itertools.pairwise(forms):
        both = np.concatenate([one, two])
        fits = {
            shift: sum(fit(f, sequence) for f in np.split(both, [len(one) + shift]))
            for shift in range(-3, 4)
        }
        assert fits[0] == max(fits.values())  # a last digit may fit neither


def form_of(count: int) -> np.ndarray:
    """The form that each of the first digits of the file is of."""
    return np.searchsorted(builtin.FORMS, np.arange(count), side="right") - 1


def test_digits_of_one_writer_are_all_in_one_part() -> None:
    raw = load_digits()
    images = images_to_tensor((raw.images / 16).astype(np.float32), size=16)
    place = {x.numpy().tobytes(): i for i, x in enumerate(images)}
    form = form_of(len(images))
    splits = set()
    for seed in range(5):
        data = load_dataset("digits", seed=seed)
        parts = []
        for x, y in ((data.test_x, data.test_y), (data.aux_x, data.aux_y),
                     (data.train_x, data.train_y)):  # fmt: skip
            positions = [place[one.numpy().tobytes()] for one in x]
            assert raw.target[positions].tolist() == y.tolist()
            counts = y.bincount(minlength=10)
            assert counts.min() >= 0.85 * counts.max()
            parts.append(frozenset(form[positions].tolist()))
            assert sorted(positions) == np.flatnonzero(np.isin(form, list(parts[-1]))).tolist()
        assert [len(forms) for forms in parts] == [3, 3, 8]
        assert len(frozenset.union(*parts)) == 14
        splits.add(tuple(parts))
    assert len(splits) == 5


def test_tabular_features_are_standardised_by_the_public_part() -> None:
    data = load_dataset("breast_cancer", seed=0)
    assert data.aux_x.mean(dim=0).abs().max() < 1e-5
    assert (data.aux_x.std(dim=0, correction=0) - 1).abs().max() < 1e-4


def test_photos_have_ten_classes_in_every_part_and_no_flat_tile(photos: Dataset) -> None:
    assert photos.classes == 10
    for y in (photos.train_y, photos.test_y, photos.aux_y):
        assert y.bincount(minlength=10).min() >= 20
    assert photos.train_x.flatten(1).std(dim=1, correction=0).min() >= 0.0499


@given(
    labels=st.lists(st.integers(0, 4), min_size=30, max_size=120),
    clients=st.integers(1, 10),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**31),
    minimum=st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_partitions_cover_every_sample_once_and_honour_the_minimum(
    labels: list[int], clients: int, alpha: float, seed: int, minimum: int
) -> None:
    y = np.array(labels)
    rng = np.random.default_rng(seed)
    shares = dirichlet(y, clients=clients, alpha=alpha, rng=rng, minimum=minimum)
    assert len(shares) == clients
    assert min(map(len, shares)) >= minimum
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(y)))
    even = iid(y, clients=clients, rng=rng)
    assert sorted(np.concatenate(even).tolist()) == list(range(len(y)))
    assert max(map(len, even)) - min(map(len, even)) <= 1


def test_a_small_alpha_skews_labels_more_than_a_large_one() -> None:
    y = np.repeat(np.arange(10), 200)

    def purity(alpha: float) -> float:
        shares = dirichlet(y, clients=10, alpha=alpha, rng=np.random.default_rng(0))
        return float(np.mean([np.bincount(y[s], minlength=10).max() / len(s) for s in shares]))

    assert purity(0.1) > 0.5 > 0.2 > purity(1000.0)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("mnist", (1, 28, 28), 10),
        ("fashion_mnist", (1, 28, 28), 10),
        ("cifar10", (3, 32, 32), 10),
        ("cifar100", (3, 32, 32), 100),
        ("adult", (108,), 2),
    ],
)
def test_sets_of_the_data_folder_load(
    data_dir: Path, name: str, shape: tuple[int, ...], classes: int
) -> None:
    data = load_dataset(name, seed=0, data_dir=data_dir)
    assert data.shape == shape
    assert data.classes == classes
    sample = 500
    assert not rows(data.train_x[:sample]) & rows(data.aux_x) or name == "adult"


def test_adult_groups_are_one_hot(data_dir: Path) -> None:
    data = load_dataset("adult", seed=0, data_dir=data_dir)
    assert len(data.categorical) == 8
    for first, last in data.categorical:
        assert torch.equal(data.train_x[:, first:last].sum(dim=1), torch.ones(len(data.train_x)))


def test_adult_as_codes_has_one_number_a_column(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    jobs = np.array(["Sales", "?", "Armed-Forces"])[rng.integers(0, 3, 500)]
    ages = rng.integers(17, 90, 500)
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data").write_text(
        "".join(
            f"{age}, Private, 77516, Bachelors, 13, Divorced, {job}, Wife, White, Male, 0, 0, 40, "
            f"Cuba, {'>50K' if age > 50 else '<=50K'}\n"
            for age, job in zip(ages, jobs, strict=True)
        )
    )
    load = partial(load_dataset, "adult", seed=0, data_dir=tmp_path)
    codes, one_hot = load(options={"features": "codes"}), load(options={})
    assert codes.shape == (14,)
    assert codes.categorical == ()
    assert torch.equal(codes.train_y, one_hot.train_y)
    # "?" sorts before the others: the codes are 0, 1, 2 in the order of the one-hot columns.
    first, last = one_hot.categorical[3]
    place = one_hot.train_x[:, first:last].argmax(dim=1)
    public = one_hot.aux_x[:, first:last].argmax(dim=1).double()
    expected = (place - public.mean()) / public.std(correction=0)
    assert torch.allclose(codes.train_x[:, 6].double(), expected, atol=1e-6)
    assert torch.allclose(codes.train_x[:, 0], one_hot.train_x[:, 0])
    with pytest.raises(ValueError, match=r"features"):
        load(options={"features": "numbers"})


PARTS = {"train": 60, "test": 12}


def write_npz(path: Path, **changes: object) -> Path:
    rng = np.random.default_rng(0)
    arrays: dict[str, object] = {
        "train_images": rng.integers(0, 255, (60, 16, 16), dtype=np.uint8),
        "train_labels": np.arange(60, dtype=np.uint8) % 3,
        "test_images": rng.integers(0, 255, (12, 16, 16), dtype=np.uint8),
        "test_labels": np.arange(12, dtype=np.uint8) % 3,
    } | changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})  # type: ignore[arg-type]
    return path


def test_an_npz_file_loads(tmp_path: Path) -> None:
    data = load_dataset(f"npz:{write_npz(tmp_path / 'a.npz')}", seed=0)
    assert data.shape == (1, 16, 16)
    assert len(data.train_y) + len(data.aux_y) == 60
    columns = {f"{part}_labels": np.arange(n)[:, None] % 3 for part, n in PARTS.items()}
    again = load_dataset(f"npz:{write_npz(tmp_path / 'b.npz', **columns)}", seed=0)
    assert torch.equal(again.train_y, data.train_y)


def twins(path: Path, name: str) -> Path:
    """An npz file whose images' header is read of one array, and the values of another."""
    with zipfile.ZipFile(write_npz(path), "a") as archive, archive.open(name, "w") as file:
        np.save(file, np.zeros((60, 5)))
    return path


def test_a_folder_of_images_loads(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for i in range(8):
            pixels = rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{i}.png")
    data = load_dataset(f"folder:{tmp_path}", seed=0, options={"size": 16})
    assert data.shape == (3, 16, 16)
    assert data.class_names == ("a", "b")
    (tmp_path / "a" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"cannot read the image .*broken\.png"):
        load_dataset(f"folder:{tmp_path}", seed=0)


def test_photographs_stand_as_a_viewer_shows_them(tmp_path: Path) -> None:
    """White above black in the file, to be shown turned: white at the right."""
    from PIL import Image

    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:20] = 255
    turned = Image.Exif()
    turned[0x0112] = 6
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for i in range(8):
            Image.fromarray(pixels).save(tmp_path / label / f"{i}.jpg", exif=turned, quality=95)
    data = load_dataset(f"folder:{tmp_path}", seed=0, options={"size": 16})
    columns = data.train_x[0, 0].mean(dim=0)
    assert columns[10:].min() > 0.9
    assert columns[:6].max() < 0.1


def test_bad_data_gets_one_clear_sentence(tmp_path: Path) -> None:
    good = write_npz(tmp_path / "good.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(good[: len(good) // 2])
    shape = np.zeros((60, 16, 16, 2), dtype=np.uint8)
    cases = {
        "digit": r"Did you mean 'digits'",
        "zip:x": r"expected folder:PATH or npz:PATH",
        "mnist": r"--data-dir",
        f"npz:{tmp_path / 'none.npz'}": r"no such file",
        f"npz:{tmp_path / 'half.npz'}": r"truncated or no npz file",
        f"npz:{write_npz(tmp_path / 's.npz', train_images=shape)}": r"must be uint8 \[N, H, W\]",
        f"npz:{write_npz(tmp_path / 'm.npz', test_labels=None)}": r"lacks the array\(s\) test_lab",
        f"npz:{write_npz(tmp_path / 'l.npz', train_labels=np.zeros(3, int))}": r"60 integers",
        f"npz:{write_npz(tmp_path / 'w.npz', train_labels=np.zeros((60, 2), int))}": r"60 integers",
        f"npz:{twins(tmp_path / 't.npz', 'train_images.npy')}": r"two arrays named train_images",
        f"npz:{twins(tmp_path / 'u.npz', 'train_images')}": r"two arrays named train_images",
        f"folder:{tmp_path / 'nowhere'}": r"no such folder",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load_dataset(name, seed=0)
    with pytest.raises(ValueError, match=r"Did you mean 'size'"):
        load_dataset("digits", seed=0, options={"sizes": 16})
    with pytest.raises(ValueError, match=r"validation of dataset digits must be true or false"):
        load_dataset("digits", seed=0, options={"validation": "yes"})
    with pytest.raises(ValueError, match=r"size must be >= 11"):
        load_dataset("digits", seed=0, options={"size": 8})
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data").write_text("39, State-gov, 77516\n" * 200)
    with pytest.raises(ValueError, match=r"truncated or not the UCI file"):
        load_dataset("adult", seed=0, data_dir=tmp_path)
    (tmp_path / "adult" / "adult.data").unlink()
    os.mkfifo(tmp_path / "adult" / "adult.data")
    with pytest.raises(ValueError, match=r"adult\.data is no plain file"):
        load_dataset("adult", seed=0, data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"is not in .*--download"):
        load_dataset("cifar10", seed=0, data_dir=tmp_path)


@given(clients=st.integers(1, 12), each=st.integers(1, 3), classes=st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_shards_deal_equal_shares_of_few_labels(clients: int, each: int, classes: int) -> None:
    y = np.random.default_rng(1).integers(0, classes, 240)
    dealt = shards(y, clients=clients, each=each, rng=np.random.default_rng(0))
    assert sorted(np.concatenate(dealt).tolist()) == list(range(240))
    sizes = [len(s) for s in dealt]
    assert max(sizes) - min(sizes) <= each
    # A shard straddles at most as many borders between labels as there are.
    assert sum(len(set(y[s].tolist())) for s in dealt) <= clients * each + classes - 1
