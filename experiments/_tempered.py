"""Paper 000, sections 4.2 and 4.3: LeNet-5 on MNIST and ResNet-20 on CIFAR-10 at many temperatures, three structures.

The posteriors are fitted once per network and seed. The prior precision is the one that the paper's weight decay stands
for, τ = 0.01 N; T varies, with 50 sampled networks on test images and on images of another data set, and with the
linearized predictive beside them. LeNet-5 is shown a second time with a prior ten times weaker. Nothing is tuned.
`temperature_curves` shows the test images, `temperature_ood` the others; with `--cache DIR` the second does not compute
again what the first has computed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from experiments._cache import cached
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.errors import BadData

STRUCTURES = {"Diag": "diag", "KFAC": "kron", "EKFAC": "ekfac"}
COLORS = {"Diag": "#2b6cb0", "KFAC": "#c05621", "EKFAC": "#2f855a"}
NETWORKS = {"lenet": "LeNet-5 on MNIST", "resnet20": "ResNet-20 on CIFAR-10"}
OUTSIDE = {"lenet": "kmnist", "resnet20": "svhn"}
SHOWN = {"kmnist": "KMNIST", "svhn": "SVHN"}
TEMPERATURES = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)
DECAY = 0.01  # the weight decay that the paper trains with
TOLERANCE = 1e-3
SIZES = ("train", "epochs", "curvature", "test", "images")

Curve = dict[str, list[float]]


@dataclass(frozen=True)
class Problem:
    """A trained network, batches for its curvature, and test images, and images from elsewhere."""

    model: nn.Module
    fit: list[tuple[Tensor, Tensor]]
    n_data: int
    test: tuple[Tensor, Tensor]
    outside: Tensor


def trained(train: datasets.Dataset, epochs: int, seed: int, decay: float = DECAY) -> nn.Sequential:
    """LeNet-5 at the mode of cross-entropy with a weight decay, the paper's by default; Adam with a falling rate."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = networks.lenet()
    steps = -(-len(train) // 100)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(train), generator=generator).split(100):
            optimizer.zero_grad()
            penalty = decay / 2 * sum(w.square().sum() for w in model.parameters())
            (F.cross_entropy(model(train.inputs[rows]), train.targets[rows]) + penalty).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def problem(network: str, given: argparse.Namespace, seed: int) -> Problem:
    """Train or read a network, and draw its images by the seed."""
    generator = torch.Generator().manual_seed(seed)
    far = datasets.images(OUTSIDE[network], "test")
    if network == "lenet":
        whole, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")
        train = _some(whole, given.train, generator)
        judged, outside = (_some(part, given.test, generator) for part in (test, far))
        model, part, n_data, prepare = trained(train, given.epochs, seed), train, len(train), lambda x: x
    else:
        part, test = datasets.images("cifar10", "train"), datasets.images("cifar10", "test")
        judged, outside = (_some(each, given.images, generator) for each in (test, far))
        model, n_data, prepare = networks.pretrained_resnet(20), 50_000, networks.standardize
    part = _some(part, given.curvature, generator)
    batches = list(zip(prepare(part.inputs).split(100), part.targets.split(100)))
    return Problem(model, batches, n_data, (prepare(judged.inputs), judged.targets), prepare(outside.inputs))


def _some(data: datasets.Dataset, size: int, generator: torch.Generator) -> datasets.Dataset:
    return data[torch.randperm(len(data), generator=generator)[:size]]


def posteriors(found: Problem, select: str = "all") -> dict[str, Any]:
    """The three posteriors at unit prior."""
    factor = lapwing.GGN(tolerance=TOLERANCE)
    return {
        name: lapwing.fit(
            found.model, found.fit, "classification", structure=structure, factor=factor, n_data=found.n_data,
            select=select, progress=False,
        )
        for name, structure in STRUCTURES.items()
    }  # fmt: skip


def curve(la: Any, found: Problem, predictive: str, temperatures: list[float]) -> Curve:
    """Accuracy, NLL and entropy on test images, and entropy and AUROC of the others, against T."""
    made = la.temperature_curve(
        found.test, ood={"outside": found.outside}, temperatures=temperatures, predictive=predictive
    )
    return {name: values.tolist() for name, values in made.columns.items()}


def norms(found: Problem) -> dict[str, float]:
    """Frobenius norms of the last layer's curvature by structure, and of the exact block."""
    fitted: dict[str, Any] = posteriors(found, "last_layer")
    factor = lapwing.GGN(tolerance=TOLERANCE)
    fitted["exact block"] = lapwing.fit(
        found.model, found.fit, "classification", structure="full", factor=factor, n_data=found.n_data,
        select="last_layer", progress=False,
    )  # fmt: skip
    return {name: la.curvature.matrix.dense().double().norm().item() for name, la in fitted.items()}


def scaling_error(fitted: Mapping[str, Any], tau: float, T: float) -> float:
    """How far (T·M + τ)⁻¹ is from (M + τ/T)⁻¹ / T (Eq. 23 and 24): the largest relative difference of a variance."""
    errors = []
    for la in fitted.values():
        left = la.replace(prior=tau, temperature=T).posterior.variance.double()
        right = la.replace(prior=tau / T, temperature=1.0).posterior.variance.double() / T
        errors.append(((left - right).abs() / right).max().item())
    return max(errors)


def run(network: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """All curves of one network and seed, from the cache where they are there; progress is printed."""
    if 1.0 not in given.temperatures or sorted(given.temperatures) != list(given.temperatures):
        raise BadData(f"--temperatures must rise and have 1 among them, got {given.temperatures}")
    options = {name: getattr(given, name) for name in (*SIZES, "temperatures")} | {"seed": seed}
    return dict(cached(given.cache, f"tempered-{network}", options, lambda: _run(network, given, seed)))


def runs_of(given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All runs by network: one per seed, of ResNet-20 for the first `--resnet-seeds` alone."""
    seeds = range(given.first, given.first + given.seeds)
    counts = {"lenet": given.seeds, "resnet20": given.resnet_seeds}
    return {network: [run(network, given, seed) for seed in seeds[: counts[network]]] for network in given.networks}


def _run(network: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    start = time.monotonic()
    found = problem(network, given, seed)
    fitted = posteriors(found)
    priors = {"training": DECAY * found.n_data}
    if network == "lenet":  # sampled curves of the other network cost ten times as much
        priors["weaker"] = priors["training"] / 10
    with torch.no_grad(), warnings.catch_warnings():
        own = (found.model(found.test[0]).argmax(-1) == found.test[1]).double().mean().item()
        warnings.filterwarnings("ignore", "the sampled weights have lost")
        curves = {
            f"{name}, {kind}, {way}": curve(la.replace(prior=tau), found, way, given.temperatures)
            for kind, tau in priors.items()
            for name, la in fitted.items()
            for way in ("sampled", "linearized")
        }
    print(f"{network}, seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
    scaling = scaling_error(fitted, priors["training"], 3.0)
    return {"accuracy": own, "priors": priors, "curves": curves, "norms": norms(found), "scaling": scaling}


def stacked(runs: list[dict[str, Any]], way: str, kind: str = "training") -> dict[str, dict[str, Tensor]]:
    """Curves by structure, (seeds, temperatures) each, with the prior of training or the weaker one."""
    parts = {name: [each["curves"][f"{name}, {kind}, {way}"] for each in runs] for name in STRUCTURES}
    return {
        name: {key: torch.tensor([each[key] for each in some], dtype=torch.float64) for key in some[0]}
        for name, some in parts.items()
    }


def converged(temperatures: list[float], values: Tensor, share: float = 0.1) -> float:
    """The smallest T from which on a curve stays within a share of its whole change from where it ends."""
    reach = share * (values[0] - values[-1]).abs()
    near = (values - values[-1]).abs() <= reach
    last = max((k for k in range(len(values)) if not near[k]), default=-1)
    return temperatures[last + 1]


def told(values: Mapping[str, float]) -> str:
    """Name and number of each."""
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both experiments share."""
    add = parser.add_argument
    add("--networks", nargs="+", choices=tuple(NETWORKS), default=list(NETWORKS))
    add("--train", type=int, default=20_000, help="training images of LeNet-5")
    add("--epochs", type=int, default=6, help="of LeNet-5")
    add("--curvature", type=int, default=1000, help="training images of which curvature is computed")
    add("--test", type=int, default=300, help="test images of LeNet-5, and as many of KMNIST")
    add("--images", type=int, default=40, help="test images of CIFAR-10, and as many of SVHN")
    add("--resnet-seeds", type=int, default=3, help="seeds of ResNet-20 at most, whose curves cost ten times as much")
    add("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))


def options_told(given: argparse.Namespace) -> str:
    """Return the options that a page repeats."""
    sizes = " ".join(f"--{name} {getattr(given, name)}" for name in SIZES)
    return f"--seeds {given.seeds} --resnet-seeds {given.resnet_seeds} --networks {' '.join(given.networks)} {sizes}"


def sizes_told(given: argparse.Namespace) -> str:
    """Return a sentence on how many images each network was trained and judged on, and what seeds draw."""
    said = {
        "lenet": f"LeNet-5: {given.train} training images, {given.test} test images and as many of KMNIST; seeds train "
        "it anew and draw the images.",
        "resnet20": f"ResNet-20: {given.images} test images and as many of SVHN, drawn by the first "
        f"{given.resnet_seeds} of the seeds; there is one pretrained network, whose own weight decay was smaller.",
    }
    return " ".join(said[network] for network in given.networks)


SMOKE = {
    "networks": ["lenet"], "train": 300, "epochs": 1, "curvature": 30, "test": 10,
    "temperatures": [0.1, 1.0],
}  # fmt: skip
QUICK = {
    "networks": ["lenet"], "train": 10_000, "epochs": 4, "curvature": 500, "test": 100,
    "temperatures": [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0],
}  # fmt: skip
