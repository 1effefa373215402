"""Curvature from many augmented passes with rescaled N (paper 001, sections 5.2 and 5.4): what do more passes change?

    python -m experiments.augmented_curvature [--seeds 3] [--out docs/results]

The network is that of `mnist_dropout`. Kronecker factors come from few images: gray, and binarized at random once, four
and sixteen times, always rescaled to the number of training images (`n_data=`), since draws of one image are not new
data. Printed are the trace of the curvature, the directions of the input factors that matter, the setting chosen on
validation images, and scores on test images and on notMNIST. Needs LAPWING_DATA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._dropout_network import (
    BATCH,
    WIDE,
    Binarized,
    add_options,
    binarized,
    fitted,
    options_told,
    predicted,
    trained,
    tuned,
)  # fmt: skip
from experiments._results import Claim, Result, spread, verdict

import lapwing
from experiments import _datasets as datasets

ABOUT = {"paper": "001, sections 5.2 and 5.4", "minutes": 1.3, "quick": 0.32}

PASSES = (0, 1, 4, 16)
SMALL = 1e-4  # share of the largest eigenvalue above which a direction matters


def told(passes: int) -> str:
    return f"{passes} binarized" if passes else "gray"


def directions(la: lapwing.Laplace) -> int:
    """Count the eigenvalues of the input factors that matter."""
    values = [block.right_spectrum.values for block in la.curvature.matrix.diagonal_blocks()]
    return sum(int((each > SMALL * each.max()).sum()) for each in values)


def run(seed: int, given: Any) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(seed)
    whole, test = datasets.images("mnist", "train"), datasets.images("mnist", "test")
    train, val = whole.split(given.train, given.val, generator=generator)[:2]
    test = test.split(given.test, generator=torch.Generator().manual_seed(0))[0] if given.test < len(test) else test
    model = trained(train, given.width, given.epochs, given.rate, seed)
    held = (binarized(val.inputs, generator), val.targets)
    images, labels = train.inputs[: given.curvature], train.targets[: given.curvature]
    digits, letters = binarized(test.inputs, generator), datasets.images("notmnist").inputs[: given.test]
    found = {}
    for passes in PASSES[: given.ways]:
        gray: Any = list(zip(images.split(BATCH), labels.split(BATCH)))
        data = Binarized(images, labels, passes, seed) if passes else gray
        la = tuned(fitted(model, data, "kron", len(train)), held, WIDE)
        ensemble = la.ensemble(given.samples)
        probs, far = (predicted(ensemble, x, "probs").double() for x in (digits, letters))
        entropy = lambda p: torch.special.entr(p).sum(-1).mean().item()  # noqa: E731
        found[told(passes)] = {
            "trace": la.curvature.matrix.trace().item(),
            "directions": float(directions(la)),
            "prior / T": float(la.belief.prior.precision) / float(la.belief.temperature.T),
            "accuracy %": 100 * (probs.argmax(-1) == test.targets).double().mean().item(),
            "NLL": -probs.gather(1, test.targets[:, None]).clamp(min=1e-30).log().mean().item(),
            "entropy notMNIST": entropy(far),
        }
        row = "  ".join(f"{key} {value:.4g}" for key, value in found[told(passes)].items())
        print(f"seed {seed} {told(passes)}: {row}", flush=True)
    return found


def claims(mean: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    names = [told(passes) for passes in PASSES if told(passes) in mean]
    gray, once, most = names[0], names[1], names[-1]
    listed = lambda key: ", ".join(f"{name} {mean[name][key]:.4g}" for name in names)  # noqa: E731
    return [
        Claim(
            "[…] the curvature of the network can be estimated using the same augmentations, effectively increasing "
            "the size of the dataset by orders of magnitude.",
            "appendix C",
            f"Directions of input factors above {SMALL:g} of the largest: {listed('directions')}; trace: "
            f"{listed('trace')}.",
            verdict(
                mean[most]["directions"] > mean[once]["directions"] > mean[gray]["directions"],
                abs(mean[most]["trace"] / mean[once]["trace"] - 1) < 0.1,
            ),
            "more draws must determine more directions, while the rescaled trace stays within a tenth of that of one.",
        ),
        Claim(
            "[…] without data augmentation we had to use much stronger regularisation of the curvature factors […], "
            "whereas with data augmentation it was only needed to ensure that the matrices are invertible.",
            "appendix C",
            f"Chosen prior precision over T: {listed('prior / T')}; NLL: {listed('NLL')}; entropy on notMNIST: "
            f"{listed('entropy notMNIST')}.",
            verdict(mean[gray]["prior / T"] >= 3 * mean[most]["prior / T"], mean[most]["NLL"] <= mean[gray]["NLL"]),
            "three times as much regularization without augmentation, and no better a likelihood.",
        ),
    ]


def figure(each: Mapping[str, Mapping[str, list[float]]]) -> Any:
    """Four figures against the number of draws: one point per seed, and means."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(11, 3.2), layout="constrained")
    names = list(each)
    for axes, key in zip(canvas.subplots(1, 4), ("directions", "prior / T", "NLL", "entropy notMNIST")):
        values = torch.tensor([each[name][key] for name in names], dtype=torch.float64)
        axes.plot(range(len(names)), values.mean(1), "o-")
        for k, own in enumerate(values):
            axes.scatter([k] * len(own), own, s=10, color="gray", zorder=3)
        axes.set_xticks(range(len(names)), [name.replace(" binarized", "×") for name in names])
        axes.set(title=key, xlabel="draws of each image", yscale="log" if key == "prior / T" else "linear")
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("augmented_curvature", run, given)
    each = {name: {key: [one[name][key] for one in runs] for key in runs[0][name]} for name in runs[0]}
    mean = {name: {key: sum(values) / len(values) for key, values in row.items()} for name, row in each.items()}
    rows = [{"curvature": n, **{key: spread(values) for key, values in row.items()}} for n, row in each.items()]
    result = Result(
        "augmented_curvature",
        "Curvature from many augmented passes",
        "001, sections 5.2 and 5.4",
        f"python -m experiments.augmented_curvature {options_told(given)}",
        list(seeds),
    )
    result = (
        result.with_rows(rows)
        .with_claims(*claims(mean))
        .with_sentence(
            "Directions that matter in the input factors: "
            + ", ".join(f"{name} {row['directions']:.0f}" for name, row in mean.items())
            + "; NLL "
            + ", ".join(f"{row['NLL']:.4f}" for row in mean.values())
            + "."
        )
        .with_notes(
            "Changed after results had been seen: the grid of priors and T was widened, together with that "
            "of `mnist_ablation`.",
            f"Curvature from {given.curvature} training images, rescaled to {given.train} (`n_data=`). The paper draws "
            "1,000 binarized images per datapoint on MNIST and 5,000 augmented ones on CIFAR-100.",
            f"Prior / T is how strong the prior is beside the curvature; priors up to {WIDE['prior'][-1]:g} and T up "
            f"to {WIDE['temperature'][-1]:g} were tried.",
            "Kronecker factors with factored damping, sampled weights; prior and T chosen on validation images. ± is "
            "the standard deviation over seeds, gray points are seeds.",
        )
    )
    result.with_data(scores=each).finish(given.out, lambda: figure(each))


if __name__ == "__main__":
    small = {"val": 100, "test": 100, "width": 32, "epochs": 1, "curvature": 100, "samples": 5, "ways": 3}
    parser = Experiment(
        __doc__,
        smoke={"train": 500, **small},
        quick={"train": 5000, "val": 300, "test": 1000, "width": 64, "epochs": 10, "curvature": 300, "samples": 20},
    )
    add_options(parser)
    parser.set_defaults(seeds=3, train=10_000, test=1000, width=128, curvature=300, samples=20)
    parser.add_argument("--ways", type=int, default=len(PASSES), help="of 0, 1, 4 and 16 passes, the first so many")
    main(parser.parse_args())
