"""Is `la.tune()` without held-out data ever worse than the network as it is? Small networks and last layers.

    python -m experiments.tune_without_data [--seeds 3] [--out DIR]

Tables: one hidden layer of 20 tanh units for six UCI tables, trained by Adam for 150 and 600 steps with and without
weight decay, with a posterior over all weights. Images: the last layer of a LeNet-5 trained on 10,000 images of MNIST
and of Fashion-MNIST, with a posterior from all of them and, as people do to save time, from 2,048 of them alone. The
table has the test NLL of the network, of the posterior that the evidence chooses and of what `la.tune()` returns, which
keeps that posterior only where leave-one-out of the training data shows that it helps. The bound on what one datum may
count (`MOST` in lapwing/extras/loo.py) was made with the LeNet-5 of benchmarks/quality.py. Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._study import study
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "", "minutes": 2.5, "quick": 0.37}

SEEN = 0.002  # nats; smaller differences do not count
UCI = ("australian", "banana", "breast_cancer", "digits", "ionosphere", "vehicle")
IMAGES = ("mnist", "fashion")
Part = tuple[Tensor, Tensor]
Problem = tuple[str, nn.Module, Part, Part, dict[str, Any]]


def trained(model: nn.Module, data: Part, steps: int, decay: float, batch: int | None, seed: int) -> nn.Module:
    """Adam with decoupled weight decay, on all data or on random batches."""
    x, y = data
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2 if batch is None else 2e-3, weight_decay=decay)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = slice(None) if batch is None else torch.randint(len(x), (batch,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval()


def tables(seed: int, given: argparse.Namespace) -> Iterator[Problem]:
    for name in UCI[: given.tables]:
        table = datasets.uci_classification(name)
        train, test = table.split(len(table) * 7 // 10, generator=torch.Generator().manual_seed(seed))
        mean, deviation = train.inputs.mean(0), train.inputs.std(0)
        deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
        inside, outside = ((part.inputs - mean) / deviation for part in (train, test))
        for steps in given.steps:
            for decay in (0.0, 1e-2):
                torch.manual_seed(seed)
                model = networks.mlp([inside.shape[1], 20, int(table.targets.max()) + 1], nn.Tanh).to(inside.dtype)
                data = (inside, train.targets)
                model = trained(model, data, steps, decay, None, seed)
                yield f"{name}, {steps} steps, decay {decay:g}", model, data, (outside, test.targets), {}


def pictures(seed: int, given: argparse.Namespace) -> Iterator[Problem]:
    for name in IMAGES:
        train = datasets.images(name, "train").split(given.train, generator=torch.Generator().manual_seed(seed))[0]
        test, data = datasets.images(name, "test")[: given.test], (train.inputs, train.targets)
        torch.manual_seed(seed)
        model = trained(networks.lenet(), data, given.batches, 1e-2, 128, seed)
        for seen in dict.fromkeys((given.train, min(given.part, given.train))):
            part = (train.inputs[:seen], train.targets[:seen])
            told = f"{name}, LeNet-5, last layer from {seen} of {given.train}"
            yield told, model, part, (test.inputs, test.targets), {"select": "last_layer", "structure": "kron"}


def batched(data: Part, size: int) -> list[Part]:
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


def scored(model: nn.Module, data: Part, test: Part, options: dict[str, Any]) -> dict[str, float]:
    """Test NLL of the network, of the evidence's posterior and of `tune()`, and whether that kept the posterior."""

    def nll(la: lapwing.Laplace) -> float:
        return -torch.cat([la.predict(x).log_prob(y) for x, y in batched(test, 500)]).mean().item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evidence of an interpolating network is to be doubted
        la = lapwing.fit(model, batched(data, 256), "classification", progress=False, **options)
        alone, evidence = la.tune(), la.tune(method="evidence")
    with torch.no_grad():
        network = torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in batched(test, 500)])
    kept = float(not alone.tuning.deterministic)
    return {"network": network.mean().item(), "evidence": nll(evidence), "tune()": nll(alone), "kept": kept}


def run(seed: int, given: argparse.Namespace) -> Scores:
    problems = [*tables(seed, given), *pictures(seed, given)]
    return {name: scored(model, data, test, options) for name, model, data, test, options in problems}


def judge(mean: Scores) -> list[Claim]:
    harm = {name: row["tune()"] - row["network"] for name, row in mean.items()}
    better, worse = (
        [abs(d) for d in (row["evidence"] - row["network"] for row in mean.values()) if sign * d > SEEN]
        for sign in (-1, 1)
    )
    kept = sum(row["kept"] for row in mean.values())
    worst = max(harm, key=lambda name: harm[name])
    return [
        answered(
            "Is `la.tune()` never worse than the network as it is?",
            f"Of {len(mean)} networks, `la.tune()` kept the posterior of {kept:.3g} on average over seeds; its largest "
            f"loss is {harm[worst]:+.4f} nats ({worst}). What the evidence chose is better than the network on "
            f"{len(better)}, by up to {max(better, default=0.0):.2f} nats, and worse on {len(worse)}, by up to "
            f"{max(worse, default=0.0):.2f}.",
            f"the mean test NLL over seeds is nowhere more than {SEEN} nats above that of the network.",
            harm[worst] <= SEEN,
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"tables": 1, "steps": [20], "train": 200, "test": 100, "part": 100, "batches": 5},
        quick={"tables": 3, "train": 5_000, "batches": 300},
    )
    parser.add_argument("--tables", type=int, default=6, help="how many UCI tables")
    parser.add_argument("--steps", type=int, nargs="+", default=[150, 600], help="steps of training on tables")
    parser.add_argument("--train", type=int, default=10_000, help="training images")
    parser.add_argument("--test", type=int, default=3_000, help="test images")
    parser.add_argument("--part", type=int, default=2_048, help="training images of the posterior from a part")
    parser.add_argument("--batches", type=int, default=600, help="steps of training on images")
    study("tune_without_data", ABOUT, "Tuning without held-out data", run, judge, parser.parse_args())
