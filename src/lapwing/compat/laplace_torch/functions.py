"""The functions of `laplace.utils`: scores of predictions, and small pieces of linear algebra."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions.multivariate_normal import _precision_to_scale_tril
from torch.utils.data import Sampler

from lapwing.compat.laplace_torch.enums import LinkApprox, PredType, PriorStructure


class RunningNLLMetric(nn.Module):
    """The mean negative log-probability of labels, over batches: `update`, `compute`, `reset`."""

    nll_sum: Tensor
    n_valid_labels: Tensor

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.register_buffer("nll_sum", torch.zeros((), dtype=torch.float64))
        self.register_buffer("n_valid_labels", torch.zeros((), dtype=torch.float64))

    def update(self, probs: Tensor, targets: Tensor) -> None:
        """Add probabilities (..., classes) and labels (...)."""
        log_probs, labels = probs.flatten(0, -2).log(), targets.flatten()
        self.nll_sum += F.nll_loss(log_probs, labels, ignore_index=self.ignore_index, reduction="sum")
        self.n_valid_labels += (labels != self.ignore_index).sum()

    def compute(self) -> Tensor:
        return self.nll_sum / self.n_valid_labels

    def reset(self) -> None:
        self.nll_sum.zero_()
        self.n_valid_labels.zero_()

    def forward(self, probs: Tensor, targets: Tensor) -> Tensor:
        self.update(probs, targets)
        return self.compute()


def get_nll(out_dist: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-probability of labels."""
    return F.nll_loss(torch.log(out_dist), targets)


def gaussian_nll(means: Tensor, variances: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-density of targets under normal distributions; `var` includes the noise."""
    variances = variances.diagonal(dim1=-2, dim2=-1) if variances.ndim > means.ndim else variances
    return F.gaussian_nll_loss(means, targets, variances, full=True, eps=1e-12)


@torch.no_grad()
def validate(
    laplace: Any,
    val_loader: Any,
    loss: Any,
    pred_type: PredType | str = PredType.GLM,
    link_approx: LinkApprox | str = LinkApprox.PROBIT,
    n_samples: int = 100,
    dict_key_y: str = "labels",
) -> float:
    """Return the loss of predictions for a data set: a metric with `update` and `compute`, or a function of all data.

    A metric starts from zero. (In laplace-torch it is not reset, so that a grid search averages over earlier
    candidates.)
    """
    running = all(callable(getattr(loss, name, None)) for name in ("update", "compute", "reset"))
    if running:
        loss.reset()
    seen: list[tuple[Any, ...]] = []
    for data in val_loader:
        x, y = (data, data[dict_key_y]) if isinstance(data, MutableMapping) else data
        y = y.to(laplace._device)
        out = laplace(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples, fitting=True)
        parts = (*out, y) if isinstance(out, tuple) else (out, y)
        if not running:
            seen.append(parts)
            continue
        try:
            loss.update(*parts)
        except TypeError:  # a metric of means alone
            loss.update(parts[0], y)
    found = loss.compute() if running else loss(*(torch.cat(part) for part in zip(*seen, strict=True)))
    return float(found.sum())


def parameters_per_layer(model: nn.Module) -> list[int]:
    """Return the number of weights of every parameter tensor."""
    return [p.numel() for p in model.parameters()]


def invsqrt_precision(M: Tensor) -> Tensor:
    """Return a lower triangular L with L Lᵀ = M⁻¹."""
    return _precision_to_scale_tril(M)


def _is_batchnorm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)


def _is_valid_scalar(scalar: Any) -> bool:
    number = np.isscalar(scalar) and bool(np.isreal(scalar))
    return number or (torch.is_tensor(scalar) and scalar.shape in ((), (1,)))


def kron(t1: Tensor, t2: Tensor) -> Tensor:
    """Return the Kronecker product of two matrices."""
    return torch.kron(t1.contiguous(), t2.contiguous())


def diagonal_add_scalar(X: Tensor, value: float | Tensor) -> Tensor:
    """Add a number to the diagonal of a matrix."""
    return X + value * torch.eye(len(X), dtype=X.dtype, device=X.device)


def block_diag(blocks: list[Tensor]) -> Tensor:
    """Return the block-diagonal matrix of these blocks."""
    return torch.block_diag(*blocks)


class SoDSampler(Sampler):
    """A sampler of M random data out of N, the same at every pass."""

    def __init__(self, N: int, M: int, seed: int = 0) -> None:
        self.indices = torch.tensor(np.random.default_rng(seed).choice(list(range(N)), M, replace=False))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def expand_prior_precision(prior_prec: Tensor, model: nn.Module) -> Tensor:
    """Return one prior precision per trainable weight, from one, one per tensor or one per weight."""
    sizes = torch.tensor([p.numel() for p in model.parameters() if p.requires_grad], device=prior_prec.device)
    if len(prior_prec) == 1:
        return prior_prec.expand(int(sizes.sum()))
    return prior_prec if len(prior_prec) == int(sizes.sum()) else prior_prec.repeat_interleave(sizes)


def fix_prior_prec_structure(
    prior_prec_init: float,
    prior_structure: PriorStructure | str,
    n_layers: int,
    n_params: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Return a prior precision of the length that a structure needs, with the same number everywhere."""
    lengths = {PriorStructure.SCALAR: 1, PriorStructure.LAYERWISE: n_layers, PriorStructure.DIAG: n_params}
    try:
        length = lengths[PriorStructure(prior_structure)]
    except ValueError:
        raise ValueError(f"prior_structure is 'scalar', 'layerwise' or 'diag', got {prior_structure!r}") from None
    return torch.full((length,), float(prior_prec_init), device=device, dtype=dtype)


def normal_samples(mean: Tensor, var: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw from normal distributions that are independent between items: (samples, batch, outputs).

    `var` holds variances (batch, outputs) or covariances (batch, outputs, outputs).
    """
    if mean.ndim != 2 or var.shape not in (mean.shape, (*mean.shape, mean.shape[1])):
        raise ValueError(f"expected a mean (batch, outputs) and its (co)variances, got {mean.shape} and {var.shape}")
    noise = torch.randn(n_samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    if var.shape == mean.shape:
        return mean + var.sqrt() * noise
    return mean + torch.einsum("bij,sbj->sbi", torch.linalg.cholesky(var), noise)
