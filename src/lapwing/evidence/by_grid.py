"""The best of the user's own candidates by the evidence."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.evidence.candidates import check_candidates, edge
from lapwing.evidence.evidence import evidence_of
from lapwing.evidence.groups import Groups
from lapwing.evidence.tuning import Setting, Tuning
from lapwing.posterior import Belief

Tune = Callable[..., Tuning]
"""Maximizes the evidence: `tune_evidence`, or a relative with the same arguments."""


def tune_grid(
    tune: Tune,
    belief: Belief,
    groups: Groups,
    grid: Mapping[str, Sequence[float]],
    *,
    learn: Sequence[str] = ("prior",),
    value: Callable[[Belief], Tensor] = evidence_of,
) -> Tuning:
    """Maximize the evidence over the candidates of `grid` for the names it has, and over all values for the others.

    Candidates for "prior" are precisions, for "noise" standard deviations. Several groups of weights are tried with one
    candidate for all of them, and with the candidate nearest to the maximum of each. `value` is what `tune` maximizes.
    """
    idle = [name for name in grid if name not in learn]
    if idle:
        raise ValueError(f"grid has candidates for {idle[0]!r}, which is not in learn={tuple(learn)}")
    check_candidates(grid)
    if not grid:
        return tune(belief, groups, learn=learn)
    if unknown := set(grid) - {"prior", "noise"}:
        raise UnsupportedOperation(f"the evidence can choose 'prior' and 'noise', not {sorted(unknown)}")
    free = tuple(name for name in learn if name not in grid)
    now = groups.precisions(belief)
    precisions = [torch.full_like(now, float(tau)) for tau in grid.get("prior", ())] or [now]
    if "prior" in grid and groups.count > 1:
        best = tune(belief, groups, learn=learn).setting.precision
        choices = torch.tensor([float(tau) for tau in grid["prior"]], dtype=torch.float64)
        precisions.append(choices[(best.cpu().log()[:, None] - choices.log()).abs().argmin(1)])
    tunings = [
        _at(tune, value, family, groups, tau, free)
        for tau, family in itertools.product(precisions, _families(belief, grid.get("noise", ())))
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
        messages=(*tunings[k].messages, *_edges(settings[k], grid, belief.likelihood.shown_dispersion)),
    )


def _families(belief: Belief, noises: Sequence[float]) -> list[Belief]:
    """The belief with each noise, or as it is."""
    told = [belief.likelihood.with_dispersion(belief.likelihood.dispersion_from(float(v))) for v in noises]
    return [replace(belief, likelihood=each) for each in told] or [belief]


def _at(
    tune: Tune,
    value: Callable[[Belief], Tensor],
    belief: Belief,
    groups: Groups,
    tau: Tensor,
    free: tuple[str, ...],
) -> Tuning:
    """Score one candidate, with what is free at its best."""
    there = groups.applied(belief, tau.to(belief.weights.device))
    if free:
        tuning = tune(there, groups, learn=free)
        if "prior" in free:
            return tuning
        exact = [replace(each, precision=tau) for each in tuning.settings]  # its logarithm was rounded on the way
        return replace(tuning, settings=tuple(exact), prior=groups.prior(tau, belief.prior.mean))
    with torch.no_grad():
        score = -value(there).double().cpu().reshape(1)
    return Tuning.of("evidence", belief, groups, [Setting(tau, float(belief.temperature.T))], score, 0)


def _edges(setting: Setting, grid: Mapping[str, Sequence[float]], shown: Callable[[float], float]) -> list[str]:
    found = [edge("prior", value, grid["prior"]) for value in setting.precision.tolist()] if "prior" in grid else []
    if "noise" in grid and setting.dispersion is not None:
        found.append(edge("noise", shown(setting.dispersion), grid["noise"]))
    return list(dict.fromkeys(text for text in found if text))
