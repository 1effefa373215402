"""Leave-one-out from the training data: an experimental stand-in where no data can be held out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, TooLarge, UnsupportedOperation
from lapwing.evidence.heldout import Batch, GramSweep, Score
from lapwing.evidence.search import MEMORY, tune_validation
from lapwing.evidence.settings import DETERMINISTIC, Groups, Rule, Setting, Trials, Tuning, lowest
from lapwing.posterior import Belief

LEVERAGE = 0.98  # a larger leverage of a datum on its own prediction is clamped to this
TRUSTED = 0.01  # the score is not trusted if more than this share of the data is clamped
SURE = 2.0  # standard errors that the gain over the network must exceed
MOST = 1.0  # nats that one datum may add to that gain or take from it
ASK = "tune on held-out data, tune(val_loader), or take what the evidence chose with method='evidence'"

CAUTION = (
    "leave-one-out is experimental: it suits models at their mode under the prior in use, but a network that "
    "interpolates its training data looks best without a posterior. Prefer held-out data: tune(val_loader)"
)


def tune_loo(
    belief: Belief,
    groups: Groups,
    batches: Iterable[Batch],
    *,
    learn: Sequence[str] | None = None,
    grid: Mapping[str, Sequence[float]] | None = None,
    score: Score | None = None,
    rule: Rule = lowest,
    memory: int = MEMORY,
) -> Tuning:
    """Minimize −Σ log ∫ p(y_n|f) N(f; f₋ₙ, V₋ₙ) df over a grid, with the training data as `batches`.

    V₋ₙ = (I − c V_n Λ_n)⁻¹ V_n and f₋ₙ = f_n − c V₋ₙ ∇_f log p, c = T/φ, are the moments without datum n; exact for a
    linear-Gaussian model at its mode. The mean is moved once, at the precision and temperature of the belief (the
    network was trained there), and only V changes with the setting: otherwise a large τ would score the training NLL. A
    datum whose leverage c V_n Λ_n reaches one is clamped, and the result says how many were. By default it learns the
    prior, a noise that the fit estimated, and what `grid` has candidates for.
    """
    if learn is None:
        default = ("prior", "dispersion") if belief.likelihood.learns_dispersion else ("prior",)
        learn = tuple(dict.fromkeys((*default, *(grid or {}))))
    if belief.curvature.factor.dispersion_power != 1:
        raise UnsupportedOperation("leave-one-out needs the curvature of the likelihood: factor 'ggn' or 'mc'")
    clamped: list[float] = []

    def prepare(sweep: GramSweep, setting: Setting) -> GramSweep:
        removal = Removal(belief.likelihood.factor(*sweep.flat))
        moved, share = removal.means(sweep, setting)
        clamped.append(share)
        return replace(sweep, f=moved, adjust=removal)

    tuning = tune_validation(
        belief, groups, batches,
        learn=learn, grid=grid, score=score, rule=rule, steps=0, memory=memory, method="loo", prepare=prepare,
    )  # fmt: skip
    notes = [CAUTION]
    if clamped[0] > TRUSTED:
        notes.append(f"not to be trusted here: {clamped[0]:.1%} of the data have a leverage above {LEVERAGE}")
    return replace(tuning, messages=(*notes, *tuning.messages))


@dataclass(frozen=True, eq=False)
class Removal:
    """Removes each datum from its own covariance: V₋ₙ = V + c V S (I − c SᵀVS)⁻¹ SᵀV, S (items, C, R), S Sᵀ = φΛ."""

    root: Tensor

    def __call__(self, covariance: Tensor, scale: Tensor, part: slice | Tensor) -> Tensor:
        return self._without(covariance, scale, part)[0]

    def _without(self, covariance: Tensor, scale: Tensor, part: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return V₋ₙ, and which data were clamped."""
        root = self.root[part].double()
        wide, scale = covariance.double(), scale.to(covariance.device)
        half = wide @ root  # (items, C, R)
        leverage, basis = torch.linalg.eigh(scale[..., None, None, None] * (root.mT @ half))
        gain = scale[..., None, None] / (1 - leverage.clamp(0.0, LEVERAGE))
        half = half @ basis
        removed = wide + (half * gain[..., None, :]) @ half.mT
        return removed.to(covariance.dtype), (leverage > LEVERAGE).any(-1)

    def means(self, sweep: GramSweep, setting: Setting) -> tuple[Tensor, float]:
        """Return f₋ₙ at the setting in force, in the shape of f, and the share of data that was clamped."""
        phi = sweep.likelihood.dispersion.item()
        scalars = torch.tensor([setting.temperature, phi], dtype=torch.float64)
        coefficients = sweep.coefficients(setting.precision.double(), scalars[0], scalars[1])
        f, y = sweep.flat
        moved, clamped = [], []
        for start in range(0, len(f), 4096):
            part = slice(start, min(len(f), start + 4096))
            covariance = sweep.covariance(coefficients, part.start, part.stop)
            without, bad = self._without(covariance, scalars[0] / scalars[1] ** sweep.power, part)
            slope = setting.temperature * sweep.likelihood.score(f[part], y[part])
            moved.append(f[part] - (without @ slope[..., None].to(without))[..., 0])
            clamped.append(bad)
        return torch.cat(moved).reshape(sweep.f.shape), torch.cat(clamped).double().mean().item()


