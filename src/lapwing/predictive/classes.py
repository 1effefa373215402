"""Predictions of classes and of binary labels: probabilities, the most probable answer, and their scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.errors import warn
from lapwing.likelihoods.likelihood import masked
from lapwing.model.calls import outside_autocast
from lapwing.predictive.links import ClassLaw, entropy, law_of
from lapwing.predictive.prediction import MOST_WORDS, Prediction

COARSE = 0.01
"""Estimated total variation of probabilities from their exact values at which a prediction warns."""


@dataclass(frozen=True, eq=False, repr=False)
class _Labels(Prediction):
    """What predictions of classes and of binary labels share: their law is a `ClassLaw`."""

    @cached_property
    @outside_autocast
    def _law(self) -> ClassLaw:
        if self.members:
            assert self.weights is not None
            return ClassLaw.mixed([member._law for member in self.members], self.weights)
        law: ClassLaw = law_of(self.link, self.function, self.likelihood, self.samples, self.seed)
        if not law.close and self.kind == "classes" and self.samples is None and not torch.compiler.is_compiling():
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
        known = self._law.parts
        return (self.entropy - self.aleatoric).clamp(min=0) if known is None else known[1]

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
    """A prediction of classes, (B, *event): of every likelihood whose conditional is categorical.

    Examples:
        >>> p = la.predict(x)
        >>> p.probs.shape, p.label.shape, p.confidence.shape
        (torch.Size([8, 3]), torch.Size([8]), torch.Size([8]))
    """

    kind: ClassVar[str] = "classes"
    uncertainty_name: ClassVar[str] = "entropy"

    @property
    def monte_carlo_error(self) -> Tensor | None:
        """The estimated total variation between `probs` and their exact values, (B, *event).

        It is an estimate, not a bound: the spread of a few independent sets of points stands for the error of their
        average. Such a spread comes out small by chance, so that an item may be off by several times what is stated;
        on average over many items the estimate holds. `samples=` with a larger number makes both smaller. None where
        there is nothing to estimate it from: links without Monte Carlo, networks of an ensemble, one draw.

        Examples:
            >>> error = la.predict(x, link="mc", samples=1000).monte_carlo_error
        """
        return self._law.error

    @cached_property
    def probs(self) -> Tensor:
        """(B, *event, C), the classes last wherever the network has them.

        Examples:
            >>> la.predict(x).probs.sum(-1).round(decimals=3)
            tensor([1., 1., 1., 1., 1., 1., 1., 1.])
        """
        return self._law.probs

    @property
    def label(self) -> Tensor:
        """The most probable class, (B, *event).

        Examples:
            >>> accuracy = (la.predict(x).label == y).float().mean()
        """
        return self._law.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of `label`.

        Examples:
            >>> sure = la.predict(x).confidence > 0.95
        """
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
        return self.entropy

    def scores(self, y: Tensor) -> dict[str, Tensor]:
        """Return log_prob, confidence, whether the label is correct, Brier score and entropy, each (B, *event).

        Examples:
            >>> brier = la.predict(x).scores(y)["brier"].mean()
        """
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

    Examples:
        >>> labels = torch.stack([y == 0, y == 1, y == 2], -1).float()
        >>> p = lapwing.fit(model, (x, labels), "binary").predict(x)
        >>> p.probs.shape, p.label.shape
        (torch.Size([8, 3]), torch.Size([8, 3]))
    """

    kind: ClassVar[str] = "labels"
    uncertainty_name: ClassVar[str] = "entropy of all labels"

    @cached_property
    def probs(self) -> Tensor:
        """p(label = 1).

        Examples:
            >>> labels = torch.stack([y == 0, y == 1, y == 2], -1).float()
            >>> p = lapwing.fit(model, (x, labels), "binary").predict(x)
            >>> p.probs.shape  # of the label 1
            torch.Size([8, 3])
        """
        return self._outside(self._law.log_probs[..., 1].exp())

    @property
    def label(self) -> Tensor:
        """0 or 1, the more probable.

        Examples:
            >>> labels = torch.stack([y == 0, y == 1, y == 2], -1).float()
            >>> p = lapwing.fit(model, (x, labels), "binary").predict(x)
            >>> accuracy = (p.label == labels).float().mean()
        """
        return self._outside(self._law.log_probs.argmax(-1))

    @property
    def confidence(self) -> Tensor:
        """The probability of `label`.

        Examples:
            >>> labels = torch.stack([y == 0, y == 1, y == 2], -1).float()
            >>> p = lapwing.fit(model, (x, labels), "binary").predict(x)
            >>> bool((p.confidence >= 0.5).all())
            True
        """
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
        """Return log p of several labels together by Monte Carlo, since they share f; Σ q log p for soft labels.

        Examples:
            >>> labels = torch.stack([y == 0, y == 1, y == 2], -1).float()
            >>> p = lapwing.fit(model, (x, labels), "binary").predict(x)
            >>> p.log_prob_of_targets(labels).shape
            torch.Size([8])
        """
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
        """Return log_prob per item, and the scores of a class per label, each a choice between two classes.

        Examples:
            >>> labels = torch.stack([y == 0, y == 1, y == 2], -1).float()
            >>> p = lapwing.fit(model, (x, labels), "binary").predict(x)
            >>> p.scores(labels)["brier"].shape
            torch.Size([8, 3])
        """
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
    if error is None or not error.numel() or not bool(error.max() > COARSE):
        return
    many = f"{int((error > COARSE).sum())} of {error.numel()} items"
    warn(
        f"the probabilities of {many} are estimated to within a total variation of {float(error.max()):.2g} only "
        f"(`.monte_carlo_error`; {COARSE:g} is aimed at): their logits are uncertain in many directions. Pass samples= "
        "with a larger number, or tune the prior on held-out data, which makes most posteriors narrower.",
    )
