"""Scores for detection alone: how much a target at an input would teach, and how far its gradients leave a subspace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, Diagonal
from lapwing.linalg.krylov import Matvec
from lapwing.model import Network, Plan, batch_size, take
from lapwing.model.batches import Inputs

FLOOR = 1e-4  # of the mean curvature of a weight
SOFTEN = 2.0  # logits are divided by it: networks are too sure of what they have not seen


def novelty_precision(matrix: PSD) -> PSD:
    """A = H + ε·tr(H)/P·I, which knows nothing of prior, noise and temperature."""
    level = (FLOOR * matrix.trace().detach() / matrix.size).clamp(min=torch.finfo(torch.float64).tiny)
    return matrix + Diagonal(level.expand(matrix.size))


def information_gain(f: Tensor, covariance: Tensor, likelihood: Likelihood) -> Tensor:
    """½ log |I + Sᵀ V S| in nats, (B, *event): f (B, *event, C), V (B, *event, C, C) under `novelty_precision`.

    The information that one more target would carry about the weights, linearized, S Sᵀ the likelihood's Fisher
    information at f. Logits are softened first: at its own confidence a network that is wrong but sure finds nothing
    left to learn. Not softened at all it is a measure of f more than of V; softened without limit, of the size of the
    gradients, which is small for smooth images, known or not. The bare trace of V is mostly what all logits share.
    """
    factor, root = softened_root(f, likelihood)
    root = root.to(covariance)
    inner = root.mT @ covariance @ root / factor**2
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    return 0.5 * torch.linalg.slogdet(eye + inner).logabsdet


def information_bound(f: Tensor, variance: Tensor, likelihood: Likelihood) -> Tensor:
    """½ log(1 + tr(Sᵀ diag(v) S)) from variances v (B, *event, C): for outputs too many for a covariance."""
    factor, root = softened_root(f, likelihood)
    return 0.5 * (root.to(variance).square().sum(-1) * variance / factor**2).sum(-1).log1p()


def softened_root(f: Tensor, likelihood: Likelihood) -> tuple[float, Tensor]:
    """What outputs are divided by, and S there; the identity where the likelihood has none without targets."""
    factor = SOFTEN if likelihood.has_logits else 1.0
    try:
        return factor, likelihood.factor(f / factor)
    except UnsupportedOperation:
        return factor, torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, f.shape[-1])


@dataclass(frozen=True, eq=False)
class CountSketch:
    """A random map of P coordinates to `size` that keeps inner products on average: signed sums of hashed entries."""

    size: int
    place: Tensor  # (P,)
    sign: Tensor  # (P,)

    @classmethod
    def draw(
        cls, length: int, size: int, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> CountSketch:
        place = torch.randint(size, (length,), generator=generator)
        sign = (2 * torch.randint(0, 2, (length,), generator=generator) - 1).to(torch.int8)
        return cls(size, place.to(device), sign.to(device))

    def __call__(self, v: Tensor) -> Tensor:
        """(*b, P) → (*b, size)."""
        out = v.new_zeros(*v.shape[:-1], self.size)
        return out.index_add(-1, self.place, v * self.sign.to(v.dtype))


@dataclass(frozen=True, eq=False)
class SketchedScore:
    """‖(I − UUᵀ) J(x)ᵀ‖² from sketches alone: an out-of-distribution score that no prior enters.

    Memory: `rank` × `size` numbers for the subspace, whatever the number of weights (Miani, Beretta, Hauberg 2024,
    "Sketched Lanczos uncertainty score").
    """

    network: Network
    plan: Plan
    sketch: CountSketch
    basis: Tensor  # (k, size), orthonormal

    def __call__(self, inputs: Inputs, samples: int = 16) -> Tensor:
        """One score a sample, (B,), summed over outputs."""
        total = batch_size(inputs)
        parts = [take(inputs, slice(k, k + samples), total) for k in range(0, total, samples)]
        return torch.cat([self._score(part) for part in parts])

    def _score(self, inputs: Inputs) -> Tensor:
        with self.network.borrow():
            at = self.network.linearize(self.plan, inputs)
            outputs = at.f[0].numel()
            eye = torch.eye(outputs, dtype=at.f.dtype, device=at.f.device)
            directions = eye.reshape(outputs, 1, *at.f.shape[1:]).expand(outputs, *at.f.shape)
            rows = self.sketch(at.jacobian(directions).dense().detach().double())  # (n, r, size)
        inside = rows @ self.basis.T
        return (rows.square().sum((-2, -1)) - inside.square().sum((-2, -1))).clamp(min=0)


def sketched_score(
    network: Network,
    plan: Plan,
    matvec: Matvec,
    *,
    rank: int = 32,
    size: int = 4096,
    generator: torch.Generator | None = None,
    progress: Callable[[int], None] | None = None,
) -> SketchedScore:
    """`rank` Lanczos steps on the curvature, keeping three vectors and the sketches of the rest.

    Without re-orthogonalization Lanczos vectors lose orthogonality but not their span; their *sketches* are
    orthonormalized at the end, which is the paper's idea: the score needs the subspace only.
    """
    params = network.params
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    sketch = CountSketch.draw(params.size, size, generator, params.device)
    v = torch.randn(1, params.size, generator=generator, dtype=torch.float64).to(params.device)
    v, before, beta = v / v.norm(), torch.zeros_like(v), torch.zeros((), dtype=torch.float64)
    kept = []
    for step in range(rank):
        kept.append(sketch(v)[0])
        w = matvec(v).double() - beta * before
        w = w - (w * v).sum() * v
        beta, before = w.norm(), v
        if progress is not None:
            progress(step)
        if not float(beta) > 1e-10:
            break
        v = w / beta
    left, values, _ = torch.linalg.svd(torch.stack(kept).T, full_matrices=False)
    return SketchedScore(network, plan, sketch, left[:, values > 1e-6 * values.max()].T)
