"""Entropy on images from elsewhere against the temperature T and the prior τ: MNIST → KMNIST, CIFAR-10 → SVHN.

    python -m experiments.temperature_ood [--seeds 2] [--cache DIR] [--out docs/results]

The networks, posteriors and predictions are those of `temperature_curves`, on images of another data set. Printed are
the entropy there and on test images, and the AUROC of the entropy between the two, at the temperatures; and how far
(T·M + τI)⁻¹ is from (M + τ/T·I)⁻¹/T, the two sides of Eq. 23 and 24. Nothing is tuned. Needs LAPWING_DATA.
"""

from __future__ import annotations

from typing import Any

from experiments._arguments import Experiment
from experiments._results import Claim, Result, spread, verdict
from experiments._tempered import (
    COLORS,
    NETWORKS,
    OUTSIDE,
    QUICK,
    SHOWN,
    SMOKE,
    TOLERANCE,
    add_options,
    options_told,
    runs_of,
    sizes_told,
    stacked,
    told,
)
from torch import Tensor

ABOUT = {"paper": "000, Fig. 5 and Eq. 23–24", "minutes": 14, "quick": 0.58}
FAR, AREA = "entropy outside", "auroc outside"
Means = dict[str, dict[str, dict[str, Tensor]]]


def means(runs: dict[str, list[dict[str, Any]]], way: str) -> Means:
    """Curves by network, structure and score, averaged over seeds, with the prior of training."""
    return {
        net: {name: {key: values.mean(0) for key, values in row.items()} for name, row in stacked(each, way).items()}
        for net, each in runs.items()
    }


def claims(runs: dict[str, list[dict[str, Any]]], temperatures: list[float]) -> list[Claim]:
    """What the paper says, judged on averages over seeds by rules that are stated."""
    mean, smooth = means(runs, "sampled"), means(runs, "linearized")
    rows = [row for each in mean.values() for row in each.values()]

    def path(key: str, found: Means = mean) -> str:
        pairs = {
            net: ", ".join(f"{name} {row[key][0]:.3g} → {row[key][-1]:.3g}" for name, row in each.items())
            for net, each in found.items()
        }
        return "; ".join(f"{NETWORKS[net]}: {text}" for net, text in pairs.items())

    ends = f"From T = {temperatures[0]:g} to {temperatures[-1]:g}"
    same = Claim(
        "The generalized Laplace approximation demonstrates behavior consistent with in-distribution experiments.",
        "section 4.3, Fig. 5",
        f"{ends}, the entropy of sampled networks on images from elsewhere: {path(FAR)}; on test images: "
        f"{path('entropy')}.",
        verdict(*(bool(row[key][-1] < row[key][0]) for row in rows for key in (FAR, "entropy"))),
        "the entropy must fall on both, for each network and structure.",
    )
    best = {
        f"{name} ({NETWORKS[net].partition(' ')[0]}, {way})": temperatures[int(row[AREA].argmax())]
        for way, found in (("sampled", mean), ("linearized", smooth))
        for net, each in found.items()
        for name, row in each.items()
    }
    small = Claim(
        "However, since high entropy is expected to yield uniform predictions, a small T is preferred for "
        "out-of-distribution data, despite the scenario remains Bayesian deep learning.",
        "section 4.3, Fig. 5",
        f"{ends}, the AUROC of the entropy between test images and the others: sampled {path(AREA)}; linearized "
        f"{path(AREA, smooth)}. T of the highest AUROC: {told(best)}.",
        verdict(
            all(int(row[FAR].argmax()) == 0 for row in rows),
            all(T < 1 for T in best.values()),
        ),
        "the entropy elsewhere must be highest at the smallest T, and so must be what it is for, telling the two kinds "
        "of images apart: the AUROC must be highest below T = 1, for each network, structure and predictive.",
    )
    error = max(each["scaling"] for some in runs.values() for each in some)
    concentrates = Claim(
        "By factoring out T from the inverse, we obtain −H_T⁻¹ = (1/T) (M + (τ/T) I)⁻¹. Therefore, T inherently "
        "concentrates the posterior distribution, regardless of whether the data is in-distribution or "
        "out-of-distribution.",
        "section 4.3, Eq. 24",
        f"Variances of the weights at (T, τ) and 1/T of those at (1, τ/T), at T = 3: apart by at most {error:.2g} of "
        f"their size, over all structures. The linearized entropy elsewhere: {path(FAR, smooth)}; on test images: "
        f"{path('entropy', smooth)}.",
        verdict(
            error < 1e-3,
            all(
                bool((row[key][1:] <= row[key][:-1] + 1e-3).all())
                for each in smooth.values()
                for row in each.values()
                for key in (FAR, "entropy")
            ),
        ),
        "the two sides must agree to 0.1 %, and the linearized entropy, which sees the variance alone, must never rise "
        "with T by more than 0.001.",
    )  # fmt: skip
    return [same, small, concentrates]


