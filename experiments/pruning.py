"""Accuracy against sparsity: pruning by the posterior beside pruning by magnitude.

    python -m experiments.pruning [--size 2000] [--epochs 20] [--seeds 3] [--out DIR]

LeNet-5 on a part of MNIST is trained (a) without a prior and (b) by `lapwing.train` with a precision per weight (diag),
(c) with a precision per unit (kron). Weights are set to zero without retraining, by magnitude, by θ²·H_pp and at
random; units are removed by the same scores, summed. Printed is the accuracy on 2,000 test images at each sparsity.
Needs LAPWING_DATA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._results import Claim, Result, spread, verdict
from torch import nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {
    "paper": "002, Part I: pruning",
    "minutes": 1.2,
    "quick": 0.4,
    "page": "training.md",
    "picture": "../figures/pruning.png",
}

WEIGHTS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99)
UNITS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def accuracy(model: nn.Module, data: datasets.Dataset) -> float:
    with torch.no_grad():
        f = torch.cat([model.eval()(x) for x in data.inputs.split(1000)])
    return (f.argmax(1) == data.targets).double().mean().item() * 100


def plain(data: datasets.Dataset, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = networks.lenet()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(data), generator=generator).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
            optimizer.step()
    return model.eval()


def learned(data: datasets.Dataset, epochs: int, seed: int, prior: str, structure: str) -> lapwing.Laplace:
    torch.manual_seed(seed)
    trained = lapwing.train(
        networks.lenet(), (data.inputs, data.targets), "classification", epochs=epochs, prior=prior, samples=2048,
        structure=structure, keep="last", progress=False, every=2 * -(-len(data) // 128),
    )  # fmt: skip
    return trained.laplace


def curve(la: lapwing.Laplace, by: str, structured: bool, test: datasets.Dataset) -> list[float]:
    levels = UNITS if structured else WEIGHTS
    generator = torch.Generator().manual_seed(0)
    pruned = [lapwing.prune(la, level, by=by, structured=structured, generator=generator) for level in levels]
    return [accuracy(p.module, test) for p in pruned]


def run(seed: int, given: Any) -> dict[str, list[float]]:
    """Accuracy in percent at each share that is removed, by what is removed, training and score."""
    whole, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")[: given.test]
    train = whole.split(given.size, generator=torch.Generator().manual_seed(seed))[0]
    data = (train.inputs, train.targets)
    fitted = {
        "no prior": lapwing.fit(
            plain(train, given.epochs, seed), data, "classification", structure="diag", progress=False
        ),
        "prior per weight": learned(train, given.epochs, seed, "parameterwise", "diag"),
        "prior per unit": learned(train, given.epochs, seed, "unit", "kron"),
    }
    rows = {}
    for structured, what, levels in ((False, "weights", WEIGHTS), (True, "units", UNITS)):
        print(f"{what + ' removed':44s}" + "".join(f"{level:8.0%}" for level in levels))
        for name, la in fitted.items():
            for by in ("magnitude", "posterior", "random"):
                if by == "random" and name != "no prior":
                    continue
                rows[f"{what}: {name}, {by}"] = found = curve(la, by, structured, test)
                print(f"{name + ', ' + by:44s}" + "".join(f"{value:8.2f}" for value in found), flush=True)
    return rows


def claims(mean: Mapping[str, list[float]]) -> list[Claim]:
    """What the slide names, judged by a rule that is stated."""
    places = {"weights": WEIGHTS.index(0.8), "units": UNITS.index(0.5)}
    kept = {
        what: {by: mean[f"{what}: no prior, {by}"][k] for by in ("posterior", "magnitude", "random")}
        for what, k in places.items()
    }
    eased = {name: mean[f"weights: {name}, magnitude"][places["weights"]] for name in ("no prior", "prior per weight")}
    told = lambda values: ", ".join(f"{name} {value:.1f}" for name, value in values.items())  # noqa: E731
    return [
        Claim(
            "Selecting architecture, structure, variables",
            "Examples of Bayesian Model Selection (among them “Shaving Weights with Occam's Razor”)",
            f"Accuracy in percent with 80 % of the weights removed: {told(kept['weights'])}; with half of the units "
            f"removed: {told(kept['units'])}; by magnitude, 80 % of the weights removed: {told(eased)}.",
            verdict(
                *(each["posterior"] > each["magnitude"] for each in kept.values()),
                eased["prior per weight"] > eased["no prior"],
            ),
            "the slide gives no numbers. Three parts: without a prior, the posterior's score keeps more accuracy than "
            "magnitude at 80 % of the weights and at half of the units; and a precision per weight, learned by the "
            "evidence, makes the network easier to prune by magnitude.",
        )
    ]


def figure(each: Mapping[str, list[list[float]]]) -> Any:
    """Accuracy against the share of weights and of units that are removed: means over seeds, and their range."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, levels, what in zip(canvas.subplots(1, 2, sharey=True), (WEIGHTS, UNITS), ("weights", "units")):
        for name, runs in each.items():
            if name.startswith(what):
                values = torch.tensor(runs)
                (line,) = axes.plot(levels, values.mean(0), marker=".", label=name.split(": ")[1])
                axes.fill_between(levels, values.amin(0), values.amax(0), color=line.get_color(), alpha=0.12, lw=0)
        axes.set(xlabel=f"share of {what} removed", ylabel="test accuracy (%)")
        axes.legend(frameon=False, fontsize=8)
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("pruning", run, given)
    each = {name: [one[name] for one in runs] for name in runs[0]}
    mean = {name: torch.tensor(values).mean(0).tolist() for name, values in each.items()}
    rows = []
    for name, values in each.items():
        levels = WEIGHTS if name.startswith("weights") else UNITS
        rows.append({"removed, training, score": name, **{
            f"{level:.0%}": spread([one[levels.index(level)] for one in values]) if level in levels else ""
            for level in sorted({*WEIGHTS, *UNITS}) if level <= 0.95
        }})  # fmt: skip
    command = f"python -m experiments.pruning --seeds {given.seeds} --size {given.size} --epochs {given.epochs}"
    result = (
        Result("pruning", "Pruning by the posterior", ABOUT["paper"], f"{command} --test {given.test}", list(seeds))
        .with_rows(rows)
        .with_claims(*claims(mean))
        .with_sentence(
            "Without a prior and with half of the units removed, the accuracy is "
            f"{mean['units: no prior, posterior'][UNITS.index(0.5)]:.1f} % by the posterior's score and "
            f"{mean['units: no prior, magnitude'][UNITS.index(0.5)]:.1f} % by magnitude."
        )
        .with_notes(
            f"LeNet-5, {given.size} images of MNIST, {given.epochs} epochs, no retraining after pruning; accuracy in "
            f"percent on {given.test} test images. ± is the standard deviation over seeds, each with its own images "
            "and start; shades are ranges.",
            "The rule was written after a smaller run, of one seed, had been seen ([that page](training.md)): there "
            f"all three parts hold. The verdict on this page is that of {len(seeds)} seeds, by the same rule.",
        )
    )
    result.with_data(weights=WEIGHTS, units=UNITS, curves=each).finish(given.out, lambda: figure(each))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"size": 300, "epochs": 3, "test": 200},
        quick={"size": 1000, "epochs": 10, "test": 1000},
    )
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--test", type=int, default=2000, help="test images")
    main(parser.parse_args())
