"""Learn prior and noise while the weights are trained: a step of the evidence now and then, in any training loop.

A step uses a curvature or, with structure="batch", a stochastic lower bound of the evidence from one batch:
log|H + Π| − log|Π| is subadditive in the data: for a batch b of a data set of N (Immer et al. 2023, Prop. 1)

    log|H + Π| − log|Π| ≤ E_b[(N/|b|)·log|I + Φ_b Π⁻¹ Φ_bᵀ|],    Φ_b the rows Sᵀ J/√φ of the batch,

so that (N/|b|)·(log p(b|θ) − ½ log|I + Φ_b Π⁻¹ Φ_bᵀ|) − ½‖θ − μ‖²_Π is below the evidence on average, and
closer to it for larger batches. It is differentiable in prior and noise, and in what the inputs were computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.curvature import Factor, Structure, estimate_curvature, pose, resolve_factor, resolve_structure
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.evidence.ascent import BOUNDS, Moved, move
from lapwing.evidence.evidence import effective_parameters, evidence_of
from lapwing.evidence.settings import KINDS, Groups, partition
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.linalg import Diagonal, Jacobian
from lapwing.model import Batch, Batches, Network, Params, Plan, batch_size, select_names, take
from lapwing.model.batches import require_one_process
from lapwing.model.calls import Inputs, call, output_tensor, outside_autocast
from lapwing.posterior import Belief, Prior, resolve_prior

BATCH = "batch"  # structure="batch": the stochastic bound of one batch


@dataclass(frozen=True, eq=False)
class Progress:
    """What the evidence has taught so far."""

    prior: Prior
    likelihood: Likelihood
    precision: Tensor | None = None  # (G,), one per group
    evidence: float = math.nan
    effective: float = math.nan
    steps: int = 0
    moments: Tensor | None = None  # (2, G + 1): Adam's, for structure="batch"


@dataclass(frozen=True, eq=False)
class Online:
    """Prior and noise learned by the evidence inside a training loop of your own.

    `prior` says which precisions are learned: "scalar", "layerwise", "unit", "input" or "parameterwise", starting at
    `start`; a number or a `Prior` is kept fixed. `learn` is any of "prior" and "noise", by default both if possible.
    `structure` and `factor` mean the same as in `fit`; structure="batch" uses the stochastic bound of one batch. A step
    reads up to `samples` data, which stand for the `n_data` of the training set, and moves logarithms by at most
    `reach` ("batch": Adam with learning rate `reach`/10). Nothing here changes: `step` returns a new object.

    Examples:
        >>> online = lapwing.Online("classification", n_data=120)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> for epoch in range(2):
        ...     for inputs, labels in train_loader:
        ...         optimizer.zero_grad()
        ...         online.loss(model, inputs, labels).backward()
        ...         optimizer.step()
        ...     online = online.step(model, train_loader)
        >>> la = lapwing.fit(model, train_loader, online.likelihood, structure="kron", prior=online.belief.prior)
    """

    family: str | Likelihood
    n_data: float
    prior: Any = "layerwise"
    start: float = 1.0
    structure: str | Structure = "kron"
    factor: str | Factor = "ggn"
    select: Any = "all"
    learn: tuple[str, ...] | None = None
    reach: float = 1.0
    bounds: tuple[float, float] = BOUNDS
    samples: int | None = 4096
    split: Callable[[Any], tuple] | None = None
    generator: torch.Generator | None = None
    belief: Progress = None  # type: ignore[assignment]
    _terms: dict[str, Any] = field(default_factory=dict, repr=False)  # the prior per parameter, once needed

    def __post_init__(self) -> None:
        if not (self.n_data > 0 and math.isfinite(self.n_data)):
            raise BadData(f"n_data is the size of the training set, positive and finite; got {self.n_data}")
        if isinstance(self.prior, str) and self.prior not in KINDS:
            raise UnsupportedOperation(
                f"prior is one of {', '.join(KINDS)}, or a fixed precision or Prior; got {self.prior!r}"
            )
        family = resolve_likelihood(self.family)
        if self.structure != BATCH:
            resolve_structure(self.structure)  # refuse now
        resolve_factor(self.factor)
        if set(self.learning) - {"prior", "dispersion"}:
            raise UnsupportedOperation(f"learn is any of 'prior' and 'noise', got {list(self.learning)}")
        if self.belief is None:
            prior = Prior(self.start) if isinstance(self.prior, str) else resolve_prior(self.prior)
            object.__setattr__(self, "belief", Progress(prior, family))

    @property
    def learning(self) -> tuple[str, ...]:
        """The names of what is learned: "prior" and "dispersion", whatever the likelihood calls it.

        Examples:
            >>> online = lapwing.Online("classification", n_data=120)
            >>> online.learning
            ('prior',)
        """
        if self.learn is not None:
            named = (self.learn,) if isinstance(self.learn, str) else tuple(self.learn)
            chosen = resolve_likelihood(self.family).learned_names(named)
        else:
            chosen = ("prior", "dispersion") if resolve_likelihood(self.family).dispersion_name else ("prior",)
        return chosen if isinstance(self.prior, str) else tuple(what for what in chosen if what != "prior")

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with the current noise.

        Examples:
            >>> online = lapwing.Online("regression", n_data=40).step(network, (inputs, targets))
            >>> noise = online.likelihood.noise
        """
        return self.belief.likelihood

    def loss(self, model: nn.Module, inputs: Inputs, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return φ·(mean −log p(y|f) + ½‖θ − μ‖²_Π/N), which is minimal where the log joint is maximal.

        The factor φ, which is 1 for everything but a Gaussian, keeps the size of gradients while the noise is learned.

        Examples:
            >>> online = lapwing.Online("classification", n_data=120)
            >>> online.loss(model, x, y).backward()
        """
        misfit = self.misfit(model, inputs, targets, weights)
        return misfit * self.likelihood.common_factor.detach().to(misfit) + self.penalty(model).to(misfit)

    def misfit(self, model: nn.Module, inputs: Inputs, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the mean −log p(y|f) over the samples of a batch; the module stays in its current mode.

        Examples:
            >>> online = lapwing.Online("classification", n_data=120)
            >>> cross_entropy = online.misfit(model, x, y)
        """
        family = self.likelihood
        f = family.outputs(output_tensor(call(model, inputs)))
        y = family.targets(f.detach(), targets)
        each = family.log_prob(f, y).reshape(f.shape[0], -1).sum(1)
        total = each.sum() if weights is None else (each * weights.to(each)).sum()
        return -total / family.count(f, y, weights)

    def penalty(self, model: nn.Module) -> Tensor:
        """Return φ·½‖θ − μ‖²_Π/N, to be added to a *mean* loss φ·(−log p), such as a mean cross-entropy (φ = 1).

        Examples:
            >>> online = lapwing.Online("classification", n_data=120)
            >>> loss = nn.functional.cross_entropy(model(x), y) + online.penalty(model)
        """
        live = dict(model.named_parameters())
        if "names" not in self._terms:
            self._terms.update(self._parameters(model))
        names, terms = self._terms["names"], self._terms["terms"]
        if terms is None:  # the prior is a matrix, such as an earlier posterior
            mean, matrix = self._terms["whole"]
            offset = torch.cat([live[name].reshape(-1) for name in names]).to(mean) - mean
            total = (offset * matrix.matvec(offset)).sum()
        else:
            parts = [_squared(live[name], *term) for name, term in zip(names, terms, strict=True)]
            total = torch.stack(parts).sum()
        return 0.5 * total * self.likelihood.common_factor.detach().to(total) / self.n_data

    def _parameters(self, model: nn.Module) -> dict[str, Any]:
        names = select_names(model, self.select)
        live = dict(model.named_parameters())
        shapes = [live[name].shape for name in names]
        like = live[names[0]]
        sizes = [shape.numel() for shape in shapes]
        mean, matrix = self.belief.prior.resolve(names, sizes, like.dtype, like.device)
        if not matrix.is_diagonal:
            return {"names": names, "terms": None, "whole": (mean.to(matrix.dtype), matrix)}
        pairs = zip(matrix.diagonal().detach().split(sizes), mean.split(sizes), shapes, strict=True)
        return {"names": names, "terms": [_term(tau, mu, shape) for tau, mu, shape in pairs]}

    @outside_autocast
    def step(self, model: nn.Module, data: Any) -> Online:
        """Take one step of prior and noise towards the maximum of the evidence at the current weights.

        The network is evaluated in eval mode and given back unchanged, in the mode it came in. `.belief` of the result
        holds the new prior and likelihood and the log evidence.

        Examples:
            >>> online = lapwing.Online("classification", n_data=120)
            >>> online = online.step(model, train_loader)
            >>> prior = online.belief.prior
        """
        require_one_process("Online.step")
        names = select_names(model, self.select)
        network = Network(model, Params.of(model, names), self.likelihood.outputs)
        subset = Subset(data, self.samples, self.generator) if self.structure != BATCH else data
        batches = Batches(subset, model, network.params.device, self.split)
        belief = self._by_batch(network, batches) if self.structure == BATCH else self._by_curvature(network, batches)
        return replace(self, belief=belief, _terms={})

    def _by_curvature(self, network: Network, batches: Batches) -> Progress:
        old = self.belief
        factor = resolve_factor(self.factor)
        problem = pose(network, batches, old.likelihood, factor, generator=self.generator, progress=False)
        curvature = estimate_curvature(problem, resolve_structure(self.structure), self.n_data)
        belief = Belief(curvature, old.prior, old.likelihood)
        if not isinstance(self.prior, str) and not self.learning:
            value, effective = evidence_of(belief).item(), effective_parameters(belief)
            return replace(old, evidence=value, effective=effective, steps=old.steps + 1)
        groups = self._groups(curvature.names, network.params)
        precision = self._precision(groups, network.params)
        moved = move(belief, groups, precision, learn=self.learning, reach=self.reach, bounds=self.bounds)
        return self._progress(groups, moved)

    def _groups(self, blocks: Any, params: Params) -> Groups:
        if isinstance(self.prior, str):
            return partition(self.prior, blocks, params)
        if not self.belief.prior.resolve(params.names, params.sizes)[1].is_diagonal:
            raise UnsupportedOperation("the noise cannot be learned under a prior that is itself a posterior: learn=()")
        return Groups.parameterwise(params.size)

    def _precision(self, groups: Groups, params: Params) -> Tensor:
        if self.belief.precision is not None and isinstance(self.prior, str):
            return self.belief.precision.to(params.device)
        _, matrix = self.belief.prior.resolve(params.names, params.sizes, torch.float64, params.device)
        return groups.average(matrix).to(params.device)

    def _progress(self, groups: Groups, moved: Moved, moments: Tensor | None = None) -> Progress:
        prior = self.belief.prior
        if isinstance(self.prior, str):
            prior = groups.prior(moved.precision, prior.mean)
        steps = self.belief.steps + 1
        return Progress(prior, moved.likelihood, moved.precision, moved.evidence, moved.effective, steps, moments)

    def _by_batch(self, network: Network, batches: Batches) -> Progress:
        old, params = self.belief, network.params
        batch: Batch = next(iter(batches))
        problem = pose(network, batches, old.likelihood, resolve_factor(self.factor), progress=False)
        blocks = tuple(block.names for block in problem.plan.blocks)
        groups = self._groups(blocks, params)
        x = self._precision(groups, params).log().detach()
        u = old.likelihood.dispersion.detach().double().log().to(x.device)
        point = torch.cat([x, u[None]]).requires_grad_()
        noisy = "dispersion" in self.learning
        family = old.likelihood.with_dispersion(point[-1].exp()) if noisy else old.likelihood
        center = torch.as_tensor(old.prior.mean, dtype=torch.float64, device=x.device).expand(params.size)
        value = batch_bound(
            network,
            problem.plan,
            batch,
            family,
            problem.factor,
            center=center,
            precision=groups.expand(point[:-1].exp()),
            n_data=self.n_data,
            generator=self.generator,
        )
        (gradient,) = torch.autograd.grad(value, point)
        moments = point.new_zeros(2, len(point)) if old.moments is None else old.moments.to(x.device)
        there, moments = _adam(point.detach(), gradient, moments, old.steps + 1, self.reach / 10)
        tau = there[:-1].exp().clamp(*self.bounds) if "prior" in self.learning else x.exp()
        told = old.likelihood.with_dispersion(there[-1].exp()) if noisy else old.likelihood
        return self._progress(groups, Moved(tau, told, value.item(), math.nan), moments)


@dataclass(frozen=True, eq=False)
class Subset:
    """Up to `count` samples of the data: random rows of a pair of tensors, or the first batches of anything else."""

    data: Any
    count: int | None
    generator: torch.Generator | None

    def __iter__(self) -> Iterator[Any]:
        data = self.data
        if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor):
            x, y = data
            rows = torch.arange(len(y), device=y.device)
            if self.count is not None and len(y) > self.count:
                generator = self.generator or torch.Generator().manual_seed(0)
                rows = torch.randperm(len(y), generator=generator, device=generator.device)[: self.count]
            for part in rows.split(256):
                yield take(x, part.to(y.device), len(y)), y[part.to(y.device)]
            return
        yield from self._first(data)

    def _first(self, data: Iterable[Any]) -> Iterator[Any]:
        seen = 0
        for batch in data:
            yield batch
            seen += batch_size(batch)
            if self.count is not None and seen >= self.count:
                return


