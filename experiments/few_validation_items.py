"""Is tuning on few held-out items as good as temperature scaling on the same items?

    python -m experiments.few_validation_items [--networks kmnist ...] [--items 100 300] [--seeds 20] [--out DIR]

For each network: train it (or read the pretrained one), fit a posterior, and keep one pass over a pool of images that
took no part. Then, for each number of items and each seed, draw that many items from the pool, tune on them as
`la.tune(val)` does by default, fit temperature scaling to the same items, and score both on the rest of the pool.
The table has the NLL of the network, of temperature scaling and of the default, the difference of the last two, and
whether the result has a posterior at all. The rule was made with the networks in `MADE_WITH`; the others, which are the
default here, judge it. Needs LAPWING_DATA. What is slow is kept in --cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import trained_once
from experiments._results import Claim, Scores, answered
from experiments._study import study
from experiments.resnet20_ood import kept, part_of
from torch import nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.evidence import Candidates, Setting, default_learn, search
from lapwing.evidence.heldout import GramSweep
from lapwing.evidence.search import GRID, OPTIONAL
from lapwing.evidence.settings import best_logit_temperature, resolve_rule

ABOUT = {"paper": "", "minutes": 4, "quick": 0.2, "page": "tuning.md"}

MADE_WITH = ("fashion", "fashion-short", "mnist")


@dataclass(frozen=True)
class Case:
    """A network, what it is trained on, the images its posterior is fitted to, and the pool."""

    make: Callable[[], nn.Module]
    train: datasets.Dataset
    pool: datasets.Dataset
    fit: int = 1_000
    n_data: int | None = None  # None: the number of training images
    epochs: int = 6
    options: tuple[tuple[str, Any], ...] = (("structure", "kron"),)


def small(name: str, part: str, train: int, pool: int, make: Callable[[], nn.Module], **options: Any) -> Case:
    """A network trained on the first images of a data set, with the pool from its test images."""
    data = datasets.images(name, part)
    rest = data[train:] if part == "test" else datasets.images(name, "test")
    return Case(make, data[:train], rest[:pool], **options)


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *networks.mlp((784, 100, 10)))


def tabular(name: str, train: int, width: int) -> Case:
    """An MLP for a UCI table, standardized by its training part."""
    data = datasets.uci_classification(name)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    x, y = data.inputs[order].float(), data.targets[order].long()
    x = (x - x[:train].mean(0)) / x[:train].std(0).clamp(min=1e-6)
    sizes = (x.shape[1], width, int(y.max()) + 1)
    both = datasets.Dataset(x, y)
    last = (("structure", "full"), ("select", "all")) if width <= 20 else (("structure", "kron"),)
    return Case(lambda: networks.mlp(sizes), both[:train], both[train:], fit=train, epochs=60, options=last)


def resnet(depth: int, **options: Any) -> Case:
    """A network pretrained on CIFAR-10, its pool the test images."""
    train, test = datasets.images("cifar10", "train")[:2_000], datasets.images("cifar10", "test")
    test = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:4_000]]
    scaled = [datasets.Dataset(networks.standardize(d.inputs), d.targets) for d in (train, test)]
    return Case(lambda: networks.pretrained_resnet(depth), *scaled, n_data=50_000, epochs=0, **options)


LAST = (("structure", "full"), ("select", "last_layer"))
CASES: dict[str, Callable[[], Case]] = {
    "fashion": lambda: small("fashion", "train", 6_000, 4_000, networks.lenet, epochs=25),
    "fashion-short": lambda: small("fashion", "train", 6_000, 4_000, networks.lenet),
    "mnist": lambda: small("mnist", "train", 4_000, 4_000, flat),
    "kmnist": lambda: small("kmnist", "test", 4_000, 4_000, networks.lenet),
    "kmnist-mlp": lambda: small("kmnist", "test", 3_000, 4_000, flat, options=(("structure", "ekfac"),)),
    "resnet20": lambda: resnet(20, fit=2_000, options=LAST),
    "resnet32": lambda: resnet(32, fit=2_000, options=LAST),
    "digits": lambda: tabular("digits", 400, 32),
    "vehicle": lambda: tabular("vehicle", 300, 16),
}


def trained(case: Case) -> nn.Module:
    model = case.make()
    data, optimizer = case.train, torch.optim.Adam(model.parameters(), 2e-3)
    steps = max(1, len(data) // 64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, case.epochs) * steps)
    for _ in range(case.epochs):
        for rows in torch.randperm(len(data)).split(64)[:steps]:
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@cache
def pool(name: str, folder: Path | None) -> GramSweep:
    """What one pass over the pool keeps."""
    case = CASES[name]()
    torch.manual_seed(0)
    model = trained_once(folder, f"few-{name}", None, case.make(), lambda: trained(case))
    batches = list(zip(case.train.inputs[: case.fit].split(200), case.train.targets[: case.fit].split(200)))
    n_data = case.n_data or len(case.train)
    la = lapwing.fit(model, batches, "classification", n_data=n_data, progress=False, **dict(case.options))
    return kept(la, case.pool, folder, ["few", name])


def one_split(everything: GramSweep, items: int, seed: int, rule: str = "widest") -> tuple[list[float], Any]:
    """Test NLL of the network, of temperature scaling and of the default, and what the default chose."""
    order = torch.randperm(len(everything.f), generator=torch.Generator().manual_seed(1_000 * items + seed))
    held, test = part_of(everything, order[:items]), part_of(everything, order[items:])
    likelihood = held.likelihood
    learn, one = default_learn(likelihood), torch.ones(1, dtype=torch.float64)
    candidates = Candidates.of(learn, {}, Setting(one), likelihood, optional=OPTIONAL, usual=GRID)
    tuning = search(held, candidates, rule=resolve_rule(rule))
    scaled = test.f / best_logit_temperature(held.f, held.y, likelihood)
    plain = [-likelihood.log_prob(f, test.y).mean().item() for f in (test.f, scaled)]
    setting = tuning.setting
    if setting.deterministic:
        default = -likelihood.log_prob(test.f / setting.logit_temperature, test.y).mean().item()
    else:
        default = test.losses([setting]).mean().item()
    return [*plain, default], setting


def run(seed: int, given: argparse.Namespace) -> Scores:
    """NLL by network and number of items; a seed is a draw of the items."""
    rows = {}
    for name in given.networks:
        everything = pool(name, given.cache)
        for items in given.items:
            if 2 * items > len(everything.f):
                continue
            (network, scaling, default), chosen = one_split(everything, items, seed, given.rule)
            rows[f"{name}, {items} items"] = {
                "network": network, "scaling": scaling, "default": default, "default − scaling": default - scaling,
                "has a posterior": float(not chosen.deterministic),
            }  # fmt: skip
    return rows


def judge(mean: Scores) -> list[Claim]:
    gaps = {row: cells["default − scaling"] for row, cells in mean.items()}
    return [
        answered(
            "Is tuning on few items as good as temperature scaling on the same items?",
            "Mean NLL of the default less that of temperature scaling: "
            + ", ".join(f"{row} {gap:+.4f}" for row, gap in gaps.items())
            + ".",
            "as good means that the mean NLL is at most 0.001 nats higher, row by row.",
            *(gap <= 0.001 for gap in gaps.values()),
        )
    ]


if __name__ == "__main__":
    judges = [name for name in CASES if name not in MADE_WITH]
    parser = Experiment(
        __doc__, smoke={"networks": ["vehicle"], "items": [30]},
        quick={"networks": ["vehicle", "digits"], "items": [100, 300], "seeds": 3}, seeds=20,
    )  # fmt: skip
    parser.add_argument("--networks", nargs="+", choices=CASES, default=judges, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--items", nargs="+", type=int, default=[100, 300, 1_000])
    parser.add_argument("--rule", default="widest")
    study("few_validation_items", ABOUT, "Tuning on few held-out items", run, judge, parser.parse_args())
