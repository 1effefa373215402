"""Readers of the data sets that the demo, the tests, the benchmarks and the experiments use.

Files come from the folder named by the environment variable LAPWING_DATA; nothing is downloaded. Images are float32
(N, channels, height, width) in [0, 1]; classes are int64.

Example:
    >>> data = datasets.images("mnist", "test")
    >>> data.inputs.shape, data.targets.shape
    (torch.Size([10000, 1, 28, 28]), torch.Size([10000]))
"""

import gzip
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapwing.errors import BadData, CorruptFile

IDX = {"mnist": "mnist", "fashion": "fashion-mnist", "kmnist": "kmnist", "notmnist": "notmnist"}
MOSAICS = {
    ("cifar10", "train"): ("cifar10", ("train_1.webp", "train_2.webp")),
    ("cifar10", "test"): ("cifar10", ("test.webp",)),
    ("svhn", "test"): ("svhn", ("test_1.webp",)),
}
NAMES = (*IDX, "cifar10", "svhn", "digits")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs (N, …) and targets (N, …), on the CPU.

    `torch.utils.data.TensorDataset(data.inputs, data.targets)` feeds a DataLoader; `(data.inputs, data.targets)` is
    accepted by `lapwing.fit` as it is.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: slice | Tensor) -> "Dataset":
        """A part of the data: a slice, a mask or a tensor of indices."""
        return Dataset(self.inputs[index], self.targets[index])

    def split(self, *sizes: int, generator: torch.Generator | None = None) -> tuple["Dataset", ...]:
        """Disjoint random parts of the given sizes; what is left over makes a last part if there is any."""
        if min(sizes) < 0 or sum(sizes) > len(self):
            raise BadData(f"parts of {sizes} items do not fit into {len(self)}")
        rest = len(self) - sum(sizes)
        order = torch.randperm(len(self), generator=generator)
        return tuple(self[part] for part in order.split([*sizes, rest] if rest else list(sizes)))


@dataclass(frozen=True, eq=False)
class Folds:
    """A table (N, d) with targets (N,) and the index sets of its train and test splits, in float64."""

    inputs: Tensor
    targets: Tensor
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    def fold(self, k: int) -> tuple[Dataset, Dataset]:
        """Training and test part of split k, in the table's own units."""
        whole = Dataset(self.inputs, self.targets)
        return whole[self.train[k]], whole[self.test[k]]


def folder() -> Path:
    """The folder named by LAPWING_DATA."""
    name = os.environ.get("LAPWING_DATA", "")
    if not name:
        raise BadData("LAPWING_DATA is not set: let it name the folder that holds mnist/, notmnist/, cifar10/, …")
    if not Path(name).is_dir():
        raise BadData(f"LAPWING_DATA={name} is not a folder: let it name the one that holds mnist/, notmnist/, …")
    return Path(name)


def images(name: str, split: str = "test") -> Dataset:
    """One of mnist, fashion, kmnist, notmnist, cifar10, svhn or digits; split is "train" or "test".

    kmnist, notmnist and svhn have a test part only; digits (8×8, from scikit-learn) have none and are returned whole.
    CIFAR-10's train part is its first 20,000 images, SVHN's test part its first 10,000.
    """
    if split not in ("train", "test"):
        raise BadData(f"split must be 'train' or 'test', got {split!r}")
    if name == "digits":
        return digits()
    if name in IDX:
        prefix = folder() / IDX[name] / ("train" if split == "train" else "t10k")
        pixels = read_idx(prefix.with_name(prefix.name + "-images-idx3-ubyte.gz"))
        labels = read_idx(prefix.with_name(prefix.name + "-labels-idx1-ubyte.gz"))
        return _dataset(pixels[:, None], labels)
    if (name, split) in MOSAICS:
        place, files = MOSAICS[name, split]
        pixels = np.concatenate([read_mosaic(folder() / place / file) for file in files])
        labels = read_table(folder() / place / "labels.npz")[split][: len(pixels)]
        return _dataset(pixels.transpose(0, 3, 1, 2), labels)
    raise BadData(f"there is no data set {name!r} with a {split} part: choose from {', '.join(NAMES)}")


def digits() -> Dataset:
    """The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'lapwing-torch[data]'") from error
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float()[:, None] / 16
    return Dataset(pixels, torch.from_numpy(bunch.target).long())


def uci_regression(name: str) -> Folds:
    """A regression table with its published splits (20; 5 for protein), e.g. `bostonHousing`, `energy`, `kin8nm`."""
    table = read_table(folder() / "uci-regression" / f"{name}.npz")
    train, test = ([torch.from_numpy(row.astype(np.int64)) for row in table[part]] for part in ("train", "test"))
    return Folds(torch.from_numpy(table["X"]), torch.from_numpy(table["y"]), tuple(train), tuple(test))


def uci_classification(name: str) -> Dataset:
    """A classification table without splits, e.g. `australian`, `banana`, `ionosphere`; inputs in float64."""
    table = read_table(folder() / "uci-classification" / f"{name}.npz")
    return Dataset(torch.from_numpy(table["X"]), torch.from_numpy(table["y"]).long())


def tinystories() -> Path:
    """The folder of the 260k-parameter Llama, for `transformers.AutoModelForCausalLM.from_pretrained`."""
    return _existing(folder() / "tinystories-260k")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Images (N, rows, columns) or labels (N,) of a gzipped idx file (LeCun's format, unsigned bytes)."""
    try:
        raw = gzip.decompress(_existing(path).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptFile(f"{path} is not a complete gzip file ({error}): copy it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise CorruptFile(f"{path} is not an idx file of unsigned bytes: copy it again")
    rank = raw[3]
    shape = tuple(np.frombuffer(raw, ">i4", rank, offset=4))
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * rank)
    if values.size != np.prod(shape):
        raise CorruptFile(f"{path} holds {values.size} bytes where its header promises {shape}: copy it again")
    return values.reshape(shape)


def read_mosaic(path: Path) -> NDArray[np.uint8]:
    """Images (N, 32, 32, 3) of a mosaic with 100 images a row, row-major."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("CIFAR-10 and SVHN need Pillow: pip install 'lapwing-torch[data]'") from error
    with Image.open(_existing(path)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    rows = pixels.shape[0] // 32
    return pixels.reshape(rows, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


def read_table(path: Path) -> dict[str, NDArray]:
    """The arrays of an npz file."""
    with np.load(_existing(path)) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _existing(path: Path) -> Path:
    if not path.exists():
        around = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        found = f"the folder holds {', '.join(around)}" if around else f"{path.parent} does not exist"
        raise BadData(f"{path} is missing: {found}")
    return path


def _dataset(pixels: NDArray[np.uint8], labels: NDArray) -> Dataset:
    if len(pixels) != len(labels):
        raise CorruptFile(f"{len(pixels)} images and {len(labels)} labels: copy the data again")
    values = pixels.astype(np.float32, order="C") / 255  # channels first in memory too, as loaders give them
    return Dataset(torch.from_numpy(values), torch.from_numpy(labels.astype(np.int64)))
