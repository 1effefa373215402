"""Links: from a distribution over the outputs f to the law of y, by name.

The probabilities E[softmax(f)] of the link "mc" come from quasi-Monte Carlo over all logits but one, and the integral
over that one in closed form (`expected_softmax`). Given the other logits, f_k is Gaussian, and its softmax is a sigmoid
of f_k minus the log-sum of the others. So each point gives every class the expectation of a sigmoid in place of its
value. Where logits are wide and independent, a point would otherwise give all its weight to one class, and 65 classes
would need 100,000 points for what 1,000 do here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Categorical as CategoricalLaw
from torch.distributions import Distribution, Independent
from torch.distributions import Poisson as PoissonLaw
from torch.nn.functional import logsigmoid

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.marginal import Marginal, log_mix, normal_nodes, safe_sqrt
from lapwing.predictive.function import SEED, FunctionDistribution, MatrixPowers, base_points

ENOUGH = 6e-3
"""Estimated total variation from the exact probabilities at which no more points are taken."""

CHEAP, AMPLE = 1024, 5e-4  # up to so many points of few classes, more are taken until the error is below this
FEW = 64  # classes up to which points are that cheap; of more classes fewer are

REPLICATES = 4  # independent sequences of points, whose spread tells the error
FIRST, LEVELS = 64, 9  # points of the first sequences, and how many times there are new ones, of twice as many
TRACED = 2048  # points per item, at most, where their number cannot depend on the item
MOST = 2**23  # logits of an item, over all its points
BLOCK = 2**19  # logits under way at a time: what fits a cache
ITEMS = 2**23  # elements of covariances under way at a time
NODES, SHIFTS = 10, 4  # of the trapezoidal rule for the logit that is integrated, a standard deviation apart
NARROW = 0.1  # conditional variance up to which the value of a sigmoid is as good as its expectation


@dataclass(frozen=True, eq=False)
class ClassLaw:
    """The law of labels: log_probs (..., C), a function for E_f[entropy of p(y | f)], (...), and the estimated total
    variation between the probabilities and their exact values, (...), where that is known."""

    log_probs: Tensor
    expected_entropy: Callable[[], Tensor]
    error: Tensor | None = None

    @classmethod
    def mixed(cls, laws: Sequence[ClassLaw], weights: Tensor) -> ClassLaw:
        """Return log Σ w p and Σ w E[entropy]: the entropy that remains when both the member and f are known."""

        def expected() -> Tensor:
            return torch.stack([w * law.expected_entropy() for w, law in zip(weights, laws)]).sum(0)

        return cls(log_mix([law.log_probs for law in laws], weights), expected)


Law = Callable[[FunctionDistribution, Likelihood, int | None, torch.Generator | None], ClassLaw | Marginal]
"""From f, p(y | f), a number of points (None: as many as it takes) and their generator (None: fixed points) to the law
of y: a `ClassLaw` for labels, a `Marginal` for numbers."""

When = Callable[[FunctionDistribution, Likelihood], bool]
"""Whether a link can serve this distribution of f under this likelihood."""

L = TypeVar("L", bound=Law)
LINKS: dict[str, tuple[Law, When]] = {}


def register_link(name: str, when: When | None = None) -> Callable[[L], L]:
    """Make a link available as `predict(link=name)` and `tune(link=name)`.

    `when` says for which distributions of f and likelihoods it is meant; without it, for those likelihoods whose
    `links` list the name.

    Example:
        @register_link("plug-in", when=lambda function, likelihood: likelihood.softmax)
        def plug_in(function, likelihood, samples, generator):
            log_probs = function.mean.log_softmax(-1)
            return ClassLaw(log_probs, lambda: -(log_probs.exp() * log_probs).sum(-1))
    """

    def register(law: L) -> L:
        LINKS[name] = law, when or (lambda function, likelihood: name in likelihood.links)
        return law

    return register


def law_of(
    link: str, function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: Any
) -> Any:
    """Return the law of y by a link that `choose_link` allowed."""
    return LINKS[link][0](function, likelihood, samples, generator)


def choose_link(link: str, function: FunctionDistribution, likelihood: Likelihood) -> str:
    """Return the link asked for if it is possible; for "auto" the best that is."""
    own = [name for name in likelihood.links if _possible(name, function, likelihood)]
    if link == "auto":
        return "quadrature" if "quadrature" in own else own[0]
    if link in own:
        return link
    others = [name for name, (_, when) in LINKS.items() if name not in likelihood.links and when(function, likelihood)]
    if link not in others:
        raise UnsupportedOperation(
            f'link="{link}" is not possible for {type(likelihood).__name__} with {function.mean.shape[-1]} outputs and '
            f'{type(function).__name__}: use "auto", {", ".join(repr(name) for name in (*own, *others))}.'
        )
    return link


def _possible(name: str, function: FunctionDistribution, likelihood: Likelihood) -> bool:
    """Whether f has what a link needs: quadrature and closed forms a Gaussian, pairs of outputs their covariance."""
    if name not in ("exact", "quadrature"):
        return True
    if not function.normal:
        return False
    law = inner_law(likelihood, function.mean)
    if name == "exact" or isinstance(law, BernoulliLaw | PoissonLaw):
        return True
    pairs = not isinstance(law, CategoricalLaw) or function.mean.shape[-1] == 2
    return pairs and function.has_covariance


def entropy(log_probs: Tensor) -> Tensor:
    """Return −Σ p log p over the last dimension, with 0 log 0 = 0."""
    p = log_probs.exp()
    return -torch.where(p > 0, p * log_probs, 0.0).sum(-1)


def log_class_probs(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Return log p(y | f) for every class, (..., C); for binary labels (..., K, 2), the label 1 last."""
    law = inner_law(likelihood, f)
    logits: Tensor = law.logits  # type: ignore[attr-defined]
    return torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1) if isinstance(law, BernoulliLaw) else logits


