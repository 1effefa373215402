"""A predictor that gives a posterior's predictive distribution in about one forward pass, for any posterior.

The mean of the linearized predictive is the network's own output, which a forward pass gives exactly. What costs tens
of passes is its covariance J Σ Jᵀ. A head that reads the same forward pass is fitted to covariances of the teacher
(`distilledlayer.py`), at the data and at perturbed data, as in Bayesian dark knowledge (Balan et al. 2015; Ritter et
al. 2018, appendix D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedOperation, positive, require_whole
from lapwing.likelihoods import Likelihood, likelihood_from_spec, stored_likelihood
from lapwing.metrics import auroc
from lapwing.model import Network, batch_size, take, tensors_in
from lapwing.model.batches import Convention
from lapwing.model.calls import Inputs, arguments, explained, map_tensors, outside_inference, unwrap
from lapwing.model.stored import describe_module, intact, require_same_module, restore_convention, restore_probe
from lapwing.model.watch import Probe
from lapwing.predictive.distilledlayer import DistilledLayer, EnergyNetwork, fit_head, restored_head
from lapwing.predictive.function import FunctionDistribution, fixed_generator
from lapwing.predictive.links import predict_targets
from lapwing.predictive.prediction import Prediction
from lapwing.predictive.predictive import fits, prepared
from lapwing.predictive.predictor import Predictor, export
from lapwing.storage import prefixed, read_file, under, write_file

EPOCHS = 50
MOST = 2000  # inputs of the data that the teacher is asked for
HELD_OUT = 5  # one input in so many measures the distance instead
FEWEST = 20  # inputs
CHUNK = 100  # inputs that the teacher predicts at a time
NOISES = 0.02, 2.0  # standard deviations of the noise, in units of the data's

Teacher = Callable[[Inputs], Prediction]


@dataclass(frozen=True)
class Distance:
    """How far a distilled predictor is from its teacher on some inputs, none of which it was fitted to.

    `divergence` is the mean of KL(teacher ‖ student) of the target in nats (of Gaussians with the same moments for
    numbers), `spread` the root mean square of the log ratio of the outputs' standard deviations (for classes, of the
    logits minus their average), `epistemic` the mean
    of |teacher − student|. For inputs out of distribution, `auroc` holds how well the uncertainty of the teacher and of
    the student tells them from the held-out ones.
    """

    items: int
    divergence: float
    spread: float
    epistemic: float
    auroc: tuple[float, float] | None = None

    @classmethod
    def restore(cls, stored: Mapping[str, Any]) -> Distance:
        """Return the distance that a file describes."""
        return cls(**{**stored, "auroc": None if stored["auroc"] is None else tuple(stored["auroc"])})

    def __str__(self) -> str:
        text = (
            f"{self.items} inputs, KL {self.divergence:.2g} nats, standard deviations off by a factor of "
            f"{torch.tensor(self.spread).exp():.2f}, epistemic by {self.epistemic:.2g}"
        )
        return text if self.auroc is None else f"{text}, AUROC {self.auroc[0]:.3f} (teacher), {self.auroc[1]:.3f}"


@dataclass(frozen=True, eq=False)
class Distilled:
    """A forward-only predictor, made by `la.distill(data)`; it needs neither the posterior nor the module any more.

    `distances` says how far it is from the posterior on held-out inputs ("held out") and on those given as `ood=`.

    Examples:
        >>> fast = la.distill(train_loader, epochs=0)
        >>> print(fast.summary())
    """

    layer: DistilledLayer
    likelihood: Likelihood
    logit_temperature: float
    scalar: bool
    convention: Convention
    distances: Mapping[str, Distance]
    probe: Probe | None = None

    @outside_inference
    def predict(
        self,
        x: Inputs,
        *,
        link: str = "auto",
        samples: int | None = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Return the predictive distribution at inputs x, as `Laplace.predict` does, in about one forward pass.

        Examples:
            >>> la.distill(train_loader, epochs=0).predict(x).probs.shape
            torch.Size([8, 3])
        """
        inputs = self._inputs(x)
        args, kwargs = arguments(inputs)
        with explained(inputs), torch.set_grad_enabled(differentiable):
            f, spread = self.layer(*args, **kwargs)
        scale = 1 / self.logit_temperature
        return predict_targets(
            self.layer.function(f, spread, self.likelihood.shift_invariant, scale),
            self.likelihood,
            link=link,
            samples=samples,
            scalar=self.scalar,
            generator=generator,
        )

    def predictor(self, *outputs: str, samples: int | None = None) -> Predictor:
        """Return predictions as a plain `nn.Module`, as `Laplace.predictor` does for a last layer.

        Examples:
            >>> fast = la.distill(train_loader, epochs=0)
            >>> probs = fast.predictor("probs", "epistemic")(x)["probs"]
        """
        if "novelty" in outputs:
            raise UnsupportedOperation(
                "a distilled predictor has no novelty: use la.predict(x).novelty, or 'epistemic'"
            )
        layer: Any = self.layer
        return Predictor(
            layer,
            self.likelihood,
            outputs,
            logit_temperature=self.logit_temperature,
            scalar=self.scalar,
            samples=samples,
        )

    def export(self, path: str | Path, example: Any, *, outputs: Any = (), samples: int | None = None) -> None:
        """Write `predictor(*outputs)` as a file: `.pt2` (`torch.export`) or `.onnx`, with a dynamic batch dimension.

        The file needs neither Lapwing nor the network's class to run. `example` is an input of at least two items.

        Examples:
            >>> fast = la.distill(train_loader, epochs=0)
            >>> fast.export("fast.pt2", x[:2])
        """
        names = (outputs,) if isinstance(outputs, str) else outputs
        export(self.predictor(*names, samples=samples), path, example)

    def save(self, path: str | Path) -> None:
        """Write one file (safetensors), atomically; `Distilled.load(path, model)` reads it for the same network.

        Examples:
            >>> la.distill(train_loader, epochs=0).save("fast.lapwing")
        """
        network, head = self.layer.network, self.layer.head
        header = {
            "distilled": {"wanted": list(network.wanted), "widths": list(network.widths)},
            "likelihood": stored_likelihood(self.likelihood),
            "logit_temperature": self.logit_temperature,
            "scalar": self.scalar,
            "convention": asdict(self.convention),
            "distances": {name: asdict(distance) for name, distance in self.distances.items()},
            "parameters": {name: list(value.shape) for name, value in network.body.named_parameters()},
        }
        tensors = prefixed("head.", head.state_dict())
        write_file(Path(path), *describe_module(network.body, self.probe, tensors, header))

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, *, likelihood: Likelihood | None = None) -> Distilled:
        """Read a predictor that `save` wrote, for the same network with the same weights; neither is in the file.

        `likelihood` is needed for a likelihood of your own that is not registered.

        Examples:
            >>> la.distill(train_loader, epochs=0).save("fast.lapwing")
            >>> fast = lapwing.Distilled.load("fast.lapwing", model)
        """
        path, module = Path(path), unwrap(model)
        tensors, header = read_file(path)
        if "distilled" not in header:
            raise BadData(f"{path.name!r} holds no distilled predictor: lapwing.load({str(path)!r}, model) reads it")
        with intact(path):
            require_same_module(header, module, path)
            probe = restore_probe(tensors, header, module, path)
        family = likelihood_from_spec(header["likelihood"], likelihood)
        with intact(path):
            wanted, widths = (tuple(map(int, header["distilled"][name])) for name in ("wanted", "widths"))
            body = EnergyNetwork(module, family.outputs, wanted=wanted, widths=widths)
            head = restored_head(under("head.", tensors, next(module.parameters()).device), widths)
            return cls(
                DistilledLayer(body, head).eval(),
                family,
                positive("the logit temperature", header["logit_temperature"]),
                bool(header["scalar"]),
                restore_convention(header),
                {name: Distance.restore(each) for name, each in header["distances"].items()},
                probe,
            )

    def summary(self) -> str:
        """Return a text that says how far this predictor is from its posterior, one line per set of inputs.

        Examples:
            >>> text = la.distill(train_loader, epochs=0, ood={"noise": noise}).summary()
        """
        return "\n".join(f"{name}: {distance}" for name, distance in self.distances.items())

    @cached_property
    def _usual(self) -> tuple[torch.dtype | None, torch.device]:
        """The dtype of the first weights, and the device."""
        return next((p.dtype for p in self.layer.network.body.parameters()), None), self.layer.head.basis.device

    def _inputs(self, x: Inputs) -> Inputs:
        if type(x) is Tensor and fits(x, self._usual):  # the usual case, checked quickly
            return x
        return prepared(self.layer.network.body, self._usual[1], self.convention, x)


