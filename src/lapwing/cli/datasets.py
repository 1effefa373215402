"""The data sets of `lapwing demo`: handwritten digits and small images.

Files come from the folder named by the environment variable LAPWING_DATA; nothing is downloaded. Images are float32
(N, channels, height, width) in [0, 1]; classes are int64.
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
        """Return a part of the data, for a slice, a mask or a tensor of indices."""
        return Dataset(self.inputs[index], self.targets[index])

    def split(self, *sizes: int, generator: torch.Generator | None = None) -> tuple["Dataset", ...]:
        """Split into disjoint random parts of the given sizes; the remaining data, if any, are a last part."""
        if min(sizes) < 0 or sum(sizes) > len(self):
            raise BadData(f"parts of {sizes} items do not fit into {len(self)}")
        rest = len(self) - sum(sizes)
        order = torch.randperm(len(self), generator=generator)
        return tuple(self[part] for part in order.split([*sizes, rest] if rest else list(sizes)))


def folder() -> Path:
    """Return the folder named by LAPWING_DATA."""
    name = os.environ.get("LAPWING_DATA", "")
    if not name:
        raise BadData("LAPWING_DATA is not set: set it to the folder that contains mnist/, notmnist/, cifar10/, …")
    if not Path(name).is_dir():
        raise BadData(f"LAPWING_DATA={name} is not a folder: set it to the folder that contains mnist/, notmnist/, …")
    return Path(name)


def images(name: str, split: str = "test") -> Dataset:
    """Read mnist, fashion, kmnist or notmnist (the last two have a test part only); split is "train" or "test"."""
    prefix = folder() / IDX[name] / ("train" if split == "train" else "t10k")
    pixels = read_idx(prefix.with_name(prefix.name + "-images-idx3-ubyte.gz"))
    labels = read_idx(prefix.with_name(prefix.name + "-labels-idx1-ubyte.gz"))
    return dataset_of(pixels[:, None], labels)


def digits() -> Dataset:
    """Return the 1,797 handwritten digits of 8×8 pixels that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'lapwing-torch[data]'") from error
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float()[:, None] / 16
    return Dataset(pixels, torch.from_numpy(bunch.target).long())


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read images (N, rows, columns) or labels (N,) from a gzipped idx file (LeCun's format, unsigned bytes)."""
    try:
        raw = gzip.decompress(existing(path).read_bytes())
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


def existing(path: Path) -> Path:
    """Return the path of a file; refuse one that is missing, and list the files beside it."""
    if not path.exists():
        around = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        found = f"the folder holds {', '.join(around)}" if around else f"{path.parent} does not exist"
        raise BadData(f"{path} is missing: {found}")
    return path


def dataset_of(pixels: NDArray[np.uint8], labels: NDArray) -> Dataset:
    if len(pixels) != len(labels):
        raise CorruptFile(f"{len(pixels)} images and {len(labels)} labels: copy the data again")
    values = pixels.astype(np.float32, order="C") / 255  # channels first in memory too, as loaders give them
    return Dataset(torch.from_numpy(values), torch.from_numpy(labels.astype(np.int64)))
