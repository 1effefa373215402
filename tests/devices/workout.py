"""Everything one does with a posterior, as named steps that give numbers: run on two devices, they must agree."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing

Pair = tuple[Any, Tensor]
FIELDS = ("mean", "entropy", "epistemic", "aleatoric", "total", "novelty", "probs", "label", "confidence", "variance",
          "stddev")  # fmt: skip
METHODS = (
    {"method": "linearized"},
    {"method": "linearized", "joint": True},
    {"method": "linearized", "differentiable": True},
    {"method": "linearized", "samples": 7},
    {"method": "linearized", "link": "jvp"},
    {"method": "sampled", "samples": 5},
)


def prediction(p: lapwing.Prediction, y: Tensor) -> dict[str, Any]:
    """Read every field of a prediction and of its distribution of f."""
    found = {name: getattr(p, name) for name in FIELDS if hasattr(p, name)}
    found["log_prob"] = p.log_prob(y)
    found["sample"] = p.sample(3).float()
    found["f variance"] = p.function.variance
    found["f covariance"] = p.function.covariance
    if hasattr(p, "interval"):
        found["interval"] = p.interval(0.9)
    if hasattr(p, "quantile"):
        found["quantile"] = p.quantile(0.2)
    return found


def steps(
    model: nn.Module, train: Pair, held_out: Pair, likelihood: Any, folder: Path, **options: Any
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, step): a fit and all that follows from it; a step returns tensors, numbers, or dicts of them."""
    device = next(model.parameters()).device
    la = lapwing.fit(model, train, likelihood, generator=seeded(device), **options)
    x, y = held_out
    family = la.likelihood
    yield "curvature", lambda: la.curvature.matrix.diagonal()
    yield "log_likelihood", lambda: la.log_likelihood
    yield "log_evidence", lambda: la.log_evidence()
    yield "linear-mode evidence", lambda: la.log_evidence(at="linear-mode")
    yield "linear-mode by products", lambda: la.log_evidence(at="linear-mode", data=train)
    yield "effective_parameters", lambda: la.effective_parameters
    yield "stationarity", lambda: la.stationarity
    yield "variance", lambda: la.posterior.variance
    yield "sample", lambda: la.posterior.sample(3, seeded(device))
    yield "log_prob", lambda: la.posterior.log_prob(torch.stack([la.posterior.mean + 0.01, la.posterior.mean - 0.02]))
    yield "summary", lambda: len(la.summary()) > 0
    for kind in METHODS:
        name = " ".join(f"{k}={v}" for k, v in kind.items())
        yield f"predict {name}", lambda kind=kind: prediction(la.predict(x, **kind), y)
        yield f"predict {name} generator", lambda kind=kind: la.predict(x, generator=seeded(device), **kind).mean
    for link in family.links:
        yield f"predict link={link}", lambda link=link: prediction(la.predict(x, link=link), y)
        yield f"sampled link={link}", lambda link=link: la.predict(x, method="sampled", samples=5, link=link).mean
    yield "predict_loader", lambda: torch.cat([p.mean for p in la.predict_loader([(x, y), (x, y)])])
    yield "gradient in x", lambda: _slope(la, x)
    yield "ensemble", lambda: prediction(la.ensemble(3).predict(x), y)
    yield "ensemble generator", lambda: la.ensemble(2, seeded(device)).weights
    yield "tune evidence", lambda: _tuned(la.tune())
    yield "tune evidence layerwise", lambda: _tuned(la.tune(prior="layerwise"))
    yield "tune validation", lambda: _tuned(la.tune(held_out))
    yield "tune validation layerwise", lambda: _tuned(la.tune(held_out, prior="layerwise"))
    yield "tune grid", lambda: _tuned(la.tune(held_out, grid={"prior": [0.5, 2.0]}, learn="prior"))
    yield "tune loo", lambda: _tuned(la.tune(train, method="loo"))
    yield "temperature_curve", lambda: _curve(la.temperature_curve(held_out, ood={"far": _far(x)}))
    yield "replace prior", lambda: la.replace(prior=3.0).predict(x).mean
    yield "replace temperature", lambda: la.replace(temperature=0.5).predict(x).entropy
    yield "replace tempered", lambda: la.replace(temperature=lapwing.Tempered(0.5, prior=True)).posterior.variance
    yield "replace blocks", lambda: la.replace(prior={"*": 2.0}).log_evidence()
    yield "replace flat", lambda: la.replace(prior=torch.full((la.params.size,), 2.0)).log_evidence()
    yield "replace mean", lambda: la.replace(prior=lapwing.Prior(2.0, mean=la.params.flat * 0.5)).log_evidence()
    yield "damping", lambda: la.damping("factored").predict(x).mean
    yield "update", lambda: la.update(held_out, generator=seeded(device)).log_evidence()
    yield "save, load", lambda: _loaded(la, model, train, folder).predict(x).mean
    yield "loaded evidence", lambda: _loaded(la, model, train, folder).log_evidence()
    yield "to", lambda: la.to(device).predict(x).mean
    yield "mixture", lambda: prediction(lapwing.Mixture([la, la.replace(prior=4.0)]).predict(x), y)
    yield "mixture by evidence", lambda: lapwing.Mixture([la, la.replace(prior=4.0)], "evidence").predict(x).mean
    yield "evaluate", lambda: _evaluated(la, model, held_out, x)
    yield "compare", lambda: lapwing.compare({"a": la, "b": la.replace(prior=9.0)}).table() is not None


