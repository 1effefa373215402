"""What `GGN(tolerance=)` leaves out, and what that does to the curvature, the evidence and the predictions.

    python -m experiments.tolerance [--images 512]

The pretrained ResNet-20 on CIFAR-10 training images: for each tolerance the directions a sample, the share of the
curvature in output space that is left out, what it is of the trace in weight space, the largest error of a diagonal
entry relative to that entry plus the prior precision (the tuned one is about 1,000 there), and, for the Kronecker
posterior, the change of the log evidence in nats and the largest change of a predicted probability. Needs LAPWING_DATA.
"""

from __future__ import annotations

import torch
from experiments._arguments import Experiment

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import GGN

ABOUT = {"paper": "", "minutes": None}

PRIOR = 1_000.0


def main() -> None:
    parser = Experiment(__doc__, smoke={"images": 4, "test": 2})
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--test", type=int, default=16, help="test images to predict")
    args = parser.parse_args()
    model = networks.pretrained_resnet(20)
    data = datasets.images("cifar10", "train")[: args.images]
    x = networks.standardize(data.inputs)
    batches = list(zip(x.split(128), data.targets.split(128)))
    new = networks.standardize(datasets.images("cifar10", "test")[: args.test].inputs)

    def fit(structure: str, tolerance: float | None) -> lapwing.Laplace:
        options = {"structure": structure, "factor": GGN(tolerance=tolerance), "n_data": 50_000, "prior": PRIOR}
        return lapwing.fit(model, batches, "classification", **options)

    exact, kron = fit("diag", 0.0), fit("kron", 0.0)
    diagonal, probs, evidence = exact.curvature.matrix.diagonal().double(), kron.predict(new).probs, kron.log_evidence()
    with torch.no_grad():
        outputs = [model(part) for part, _ in batches]
    print("| tolerance | directions a sample | left out, outputs | left out, trace | diagonal | evidence | probs |")
    print("|---|---|---|---|---|---|---|")
    for tolerance in (None, 1e-4, 1e-3, 1e-2, 1e-1):
        chosen = [GGN(tolerance=tolerance).choose(exact.likelihood, f, y) for f, (_, y) in zip(outputs, batches)]
        needed = sum(int(c.needed.sum()) for c in chosen) / len(data)
        share = sum(c.dropped for c in chosen) / sum(c.total for c in chosen)
        less = fit("diag", tolerance).curvature.matrix.diagonal().double()
        other = fit("kron", tolerance)
        print(
            f"| {'rounding (default)' if tolerance is None else f'{tolerance:g}'} | {needed:.2f} | {share:.1e} "
            f"| {1 - float(less.sum() / diagonal.sum()):.1e} "
            f"| {float(((diagonal - less).abs() / (diagonal + PRIOR)).max()):.1e} "
            f"| {float(other.log_evidence() - evidence):+.2g} "
            f"| {float((other.predict(new).probs - probs).abs().max()):.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