def distill(
    network: Network,
    likelihood: Likelihood,
    teacher: Teacher,
    batches: Iterator[Inputs],
    *,
    ood: Mapping[str, Iterator[Inputs]],
    epochs: int | None,
    most: int,
    perturb: bool,
    generator: torch.Generator | None,
    logit_temperature: float,
    scalar: bool,
    convention: Convention,
) -> Distilled:
    """Fit a forward-only predictor to a teacher; the options are those of `Laplace.distill`."""
    epochs = EPOCHS if epochs is None else epochs
    if not (isinstance(epochs, int) and epochs >= 0):
        raise BadData(f"epochs is a whole number that is not negative, got {epochs!r}")
    require_whole("most", most)
    generator = fixed_generator(network.params.device) if generator is None else generator
    own, held = _parts(batches, most)
    if not own or not held or sum(map(batch_size, own)) < FEWEST:
        raise BadData(f"distill needs at least {FEWEST * HELD_OUT // (HELD_OUT - 1)} inputs, and these are fewer")
    body = EnergyNetwork(network.module, network.outputs, own[0])
    moved = [each for part in own for each in perturbed(part, generator)] if perturb else []
    asked = [_asked(body, teacher, part, likelihood.shift_invariant) for part in (*own, *moved)]
    f, z, covariance = (torch.cat(each) for each in zip(*asked))
    head = fit_head(
        f,
        z,
        covariance * logit_temperature**2,  # predictions are of the outputs divided by it
        body.widths,
        inside=sum(map(batch_size, own)),
        shift_invariant=likelihood.shift_invariant,
        epochs=epochs,
        generator=generator,
    )
    layer, probe = DistilledLayer(body, head).eval(), Probe.of(network.module, own[0])
    found = Distilled(layer, likelihood, logit_temperature, scalar, convention, {}, probe)
    return _measured(found, teacher, held, {name: list(chain(*_parts(each, most))) for name, each in ood.items()})


