"""Run models over data and collect the scores that a report needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, warn
from lapwing.evaluation.examples import Describe, Viewer
from lapwing.evaluation.report import Report
from lapwing.evaluation.scoring import Asked, Reader, Result, evaluate_one, run_of
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model.batches import Batches, require_one_process
from lapwing.model.calls import outside_autocast

BELIEF = ("likelihood", "prior", "temperature", "logit_temperature", "tuned", "n_data")  # settings of a posterior


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
    `Prediction`). `data` is read as in `lapwing.fit`; the sets of `ood` need no targets, and a tensor of inputs is
    enough. Plain networks are scored under `likelihood`; without it, under the likelihood of the first model that has
    one. Classification is scored by accuracy, NLL, ECE with `bins` bins, Brier score and entropy; regression by NLL,
    RMSE, CRPS, coverage and standard deviation; all get seconds and peak memory. `ood` adds AUROC and FPR95 by every
    score of strangeness that a model has: uncertainty, epistemic uncertainty and novelty; energy and maximum logit of
    classifiers; with `train`, the labeled training data, also the Mahalanobis distance of the last layer's features.
    `novelty` says whether that score is computed, which costs about as much as another prediction: by default only with
    `ood`.

    The report shows single items: `classes` are names of classes (by default from the data set or the network's
    configuration), and `describe(inputs)` turns inputs that hold one sample into a text or a picture (C, H, W), as in
    `describe=lambda x: tokenizer.decode(x["input_ids"][0])`.

    `split` reads batches as in `fit`; without it a posterior reads them with the split of its own fit, and a plain
    network with the split of the first posterior. `progress`: True shows a bar, False none, None only on a terminal.

    Examples:
        >>> report = lapwing.evaluate({"MAP": model, "Laplace": la}, test_loader, ood={"noise": noise})
        >>> print(report.table("accuracy", "nll", "ece", "auroc noise"))
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
    splits = [getattr(getattr(model, "options", None), "split", None) for model in models.values()]
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
    """Refuse an argument that is not a mapping whose keys are names."""
    if not isinstance(given, Mapping):
        raise BadData(f"expected {what} by name, as in {example}, got a {type(given).__name__}")


def find_likelihood(models: Mapping[str, Any], likelihood: str | Likelihood | None) -> Likelihood | None:
    """Return the given likelihood. Without one, or if its noise is unknown, return that of the first model with one."""
    asked = None if likelihood is None else resolve_likelihood(likelihood)
    if asked is not None and asked.known:
        return asked
    found = (getattr(model, "likelihood", None) for model in models.values())
    alike = type(asked) if asked is not None else Likelihood
    first = next((one for one in found if isinstance(one, alike)), None)
    if first is None and asked is not None:
        warn(
            f"the noise of the network is unknown and counts as 1 ({asked}): NLL, CRPS and coverage mean little. Pass "
            "it, as in likelihood=lapwing.Gaussian(noise=0.3), or evaluate a fitted posterior together with the network"
        )
    return first or asked


def settings_of(model: Any, module: nn.Module) -> dict[str, str]:
    """Return what a report says about a model: its kind, its network, and the settings that it has."""
    found = {} if model is module else {"kind": type(model).__name__}
    weights = sum(p.numel() for p in module.parameters())
    if weights:
        found["network"] = f"{type(module).__name__}, {weights:,} weights"
    curvature = getattr(model, "curvature", None)
    if curvature is not None and hasattr(curvature, "structure"):
        found["structure"] = f"{curvature.structure.name}, factor {type(curvature.factor).__name__}"
    elif is_dataclass(model):
        for each in fields(model):
            value = getattr(model, each.name)
            if isinstance(value, int | float | str):
                found[each.name] = f"{value:.4g}" if isinstance(value, float) else str(value)
    for name in BELIEF if hasattr(model, "predict") else ():
        value = getattr(model, name, None)
        if value is not None and not callable(value) and value not in ("", 1.0):
            found[name.replace("_", " ")] = f"{value:.6g}" if isinstance(value, float) else str(value)
    notes = [*getattr(curvature, "notes", ()), *getattr(getattr(model, "tuning", None), "messages", ())]
    return found | ({"notes": "; ".join(str(note) for note in notes)} if notes else {})


def data_facts(data: Any, ood: Mapping[str, Any], results: Mapping[str, Result]) -> dict[str, str]:
    """Return what a report says about the data: how many items, and the name of the data set, if it has one."""
    first = next(iter(results.values()))
    facts = {"test data": _data_words(data, first.count)}
    return facts | {f"outside: {name}": _data_words(each, first.outside[name].count) for name, each in ood.items()}


def _data_words(data: Any, count: int) -> str:
    whole = getattr(data, "dataset", None)
    name = "" if whole is None or type(whole).__module__.startswith("torch.") else f" of {type(whole).__name__}"
    first = data[0] if isinstance(data, tuple | list) and data else data
    first = first[0] if isinstance(first, tuple | list) and first else first
    shape = tuple(getattr(first, "shape", ())[1:])
    return f"{count:,} items{name}" + (f" of shape {shape}" if shape else "")


def class_names(data: Any, modules: Iterable[nn.Module]) -> Sequence[str]:
    """Return the names of classes that a data set (`classes`) or a network's configuration (`id2label`) knows."""
    found = getattr(getattr(data, "dataset", data), "classes", None)
    if isinstance(found, list | tuple) and all(isinstance(each, str) for each in found):
        return found
    for module in modules:
        labels = getattr(getattr(module, "config", None), "id2label", None)
        if isinstance(labels, Mapping) and not any(str(v).startswith("LABEL_") for v in labels.values()):
            return [str(labels[k]) for k in sorted(labels)]
    return ()


def feature_names(data: Any) -> Sequence[str]:
    """Return the names of the columns of a data frame in (X, y)."""
    table = data[0] if isinstance(data, tuple) and data else data
    return [str(name) for name in getattr(table, "columns", ())]
