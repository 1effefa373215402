"""The Laplace object: a fitted posterior, and everything one does with it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lapwing.curvature import Curvature, extend_curvature, pose
from lapwing.curvature.matrixfree import moved as sent
from lapwing.curvature.shards import filled, require_one_process, require_same, sharded, together
from lapwing.errors import BadData, IncompatiblePrior, UnsupportedOperation, require_whole
from lapwing.evaluation.curves import TemperatureCurve, temperature_curve
from lapwing.evidence import (
    Groups,
    Rule,
    Tuning,
    check_logit_temperature,
    collect,
    effective_parameters,
    keep_if_shown,
    linked,
    log_evidence,
    nodes_for,
    resolve_rule,
    stationarity,
    tune_bound,
    tune_evidence,
    tune_grid,
    tune_loo,
    tune_validation,
    variational_bound,
)
from lapwing.evidence.linear_mode import LinearMode, LinearModel, linear_mode
from lapwing.interfaces.storage import write
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.linalg import PSD, Diagonal, Jacobian, move
from lapwing.linalg.generators import require_generator
from lapwing.linalg.operator import Operator
from lapwing.model import Batches, Network, Params, Plan, batch_size, tensors_in
from lapwing.model.batches import Batch, Inputs, as_tensors, detached
from lapwing.model.convention import Convention
from lapwing.model.fingerprint import Watch
from lapwing.model.module import outside_inference
from lapwing.model.products import Products
from lapwing.posterior import (
    Posterior,
    Prior,
    Tempered,
    factored_precision,
    make_posterior,
    resolve_prior,
    resolve_temperature,
)
from lapwing.predictive import Prediction, predict_targets
from lapwing.predictive.lastlayer import LastLayer, last_layer_of
from lapwing.predictive.linearized import CLOSED_FORM, Linearized
from lapwing.predictive.novelty import information_bound, information_gain, novelty_precision
from lapwing.predictive.predictor import Predictor, export
from lapwing.predictive.sampled import Ensemble, sampled_function, warn_of_collapse
from lapwing.summary import summary

TEMPERATURES = tuple(10 ** (k / 2) for k in range(-4, 9))  # of a curve
INTERPOLATES = (
    "with more weights than data a network interpolates, and the evidence then tends to pick too small a prior "
    "precision; check on held-out data"
)
LOO_DATA = 1000  # training data that tuning without held-out data compares on
JVP_DRAWS = 16  # for link="jvp": eight products and their mirror images
SAMPLED_DRAWS = 50  # networks in method="sampled" (Generalized Laplace uses as many)


@dataclass(frozen=True, eq=False)
class Options:
    """How a fit was asked to run, kept for what follows it."""

    memory: int
    split: Any = None
    progress: bool | None = None
    scalar: bool = False  # the network returns (B,)
    convention: Convention = field(default_factory=Convention)  # how the batches of the fit were read
    data: Any = field(default=None, repr=False)  # the training data, where they can be read again


@dataclass(frozen=True, eq=False)
class Laplace:
    """A posterior over the selected weights of a trained network: N(θ̂, (T/φ·H + Π)⁻¹). Made by `lapwing.fit`.

    Nothing here changes: `replace`, `tune`, `update` and `damping` return new objects and, but for `update`, read no
    training data.
    """

    network: Network
    curvature: Curvature
    likelihood: Likelihood
    prior: Prior
    temperature: Tempered
    options: Options
    plan: Plan | None = None
    tuning: Tuning | None = None
    damped: bool = False
    repair: bool = False
    logit_temperature: float = 1.0  # logits are divided by it before the link
    tuned: str = ""  # how prior, temperature and noise were chosen, in a line
    watch: Watch | None = field(default=None, repr=False)  # what the module was like at the fit
    _plans: dict[str, Plan] = field(default_factory=dict, repr=False)  # the plan, once inputs were seen

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        """Names, sizes and values of the selected parameters."""
        return self.network.params

    @property
    def module(self) -> nn.Module:
        """The network itself."""
        return self.network.module

    @property
    def n_data(self) -> float:
        """The size of the data set that the curvature stands for."""
        return self.curvature.n_data

    @property
    def log_likelihood(self) -> Tensor:
        """Σ log p(y | f̂) of the training data under the current noise."""
        return self.likelihood.log_likelihood(self.curvature.statistics)

    @cached_property
    def _resolved_prior(self) -> tuple[Tensor, PSD]:
        params = self.params
        return self.prior.resolve(params.names, params.sizes, torch.float64, params.device, index=params.index)

    @cached_property
    def _prior_in_use(self) -> tuple[Tensor, PSD]:
        """The prior with what `repair` had to add to its precision."""
        mean, matrix = self._resolved_prior
        increase = self.posterior.increase if self.repair and not self.damped else 0.0
        if not increase:
            return mean, matrix
        added = torch.full((self.params.size,), increase, dtype=torch.float64, device=self.params.device)
        return mean, matrix + Diagonal(added / self.temperature.prior_scale)

    @property
    def _scale(self) -> Tensor:
        return self.temperature.likelihood_scale(self.likelihood.dispersion, self.curvature.dispersion_power)

    @property
    def _split(self) -> float | None:
        """√n of factored damping, None without."""
        return max(self.curvature.n_data, 1.0) ** 0.5 if self.damped else None

    @cached_property
    def posterior(self) -> Posterior:
        """N(θ̂, Σ): `.mean`, `.precision`, `.sample(n)`, `.log_prob(theta)`, `.variance`, `.covariance()`."""
        prior = self._resolved_prior[1]
        if self.temperature.prior:
            prior = prior.scale(self.temperature.prior_scale)
        if self.damped:
            precision = factored_precision(self.curvature.matrix, self._scale, prior, split=self._split or 1.0)
            return Posterior(self.params.flat, precision)
        return make_posterior(self.params.flat, self.curvature.matrix, self._scale, prior, repair=self.repair)

    @property
    def _certain(self) -> bool:
        """Whether any structure has this posterior: a sum of squares and one precision for all weights."""
        matrix = self._resolved_prior[1]
        tau = matrix.constant() if matrix.expanded else None
        return tau is not None and bool(tau > 0) and not self.repair and self.curvature.factor.definite

    # --- evidence --------------------------------------------------------------------------------------------------

    @outside_inference
    def log_evidence(self, at: str = "map", *, data: Any = None) -> Tensor:
        """log p(D) under the Laplace approximation, a 0-d float64 tensor, differentiable in prior and noise.

        At T ≠ 1 it is that of the tempered likelihood. `at="linear-mode"` moves to the mode of the linearized model,
        for networks that were not trained to the mode of this very prior: by one step of Newton in the stored
        curvature, or, with the training `data`, by Jacobian products until it is reached (`linear_mode`; no gradients).
        """
        if at == "linear-mode" and data is not None:
            return self.log_evidence() - self._log_joint + self.linear_mode(data).log_joint
        return log_evidence(
            self.curvature,
            self._prior_in_use,
            self.likelihood,
            mean=self.params.flat,
            temperature=self.temperature,
            at=at,
        )

    @property
    def _log_joint(self) -> Tensor:
        """T·log p(D|θ̂) − ½(θ̂−μ₀)ᵀΠ(θ̂−μ₀)."""
        mean, matrix = self._prior_in_use
        offset = self.params.flat.double() - mean
        scale = self.temperature.prior_scale
        return self.temperature.T * self.log_likelihood - 0.5 * scale * (offset * matrix.matvec(offset)).sum()

    @outside_inference
    def linear_mode(self, data: Any) -> LinearMode:
        """The mode θ̄ of the linearized model f̂ + J(θ − θ̂) under this prior, from the training data.

        la.linear_mode(train_loader).weights
        """
        require_one_process("linear_mode")
        self._require_unchanged()
        mean, matrix = self._prior_in_use
        batches = self.batches(data)
        batches.require_reiterable("the mode of the linearized model")
        model = LinearModel(
            Products(self.network, batches, self.options.progress),
            self.likelihood,
            float(self.temperature.T) * self.curvature.n_data / self.curvature.seen,
            self.params.flat.double() - mean,
            matrix.scale(self.temperature.prior_scale),
        )
        return linear_mode(model, self.params.flat, self.posterior.precision)

    @property
    @outside_inference
    def effective_parameters(self) -> float:
        """γ = tr(c·H (c·H + Π)⁻¹): how many directions the data, not the prior, determine."""
        return effective_parameters(self.curvature, self._prior_in_use, self.likelihood, temperature=self.temperature)

    @property
    @outside_inference
    def stationarity(self) -> float:
        """½gᵀΣg in nats: what the log joint would gain by moving to the mode of the linearized model."""
        return stationarity(
            self.curvature,
            self._prior_in_use,
            self.likelihood,
            mean=self.params.flat.double(),
            temperature=self.temperature,
        )

    # --- changes ---------------------------------------------------------------------------------------------------

    @outside_inference
    def replace(
        self,
        *,
        prior: Any = None,
        temperature: float | Tensor | Tempered | None = None,
        likelihood: str | Likelihood | None = None,
        logit_temperature: float | None = None,
        repair: bool | None = None,
    ) -> Laplace:
        """Another prior, temperature or noise on the same curvature; no data pass.

        `likelihood` may differ in a common factor of its noise only: other ratios between outputs, another family or
        other options change the curvature and need a new fit. "regression" estimates the noise from the residuals of
        the fit. `logit_temperature` divides the logits before they become probabilities: temperature scaling on top of
        the posterior. `repair=True` raises the prior precision by the smallest sufficient amount where the posterior
        would not be positive definite, and `summary()` reports it.
        """
        changes: dict[str, Any] = {}
        if prior is not None:
            changes["prior"] = resolve_prior(prior)
        if temperature is not None:
            changes["temperature"] = resolve_temperature(temperature)
        if likelihood is not None:
            new = resolve_likelihood(likelihood)
            if not new.known and type(new) is type(self.likelihood):
                new = new.estimate(self.curvature.statistics)
            if not self.likelihood.same_curvature(new):
                raise UnsupportedOperation(
                    f"{new} gives another curvature than {self.likelihood}, on which this was fitted: only a common "
                    "factor of a Gaussian's noise is free. Fit again with the new likelihood."
                )
            changes["likelihood"] = new
        if logit_temperature is not None:
            changes["logit_temperature"] = check_logit_temperature(logit_temperature, self.likelihood)
        if repair is not None:
            changes["repair"] = repair
        replaced = replace(self, **changes)
        mean, matrix = replaced._resolved_prior
        if not (mean.requires_grad or matrix.diagonal().requires_grad or replaced._certain):
            _ = replaced.posterior  # refuse now what has no posterior
        return replaced

    @outside_inference
    def damping(self, kind: str) -> Laplace:
        """Kronecker posteriors: "exact" adds τI to G ⊗ A, "factored" damps each factor (Ritter et al., Eq. 9).

        A view of the posterior for prediction and sampling; held-out data tune the view (`la.damping("factored")
        .tune(val)`), while the evidence always uses the exact sum.
        """
        if kind not in ("exact", "factored"):
            raise UnsupportedOperation(f"damping is 'exact' or 'factored', got {kind!r}")
        damped = replace(self, damped=kind == "factored")
        _ = damped.posterior  # refuse now what is not Kronecker
        return damped

    @outside_inference
    @together()
    def update(self, data: Any, *, generator: torch.Generator | None = None) -> Laplace:
        """Add data to the curvature: as if fitted on the union (diag, blockdiag, kron, full).

        EKFAC keeps the eigenbasis of the first fit and adds exact second moments in it; low rank keeps what its rank
        can hold. n_data grows by the number of new data. A noise that the fit estimated and nobody tuned is estimated
        again from all residuals, the ratios between outputs kept.
        """
        self._require_unchanged()
        require_generator(generator, self.params.device)
        batches = filled(self.batches(data))
        if sharded():
            require_same({"model": repr(self.watch and self.watch.sums), "curvature": self._fingerprint()})
        problem = pose(
            self.network,
            batches,
            self.likelihood,
            self.curvature.factor,
            generator=generator,
            memory=self.options.memory,
            progress=self.options.progress,
        )
        curvature = extend_curvature(problem, self.curvature)
        likelihood = self.likelihood if self.tuned else self.likelihood.estimate(curvature.statistics)
        return replace(self, curvature=curvature, likelihood=likelihood, plan=problem.plan, _plans={})

    def _fingerprint(self) -> str:
        """A text that tells two curvatures apart."""
        curvature = self.curvature
        numbers = [curvature.n_data, curvature.seen, *curvature.statistics.reshape(-1).tolist()]
        return f"{curvature.structure!r} {curvature.factor!r} {numbers} {float(curvature.matrix.diagonal().sum())}"

    def to(self, device: torch.device | str) -> Laplace:
        """The same posterior on another device, module included in what is *read*, so move the module first."""
        params = self.params
        moved = Params(
            params.names,
            tuple(v.to(device) for v in params.values),
            None if params.index is None else params.index.to(device),
        )
        network, matrix = replace(self.network, params=moved), self.curvature.matrix
        curvature = replace(
            self.curvature,
            matrix=sent(matrix, network, device) if isinstance(matrix, Operator) else move(matrix, device),
            statistics=self.curvature.statistics.to(device),
            gradient=None if self.curvature.gradient is None else self.curvature.gradient.to(device),
            state={k: v.to(device) for k, v in self.curvature.state.items()},
            params=moved,
        )
        watch = None if self.watch is None else self.watch.to(device)
        return replace(self, network=network, curvature=curvature, watch=watch, plan=None, _plans={})

    # --- prediction ------------------------------------------------------------------------------------------------

    @outside_inference
    def predict(
        self,
        x: Inputs,
        *,
        method: str = "linearized",
        link: str = "auto",
        samples: int | None = None,
        joint: bool = False,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The predictive distribution at inputs x: a tensor, a tuple called as model(*x), or a dict.

        `method="linearized"` uses f̂ + J(θ − θ̂), in closed form or by `samples` forward-mode products where outputs
        are many; "sampled" runs the network at `samples` drawn weights. `link` turns f into probabilities: "auto" takes
        what is exact or nearly so, else Monte Carlo; "probit", "bridge", "mc" insist; "jvp" is Monte Carlo by
        forward-mode products and their mirror images, without covariances however few the outputs: about `samples`
        forward passes, and coarse. `joint=True` keeps the covariance between inputs, `differentiable=True` the
        gradients with respect to x. Without a generator, results are the same at every call and whatever the batch.
        With a logit temperature s, `function` is that of f/s.

            p = la.predict(x);  p.probs, p.entropy, p.epistemic
        """
        self._require_unchanged()
        require_generator(generator, self.params.device)
        inputs = self._inputs(x)
        if samples is not None and not (isinstance(samples, int) and samples > 0):
            raise BadData(f"samples is a positive whole number, got {samples!r}")
        with self.network.explaining(inputs):
            return self._predicted(inputs, method, link, samples, joint, differentiable, generator)

    def _predicted(
        self,
        inputs: Inputs,
        method: str,
        link: str,
        samples: int | None,
        joint: bool,
        differentiable: bool,
        generator: torch.Generator | None,
    ) -> Prediction:
        if method == "sampled":
            if joint:
                raise UnsupportedOperation("joint=True needs method='linearized': weight samples are joint already")
            draws = self._draws(samples or SAMPLED_DRAWS, generator)
            function: Any = sampled_function(self.network, draws, inputs, differentiable)
            warn_of_collapse(self.network, self.likelihood, function, inputs)
            link = "mc" if link == "auto" else link
        elif method == "linearized":
            by_draws = link == "jvp"
            if by_draws and (joint or differentiable or "mc" not in self.likelihood.links):
                raise UnsupportedOperation(
                    'link="jvp" is for likelihoods with Monte Carlo predictions ("mc"), without joint=True and '
                    "differentiable=True"
                )
            layer = None if joint or differentiable or by_draws else self._last_layer
            if layer is not None:
                self.network.require_apart(inputs)
                with torch.no_grad():
                    f, a = layer(inputs)
                function = layer.function(f, a, self.likelihood.shift_invariant)
            else:
                function = self._linearized(inputs).function(
                    inputs, joint=joint, differentiable=differentiable, by_draws=by_draws
                )
            if by_draws:
                link, samples = "mc", samples or JVP_DRAWS
        else:
            raise UnsupportedOperation(f"method is 'linearized' or 'sampled', got {method!r}")
        return predict_targets(
            function if self.logit_temperature == 1.0 else function.scaled(1 / self.logit_temperature),
            self.likelihood,
            link=link,
            samples=samples,
            novelty=lambda: self._novelty(inputs, function.mean),
            scalar=self.options.scalar,
            shifted=bool(self.options.convention.shifted),
            generator=generator,
        )

    @outside_inference
    def predictor(self, *outputs: str, samples: int | None = None) -> Predictor:
        """Predictions as a plain `nn.Module` that no longer needs this object, for posteriors over the last layer.

        `forward(x)` returns a dict of tensors, one per name of `outputs`: attributes of `Prediction` such as "probs",
        "mean", "variance", "epistemic", "aleatoric", "entropy", "novelty". Without names: "probs" and "epistemic", or
        "mean" and "variance" for numbers. It is thread-safe, holds its own copy of the weights and can be compiled and
        exported (`la.export`).

            predictor = la.predictor("probs", "epistemic");  predictor(x)["probs"]
        """
        self._require_unchanged()
        layer = self._last_layer
        if layer is None:
            raise UnsupportedOperation(
                "a predictor is for a posterior over the linear layer that produces the outputs as they are: fit with "
                "select='last_layer', or use la.predict(x)"
            )
        names = outputs or (("probs", "epistemic") if self.likelihood.has_logits else ("mean", "variance"))
        return Predictor(
            layer,
            self.likelihood,
            names,
            novelty=self._novelty_layer if "novelty" in names else None,
            logit_temperature=self.logit_temperature,
            scalar=self.options.scalar,
            samples=samples,
        )

    def export(
        self, path: str | Path, example: Any, *, outputs: Sequence[str] = (), samples: int | None = None
    ) -> None:
        """Write `la.predictor(*outputs)` as a file: `.pt2` (`torch.export`) or `.onnx`, with a dynamic batch dimension.

        The file needs neither Lapwing nor the network's class to run. `example` is an input of at least two items.

            la.export("model.pt2", x[:2], outputs=("probs", "epistemic"))
        """
        export(self.predictor(*outputs, samples=samples), path, example)

    def predict_loader(self, data: Any, **options: Any) -> Iterator[Prediction]:
        """One prediction a batch, in order. Batches may be inputs alone or come with targets, which are left unread."""
        batches = self.batches(data)
        for inputs in batches.unlabeled():
            yield self.predict(inputs, **options)

    @outside_inference
    def ensemble(self, n: int, generator: torch.Generator | None = None) -> Ensemble:
        """n fixed weight samples as n networks: the same ones at every input."""
        self._require_unchanged()
        require_whole("the number of members of an ensemble", n)
        draws = self._draws(n, generator)
        return Ensemble(
            self.network,
            self.likelihood,
            draws,
            self.options.scalar,
            self.watch,
            self.logit_temperature,
            self._inputs,
            bool(self.options.convention.shifted),
        )

    def batches(self, data: Any) -> Batches:
        """Data as batches, read as those of the fit were."""
        options = self.options
        return Batches(data, self.module, self.params.device, options.split, options.convention)

    def _inputs(self, x: Inputs) -> Inputs:
        """Inputs as the fit used them: without what it took as targets, on its device, in a dtype the network takes."""
        x = as_tensors(x)
        x = self.options.convention.inputs_of(x) if isinstance(x, Mapping) else x
        if not any(True for _ in tensors_in(x)):
            raise BadData(
                f"expected a tensor, a tuple of tensors or a dict of tensors to predict, got {type(x).__name__}"
            )
        x = self.batches(()).placed(x)
        if batch_size(x) == 0:
            raise BadData("the batch to predict is empty")
        for tensor in tensors_in(x):
            if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
                where = tuple((~tensor.isfinite()).nonzero()[0].tolist())
                raise BadData(f"the inputs hold {tensor[where].item()} at index {where}")
        self.network.settle(x)
        return x

    def _draws(self, n: int, generator: torch.Generator | None) -> Tensor:
        generator = torch.Generator(self.params.device).manual_seed(0) if generator is None else generator
        return self.posterior.sample(n, generator)

    def _linearized(self, inputs: Inputs) -> Linearized:
        return Linearized(
            self.network,
            self._plan_for(inputs),
            self.posterior.precision,
            self._draws,
            self.options.memory,
            shift_invariant=self.likelihood.shift_invariant,
        )

    @cached_property
    def _last_layer(self) -> LastLayer | None:
        """The short path of predictions, where the posterior is one over the layer that produces the outputs."""
        probe = self.watch.probe if self.watch is not None else None
        example = probe.inputs if probe is not None else None
        return last_layer_of(self.network, self.posterior.precision, self.options.memory, example)

    @cached_property
    def _novelty_layer(self) -> LastLayer | None:
        layer, precision = self._last_layer, novelty_precision(self.curvature.matrix)
        return None if layer is None else layer.under(precision, self.options.memory)

    def _plan_for(self, inputs: Inputs) -> Plan:
        if self.plan is not None:
            return self.plan
        if "plan" not in self._plans:
            with self.network.borrow():
                self._plans["plan"] = self.network.plan(detached(inputs))
        return self._plans["plan"]

    def _novelty(self, inputs: Inputs, mean: Tensor) -> Tensor:
        mean = mean.detach()
        at = replace(self._linearized(inputs), precision=novelty_precision(self.curvature.matrix))
        if mean.shape[-1] > CLOSED_FORM:
            return information_bound(mean, at.variance(inputs, mean, at.precision), self.likelihood)
        return information_gain(mean, at.covariance(inputs, mean, contrast=at.shift_invariant), self.likelihood)

    def _require_unchanged(self) -> None:
        if self.watch is not None:
            self.watch.require_unchanged(self.module, self.params)

    # --- tuning ----------------------------------------------------------------------------------------------------

    @outside_inference
    def tune(
        self,
        data: Any = None,
        *,
        method: str = "auto",
        learn: str | Sequence[str] | None = None,
        prior: str = "scalar",
        grid: Mapping[str, Sequence[float]] | None = None,
        rule: str | Rule = "widest",
        link: str = "auto",
    ) -> Laplace:
        """Choose prior, temperature and noise; `.tuning` of the result holds what was tried and what it scored.

        With held-out `data`, by their negative log-likelihood under the link that predictions use
        (`method="validation"`, all settings from one pass); without, by the evidence, which on networks that
        interpolate their data often picks too small a precision. So `tune()` alone keeps a classifier's posterior only
        where leave-one-out of the training data shows that it helps; `method="evidence"` takes it in any case.
        `learn` is any of "prior", "temperature", "logit_temperature", "noise". Without it held-out data choose the
        prior, the temperature where that helps, and the logit temperature or a noise that the fit estimated; the
        evidence the prior and such a noise. `prior` is "scalar", "layerwise" or "parameterwise"; `grid` maps names of
        `learn` to candidates, one of which is chosen. `rule` picks from what was tried: "lowest" the lowest NLL,
        "widest" the smallest precision that is shown not to be worse (`evidence.widest`): as good on data like these,
        and more cautious elsewhere.

            la = la.tune(val_loader);  print(la.tuning.table())
        """
        if data is not None:
            require_one_process("tune with data")
        alone = method == "auto" and data is None
        if method == "auto":
            method = "validation" if data is not None else "evidence"
        learn = (learn,) if isinstance(learn, str) else learn
        common: dict[str, Any] = {
            "start": self._start(prior),
            "center": self.prior.mean,
            "temperature": self.temperature,
        }
        if method == "evidence":
            tuning = self._tune_evidence(data, learn, prior, grid, common)
            if alone and grid is None and self.likelihood.has_logits:
                tuning = self._kept_if_shown(tuning, prior)
        elif method == "validation":
            if data is None:
                raise BadData("method='validation' needs held-out data: tune(val_loader)")
            tuning = tune_validation(
                self.curvature,
                self.likelihood,
                self._groups(prior),
                self._held_out(data, link),
                learn=tuple(learn) if learn else None,
                grid=grid,
                score=linked(link, samples=128),
                rule=resolve_rule(rule),
                logit_temperature=self.logit_temperature,
                memory=self.options.memory,
                split=self._split,
                **common,
            )
        elif method == "loo":
            if data is None:
                raise BadData("method='loo' needs the training data: tune(train_loader, method='loo')")
            tuning = tune_loo(
                self.curvature,
                self.likelihood,
                self._groups(prior),
                self._held_out(data),
                learn=tuple(learn) if learn else None,
                grid=grid,
                split=self._split,
                **common,
            )
        else:
            raise UnsupportedOperation(f"method is 'auto', 'validation', 'evidence' or 'loo', got {method!r}")
        return replace(
            self,
            prior=tuning.prior,
            temperature=tuning.temperature,
            likelihood=tuning.likelihood,
            logit_temperature=tuning.logit_temperature or self.logit_temperature,
            tuning=tuning,
            tuned=f"{tuning.method}: {tuning.setting}, score {tuning.score:.6g}",
        )

    def _tune_evidence(self, data: Any, learn: Any, prior: str, grid: Any, common: dict[str, Any]) -> Tuning:
        bound = "excess" in self.curvature.state
        if not learn:
            default = ("prior", "noise") if self.likelihood.learns_noise and not bound else ("prior",)
            learn = tuple(dict.fromkeys((*default, *(grid or {}))))
        learn = tuple(learn)
        if "temperature" in learn:
            raise UnsupportedOperation("the evidence cannot choose a temperature; tune it on held-out data")
        tune, value = (tune_bound, variational_bound) if bound else (tune_evidence, log_evidence)
        groups, mean = self._groups(prior), self.params.flat.double()
        tuning = tune_grid(
            tune, self.curvature, self.likelihood, groups, grid or {}, mean=mean, learn=learn, value=value, **common
        )
        if self.params.size <= self.n_data:
            return tuning
        if data is None:
            warnings.warn(f"tuning by the evidence: {INTERPOLATES}, or pass some: tune(val_loader)", stacklevel=3)
        return replace(tuning, messages=(INTERPOLATES, *tuning.messages))

    def _kept_if_shown(self, tuning: Tuning, prior: str) -> Tuning:
        """Labels without held-out data: the posterior must be shown to predict better than the network."""
        known = None if sharded() else self.options.data  # a process has its own shard, and all must choose the same
        held = None if known is None else self._held_out(known, most=LOO_DATA)
        return keep_if_shown(
            tuning,
            self.curvature,
            self.likelihood,
            self._groups(prior),
            held,
            center=self.prior.mean,
            temperature=self.temperature,
            memory=self.options.memory,
            split=self._split,
        )

    def _groups(self, prior: str) -> Groups:
        params = self.params
        if prior == "scalar":
            return Groups.scalar(params.size)
        if prior == "layerwise":
            return Groups.layerwise(self.curvature.names, params.names, params.sizes, params.index)
        if prior == "parameterwise":
            return Groups.parameterwise(params.size)
        raise UnsupportedOperation(f"prior is 'scalar', 'layerwise' or 'parameterwise', got {prior!r}")

    def _start(self, prior: str) -> Tensor:
        """The current precision, averaged (geometrically) over each group."""
        groups, matrix = self._groups(prior), self._resolved_prior[1]
        if not matrix.is_diagonal:
            raise UnsupportedOperation("a prior that is itself a posterior has nothing to tune; tune before chaining")
        logs = matrix.diagonal().detach().double().log().cpu()
        counts = groups.total(torch.ones_like(logs))
        return (groups.total(logs) / counts.clamp(min=1)).exp()

    def _held_out(
        self, data: Any, link: str = "auto", most: float = math.inf
    ) -> Iterator[tuple[Tensor, Tensor, Jacobian]]:
        """(f, targets, rows) of held-out data, a few samples at a time; rows of what the link sees of f.

        Ends with the batch that reaches `most` samples.
        """
        self._require_unchanged()
        batches = self.batches(data)
        show = self.options.progress
        bar = tqdm(batches, "tune", batches.length, disable=None if show is None else not show, delay=0 if show else 1,
                   leave=False)  # fmt: skip
        for batch in bar:
            y = self._targets(batch)
            start = 0
            at = self._linearized(batch.inputs)
            for linearization, rows in at.jacobians(batch.inputs, contrast=self._contrast(link)):
                f = linearization.f.detach()
                yield f, y[start : start + f.shape[0]], rows
                start += f.shape[0]
            most -= start
            if most <= 0:
                return

    def _contrast(self, link: str) -> bool:
        """Whether a link does not see what all logits of an item share."""
        return self.likelihood.shift_invariant and link in ("auto", "mc")

    def _targets(self, batch: Batch) -> Tensor:
        """The targets of a batch in canonical form; errors name the batch."""
        try:
            f = self.network.forward(self._inputs(batch.inputs))
            if not bool(f.isfinite().all()):
                raise BadData("the outputs of the network are not finite")
            return self.likelihood.targets(f, batch.targets)
        except BadData as error:
            raise BadData(f"batch {batch.number}: {error}") from error

    @outside_inference
    def temperature_curve(
        self,
        data: Any,
        *,
        ood: Mapping[str, Any] | None = None,
        temperatures: Sequence[float] = TEMPERATURES,
        link: str = "auto",
    ) -> TemperatureCurve:
        """Accuracy, NLL and entropy of labeled `data` and entropy of the data sets of `ood` against the temperature.

        One pass over each data set, whatever the number of temperatures; the prior stays. With
        `Tempered(1.0, prior=True)` as the temperature of this object the prior is tempered too.

            curve = la.temperature_curve(test_loader, ood={"KMNIST": images});  print(curve.table())
            lapwing.plots.temperature(curve).savefig("temperature.png")
        """
        require_one_process("temperature_curve")
        if not temperatures or not all(T > 0 for T in temperatures):
            raise BadData(f"temperatures must be positive and at least one, got {list(temperatures)}")
        groups, precision = self._prior_groups()
        sweep = partial(
            collect,
            self.curvature.matrix,
            groups,
            nodes=nodes_for(
                self.curvature, precision, temperatures, self.likelihood, self.temperature.prior, self._split
            ),
            likelihood=self.likelihood,
            power=self.curvature.dispersion_power,
            tempers_prior=self.temperature.prior,
            score=linked(link),
            memory=self.options.memory,
            split=self._split,
        )
        return temperature_curve(
            sweep(self._held_out(data, link)),
            {name: sweep(self._unlabeled(others, link)) for name, others in (ood or {}).items()},
            precision,
            temperatures,
            logit_temperature=self.logit_temperature,
            link=link,
        )

    def _prior_groups(self) -> tuple[Groups, Tensor]:
        """Groups of weights with one precision each, and these precisions."""
        for kind in ("scalar", "layerwise"):
            groups, start = self._groups(kind), self._start(kind)
            matrix = self._resolved_prior[1]
            values = matrix.diagonal().detach().double().cpu()
            if torch.allclose(groups.expand(start), values, rtol=1e-9):
                return groups, start
        raise IncompatiblePrior("a curve needs a prior that is constant per block; use a scalar or layerwise prior")

    def _unlabeled(self, data: Any, link: str) -> Iterator[tuple[Tensor, Tensor, Jacobian]]:
        """(f, targets of the network's own, rows) of data whose targets, if any, are left unread."""
        data = as_tensors(data)
        data = [data] if isinstance(data, Tensor) else data
        batches = self.batches(data)
        generator = torch.Generator(self.params.device).manual_seed(0)
        for raw in batches.unlabeled():
            inputs = self._inputs(raw)
            for linearization, rows in self._linearized(inputs).jacobians(inputs, contrast=self._contrast(link)):
                f = linearization.f.detach()
                yield f, self.likelihood.sample_target(f, generator), rows

    # --- reports and storage ---------------------------------------------------------------------------------------

    @outside_inference
    def summary(self) -> str:
        """What was fitted, how, and what to know about it."""
        return summary(self)

    @outside_inference
    def save(self, path: str | Path) -> None:
        """One file (safetensors), written atomically; `lapwing.load(path, model)` reads it."""
        self._require_unchanged()
        write(Path(path), self)

    def __repr__(self) -> str:
        name = self.curvature.structure.name
        return f"Laplace({type(self.module).__name__}, {name}, {self.params.size:,} weights, {self.prior})"
