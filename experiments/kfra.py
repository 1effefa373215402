"""KFRA beside KFAC: how close to the exact blocks of the GGN, how good, how fast?

    python -m experiments.kfra

prints, for an MLP on the 8×8 digits, each layer's cosine with the exact GGN block and the ratio of traces, for KFAC and
for KFRA; and for MLPs on MNIST (10,000 images, 5,000 others for tuning) the seconds of a fit and the tuned posterior.
Needs LAPWING_DATA.
"""

import argparse
import time
from itertools import pairwise

import torch
from experiments._arguments import Experiment
from torch import nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets

ABOUT = {"paper": "001, appendices B, C and G", "minutes": None}

FACTORS = {"KFAC": "ggn", "KFRA": "kfra"}


def train(widths: list[int], x: torch.Tensor, y: torch.Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        parts += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*parts[:-1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(steps):
        rows = torch.arange(128) + 128 * (step % (len(x) // 128))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


def closeness(size: int, steps: int) -> None:
    digits = datasets.digits()
    x, y = digits.inputs[:size], digits.targets[:size]
    model = train([64, 32, 32, 32, 10], x, y, steps)
    for name in (name for name, _ in model.named_parameters() if name.endswith("weight")):
        exact = lapwing.fit(model, (x, y), "classification", structure="blockdiag", select=[name]).curvature.dense()
        row = []
        for factor in FACTORS.values():
            whole = lapwing.fit(model, (x, y), "classification", structure="kron", factor=factor)
            start = whole.params.offsets[whole.params.names.index(name)]
            own = whole.curvature.dense()[start : start + len(exact), start : start + len(exact)]
            row += [(exact * own).sum() / (exact.norm() * own.norm()), own.trace() / exact.trace()]
        print(f"digits {name:10s}" + "".join(f"{float(v):9.3f}" for v in row))


def quality(given: argparse.Namespace) -> None:
    mnist, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")[: given.test]
    x, y = mnist.inputs[: given.size], mnist.targets[: given.size]
    held_out = mnist[10_000 : 10_000 + given.val]
    val, strange = (held_out.inputs, held_out.targets), datasets.images("notmnist").inputs
    for hidden in given.widths:
        widths = [784, *map(int, hidden.split("-")), 10]
        model = train(widths, x, y, given.steps)
        rows, batches = {"MAP": model}, list(zip(x.split(512), y.split(512), strict=True))
        for name, factor in FACTORS.items():
            begun = time.perf_counter()
            la = lapwing.fit(model, batches, "classification", structure="kron", factor=factor, progress=False)
            seconds, trace = time.perf_counter() - begun, float(la.curvature.matrix.diagonal().sum())
            print(f"mnist {widths}: {name} {seconds:.2f} s, trace {trace:.6g}")
            rows[name] = la.tune(val)
        report = lapwing.evaluate(rows, (test.inputs, test.targets), ood={"notMNIST": strange[: min(given.test, 2000)]})
        print(report.table("accuracy", "nll", "ece", "auroc notMNIST"))


def main() -> None:
    parser = Experiment(
        __doc__, smoke={"digits": 128, "size": 128, "val": 20, "test": 20, "steps": 5, "widths": ["16-16"]}
    )
    parser.add_argument("--digits", type=int, default=1280, help="8×8 digits that layers are compared on")
    parser.add_argument("--size", type=int, default=10_000, help="MNIST images of a fit")
    parser.add_argument("--val", type=int, default=5_000, help="MNIST images to tune on")
    parser.add_argument("--test", type=int, default=10_000, help="test images; as many of notMNIST, up to 2,000")
    parser.add_argument("--steps", type=int, default=1000, help="of training; three tenths of it on the digits")
    parser.add_argument("--widths", nargs="+", default=["256-256", "256-256-256-256"], help="of the MLPs on MNIST")
    given = parser.parse_args()
    closeness(given.digits, given.steps * 3 // 10)
    quality(given)


if __name__ == "__main__":
    main()
