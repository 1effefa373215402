"""The sketched Lanczos score: how far gradients leave the leading subspace of the curvature, at fixed memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.krylov import Matvec
from lapwing.model import Network, Plan, batch_size, take
from lapwing.model.calls import Inputs


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
        """Return one score per sample, (B,), summed over outputs."""
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
    """Take `rank` Lanczos steps on the curvature, keeping three vectors and the sketches of the others.

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
