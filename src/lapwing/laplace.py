"""`Laplace`: a fitted posterior, and everything that you can do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapwing.curvature import Curvature, extend_curvature, pose
from lapwing.curvature.shards import filled, require_same, together
from lapwing.errors import BadData, UnsupportedOperation, nearest, require_generator, require_whole
from lapwing.evaluation.evaluate import require_names
from lapwing.evidence import Rule, Tuning, check_logit_temperature, effective_parameters, evidence_of, stationarity
from lapwing.evidence.curves import TemperatureCurve, sampled_curve, temperature_curve
from lapwing.extras.linear_mode import LinearMode, linear_mode
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model import Batches, Network, Params, Plan
from lapwing.model.batches import require_one_process, sharded
from lapwing.model.calls import Inputs, as_tensors, outside_inference
from lapwing.model.watch import Watch
from lapwing.posterior import Belief, Posterior, Prior, Tempered, resolve_prior, resolve_temperature
from lapwing.predictive import Prediction
from lapwing.predictive.distilled import MOST, Distilled, distill
from lapwing.predictive.predictive import Options, Predictive
from lapwing.predictive.predictor import Predictor, export
from lapwing.predictive.sampled import Ensemble
from lapwing.saving import stored
from lapwing.storage import write_file
from lapwing.summary import html, summary
from lapwing.tuning import Request, require_predictive, tune

TEMPERATURES = tuple(10 ** (k / 2) for k in range(-4, 9))  # of a temperature curve
ELSEWHERE = {"num_outputs": "for BoTorch, wrap it as lapwing.botorch.LaplaceModel(la)"}  # names others look for


@dataclass(frozen=True, eq=False)
class Laplace:
    """A posterior over the selected weights of a trained network: N(θ̂, (T/φ·H + Π)⁻¹). Made by `lapwing.fit`.

    It holds the network, a belief (curvature, prior, likelihood, temperature) and the options of the fit. Nothing here
    changes: `replace`, `tune`, `update` and `damping` return new objects. `update` and `tune` read the data that they
    are given.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification").tune(val_loader)
        >>> la.predict(x).probs.shape
        torch.Size([8, 3])
    """

    network: Network
    belief: Belief
    options: Options
    plan: Plan | None = None
    tuning: Tuning | None = None
    tuned: str = ""  # one line on how prior, temperature and noise were chosen
    watch: Watch | None = field(default=None, repr=False)  # notices when the module has changed since the fit

    @property
    def params(self) -> Params:
        """Names, sizes and values of the selected parameters.

        Examples:
            >>> dict(zip(la.params.names, la.params.sizes))
            {'0.weight': 64, '0.bias': 16, '2.weight': 48, '2.bias': 3}
        """
        return self.network.params

    @property
    def module(self) -> nn.Module:
        """The user's network.

        Examples:
            >>> la.module is model
            True
        """
        return self.network.module

    @property
    def curvature(self) -> Curvature:
        """The curvature of the log-likelihood, without prior, noise and temperature.

        Examples:
            >>> la.curvature.matrix.diagonal().shape
            torch.Size([131])
        """
        return self.belief.curvature

    @property
    def prior(self) -> Prior:
        """The prior over the weights.

        Examples:
            >>> la.replace(prior=0.1).prior
            Prior(0.1)
        """
        return self.belief.prior

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood p(y | f) of a target y given the outputs f, with its current noise.

        Examples:
            >>> print(f"estimated noise: {regression.likelihood.noise.item():.2f}")
            estimated noise: 0.1...
        """
        return self.belief.likelihood

    @property
    def temperature(self) -> Tempered:
        """The temperature T of the likelihood: each datum counts T times.

        Examples:
            >>> la.replace(temperature=0.5).temperature
            Tempered(0.5)
        """
        return self.belief.temperature

    @property
    def logit_temperature(self) -> float:
        """The number by which logits are divided before they become probabilities.

        Examples:
            >>> la.replace(logit_temperature=1.5).logit_temperature
            1.5
        """
        return self.belief.logit_temperature

    @property
    def damped(self) -> bool:
        """Whether Kronecker factors are damped one by one (`damping("factored")`).

        Examples:
            >>> kron = lapwing.fit(model, train_loader, "classification", structure="kron")
            >>> kron.damping("factored").damped
            True
        """
        return self.belief.damped

    @property
    def posterior(self) -> Posterior:
        """N(θ̂, Σ): `.mean`, `.precision`, `.sample(n)`, `.log_prob(theta)`, `.variance`, `.covariance()`.

        Examples:
            >>> la.posterior.sample(5).shape  # one row of weights per draw
            torch.Size([5, 131])
        """
        return self.belief.posterior

    @property
    def n_data(self) -> float:
        """The size of the data set that the curvature stands for.

        Examples:
            >>> la.n_data
            120.0
        """
        return self.curvature.n_data

    @property
    def log_likelihood(self) -> Tensor:
        """Σ log p(y | f̂) of the training data under the current noise.

        Examples:
            >>> bool(la.log_likelihood < 0)
            True
        """
        return self.belief.log_likelihood

    @outside_inference
    def log_evidence(self, at: str = "map", *, data: Any = None) -> Tensor:
        """log p(D) under the Laplace approximation, a 0-d float64 tensor, differentiable in prior and noise.

        At T ≠ 1 it is the evidence of the tempered likelihood. `at="linear-mode"` is for networks whose
        weights are not at the mode under this prior. It evaluates at the mode of the linearized model, which it finds
        by one Newton step in the stored curvature or, with the training `data`, exactly by Jacobian products
        (`linear_mode`; then the result has no gradients).

        Examples:
            >>> evidence = la.log_evidence()
            >>> moved = la.log_evidence("linear-mode", data=train_loader)
        """
        if at == "linear-mode" and data is not None:
            return self.log_evidence() - self.belief.log_joint + self.linear_mode(data).log_joint
        return evidence_of(self.belief, at)

    @outside_inference
    def linear_mode(self, data: Any) -> LinearMode:
        """The mode θ̄ of the linearized model f̂ + J(θ − θ̂) under this prior, from the training data.

        Examples:
            >>> la.linear_mode(train_loader).weights.shape
            torch.Size([131])
        """
        require_one_process("linear_mode")
        self._require_unchanged()
        return linear_mode(self.network, self.belief, self.batches(data), progress=self.options.progress)

    @property
    @outside_inference
    def effective_parameters(self) -> float:
        """γ = tr(c·H (c·H + Π)⁻¹), c = T/φ: the number of directions that the data determine rather than the prior.

        Examples:
            >>> 0 < la.effective_parameters < la.params.size
            True
        """
        return effective_parameters(self.belief)

    @property
    @outside_inference
    def stationarity(self) -> float:
        """½gᵀΣg in nats: what the log joint would gain by moving to the mode of the linearized model.

        Examples:
            >>> print(f"the log joint is {la.stationarity:.1f} nats below that of the linear mode")
            the log joint is ... nats below that of the linear mode
        """
        return stationarity(self.belief)

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
        """Return the posterior for another prior, temperature or noise on the same curvature; no data are read.

        `likelihood` may differ only in a common factor of its noise: other ratios between outputs, another family or
        other options change the curvature and need a new fit. "regression" estimates the noise from the residuals of
        the fit. `logit_temperature` divides the logits before they become probabilities: temperature scaling on top of
        the posterior. If the posterior would not be positive definite, `repair=True` raises the prior precision by the
        smallest sufficient amount, and `summary()` reports it.

        Examples:
            >>> wide = la.replace(prior=0.1, temperature=0.5)
            >>> noisy = regression.replace(likelihood=lapwing.Gaussian(noise=0.3))
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
        belief = replace(self.belief, **changes)
        belief.require_posterior()  # raise now if there is no posterior
        return replace(self, belief=belief)

    @outside_inference
    def damping(self, kind: str) -> Laplace:
        """Choose how Kronecker posteriors add the prior: "exact" adds τI to G ⊗ A, "factored" damps each factor.

        Factored damping (Ritter et al. 2018, Eq. 9) changes predictions and samples. Held-out data tune it
        (`la.damping("factored").tune(val)`), while the evidence always uses the exact sum.

        Examples:
            >>> la = lapwing.fit(model, train_loader, "classification", structure="kron")
            >>> la = la.damping("factored").tune(val_loader)
        """
        if kind not in ("exact", "factored"):
            raise UnsupportedOperation(
                f"damping is 'exact' or 'factored', got {kind!r}{nearest(kind, ('exact', 'factored'))}"
            )
        belief = replace(self.belief, damped=kind == "factored")
        _ = belief.posterior  # raise now if this is not Kronecker
        return replace(self, belief=belief)

    @outside_inference
    def update(self, data: Any, *, generator: torch.Generator | None = None) -> Laplace:
        """Add data to the curvature, as if it were fitted on the union (diag, blockdiag, kron, full).

        EKFAC keeps the eigenbasis of the first fit and adds exact second moments in it; low rank keeps the leading
        eigenpairs of the sum. n_data grows by the number of new data. A noise that the fit estimated and that was not
        tuned is estimated again from all residuals, with the same ratios between outputs.

        Examples:
            >>> la.update(val_loader).n_data  # 120 data of the fit and 60 new ones
            180.0
        """
        with together() if sharded() else nullcontext():
            self._require_unchanged()
            require_generator(generator, self.params.device)
            batches = self.batches(data)
            if sharded():
                batches = filled(batches)
                require_same({"model": repr(self.watch and self.watch.sums), "curvature": self.curvature.fingerprint()})
            problem = pose(
                self.network,
                batches,
                self.likelihood,
                self.curvature.factor,
                closed=self.curvature.structure.closed_form,
                generator=generator,
                memory=self.options.memory,
                progress=self.options.progress,
            )
            curvature = extend_curvature(problem, self.curvature)
            likelihood = self.likelihood if self.tuned else self.likelihood.estimate(curvature.statistics)
            belief = replace(self.belief, curvature=curvature, likelihood=likelihood)
            return replace(self, belief=belief, plan=problem.plan)

    def to(self, device: torch.device | str) -> Laplace:
        """Return the same posterior on another device. Move the module there first: it is read, not copied.

        Examples:
            >>> la = la.to("cpu")  # or model.to("cuda"), then la.to("cuda")
        """
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise BadData(f"there is no device {str(device)!r} on this machine ({error}): use 'cpu'") from error
        network = replace(self.network, params=self.params.to(device))
        belief = replace(self.belief, curvature=self.curvature.to(network, device))
        watch = None if self.watch is None else self.watch.to(device)
        return replace(self, network=network, belief=belief, watch=watch, plan=None)

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
        """Return the predictive distribution at inputs x: a tensor, a tuple called as model(*x), or a dict.

        `method="linearized"` uses f̂ + J(θ − θ̂), so that f ~ N(f̂, J Σ Jᵀ) (Immer et al. 2021): in closed form, or by
        `samples` forward-mode products if there are many outputs. `method="sampled"` runs the network at `samples`
        drawn weights. `link` turns f into probabilities: "auto" takes a link that is exact or nearly so, else Monte
        Carlo; "probit", "bridge" and "mc" ask for that link; "jvp" is coarse Monte Carlo by about `samples`
        forward-mode products and their mirror images, without covariances. `joint=True` keeps the covariance between
        inputs, `differentiable=True` the gradients with respect to x. Without a generator, results are the same at
        every call and for any split into batches. With a logit temperature s, `function` is the distribution of f/s.

        Examples:
            >>> p = la.predict(x)
            >>> p.probs.shape, p.entropy.shape, p.epistemic.shape
            (torch.Size([8, 3]), torch.Size([8]), torch.Size([8]))
            >>> sampled = la.predict(x, method="sampled", samples=50)
            >>> low, high = regression.predict(inputs).interval(0.95)
        """
        self._require_unchanged()
        if generator is not None:
            require_generator(generator, self.params.device)
        inputs = self._predictive.inputs(x)
        if samples is not None and not (isinstance(samples, int) and samples > 0):
            raise BadData(f"samples is a positive whole number, got {samples!r}")
        with self.network.explaining(inputs):
            return self._predictive.predict(
                inputs, method=method, link=link, samples=samples, joint=joint, differentiable=differentiable,
                generator=generator,
            )  # fmt: skip

    @outside_inference
    def kernel_factors(self, x: Inputs, *, differentiable: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return f (B, *event, C) at inputs x, and factors U and V (B, *event, C, k) of its covariance.

        U(x) V(x′)ᵀ = J(x) Σ J(x′)ᵀ is the covariance of f(x) and f(x′), for factors from the same call or from two
        calls. k is about the number of weights. So many small joint covariances (`lapwing.botorch`) cost one pass.
        `differentiable=True` keeps the gradients with respect to x.

        Examples:
            >>> f, left, right = la.kernel_factors(x)
            >>> covariance = left[:, 0] @ right[:, 0].mT  # (B, B), of the first output
            >>> torch.allclose(covariance.diagonal(), la.predict(x).function.variance[:, 0], rtol=1e-3)
            True
        """
        self._require_unchanged()
        inputs = self._predictive.inputs(x)
        with self.network.explaining(inputs):
            return self._predictive.kernel_factors(inputs, differentiable)

    @outside_inference
    def predictor(self, *outputs: str, samples: int | None = None) -> Predictor:
        """Return predictions as a plain `nn.Module` that does not need this object, for posteriors over a last layer.

        `forward(x)` returns a dict of tensors, one per name of `outputs`: attributes of `Prediction` such as "probs",
        "mean", "variance", "epistemic", "aleatoric", "entropy", "novelty". Without names: "probs" and "epistemic", or
        "mean" and "variance" for numbers. It is thread-safe, holds its own copy of the weights and can be compiled and
        exported (`la.export`).

        Examples:
            >>> la = lapwing.fit(model, train_loader, "classification", select="last_layer").tune(val_loader)
            >>> predictor = la.predictor("probs", "epistemic")
            >>> {name: tuple(value.shape) for name, value in predictor(x).items()}
            {'probs': (8, 3), 'epistemic': (8,)}
        """
        self._require_unchanged()
        layer = self._predictive.last_layer
        if layer is None:
            names = self.params.names
            raise UnsupportedOperation(
                "a predictor needs a posterior over one linear layer (select='last_layer') with at most a fixed affine "
                f"map after it, unlike this one over {', '.join(names[:3])}{', …' * (len(names) > 3)}: use "
                "la.distill(data).predictor() or la.predict(x)"
            )
        return Predictor(
            layer,
            self.likelihood,
            outputs,
            novelty=self._predictive.novelty_layer if "novelty" in outputs else None,
            logit_temperature=self.logit_temperature,
            scalar=self.options.scalar,
            samples=samples,
        )

    def export(
        self, path: str | Path, example: Any, *, outputs: str | Sequence[str] = (), samples: int | None = None
    ) -> None:
        """Write `la.predictor(*outputs)` as a file: `.pt2` (`torch.export`) or `.onnx`, with a dynamic batch dimension.

        The file needs neither Lapwing nor the network's class to run. `example` is an input of at least two items.

        Examples:
            >>> la = lapwing.fit(model, train_loader, "classification", select="last_layer")
            >>> la.export("model.pt2", x[:2], outputs=("probs", "epistemic"))
            >>> torch.export.load("model.pt2").module()(x)["probs"].shape
            torch.Size([8, 3])
        """
        names = (outputs,) if isinstance(outputs, str) else outputs
        export(self.predictor(*names, samples=samples), path, example)

    @outside_inference
    def distill(
        self,
        data: Any,
        *,
        epochs: int | None = None,
        most: int = MOST,
        perturb: bool = True,
        ood: Any = None,
        generator: torch.Generator | None = None,
    ) -> Distilled:
        """Return a predictor that gives this posterior's linearized predictions in about one forward pass.

        The outputs of the network do not change. A head that reads the energies of its layers (the mean squares of
        their inputs) learns the covariance that this posterior gives the outputs, at the first `most` inputs of `data`
        (targets are not read) and, with `perturb`, at noisy and mixed inputs, so that it is uncertain where the
        posterior is. One input in five is held out, and `.distances` and `.summary()` say how far the predictor is from
        the posterior there and on the sets of `ood`, which it never learns from. For classes, `function` leaves out the
        variance that all logits share, which does not affect probabilities. `epochs` is how long the head's correction
        is trained (50 by default; 0 leaves it out).

        Examples:
            >>> fast = la.distill(train_loader, epochs=0, ood={"noise": noise})
            >>> fast.predict(x).probs.shape
            torch.Size([8, 3])
        """
        self._require_unchanged()
        require_generator(generator, self.params.device)
        return distill(
            self.network,
            self.likelihood,
            self.predict,
            self._unlabeled(data),
            ood={name: self._unlabeled(others) for name, others in (ood or {}).items()},
            epochs=epochs,
            most=most,
            perturb=perturb,
            generator=generator,
            logit_temperature=self.logit_temperature,
            scalar=self.options.scalar,
            convention=self.options.convention,
        )

    def _unlabeled(self, data: Any) -> Iterator[Inputs]:
        """Yield prepared inputs of data with or without targets, or of one tensor."""
        data = as_tensors(data)
        return map(self._predictive.inputs, self.batches([data] if isinstance(data, Tensor) else data).unlabeled())

    def predict_loader(self, data: Any, **options: Any) -> Iterator[Prediction]:
        """Yield one prediction per batch, in order. Targets in the batches, if any, are not read.

        Examples:
            >>> labels = torch.cat([p.label for p in la.predict_loader(test_loader)])
            >>> labels.shape
            torch.Size([60])
        """
        for inputs in self.batches(data).unlabeled():
            yield self.predict(inputs, **options)

    @outside_inference
    def ensemble(self, n: int, generator: torch.Generator | None = None) -> Ensemble:
        """Return an ensemble of n networks with weights drawn once from the posterior.

        Examples:
            >>> five = la.ensemble(5)
            >>> five.predict(x).probs.shape
            torch.Size([8, 3])
        """
        self._require_unchanged()
        require_whole("the number of members of an ensemble", n)
        return Ensemble(
            self.network,
            self.likelihood,
            self._predictive.draws(n, generator),
            self.options.scalar,
            self.watch,
            self.logit_temperature,
            self._predictive.inputs,
            bool(self.options.convention.shifted),
        )

    def batches(self, data: Any) -> Batches:
        """Read data in the same way as the fit did."""
        return self._predictive.batches(data)

    @cached_property
    def _predictive(self) -> Predictive:
        probe = None if self.watch is None else self.watch.probe
        return Predictive(self.network, self.belief, self.options, self.plan, None if probe is None else probe.inputs)

    def _require_unchanged(self) -> None:
        if self.watch is not None:
            self.watch.require_unchanged(self.module, self.params)

    @outside_inference
    def tune(
        self,
        data: Any = None,
        *,
        method: str = "auto",
        learn: str | Sequence[str] | None = None,
        prior: str = "scalar",
        grid: Mapping[str, Sequence[float]] | None = None,
        predictive: str = "linearized",
        link: str = "auto",
        rule: str | Rule = "widest",
        progress: bool | None = None,
    ) -> Laplace:
        """Choose prior, temperature and noise; `.tuning` of the result lists what was tried, with scores.

        With held-out `data` (`method="validation"`), settings are chosen by the negative log-likelihood of these data
        under the link that predictions use, all from one pass. Without data the evidence chooses, which often picks
        too small a precision for networks that interpolate their data. So `tune()` without arguments keeps a
        classifier's posterior only if leave-one-out on the training data shows that it helps; `method="evidence"`
        keeps it in any case.

        `learn` is any of "prior", "temperature", "logit_temperature", "noise". By default, held-out data choose the
        prior, the temperature if that helps, and the logit temperature or a noise that the fit estimated; the evidence
        chooses the prior and such a noise. `prior` is "scalar", "layerwise" or "parameterwise"; the evidence also takes
        "unit" (one precision per output of a layer: per class, for a last layer) and "input" (one per input: per
        feature). `grid` maps names of `learn` to candidates, one of which is chosen.

        `rule` chooses among the settings that were tried: "lowest" takes the lowest NLL, "widest" the smallest
        precision that is shown to be no worse (`evidence.widest`), which is as good on data like these and more
        cautious elsewhere. `predictive="sampled"` scores what `predict(x, method="sampled")` predicts, on a grid of
        settings with common random numbers; T·n_data are the pseudo-observations of Ritter et al. (2018). `progress`:
        True shows a bar, False none, None does as in the fit.

        Examples:
            >>> la = la.tune(val_loader)
            >>> print(la.tuning.table())
            validation: 67 settings...
            >>> careful = la.tune(val_loader, learn="prior", grid={"prior": [0.1, 1.0, 10.0]}, rule="lowest")
        """
        known = self._predictive
        if progress is not None:
            known = replace(known, options=replace(self.options, progress=progress))
        request = Request(data, method, learn, prior, grid, predictive, link, rule)
        tuning = tune(known, request, self._require_unchanged)
        told = f"{tuning.method}: {tuning.setting}, score {tuning.score:.6g}"
        return replace(self, belief=tuning.applied(self.belief), tuning=tuning, tuned=told)

    @outside_inference
    def temperature_curve(
        self,
        data: Any,
        *,
        ood: Mapping[str, Any] | None = None,
        temperatures: Sequence[float] = TEMPERATURES,
        predictive: str = "linearized",
        link: str = "auto",
    ) -> TemperatureCurve:
        """Compute accuracy, NLL and entropy of labeled `data`, and entropy of the `ood` sets, against the temperature.

        Takes one pass over each data set for any number of temperatures; the prior stays. If the temperature of this
        object is `Tempered(1.0, prior=True)`, the prior is tempered too. `predictive="sampled"` scores what
        `predict(x, method="sampled")` predicts, with the same random numbers at all temperatures.

        Examples:
            >>> curve = la.temperature_curve(test_loader, ood={"noise": noise})
            >>> lapwing.plots.temperature(curve).savefig("temperature.png")
        """
        require_one_process("temperature_curve")
        require_predictive(predictive)
        if ood is not None:
            require_names("ood", ood, "{'noise': inputs}")
        self._require_unchanged()
        if predictive == "sampled":
            return sampled_curve(self._predictive, data, ood or {}, temperatures, link=link)
        return temperature_curve(
            self.belief,
            self._predictive.held_out(data, link),
            {name: self._predictive.unlabeled(others, link) for name, others in (ood or {}).items()},
            temperatures,
            link=link,
            memory=self.options.memory,
        )

    @outside_inference
    def summary(self) -> str:
        """Describe the posterior in a text: what was fitted and how, with warnings and notes.

        Examples:
            >>> print(la.summary())
            Laplace...
        """
        return summary(self)

    @outside_inference
    def save(self, path: str | Path) -> None:
        """Write one file (safetensors), atomically; `lapwing.load(path, model)` reads it.

        Missing folders of the path are created.

        Examples:
            >>> la.save("model.lapwing")
            >>> la = lapwing.load("model.lapwing", model)
        """
        write_file(Path(path), *self.stored())

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the contents of the file that `save` writes: tensors by name, and a description that JSON can hold."""
        self._require_unchanged()
        return stored(self)

    if not TYPE_CHECKING:  # type checkers go on reporting unknown names

        def __getattr__(self, name: str) -> Any:
            """Explain where to find a name that another library looks for on a model."""
            if name in ELSEWHERE:
                raise AttributeError(f"a Laplace posterior has no {name!r}: {ELSEWHERE[name]}")
            return object.__getattribute__(self, name)  # raises, with the error of a property if that failed

    def __repr__(self) -> str:
        name = self.curvature.structure.name
        return f"Laplace({type(self.module).__name__}, {name}, {self.params.size:,} weights, {self.prior})"

    def _repr_html_(self) -> str:
        return html(self)
