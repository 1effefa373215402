"""Accuracy, NLL and entropy against the temperature, from one pass over each data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.errors import brief, positives
from lapwing.evidence import Groups, collect, linked, nodes_for
from lapwing.evidence.drawnweights import HeldOut, drawn_outputs
from lapwing.evidence.heldout import Batch, GramSweep, item_scores
from lapwing.evidence.search import MEMORY
from lapwing.evidence.settings import Setting
from lapwing.posterior import Belief
from lapwing.predictive import GaussianFunction, predict_targets
from lapwing.predictive.predictive import Predictive

CHUNK = 2**22  # elements of f that one Monte Carlo step holds


@dataclass(frozen=True, eq=False)
class TemperatureCurve:
    """Scores of the predictions of a posterior at temperatures T (m,), one number per temperature.

    `entropy` is the mean over the test items, `outside` maps each other data set to its mean entropy and `auroc` to how
    well the entropy tells it from the test items. `accuracy` is None where the targets are no classes.

    Examples:
        >>> curve = la.temperature_curve(test_loader, ood={"noise": noise})
        >>> print(curve.table())
    """

    __repr__ = brief

    temperatures: Tensor
    nll: Tensor
    entropy: Tensor
    accuracy: Tensor | None
    outside: Mapping[str, Tensor]
    auroc: Mapping[str, Tensor]

    @property
    def columns(self) -> dict[str, Tensor]:
        """Every curve by its name.

        Examples:
            >>> list(la.temperature_curve(test_loader).columns)
        """
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        outside = {f"entropy {name}": values for name, values in self.outside.items()}
        areas = {f"auroc {name}": values for name, values in self.auroc.items()}
        return {"T": self.temperatures, "nll": self.nll} | accuracy | {"entropy": self.entropy} | outside | areas

    def table(self) -> str:
        """Return the curve as text, one line per temperature.

        Examples:
            >>> print(la.temperature_curve(test_loader, temperatures=(0.1, 1.0)).table())
        """
        columns = self.columns
        rows = [
            list(columns),
            *([f"{value:.4g}" for value in row] for row in zip(*map(Tensor.tolist, columns.values()))),
        ]
        widths = [max(len(row[k]) for row in rows) for k in range(len(columns))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)

    def __str__(self) -> str:
        return self.table()


def temperature_curve(
    belief: Belief,
    inside: Iterable[Batch],
    outside: Mapping[str, Iterable[Batch]],
    temperatures: Sequence[float],
    *,
    link: str = "auto",
    samples: int = 256,
    memory: int = MEMORY,
) -> TemperatureCurve:
    """Score a belief at each temperature, its prior kept, on labeled data and on data from elsewhere.

    `inside` and the streams of `outside` yield (f, targets, rows) and are read once; `Laplace.temperature_curve` makes
    them.
    """
    temperatures = positives("temperatures", temperatures)
    groups, precision = Groups.of_prior(belief)
    nodes, logit_temperature = nodes_for(belief, precision, temperatures), belief.logit_temperature
    sweep = partial(collect, belief, groups, nodes=nodes, score=linked(link), memory=memory)
    kept, others = sweep(inside), {name: sweep(stream) for name, stream in outside.items()}
    rows = []
    for T in temperatures:
        at = lambda sweep, T=T: _Items.of(sweep, precision, T, logit_temperature, link, samples)  # noqa: E731
        rows.append((at(kept), {name: at(other) for name, other in others.items()}))
    column = lambda pick: torch.tensor([pick(*row) for row in rows], dtype=torch.float64)  # noqa: E731
    return TemperatureCurve(
        torch.tensor(list(temperatures), dtype=torch.float64),
        column(lambda test, _: test.losses.mean().item()),
        column(lambda test, _: test.entropy.mean().item()),
        None if rows[0][0].correct is None else column(lambda test, _: test.correct.mean().item()),
        {name: column(lambda _, other, name=name: other[name].entropy.mean().item()) for name in outside},
        {name: column(lambda test, other, name=name: metrics.auroc(test.entropy, other[name].entropy).item())
         for name in outside},
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Items:
    """Scores of the items of one data set that count, at one temperature."""

    losses: Tensor
    entropy: Tensor
    correct: Tensor | None

    @classmethod
    def of(
        cls, sweep: GramSweep, precision: Tensor, T: float, logit_temperature: float, link: str, samples: int
    ) -> _Items:
        likelihood = sweep.likelihood
        dispersion = likelihood.dispersion.detach().double()
        coefficients = sweep.coefficients(precision.double(), torch.tensor(T, dtype=torch.float64), dispersion)
        f, y = sweep.flat
        mask = likelihood.mask(f, y)
        step = max(1, CHUNK // (samples * f.shape[-1]))
        parts: list[list[Tensor]] = []
        for start in range(0, len(f), step):
            stop = min(len(f), start + step)
            function = GaussianFunction(f[start:stop], sweep.covariance(coefficients, start, stop))
            function = function.scaled(1 / logit_temperature)
            prediction = predict_targets(function, likelihood, link=link, samples=samples)
            parts.append(item_scores(prediction, y[start:stop]))
        columns = [torch.cat(column) for column in zip(*parts)]
        columns = columns if mask is None else [column[mask] for column in columns]
        return cls(columns[0], columns[1], columns[2] if len(columns) > 2 else None)


def sampled_curve(
    predictive: Predictive, data: Any, outside: Mapping[str, Any], temperatures: Sequence[float], *, link: str = "auto"
) -> TemperatureCurve:
    """Score the sampled predictive at each temperature, its prior kept, on labeled data and on data from elsewhere.

    As in Figs. 3 to 5 of Chen, Yu, Li and Lim, "Generalized Laplace Approximation": 50 networks per temperature, from
    the same random numbers at all temperatures.
    """
    temperatures = positives("temperatures", temperatures)
    groups, precision = Groups.of_prior(predictive.belief)
    held = HeldOut.of(predictive, groups, data, link)
    others = {name: tuple(predictive.bare_inputs(each)) for name, each in outside.items()}
    rows: list[dict[str, float]] = []
    for T in temperatures:
        setting = Setting(precision, T, logit_temperature=predictive.belief.logit_temperature)
        at = replace(predictive, belief=held.belief(setting))
        inside = held.prediction(setting, drawn_outputs(at, held.inputs, held.draws))
        losses, entropy, *correct = held.scores(inside)
        row = {"nll": losses.mean().item(), "entropy": entropy.mean().item()}
        row |= {"accuracy": correct[0].mean().item()} if correct else {}
        for name, inputs in others.items():
            far = held.prediction(setting, drawn_outputs(at, inputs, held.draws)).entropy.double()
            far = far.reshape(len(far), -1).mean(-1)  # several binary labels have an entropy each
            row |= {f"entropy {name}": far.mean().item(), f"auroc {name}": metrics.auroc(entropy, far).item()}
        rows.append(row)
    columns = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]}
    return TemperatureCurve(
        torch.tensor(list(temperatures), dtype=torch.float64),
        columns["nll"],
        columns["entropy"],
        columns.get("accuracy"),
        {name: columns[f"entropy {name}"] for name in others},
        {name: columns[f"auroc {name}"] for name in others},
    )
