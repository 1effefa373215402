"""The interface of a likelihood p(y | f), its defaults in terms of `conditional` alone, and likelihoods by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, kl_divergence

from lapwing.errors import BadData, UnsupportedOperation, nearest
from lapwing.likelihoods.marginal import Marginal, Outputs
from lapwing.model.calls import promote
from lapwing.storage import is_registered, named, unpack

NODES = 64
"""Dispersions at which the default `statistics` hold the log-likelihood."""


class Likelihood(ABC):
    """p(y | f): the distribution of a target given the outputs of the network.

    Inside Lapwing outputs are always f (B, *event, C). Only :meth:`conditional` is required; everything else has a
    default in terms of it, which the families replace by closed forms. With φ the :attr:`common_factor`,

        Λ = E_y[−∇²_f log p(y|f)] = E_y[∇ log p ∇ log pᵀ],      S Sᵀ = φ·Λ.

    Targets in canonical form have the shape batch_shape + event_shape of the conditional.

    A likelihood that registers itself (`lapwing.register`) is found by name in `fit`, and files that hold it load. Its
    options must then be numbers, strings, booleans or tuples of them.

    Example: a Gamma regression, good for `lapwing.fit(model, data, "positive")`:

    Examples:
        >>> from dataclasses import dataclass
        >>> @lapwing.register(name="positive")
        ... @dataclass(frozen=True, eq=False)
        ... class PositiveTarget(lapwing.Likelihood):
        ...     shape: float = 2.0
        ...     def conditional(self, f):
        ...         return torch.distributions.Gamma(self.shape, (-f[..., 0]).exp())
        >>> la = lapwing.fit(network, (inputs, targets.exp()[:, 0]), "positive")
        >>> la.predict(inputs).mean.shape
        torch.Size([40])
    """

    links: ClassVar[tuple[str, ...]] = ("mc",)
    """Links from a distribution of f to one of y, by name, the best first. Monte Carlo serves every likelihood."""

    by_outputs: ClassVar[Mapping[int, type[Likelihood]]] = {}
    """The likelihoods of predictions whose outputs mean something else than in the fit, by the number of outputs: a
    network that was fitted to preferences between two items predicts the reward of a single item."""

    @abstractmethod
    def conditional(self, f: Tensor) -> Distribution:
        """Return p(y | f) with batch_shape (B, *event) and event_shape () or (K,).

        A distribution of batch_shape f.shape counts as independent over the last dimension.

        Examples:
            >>> lapwing.Categorical().conditional(torch.zeros(2, 3)).probs[0]
            tensor([0.3333, 0.3333, 0.3333])
        """

    def law(self, f: Tensor) -> Distribution:
        """Return the conditional with batch_shape (B, *event): one per output is made independent over outputs.

        Examples:
            >>> lapwing.Gaussian(noise=0.5).law(torch.zeros(2, 3)).event_shape
            torch.Size([3])
        """
        conditional = self.conditional(promote(f))
        if not isinstance(conditional, Distribution):
            raise UnsupportedOperation(
                f"{type(self).__name__}.conditional returned {type(conditional).__name__}; it must return a "
                "torch.distributions.Distribution, such as torch.distributions.Normal(f, 1.0)."
            )
        surplus = len(conditional.batch_shape) - (f.ndim - 1)
        if surplus > 0 and isinstance(conditional, Categorical):
            raise UnsupportedOperation(
                f"{type(self).__name__}.conditional returned one categorical law per output, of batch_shape "
                f"{tuple(conditional.batch_shape)}; return one per item, of batch_shape {tuple(f.shape[:-1])}. If it "
                "depends on a single output, use f[..., 0]."
            )
        if surplus > 0:
            conditional = Independent(conditional, surplus)
        if conditional.batch_shape != f.shape[:-1]:
            raise UnsupportedOperation(
                f"{type(self).__name__}.conditional returned batch_shape {tuple(conditional.batch_shape)} for outputs "
                f"of shape {tuple(f.shape)}; it must be {tuple(f.shape[:-1])} (one law per item) or {tuple(f.shape)}."
            )
        return conditional

    def outputs(self, raw: Tensor) -> Tensor:
        """Return f (B, *event, C) from what the network returned; (B,) becomes (B, 1), half precision float32.

        Examples:
            >>> lapwing.Gaussian().outputs(torch.zeros(5)).shape  # a network that returns (B,)
            torch.Size([5, 1])
        """
        if raw.ndim == 0:
            raise BadData(
                "the network returned one number for the whole batch; it must return one row per sample, (B, C)."
            )
        return promote(raw[:, None] if raw.ndim == 1 else raw)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        """Return y in canonical form after checking that it has the right shape, is finite and is in the support.

        Examples:
            >>> lapwing.Gaussian().targets(torch.zeros(5, 1), torch.zeros(5)).shape  # outputs, then targets
            torch.Size([5, 1])
        """
        y = as_target(f, y)
        require_finite(f, y)
        law = self.law(f)
        shape = law.batch_shape + law.event_shape
        y = match_shape(y, shape, law.event_shape, type(self).__name__)
        support = law.support
        if y.is_floating_point() or support is None or not support.is_discrete:
            y = y.to(promote(f).dtype)
        if support is not None:
            require(support.check(y), y, f"the support of {type(self).__name__} ({support})")
        return y

    def mask(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return True where a target counts, (B, *event); None where all do.

        Examples:
            >>> lapwing.Categorical().mask(torch.zeros(3, 5), torch.tensor([0, -100, 2]))
            tensor([ True, False,  True])
        """
        return None

    def count(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> float:
        """Return the number of data: samples (not tokens), or the sum of their weights."""
        return float(f.shape[0]) if weights is None else float(weights.double().sum())

    def counted(self, f: Tensor, y: Tensor) -> Tensor:
        """Return True where any target of a sample counts, (B,)."""
        mask = self.mask(f, y)
        return (
            torch.ones(len(f), dtype=torch.bool, device=f.device) if mask is None else mask.reshape(len(f), -1).any(1)
        )

    def doubts(self, f: Tensor, y: Tensor) -> list[str]:
        """Return messages where outputs and canonical targets of a few items contradict this likelihood."""
        return []

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log p(y | f), (B, *event), 0 where the target is ignored.

        Examples:
            >>> lapwing.Categorical().log_prob(torch.zeros(2, 2), torch.tensor([0, 1]))
            tensor([-0.6931, -0.6931])
        """
        return masked(self.law(f).log_prob(y), self.mask(f, y))

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ∇_f log p(y | f), with the shape of f, 0 where the target is ignored.

        Examples:
            >>> lapwing.Categorical().score(torch.zeros(1, 2), torch.tensor([0]))
            tensor([[ 0.5000, -0.5000]])
        """
        with torch.enable_grad():
            f = promote(f).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.log_prob(f, y).sum(), f)
        return gradient

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return S (B, *event, C, R) with S Sᵀ = φ·Λ; zero where the target is ignored.

        By default Λ is the Hessian of KL(p_f₀ ‖ p_f) at f₀ where torch knows that divergence; else the sum over an
        enumerable support; else the observed Hessian of −log p(y | f), negative eigenvalues set to zero (this one
        needs y).

        Examples:
            >>> S = lapwing.Categorical().factor(torch.zeros(1, 2))
            >>> S @ S.mT  # Λ = diag(p) − p pᵀ
            tensor([[[ 0.2500, -0.2500],
                     [-0.2500,  0.2500]]])
        """
        f = promote(f).detach()
        law = self.law(f)
        try:
            kl_divergence(law, law)
        except NotImplementedError:
            root = self._enumerated_root(f, law) if enumerable(law) else self._observed_root(f, y)
        else:
            root = psd_root(hessian(lambda g: kl_divergence(law, self.law(g)), f))
        root = root * self.common_factor.detach().to(root).sqrt()
        return masked(root, None if y is None else self.mask(f, y))

    def curvature_product(self, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """Return φΛ u for vectors u (s, B, *event, C); families with a closed form need no C × C matrix.

        Examples:
            >>> f, counts, u = torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[[2.0]]])
            >>> lapwing.Poisson().curvature_product(f, counts, u)  # Λ = exp f = 1
            tensor([[[2.]]])
        """
        root = self.factor(f, y).to(u)
        return torch.einsum("n...cr,n...dr,sn...d->sn...c", root, root, u)

    def curvature_sum(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return Σ φΛ over all items, each times the weight (B,) of its sample, (C, C) in float64.

        Examples:
            >>> lapwing.Categorical().curvature_sum(torch.zeros(4, 2), torch.zeros(4).long())
            tensor([[ 1., -1.],
                    [-1.,  1.]], dtype=torch.float64)
        """
        root = self.factor(f, y).double()
        if weights is not None:
            root = root * weights.to(root).sqrt().reshape(-1, *(1,) * (root.ndim - 1))
        rows = root.mT.reshape(-1, f.shape[-1])
        return rows.mT @ rows

    def curvature_diagonal(self, f: Tensor, y: Tensor, basis: Tensor | None = None) -> Tensor:
        """Return the diagonal of Bᵀ φΛ B for every item, (B, *event, k), for a basis (C, k) or the identity."""
        root = self.factor(f, y)
        return (root if basis is None else basis.mT.to(root) @ root).square().sum(-1)

    def root_noise(self, f: Tensor, y: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n vectors S ε with covariance φΛ, (n, B, *event, C)."""
        root = self.factor(f, y)
        shape = (n, *root.shape[:-2], root.shape[-1])
        noise = torch.randn(shape, generator=generator, dtype=root.dtype, device=root.device)
        return torch.einsum("b...cr,sb...r->sb...c", root, noise)

    def smooth_factor(self, f: Tensor, y: Tensor) -> Tensor:
        """Return an S (B, *event, C, R) that autograd can differentiate in f; constant in f where none is known."""
        return self.factor(f.detach(), y)

    def scored_factor(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return an S (B, C, R) as from `factor` whose first column is the score times one number per item.

        The numbers (B,) are returned too. This saves a backward pass and changes no result. None if no such S is known.
        """
        return None

    def _enumerated_root(self, f: Tensor, law: Distribution) -> Tensor:
        """Return columns √p(y)·∇log p(y|f), one per y of the support."""
        columns = []
        for y in law.enumerate_support(expand=True):
            columns.append(law.log_prob(y).exp().sqrt()[..., None] * Likelihood.score(self, f, y))
        return torch.stack(columns, -1)

    def _observed_root(self, f: Tensor, y: Tensor | None) -> Tensor:
        if y is None:
            raise UnsupportedOperation(
                f"the Fisher information of {type(self).__name__} has no known form (no KL divergence in torch, no "
                "enumerable support), and the observed Hessian needs targets. Pass y, or define `factor`."
            )
        return psd_root(hessian(lambda g: -self.log_prob(g, y), f))

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one y ~ p(y | f) per item.

        Examples:
            >>> lapwing.Categorical().sample_target(torch.zeros(5, 3), torch.Generator().manual_seed(0)).shape
            torch.Size([5])
        """
        return draw(self.law(f.detach()), (), generator)

    def sample_factor(self, f: Tensor, y: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Return s = √φ·∇_f log p(ỹ | f) at drawn targets ỹ, so that E[s sᵀ] = φ·Λ; y says which targets to ignore.

        Examples:
            >>> s = lapwing.Categorical().sample_factor(torch.zeros(5, 3), y[:5], torch.Generator().manual_seed(0))
            >>> s.shape
            torch.Size([5, 3])
        """
        score = self.score(f, self.sample_target(f, generator))
        score = score * self.common_factor.detach().to(score).sqrt()
        return masked(score, None if y is None else self.mask(f, y))

    def marginal(self, f: Outputs) -> Marginal | None:
        """Return ∫ p(y | f) N(f) df where it has a closed form or a quadrature in one dimension; else None.

        Examples:
            >>> from lapwing.predictive import GaussianFunction
            >>> function = GaussianFunction(torch.zeros(2, 1), torch.ones(2, 1, 1))
            >>> law = lapwing.Gaussian(noise=2.0).marginal(function)
            >>> law.epistemic, law.aleatoric
            (tensor([[1.],
                    [1.]]), tensor([[4.],
                    [4.]]))
        """
        return None

    @property
    def softmax(self) -> bool:
        """Whether p(y | f) = softmax(f)_y over the last dimension of f."""
        return False

    def noise_variance(self, f: Tensor) -> Tensor | None:
        """Return the variance of y given f, (C,), if y = f + noise that is the same at all inputs; else None."""
        return None

    @property
    def has_logits(self) -> bool:
        """Whether outputs are logits of labels, so that dividing them by a temperature makes sense.

        Examples:
            >>> lapwing.Categorical().has_logits, lapwing.Gaussian().has_logits
            (True, False)
        """
        return False

    @property
    def takes_class_indices(self) -> bool:
        """Whether a target is the index of a class, so that 3.0 read from a file means class 3."""
        return False

    @property
    def shift_invariant(self) -> bool:
        """Whether adding one number to all outputs of an item changes nothing, as under a softmax.

        Examples:
            >>> lapwing.Categorical().shift_invariant, lapwing.Bernoulli().shift_invariant
            (True, False)
        """
        return False

    dispersion_name: ClassVar[str] = ""
    """What `tune(learn=...)` calls the dispersion, such as "noise"; empty where there is none to learn."""

    dispersion_unit: ClassVar[float] = 1.0
    """Users read and write the dispersion to this power: ½ for a noise that is shown as a standard deviation."""

    dispersion_range: ClassVar[tuple[float, float]] = (1e-4, 1e4)
    """The range of dispersions for which the default `statistics` know the log-likelihood."""

    scales_curvature: ClassVar[bool] = True
    """Whether Λ⁻¹ is proportional to the dispersion, so that another one only scales a fitted curvature.

    If it is not, a fitted curvature keeps the dispersion of the fit.
    """

    @property
    def dispersion(self) -> Tensor:
        """The positive number that `tune` may learn, 0-d, with its graph: σ² for a Gaussian, 1 if there is none.

        Examples:
            >>> float(lapwing.Gaussian(noise=0.5).dispersion)  # σ²
            0.25
        """
        return torch.ones((), dtype=torch.float64)

    @property
    def common_factor(self) -> Tensor:
        """φ, 0-d, by which Λ⁻¹ scales: the dispersion where it `scales_curvature`, else 1."""
        phi = self.dispersion
        return phi if self.scales_curvature else torch.ones_like(phi).detach()

    def with_dispersion(self, dispersion: float | Tensor) -> Likelihood:
        """Return the same likelihood with another dispersion; gradients flow from it.

        Examples:
            >>> print(lapwing.Gaussian(noise=0.5).with_dispersion(torch.tensor(0.04)))
            Gaussian, noise 0.2
        """
        raise UnsupportedOperation(
            f"{type(self).__name__} has no dispersion: define `dispersion_name`, `dispersion` and `with_dispersion`."
        )

    def learned_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Replace the user's name of the dispersion, such as "noise", by "dispersion" in names of what to learn."""
        asked = [name for name in names if name in ("noise", "dispersion", self.dispersion_name)]
        if asked and not self.dispersion_name:
            raise UnsupportedOperation(
                f"{type(self).__name__} has no {asked[0]} to learn; Gaussian has. A likelihood of your own needs "
                "`dispersion_name`, `dispersion` and `with_dispersion`."
            )
        return tuple("dispersion" if name in asked else name for name in names)

    @property
    def shown_as(self) -> tuple[str, float]:
        """The name of the dispersion, and the power of it that users read, such as ½ for a standard deviation."""
        return self.dispersion_name, self.dispersion_unit

    def dispersion_from(self, shown: float) -> float:
        """Return the dispersion φ for the value that users read or write, such as a standard deviation."""
        return shown ** (1 / self.dispersion_unit)

    @property
    def dispersion_bounds(self) -> tuple[float, float]:
        """The smallest and the largest dispersion that the evidence may choose."""
        return self.dispersion_range

    @property
    def known(self) -> bool:
        """Whether the dispersion has a value. `Gaussian()` has no known noise before a fit; it then counts as 1.

        Examples:
            >>> lapwing.Gaussian().known, lapwing.Gaussian(noise=0.5).known
            (False, True)
        """
        return True

    @property
    def learns_dispersion(self) -> bool:
        """Whether tuning learns the dispersion unless it is told what to learn."""
        return bool(self.dispersion_name)

    def estimates_first(self, outputs: int) -> bool:
        """Whether an unknown dispersion must be estimated before the curvature, for this number of outputs."""
        return not (self.known or self.scales_curvature)

    def estimate(self, statistics: Tensor) -> Likelihood:
        """Estimate an unknown dispersion from the `statistics` of the data; return the likelihood where it is known."""
        if self.known:
            return self
        return self.with_dispersion(_highest(lambda phi: self.with_dispersion(phi).log_likelihood(statistics), self))

    def best_dispersion(self, f: Tensor, y: Tensor, held: float = 0.0) -> float:
        """Return the dispersion of the largest Σ log p(y | f), for outputs and targets without a posterior.

        `held` is the number of items that the dispersion in force counts as, so that few items cannot make it absurd.
        """
        now = self.dispersion.detach().double().to(f.device)

        def value(phi: Tensor) -> Tensor:
            pull = held / 4 * (phi / now).log().square()  # as much as so many items of a Gaussian, to second order
            return self.with_dispersion(phi).log_prob(f, y).double().sum() - pull

        return _highest(value, self)

    def dispersion_step(self, statistics: Tensor, effective: Tensor) -> Tensor:
        """Return log φ′/φ of MacKay's fixed point (1992, Eq. 3.10), φ′ = RSS/(NK − γ) for `effective` parameters γ.

        RSS/φ = −2L″ and NK = −2L″ − 2L′ come from the log-likelihood L(log φ), so that at the fixed point of any
        likelihood the slope −2L′ equals γ.
        """
        with torch.enable_grad():
            u = self.dispersion.detach().double().log().to(statistics.device).requires_grad_()
            value = self.with_dispersion(u.exp()).log_likelihood(statistics)
            (first,) = torch.autograd.grad(value, u, create_graph=True)
            (second,) = torch.autograd.grad(first, u)
        residual, count = -2 * second, -2 * second - 2 * first.detach()
        left = (count - effective).clamp_min(1e-3 * count)
        return (residual.clamp_min(1e-30) / left).log()

    def statistics(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return numbers (k,), float64 and additive over data, from which `log_likelihood` finds Σ log p.

        They must serve every dispersion. The default is Σ log p itself. For a likelihood with a dispersion it is Σ log
        p at `NODES` dispersions over `dispersion_range`: a polynomial in log φ through these values is exact to about
        1e-9. Sufficient statistics, if a family has them, cost less. weights: (B,).

        Examples:
            >>> likelihood = lapwing.Gaussian(noise=0.5)
            >>> statistics = likelihood.statistics(torch.zeros(4, 1), torch.ones(4, 1))
            >>> statistics  # the number of items, and Σ (y − f)²
            tensor([4., 4.], dtype=torch.float64)
        """
        if not self.dispersion_name:
            return weighted_sum(self.log_prob(f, y)[..., None], weights)
        each = [self.with_dispersion(phi) for phi in _dispersions(self.dispersion_range)]
        return torch.cat([weighted_sum(law.log_prob(f, y)[..., None], weights) for law in each])

    def log_likelihood(self, statistics: Tensor) -> Tensor:
        """Return Σ_n log p(y_n | f_n) from `statistics`, 0-d and differentiable in the parameters of the likelihood.

        Examples:
            >>> likelihood = lapwing.Gaussian(noise=1.0)
            >>> statistics = likelihood.statistics(torch.zeros(4, 1), torch.zeros(4, 1))
            >>> round(float(likelihood.log_likelihood(statistics)), 4)  # −4 · ½ log 2π
            -3.6758
        """
        if not self.dispersion_name:
            return statistics[0]
        return _interpolated(statistics, self.dispersion.to(statistics), self.dispersion_range, type(self).__name__)

    def flaw(self, statistics: Tensor) -> str:
        """Say why no data can have these statistics, which were read from a file; empty if some data can."""
        own = type(self).statistics is not Likelihood.statistics
        if statistics.ndim != 1 or not (own or len(statistics) == (NODES if self.dispersion_name else 1)):
            return f"the statistics have shape {tuple(statistics.shape)}"
        return "" if bool(self.log_likelihood(statistics).isfinite()) else "the log-likelihood is not finite"

    def same_curvature(self, other: Likelihood) -> bool:
        """Whether φ·Λ is the same function of f, so that the other may replace this one without a new fit.

        Examples:
            >>> lapwing.Gaussian(noise=0.5).same_curvature(lapwing.Gaussian(noise=2.0))
            True
            >>> lapwing.Gaussian(noise=[0.5, 0.5]).same_curvature(lapwing.Gaussian(noise=[0.5, 2.0]))
            False
        """
        if self is other or type(self) is not type(other):
            return self is other
        free = bool(self.dispersion_name) and self.scales_curvature
        mine, theirs = (each.with_dispersion(1.0) if free else each for each in (self, other))
        return mine.spec() == theirs.spec() and _told(self)

    def spec(self) -> dict[str, Any]:
        """Return what a file stores: the family and its options.

        A registered likelihood is made again from it; of any other a file keeps this to compare with what the caller
        of `load` passes.

        Examples:
            >>> lapwing.Categorical(ignore_index=-1).spec()
        """
        options = {name: _described(value) for name, value in _options(self).items()}
        if is_registered(type(self)):
            return {"family": type(self).__name__, **options}
        return {"family": type(self).__qualname__, "own": True, "options": options}


def stored_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """Return the `spec` for a file; refuse options that the file could not give back."""
    remade = is_registered(type(likelihood)) and type(likelihood).spec is Likelihood.spec
    for name, value in _options(likelihood).items() if remade else ():
        if value is not None and (_described(value) is None or (isinstance(value, Tensor) and value.ndim)):
            raise UnsupportedOperation(
                f"a file cannot hold {name!r} of {type(likelihood).__name__}, a {type(value).__name__}: the options of "
                "a registered likelihood are numbers, strings, booleans or tuples of them"
            )
    return likelihood.spec()


def resolve_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of this name ("classification", "regression", …), or the object itself."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    known = named(Likelihood)
    names = ", ".join(f'"{name}"' for name in known)
    if hasattr(likelihood, "__array__") or isinstance(likelihood, (list, tuple)):
        raise BadData(
            f"the likelihood is a {type(likelihood).__name__}; expected one of {names}. Inputs and targets go "
            'together, as one pair: fit(model, (x, y), "classification")'
        )
    if not isinstance(likelihood, str) or likelihood not in known:
        raise BadData(
            f"likelihood={likelihood!r}: use one of {names}, or an object such as Gaussian(noise=0.1)"
            f"{nearest(likelihood, known) or '.'}"
        )
    return known[likelihood]()


def likelihood_from_spec(spec: dict[str, Any], likelihood: Likelihood | None = None) -> Likelihood:
    """Return the likelihood that a file describes.

    One that is not registered is not in the file: the caller passes it, and names and options must agree.
    """
    family = spec.get("family")
    if spec.get("own"):
        if likelihood is None:
            raise BadData(
                f"the file was made with your own likelihood {family!r}: pass it, load(..., likelihood={family}())."
            )
        if type(likelihood).__qualname__ != family:
            raise BadData(f"the file was made with likelihood {family!r}, not {type(likelihood).__qualname__!r}.")
        mine = {name: _described(value) for name, value in _options(likelihood).items()}
        if mine != spec.get("options"):
            raise BadData(f"the file was made with {family}({spec.get('options')}), not with {family}({mine}).")
        return likelihood
    options = {key: value for key, value in spec.items() if key not in ("family", "own")}
    stored = unpack({}, {"type": family, **options}, Likelihood)
    if likelihood is not None and likelihood.spec() != spec:
        raise BadData(
            f"the file was made with {spec}, not with {likelihood.spec()}. Load first, then .replace(likelihood=...)."
        )
    return stored


def _options(likelihood: Likelihood) -> dict[str, Any]:
    """Return the values of the fields of a dataclass, or all attributes of another object."""
    if not is_dataclass(likelihood):
        return dict(vars(likelihood))
    return {each.name: getattr(likelihood, each.name) for each in fields(likelihood)}


def _described(value: Any) -> Any:
    """Return an option as JSON can hold it; None where it cannot be told (a function, a module)."""
    if isinstance(value, Tensor):
        return value.detach().double().tolist()
    if isinstance(value, list | tuple):
        each = [_described(item) for item in value]
        return None if None in each else each
    return value if isinstance(value, bool | int | float | str) else None


def _told(likelihood: Likelihood) -> bool:
    return all(value is None or _described(value) is not None for value in _options(likelihood).values())


def _dispersions(bounds: tuple[float, float]) -> list[float]:
    """Return Chebyshev's nodes in log φ, from the upper bound to the lower one."""
    low, high = map(math.log, bounds)
    angles = [math.pi * (j + 0.5) / NODES for j in range(NODES)]
    return [math.exp((low + high) / 2 + (high - low) / 2 * math.cos(angle)) for angle in angles]


def _interpolated(values: Tensor, phi: Tensor, bounds: tuple[float, float], name: str) -> Tensor:
    """Evaluate at φ the polynomial in log φ through values (NODES,) at `_dispersions`, by Clenshaw's recurrence."""
    low, high = map(math.log, bounds)
    x = (2 * phi.log() - (low + high)) / (high - low)
    if not abs(x.item()) <= 1 + 1e-9:
        raise BadData(
            f"the dispersion {phi.item():.3g} of {name} is outside {bounds[0]:g} to {bounds[1]:g}, where its "
            "log-likelihood is known: scale the targets, or give the class another `dispersion_range`."
        )
    angles = math.pi * (torch.arange(NODES, dtype=values.dtype, device=values.device) + 0.5) / NODES
    coefficients = 2 / NODES * torch.cos(torch.arange(NODES, device=values.device)[:, None] * angles) @ values
    after, second = torch.zeros_like(x), torch.zeros_like(x)
    for c in coefficients[1:].flip(0):
        after, second = c + 2 * x * after - second, after
    return coefficients[0] / 2 + x * after - second


def _highest(value: Callable[[Tensor], Tensor], likelihood: Likelihood) -> float:
    """Return the dispersion in the range of a likelihood where a function is largest, by ever finer grids."""
    low, high = map(math.log, likelihood.dispersion_range)
    with torch.no_grad():
        while high - low > 1e-7:
            grid = torch.linspace(low, high, 33, dtype=torch.float64)
            values = torch.stack([value(u.exp()).detach().cpu() for u in grid]).nan_to_num(-torch.inf)
            top = int(values.argmax())
            low, high = grid[max(top - 1, 0)].item(), grid[min(top + 1, 32)].item()
    return math.exp((low + high) / 2)


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return values (B, *event, ...) with zeros where mask (B, *event) is False, also in place of NaN."""
    if mask is None:
        return values
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum values (B, *event, k) to (k,) float64: Σ_b w_b Σ_event values."""
    rows = values.double().reshape(values.shape[0], -1, values.shape[-1]).sum(1)
    if weights is None:
        return rows.sum(0)
    if weights.shape != rows.shape[:1]:
        raise BadData(f"weights of shape {tuple(weights.shape)} for {rows.shape[0]} samples: pass one per sample.")
    return weights.to(rows) @ rows


def hessian(function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """Return the Hessians (B, *event, C, C) of a function f (B, *event, C) -> (B, *event) that acts per item."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(f).sum(), f, create_graph=True)
        rows = [
            torch.autograd.grad(gradient[..., c].sum(), f, retain_graph=True, materialize_grads=True)[0]
            for c in range(f.shape[-1])
        ]
    return torch.stack(rows, -2).detach()


def psd_root(matrix: Tensor) -> Tensor:
    """Return S whose S Sᵀ is the nearest positive semi-definite matrix, columns by decreasing norm; for small C."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT).double() / 2)
    root = vectors * values.clamp(min=0).sqrt()[..., None, :]
    return root.flip(-1).to(matrix.dtype)


def enumerable(law: Distribution) -> bool:
    """Whether all values of a target can be listed."""
    if isinstance(law, Independent):
        return law.base_dist.has_enumerate_support and law.event_shape.numel() == 1
    return law.has_enumerate_support


def draw(law: Distribution, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Sample a torch distribution, (*shape, ...). It knows only the global random state, which is set and restored."""
    if generator is None:
        return law.sample(shape)
    device = generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=device))
    if device.type == "cpu":  # torch.manual_seed would also set the state of every other device
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return law.sample(shape)
    count = getattr(torch, device.type).device_count()
    with torch.random.fork_rng(devices=range(count), device_type=device.type):
        torch.manual_seed(seed)
        return law.sample(shape)


def as_target(f: Tensor, y: Any) -> Tensor:
    """Return y as a tensor on the device of f."""
    try:
        y = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(
            f"targets are a {type(y).__name__} that is no tensor of numbers ({error}). Write classes as 0, 1, …"
        ) from error
    if y.is_sparse or y.layout is not torch.strided:
        raise BadData(f"targets are sparse ({y.layout}): pass targets.to_dense()")
    if y.is_complex():
        raise BadData(f"targets are complex numbers ({y.dtype}): pass real ones, such as y.real")
    return y.to(f.device)


def match_shape(y: Tensor, shape: torch.Size, event_shape: torch.Size, name: str) -> Tensor:
    """Return y in exactly this shape; the last dimension may be missing where it is 1. Nothing is broadcast."""
    if event_shape == (1,) and y.shape == shape[:-1]:
        return y[..., None]
    if y.shape != shape:
        allowed = f"{tuple(shape)} or {tuple(shape[:-1])}" if event_shape == (1,) else f"{tuple(shape)}"
        raise BadData(f"targets have shape {tuple(y.shape)}, but {name} with these outputs needs {allowed}.")
    return y


def require_finite(f: Tensor, y: Tensor) -> None:
    """Raise BadData with the first value of outputs or targets that is not finite."""
    for what, values in (("network outputs", f), ("targets", y)):
        bad = ~torch.isfinite(values)
        if bad.any():
            where = tuple(bad.nonzero()[0].tolist())
            raise BadData(
                f"{what} are not finite: {values[where].item()} at index {where} "
                f"({int(bad.sum())} of {values.numel()} values). Clean the data or the network first."
            )


def require(inside: Tensor, y: Tensor, allowed: str, hint: str = "") -> None:
    """Raise BadData with the first offending value where `inside` (a leading part of the shape of y) is False."""
    if not inside.all():
        where = tuple((~inside).nonzero()[0].tolist())
        value = y[where]
        shown = value.item() if value.numel() == 1 else value.tolist()
        raise BadData(f"target {shown} at index {where} is outside {allowed}.{hint and ' '}{hint}")
