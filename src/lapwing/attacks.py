"""Attacks on inputs through the predictive distribution of any method (Ritter et al. 2018, section 5.3).

An attack differentiates log p(y | x) of the whole predictive distribution, the average over networks included, and not
that of one network. `predictor` is anything with `predict(x) -> Prediction`: a posterior, a baseline of
`lapwing.baselines`, or an object of your own whose probabilities have gradients to x. A plain network is
`lapwing.baselines.DeepEnsemble([model], "classification")`.

Examples:
    >>> moved = lapwing.attacks.fgsm(la, x, 0.1)
    >>> fooled = la.predict(moved).label != la.predict(x).label
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.predictive import Prediction

__all__ = ["Predictor", "fgsm", "targeted"]


class Predictor(Protocol):
    """Anything that predicts labels.

    Examples:
        >>> moved = attacks.fgsm(baselines.DeepEnsemble([model], "classification"), x, 0.1)
    """

    def predict(self, x: Any) -> Prediction: ...


def fgsm(
    predictor: Predictor,
    x: Tensor,
    steps: float | Sequence[float] | Tensor,
    *,
    scale: float | Tensor = 1.0,
    bounds: tuple[float, float] | None = None,
    **options: Any,
) -> Tensor:
    """Move inputs against the class that is predicted, by the sign of the gradient (Goodfellow et al. 2015).

        x_adv = x − η · scale · sign(∇_x max_y log p(y | x))

    `steps` are step sizes η: a number gives inputs of the shape of x, several give one set of inputs per step size,
    (len(steps), *x.shape), all from the same gradient. `scale` is the range of the data, a number or a tensor that
    broadcasts with x; `bounds` clip the result. `options` go to `predictor.predict`, such as method="sampled".

    Examples:
        >>> for moved in lapwing.attacks.fgsm(la, x, [0.1, 0.2, 0.3]):
        ...     p = la.predict(moved)
    """
    try:
        sizes = torch.as_tensor(steps, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        sizes = torch.empty(0)
    if not sizes.numel() or not bool(sizes.isfinite().all()):
        raise BadData(f"steps are step sizes, one or several finite numbers, got {steps!r}")
    slope = _slope(predictor, _movable(x), None, options)
    moved = torch.stack([_clipped(x - eta * scale * slope.sign(), bounds) for eta in sizes.reshape(-1).tolist()])
    return moved if sizes.ndim else moved[0]


def targeted(
    predictor: Predictor,
    x: Tensor,
    target: int | Tensor,
    step: float,
    steps: int | Sequence[int],
    *,
    scale: float | Tensor = 1.0,
    bounds: tuple[float, float] | None = None,
    **options: Any,
) -> Tensor:
    """Move inputs towards a class by signs of gradients, `steps` times a step of size `step` = η.

        x_{t+1} = x_t + η · scale · sign(∇_x log p(target | x_t))

    `target` is a class, or one per input. A number of `steps` gives inputs of the shape of x; several numbers give the
    inputs after each, (len(steps), *x.shape), from one run. `scale`, `bounds` and `options` are as in `fgsm`.

    Examples:
        >>> path = lapwing.attacks.targeted(la, x, target=0, step=0.1, steps=range(4))
        >>> path.shape  # after 0, 1, 2 and 3 steps
        torch.Size([4, 8, 4])
    """
    several = isinstance(steps, Iterable)
    wanted = [int(k) for k in steps] if isinstance(steps, Iterable) else [steps] if isinstance(steps, int) else []
    if not wanted or min(wanted) < 0:
        raise BadData(f"steps are numbers of steps, at least 0, got {steps!r}")
    path, labels = [_movable(x)], torch.as_tensor(target)
    for _ in range(max(wanted)):
        slope = _slope(predictor, path[-1], labels, options)
        path.append(_clipped(path[-1] + step * scale * slope.sign(), bounds))
    return torch.stack([path[k] for k in wanted]) if several else path[wanted[0]]


def _movable(x: Any) -> Tensor:
    """Return the inputs without their graph; refuse anything but a tensor of real numbers."""
    if not isinstance(x, Tensor):
        raise BadData(f"an attack moves a tensor of real numbers, got {type(x).__name__}: pass torch.as_tensor(x)")
    if not x.is_floating_point():
        raise BadData(f"an attack moves a tensor of real numbers, got {x.dtype}: pass x.float()")
    return x.detach()


def _slope(predictor: Predictor, x: Tensor, target: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Return ∇_x log p(target | x), of the predicted label where no target is given."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        prediction = _predict(predictor)(x, **options)
        label = getattr(prediction, "label", None)
        if label is None:
            raise UnsupportedOperation(f"attacks are on classes and labels, and {prediction!r} has none")
        aim = label.detach() if target is None else target.to(label)
        if aim.shape not in ((), label.shape):
            raise BadData(f"target is one class, or one per input, {tuple(label.shape)}; got shape {tuple(aim.shape)}")
        aim = aim.expand(label.shape)
        value = prediction.log_prob(aim).sum()
        if not value.requires_grad:
            raise UnsupportedOperation(
                f"the prediction of {type(predictor).__name__} has no gradient to x: its predict(x) must keep the "
                "graph, or take differentiable=True"
            )
        (slope,) = torch.autograd.grad(value, x, allow_unused=True)
    if slope is None or not bool(slope.isfinite().all()):
        raise UnsupportedOperation("the gradient of the prediction to x is missing or not finite")
    return slope


def _predict(predictor: Predictor) -> Callable[..., Prediction]:
    """Return `predict`, asked for gradients where it has that option."""
    predict = getattr(predictor, "predict", None)
    if predict is None:
        raise BadData(
            f"{type(predictor).__name__} has no predict(x): pass a posterior or a baseline, and a plain network as "
            "lapwing.baselines.DeepEnsemble([model], 'classification')"
        )
    names = inspect.signature(predict).parameters
    return (lambda x, **options: predict(x, differentiable=True, **options)) if "differentiable" in names else predict


def _clipped(x: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    return x.detach() if bounds is None else x.detach().clamp(*bounds)
