"""UCI regression: networks trained with the evidence, homoscedastic and natural heteroscedastic, on published splits.

    python -m experiments.uci_regression [--sets bostonHousing energy ...] [--splits 5] [--epochs N] [--cache DIR]
    python -m experiments.uci_regression --validation

prints, for each table, the mean test log-likelihood in the units of the data and its standard error over splits: of the
network alone (plug-in), and of the linearized predictive of the posterior at the end. Inputs and targets are
standardized by the training part; the scale of the targets is undone. An epoch is 20 iterations of L-BFGS on all data;
after every third the evidence sets prior and noise. Nothing is chosen on test data: `--validation` holds out a tenth of
the training part and scores on it, which is how optimizer, structure and the lengths in `EPOCHS` were chosen.
`--keep evidence` keeps the weights with the best evidence and stops when it has not risen for four steps. `--cache`
keeps the figures of each split. Needs LAPWING_DATA.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from experiments._arguments import Experiment
from torch import Tensor, nn

import lapwing
from experiments import _datasets as datasets

ABOUT = {"paper": "002, Part I: evidence during training", "minutes": None, "page": "training.md"}

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


def run(name: str, split: int, kind: str, given: argparse.Namespace) -> tuple[float, float]:
    """Log-likelihood per datum: plug-in and linearized."""
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
    return plug - math.log(scale), linear - math.log(scale)


def cached(folder: Path | None, name: str, split: int, kind: str, given: argparse.Namespace) -> list[float]:
    """Plug-in, linearized, CPU seconds; from the cache where they are there."""
    part = "validation" if given.validation else "test"
    setting = f"{given.epochs or EPOCHS[name]}-{given.width}-{given.structure}-{given.prior}-{given.keep}"
    key = f"uci-{part}-{name}-{kind}-{split}-{setting}.json"
    if folder is not None and (folder / key).exists():
        return json.loads((folder / key).read_text())
    start = time.process_time()
    found = [*run(name, split, kind, given), time.process_time() - start]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / key).write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"sets": ["bostonHousing"], "splits": 2, "epochs": 1})
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--kinds", nargs="+", default=("regression", "heteroscedastic"))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--width", type=int, default=50)
    parser.add_argument("--structure", default="full")
    parser.add_argument("--prior", default="layerwise")
    parser.add_argument("--keep", default="last", choices=("last", "evidence"))
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args()
    for name in given.sets:
        for kind in given.kinds:
            values = torch.tensor([cached(given.cache, name, k, kind, given) for k in range(given.splits)])
            mean, error = values.mean(0).tolist(), (values.std(0) / len(values) ** 0.5).tolist()
            print(
                f"{name:24s} {kind:16s} plug-in {mean[0]:7.3f} ± {error[0]:.3f}  linearized {mean[1]:7.3f} ± "
                f"{error[1]:.3f}  published {PUBLISHED.get(name, math.nan):6.2f}  "
                f"({mean[2]:.0f} CPU s a split)",
                flush=True,
            )
