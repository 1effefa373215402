"""KFRA beside KFAC: how close to the exact blocks of the GGN, how good, how fast?

    python experiments/kfra.py

prints, for an MLP on the 8×8 digits, each layer's cosine with the exact GGN block and the ratio of traces, for KFAC and
for KFRA; and for MLPs on MNIST (10,000 images, 5,000 others for tuning) the seconds of a fit and the tuned posterior.
"""

import time
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

import lapwing
from lapwing.interfaces import datasets

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


def closeness() -> None:
    digits = datasets.digits()
    x, y = digits.inputs[:1280], digits.targets[:1280]
    model = train([64, 32, 32, 32, 10], x, y, 300)
    for name in (name for name, _ in model.named_parameters() if name.endswith("weight")):
        exact = lapwing.fit(model, (x, y), "classification", structure="blockdiag", select=[name]).curvature.dense()
        row = []
        for factor in FACTORS.values():
            whole = lapwing.fit(model, (x, y), "classification", structure="kron", factor=factor)
            start = whole.params.offsets[whole.params.names.index(name)]
            own = whole.curvature.dense()[start : start + len(exact), start : start + len(exact)]
            row += [(exact * own).sum() / (exact.norm() * own.norm()), own.trace() / exact.trace()]
        print(f"digits {name:10s}" + "".join(f"{float(v):9.3f}" for v in row))


def quality() -> None:
    mnist, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")
    x, y = mnist.inputs[:10_000], mnist.targets[:10_000]
    val, strange = (mnist.inputs[10_000:15_000], mnist.targets[10_000:15_000]), datasets.images("notmnist").inputs
    for widths in ([784, 256, 256, 10], [784, 256, 256, 256, 256, 10]):
        model = train(widths, x, y, 1000)
        rows, batches = {"MAP": model}, list(zip(x.split(512), y.split(512), strict=True))
        for name, factor in FACTORS.items():
            begun = time.perf_counter()
            la = lapwing.fit(model, batches, "classification", structure="kron", factor=factor, progress=False)
            seconds, trace = time.perf_counter() - begun, float(la.curvature.matrix.diagonal().sum())
            print(f"mnist {widths}: {name} {seconds:.2f} s, trace {trace:.6g}")
            rows[name] = la.tune(val)
        report = lapwing.evaluate(rows, (test.inputs, test.targets), ood={"notMNIST": strange[:2000]})
        print(report.table("accuracy", "nll", "ece", "auroc notMNIST"))


if __name__ == "__main__":
    closeness()
    quality()
