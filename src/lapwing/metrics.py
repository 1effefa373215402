"""Scores of predictions: pure functions on tensors, NumPy arrays or pandas series.

Probabilities are (*batch, K) with classes last; targets are class indices (*batch) or soft labels (*batch, K).
Scores are averages over the batch as 0-d float64 tensors; `entropy` is per item. Nothing is clamped: a probability
of zero for what happened is an infinite NLL.

Examples:
    >>> probs, y = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])
    >>> float(metrics.accuracy(probs, y))
    1.0
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import BadData
from lapwing.likelihoods.marginal import normal_crps, sample_crps
from lapwing.model.calls import as_tensors

__all__ = [
    "Rejection", "Reliability", "accuracy", "auroc", "brier", "coverage", "crps", "crps_samples", "ece", "entropy",
    "fpr95", "gaussian_nll", "nll", "rejection", "reliability", "rmse",
]  # fmt: skip


def nll(probs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log probability of the targets, −Σ_k q_k log p_k, in nats.

    Examples:
        >>> probs, y = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])
        >>> round(float(metrics.nll(probs, y)), 4)
        0.3081
    """
    probs, targets = _classes(probs, targets)
    return -(torch.special.xlogy(targets, probs)).sum(-1).mean()


def gaussian_nll(mean: Tensor, stddev: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of ½ log 2πσ² + (y − μ)² / 2σ² over all items and outputs.

    Examples:
        >>> p = regression.predict(inputs)
        >>> nll = metrics.gaussian_nll(p.mean, p.variance, targets)
    """
    mean, stddev, targets = _values(mean, stddev, targets)
    return (0.5 * math.log(2 * math.pi) + stddev.log() + 0.5 * ((targets - mean) / stddev) ** 2).mean()


def accuracy(probs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of items whose most probable class is the target (for soft labels: its most probable class).

    Examples:
        >>> probs, y = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])
        >>> float(metrics.accuracy(probs, y))
        1.0
    """
    probs, targets = _classes(probs, targets)
    return (probs.argmax(-1) == targets.argmax(-1)).double().mean()


def brier(probs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of Σ_k (p_k − q_k)² (Brier 1950: the sum over all classes, so 2(p − y)² for two).

    Examples:
        >>> probs, y = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])
        >>> round(float(metrics.brier(probs, y)), 4)
        0.17
    """
    probs, targets = _classes(probs, targets)
    return (probs - targets).square().sum(-1).mean()


def ece(probs: Tensor, targets: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error of the top class: Σ_b n_b/N · |accuracy_b − confidence_b|.

    `bins` equal-width bins ((b−1)/bins, b/bins] (Guo et al. 2017, Eq. 3, who use 15).

    Examples:
        >>> probs, y = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])
        >>> round(float(metrics.ece(probs, y)), 4)
        0.25
    """
    probs, targets = _classes(probs, targets)
    confidence, label = probs.max(-1)
    return reliability(confidence, label == targets.argmax(-1), bins).gap


@dataclass(frozen=True, eq=False)
class Reliability:
    """Mean confidence, accuracy and number of items in each bin of confidence; each (bins,), zeros in empty bins.

    Examples:
        >>> p = la.predict(x)
        >>> table = metrics.reliability(p.confidence, p.label == y)
        >>> int(table.count.sum())
        8
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def gap(self) -> Tensor:
        """The expected calibration error, Σ_b n_b/N · |accuracy_b − confidence_b|.

        Examples:
            >>> confidence, correct = torch.tensor([0.9, 0.6]), torch.tensor([True, False])
            >>> round(float(metrics.reliability(confidence, correct).gap), 4)
            0.35
        """
        return (self.count * (self.accuracy - self.confidence).abs()).sum() / self.count.sum()


def reliability(confidence: Tensor, correct: Tensor, bins: int = 15) -> Reliability:
    """Sort items into `bins` equal-width bins of confidence, ((b−1)/bins, b/bins].

    `confidence` is the probability of what was predicted and `correct` whether it came true; any shape.

    Examples:
        >>> confidence, correct = torch.tensor([0.9, 0.6]), torch.tensor([True, False])
        >>> metrics.reliability(confidence, correct, bins=2).accuracy
        tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    confidence, correct = _tensors(confidence, correct)
    _same(confidence, correct)
    if bins < 1:
        raise BadData(f"bins must be at least 1, got {bins}")
    confidence, correct = confidence.double().flatten(), correct.double().flatten()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    which = torch.bucketize(confidence, edges[1:-1])
    rows = torch.stack([confidence, correct, torch.ones_like(correct)])
    total = torch.zeros((3, bins), dtype=torch.float64, device=confidence.device).index_add(1, which, rows)
    return Reliability(total[0] / total[2].clamp(min=1), total[1] / total[2].clamp(min=1), total[2])


