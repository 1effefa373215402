"""Toy regression x³ (paper 001, Figs. 1 and 8): Kronecker, diagonal and full Laplace beside HMC, untuned and tuned.

    python -m experiments.toy_cubic [--seeds 5] [--out docs/results]

Twenty points x ~ U(−4, 4), y ~ N(x³, 3²), a network 1-7-7-1 of 78 weights. The network is trained to the mode under a
prior N(0, 1), of standardized inputs and targets. The Laplace approximations predict by sampled weights, as in the
paper: "untuned" with this prior and N = 20, "tuned" with prior and N (pseudo-observations) chosen on 20 more points by
`tune(val, predictive="sampled")` over a grid. The Kronecker posterior has the damping of Eq. 9. HMC is Pyro's NUTS
under the same prior and noise. Bands are those of the function, without the noise, in the units of y.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed, tensors
from experiments._results import Claim, Result, spread, verdict
from torch import Tensor, nn

import lapwing
from experiments import _networks as networks
from lapwing.baselines import HMC

ABOUT = {"paper": "001, Figs. 1 and 8", "minutes": 5.5, "quick": 1.1}

STRUCTURES = {"Kronecker": "kron", "diagonal": "diag", "full": "full"}
NOISE, PRIOR = 3.0, 1.0
WIDTH = 4.0  # standard deviation that x is divided by; that of y is the one of x³ on the training points
FAR = 6.0
UNIDENTIFIED = (
    "HMC's R-hat and effective sample size are given for outputs and for weights. The weights of a network are not "
    "identified: units may trade places, and a tanh unit may change the signs of its weights, without a change of the "
    "function. Chains around different such copies have an R-hat of the weights above 1 for ever; that of the outputs "
    "tells whether they have mixed."
)


@dataclass(frozen=True)
class Problem:
    """Training, validation and test points, standardized, and the scale of y."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    scale: float

    @classmethod
    def draw(cls, seed: int) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def points(n: int) -> tuple[Tensor, Tensor]:
            x = 8 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 4
            return x, x**3 + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)

        train, val, test = points(20), points(20), points(1000)
        scale = float(train[1].std())
        return cls(*((x / WIDTH, y / scale) for x, y in (train, val, test)), scale)


