"""The work of `la.tune`: check the request, run the method that it asks for, and return what was tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lapwing.errors import BadData, UnsupportedOperation, nearest, positives, warn
from lapwing.evidence import (
    Groups,
    Rule,
    Tuning,
    evidence_of,
    linked,
    partition,
    resolve_rule,
    tune_evidence,
    tune_grid,
    tune_validation,
)
from lapwing.evidence.drawnweights import tune_sampled
from lapwing.evidence.heldout import needs_draws
from lapwing.extras.loo import keep_if_shown, tune_loo
from lapwing.extras.valla import tune_bound, variational_bound
from lapwing.likelihoods import Likelihood
from lapwing.model.batches import require_one_process, sharded
from lapwing.predictive.predictive import Labeled, Predictive

METHODS = ("auto", "validation", "evidence", "loo")
INTERPOLATES = (
    "with more weights than data a network interpolates, and the evidence then tends to pick too small a prior "
    "precision; check on held-out data"
)
LOO_DATA = 1000  # training samples on which tune() without held-out data compares posterior and network

Grid = Mapping[str, Sequence[float]]


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `Laplace.tune`, whose docstring explains them."""

    data: Any
    method: str
    learn: str | Sequence[str] | None
    prior: str
    grid: Grid | None
    predictive: str
    link: str
    rule: str | Rule

    @property
    def alone(self) -> bool:
        """Whether neither data nor a method was given: then leave-one-out may refuse what the evidence chooses."""
        return self.method == "auto" and self.data is None

    @property
    def chosen(self) -> str:
        """The method, with "auto" resolved."""
        if self.method not in METHODS:
            hint = nearest(self.method, METHODS)
            raise UnsupportedOperation(
                f"method is 'auto', 'validation', 'evidence' or 'loo', got {self.method!r}{hint}"
            )
        if self.method != "auto":
            return self.method
        return "evidence" if self.data is None else "validation"

    def learned(self, likelihood: Likelihood) -> tuple[str, ...] | None:
        """Return the names of what is learned, as the likelihood calls them; None for the default of the method."""
        if not self.learn:
            return None
        names = (self.learn,) if isinstance(self.learn, str) else self.learn
        if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
            raise BadData(f"learn is a name or a list of names, such as 'prior', got {self.learn!r}")
        return likelihood.learned_names(tuple(names))

    def candidates(self, likelihood: Likelihood) -> Grid | None:
        """Return the grid with the names that the likelihood uses."""
        if self.grid is None:
            return None
        if not isinstance(self.grid, Mapping):
            raise BadData(f"grid maps names to candidates, such as {{'prior': [0.1, 1.0, 10.0]}}, got {self.grid!r}")
        candidates = [positives(f"the candidates for {name!r}", values) for name, values in self.grid.items()]
        return dict(zip(likelihood.learned_names(tuple(self.grid)), candidates, strict=True))

    def check(self) -> None:
        """Refuse a request that no method can fulfill."""
        require_predictive(self.predictive)
        if self.prior in ("unit", "input") and (self.chosen != "evidence" or self.alone):
            raise UnsupportedOperation(
                f"a prior per {self.prior} is chosen by the evidence: tune(method='evidence', prior={self.prior!r})"
            )
        if self.predictive == "sampled" and self.chosen != "validation":
            raise UnsupportedOperation(
                "predictive='sampled' is tuned on held-out data: la.tune(val_loader, predictive='sampled')"
            )
        if self.chosen == "validation" and self.data is None:
            raise BadData("method='validation' needs held-out data: tune(val_loader)")
        if self.data is not None:
            require_one_process("tune with data")


def tune(predictive: Predictive, request: Request, require_unchanged: Callable[[], None]) -> Tuning:
    """Choose prior, temperature and noise; `require_unchanged` is called before the network runs on data."""
    request.check()
    belief = predictive.belief
    groups = partition(request.prior, belief.curvature.names, predictive.network.params)
    learn, grid = request.learned(belief.likelihood), request.candidates(belief.likelihood)
    if request.chosen == "evidence":
        tuning = _by_evidence(predictive, request.data, groups, learn, grid or {})
        if not (request.alone and grid is None and belief.likelihood.has_logits):
            return tuning
        require_unchanged()
        known = _training_data(predictive)
        held = None if known is None else predictive.held_out(known, most=LOO_DATA)
        return keep_if_shown(tuning, belief, groups, held, memory=predictive.options.memory)
    require_unchanged()
    if request.chosen == "loo":
        data = _training_data(predictive) if request.data is None else request.data
        if data is None:
            raise BadData("method='loo' needs the training data: tune(train_loader, method='loo')")
        return tune_loo(belief, groups, predictive.held_out(data), learn=learn, grid=grid)
    choices: dict[str, Any] = {"learn": learn, "grid": grid, "rule": resolve_rule(request.rule)}
    if request.predictive == "sampled":
        return tune_sampled(predictive, groups, request.data, link=request.link, **choices)
    labeled, by_draws = _many_outputs(predictive, request.data, request.link)
    return tune_validation(
        belief,
        groups,
        predictive.held_out(request.data, request.link, labeled=labeled),
        score=linked(request.link, samples=128),
        memory=predictive.options.memory,
        draws=predictive.pushed(labeled) if by_draws else None,
        **choices,
    )


def _training_data(predictive: Predictive) -> Any:
    """Return the data of the fit, or None if they cannot be read again.

    Under `torchrun` every process has only its own shard, while all must agree on one tuning, so it is None.
    """
    return None if sharded() else predictive.options.data


def _by_evidence(
    predictive: Predictive, data: Any, groups: Groups, learn: tuple[str, ...] | None, grid: Grid
) -> Tuning:
    belief = predictive.belief
    bound = "excess" in belief.curvature.state
    if not learn:
        default = ("prior", "dispersion") if belief.likelihood.learns_dispersion and not bound else ("prior",)
        learn = tuple(dict.fromkeys((*default, *grid)))
    if "temperature" in learn:
        raise UnsupportedOperation("the evidence cannot choose a temperature; tune it on held-out data")
    maximize, value = (tune_bound, variational_bound) if bound else (tune_evidence, evidence_of)
    tuning = tune_grid(maximize, belief, groups, grid, learn=learn, value=value)
    if predictive.network.params.size <= belief.curvature.n_data:
        return tuning
    if data is None:
        warn(f"tuning by the evidence: {INTERPOLATES}, or pass some: tune(val_loader)")
    return replace(tuning, messages=(INTERPOLATES, *tuning.messages))


def _many_outputs(predictive: Predictive, data: Any, link: str) -> tuple[Iterator[Labeled], bool]:
    """Return the stream of labeled data, and whether it has so many outputs that draws must replace covariances."""
    labeled = predictive.labeled(data)
    first = next(labeled, None)
    if first is None:
        return labeled, False
    _, f, y = first
    samples = f.shape[0] * (predictive.batches(data).length or 1)
    by_draws = needs_draws(predictive.belief, f, y, link, predictive.options.memory, samples)
    return itertools.chain([first], labeled), by_draws


def require_predictive(predictive: str) -> None:
    """Refuse a kind of prediction that cannot be scored."""
    if predictive not in ("linearized", "sampled"):
        raise UnsupportedOperation(f"predictive is 'linearized' or 'sampled', got {predictive!r}")