def keep_if_shown(
    tuning: Tuning, belief: Belief, groups: Groups, batches: Iterable[Batch] | None, *, memory: int = MEMORY
) -> Tuning:
    """Keep a tuning only if leave-one-out shows that its posterior predicts better; else choose the bare network.

    `batches` are training data. The posterior is kept if its leave-one-out loss is below that of the network, evaluated
    at the leave-one-out means, by more than two standard errors. One datum counts for at most one nat: leave-one-out
    means are a single Newton step away, and a step that costs many nats goes farther than a refit would. That matters
    where the posterior was fitted to a part of what the network was trained on. A network that interpolates its data
    looks best without a posterior; then nothing can be shown, and a posterior that would have helped is lost. With None
    for data nothing is shown either.
    """
    if batches is None:
        return _without(tuning, belief, groups, f"there are no training data at hand to compare with; {ASK}")
    seen: list[Trials] = []

    def rule(trials: Trials) -> int:
        seen.append(trials)
        return 0

    try:
        found = tune_loo(
            replace(belief, prior=tuning.prior),
            groups,
            batches,
            learn=("temperature",),
            grid={"temperature": (float(belief.temperature.T),)},
            rule=rule,
            memory=memory,
        )
    except (IncompatiblePrior, UnsupportedOperation, TooLarge) as refusal:
        return _without(tuning, belief, groups, f"leave-one-out has no answer here ({refusal}); {ASK}")
    difference = (seen[0].losses[seen[0].home] - seen[0].losses[0]).double().clamp(-MOST, MOST)
    gain, error = difference.mean().item(), difference.std().item() / len(difference) ** 0.5
    told = f"by leave-one-out of {len(difference)} training data it gains {gain:.2g} ± {error:.2g} nats per item"
    if gain > SURE * error and not any("not to be trusted" in message for message in found.messages):
        return replace(tuning, messages=(f"the posterior is kept: {told}", *tuning.messages))
    doubt = f", more than 1 % of which have a leverage above {LEVERAGE}" if gain > SURE * error else ""
    return _without(tuning, belief, groups, f"{told}{doubt}; {ASK}")


def _without(tuning: Tuning, belief: Belief, groups: Groups, why: str) -> Tuning:
    """Replace the choice by the network without a posterior, and say why."""
    empty = torch.empty(0, dtype=torch.float64)
    limit = Setting(empty, tuning.setting.temperature, tuning.setting.dispersion, deterministic=True)
    said = f"the network is kept without the posterior that the evidence chose ({tuning.setting}), not shown to help: "
    return replace(
        tuning,
        settings=(*tuning.settings, limit),
        scores=torch.cat([tuning.scores, tuning.scores.new_full((1,), torch.nan)]),
        best=len(tuning.settings),
        prior=groups.prior(torch.full((groups.count,), DETERMINISTIC, dtype=torch.float64), belief.prior.mean),
        messages=(said + why, *tuning.messages),
    )
