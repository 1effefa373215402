"""What is wrong with the first batch is said before anything is computed of it, wherever in the batch it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import BadData, LapwingError

N = 40


class Root(nn.Module):
    """Outputs that are not a number where an input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.sqrt())


class Merging(nn.Module):
    """Two samples become one row of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, 6))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(N, 3, generator=generator) + 0.1, torch.arange(N) % 2


def refused(model: nn.Module, x: Tensor, y: Tensor, match: str, *weights: Tensor) -> None:
    with pytest.raises(LapwingError, match=match):
        lapwing.fit(
            model, [(x, y, *weights)], "classification", structure="diag", split=lambda batch: batch, progress=False
        )


@pytest.mark.parametrize("at", [0, 7, 8, N - 1])
class TestAnywhere:
    def test_a_class_that_is_not_there(self, at: int) -> None:
        x, y = data()
        y[at] = 5
        refused(nn.Linear(3, 2), x, y, "batch .*5")

    def test_an_input_that_is_not_finite(self, at: int) -> None:
        x, y = data()
        x[at, 1] = float("nan")
        refused(nn.Linear(3, 2), x, y, rf"the inputs hold nan at index \({at}, 1\)")

    def test_an_output_that_is_not_finite(self, at: int) -> None:
        x, y = data()
        x[at, 1] = -1.0
        refused(Root(), x, y, "are not finite")

    def test_a_weight_below_zero(self, at: int) -> None:
        x, y = data()
        weights = torch.ones(N)
        weights[at] = -2.0
        refused(nn.Linear(3, 2), x, y, "a sample weight is -2", weights)


def test_targets_that_are_too_few() -> None:
    x, y = data()
    with pytest.raises(BadData):
        lapwing.fit(nn.Linear(3, 2), [(x, y[:20])], "classification", structure="diag", progress=False)


def test_samples_that_become_one() -> None:
    x, y = data()
    refused(Merging(), x, y, r"a batch of 40 samples gave outputs of shape \(20, 2\)")


class Squared(nn.Module):
    """Outputs beyond the range of numbers where inputs are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).square())


def test_outputs_that_are_not_finite_are_not_taken_for_gradients() -> None:
    x, y = data()
    x[8:] = 1e30
    refused(Squared(), x, y, "batch 0: the outputs of layer linear.* are not finite")


class Picky(nn.Linear):
    """Takes batches of the size of the data, and those of the self-check."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) in (N, 4, 2, 1)
        return super().forward(x)


def test_a_network_that_takes_some_batches_only() -> None:
    x, y = data()
    la = lapwing.fit(Picky(3, 2), [(x, y)], "classification", structure="diag", progress=False)
    assert bool(la.log_evidence().isfinite())


class Trimmed(nn.Module):
    """As many outputs as the longest sample of a batch has entries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, : int((x != 0).sum(1).max()), None])


def test_outputs_that_depend_on_the_batch() -> None:
    x, _ = data()
    x[:20, 2] = 0.0
    refused(Trimmed(), x, torch.zeros(N, 3, dtype=torch.long), "depend on the other samples of its batch")
