"""The interface: what the outputs f of a network mean for the targets y."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, kl_divergence

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods.marginal import Marginal, Outputs


class Likelihood(ABC):
    """p(y | f): the distribution of a target given the outputs of the network.

    Inside Lapwing outputs are always f (B, *event, C). Only :meth:`conditional` is required; everything else has a
    default in terms of it, which the families replace by closed forms. With φ the :attr:`dispersion`,

        Λ = E_y[−∇²_f log p(y|f)] = E_y[∇ log p ∇ log pᵀ],      S Sᵀ = φ·Λ.

    Targets in canonical form have the shape batch_shape + event_shape of the conditional.

    Example: a Gamma regression with unit rate and log-linear concentration, good for `lapwing.fit`:

        @dataclass(frozen=True, eq=False)
        class PositiveTarget(Likelihood):
            shape: float = 2.0

            def conditional(self, f):
                return torch.distributions.Gamma(self.shape, (-f[..., 0]).exp())
    """

    links: ClassVar[tuple[str, ...]] = ("mc",)
    """Ways from a distribution of f to one of y, the best first. Monte Carlo serves every likelihood."""

    @abstractmethod
    def conditional(self, f: Tensor) -> Distribution:
        """p(y | f) with batch_shape (B, *event) and event_shape () or (K,). One of batch_shape f.shape counts as
        independent over the last dimension."""

    def law(self, f: Tensor) -> Distribution:
        """The conditional at (B, *event): a distribution given per output is made independent over the outputs."""
        conditional = self.conditional(promote(f))
        surplus = len(conditional.batch_shape) - (f.ndim - 1)
        if surplus > 0:
            conditional = Independent(conditional, surplus)
        if conditional.batch_shape != f.shape[:-1]:
            raise UnsupportedOperation(
                f"{type(self).__name__}.conditional returned batch_shape {tuple(conditional.batch_shape)} for outputs "
                f"of shape {tuple(f.shape)}; it must be {tuple(f.shape[:-1])} (one law an item) or {tuple(f.shape)}."
            )
        return conditional

    # --- what the network and the data look like -------------------------------------------------------------------

    def outputs(self, raw: Tensor) -> Tensor:
        """f (B, *event, C) from what the network returned; (B,) becomes (B, 1), half precision becomes float32."""
        if raw.ndim == 0:
            raise BadData(
                "the network returned one number for the whole batch; it must return one row a sample, (B, C)."
            )
        return promote(raw[:, None] if raw.ndim == 1 else raw)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        """y in canonical form, checked once: shape, finite, in the support of the conditional."""
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
        """(B, *event), True where the target counts; None where all do."""
        return None

    def count(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> float:
        """Number of data: samples (not tokens), or the sum of their weights."""
        return float(f.shape[0]) if weights is None else float(weights.double().sum())

    def counted(self, f: Tensor, y: Tensor) -> Tensor:
        """(B,), True where any target of a sample counts."""
        mask = self.mask(f, y)
        return (
            torch.ones(len(f), dtype=torch.bool, device=f.device) if mask is None else mask.reshape(len(f), -1).any(1)
        )

    def doubts(self, f: Tensor, y: Tensor) -> list[str]:
        """Say what in outputs and canonical targets of a few items contradicts this likelihood, and what to pass."""
        return []

    # --- derivatives of log p(y | f) -------------------------------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f), (B, *event), 0 where the target is ignored."""
        return masked(self.law(f).log_prob(y), self.mask(f, y))

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """∇_f log p(y | f), shape of f, 0 where the target is ignored."""
        with torch.enable_grad():
            f = promote(f).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.log_prob(f, y).sum(), f)
        return gradient

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """S (B, *event, C, R) with S Sᵀ = φ·Λ; zero where the target is ignored.

        Default: Λ is the Hessian of KL(p_f₀ ‖ p_f) at f₀ where torch knows that divergence; else the sum over an
        enumerable support; else the observed Hessian of −log p(y | f), negative eigenvalues set to zero (this one
        needs y).
        """
        f = promote(f).detach()
        law = self.law(f)
        try:
            kl_divergence(law, law)
        except NotImplementedError:
            root = self._enumerated_root(f, law) if enumerable(law) else self._observed_root(f, y)
        else:
            root = psd_root(hessian(lambda g: kl_divergence(law, self.law(g)), f))
        root = root * self.dispersion.detach().to(root).sqrt()
        return masked(root, None if y is None else self.mask(f, y))

    def curvature_product(self, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """Return φΛ u for vectors u (s, B, *event, C); families with a closed form need no C × C matrix."""
        root = self.factor(f, y).to(u)
        return torch.einsum("n...cr,n...dr,sn...d->sn...c", root, root, u)

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
        """An S as `factor` gives, (B, C, R), whose first column is the score times a number of each item, and these
        numbers (B,). None where no such S is at hand: it saves a backward pass, and nothing else."""
        return None

    def _enumerated_root(self, f: Tensor, law: Distribution) -> Tensor:
        """Columns √p(y)·∇log p(y|f), one for each y of the support."""
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

    # --- draws -----------------------------------------------------------------------------------------------------

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One y ~ p(y | f) for each item."""
        return draw(self.law(f.detach()), (), generator)

    def sample_factor(self, f: Tensor, y: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """√φ·∇_f log p(ỹ | f) at a drawn target ỹ: s with E[s sᵀ] = φ·Λ. y says only which targets are ignored."""
        score = self.score(f, self.sample_target(f, generator))
        score = score * self.dispersion.detach().to(score).sqrt()
        return masked(score, None if y is None else self.mask(f, y))

    # --- the prediction --------------------------------------------------------------------------------------------

    def marginal(self, f: Outputs) -> Marginal | None:
        """∫ p(y | f) N(f) df where it is known in closed form or by quadrature in one dimension; else None."""
        return None

    # --- sums over data --------------------------------------------------------------------------------------------

    @property
    def softmax(self) -> bool:
        """Whether p(y | f) = softmax(f)_y over the last dimension of f."""
        return False

    @property
    def has_logits(self) -> bool:
        """Whether outputs are logits of labels, so that dividing them by a temperature makes sense."""
        return False

    @property
    def takes_class_indices(self) -> bool:
        """Whether a target is the index of a class, so that 3.0 read from a file means class 3."""
        return False

    @property
    def shift_invariant(self) -> bool:
        """Whether adding one number to all outputs of an item changes nothing, as under a softmax."""
        return False

    # --- the dispersion --------------------------------------------------------------------------------------------

    dispersion_name: ClassVar[str] = ""
    """What `tune(learn=...)` calls the dispersion, such as "noise"; empty where there is none to learn."""

    dispersion_unit: ClassVar[float] = 1.0
    """Users read and write the dispersion to this power: ½ for a noise that is shown as a standard deviation."""

    @property
    def dispersion(self) -> Tensor:
        """φ, 0-d: the common factor by which Λ⁻¹ scales (σ² for a Gaussian, 1 otherwise). Gradients flow."""
        return torch.ones((), dtype=torch.float64)

    def with_dispersion(self, dispersion: float | Tensor) -> Likelihood:
        """Return the same likelihood with another dispersion; gradients flow from it."""
        raise UnsupportedOperation(f"{type(self).__name__} has no noise to learn; only Gaussian(noise) has")

    def best_dispersion(self, f: Tensor, y: Tensor, held: float = 0.0) -> float:
        """Return the dispersion of the largest Σ log p(y | f), for outputs and targets without a posterior.

        `held` is the number of items that the dispersion in force counts as, so that few items cannot make it absurd.
        """
        raise UnsupportedOperation(f"{type(self).__name__} has no noise to learn; only Gaussian(noise) has")

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

    @property
    def known(self) -> bool:
        """Whether every parameter of the likelihood has a value; the noise of `Gaussian()` has none before a fit."""
        return True

    @property
    def learns_noise(self) -> bool:
        """Whether tuning learns the dispersion unless it is told what to learn."""
        return False

    def estimate(self, statistics: Tensor) -> Likelihood:
        """Estimate what is not known from the `statistics` of the data; the likelihood itself where nothing is."""
        return self

    def statistics(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """(k,) float64, additive over data, from which `log_likelihood` finds Σ log p exactly. weights: (B,)."""
        return weighted_sum(self.log_prob(f, y)[..., None], weights)

    def log_likelihood(self, statistics: Tensor) -> Tensor:
        """Σ_n log p(y_n | f_n) from `statistics`, 0-d and differentiable in the parameters of the likelihood."""
        return statistics[0]

    def flaw(self, statistics: Tensor) -> str:
        """What makes these statistics impossible, in words; empty where they may be of some data. For files."""
        own = type(self).statistics is not Likelihood.statistics
        if statistics.ndim != 1 or not (own or len(statistics) == 1):
            return f"the statistics have shape {tuple(statistics.shape)}"
        return "" if bool(self.log_likelihood(statistics).isfinite()) else "the log-likelihood is not finite"

    # --- identity --------------------------------------------------------------------------------------------------

    def same_curvature(self, other: Likelihood) -> bool:
        """Whether φ·Λ is the same function of f, so that the other may replace this one without a new fit."""
        return self is other or (type(self) is type(other) and self.spec() == other.spec() and _told(self))

    def spec(self) -> dict[str, Any]:
        """What a file stores. A user's own likelihood stores its name and options; loading asks the caller for it."""
        options = {name: _described(value) for name, value in vars(self).items()}
        return {"family": type(self).__qualname__, "own": True, "options": options}


def _described(value: Any) -> Any:
    """An option as JSON can hold it; None where it cannot be told (a function, a module)."""
    if isinstance(value, Tensor):
        return value.detach().double().tolist()
    return value if isinstance(value, bool | int | float | str) else None


def _told(likelihood: Likelihood) -> bool:
    return all(value is None or _described(value) is not None for value in vars(likelihood).values())


def promote(f: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return f.float() if f.dtype in (torch.float16, torch.bfloat16) else f


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """values (B, *event, ...) with zeros where mask (B, *event) is False, also over NaN."""
    if mask is None:
        return values
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    """(B, *event, k) -> (k,) float64: Σ_b w_b Σ_event values."""
    rows = values.double().reshape(values.shape[0], -1, values.shape[-1]).sum(1)
    if weights is None:
        return rows.sum(0)
    if weights.shape != rows.shape[:1]:
        raise BadData(f"weights of shape {tuple(weights.shape)} for {rows.shape[0]} samples: pass one a sample.")
    return weights.to(rows) @ rows


def hessian(function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """(B, *event, C, C) Hessians of an items-wise function f (B, *event, C) -> (B, *event)."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(f).sum(), f, create_graph=True)
        rows = [
            torch.autograd.grad(gradient[..., c].sum(), f, retain_graph=True, materialize_grads=True)[0]
            for c in range(f.shape[-1])
        ]
    return torch.stack(rows, -2).detach()


def psd_root(matrix: Tensor) -> Tensor:
    """S with S Sᵀ = the nearest positive semi-definite matrix, columns by decreasing norm. For small C only."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT).double() / 2)
    root = vectors * values.clamp(min=0).sqrt()[..., None, :]
    return root.flip(-1).to(matrix.dtype)


def enumerable(law: Distribution) -> bool:
    if isinstance(law, Independent):
        return law.base_dist.has_enumerate_support and law.event_shape.numel() == 1
    return law.has_enumerate_support


def draw(law: Distribution, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Samples (*shape, ...) of a torch distribution, which knows only the global state: it is set and put back."""
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
    """y as a tensor on the device of f."""
    try:
        y = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(
            f"targets are a {type(y).__name__} that is no tensor of numbers ({error}). Write classes as 0, 1, …"
        ) from error
    if y.is_sparse or y.layout is not torch.strided:
        raise BadData(f"targets are sparse ({y.layout}): pass targets.to_dense()")
    return y.to(f.device)


def match_shape(y: Tensor, shape: torch.Size, event_shape: torch.Size, name: str) -> Tensor:
    """y of exactly this shape; the last dimension may be missing where it is 1. Nothing is broadcast."""
    if event_shape == (1,) and y.shape == shape[:-1]:
        return y[..., None]
    if y.shape != shape:
        allowed = f"{tuple(shape)} or {tuple(shape[:-1])}" if event_shape == (1,) else f"{tuple(shape)}"
        raise BadData(f"targets have shape {tuple(y.shape)}, but {name} with these outputs needs {allowed}.")
    return y


def require_finite(f: Tensor, y: Tensor) -> None:
    for what, values in (("network outputs", f), ("targets", y)):
        bad = ~torch.isfinite(values)
        if bad.any():
            where = tuple(bad.nonzero()[0].tolist())
            raise BadData(
                f"{what} are not finite: {values[where].item()} at index {where} "
                f"({int(bad.sum())} of {values.numel()} values). Clean the data or the network first."
            )


def require(inside: Tensor, y: Tensor, allowed: str, hint: str = "") -> None:
    """BadData with the first offending value where `inside` (a leading part of the shape of y) is False."""
    if not inside.all():
        where = tuple((~inside).nonzero()[0].tolist())
        value = y[where]
        shown = value.item() if value.numel() == 1 else value.tolist()
        raise BadData(f"target {shown} at index {where} is outside {allowed}.{hint and ' '}{hint}")
