"""A batched backward pass that is wrong is not used, however small the gradients it is wrong in."""

import pytest
import torch
from torch import nn

import lapwing


class Wrong(torch.autograd.Function):
    """tanh, whose backward pass is right for one direction and half as much again for several at once."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        batched = "Batched" in str(torch._C._dispatch_keys(g))
        return (1.5 if batched else 1.0) * g * (1 - torch.tanh(x) ** 2)


class Scaled(nn.Module):
    """Large inputs, small gradients at the first layer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.a, self.b = scale, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Wrong.apply(self.a(x) / self.scale))


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5])
def test_wrong_batches_of_directions_are_noticed(scale: float) -> None:
    model = Scaled(scale)
    x, y = scale * torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3
    la = lapwing.fit(model, (x, y), "classification", structure="diag", factor=lapwing.GGN(tolerance=0))
    assert not la.plan.batched
    p = model(x).softmax(-1).detach()
    weights = (model.a.weight, model.a.bias, model.b.weight, model.b.bias)
    diagonal = torch.zeros(la.params.size)
    for n in range(20):
        f = model(x[n : n + 1])[0]
        rows = torch.stack(
            [torch.cat([g.flatten() for g in torch.autograd.grad(f[c], weights, retain_graph=True)]) for c in range(3)]
        )
        curvature = torch.diag(p[n]) - torch.outer(p[n], p[n])
        diagonal += torch.einsum("cp,cd,dp->p", rows, curvature, rows)
    torch.testing.assert_close(la.curvature.matrix.diagonal(), diagonal, rtol=1e-4, atol=1e-7)


class Prototypes(nn.Module):
    """Distances to prototypes, whose derivative has a kernel of its own for few points that vmap gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.c, self.head = nn.Linear(3, 4), nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.exp(-torch.cdist(self.enc(x), self.c.expand(len(x), -1, -1))).mean(1))


def test_kernels_that_the_first_batch_does_not_meet() -> None:
    model = Prototypes().double()
    data = [(torch.randn(6, k, 3, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64)) for k in (30, 10, 12)]
    params, truth = list(model.parameters()), torch.zeros(())
    for x, _ in data:
        for one in x:
            for f in model(one[None])[0]:
                row = torch.cat([g.flatten() for g in torch.autograd.grad(f, params, retain_graph=True)])
                truth = truth + torch.outer(row, row)
    la = lapwing.fit(model, data, lapwing.Gaussian(1.0), structure="full")
    torch.testing.assert_close(la.curvature.dense(), truth, rtol=1e-9, atol=1e-9 * float(truth.abs().max()))
