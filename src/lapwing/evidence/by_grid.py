"""The best of the user's own candidates by the evidence."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.evidence.candidates import check_candidates, edge
from lapwing.evidence.evidence import FittedCurvature, log_evidence
from lapwing.evidence.groups import Groups
from lapwing.evidence.tuning import Setting, Tuning
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Tempered, resolve_temperature

Tune = Callable[..., Tuning]
"""Maximizes the evidence: `tune_evidence`, or a relative with the same arguments."""


def tune_grid(
    tune: Tune,
    curvature: FittedCurvature,
    likelihood: Likelihood,
    groups: Groups,
    grid: Mapping[str, Sequence[float]],
    *,
    mean: Tensor,
    start: float | Tensor = 1.0,
    center: float | Tensor = 0.0,
    temperature: float | Tensor | Tempered = 1.0,
    learn: Sequence[str] = ("prior",),
    value: Callable[..., Tensor] = log_evidence,
) -> Tuning:
    """Maximize the evidence over the candidates of `grid` for the names it has, and over all values for the others.

    Candidates for "prior" are precisions, for "noise" standard deviations. Several groups of weights are tried with one
    candidate for all of them, and with the candidate nearest to the maximum of each. `value` is what `tune` maximizes.
    """
    options: dict[str, Any] = {"mean": mean, "center": center, "temperature": temperature}
    idle = [name for name in grid if name not in learn]
    if idle:
        raise ValueError(f"grid has candidates for {idle[0]!r}, which is not in learn={tuple(learn)}")
    check_candidates(grid)
    if not grid:
        return tune(curvature, likelihood, groups, start=start, learn=learn, **options)
    if unknown := set(grid) - {"prior", "noise"}:
        raise UnsupportedOperation(f"the evidence can choose 'prior' and 'noise', not {sorted(unknown)}")
    free = tuple(name for name in learn if name not in grid)
    now = torch.as_tensor(start, dtype=torch.float64).detach().cpu().expand(groups.count)
    precisions = [torch.full_like(now, float(tau)) for tau in grid.get("prior", ())] or [now]
    if "prior" in grid and groups.count > 1:
        best = tune(curvature, likelihood, groups, start=start, learn=learn, **options).setting.precision
        choices = torch.tensor([float(tau) for tau in grid["prior"]], dtype=torch.float64)
        precisions.append(choices[(best.cpu().log()[:, None] - choices.log()).abs().argmin(1)])
    tunings = [
        _at(tune, value, curvature, family, groups, tau, free, options)
        for tau, family in itertools.product(precisions, _families(likelihood, grid.get("noise", ())))
    ]
    scores = torch.tensor([each.score for each in tunings], dtype=torch.float64)
    k = int(scores.nan_to_num(torch.inf).argmin())
    settings = [each.setting for each in tunings]
    if "noise" in learn:
        settings = [replace(each.setting, dispersion=float(each.likelihood.dispersion)) for each in tunings]
    return replace(
        tunings[k],
        settings=tuple(settings),
        scores=scores,
        best=k,
        iterations=sum(each.iterations for each in tunings),
        messages=(*tunings[k].messages, *_edges(settings[k], grid)),
    )


def _families(likelihood: Likelihood, noises: Sequence[float]) -> list[Likelihood]:
    """The likelihood with each noise, or as it is."""
    return [likelihood.with_dispersion(float(sigma) ** 2) for sigma in noises] or [likelihood]


def _at(
    tune: Tune,
    value: Callable[..., Tensor],
    curvature: FittedCurvature,
    family: Likelihood,
    groups: Groups,
    tau: Tensor,
    free: tuple[str, ...],
    options: dict[str, Any],
) -> Tuning:
    """One candidate, with what is free at its best."""
    if free:
        tuning = tune(curvature, family, groups, start=tau, learn=free, **options)
        if "prior" in free:
            return tuning
        exact = [replace(each, precision=tau) for each in tuning.settings]  # its logarithm was rounded on the way
        return replace(tuning, settings=tuple(exact), prior=groups.prior(tau, options["center"]))
    tempered = resolve_temperature(options["temperature"])
    prior = torch.as_tensor(options["center"], dtype=torch.float64), groups.diagonal(tau.to(options["mean"].device))
    with torch.no_grad():
        score = -value(curvature, prior, family, mean=options["mean"], temperature=tempered).double().cpu().reshape(1)
    setting = Setting(tau, torch.as_tensor(tempered.T, dtype=torch.float64).item())
    return Tuning("evidence", (setting,), score, 0, groups.prior(tau, options["center"]), tempered, family)


def _edges(setting: Setting, grid: Mapping[str, Sequence[float]]) -> list[str]:
    found = [edge("prior", value, grid["prior"]) for value in setting.precision.tolist()] if "prior" in grid else []
    if "noise" in grid and setting.dispersion is not None:
        found.append(edge("noise", setting.dispersion**0.5, grid["noise"]))
    return list(dict.fromkeys(text for text in found if text))
