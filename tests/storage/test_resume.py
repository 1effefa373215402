"""A fit that was interrupted goes on in its folder, exactly."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature import resume
from lapwing.errors import CannotWrite


class Interrupted(Exception):
    pass


class Data:
    """Batches in order, which break off after so many."""

    def __init__(self, batches: list, stop: int | None = None) -> None:
        self.batches, self.stop = batches, stop

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        for k, batch in enumerate(self.batches):
            if k == self.stop:
                raise Interrupted
            yield batch


class Counting(nn.Sequential):
    """Counts the samples of its forward passes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(len(x))
        return super().forward(x)


SEEN: list[int] = []


def network() -> nn.Module:
    torch.manual_seed(0)
    return Counting(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5))


def batches(n: int = 13) -> list:
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(n * 8, 1, 6, 6, generator=generator)
    y = torch.randint(5, (n * 8,), generator=generator)
    return list(zip(x.split(8), y.split(8), strict=True))


def fit(
    data: object, folder: Path | None, structure: str = "kron", factor: object = "ggn", **options
) -> lapwing.Laplace:
    generator = torch.Generator().manual_seed(5)
    made = {"structure": structure, "factor": factor, "generator": generator, "checkpoint": folder}
    return lapwing.fit(options.pop("model", None) or network(), data, "classification", **made, **options)


def same(a: lapwing.Laplace, b: lapwing.Laplace) -> bool:
    pairs = [(a.curvature.matrix.diagonal(), b.curvature.matrix.diagonal()), (a.log_likelihood, b.log_likelihood)]
    if a.curvature.gradient is not None and b.curvature.gradient is not None:
        pairs.append((a.curvature.gradient, b.curvature.gradient))
    return all(torch.equal(p, q) for p, q in pairs) and a.curvature.seen == b.curvature.seen


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "EVERY", 2)
    monkeypatch.setattr(resume, "SECONDS", 0.0)


@pytest.mark.parametrize("structure", ["diag", "blockdiag", "kron", "ekfac", "full"])
@pytest.mark.parametrize("factor", ["ggn", "mc", lapwing.GGN(tolerance=1e-2)])
def test_goes_on_exactly(tmp_path: Path, structure: str, factor: object) -> None:
    whole = fit(batches(), tmp_path / "a", structure, factor)
    with pytest.raises(Interrupted):
        fit(Data(batches(), stop=9), tmp_path / "b", structure, factor)
    assert list((tmp_path / "b").iterdir())
    SEEN.clear()
    resumed = fit(Data(batches()), tmp_path / "b", structure, factor)
    assert same(whole, resumed)
    assert not list((tmp_path / "b").iterdir())
    plain = fit(batches(), None, structure, factor)
    torch.testing.assert_close(plain.curvature.matrix.diagonal(), resumed.curvature.matrix.diagonal())


def test_goes_on_exactly_where_batches_become_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "EVERY", 8)
    generator = torch.Generator().manual_seed(1)
    sizes = [64] * 4 + [10] * 20
    data = [
        (4 * torch.randn(n, 1, 6, 6, generator=generator), torch.randint(5, (n,), generator=generator)) for n in sizes
    ]
    model = network()
    model[3].weight.data *= 40  # confident: most samples need no direction, the others wait
    options = {"structure": "diag", "factor": lapwing.GGN(tolerance=1e-2), "model": model}
    with pytest.raises(Interrupted):
        fit(Data(data, stop=18), tmp_path / "b", **options)
    assert same(fit(data, tmp_path / "a", **options), fit(data, tmp_path / "b", **options))


def test_does_not_run_again_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        fit(Data(batches(), stop=11), tmp_path, factor=lapwing.GGN(tolerance=0))
    SEEN.clear()
    fit(Data(batches()), tmp_path, factor=lapwing.GGN(tolerance=0))
    again = sum(SEEN)
    SEEN.clear()
    fit(Data(batches()), tmp_path, factor=lapwing.GGN(tolerance=0))
    assert sum(SEEN) - again == 10 * 8


def test_second_pass_keeps_the_basis_of_the_first(tmp_path: Path) -> None:
    class Second(Data):
        passes = 0

        def __iter__(self) -> Iterator:
            for k, batch in enumerate(self.batches):
                self.passes += k == 7  # the plan reads a few batches only
                if self.passes == 2 and k == 7:
                    raise Interrupted
                yield batch

    with pytest.raises(Interrupted):
        fit(Second(batches()), tmp_path, "ekfac")
    assert {path.stem for path in tmp_path.iterdir()} == {"fit--basis", "fit--moments"}
    assert same(fit(batches(), tmp_path, "ekfac"), fit(batches(), tmp_path / "other", "ekfac"))


