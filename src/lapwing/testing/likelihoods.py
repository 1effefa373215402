"""The laws of a likelihood: every answer is that of its conditional, by autograd, by sums over y and by sampling."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.distributions import Distribution, Independent, biject_to

from lapwing.errors import LapwingError, UnsupportedOperation
from lapwing.likelihoods import Likelihood, likelihood_from_spec
from lapwing.likelihoods.marginal import Marginal
from lapwing.predictive import GaussianFunction, predict_targets
from lapwing.storage import is_registered

ITEMS = 5
MOST = 40_000  # outcomes of an item that are summed over; more are sampled instead
DRAWS = 40_000
SIGMAS = 5.0  # standard errors by which an average of draws may be off


class LikelihoodLaws:
    """Test case of a likelihood: name it and say how many outputs a network has for it.

    The curvature is compared with the Fisher information, as sums over all y where these are few (counts, labels, one
    or two numbers), else by sampling. A likelihood whose `factor` needs targets is compared with the Hessian of
    −log p(y | f). What it claims (`shift_invariant`, `softmax`, a dispersion that `scales_curvature`) is checked too.

    Examples:
        >>> from lapwing.testing import LikelihoodLaws
        >>> class TestGaussian(LikelihoodLaws):
        ...     likelihood = lapwing.Gaussian(noise=0.5)
        ...     outputs = 2
    """

    likelihood: ClassVar[Likelihood]
    outputs: ClassVar[int]
    events: ClassVar[tuple[tuple[int, ...], ...]] = ((), (3,), (2, 3))
    tolerance: ClassVar[float] = 1e-6  # relative, of sums over y

    def drawn(self, event: tuple[int, ...] = (), n: int = ITEMS, dtype: torch.dtype = torch.float64) -> tuple:
        """Return outputs f (n, *event, C) and canonical targets drawn from the conditional."""
        generator = torch.Generator().manual_seed(0)
        f = torch.randn(n, *event, self.outputs, generator=generator, dtype=torch.float64).to(dtype)
        return f, self.likelihood.targets(f, self.likelihood.sample_target(f, generator))

    def test_log_prob_is_that_of_the_conditional(self) -> None:
        for event in self.events:
            f, y = self.drawn(event)
            found = self.likelihood.log_prob(f, y)
            assert found.shape == f.shape[:-1]
            torch.testing.assert_close(found, self.likelihood.law(f).log_prob(y))

    def test_score_is_the_gradient(self) -> None:
        for event in self.events:
            f, y = self.drawn(event)
            torch.testing.assert_close(self.likelihood.score(f, y), self._score(f, y))

    def test_factor_is_the_information(self) -> None:
        """S Sᵀ = φ E[∇ log p ∇ log pᵀ] = φ E[−∇² log p], or φ times the observed Hessian where S needs targets."""
        f, y = self.drawn()
        phi = self.likelihood.common_factor.detach()
        if not self.expected:
            S = self.likelihood.factor(f, y)
            for n in range(len(f)):
                truth = phi * hessian(lambda g, n=n: -self._log_prob(g[None], y[n : n + 1]).sum(), f[n])
                values, vectors = torch.linalg.eigh(truth)
                self._close(S[n] @ S[n].T, (vectors * values.clamp(min=0)) @ vectors.T)
            return
        S = self.likelihood.factor(f)
        for n in range(2):
            found = self.outcomes(f[n])
            if found is None:
                continue
            targets, weights = found
            scores = self._score(f[n].expand(len(targets), -1), targets)
            self._close(S[n] @ S[n].T, phi * (weights[:, None] * scores).T @ scores)

            def risk(g: Tensor, targets: Tensor = targets, weights: Tensor = weights) -> Tensor:
                return -(weights * self._log_prob(g.expand(len(targets), -1), targets)).sum()

            self._close(S[n] @ S[n].T, phi * hessian(risk, f[n]))

    def test_factor_of_events_is_that_of_items(self) -> None:
        for event in self.events:
            f, y = self.drawn(event)
            S = self.likelihood.factor(f, y)
            assert S.shape[:-1] == f.shape
            flat, targets = f.reshape(-1, self.outputs), y.reshape(-1, *y.shape[f.ndim - 1 :])
            each = [self.likelihood.factor(flat[i : i + 1], targets[i : i + 1]) for i in range(len(flat))]
            whole = (S @ S.mT).reshape(-1, self.outputs, self.outputs)
            torch.testing.assert_close(whole, torch.cat([s @ s.mT for s in each]))

    def test_products_with_the_information(self) -> None:
        """`curvature_product`, `root_noise` and `smooth_factor` belong to the same S Sᵀ as `factor`."""
        for event in self.events:
            f, y = self.drawn(event)
            S, smooth = self.likelihood.factor(f, y), self.likelihood.smooth_factor(f, y)
            u = torch.randn(2, *f.shape, generator=torch.Generator().manual_seed(1), dtype=f.dtype)
            image = torch.einsum("n...cd,sn...d->sn...c", S @ S.mT, u)
            torch.testing.assert_close(self.likelihood.curvature_product(f, y, u), image)
            torch.testing.assert_close(smooth @ smooth.mT, S @ S.mT)
        f, y = self.drawn(n=2)
        noise = self.likelihood.root_noise(f, y, DRAWS, torch.Generator().manual_seed(2))
        S = self.likelihood.factor(f, y)
        self._estimates(torch.einsum("snc,snd->sncd", noise, noise), S @ S.mT)

    def test_sampled_factor_estimates_the_factor(self) -> None:
        if not self.expected:
            return
        f, _ = self.drawn(n=2)
        many = f[:, None].expand(-1, DRAWS, -1)
        s = self.likelihood.sample_factor(many, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
        S = self.likelihood.factor(f)
        self._estimates(s[..., :, None] * s[..., None, :], S @ S.mT)

    def test_what_it_claims_about_outputs(self) -> None:
        f, y = self.drawn()
        if self.likelihood.shift_invariant:
            torch.testing.assert_close(self.likelihood.log_prob(f + 3.0, y), self.likelihood.log_prob(f, y))
        if self.likelihood.softmax:
            logs = f.log_softmax(-1).gather(-1, y[..., None])[..., 0]
            torch.testing.assert_close(self.likelihood.log_prob(f, y), logs)

    def test_draws_follow_the_generator(self) -> None:
        f, _ = self.drawn((3,))
        before = torch.get_rng_state()
        draws = [self.likelihood.sample_target(f, torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        assert torch.equal(before, torch.get_rng_state())
        law = self.likelihood.law(f[:1])
        if _has_moments(law):
            many = self.likelihood.sample_target(f[:1].expand(DRAWS, 3, -1), torch.Generator().manual_seed(3))
            assert ((many.mean(0) - law.mean[0]).abs() <= SIGMAS * law.stddev[0] / math.sqrt(DRAWS)).all()

    def test_statistics_give_the_log_likelihood(self) -> None:
        likelihood, weights = self.likelihood, torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
        for event in self.events:
            f, y = self.drawn(event)
            item = likelihood.law(f).log_prob(y).reshape(ITEMS, -1).sum(1)
            total = likelihood.statistics(f, y)
            assert total.dtype == torch.float64
            assert total.ndim == 1
            torch.testing.assert_close(likelihood.log_likelihood(total), item.sum())
            weighted = likelihood.log_likelihood(likelihood.statistics(f, y, weights))
            torch.testing.assert_close(weighted, (weights * item).sum())
            parts = likelihood.statistics(f[:2], y[:2]) + likelihood.statistics(f[2:], y[2:])
            torch.testing.assert_close(parts, total)
            assert likelihood.flaw(total) == ""
        assert likelihood.count(f, y) == ITEMS
        assert likelihood.count(f, y, weights) == 4.5
        _refuses(lambda: likelihood.statistics(f, y, torch.ones(3)), "one per sample")

    def test_dtype_follows_outputs(self) -> None:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            f, y = self.drawn(dtype=dtype)
            want = dtype if dtype in (torch.float64, torch.float32) else torch.float32
            f = self.likelihood.outputs(f)
            assert f.dtype == want
            for value in (self.likelihood.log_prob(f, y), self.likelihood.score(f, y), self.likelihood.factor(f, y)):
                assert value.dtype == want
                assert value.isfinite().all()
            assert self.likelihood.sample_factor(f, y, torch.Generator().manual_seed(0)).dtype == want
            assert self.likelihood.statistics(f, y).dtype == torch.float64

    def test_targets_are_checked(self) -> None:
        f, y = self.drawn()
        torch.testing.assert_close(self.likelihood.targets(f, y), y)
        _refuses(lambda: self.likelihood.targets(f, y[:-1]), "shape")
        _refuses(lambda: self.likelihood.targets(f, torch.full(y.shape, torch.nan)), "nan at index")
        broken = f.clone()
        broken[3, 0] = torch.inf
        _refuses(lambda: self.likelihood.targets(broken, y), "outputs are not finite: inf at index (3, 0)")

    def test_another_dispersion_is_another_likelihood(self) -> None:
        if not self.likelihood.dispersion_name:
            return
        f, y = self.drawn()
        likelihood, statistics = self.likelihood, self.likelihood.statistics(f, y)
        for ratio in (0.3, 1.0, 4.0):
            phi = ratio * likelihood.dispersion.detach()
            other = likelihood.with_dispersion(phi)
            torch.testing.assert_close(other.dispersion, phi)
            torch.testing.assert_close(other.log_likelihood(statistics), other.log_prob(f, y).double().sum())
            shown = float(phi) ** other.shown_as[1]
            assert math.isclose(other.dispersion_from(shown), float(phi), rel_tol=1e-9)
            if likelihood.scales_curvature:
                ours, theirs = likelihood.factor(f, y), other.factor(f, y)
                torch.testing.assert_close(
                    theirs @ theirs.mT,
                    ours @ ours.mT,
                    msg=lambda text: f"scales_curvature is True, but `factor` depends on the dispersion: {text}",
                )
                assert likelihood.same_curvature(other)
        free = likelihood.dispersion.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(likelihood.with_dispersion(free).log_likelihood(statistics), free)
        (truth,) = torch.autograd.grad(likelihood.with_dispersion(free).log_prob(f, y).double().sum(), free)
        torch.testing.assert_close(slope, truth, rtol=1e-5, atol=1e-6)

    def test_the_best_dispersion_is_the_most_likely_one(self) -> None:
        if not self.likelihood.dispersion_name:
            return
        f, y = self.drawn(n=200)
        best = self.likelihood.best_dispersion(f, y)
        top = self.likelihood.with_dispersion(best).log_prob(f, y).double().sum()
        for ratio in (0.9, 0.99, 1.01, 1.1):
            assert self.likelihood.with_dispersion(ratio * best).log_prob(f, y).double().sum() <= top + 1e-6

    def test_predictions_are_averages_over_f(self) -> None:
        """Mean and variance of y (or class probabilities) for Gaussian f, against draws of f."""
        generator = torch.Generator().manual_seed(4)
        f, _ = self.drawn(n=3)
        root = 0.4 * torch.randn(3, self.outputs, self.outputs, generator=generator, dtype=torch.float64)
        prediction = predict_targets(GaussianFunction(f, root @ root.mT), self.likelihood)
        noise = torch.randn(DRAWS, 3, self.outputs, generator=generator, dtype=torch.float64)
        drawn = f + (noise[..., None, :] @ root.mT)[..., 0, :]
        law = self.likelihood.law(drawn)
        if _has_moments(law):
            self._estimates(law.mean, prediction.mean.reshape(law.mean.shape[1:]), slack=5e-3)
            second = law.variance + (law.mean - law.mean.mean(0)).square()
            if prediction.kind == "numbers":
                self._estimates(second, prediction.total.reshape(second.shape[1:]), slack=5e-3)
        y = self.likelihood.targets(f, self.likelihood.sample_target(f, generator))
        densities = self.likelihood.log_prob(drawn, y.expand(DRAWS, *y.shape)).exp()
        self._estimates(densities, prediction.log_prob(y).exp(), slack=5e-3 * float(densities.mean(0).max()))

    def test_marginals_are_distributions(self) -> None:
        """Where there is a closed form: quantiles invert the distribution function, which is that of draws of y."""
        f, _ = self.drawn(n=3)
        generator = torch.Generator().manual_seed(5)
        covariance = 0.1 * torch.eye(self.outputs, dtype=torch.float64).expand(3, -1, -1)
        marginal = self.likelihood.marginal(GaussianFunction(f, covariance))
        if not isinstance(marginal, Marginal):
            return
        noise = torch.randn(DRAWS, 3, self.outputs, generator=generator, dtype=torch.float64)
        y = self.likelihood.sample_target(f + math.sqrt(0.1) * noise, generator)
        for level in (0.1, 0.5, 0.9):
            at = marginal.quantile(level)
            share = marginal.cdf(at)
            assert (share >= level - 1e-6).all()
            below = (y <= at).double()
            self._estimates(below, share.reshape(below.shape[1:]), slack=1e-6)

    def test_spec_survives_json(self) -> None:
        likelihood = self.likelihood
        spec = json.loads(json.dumps(likelihood.spec()))
        assert likelihood.same_curvature(likelihood)
        if not is_registered(type(likelihood)):
            _refuses(lambda: likelihood_from_spec(spec), "likelihood=")
            assert likelihood_from_spec(spec, likelihood) is likelihood
            return
        f, y = self.drawn()
        again = likelihood_from_spec(spec)
        assert type(again) is type(likelihood)
        assert again.spec() == likelihood.spec()
        assert again.same_curvature(likelihood)
        torch.testing.assert_close(again.log_prob(f, y), likelihood.log_prob(f, y))

    def test_it_cannot_be_changed(self) -> None:
        for name in ("noise", *vars(self.likelihood)):
            try:
                setattr(self.likelihood, name, 3.0)
            except AttributeError:
                continue
            raise AssertionError(f"{name} could be changed: use @dataclass(frozen=True, eq=False)")
        assert copy.deepcopy(self.likelihood).spec() == self.likelihood.spec()

    @property
    def expected(self) -> bool:
        """Whether `factor` gives the Fisher information, which needs no targets."""
        try:
            self.likelihood.factor(self.drawn(n=1)[0])
        except UnsupportedOperation:
            return False
        return True

    def outcomes(self, f: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return targets and weights with Σ w g(y) = E[g(y) | f] for one item f (C,); None where they are too many."""
        law = self.likelihood.law(f[None])
        inner = law.base_dist if isinstance(law, Independent) else law
        count = law.event_shape.numel()
        discrete = inner.support is not None and inner.support.is_discrete
        rules = _discrete(inner) if discrete else _continuous(inner)  # (m, count) and weights
        if len(rules[0]) ** count > MOST:
            return None
        values, weights = (part.reshape(len(part), -1) for part in rules)
        places = torch.cartesian_prod(*[torch.arange(len(values))] * count).reshape(-1, count)
        y = torch.stack([values[places[:, k], k] for k in range(count)], -1)
        mass = torch.stack([weights[places[:, k], k] for k in range(count)], -1).prod(-1)
        y = y if law.event_shape else y[:, 0]
        return (y.long() if self.likelihood.takes_class_indices else y), mass

    def _log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.likelihood.law(f).log_prob(y)

    def _score(self, f: Tensor, y: Tensor) -> Tensor:
        f = f.detach().requires_grad_()
        return torch.autograd.grad(self._log_prob(f, y).sum(), f)[0]

    def _close(self, found: Tensor, truth: Tensor) -> None:
        torch.testing.assert_close(found, truth, rtol=self.tolerance, atol=1e-2 * self.tolerance)

    def _estimates(self, draws: Tensor, value: Tensor, slack: float = 1e-12) -> None:
        """Check that `value` is the mean of draws (n, ...), up to a few standard errors."""
        error = draws.std(0) / math.sqrt(len(draws))
        off = (draws.mean(0) - value).abs()
        assert (off <= SIGMAS * error + slack * (1 + value.abs())).all(), f"off by {off} at a standard error of {error}"


