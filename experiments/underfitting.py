"""The sampled predictive of a Laplace approximation underfits, the linearized one does not: one and two dimensions.

    python -m experiments.underfitting [--seeds 5] [--out docs/results]

Networks with two hidden layers of 30 tanh units are trained to their mode under a prior N(0, 1): on 80 points of a sine
(1-30-30-1, known noise) and on 200 points of two moons (2-30-30-2). The posterior has the full GGN and that same prior;
nothing is tuned. It predicts by sampled weights, p(y | f(x, θ_s)), and by the linearized network,
p(y | f(x, θ̂) + J(x)(θ_s − θ̂)); beside both stands the network itself (document 002, Part 2). Scores are the NLL per
point on the training data and on 1,000 test points.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed, tensors
from experiments._mode import to_mode
from experiments._results import Claim, Result, gathered, spread, verdict
from torch import Tensor, nn

import lapwing
from experiments import _networks as networks

ABOUT = {"paper": "002, Laplace Posterior Predictive Underfitting", "minutes": 1, "quick": 0.3}

NOISE, PRIOR = 0.2, 1.0
UNDER = 0.1  # nats per training point by which an underfit exceeds the network's own NLL
WAYS = ("network", "sampled", "linearized")
PROBLEMS = {"sine": "regression in one dimension", "moons": "classification in two dimensions"}


def draw(problem: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of y = sin 3x + noise for x in [−2, 2], or of two moons with noise."""
    if problem == "sine":
        x = 4 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 2
        return x, (3 * x).sin() + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    y = (torch.rand(n, generator=generator) < 0.5).long()
    angle = math.pi * torch.rand(n, generator=generator, dtype=torch.float64)
    side = 1 - 2 * y.double()
    moon = torch.stack([side * angle.cos() + y, side * angle.sin() + 0.5 * y], 1)
    return moon + NOISE * torch.randn(n, 2, generator=generator, dtype=torch.float64), y


def predictions(la: lapwing.Laplace, x: Tensor, draws: int) -> dict[str, Any]:
    """The three predictions at x; the network is the posterior's own with nothing uncertain."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the sampled weights have lost")  # that is the experiment
        sampled = la.predict(x, method="sampled", samples=draws)
    return {
        "network": lapwing.baselines.DeepEnsemble([la.module], la.likelihood).predict(x),
        "sampled": sampled,
        "linearized": la.predict(x),
    }


def run(seed: int, given: Any) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Scores by problem and way, and what the figure shows."""
    table: dict[str, dict[str, float]] = {}
    shown: dict[str, Any] = {}
    for problem, likelihood in (("sine", lapwing.Gaussian(noise=NOISE)), ("moons", lapwing.Categorical())):
        generator = torch.Generator().manual_seed(seed)
        train, test = (
            draw(problem, given.sine if problem == "sine" else given.moons, generator),
            draw(problem, given.test, generator),
        )
        torch.manual_seed(seed)
        sizes = [train[0].shape[1], given.width, given.width, 1 if problem == "sine" else 2]
        model = to_mode(networks.mlp(sizes, nn.Tanh).double(), *train, likelihood, PRIOR, given.steps)
        la = lapwing.fit(model, train, likelihood, structure="full", prior=PRIOR, progress=False)
        for part, (x, y) in (("training", train), ("test", test)):
            for way, p in predictions(la, x, given.draws).items():
                row = table.setdefault(f"{problem}, {way}", {})
                row[f"{part} NLL"] = -p.log_prob(y).mean().item()
                if part == "test" and problem == "sine":
                    row["RMSE or accuracy %"] = (p.mean - y).square().mean().sqrt().item()
                elif part == "test":
                    row["RMSE or accuracy %"] = 100 * (p.label == y).double().mean().item()
        shown[problem] = {"data": train, **field(problem, la, given)}
    return table, shown


def field(problem: str, la: lapwing.Laplace, given: Any) -> dict[str, Any]:
    """Predictions on a grid: mean and standard deviation of y, or the probability of the second class."""
    if problem == "sine":
        grid = torch.linspace(-4, 4, 161, dtype=torch.float64)
        found = predictions(la, grid[:, None], given.draws)
        return {"x": grid, **{way: (p.mean[:, 0], p.stddev[:, 0]) for way, p in found.items()}}
    side = torch.linspace(-2.5, 3.5, given.pixels, dtype=torch.float64)
    down = torch.linspace(-2.5, 3.0, given.pixels, dtype=torch.float64)
    inputs = torch.cartesian_prod(side, down)
    found = predictions(la, inputs, given.draws)
    return {"x": side, "y": down, **{way: p.probs[:, 1].reshape(len(side), -1).T for way, p in found.items()}}


