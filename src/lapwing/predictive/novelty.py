"""A score for detection alone: how far an input reaches into directions that the training data left open."""

from __future__ import annotations

import torch

from lapwing.linalg import PSD, Diagonal

FLOOR = 1e-3  # of the mean curvature of a weight


def novelty_precision(matrix: PSD) -> PSD:
    """A = H + ε·tr(H)/P·I, which knows nothing of prior, noise and temperature; the score is tr(J A⁻¹ Jᵀ)."""
    level = (FLOOR * matrix.trace().detach() / matrix.size).clamp(min=torch.finfo(torch.float64).tiny)
    return matrix + Diagonal(level.expand(matrix.size))
