"""Brute force in float64: one sample, one output, one call of autograd at a time. No Lapwing code here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .architectures.registry import Inputs


def call(module: nn.Module, inputs: Inputs) -> Tensor:
    """model(x), model(*x) or model(**x); `.logits` where there is one."""
    if isinstance(inputs, dict):
        out = module(**inputs)
    elif isinstance(inputs, tuple):
        out = module(*inputs)
    else:
        out = module(inputs)
    return getattr(out, "logits", out)


def take(inputs: Inputs, index: slice) -> Inputs:
    if isinstance(inputs, dict):
        return {k: v[index] for k, v in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(v[index] for v in inputs)
    return inputs[index]


def count(inputs: Inputs) -> int:
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    return len(first[0] if isinstance(first, tuple) else first)


def selected(module: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Parameters that require grad, in the order of named_parameters (a tied tensor once)."""
    free = {k: p for k, p in module.named_parameters() if p.requires_grad}
    return free if names is None else {k: p for k, p in free.items() if k in names}


def outputs(module: nn.Module, inputs: Inputs, class_dim: int = -1) -> Tensor:
    """f (N, *event, C), sample by sample; (N,) becomes (N, 1)."""
    check_mode(module)
    rows = []
    with torch.no_grad():
        for n in range(count(inputs)):
            rows.append(canonical(call(module, take(inputs, slice(n, n + 1))), class_dim))
    return torch.cat(rows).detach()


def check_mode(module: nn.Module) -> None:
    if any(m.training for m in module.modules()):
        raise ValueError("the oracle wants a module in evaluation mode")


def canonical(raw: Tensor, class_dim: int = -1) -> Tensor:
    return raw.unsqueeze(-1) if raw.dim() == 1 else raw.movedim(class_dim, -1)


def jacobian(module: nn.Module, inputs: Inputs, names: Sequence[str] | None = None, class_dim: int = -1) -> Tensor:
    """(N, D, P): every output of every sample, D running over (*event, C) row-major."""
    check_mode(module)
    params = list(selected(module, names).values())
    samples = []
    for n in range(count(inputs)):
        f = canonical(call(module, take(inputs, slice(n, n + 1))), class_dim).reshape(-1)
        rows = [gradient(f[d], params) for d in range(f.numel())]
        samples.append(torch.stack(rows))
    return torch.stack(samples)


def gradient(scalar: Tensor, params: Sequence[Tensor]) -> Tensor:
    if not scalar.requires_grad:
        return torch.cat([torch.zeros_like(p).flatten() for p in params])
    grads = torch.autograd.grad(scalar, params, retain_graph=True, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(params, grads, strict=True)]
    return torch.cat([g.flatten() for g in flat]).detach()


def hessian_gaussian(f: Tensor) -> Tensor:
    """Λ (N, D, D) of unit noise: the identity."""
    n = f.shape[0]
    d = f[0].numel()
    return torch.eye(d, dtype=f.dtype).expand(n, d, d)


def hessian_categorical(f: Tensor) -> Tensor:
    """Λ (N, D, D): diag(p) − p pᵀ within each event, nothing between events."""
    n, c = f.shape[0], f.shape[-1]
    p = torch.softmax(f.reshape(n, -1, c), -1)  # (N, E, C)
    blocks = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    e = p.shape[1]
    full = f.new_zeros(n, e, c, e, c)
    for k in range(e):
        full[:, k, :, k] = blocks[:, k]
    return full.reshape(n, e * c, e * c)


def hessian_bernoulli(f: Tensor) -> Tensor:
    p = torch.sigmoid(f.flatten(1))
    return torch.diag_embed(p * (1 - p))


def ggn(j: Tensor, lam: Tensor) -> Tensor:
    """Σ_n J_nᵀ Λ_n J_n, (P, P)."""
    return torch.einsum("ndp,nde,neq->pq", j, lam, j)


def score_gaussian(f: Tensor, y: Tensor) -> Tensor:
    """∇_f log N(y; f, 1), (N, D)."""
    return (y.reshape(f.shape) - f).flatten(1)


def score_categorical(f: Tensor, y: Tensor) -> Tensor:
    onehot = torch.nn.functional.one_hot(y, f.shape[-1]).to(f.dtype)
    return (onehot - torch.softmax(f, -1)).flatten(1)


def score_bernoulli(f: Tensor, y: Tensor) -> Tensor:
    return (y.reshape(f.shape).to(f.dtype) - torch.sigmoid(f)).flatten(1)


def empirical_fisher(j: Tensor, score: Tensor) -> Tensor:
    """Σ_n s_n s_nᵀ with s_n = J_nᵀ ∇_f log p(y_n | f_n)."""
    s = torch.einsum("ndp,nd->np", j, score)
    return s.T @ s


def positions(module: nn.Module, names: Sequence[str], of: Sequence[str] | None = None) -> Tensor:
    """Where the parameters called `names` sit in the flat vector of the selection `of`."""
    at, start = {}, 0
    for k, p in selected(module, of).items():
        at[k] = torch.arange(start, start + p.numel())
        start += p.numel()
    return torch.cat([at[k] for k in names])


def keep_blocks(matrix: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """The matrix with everything outside the given diagonal blocks set to zero."""
    out = torch.zeros_like(matrix)
    for index in blocks:
        out[index.unsqueeze(1), index] = matrix[index.unsqueeze(1), index]
    return out