def entropy(probs: Tensor) -> Tensor:
    """Return −Σ_k p_k log p_k per item, in nats: (*batch, K) to (*batch).

    Examples:
        >>> metrics.entropy(torch.tensor([0.5, 0.5]))
        tensor(0.6931)
    """
    return torch.special.entr(*_tensors(probs)).sum(-1)


def rmse(mean: Tensor, targets: Tensor) -> Tensor:
    """Return the root of the mean squared error over all items and outputs, in the targets' units.

    Examples:
        >>> round(float(metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))), 4)  # predicted, true
        1.4142
    """
    mean, targets = _values(mean, targets)
    return (mean - targets).square().mean().sqrt()


def crps(mean: Tensor, stddev: Tensor, targets: Tensor) -> Tensor:
    """Return the mean continuous ranked probability score of Gaussian predictions, in the targets' units.

    σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − μ)/σ (Gneiting and Raftery 2007, Eq. 21 with
    the sign reversed: less is better).

    Examples:
        >>> p = regression.predict(inputs)
        >>> score = metrics.crps(p.mean, p.variance, targets)
    """
    mean, stddev, targets = _values(mean, stddev, targets)
    return normal_crps(mean, stddev, targets).mean()


def crps_samples(samples: Tensor, targets: Tensor) -> Tensor:
    """Return the score of `crps` from draws: E|X − y| − ½ E|X − X′| with samples (n, *batch), n ≥ 2.

    The second term averages over pairs of different draws (divided by n(n − 1)), which makes it unbiased.

    Examples:
        >>> p = regression.predict(inputs)
        >>> score = metrics.crps_samples(p.sample(100), targets)
    """
    samples, targets = _tensors(samples, targets)
    n = samples.shape[0]
    if n < 2:
        raise BadData(f"the score needs at least 2 samples, got {n}")
    _same(samples[0], targets)
    return sample_crps(samples, targets).mean()


def coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> Tensor:
    """Return the share of targets with lower ≤ y ≤ upper; compare with the level of the interval.

    Examples:
        >>> low, high = regression.predict(inputs).interval(0.95)
        >>> share = metrics.coverage(low, high, targets)
    """
    lower, upper, targets = _values(lower, upper, targets)
    return ((lower <= targets) & (targets <= upper)).double().mean()


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the probability that an outside item scores higher than an inside one, ties counting half.

    Scores are any shape and grow with strangeness (entropy, novelty). 1 separates perfectly, ½ is chance.

    Examples:
        >>> float(metrics.auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9])))  # inside, outside
        0.75
    """
    inside, outside = _scores(inside, outside)
    ordered = inside.sort().values
    below = torch.searchsorted(ordered, outside, right=False)
    up_to = torch.searchsorted(ordered, outside, right=True)
    return (below + up_to).double().mean() / (2 * len(inside))


def fpr95(inside: Tensor, outside: Tensor, rate: float = 0.95) -> Tensor:
    """Return the share of outside items that pass for inside at the threshold that keeps `rate` of the inside items.

    Inside is the positive class (Liang et al. 2018): the threshold is the smallest score t with at least `rate` of the
    inside scores ≤ t; an outside item passes if its score is ≤ t. Less is better.

    Examples:
        >>> float(metrics.fpr95(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9])))  # inside, outside
        0.5
    """
    inside, outside = _scores(inside, outside)
    kept = math.ceil(rate * len(inside) - 1e-9)
    threshold = inside.sort().values[max(kept, 1) - 1]
    return (outside <= threshold).double().mean()


@dataclass(frozen=True, eq=False)
class Rejection:
    """What a model gains by not answering its most doubtful items. Made by `rejection`.

    One entry per possible threshold, the most trusted items first, each (n,) in float64: `share` is the part of the
    items that is answered at that threshold, `risk` the share of wrong answers among them (for numbers the root mean
    squared error), `thresholds` the value to pass to `p.abstain`.

    Examples:
        >>> curve = metrics.rejection(la.predict(x), y)
        >>> curve.share.shape, curve.risk.shape
        (torch.Size([8]), torch.Size([8]))
    """

    share: Tensor
    risk: Tensor
    thresholds: Tensor
    by: str
    numbers: bool

    @property
    def accuracy(self) -> Tensor:
        """The share of right answers among those given, 1 − risk; numbers are neither right nor wrong.

        Examples:
            >>> metrics.rejection(la.predict(x), y).accuracy.shape
            torch.Size([8])
        """
        if self.numbers:
            raise BadData("numbers have no accuracy: use .risk, their root mean squared error")
        return 1 - self.risk

    @property
    def area(self) -> Tensor:
        """The mean risk over all shares, the area under the risk-coverage curve (Geifman and El-Yaniv 2017).

        Examples:
            >>> area = metrics.rejection(la.predict(x), y).area
        """
        width = torch.diff(self.share, prepend=self.share.new_zeros(1))
        return (self.risk * width).sum()

    def threshold(self, risk: float) -> float:
        """Return the threshold that answers most items with at most this risk on these data.

        The risk on new data is close to it only if these data are held out, many, and like the new data.

        Examples:
            >>> threshold = metrics.rejection(la.predict(x), y).threshold(risk=0.2)
        """
        if not (risk >= 0 and (self.numbers or risk <= 1)):
            allowed = "an error, at least 0" if self.numbers else "a share of wrong answers, from 0 to 1"
            raise BadData(f"the risk is {allowed}, got {risk!r}")
        below = (self.risk <= risk).nonzero()
        if not len(below):
            raise BadData(
                f"no threshold reaches a risk of {risk:g} on these data: the most trusted items have "
                f"{float(self.risk.min()):.3g} at best"
            )
        return float(self.thresholds[below[-1, 0]])

    def table(self, shares: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)) -> str:
        """Return a few points of the curve as text.

        Examples:
            >>> print(metrics.rejection(la.predict(x), y).table())
        """
        lines = [f"{'answered':>8}  {'RMSE' if self.numbers else 'accuracy':>8}  {self.by:>10}"]
        for wanted in shares:
            k = min(int((self.share < wanted - 1e-12).sum()), len(self.share) - 1)
            value = self.risk[k] if self.numbers else self.accuracy[k]
            lines.append(f"{float(self.share[k]):8.1%}  {float(value):8.4f}  {float(self.thresholds[k]):10.4g}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Rejection({len(self.share)} thresholds of {self.by}, area {float(self.area):.4g})"


def rejection(prediction: Any, targets: Any, *, by: str | None = None) -> Rejection:
    """Return the accuracy against the share of items answered, for a model that abstains where it doubts.

    Items are judged by their confidence, numbers by their standard deviation, or by another field, such as
    by="epistemic". Items with the same value are answered together; targets that the likelihood ignores do not count.

    Examples:
        >>> curve = metrics.rejection(la.predict(x), y)  # held-out data in practice
        >>> refused = la.predict(noise).abstain(curve.threshold(risk=0.2))
    """
    f = prediction.function.mean
    by = prediction.doubt_name if by is None else by
    y = prediction.likelihood.targets(f, torch.as_tensor(as_tensors(targets)))
    scores, doubt = prediction.scores(y), prediction.doubt(by)
    numbers = "correct" not in scores
    loss = scores["square"] if numbers else 1 - scores["correct"].double()
    if doubt.shape != loss.shape:
        raise BadData(f"by={by!r} has shape {tuple(doubt.shape)}, the predictions {tuple(loss.shape)}: use another")
    mask = prediction.likelihood.mask(f, y)
    if mask is not None:
        loss, doubt = loss[mask], doubt[mask]
    loss, doubt = loss.detach().double().cpu().flatten(), doubt.detach().double().cpu().flatten()
    if not len(loss):
        raise BadData("there is nothing to score: no target counts")
    if doubt.isnan().any():
        raise BadData("a score is NaN: find the prediction that is not finite first")
    order = doubt.argsort(stable=True)
    doubt, loss = doubt[order], loss[order]
    last = torch.cat(
        [doubt[1:] != doubt[:-1], torch.ones(1, dtype=torch.bool, device=loss.device)]
    )  # of items with the same value
    answered = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    risk = loss.cumsum(0) / answered
    thresholds = -doubt if by == "confidence" else doubt
    return Rejection(
        (answered / len(loss))[last], (risk.sqrt() if numbers else risk)[last], thresholds[last], by, numbers
    )


def _tensors(*values: Any) -> list[Tensor]:
    """Return tensors as they are, and arrays, series and plain numbers as tensors."""
    return [torch.as_tensor(as_tensors(value)) for value in values]


def _classes(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 probabilities (*b, K) and targets as soft labels of the same shape."""
    probs, targets = _tensors(probs, targets)
    if probs.ndim < 2 or not probs.numel():
        raise BadData(f"expected probabilities of shape (*batch, classes) that are not empty, got {tuple(probs.shape)}")
    if not probs.isfinite().all():
        raise BadData("a probability is NaN or infinite: find the prediction that is not finite first")
    probs, k = probs.double(), probs.shape[-1]
    if targets.shape == probs.shape and targets.is_floating_point():
        return probs, targets.to(probs)
    _same(probs[..., 0], targets)
    if targets.is_floating_point():
        raise BadData(f"class targets of shape {tuple(targets.shape)} must be integers, got {targets.dtype}")
    labels = targets.to(probs.device).long()
    if labels.min() < 0 or labels.max() >= k:
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise BadData(f"class target {int(worst)} is outside 0..{k - 1}: leave ignored items out before scoring")
    return probs, torch.nn.functional.one_hot(labels, k).to(probs)


