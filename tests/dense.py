"""Dense algebra that tests compare with: Jacobians by autograd, Hessians of the usual losses, Gaussian integrals.

No Lapwing code here, and nothing clever: float64 matrices of a few hundred rows.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=seeded(seed))


def build(make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A module with weights that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(dtype)


def chosen(module: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The parameters that take part, in the order of named_parameters."""
    free = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return free if names is None else {name: p for name, p in free.items() if name in names}


def flat(module: nn.Module, names: Sequence[str] | None = None) -> Tensor:
    return torch.cat([p.reshape(-1) for p in chosen(module, names).values()])


def jacobian(module: nn.Module, x: Tensor, names: Sequence[str] | None = None) -> Tensor:
    """(N, D, P): D runs over all dimensions of an output but the first."""
    weights = chosen(module, names)

    def outputs(w: dict[str, Tensor]) -> Tensor:
        return functional_call(module, w, (x,)).reshape(len(x), -1)

    found = jacrev(outputs)(weights)
    return torch.cat([found[name].flatten(2) for name in weights], -1).detach()


def outputs(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x)


def softmax_hessian(f: Tensor) -> Tensor:
    """diag(p) − p pᵀ, (N, C, C)."""
    p = f.softmax(-1)
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def ggn(j: Tensor, lam: Tensor | None = None) -> Tensor:
    """Σ_n J_nᵀ Λ_n J_n, (P, P); Λ = I where none is given."""
    lam = torch.eye(j.shape[1], dtype=j.dtype).expand(len(j), -1, -1) if lam is None else lam
    return torch.einsum("ndp,nde,neq->pq", j, lam, j)


def covariance(j: Tensor, precision: Tensor) -> Tensor:
    """J_n A⁻¹ J_nᵀ, (N, D, D)."""
    return j @ torch.linalg.inv(precision) @ j.mT


def gaussian_log_density(y: Tensor, mean: Tensor, matrix: Tensor) -> Tensor:
    """log N(y; mean, matrix) for vectors."""
    offset = y - mean
    distance = offset @ torch.linalg.solve(matrix, offset)
    return -0.5 * (distance + torch.linalg.slogdet(matrix)[1] + len(y) * math.log(2 * math.pi))


def relative(a: Tensor, b: Tensor) -> float:
    """max |a − b| / max |b|."""
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-300)).item()


def assert_same(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    error = relative(a, b)
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"
