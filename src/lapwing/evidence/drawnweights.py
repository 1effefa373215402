"""Tuning of the sampled predictive: networks at drawn weights, with common random numbers.

Every setting draws its weights from the same normal numbers, as `predict(x, method="sampled")` does, so that settings
differ by what they mean and not by chance, and every score is that of the prediction a user gets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import BadData, NotPositiveDefinite, warn
from lapwing.evidence.heldout import item_scores
from lapwing.evidence.search import GRID, LOGIT_RANGE, Candidates, by_group, check_learned, default_learn, with_limits
from lapwing.evidence.settings import Groups, Rule, Setting, Trials, Tuning, baselines, counted, held_near, lowest
from lapwing.likelihoods import Likelihood
from lapwing.model.calls import Inputs, map_tensors
from lapwing.posterior import Belief, Tempered
from lapwing.predictive import Prediction, SampledFunction, predict_targets
from lapwing.predictive.predictive import SAMPLED_DRAWS, Predictive
from lapwing.predictive.sampled import sampled_function

SCREENED = 16  # a usual grid larger than this is first scored coarsely
COARSE_DRAWS, COARSE_ITEMS = 10, 256  # networks and held-out items of that first look
KEPT = 12  # settings that the first look leaves
DISPERSIONS = tuple(2.0 ** (k / 2) for k in range(-4, 5))  # candidates of an unknown noise, times that of the residuals
STEPS = 24  # of the search for a logit temperature, each of which narrows its range to 62 %
GOLDEN = (math.sqrt(5) - 1) / 2
LOST = 0.1  # share of right labels that sampled weights may lose before tuning warns


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out inputs in batches, the outputs of the network itself at them, and how to run drawn networks on them.

    `f` are the outputs of the network itself, (items, C), one row per sample and position; `y` are canonical targets.
    `counts` says how many items each batch of inputs has.
    """

    predictive: Predictive
    groups: Groups
    inputs: tuple[Inputs, ...]
    counts: tuple[int, ...]
    f: Tensor
    y: Tensor
    draws: int = SAMPLED_DRAWS
    link: str = "mc"

    @classmethod
    def of(cls, predictive: Predictive, groups: Groups, data: Any, link: str = "auto") -> HeldOut:
        """Read labeled data once and keep inputs, outputs and targets."""
        # copies: a loader may fill its tensors with the next batch
        parts = [(map_tensors(Tensor.clone, inputs), f, y) for inputs, f, y in predictive.labeled(data)]
        if not parts:
            raise BadData("the validation data hold no batch")
        inputs, counts = tuple(part[0] for part in parts), tuple(f[..., 0].numel() for _, f, _ in parts)
        f = torch.cat([_items(f) for _, f, _ in parts])
        y = torch.cat([y.reshape(count, *y.shape[f.ndim - 1 :]) for (_, f, y), count in zip(parts, counts)])
        return cls(predictive, groups, inputs, counts, f, y, link="mc" if link == "auto" else link)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood in force."""
        return self.predictive.belief.likelihood

    def coarse(self) -> HeldOut:
        """Keep the first batches, of at least `COARSE_ITEMS` items together, and few draws."""
        totals = list(itertools.accumulate(self.counts))
        last = next((k for k, total in enumerate(totals) if total >= COARSE_ITEMS), len(totals) - 1)
        f, y, draws = self.f[: totals[last]], self.y[: totals[last]], min(COARSE_DRAWS, self.draws)
        return replace(self, inputs=self.inputs[: last + 1], counts=self.counts[: last + 1], f=f, y=y, draws=draws)

    def belief(self, setting: Setting) -> Belief:
        """Return the belief at a setting."""
        belief, groups = self.predictive.belief, self.groups
        tempered = Tempered(setting.temperature, belief.temperature.prior)
        likelihood = self.likelihood
        if setting.dispersion is not None:
            likelihood = likelihood.with_dispersion(setting.dispersion)
        prior = groups.prior(setting.precision, belief.prior.mean)
        return replace(belief, prior=prior, temperature=tempered, likelihood=likelihood)

    def outputs(self, setting: Setting) -> Tensor | None:
        """Return f of every drawn network at every item, (S, items, C); None where there is no posterior."""
        try:
            return drawn_outputs(replace(self.predictive, belief=self.belief(setting)), self.inputs, self.draws)
        except NotPositiveDefinite:
            return None

    def prediction(self, setting: Setting, outputs: Tensor) -> Prediction:
        """Return the prediction that these outputs mean under the noise and logit temperature of a setting."""
        function = SampledFunction(None, outputs)
        function = function if setting.logit_temperature == 1.0 else function.scaled(1 / setting.logit_temperature)
        return predict_targets(function, self.belief(setting).likelihood, link=self.link)

    def loss(self, setting: Setting, outputs: Tensor | None) -> Tensor:
        """Return −log p(y) of every item that counts, (N,) float64; infinite where there is no posterior."""
        if outputs is None:
            losses = self.f.new_full((len(self.f),), torch.inf)
        else:
            losses = -self.prediction(setting, outputs).log_prob(self.y)
        return self._counted(losses.double().nan_to_num(torch.inf, torch.inf, torch.inf))

    def _counted(self, values: Tensor) -> Tensor:
        """Keep the values (items,) of items whose targets count."""
        return counted(self.f, self.y, self.likelihood, values)

    def fitted(self, setting: Setting, near: float) -> tuple[Setting, Tensor]:
        """Return the setting with its best logit temperature, held near another one, and the losses there."""
        outputs = self.outputs(setting)

        def at(u: float) -> tuple[Setting, Tensor]:
            moved = replace(setting, logit_temperature=math.exp(u))
            return moved, self.loss(moved, outputs)

        def value(u: float) -> float:
            pull = held_near(torch.tensor(math.exp(u), dtype=torch.float64), near).item()
            return at(u)[1].mean().item() + pull / len(self.f)

        return at(minimum(value, *map(math.log, LOGIT_RANGE)))

    def scored(self, settings: Sequence[Setting], near: float | None) -> tuple[list[Setting], Tensor]:
        """Score settings, (S, N); with `near`, each gets its best logit temperature first."""
        if near is None:
            return list(settings), torch.stack([self.loss(each, self.outputs(each)) for each in settings])
        found = [self.fitted(each, near) for each in settings]
        return [setting for setting, _ in found], torch.stack([losses for _, losses in found])

    def accuracy(self, setting: Setting) -> tuple[float, float] | None:
        """Return the share of right labels of the network itself and of the drawn ones; None without labels."""
        outputs = self.outputs(setting)
        own = predict_targets(SampledFunction(None, self.f[None]), self.likelihood, link=self.link)
        if outputs is None or not self.likelihood.has_logits:
            return None
        shares = [item_scores(each, self.y)[2] for each in (own, self.prediction(setting, outputs))]
        before, after = (self._counted(share).mean().item() for share in shares)
        return before, after

    def scores(self, prediction: Prediction) -> list[Tensor]:
        """Return −log p(y), the entropy and, for labels, whether they are right, of every item that counts."""
        return [self._counted(each) for each in item_scores(prediction, self.y)]


def drawn_outputs(predictive: Predictive, inputs: Iterable[Inputs], draws: int) -> Tensor:
    """Run the networks that `predict(method="sampled", samples=draws)` draws on all batches: (S, items, C)."""
    weights, network = predictive.draws(draws), predictive.network
    parts = [sampled_function(network, weights, batch).samples for batch in inputs]
    return torch.cat([part.reshape(len(part), -1, part.shape[-1]) for part in parts], 1)


def _items(f: Tensor) -> Tensor:
    return f.reshape(-1, f.shape[-1])


def tune_sampled(
    predictive: Predictive,
    groups: Groups,
    data: Any,
    *,
    learn: Sequence[str] | None = None,
    grid: Mapping[str, Sequence[float]] | None = None,
    link: str = "auto",
    rule: Rule = lowest,
) -> Tuning:
    """Choose prior, temperature, noise and logit temperature by the held-out NLL of the *sampled* predictive.

    Each candidate is scored as `la.replace(...).predict(x, method="sampled")` predicts: 50 networks from the same
    random numbers for all candidates. T·n_data is the number of pseudo-observations of Ritter et al. (2018), section
    3.4, who choose it and τ this way. A grid of the user's is scored in full. The usual one, of precisions ×
    temperatures (× noise levels where the noise is unknown, and then without temperatures), is first scored with 10
    networks on about 256 items, which leaves 12 candidates. A logit temperature without candidates is fitted to each.
    """
    belief = predictive.belief
    if learn is None:
        skipped = "temperature" if belief.likelihood.learns_dispersion else ""  # T and the noise scale H alike
        usual = [name for name in default_learn(belief.likelihood) if name != skipped]
        learn = tuple(dict.fromkeys((*usual, *(grid or {}))))
    learned = check_learned(learn, grid, belief.likelihood)
    held = HeldOut.of(predictive, groups, data, link)
    now = Setting(groups.precisions(belief), float(belief.temperature.T), logit_temperature=belief.logit_temperature)
    choices = dict(GRID)
    if "dispersion" in learned and "dispersion" not in (grid or {}):
        best = held.likelihood.best_dispersion(held.f, held.y) ** held.likelihood.dispersion_unit
        choices["dispersion"] = tuple(best * factor for factor in DISPERSIONS)
    candidates = Candidates.of(learned, grid or {}, now, belief.likelihood, usual=choices)
    near = candidates.near(held) if "logit_temperature" in candidates.free else None
    settings = candidates.every()
    tried = len(settings)
    if tried > SCREENED and not grid:
        settings = _screened(held.coarse(), settings, near)
    settings, losses = held.scored(settings, near)
    if groups.count > 1 and "prior" in learned:
        settings, losses = by_group(lambda more: held.scored(more, None)[1], candidates, settings, losses)
    rivals = baselines(held.f, held.y, held.likelihood, dispersion="dispersion" in learned)
    trials = with_limits(held, candidates, settings, losses, rivals, near or candidates.logit_temperature)
    best_index = trials.choose(rule)
    told = f"{tried} settings of the sampled predictive, {len(settings)} of them with {held.draws} networks on "
    return Tuning.of(
        "validation, sampled",
        belief,
        groups,
        trials.settings,
        trials.scores,
        best_index,
        baselines={name: values.mean().item() for name, values in rivals.items()},
        messages=(
            *trials.about(best_index, candidates.edges),
            *_labels_kept(held, trials, best_index, now),
            f"{told}{len(held.f)} data; {trials.rivals()}",
        ),
        logit_temperature=trials.settings[best_index].logit_temperature,
    )


def _screened(coarse: HeldOut, settings: Sequence[Setting], near: float | None) -> list[Setting]:
    """Return the `KEPT` settings of lowest NLL on part of the data."""
    scores = coarse.scored(settings, near)[1].mean(1)
    return [settings[k] for k in scores.argsort()[:KEPT].sort().values.tolist()]


def _labels_kept(held: HeldOut, trials: Trials, best: int, now: Setting) -> list[str]:
    """Say how many labels sampled weights get right before and after tuning; warn where the choice loses many."""
    before, chosen = held.accuracy(now), trials.settings[best]
    after = None if chosen.deterministic else held.accuracy(chosen)
    if before is None:
        return []
    own, was = before
    said = f"right labels: the network {own:.1%}, sampled weights {was:.1%} before tuning"
    if after is not None:
        said += f" and {after[1]:.1%} after"
        if after[1] < own - LOST:
            warn(
                f"sampled weights have lost what the network knows: {after[1]:.1%} right labels on the held-out data "
                f"where the network has {own:.1%}. Try a wider grid (larger priors, larger temperatures), or use the "
                "linearized predictive: la.tune(val) and la.predict(x)."
            )
    return [said]


def minimum(value: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function of one number with one valley is lowest, by golden sections."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(STEPS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = value(right)
    return left if at_left <= at_right else right
