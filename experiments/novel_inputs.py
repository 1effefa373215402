"""Out-of-distribution AUROC of the sketched score, Nyström, inducing points and matrix-free posteriors.

    python -m experiments.novel_inputs mnist [--out DIR]      # MNIST → notMNIST, KMNIST; an MLP 784-200-200-10
    python -m experiments.novel_inputs cifar10 [--out DIR]    # CIFAR-10 → SVHN; the pretrained ResNet-20

Every posterior's prior precision is the one of 1, 10, 100, 1000 with the lowest negative log-likelihood on held-out
data of the *known* kind; scores are then computed on other data. The matrix-free posterior chooses its prior by its
sketch and predicts by weight samples, each a solve. Columns: predictive entropy, and the mean variance of the network's
outputs. Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._sketched import sketched_score
from experiments._study import study, told
from torch import Tensor, nn

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.metrics import auroc

ABOUT = {"paper": "003", "minutes": 12, "quick": 1.4, "page": "without_a_matrix.md"}

warnings.filterwarnings("ignore")
PRIORS = (1.0, 10.0, 100.0, 1000.0)


def mnist(
    n: int, train: int, test: int, seed: int
) -> tuple[nn.Module, list, tuple[Tensor, Tensor], dict[str, Tensor], int]:
    data = datasets.images("mnist", "train")[:train]
    torch.manual_seed(seed)
    model = networks.mlp([784, 200, 200, 10], nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        for rows in torch.randperm(len(data.inputs)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
            optimizer.step()
    held = datasets.images("mnist", "train")[10_000 : 10_000 + test * 3 // 4]
    tests = {name: datasets.images(name, "test").inputs[:test] for name in ("mnist", "notmnist", "kmnist")}
    return model.eval(), _batches(data.inputs[:n], data.targets[:n]), (held.inputs, held.targets), tests, train


def cifar10(
    n: int, train: int, test: int, seed: int
) -> tuple[nn.Module, list, tuple[Tensor, Tensor], dict[str, Tensor], int]:
    generator = torch.Generator().manual_seed(seed)
    data = datasets.images("cifar10", "train").split(n, generator=generator)[0]
    images = datasets.images("cifar10", "test")
    x = networks.standardize
    tests = {
        "cifar10": x(images.inputs[100:][: test * 3 // 4]),
        "svhn": x(datasets.images("svhn", "test").inputs[: test * 3 // 4]),
    }
    held = x(images.inputs[:100]), images.targets[:100]
    return networks.pretrained_resnet(20), _batches(x(data.inputs), data.targets), held, tests, 50_000


def _batches(x: Tensor, y: Tensor) -> list:
    return list(zip(x.split(50), y.split(50)))


def areas(score: str, names: list[str], values: list[Tensor]) -> dict[str, float]:
    """AUROC against each other data set; the first values are those of the known kind."""
    known, *others = values
    return {f"{score}, {name}": float(auroc(known, other)) for name, other in zip(names, others)}


def scores(la: lapwing.Laplace, tests: dict[str, Tensor]) -> dict[str, float]:
    found, names = [la.predict(x) for x in tests.values()], list(tests)[1:]
    variances = [p.function.variance.mean(-1) for p in found]
    return areas("entropy", names, [p.entropy for p in found]) | areas("variance", names, variances)


def points_of(given: argparse.Namespace) -> int:
    """Number of data for the curvature."""
    return given.points or (500 if given.data == "mnist" else 150)


def run(seed: int, given: argparse.Namespace) -> Scores:
    points = points_of(given)
    make = {"mnist": mnist, "cifar10": cifar10}[given.data]
    model, data, held, tests, whole = make(points, given.train, given.test, seed)
    names = list(tests)[1:]
    with torch.no_grad():
        entropies = [torch.distributions.Categorical(logits=model(x)).entropy() for x in tests.values()]
    rows = {"MAP": areas("entropy", names, entropies)}
    structures = {
        "KFAC": ("kron", "all"),
        "last layer": ("full", "last_layer"),
        "Nyström 64": (lapwing.Nystrom(64), "all"),
        "VaLLA 10": (lapwing.VaLLA(10), "all"),
        "matrix-free": (lapwing.MatrixFree(rank=given.rank, predictive="sketch"), "all"),
    }
    for name, (structure, select) in structures.items():
        if given.only and given.only not in name:
            continue
        begin = time.process_time()
        la = lapwing.fit(model, data, "classification", structure=structure, select=select, n_data=whole)
        losses = {tau: -float(la.replace(prior=tau).predict(held[0]).log_prob(held[1]).mean()) for tau in PRIORS}
        tau = min(losses, key=losses.get)  # type: ignore[arg-type]
        la = la.replace(prior=tau)
        rows[name] = scores(la, tests) | {"prior": tau, "CPU s": time.process_time() - begin}
        if name == "matrix-free":
            begin = time.process_time()
            matrix = la.curvature.matrix
            options = replace(matrix.solver, predictive="samples", samples=16, columns=16, tolerance=1e-2)
            curvature = replace(la.curvature, matrix=replace(matrix, solver=options))
            found = scores(replace(la, belief=replace(la.belief, curvature=curvature)), tests)
            rows[f"{name}, 16 samples"] = found | {"prior": tau, "CPU s": time.process_time() - begin}
    if given.only in ("", "score"):
        begin = time.process_time()
        la = lapwing.fit(model, data, "classification", structure=lapwing.MatrixFree(sketch="none"), n_data=whole)
        score = sketched_score(la.network, la.plan, la.curvature.matrix.product.matvec, rank=40, size=4096)
        found = areas("variance", names, [score(x) for x in tests.values()])
        rows["sketched score, rank 40"] = found | {"CPU s": time.process_time() - begin}
    return rows


def judge(mean: Scores) -> list[Claim]:
    score = lambda name, kind: [value for key, value in mean[name].items() if key.startswith(kind)]  # noqa: E731
    areas = {
        f"{name} by {kind}": sum(score(name, kind)) / len(score(name, kind))
        for name in mean
        for kind in ("entropy", "variance")
        if score(name, kind)
    }
    free = [value for name, value in areas.items() if name.startswith("matrix-free, 16 samples")]
    return [
        answered(
            "Does a matrix-free posterior notice inputs of another kind better than the network alone?",
            f"Mean AUROC over the other data sets: {told(areas)}.",
            "two parts, by entropy and by variance: the mean AUROC of the matrix-free posterior with 16 samples is "
            "above that of the MAP network's entropy.",
            *(value > areas["MAP by entropy"] for value in free),
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"points": 10, "train": 200, "test": 12, "rank": 8, "only": "matrix-free"},
        quick={"points": 100, "train": 3000, "test": 100, "rank": 32}, seeds=3,
    )  # fmt: skip
    parser.add_argument("data", nargs="?", choices=["mnist", "cifar10"], default="mnist")
    parser.add_argument("--train", type=int, default=10_000, help="images that the MLP is trained on")
    parser.add_argument(
        "--test", type=int, default=400, help="images of each test set; three quarters of it for CIFAR-10"
    )
    parser.add_argument("--points", type=int, default=None, help="data for the curvature, scaled to the training set")
    parser.add_argument("--rank", type=int, default=128, help="of the matrix-free posterior's sketch")
    parser.add_argument("--only", default="", help="one posterior, by a part of its name, or 'score'")
    given = parser.parse_args()
    mlp = f"an MLP trained on {given.train:,} images of MNIST"
    notes = [
        f"The network is {mlp if given.data == 'mnist' else 'the pretrained ResNet-20'}. Curvature comes from "
        f"{points_of(given)} training images and is scaled to all of them. Entropy and variance are AUROCs of test "
        "images against images of the other data set: by the entropy of the prediction, and by the mean variance of "
        "the outputs. The sketched score takes the place of a variance.",
        "The prior precision is the one of 1, 10, 100 and 1000 with the lowest NLL on held-out images of the known "
        "kind; the table has its mean. The matrix-free posterior with 16 samples shares the fit and the prior of the "
        "row above, so that its CPU time is that of predictions alone.",
    ]
    study("novel_inputs", ABOUT, "Inputs of another kind", run, judge, given, notes=notes)
