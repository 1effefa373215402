"""Readers of the data sets that the tests, the benchmarks and the experiments use.

Files come from the folder named by the environment variable LAPWING_DATA; nothing is downloaded. Images are float32
(N, channels, height, width) in [0, 1]; classes are int64.

Example:
    >>> data = datasets.images("mnist", "test")
    >>> data.inputs.shape, data.targets.shape
    (torch.Size([10000, 1, 28, 28]), torch.Size([10000]))
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapwing.cli import datasets as small
from lapwing.cli.datasets import IDX, Dataset, dataset_of, digits, existing, folder, read_idx
from lapwing.errors import BadData

MOSAICS = {
    ("cifar10", "train"): ("cifar10", ("train_1.webp", "train_2.webp")),
    ("cifar10", "test"): ("cifar10", ("test.webp",)),
    ("svhn", "test"): ("svhn", ("test_1.webp",)),
}
NAMES = (*IDX, "cifar10", "svhn", "digits")


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


def images(name: str, split: str = "test") -> Dataset:
    """Read one of mnist, fashion, kmnist, notmnist, cifar10, svhn or digits; split is "train" or "test".

    kmnist, notmnist and svhn have a test part only; digits (8×8, from scikit-learn) have none and are returned whole.
    CIFAR-10's train part is its first 20,000 images, SVHN's test part its first 10,000.
    """
    if split not in ("train", "test"):
        raise BadData(f"split must be 'train' or 'test', got {split!r}")
    if name == "digits":
        return digits()
    if name in IDX:
        return small.images(name, split)
    if (name, split) in MOSAICS:
        place, files = MOSAICS[name, split]
        pixels = np.concatenate([read_mosaic(folder() / place / file) for file in files])
        labels = read_table(folder() / place / "labels.npz")[split][: len(pixels)]
        return dataset_of(pixels.transpose(0, 3, 1, 2), labels)
    raise BadData(f"there is no data set {name!r} with a {split} part: choose from {', '.join(NAMES)}")


def uci_regression(name: str) -> Folds:
    """A regression table with its published splits (20; 5 for protein), e.g. `bostonHousing`, `energy`, `kin8nm`."""
    table = read_table(folder() / "uci-regression" / f"{name}.npz")
    train, test = ([torch.from_numpy(row.astype(np.int64)) for row in table[part]] for part in ("train", "test"))
    return Folds(torch.from_numpy(table["X"]), torch.from_numpy(table["y"]), tuple(train), tuple(test))


def uci_classification(name: str) -> Dataset:
    """A classification table without splits, e.g. `australian`, `banana`, `ionosphere`; inputs in float64."""
    table = read_table(folder() / "uci-classification" / f"{name}.npz")
    return Dataset(torch.from_numpy(table["X"]), torch.from_numpy(table["y"]).long())


def crispr(name: str) -> Dataset:
    """CRISPR-Cas13 knockdown (Wessels et al. 2020; Stirn et al. 2023): "flow-cytometry" or "survival-screen".

    Inputs are one-hot, (N, 4, 38): a guide of 23 nucleotides and its surroundings, zero where a nucleotide is missing.
    Targets (N, 1) are mean log fold changes over the replicates.
    """
    table = read_table(folder() / "crispr-cas13" / f"{name}-HEK293.npz")
    hot = torch.from_numpy(table["x"]).long()[:, None] == torch.arange(4)[None, :, None]
    return Dataset(hot.float(), torch.from_numpy(table["y_mean"]))


def tinystories() -> Path:
    """The folder of the 260k-parameter Llama, for `transformers.AutoModelForCausalLM.from_pretrained`."""
    return existing(folder() / "tinystories-260k")


def read_mosaic(path: Path) -> NDArray[np.uint8]:
    """Images (N, 32, 32, 3) of a mosaic with 100 images a row, row-major."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("CIFAR-10 and SVHN need Pillow: pip install 'lapwing-torch[data]'") from error
    with Image.open(existing(path)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    rows = pixels.shape[0] // 32
    return pixels.reshape(rows, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


def read_table(path: Path) -> dict[str, NDArray]:
    """The arrays of an npz file."""
    with np.load(existing(path)) as arrays:
        return {name: arrays[name] for name in arrays.files}


__all__ = [
    "Dataset",
    "Folds",
    "crispr",
    "digits",
    "folder",
    "images",
    "read_idx",
    "read_mosaic",
    "read_table",
    "tinystories",
    "uci_classification",
    "uci_regression",
]
