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
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from lapwing.baselines import DeepEnsemble, MCDropout, MeanField

BATCH, PRIOR = 100, 1.0
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

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.passes):
            for x, y in zip(self.images.split(BATCH), self.labels.split(BATCH)):
                yield binarized(x, generator), y

    def __len__(self) -> int:
        return self.passes * -(-len(self.images) // BATCH)


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
    model = trained(train, given.width, given.epochs, given.rate, seed)
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
        la = tuned(model, part, held, structure, len(train))
        assert la.tuning is not None
        chosen[name] = str(la.tuning.setting)
        found[name] = la.ensemble(given.samples)
        _tell(name, start)
    if "mean field" in names:
        start = time.monotonic()
        torch.manual_seed(seed)
        data = Binarized(train.inputs, train.targets, given.epochs, seed)  # other draws in every pass
        found["mean field"] = MeanField.fit(
            network(given.width), data, "classification", prior=PRIOR, epochs=1, samples=given.samples,
            n_data=len(train), generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        _tell("mean field", start)
    return Methods({name: found[name] for name in names}, test, chosen)


def tuned(
    model: nn.Module,
    data: Any,
    held: tuple[Tensor, Tensor],
    structure: str,
    n_data: int,
    factor: Any = "ggn",
    grid: dict[str, tuple[float, ...]] | None = None,
) -> lapwing.Laplace:
    """Fit a posterior, with factored damping if Kronecker, and choose prior and pseudo-observations on held-out images.

    The curvature of all passes over the data is rescaled to `n_data`.
    """
    la = lapwing.fit(
        model, data, "classification", structure=structure, factor=factor, prior=PRIOR, n_data=n_data, progress=False
    )
    la = la.damping("factored") if structure == "kron" else la
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sampled weights have lost")
        return la.tune(
            held, predictive="sampled", grid=grid or GRID, learn=("prior", "temperature"), rule="lowest", progress=False
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both experiments share."""
    add = parser.add_argument
    add("--train", type=int, default=55_000, help="training images")
    add("--val", type=int, default=1000, help="validation images")
    add("--test", type=int, default=10_000, help="test images")
    add("--width", type=int, default=1024, help="hidden units per layer")
    add("--epochs", type=int, default=20, help="(the paper trains for 250)")
    add("--rate", type=float, default=0.05, help="of SGD at the start (the paper has 0.01)")
    add("--curvature", type=int, default=10_000, help="training images of which curvature is computed")
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
