"""Data added to a fit: in the blocks of the fit or not at all; input sums are kept as the means of the factors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.linalg import BlockDiagonal, Kronecker

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
Y = torch.arange(12) % 2
HERE, THERE = [(X, Y)], [(-X, Y)]


class Branches(nn.Module):
    """Other operations for other data; the last weight is used in both orientations in one branch."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=bias), nn.Linear(4, 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return self.b(self.a(x).tanh())
        return self.b(self.a(x).relu() @ self.b.weight.T @ self.b.weight)


def fitted(data: list[tuple[Tensor, Tensor]], structure: str, bias: bool) -> lapwing.Laplace:
    torch.manual_seed(1)
    return lapwing.fit(Branches(bias).double(), data, "classification", structure=structure, progress=False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "full"])
@pytest.mark.parametrize(
    ("first", "more"),
    [(HERE, HERE), (HERE + THERE, HERE), (HERE + THERE, THERE), (HERE + THERE, HERE + THERE)],
    ids=["same", "mixed-here", "mixed-there", "mixed-mixed"],
)
def test_data_of_the_same_blocks(structure, first, more, bias):
    """A fit of all data, which finds the same basis: the operations of both are those of a loop over samples."""
    added, whole = fitted(first, structure, bias).update(more), fitted(first + more, structure, bias)
    torch.testing.assert_close(added.log_evidence(), whole.log_evidence())
    torch.testing.assert_close(added.posterior.variance, whole.posterior.variance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_data_of_other_blocks(structure, bias):
    la = fitted(HERE, structure, bias)
    before = la.log_evidence()
    with pytest.raises(lapwing.UnsupportedOperation, match="the new data use other operations"):
        la.update(HERE + THERE)
    if structure == "kron":  # one orientation more: the factors are of other sums
        with pytest.raises(lapwing.UnsupportedOperation, match="the new data use other operations"):
            la.update(THERE)
    torch.testing.assert_close(la.log_evidence(), before, rtol=0, atol=0)


@pytest.mark.parametrize("n_data", [None, 1000])
def test_input_sums_are_those_of_the_factors(n_data):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    options = {"structure": "kron", "progress": False}
    la = lapwing.fit(model, HERE, "classification", n_data=n_data, **options)
    matrix, state = la.curvature.matrix, la.curvature.state
    assert isinstance(matrix, BlockDiagonal)
    assert not any(name.endswith(".right") for name in state)
    sums = {}
    with torch.no_grad():
        for k, (block, a) in enumerate(zip(matrix.blocks, (X, model[:2](X)), strict=True)):
            assert isinstance(block, Kronecker)
            ones = torch.cat([a, torch.ones(12, 1, dtype=a.dtype)], 1)
            torch.testing.assert_close(block.right[0], ones.T @ ones / 12)
            sums[f"{k}.plain.right"] = (ones.T @ ones)[None]
    more = [(X.flip(0)[:7].square(), Y[:7])]
    new = la.update(more)
    if n_data is None:
        whole = lapwing.fit(model, HERE + more, "classification", **options)
        torch.testing.assert_close(new.log_evidence(), whole.log_evidence())
    belief = replace(la.belief, curvature=replace(la.curvature, state=state | sums))  # as files held them
    old = replace(la, belief=belief)
    torch.testing.assert_close(old.update(more).log_evidence(), new.log_evidence())
