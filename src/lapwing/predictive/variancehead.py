"""The covariance of a network's outputs as a function of one forward pass, fitted to covariances of a posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lapwing.errors import CorruptFile
from lapwing.predictive.linearized import contrasts

WIDTH = 64  # of the network that corrects the quadratic form
BATCH = 256
RATE, DECAY = 3e-3, 1e-2
WORK = 2e10  # multiplications that the fit of the quadratic form may take
ROUNDS = 20, 2000  # the fewest and the most of its iterations
FAR = 4.0  # standard deviations beyond which inputs of the correction count as this far
TAIL = 0.01  # share of the corrections that are cut off on either side


class VarianceHead(nn.Module):
    """Standard deviations of the outputs along the columns of an orthogonal basis R (C, C): covariances R diag(s²) Rᵀ.

    s² = (W z) exp(g(f, z)). The weights W ≥ 0 of the energies z make a quadratic form in the inputs of the layers, as
    the covariance of a Kronecker-factored posterior is, so that it goes on growing where inputs are larger than any
    that were seen. The correction g is a small network, and it stays within what the data needed.
    """

    basis: Tensor
    weights: Tensor
    center: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, basis: Tensor, weights: Tensor, widths: Sequence[int]) -> None:
        super().__init__()
        self._widths, self._outputs = tuple(widths), len(basis)
        self.register_buffer("basis", basis)
        self.register_buffer("weights", weights)
        inputs = 2 * self._outputs + len(self._widths)
        like: dict[str, Any] = {"dtype": basis.dtype, "device": basis.device}
        sizes = (inputs, WIDTH, WIDTH, self._outputs)
        layers = [skip_init(nn.Linear, i, o, **like) for i, o in pairwise(sizes)]  # no global random numbers are drawn
        for layer in layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.correction = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        self.register_buffer("center", torch.zeros(inputs, **like))
        self.register_buffer("scale", torch.ones(inputs, **like))
        self.register_buffer("low", torch.zeros(self._outputs, **like))
        self.register_buffer("high", torch.zeros(self._outputs, **like))

    def forward(self, f: Tensor, z: Tensor) -> Tensor:
        """s (B, C) for outputs f (B, C) and energies z (B, D), the last of which is 1."""
        plain = self.plain(z)
        moved = self.correction(self.standardized(self.features(f, z, plain)))
        moved = torch.minimum(torch.maximum(moved, self.low), self.high)
        return (plain.sqrt() * (moved / 2).exp()).to(f)

    def plain(self, z: Tensor) -> Tensor:
        """The quadratic form W z, (B, C)."""
        return (z.to(self.weights) @ self.weights.mT).clamp(min=torch.finfo(self.weights.dtype).tiny ** 0.5)

    def features(self, f: Tensor, z: Tensor, plain: Tensor) -> Tensor:
        """What the correction depends on: outputs, the log of each layer's energy and of the quadratic form."""
        layers = [part.mean(-1, keepdim=True) for part in z[:, :-1].split(self._widths, -1)] if self._widths else []
        sizes = torch.cat([*(each.to(plain) for each in layers), plain], -1)
        return torch.cat([f.to(plain), (sizes + 1e-12).log()], -1)

    def standardized(self, features: Tensor) -> Tensor:
        """Features in standard deviations of the data, cut off far away."""
        return ((features - self.center) / self.scale).clamp(-FAR, FAR)


def fit_head(
    f: Tensor,
    z: Tensor,
    covariance: Tensor,
    widths: Sequence[int],
    *,
    inside: int,
    shift_invariant: bool,
    epochs: int,
    generator: torch.Generator,
) -> VarianceHead:
    """Fit a head to the teacher's covariances (N, C, C) at outputs f (N, C) and energies z (N, D).

    Where `shift_invariant`, the covariances are those of the outputs minus their average.

    The first `inside` items are those of the data, the others are perturbed. Variances may differ by orders of
    magnitude between items, so the fit of both parts counts ratios, not differences.
    """
    basis = _basis(covariance[:inside].double(), shift_invariant)
    target = torch.einsum("ik,nij,jk->nk", basis, covariance.double(), basis)
    if shift_invariant and len(basis) > 1:
        target[:, -1] = target[:, :-1].mean(-1)  # of the average, which no target sees
    target = target.clamp(min=1e-6 * target.mean().clamp(min=torch.finfo(torch.float64).tiny ** 0.25))
    weights = quadratic_weights(z, target, widths)
    head = VarianceHead(basis.to(f), weights.to(f), widths)
    if epochs:
        _fit_correction(head, f, z, target.to(f), epochs, generator)
    return head.requires_grad_(False).eval()


