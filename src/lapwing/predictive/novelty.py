"""A score for detection alone: how much a target at an input would still teach about the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, Diagonal

FLOOR = 1e-3  # of the mean curvature of a weight


def novelty_precision(matrix: PSD) -> PSD:
    """A = H + ε·tr(H)/P·I, which knows nothing of prior, noise and temperature."""
    level = (FLOOR * matrix.trace().detach() / matrix.size).clamp(min=torch.finfo(torch.float64).tiny)
    return matrix + Diagonal(level.expand(matrix.size))


def information_gain(f: Tensor, covariance: Tensor, likelihood: Likelihood) -> Tensor:
    """½ log |I + Sᵀ V S| in nats, (B, *event): f (B, *event, C), V (B, *event, C, C) under `novelty_precision`.

    The expected information of one more target about the weights, linearized. The bare trace of V is no such score:
    where a network is confident its logits, and with them their variance, are large (on the digits of the demo that
    trace is far worse than chance).
    """
    root = output_root(f, likelihood).to(covariance)
    inner = root.mT @ covariance @ root
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    return 0.5 * torch.linalg.slogdet(eye + inner).logabsdet


def information_bound(f: Tensor, variance: Tensor, likelihood: Likelihood) -> Tensor:
    """½ log(1 + tr(Sᵀ diag(v) S)) from variances v (B, *event, C): for outputs too many for a covariance."""
    root = output_root(f, likelihood).to(variance)
    return 0.5 * (root.square().sum(-1) * variance).sum(-1).log1p()


def output_root(f: Tensor, likelihood: Likelihood) -> Tensor:
    """S of the likelihood, or the identity where it has none without targets."""
    try:
        return likelihood.factor(f)
    except UnsupportedOperation:
        return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, f.shape[-1])
