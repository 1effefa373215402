"""Scores of strangeness: numbers that are higher for inputs unlike the training data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedModel, UnsupportedOperation
from lapwing.model import last_layer
from lapwing.model.calls import call, explained
from lapwing.model.copies import borrowed
from lapwing.predictive import Prediction


def strangeness(prediction: Prediction, outside: bool, novelty: bool) -> dict[str, Tensor]:
    """Return the scores of strangeness that a prediction has beside its uncertainty, and its novelty if asked for."""
    found: dict[str, Tensor] = {}
    if outside:
        doubt = prediction.epistemic
        if prediction.kind != "classes":
            doubt = doubt.flatten(1).sum(-1) if doubt.ndim > 1 else doubt
        found["epistemic"] = doubt.sqrt() if prediction.kind == "numbers" else doubt
        if prediction.kind == "classes" and prediction.likelihood.has_logits:
            f = prediction.function.mean
            found |= {"energy": energy(f), "maxlogit": max_logit(f)}
    if novelty:
        try:
            found["novelty"] = prediction.novelty
        except UnsupportedOperation:
            pass
    return found


@dataclass(frozen=True, eq=False)
class Features:
    """The inputs of a network's last linear layer. Made by `features_of`.

    Example: `features_of(model, x)(x)` has shape (B, width).
    """

    module: nn.Module
    layer: str

    def __call__(self, inputs: Any) -> Tensor:
        """Return the inputs of the last layer, (B, *event, width), in float64 on the CPU."""
        seen: list[Tensor] = []
        with borrowed(self.module) as own, torch.no_grad(), explained(inputs):
            handle = own.get_submodule(self.layer).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
            try:
                call(own, inputs)
            finally:
                handle.remove()
        if len(seen) != 1:
            raise UnsupportedModel(f"the last layer {self.layer!r} ran {len(seen)} times, not once")
        return seen[0].detach().double().cpu()


def features_of(module: nn.Module, inputs: Any) -> Features | None:
    """Return the features of a network whose last layer is an `nn.Linear` that runs once; else None."""
    try:
        names = last_layer(module, inputs)
    except UnsupportedModel:
        return None
    owners = {name.rpartition(".")[0] for name in names if name.endswith("weight") or name.endswith("bias")}
    if len(owners) != 1:
        return None
    (owner,) = owners
    if type(module.get_submodule(owner)) is not nn.Linear:
        return None
    found = Features(module, owner)
    try:
        found(inputs)
    except UnsupportedModel:
        return None
    return found


@dataclass(frozen=True, eq=False)
class Mahalanobis:
    """The squared distance of features from the nearest class mean, in units of the covariance within classes.

    min_c (a − μ_c)ᵀ Σ⁺ (a − μ_c) with the means and the shared covariance of the training features (Lee et al. 2018,
    Eqs. 1 and 2), and the pseudo-inverse of Σ, since features may be constant.

    Examples:
        >>> from lapwing.evaluation.strangeness import Mahalanobis, features_of
        >>> score = Mahalanobis.of(features_of(model, x), train_loader)
        >>> score(x).shape
        torch.Size([8])
    """

    features: Features
    means: Tensor  # (C, d)
    root: Tensor  # (d, r), Σ⁺ = R Rᵀ

    @classmethod
    def of(cls, features: Features, batches: Iterable[tuple[Any, Tensor]]) -> Mahalanobis:
        """Compute means and covariance in one pass over labeled training batches; negative labels do not count."""
        rows, labels = [], []
        for inputs, y in batches:
            a, y = features(inputs), y.detach().cpu()
            y = y.argmax(-1) if y.is_floating_point() else y
            if a.shape[:-1] != y.shape:
                raise BadData(f"features of shape {tuple(a.shape)} need one label per row, got {tuple(y.shape)}")
            rows.append(a.flatten(0, -2)[y.flatten() >= 0])
            labels.append(y.flatten()[y.flatten() >= 0])
        a, y = torch.cat(rows), torch.cat(labels)
        if not len(a):
            raise BadData("the training data for the Mahalanobis score hold no labeled item")
        classes, place, count = y.unique(return_inverse=True, return_counts=True)
        means = torch.zeros(len(classes), a.shape[1], dtype=a.dtype).index_add(0, place, a) / count[:, None]
        centered = a - means[place]
        values, vectors = torch.linalg.eigh(centered.mT @ centered / len(a))
        kept = values > values[-1].clamp(min=0) * max(a.shape) * torch.finfo(a.dtype).eps
        return cls(features, means, vectors[:, kept] * values[kept].rsqrt())

    def __call__(self, inputs: Any) -> Tensor:
        """Return the score per item, (B, *event)."""
        white = self.features(inputs) @ self.root
        return torch.stack([(white - mean @ self.root).square().sum(-1) for mean in self.means]).amin(0)


def energy(f: Tensor) -> Tensor:
    """Return −log Σ_k exp f_k of logits (…, C), which is high for strange inputs (Liu et al. 2020, Eq. 4 at T = 1)."""
    return -f.logsumexp(-1)


def max_logit(f: Tensor) -> Tensor:
    """Return −max_k f_k of logits (…, C), which is high for strange inputs (Hendrycks et al. 2022)."""
    return -f.amax(-1)
