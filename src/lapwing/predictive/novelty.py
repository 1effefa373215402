"""A score for detection alone: how much a target at an input would still teach about the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, Diagonal

FLOOR = 1e-2  # of the mean curvature of a weight


def novelty_precision(matrix: PSD) -> PSD:
    """A = H + ε·tr(H)/P·I, which knows nothing of prior, noise and temperature."""
    level = (FLOOR * matrix.trace().detach() / matrix.size).clamp(min=torch.finfo(torch.float64).tiny)
    return matrix + Diagonal(level.expand(matrix.size))


def information_gain(f: Tensor, covariance: Tensor, likelihood: Likelihood) -> Tensor:
    """½ log |I + S₀ᵀ V S₀| in nats, (B, *event): f (B, *event, C), V (B, *event, C, C) under `novelty_precision`.

    The information that one more target would carry about the weights, linearized, for a network that does not know the
    answer yet: S₀ S₀ᵀ is the likelihood's Fisher information at f = 0 (equal probabilities, unit rates). At the
    network's own f a confident mistake would look familiar, since its target seems known in advance. For classes S₀
    takes out the common shift of the logits, which no data determine and which is most of the bare trace of V.
    """
    root = blank_root(f, likelihood).to(covariance)
    inner = root.mT @ covariance @ root
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    return 0.5 * torch.linalg.slogdet(eye + inner).logabsdet


def information_bound(f: Tensor, variance: Tensor, likelihood: Likelihood) -> Tensor:
    """½ log(1 + tr(S₀ᵀ diag(v) S₀)) from variances v (B, *event, C): for outputs too many for a covariance."""
    root = blank_root(f, likelihood).to(variance)
    return 0.5 * (root.square().sum(-1) * variance).sum(-1).log1p()


def blank_root(f: Tensor, likelihood: Likelihood) -> Tensor:
    """S of the likelihood at f = 0, the same for all items, or the identity where it has none without targets."""
    blank = f.new_zeros(1, *(1 for _ in f.shape[1:-1]), f.shape[-1])
    try:
        return likelihood.factor(blank)
    except UnsupportedOperation:
        return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
