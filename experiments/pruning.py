"""Accuracy against sparsity: pruning by the posterior beside pruning by magnitude.

    python -m experiments.pruning [--size 2000] [--epochs 20] [--out pruning.png]

LeNet-5 on a part of MNIST is trained (a) without a prior and (b) by `lapwing.train` with a precision per weight (diag),
(c) with a precision per unit (kron). Weights are set to zero without retraining, by magnitude, by θ²·H_pp and at
random; units are removed by the same scores, summed. Printed is the accuracy on 2,000 test images at each sparsity.
Needs LAPWING_DATA.
"""

import torch
from experiments._arguments import Experiment
from torch import nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "002, Part I: pruning", "minutes": None, "page": "training.md", "picture": "../figures/pruning.png"}

WEIGHTS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99)
UNITS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def accuracy(model: nn.Module, data: datasets.Dataset) -> float:
    with torch.no_grad():
        f = torch.cat([model.eval()(x) for x in data.inputs.split(1000)])
    return (f.argmax(1) == data.targets).double().mean().item() * 100


def plain(data: datasets.Dataset, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = networks.lenet()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(data), generator=generator).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
            optimizer.step()
    return model.eval()


def learned(data: datasets.Dataset, epochs: int, prior: str, structure: str) -> lapwing.Laplace:
    torch.manual_seed(0)
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


def draw(rows: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), dpi=80, sharey=True)
    for axes, levels, what in zip(panels, (WEIGHTS, UNITS), ("weights", "units"), strict=True):
        for name, values in rows.items():
            if name.startswith(what):
                axes.plot(levels, values, marker="o", label=name.split(": ")[1])
        axes.set(xlabel=f"share of {what} removed", ylabel="test accuracy, %")
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"size": 200, "epochs": 1, "test": 200})
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--test", type=int, default=2000, help="test images")
    parser.add_argument("--out")
    given = parser.parse_args()
    whole, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")[: given.test]
    train = whole.split(given.size, generator=torch.Generator().manual_seed(0))[0]
    fitted = {
        "no prior": lapwing.fit(
            plain(train, given.epochs),
            (train.inputs, train.targets),
            "classification",
            structure="diag",
            progress=False,
        ),
        "prior per weight": learned(train, given.epochs, "parameterwise", "diag"),
        "prior per unit": learned(train, given.epochs, "unit", "kron"),
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
    if given.out:
        draw(rows, given.out)
