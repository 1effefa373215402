"""The answer to a query: a distribution over targets y. Its kinds are in `classes.py` and `values.py`."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lapwing.errors import BadData, UnsupportedOperation, nearest, require_generator
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.marginal import log_mix
from lapwing.model.batches import are_tokens, shift
from lapwing.model.calls import as_tensors, outside_autocast
from lapwing.predictive.function import FunctionDistribution, fixed_generator, seeded
from lapwing.predictive.links import KINDS, ClassLaw
from lapwing.predictive.table import SHOWN, frame_of, html_of

if TYPE_CHECKING:
    import pandas

MOST_WORDS = 8  # numbers or labels of an item that are written out

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

    Examples:
        >>> p = la.predict(x)
        >>> p.mean.shape, p.log_prob(y).shape
        (torch.Size([8, 3]), torch.Size([8]))
        >>> len(p), len(p[:5])
        (8, 5)
    """

    kind: ClassVar[str] = "targets"
    """What is predicted, in a word: "classes", "labels" or "numbers"."""

    uncertainty_name: ClassVar[str] = "uncertainty"
    """What `uncertainty` is, in words."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

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
        """E[y]; the probabilities for classes and labels.

        Examples:
            >>> regression.predict(inputs).mean.shape
            torch.Size([40, 1])
        """

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """The entropy of p(y), in nats; the differential entropy for values.

        Examples:
            >>> la.predict(x).entropy.shape
            torch.Size([8])
        """

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Uncertainty of y = aleatoric + epistemic: the entropy for classes and labels, else the variance.

        Examples:
            >>> p = la.predict(x)
            >>> torch.allclose(p.total, p.aleatoric + p.epistemic)
            True
        """

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The uncertainty that would remain if the weights were known: E_f[entropy of p(y|f)], else E_f[Var(y|f)].

        Examples:
            >>> la.predict(x).aleatoric.shape
            torch.Size([8])
        """

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The uncertainty that more data would remove: the mutual information of y and f, else Var_f(E[y|f]).

        Examples:
            >>> bool(la.predict(noise).epistemic.mean() > la.predict(x).epistemic.mean())
            True
        """

    def log_prob(self, y: Any) -> Tensor:
        """log p(y), (B, *event), over all outputs of an item together; soft labels give Σ q log p.

        Labels of a language model mean what they mean to its own loss: those of position t + 1 are taken at t.

        Examples:
            >>> nll = -la.predict(x).log_prob(y).mean()
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
        """How uncertain y is, (B, *event) or (B,): a score for strange inputs that every kind of model has.

        Examples:
            >>> p = la.predict(x)
            >>> torch.equal(p.uncertainty, p.entropy)  # for numbers it is the standard deviation
            True
        """

    @abstractmethod
    def scores(self, y: Tensor) -> dict[str, Tensor]:
        """Score canonical targets y: one tensor per name, with one entry per item, label or output.

        `evaluate` makes its columns of them: "log_prob" becomes the NLL, "correct" the accuracy, and so on.

        Examples:
            >>> sorted(la.predict(x).scores(y))
            ['brier', 'confidence', 'correct', 'entropy', 'log_prob']
        """

    @abstractmethod
    def fields(self, level: float = 0.95) -> dict[str, Tensor]:
        """Return the fields that files contain, by name, with one row per item; intervals have this level.

        Examples:
            >>> list(regression.predict(inputs).fields(level=0.9))
            ['mean', 'stddev', 'epistemic', 'aleatoric', 'lower', 'upper']
        """

    doubt_name: ClassVar[str] = "uncertainty"
    """The field by which `abstain` decides, if none is named."""

    def abstain(self, threshold: float, *, by: str | None = None) -> Tensor:
        """Return True where the model should not answer: a confidence below the threshold, or a spread above it.

        Classes and labels are judged by `confidence`, numbers by `stddev`. `by` names another field, such as "entropy",
        "epistemic" or "novelty", whose large values mean doubt. `lapwing.metrics.rejection(p, y).threshold(risk)`
        finds a threshold for a wanted risk on held-out data.

        Examples:
            >>> p = la.predict(x)
            >>> answered = p.label[~p.abstain(0.9)]
        """
        if not isinstance(threshold, int | float | Tensor) or math.isnan(threshold):
            raise BadData(f"threshold must be a number, got {threshold!r}")
        by = self.doubt_name if by is None else by
        value = self.doubt(by)
        return value > (-threshold if by == "confidence" else threshold)

    def doubt(self, by: str | None = None) -> Tensor:
        """Return the field `by` such that large values mean doubt; a confidence has its sign reversed."""
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

        Examples:
            >>> p = la.predict(x).to("cpu")
        """
        here, there = self.function.mean.device, torch.device(device)
        if there.type == here.type and there.index in (None, here.index):
            return self
        other: Prediction = object.__new__(type(self))
        other.__dict__.update(_moved(self.__getstate__(), there))
        return other

    def to_frame(self, *, level: float = 0.95, novelty: bool = False, index: Any = None) -> pandas.DataFrame:
        """Return a pandas data frame, one row per item (per item and position for tokens and pixels).

        Classes have label, confidence, entropy, epistemic and probs_0, probs_1, …; numbers have mean, stddev, the
        variances epistemic and aleatoric, and lower and upper of a central interval of this level.

        Examples:
            >>> list(la.predict(x).to_frame().columns)
            ['label', 'confidence', 'entropy', 'epistemic', 'probs_0', 'probs_1', 'probs_2']
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
        """Describe item `index` of the batch in words: its "truth", the "answer" and the "certainty" of the answer.

        y are canonical targets and `classes` names of classes. An entry is empty where a few words do not suffice.
        """
        return {"truth": "", "answer": "", "certainty": f"{float(self.uncertainty[index].mean()):.2f}"}

    @cached_property
    @outside_autocast
    def novelty(self) -> Tensor:
        """How unlike the training data the input is: a score that does not depend on the tuned prior.

        Examples:
            >>> bool(la.predict(noise).novelty.mean() > la.predict(x).novelty.mean())
            True
        """
        if self.score is None:
            raise UnsupportedOperation(
                "this prediction was made without a novelty score: use Laplace.predict(x).novelty."
            )
        return self.score() if callable(self.score) else self.score

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw y, (n, *shape of y): f from `function` (joint over inputs where that is), then y given f.

        Without a generator the draws come from a fixed seed and are the same at every call.

        Examples:
            >>> la.predict(x).sample(10).shape
            torch.Size([10, 8])
        """
        require_generator(generator, self.function.mean.device)
        generator = fixed_generator(self.function.mean.device) if generator is None else generator
        if self.weights is None:
            return self._outside(self.likelihood.sample_target(self.function.sample(n, generator), generator))
        which = torch.multinomial(self.weights.detach(), n, replacement=True, generator=generator)
        each = [member.sample(int((which == k).sum()), generator) for k, member in enumerate(self.members)]
        return torch.cat(each)[which.argsort(stable=True).argsort()]

    def _outside(self, values: Tensor) -> Tensor:
        """Drop the last dimension where the network returned (B,), whose targets are (B, 1) inside."""
        return values[..., 0] if self.scalar and self._event_shape == (1,) else values

    @cached_property
    def _event_shape(self) -> torch.Size:
        return self.likelihood.law(self.function.mean).event_shape

    @cached_property
    @outside_autocast
    def _points(self) -> Tensor:
        generator = seeded(self.seed, self.function.mean.device)
        return self.function.points(self.function.usual if self.samples is None else self.samples, generator)

    @outside_autocast
    def _mixture_log_prob(self, y: Tensor) -> Tensor:
        """Return log (1/S) Σ_s p(y | f_s) for canonical targets."""
        if self.weights is not None:
            return log_mix([member._mixture_log_prob(y) for member in self.members], self.weights)
        points = self._points
        parts = self.likelihood.log_prob(points, y[None])
        return parts.logsumexp(0) - math.log(len(points))

    def __repr__(self) -> str:
        shape = tuple(self.function.mean.shape)
        return f"{type(self).__name__}({type(self.likelihood).__name__}, outputs {shape}, link={self.link!r})"


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


def _moved(value: Any, device: torch.device, seen: dict[int, Any] | None = None) -> Any:
    """Return `value` with all tensors inside it on `device`: in lists, dicts, and objects of this library or its users.

    An object that is met twice is copied once.
    """
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Tensor):
        found: Any = value.to(device)
    elif isinstance(value, list | tuple):
        found = type(value)(_moved(each, device, seen) for each in value)
    elif isinstance(value, dict):
        found = {key: _moved(each, device, seen) for key, each in value.items()}
    elif _holds_tensors(value):
        found = seen[id(value)] = copy.copy(value)
        found.__dict__.update({name: _moved(each, device, seen) for name, each in vars(value).items()})
    else:
        found = value
    seen[id(value)] = found
    return found


def _holds_tensors(value: Any) -> bool:
    ours = type(value).__module__.startswith(("lapwing.", "torch.distributions")) or isinstance(value, Likelihood)
    return hasattr(value, "__dict__") and not isinstance(value, type) and (ours or is_dataclass(value))
