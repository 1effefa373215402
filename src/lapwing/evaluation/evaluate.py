"""Run models over data and keep what a report needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, warn
from lapwing.evaluation.examples import Describe, Viewer
from lapwing.evaluation.facts import class_names, data_facts, feature_names, settings_of
from lapwing.evaluation.report import Report
from lapwing.evaluation.scoring import Asked, Reader, Run, evaluate_one
from lapwing.evaluation.temperature import device_of, point_prediction
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model.batches import Batches, require_one_process
from lapwing.model.calls import outside_autocast


@outside_autocast
def evaluate(
    models: Mapping[str, Any],
    data: Any,
    *,
    ood: Mapping[str, Any] | None = None,
    likelihood: str | Likelihood | None = None,
    bins: int = 15,
    novelty: bool | None = None,
    train: Any = None,
    classes: Sequence[str] | None = None,
    describe: Describe | None = None,
    split: Callable[[Any], tuple] | None = None,
    progress: bool | None = None,
) -> Report:
    """Score models on the same test data, and on data unlike what they were trained on.

    `models` maps names to networks, `Laplace` objects or baselines (anything with `.predict(x)` returning a
    `Prediction`). `data` is read as in `lapwing.fit`; the sets of `ood` need no targets, and a tensor of
    inputs is enough. Plain networks are scored under `likelihood`; without it, under that of the first model that
    has one. Classification is scored by accuracy, NLL, ECE with `bins` bins, Brier score and entropy; regression by
    NLL, RMSE, CRPS, coverage and standard deviation; all get seconds and peak memory. `ood` adds AUROC and FPR95 by
    every score of strangeness that a model has: uncertainty, epistemic uncertainty and novelty; energy and maximum
    logit of classifiers; with `train`, the labeled training data, also the Mahalanobis distance of the last layer's
    features. `novelty` computes that score of every item, which costs about as much as another prediction: by default
    only where there is `ood` to compare with.

    The report shows single items: `classes` are names of classes (by default those of the data set or the network's
    configuration), and `describe(inputs)` turns inputs that hold one sample into a text or a picture (C, H, W), as in
    `describe=lambda x: tokenizer.decode(x["input_ids"][0])`.

    `split` reads batches as in `fit`; without it a posterior reads them with the split of its own fit, and a plain
    network with that of the first posterior beside it. `progress`: True shows a bar, False none, None only on a
    terminal.

    Example:
        >>> report = lapwing.evaluate({"MAP": model, "Laplace": la}, test_loader, ood={"notMNIST": images})
        >>> print(report.table("accuracy", "nll", "ece", "auroc notMNIST"))
    """
    require_one_process("evaluate")
    require_names("the models", models, "{'MAP': model, 'Laplace': la}")
    if ood is not None:
        require_names("ood", ood, "{'noise': inputs}")
    if not models:
        raise BadData("evaluate needs at least one model: pass {'MAP': model, 'Laplace': la}")
    shared = find_likelihood(models, likelihood)
    runs = {name: run_of(model, shared) for name, model in models.items()}
    for source in (data, *(ood or {}).values()):
        if len(runs) > 1 and not isinstance(source, Tensor):
            Batches(source, nn.Identity(), torch.device("cpu")).require_reiterable("evaluating several models")
    splits = [split_of(model) for model in models.values()]
    usual = split or next((each for each in splits if each is not None), None)
    viewer = Viewer(classes or class_names(data, (run.module for run in runs.values())), feature_names(data), describe)
    wanted = Asked(bool(ood), bool(ood) if novelty is None else novelty, train, viewer, {}, {})
    results = {}
    for (name, run), own in zip(runs.items(), splits):
        chosen = split or own or usual
        readers = {"test": Reader(data, run, chosen, f"{name}: test", progress)}
        for place, others in (ood or {}).items():
            way = split if hasattr(others, "__array__") else chosen  # bare inputs have no batches of the fit's form
            readers[f"ood {place}"] = Reader(others, run, way, f"{name}: {place}", progress)
        results[name] = evaluate_one(run, readers, replace(wanted, about=settings_of(models[name], run.module)))
    return Report(results, bins, data_facts(data, ood or {}, results))


def require_names(what: str, given: Any, example: str) -> None:
    """Refuse an argument that is not a dict from names to what they name."""
    if not isinstance(given, Mapping):
        raise BadData(f"{what} is a dict by name, as in {what}={example}, got a {type(given).__name__}")


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
