"""Whether the posterior that the evidence chose predicts better than the network, as far as training data can show."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from lapwing.errors import IncompatiblePrior, TooLarge, UnsupportedOperation
from lapwing.evidence.by_loo import LEVERAGE, tune_loo
from lapwing.evidence.by_validation import MEMORY
from lapwing.evidence.groups import Groups
from lapwing.evidence.sweep import Batch
from lapwing.evidence.tuning import DETERMINISTIC, Setting, Trials, Tuning
from lapwing.posterior import Belief

SURE = 2.0  # standard errors that the gain over the network must exceed
ASK = "tune on held-out data, tune(val_loader), or take what the evidence chose with method='evidence'"


def keep_if_shown(
    tuning: Tuning, belief: Belief, groups: Groups, batches: Iterable[Batch] | None, *, memory: int = MEMORY
) -> Tuning:
    """The tuning itself where leave-one-out shows that its posterior predicts better; else the network without one.

    `batches` are training data. Shown: the loss of the leave-one-out predictive is below that of the network, with its
    leave-one-out means, by more than two standard errors. A network that interpolates its data looks best without a
    posterior: nothing can be shown then, and a posterior that would have helped is lost. None: no data, nothing shown.
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
    difference = (seen[0].losses[seen[0].home] - seen[0].losses[0]).double()
    gain, error = difference.mean().item(), difference.std().item() / len(difference) ** 0.5
    told = f"by leave-one-out of {len(difference)} training data it gains {gain:.2g} ± {error:.2g} nats per item"
    if gain > SURE * error and not any("not to be trusted" in message for message in found.messages):
        return replace(tuning, messages=(f"the posterior is kept: {told}", *tuning.messages))
    doubt = f", more than 1 % of which have a leverage above {LEVERAGE}" if gain > SURE * error else ""
    return _without(tuning, belief, groups, f"{told}{doubt}; {ASK}")


def _without(tuning: Tuning, belief: Belief, groups: Groups, why: str) -> Tuning:
    """The network without a posterior, and why."""
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
