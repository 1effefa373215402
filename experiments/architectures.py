"""Does the evidence rank architectures as test data do? Twelve small networks on a part of Fashion-MNIST.

    python -m experiments.architectures [--size 4000] [--epochs 30] [--out architectures.png] [--cache DIR]

Each network is trained by `lapwing.train` (layerwise priors, Kronecker factors) on the same 14×14 images. Printed are
the log evidence per datum on the training data, the mean log-likelihood of 10,000 test images, and the rank correlation
of the two (Spearman); the plot shows one against the other. Nothing is chosen on test data. `--cache` keeps the figures
of each network, so that an interrupted run goes on. Needs LAPWING_DATA.
"""

import json
import time
from pathlib import Path

import torch
from experiments._arguments import Experiment
from torch import nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {
    "paper": "002, Part I: model comparison", "minutes": None,
    "page": "training.md", "picture": "../figures/architectures.png",
}  # fmt: skip


def mlp(*hidden: int) -> nn.Sequential:
    return networks.mlp([196, *hidden, 10], nn.ReLU)


def cnn(*channels: int, hidden: int = 0) -> nn.Sequential:
    """Convolutions 3×3 with stride 2 on 14×14 images, then linear layers."""
    layers: list[nn.Module] = []
    before, side = 1, 14
    for width in channels:
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.ReLU()]
        before, side = width, -(-side // 2)
    layers += [nn.Flatten()]
    size = before * side * side
    if hidden:
        layers += [nn.Linear(size, hidden), nn.ReLU()]
        size = hidden
    return nn.Sequential(*layers, nn.Linear(size, 10))


CANDIDATES = {
    "linear": lambda: mlp(),
    "mlp 4": lambda: mlp(4),
    "mlp 16": lambda: mlp(16),
    "mlp 64": lambda: mlp(64),
    "mlp 32-32": lambda: mlp(32, 32),
    "mlp 8-8-8-8": lambda: mlp(8, 8, 8, 8),
    "cnn 2": lambda: cnn(2),
    "cnn 4": lambda: cnn(4),
    "cnn 16": lambda: cnn(16),
    "cnn 8-16": lambda: cnn(8, 16),
    "cnn 16-32": lambda: cnn(16, 32),
    "cnn 2-4-4": lambda: cnn(2, 4, 4),
}


def ranks(values: torch.Tensor) -> torch.Tensor:
    return values.argsort().argsort().double()


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1].item()


def run(name: str, train: datasets.Dataset, test: datasets.Dataset, epochs: int) -> tuple[float, float, float]:
    """Log evidence per datum, test log-likelihood, test accuracy."""
    torch.manual_seed(0)
    model = CANDIDATES[name]()
    trained = lapwing.train(
        model, (train.inputs, train.targets), "classification", epochs=epochs, keep="last", progress=False,
        every=3 * -(-len(train) // 128), samples=2000,
        optimizer=lambda p: torch.optim.Adam(p, 3e-3),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs, 1e-5),
    )  # fmt: skip
    with torch.no_grad():
        f = torch.cat([model.eval()(x) for x in test.inputs.split(1000)])
    accuracy = (f.argmax(1) == test.targets).double().mean().item()
    return trained.laplace.log_evidence().item() / len(train), -F.cross_entropy(f, test.targets).item(), accuracy


def draw(found: dict[str, tuple[float, float, float]], path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.5), dpi=80)
    for name, (evidence, score, _) in found.items():
        axes.scatter(evidence, score, color="tab:orange" if name.startswith(("cnn", "lenet")) else "tab:blue")
        axes.annotate(name, (evidence, score), textcoords="offset points", xytext=(5, -3), fontsize=8)
    axes.set(xlabel="log evidence per training image", ylabel="test log-likelihood per image", title=title)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"size": 200, "epochs": 1, "test": 200, "only": ("linear", "cnn 2")})
    parser.add_argument("--size", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--test", type=int, default=10_000, help="test images")
    parser.add_argument("--out")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--only", nargs="+", default=CANDIDATES)
    given = parser.parse_args()
    whole, test = datasets.images("fashion", "train"), datasets.images("fashion", "test")[: given.test]
    train = whole.split(given.size, generator=torch.Generator().manual_seed(0))[0]
    train, test = (datasets.Dataset(F.avg_pool2d(part.inputs, 2), part.targets) for part in (train, test))
    found = {}
    for name in given.only:
        start = time.process_time()
        kept = given.cache and given.cache / f"architectures-{name.replace(' ', '-')}-{given.size}-{given.epochs}.json"
        if kept and kept.exists():
            found[name], seconds = json.loads(kept.read_text())
        else:
            found[name] = run(name, train, test, given.epochs)
            seconds = time.process_time() - start
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([found[name], seconds]))
        evidence, score, accuracy = found[name]
        print(
            f"{name:14s} evidence {evidence:8.4f}  test {score:8.4f}  {accuracy:6.2%}  {seconds:5.0f} CPU s", flush=True
        )
    table = torch.tensor(list(found.values()), dtype=torch.float64)
    both = spearman(table[:, 0], table[:, 1]), spearman(table[:, 0], table[:, 2])
    print(f"rank correlation of the evidence with test log-likelihood {both[0]:.3f}, with test accuracy {both[1]:.3f}")
    if given.out:
        draw(found, given.out, f"{given.size} images of Fashion-MNIST, rank correlation {both[0]:.2f}")
