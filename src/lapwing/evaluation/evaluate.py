"""Run models over data and keep what a report needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lapwing.curvature.shards import require_one_process
from lapwing.errors import BadData, UnsupportedOperation, warn
from lapwing.evaluation.meter import measure
from lapwing.evaluation.report import Gallery, Items, Outside, Report, Result
from lapwing.evaluation.temperature import device_of, point_prediction
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model.batches import Batches
from lapwing.model.inputs import as_tensors, batch_size
from lapwing.model.module import outside_autocast
from lapwing.predictive import Prediction

PICTURES = 16


@outside_autocast
def evaluate(
    models: Mapping[str, Any],
    data: Any,
    *,
    ood: Mapping[str, Any] | None = None,
    likelihood: str | Likelihood | None = None,
    bins: int = 15,
    novelty: bool | None = None,
    split: Callable[[Any], tuple] | None = None,
    progress: bool | None = None,
) -> Report:
    """Score models on the same test data, and on data unlike what they were trained on.

    `models` maps names to networks, `Laplace` objects or baselines (anything with `.predict(x)` returning a
    `Prediction`). `data` is read as in `lapwing.fit`; the sets of `ood` need no targets, and a tensor of
    inputs is enough. Plain networks are scored under `likelihood`; without it, under that of the first model that
    has one. Classification is scored by accuracy, NLL, ECE with `bins` bins, Brier score and entropy; regression by
    NLL, RMSE, CRPS, coverage and standard deviation; `ood` adds AUROC and FPR95; all get seconds and peak memory.
    `novelty` computes that score of every item, which costs about as much as another prediction: by default only
    where there is `ood` to compare with. `split` reads batches as in `fit`; without it a posterior reads them with the
    split of its own fit, and a plain network with that of the first posterior beside it. `progress`: True shows a bar,
    False none, None only on a terminal.

    Example:
        >>> report = lapwing.evaluate({"MAP": model, "Laplace": la}, test_loader, ood={"notMNIST": images})
        >>> print(report.table("accuracy", "nll", "ece", "auroc notMNIST"))
    """
    require_one_process("evaluate")
    if not models:
        raise BadData("evaluate needs at least one model: pass {'MAP': model, 'Laplace': la}")
    shared = find_likelihood(models, likelihood)
    runs = {name: run_of(model, shared) for name, model in models.items()}
    for source in (data, *(ood or {}).values()):
        if len(runs) > 1 and not isinstance(source, Tensor):
            Batches(source, nn.Identity(), torch.device("cpu")).require_reiterable("evaluating several models")
    splits = [split_of(model) for model in models.values()]
    usual = split or next((each for each in splits if each is not None), None)
    results = {}
    for (name, run), own in zip(runs.items(), splits):
        chosen = split or own or usual
        readers = {"test": Reader(data, run, chosen, f"{name}: test", progress)}
        for place, others in (ood or {}).items():
            way = split if hasattr(others, "__array__") else chosen  # bare inputs have no batches of the fit's form
            readers[f"ood {place}"] = Reader(others, run, way, f"{name}: {place}", progress)
        results[name] = evaluate_one(run, readers, novelty=bool(ood) if novelty is None else novelty)
    return Report(results, bins)


@dataclass(frozen=True, eq=False)
class Run:
    """A model as a function from inputs to a prediction, where its inputs belong, and the module behind it."""

    predict: Callable[[Any], Prediction]
    device: torch.device
    module: nn.Module


def run_of(model: Any, likelihood: Likelihood | None) -> Run:
    """Return a network, or an object with `.predict`, as a `Run`."""
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


def split_of(model: Any) -> Callable[[Any], tuple] | None:
    """Return the `split` that a posterior was fitted with, if any."""
    return getattr(getattr(model, "options", None), "split", None)


def find_likelihood(models: Mapping[str, Any], likelihood: str | Likelihood | None) -> Likelihood | None:
    """Return the likelihood asked for; without one, or without its noise, that of the first model that has one."""
    asked = None if likelihood is None else resolve_likelihood(likelihood)
    if asked is not None and asked.known:
        return asked
    found = (getattr(model, "likelihood", None) for model in models.values())
    alike = type(asked) if asked is not None else Likelihood
    first = next((one for one in found if isinstance(one, alike)), None)
    if first is None and asked is not None:
        warn(
            f"the noise of the network is unknown and counts as 1 ({asked}): NLL, CRPS and coverage mean little. Give "
            "it, as in likelihood=lapwing.Gaussian(noise=0.3), or evaluate a fitted posterior beside the network",
        )
    return first or asked


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

    def _bar(self, source: Iterable[Any]) -> Iterable[Any]:
        """Show a bar always, never, or (None) on a terminal if it takes a second."""
        hide, total = (None if self.progress is None else not self.progress), self._batches.length
        return tqdm(source, self.label, total, leave=False, disable=hide, delay=0 if self.progress else 1)


def evaluate_one(run: Run, readers: Mapping[str, Reader], novelty: bool = True) -> Result:
    """Score one model on "test" and each "ood …". The clock runs while the test set is predicted and scored."""
    scores, cost = measure(lambda: Scores.of(run, readers["test"].labeled(), novelty), run.device)
    outside = {}
    for key, reader in readers.items():
        if key.startswith("ood "):
            seen = Scores.of(run, reader.unlabeled(), novelty)
            outside[key.removeprefix("ood ")] = Outside(seen.uncertainty, seen.novelty, seen.gallery)
    return Result(
        scores.kind, scores.items, scores.uncertainty, scores.novelty, outside, cost, scores.count, scores.gallery
    )


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one pass over a data set."""

    kind: type[Prediction]
    items: Items
    uncertainty: Tensor
    novelty: Tensor | None
    gallery: Gallery | None
    count: int

    @classmethod
    def of(cls, run: Run, batches: Iterable[tuple[Any, Any]], novelty: bool = True) -> Scores:
        parts = [one_batch(run, inputs, targets, novelty) for inputs, targets in batches]
        if not parts:
            raise BadData("a data set of `ood` holds no items")
        items = {name: torch.cat([part.items[name] for part in parts]) for name in parts[0].items}
        novelties = [part.novelty for part in parts if part.novelty is not None]
        galleries = [part.gallery for part in parts if part.gallery is not None]
        return cls(
            parts[0].kind,
            items,
            torch.cat([part.uncertainty for part in parts]),
            torch.cat(novelties) if novelties else None,
            merge(galleries) if len(galleries) == len(parts) else None,
            sum(part.count for part in parts),
        )


