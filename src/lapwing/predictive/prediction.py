"""The answer to a query: a distribution over targets y."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Categorical as CategoricalLaw

from lapwing.errors import BadData, UnsupportedOperation, nearest, require_generator, warn
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.likelihood import masked
from lapwing.likelihoods.marginal import BlendedMarginal, Marginal, MixtureMarginal, sample_crps
from lapwing.model.convention import are_tokens, shift
from lapwing.model.inputs import as_tensors
from lapwing.model.module import outside_autocast
from lapwing.predictive.function import FunctionDistribution, fixed_generator
from lapwing.predictive.links import ClassLaw, choose_link, entropy, inner_law, law_of
from lapwing.predictive.moving import moved
from lapwing.predictive.table import SHOWN, frame_of, html_of

if TYPE_CHECKING:
    import pandas

TARGETS = 1024
"""Draws of y, at least, where its law has no quantiles or entropy in closed form."""

COARSE = 0.01
"""Estimated total variation of probabilities from their exact values at which a prediction warns."""

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.95)
"""Central intervals whose coverage is scored."""

MOST_WORDS = 8  # numbers or labels of an item that are written out

DRAWS = 256  # of y, for a CRPS without closed form

_CLASSES = ("probs", "label", "confidence")
_VALUES = ("variance", "stddev", "interval", "quantile", "cdf")


class _Elsewhere:
    """A field that predictions of another kind have. Reading it raises an `AttributeError` that says so."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        kind, others = ("classification", _VALUES) if self.name in _CLASSES else ("regression", _CLASSES)
        raise AttributeError(
            f".{self.name} is for {kind}; a prediction of {type(instance.likelihood).__name__} has .mean, .entropy, "
            f".total, .aleatoric, .epistemic and .{', .'.join(others)}."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(ABC):
    """p(y | x) = ∫ p(y | f) p(f) df for a batch of inputs. Built by `predict_targets`.

    Shapes: y is (B, *event) for classes and (B, *event, K) for K labels, counts or values; without the K where the
    network returned (B,) (`scalar`). `entropy` and `log_prob` are one number per item, (B, *event), except that several
    binary labels have an entropy each. Everything but `sample` is the same for an item whatever else is in the batch,
    unless a generator was given. Reports and files ask a prediction for its `scores`, `uncertainty` and `fields`.

    A prediction is a sequence of items: `len(p)`, `p[3]` (a prediction of one item), `p[10:20]`, `p[mask]`. It can be
    pickled and moved to another device, without the network.

    Example: `p = la.predict(x); p.mean, p.epistemic, p.log_prob(y); p[:5].to_frame()`
    """

    kind: ClassVar[str] = "targets"
    """What is predicted, in a word: "classes", "labels" or "numbers"."""

    uncertainty_name: ClassVar[str] = "uncertainty"
    """What `uncertainty` is, in words."""

    function: FunctionDistribution
    likelihood: Likelihood
    link: str
    samples: int | None = None
    seed: int | None = None
    score: Tensor | Callable[[], Tensor] | None = None
    scalar: bool = False
    shifted: bool = False  # position t predicts the label at t + 1
    members: tuple[Any, ...] = ()  # predictions that are mixed, and their weights
    weights: Tensor | None = None

    if TYPE_CHECKING:  # what an editor completes; predictions of another kind raise an AttributeError that says so

        @property
        def probs(self) -> Tensor: ...
        @property
        def label(self) -> Tensor: ...
        @property
        def confidence(self) -> Tensor: ...
        @property
        def variance(self) -> Tensor: ...
        @property
        def stddev(self) -> Tensor: ...
        def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]: ...
        def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor: ...
        def cdf(self, y: Any) -> Tensor: ...
    else:
        probs, label, confidence = _Elsewhere(), _Elsewhere(), _Elsewhere()
        variance, stddev, interval, quantile, cdf = (_Elsewhere() for _ in _VALUES)

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """E[y]; the probabilities for classes and labels."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """The entropy of p(y), in nats; the differential entropy for values."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Uncertainty of y = aleatoric + epistemic: the entropy for classes and labels, else the variance."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """What would remain if the weights were known: E_f[entropy of p(y|f)], else E_f[Var(y|f)]."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """What more data would remove: the mutual information of y and f, else Var_f(E[y|f])."""

    def log_prob(self, y: Any) -> Tensor:
        """log p(y), (B, *event), over all outputs of an item together; soft labels give Σ q log p.

        Labels of a language model mean what they mean to its own loss: those of position t + 1 are taken at t.
        """
        y = as_tensors(y)
        if self.shifted:
            y = torch.as_tensor(y)
            y = shift(y) if are_tokens(y) else y
        return self.log_prob_of_targets(y)

    @abstractmethod
    def log_prob_of_targets(self, y: Any) -> Tensor:
        """log p(y) of targets that stand at the position that predicts them."""

    @property
    @abstractmethod
    def uncertainty(self) -> Tensor:
        """How uncertain y is, (B, *event) or (B,): the score for strange inputs that every model has."""

    @abstractmethod
    def scores(self, y: Tensor) -> dict[str, Tensor]:
        """Score canonical targets y: one tensor per name, with one entry per item, label or output.

        `evaluate` makes its columns of them: "log_prob" becomes the NLL, "correct" the accuracy, and so on.
        """

    @abstractmethod
    def fields(self, level: float = 0.95) -> dict[str, Tensor]:
        """Return what files hold of this prediction, by name, one row per item; intervals have this level."""

    doubt_name: ClassVar[str] = "uncertainty"
    """The field by which `abstain` decides, if none is named."""

    def abstain(self, threshold: float, *, by: str | None = None) -> Tensor:
        """Return True where the model should not answer: a confidence below the threshold, or a spread above it.

        Classes and labels are judged by `confidence`, numbers by `stddev`. `by` names another field, such as "entropy",
        "epistemic" or "novelty", of which large values are doubtful. `lapwing.metrics.rejection(p, y).threshold(risk)`
        finds a threshold for a wanted risk on held-out data.

            p.label[~p.abstain(0.9)]
        """
        if not isinstance(threshold, int | float | Tensor) or math.isnan(threshold):
            raise BadData(f"threshold must be a number, got {threshold!r}")
        by = self.doubt_name if by is None else by
        value = self.doubt(by)
        return value > (-threshold if by == "confidence" else threshold)

    def doubt(self, by: str | None = None) -> Tensor:
        """Return a field of which large values are doubtful; the confidence with its sign reversed."""
        by = self.doubt_name if by is None else by
        known = ("confidence", "entropy", "epistemic", "total", "novelty", "stddev", "uncertainty")
        value = getattr(self, by, None) if by in known else None
        if value is None:
            names = [name for name in known if hasattr(type(self), name) and not _is_elsewhere(type(self), name)]
            raise BadData(
                f"by={by!r}: predictions of {self.kind} are judged by one of {', '.join(names)}{nearest(by, names)}"
            )
        return -value if by == "confidence" else value

    def __len__(self) -> int:
        return self.function.mean.shape[0]

    def __getitem__(self, index: Any) -> Prediction:
        """Return the prediction at some items: a number, a slice, or numbers or a mask in a list, array or tensor.

        `p[3]` keeps the batch dimension and holds one item: `p[3].mean` is `p.mean[3:4]`.
        """
        chosen = _items(index, len(self), self.function.mean.device)
        score = self.score
        part = replace(
            self,
            function=self.function.take(chosen),
            score=None if score is None else lambda: self.novelty[chosen],
            members=tuple(member[chosen] for member in self.members),
        )
        for name, value in self._drawn(all_of_it=not len(chosen)).items():
            part.__dict__[name] = value.take(chosen) if isinstance(value, ClassLaw) else value[:, chosen]
        return part

    def __iter__(self) -> Iterator[Prediction]:
        return (self[k] for k in range(len(self)))

    def _drawn(self, all_of_it: bool = False) -> dict[str, Any]:
        """Return results that other items, or a prediction without the network, would not find again.

        Draws from a generator depend on the batch. What is computed already saves work, and a prediction of no items
        computes nothing by itself (`all_of_it`).
        """
        needed = self.seed is not None and not self.members
        return {"_points": self._points} if needed or "_points" in self.__dict__ else {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: every field, without the network. What was not asked for yet is computed."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        kept = self._drawn()
        if self.function.needs_network and not self.function.has_covariance:
            kept["_points"] = self._points
        try:
            state["score"] = None if self.score is None else self.novelty.detach()
        except UnsupportedOperation:
            state["score"] = None
        state["function"] = self.function.stored()
        return state | {name: v.stored() if isinstance(v, ClassLaw) else v.detach() for name, v in kept.items()}

    def to(self, device: torch.device | str) -> Prediction:
        """Return the prediction on another device, with nothing left on this one; gradients are cut.

        p = la.predict(x).to("cpu")
        """
        here, there = self.function.mean.device, torch.device(device)
        if there.type == here.type and there.index in (None, here.index):
            return self
        other: Prediction = object.__new__(type(self))
        other.__dict__.update(moved(self.__getstate__(), there))
        return other

    def to_frame(self, *, level: float = 0.95, novelty: bool = False, index: Any = None) -> pandas.DataFrame:
        """Return a pandas data frame, one row per item (per item and position for tokens and pixels).

        Classes have label, confidence, entropy, epistemic and probs_0, probs_1, …; numbers have mean, stddev, the
        variances epistemic and aleatoric, and lower and upper of a central interval of this level.

            la.predict(frame).to_frame(index=frame.index)
        """
        found = self.fields(level)
        if novelty:
            found["novelty"] = self.novelty
        return frame_of(found, self.function.mean.ndim - 1, index)

    def _repr_html_(self) -> str:
        shown, rows = self[:SHOWN], self.function.mean.ndim - 1
        caption = f"{len(self):,} predictions of {self.kind} ({type(self.likelihood).__name__}, link {self.link!r})"
        if rows > 1:
            return html_of(caption, {"uncertainty": shown.uncertainty.reshape(len(shown), -1).mean(1)}, 1, len(self))
        return html_of(caption, shown.fields(), rows, len(self))

    def described(self, index: int, y: Tensor | None = None, classes: Sequence[str] = ()) -> dict[str, str]:
        """Return words for item `index` of the batch: its "truth", the "answer" and the "certainty" of the answer.

        y are canonical targets and `classes` names of classes. What cannot be said in a few words is empty.
        """
        return {"truth": "", "answer": "", "certainty": f"{float(self.uncertainty[index].mean()):.2f}"}

    @cached_property
    @outside_autocast
    def novelty(self) -> Tensor:
        """How unlike the training data the input is: a score that does not depend on the tuned prior."""
        if self.score is None:
            raise UnsupportedOperation(
                "this prediction was made without a novelty score: use Laplace.predict(x).novelty."
            )
        return self.score() if callable(self.score) else self.score

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw y, (n, *shape of y): f from `function` (joint over inputs where that is), then y given f.

        Without a generator the draws come from a fixed seed and are the same at every call.
        """
        require_generator(generator, self.function.mean.device)
        generator = fixed_generator(self.function.mean.device) if generator is None else generator
        return self._outside(self.likelihood.sample_target(self.function.sample(n, generator), generator))

    def _outside(self, values: Tensor) -> Tensor:
        """Drop the last dimension where the network returned (B,), whose targets are (B, 1) inside."""
        return values[..., 0] if self.scalar and self._event_shape == (1,) else values

    @cached_property
    def _event_shape(self) -> torch.Size:
        return self.likelihood.law(self.function.mean).event_shape

    def _generator(self) -> torch.Generator | None:
        """Return a fresh generator per use, so that results do not depend on the order of questions."""
        return None if self.seed is None else torch.Generator(self.function.mean.device).manual_seed(self.seed)

    @cached_property
    @outside_autocast
    def _points(self) -> Tensor:
        return self.function.points(self.function.usual if self.samples is None else self.samples, self._generator())

    @outside_autocast
    def _mixture_log_prob(self, y: Tensor) -> Tensor:
        """Return log (1/S) Σ_s p(y | f_s) for canonical targets."""
        points = self._points
        parts = self.likelihood.log_prob(points, y[None])
        return parts.logsumexp(0) - math.log(len(points))

    def __repr__(self) -> str:
        shape = tuple(self.function.mean.shape)
        return f"{type(self).__name__}({type(self.likelihood).__name__}, outputs {shape}, link={self.link!r})"


