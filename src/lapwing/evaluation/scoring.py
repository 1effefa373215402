"""Run one model over data and collect the scores of every item.

Scores of strangeness are higher for inputs unlike the training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lapwing.errors import BadData, UnsupportedModel, UnsupportedOperation
from lapwing.evaluation.examples import Example, Viewer, merged, per_item
from lapwing.evaluation.meter import Cost, measure
from lapwing.likelihoods import Likelihood
from lapwing.model import last_layer
from lapwing.model.batches import Batches
from lapwing.model.calls import Inputs, as_tensors, batch_size, call, explained, output_tensor
from lapwing.model.copies import borrowed
from lapwing.predictive import Prediction, SampledFunction, predict_targets

Items = Mapping[str, Tensor]  # the scores of all items, by name
NOTHING = 1e-5  # of the uncertainty: an epistemic part below it is rounding


def strangeness(prediction: Prediction, outside: bool, novelty: bool) -> dict[str, Tensor]:
    """Return the scores of strangeness that a prediction has besides its uncertainty, with its novelty if asked for."""
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
    found = Features(module, *owners)
    if type(module.get_submodule(found.layer)) is not nn.Linear:
        return None
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
        >>> from lapwing.evaluation.scoring import Mahalanobis, features_of
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


@dataclass(frozen=True, eq=False)
class Result:
    """The scores of one model on test items and outside items, and what predicting the test set cost.

    `items` are scores that need targets, `scores` are scores of strangeness. If a score has several entries per item,
    `owners` has the number of the item that each entry belongs to. `examples` are the most "uncertain" and the most
    "wrong" test items, `x` the inputs of a curve, and `about` the settings of the model.
    """

    kind: type[Prediction]  # of its predictions
    items: Items
    scores: Items
    outside: Mapping[str, Scored]
    cost: Cost
    count: int
    examples: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    owners: Mapping[str, Tensor] = field(default_factory=dict)
    x: Tensor | None = None
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def novelty(self) -> Tensor | None:
        """The novelty of the test items, or None if it was not computed."""
        return self.scores.get("novelty")


@dataclass(frozen=True, eq=False)
class Run:
    """A model as a function from inputs to a prediction, with the device for its inputs and its module."""

    predict: Callable[[Any], Prediction]
    device: torch.device
    module: nn.Module


@dataclass(frozen=True, eq=False)
class Reader:
    """One data set as a model reads it, with a progress bar."""

    data: Any
    run: Run
    split: Callable[[Any], tuple] | None
    label: str
    progress: bool | None

    @property
    def _batches(self) -> Batches:
        data = as_tensors(self.data) if hasattr(self.data, "__array__") else self.data
        data = (data, torch.zeros(len(data))) if isinstance(data, Tensor) else data
        return Batches(data, self.run.module, self.run.device, self.split)

    def labeled(self) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of each batch."""
        for batch in self._bar(self._batches):
            yield batch.inputs, batch.targets

    def unlabeled(self) -> Iterator[tuple[Any, None]]:
        """Yield (inputs, None) of each batch that is not empty, whether it has targets or not."""
        batches = self._batches
        for inputs in self._bar(batches.unlabeled()):
            if batch_size(inputs):
                yield batches.placed(inputs), None

    def quiet(self) -> Reader:
        """Return the reader without its bar."""
        return replace(self, progress=False)

    def _bar(self, source: Iterable[Any]) -> Iterable[Any]:
        """Show a bar always, never, or (None) on a terminal if it takes a second."""
        hide, total = (None if self.progress is None else not self.progress), self._batches.length
        return tqdm(source, self.label, total, leave=False, disable=hide, delay=0 if self.progress else 1)


def run_of(model: Any, likelihood: Likelihood | None) -> Run:
    """Make a `Run` of a network, or of an object with `.predict`."""
    if hasattr(model, "predict"):
        held = (getattr(model, "module", None), getattr(getattr(model, "network", None), "module", None))
        module = next((each for each in held if isinstance(each, nn.Module)), None) or nn.Identity()
        return Run(model.predict, device_of(module), module)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise BadData(f"a model is a {kind}: pass an nn.Module, or an object with predict(x) such as a Laplace object")
    if likelihood is None:
        raise BadData("a plain network has no likelihood: pass likelihood='classification', 'regression', …")
    return Run(lambda inputs: point_prediction(model, inputs, likelihood), device_of(model), model)


def point_prediction(
    model: nn.Module, inputs: Inputs, likelihood: Likelihood, temperature: float = 1.0, differentiable: bool = False
) -> Prediction:
    """Return p(y | f(x)/T) for a network without a posterior: the distribution of f is one point."""
    with borrowed(model) as own, torch.set_grad_enabled(differentiable), explained(inputs):
        raw = output_tensor(call(own, inputs)) / temperature
    f = likelihood.outputs(raw)
    return predict_targets(SampledFunction(None, f[None]), likelihood, scalar=raw.ndim == 1)


