"""f(x, θ) ≈ f̂(x) + J(x)(θ − θ̂): the Gaussian over outputs that a Gaussian over weights gives, and what it would learn.

Novelty, a score for detection alone, is how much a target at an input would still teach about the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import TooLarge, UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, Diagonal, Jacobian
from lapwing.linalg.rows import chunks
from lapwing.model import Linearization, Network, Plan, PlanChanged, batch_size, dynamic_plan, take
from lapwing.model.calls import Inputs, outside_inference
from lapwing.model.linearization import pull
from lapwing.predictive.function import GaussianFunction

CLOSED_FORM = 64
"""Outputs per sample up to which everything comes from covariances; beyond, `sample` takes one JVP per draw."""

COVARIANCES = 1024
"""Outputs per sample up to which class probabilities come from covariances; beyond, they come from draws by JVPs.
Equally accurate probabilities would need more draws than there are outputs."""

CHUNK = 2**28
"""Bytes of back-propagated gradients, and of the graph behind them, in memory at a time."""

FLOOR = 1e-4  # precision of weights in the score of novel inputs, in parts of their mean curvature
SOFTEN = 2.0  # logits are divided by it: networks are too sure of what they have not seen

OUTPUTS = 6
"""Tensors of the size of the outputs that a prediction by draws holds at least: its results and one draw."""

Draws = Callable[[int, torch.Generator | None], Tensor]


@dataclass(frozen=True, eq=False)
class Linearized:
    """The network linearized at its weights, with a Gaussian over the weights."""

    network: Network
    plan: Plan
    precision: PSD
    draws: Draws  # (n, generator) -> weight samples (n, P)
    memory: int
    shift_invariant: bool = False  # whether targets do not see what all outputs of an item share, as a softmax

    def function(
        self, inputs: Inputs, *, joint: bool = False, differentiable: bool = False, by_draws: bool = False
    ) -> GaussianFunction:
        """Return the distribution of f at these inputs; covariances are computed when asked for.

        `by_draws`: expectations come from weight draws however few outputs there are.
        """
        if differentiable:
            return self._differentiable(inputs, joint)
        mean = self.network.forward(inputs)
        sampler = root = None
        many = mean[0].numel() > CLOSED_FORM
        if (many or by_draws) and not joint:
            sampler = lambda n, generator: self._sample(inputs, mean, n, generator)  # noqa: E731
        if many and not by_draws and not joint:
            root = lambda: shared_root(self.network, self.plan, self.precision, inputs)  # noqa: E731
        covariance = (lambda: self._joint(inputs, mean)) if joint else (lambda: self.covariance(inputs, mean))
        variance = None if joint else lambda: self.variance(inputs, mean, self.precision)
        exact = lambda: self.covariance(inputs, mean, contrast=True)  # noqa: E731
        contrasts = exact if self.shift_invariant and mean.shape[-1] > 2 else False
        return GaussianFunction(
            mean,
            covariance,
            variance=variance,
            sampler=sampler,
            joint=joint,
            contrasts=contrasts,
            root=root,
            closed=not by_draws and self._affordable(mean),
        )

    def _affordable(self, mean: Tensor) -> bool:
        """Whether the covariances of items with many outputs take a bearable part of time and memory."""
        under_way = 4 * self.plan.under_way(mean.shape[-1]) + self.plan.graph
        covariances = 4 * mean.numel() * mean.shape[-1] * mean.element_size()
        few = mean[0].numel() <= (CLOSED_FORM if self.precision.iterative else COVARIANCES)
        return few and max(under_way, covariances) <= self.memory // 4

    def jacobians(
        self,
        inputs: Inputs,
        event: int | None = None,
        directions: int | None = None,
        contrast: bool = False,
        basis: Tensor | None = None,
    ) -> Iterator[tuple[Linearization, Jacobian]]:
        """Yield rows of ∂f/∂θ for every output of an item, a few samples at a time (of one event position, if given).

        With `contrast` they are rows of f minus its average over the outputs of an item; with `basis` (k, C), rows of k
        combinations of the outputs of one event position. `directions` is how many rows an item will have; without it
        the first few samples tell.
        """
        total = batch_size(inputs)
        start, size = 0, min(4 if directions is None else self._samples_at_once(self.plan, directions), total)
        while start < total:  # no copy is held while the caller has its turn, who may never come back
            part = take(inputs, slice(start, start + size), total)
            with self.network.borrow():
                at, rows = self._rows(part, event, contrast=contrast, basis=basis)
            yield at, rows
            start += size
            size = self._samples_at_once(at.plan, rows.r)

    def require_rows(self, directions: int) -> None:
        """Raise `TooLarge` where so many rows of one sample do not fit into memory."""
        needed = 4 * (self.plan.under_way(directions) + directions**2) + self.plan.graph  # and directions
        if needed > max(self.memory, CHUNK):
            raise TooLarge(
                f"the rows of {directions:,} outputs of one sample need {needed / 1e9:.3g} GB, the budget is "
                f"{self.memory / 1e9:.3g} GB. Use la.tune(val) with held-out data, which takes draws of so many "
                "outputs, choose the prior yourself with la.replace(prior=...), or raise memory= in fit."
            )

    def _samples_at_once(self, plan: Plan, directions: int) -> int:
        """Return how many samples fit into memory with the gradients of all directions and their graph."""
        each = 4 * plan.under_way(directions) + plan.graph
        return max(1, min(64, int(min(self.memory / 8, CHUNK) / max(1, each))))

    @outside_inference
    def covariance(self, inputs: Inputs, mean: Tensor, contrast: bool = False) -> Tensor:
        """Return the covariance (B, *event, C, C) of f, or with `contrast` that of f minus its average."""
        _require(mean.numel() * mean.shape[-1] * mean.element_size(), self.memory, "the covariance of the outputs")
        n, c = mean.shape[0], mean.shape[-1]
        if c > CLOSED_FORM and not contrast:
            root = shared_root(self.network, self.plan, self.precision, inputs)
            if root is not None:
                return from_root(*root[:2]).to(mean.dtype)
        events = mean[0].numel() // c
        basis = contrasts(c, mean) if contrast else None
        blocks = []
        for e in range(events):
            with self.network.copied(), torch.no_grad():
                rows = self.jacobians(inputs, e, c, basis=basis)
                found = torch.cat([self.precision.quadratic(part) for _, part in rows])
                blocks.append(found if basis is None else basis.to(found).mT @ found @ basis.to(found))
        return torch.stack(blocks, 1).reshape(n, *mean.shape[1:], c).to(mean.dtype)

    @outside_inference
    def variance(self, inputs: Inputs, mean: Tensor, precision: PSD) -> Tensor:
        """Return diag(J A⁻¹ Jᵀ) under any precision A, (B, *event, C)."""
        columns = []
        for e in range(mean[0].numel() // mean.shape[-1]):
            with self.network.copied(), torch.no_grad():
                parts = [precision.variance(rows) for _, rows in self.jacobians(inputs, e, mean.shape[-1])]
                columns.append(torch.cat(parts))
        return torch.stack(columns, 1).reshape(mean.shape).to(mean.dtype)

    @outside_inference
    def _joint(self, inputs: Inputs, mean: Tensor) -> Tensor:
        """Return the covariance over all inputs, (B, *event, C, B, *event, C)."""
        _require(mean.numel() ** 2 * mean.element_size(), self.memory, "the joint covariance of the outputs")
        with self.network.borrow(), torch.no_grad():
            rows = self._rows(inputs)[1]
            return self.precision.joint(rows).reshape(*mean.shape, *mean.shape).to(mean.dtype)

    @outside_inference
    def kernel_factors(self, inputs: Inputs, differentiable: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return f (B, *event, C), and U and V (B, *event, C, k) with U(x) V(x′)ᵀ = J(x) A⁻¹ J(x′)ᵀ for any inputs."""
        total = batch_size(inputs)

        def factors(at: Linearization, rows: Jacobian) -> tuple[Tensor, Tensor, Tensor]:
            if (needed := 2 * total * rows.r * rows.size * self.precision.dtype.itemsize) > self.memory:
                raise TooLarge(
                    f"the covariance of {total} inputs with others needs {needed / 1e9:.3g} GB, one number per input, "
                    f"output and weight; the budget is {self.memory / 1e9:.3g} GB. Ask for fewer inputs at once, fit "
                    "with select='last_layer', or raise memory= in fit."
                )
            return at.f, *self.precision.cross_factors(rows)

        if differentiable:
            with self.network.borrow(differentiable=True):
                parts = [factors(*self._rows(inputs, create_graph=True))]
        else:
            with self.network.copied(), torch.no_grad():
                found = [factors(at, rows) for at, rows in self.jacobians(inputs)]
                parts = [(f.detach(), left, right) for f, left, right in found]
        f, left, right = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return f, left.reshape(*f.shape, -1), right.reshape(*f.shape, -1)

    def _rows(
        self,
        inputs: Inputs,
        event: int | None = None,
        create_graph: bool = False,
        contrast: bool = False,
        basis: Tensor | None = None,
    ) -> tuple[Linearization, Jacobian]:
        """Return the network and its rows at these inputs; without the tape where they run other operations."""
        for dynamic in (False, True):
            plan = dynamic_plan(self.network.params, "these inputs run other operations") if dynamic else self.plan
            try:
                with torch.enable_grad():
                    at = self.network.linearize(plan, inputs, create_graph)
                directions = _identity(at.f, event)
                if basis is not None:
                    directions = torch.einsum("kc,c...->k...", basis.to(directions), directions)
                return at, at.jacobian(_centered(directions) if contrast else directions)
            except PlanChanged:
                if plan.dynamic:
                    raise
        raise AssertionError("a dynamic plan reads any network")

    def _differentiable(self, inputs: Inputs, joint: bool) -> GaussianFunction:
        """Return mean and covariance at once, as functions of the inputs that autograd can follow."""
        with self.network.borrow(differentiable=True):
            at, rows = self._rows(inputs, create_graph=True)
            f = at.f
            n, c = f.shape[0], f.shape[-1]
            if joint:
                covariance = self.precision.joint(rows).reshape(*f.shape, *f.shape)
            elif f.ndim == 2:
                covariance = self.precision.quadratic(rows)
            else:
                parts = [self.precision.quadratic(at.jacobian(_identity(f, e))) for e in range(f[0].numel() // c)]
                covariance = torch.stack(parts, 1).reshape(n, *f.shape[1:], c)
            return GaussianFunction(f, covariance.to(f.dtype), joint=joint, contrasts=self.shift_invariant and c > 2)

    def _sample(self, inputs: Inputs, mean: Tensor, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Draw f (n, B, *event, C) with one weight draw and one forward-mode product each, a few draws at a time."""
        each = mean.numel() * mean.element_size()
        _require(OUTPUTS * each, self.memory, f"{OUTPUTS} tensors of the size of the outputs")
        steps = self.draws(n, generator) - self.network.params.flat
        few = max(1, min(self.memory // 32, CHUNK) // (each + 2 * self.plan.graph))
        for k in range(0, n, few):
            yield mean + self._push(inputs, steps[k : k + few])

    @outside_inference
    def _push(self, inputs: Inputs, steps: Tensor) -> Tensor:
        """Return J v for weight steps v (s, P), (s, B, *event, C)."""
        total, size = batch_size(inputs), max(1, CHUNK // max(1, self.plan.graph))
        parts = (take(inputs, slice(k, k + size), total) for k in range(0, total, size))
        return torch.cat([self.network.jvp(part, steps)[1] for part in parts], 1)


def from_root(root: Tensor, spread: Tensor) -> Tensor:
    """Return R diag(s²) Rᵀ of each item, (B, C, C), a few items at a time."""
    c = len(root)
    found = root.new_empty(len(spread), c, c)
    for start, length in chunks(len(spread), c * c * root.element_size()):
        own = spread[start : start + length].square()
        torch.matmul(root * own[:, None], root.mT, out=found[start : start + length])
    return found


def _identity(f: Tensor, event: int | None = None) -> Tensor:
    """Return directions (r, n, *event, c): every output of an item, or those of one event position."""
    size, c = f[0].numel(), f.shape[-1]
    eye = torch.eye(size, dtype=f.dtype, device=f.device)
    if event is not None:
        eye = eye[event * c : (event + 1) * c]
    return eye.reshape(-1, 1, *f.shape[1:]).expand(-1, *f.shape)


def _centered(directions: Tensor) -> Tensor:
    return directions - directions.mean(-1, keepdim=True)


def contrasts(c: int, like: Tensor) -> Tensor:
    """Return Helmert's orthonormal basis (c − 1, c) of c outputs without their average."""
    rank = torch.arange(1, c, dtype=torch.float64, device=like.device)
    basis = torch.tril(torch.ones(c - 1, c, dtype=torch.float64, device=like.device))
    basis[:, 1:].diagonal().copy_(-rank)
    return (basis / (rank * (rank + 1)).sqrt()[:, None]).to(like.dtype)


def _require(needed: int, memory: int, what: str) -> None:
    if needed > memory:
        raise TooLarge(
            f"{what} needs {needed / 1e9:.3g} GB, the budget is {memory / 1e9:.3g} GB. Use .function.variance or "
            ".function.sample(n), predict fewer inputs at once, or raise memory= in fit."
        )


def shared_root(network: Network, plan: Plan, precision: PSD, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """Return R (C, C) and s (B, C) with covariance R diag(s²) Rᵀ of f at every input, for a last layer on its own.

    This needs outputs W a of one weight matrix, and a precision whose eigenvectors are products. No covariance of the
    outputs is formed. None for other networks, selections and structures.
    """
    if len(plan.blocks) != 1 or plan.looped or network.params.index is not None:
        return None
    block = plan.blocks[0]
    if block.kind != "matrix" or len(block.uses) != 1 or block.uses[0][1]:
        return None
    try:
        with network.borrow(), torch.enable_grad():
            at = network.linearize(plan, inputs)
    except PlanChanged:
        return None
    uses = at.plan.blocks[0].uses if at.plan.blocks else ()  # of a plan made for these inputs, where it is another
    if len(uses) != 1 or not _last(at, uses[0][0]):
        return None
    a = at.recorded.right(uses[0][0], block.bias)[:, 0].detach()
    if a.shape[1:3] != (1, 1):
        return None
    if precision.is_diagonal:
        precision = Diagonal(block.places.take(precision.diagonal()))
    factors = precision.output_factors(at.f.shape[-1], a.shape[-1])
    if factors is None:
        return None
    left, right, variances = factors
    inner = a[:, 0, 0].to(precision.dtype)
    square = (inner if right is None else inner @ right).square() @ variances.mT
    return left, (square + torch.finfo(square.dtype).tiny ** 0.5).sqrt()


def _last(at: Linearization, k: int) -> bool:
    """Check by values and by a backward pass whether outputs (B, C) are those of a record, unchanged."""
    record = at.recorded.records[k]
    if at.f.ndim != 2 or record.out.shape != at.f.shape or not torch.equal(record.out, at.f):
        return False
    v = torch.randn(at.f.shape, generator=torch.Generator().manual_seed(0)).to(at.f)
    (g,) = pull(at.f, [record.edge], v)
    return g is not None and torch.equal(g.to(v), v)


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
