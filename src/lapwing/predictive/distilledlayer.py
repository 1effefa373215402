"""A network that gives the covariance of its outputs in the same forward pass, fitted to covariances of a posterior.

`EnergyNetwork` returns, beside its outputs, how large the inputs of its layers were. `VarianceHead` makes variances
from both. `DistilledLayer` is the two together, which `Predictor` runs.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d, linear
from torch.nn.utils import skip_init

from lapwing.errors import CorruptFile, UnsupportedModel
from lapwing.model import batch_size, take
from lapwing.model.calls import Inputs, arguments, as_called, close, explained, output_tensor, promote, tolerance
from lapwing.model.copies import without_fast_path, written_by_forward
from lapwing.model.linearization import Outputs
from lapwing.predictive.function import GaussianFunction, contrasts

CALLS = 8
"""Layers, at most, whose inputs are looked at: the first, the last and others in between."""

WIDEST = 1024
"""Energies per layer, at most; a wider layer has neighboring features averaged."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

WIDTH = 64  # of the network that corrects the quadratic form
BATCH = 256
RATE, DECAY = 3e-3, 1e-2
WORK = 2e10  # multiplications that the fit of the quadratic form may take
ROUNDS = 20, 2000  # the fewest and the most of its iterations
FAR = 4.0  # standard deviations beyond which inputs of the correction count as this far
TAIL = 0.01  # share of the corrections that are cut off on either side

_OPEN = threading.local()  # `calls`: the energies of this thread's pass so far, in the order of the calls


