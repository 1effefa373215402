"""Heteroscedastic regression: mean and variance against natural parameters, with and without Laplace, on a toy.

    python -m experiments.heteroscedastic_toy [--seeds 3] [--out docs/results]

y = x sin x + 0.3 (1 + x) ε / 2 for x in [0, 10] (Detlefsen et al. 2019), 200 points, none in [4.5, 6]: the noise grows
with x. A network 1-30-30-2 of tanh units emits (μ, log σ²) or natural parameters (η₁, ρ) (document 002, "Revisiting the
Natural Parameterization"). "MAP" is trained with one small prior precision; "evidence" by `lapwing.train`, which learns
a prior per layer. Each predicts by the network alone and by the linearized posterior (full GGN). Test points are 1,000
new ones at the data, and 500 in the gap and beyond 10. Whether the log-likelihood is concave is read off the Hessian of
−log p(y | ·) at every training point of the trained networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed, tensors
from experiments._mode import to_mode
from experiments._results import Claim, Result, gathered, spread, verdict
from torch import Tensor, nn
from torch.func import hessian, vmap

import lapwing
from experiments import _networks as networks
from lapwing.baselines import DeepEnsemble

ABOUT = {"paper": "002, Heteroscedastic Regression Illustration", "minutes": 5, "quick": 1.2}

KINDS = {"mean": "mean–variance", "natural": "natural"}
GAP, END = (4.5, 6.0), 10.0
SCALE = 5.0  # inputs are (x − 5)/SCALE and targets y/SCALE


def truth(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of y."""
    return x * x.sin(), 0.15 * (1 + x)


def draw(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Standardized inputs and targets."""
    mean, deviation = truth(x)
    y = mean + deviation * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return ((x - 5) / SCALE)[:, None], (y / SCALE)[:, None]


def points(n: int, inside: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points at the data, or in the gap and up to 2 beyond the end."""
    if inside:
        x = (END - (GAP[1] - GAP[0])) * torch.rand(n, generator=generator, dtype=torch.float64)
        x = torch.where(x < GAP[0], x, x + GAP[1] - GAP[0])
    else:
        x = 3.5 * torch.rand(n, generator=generator, dtype=torch.float64)
        x = torch.where(x < 1.5, x + GAP[0], x - 1.5 + END)
    return draw(x, generator)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=20, history_size=30, line_search_fn="strong_wolfe")