@dataclass(frozen=True, eq=False, repr=False)
class _Labels(Prediction):
    """What predictions of classes and of binary labels share: their law is a `ClassLaw`."""

    @cached_property
    @outside_autocast
    def _law(self) -> ClassLaw:
        if self.members:
            assert self.weights is not None
            return ClassLaw.mixed([member._law for member in self.members], self.weights)
        law: ClassLaw = law_of(self.link, self.function, self.likelihood, self.samples, self._generator())
        if self.kind == "classes" and self.samples is None and not torch.compiler.is_compiling():
            _warn_if_coarse(law.error)
        return law

    @property
    @abstractmethod
    def probs(self) -> Tensor:
        """The probabilities of classes, or of the label 1."""

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def total(self) -> Tensor:
        return self.entropy

    @property
    def epistemic(self) -> Tensor:
        return (self.entropy - self.aleatoric).clamp(min=0)

    def fields(self, level: float = 0.95) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("label", "confidence", "entropy", "epistemic", "probs")}

    doubt_name: ClassVar[str] = "confidence"

    def _drawn(self, all_of_it: bool = False) -> dict[str, Any]:
        found = super()._drawn()
        if all_of_it or "_law" in self.__dict__ or (self.seed is not None and not self.members):
            found["_law"] = self._law
        return found

    def __getstate__(self) -> dict[str, Any]:
        _ = self._law
        return super().__getstate__()


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(_Labels):
    """A prediction of classes, (B, *event): of every likelihood whose conditional is categorical."""

    kind: ClassVar[str] = "classes"
    uncertainty_name: ClassVar[str] = "entropy"

    @property
    def monte_carlo_error(self) -> Tensor | None:
        """The estimated total variation between `probs` and their exact values, (B, *event). None where there is
        nothing to estimate it from: links without Monte Carlo, networks of an ensemble, one draw."""
        return self._law.error

    @cached_property
    def probs(self) -> Tensor:
        """(B, *event, C), the classes last wherever the network has them."""
        return self._law.probs

    @property
    def label(self) -> Tensor:
        """The most probable class, (B, *event)."""
        return self._law.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of `label`."""
        return self.probs.amax(-1)

    @cached_property
    @outside_autocast
    def entropy(self) -> Tensor:
        return self._law.entropy

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._law.expected_entropy()

    def log_prob_of_targets(self, y: Any) -> Tensor:
        f, log_probs = self.function.mean, self._law.log_probs
        y = self.likelihood.targets(f, y)
        if y.ndim == log_probs.ndim:
            return torch.where(y > 0, y * log_probs, 0.0).sum(-1)
        mask = self.likelihood.mask(f, y)
        index = y if mask is None else y.masked_fill(~mask, 0)
        return masked(log_probs.gather(-1, index.long()[..., None])[..., 0], mask)

    @property
    def uncertainty(self) -> Tensor:
        return torch.special.entr(self.probs).sum(-1)

    def scores(self, y: Tensor) -> dict[str, Tensor]:
        """Return log_prob, confidence, whether the label is correct, Brier score and entropy, each (B, *event)."""
        probs, soft = self.probs, y
        if y.shape != probs.shape:  # an ignored index becomes some class, and the caller leaves the item out
            soft = torch.nn.functional.one_hot(y.clamp(0, probs.shape[-1] - 1), probs.shape[-1])
        return {"log_prob": self.log_prob_of_targets(y), **_label_scores(probs, soft.to(probs))}

    def described(self, index: int, y: Tensor | None = None, classes: Sequence[str] = ()) -> dict[str, str]:
        if self.probs.ndim != 2:
            return super().described(index, y, classes)
        name = lambda k: classes[k] if 0 <= k < len(classes) else str(k)  # noqa: E731
        probability, label = self.probs[index].max(-1)
        truth = "" if y is None else name(int(y[index] if y.ndim == 1 else y[index].argmax()))
        return {"truth": truth, "answer": name(int(label)), "certainty": f"p {float(probability):.2f}"}


@dataclass(frozen=True, eq=False, repr=False)
class LabelPrediction(_Labels):
    """A prediction of binary labels: `probs`, `label` and `confidence` have the shape of y.

    Several labels have an entropy and a split each, (B, *event, K); a single logit has those of its item, (B, *event).
    """

    kind: ClassVar[str] = "labels"
    uncertainty_name: ClassVar[str] = "entropy of all labels"

    @cached_property
    def probs(self) -> Tensor:
        """p(label = 1)."""
        return self._outside(self._law.log_probs[..., 1].exp())

    @property
    def label(self) -> Tensor:
        """0 or 1, the more probable."""
        return self._outside(self._law.log_probs.argmax(-1))

    @property
    def confidence(self) -> Tensor:
        """The probability of `label`."""
        return self._outside(self._law.log_probs.amax(-1).exp())

    @cached_property
    @outside_autocast
    def entropy(self) -> Tensor:
        return self._each_label(entropy(self._law.log_probs))

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._each_label(self._law.expected_entropy())

    def _each_label(self, values: Tensor) -> Tensor:
        return values[..., 0] if self._event_shape == (1,) else values

    def log_prob_of_targets(self, y: Any) -> Tensor:
        """Return log p of several labels together by Monte Carlo, since they share f; Σ q log p for soft labels."""
        y = self.likelihood.targets(self.function.mean, y)
        if self._event_shape.numel() > 1 and bool(((y == 0) | (y == 1)).all()):
            return self._mixture_log_prob(y)
        log_probs = self._law.log_probs
        parts = torch.where(y > 0, y * log_probs[..., 1], 0.0) + torch.where(y < 1, (1 - y) * log_probs[..., 0], 0.0)
        return parts.sum(-1) if self._event_shape else parts

    @property
    def uncertainty(self) -> Tensor:
        entropies = torch.special.entr(_both(self.mean)).sum(-1)
        return entropies.flatten(1).sum(-1) if entropies.ndim > 1 else entropies

    def scores(self, y: Tensor) -> dict[str, Tensor]:
        """Return log_prob per item, and the scores of a class per label, each a choice between two classes."""
        p = self.mean
        return {"log_prob": self.log_prob_of_targets(y), **_label_scores(_both(p), _both(y.reshape(p.shape).to(p)))}

    def described(self, index: int, y: Tensor | None = None, classes: Sequence[str] = ()) -> dict[str, str]:
        p = self.mean[index].flatten()
        if len(p) > MOST_WORDS:
            return super().described(index, y, classes)
        names = classes if len(classes) == len(p) else [str(k) for k in range(len(p))]
        said = lambda on: ", ".join(n for n, each in zip(names, on) if each) or "none"  # noqa: E731
        if len(p) == 1:
            yes = lambda on: classes[int(on)] if len(classes) == 2 else str(int(on))  # noqa: E731
            truth = "" if y is None else yes(bool(y[index].flatten()[0] > 0.5))
            sure = max(float(p[0]), 1 - float(p[0]))
            return {"truth": truth, "answer": yes(bool(p[0] > 0.5)), "certainty": f"p {sure:.2f}"}
        truth = "" if y is None else said((y[index].flatten() > 0.5).tolist())
        certainty = " ".join(f"{float(each):.2f}" for each in p)
        return {"truth": truth, "answer": said((p > 0.5).tolist()), "certainty": f"p {certainty}"}


@dataclass(frozen=True, eq=False, repr=False)
class ValuePrediction(Prediction):
    """A prediction of numbers: in closed form (Gaussian), by quadrature (counts, varying noise) or Monte Carlo.

    Example: `p.mean, p.stddev, p.interval(0.9)`
    """

    kind: ClassVar[str] = "numbers"
    uncertainty_name: ClassVar[str] = "standard deviation"
    doubt_name: ClassVar[str] = "stddev"

    @cached_property
    @outside_autocast
    def _marginal(self) -> Marginal:
        marginal: Marginal | None = None
        if self.members:
            assert self.weights is not None
            return BlendedMarginal.of([member._marginal for member in self.members], self.weights)
        if self.link in ("exact", "quadrature"):
            marginal = self.likelihood.marginal(self.function)
        elif self.link != "mc":
            marginal = law_of(self.link, self.function, self.likelihood, self.samples, self._generator())
        return self._sampled_marginal() if marginal is None else marginal

    def _sampled_marginal(self) -> Marginal:
        """Return (1/S) Σ_s p(y | f_s)."""
        points = self._points
        law = inner_law(self.likelihood, points)
        centers = law.mean
        return MixtureMarginal(
            law,
            centers.new_full((len(points),), -math.log(len(points))),
            mean=centers.mean(0),
            aleatoric=law.variance.mean(0),
            epistemic=(centers - centers.mean(0)).square().mean(0),
            event_dims=len(self._event_shape) - len(law.event_shape),
            whole=True,
        )

    @property
    def mean(self) -> Tensor:
        return self._outside(self._marginal.mean)

    @property
    def variance(self) -> Tensor:
        """The variance of y, the noise included."""
        return self._outside(self._marginal.aleatoric + self._marginal.epistemic)

    @property
    def stddev(self) -> Tensor:
        return self.variance.sqrt()

    @property
    def total(self) -> Tensor:
        return self.variance

    @property
    def aleatoric(self) -> Tensor:
        return self._outside(self._marginal.aleatoric)

    @property
    def epistemic(self) -> Tensor:
        return self._outside(self._marginal.epistemic)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds of the central interval that holds each output with this probability."""
        if not 0 < level < 1:
            raise ValueError(f"interval level {level}: it is a probability between 0 and 1, such as 0.95.")
        lower, upper = self.quantile(((1 - level) / 2, (1 + level) / 2))
        return lower, upper

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Return y with p(output ≤ y) = q, output by output; several levels come first, (len(q), *shape of y).

        p.quantile(0.5);  lower, median, upper = p.quantile([0.05, 0.5, 0.95])
        """
        levels = torch.as_tensor(as_tensors(q), dtype=torch.float64).cpu()
        if levels.ndim > 1 or not levels.numel() or not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"quantile levels {q}: they are probabilities between 0 and 1, such as 0.5 or [0.1, 0.9].")
        each = levels.reshape(-1).tolist()
        try:
            found = torch.stack([self._marginal.quantile(level) for level in each])
        except (NotImplementedError, UnsupportedOperation):  # torch knows no distribution function for this law
            found = torch.quantile(self._targets, self._targets.new_tensor(each), dim=0)
        found = self._outside(found)
        return found if levels.ndim else found[0]

    def cdf(self, y: Any) -> Tensor:
        """Return p(output ≤ y), output by output: y has the shape of targets, or is one number for all.

        Of data like those of the fit, `p.cdf(y)` is uniform between 0 and 1 if the prediction is calibrated.
        """
        mean = self._marginal.mean
        y = torch.as_tensor(as_tensors(y)).to(mean)
        if y.ndim and y.shape not in (mean.shape, self.mean.shape, mean.shape[:-1] if mean.shape[-1:] == (1,) else ()):
            raise BadData(f"y has shape {tuple(y.shape)}; expected {tuple(self.mean.shape)}, or one number")
        y = y.reshape(mean.shape) if y.ndim else y.expand(mean.shape)
        try:
            found = self._marginal.cdf(y)
        except NotImplementedError:  # torch knows no distribution function for this law
            found = (self._targets <= y).double().mean(0)
        return self._outside(found.to(mean.dtype))

    def log_prob_of_targets(self, y: Any) -> Tensor:
        f = self.function.mean
        y = self.likelihood.targets(f, y)
        return masked(self._log_prob(y), self.likelihood.mask(f, y))

    def _log_prob(self, y: Tensor) -> Tensor:
        value = self._marginal.log_prob(y)
        return self._mixture_log_prob(y) if value is None else value

    @cached_property
    @outside_autocast
    def entropy(self) -> Tensor:
        """The differential entropy: closed form for Gaussians, quadrature for one output, else from draws of y."""
        value = self._marginal.entropy()
        if value is None:
            value = -torch.stack([self._log_prob(y) for y in self._targets[:512]]).mean(0)
        return value

    @cached_property
    @outside_autocast
    def _targets(self) -> Tensor:
        """Draws y_s ~ p(y | f_s), (S, *shape of y): the same random numbers for every item, whatever its batch.

        Where f has fewer points than `TARGETS` (a network without a posterior has one), each point gets equally many
        draws.
        """
        points = self._points
        points = points.repeat(-(-TARGETS // len(points)), *[1] * (points.ndim - 1))
        items = points.reshape(len(points), -1, points.shape[-1])
        device = points.device
        if not items.shape[1]:
            return self.likelihood.sample_target(points, fixed_generator(device))
        draws = [self.likelihood.sample_target(items[:, i], fixed_generator(device)) for i in range(items.shape[1])]
        return torch.stack(draws, 1).reshape(len(points), *points.shape[1:-1], *draws[0].shape[1:])

    @property
    def uncertainty(self) -> Tensor:
        return (self.variance.flatten(1).sum(-1) if self.variance.ndim > 1 else self.variance).sqrt()

    def scores(self, y: Tensor) -> dict[str, Tensor]:
        """Return log_prob per item, and per output: what was predicted, squared error, CRPS, coverage of intervals."""
        mean = self.mean
        truth = y.reshape(mean.shape)
        covered = {}
        for level in LEVELS:
            lower, upper = self.interval(level)
            covered[f"covered {level}"] = (lower <= truth) & (truth <= upper)
        return {
            "log_prob": self.log_prob_of_targets(y),
            "square": (mean - truth).square(),
            "crps": self._crps(y, truth),
            "stddev": self.variance.sqrt(),
            "mean": mean,
            "truth": truth,
            **dict(zip(("lower", "upper"), self.interval(0.95))),
            **covered,
        }

    def described(self, index: int, y: Tensor | None = None, classes: Sequence[str] = ()) -> dict[str, str]:
        mean, spread = self.mean[index].flatten(), self.stddev[index].flatten()
        if len(mean) > MOST_WORDS:
            return super().described(index, y, classes)
        truth = "" if y is None else ", ".join(f"{float(each):.4g}" for each in y[index].flatten())
        answer = ", ".join(f"{float(each):.4g}" for each in mean)
        certainty = "± " + ", ".join(f"{float(each):.2g}" for each in spread)
        return {"truth": truth, "answer": answer, "certainty": certainty}

    def _crps(self, y: Tensor, truth: Tensor) -> Tensor:
        """Return the CRPS per output: closed form, or from draws that are the same at every call."""
        score = self._marginal.crps(y)
        return sample_crps(self.sample(DRAWS), truth) if score is None else score

    def fields(self, level: float = 0.95) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in ("mean", "stddev", "epistemic", "aleatoric")}
        found["lower"], found["upper"] = self.interval(level)
        return found


def _items(index: Any, count: int, device: torch.device) -> Tensor:
    """Return the numbers of the items that an index chooses out of `count`."""
    every = torch.arange(count, device=device)
    if isinstance(index, slice):
        return every[list(range(count)[index])]
    index = torch.as_tensor(as_tensors(index))
    if index.ndim > 1 or index.is_floating_point() or index.is_complex():
        raise IndexError(f"items are chosen by a number, a slice, a list of numbers or a mask, got {index!r}")
    if index.dtype == torch.bool:
        if index.shape != (count,):
            raise IndexError(f"a mask of shape {tuple(index.shape)} does not fit a prediction of {count} items")
        return every[index.to(device)]
    index = index.reshape(-1)
    if bool(((index < -count) | (index >= count)).any()):
        raise IndexError(f"index {index.tolist()} is out of range for a prediction of {count} items")
    return every[index.to(device)]


def _is_elsewhere(kind: type, name: str) -> bool:
    """Whether a field is one that only predictions of another kind have."""
    return isinstance(getattr(kind, name, None), _Elsewhere)


def _label_scores(probs: Tensor, soft: Tensor) -> dict[str, Tensor]:
    """Score probabilities (…, K) against soft labels (…, K); each score is (…)."""
    confidence, label = probs.max(-1)
    return {
        "confidence": confidence,
        "correct": label == soft.argmax(-1),
        "brier": (probs - soft).square().sum(-1),
        "entropy": torch.special.entr(probs).sum(-1),
    }


def _both(p: Tensor) -> Tensor:
    """Return (…, 2) probabilities of no and yes from those of yes."""
    return torch.stack([1 - p, p], -1)


def _warn_if_coarse(error: Tensor | None) -> None:
    """Warn where probabilities have an estimated error above `COARSE`."""
    if error is None or not bool((error > COARSE).any()):
        return
    many = f"{int((error > COARSE).sum())} of {error.numel()} items"
    warn(
        f"the probabilities of {many} are estimated to within a total variation of {float(error.max()):.2g} only "
        f"(`.monte_carlo_error`; {COARSE:g} is aimed at): their logits are uncertain in many directions. Pass samples= "
        "with a larger number, or tune the prior on held-out data, which makes most posteriors narrower.",
    )


def predict_targets(
    function: FunctionDistribution,
    likelihood: Likelihood,
    *,
    link: str = "auto",
    samples: int | None = None,
    novelty: Tensor | Callable[[], Tensor] | None = None,
    scalar: bool = False,
    shifted: bool = False,
    generator: torch.Generator | None = None,
) -> Prediction:
    """Return the prediction that follows from a distribution of f: of classes, labels or numbers, as p(y | f) is.

    `link="auto"` takes what is exact or nearly so (closed form, quadrature in one dimension), else Monte Carlo in
    output space. `scalar`: the network returned (B,). `shifted`: position t predicts the label at t + 1.
    """
    law = inner_law(likelihood, function.mean)
    leaf: type[Prediction] = ValuePrediction
    if isinstance(law, CategoricalLaw):
        leaf = ClassPrediction
    elif isinstance(law, BernoulliLaw):
        leaf = LabelPrediction
    seed = None
    if generator is not None:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return leaf(
        function,
        likelihood,
        link=choose_link(link, function, likelihood),
        samples=samples,
        seed=seed,
        score=novelty,
        scalar=scalar,
        shifted=shifted,
    )
