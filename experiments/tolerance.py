"""What `GGN(tolerance=)` leaves out, and what that does to the curvature, the evidence and the predictions.

    python -m experiments.tolerance [--images 256] [--seeds 3] [--out DIR]

The pretrained ResNet-20 on CIFAR-10 training images, drawn by the seed: for each tolerance the directions per sample,
the share of the curvature in output space that is left out, what it is of the trace in weight space, the largest error
of a diagonal entry relative to that entry plus the prior precision (the tuned one is about 1,000 there), and, for the
Kronecker posterior, the change of the log evidence in nats and the largest change of a predicted probability. Needs
LAPWING_DATA.
"""

from __future__ import annotations

import argparse

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._study import study

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import GGN

ABOUT = {"paper": "", "minutes": 1.4, "quick": 0.4}

PRIOR = 1_000.0


ROUNDING = "rounding (default)"


def run(seed: int, given: argparse.Namespace) -> Scores:
    """What each tolerance leaves out, and what it changes."""
    model, generator = networks.pretrained_resnet(20), torch.Generator().manual_seed(seed)
    data = datasets.images("cifar10", "train").split(given.images, generator=generator)[0]
    x = networks.standardize(data.inputs)
    batches = list(zip(x.split(128), data.targets.split(128)))
    new = networks.standardize(datasets.images("cifar10", "test").split(given.test, generator=generator)[0].inputs)

    def fit(structure: str, tolerance: float | None) -> lapwing.Laplace:
        options = {"structure": structure, "factor": GGN(tolerance=tolerance), "n_data": 50_000, "prior": PRIOR}
        return lapwing.fit(model, batches, "classification", **options)

    exact, kron = fit("diag", 0.0), fit("kron", 0.0)
    diagonal, probs, evidence = exact.curvature.matrix.diagonal().double(), kron.predict(new).probs, kron.log_evidence()
    with torch.no_grad():
        outputs = [model(part) for part, _ in batches]
    rows = {}
    for tolerance in (None, 1e-4, 1e-3, 1e-2, 1e-1):
        chosen = [GGN(tolerance=tolerance).choose(exact.likelihood, f, y) for f, (_, y) in zip(outputs, batches)]
        less, other = fit("diag", tolerance).curvature.matrix.diagonal().double(), fit("kron", tolerance)
        rows[ROUNDING if tolerance is None else f"{tolerance:g}"] = {
            "directions per sample": sum(int(c.needed.sum()) for c in chosen) / len(data),
            "left out, outputs": float(sum(c.dropped for c in chosen) / sum(c.total for c in chosen)),
            "left out, trace": 1 - float(less.sum() / diagonal.sum()),
            "error of the diagonal": float(((diagonal - less).abs() / (diagonal + PRIOR)).max()),
            "change of the evidence": float(other.log_evidence() - evidence),
            "change of probabilities": float((other.predict(new).probs - probs).abs().max()),
        }
    return rows


def judge(mean: Scores) -> list[Claim]:
    rounding, loose = mean[ROUNDING], mean["0.001"]
    nats, probs, directions = "change of the evidence", "change of probabilities", "directions per sample"
    return [
        answered(
            "Does the default leave out nothing that can be seen?",
            f"The default changes the log evidence by {rounding[nats]:.2g} nats and a probability by at most "
            f"{rounding[probs]:.1e}.",
            "the log evidence changes by less than 0.1 nats and no predicted probability by more than 1e-4.",
            abs(rounding[nats]) < 0.1,
            rounding[probs] < 1e-4,
        ),
        answered(
            "Is a tolerance of 1e-3 a good bargain?",
            f"It needs {loose[directions]:.2f} directions per sample where the default needs "
            f"{rounding[directions]:.2f}, and changes a probability by at most {loose[probs]:.1e}.",
            "at most half of the directions, and no probability changes by more than 0.01.",
            loose[directions] <= rounding[directions] / 2,
            loose[probs] < 0.01,
        ),
    ]


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"images": 3, "test": 1}, quick={"images": 64, "test": 8}, seeds=3)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--test", type=int, default=16, help="test images to predict")
    notes = [
        "The pretrained ResNet-20, a prior precision of 1,000 and images of CIFAR-10, drawn anew for each seed. "
        "Sentences give means over seeds: for probabilities, that of the largest change on each.",
    ]
    title = "What a tolerance of the curvature leaves out"
    study("tolerance", ABOUT, title, run, judge, parser.parse_args(), notes=notes)