def figure(runs: dict[str, list[dict[str, Any]]], temperatures: list[float]) -> Any:
    """Entropy elsewhere, its distance to that of test images, and the AUROC, against T."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(13, 3.6 * len(runs)))
    for row, (net, each) in enumerate(runs.items()):
        far = SHOWN[OUTSIDE[net]]
        kinds = [("sampled", "training", "-"), ("linearized", "training", "--")]
        kinds += [("sampled", "weaker", ":")] if "weaker" in each[0]["priors"] else []
        panels = [
            (f"{far}: entropy", lambda c: c[FAR]),
            (f"entropy on {far} minus on test images", lambda c: c[FAR] - c["entropy"]),
            (f"AUROC of the entropy, test images against {far}", lambda c: c[AREA]),
        ]
        for k, (title, pick) in enumerate(panels):
            axes = canvas.add_subplot(len(runs), 3, 3 * row + k + 1)
            for way, kind, line in kinds:
                for name, curves in stacked(each, way, kind).items():
                    values = pick(curves)
                    label = f"{name}, {way}" + (", τ/10" if kind == "weaker" else "")
                    dots = "." if line == "-" else ""
                    axes.plot(temperatures, values.mean(0), line, color=COLORS[name], label=label, marker=dots)
                    if len(values) > 1 and line == "-":
                        low, high = values.min(0).values, values.max(0).values
                        axes.fill_between(temperatures, low, high, color=COLORS[name], alpha=0.15, lw=0)
            axes.axvline(1.0, color="gray", lw=0.5)
            axes.set_xscale("log")
            axes.set_xlabel("T")
            axes.set_title(f"{NETWORKS[net]}\n{title}", loc="left", fontsize=9)
            if k == 1:
                axes.legend(frameon=False, fontsize=6)
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = runs_of(given)
    rows, temperatures = [], given.temperatures
    for net, each in runs.items():
        for way, kind in (("sampled", "training"), ("linearized", "training"), ("sampled", "weaker")):
            if kind not in each[0]["priors"]:
                continue
            for name, curves in stacked(each, way, kind).items():
                row: dict[str, Any] = {"network": NETWORKS[net], "structure": name, "predictive": way}
                row["τ"] = each[0]["priors"][kind]
                for T in (temperatures[0], 1.0, temperatures[-1]):
                    k = temperatures.index(T)
                    row[f"entropy elsewhere T={T:g}"] = spread(curves[FAR][:, k].tolist())
                    row[f"AUROC T={T:g}"] = spread(curves[AREA][:, k].tolist())
                rows.append(row | {"best T by AUROC": temperatures[int(curves[AREA].mean(0).argmax())]})
    net = given.networks[0]
    first = means(runs, "sampled")[net]
    area = {name: row[AREA].max().item() for name, row in first.items()}
    at = {name: temperatures[int(row[AREA].argmax())] for name, row in first.items()}
    falls = all(bool(row[key][-1] < row[key][0]) for row in first.values() for key in (FAR, "entropy"))
    command = f"python -m experiments.temperature_ood {options_told(given)}"
    title = "Entropy out of distribution against T"
    result = Result("temperature_ood", title, ABOUT["paper"], command, list(seeds))
    result = (
        result.with_rows(rows)
        .with_claims(*claims(runs, temperatures))
        .with_sentence(
            f"{NETWORKS[net]}: the entropy of sampled networks {'falls' if falls else 'does not always fall'} with T "
            f"on {SHOWN[OUTSIDE[net]]} and on test images, and tells the two apart best at T = {told(at)} "
            f"(AUROC {told(area)})."
        )
        .with_notes(
            "Entropy is the mean entropy of the predictive in nats; AUROC is that of the entropy between test images "
            "and the others, which the paper does not measure. ± is the standard deviation over seeds, shades "
            "are their range.",
            sizes_told(given),
            "Why τ is not tuned: see the notes of temperature_curves.",
            "τ is that of the paper's weight decay, 0.01 N; dotted curves and the last rows have a prior ten times "
            f"weaker. Curvature is the GGN (tolerance {TOLERANCE:g}) of {given.curvature} training images, scaled to "
            "all.",
        )
    )  # fmt: skip
    result.with_data(temperatures=temperatures, runs=runs).finish(given.out, lambda: figure(runs, temperatures))


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke=SMOKE, quick=QUICK, seeds=3)
    add_options(parser)
    main(parser.parse_args())