def claims(mean: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    def of(way: str, key: str) -> dict[str, float]:
        return {problem: mean[f"{problem}, {way}"][key] for problem in PROBLEMS}

    def told(key: str) -> str:
        parts = [", ".join(f"{way} {of(way, key)[problem]:.3g}" for way in WAYS) for problem in PROBLEMS]
        return "; ".join(f"{PROBLEMS[problem]}: {part}" for problem, part in zip(PROBLEMS, parts))

    own, sampled, linear = (of(way, "training NLL") for way in WAYS)
    under = Claim(
        "Problem: Laplace posterior predictive underfits",
        "Laplace Posterior Predictive Underfitting",
        f"NLL of the training data: {told('training NLL')}.",
        verdict(*(sampled[problem] > own[problem] + UNDER for problem in PROBLEMS)),
        f"an underfit has a training NLL of more than {UNDER} nats above the network's, in both problems.",
    )
    before, after = of("sampled", "test NLL"), of("linearized", "test NLL")
    better = Claim(
        "→ Stabilizes and improves Laplace predictive",
        "Linearized Laplace",
        f"NLL of test data: {told('test NLL')}.",
        verdict(
            all(linear[problem] <= own[problem] + UNDER for problem in PROBLEMS),
            all(after[problem] < before[problem] for problem in PROBLEMS),
        ),
        f"stable means a training NLL within {UNDER} nats of the network's, improved a lower test NLL than by sampled "
        "weights, in both problems.",
    )
    return [under, better]


def figure(shown: Mapping[str, Any]) -> Any:
    """Two rows: the sine with bands of two standard deviations of y, and the moons with class probabilities."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(11, 6.4))
    titles = {"network": "the network itself", "sampled": "sampled weights", "linearized": "linearized"}
    sine, moons = shown["sine"], shown["moons"]
    for k, way in enumerate(WAYS):
        axes = canvas.add_subplot(2, 3, k + 1)
        mean, deviation = sine[way]
        for times in (2, 1):
            low, high = mean - times * deviation, mean + times * deviation
            axes.fill_between(sine["x"], low, high, color="#2b6cb0", alpha=0.2, lw=0)
        axes.plot(sine["x"], mean, color="#2b6cb0", lw=1.5)
        axes.plot(*(part[:, 0] for part in sine["data"]), ".", color="black", ms=3)
        axes.set_ylim(-4, 4)
        axes.set(xlabel="x", ylabel="" if k else "y")
        axes.set_title(titles[way], loc="left", fontsize=10)
        axes = canvas.add_subplot(2, 3, k + 4)
        levels = [value / 10 for value in range(11)]
        drawn = axes.contourf(moons["x"], moons["y"], moons[way], levels=levels, cmap="RdBu_r")
        axes.set(xlabel="first input", ylabel="" if k else "second input")
        points, label = moons["data"]
        for value, color in ((0, "#1a365d"), (1, "#742a2a")):
            axes.scatter(*points[label == value].T, s=7, color=color, edgecolors="white", linewidths=0.3)
        if k == 2:
            canvas.colorbar(drawn, ax=axes, label="probability of the second class")
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("underfitting", run, given)
    each, mean = gathered([table for table, _ in runs])
    rows = [{"problem and way": n, **{key: spread(values) for key, values in row.items()}} for n, row in each.items()]
    command = f"python -m experiments.underfitting --seeds {given.seeds} --width {given.width} --draws {given.draws}"
    title = "The sampled predictive underfits, the linearized one does not"
    gaps = {way: mean[f"moons, {way}"]["training NLL"] for way in WAYS}
    result = (
        Result("underfitting", title, ABOUT["paper"], command, list(seeds))
        .with_rows(rows)
        .with_claims(*claims(mean))
        .with_sentence(
            f"With the same posterior, the training NLL on two moons is {gaps['network']:.3g} by the network, "
            f"{gaps['sampled']:.3g} by sampled weights and {gaps['linearized']:.3g} by the linearized network."
        )
        .with_notes(
            "Prior precision 1 for training and posterior, temperature 1: nothing is tuned. The last column is the "
            "RMSE of the mean for the sine and the accuracy in percent for the moons, on test data.",
            f"{given.draws} networks are sampled. ± is the standard deviation over seeds, each with its own data and "
            "network; the figure is that of the first.",
        )
    )
    shown = tensors(runs[0][1])
    result.with_data(scores=each, figure=shown).finish(given.out, lambda: figure(shown))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"seeds": 1, "steps": 100, "width": 6, "sine": 30, "moons": 40, "test": 50, "draws": 10, "pixels": 8},
        quick={"seeds": 2, "steps": 1000},
    )
    parser.set_defaults(seeds=5)
    parser.add_argument("--sine", type=int, default=80, help="training points of the sine")
    parser.add_argument("--moons", type=int, default=200, help="training points of the moons")
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--width", type=int, default=30, help="of the two hidden layers")
    parser.add_argument("--steps", type=int, default=3000, help="of Adam, before L-BFGS")
    parser.add_argument("--draws", type=int, default=200, help="sampled networks")
    parser.add_argument("--pixels", type=int, default=50, help="of a side of the map in two dimensions")
    main(parser.parse_args())
