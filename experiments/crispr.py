"""CRISPR-Cas13 knockdown: natural against mean–variance parameters, with and without evidence and posterior.

    python -m experiments.crispr [--data flow-cytometry|survival-screen] [--seeds 3] [--out docs/results]

Document 002, "Epistemic Uncertainty in Heteroscedastic Regression": predict how much a guide knocks a gene down from
its nucleotides (Wessels et al. 2020, processed by Stirn et al. 2023). One convolutional network of 9,500 weights; the
data are split 80/10/10 into training, validation and test at random by seed, and targets are standardized by the
training part. Methods: a homoscedastic network, β-NLL with β = ½ (Seitzer et al. 2022), and heteroscedastic networks
that emit (μ, log σ²) or natural parameters. Each is trained
- with the weight decay out of `--decays` with the best log-likelihood on the validation part ("decay"), or
- on its log joint with a prior per layer chosen by the evidence during training ("evidence", no validation part),
and predicts by the network alone or by the linearized Kronecker posterior ("+ Laplace"). Needs LAPWING_DATA.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._results import Claim, Result, gathered, spread, verdict
from torch import Tensor, nn

import lapwing
from experiments import _datasets as datasets
from lapwing.baselines import DeepEnsemble

ABOUT = {"paper": "002, Epistemic Uncertainty in Heteroscedastic Regression", "minutes": 3, "quick": 0.32}

KINDS = {"homoscedastic": 1, "mean–variance": 2, "natural": 2}
BETA = 0.5
WAYS = ("decay", "decay + Laplace", "evidence", "evidence + Laplace")
Pair = tuple[Tensor, Tensor]


def network(outputs: int, width: int) -> nn.Module:
    """Two convolutions over the 38 positions, pooling, one hidden layer."""
    return nn.Sequential(
        nn.Conv1d(4, width, 5), nn.GELU(), nn.Conv1d(width, width, 5), nn.GELU(), nn.AvgPool1d(2), nn.Flatten(),
        nn.Linear(15 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, outputs),
    )  # fmt: skip


def likelihood_of(kind: str, noise: float) -> Any:
    if kind == "homoscedastic":
        return lapwing.Gaussian(noise=noise)
    return lapwing.HeteroscedasticGaussian("natural" if kind == "natural" else "mean")


def loss_of(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss per point: squared error, NLL, or NLL times σ^(2β) without its gradient."""
    if kind == "homoscedastic":
        return lambda f, y: (f - y).square().sum(-1) / 2
    likelihood = likelihood_of(kind, 1.0)
    if kind != "β-NLL":
        return lambda f, y: -likelihood.log_prob(f, y)
    return lambda f, y: -likelihood.log_prob(f, y) * likelihood.moments(f)[1][:, 0].detach() ** BETA


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 3e-3)


def cosine(optimizer: Any, epochs: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, 1e-5)


def by_decay(kind: str, train: Pair, decay: float, seed: int, given: Any) -> nn.Module:
    """Adam on the mean loss plus decay/2·‖θ‖², that is, a prior precision of decay × the number of data."""
    torch.manual_seed(seed)
    model, loss = network(KINDS.get(kind, 2), given.width), loss_of(kind)
    generator = torch.Generator().manual_seed(seed)
    optimizer = adam(model.parameters())
    rates = cosine(optimizer, given.epochs)
    for _ in range(given.epochs):
        for rows in torch.randperm(len(train[1]), generator=generator).split(128):
            optimizer.zero_grad(set_to_none=True)
            value = loss(model(train[0][rows]), train[1][rows]).mean()
            (value + decay / 2 * sum(p.square().sum() for p in model.parameters())).backward()
            optimizer.step()
        rates.step()
    return model.eval()


def residual(model: nn.Module, pair: Pair) -> float:
    """The root mean squared error: the noise of a homoscedastic network."""
    with torch.no_grad():
        return (model(pair[0])[:, :1] - pair[1]).square().mean().sqrt().item()