def one_batch(run: Run, inputs: Any, targets: Any | None, novelty: bool = True) -> Scores:
    """Score one batch, flat, in float64 on the CPU; items that the likelihood ignores are left out."""
    prediction = run.predict(inputs)
    y = prediction.likelihood.targets(prediction.function.mean, targets) if targets is not None else None
    mask = None if y is None else prediction.likelihood.mask(prediction.function.mean, y)
    uncertainty = prediction.uncertainty
    items = {} if y is None else prediction.scores(y)
    return Scores(
        type(prediction),
        {name: flat(values, mask) for name, values in items.items()},
        flat(uncertainty, mask),
        novelty_of(prediction) if novelty else None,
        gallery_of(prediction, inputs, y, uncertainty),
        batch_size(inputs),
    )


def flat(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the entries that count in one row. Only likelihoods that score whole items have a mask."""
    values = values.detach()
    return (values if mask is None else values[mask]).flatten().double().cpu()


def novelty_of(prediction: Prediction) -> Tensor | None:
    try:
        return flat(prediction.novelty, None)
    except UnsupportedOperation:
        return None


def gallery_of(prediction: Prediction, inputs: Any, y: Tensor | None, uncertainty: Tensor) -> Gallery | None:
    """Return the most uncertain pictures of a batch; None where inputs are no pictures."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    scores = uncertainty.detach().reshape(len(inputs), -1).double().mean(-1).cpu()
    order = scores.argsort(descending=True)[:PICTURES]
    captions = tuple(prediction.caption(int(index), y) for index in order)
    return Gallery(inputs[order.to(inputs.device)].detach().cpu(), scores[order], captions)


def merge(galleries: list[Gallery]) -> Gallery:
    """Return the most uncertain pictures of several galleries."""
    images, scores = torch.cat([g.images for g in galleries]), torch.cat([g.scores for g in galleries])
    captions = [caption for g in galleries for caption in g.captions]
    order = scores.argsort(descending=True)[:PICTURES]
    return Gallery(images[order], scores[order], tuple(captions[int(index)] for index in order))
