"""Kron(bias="separate"): the factors of weights and biases without what connects them, against autograd."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing import Kron
from tests.dense import assert_same, build, jacobian, outputs, randn, seeded, softmax_hessian

SEPARATE = Kron(sharing="expand", bias="separate")


def problem(n=9):
    module = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    return module, randn(n, 3), torch.randint(3, (n,), generator=seeded(1))


def expected(module, x):
    """Blocks Σ g gᵀ ⊗ E[a aᵀ] and Σ g gᵀ in the flat order of the parameters."""
    J, Lambda = jacobian(module, x), softmax_hessian(outputs(module, x))
    a = (x, torch.tanh(outputs(module[0], x)))
    blocks, start = [], 0
    for layer, inputs in zip((module[0], module[2]), a, strict=True):
        size, o = layer.weight.numel(), layer.out_features
        g = J[:, :, start + size : start + size + o]  # the gradient of a bias is that of the layer's outputs
        G = torch.einsum("nco,ncd,ndp->op", g, Lambda, g)
        blocks += [torch.kron(G.contiguous(), inputs.T @ inputs / len(x)), G]
        start += size + o
    return torch.block_diag(*blocks)


def test_matrix_prediction_and_evidence():
    module, x, y = problem()
    la = lapwing.fit(module, (x, y), "classification", structure=SEPARATE, prior=0.4)
    H = expected(module, x)
    assert_same(la.curvature.dense(), H, 1e-10)
    precision = H + 0.4 * torch.eye(len(H), dtype=torch.float64)
    new = randn(5, 3, seed=4)
    J = jacobian(module, new)
    assert_same(la.predict(new).function.covariance, J @ torch.linalg.inv(precision) @ J.mT, 1e-8)
    theta = torch.cat([p.detach().flatten() for p in module.parameters()])
    fit = -nn.functional.cross_entropy(outputs(module, x), y, reduction="sum")
    bracket = torch.logdet(precision) - len(H) * torch.tensor(0.4, dtype=torch.float64).log()
    assert_same(la.log_evidence(), fit - 0.2 * theta @ theta - 0.5 * bracket, 1e-9)


def test_a_prior_per_tensor():
    module, x, y = problem()
    prior = {"0.weight": 0.3, "0.bias": 2.0, "2.weight": 5.0, "2.bias": 0.1}
    la = lapwing.fit(module, (x, y), "classification", structure=SEPARATE, prior=prior)
    values = torch.cat([torch.full((p.numel(),), prior[n], dtype=p.dtype) for n, p in module.named_parameters()])
    covariance = torch.linalg.inv(expected(module, x) + torch.diag(values))
    assert_same(la.posterior.covariance(), covariance, 1e-8)


def test_more_data_save_and_load(tmp_path):
    module, x, y = problem(12)
    whole = lapwing.fit(module, (x, y), "classification", structure=SEPARATE)
    parts = lapwing.fit(module, (x[:5], y[:5]), "classification", structure=SEPARATE).update((x[5:], y[5:]))
    assert_same(parts.curvature.dense(), whole.curvature.dense(), 1e-10)
    parts.save(tmp_path / "kron.lapwing")
    again = lapwing.load(tmp_path / "kron.lapwing", module)
    assert again.curvature.structure.bias == "separate"
    assert_same(again.update((x, y)).curvature.dense(), 2 * whole.curvature.dense(), 1e-10)


def test_a_convolution_with_groups():
    module = build(lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 2)))
    x, y = randn(5, 4, 4, 4), torch.randint(2, (5,), generator=seeded(1))
    joint = lapwing.fit(module, (x, y), "classification", structure=Kron(sharing="expand")).curvature.dense()
    apart = lapwing.fit(module, (x, y), "classification", structure=SEPARATE).curvature.dense()
    bias = torch.cat([torch.full((p.numel(),), p.ndim == 1) for p in module.parameters()])
    assert_same(apart, torch.where(bias[:, None] == bias, joint, 0.0), 1e-12)


def test_unknown_treatment_is_refused():
    with pytest.raises(lapwing.UnsupportedOperation, match="bias is 'joint' or 'separate'"):
        Kron(bias="none")
