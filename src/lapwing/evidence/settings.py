"""What a tuning sets and what it found: groups of weights, settings with their scores, and rules that choose one.

Settings are compared with the network without a posterior, as it is and after its usual remedy (`baselines`):
temperature scaling, or the noise that fits its residuals.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, UnsupportedOperation, brief, nearest, positive
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, Diagonal
from lapwing.model import Params
from lapwing.posterior import Belief, Prior, Tempered

SCALING = "temperature scaling"
DETERMINISTIC = 1e12  # the precision that stands for a network without a posterior
AS_FITTED = (
    "the curvature stays as it was fitted, at another {0} than the {1:.4g} chosen here: for the curvature at this one, "
    "fit again with likelihood=la.likelihood"
)
KINDS = ("scalar", "layerwise", "unit", "input", "parameterwise")


@dataclass(frozen=True, eq=False)
class Groups:
    """A partition of the P selected weights into groups: weight p has precision τ[index[p]].

    `members` holds the parameter names of each group. It is empty if the groups are not made of whole parameters, as
    with one group for everything or one per weight.

        groups = Groups.layerwise(la.curvature.names, la.params.names, la.params.sizes)
    """

    index: Tensor
    count: int
    members: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.index.ndim != 1 or self.index.dtype != torch.long:
            raise ValueError(f"expected a flat tensor of integers, got {self.index.dtype} {tuple(self.index.shape)}")
        if self.members and len(self.members) != self.count:
            raise ValueError(f"{self.count} groups need as many lists of names, got {len(self.members)}")

    @classmethod
    def scalar(cls, size: int) -> "Groups":
        """Put all `size` weights into one group."""
        return cls(torch.zeros(size, dtype=torch.long), 1)

    @classmethod
    def parameterwise(cls, size: int) -> "Groups":
        """Make each weight a group of its own."""
        return cls(torch.arange(size), size)

    @classmethod
    def layerwise(
        cls, blocks: Sequence[Sequence[str]], names: Sequence[str], sizes: Sequence[int], index: Tensor | None = None
    ) -> "Groups":
        """Make one group per block; `blocks` lists the parameter names of each (`curvature.names`).

        `names` and `sizes` describe the flat vector; `index` picks the weights of a subnetwork out of it.
        """
        where = {name: k for k, block in enumerate(blocks) for name in block}
        missing = [name for name in names if name not in where]
        if missing:
            raise ValueError(f"no block holds the parameter {missing[0]!r}; the blocks are {list(map(tuple, blocks))}")
        flat = torch.repeat_interleave(torch.tensor([where[name] for name in names]), torch.tensor(list(sizes)))
        return cls(flat if index is None else flat[index.cpu()], len(blocks), tuple(map(tuple, blocks)))

    @classmethod
    def of_prior(cls, belief: Belief) -> tuple["Groups", Tensor]:
        """Return the fewest groups in which the prior of a belief is constant, and its precision in each."""
        params, precision = belief.curvature.params, belief.resolved_prior[1].diagonal().detach().double().cpu()
        assert params is not None
        kinds = (
            cls.scalar(params.size),
            cls.layerwise(belief.curvature.names, params.names, params.sizes, params.index),
        )
        for groups in kinds:
            values = groups.precisions(belief)
            if torch.allclose(groups.expand(values), precision, rtol=1e-9):
                return groups, values
        raise IncompatiblePrior("a curve needs a prior that is constant per block; use a scalar or layerwise prior")

    @property
    def size(self) -> int:
        """P, the number of weights."""
        return self.index.numel()

    def expand(self, values: Tensor) -> Tensor:
        """Expand values per group (*batch, G) to values per weight (*batch, P)."""
        return values[..., self.index.to(values.device)]

    def diagonal(self, values: Tensor) -> Diagonal:
        """Return the diagonal matrix of values per group (G,); it knows which weights share a value."""
        if self.count == 1:
            return Diagonal(values[0].expand(self.size))
        return Diagonal.by_group(values, self.index)

    def total(self, values: Tensor) -> Tensor:
        """Sum values per weight (P,) over each group, (G,)."""
        zero = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zero.index_add(0, self.index.to(values.device), values)

    def label(self, group: int) -> str:
        """Return the name of a group for messages."""
        if self.members:
            return f"block {group} ({', '.join(self.members[group])})"
        return "all weights" if self.count == 1 else f"weight {group}"

    def prior(self, values: Tensor, mean: float | Tensor = 0.0) -> Prior:
        """Return the prior with precision values[g] on group g."""
        values = values.detach()
        if self.members:
            return Prior.per_block(values.tolist(), self.members, mean)
        return Prior(values.item() if self.count == 1 else self.expand(values), mean)

    def precisions(self, belief: Belief) -> Tensor:
        """Return the prior precisions of a belief, as geometric means over each group, (G,)."""
        return self.average(belief.resolved_prior[1])

    def average(self, matrix: PSD) -> Tensor:
        """Return the geometric means of a diagonal matrix over each group, (G,) on the CPU."""
        if not matrix.is_diagonal:
            raise UnsupportedOperation("a prior that is itself a posterior cannot be tuned; tune before chaining")
        logs = matrix.diagonal().detach().double().log().cpu()
        counts = self.total(torch.ones_like(logs))
        return (self.total(logs) / counts.clamp(min=1)).exp()

    def squares(self, belief: Belief) -> Tensor:
        """Return ‖θ̂ − μ₀‖² over each group, (G,) float64."""
        return self.total(belief.offset.detach().square())

    def applied(self, belief: Belief, values: Tensor) -> Belief:
        """Return the belief with precision values[g] on group g; gradients flow into the values."""
        return replace(belief, prior=Prior(self.diagonal(values), belief.prior.mean))


def partition(kind: str, blocks: Sequence[Sequence[str]], params: Params) -> Groups:
    """Group the selected weights by kind; `blocks` are `curvature.names`.

    "unit" groups the weights that feed one output of a block: a row of the weight matrix and its bias. "input" groups
    the weights that read one input of a block, a column of the weight matrix; the biases of the block are one more
    group. Both are products over rows and columns, which Kronecker structures accept. In a tensor without rows or
    columns (a norm's scale) each entry is a unit.

        groups = partition("layerwise", la.curvature.names, la.params)
    """
    if kind not in KINDS:
        raise UnsupportedOperation(f"prior is one of {', '.join(KINDS)}; got {kind!r}{nearest(kind, KINDS)}")
    if kind == "scalar":
        return Groups.scalar(params.size)
    if kind == "parameterwise":
        return Groups.parameterwise(params.size)
    if kind == "layerwise":
        return Groups.layerwise(blocks, params.names, params.sizes, params.index)
    where = {name: k for k, block in enumerate(blocks) for name in block}
    labels: dict[tuple[int, int, int], int] = {}
    parts = [_labels(kind, where[name], shape, labels) for name, shape in zip(params.names, params.shapes, strict=True)]
    flat = torch.cat(parts)
    index = flat if params.index is None else flat[params.index.cpu()]
    used, index = index.unique(return_inverse=True)
    return Groups(index, len(used))


def _labels(kind: str, block: int, shape: torch.Size, labels: dict[tuple[int, int, int], int]) -> torch.Tensor:
    """Number the entries of a tensor by unit or input; tensors of one block share the numbers in `labels`."""
    if kind == "input" and len(shape) < 2:
        return torch.full((shape.numel(),), labels.setdefault((block, 1, 0), len(labels)))
    axis = 1 if kind == "input" else 0
    count = shape[axis] if shape else 1
    numbers = torch.tensor([labels.setdefault((block, 0, k), len(labels)) for k in range(count)])
    if not shape:
        return numbers
    view = [1] * len(shape)
    view[axis] = count
    return numbers.reshape(view).expand(shape).reshape(-1)


@dataclass(frozen=True, eq=False)
class Setting:
    """One candidate: a precision per group (G,), a temperature and, where it is learned, the dispersion φ (σ²).

    `logit_temperature` divides the logits before the link. `deterministic` marks the network without a posterior, the
    limit τ → ∞; its precision is empty, and with a logit temperature it is temperature scaling.
    """

    precision: Tensor
    temperature: float = 1.0
    dispersion: float | None = None
    deterministic: bool = False
    logit_temperature: float = 1.0
    unit: tuple[str, float] = ("noise", 0.5)  # the name of the dispersion, and the power at which users read it

    @cached_property
    def narrow(self) -> float:
        """The geometric mean of the precisions, infinite for the network without a posterior: large means narrow."""
        return float("inf") if self.deterministic else self.precision.double().log().mean().exp().item()

    def __str__(self) -> str:
        if self.deterministic:
            parts = ["deterministic"]
        elif len(self.precision) == 1:
            parts = [f"prior {self.precision.item():.4g}"]
        else:
            low, high = self.precision.min().item(), self.precision.max().item()
            parts = [f"prior {low:.3g} … {high:.3g} ({len(self.precision)} values)"]
        parts += [f"T {self.temperature:.4g}"] if self.temperature != 1.0 else []
        parts += [f"logits / {self.logit_temperature:.4g}"] if self.logit_temperature != 1.0 else []
        name, power = self.unit
        parts += [f"{name} {self.dispersion**power:.4g}"] if self.dispersion is not None else []
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Trials:
    """All settings with their losses on every held-out item, (S, N), and the losses of the baselines, (N,) each.

    `home` is the index of the network without a posterior and with nothing learned. `reference` is the index of its
    usual remedy on the same items: temperature scaling, or the noise fitted to the residuals. `barred` settings serve
    for comparison only and are never chosen, so that the result stays on a grid that the user gave.
    """

    settings: tuple[Setting, ...]
    losses: Tensor
    baselines: Mapping[str, Tensor]
    home: int
    barred: frozenset[int] = frozenset()
    reference: int = -1

    @property
    def scores(self) -> Tensor:
        """The mean loss of each setting, (S,); infinite where it is not a number."""
        return self.losses.double().mean(1).nan_to_num(float("inf"), float("inf"))

    def excess(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Compare each setting with other losses (N,) item by item: the mean difference and its standard error, (S,).

        With one item the standard error is infinite.
        """
        difference = self.losses.double() - losses.double()
        n = difference.shape[1]
        error = difference.std(1) / n**0.5 if n > 1 else torch.full_like(difference[:, 0], torch.inf)
        return difference.mean(1), error

    def gain(self, setting: int) -> tuple[float, float]:
        """Return the mean improvement of a setting over the reference, and its standard error."""
        mean, error = self.excess(self.losses[self.reference])
        return 0.0 - mean[setting].item(), error[setting].item()

    def choose(self, rule: "Rule") -> int:
        """Return the index that the rule picks; if that one is barred, the lowest score among the others."""
        found = rule(self)
        if found not in self.barred:
            return found
        scores = self.scores.tolist()
        return min((k for k in range(len(scores)) if k not in self.barred), key=lambda k: scores[k])

    def rivals(self) -> str:
        """Return the mean losses of the network without a posterior as one line."""
        means = {name: losses.mean().item() for name, losses in self.baselines.items()}
        said = "the network alone: " + ", ".join(f"{name} {value:.5g}" for name, value in means.items())
        own = [score for score, each in zip(self.scores.tolist(), self.settings) if each.deterministic]
        if min(means.values()) < min(own, default=-math.inf) - 1e-6:
            said += " (fitted to these data without restraint; what is tuned is held near the values in force)"
        return said

    def about(self, best: int, edges: Callable[[Setting], Sequence[str]]) -> list[str]:
        """Say what to know about a choice; `edges` warns where a setting lies at the edge of its grid."""
        scores, setting, top = self.scores, self.settings[best], lowest(self)
        posteriors = [k for k, s in enumerate(self.settings) if not s.deterministic]
        messages = []
        if setting.deterministic:
            messages.append(
                f"the network without a posterior was chosen (NLL {scores[best]:.5g}, best posterior "
                f"{scores[posteriors].min():.5g}): the prior is now so narrow that predictions are the network's own"
            )
        gain, error = self.gain(top)
        if gain <= 2 * error:
            messages.append(
                "nothing is measurably better than the network without a posterior "
                f"({self.settings[self.reference]}): gain {gain:.2g} ± {error:.2g}"
            )
        # a rule may go to an edge by design (`widest` to the smallest prior), where a wider grid helps nobody
        tried = [k for k in posteriors if k not in self.barred]
        best_edges = edges(self.settings[min(tried, key=lambda k: scores[k].item(), default=best)])
        messages += [text for text in edges(setting) if text in best_edges]
        if scores[best] > scores[top]:
            mean, error = (value[best].item() for value in self.excess(self.losses[top]))
            messages.append(
                f"the lowest NLL is {scores[top]:.5g} at {self.settings[top]}; the chosen setting has {mean:.2g} ± "
                f"{error:.2g} more per item"
            )
        return messages

    def joined(self, setting: Setting, losses: Tensor) -> "Trials":
        """Return the trials with one more setting at the end."""
        return replace(self, settings=(*self.settings, setting), losses=torch.cat([self.losses, losses[None]]))


Rule = Callable[[Trials], int]
"""A rule takes the trials and returns the index of the chosen setting."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """The result of `tune`: every setting tried, its score, and the one chosen.

    Scores are negative log-likelihoods per held-out datum for `method="validation"` and `"loo"`, and minus the log
    evidence for `"evidence"`: lower is better throughout. `prior`, `temperature`, `likelihood` and `logit_temperature`
    (None: unchanged) are what the chosen setting means for a `Laplace` object.

    Examples:
        >>> la = la.tune(val_loader)
        >>> bool(la.tuning.score <= la.tuning.scores.max())
        True
    """

    __repr__ = brief

    method: str
    settings: tuple[Setting, ...]
    scores: Tensor
    best: int
    prior: Prior
    temperature: Tempered
    likelihood: Likelihood
    iterations: int = 0
    converged: bool = True
    baselines: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    logit_temperature: float | None = None

    @classmethod
    def of(
        cls, method: str, belief: Belief, groups: Groups, settings: Sequence[Setting], scores: Tensor, best: int,
        **more: Any,
    ) -> "Tuning":  # fmt: skip
        """Build the result for a belief; prior, temperature and likelihood follow from `settings[best]`."""
        unit = belief.likelihood.shown_as
        settings = [replace(each, unit=unit) for each in settings]
        chosen = settings[best]
        precision = chosen.precision
        if chosen.deterministic:
            precision = torch.full((groups.count,), DETERMINISTIC, dtype=torch.float64)
        tempered, likelihood = belief.temperature, belief.likelihood
        if not chosen.deterministic and chosen.temperature != float(tempered.T):
            tempered = Tempered(chosen.temperature, tempered.prior)
        if chosen.dispersion is not None:
            likelihood = likelihood.with_dispersion(chosen.dispersion)
            if not likelihood.scales_curvature:
                more["messages"] = (*more.get("messages", ()), AS_FITTED.format(unit[0], chosen.dispersion ** unit[1]))
        prior = groups.prior(precision, belief.prior.mean)
        return cls(method, tuple(settings), scores, best, prior, tempered, likelihood, **more)

    def applied(self, belief: Belief) -> Belief:
        """Return the belief with the chosen prior, temperature, likelihood and logit temperature."""
        scaling = belief.logit_temperature if self.logit_temperature is None else self.logit_temperature
        return replace(
            belief,
            prior=self.prior,
            temperature=self.temperature,
            likelihood=self.likelihood,
            logit_temperature=scaling,
        )

    @property
    def setting(self) -> Setting:
        """The chosen setting.

        Examples:
            >>> precision = la.tune(val_loader).tuning.setting.precision
        """
        return self.settings[self.best]

    @property
    def score(self) -> float:
        """The score of the chosen setting.

        Examples:
            >>> nll = la.tune(val_loader).tuning.score
        """
        return self.scores[self.best].item()

    @property
    def deterministic(self) -> bool:
        """Whether the network without a posterior was chosen.

        Examples:
            >>> la.tune(val_loader).tuning.deterministic
            False
        """
        return self.setting.deterministic

    def table(self, rows: int = 12) -> str:
        """Return the best settings, the baselines and the messages as text.

        Examples:
            >>> print(la.tune(val_loader).tuning.table(rows=5))
        """
        unit = "−log evidence" if self.method == "evidence" else "NLL"
        order = self.scores.argsort()[:rows].tolist()
        shown = order if self.best in order else [*order[:-1], self.best]
        lines = [f"{self.method}: {len(self.settings)} settings, {self.iterations} iterations", f"{unit:>16}  setting"]
        for k in shown:
            mark = "  ← chosen" if k == self.best else ""
            lines.append(f"{self.scores[k].item():16.6g}  {self.settings[k]}{mark}")
        lines += [f"{score:16.6g}  {name}" for name, score in self.baselines.items()]
        return "\n".join([*lines, *self.messages])


def lowest(trials: Trials) -> int:
    """Choose the setting with the lowest score."""
    return int(trials.scores.argmin())


def widest(margin: float = 0.002, errors: float = 3.0, sure: float = 3.0, least: int = 20) -> Rule:
    """Make a rule that chooses the smallest prior precision among settings shown to be no worse than the best.

    The best is the setting with the lowest score, provided that it beats the reference (the network without a
    posterior, its logits scaled or its noise fitted to the same items) by more than `sure` standard errors; otherwise
    it is the reference. A setting is shown to be no worse if its mean loss per item exceeds the best by at most
    `margin` nats even after adding `errors` standard errors of the difference. This is a test of non-inferiority,
    which few data do not pass. All such settings are equally good where there are data, and the widest is the most
    cautious elsewhere. The lowest score decides between equally wide ones. With fewer than `least` items the best is
    taken.

    Examples:
        >>> from lapwing.evidence import widest
        >>> la = la.tune(val_loader, rule=widest(margin=0.01))
    """

    def rule(trials: Trials) -> int:
        best = lowest(trials)
        gain, error = trials.gain(best)
        few = trials.losses.shape[1] < least
        best = best if gain > sure * error and not few else trials.reference % len(trials.settings)
        if few:
            return best
        mean, errs = trials.excess(trials.losses[best])
        scores = trials.scores.tolist()
        good = [k for k in (mean + errors * errs <= margin).nonzero()[:, 0].tolist() if math.isfinite(scores[k])]
        good = [k for k in good if k not in trials.barred]
        return min(good or [best], key=lambda k: (trials.settings[k].narrow, scores[k]))

    return rule


RULES: Mapping[str, Rule] = {"lowest": lowest, "widest": widest()}


def resolve_rule(rule: str | Rule) -> Rule:
    """Return the rule for a name, or the function itself."""
    if callable(rule):
        return rule
    if rule not in RULES:
        names = ", ".join(map(repr, RULES))
        raise UnsupportedOperation(f"rule is {names} or a function of `Trials`, got {rule!r}{nearest(rule, RULES)}")
    return RULES[rule]


def check_logit_temperature(value: float, likelihood: Likelihood) -> float:
    """Return the value if it is positive and the outputs of the likelihood are logits; otherwise raise."""
    require_logits(likelihood)
    return positive("logit_temperature", value)


def require_logits(likelihood: Likelihood) -> None:
    """Refuse a likelihood whose outputs are not logits."""
    if not likelihood.has_logits:
        raise UnsupportedOperation(
            f"a logit temperature divides logits, and {type(likelihood).__name__} has none: it is for Categorical, "
            "Bernoulli and BradleyTerry"
        )


def baselines(f: Tensor, y: Tensor, likelihood: Likelihood, *, dispersion: bool) -> dict[str, Tensor]:
    """Return −log p of each item for the network without a posterior, and after its usual remedy on the same data.

    The remedy for logits is temperature scaling; for a dispersion that may change, the value that fits the residuals.
    """
    rivals = {"MAP": (f, likelihood)}
    if likelihood.has_logits:
        rivals[SCALING] = (f / best_logit_temperature(f, y, likelihood), likelihood)
    elif likelihood.dispersion_name and dispersion:
        best = likelihood.with_dispersion(likelihood.best_dispersion(f, y))
        rivals[f"MAP, {likelihood.dispersion_name} fitted"] = (f, best)
    return {name: counted(f, y, law, -law.log_prob(g, y).double().reshape(-1)) for name, (g, law) in rivals.items()}


def counted(f: Tensor, y: Tensor, likelihood: Likelihood, losses: Tensor) -> Tensor:
    """Drop the losses of items whose targets do not count."""
    mask = likelihood.mask(f, y)
    return losses if mask is None else losses[mask.reshape(-1)]


def best_logit_temperature(
    f: Tensor, y: Tensor, likelihood: Likelihood, limit: float = 100.0, near: float | None = None
) -> float:
    """Return 1/s for the s with the smallest Σ −log p(y | s·f), between 1/limit and limit.

    The sum is convex in s, so Newton's method with bisection as its guard finds it. `near` holds the result weakly near
    another logit temperature, with a quarter of `held_near`: otherwise a few items that are all classified correctly
    would ask for infinite logits.
    """
    f = f.double()
    low, high = 1 / limit, limit
    s = 1.0
    for _ in range(60):
        with torch.enable_grad():
            scale = torch.tensor(s, dtype=torch.float64, device=f.device, requires_grad=True)
            value = -likelihood.log_prob(scale * f, y).sum()
            value = value if near is None else value + held_near(1 / scale, near) / 4
            (slope,) = torch.autograd.grad(value, scale, create_graph=True)
            (curve,) = torch.autograd.grad(slope, scale)
        low, high = (low, s) if slope > 0 else (s, high)
        newton = s - (slope / curve).item() if curve > 0 else high
        new = newton if low < newton < high else math.sqrt(low * high)
        if abs(new - s) <= 1e-9 * s:
            break
        s = new
    return 1 / s


def held_near(logit_temperature: Tensor, near: float) -> Tensor:
    """½ (log s − log near)²/½², in nats for all items together: a penalty that holds s near temperature scaling's.

    A few items may favor a wide posterior with logits so large that draws vote instead of giving probabilities, which
    fails on other items. Many items outweigh the penalty.
    """
    return 2.0 * (logit_temperature.log() - math.log(near)).square()