def _parts(batches: Iterator[Inputs], most: int) -> tuple[list[Inputs], list[Inputs]]:
    """The first `most` inputs, some at a time: those to learn from, and one in `HELD_OUT` to measure distances with."""
    own: list[Inputs] = []
    held: list[Inputs] = []
    left = most
    for k, batch in enumerate(batches):
        whole = batch_size(batch)
        n = min(whole, left)
        cut = n - n // HELD_OUT if n >= HELD_OUT else n * (k % HELD_OUT != HELD_OUT - 1)
        for parts, first, last in ((own, 0, cut), (held, cut, n)):
            for start in range(first, last, CHUNK):
                parts.append(take(batch, slice(start, min(start + CHUNK, last)), whole))
        left -= n
        if left <= 0:
            break
    return own, held


def _asked(
    body: EnergyNetwork, teacher: Teacher, inputs: Inputs, shift_invariant: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """f, energies and the teacher's covariance of the outputs."""
    function = teacher(inputs).function
    if function.mean.ndim != 2:
        raise UnsupportedOperation(
            f"distill is for networks with one row of outputs per input; the outputs here are "
            f"{tuple(function.mean.shape)}"
        )
    args, kwargs = arguments(inputs)
    with torch.no_grad():
        f, z = body(*args, **kwargs)
    return f, z, _visible(function, shift_invariant).detach()


def _visible(function: FunctionDistribution, shift_invariant: bool) -> Tensor:
    """The covariance of the outputs; without their average, where targets do not see it and its variance, which may be
    larger by orders of magnitude, would drown the rest in rounding."""
    found = function.contrast_covariance if shift_invariant else None
    return function.item_covariance if found is None else found


def perturbed(inputs: Inputs, generator: torch.Generator) -> list[Inputs]:
    """Return inputs with noise on a random part of their entries, and inputs mixed with each other.

    Noise reaches what the data never vary in, where a posterior knows least. Inputs without real numbers (tokens) have
    no perturbed form.
    """
    n = batch_size(inputs)
    floats = [t for t in tensors_in(inputs) if t.is_floating_point() and t.ndim and len(t) == n]
    if not floats:
        return []
    like: dict[str, Any] = {"generator": generator, "device": floats[0].device}
    order = torch.randperm(n, **like)
    share, level, part = (torch.rand(n, **like) for _ in range(3))

    def column(values: Tensor, t: Tensor) -> Tensor:
        return values.to(t.dtype).reshape(n, *(1,) * (t.ndim - 1))

    def noisy(t: Tensor) -> Tensor:
        if not (t.is_floating_point() and t.ndim and len(t) == n):
            return t
        low, high = NOISES
        size = t.std(correction=0) * low * (high / low) ** column(level, t)
        hit = torch.rand(t.shape, dtype=t.dtype, **like) < column(part, t)
        return t + size * hit * torch.randn(t.shape, dtype=t.dtype, **like)

    def mixed(t: Tensor) -> Tensor:
        if not (t.is_floating_point() and t.ndim and len(t) == n):
            return t
        return torch.lerp(t[order], t, column(share, t))

    return [map_tensors(noisy, inputs), take(map_tensors(mixed, inputs), slice(0, -(-n // 2)), n)]


def _measured(found: Distilled, teacher: Teacher, held: list[Inputs], ood: Mapping[str, list[Inputs]]) -> Distilled:
    """Return the predictor with its distances filled in."""
    distances: dict[str, Distance] = {}
    inside: tuple[Tensor, Tensor] | None = None
    for name, parts in {"held out": held, **ood}.items():
        if not parts:
            raise BadData(f"there are no inputs in {name!r}")
        pairs = [(teacher(part), found.predict(part)) for part in parts]
        scores = tuple(torch.cat([one.uncertainty.flatten() for one in each]) for each in zip(*pairs))
        areas = None if inside is None else tuple(float(auroc(a, b)) for a, b in zip(inside, scores))
        distances[name] = _distance(pairs, areas)  # type: ignore[arg-type]
        inside = scores if inside is None else inside  # type: ignore[assignment]
    return replace(found, distances=distances)


def _distance(pairs: list[tuple[Prediction, Prediction]], areas: tuple[float, float] | None) -> Distance:
    kl = torch.cat([_divergence(theirs, ours) for theirs, ours in pairs])
    ratio = torch.cat([_log_ratio(theirs, ours) for theirs, ours in pairs])
    gap = torch.cat([(theirs.epistemic - ours.epistemic).abs().flatten() for theirs, ours in pairs])
    return Distance(len(kl), float(kl.mean()), float(ratio.square().mean().sqrt()), float(gap.mean()), areas)


def _log_ratio(theirs: Prediction, ours: Prediction) -> Tensor:
    """The log ratio of the outputs' standard deviations, (B, C)."""
    invariant = theirs.likelihood.shift_invariant
    one, other = (_visible(each.function, invariant).diagonal(dim1=-2, dim2=-1) for each in (theirs, ours))
    return (other / one.clamp(min=torch.finfo(one.dtype).tiny)).log() / 2


def _divergence(theirs: Prediction, ours: Prediction) -> Tensor:
    """KL(teacher ‖ student) of the target per item, (B,)."""
    if theirs.kind != "numbers":
        p, q = (each.probs if each.kind == "classes" else _both(each.probs) for each in (theirs, ours))
        return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).flatten(1).sum(-1)
    ratio = theirs.variance / ours.variance
    return (ratio - 1 - ratio.log() + (theirs.mean - ours.mean).square() / ours.variance).reshape(len(ratio), -1).sum(
        -1
    ) / 2


def _both(p: Tensor) -> Tensor:
    return torch.stack([1 - p, p], -1)
