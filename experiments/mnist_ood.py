"""Good in and out of distribution at once: an MLP 784-200-200-10 on MNIST or Fashion-MNIST, tuned on held-out images.

    python -m experiments.mnist_ood mnist [--out DIR]       # or fashion; --activation relu, --structure kron

Trains on 55,000 images (20 epochs of Adam; cross-entropy with prior precision 1), tunes on the other 5,000 of the
training part, and gives for the MAP, for temperature scaling on the same 5,000 images and for the tuned posterior:
accuracy, NLL and ECE on the test images, then the AUROC of each score against three other data sets. Nothing is chosen
on test images. Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse

import torch
from experiments._arguments import Experiment
from experiments._cache import trained_once
from experiments._results import Claim, Scores, answered
from experiments._study import study, told
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics

ABOUT = {"paper": "", "minutes": 2.2, "quick": 0.3, "page": "tuning.md"}

NAMES = ("mnist", "fashion", "kmnist", "notmnist")
TRAIN, BATCH, PRIOR = 55_000, 128, 1.0
SCALING, TUNED = "temperature scaling", "Laplace, tuned"
SCORES = ("entropy", "mutual information", "max probability", "novelty")


def trained(data: datasets.Dataset, given: argparse.Namespace, seed: int) -> nn.Module:
    """The network at the mode of cross-entropy and prior, as far as the epochs bring it."""
    torch.manual_seed(seed)
    model = networks.mlp([784, 200, 200, 10], {"tanh": nn.Tanh, "relu": nn.ReLU}[given.activation])

    def train() -> nn.Module:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs * (len(data) // BATCH))
        for _ in range(given.epochs):
            for rows in torch.randperm(len(data)).split(BATCH)[: len(data) // BATCH]:
                optimizer.zero_grad()
                decay = 0.5 * PRIOR / len(data) * sum(p.square().sum() for p in model.parameters())
                (F.cross_entropy(model(data.inputs[rows]), data.targets[rows]) + decay).backward()
                optimizer.step()
                schedule.step()
        return model.eval()

    options = [given.data, given.activation, given.train, given.epochs, seed]
    return trained_once(given.cache, "mnist_ood", options, model, train)


def scores(prediction: lapwing.Prediction) -> dict[str, Tensor]:
    """Each score of a batch, larger where the input looks stranger."""
    found = {"entropy": prediction.entropy, "max probability": -prediction.probs.amax(-1)}
    if prediction.score is not None:
        found |= {"mutual information": prediction.epistemic, "novelty": prediction.novelty}
    return found


def predicted(
    model: nn.Module | lapwing.Laplace, inputs: Tensor, divisor: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Probabilities and scores of all inputs."""
    probs, parts = [], []
    for x in inputs.split(500):
        if isinstance(model, lapwing.Laplace):
            prediction = model.predict(x)
            probs.append(prediction.probs)
            parts.append(scores(prediction))
        else:
            with torch.no_grad():
                p = (model(x) / divisor).softmax(-1)
            probs.append(p)
            parts.append({"entropy": metrics.entropy(p), "max probability": -p.amax(-1)})
    return torch.cat(probs), {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}


def run(seed: int, given: argparse.Namespace) -> Scores:
    """What each model does on the test images, and how its scores tell other images from them."""
    train = datasets.images(given.data, "train")
    fit, validation = train[: given.train], train[TRAIN : TRAIN + given.validation]
    test = datasets.images(given.data, "test")[: given.test]
    outside = {n: datasets.images(n, "test").inputs[: given.outside] for n in NAMES if n != given.data}
    model, held_out = trained(fit, given, seed), (validation.inputs, validation.targets)
    batches = list(zip(fit.inputs.split(1000), fit.targets.split(1000)))
    la = lapwing.fit(model, batches, "classification", structure=given.structure, prior=PRIOR, progress=False)
    scaled = lapwing.TemperatureScaled.fit(model, held_out)
    models = {
        "MAP": (model, 1.0),
        SCALING: (model, scaled.temperature),
        TUNED: (la.tune(held_out, rule=given.rule), 1.0),
    }
    rows = {}
    for name, (method, divisor) in models.items():
        probs, inside = predicted(method, test.inputs, divisor)
        others = {place: predicted(method, images, divisor)[1] for place, images in outside.items()}
        rows[name] = {
            "accuracy": float(metrics.accuracy(probs, test.targets)),
            "NLL": float(metrics.nll(probs, test.targets)),
            "ECE": float(metrics.ece(probs, test.targets)),
        } | {
            f"{score}, {place}": float(metrics.auroc(inside[score], other[score]))
            for score in SCORES if score in inside
            for place, other in others.items()
        }  # fmt: skip
    return rows


def judge(mean: Scores) -> list[Claim]:
    nll = {name: cells["NLL"] for name, cells in mean.items()}
    areas = {
        name: sum(value for key, value in cells.items() if key.startswith("entropy, ")) / 3
        for name, cells in mean.items()
    }
    return [
        answered(
            "Is the tuned posterior good in and out of distribution at once?",
            f"Test NLL: {told(nll, 4)}. Mean AUROC of the entropy against three other data sets: {told(areas, 4)}.",
            "two parts: its test NLL is not above that of temperature scaling on the same images, and the mean AUROC "
            "of its entropy is higher.",
            nll[TUNED] <= nll[SCALING],
            areas[TUNED] > areas[SCALING],
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"train": 256, "validation": 100, "epochs": 1, "test": 100, "outside": 50},
        quick={"train": 10_000, "validation": 1000, "epochs": 5, "test": 1000, "outside": 300, "structure": "kron"},
        seeds=3,
    )
    parser.add_argument("data", nargs="?", choices=("mnist", "fashion"), default="mnist")
    parser.add_argument("--activation", choices=("tanh", "relu"), default="tanh")
    parser.add_argument("--structure", default="ekfac")
    parser.add_argument("--rule", choices=("widest", "lowest"), default="widest")
    parser.add_argument("--train", type=int, default=TRAIN, help="training images")
    parser.add_argument("--validation", type=int, default=5_000, help="images to tune on")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--test", type=int, default=10_000, help="test images")
    parser.add_argument("--outside", type=int, default=2_000, help="images of each other data set")
    study("mnist_ood", ABOUT, "An MLP in and out of distribution", run, judge, parser.parse_args())
