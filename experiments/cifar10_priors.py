"""One prior per layer on CIFAR-10, chosen by the evidence during training: curves, and what it costs.

    python -m experiments.cifar10_priors [--seeds 2] [--size 1000] [--epochs 60] [--out docs/results]

Document 002, "CIFAR-10 Classification": a small convolutional network is trained on part of CIFAR-10 by Adam with the
same steps, batches and start in three ways: "standard" (cross-entropy alone), with one prior precision per layer, and
with one per weight. The precisions move by the evidence every `--every` epochs, after `--burnin`: Kronecker factors for
layers, the diagonal for weights (`lapwing.Online`). After each epoch the NLL and the accuracy on all training images
and on test images are noted; that time is not counted. Nothing is chosen on test images: `--validation` scores
on other training images, after training on other ones, and is how the defaults were chosen. Needs LAPWING_DATA.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._results import Claim, Result, gathered, spread, verdict
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "002, CIFAR-10 Classification", "minutes": 2.8, "quick": 0.38}

WAYS = {
    "standard": None,
    "evidence, per layer": ("layerwise", "kron"),
    "evidence, per weight": ("parameterwise", "diag"),
}


def network(width: int, seed: int) -> nn.Module:
    """Three convolutions and two linear layers; no batch norm, whose weights no prior on scale can regularize."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def scored(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """NLL and accuracy in percent."""
    model.eval()
    with torch.no_grad():
        f = torch.cat([model(part) for part in x.split(500)]).double()
    model.train()
    return F.cross_entropy(f, y).item(), 100 * (f.argmax(1) == y).double().mean().item()


def trained(way: str, train: datasets.Dataset, test: datasets.Dataset, seed: int, given: Any) -> dict[str, Any]:
    """Curves over epochs, (epochs,) each, the CPU seconds of training, and the precisions at the end."""
    model = network(given.width, seed).train()
    x, y = train.inputs, train.targets
    online = None
    if WAYS[way] is not None:
        prior, structure = WAYS[way]
        online = lapwing.Online(
            "classification", n_data=len(y), prior=prior, structure=structure, samples=given.samples,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs, 1e-5)
    generator = torch.Generator().manual_seed(seed)
    curves: dict[str, list[Any]] = {"train": [], "test": [], "precision": []}
    seconds = 0.0
    for epoch in range(given.epochs):
        start = time.process_time()
        for rows in torch.randperm(len(y), generator=generator).split(64):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x[rows]), y[rows])
            if online is not None:
                loss = loss + online.penalty(model)
            loss.backward()
            optimizer.step()
        rates.step()
        if online is not None and epoch >= given.burnin and (epoch - given.burnin) % given.every == 0:
            online = online.step(model, (x, y))
        seconds += time.process_time() - start
        curves["train"].append(scored(model, x, y))
        curves["test"].append(scored(model, test.inputs, test.targets))
        if online is not None:
            values = online.belief.precision
            curves["precision"].append([1.0] if values is None else _quantiles(values))
    found = {"seconds": seconds, "precision": curves["precision"]}
    for part in ("train", "test"):
        nll, accuracy = zip(*curves[part])
        found |= {f"{part} NLL": list(nll), f"{part} accuracy": list(accuracy)}
    return found


def _quantiles(values: Tensor) -> list[float]:
    """All of a few precisions, or five quantiles of many."""
    levels = torch.linspace(0, 1, 5, dtype=torch.float64)
    return (values if len(values) <= 10 else values.double().quantile(levels)).tolist()


def run(seed: int, given: Any) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Scores at the end by way, and the curves."""
    generator = torch.Generator().manual_seed(seed + 100 * given.validation)
    train, rest = datasets.images("cifar10", "train").split(given.size, given.test, generator=generator)[:2]
    test = rest if given.validation else datasets.images("cifar10", "test")[: given.test]
    train, test = (datasets.Dataset(networks.standardize(part.inputs), part.targets) for part in (train, test))
    table, curves = {}, {}
    for way in WAYS:
        found = curves[way] = trained(way, train, test, seed, given)
        ends = {key: found[key][-1] for key in ("train NLL", "train accuracy", "test NLL", "test accuracy")}
        ratio = found["seconds"] / curves["standard"]["seconds"]
        table[way] = {**ends, "best test NLL": min(found["test NLL"]), "CPU s": found["seconds"], "CPU ratio": ratio}
        print(f"seed {seed}, {way}: test NLL {ends['test NLL']:.3f}, {ends['test accuracy']:.1f} %", flush=True)
    return table, curves


