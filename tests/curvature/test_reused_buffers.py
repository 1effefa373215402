"""Loaders that fill the same tensors with every batch, against lists of separate tensors."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lapwing


class Refilled:
    """Yields batches of ten in the same tensors, each filled again and again."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.own = tensors, tuple(torch.empty_like(t[:10]) for t in tensors)

    def __len__(self) -> int:
        return len(self.tensors[0]) // 10

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, len(self.tensors[0]), 10):
            for own, whole in zip(self.own, self.tensors, strict=True):
                own.copy_(whole[start : start + 10])
            yield self.own


def separate(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(10) for t in tensors), strict=True))


def split(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return batch


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag", "blockdiag"])
@pytest.mark.parametrize("factor", ["ggn", "empirical"])
def test_fits_of_a_last_layer(structure: str, factor: str) -> None:
    torch.manual_seed(0)
    x, y, weights = torch.randn(60, 4), torch.randn(60, 2), torch.rand(60)
    for net in (nn.Linear(4, 2, bias=False), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))):
        one, other = (
            lapwing.fit(
                net, data(x, y, weights), lapwing.Gaussian(noise=0.7), structure=structure, factor=factor, split=split,
                select="last_layer", progress=False,
            )
            for data in (Refilled, separate)
        )  # fmt: skip
        torch.testing.assert_close(one.curvature.dense(), other.curvature.dense())
        torch.testing.assert_close(one.curvature.statistics, other.curvature.statistics)
        torch.testing.assert_close(one.log_evidence(), other.log_evidence())


@pytest.mark.parametrize("predictive", ["linearized", "sampled"])
def test_tuning_and_temperature_curves(predictive: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    la = lapwing.fit(net, (x, y), "classification", structure="full", select="last_layer", progress=False)
    grid = {"prior": [0.1, 1.0, 10.0]}
    one, other = (la.tune(d(x, y), grid=grid, learn=["prior"], predictive=predictive) for d in (Refilled, separate))
    torch.testing.assert_close(one.tuning.scores, other.tuning.scores)
    one, other = (la.temperature_curve(d(x, y), predictive=predictive).nll for d in (Refilled, separate))
    torch.testing.assert_close(one, other)
