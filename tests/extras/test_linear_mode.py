"""The mode of the linearized model against closed forms and direct optimization."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import lapwing


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    weights = {name: p.detach() for name, p in net.named_parameters()}
    parts = jacrev(lambda p: functional_call(net, p, (x,)))(weights)
    return torch.cat([part.flatten(2) for part in parts.values()], -1)


def test_one_step_is_exact_for_gaussian_noise() -> None:
    """Quadratic: the mode is one solve away, and the gain is ½gᵀΣg of the full curvature."""
    net, x = network(2), torch.randn(12, 2, dtype=torch.float64)
    y = torch.randn(12, 2, dtype=torch.float64)
    la = lapwing.fit(net, (x, y), lapwing.Gaussian(0.5), structure="full", prior=lapwing.Prior(0.7, 0.1))
    j = jacobian(net, x).flatten(0, 1)
    theta = la.params.flat
    residual = (y - net(x).detach()).flatten() + j @ theta
    precision = j.T @ j / 0.25 + 0.7 * torch.eye(len(theta), dtype=torch.float64)
    expected = torch.linalg.solve(precision, j.T @ residual / 0.25 + 0.07)
    found = la.linear_mode([(x[:5], y[:5]), (x[5:], y[5:])])
    torch.testing.assert_close(found.weights, expected, rtol=1e-4, atol=1e-5)
    exact = la.log_evidence(at="linear-mode")
    assert la.log_evidence(at="linear-mode", data=(x, y)).item() == pytest.approx(exact.item(), abs=1e-4)
    assert exact - la.log_evidence() > 1


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_classes_against_direct_optimization(structure: str) -> None:
    """Whatever the structure: it is the preconditioner only. n_data scales the likelihood."""
    net, x, y = network(3), torch.randn(15, 2, dtype=torch.float64), torch.randint(3, (15,))
    la = lapwing.fit(net, (x, y), "classification", structure=structure, prior=0.3, n_data=30, temperature=1.5)
    j, f = jacobian(net, x), net(x).detach()
    theta = la.params.flat.clone()
    delta = torch.zeros_like(theta, requires_grad=True)
    optimizer = torch.optim.LBFGS([delta], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 3.0 * nn.functional.cross_entropy(f + j @ delta, y, reduction="sum") + 0.15 * (theta + delta) @ (
            theta + delta
        )
        loss.backward()
        return loss

    optimizer.step(closure)
    found = la.linear_mode((x, y))
    torch.testing.assert_close(found.log_joint, -closure().detach(), rtol=0, atol=1e-3)
    torch.testing.assert_close(found.weights, (theta + delta).detach(), rtol=0, atol=0.05)
    gap = la.log_evidence(at="linear-mode", data=(x, y)) - la.log_evidence()
    at_map = -3.0 * nn.functional.cross_entropy(f, y, reduction="sum") - 0.15 * theta @ theta
    torch.testing.assert_close(gap, found.log_joint - at_map, rtol=1e-6, atol=1e-6)