def methods(kind: str, train: tuple[Tensor, Tensor], seed: int, given: Any) -> dict[str, Any]:
    """What predicts, by name."""
    likelihood = lapwing.HeteroscedasticGaussian(kind)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    plain = networks.mlp([1, given.width, given.width, 2], nn.Tanh).double()
    torch.manual_seed(seed)
    learned = networks.mlp([1, given.width, given.width, 2], nn.Tanh).double()
    to_mode(plain, *train, likelihood, given.precision, given.steps)
    # Adam first: from a random start, L-BFGS on (μ, log σ²) tends to end where σ² explains everything
    to_mode(learned, *train, likelihood, 1.0, given.steps // 3)
    trained = lapwing.train(
        learned, train, likelihood, epochs=given.epochs, batch_size=len(train[1]), every=2, burnin=0, samples=None,
        structure="full", keep="last", optimizer=lbfgs, progress=False,
    )  # fmt: skip
    name = KINDS[kind]
    return {
        f"{name}, MAP": DeepEnsemble([plain], likelihood),
        f"{name}, MAP and Laplace": lapwing.fit(
            plain, train, likelihood, structure="full", prior=given.precision, progress=False
        ),
        f"{name}, evidence": DeepEnsemble([trained.module], likelihood),
        f"{name}, evidence and Laplace": trained.laplace,
    }


def indefinite(kind: str, network: nn.Module, train: tuple[Tensor, Tensor]) -> float:
    """Share of training points, in percent, where −log p has a Hessian with a negative eigenvalue.

    In (μ, σ²) for mean and variance, as on the slide, and in (η₁, η₂) for natural parameters.
    """
    x, y = train
    with torch.no_grad():
        mean, variance = lapwing.HeteroscedasticGaussian(kind).moments(network(x).double())  # type: ignore[arg-type]
    at = torch.cat([mean, variance] if kind == "mean" else [mean / variance, -0.5 / variance], -1)

    def loss(parameters: Tensor, target: Tensor) -> Tensor:
        first, second = parameters
        if kind == "mean":
            return second.log() / 2 + (target[0] - first).square() / (2 * second)
        return (
            -(first * target[0] + second * target[0].square() + first.square() / (4 * second)) - (-2 * second).log() / 2
        )

    eigenvalues = torch.linalg.eigvalsh(vmap(hessian(loss))(at, y))
    return 100 * (eigenvalues[:, 0] < -1e-9 * eigenvalues[:, 1].abs()).double().mean().item()


def run(seed: int, given: Any) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Scores by method, and the curves of the figure."""
    generator = torch.Generator().manual_seed(seed)
    train = points(given.points, True, generator)
    near, far = points(given.test, True, generator), points(given.test // 2, False, generator)
    grid = torch.linspace(-2, 13, 151, dtype=torch.float64)
    table: dict[str, dict[str, float]] = {}
    curves: dict[str, Any] = {"x": grid, "data": (SCALE * train[0][:, 0] + 5, SCALE * train[1][:, 0])}
    log_scale = torch.tensor(SCALE).log().item()
    for kind in KINDS:
        found = methods(kind, train, seed, given)
        for name, method in found.items():
            p, q = method.predict(near[0]), method.predict(far[0])
            wanted = truth(SCALE * near[0][:, 0] + 5)[0]
            low, high = q.interval(0.95)
            table[name] = {
                "log-likelihood": p.log_prob(near[1]).mean().item() - log_scale,
                "RMSE to the true mean": (SCALE * p.mean[:, 0] - wanted).square().mean().sqrt().item(),
                "outside: log-likelihood": q.log_prob(far[1]).mean().item() - log_scale,
                "outside: coverage of 95 %": 100 * ((low <= far[1]) & (far[1] <= high)).double().mean().item(),
                "outside: largest stddev": SCALE * q.stddev.max().item(),
                "outside: widest interval": SCALE * (high - low).max().item(),
            }
            if name.endswith(("MAP", "evidence")):
                table[name]["indefinite in %"] = indefinite(kind, method.models[0], train)
            p = method.predict(((grid - 5) / SCALE)[:, None])
            low, high = p.interval(0.95)
            band = SCALE * p.mean[:, 0], SCALE * p.aleatoric[:, 0].sqrt()
            curves[name] = (*band, SCALE * low[:, 0], SCALE * high[:, 0])
    return table, curves


def claims(mean: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    def of(key: str, *kinds: str) -> dict[str, float]:
        return {name: row[key] for name, row in mean.items() if key in row and name.startswith(kinds)}

    def told(values: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in values.items())

    mixed, clean = of("indefinite in %", "mean"), of("indefinite in %", "natural")
    curved = Claim(
        "Mean-variance parameterization does not yield concave log likelihood […] Natural parameterization always "
        "yields a concave log likelihood",
        "Problem with Mean-Variance Parameterization; Revisiting the Natural Parameterization",
        f"Training points with an indefinite Hessian, in percent: {told(mixed | clean)}.",
        verdict(all(value > 0 for value in mixed.values()), all(value == 0 for value in clean.values())),
        "the Hessian must be indefinite at some training points for mean–variance and at none for natural. In (μ, "
        "σ²) the determinant of the Hessian is −1/(2σ⁶), so "
        "that it is indefinite everywhere, not only potentially.",
    )
    fits = of("log-likelihood", "mean", "natural")
    hard = Claim(
        "Objective balances mean and variance → Hard to optimize and regularize",
        "Estimating Heteroscedastic Aleatoric Uncertainty",
        f"Log-likelihood of test points at the data: {told(fits)}. RMSE to the true mean: "
        f"{told(of('RMSE to the true mean', 'mean', 'natural'))}.",
        verdict(*(fits[f"natural, {way}"] > fits[f"mean–variance, {way}"] for way in ("MAP", "evidence"))),
        "hard for mean–variance means a lower test log-likelihood than natural, by the network alone, as MAP and with "
        "the evidence.",
    )
    outside = of("outside: log-likelihood", "mean", "natural")
    cover = of("outside: coverage of 95 %", "mean", "natural")
    ways = [f"{kind}, {way}" for kind in KINDS.values() for way in ("MAP", "evidence")]
    epistemic = Claim(
        "→ Additionally provide epistemic uncertainty",
        "Advantage 2) Predictive Uncertainty",
        f"In the gap and beyond the data, log-likelihood: {told(outside)}; coverage of the 95 % interval in percent: "
        f"{told(cover)}.",
        verdict(*(outside[f"{way} and Laplace"] > outside[way] for way in ways)),
        "with Laplace the log-likelihood outside must be higher than without, for all four pairs.",
    )
    return [curved, hard, epistemic]


def sentence(mean: Mapping[str, Mapping[str, float]]) -> str:
    """Say which method is best at the data, and what the posterior does to intervals outside."""
    best = max(mean, key=lambda name: mean[name]["log-likelihood"])
    cover = "outside: coverage of 95 %"
    pairs = [(name, f"{name} and Laplace") for name in mean if not name.endswith("Laplace")]
    more = sum(mean[with_it][cover] > mean[without][cover] for without, with_it in pairs)
    return (
        f"Of eight methods, “{best}” has the highest log-likelihood at the data, {mean[best]['log-likelihood']:.3g}; "
        f"outside, intervals cover more with Laplace than without in {more} of {len(pairs)} pairs."
    )


def figure(curves: Mapping[str, Any]) -> Any:
    """Two rows, mean–variance and natural: network and posterior, with the 95 % interval and the noise inside it."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(13, 6))
    x, (px, py) = curves["x"], curves["data"]
    center, _ = truth(x)
    for row, kind in enumerate(KINDS.values()):
        for k, way in enumerate(("MAP", "MAP and Laplace", "evidence", "evidence and Laplace")):
            axes = canvas.add_subplot(2, 4, 4 * row + k + 1)
            mean, noise, low, high = curves[f"{kind}, {way}"]
            axes.fill_between(x, low, high, color="#2b6cb0", alpha=0.2, lw=0, label="95 % interval")
            axes.fill_between(x, mean - 2 * noise, mean + 2 * noise, color="#dd6b20", alpha=0.2, lw=0, label="noise")
            axes.plot(x, center, color="black", lw=1, ls="--", label="true mean")
            axes.plot(x, mean, color="#2b6cb0", lw=1.5, label="mean")
            axes.plot(px, py, ".", color="black", ms=2)
            axes.axvspan(*GAP, color="black", alpha=0.05, lw=0)
            axes.set_ylim(-16, 16)
            axes.set(xlabel="x" if row else "", ylabel="" if k else "y")
            axes.set_title(f"{kind}, {way}", loc="left", fontsize=9)
            if row == k == 0:
                axes.legend(frameon=False, fontsize=7, loc="lower left")
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("heteroscedastic_toy", run, given)
    each, mean = gathered([table for table, _ in runs])
    rows = [{"method": n, **{key: spread(values) for key, values in row.items()}} for n, row in each.items()]
    command = f"python -m experiments.heteroscedastic_toy --seeds {given.seeds} --steps {given.steps}"
    title = "Heteroscedastic regression on a toy: mean–variance against natural parameters"
    result = (
        Result("heteroscedastic_toy", title, ABOUT["paper"], f"{command} --epochs {given.epochs}", list(seeds))
        .with_rows(rows)
        .with_claims(*claims(mean))
        .with_sentence(sentence(mean))
        .with_notes(
            f"MAP: prior precision {given.precision:g}, not tuned. Evidence: a precision per layer, full GGN, L-BFGS "
            "on all data after a third of the steps of Adam. Everything is in the units of y; the true noise has a "
            "standard deviation of 0.15 (1 + x).",
            "The standard deviation of a prediction is never larger than the width of its 95 % interval "
            "(`HeteroscedasticGaussian.marginal`): natural parameters have means and variances that grow without bound "
            "where the noise is not known.",
            "± is the standard deviation over seeds, each with its own data and network; the figure is of the first.",
        )
    )
    curves = tensors(runs[0][1])
    result.with_data(scores=each, curves=curves).finish(given.out, lambda: figure(curves))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"seeds": 1, "steps": 90, "epochs": 3, "points": 40, "test": 40, "width": 6},
        quick={"seeds": 1, "steps": 1500, "epochs": 12},
    )
    parser.set_defaults(seeds=3)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--width", type=int, default=30, help="of the two hidden layers")
    parser.add_argument("--steps", type=int, default=3000, help="of Adam")
    parser.add_argument("--epochs", type=int, default=24, help="of 20 iterations of L-BFGS each, with the evidence")
    parser.add_argument("--precision", type=float, default=0.01, help="of the prior of MAP")
    main(parser.parse_args())