def inner_law(likelihood: Likelihood, f: Tensor) -> Distribution:
    """Return p(y | f) without the wrapper that declares its outputs independent."""
    law = likelihood.law(f)
    while isinstance(law, Independent):
        law = law.base_dist
    return law


@register_link("mc")
def monte_carlo(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Average p(y | f_s) over points of f: right for any covariance and any distribution of f.

    The softmax of a Gaussian goes through `expected_softmax`.
    """
    spread = spread_of(function) if likelihood.softmax and function.mean.shape[-1] > 2 else None
    if spread is not None:
        return _softmax(function.mean, spread, samples, generator)
    log_sum: Tensor | None = None
    expected: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    count = 0
    for f in function.blocks(function.usual if samples is None else samples, generator):
        log_p = log_class_probs(likelihood, f)
        part = log_p.logsumexp(0)
        log_sum = part if log_sum is None else torch.logaddexp(log_sum, part)
        expected = expected + entropy(log_p).sum(0)
        if function.mirrored:
            squares = squares + _pairs(log_p.detach().exp()).square().sum(0)
        count += len(f)
    assert log_sum is not None
    log_probs = log_sum - math.log(count)
    error = _error(log_probs.detach().exp(), squares, count // 2) if isinstance(squares, Tensor) else None
    return ClassLaw(log_probs, lambda: torch.as_tensor(expected / count), error)


def _pairs(p: Tensor) -> Tensor:
    """Average draws with their mirror images."""
    half = len(p) // 2
    return (p[:half] + p[half : 2 * half]) / 2


def _error(p: Tensor, squares: Tensor, pairs: int) -> Tensor | None:
    """Estimate the total variation of an average of so many independent draws from the sum of their squares."""
    if pairs < 2:
        return None
    deviation = ((squares / pairs - p.square()).clamp(min=0) / (pairs - 1)).sqrt()
    return deviation.sum(-1) / math.sqrt(2 * math.pi)


def _softmax(mean: Tensor, spread: Spread, samples: int | None, generator: torch.Generator | None) -> ClassLaw:
    seed = None if generator is None else int(torch.randint(2**31, (), generator=generator, device=generator.device))
    found = expected_softmax(mean.reshape(-1, mean.shape[-1]), spread, samples, seed)
    entropies, error = (part.reshape(mean.shape[:-1]) for part in (found.entropy, found.error))
    return ClassLaw(found.log_probs.reshape(mean.shape), lambda: entropies, error)


def binary_quadrature(mean: Tensor, variance: Tensor) -> ClassLaw:
    """Return E[sigmoid(z)] and its complement for z ~ N(mean, variance) by one-dimensional quadrature, nearly exact."""
    x, log_weights = normal_nodes(mean)
    shape = (-1,) + (1,) * mean.ndim
    z = mean + safe_sqrt(variance) * x.reshape(shape)  # (Q, ...)
    log_p = torch.stack([logsigmoid(-z), logsigmoid(z)], -1)
    log_weights = log_weights.reshape(shape)
    log_probs = (log_p + log_weights[..., None]).logsumexp(0)
    return ClassLaw(log_probs.log_softmax(-1), lambda: (log_weights.exp() * entropy(log_p)).sum(0))


@register_link("quadrature")
def quadrature(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Integrate each label over its own logit, or two classes over f₁ − f₀ ~ N(m₁ − m₀, v₀₀ + v₁₁ − 2v₀₁)."""
    if isinstance(inner_law(likelihood, function.mean), BernoulliLaw):
        return binary_quadrature(function.mean, function.variance)
    covariance = function.item_covariance
    difference = function.mean[..., 1] - function.mean[..., 0]
    variance = covariance[..., 0, 0] + covariance[..., 1, 1] - covariance[..., 0, 1] - covariance[..., 1, 0]
    return binary_quadrature(difference, variance)


@register_link("probit")
def probit(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Return softmax(m / √(1 + πv/8)), MacKay's approximation from variances alone (the sigmoid for binary labels).

    It is fast, but over-confident at 2 classes and badly under-confident at 1,000. The expected entropy treats the
    logits as independent too, and is cut at the entropy, which no expected entropy exceeds.
    """
    mean, variance = function.mean, function.variance
    log_probs = log_class_probs(likelihood, mean / (1 + math.pi / 8 * variance).sqrt())

    def expected() -> Tensor:
        base = base_points(function.usual if samples is None else samples, mean.shape[-1], mean)
        shape = (len(base), *(1,) * (mean.ndim - 1), mean.shape[-1])
        f = mean + safe_sqrt(variance) * base.reshape(shape)
        return torch.minimum(entropy(log_class_probs(likelihood, f)).mean(0), entropy(log_probs))

    return ClassLaw(log_probs, expected)


@register_link("bridge")
def bridge(
    function: FunctionDistribution,
    likelihood: Likelihood,
    samples: int | None,
    generator: torch.Generator | None,
    *,
    normalize: bool = False,
) -> ClassLaw:
    """Fit a Dirichlet to the probabilities by the Laplace bridge (Hobbhahn et al. 2022); all else is in closed form.

    f is first freed of its average, which the softmax does not see; then α_k = (1 − 2/K + e^{m_k} Σ_l e^{−m_l} / K²) /
    v_k. (Published code conditions on Σf = 0 instead, so that adding 1 to all logits changes the probabilities: the
    total variation from the truth was 0.25 there and 0.03 here for two classes, 0.27 and 0.13 for three.) This is the
    least accurate link; use it where a Dirichlet is wanted.
    """
    mean, variance = zero_sum(function.mean, function.item_covariance)
    classes = mean.shape[-1]
    if normalize:
        scale = variance.mean(-1, keepdim=True) / math.sqrt(classes / 2)
        mean, variance = mean / scale.sqrt(), variance / scale
    shape = (1 - 2 / classes) + (mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(classes)).exp()
    alpha = shape / variance.clamp(min=math.sqrt(torch.finfo(variance.dtype).tiny))
    total = alpha.sum(-1, keepdim=True)

    def expected() -> Tensor:
        return (torch.digamma(total[..., 0] + 1) - (alpha / total * torch.digamma(alpha + 1)).sum(-1)).clamp(min=0)

    return ClassLaw((alpha / total).log(), expected)


@register_link("bridge_norm")
def bridge_norm(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Apply the bridge after scaling the variances to average √(K/2), and the mean with them.

    This is better than the plain bridge where variances are large, and over-confident where they are small.
    """
    return bridge(function, likelihood, samples, generator, normalize=True)


def zero_sum(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variances of f minus its average over the classes, which leaves the softmax as it is."""
    rows = covariance.mean(-1)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    return mean - mean.mean(-1, keepdim=True), variance.clamp(min=0)


class Spread(ABC):
    """A root of the covariance of K logits per item, and the law of each logit given the others."""

    @property
    @abstractmethod
    def conditional(self) -> Tensor:
        """Var(f_k | all differences between other logits), (n, K)."""

    @abstractmethod
    def steps(self, z: Tensor) -> Tensor:
        """f − m at standard normal points (S, K), (S, n, K); what all logits share is left out."""

    @abstractmethod
    def own(self, z: Tensor) -> Tensor:
        """f_k − E[f_k | all differences between other logits] at the same points, (S, n, K)."""

    @abstractmethod
    def take(self, items: Tensor) -> Spread:
        """Return the spread of some items."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """How many items to work on at a time."""


@dataclass(frozen=True, eq=False)
class DenseSpread(Spread):
    """The spread of logits whose covariance (n, K, K), that of f minus its average over the K logits, is given."""

    covariance: Tensor

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """C^½, c · C^−½ and c = 1 / diag(C⁻¹), where the average of f, which C lacks, is free."""
        wide, k = self.covariance.double(), self.covariance.shape[-1]
        top = wide.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        top = top.clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
        rounding = k * torch.finfo(self.covariance.dtype).eps
        root, back, inverse = MatrixPowers.apply(wide + top / k, rounding, 3)  # top on the average, taken away again
        conditional = 1 / (inverse.diagonal(dim1=-2, dim2=-1) - 1 / (k * top[..., 0]))
        back = conditional[..., None] * (back - top.rsqrt() / k)
        like = self.covariance.dtype
        return (root - top.sqrt() / k).to(like), back.to(like), conditional.to(like)

    @property
    def conditional(self) -> Tensor:
        return self._parts[2]

    def steps(self, z: Tensor) -> Tensor:
        return _product(z, self._parts[0])

    def own(self, z: Tensor) -> Tensor:
        return _product(z, self._parts[1])

    def take(self, items: Tensor) -> DenseSpread:
        part = DenseSpread(self.covariance[items])
        if "_parts" in self.__dict__:
            part.__dict__["_parts"] = tuple(each[items] for each in self._parts)
        return part

    @property
    def chunk(self) -> int:
        return max(1, ITEMS // self.covariance[0].numel())


def _product(z: Tensor, matrices: Tensor) -> Tensor:
    """Return A_n z_s for points (S, K) and matrices (n, K, K), (S, n, K)."""
    n, k, _ = matrices.shape
    return (z @ matrices.reshape(n * k, k).mT).reshape(z.shape[0], n, k)


@dataclass(frozen=True, eq=False)
class SharedSpread(Spread):
    """The spread of logits with covariances R diag(s²) Rᵀ, one R (K, K) for all items and s (n, K): a last layer."""

    root: Tensor
    spread: Tensor
    inverse: Tensor | None = None  # of the root, where it is at hand

    @cached_property
    def _dual(self) -> Tensor:
        """R^−T."""
        found = torch.linalg.inv(self.root.double()) if self.inverse is None else self.inverse
        return found.mT.to(self.root)

    @cached_property
    def _precision(self) -> tuple[Tensor, Tensor]:
        """V⁻¹1 and the diagonal of V⁻¹ − V⁻¹1 1ᵀV⁻¹ / 1ᵀV⁻¹1, each (n, K): the average of f is free."""
        dual, inverse = self._dual.double(), 1 / self.spread.double().square()
        along = (inverse * dual.sum(0)) @ dual.mT
        diagonal = inverse @ dual.square().mT - along.square() / along.sum(-1, keepdim=True)
        return along, diagonal

    @property
    def conditional(self) -> Tensor:
        return (1 / self._precision[1]).to(self.spread)

    def steps(self, z: Tensor) -> Tensor:
        return (z[:, None] * self.spread) @ (self.root - self.root.mean(0)).mT

    def own(self, z: Tensor) -> Tensor:
        along = self._precision[0].to(self.spread)
        back = (z[:, None] / self.spread) @ self._dual.mT
        return self.conditional * (back - along * (back.sum(-1, keepdim=True) / along.sum(-1, keepdim=True)))

    def take(self, items: Tensor) -> SharedSpread:
        part = SharedSpread(self.root, self.spread[items], self.inverse)
        part.__dict__["_dual"] = self._dual
        return part

    @property
    def chunk(self) -> int:
        return max(1, ITEMS // self.spread.shape[-1])


def spread_of(function: FunctionDistribution) -> Spread | None:
    """Return the roots of the covariances of all items, (items, C, C); None where there are only draws."""
    shared = function.shared_root
    if shared is not None:
        root, spread, *inverse = (part.to(function.mean) for part in shared)
        return SharedSpread(root, spread.reshape(-1, spread.shape[-1]), *inverse)
    covariance = function.contrast_covariance
    return None if covariance is None else DenseSpread(covariance.reshape(-1, *covariance.shape[-2:]))


@dataclass(frozen=True, eq=False)
class Softmax:
    """Probabilities (n, K), the expected entropy of softmax(f) and the estimated error of the probabilities, (n,)."""

    log_probs: Tensor
    entropy: Tensor
    error: Tensor


def expected_softmax(mean: Tensor, spread: Spread, samples: int | None, seed: int | None = None) -> Softmax:
    """Compute E[softmax(f)] for Gaussian f with this mean (n, K) and spread.

    Without `samples`, each item gets as many points as bring its estimated error below `ENOUGH`, as far as `MOST`
    allows. The number does not depend on the other items.
    """
    whole = _Chunk(mean, spread, SEED if seed is None else seed)
    if torch.compiler.is_compiling():  # no choice may depend on numbers, and items are as many as come
        return whole.traced(samples)
    if len(mean) <= spread.chunk:
        return whole.run(samples)
    parts = [whole._take(items).run(samples) for items in torch.arange(len(mean)).to(mean.device).split(spread.chunk)]
    return Softmax(*(torch.cat([getattr(part, name) for part in parts]) for name in ("log_probs", "entropy", "error")))


@dataclass(frozen=True, eq=False)
class _Chunk:
    mean: Tensor
    spread: Spread
    seed: int

    def run(self, samples: int | None) -> Softmax:
        """Take new levels of points for the items whose error is too large still."""
        levels = enumerate(_levels(samples, self.mean.shape[-1]))
        _, (size, sequences) = next(levels)
        probs, entropy, error = self._level(0, size, sequences)
        done = size * sequences
        open_ = self._open(error, done).nonzero()[:, 0]
        for level, (size, sequences) in levels:
            if not len(open_):
                break
            p, h, e = self._take(open_)._level(level, size, sequences)
            now = size * sequences
            new = now / (done + now)  # earlier points count as well
            probs[open_] = torch.lerp(probs[open_], p, new)
            entropy[open_] = torch.lerp(entropy[open_], h, new)
            error[open_] = e * math.sqrt(new)
            done += now
            open_ = open_[self._open(error[open_], done)]
        return Softmax(self._logs(probs), entropy, error)

    def traced(self, samples: int | None) -> Softmax:
        """Do the same without branches, for export.

        All items take the points of every level up to `TRACED` of them, and each keeps the average of those that `run`
        would take.
        """
        probs, entropy = torch.zeros_like(self.mean), torch.zeros_like(self.mean[:, 0])
        error, done = torch.full_like(entropy, torch.inf), 0
        wide = (self.spread.conditional.amax(-1) > NARROW)[:, None]
        for level, (size, sequences) in enumerate(_traced_levels(samples, self.mean.shape[-1])):
            now = size * sequences
            points = self._sequences(level, size, sequences)
            integrated, h = _average(self.mean, self.spread, points, True, whole=True)
            plain, _ = _average(self.mean, self.spread, points, False, whole=True)
            found = torch.where(wide, integrated, plain)
            found = found / found.sum(-1, keepdim=True)
            new = now / (done + now)
            still = self._open(error, done)
            probs = torch.where(still[:, None], torch.lerp(probs, found.mean(0), new), probs)
            entropy = torch.where(still, torch.lerp(entropy, h, new), entropy)
            error = torch.where(still, _error_of(found) * math.sqrt(new), error)
            done += now
        return Softmax(probs.clamp(min=torch.finfo(probs.dtype).tiny).log(), entropy, error)

    def _take(self, items: Tensor) -> _Chunk:
        whole = len(items) == len(self.mean)
        return self if whole else replace(self, mean=self.mean[items], spread=self.spread.take(items))

    def _open(self, error: Tensor, done: int) -> Tensor:
        """Tell which items need more points after so many."""
        few = done * max(self.mean.shape[-1], FEW) < CHEAP * FEW
        return error.detach() > (AMPLE if few else ENOUGH)

    def _sequences(self, level: int, size: int, sequences: int) -> Tensor:
        """Return the points (sequences, size, K) of a level."""
        mean = self.mean
        seeds = range(self.seed + 97 * level, self.seed + 97 * level + sequences)
        return torch.stack([_points(size, mean.shape[-1], seed, mean.dtype) for seed in seeds]).to(mean.device)

    def _level(self, level: int, size: int, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return probabilities, expected entropy and error from so many sequences of points."""
        mean, spread, points = self.mean, self.spread, self._sequences(level, size, sequences)
        wide = spread.conditional.amax(-1) > NARROW
        count = int(wide.sum())
        if count in (0, len(mean)):
            probs, entropy = _average(mean, spread, points, integrated=count > 0)
        else:
            probs, entropy = mean.new_zeros(sequences, *mean.shape), mean.new_zeros(len(mean))
            for which, integrated in ((wide, True), (~wide, False)):
                some = which.nonzero()[:, 0]
                probs[:, some], entropy[some] = _average(mean[some], spread.take(some), points, integrated)
        probs = probs / probs.sum(-1, keepdim=True)
        return probs.mean(0), entropy, _error_of(probs)

    def _logs(self, probs: Tensor) -> Tensor:
        """Return log p, from sums of logarithms where p is so small that sums of exponentials underflow."""
        small = (probs < math.sqrt(torch.finfo(probs.dtype).tiny)).any(-1).nonzero()[:, 0]
        logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
        if len(small):
            points = _points(CHEAP // REPLICATES, probs.shape[-1], self.seed, probs.dtype).to(probs.device)
            spread, mean = self.spread.take(small), self.mean[small]
            each = [(mean + spread.steps(z)).log_softmax(-1).logsumexp(0) for z in points.split(_rows(mean))]
            far = torch.stack(each).logsumexp(0) - math.log(len(points))
            logs[small] = torch.where(probs[small] < math.sqrt(torch.finfo(probs.dtype).tiny), far, logs[small])
        return logs


def prepare(classes: int, samples: int | None, dtype: torch.dtype) -> None:
    """Make the points that a traced form will hold: tracing itself can make none."""
    for level, (size, sequences) in enumerate(_traced_levels(samples, classes)):
        for seed in range(SEED + 97 * level, SEED + 97 * level + sequences):
            _kept(size, classes, seed, dtype)


def _error_of(probs: Tensor) -> Tensor:
    """Estimate the total variation of the average of several sequences (r, n, K) from the exact value, (n,)."""
    sequences = probs.shape[0]
    deviation = probs.detach().std(0) if sequences > 1 else torch.full_like(probs[0], torch.inf)
    return deviation.sum(-1) * math.sqrt(2 / math.pi / sequences) / 2


def _traced_levels(samples: int | None, classes: int) -> list[tuple[int, int]]:
    """Return the levels of which all items take the points where no choice may depend on them."""
    levels: list[tuple[int, int]] = []
    total = 0
    for size, sequences in _levels(samples, classes):
        total += size * sequences
        if levels and total > TRACED:
            break
        levels.append((size, sequences))
    return levels


def _levels(samples: int | None, classes: int) -> list[tuple[int, int]]:
    """Return the points per sequence and the number of sequences of each level."""
    if samples is not None:
        sequences = min(REPLICATES, samples)
        return [(SHIFTS * -(-samples // (sequences * SHIFTS)), sequences)]
    sizes = [FIRST * 2**level for level in range(LEVELS)]
    return [(size, REPLICATES) for size in sizes if REPLICATES * size <= CHEAP or REPLICATES * size * classes <= MOST]


def _rows(mean: Tensor) -> int:
    return max(1, BLOCK // max(1, mean.numel()))


def _average(
    mean: Tensor, spread: Spread, points: Tensor, integrated: bool, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """Average the softmax over each sequence of points (r, S, K), giving (r, n, K), and its entropy over all, (n,).

    `integrated`: each probability is integrated over its own logit instead of taken at the point. `whole`: all points
    are taken at once.
    """
    sequences, size, _ = points.shape
    total, entropy = mean.new_zeros(sequences, *mean.shape), mean.new_zeros(mean.shape[0])
    for part in points.split(size if whole else SHIFTS * max(1, _rows(mean) // (sequences * SHIFTS)), 1):
        z = part.flatten(0, 1)
        f = mean + spread.steps(z)
        highest, first = f.max(-1, keepdim=True)
        f = f - highest
        e = f.exp()
        own = e.scatter(-1, first, 0.0).sum(-1, keepdim=True)  # the others of the highest, which would cancel
        p = e / (own + 1)
        entropy = entropy + ((own + 1).log()[..., 0] - (p * f).sum(-1)).sum(0)
        if not integrated:
            total = total + p.unflatten(0, part.shape[:2]).sum(1)
            continue
        rest = (own + 1 - e).scatter(-1, first, own).clamp(min=torch.finfo(f.dtype).tiny)
        odds = (f - rest.log() - spread.own(z)).unflatten(0, (sequences, -1, SHIFTS))
        total = total + _expected_sigmoid(odds, spread.conditional)
    return total / size, entropy / (sequences * size)


def _expected_sigmoid(x: Tensor, variance: Tensor) -> Tensor:
    """Return Σ_s E[sigmoid(x_s + √v t)], t ~ N(0, 1), for x (r, S, SHIFTS, n, K) and v (n, K), as (r, n, K).

    This uses the trapezoidal rule. The points of every group of `SHIFTS` have their own nodes, between those of the
    others, so that together they are as good as a finer rule.
    """
    far = -math.log(torch.finfo(x.dtype).tiny) - 8
    against = (-x).clamp(-far, far).exp_()
    shifts = torch.arange(SHIFTS, dtype=torch.float64)[:, None] / SHIFTS
    nodes = torch.arange(NODES, dtype=torch.float64) - NODES / 2 + shifts  # (SHIFTS, NODES)
    weights = (-nodes.square() / 2).softmax(-1).to(x)
    total, scale = x.new_zeros(x.shape[0], *variance.shape), variance.sqrt()
    for node, weight in zip(nodes.to(x).T, weights.T, strict=True):
        away = (-node[:, None, None] * scale).exp()  # (SHIFTS, n, K)
        each = (against * away).add_(1).reciprocal_().sum(1)
        total = total + torch.einsum("h,rhnk->rnk", weight, each)
    return total


@lru_cache(maxsize=64)
def _kept(n: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    return base_points(n, dim, torch.empty(0, dtype=dtype), seed)


def _points(n: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    small = n * dim <= 2**18 or torch.compiler.is_compiling()
    return _kept(n, dim, seed, dtype) if small else base_points(n, dim, torch.empty(0, dtype=dtype), seed)