def _term(tau: Tensor, mu: Tensor, shape: torch.Size) -> tuple[Tensor | float, Tensor | None]:
    """Return precision and mean of one parameter: one number if all its weights share it, None for a mean of zero."""
    common = tau[0].item() if bool((tau == tau[0]).all()) else tau.reshape(shape)
    return common, None if not bool(mu.any()) else mu.reshape(shape)


def _squared(value: Tensor, tau: Tensor | float, mu: Tensor | None) -> Tensor:
    squared = (value if mu is None else value - mu).square()
    return (squared * tau).sum() if isinstance(tau, Tensor) else squared.sum() * tau


def _adam(x: Tensor, gradient: Tensor, moments: Tensor, count: int, rate: float) -> tuple[Tensor, Tensor]:
    """One step of Adam uphill (Kingma & Ba 2015)."""
    first = 0.9 * moments[0] + 0.1 * gradient
    second = 0.99 * moments[1] + 0.01 * gradient.square()
    step = (first / (1 - 0.9**count)) / ((second / (1 - 0.99**count)).sqrt() + 1e-12)
    return x + rate * step, torch.stack([first, second])


def bracket_bound(rows: Jacobian, precision: Tensor, scale: Tensor, ratio: float) -> Tensor:
    """Return (N/|b|)·log|I + c·Φ Π⁻¹ Φᵀ| for rows Φ (n, r, P), Π = diag(precision), c = `scale`, ratio = N/|b|."""
    kernel = Diagonal(precision).joint(rows).double().flatten(2).flatten(0, 1)  # (n·r, n·r)
    eye = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    kernel = 0.5 * (kernel + kernel.mT) * scale
    return ratio * 2 * torch.linalg.cholesky(eye + kernel).diagonal().log().sum()


def batch_bound(
    network: Network,
    plan: Plan,
    batch: Batch,
    likelihood: Likelihood,
    factor: Factor,
    *,
    center: Tensor,
    precision: Tensor,
    n_data: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the bound for one batch, a float64 scalar with gradients into `precision` (P,), `center` and the noise."""
    with network.borrow():
        at = network.linearize(plan, batch.inputs)
        f = at.f.detach()
        y = likelihood.targets(f, batch.targets)
        ratio = n_data / likelihood.count(f, y, batch.weights)
        directions = torch.stack(list(factor.directions(likelihood, f, y, generator)))
        if batch.weights is not None:
            directions = directions * batch.weights.to(f).sqrt().reshape(-1, *(1,) * (f.ndim - 1))
        rows = at.jacobian(directions)
        scale = likelihood.common_factor.double() ** -factor.dispersion_power
        bracket = bracket_bound(rows, precision, scale, ratio)
    fit = ratio * likelihood.log_likelihood(likelihood.statistics(f, y, batch.weights))
    offset = network.params.flat.double() - center.double()
    return fit - 0.5 * (precision.double() * offset.square()).sum() - 0.5 * bracket
