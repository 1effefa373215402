"""The variational lower bound of the evidence for inducing points, and the prior that maximizes it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.curvature import Curvature
from lapwing.errors import IncompatiblePrior, UnsupportedOperation
from lapwing.evidence.evidence import evidence_of
from lapwing.evidence.groups import Groups
from lapwing.evidence.tuning import Setting, Tuning
from lapwing.posterior import Belief

BOUNDS = (1e-10, 1e10)


def variational_bound(belief: Belief) -> Tensor:
    """The ELBO of structure='valla': never above the log evidence of the full GGN, a differentiable float64 scalar.

    The log evidence of the compressed curvature minus ½ c/τ·(tr G − tr VGVᵀ) (Titsias 2009, Eq. 9): for Q ⪯ K,
    log|I + K| ≤ log|I + Q| + tr(K − Q). Equal to the log evidence once nothing of G is left outside the span.

        bound = variational_bound(la.belief)
    """
    tau = belief.resolved_prior[1].constant()
    if tau is None:
        raise IncompatiblePrior("the variational bound is for one prior precision for all weights; use a scalar prior")
    excess = belief.scale * _excess(belief.curvature) / (tau * belief.temperature.prior_scale)
    return evidence_of(belief) - 0.5 * excess


def _excess(curvature: Curvature) -> Tensor:
    """The trace of the curvature outside the span of the inducing points."""
    if "excess" not in curvature.state:
        raise UnsupportedOperation("only structure='valla' has a variational bound: it knows what its span leaves out")
    return curvature.state["excess"].double() * (curvature.n_data / curvature.seen)


def tune_bound(belief: Belief, groups: Groups, *, learn: Sequence[str] = ("prior",)) -> Tuning:
    """Maximize `variational_bound` over one prior precision: concave in log τ, so its slope is bisected.

    ∂/∂log τ = ½[Σ c e/(c e + τ) + c t/τ − τ‖θ̂ − μ₀‖²], e the eigenvalues inside the span and t the trace outside.
    """
    if tuple(learn) != ("prior",) or groups.count != 1:
        raise UnsupportedOperation("inducing points learn one prior precision (learn='prior', prior='scalar')")
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
