"""UCI regression: networks trained with the evidence, homoscedastic and natural heteroscedastic, on published splits.

    python -m experiments.uci_regression [--sets bostonHousing energy ...] [--seeds 5] [--epochs N] [--out DIR]
    python -m experiments.uci_regression --validation

gives, for each table, the test log-likelihood in the units of the data on published splits, one per seed: of the
network alone (plug-in), and of the linearized predictive of the posterior at the end. Inputs and targets are
standardized by the training part; the scale of the targets is undone. An epoch is 20 iterations of L-BFGS on all data;
after every third the evidence sets prior and noise. Nothing is chosen on test data: `--validation` holds out a tenth of
the training part and scores on it, which is how optimizer, structure and the lengths in `EPOCHS` were chosen.
`--keep evidence` keeps the weights with the best evidence and stops when it has not risen for four steps. Needs
LAPWING_DATA.
"""

import argparse
import math
import time
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import cached
from experiments._results import Claim, Scores, verdict
from experiments._study import study
from torch import Tensor, nn

import lapwing
from experiments import _datasets as datasets

ABOUT = {"paper": "002, Part I: evidence during training", "minutes": 10, "quick": 0.3, "page": "training.md"}

SETS = ("bostonHousing", "concrete", "energy", "kin8nm", "naval-propulsion-plant")
PUBLISHED = {"bostonHousing": -2.50, "concrete": -2.95, "energy": -1.20, "kin8nm": 1.35, "naval-propulsion-plant": 6.51}
EPOCHS = {"bostonHousing": 20, "concrete": 45, "energy": 45, "kin8nm": 90, "naval-propulsion-plant": 60}


def standardized(name: str, split: int, held: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], float]:
    """Pairs to train and to score on (of the test part, or held out of the training part), and the scale of targets."""
    train, test = datasets.uci_regression(name).fold(split)
    if held:
        train, test = train.split(len(train.targets) * 9 // 10, generator=torch.Generator().manual_seed(split))[:2]
    mean, deviation = train.inputs.mean(0), train.inputs.std(0)
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    center, scale = train.targets.mean(), train.targets.std()
    pairs = [((d.inputs - mean) / deviation, ((d.targets - center) / scale)[:, None]) for d in (train, test)]
    return pairs[0], pairs[1], scale.item()


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        parameters, 1.0, max_iter=20, history_size=30, tolerance_grad=1e-12, tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )  # fmt: skip


def scored(name: str, split: int, kind: str, given: argparse.Namespace) -> dict[str, float]:
    """Log-likelihood per datum, plug-in and linearized, and CPU seconds."""
    start = time.process_time()
    (x, y), (tx, ty), scale = standardized(name, split, given.validation)
    torch.manual_seed(split)
    outputs = 2 if kind == "heteroscedastic" else 1
    model = nn.Sequential(nn.Linear(x.shape[1], given.width), nn.GELU(), nn.Linear(given.width, outputs)).double()
    trained = lapwing.train(
        model, (x, y), kind, epochs=given.epochs or EPOCHS[name], batch_size=len(y), every=3, burnin=2, samples=2700,
        patience=4 if given.keep == "evidence" else None, keep=given.keep, prior=given.prior,
        structure=given.structure, optimizer=lbfgs, progress=False,
    )  # fmt: skip
    la = trained.laplace
    with torch.no_grad():
        f = la.likelihood.outputs(model(tx))
        plug = la.likelihood.log_prob(f, la.likelihood.targets(f, ty)).mean().item()
    parts = la.predict_loader(list(zip(tx.split(256), ty.split(256), strict=True)))
    linear = torch.cat([p.log_prob(t) for p, t in zip(parts, ty.split(256), strict=True)]).mean().item()
    spent = time.process_time() - start
    return {"plug-in": plug - math.log(scale), "linearized": linear - math.log(scale), "CPU s": spent}


def run(seed: int, given: argparse.Namespace) -> Scores:
    """Rows by table and likelihood; a seed is a split, and each fit is kept by itself."""
    options = {key: getattr(given, key) for key in ("epochs", "width", "structure", "prior", "keep", "validation")}
    return {
        f"{name}, {kind}": cached(
            given.cache, f"uci-{name}-{kind}-{seed}", options, lambda n=name, k=kind: scored(n, seed, k, given)
        )
        | {"published": PUBLISHED[name]}
        for name in given.sets
        for kind in given.kinds
    }


def judge(mean: Scores) -> list[Claim]:
    gaps = {row: cells["linearized"] - cells["plug-in"] for row, cells in mean.items()}
    natural = {row: cells["linearized"] - cells["published"] for row, cells in mean.items() if "hetero" in row}
    digits = lambda value: ".3f" if abs(value) < 100 else ".1e"  # noqa: E731
    told = lambda values: "; ".join(f"{row} {value:+{digits(value)}}" for row, value in values.items())  # noqa: E731
    return [
        Claim(
            "Stabilizes and improves Laplace predictive",
            "Linearized Laplace",
            f"Test log-likelihood of the linearized predictive less that of the network alone: {told(gaps)}.",
            verdict(sum(gap > 0 for gap in gaps.values()) > len(gaps) / 2, all(gap > -0.01 for gap in gaps.values())),
            "two parts: with the linearized predictive the log-likelihood is higher than that of the network alone in "
            "more than half of the rows (it improves), and nowhere lower by 0.01 nats or more (it is stable).",
        ),
        Claim(
            "Optimize prior precision (regularization) with parameters in one training run",
            "Example: Gradient-Based Model Selection",
            "Heteroscedastic networks, linearized, less the published log-likelihood of that method: "
            f"{told(natural) or 'not run'}.",
            verdict(*(gap > -0.1 for gap in natural.values())),
            "reached means a log-likelihood at most 0.1 nats below the published one (Immer et al. 2023), table by "
            "table.",
        ),
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"sets": ["bostonHousing"], "epochs": 1},
        quick={"sets": ["bostonHousing", "energy"], "epochs": 9}, seeds=5,
    )  # fmt: skip
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--kinds", nargs="+", default=["regression", "heteroscedastic"])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--width", type=int, default=50)
    parser.add_argument("--structure", default="full")
    parser.add_argument("--prior", default="layerwise")
    parser.add_argument("--keep", default="last", choices=("last", "evidence"))
    parser.add_argument("--validation", action="store_true")
    notes = [
        "Log-likelihood in nats per datum, in the units of the data; a seed is a published split.",
        "In natural parameters the mean of a network alone has no bound where its precision is near zero. One such "
        "test input is enough for a very low log-likelihood of the network on a split ([training](training.md)).",
    ]
    title = "UCI regression: training with the evidence"
    study("uci_regression", ABOUT, title, run, judge, parser.parse_args(), notes=notes)
