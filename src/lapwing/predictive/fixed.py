"""The fixed points and the fixed seed of everything that is computed without a generator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

SEED = 2021
"""Of everything that is drawn without a generator."""


def base_points(n: int, dim: int, like: Tensor, seed: int = SEED) -> Tensor:
    """(n, dim) fixed points that stand for N(0, I): a scrambled Sobol sequence through the normal quantile.

    For softmax probabilities from 1,024 points its error is about 1/20 of that of independent draws at 3 classes, 1/5
    at 10 and 1/2 at 100 (antithetic draws reach 1/2).
    """
    if dim > SobolEngine.MAXDIM:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, dim, generator=generator, dtype=torch.float64).to(like)
    uniform = SobolEngine(dim, scramble=True, seed=seed).draw(n, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(2**-53, 1 - 2**-53)).to(like)


def fixed_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)
