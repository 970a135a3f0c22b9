"""Image sets that installed libraries ship: no download, for tries, tests and CI."""

from typing import Literal

import numpy as np

from bench.data.dataset import Dataset, from_arrays
from bench.seeding import numpy_generator

FORMS = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667)
"""Where each form begins in scikit-learn's digits.

The file names no writers. It holds the test part of UCI's Optical Recognition of Handwritten
Digits. Its labels are one sequence of 130 digits 14 times over, at times without a few of them: the
forms that were filled in. UCI speaks of 13 writers, but no two forms are of one hand: of the images
that are nearest to those of half a form, per class and among halves of all forms, 23 to 72 % are in
its own other half, and at most 18 % in any other form's.
"""


def digits(*, seed: int, size: int = 16) -> Dataset:
    """1797 handwritten digits of scikit-learn, 8x8 gray, resized (SSIM needs 11 pixels).

    They are split by writers: of the 14 forms that they filled in, three are test, three auxiliary
    and eight training, as the seed decides. A random split would show the hand that wrote a
    private image among the public ones.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = (raw.images / 16.0).astype(np.float32)
    rng = numpy_generator(seed, "split", "digits")
    forms = np.split(np.arange(len(images)), FORMS[1:])
    test, aux, train = (
        rng.permutation(np.concatenate([forms[i] for i in part]))
        for part in np.split(rng.permutation(len(forms)), (3, 6))
    )
    return from_arrays(
        name="digits",
        train=(images[train], raw.target[train]),
        test=(images[test], raw.target[test]),
        aux=(images[aux], raw.target[aux]),
        class_names=tuple(map(str, range(10))),
        size=size,
    )


_NAMES = (
    "astronaut cat coffee rocket retina immunohistochemistry hubble_deep_field "
    "stereo_motorcycle china flower"
)
PHOTOGRAPHS = tuple(_NAMES.split())
"""Ten colour photographs of scikit-image and scikit-learn; each is a class."""


def _photograph(name: str) -> np.ndarray:
    """One photograph, uint8 [H, W, 3]."""
    if name in ("china", "flower"):
        from sklearn.datasets import load_sample_image

        return load_sample_image(f"{name}.jpg")
    from skimage import data

    if name == "stereo_motorcycle":  # the right image is a near-duplicate of the left
        return data.stereo_motorcycle()[0][..., :3]
    return getattr(data, name)()[..., :3]


MOST_TILES = 400
"""Of a photograph."""


def photos(*, seed: int, size: Literal[16, 32] = 16) -> Dataset:
    """Colour tiles cut without overlap from ten photographs; the class is the photograph.

    Flat tiles (standard deviation below 0.05) and near-duplicates (mean absolute difference
    below 0.02 to an earlier tile) are left out. Each photograph is split by place into bands
    (60 % training, 20 % test, 20 % auxiliary, direction from the seed), since a random split
    puts neighbours of a training tile into the test and inflates accuracy by a tenth.
    At most `MOST_TILES` of a photograph are kept.
    """
    rng = numpy_generator(seed, "split", "photos")
    parts: tuple[list, list, list] = ([], [], [])
    for label, name in enumerate(PHOTOGRAPHS):
        tiles, place = _tiles(_photograph(name), size)
        line = place[:, int(rng.integers(2))]  # bands of whole rows, or of whole columns
        line = line if rng.integers(2) else line.max() - line
        # Bands hold shares of the tiles that are left, since a sky leaves few.
        before = np.searchsorted(np.sort(line), line) / len(line)
        for part, low, high in zip(parts, (0.0, 0.6, 0.8), (0.6, 0.8, 1.0), strict=True):
            members = rng.permutation(np.flatnonzero((before >= low) & (before < high)))
            members = members[: round(MOST_TILES * (high - low))]
            part.extend((tiles[i], label) for i in members)
    train, test, aux = ((np.stack([t for t, _ in p]), np.array([c for _, c in p])) for p in parts)
    return from_arrays(name="photos", train=train, test=test, aux=aux, class_names=PHOTOGRAPHS)


def _tiles(photo: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct, textured tiles [N, size, size, 3] and their (row, column) in the grid [N, 2]."""
    rows, columns = photo.shape[0] // size, photo.shape[1] // size
    grid = photo[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    tiles = grid.swapaxes(1, 2).reshape(-1, size, size, 3)
    place = np.stack(np.divmod(np.arange(len(tiles)), columns), axis=1)
    textured = tiles.reshape(len(tiles), -1).std(axis=1) / 255 >= 0.05
    tiles, place = tiles[textured], place[textured]
    flat = tiles.reshape(len(tiles), -1).astype(np.float32) / 255
    keep = np.zeros(len(flat), dtype=bool)
    means = flat.mean(axis=1)
    for i in range(len(flat)):
        near = keep & (np.abs(means - means[i]) < 0.02)  # |mean| bounds the mean |.|
        keep[i] = not near.any() or np.abs(flat[near] - flat[i]).mean(axis=1).min() >= 0.02
    return tiles[keep], place[keep]
