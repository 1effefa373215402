"""Variational inducing points: a posterior from the outputs at a few inputs, for large data sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from lapwing.curvature import Curvature
from lapwing.curvature.curvature import Accumulator, Estimate, Structure
from lapwing.curvature.fewrows import compressed, subset
from lapwing.curvature.onepass import pass_over
from lapwing.curvature.problem import Problem
from lapwing.errors import BadData, IncompatiblePrior, UnsupportedOperation, require_whole
from lapwing.evidence.evidence import evidence_of
from lapwing.evidence.settings import Groups, Setting, Tuning
from lapwing.linalg import PSD, Jacobian
from lapwing.linalg import LowRank as LowRankMatrix
from lapwing.linalg.krylov import complement, orthonormal_rows
from lapwing.model import Plan, batch_size, take
from lapwing.posterior import Belief
from lapwing.storage import register

OUTPUTS = 64  # outputs per inducing input; of more outputs, a random choice
POOL = 4  # candidates per inducing input in a greedy choice


class ProjectionAccumulator(Accumulator):
    """V G Vᵀ (k, k) for orthonormal rows V, and tr G."""

    def __init__(self, basis: Tensor) -> None:
        self.basis = basis
        self.tensors = {
            "core": torch.zeros(len(basis), len(basis), dtype=torch.float64, device=basis.device),
            "trace": torch.zeros((), dtype=torch.float64, device=basis.device),
        }

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        inside = jacobian.matvec(self.basis.to(jacobian.dtype)).flatten(1).double()
        self.tensors["core"] = self.tensors["core"] + inside @ inside.T
        self.tensors["trace"] = self.tensors["trace"] + jacobian.square_sum().double().sum()

    def finish(self) -> LowRankMatrix:
        return compressed(self.basis, self.tensors["core"])


@register(name="valla")
@dataclass(frozen=True, eq=False)
class VaLLA(Structure):
    """A sparse variational Gaussian process around the network: inducing outputs at `inducing` training inputs.

    With V an orthonormal basis of the Jacobian rows at the inducing inputs, the optimal variational posterior (Titsias
    2009; for linearized networks Ortega, Rodríguez Santana, Hernández-Lobato 2024) has precision VᵀV·cG·VᵀV + τI. It is
    exact once the inducing inputs span all data; outside their span it is the prior. It takes one pass over data of any
    size and k = inducing × outputs vectors of memory. `summary()` brackets the evidence of the full GGN: `log_evidence`
    of the compressed curvature is never below it, `variational_bound` (the ELBO) never above it, and `tune` maximizes
    the bound. Inducing inputs are taken from the data, greedily by the remaining variance among 4 × as many candidates,
    or at random; unlike in the paper, gradients do not move them.

    Examples:
        >>> structure = lapwing.VaLLA(inducing=20)
        >>> la = lapwing.fit(model, train_loader, "classification", structure=structure, prior=10.0).tune()
    """

    inducing: int = 16
    choice: Literal["greedy", "random"] = "greedy"
    seed: int = 0
    bound = "upper"

    def __post_init__(self) -> None:
        require_whole("the number of inducing inputs", self.inducing)
        if self.choice not in ("greedy", "random"):
            raise BadData(f"choice is 'greedy' or 'random', got {self.choice!r}")

    def bytes(self, plan: Plan, itemsize: int) -> int:
        candidates = (POOL if self.choice == "greedy" else 1) * self.inducing
        return (candidates + 2 * self.inducing) * 10 * sum(block.size for block in plan.blocks) * itemsize

    def passes(self) -> int:
        return 2

    def estimate(self, problem: Problem) -> Estimate:
        if problem.plan.dynamic:
            raise UnsupportedOperation("inducing inputs need a network whose operations do not depend on the data")
        basis = self._basis(problem)
        accumulator = ProjectionAccumulator(basis)
        totals = pass_over(problem, accumulator.update)
        matrix, trace = accumulator.finish(), accumulator.tensors["trace"]
        excess = (trace - matrix.values.sum()).clamp(min=0)
        note = (
            f"{self.inducing} inducing inputs span {len(basis)} directions with {1 - float(excess / trace):.2%} of the "
            "trace; only the prior outside"
        )
        return Estimate(matrix, totals, {"excess": excess}, (note,))

    def extend(self, problem: Problem, matrix: PSD, state: dict[str, Tensor]) -> Estimate:
        """Add data under the inducing inputs of the first fit."""
        matrix = cast(LowRankMatrix, matrix)
        accumulator = ProjectionAccumulator(matrix.basis)
        accumulator.tensors["core"] += torch.diag(matrix.values.double())
        accumulator.tensors["trace"] += matrix.values.double().sum() + state["excess"]
        totals = pass_over(problem, accumulator.update)
        grown = accumulator.finish()
        excess = (accumulator.tensors["trace"] - grown.values.sum()).clamp(min=0)
        return Estimate(grown, totals, {"excess": excess})

    def _basis(self, problem: Problem) -> Tensor:
        """Return orthonormal rows that span the Jacobian at the inducing inputs."""
        greedy = self.choice == "greedy"
        rows = self._rows(problem, POOL * self.inducing if greedy else self.inducing)  # one (r, P) an input
        if not greedy or len(rows) <= self.inducing:
            return orthonormal_rows(torch.cat(rows[: self.inducing]))
        basis = rows[0][:0]
        left = list(rows)
        for _ in range(self.inducing):
            best = int(torch.stack([part.double().square().sum() for part in left]).argmax())
            fresh = orthonormal_rows(complement(left[best], basis) if len(basis) else left[best])
            basis = torch.cat([basis, fresh])
            left = [part - (part @ fresh.T) @ fresh for part in left]
        return orthonormal_rows(basis)

    def _rows(self, problem: Problem, points: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        rows = []
        with problem.network.borrow():
            for batch in subset(problem.batches, points, self.seed):
                size = batch_size(batch.inputs)
                for k in range(size):
                    at = problem.network.linearize(problem.plan, take(batch.inputs, slice(k, k + 1), size))
                    outputs = at.f[0].numel()
                    picked = torch.randperm(outputs, generator=generator)[:OUTPUTS]
                    eye = torch.eye(outputs, dtype=at.f.dtype)[picked].to(at.f.device)
                    directions = eye.reshape(-1, 1, *at.f.shape[1:])
                    rows.append(at.jacobian(directions).dense()[0].detach())
        return rows


BOUNDS = (1e-10, 1e10)


def variational_bound(belief: Belief) -> Tensor:
    """Return the ELBO of structure='valla', a differentiable float64 scalar, at most the log evidence of the full GGN.

    The log evidence of the compressed curvature minus ½ c/τ·(tr G − tr VGVᵀ) (Titsias 2009, Eq. 9): for Q ⪯ K,
    log|I + K| ≤ log|I + Q| + tr(K − Q). It equals the log evidence once nothing of G is left outside the span.

        bound = variational_bound(la.belief)
    """
    tau = belief.resolved_prior[1].constant()
    if tau is None:
        raise IncompatiblePrior("the variational bound is for one prior precision for all weights; use a scalar prior")
    excess = belief.scale * _excess(belief.curvature) / (tau * belief.temperature.prior_scale)
    return evidence_of(belief) - 0.5 * excess


def _excess(curvature: Curvature) -> Tensor:
    """Return the trace of the curvature outside the span of the inducing points."""
    if "excess" not in curvature.state:
        raise UnsupportedOperation("only structure='valla' has a variational bound: it knows what its span leaves out")
    return curvature.state["excess"].double() * (curvature.n_data / curvature.seen)


def tune_bound(belief: Belief, groups: Groups, *, learn: Sequence[str] = ("prior",)) -> Tuning:
    """Maximize `variational_bound` over one prior precision: concave in log τ, so its slope is bisected.

    ∂/∂log τ = ½[Σ c e/(c e + τ) + c t/τ − τ‖θ̂ − μ₀‖²], e the eigenvalues inside the span and t the trace outside.
    """
    if tuple(learn) != ("prior",) or groups.count != 1:
        raise UnsupportedOperation("structure='valla' can tune one prior precision only: learn='prior', prior='scalar'")
    inside, prior_scale = belief.curvature.matrix.eigenvalues(), belief.temperature.prior_scale
    assert inside is not None  # of the span, without a prior
    inner = belief.scale.detach() / prior_scale
    values, outside = inner * inside, inner * _excess(belief.curvature)
    square = prior_scale * groups.squares(belief)[0]
    low, high = (math.log(bound) for bound in BOUNDS)
    for _ in range(100):
        middle = (low + high) / 2
        tau = math.exp(middle)
        slope = (values / (values + tau)).sum() + outside / tau - tau * square
        low, high = (middle, high) if float(slope) > 0 else (low, middle)
    found = torch.tensor([math.exp(low)], dtype=torch.float64, device=square.device)
    settings = [Setting(tau, float(belief.temperature.T)) for tau in (groups.precisions(belief).to(found), found)]
    with torch.no_grad():
        scores = torch.stack([-variational_bound(groups.applied(belief, each.precision)) for each in settings])
    message = "the prior maximizes the variational lower bound of the evidence (inducing points)"
    return Tuning.of("evidence", belief, groups, settings, scores, 1, iterations=100, messages=(message,))
