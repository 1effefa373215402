"""Do coarser curvatures give narrower bands? Diag, KFAC, EKFAC and B-Diag on a cubic with 100 points.

    python -m experiments.toy_structures [--seeds 3] [--cache DIR] [--out docs/results]

A hundred points x ~ U(−4, 4), y ~ N(x³, 3²), a network 1-7-7-1 trained to the mode under a prior N(0, 1) of
standardized inputs and targets. The four structures, full Laplace and HMC (Pyro's NUTS, the same prior and noise) give
bands at T = 1: by sampled weights, as in the paper, and by linearization. Curvature is the exact GGN, and once more the
empirical Fisher of the paper's Eq. 25. Printed are the mean band inside [−4, 4] and on 4 < |x| ≤ 6, how far the
curvature is from the exact one (Frobenius norm) and the posterior from full Laplace (KL divergence). Nothing is tuned.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._results import Claim, Result, spread, verdict
from experiments.toy_cubic import FAR, NOISE, PRIOR, UNIDENTIFIED, WIDTH, Problem, trained
from torch import Tensor

import lapwing
from lapwing.baselines import HMC

ABOUT = {"paper": "000, Fig. 2", "minutes": 3, "quick": 0.88}
STRUCTURES = {"KFAC": "kron", "Diag": "diag", "EKFAC": "ekfac", "B-Diag": "blockdiag", "Full": "full"}
ORDER = ("KFAC", "Diag", "EKFAC", "B-Diag")
FACTORS = {"GGN": "ggn", "empirical Fisher": "empirical"}
WAYS = ("sampled", "linearized")
PRIORS = tuple(10.0**k for k in range(-2, 4))
SIZES = ("points", "samples", "warmup", "chains", "depth")
Table = dict[str, dict[str, float]]


def drawn(seed: int, points: int) -> Problem:
    """Training points, no validation points (nothing is tuned), and test points, standardized."""
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(points + 1000, 1, generator=generator, dtype=torch.float64) - 4
    y = x**3 + NOISE * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    scale = float(y[:points].std())
    train, test = ((x[part] / WIDTH, y[part] / scale) for part in (slice(points), slice(points, None)))
    return Problem(train, (x[:0], y[:0]), test, scale)


def band(method: Any, x: Tensor, scale: float, way: str, draws: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the function at x, (n,) each, in the units of y."""
    options: dict[str, Any] = {} if way == "hmc" else {"method": way}
    options |= {"samples": draws} if way == "sampled" else {}
    function = method.predict(x[:, None] / WIDTH, **options).function
    return scale * function.mean[:, 0], scale * function.variance[:, 0].sqrt()


def divergence(q: Any, p: Any) -> float:
    """KL(q ‖ p) between two Gaussian posteriors with the same mean, in nats."""
    first, second = (each.posterior.precision.dense().double() for each in (q, p))
    ratio = torch.linalg.solve(first, second)  # p's precision times q's covariance, up to a transposition
    return 0.5 * (ratio.diagonal().sum() - len(ratio) - torch.linalg.slogdet(ratio)[1]).item()


def curvature(la: Any) -> Tensor:
    """The curvature alone, dense: the precision without the prior."""
    dense = la.posterior.precision.dense().double()
    return dense - PRIOR * torch.eye(len(dense), dtype=torch.float64)


