"""What a report keeps of a batch of predictions: one number an item for every score, by the kind of target."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.evaluation import metrics
from lapwing.likelihoods import Gaussian
from lapwing.predictive import Prediction, SampledFunction
from lapwing.predictive.prediction import ClassPrediction, LabelPrediction, ValuePrediction

Items = Mapping[str, Tensor]  # score -> one entry an item
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.95)
DRAWS = 256  # for scores that have no closed form


@dataclass(frozen=True)
class Column:
    """A column of the report: a metric, and whether more of it is better (None: neither)."""

    name: str
    more_is_better: bool | None


class Task(ABC):
    """What predictions of one kind of target are scored by."""

    columns: ClassVar[tuple[Column, ...]]
    uncertainty_name: ClassVar[str]

    @abstractmethod
    def uncertainty(self, prediction: Any) -> Tensor:
        """How uncertain y is, (B, *event) or (B,): the out-of-distribution score that every model has."""

    @abstractmethod
    def items(self, prediction: Any, y: Tensor) -> dict[str, Tensor]:
        """Scores of the items of a batch; y in canonical form."""

    @abstractmethod
    def summary(self, items: Items, bins: int) -> dict[str, float]:
        """The value of each column, from the scores of all items."""

    def caption(self, prediction: Any, y: Tensor | None, index: int) -> str:
        """Words for picture `index` of the batch."""
        return f"{float(self.uncertainty(prediction)[index].mean()):.2f}"


class Classes(Task):
    """One of K classes: accuracy, NLL, ECE, Brier score, entropy."""

    columns = (
        Column("accuracy", True),
        Column("nll", False),
        Column("ece", False),
        Column("brier", False),
        Column("entropy", None),
    )
    uncertainty_name = "entropy"

    def uncertainty(self, prediction: Any) -> Tensor:
        return metrics.entropy(prediction.probs)

    def items(self, prediction: Any, y: Tensor) -> dict[str, Tensor]:
        probs = prediction.probs
        soft = y if y.shape == probs.shape else one_hot(y, probs.shape[-1])
        return {"log_prob": prediction.log_prob_of_targets(y), **class_items(probs, soft.to(probs))}

    def summary(self, items: Items, bins: int) -> dict[str, float]:
        return {
            "accuracy": items["correct"].mean().item(),
            "nll": -items["log_prob"].mean().item(),
            "ece": metrics.reliability(items["confidence"], items["correct"], bins).gap.item(),
            "brier": items["brier"].mean().item(),
            "entropy": items["entropy"].mean().item(),
        }

    def caption(self, prediction: Any, y: Tensor | None, index: int) -> str:
        if prediction.probs.ndim != 2:
            return super().caption(prediction, y, index)
        probability, label = prediction.probs[index].max(-1)
        truth = "" if y is None else f"{int(y[index] if y.ndim == 1 else y[index].argmax())} → "
        return f"{truth}{int(label)}\np {float(probability):.2f}"


class Labels(Classes):
    """Yes or no, for one label or several. The NLL is that of an item's labels together; the other scores count each
    label as an item of two classes."""

    uncertainty_name = "entropy of all labels"

    def uncertainty(self, prediction: Any) -> Tensor:
        entropy = metrics.entropy(both(prediction.mean))
        return entropy.flatten(1).sum(-1) if entropy.ndim > 1 else entropy

    def items(self, prediction: Any, y: Tensor) -> dict[str, Tensor]:
        p = prediction.mean
        scores = class_items(both(p), both(y.reshape(p.shape).to(p)))
        return {"log_prob": prediction.log_prob_of_targets(y), **scores}

    def caption(self, prediction: Any, y: Tensor | None, index: int) -> str:
        return f"p {float(prediction.mean[index].max()):.2f}"


class Numbers(Task):
    """Real or counted targets: NLL, RMSE, CRPS, coverage of the central 95 % interval, standard deviation.

    The NLL is that of an item's outputs together; the other scores count each output. CRPS has a closed form where
    the prediction is Gaussian; otherwise it comes from 256 draws, the same at every call.
    """

    columns = (
        Column("nll", False),
        Column("rmse", False),
        Column("crps", False),
        Column("coverage95", None),
        Column("stddev", None),
    )
    uncertainty_name = "standard deviation"

    def uncertainty(self, prediction: Any) -> Tensor:
        variance = prediction.variance
        return (variance.flatten(1).sum(-1) if variance.ndim > 1 else variance).sqrt()

    def items(self, prediction: Any, y: Tensor) -> dict[str, Tensor]:
        mean = prediction.mean
        truth = y.reshape(mean.shape)
        covered = {}
        for level in LEVELS:
            lower, upper = prediction.interval(level)
            covered[f"covered {level}"] = (lower <= truth) & (truth <= upper)
        return {
            "log_prob": prediction.log_prob_of_targets(y),
            "square": (mean - truth).square(),
            "crps": self._crps(prediction, truth),
            "stddev": prediction.variance.sqrt(),
            **covered,
        }

    def _crps(self, prediction: Any, truth: Tensor) -> Tensor:
        """The mean over the batch, repeated for each of its items: so the mean over all items is right."""
        if is_normal(prediction):
            score = metrics.crps(prediction.mean, prediction.stddev, truth)
        else:
            score = metrics.crps_samples(prediction.sample(DRAWS), truth)
        return score.expand(truth.shape)

    def summary(self, items: Items, bins: int) -> dict[str, float]:
        return {
            "nll": -items["log_prob"].mean().item(),
            "rmse": items["square"].mean().sqrt().item(),
            "crps": items["crps"].mean().item(),
            "coverage95": items["covered 0.95"].mean().item(),
            "stddev": items["stddev"].mean().item(),
        }


def task_of(prediction: Prediction) -> Task:
    """How predictions of this kind are scored."""
    if isinstance(prediction, ClassPrediction):
        return Classes()
    if isinstance(prediction, LabelPrediction):
        return Labels()
    if isinstance(prediction, ValuePrediction):
        return Numbers()
    raise UnsupportedOperation(f"there are no scores for predictions of type {type(prediction).__name__}")


def is_normal(prediction: Prediction) -> bool:
    """Whether each output has a Gaussian law: Gaussian noise on an f that is Gaussian, or certain."""
    certain = isinstance(prediction.function, SampledFunction) and len(prediction.function.samples) == 1
    return isinstance(prediction.likelihood, Gaussian) and (prediction.link == "exact" or certain)


def class_items(probs: Tensor, soft: Tensor) -> dict[str, Tensor]:
    """Scores (…) of probabilities (…, K) against soft labels (…, K)."""
    confidence, label = probs.max(-1)
    return {
        "confidence": confidence,
        "correct": label == soft.argmax(-1),
        "brier": (probs - soft).square().sum(-1),
        "entropy": metrics.entropy(probs),
    }


def both(p: Tensor) -> Tensor:
    """(…) probabilities of yes to (…, 2) of no and yes."""
    return torch.stack([1 - p, p], -1)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """(…) to (…, classes); what is ignored (a negative index) becomes class 0 and is masked out by the caller."""
    return torch.nn.functional.one_hot(y.clamp(0, classes - 1), classes)
