"""The MNIST network of paper 001, sections 5.2 and 5.3, and the five methods that predict with it.

Two hidden layers of 1,024 units with ReLU and dropout, trained on randomly binarized images; predictions by the network
itself, by MC dropout, by weights sampled from Kronecker and diagonal Laplace posteriors that are tuned on validation
images, and by a mean-field posterior of the same architecture that is trained on the variational bound.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from experiments._cache import cached, trained_once
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from lapwing.baselines import DeepEnsemble, MCDropout, MeanField

BATCH, PRIOR = 100, 1.0
FIELD_BATCH = 250  # mean-field steps cost much that does not depend on the batch
NAMES = ("deterministic", "MC dropout", "diagonal", "Kronecker", "mean field")
GRID = {"prior": (1.0, 10.0, 100.0, 1000.0), "temperature": (1.0, 10.0, 100.0)}
WIDE = {"prior": (0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0), "temperature": (1.0, 10.0, 100.0, 1000.0)}


@dataclass(frozen=True)
class Binarized:
    """Images whose pixels are drawn anew to be 0 or 1 with their intensity, `passes` times, in the same order."""

    images: Tensor
    labels: Tensor
    passes: int
    seed: int
    batch: int = BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.passes):
            for x, y in zip(self.images.split(self.batch), self.labels.split(self.batch)):
                yield binarized(x, generator), y

    def __len__(self) -> int:
        return self.passes * -(-len(self.images) // self.batch)


def binarized(x: Tensor, generator: torch.Generator) -> Tensor:
    """Draw every pixel to be 1 with its intensity, else 0."""
    return (torch.rand(x.shape, generator=generator) < x).to(x.dtype)


def network(width: int) -> nn.Sequential:
    """784-width-width-10 with ReLU and dropout after each inner layer."""
    inner = [nn.Linear(784, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(nn.Flatten(), *inner, nn.Linear(width, 10))


def trained(train: datasets.Dataset, width: int, epochs: int, rate: float, seed: int) -> nn.Module:
    """SGD with momentum 0.9, a rate lowered by a cosine, weight decay for a prior precision of 1."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = network(width)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=PRIOR / len(train))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(train) // BATCH))
    for _ in range(epochs):
        for rows in torch.randperm(len(train), generator=generator).split(BATCH):
            optimizer.zero_grad()
            x = binarized(train.inputs[rows], generator)
            F.cross_entropy(model(x), train.targets[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@dataclass(frozen=True)
class Methods:
    """The methods by name, the data that they are judged on, and what was chosen on validation images."""

    predictors: dict[str, Any]
    test: datasets.Dataset
    chosen: dict[str, str]


def methods(given: argparse.Namespace, seed: int, names: tuple[str, ...] = NAMES) -> Methods:
    """Train the network and make the methods; progress is printed."""
    generator = torch.Generator().manual_seed(seed)
    whole, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")
    train, val = whole.split(given.train, given.val, generator=generator)[:2]
    test = test.split(given.test, generator=torch.Generator().manual_seed(0))[0] if given.test < len(test) else test
    start = time.monotonic()
    told = {key: getattr(given, key) for key in ("train", "val", "width", "epochs", "rate")} | {"seed": seed}
    model = trained_once(
        given.cache, "mnist-network", told, network(given.width),
        lambda: trained(train, given.width, given.epochs, given.rate, seed),
    )  # fmt: skip
    _tell("network", start)
    found: dict[str, Any] = {
        "deterministic": DeepEnsemble([model], "classification"),
        "MC dropout": MCDropout(model, "classification", samples=given.samples),
    }
    chosen: dict[str, str] = {}
    part = Binarized(train.inputs[: given.curvature], train.targets[: given.curvature], given.passes, seed)
    held = (binarized(val.inputs, generator), val.targets)
    for name, structure in {"diagonal": "diag", "Kronecker": "kron"}.items():
        if name not in names:
            continue
        start = time.monotonic()
        la = fitted(model, part, structure, len(train))
        more = {"curvature": given.curvature, "passes": given.passes, "structure": structure}
        setting = cached(given.cache, "mnist-setting", told | more, lambda la=la: settled(tuned(la, held)))
        la = la.replace(prior=setting["prior"], temperature=setting["T"])
        chosen[name] = f"prior {setting['prior']:.4g}, T {setting['T']:.4g}"
        found[name] = la.ensemble(given.samples)
        _tell(name, start)
    if "mean field" in names:
        start = time.monotonic()
        torch.manual_seed(seed)
        data = Binarized(train.inputs, train.targets, given.epochs, seed, FIELD_BATCH)  # other draws in every pass
        found["mean field"] = MeanField.fit(
            network(given.width), data, "classification", prior=PRIOR, epochs=1, samples=given.samples,
            n_data=len(train), generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        _tell("mean field", start)
    return Methods({name: found[name] for name in names}, test, chosen)


def fitted(model: nn.Module, data: Any, structure: str, n_data: int, factor: Any = "ggn") -> lapwing.Laplace:
    """Fit a posterior, with factored damping if Kronecker; the curvature of all passes is rescaled to `n_data`."""
    la = lapwing.fit(
        model, data, "classification", structure=structure, factor=factor, prior=PRIOR, n_data=n_data, progress=False
    )
    return la.damping("factored") if structure == "kron" else la


def tuned(
    la: lapwing.Laplace, held: tuple[Tensor, Tensor], grid: dict[str, tuple[float, ...]] | None = None
) -> lapwing.Laplace:
    """Choose prior and pseudo-observations by the NLL of sampled weights on held-out images."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sampled weights have lost")
        return la.tune(
            held, predictive="sampled", grid=grid or GRID, learn=("prior", "temperature"), rule="lowest", progress=False
        )


def settled(la: lapwing.Laplace) -> dict[str, float]:
    """Return the prior precision and the temperature of a posterior."""
    return {"prior": float(la.belief.prior.precision), "T": float(la.belief.temperature.T)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both experiments share."""
    add = parser.add_argument
    add("--train", type=int, default=55_000, help="training images")
    add("--val", type=int, default=500, help="validation images")
    add("--test", type=int, default=2000, help="test images")
    add("--width", type=int, default=1024, help="hidden units per layer")
    add("--epochs", type=int, default=10, help="(the paper trains for 250)")
    add("--rate", type=float, default=0.05, help="of SGD at the start (the paper has 0.01)")
    add("--curvature", type=int, default=5000, help="training images of which curvature is computed")
    add("--passes", type=int, default=1, help="binarized draws of each of them (the paper takes 1,000)")
    add("--samples", type=int, default=50, help="networks or masks per prediction (the paper takes 100)")


def options_told(given: argparse.Namespace) -> str:
    """Return the options that a page repeats."""
    names = ("seeds", "train", "val", "test", "width", "epochs", "rate", "curvature", "passes", "samples")
    return " ".join(f"--{name} {getattr(given, name)}" for name in names)


def predicted(predictor: Any, images: Tensor, attribute: str) -> Tensor:
    """Return an attribute of predictions, in batches of 500."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the sampled weights have lost")
        return torch.cat([getattr(predictor.predict(part), attribute).detach() for part in images.split(500)])


def _tell(name: str, start: float) -> None:
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
