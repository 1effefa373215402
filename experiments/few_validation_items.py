"""Is tuning on few held-out items as good as temperature scaling on the same items?

    python -m experiments.few_validation_items [--networks kmnist resnet20 ...] [--items 100 300 1000] [--splits 20]

For each network: train it (or read the pretrained one), fit a posterior, and keep one pass over a pool of images that
took no part. Then, for each number of items and each split, draw that many items from the pool, tune on them as
`la.tune(val)` does by default, fit temperature scaling to the same items, and score both on the rest of the pool.
Prints the mean NLL of the network, of temperature scaling and of the default, the paired difference of the last two
with its 95 % interval over splits, and how often the result has a posterior at all. The rule was made with
the networks in `MADE_WITH`; the others, which are the default here, judge it. Needs LAPWING_DATA. What is slow is kept
in --cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from experiments._arguments import Experiment
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.evidence import Candidates, Groups, Setting, collect, default_learn, linked, nodes_for, search
from lapwing.evidence.candidates import GRID
from lapwing.evidence.heldout import GramSweep, Nodes
from lapwing.evidence.scores import best_logit_temperature
from lapwing.evidence.search import OPTIONAL
from lapwing.evidence.settings import resolve_rule

ABOUT = {"paper": "", "minutes": None, "page": "tuning.md"}

REACH = ([1e-5, 1e6], [0.01, 1e5])  # precisions and temperatures that the kept pass can serve
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


def trained(case: Case, path: Path) -> nn.Module:
    torch.manual_seed(0)
    model = case.make()
    if not case.epochs:
        return model.eval()
    if path.exists():
        model.load_state_dict(load_file(path))
        return model.eval()
    data, optimizer = case.train, torch.optim.Adam(model.parameters(), 2e-3)
    steps = max(1, len(data) // 64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.epochs * steps)
    for _ in range(case.epochs):
        for rows in torch.randperm(len(data)).split(64)[:steps]:
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
            optimizer.step()
            schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path)
    return model.eval()


def pool(name: str, cache: Path) -> GramSweep:
    """What one pass over the pool keeps."""
    path = cache / f"few-{name}.safetensors"
    score = {"power": 1, "tempers_prior": False, "score": linked(samples=128)}
    if path.exists():
        found = load_file(path)
        nodes = Nodes(found["shifts"], found["spectrum"])
        return GramSweep(found["f"], found["y"], nodes, lapwing.Categorical(), grams=found["g"], **score)  # type: ignore[arg-type]
    case = CASES[name]()
    model = trained(case, cache / f"few-{name}-net.safetensors")
    batches = list(zip(case.train.inputs[: case.fit].split(200), case.train.targets[: case.fit].split(200)))
    la = lapwing.fit(model, batches, "classification", n_data=case.n_data or len(case.train), **dict(case.options))
    nodes = nodes_for(la.belief, torch.tensor(REACH[0]).double(), REACH[1])
    held = la._predictive.held_out(list(zip(case.pool.inputs.split(100), case.pool.targets.split(100))))
    groups = Groups.scalar(la.params.size)
    sweep = collect(la.belief, groups, held, nodes, score=score["score"], memory=2**33)
    kept = {"f": sweep.f, "y": sweep.y, "g": sweep.grams, "shifts": nodes.shifts, "spectrum": nodes.spectrum}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in kept.items()}, path)
    return sweep


def part_of(sweep: GramSweep, index: Tensor) -> GramSweep:
    return replace(sweep, f=sweep.f[index], y=sweep.y[index], grams=sweep.grams[:, :, index])


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


def main() -> None:
    parser = Experiment(__doc__, smoke={"networks": ["vehicle"], "items": [30], "splits": 3})
    judges = [name for name in CASES if name not in MADE_WITH]
    parser.add_argument("--networks", nargs="+", choices=CASES, default=judges, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--items", nargs="+", type=int, default=[100, 300, 1_000])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--rule", default="widest")
    parser.add_argument("--verbose", action="store_true", help="print what every split chose")
    parser.add_argument("--cache", type=Path, default=Path(".cache/experiments"))
    options = parser.parse_args()
    for name in options.networks:
        everything = pool(name, options.cache)
        for items in options.items:
            if 2 * items > len(everything.f):
                continue
            found, chosen = zip(*(one_split(everything, items, seed, options.rule) for seed in range(options.splits)))
            if options.verbose:
                print("\n".join(f"    {setting}  {a:.4f} {b:.4f} {c:.4f}" for setting, (a, b, c) in zip(chosen, found)))
            scores = torch.tensor(found)
            gap = scores[:, 2] - scores[:, 1]
            reach = 2.09 * gap.std() / len(gap) ** 0.5  # Student's t of 19 degrees of freedom
            alive = sum(not setting.deterministic for setting in chosen)
            network, scaling, default = scores.mean(0).tolist()
            print(
                f"{name:12s} {items:5d} items: network {network:.4f}  scaling {scaling:.4f}  default {default:.4f}  "
                f"difference {gap.mean():+.4f} ({gap.mean() - reach:+.4f} to {gap.mean() + reach:+.4f})  "
                f"largest {gap.max():+.4f}  with a posterior {alive}/{len(gap)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