def claims(each: Mapping[str, Mapping[str, list[float]]], mean: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    def told(key: str) -> str:
        return ", ".join(f"{way} {mean[way][key]:.3g}" for way in WAYS)

    def gain(key: str, way: str) -> tuple[float, float]:
        off = torch.tensor(each[way][key]).double() - torch.tensor(each["standard"][key]).double()
        return off.mean().item(), (off.std(correction=min(1, len(off) - 1)) / math.sqrt(len(off))).item()

    layer, weight = list(WAYS)[1:]
    nll, accuracy = gain("test NLL", layer), gain("test accuracy", layer)
    train = Claim(
        "Compare train performance: Standard vs MargLik",
        "CIFAR-10 Classification",
        f"Training NLL at the end: {told('train NLL')}; accuracy in percent: {told('train accuracy')}.",
        verdict(mean["standard"]["train NLL"] < mean[layer]["train NLL"]),
        "the standard network fits its training images more closely; the slide shows curves without numbers.",
    )
    test = Claim(
        "→ MargLik generalizes better",
        "CIFAR-10 Classification",
        f"Test NLL at the end: {told('test NLL')}; accuracy in percent: {told('test accuracy')}. With a prior per "
        f"layer minus standard: {nll[0]:+.3g} ± {nll[1]:.1g} nats, {accuracy[0]:+.3g} ± {accuracy[1]:.1g} % (standard "
        "error, paired by seed).",
        verdict(nll[0] < -nll[1], accuracy[0] > accuracy[1]),
        "better means a lower NLL and a higher accuracy with one prior per layer, each by more than a standard error.",
    )
    cost = Claim(
        "→ Optimize thousands of regularization parameters in only 2x runtime",
        "CIFAR-10 Classification",
        f"CPU time over that of standard training: per layer {mean[layer]['CPU ratio']:.3g}, per weight "
        f"{mean[weight]['CPU ratio']:.3g}; test NLL per weight {mean[weight]['test NLL']:.3g}.",
        verdict(
            mean[layer]["CPU ratio"] <= 2,
            mean[weight]["CPU ratio"] <= 2,
            mean[weight]["test NLL"] < mean["standard"]["test NLL"],
        ),
        "both ratios at most 2, and the precisions per weight (there are thousands of them) of use: a lower test NLL "
        "than standard.",
    )
    return [train, test, cost]


def figure(curves: Mapping[str, Any]) -> Any:
    """NLL and accuracy against the epoch, training dashed; and the precisions per layer."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(13, 3.9))
    colors = dict(zip(WAYS, ("#718096", "#2b6cb0", "#dd6b20")))
    for k, key in enumerate(("NLL", "accuracy")):
        axes = canvas.add_subplot(1, 3, k + 1)
        for way, found in curves.items():
            epochs = range(1, 1 + len(found[f"test {key}"]))
            axes.plot(epochs, found[f"test {key}"], color=colors[way], lw=1.8, label=f"{way}, test")
            axes.plot(epochs, found[f"train {key}"], color=colors[way], lw=1.2, ls="--", label=f"{way}, training")
        axes.set_xlabel("epoch")
        axes.set_title(key + (" (nats)" if k == 0 else " (%)"), loc="left", fontsize=10)
        if k == 0:
            top = max(curves[way]["test NLL"][0] for way in curves)
            axes.set_ylim(0, 1.6 * top)
            axes.legend(frameon=False, fontsize=7)
    axes = canvas.add_subplot(1, 3, 3)
    layers = [row for row in curves["evidence, per layer"]["precision"] if len(row) > 1]
    first = 1 + len(curves["evidence, per layer"]["precision"]) - len(layers)
    for k, values in enumerate(zip(*layers)):
        axes.plot(range(first, first + len(layers)), values, lw=1.5, label=f"layer {k + 1}")
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_title("prior precision per layer", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=7)
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("cifar10_priors", run, given)
    each, mean = gathered([table for table, _ in runs])
    rows = [{"training": n, **{key: spread(values) for key, values in row.items()}} for n, row in each.items()]
    command = f"python -m experiments.cifar10_priors --seeds {given.seeds} --size {given.size} --test {given.test} "
    command += f"--epochs {given.epochs} --width {given.width}"
    weights = sum(p.numel() for p in network(given.width, 0).parameters())
    layer = mean["evidence, per layer"]
    result = (
        Result("cifar10_priors", "One prior per layer on CIFAR-10", ABOUT["paper"], command, list(seeds))
        .with_rows(rows)
        .with_claims(*claims(each, mean))
        .with_sentence(
            f"A prior per layer, chosen during training, brings the test NLL from {mean['standard']['test NLL']:.3g} "
            f"to {layer['test NLL']:.3g} and the accuracy from {mean['standard']['test accuracy']:.3g} to "
            f"{layer['test accuracy']:.3g} %, for {layer['CPU ratio']:.3g} times the CPU time."
        )
        .with_notes(
            "Changed after results had been seen: a gain must exceed a standard error, which lowered one verdict.",
            f"A network of {weights:,} weights, five layers, on {given.size} of the images, {given.test} test images; "
            f"a step of the evidence every {given.every} epochs from epoch {given.burnin + 1}, on "
            f"{given.samples or 'all'} images.",
            "“Best test NLL” is the lowest of the curve, which nobody may choose by: it shows what early stopping "
            "could give. CPU s leaves out the scoring. ± is the standard deviation over seeds, each with its own "
            "images and start; the figure is of the first.",
        )
    )
    curves = runs[0][1]
    result.with_data(scores=each, curves=[curves for _, curves in runs]).finish(given.out, lambda: figure(curves))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"seeds": 1, "size": 64, "epochs": 3, "width": 4, "test": 100, "every": 1, "burnin": 0},
        quick={"seeds": 1, "epochs": 20},
    )
    parser.set_defaults(seeds=3)
    parser.add_argument("--size", type=int, default=1000, help="training images")
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer")
    parser.add_argument("--every", type=int, default=4, help="epochs between two steps of the evidence")
    parser.add_argument("--burnin", type=int, default=4, help="epochs before the first")
    parser.add_argument("--samples", type=int, default=1000, help="images that a step of the evidence reads")
    parser.add_argument("--validation", action="store_true", help="score on other training images, to choose settings")
    main(parser.parse_args())
