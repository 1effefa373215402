"""Is the range of rotations in the data found by the evidence? MNIST digits, rotated at random and upright.

    python -m experiments.invariances [--angles 0 90] [--size 1000] [--epochs 40]

Digits (14×14) are rotated once by an angle uniform in ± the given one. A small CNN that averages its outputs over eight
random rotations is trained while the stochastic bound of the evidence learns their range, from 20 degrees on. Printed
are the learned range and the test accuracy with it, beside the same network trained without augmentation. The test
digits are rotated as the training digits are. Needs LAPWING_DATA.
"""

import argparse
import math
import time

import torch
from experiments._arguments import Experiment
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets

ABOUT = {"paper": "002, Part I: invariances", "minutes": None, "page": "training.md"}


def digits(part: str, size: int, angle: float, seed: int) -> tuple[Tensor, Tensor]:
    data = datasets.images("mnist", part).split(size, generator=torch.Generator().manual_seed(seed))[0]
    x = F.avg_pool2d(data.inputs, 2)
    noise = torch.rand(size, 1, generator=torch.Generator().manual_seed(seed + 1)) * 2 - 1
    with torch.no_grad():
        return lapwing.Affine(rotation=1.0).transform(x, noise * math.radians(angle)), data.targets


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(256, 32), nn.GELU(), nn.Linear(32, 10),
    )  # fmt: skip


def accuracy(f: Tensor, y: Tensor) -> float:
    return (f.argmax(1) == y).double().mean().item() * 100


def run(angle: float, given: argparse.Namespace) -> None:
    train, test = digits("train", given.size, angle, 0), digits("test", given.test, angle, 0)
    start = time.process_time()
    augment = lapwing.Affine(rotation=given.start)
    found = lapwing.learn_invariances(
        network(0), train, "classification", augment, epochs=given.epochs, lr=3e-3, batch_size=100,
        evidence_batch=given.evidence_batch, every=given.every, range_lr=given.range_lr, progress=False,
    )  # fmt: skip
    seconds = time.process_time() - start
    alone = lapwing.train(
        network(0), train, "classification", epochs=given.epochs, batch_size=100, keep="last", progress=False,
        optimizer=lambda p: torch.optim.Adam(p, 3e-3),
    )  # fmt: skip
    with torch.no_grad():
        plain = accuracy(alone.module(test[0]), test[1])
    path = [h["rotation"] for h in found.history]
    quarters = ", ".join(f"{path[k * len(path) // 4 - 1]:.1f}" for k in (1, 2, 3, 4))
    print(f"± {angle:g}°: learned ± {path[-1]:.1f}° (by quarters {quarters}), "
          f"test accuracy {accuracy(found.predict(test[0]), test[1]):.1f} %, without augmentation {plain:.1f} %, "
          f"{seconds:.0f} CPU s", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"angles": (90.0,), "size": 100, "epochs": 1, "test": 100})
    parser.add_argument("--angles", nargs="+", type=float, default=(0.0, 90.0))
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--test", type=int, default=2000, help="test digits")
    parser.add_argument("--start", type=float, default=20.0)
    parser.add_argument("--evidence-batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--range-lr", type=float, default=0.1)
    given = parser.parse_args()
    for angle in given.angles:
        run(angle, given)