def _values(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return float64 tensors of one shape; a wrong broadcast, (n, 1) against (n,), is the classic silent error.

    Predictions (n, 1) and targets (n,), or the other way round, are one output, and are laid side by side.
    """
    *parts, targets = (t.double() for t in _tensors(*tensors))
    predicted = torch.broadcast_tensors(*parts)
    shape = predicted[0].shape
    if shape == (*targets.shape, 1):
        predicted = tuple(part[..., 0] for part in predicted)
    elif targets.shape == (*shape, 1):
        targets = targets[..., 0]
    _same(predicted[0], targets)
    if not targets.numel():
        raise BadData("there is nothing to score: the targets are empty")
    return (*predicted, targets)


def _same(predicted: Tensor, targets: Tensor) -> None:
    if predicted.shape != targets.shape:
        shapes = f"predictions of shape {tuple(predicted.shape)} need targets of that shape, got {tuple(targets.shape)}"
        raise BadData(shapes)


def _scores(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    inside, outside = (each.double().flatten() for each in _tensors(inside, outside))
    if not len(inside) or not len(outside):
        raise BadData(f"both sides need at least one score, got {len(inside)} inside and {len(outside)} outside")
    if inside.isnan().any() or outside.isnan().any():
        raise BadData("a score is NaN: find the prediction that is not finite first")
    return inside, outside