def run(seed: int, given: Any) -> tuple[Table, dict[str, Any], str]:
    """Scores by factor and structure, curves of the figure, and how far HMC has mixed, for one seed."""
    problem = drawn(seed, given.points)
    model = trained(problem, seed, given.steps)
    likelihood = lapwing.Gaussian(noise=NOISE / problem.scale)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the chains have not mixed")
        hmc = HMC.fit(
            model, problem.train, likelihood, prior=PRIOR, samples=given.samples, warmup=given.warmup,
            chains=given.chains, depth=given.depth, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
    grid = torch.linspace(-FAR, FAR, 121, dtype=torch.float64)
    inside = grid.abs() <= 4
    reference = band(hmc, grid, problem.scale, "hmc", given.draws)
    table: Table = {}
    curves: dict[str, Any] = {"x": grid, "HMC": reference, "priors": {}}
    for factor, choice in FACTORS.items():
        fitted = {
            name: lapwing.fit(
                model, problem.train, likelihood, structure=structure, factor=choice, prior=PRIOR, progress=False
            )
            for name, structure in STRUCTURES.items()
        }
        exact = {name: curvature(fitted[name]) for name in fitted}
        for name, la in fitted.items():
            row: dict[str, float] = {}
            for way in WAYS:
                mean, deviation = band(la, grid, problem.scale, way, given.draws)
                row[f"inside, {way}"] = deviation[inside].mean().item()
                row[f"outside, {way}"] = deviation[~inside].mean().item()
                row[f"off HMC, {way}"] = (deviation - reference[1])[inside].abs().mean().item()
                if choice == "ggn":
                    curves[f"{name}, {way}"] = (mean, deviation)
            block, full = exact["B-Diag"], exact["Full"]
            row["error to blocks"] = ((exact[name] - block).norm() / block.norm()).item()
            row["error to full"] = ((exact[name] - full).norm() / full.norm()).item()
            row["norm"] = exact[name].norm().item()
            row["KL to full"] = divergence(la, fitted["Full"])
            table[f"{name}, {factor}"] = row
            if choice == "ggn":
                each = [band(la.replace(prior=tau), grid, problem.scale, "sampled", given.draws) for tau in PRIORS]
                curves["priors"][name] = [deviation[inside].mean().item() for _, deviation in each]
                row |= {f"τ={tau:g}": value for tau, value in zip(PRIORS, curves["priors"][name])}
    table["HMC"] = {"inside": reference[1][inside].mean().item(), "outside": reference[1][~inside].mean().item()}
    with torch.no_grad():
        curves["network"] = problem.scale * model(grid[:, None] / WIDTH)[:, 0]
    curves["data"] = (problem.train[0][:, 0] * WIDTH, problem.train[1][:, 0] * problem.scale)
    return table, curves, hmc.summary()


def told(values: Mapping[str, float]) -> str:
    """Name and number of each."""
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def claims(mean: Table, runs: list[Table]) -> list[Claim]:
    """What the paper says, judged on averages over seeds by rules that are stated."""

    def column(key: str, factor: str = "GGN", table: Table = mean, names: tuple[str, ...] = ORDER) -> dict[str, float]:
        return {name: table[f"{name}, {factor}"][key] for name in names}

    def pairs(key: str, factor: str, table: Table = mean) -> list[bool]:
        values = list(column(key, factor, table).values())
        return [a < b for a, b in pairwise(values)]

    keys = [f"{where}, sampled" for where in ("inside", "outside")]
    steps = ["KFAC < Diag", "Diag < EKFAC", "EKFAC < B-Diag"]
    often = {
        step: sum(pairs(key, factor, table)[k] for table in runs for key in keys for factor in FACTORS)
        for k, step in enumerate(steps)
    }
    total = len(runs) * len(keys) * len(FACTORS)
    holding = [f"{tau:g}" for tau in PRIORS if all(pairs(f"τ={tau:g}", "GGN"))]
    order = Claim(
        "Meanwhile, the estimated uncertainty generally follows the order: KFAC < Diag < EKFAC < B-Diag.",
        "section 4.1, Fig. 2",
        f"Mean bands inside, sampled: GGN {told(column(keys[0]))}; empirical Fisher "
        f"{told(column(keys[0], 'empirical Fisher'))}. Outside: GGN {told(column(keys[1]))}; empirical Fisher "
        f"{told(column(keys[1], 'empirical Fisher'))}. Over seeds, places and factors: "
        + ", ".join(f"{step} {count} of {total}" for step, count in often.items())
        + f". With other prior precisions from {PRIORS[0]:g} to {PRIORS[-1]:g} the whole order is seen "
        + (f"at {', '.join(holding)}" if holding else "at none")
        + f"; at {PRIORS[-1]:g} the bands are {told(column(f'τ={PRIORS[-1]:g}'))}.",
        verdict(*(count > total / 2 for count in often.values())),
        "generally means that each of the three inequalities is right more often than not.",
    )  # fmt: skip
    errors = {factor: column("error to blocks", factor) for factor in FACTORS}
    finer = Claim(
        "EKFAC method approximates the Hessian matrix with higher precision compared to KFAC, […] B-Diag offers the "
        "highest approximation precision among the mentioned methods.",
        "section 4.1",
        "Frobenius error relative to the exact diagonal blocks: "
        + "; ".join(f"{factor} {told(values)}" for factor, values in errors.items())
        + f"; relative to the full GGN: {told(column('error to full'))}.",
        verdict(
            *(values["EKFAC"] < values["KFAC"] for values in errors.values()),
            all(min(each, key=each.__getitem__) == "B-Diag" for each in (*errors.values(), column("error to full"))),
        ),
        "the smaller error is the higher precision; B-Diag is exact in its blocks by definition.",
    )
    names = (*ORDER, "Full")
    bands = column("inside, sampled", names=names)
    precise = column("error to full", names=names)
    by_error = sorted(names, key=lambda name: -precise[name])
    strong = column(f"τ={PRIORS[-1]:g}", names=names)
    grows = [each[a] < each[b] for each in (bands, strong) for a, b in pairwise(by_error)]
    hypothesis = Claim(
        "We can have a preliminary hypothesis that the approximation of Hessian matrix can lead to the concentration "
        "of uncertainty, with finer approximations resulting in greater uncertainty.",
        "section 4.1 (which does not examine it)",
        f"From the largest to the smallest error the bands inside are {told({n: bands[n] for n in by_error})} with τ = "
        f"{PRIOR:g}, and {told({n: strong[n] for n in by_error})} with τ = {PRIORS[-1]:g}; HMC has "
        f"{mean['HMC']['inside']:.3g} with τ = {PRIOR:g}. KL divergence to full Laplace: "
        f"{told(column('KL to full', names=names))} nats.",
        verdict(*grows),
        "each step to a smaller Frobenius error must widen the sampled band inside, with either prior.",
    )
    return [order, finer, hypothesis]


def figure(curves: Mapping[str, Any]) -> Any:
    """Bands of all structures and of HMC, sampled and linearized, and bands against the prior."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(15, 6))
    x, (px, py) = torch.tensor(curves["x"]), curves["data"]
    names = (*ORDER, "Full", "HMC")
    panels = [(name, way) for way in WAYS for name in names]
    for k, (name, way) in enumerate(panels[:-1]):
        axes = canvas.add_subplot(2, len(names), k + 1)
        title = name if name == "HMC" else f"{name}, {way}"
        mean, deviation = map(torch.tensor, curves[title])
        for times in (3, 2, 1):
            axes.fill_between(x, mean - times * deviation, mean + times * deviation, color="#2b6cb0", alpha=0.2, lw=0)
        axes.plot(x, x**3, color="black", lw=1, label="x³")
        axes.plot(x, curves["network"], color="#c53030", lw=1, label="network")
        axes.plot(x, mean, color="#2b6cb0", lw=1.5, label="mean")
        axes.plot(px, py, ".", color="black", ms=2.5)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylim(-250, 250)
        axes.set_xlabel("x", fontsize=8)
        axes.set_ylabel("" if k % len(names) else "y", fontsize=8)
        axes.tick_params(labelsize=7, labelleft=k % len(names) == 0)
        if k == 0:
            axes.legend(frameon=False, fontsize=7)
    axes = canvas.add_subplot(2, len(names), len(panels))
    for name, values in curves["priors"].items():
        axes.loglog(PRIORS, values, marker=".", label=name)
    axes.set_xticks(PRIORS[::2])
    axes.set_xlabel("prior precision τ", fontsize=8)
    axes.set_title("sampled band inside (units of y)", loc="left", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.legend(frameon=False, fontsize=7)
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("toy_structures", run, given)
    tables = [table for table, _, _ in runs]
    mean = {
        name: {key: sum(table[name][key] for table in tables) / len(tables) for key in row}
        for name, row in tables[0].items()
    }
    rows = [
        {"curvature": name, **{k: spread([table[name][k] for table in tables]) for k in row if not k.startswith("τ")}}
        for name, row in mean.items()
        if name != "HMC"
    ]
    inside = {name: mean[f"{name}, GGN"]["inside, sampled"] for name in STRUCTURES}
    sizes = " ".join(f"--{name} {getattr(given, name)}" for name in SIZES)
    command = f"python -m experiments.toy_structures --seeds {given.seeds} {sizes}"
    result = Result("toy_structures", "A cubic, structure by structure", ABOUT["paper"], command, list(seeds))
    result = (
        result.with_rows(rows)
        .with_claims(*claims(mean, tables))
        .with_sentence(
            f"On a cubic with {given.points} points the sampled bands of the exact GGN are {told(inside)} wide inside "
            f"the data, and HMC's {mean['HMC']['inside']:.3g}."
        )
        .with_notes(
            "Bands are standard deviations of the function, without the noise, in the units of y: their mean over "
            "|x| ≤ 4 (inside) and 4 < |x| ≤ 6 (outside). ± is the standard deviation over seeds. Norms and errors are "
            "Frobenius norms of the curvature without the prior; all structures add the prior τ I exactly, as Eq. 21.",
            f"HMC: band inside {spread([table['HMC']['inside'] for table in tables])}, outside "
            f"{spread([table['HMC']['outside'] for table in tables])}; "
            + "; ".join(f"seed {seed}: {summary}" for seed, (_, _, summary) in zip(seeds, runs)) + ".",
            UNIDENTIFIED,
            "The paper names neither prior nor standardization; here τ = 1 on inputs divided by 4 and targets by their "
            "standard deviation. The last panel shows how the bands depend on τ, with the weights and the curvature "
            "of τ = 1.",
        )
    )  # fmt: skip
    curves = runs[0][1]
    result.with_data(scores=tables, curves=curves).finish(given.out, lambda: figure(curves))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"steps": 200, "samples": 20, "warmup": 10, "chains": 1, "draws": 20, "depth": 3, "points": 30},
        quick={"samples": 100, "warmup": 150},
    )
    parser.add_argument("--points", type=int, default=100, help="training points")
    parser.add_argument("--steps", type=int, default=3000, help="of Adam")
    parser.add_argument("--samples", type=int, default=200, help="HMC draws per chain")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--depth", type=int, default=7, help="doublings of an HMC trajectory at most")
    parser.add_argument("--draws", type=int, default=500, help="networks behind the bands of a Laplace posterior")
    main(parser.parse_args())