def _record(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Keep the mean square of each feature of a layer's input: a hook before its forward pass."""
    calls: list[Tensor | None] | None = getattr(_OPEN, "calls", None)
    if calls is None:
        return
    wanted, a = _OPEN.wanted, args[0] if args else None
    if not isinstance(a, Tensor) or a.ndim < 2 or (wanted is not None and len(calls) not in wanted):
        calls.append(None)
    else:
        calls.append(_mean_squares(a, 1 if isinstance(module, CONVOLUTIONS) else a.ndim - 1))


def _mean_squares(a: Tensor, axis: int) -> Tensor:
    """The mean square over all positions of each feature along `axis`, (B, c) with at most `WIDEST` features."""
    a = promote(a)
    others = [k for k in range(1, a.ndim) if k != axis]
    if others:
        count = 1
        for k in others:
            count = count * a.shape[k]
        square = torch.linalg.vector_norm(a, dim=others).square() / count
    else:
        square = a.square()
    return square if square.shape[-1] <= WIDEST else adaptive_avg_pool1d(square[:, None], WIDEST)[:, 0]


class EnergyNetwork(nn.Module):
    """A copy of a network that returns f (B, C) and energies (B, D): mean squares of the inputs of some layers, and 1.

    The uncertainty of the outputs that a layer's weights cause grows with the square of that layer's inputs, so
    energies say where it comes from, at the cost of a look at activations that are computed anyway. The copy is never
    written to, so that any number of threads may run it.

    Example: `f, energies = EnergyNetwork(module, outputs, x)(x)`.
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Outputs,
        example: Inputs | None = None,
        *,
        wanted: tuple[int, ...] = (),
        widths: tuple[int, ...] = (),
    ) -> None:
        """`example` shows which calls of layers to look at; without it, `wanted` and their `widths` say so."""
        super().__init__()
        if any(written_by_forward(each) for each in module.modules()):
            raise UnsupportedModel(
                "the forward pass of this network writes to its module (a counter, a cache), so that threads that "
                "share a predictor would disturb each other. Return such values instead of keeping them in self."
            )
        try:
            self.body = copy.deepcopy(module).requires_grad_(False).eval()
        except Exception as error:  # what cannot be copied raises many kinds
            raise UnsupportedModel(f"the network cannot be copied ({type(error).__name__}: {error})") from error
        self._outputs = outputs
        self._fast = any(
            isinstance(part, nn.MultiheadAttention | nn.TransformerEncoder) for part in self.body.modules()
        )
        for part in self.body.modules():
            if isinstance(part, (nn.Linear, *CONVOLUTIONS)):
                part.register_forward_pre_hook(_record)
        self._wanted: tuple[int, ...] | None = None
        self._wanted, self.widths = (wanted, widths) if example is None else self._look(example)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The calls of layers whose energies are read, in the order of the calls."""
        assert self._wanted is not None
        return self._wanted

    def _look(self, example: Inputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Choose the calls whose energies belong to one sample each: they must be the same alone and in a batch."""
        n = batch_size(example)
        few = max(1, n // 2)
        with torch.no_grad():
            whole, part = (self._calls(each)[1] for each in (example, take(example, slice(0, few), n)))
        good = [
            k
            for k, (a, b) in enumerate(zip(whole, part))
            if a is not None and b is not None and len(a) == n and len(b) == few
            if close(b, a[:few], tolerance([a.dtype]))
        ]  # fmt: skip
        if len(whole) != len(part):
            good = []
        count = min(CALLS, len(good))
        chosen = tuple(good[round(k * (len(good) - 1) / max(1, count - 1))] for k in range(count))
        return chosen, tuple(whole[k].shape[-1] for k in chosen)  # type: ignore[union-attr]

    def _calls(self, inputs: Inputs) -> tuple[Tensor, list[Tensor | None]]:
        args, kwargs = arguments(inputs)
        with explained(inputs):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
        plain = without_fast_path(self.body) if self._fast and not torch.compiler.is_compiling() else nullcontext()
        calls: list[Tensor | None] = []
        _OPEN.calls, _OPEN.wanted = calls, self._wanted
        try:
            with plain, as_called():
                out = output_tensor(self.body(*args, **kwargs))
        finally:
            _OPEN.calls = None
        return self._outputs(out), calls

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """f and energies at the arguments that the network takes."""
        f, calls = self._run(args, kwargs)
        assert self._wanted is not None
        found = [calls[k] for k in self._wanted if k < len(calls)]
        if [None if a is None else a.shape[-1] for a in found] != list(self.widths):
            raise UnsupportedModel("these inputs run other layers than those that the predictor was distilled from")
        one = f.new_ones(f.shape[0], 1)
        return f, torch.cat([*(a.to(f) for a in found if a is not None), one], -1)


class VarianceHead(nn.Module):
    """Standard deviations of the outputs along the columns of an orthogonal basis R (C, C): covariances R diag(s²) Rᵀ.

    s² = (W z) exp(g(f, z)). The weights W ≥ 0 of the energies z make a quadratic form in the inputs of the layers, as
    the covariance of a Kronecker-factored posterior is, so that it goes on growing where inputs are larger than any
    that were seen. The correction g is a small network, and it stays within what the data needed.
    """

    basis: Tensor
    weights: Tensor
    sums: Tensor
    center: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, basis: Tensor, weights: Tensor, widths: Sequence[int]) -> None:
        super().__init__()
        self._widths, self._outputs = tuple(widths), len(basis)
        self.register_buffer("basis", basis.contiguous())  # as it comes back from a file, so that products round alike
        self.register_buffer("weights", weights)
        ends = [*accumulate(self._widths, initial=0)]
        means = weights.new_zeros(len(self._widths), weights.shape[1])
        for k, (begin, end) in enumerate(pairwise(ends)):
            means[k, begin:end] = 1 / (end - begin)
        self.register_buffer("sums", torch.cat([means, weights]), persistent=False)
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
        sizes = self.sizes(z)
        moved = self.correction(self.standardized(self.features(f, sizes))).clamp(self.low, self.high)
        return (sizes[:, -self._outputs :].sqrt() * (moved / 2).exp()).to(f)

    def sizes(self, z: Tensor) -> Tensor:
        """The mean energy of each of the L layers, and the quadratic form W z, (B, L + C)."""
        return linear(z.to(self.sums), self.sums).clamp(min=torch.finfo(self.sums.dtype).tiny ** 0.5)

    def features(self, f: Tensor, sizes: Tensor) -> Tensor:
        """What the correction depends on: outputs, the log of each layer's energy and of the quadratic form."""
        return torch.cat([f.to(sizes), (sizes + 1e-12).log()], -1)

    def standardized(self, features: Tensor) -> Tensor:
        """Features in standard deviations of the data, cut off far away."""
        return ((features - self.center) / self.scale).clamp(-FAR, FAR)


class DistilledLayer(nn.Module):
    """A network with the covariance of its outputs by a fitted head; what `Predictor` runs."""

    def __init__(self, network: EnergyNetwork, head: VarianceHead) -> None:
        super().__init__()
        self.network, self.head = network, head

    @property
    def width(self) -> int:
        """The number of outputs."""
        return len(self.head.basis)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """f (B, C) and its standard deviations along the head's basis, (B, C)."""
        f, z = self.network(*args, **kwargs)
        return f, self.head(f, z)

    def function(
        self, f: Tensor, spread: Tensor, shift_invariant: bool = False, scale: float = 1.0
    ) -> GaussianFunction:
        """The Gaussian over the outputs, multiplied by `scale`."""
        f, spread = (f, spread) if scale == 1.0 else (scale * f, scale * spread)
        basis = self.head.basis.to(f)
        gram = lambda root: (root * spread[..., None, :].square()) @ root.mT  # noqa: E731
        return GaussianFunction(
            f,
            lambda: gram(basis),
            variance=lambda: spread.square() @ basis.square().mT,
            contrasts=(lambda: gram(basis - basis.mean(0))) if shift_invariant and f.shape[-1] > 2 else False,
            root=lambda: (basis, spread, basis.mT),
            closed=True,
        )


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
    sizes = head.sizes(z)
    x, y = head.features(f, sizes), target.log() - sizes[:, -target.shape[-1] :].log()
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
