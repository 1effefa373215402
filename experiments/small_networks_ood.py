"""Is the temperature tuned where that helps? Two small networks that had no part in the making of that test.

    python -m experiments.small_networks_ood lenet fashion          # or batchnorm; mnist

Trains on 20,000 images (Adam, cross-entropy alone), fits EKFAC over all weights to 4,000 of them with n_data=20000, and
keeps one pass over 2,000 held-out images, 1,000 test images and 300 of each of three other data sets. Then tunes by the
default, with T fixed at 1 and with T free, and prints NLL and ECE on the test images and the AUROC of the entropy
against each other data set, beside temperature scaling. The trained network and the passes are kept in --cache.
Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from experiments._arguments import Experiment
from experiments.resnet20_ood import LEARN, kept, probabilities
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics
from lapwing.evidence import Candidates, Setting, search, widest
from lapwing.evidence.heldout import GramSweep

ABOUT = {"paper": "", "minutes": None, "page": "tuning.md"}

SIZES = {"train": 20_000, "fit": 4_000, "held-out": 2_000, "test": 1_000, "outside": 300}
EPOCHS = {"lenet": 8, "batchnorm": 5}
NAMES = ("mnist", "fashion", "kmnist", "notmnist")


def batchnorm() -> nn.Sequential:
    """Five convolutions with batch norm, an average over places and a linear layer."""
    widths, strides = (1, 16, 16, 32, 32, 64), (1, 2, 1, 2, 1)
    layers: list[nn.Module] = []
    for width, following, stride in zip(widths[:-1], widths[1:], strides, strict=True):
        layers += [nn.Conv2d(width, following, 3, stride, 1, bias=False), nn.BatchNorm2d(following), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def trained(kind: str, data: datasets.Dataset, path: Path, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = networks.lenet() if kind == "lenet" else batchnorm()
    if path.exists():
        model.load_state_dict(load_file(path))
        return model.eval()
    steps = len(data) // 128
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(data)).split(128)[:steps]:
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
            optimizer.step()
            schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path)
    return model.eval()


def passes(kind: str, name: str, given: argparse.Namespace) -> dict[str, GramSweep]:
    """What a pass over the held-out, the test and the other images keeps."""
    cache, train = given.cache, datasets.images(name, "train")
    epochs = given.epochs or EPOCHS[kind]
    model = trained(kind, train[: given.train], cache / f"{name}-{kind}.safetensors", epochs)
    stem = cache / f"{name}-{kind}.lapwing"
    if stem.exists():
        la = lapwing.load(stem, model)
    else:
        batches = list(zip(train.inputs[: given.fit].split(200), train.targets[: given.fit].split(200)))
        la = lapwing.fit(model, batches, "classification", structure="ekfac", n_data=given.train)
        la.save(stem)
    parts = {
        "held out": train[given.train : given.train + given.held_out],
        "test": datasets.images(name, "test")[: given.test],
    }
    parts |= {other: datasets.images(other, "test")[: given.outside] for other in NAMES if other != name}
    path = lambda part: cache / f"{name}-{kind}-{part.replace(' ', '')}.safetensors"  # noqa: E731
    return {part: kept(la, data, path(part)) for part, data in parts.items()}


def main() -> None:
    parser = Experiment(__doc__, smoke={
        "train": 256, "fit": 64, "held_out": 40, "test": 40, "outside": 20, "epochs": 1,
    })  # fmt: skip
    parser.add_argument("network", nargs="?", choices=tuple(EPOCHS), default="lenet")
    parser.add_argument("data", nargs="?", choices=("mnist", "fashion"), default="mnist")
    parser.add_argument("--epochs", type=int, help="of training; 8 of lenet, 5 of batchnorm")
    for name, count in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=count, help="images")
    parser.add_argument("--cache", type=Path, default=Path(".cache/experiments"))
    options = parser.parse_args()
    found = passes(options.network, options.data, options)
    held_out, test = found.pop("held out"), found.pop("test")
    tries = {"the default": (LEARN, LEARN[1:]), "T = 1": (("prior", "logit_temperature"), ()), "T free": (LEARN, ())}
    settings = {}
    for name, (learn, optional) in tries.items():
        begin = time.perf_counter()
        one = torch.ones(1, dtype=torch.float64)
        candidates = Candidates.of(learn, {}, Setting(one), held_out.likelihood, optional=optional)
        tuning = search(held_out, candidates, rule=widest())
        settings[name] = tuning.setting
        print(f"{name}: {time.perf_counter() - begin:.0f} s; {tuning.messages[0]}", flush=True)
    limits = [setting for setting in tuning.trials.settings if setting.deterministic]
    for name, setting in {"temperature scaling": limits[0], **settings}.items():
        probs = probabilities(test, setting)
        inside = metrics.entropy(probs)
        areas = {o: metrics.auroc(inside, metrics.entropy(probabilities(s, setting))) for o, s in found.items()}
        figures = f"NLL {metrics.nll(probs, test.y):.4f}  ECE {metrics.ece(probs, test.y):.4f}  AUROC"
        print(f"{name:20s} {figures} {'  '.join(f'{o} {a:.3f}' for o, a in areas.items())}  ({setting})", flush=True)


if __name__ == "__main__":
    main()
