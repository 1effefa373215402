"""Batches of one sample through batch norm into tokens, where PyTorch 2.13 has wrong derivatives of its own."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing.model.kernels import fixed_batch_norm

from ..zoo.cases import assert_same


class Tokens(nn.Module):
    """A convolution, a batch norm, tokens. `elementary` writes the norm out, which PyTorch differentiates correctly."""

    def __init__(self, hidden: bool = False):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(36, 3)
        self.hidden, self.elementary = hidden, False
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = self.conv(x)
        x = x + 0 * Unseen.apply(x, self.conv.weight) if self.hidden else x
        tokens = self._normalized(x).flatten(2).transpose(1, 2)
        return self.head(torch.tanh(tokens).flatten(1))

    def _normalized(self, x):
        norm = self.norm
        if not self.elementary:
            return norm(x)
        mean, variance, weight, bias = (
            t.reshape(-1, 1, 1) for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
        return (x - mean) / (variance + norm.eps).sqrt() * weight + bias


class Unseen(torch.autograd.Function):
    """A use of a weight that the tape cannot see, so that its rows come from a loop over samples."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, torch.zeros_like(ctx.saved_tensors[0])


def truth(model, x):
    """Rows of the Jacobian, (n, outputs, P)."""
    model.elementary = True
    weights = list(model.parameters())
    rows = [[torch.autograd.grad(v, weights, retain_graph=True) for v in model(one[None])[0]] for one in x]
    model.elementary = False
    return torch.stack([torch.stack([torch.cat([g.flatten() for g in row]) for row in each]) for each in rows])


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("structure", ["full", "matrixfree"])
def test_batches_of_one(structure, hidden):
    torch.manual_seed(0)
    model, x = Tokens(hidden).double().eval(), torch.randn(4, 2, 3, 3).double()
    j = truth(model, x)
    data = [(one[None], torch.zeros(1, 3).double()) for one in x]
    la = lapwing.fit(model, data, lapwing.Gaussian(1.0), structure=structure)
    exact = torch.einsum("nop,noq->pq", j, j)
    sigma = torch.linalg.inv(exact + torch.eye(len(exact)).double())
    for one, own in zip(x, j, strict=True):
        assert_same(la.predict(one[None]).function.covariance[0], own @ sigma @ own.T, 1e-7, "covariance")


def test_input_in_the_layout_of_tokens():
    torch.manual_seed(0)
    x = torch.randn(1, 9, 4).double().transpose(1, 2).unflatten(2, (3, 3)).requires_grad_()
    mean, variance = torch.randn(4).double(), torch.rand(4).double() + 0.5
    weight, v = torch.randn(4).double().requires_grad_(), torch.randn(1, 4, 3, 3).double()
    out = fixed_batch_norm(x, mean, variance, weight)
    found = torch.autograd.grad((out * v).sum(), [x, weight])
    slope = ((variance + 1e-5).rsqrt() * weight).detach()[:, None, None]
    normalized = (x.detach() - mean[:, None, None]) * (variance + 1e-5).rsqrt()[:, None, None]
    for got, expected in zip(found, [v * slope, (v * normalized).sum((0, 2, 3))], strict=True):
        assert_same(got, expected, 1e-12, "derivative")