def _refuses(action: Callable[[], Any], words: str) -> None:
    """Check that an action raises an error of Lapwing with these words."""
    said = "nothing"
    try:
        action()
    except LapwingError as error:
        said = str(error)
    assert words in said, f"expected an error that says {words!r}, got: {said}"


def _has_moments(law: Distribution) -> bool:
    """Whether mean and variance of a law are numbers, which those of classes are not."""
    try:
        return bool(law.mean.isfinite().all() & law.variance.isfinite().all())
    except NotImplementedError:
        return False


def _discrete(law: Distribution) -> tuple[Tensor, Tensor]:
    """Return the values of a discrete law that have any weight, (m, *shape), and these weights."""
    if law.has_enumerate_support:
        values = law.enumerate_support(expand=True).double()
    else:
        most = int((law.mean + 40 * law.stddev + 40).max())
        values = torch.arange(most, dtype=torch.float64).reshape(-1, *(1,) * len(law.batch_shape))
        values = values.expand(-1, *law.batch_shape)
    weights = law.log_prob(values).exp()
    seen = weights.reshape(len(weights), -1).amax(1) > 1e-14
    return values[seen], weights[seen]


def _continuous(law: Distribution) -> tuple[Tensor, Tensor]:
    """Return nodes of a continuous law and their weights: the trapezoidal rule after a double exponential change."""
    u = torch.linspace(-4.0, 4.0, 161, dtype=torch.float64).reshape(-1, *(1,) * len(law.batch_shape))
    to = biject_to(law.support)
    like = law.sample((4000,)).double()
    unbounded = to.inv(like)
    center, width = unbounded.median(0).values, unbounded.std(0).clamp(max=3.0)
    z = center + width * u.sinh()
    y = to(z)
    logs = law.log_prob(y) + to.log_abs_det_jacobian(z, y) + (width * u.cosh()).log() + math.log(8 / 160)
    return y, logs.exp()
