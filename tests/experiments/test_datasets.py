"""Readers against the published facts about each data set, and their errors."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.errors import BadData, CorruptFile


@pytest.mark.parametrize(
    ("name", "split", "shape"),
    [
        ("mnist", "train", (60_000, 1, 28, 28)),
        ("mnist", "test", (10_000, 1, 28, 28)),
        ("fashion", "test", (10_000, 1, 28, 28)),
        ("kmnist", "test", (10_000, 1, 28, 28)),
        ("notmnist", "test", (10_000, 1, 28, 28)),
        ("cifar10", "train", (20_000, 3, 32, 32)),
        ("cifar10", "test", (10_000, 3, 32, 32)),
        ("svhn", "test", (10_000, 3, 32, 32)),
    ],
)
def test_images(data_dir: Path, name: str, split: str, shape: tuple[int, ...]) -> None:
    data = datasets.images(name, split)
    assert tuple(data.inputs.shape) == shape
    assert data.inputs.dtype == torch.float32
    assert data.inputs.min() >= 0
    assert data.inputs.max() == 1
    assert data.targets.dtype == torch.int64
    assert data.targets.unique().tolist() == list(range(10))


def test_mnist_class_counts(data_dir: Path) -> None:
    counts = datasets.images("mnist", "test").targets.bincount().tolist()
    assert counts == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_digits_equal_the_uci_table(data_dir: Path) -> None:
    table, digits = datasets.uci_classification("digits"), datasets.digits()
    assert torch.equal(digits.targets, table.targets)
    assert len(digits) == 1797
    assert tuple(digits.inputs.shape[1:]) == (1, 8, 8)


def test_uci_folds_are_disjoint_and_complete(data_dir: Path) -> None:
    data = datasets.uci_regression("energy")
    for k in range(20):
        assert torch.equal(torch.cat([data.train[k], data.test[k]]).sort().values, torch.arange(768))
    train, test = data.fold(3)
    assert (len(train), len(test)) == (691, 77)
    assert torch.equal(test.targets, data.targets[data.test[3]])


@pytest.mark.parametrize(("name", "size"), [("flow-cytometry", 5635), ("survival-screen", 9985)])
def test_crispr_guides_are_one_hot(data_dir: Path, name: str, size: int) -> None:
    data = datasets.crispr(name)
    assert tuple(data.inputs.shape) == (size, 4, 38)
    assert tuple(data.targets.shape) == (size, 1)
    assert data.inputs.sum(1).unique().tolist() in ([1.0], [0.0, 1.0])
    assert data.inputs.sum() / data.inputs[:, 0].numel() > 0.999
    assert bool(data.targets.isfinite().all())


def test_tinystories_is_a_hugging_face_folder(data_dir: Path) -> None:
    assert (datasets.tinystories() / "config.json").exists()


def test_split_is_disjoint_and_follows_the_generator() -> None:
    data = datasets.Dataset(torch.arange(10)[:, None], torch.arange(10))
    parts = data.split(3, 5, generator=torch.Generator().manual_seed(1))
    again = data.split(3, 5, generator=torch.Generator().manual_seed(1))
    assert [len(part) for part in parts] == [3, 5, 2]
    assert torch.cat([part.targets for part in parts]).sort().values.tolist() == list(range(10))
    assert all(torch.equal(a.targets, b.targets) for a, b in zip(parts, again))
    assert all(torch.equal(part.inputs[:, 0], part.targets) for part in parts)
    with pytest.raises(BadData, match="do not fit into 10"):
        data.split(11)


def test_missing_data_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    with pytest.raises(BadData, match="LAPWING_DATA is not set"):
        datasets.images("mnist", "test")
    monkeypatch.setenv("LAPWING_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(BadData, match="is not a folder"):
        datasets.images("mnist", "test")
    monkeypatch.setenv("LAPWING_DATA", str(tmp_path))
    with pytest.raises(BadData, match="is missing"):
        datasets.images("mnist", "test")
    with pytest.raises(BadData, match="choose from mnist"):
        datasets.images("imagenet", "test")
    with pytest.raises(BadData, match="'svhn' with a train part"):
        datasets.images("svhn", "train")
    with pytest.raises(BadData, match="'train' or 'test'"):
        datasets.images("mnist", "validation")


def test_damaged_files_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    header = bytes([0, 0, 8, 1, 0, 0, 0, 3])
    path.write_bytes(gzip.compress(header + b"abc"))
    assert datasets.read_idx(path).tolist() == list(b"abc")
    whole = path.read_bytes()
    for damaged in (whole[:-9], b"hello", gzip.compress(header + b"ab"), gzip.compress(b"text that is no idx file")):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match="copy it again"):
            datasets.read_idx(path)


def test_mosaic_is_row_major(tmp_path: Path) -> None:
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    mosaic = np.concatenate([np.concatenate(list(row), axis=1) for row in images.reshape(2, 100, 32, 32, 3)])
    path = tmp_path / "mosaic.webp"
    Image.fromarray(mosaic).save(path, lossless=True)
    np.testing.assert_array_equal(datasets.read_mosaic(path), images)


def test_network_sizes() -> None:
    def count(model: torch.nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    assert count(networks.ResNet(20)) == 269_722
    assert count(networks.lenet()) == 61_706
    assert count(networks.mlp([784, 200, 200, 10])) == 785 * 200 + 201 * 200 + 201 * 10
    assert networks.small_cnn(8)(torch.zeros(2, 1, 8, 8)).shape == (2, 8)
    assert networks.lenet()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(BadData, match="6n"):
        networks.ResNet(18)
    with pytest.raises(BadData, match="at least an input"):
        networks.mlp([3])


@pytest.mark.slow
def test_pretrained_resnet_reaches_its_published_accuracy(data_dir: Path) -> None:
    data, model = datasets.images("cifar10", "test"), networks.pretrained_resnet(20)
    with torch.no_grad():
        logits = torch.cat([model(networks.standardize(x)) for x in data.inputs.split(500)])
    assert (logits.argmax(-1) == data.targets).double().mean().item() == pytest.approx(0.9173, abs=2e-4)
    assert torch.nn.functional.cross_entropy(logits.double(), data.targets).item() == pytest.approx(0.3727, abs=2e-4)
