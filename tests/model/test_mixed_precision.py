"""Networks that compute in other types than those of their parameters."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature import MatrixFree

from ..zoo import oracle
from ..zoo.cases import assert_same


class Narrow(nn.Module):
    """A network whose layers in the middle compute in a narrower type."""

    def __init__(self, inside):
        super().__init__()
        self.body, self.middle, self.head, self.inside = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3), inside

    def forward(self, x):
        z = torch.tanh(self.body(x)).to(self.inside)
        z = nn.functional.linear(z, self.middle.weight.to(self.inside), self.middle.bias.to(self.inside))
        z = z * (1 + z.softmax(-1) @ torch.ones(32, 1).to(z))
        return self.head(torch.tanh(z).to(x.dtype))


@pytest.mark.parametrize(
    ("outside", "inside", "rtol"),
    [
        (torch.float64, torch.float32, 1e-5),
        (torch.float64, torch.bfloat16, 5e-2),
        (torch.float32, torch.bfloat16, 5e-2),
    ],
)
def test_tolerance_is_that_of_the_computation(outside, inside, rtol):
    torch.manual_seed(0)
    model, x = Narrow(inside).to(outside).eval(), torch.randn(40, 8, dtype=outside)
    la = lapwing.fit(model, [(x, torch.zeros(40, 3, dtype=outside))], lapwing.Gaussian(1.0), structure="diag")
    j = oracle.jacobian(model, x).double()
    assert_same(la.curvature.matrix.diagonal().double(), j.square().sum((0, 1)), rtol, "diagonal")
    assert not [note for note in la.curvature.notes if "loop" in note]


def test_products():
    torch.manual_seed(0)
    model, x = Narrow(torch.float32).double().eval(), torch.randn(40, 8).double()
    structure = MatrixFree(tolerance=1e-5)
    la = lapwing.fit(model, [(x, torch.zeros(40, 3).double())], lapwing.Gaussian(1.0), structure=structure)
    j = oracle.jacobian(model, x)
    sigma = torch.linalg.inv(torch.einsum("nop,noq->pq", j, j) + torch.eye(la.params.size).double())
    expected = (j[:4] @ sigma @ j[:4].mT).diagonal(dim1=1, dim2=2)
    assert_same(la.predict(x[:4]).function.variance, expected, 1e-3, "variance")
    assert all(la.network._trusted.values())


def test_tight_where_nothing_is_narrow():
    torch.manual_seed(0)

    class Leaking(nn.Module):
        """Samples see a little of each other."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            return self.head(x + 1e-6 * x.mean(0))

    x = torch.randn(6, 2).double()
    with pytest.raises(lapwing.UnsupportedModel, match="other samples"):
        lapwing.fit(Leaking().double(), (x, x), lapwing.Gaussian(1.0), structure="diag")
