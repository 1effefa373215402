"""Out-of-distribution AUROC of the sketched score, Nyström, inducing points and matrix-free posteriors.

LAPWING_DATA=... python -m experiments.novel_inputs mnist      # MNIST → notMNIST, KMNIST; an MLP 784-200-200-10
LAPWING_DATA=... python -m experiments.novel_inputs cifar10    # CIFAR-10 → SVHN; the pretrained ResNet-20

Every posterior's prior precision is the one of 1, 10, 100, 1000 with the lowest negative log-likelihood on held-out
data of the *known* kind; scores are then computed on other data. The matrix-free posterior chooses its prior by its
sketch and predicts by weight samples, each a solve. Columns: predictive entropy, and the mean variance of the network's
outputs. Needs LAPWING_DATA.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import torch
from experiments._arguments import Experiment
from experiments._sketched import sketched_score
from torch import Tensor, nn

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.metrics import auroc

ABOUT = {"paper": "003", "minutes": None, "page": "matrixfree.md"}

warnings.filterwarnings("ignore")
PRIORS = (1.0, 10.0, 100.0, 1000.0)


def mnist(n: int, train: int, test: int) -> tuple[nn.Module, list, tuple[Tensor, Tensor], dict[str, Tensor], int]:
    data = datasets.images("mnist", "train")[:train]
    model = networks.mlp([784, 200, 200, 10], nn.ReLU)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        for rows in torch.randperm(len(data.inputs)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
            optimizer.step()
    held = datasets.images("mnist", "train")[10_000 : 10_000 + test * 3 // 4]
    tests = {name: datasets.images(name, "test").inputs[:test] for name in ("mnist", "notmnist", "kmnist")}
    return model.eval(), _batches(data.inputs[:n], data.targets[:n]), (held.inputs, held.targets), tests, train


def cifar10(n: int, train: int, test: int) -> tuple[nn.Module, list, tuple[Tensor, Tensor], dict[str, Tensor], int]:
    data, images = datasets.images("cifar10", "train")[:n], datasets.images("cifar10", "test")
    x = networks.standardize
    tests = {
        "cifar10": x(images.inputs[100:][: test * 3 // 4]),
        "svhn": x(datasets.images("svhn", "test").inputs[: test * 3 // 4]),
    }
    held = x(images.inputs[:100]), images.targets[:100]
    return networks.pretrained_resnet(20), _batches(x(data.inputs), data.targets), held, tests, 50_000


def _batches(x: Tensor, y: Tensor) -> list:
    return list(zip(x.split(50), y.split(50)))


def areas(scores: list[Tensor]) -> list[float]:
    known, *others = scores
    return [float(auroc(known, other)) for other in others]


def show(name: str, entropy: list[float], variance: list[float], seconds: float) -> None:
    columns = [" ".join(f"{a:.3f}" for a in part) for part in (entropy, variance)]
    print(f"  {name:<34}{columns[0]:<16}{columns[1]:<16}{seconds:6.0f} s CPU", flush=True)


def main() -> None:
    parser = Experiment(__doc__, smoke={"points": 10, "train": 200, "test": 12, "rank": 8})
    parser.add_argument("data", nargs="?", choices=["mnist", "cifar10"], default="mnist")
    parser.add_argument("--train", type=int, default=10_000, help="images that the MLP is trained on")
    parser.add_argument(
        "--test", type=int, default=400, help="images of each test set; three quarters of it for CIFAR-10"
    )
    parser.add_argument("--points", type=int, default=None, help="data for the curvature, scaled to the training set")
    parser.add_argument("--rank", type=int, default=128, help="of the matrix-free posterior's sketch")
    parser.add_argument("--only", default="", help="one posterior, by a part of its name, or 'score'")
    arguments = parser.parse_args()
    points = arguments.points or (500 if arguments.data == "mnist" else 150)
    model, data, held, tests, whole = {"mnist": mnist, "cifar10": cifar10}[arguments.data](
        points, arguments.train, arguments.test
    )
    names = list(tests)[1:]
    print(
        f"{arguments.data}, curvature from {points} data scaled to {whole}; AUROC against {', '.join(names)}",
        flush=True,
    )
    with torch.no_grad():
        entropies = [torch.distributions.Categorical(logits=model(x)).entropy() for x in tests.values()]
        show("MAP", areas(entropies), [], 0.0)
    structures = {
        "KFAC": ("kron", "all"),
        "last layer": ("full", "last_layer"),
        "Nyström 64": (lapwing.Nystrom(64), "all"),
        "VaLLA 10": (lapwing.VaLLA(10), "all"),
        "matrix-free": (lapwing.MatrixFree(rank=arguments.rank, predictive="sketch"), "all"),
    }
    for name, (structure, select) in structures.items():
        if arguments.only and arguments.only not in name:
            continue
        begin = time.process_time()
        la = lapwing.fit(model, data, "classification", structure=structure, select=select, n_data=whole)
        losses = {tau: -float(la.replace(prior=tau).predict(held[0]).log_prob(held[1]).mean()) for tau in PRIORS}
        tau = min(losses, key=losses.get)  # type: ignore[arg-type]
        la = la.replace(prior=tau)
        show(f"{name:<24}τ={tau:<6g}", *scores(la, tests), time.process_time() - begin)
        if name == "matrix-free":
            begin = time.process_time()
            matrix = la.curvature.matrix
            options = replace(matrix.solver, predictive="samples", samples=16, columns=16, tolerance=1e-2)
            curvature = replace(la.curvature, matrix=replace(matrix, solver=options))
            found = scores(replace(la, belief=replace(la.belief, curvature=curvature)), tests)
            show(f"{name + ', 16 samples':<24}τ={tau:<6g}", *found, time.process_time() - begin)
    if arguments.only not in ("", "score"):
        return
    begin = time.process_time()
    la = lapwing.fit(model, data, "classification", structure=lapwing.MatrixFree(sketch="none"), n_data=whole)
    score = sketched_score(la.network, la.plan, la.curvature.matrix.product.matvec, rank=40, size=4096)
    show("sketched score, rank 40", [], areas([score(x) for x in tests.values()]), time.process_time() - begin)


def scores(la: lapwing.Laplace, tests: dict[str, Tensor]) -> tuple[list[float], list[float]]:
    found = [la.predict(x) for x in tests.values()]
    return areas([p.entropy for p in found]), areas([p.function.variance.mean(-1) for p in found])


if __name__ == "__main__":
    main()
