"""Continual learning on permuted MNIST: yesterday's posterior is today's prior, beside plain fine-tuning.

    python -m experiments.continual [--tasks 5] [--size 2000] [--epochs 6] [--seeds 3]

Each task is MNIST with its own fixed permutation of the pixels. One MLP 784-100-10 learns them in turn: by
`lapwing.train` with `Prior.from_posterior` of the task before (diagonal, Kronecker and EKFAC posteriors), and by
fine-tuning under the same fixed prior N(0, 1) every time. Printed is the test accuracy on all tasks seen, after each,
and the mean over seeds after the last. Needs LAPWING_DATA.
"""

import torch
from experiments._arguments import Experiment

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "", "minutes": 7, "page": "training.md"}


def accuracy(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == y).double().mean().item() * 100


def spread(values: list[float]) -> str:
    """Return the mean over seeds, with the standard deviation where there are several."""
    found = torch.tensor(values, dtype=torch.float64)
    return f"{found.mean():.2f}" + (f" ± {found.std():.2f}" if len(found) > 1 else "")


def run(tasks: int, size: int, epochs: int, structure: str | None, seed: int) -> list[float]:
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
        mean, each = sum(found) / (k + 1), " ".join(f"{a:6.2f}" for a in found)
        name = structure or "fine-tuning"
        print(f"{name:12s} seed {seed} after task {k + 1}: mean {mean:6.2f} %   {each}", flush=True)
    return found


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"tasks": 3, "size": 200, "epochs": 1, "seeds": 1})
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    table = {}
    for structure in (None, "diag", "kron", "ekfac"):
        table[structure or "fine-tuning"] = [
            run(given.tasks, given.size, given.epochs, structure, seed) for seed in range(given.seeds)
        ]
    for name, runs in table.items():
        mean, first = spread([sum(run) / len(run) for run in runs]), spread([run[0] for run in runs])
        print(f"{name:12s} mean over tasks {mean} %, on the first task {first} %")
