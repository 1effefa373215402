"""The posterior predictive: reads inputs as the fit did and turns them into predictions, or into rows for tuning.

With f(x, θ) ≈ f̂(x) + J(x)(θ − θ̂), a Gaussian over weights gives a Gaussian over outputs (`Linearized`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lapwing.errors import BadData, TooLarge, UnsupportedOperation, nearest
from lapwing.linalg import PSD, Diagonal, Jacobian
from lapwing.model import (
    Batches,
    Linearization,
    Network,
    Plan,
    PlanChanged,
    batch_size,
    dynamic_plan,
    take,
    tensors_in,
)
from lapwing.model.batches import Batch, Convention
from lapwing.model.calls import Inputs, as_tensors, outside_inference, placed
from lapwing.model.linearization import pull
from lapwing.model.products import Products
from lapwing.posterior import Belief
from lapwing.predictive.function import CLOSED_FORM, COVARIANCES, GaussianFunction, contrasts, from_root
from lapwing.predictive.lastlayer import LastLayer, last_layer_of
from lapwing.predictive.links import answering, predict_targets
from lapwing.predictive.novelty import information_bound, information_gain, novelty_precision
from lapwing.predictive.prediction import Prediction
from lapwing.predictive.sampled import sampled_function, warn_of_collapse

JVP_DRAWS = 16  # for link="jvp": eight products and their mirror images
SAMPLED_DRAWS = 50  # networks in method="sampled", as many as Chen et al. use in "Generalized Laplace Approximation"

CHUNK = 2**28
"""Bytes of back-propagated gradients, and of the graph behind them, in memory at a time."""

OUTPUTS = 6
"""Tensors of the size of the outputs that a prediction by draws holds at least: its results and one draw."""

SHARED = 4  # samples that share their draws in tuning by draws: few, so that the errors of draws average out

HeldOut = tuple[Tensor, Tensor, Jacobian]
"""f (B, *event, C), canonical targets, and rows of ∂f/∂θ, (B, event·C)."""
Pushed = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]
"""f (B, *event, C), canonical targets, and weight tangents (s, P) → J v, (s, B, *event, C)."""
Draws = Callable[[int, torch.Generator | None], Tensor]
"""(n, generator) → n draws of the weights, (n, P)."""
Labeled = tuple[Inputs, Tensor, Tensor]
"""The prepared inputs of a batch, f (B, *event, C) and canonical targets."""


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
class Predictive:
    """A network with a belief about its weights, and how its inputs are read.

    `plan` is how the fit read the network; None after loading, then made from the first inputs. `example` are inputs
    that the network takes, for a look at its last layer.
    """

    network: Network
    belief: Belief
    options: Options
    plan: Plan | None = None
    example: Inputs | None = None
    _recent: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # the last inputs, with features

    @cached_property
    def last_layer(self) -> LastLayer | None:
        """The short path to predictions, where the posterior is one over the linear layer that produces the outputs."""
        if self.example is None or self.network.last_linear is None:
            return None
        precision, classes = self.belief.posterior.precision, self.belief.likelihood.shift_invariant
        return last_layer_of(self.network, precision, self.options.memory, self.example, classes)

    @cached_property
    def novelty_layer(self) -> LastLayer | None:
        """The same under the precision that the score of novel inputs uses."""
        layer = self.last_layer
        precision = None if layer is None else novelty_precision(self.belief.curvature.matrix)
        return None if layer is None or precision is None else layer.under(precision, self.options.memory)

    def batches(self, data: Any) -> Batches:
        """Read data as the fit read its own."""
        network, options = self.network, self.options
        return Batches(data, network.module, network.params.device, options.split, options.convention)

    def inputs(self, x: Inputs) -> Inputs:
        """Prepare inputs as the fit did: without its targets, on its device, in a dtype the network takes, finite."""
        if type(x) is Tensor and fits(x, self._usual):  # the usual case, checked quickly
            return x
        x = prepared(self.network.module, self.network.params.device, self.options.convention, x)
        if type(x) is not Tensor:  # a single tensor holds the samples
            self.network.settle(x)
        return x

    @cached_property
    def _usual(self) -> tuple[torch.dtype | None, torch.device]:
        """The dtype of the first weights, and the device."""
        first = next(self.network.module.parameters(), None)
        return None if first is None else first.dtype, self.network.params.device

    def draws(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Weights drawn from the posterior, (n, P); the same at every call without a generator."""
        if generator is None:
            generator = torch.Generator(self.network.params.device).manual_seed(0)
        return self.belief.posterior.sample(n, generator)

    def linearized(self, inputs: Inputs) -> Linearized:
        """The network linearized at its weights, ready for inputs like these."""
        return Linearized(
            self.network,
            self.network.plan_of_first(inputs) if self.plan is None else self.plan,
            self.belief.posterior.precision,
            self.draws,
            self.options.memory,
            shift_invariant=self.belief.likelihood.shift_invariant,
        )

    def predict(
        self,
        inputs: Inputs,
        *,
        method: str,
        link: str,
        samples: int | None,
        joint: bool,
        differentiable: bool,
        generator: torch.Generator | None,
    ) -> Prediction:
        """The predictive distribution at prepared inputs; the arguments are those of `Laplace.predict`."""
        belief, found = self.belief, None
        scale = 1 / belief.logit_temperature
        if method == "sampled":
            if joint:
                raise UnsupportedOperation("joint=True needs method='linearized': weight samples are joint already")
            draws = self.draws(samples or SAMPLED_DRAWS, generator)
            function: Any = sampled_function(self.network, draws, inputs, differentiable)
            warn_of_collapse(self.network, belief.likelihood, function, inputs)
            link = "mc" if link == "auto" else link
        elif method == "linearized":
            by_draws = link == "jvp"
            if by_draws and (joint or differentiable or "mc" not in belief.likelihood.links):
                raise UnsupportedOperation(
                    'link="jvp" is for likelihoods with Monte Carlo predictions ("mc"), without joint=True and '
                    "differentiable=True"
                )
            layer = None if joint or differentiable or by_draws else self.last_layer
            found = None if layer is None else layer.read(inputs)
            if layer is not None and found is not None:
                self.network.require_apart(inputs, found[0])
                function, scale = layer.function(*found, belief.likelihood.shift_invariant, scale), 1.0
            else:
                function = self.linearized(inputs).function(
                    inputs, joint=joint, differentiable=differentiable, by_draws=by_draws
                )
            if by_draws:
                link, samples = "mc", samples or JVP_DRAWS
        else:
            hint = nearest(method, ("linearized", "sampled"))
            raise UnsupportedOperation(f"method is 'linearized' or 'sampled', got {method!r}{hint}")
        f = function.mean if found is None else found[0]
        return predict_targets(
            function if scale == 1.0 else function.scaled(scale),
            belief.likelihood,
            link=link,
            samples=samples,
            novelty=lambda: self.novelty(inputs, f, found),
            scalar=self.options.scalar,
            shifted=bool(self.options.convention.shifted),
            generator=generator,
        )

    def kernel_factors(self, inputs: Inputs, differentiable: bool) -> tuple[Tensor, Tensor, Tensor]:
        """f at prepared inputs and the two factors of its covariance with f at any others; see `Laplace`."""
        layer, scale = self.last_layer, 1 / self.belief.logit_temperature
        found = None if layer is None else layer.read(inputs, differentiable)
        if layer is not None and found is not None:
            f, a = found
            self.network.require_apart(inputs, f)
            with torch.set_grad_enabled(differentiable):
                left = right = layer.root.across(a)
        else:
            f, left, right = self.linearized(inputs).kernel_factors(inputs, differentiable)
        return (f, left, right) if scale == 1.0 else (scale * f, scale * left, scale * right)

    @outside_inference
    def novelty(self, inputs: Inputs, mean: Tensor, found: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """How much a target at these inputs would still teach, (B, *event); see `information_gain`.

        `found` are the outputs and the inputs of the last layer, where the short path has them.
        """
        mean = mean.detach()
        likelihood = answering(self.belief.likelihood, mean)
        layer = None if found is None else self.novelty_layer
        if layer is not None and found is not None:
            return layer.information(*found, likelihood)
        at = replace(self.linearized(inputs), precision=novelty_precision(self.belief.curvature.matrix))
        if mean.shape[-1] > CLOSED_FORM:
            return information_bound(mean, at.variance(inputs, mean, at.precision), likelihood)
        return information_gain(mean, at.covariance(inputs, mean, contrast=at.shift_invariant), likelihood)

    def labeled(self, data: Any, most: float = math.inf) -> Iterator[Labeled]:
        """Stream (prepared inputs, f, canonical targets) batch by batch, until `most` samples are reached."""
        batches, show = self.batches(data), self.options.progress
        bar = tqdm(batches, "tune", batches.length, disable=None if show is None else not show, delay=0 if show else 1,
                   leave=False)  # fmt: skip
        counts: Tensor | None = None
        for batch in bar:
            found = self._read(batch)
            yield found
            mask = self.belief.likelihood.mask(*found[1:])
            any_counts = torch.tensor(True) if mask is None else mask.any()
            counts = any_counts if counts is None else counts | any_counts
            most -= batch_size(batch.inputs)
            if most <= 0:
                break
        if counts is not None and not bool(counts):
            raise BadData("the held-out data hold no batch with a target that counts")

    def held_out(
        self, data: Any, link: str = "auto", most: float = math.inf, labeled: Iterable[Labeled] | None = None
    ) -> Iterator[HeldOut]:
        """Stream (f, targets, rows) of labeled data, a few samples at a time, for tuning.

        For links that ignore a common shift of the logits the rows are those of f minus its average. Ends with the
        batch that reaches `most` samples. `labeled` is what `self.labeled(data)` yields, where that is known.
        """
        for inputs, outputs, y in self.labeled(data, most) if labeled is None else labeled:
            start = 0
            for f, rows in self._rows(inputs, link, outputs[0].numel()):
                yield f, y[start : start + f.shape[0]], rows
                start += f.shape[0]

    def pushed(self, labeled: Iterable[Labeled]) -> Iterator[Pushed]:
        """Stream (f, targets, products with ∂f/∂θ) of labeled data, a few samples at a time, for tuning by draws."""
        products = Products(self.network, self.batches(()))
        for inputs, f, y in labeled:
            n = f.shape[0]
            for start in range(0, n, SHARED):
                part = slice(start, min(n, start + SHARED))
                few = take(inputs, part, n)
                yield f[part], y[part], partial(self._push, products, few)

    def _push(self, products: Products, inputs: Inputs, tangents: Tensor) -> Tensor:
        return products.jvp(inputs, tangents)[1]

    def unlabeled(self, data: Any, link: str = "auto") -> Iterator[HeldOut]:
        """Stream as `held_out` does, with targets drawn from the network itself; those of the data are not read."""
        generator = torch.Generator(self.network.params.device).manual_seed(0)
        for inputs in self.bare_inputs(data):
            for f, rows in self._rows(inputs, link, self._outputs(inputs)[0].numel()):
                yield f, self.belief.likelihood.sample_target(f, generator), rows

    def _outputs(self, inputs: Inputs) -> Tensor:
        short = self._short(inputs, fresh=True)
        return self.network.forward(inputs) if short is None else short[0]

    def bare_inputs(self, data: Any) -> Iterator[Inputs]:
        """Stream prepared inputs batch by batch; targets are not read, and a tensor of inputs is one batch."""
        data = as_tensors(data)
        data = [data] if isinstance(data, Tensor) else data
        for raw in self.batches(data).unlabeled():
            yield self.inputs(raw)

    def _rows(self, inputs: Inputs, link: str, directions: int) -> Iterator[tuple[Tensor, Jacobian]]:
        contrast = self.belief.likelihood.shift_invariant and link in ("auto", "mc")
        layer, short = self.last_layer, self._short(inputs)
        if layer is not None and short is not None and short[0].ndim == 2:
            yield short[0], layer.rows(*short, self.belief.curvature.layout, contrast)
            return
        at = self.linearized(inputs)
        at.require_rows(directions)
        for linearization, rows in at.jacobians(inputs, directions=directions, contrast=contrast):
            yield linearization.f.detach(), rows

    def _short(self, inputs: Inputs, fresh: bool = False) -> tuple[Tensor, Tensor] | None:
        """Outputs and inputs of the last layer, where the posterior is over one; those of the last inputs are kept.

        `fresh`: these inputs are the next batch, also if they are the same object: a loader may fill one tensor again
        and again.
        """
        layer, kept = self.last_layer, self._recent.get("read")
        if layer is None:
            return None
        if fresh or kept is None or kept[0] is not inputs:
            kept = self._recent["read"] = (inputs, layer.read(inputs))
        return kept[1]

    def _read(self, batch: Batch) -> Labeled:
        """Return the prepared inputs of a batch, their outputs and canonical targets; errors name the batch."""
        try:
            inputs = self.inputs(batch.inputs)
            with self.network.explaining(inputs):
                f = self._outputs(inputs)
            if not bool(f.isfinite().all()):
                raise BadData("the outputs of the network are not finite")
            y = self.belief.likelihood.targets(f, batch.targets)
            return inputs, f, y.clone()  # targets are kept, and a loader may fill its tensors with the next batch
        except BadData as error:
            raise BadData(f"batch {batch.number}: {error}") from error


@dataclass(frozen=True, eq=False)
class Linearized:
    """The network linearized at its weights, with a Gaussian over the weights."""

    network: Network
    plan: Plan
    precision: PSD
    draws: Draws
    memory: int
    shift_invariant: bool = False  # whether targets do not see what all outputs of an item share, as a softmax

    def function(
        self, inputs: Inputs, *, joint: bool = False, differentiable: bool = False, by_draws: bool = False
    ) -> GaussianFunction:
        """Return the distribution of f at these inputs; covariances are computed when asked for.

        `by_draws`: expectations come from weight draws however few outputs there are.
        """
        if differentiable:
            return self._differentiable(inputs, joint)
        mean = self.network.forward(inputs)
        sampler = root = None
        many = mean[0].numel() > CLOSED_FORM
        if (many or by_draws) and not joint:
            sampler = lambda n, generator: self._sample(inputs, mean, n, generator)  # noqa: E731
        if many and not by_draws and not joint:
            root = lambda: shared_root(self.network, self.plan, self.precision, inputs)  # noqa: E731
        covariance = (lambda: self._joint(inputs, mean)) if joint else (lambda: self.covariance(inputs, mean))
        variance = None if joint else lambda: self.variance(inputs, mean, self.precision)
        exact = lambda: self.covariance(inputs, mean, contrast=True)  # noqa: E731
        contrasts = exact if self.shift_invariant and mean.shape[-1] > 2 else False
        return GaussianFunction(
            mean,
            covariance,
            variance=variance,
            sampler=sampler,
            joint=joint,
            contrasts=contrasts,
            root=root,
            closed=not by_draws and self._affordable(mean),
        )

    def _affordable(self, mean: Tensor) -> bool:
        """Whether the covariances of items with many outputs take a bearable part of time and memory."""
        under_way = 4 * self.plan.under_way(mean.shape[-1]) + self.plan.graph
        covariances = 4 * mean.numel() * mean.shape[-1] * mean.element_size()
        few = mean[0].numel() <= (CLOSED_FORM if self.precision.iterative else COVARIANCES)
        return few and max(under_way, covariances) <= self.memory // 4

    def jacobians(
        self,
        inputs: Inputs,
        event: int | None = None,
        directions: int | None = None,
        contrast: bool = False,
        basis: Tensor | None = None,
    ) -> Iterator[tuple[Linearization, Jacobian]]:
        """Yield rows of ∂f/∂θ for every output of an item, a few samples at a time (of one event position, if given).

        With `contrast` they are rows of f minus its average over the outputs of an item; with `basis` (k, C), rows of k
        combinations of the outputs of one event position. `directions` is how many rows an item will have; without it
        the first few samples tell.
        """
        total = batch_size(inputs)
        start, size = 0, min(4 if directions is None else self._samples_at_once(self.plan, directions), total)
        while start < total:  # no copy is held while the caller has its turn, who may never come back
            part = take(inputs, slice(start, start + size), total)
            with self.network.borrow():
                at, rows = self._rows(part, event, contrast=contrast, basis=basis)
            yield at, rows
            start += size
            size = self._samples_at_once(at.plan, rows.r)

    def require_rows(self, directions: int) -> None:
        """Raise `TooLarge` where so many rows of one sample do not fit into memory."""
        needed = 4 * (self.plan.under_way(directions) + directions**2) + self.plan.graph  # and directions
        if needed > max(self.memory, CHUNK):
            raise TooLarge(
                f"the rows of {directions:,} outputs of one sample need {needed / 1e9:.3g} GB, the budget is "
                f"{self.memory / 1e9:.3g} GB. Use la.tune(val) with held-out data, which takes draws of so many "
                "outputs, choose the prior yourself with la.replace(prior=...), or raise memory= in fit."
            )

    def _samples_at_once(self, plan: Plan, directions: int) -> int:
        """Return how many samples fit into memory with the gradients of all directions and their graph."""
        each = 4 * plan.under_way(directions) + plan.graph
        return max(1, min(64, int(min(self.memory / 8, CHUNK) / max(1, each))))

    @outside_inference
    def covariance(self, inputs: Inputs, mean: Tensor, contrast: bool = False) -> Tensor:
        """Return the covariance (B, *event, C, C) of f, or with `contrast` that of f minus its average."""
        _require(mean.numel() * mean.shape[-1] * mean.element_size(), self.memory, "the covariance of the outputs")
        n, c = mean.shape[0], mean.shape[-1]
        if c > CLOSED_FORM and not contrast:
            root = shared_root(self.network, self.plan, self.precision, inputs)
            if root is not None:
                return from_root(*root[:2]).to(mean.dtype)
        events = mean[0].numel() // c
        basis = contrasts(c, mean) if contrast else None
        blocks = []
        for e in range(events):
            with self.network.copied(), torch.no_grad():
                rows = self.jacobians(inputs, e, c, basis=basis)
                found = torch.cat([self.precision.quadratic(part) for _, part in rows])
                blocks.append(found if basis is None else basis.to(found).mT @ found @ basis.to(found))
        return torch.stack(blocks, 1).reshape(n, *mean.shape[1:], c).to(mean.dtype)

    @outside_inference
    def variance(self, inputs: Inputs, mean: Tensor, precision: PSD) -> Tensor:
        """Return diag(J A⁻¹ Jᵀ) under any precision A, (B, *event, C)."""
        columns = []
        for e in range(mean[0].numel() // mean.shape[-1]):
            with self.network.copied(), torch.no_grad():
                parts = [precision.variance(rows) for _, rows in self.jacobians(inputs, e, mean.shape[-1])]
                columns.append(torch.cat(parts))
        return torch.stack(columns, 1).reshape(mean.shape).to(mean.dtype)

    @outside_inference
    def _joint(self, inputs: Inputs, mean: Tensor) -> Tensor:
        """Return the covariance over all inputs, (B, *event, C, B, *event, C)."""
        _require(mean.numel() ** 2 * mean.element_size(), self.memory, "the joint covariance of the outputs")
        with self.network.borrow(), torch.no_grad():
            rows = self._rows(inputs)[1]
            return self.precision.joint(rows).reshape(*mean.shape, *mean.shape).to(mean.dtype)

    @outside_inference
    def kernel_factors(self, inputs: Inputs, differentiable: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return f (B, *event, C), and U and V (B, *event, C, k) with U(x) V(x′)ᵀ = J(x) A⁻¹ J(x′)ᵀ for any inputs."""
        total = batch_size(inputs)

        def factors(at: Linearization, rows: Jacobian) -> tuple[Tensor, Tensor, Tensor]:
            if (needed := 2 * total * rows.r * rows.size * self.precision.dtype.itemsize) > self.memory:
                raise TooLarge(
                    f"the covariance of {total} inputs with others needs {needed / 1e9:.3g} GB, one number per input, "
                    f"output and weight; the budget is {self.memory / 1e9:.3g} GB. Ask for fewer inputs at once, fit "
                    "with select='last_layer', or raise memory= in fit."
                )
            return at.f, *self.precision.cross_factors(rows)

        if differentiable:
            with self.network.borrow(differentiable=True):
                parts = [factors(*self._rows(inputs, create_graph=True))]
        else:
            with self.network.copied(), torch.no_grad():
                found = [factors(at, rows) for at, rows in self.jacobians(inputs)]
                parts = [(f.detach(), left, right) for f, left, right in found]
        f, left, right = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return f, left.reshape(*f.shape, -1), right.reshape(*f.shape, -1)

    def _rows(
        self,
        inputs: Inputs,
        event: int | None = None,
        create_graph: bool = False,
        contrast: bool = False,
        basis: Tensor | None = None,
    ) -> tuple[Linearization, Jacobian]:
        """Return the network and its rows at these inputs; without the tape where they run other operations."""
        for dynamic in (False, True):
            plan = dynamic_plan(self.network.params, "these inputs run other operations") if dynamic else self.plan
            try:
                with torch.enable_grad():
                    at = self.network.linearize(plan, inputs, create_graph)
                directions = _identity(at.f, event)
                if basis is not None:
                    directions = torch.einsum("kc,c...->k...", basis.to(directions), directions)
                return at, at.jacobian(_centered(directions) if contrast else directions)
            except PlanChanged:
                if plan.dynamic:
                    raise
        raise AssertionError("a dynamic plan reads any network")

    def _differentiable(self, inputs: Inputs, joint: bool) -> GaussianFunction:
        """Return mean and covariance at once, as functions of the inputs that autograd can follow."""
        with self.network.borrow(differentiable=True):
            at, rows = self._rows(inputs, create_graph=True)
            f = at.f
            n, c = f.shape[0], f.shape[-1]
            if joint:
                covariance = self.precision.joint(rows).reshape(*f.shape, *f.shape)
            elif f.ndim == 2:
                covariance = self.precision.quadratic(rows)
            else:
                parts = [self.precision.quadratic(at.jacobian(_identity(f, e))) for e in range(f[0].numel() // c)]
                covariance = torch.stack(parts, 1).reshape(n, *f.shape[1:], c)
            return GaussianFunction(f, covariance.to(f.dtype), joint=joint, contrasts=self.shift_invariant and c > 2)

    def _sample(self, inputs: Inputs, mean: Tensor, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Draw f (n, B, *event, C) with one weight draw and one forward-mode product each, a few draws at a time."""
        each = mean.numel() * mean.element_size()
        _require(OUTPUTS * each, self.memory, f"{OUTPUTS} tensors of the size of the outputs")
        steps = self.draws(n, generator) - self.network.params.flat
        few = max(1, min(self.memory // 32, CHUNK) // (each + 2 * self.plan.graph))
        for k in range(0, n, few):
            yield mean + self._push(inputs, steps[k : k + few])

    @outside_inference
    def _push(self, inputs: Inputs, steps: Tensor) -> Tensor:
        """Return J v for weight steps v (s, P), (s, B, *event, C)."""
        total, size = batch_size(inputs), max(1, CHUNK // max(1, self.plan.graph))
        parts = (take(inputs, slice(k, k + size), total) for k in range(0, total, size))
        return torch.cat([self.network.jvp(part, steps)[1] for part in parts], 1)


def prepared(module: nn.Module, device: torch.device, convention: Convention, x: Inputs) -> Inputs:
    """Prepare inputs for a network: without targets, on its device, in a dtype that it takes; refuse NaN and none."""
    x = as_tensors(x)
    x = convention.inputs_of(x) if isinstance(x, Mapping) else x
    if not any(True for _ in tensors_in(x)):
        loader = hasattr(x, "__iter__") and not isinstance(x, str | bytes | list | tuple | Mapping)
        hint = "; for a loader, `for p in la.predict_loader(data)` predicts batch by batch" if loader else ""
        raise BadData(
            f"expected a tensor, a tuple of tensors or a dict of tensors to predict, got {type(x).__name__}{hint}"
        )
    x, _ = placed(module, x, device, convention.cast)
    if batch_size(x) == 0:
        raise BadData("the batch to predict is empty")
    for tensor in tensors_in(x):
        if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
            where = tuple((~tensor.isfinite()).nonzero()[0].tolist())
            raise BadData(f"the inputs hold {tensor[where].item()} at index {where}; fill or drop such items")
    return x


def fits(x: Tensor, usual: tuple[torch.dtype | None, torch.device]) -> bool:
    """Whether a tensor needs no preparation: dense, of the dtype and device of the weights, finite, not empty."""
    return (
        (x.dtype, x.device) == usual
        and x.is_floating_point()
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_inference()
        and x.ndim > 0
        and len(x) > 0
        and math.isfinite(x.sum().item())  # the sum of finite values hardly ever overflows
    )


def _identity(f: Tensor, event: int | None = None) -> Tensor:
    """Return directions (r, n, *event, c): every output of an item, or those of one event position."""
    size, c = f[0].numel(), f.shape[-1]
    eye = torch.eye(size, dtype=f.dtype, device=f.device)
    if event is not None:
        eye = eye[event * c : (event + 1) * c]
    return eye.reshape(-1, 1, *f.shape[1:]).expand(-1, *f.shape)


def _centered(directions: Tensor) -> Tensor:
    return directions - directions.mean(-1, keepdim=True)


def _require(needed: int, memory: int, what: str) -> None:
    if needed > memory:
        raise TooLarge(
            f"{what} needs {needed / 1e9:.3g} GB, the budget is {memory / 1e9:.3g} GB. Use .function.variance or "
            ".function.sample(n), predict fewer inputs at once, or raise memory= in fit."
        )


@outside_inference
def shared_root(network: Network, plan: Plan, precision: PSD, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """Return R (C, C) and s (B, C) with covariance R diag(s²) Rᵀ of f at every input, for a last layer on its own.

    This needs outputs W a of one weight matrix, and a precision whose eigenvectors are products. No covariance of the
    outputs is formed. None for other networks, selections and structures.
    """
    if len(plan.blocks) != 1 or plan.looped or network.params.index is not None:
        return None
    block = plan.blocks[0]
    if block.kind != "matrix" or len(block.uses) != 1 or block.uses[0][1]:
        return None
    try:
        with network.borrow(), torch.enable_grad():
            at = network.linearize(plan, inputs)
    except PlanChanged:
        return None
    uses = at.plan.blocks[0].uses if at.plan.blocks else ()  # of a plan made for these inputs, where it is another
    if len(uses) != 1 or not _last(at, uses[0][0]):
        return None
    a = at.recorded.right(uses[0][0], block.bias)[:, 0].detach()
    if a.shape[1:3] != (1, 1):
        return None
    if precision.is_diagonal:
        precision = Diagonal(block.places.take(precision.diagonal()))
    factors = precision.output_factors(at.f.shape[-1], a.shape[-1])
    if factors is None:
        return None
    left, right, variances = factors
    inner = a[:, 0, 0].to(precision.dtype)
    square = (inner if right is None else inner @ right).square() @ variances.mT
    return left, (square + torch.finfo(square.dtype).tiny ** 0.5).sqrt()


def _last(at: Linearization, k: int) -> bool:
    """Check by values and by a backward pass whether outputs (B, C) are those of a record, unchanged."""
    record = at.recorded.records[k]
    if at.f.ndim != 2 or record.out.shape != at.f.shape or not torch.equal(record.out, at.f):
        return False
    v = torch.randn(at.f.shape, generator=torch.Generator().manual_seed(0)).to(at.f)
    (g,) = pull(at.f, [record.edge], v)
    return g is not None and torch.equal(g.to(v), v)
