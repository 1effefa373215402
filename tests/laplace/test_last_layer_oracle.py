"""Fits and predictions of a last layer beside autograd: Hessians, Jacobians and draws of the outputs."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import softplus

import lapwing
from tests import dense

PRIOR = 0.7


class Net(nn.Module):
    """A linear last layer and a fixed affine map of its outputs; rewards of two candidates have one output each."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(5, 6), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        f = 0.6 * self.last(self.body(x).tanh()) + 0.2
        return f[..., 0] if x.ndim == 3 else f


# name: likelihood, outputs, targets from draws in [0, 1), −log p(y | f) up to a constant, E[y | f]
TASKS = {
    "counts": ("counts", 3, lambda u: (4 * u).floor(), lambda f, y: (f.exp() - y * f).sum(), torch.exp),
    "labels": ("binary", 3, lambda u: u.round(), lambda f, y: (softplus(f) - y * f).sum(), torch.sigmoid),
    "preference": (
        "preference",
        1,
        lambda u: u[:, 0].round().long(),
        lambda f, y: f.logsumexp(-1) - f[y],
        lambda f: f.softmax(-1),
    ),
}


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("task", TASKS)
def test_beside_autograd(task: str, structure: str, weighted: bool) -> None:
    likelihood, outputs, targets, loss, expected = TASKS[task]
    net = dense.build(lambda: Net(outputs))
    x = dense.randn(30, *((2, 5) if task == "preference" else (5,)))
    y = targets(uniform(30, outputs))
    weights = uniform(30) + 0.1 if weighted else torch.ones(30, dtype=torch.float64)
    data = [(x[:13], y[:13], weights[:13]), (x[13:], y[13:], weights[13:])]
    options = {"structure": structure, "select": "last_layer", "prior": PRIOR, "progress": False}
    la = lapwing.fit(net, data, likelihood, split=lambda batch: batch, **options)

    theta = {name: dict(net.named_parameters())[name].detach() for name in la.params.names}

    def jacobian(inputs: Tensor) -> tuple[Tensor, Tensor]:
        run = lambda values: functional_call(net, values, (inputs,))  # noqa: E731
        f = run(theta).detach()
        return f, torch.cat([part.reshape(*f.shape, -1) for part in jacrev(run)(theta).values()], -1)

    f, rows = jacobian(x)
    h = torch.zeros(la.params.size, la.params.size, dtype=torch.float64)
    for i in range(30):
        h = h + weights[i] * rows[i].mT @ jacrev(jacrev(lambda value: loss(value, y[i])))(f[i]) @ rows[i]  # noqa: B023
    h = torch.diag(h.diagonal()) if structure == "diag" else h
    precision = h + PRIOR * torch.eye(len(h), dtype=h.dtype)
    torch.testing.assert_close(la.posterior.precision.dense(), precision, rtol=1e-9, atol=1e-11)

    f, rows = jacobian(x[:4])
    covariance = rows @ torch.linalg.inv(precision) @ rows.mT
    p = la.predict(x[:4])
    torch.testing.assert_close(p.function.covariance, covariance, rtol=1e-9, atol=1e-11)
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(covariance.shape[-1], dtype=h.dtype))
    draws = f + torch.einsum("nij,snj->sni", root, dense.randn(40_000, *f.shape))
    torch.testing.assert_close(p.mean, expected(draws).mean(0), rtol=0.03, atol=0.01)
