"""Weights that are read by a loop over samples, in a classifier so confident that some samples need no direction."""

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import GGN
from tests import dense


class Product(torch.autograd.Function):
    """x Wᵀ as an operation that the tape cannot read."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


class Looped(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.w, self.head = own, nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(Product.apply(x, self.w) if self.own else x @ self.w.T))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("tolerance", [1e-12, 1e-3])
def test_blocks_of_looped_weights_are_those_of_the_exact_matrix(structure: str, tolerance: float) -> None:
    net = dense.build(lambda: Looped(own=True))
    plain = Looped(own=False).double()
    plain.load_state_dict(net.state_dict())
    for module in (net, plain):
        module.head.weight.data *= 200
    x = dense.randn(64, 4)
    y = dense.outputs(plain, x).argmax(-1)
    batches = [(x[k : k + 16], y[k : k + 16]) for k in range(0, 64, 16)]
    la = lapwing.fit(net, batches, "classification", structure=structure, factor=GGN(tolerance=tolerance))

    f = dense.outputs(plain, x)
    exact = dense.ggn(dense.jacobian(plain, x), dense.softmax_hessian(f))[:16, :16]
    found = la.curvature.dense()[:16, :16]
    assert dense.relative(found, exact) < 10 * tolerance