QUICK = ("curvature", "log_evidence", "variance", "sample", "predict method=linearized", "sampled link=mc",
         "tune evidence", "tune validation", "update", "save, load", "to")  # fmt: skip
DRAWN = ("sample", "jvp", "ensemble")  # steps that draw weights: rounding turns the basis of equal eigenvalues


def run(steps: Iterator[tuple[str, Callable[[], Any]]], names: Collection[str] | None = None) -> dict[str, Any]:
    """Run the steps, or those of these names; results are CPU tensors by name, or the text of an error."""
    found: dict[str, Any] = {}
    for name, step in steps:
        if names is not None and name not in names:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = _home(step())
        except Exception as error:  # the other device must refuse with the same words
            found[name] = f"{type(error).__name__}: {re.sub(r'[-+.e0-9]*[0-9]', '#', str(error))}"  # but for numbers
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, drawn: bool = True) -> None:
    """Compare the results of two devices; `drawn=False` compares only the shapes of what random weights give."""
    assert found.keys() == expected.keys()
    for name in expected:
        if drawn or not any(word in name for word in DRAWN):
            _assert_equal(name, found[name], expected[name])
        elif isinstance(expected[name], Tensor):
            assert found[name].shape == expected[name].shape, name


def _assert_equal(name: str, found: Any, expected: Any) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected, f"{name}: {found}, expected {expected}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key in expected:
            _assert_equal(f"{name}, {key}", found[key], expected[key])
    else:
        torch.testing.assert_close(
            found, expected, rtol=1e-6, atol=1e-9, equal_nan=True, msg=lambda text: f"{name}: {text}"
        )


def seeded(device: torch.device, seed: int = 0) -> torch.Generator:
    """Return a generator of the device."""
    return torch.Generator(device).manual_seed(seed)


def _home(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _home(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_home(part) for part in value]
    return value


def _tuned(la: lapwing.Laplace) -> dict[str, Any]:
    assert la.tuning is not None
    return {"evidence": la.log_evidence(), "scores": la.tuning.scores, "T": float(la.temperature.T)}


def _curve(curve: Any) -> dict[str, Any]:
    return {"nll": curve.nll, "table": len(curve.table()) > 0}


def _loaded(la: lapwing.Laplace, model: nn.Module, train: Pair, folder: Path) -> lapwing.Laplace:
    la.save(folder / "posterior.lapwing")
    return lapwing.load(folder / "posterior.lapwing", model, data=train)


def _far(x: Any) -> Any:
    return x + 1 if isinstance(x, Tensor) and x.is_floating_point() else [(x, None)]


def _slope(la: lapwing.Laplace, x: Any) -> Tensor:
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return torch.zeros(())
    leaf = x.clone().requires_grad_()
    la.predict(leaf, differentiable=True).function.variance.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def _evaluated(la: lapwing.Laplace, model: nn.Module, held_out: Pair, x: Any) -> dict[str, Any]:
    report = lapwing.evaluate({"MAP": model, "Laplace": la}, held_out, ood={"far": _far(x)})
    timed = ("seconds", "memory", "peak", "items")
    return {
        f"{name} {key}": value
        for name, row in report.to_dict()["models"].items()
        for key, value in row.items()
        if isinstance(value, float) and not any(word in key for word in timed)
    }