def trained(problem: Problem, seed: int, steps: int) -> nn.Module:
    """The network at the mode: Adam, then L-BFGS on the log joint."""
    torch.manual_seed(seed)
    model = networks.mlp([1, 7, 7, 1], nn.Tanh).double()
    (x, y), noise = problem.train, NOISE / problem.scale
    weights = list(model.parameters())

    def loss() -> Tensor:
        return (model(x) - y).square().sum() / (2 * noise**2) + PRIOR / 2 * sum(w.square().sum() for w in weights)

    for optimizer in (torch.optim.Adam(weights, 1e-2), torch.optim.LBFGS(weights, line_search_fn="strong_wolfe")):

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        for _ in range(steps if isinstance(optimizer, torch.optim.Adam) else steps // 20):
            optimizer.step(closure)
    return model


def candidates(per_decade: int) -> dict[str, tuple[float, ...]]:
    """Prior precisions from 0.01 to 10,000, and N from 20 to 20,000 pseudo-observations as temperatures N/20."""
    precisions = tuple(10.0 ** (k / per_decade) for k in range(-2 * per_decade, 4 * per_decade + 1))
    return {"prior": precisions, "temperature": tuple(10.0 ** (k / per_decade) for k in range(3 * per_decade + 1))}


def posteriors(model: nn.Module, problem: Problem, factor: str, per_decade: int) -> dict[str, Any]:
    """The Laplace approximations, untuned and tuned on the validation points."""
    found, grid = {}, candidates(per_decade)
    likelihood = lapwing.Gaussian(noise=NOISE / problem.scale)
    for name, structure in STRUCTURES.items():
        la = lapwing.fit(
            model, problem.train, likelihood, structure=structure, prior=PRIOR, progress=False,
            factor="ggn" if structure == "kron" else factor, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        la = la.damping("factored") if structure == "kron" else la
        found[f"{name}, untuned"] = la
        found[f"{name}, tuned"] = la.tune(
            problem.val, predictive="sampled", grid=grid, learn=("prior", "temperature"), rule="lowest"
        )
    return found


def bands(method: Any, x: Tensor, scale: float, draws: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the function at x, (n,) each, in the units of y."""
    sampled = {} if isinstance(method, HMC) else {"method": "sampled", "samples": draws}
    function = method.predict(x[:, None] / WIDTH, **sampled).function
    return scale * function.mean[:, 0], scale * function.variance[:, 0].sqrt()


def scores(
    method: Any, problem: Problem, reference: Mapping[str, Tensor], grid: Tensor, draws: int
) -> dict[str, float]:
    """NLL of the test points, the size of the band inside and at ±6, and the distance to HMC inside."""
    sampled = {} if isinstance(method, HMC) else {"method": "sampled", "samples": draws}
    x, y = problem.test
    nll = -method.predict(x, **sampled).log_prob(y).mean().item() + torch.tensor(problem.scale).log().item()
    mean, deviation = bands(method, grid, problem.scale, draws)
    inside, far = grid.abs() <= 4, grid.abs() >= FAR - 1e-9
    off = (mean - reference["mean"])[inside].square().mean().sqrt().item()
    return {
        "NLL": nll,
        "band inside": deviation[inside].mean().item(),
        "band at ±6": deviation[far].mean().item(),
        "mean off HMC": off,
        "band off HMC": (deviation - reference["deviation"])[inside].abs().mean().item(),
    }


def run(seed: int, given: Any) -> tuple[dict[str, dict[str, float]], dict[str, Any], str]:
    """Scores by method, curves of the figure, and how far HMC has mixed, for one seed."""
    problem = Problem.draw(seed)
    model = trained(problem, seed, given.steps)
    likelihood = lapwing.Gaussian(noise=NOISE / problem.scale)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the chains have not mixed")
        hmc = HMC.fit(
            model, problem.train, likelihood, prior=PRIOR, samples=given.samples, warmup=given.warmup,
            chains=given.chains, depth=given.depth, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
    grid = torch.linspace(-FAR, FAR, 121, dtype=torch.float64)
    mean, deviation = bands(hmc, grid, problem.scale, given.draws)
    reference = {"mean": mean, "deviation": deviation}
    methods = {**posteriors(model, problem, given.factor, given.per_decade), "HMC": hmc}
    table = {name: scores(method, problem, reference, grid, given.draws) for name, method in methods.items()}
    for name, method in methods.items():
        if name.endswith(" tuned"):
            table[name] |= {"τ": float(method.prior.precision), "N": 20 * float(method.temperature.T)}
        elif name != "HMC":
            table[name] |= {"τ": PRIOR, "N": 20.0}
    curves: dict[str, Any] = {name: bands(method, grid, problem.scale, given.draws) for name, method in methods.items()}
    with torch.no_grad():
        curves["network"] = problem.scale * model(grid[:, None] / WIDTH)[:, 0]
    curves |= {"x": grid, "data": (problem.train[0][:, 0] * WIDTH, problem.train[1][:, 0] * problem.scale)}
    return table, curves, hmc.summary()


def claims(mean: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    """What the paper says, judged on averages over seeds by rules that are stated."""
    tuned, untuned = ([f"{name}, {kind}" for name in STRUCTURES] for kind in ("tuned", "untuned"))
    hmc = mean["HMC"]
    inside = hmc["band inside"]

    def told(values: Mapping[str, float]) -> str:
        return ", ".join(f"{name.partition(',')[0]} {value:.3g}" for name, value in values.items())

    def column(names: list[str], key: str) -> dict[str, float]:
        return {name: mean[name][key] for name in names}

    off, bands_off = column(tuned, "mean off HMC"), column(tuned, "band off HMC")
    fits = Claim(
        "The regularised Laplace approximations all give an overall good fit to the HMC predictive posterior.",
        "section 5.1",
        f"Between −4 and 4 the tuned means are off HMC's by {told(off)} (root mean square), the bands by "
        f"{told(bands_off)}; the noise is 3.",
        verdict(*(off[n] < NOISE and bands_off[n] < NOISE for n in tuned)),
        "a good fit is off by less than the noise.",
    )
    wide = column([*tuned, "HMC"], "band inside")
    growth = {name: mean[name]["band at ±6"] / value for name, value in wide.items()}
    shape = Claim(
        "Their uncertainty is slightly higher close to the training data and "
        "increases more slowly away from the data than that of the HMC posterior.",
        "section 5.1",
        f"Bands inside: {told(wide)}. Band at ±6 over band inside: {told(growth)}.",
        verdict(all(wide[n] > inside for n in tuned), all(growth[n] < growth["HMC"] for n in tuned)),
        "the band inside must be wider than HMC's, and grow by a smaller factor from inside to ±6, for all three "
        "structures.",
    )
    raw, taus, counts = column(untuned, "band inside"), column(tuned, "τ"), column(tuned, "N")
    kron, *others = untuned
    first, *rest = (taus[n] * counts[n] for n in tuned)
    regular = Claim(
        "The diagonal and full Laplace approximation require stronger regularisation than our Kronecker factored one, "
        "as they have higher uncertainty when not regularised.",
        "section 5.1",
        f"Untuned bands inside: {told(raw)}. Chosen τ: {told(taus)}; chosen N: {told(counts)} (geometric means).",
        verdict(all(raw[n] > raw[kron] for n in others), all(product > first for product in rest)),
        "stronger means a larger product τ·N, higher a wider untuned band inside.",
    )
    over = Claim(
        "However they all overestimate the uncertainty without regularisation.",
        "appendix E",
        f"Untuned bands inside: {told(raw)}, HMC {inside:.3g}.",
        verdict(*(value > 1.2 * inside for value in raw.values())),
        "overestimated means 1.2 times HMC's band.",
    )
    full, lost = untuned[-1], column(untuned, "mean off HMC")
    worst = Claim(
        "This leads to the full Laplace approximation vastly overestimating the uncertainty and a bad predictive mean.",
        "appendix E",
        f"Untuned, its band inside is {raw[full]:.3g} (HMC {inside:.3g}); the means are off HMC's by {told(lost)}.",
        verdict(raw[full] > 3 * inside, lost[full] > NOISE),
        "vastly means three times HMC's band, bad a mean that is off by more than the noise.",
    )
    return [fits, shape, regular, over, worst]


def figure(curves: Mapping[str, Any]) -> Any:
    """Two rows, untuned and tuned: the data, x³, the network, and bands of one, two and three deviations."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(13, 6))
    x, (px, py) = curves["x"], curves["data"]
    for row, kind in enumerate(("untuned", "tuned")):
        for k, name in enumerate((*STRUCTURES, "HMC")):
            key = name if name == "HMC" else f"{name}, {kind}"
            axes = canvas.add_subplot(2, 4, 4 * row + k + 1)
            mean, deviation = curves[key]
            for times in (3, 2, 1):
                axes.fill_between(
                    x, mean - times * deviation, mean + times * deviation, color="#2b6cb0", alpha=0.2, lw=0
                )
            axes.plot(x, x**3, color="black", lw=1, label="x³")
            axes.plot(x, curves["network"], color="#c53030", lw=1, label="network")
            axes.plot(x, mean, color="#2b6cb0", lw=1.5, label="mean")
            axes.plot(px, py, ".", color="black", ms=4)
            axes.set_title(key, loc="left", fontsize=9)
            axes.set_ylim(-250, 250)
            axes.set(xlabel="x" if row else "", ylabel="" if k else "y")
            if row == k == 0:
                axes.legend(frameon=False, fontsize=7)
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("toy_cubic", run, given)
    names = list(runs[0][0])
    keys = {name: list(runs[0][0][name]) for name in names}
    each = {name: {key: [table[name][key] for table, _, _ in runs] for key in keys[name]} for name in names}
    mean = {name: {key: sum(values) / len(values) for key, values in row.items()} for name, row in each.items()}
    for row, values in zip(mean.values(), each.values()):
        for key in ("τ", "N"):
            if key in row:
                row[key] = torch.tensor(values[key]).log().mean().exp().item()
    rows = [{"method": name, **{key: spread(values) for key, values in each[name].items()}} for name in names]
    command = (
        f"python -m experiments.toy_cubic --seeds {given.seeds} --samples {given.samples} --warmup {given.warmup} "
    )
    command += f"--chains {given.chains} --depth {given.depth}"
    result = Result("toy_cubic", "Toy regression x³", "001, Figs. 1 and 8", command, list(seeds)).with_rows(rows)
    sizes = ", ".join(f"{name} {mean[name]['band inside']:.3g}" for name in names if "untuned" not in name)
    result = result.with_claims(*claims(mean)).with_sentence(f"Bands of the function at the data: {sizes}.")
    result = result.with_notes(
        "Bands are standard deviations of the function, without the noise, in the units of y; NLL is that of 1,000 "
        "test points. ± is the standard deviation over seeds.",
        f"HMC: {'; '.join(f'seed {seed}: {summary}' for seed, (_, _, summary) in zip(seeds, runs))}.",
        UNIDENTIFIED,
        "The paper draws 50,000 HMC samples, and computes the diagonal and the full Fisher matrix from one drawn "
        "target per point; here they are exact (`--factor mc` draws).",
    )
    curves = tensors(runs[0][1])
    result.with_data(scores=each, curves=curves).finish(given.out, lambda: figure(curves))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"steps": 200, "samples": 20, "warmup": 10, "chains": 1, "per_decade": 1, "draws": 20, "depth": 3},
        quick={"samples": 150, "warmup": 150, "chains": 2, "depth": 7},
        seeds=3,
    )
    parser.add_argument("--steps", type=int, default=3000, help="of Adam")
    parser.add_argument("--samples", type=int, default=300, help="HMC draws per chain")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--depth", type=int, default=7, help="doublings of an HMC trajectory at most")
    parser.add_argument("--per-decade", type=int, default=2, help="candidates of prior and N per decade")
    parser.add_argument("--draws", type=int, default=500, help="networks behind the bands of a Laplace posterior")
    parser.add_argument("--factor", choices=("ggn", "mc"), default="ggn", help="of the diagonal and full curvature")
    main(parser.parse_args())