def evaluate_one(run: Run, readers: Mapping[str, Reader], asked: Asked) -> Result:
    """Score one model on "test" and each "ood …". The clock runs while the test set is predicted and scored."""
    distance = mahalanobis(run, readers["test"], asked)
    one = partial(one_batch, run, asked, distance)
    scored, cost = measure(lambda: Scored.of(one(*batch) for batch in readers["test"].labeled()), run.device)
    outside = {
        key.removeprefix("ood "): Scored.of(one(*batch) for batch in reader.unlabeled())
        for key, reader in readers.items()
        if key.startswith("ood ")
    }
    seen = [scored.scores, *(each.scores for each in outside.values())]
    if not any(doubts(scores) for scores in seen):  # a network without a posterior has no doubt about its function
        seen = [{name: v for name, v in scores.items() if name != "epistemic"} for scores in seen]
        outside = {place: replace(each, scores=own) for (place, each), own in zip(outside.items(), seen[1:])}
    return Result(
        scored.kind, scored.items, seen[0], outside, cost, scored.count, scored.examples, scored.owners, scored.x,
        asked.about,
    )  # fmt: skip


def doubts(scores: Items) -> bool:
    """Whether the epistemic uncertainty of some item is more than rounding."""
    if "epistemic" not in scores:
        return False
    return bool((scores["epistemic"].amax() > NOTHING * scores["uncertainty"].abs().amax()).item())


def mahalanobis(run: Run, test: Reader, asked: Asked) -> Mahalanobis | None:
    """Return the Mahalanobis score of a linear last layer; None for other networks, or without training data."""
    if asked.train is None or not asked.outside:
        return None
    first = next(iter(test.quiet().labeled()), None)
    if first is None or run.predict(first[0]).kind != "classes":
        return None
    features = features_of(run.module, first[0])
    if features is None:
        return None
    if id(run.module) not in asked.known:  # several models may share a network
        asked.known[id(run.module)] = Mahalanobis.of(features, replace(test, data=asked.train).quiet().labeled())
    return asked.known[id(run.module)]


@dataclass(frozen=True, eq=False)
class Asked:
    """The options of an evaluation: which scores of strangeness are wanted, and how items are shown."""

    outside: bool
    novelty: bool
    train: Any
    viewer: Viewer
    about: Mapping[str, str]
    known: dict[int, Mahalanobis]  # by the network they belong to


@dataclass(frozen=True, eq=False)
class Scored:
    """The scores of a data set, or of one batch."""

    kind: type[Prediction]
    items: Items
    scores: Items
    owners: Mapping[str, Tensor]  # the item of each entry, for every name of `items` and `scores`
    examples: Mapping[str, tuple[Example, ...]]
    x: Tensor | None
    count: int

    @classmethod
    def of(cls, batches: Iterable[Scored]) -> Scored:
        parts = list(batches)
        if not parts:
            raise BadData("a data set of `ood` holds no items")
        starts = [sum(part.count for part in parts[:k]) for k in range(len(parts))]
        count = sum(part.count for part in parts)
        owners = {
            name: torch.cat([part.owners[name] + start for part, start in zip(parts, starts)])
            for name in parts[0].owners
        }
        whole = torch.arange(count)
        return cls(
            parts[0].kind,
            {name: torch.cat([part.items[name] for part in parts]) for name in parts[0].items},
            {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores},
            {name: each for name, each in owners.items() if not torch.equal(each, whole)},
            {name: merged([part.examples[name] for part in parts]) for name in parts[0].examples},
            None if any(part.x is None for part in parts) else torch.cat([p.x for p in parts if p.x is not None]),
            count,
        )


def one_batch(run: Run, asked: Asked, distance: Mahalanobis | None, inputs: Any, targets: Any | None) -> Scored:
    """Score one batch, flat, in float64 on the CPU; items that the likelihood ignores are left out."""
    prediction = run.predict(inputs)
    if not hasattr(prediction, "likelihood"):
        raise BadData(
            f"predict(x) of a model returned a {type(prediction).__name__}; expected a lapwing Prediction. For an "
            "estimator of lapwing.sklearn, pass its .laplace_"
        )
    y = prediction.likelihood.targets(prediction.function.mean, targets) if targets is not None else None
    mask = None if y is None else prediction.likelihood.mask(prediction.function.mean, y)
    raw = {} if y is None else prediction.scores(y)
    uncertainty = prediction.uncertainty
    strange = {"uncertainty": uncertainty, **strangeness(prediction, asked.outside, asked.novelty)}
    if distance is not None:
        strange["mahalanobis"] = distance(inputs)
    owner = {name: owner_of(values, mask) for name, values in (raw | strange).items()}
    ranks = {"uncertain": per_item(uncertainty)}
    if y is not None:
        ranks["wrong"] = per_item(-raw["log_prob"])
    return Scored(
        type(prediction),
        {name: flat(values, mask) for name, values in raw.items()},
        {name: flat(values, mask) for name, values in strange.items()},
        owner,
        {name: asked.viewer.picked(prediction, inputs, y, rank) for name, rank in ranks.items()},
        line_of(prediction, inputs),
        batch_size(inputs),
    )


def flat(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the entries that count as one row. A mask (B, *event) does not apply to values of whole items."""
    if mask is not None and values.shape[: mask.ndim] == mask.shape:
        values = values[mask.to(values.device)]
    return values.detach().flatten().double().cpu()


def owner_of(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of the item, in its batch, that each entry of `flat(values, mask)` belongs to."""
    rows = torch.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1)).expand(values.shape)
    return flat(rows, mask).long()


def line_of(prediction: Prediction, inputs: Any) -> Tensor | None:
    """Return inputs of one dimension whose target is one number, (B,), over which a band can be drawn; else None."""
    if prediction.kind != "numbers" or not isinstance(inputs, Tensor) or inputs.numel() != len(inputs):
        return None
    return flat(inputs, None) if prediction.mean.numel() == len(inputs) else None


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer; the CPU for a model without any."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
