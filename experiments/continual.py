"""Continual learning on permuted MNIST: yesterday's posterior is today's prior, beside plain fine-tuning.

    python -m experiments.continual [--tasks 5] [--size 5000] [--epochs 10]

Each task is MNIST with its own fixed permutation of the pixels. One MLP 784-100-10 learns them in turn: by
`lapwing.train` with `Prior.from_posterior` of the task before (diagonal posterior), and by fine-tuning under the same
fixed prior N(0, 1) every time. Printed is the test accuracy on all tasks seen, after each. Needs LAPWING_DATA.
"""

import torch
from experiments._arguments import Experiment

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "", "minutes": None, "page": "training.md"}


def accuracy(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == y).double().mean().item() * 100


def run(tasks: int, size: int, epochs: int, chained: bool) -> list[list[float]]:
    train, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")
    orders = [torch.randperm(784, generator=torch.Generator().manual_seed(k)) for k in range(tasks)]
    torch.manual_seed(0)
    model, prior, found = networks.mlp([784, 100, 10], torch.nn.ReLU), lapwing.Prior(1.0), []
    for k in range(tasks):
        part = train.split(size, generator=torch.Generator().manual_seed(k))[0]
        data = part.inputs.flatten(1)[:, orders[k]], part.targets
        trained = lapwing.train(
            model, data, "classification", epochs=epochs, prior=prior, structure="diag", keep="last",
            progress=False,
        )  # fmt: skip
        if chained:
            prior = lapwing.Prior.from_posterior(trained.laplace.posterior)
        found.append([accuracy(model, test.inputs.flatten(1)[:, o], test.targets) for o in orders[: k + 1]])
        mean, each = sum(found[-1]) / (k + 1), " ".join(f"{a:6.2f}" for a in found[-1])
        how = "posterior → prior" if chained else "fine-tuning"
        print(f"{how:18s} after task {k + 1}: mean {mean:6.2f} %   {each}", flush=True)
    return found


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"tasks": 2, "size": 200, "epochs": 1})
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--size", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    for chained in (False, True):
        run(given.tasks, given.size, given.epochs, chained)