def chosen(kind: str, train: Pair, val: Pair, seed: int, given: Any) -> tuple[nn.Module, Any, float]:
    """The network with the best validation log-likelihood, its likelihood and its decay."""
    best: tuple[float, nn.Module, Any, float] | None = None
    for decay in given.decays:
        model = by_decay(kind, train, decay, seed, given)
        likelihood = likelihood_of(kind, residual(model, val) if kind == "homoscedastic" else 1.0)
        score = DeepEnsemble([model], likelihood).predict(val[0]).log_prob(val[1]).mean().item()
        if math.isfinite(score) and (best is None or score > best[0]):
            best = score, model, likelihood, decay
    assert best is not None, "no decay gives a finite validation log-likelihood"
    return best[1], best[2], best[3]


def methods(train: Pair, val: Pair, seed: int, given: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """What predicts, by name, and the CPU seconds that its training took, with the search over decays."""
    found: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for kind in ("homoscedastic", "β-NLL", "mean–variance", "natural"):
        start = time.process_time()
        model, likelihood, decay = chosen(kind, train, val, seed, given)
        found[f"{kind}, decay"] = DeepEnsemble([model], likelihood)
        seconds[f"{kind}, decay"] = time.process_time() - start
        if kind == "β-NLL":  # its loss is no log-likelihood, so that it has no posterior of its own
            continue
        # a homoscedastic loss is ½(f − y)² = σ² · (−log p): the same minimum under the prior decay·n/σ²
        scale = likelihood.common_factor.item() if kind == "homoscedastic" else 1.0
        prior = max(decay, 1e-6) * len(train[1]) / scale
        found[f"{kind}, decay + Laplace"] = lapwing.fit(
            model, train, likelihood, structure="kron", prior=prior, progress=False
        )
        start = time.process_time()
        torch.manual_seed(seed)
        trained = lapwing.train(
            network(KINDS[kind], given.width), train, "regression" if kind == "homoscedastic" else likelihood,
            epochs=given.epochs, every=given.every * -(-len(train[1]) // 128), optimizer=adam, keep="last",
            scheduler=lambda optimizer: cosine(optimizer, given.epochs), samples=None, progress=False,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        seconds[f"{kind}, evidence"] = time.process_time() - start
        found[f"{kind}, evidence"] = DeepEnsemble([trained.module.eval()], trained.laplace.likelihood)
        found[f"{kind}, evidence + Laplace"] = trained.laplace
        print(f"seed {seed}: {kind}, decay {decay:g}", flush=True)
    return found, seconds


def run(seed: int, given: Any) -> dict[str, dict[str, float]]:
    """Scores by method on the test part, in the units of the data."""
    whole = datasets.crispr(given.data)
    few = min(len(whole), given.size)
    sizes = few * 8 // 10, few // 10, few // 10
    parts = whole.split(*sizes, generator=torch.Generator().manual_seed(seed))[:3]
    center, scale = parts[0].targets.mean(), parts[0].targets.std()
    train, val, test = ((part.inputs, (part.targets - center) / scale) for part in parts)
    found, seconds = methods(train, val, seed, given)
    table = {}
    for name, method in found.items():
        blocks = [method.predict(x) for x in test[0].split(200)]
        log_prob = torch.cat([p.log_prob(y) for p, y in zip(blocks, test[1].split(200))])
        mean, deviation = (torch.cat([getattr(p, part) for p in blocks]) for part in ("mean", "stddev"))
        low, median, high = (torch.cat([p.quantile(q) for p in blocks]) for q in (0.025, 0.5, 0.975))
        table[name] = {
            "log-likelihood": log_prob.mean().item() - scale.log().item(),
            "RMSE": (scale * (mean - test[1]).square().mean().sqrt()).item(),
            "RMSE of the median": (scale * (median - test[1]).square().mean().sqrt()).item(),
            "coverage of 95 %": 100 * ((low <= test[1]) & (test[1] <= high)).double().mean().item(),
            "largest stddev": (scale * deviation.max()).item(),
            "widest interval": (scale * (high - low).max()).item(),
        }
        if name in seconds:
            table[name]["training CPU s"] = seconds[name]
    return table


def claims(each: Mapping[str, Mapping[str, list[float]]], mean: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    def gain(better: str, worse: str) -> tuple[float, float]:
        """Mean difference of the log-likelihood, paired by seed, and its standard error."""
        pair = torch.tensor([each[name]["log-likelihood"] for name in (better, worse)], dtype=torch.float64)
        off = pair[0] - pair[1]
        return off.mean().item(), (off.std(correction=min(1, len(off) - 1)) / len(off) ** 0.5).item()

    def told(pairs: Mapping[str, tuple[float, float]]) -> str:
        return ", ".join(f"{name} {value:+.3g} ± {error:.1g}" for name, (value, error) in pairs.items())

    natural = {way: gain(f"natural, {way}", f"mean–variance, {way}") for way in WAYS}
    laplace = {
        f"{kind}, {way}": gain(f"{kind}, {way} + Laplace", f"{kind}, {way}")
        for kind in ("mean–variance", "natural")
        for way in ("decay", "evidence")
    }
    both = Claim(
        "→ Improvements due to both natural parameterization and Laplace",
        "Epistemic Uncertainty in Heteroscedastic Regression",
        f"Gain in test log-likelihood of natural over mean–variance parameters: {told(natural)}; of the posterior "
        f"predictive over the network alone: {told(laplace)} (± standard error over seeds).",
        verdict(
            *(natural[way][0] > 0 for way in ("decay", "evidence + Laplace")), *(v > 0 for v, _ in laplace.values())
        ),
        "natural must be better with a decay and no posterior, and with evidence and posterior; the posterior better "
        "than the network in all four pairs.",
    )
    evidence = {kind: gain(f"{kind}, evidence + Laplace", f"{kind}, decay") for kind in KINDS}
    alone = {kind: gain(f"{kind}, evidence", f"{kind}, decay") for kind in KINDS}
    chosen_by = Claim(
        "Can optimize high-dimensional hyperparameters without re-training",
        "Practical Bayesian Model Selection with Laplace",
        f"Gain in test log-likelihood of a prior per layer by the evidence over a searched decay: {told(alone)} for "
        f"the network, {told(evidence)} with the posterior predictive.",
        verdict(*(value > -error for value, error in alone.values())),
        "the network trained with the evidence, which sees no validation data, must not be worse than the one with the "
        "searched decay by a standard error, for all three kinds. (Posterior predictives are judged above.)",
    )
    ours = {name: row["log-likelihood"] for name, row in mean.items() if name.endswith("evidence + Laplace")}
    rivals = {"β-NLL": mean["β-NLL, decay"], "homoscedastic": mean["homoscedastic, decay"]}
    best = mean["natural, evidence + Laplace"]
    beats = Claim(
        "Objective balances mean and variance → Hard to optimize and regularize",
        "Estimating Heteroscedastic Aleatoric Uncertainty (its remedies: β-NLL, natural parameters)",
        f"Log-likelihood and RMSE: natural with evidence and Laplace {best['log-likelihood']:.3g}, {best['RMSE']:.3g}; "
        + "; ".join(f"{name} {row['log-likelihood']:.3g}, {row['RMSE']:.3g}" for name, row in rivals.items())
        + f"; mean–variance {mean['mean–variance, decay']['log-likelihood']:.3g}, "
        f"{mean['mean–variance, decay']['RMSE']:.3g}.",
        verdict(
            all(ours["natural, evidence + Laplace"] > row["log-likelihood"] for row in rivals.values()),
            all(best["RMSE"] <= row["RMSE"] * 1.02 for row in rivals.values()),
        ),
        "natural parameters remedy it where their log-likelihood is higher than that of β-NLL and of the homoscedastic "
        "network, and their RMSE at most 2 % above.",
    )
    return [both, chosen_by, beats]


def figure(each: Mapping[str, Mapping[str, list[float]]]) -> Any:
    """Log-likelihood and RMSE by method, one point per seed."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(11, 4.6))
    colors = {"homoscedastic": "#718096", "β-NLL": "#805ad5", "mean–variance": "#dd6b20", "natural": "#2b6cb0"}
    names = list(each)[::-1]
    for k, key in enumerate(("log-likelihood", "RMSE")):
        axes = canvas.add_subplot(1, 2, k + 1)
        for row, name in enumerate(names):
            values = torch.tensor(each[name][key])
            color = colors[name.partition(",")[0]]
            axes.plot(values, [row] * len(values), ".", color=color, alpha=0.5)
            axes.plot(values.mean(), row, "D", color=color, ms=6)
        axes.set_yticks(range(len(names)), names if k == 0 else [""] * len(names), fontsize=8)
        axes.set_xlabel(f"test {key}" + (" (more is better)" if k == 0 else " (less is better)"))
        axes.grid(axis="x", alpha=0.3)
        middle = sorted(float(torch.tensor(each[name][key]).mean()) for name in names)
        low, high = middle[1 if k == 0 else 0], middle[-1 if k == 0 else -2]
        pad = 0.15 * max(high - low, 1e-3)
        if k == 0:
            axes.set_xlim(left=min(low, middle[0]) - pad if middle[0] > low - 3 * (high - low) else low - 3 * pad)
        elif middle[-1] > high + 3 * (high - low):
            axes.set_xlim(right=high + 3 * pad)
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    each, mean = gathered(each_seed("crispr", run, given))
    rows = [{"method": n, **{key: spread(values) for key, values in row.items()}} for n, row in each.items()]
    command = f"python -m experiments.crispr --data {given.data} --seeds {given.seeds} --epochs {given.epochs}"
    command += f" --size {given.size}"
    ordered = sorted(mean, key=lambda name: -mean[name]["log-likelihood"])
    title = "CRISPR-Cas13 knockdown: heteroscedastic regression"
    result = (
        Result("crispr", title, ABOUT["paper"], f"{command} --width {given.width}", list(seeds))
        .with_rows(rows)
        .with_claims(*claims(each, mean))
        .with_sentence(
            f"Of {len(mean)} methods, “{ordered[0]}” has the highest test log-likelihood, "
            f"{mean[ordered[0]]['log-likelihood']:.3g}, and “{ordered[-1]}” the lowest, "
            f"{mean[ordered[-1]]['log-likelihood']:.3g}."
        )
        .with_notes(
            f"Data: {given.data} (HEK293); decays {', '.join(f'{d:g}' for d in given.decays)}, chosen on the "
            "validation part, which the evidence does not see. Log-likelihood and RMSE are in the units of the data "
            "(log fold change).",
            f"{given.size:,} of the guides take part, drawn by seed. Where the posterior hardly knows the noise of a "
            "guide, its predictive law in natural parameters has so heavy a tail that the mean is a poor guess; the "
            "median is not.",
            "Training CPU s of a decay is that of the whole search. ± is the standard deviation over seeds, each with "
            "its own split and network.",
            "“Largest stddev” is the largest standard deviation reported for a test guide, “widest interval” the "
            "widest 95 % interval: moments stay within the interval where natural parameters would make them explode.",
        )
    )
    result.with_data(scores=each).finish(given.out, lambda: figure(each))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"seeds": 1, "size": 300, "epochs": 2, "width": 4, "decays": [1e-3], "every": 1},
        quick={"seeds": 1, "size": 2000, "epochs": 15},
    )
    parser.set_defaults(seeds=3)
    parser.add_argument("--data", default="flow-cytometry", choices=("flow-cytometry", "survival-screen"))
    parser.add_argument("--size", type=int, default=3000, help="guides to take part, 5,635 or 9,985 at most")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=2, help="epochs between two steps of the evidence")
    parser.add_argument("--width", type=int, default=16, help="channels; the hidden layer has twice as many units")
    parser.add_argument("--decays", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2], help="for the validation part")
    main(parser.parse_args())