def restored_head(tensors: Mapping[str, Tensor], widths: Sequence[int]) -> VarianceHead:
    """Return the head that these tensors are the state of; refuse what no fit can have made."""
    if any(not bool(value.isfinite().all()) for value in tensors.values()):
        raise CorruptFile("the head of the stored predictor is not finite")
    basis, weights = tensors["basis"], tensors["weights"]
    if weights.shape != (len(basis), sum(widths) + 1) or bool((weights < 0).any()):
        raise CorruptFile("the weights of the stored predictor fit no head")
    head = VarianceHead(basis, weights, widths)
    head.load_state_dict(dict(tensors))
    return head.requires_grad_(False).eval()


def _basis(covariance: Tensor, shift_invariant: bool) -> Tensor:
    """Eigenvectors of the mean covariance, every item counting alike; the average of all outputs on its own, where
    targets do not see it."""
    c = covariance.shape[-1]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=torch.finfo(covariance.dtype).tiny ** 0.5)
    if not shift_invariant or c == 1:
        return torch.linalg.eigh((covariance / trace[:, None, None]).mean(0)).eigenvectors
    free = contrasts(c, covariance)  # (c − 1, c)
    within = free @ covariance @ free.mT
    trace = within.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=torch.finfo(covariance.dtype).tiny ** 0.5)
    vectors = torch.linalg.eigh((within / trace[:, None, None]).mean(0)).eigenvectors
    return torch.cat([free.mT @ vectors, covariance.new_full((c, 1), 1 / math.sqrt(c))], -1)


def quadratic_weights(z: Tensor, target: Tensor, widths: Sequence[int] = ()) -> Tensor:
    """Return W ≥ 0 (C, D) that minimizes Σ t/(Wz) + log(Wz), in which only ratios count.

    This is the divergence of Itakura and Saito, and each multiplicative step lowers it (Févotte and Idier 2011).
    Energies that are zero in all data get the mean weight of their layer.
    """
    size, unit = z.mean(0), target.mean(0)
    seen = size > 1e-12 * size.max()
    x, t = torch.where(seen, z / size.where(seen, 1.0), 0.0), (target / unit).to(z)
    w = (seen / seen.sum()).to(z).expand(target.shape[-1], -1)
    tiny = torch.finfo(z.dtype).tiny ** 0.25
    for _ in range(int(min(max(WORK / (4 * x.numel() * len(w)), ROUNDS[0]), ROUNDS[1]))):
        v = (x @ w.mT).clamp(min=tiny)
        w = w * (((t / v.square()).mT @ x) / ((1 / v).mT @ x).clamp(min=tiny)).sqrt()
    w = torch.where(seen, w.double() * unit[:, None] / size.where(seen, 1.0), 0.0)
    parts = []
    for part, own in zip(
        w.split([*widths, 1], -1) if widths else (w,), seen.split([*widths, 1]) if widths else (seen,)
    ):
        mean = part.sum(-1, keepdim=True) / own.sum().clamp(min=1)
        parts.append(torch.where(own, part, mean))
    return torch.cat(parts, -1)


def _fit_correction(
    head: VarianceHead, f: Tensor, z: Tensor, target: Tensor, epochs: int, generator: torch.Generator
) -> None:
    """Train the correction on the logarithm of what the quadratic form leaves."""
    plain = head.plain(z)
    x, y = head.features(f, z, plain), target.log() - plain.log()
    head.center, head.scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-3)
    head.low, head.high = torch.quantile(y, TAIL, dim=0), torch.quantile(y, 1 - TAIL, dim=0)
    middle, spread = y.mean(0), y.std(0, correction=0).clamp(min=1e-6)
    x, y = head.standardized(x), (y - middle) / spread
    layers = [layer for layer in head.correction if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
    optimizer = torch.optim.AdamW(head.correction.parameters(), RATE, weight_decay=DECAY)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // BATCH))
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(x), generator=generator, device=x.device).split(BATCH):
                optimizer.zero_grad()
                (head.correction(x[rows]) - y[rows]).square().mean().backward()
                optimizer.step()
                rates.step()
    with torch.no_grad():
        layers[-1].weight.mul_(spread[:, None])
        layers[-1].bias.mul_(spread).add_(middle)
