"""Continual learning on permuted MNIST: yesterday's posterior is today's prior, beside plain fine-tuning.

    python -m experiments.continual [--tasks 5] [--size 2000] [--epochs 6] [--seeds 3] [--out DIR]

Each task is MNIST with its own fixed permutation of the pixels. One MLP 784-100-10 learns them in turn: by
`lapwing.train` with `Prior.from_posterior` of the task before (diagonal, Kronecker and EKFAC posteriors), and by
fine-tuning under the same fixed prior N(0, 1) every time. The table has the test accuracy after the last task: its mean
over tasks, and on the first task. Needs LAPWING_DATA.
"""

import argparse

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._study import study, told

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "", "minutes": 1.4, "quick": 0.3, "page": "training.md"}

TUNED = "fine-tuning"


def accuracy(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == y).double().mean().item() * 100


def learn(tasks: int, size: int, epochs: int, structure: str | None, seed: int) -> list[float]:
    """Return the accuracy on each task after the last; without a structure the prior stays N(0, 1)."""
    train, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")
    draws = [torch.Generator().manual_seed(1000 * seed + k) for k in range(tasks)]
    orders = [torch.randperm(784, generator=generator) for generator in draws]
    torch.manual_seed(seed)
    model, prior, found = networks.mlp([784, 100, 10], torch.nn.ReLU), lapwing.Prior(1.0), []
    for k in range(tasks):
        part = train.split(size, generator=draws[k])[0]
        data = part.inputs.flatten(1)[:, orders[k]], part.targets
        trained = lapwing.train(
            model, data, "classification", epochs=epochs, prior=prior, structure=structure or "diag", keep="last",
            progress=False,
        )  # fmt: skip
        if structure is not None:
            prior = lapwing.Prior.from_posterior(trained.laplace.posterior)
        found = [accuracy(model, test.inputs.flatten(1)[:, order], test.targets) for order in orders[: k + 1]]
    return found


def run(seed: int, given: argparse.Namespace) -> Scores:
    rows = {}
    for structure in (None, "diag", "kron", "ekfac"):
        found = learn(given.tasks, given.size, given.epochs, structure, seed)
        rows[structure or TUNED] = {"mean over tasks (%)": sum(found) / len(found), "first task (%)": found[0]}
    return rows


def judge(mean: Scores) -> list[Claim]:
    over = {name: cells["mean over tasks (%)"] for name, cells in mean.items()}
    return [
        answered(
            "Do posteriors as priors keep what fine-tuning forgets?",
            f"Mean accuracy in percent over all tasks after the last: {told(over, 4)}.",
            "three parts: each of the three posteriors must have a mean accuracy at least 2 points above that of "
            "fine-tuning.",
            *(value > over[TUNED] + 2 for name, value in over.items() if name != TUNED),
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"tasks": 2, "size": 200, "epochs": 1}, quick={"tasks": 3, "size": 500, "epochs": 4}, seeds=3
    )
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=6)
    study("continual", ABOUT, "Continual learning on permuted MNIST", run, judge, parser.parse_args())
