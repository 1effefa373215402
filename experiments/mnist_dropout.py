"""MNIST, dropout network (paper 001, Fig. 2 and Table 1): entropy on notMNIST and accuracy of five methods.

    python -m experiments.mnist_dropout [--seeds 3] [--out docs/results]

A network 784-1024-1024-10 with dropout, trained on randomly binarized MNIST. The network itself, MC dropout, Laplace
posteriors with sampled weights (Kronecker with Eq. 9, diagonal; prior and pseudo-observations chosen on validation
images) and mean-field variational inference predict binarized test images and notMNIST. Printed are accuracies, NLL,
and how the entropy on notMNIST is distributed; the figure is the inverse ECDF. Needs LAPWING_DATA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._dropout_network import (
    FIELD_BATCH,
    GRID,
    NAMES,
    add_options,
    binarized,
    methods,
    options_told,
    predicted,
)
from experiments._results import Claim, Result, spread, verdict
from torch import Tensor

from experiments import _datasets as datasets
from lapwing import metrics

ABOUT = {"paper": "001, Fig. 2 and Table 1", "minutes": 10, "quick": 0.33}

SURE = 0.1  # nats below which a letter counts as taken for a digit with certainty
PAPER = {"mean field": 98.88, "deterministic": 98.86, "MC dropout": 98.85, "diagonal": 98.85, "Kronecker": 98.80}


def run(seed: int, given: Any) -> tuple[dict[str, dict[str, float]], dict[str, Tensor], dict[str, str]]:
    """Scores by method, entropies on notMNIST, and what was chosen, for one seed."""
    made = methods(given, seed)
    letters = datasets.images("notmnist").inputs[: given.test]
    digits = binarized(made.test.inputs, torch.Generator().manual_seed(seed))
    table, entropies = {}, {}
    for name, predictor in made.predictors.items():
        probs = predicted(predictor, digits, "probs").double()
        right = probs.argmax(-1) == made.test.targets
        inside = torch.special.entr(probs).sum(-1)
        far = torch.special.entr(predicted(predictor, letters, "probs").double()).sum(-1)
        entropies[name] = far.sort().values
        table[name] = {
            "accuracy %": 100 * right.double().mean().item(),
            "NLL": -probs.gather(1, made.test.targets[:, None]).clamp(min=1e-30).log().mean().item(),
            "entropy notMNIST": far.mean().item(),
            "sure of letters %": 100 * (far < SURE).double().mean().item(),
            "AUROC": metrics.auroc(inside, far).item(),
        }
    return table, entropies, made.chosen


def claims(mean: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    """What the paper says, judged on averages over seeds by rules that are stated."""
    entropy, sure = ({name: mean[name][key] for name in NAMES} for key in ("entropy notMNIST", "sure of letters %"))
    accuracy = {name: mean[name]["accuracy %"] for name in NAMES}
    told = lambda values: ", ".join(f"{name} {value:.3g}" for name, value in values.items())  # noqa: E731
    others = [name for name in NAMES if name != "Kronecker"]
    return [
        Claim(
            "Averaging the probabilities of multiple passes through the network yields predictions with higher "
            "uncertainty than a deterministic pass.",
            "section 5.2",
            f"Mean entropy on notMNIST: {told(entropy)}.",
            verdict(entropy["MC dropout"] > entropy["deterministic"]),
            "the mean entropy must be higher by MC dropout than by the deterministic pass.",
        ),
        Claim(
            "Our Kronecker factored Laplace approximation makes hardly any predictions with absolute certainty and "
            "assigns high uncertainty to most of the letters as desired.",
            "section 5.2",
            f"Letters with an entropy below {SURE}, in percent: {told(sure)}.",
            verdict(sure["Kronecker"] < 2, all(entropy["Kronecker"] > entropy[name] for name in others)),
            "hardly any means below 2 %, high means the highest mean entropy of all methods.",
        ),
        Claim(
            "The diagonal Laplace approximation […] performs similarly to Dropout.",
            "section 5.2",
            f"Mean entropy on notMNIST: diagonal {entropy['diagonal']:.3g}, MC dropout {entropy['MC dropout']:.3g}.",
            verdict(abs(entropy["diagonal"] - entropy["MC dropout"]) < 0.2 * entropy["MC dropout"]),
            "similar means within a fifth of the entropy.",
        ),
        Claim(
            "The network makes predictions on the test set of MNIST with similar accuracy to the deterministic forward "
            "pass and MC Dropout when using our approximation.",
            "section 5.2 and Table 1",
            f"Accuracies in percent: {told(accuracy)} (the paper: {told(PAPER)}).",
            verdict(abs(accuracy["Kronecker"] - accuracy["deterministic"]) < 0.5),
            "similar means within half a percent.",
        ),
        Claim(
            "The variational factorised Gaussian posterior has low uncertainty as expected.",
            "section 5.2",
            f"Mean entropy on notMNIST: mean field {entropy['mean field']:.3g}.",
            verdict(all(entropy["mean field"] < entropy[name] for name in ("MC dropout", "diagonal", "Kronecker"))),
            "low means lower than that of the other Bayesian methods.",
        ),
    ]


def figure(entropies: Mapping[str, Tensor]) -> Any:
    """The share of letters whose entropy exceeds a value."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(6, 4))
    axes = canvas.add_subplot()
    for name, values in entropies.items():
        axes.plot(values, 1 - torch.arange(1, len(values) + 1) / len(values), label=name)
    axes.set_xlabel("entropy on notMNIST (nats)")
    axes.set_ylabel("share of letters above")
    axes.legend(frameon=False)
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("mnist_dropout", run, given)
    each = {n: {key: [table[n][key] for table, _, _ in runs] for key in runs[0][0][n]} for n in NAMES}
    mean = {n: {key: sum(values) / len(values) for key, values in row.items()} for n, row in each.items()}
    rows = [{"method": n, **{key: spread(values) for key, values in each[n].items()}} for n in NAMES]
    result = Result(
        "mnist_dropout",
        "MNIST dropout network, entropy on notMNIST",
        "001, Fig. 2 and Table 1",
        f"python -m experiments.mnist_dropout {options_told(given)}",
        list(seeds),
    )
    chosen = "; ".join(f"{name}: {setting}" for name, setting in runs[0][2].items())
    corner = [f"prior {GRID['prior'][-1]:.4g}, T {GRID['temperature'][-1]:.4g}"]
    ends = [name for name in runs[0][2] if [run[2][name] for run in runs] == corner * len(runs)]
    at_corner = f" Strongest of all that were tried: {', '.join(ends)}." if ends else ""
    result = (
        result.with_rows(rows)
        .with_claims(*claims(mean))
        .with_sentence(
            "Letters that are taken for a digit with an entropy below 0.1 nats, in percent: "
            + ", ".join(f"{name} {mean[name]['sure of letters %']:.3g}" for name in NAMES)
            + "."
        )
        .with_notes(
            f"Chosen on {given.val} validation images (seed {seeds[0]}): {chosen}. T times {given.train} is the "
            f"number of pseudo-observations N.{at_corner}",
            "The paper trains for 250 epochs, draws 1,000 binarized images per datapoint for the curvature and 100 "
            "networks per prediction; the numbers here are in the command. Mean-field inference takes steps of "
            f"{FIELD_BATCH} images, as many epochs as the network.",
            f"“Sure of letters” counts entropies below {SURE} nats. ± is the standard deviation over seeds, where "
            "there are several; the figure is of the first.",
        )
    )
    entropies = {name: values[:: max(1, len(values) // 200)] for name, values in runs[0][1].items()}
    result.with_data(scores=each, entropies=entropies).finish(given.out, lambda: figure(runs[0][1]))


if __name__ == "__main__":
    small = {"val": 100, "test": 100, "width": 32, "epochs": 1, "curvature": 200, "samples": 5}
    parser = Experiment(
        __doc__,
        smoke={"train": 500, **small},
        quick={"train": 10_000, "val": 300, "test": 1000, "width": 128, "epochs": 15, "curvature": 2000, "samples": 20},
    )
    add_options(parser)
    main(parser.parse_args())