@pytest.mark.parametrize("change", ["order", "weights", "structure", "damage", "fewer"])
def test_starts_over_where_it_must(tmp_path: Path, change: str) -> None:
    data, options = batches(), {}
    with pytest.raises(Interrupted):
        fit(Data(data, stop=9), tmp_path)
    if change == "order":
        data = data[::-1]
    elif change == "weights":
        options["model"] = network()
        nn.init.zeros_(options["model"][3].bias)
    elif change == "structure":
        options["structure"] = "diag"
    elif change == "fewer":
        data = data[:3]
    else:
        path = next(tmp_path.iterdir())
        path.write_bytes(path.read_bytes()[:-7] + b"damaged")
    assert same(fit(data, tmp_path, **options), fit(data, tmp_path / "new", **options))


def test_refuses_what_cannot_go_on(tmp_path: Path) -> None:
    with pytest.raises(lapwing.UnsupportedOperation, match="checkpoint"):
        fit(batches(), tmp_path, "lowrank")
    (tmp_path / "file").write_text("")
    with pytest.raises(lapwing.BadData, match="folder"):
        fit(batches(), tmp_path / "file")


class Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor, scale: float | torch.Tensor = 1.0, kind: str = "plain") -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * scale if kind == "plain" else x + scale)


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return Scaled(*network().children())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"scale": 0.5}, {"scale": 0.6}),
        ({"scale": 1}, {"scale": True}),
        ({"scale": 0.5, "kind": "plain"}, {"scale": 0.5, "kind": "other"}),
        ({"scale": torch.tensor(0.5)}, {"scale": torch.tensor(0.6)}),
    ],
)
def test_other_arguments_start_over(tmp_path: Path, before: dict, after: dict) -> None:
    first = [{"x": x, **before, "labels": y} for x, y in batches()]
    second = [{"x": x, **after, "labels": y} for x, y in batches()]
    with pytest.raises(Interrupted):
        fit(Data(first, stop=9), tmp_path, model=scaled())
    assert same(fit(second, tmp_path, model=scaled()), fit(second, None, model=scaled()))


def test_other_labels_in_lists_start_over(tmp_path: Path) -> None:
    first = [(x, y.tolist()) for x, y in batches()]
    second = [(x, ((y + 1) % 5).tolist()) for x, y in batches()]
    with pytest.raises(Interrupted):
        fit(Data(first, stop=9), tmp_path, "diag")
    assert torch.equal(fit(second, tmp_path, "diag").log_likelihood, fit(second, None, "diag").log_likelihood)


def test_objects_cannot_be_recognized(tmp_path: Path) -> None:
    class Size:
        def __rmul__(self, other: torch.Tensor) -> torch.Tensor:
            return other * 0.5

        __mul__ = __rmul__

    data = [{"x": x, "scale": Size(), "labels": y} for x, y in batches()]
    fit(data, None, "diag", model=scaled())
    with pytest.raises(lapwing.UnsupportedOperation, match="batch 0 holds an object of type Size"):
        fit(data, tmp_path, "diag", model=scaled())


def test_another_noise_starts_over(tmp_path: Path) -> None:
    data = [(x, nn.functional.one_hot(y, 5).float()) for x, y in batches()]

    def gaussian(last: float) -> lapwing.Gaussian:
        return lapwing.Gaussian(torch.tensor([1.0, 1.0, 1.0, 1.0, last], dtype=torch.float64))

    with pytest.raises(Interrupted):
        lapwing.fit(network(), Data(data, stop=9), gaussian(2.00001), structure="diag", checkpoint=tmp_path)
    found = lapwing.fit(network(), data, gaussian(2.00004), structure="diag", checkpoint=tmp_path)
    assert same(found, lapwing.fit(network(), data, gaussian(2.00004), structure="diag"))


@pytest.mark.parametrize("folder", ["/proc/nowhere/folder", "file/folder"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    SEEN.clear()
    with pytest.raises(CannotWrite, match="no file can be written into the folder"):
        fit(batches(), tmp_path / folder)
    assert sum(SEEN) < 8 * 13
