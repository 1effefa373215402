"""Novelty: how much a target at an input would still teach about the weights, a score for detection alone."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, Diagonal

FLOOR = 1e-4  # precision of weights in the score of novel inputs, in parts of their mean curvature
SOFTEN = 2.0  # logits are divided by it: networks are too sure of what they have not seen


def novelty_precision(matrix: PSD) -> PSD:
    """Return H + ε·tr(H)/P·I, which does not depend on prior, noise and temperature."""
    level = (FLOOR * matrix.trace().detach() / matrix.size).clamp(min=torch.finfo(torch.float64).tiny)
    return matrix + Diagonal(level.expand(matrix.size))


def information_gain(f: Tensor, covariance: Tensor, likelihood: Likelihood) -> Tensor:
    """Return ½ log |I + Sᵀ V S| in nats, (B, *event), for f (B, *event, C) and V (B, *event, C, C).

    V is the covariance under `novelty_precision`, S Sᵀ the Fisher information of the likelihood at f. In a linearized
    model this is what one more target would tell about the weights. Logits are softened first, since a network that is
    wrong but sure would find nothing left to learn. Without softening the score measures f more than V; softened
    without limit, it measures the size of the gradients, which is small for smooth images, known or not. The trace of
    V alone is mostly what all logits share.
    """
    factor, root = softened_root(f, likelihood)
    root = root.to(covariance)
    inner = root.mT @ covariance @ root / factor**2
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    return 0.5 * torch.linalg.slogdet(eye + inner).logabsdet


def information_bound(f: Tensor, variance: Tensor, likelihood: Likelihood) -> Tensor:
    """Return ½ log(1 + tr(Sᵀ diag(v) S)) from variances v (B, *event, C), for outputs too many for a covariance."""
    factor, root = softened_root(f, likelihood)
    return 0.5 * (root.to(variance).square().sum(-1) * variance / factor**2).sum(-1).log1p()


def softened_root(f: Tensor, likelihood: Likelihood) -> tuple[float, Tensor]:
    """Return the number that outputs are divided by, and S there (the identity where S needs targets)."""
    factor = SOFTEN if likelihood.has_logits else 1.0
    try:
        return factor, likelihood.factor(f / factor)
    except UnsupportedOperation:
        return factor, torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, f.shape[-1])
