"""What a posterior over the last layer costs, in forward passes: `python -m benchmarks.lastlayer [resnet20] [lenet]`.

Every figure is a ratio of CPU times in one process with one thread. The work and the forward pass it is compared with
take turns, and the ratio is that of their medians. `head` is the last layer of an ImageNet classifier, 2,048 → 1,000,
on made-up features; its memory is the peak of the process above what it had before the fit, and its predictions are
compared with three forward passes and 100 draws of the logits, with their accuracy beside them.
"""

import argparse
import math
import resource
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

import lapwing
from benchmarks.workloads import WORKLOADS
from lapwing.predictive.softmax import base_points

NETWORKS = ("resnet20", "lenet")
TARGETS = {"fit": 1.2, "64 images": 1.15, "one image, resnet20": 1.2, "one image, lenet": 2.0, "100 settings": 1.0}
DATA = {"resnet20": 1024, "lenet": 4928}
HELD_OUT = {"resnet20": 512, "lenet": 1024}
PRIORS = 1.0, 10.0, 100.0, 300.0  # of the head: from very wide to narrow
DRAWS = 100
REFERENCE, FEW = 20_000, 8  # points of the reference, and how many items have one


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.lastlayer", description=__doc__)
    top.add_argument("what", nargs="*", help=f"any of {', '.join(NETWORKS)}, head; all without a name")
    top.add_argument("--repeats", type=int, default=5)
    options = top.parse_args()
    torch.set_num_threads(1)
    for name in options.what or (*NETWORKS, "head"):
        if name == "head":
            head(options.repeats)
        else:
            network(name, options.repeats)


def network(name: str, repeats: int) -> None:
    """Print the ratios of one network with ten classes."""
    n = DATA[name]
    task = WORKLOADS[name](n + HELD_OUT[name], 1)
    x, y = (torch.cat(parts) for parts in zip(*task.batches, strict=True))
    batches, held = (
        list(zip(x[part].split(64), y[part].split(64), strict=True)) for part in (slice(0, n), slice(n, None))
    )
    model, new = task.model.eval(), x[n:]

    def say(what: str, work: Callable[[], object], base: Callable[[], object], times: int, limit: float) -> None:
        goal = f"  (target ≤ {limit:g})" if math.isfinite(limit) else ""
        print(f"{name:10}{what:46}{in_turns(work, base, times):7.2f}{goal}", flush=True)

    def epoch() -> None:
        for part, _ in batches:
            forward(model, part)

    def held_epoch() -> None:
        for part, _ in held:
            forward(model, part)

    for structure in ("kron", "full", "ekfac", "diag"):
        fit = lambda: fitted(model, batches, structure)  # noqa: B023, E731
        say(f"fit {structure}, in epochs", fit, epoch, max(2, repeats // 2), TARGETS["fit"])
    for structure in ("kron", "full"):
        wide = fitted(model, batches, structure)
        wide_images = lambda: answer(wide, new[:64])  # noqa: B023, E731
        say(
            f"predict {structure}, 64 images, untuned", wide_images, lambda: forward(model, new[:64]), repeats, math.inf
        )
        la = wide.tune(held)
        predictor = la.predictor("probs", "epistemic")
        for size, limit in ((64, TARGETS["64 images"]), (1, TARGETS[f"one image, {name}"])):
            few, times = new[:size], repeats * (20 if size == 1 else 5)
            label = f"{structure}, {size} image{'s' * (size > 1)}"
            say(f"predict {label}", lambda: answer(la, few), lambda: forward(model, few), times, limit)  # noqa: B023
            say(f"predictor {label}", lambda: predictor(few), lambda: forward(model, few), times, limit)  # noqa: B023
        few_settings, many = {"prior": grid(2), "temperature": (1.0,)}, {"prior": grid(102), "temperature": (1.0,)}
        tune = lambda settings: la.tune(held, learn=("prior", "temperature"), grid=settings)  # noqa: B023, E731
        base = cpu(held_epoch)
        one, hundred = (median(cpu(lambda: tune(s)) for _ in range(repeats)) for s in (few_settings, many))  # noqa: B023
        print(f"{name:10}{f'tune {structure}, in held-out epochs':46}{one / base:7.2f}")
        more = (hundred - one) / base
        print(f"{name:10}{'  100 settings more':46}{more:7.2f}  (target ≤ {TARGETS['100 settings']:g})")


def head(repeats: int, features: int = 2048, classes: int = 1000, n: int = 5000) -> None:
    """Print what a last layer of a thousand classes costs."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % classes
    centers = torch.randn(classes, features, generator=generator)
    x = centers[y] + 1.5 * torch.randn(n, features, generator=generator)
    model = nn.Sequential(nn.Identity(), nn.Linear(features, classes)).eval()
    with torch.no_grad():
        model[1].weight.copy_(centers / features**0.5)
    batches = list(zip(x.split(64), y.split(64), strict=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = cpu(lambda: fitted(model, batches, "kron"))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9
    print(f"head      fit kron of {n} feature vectors: {seconds:.1f} s, {peak:.2f} GB  (target ≤ 2 GB)", flush=True)
    la = fitted(model, batches, "kron")
    for prior in PRIORS:
        under = la.replace(prior=prior)
        predictor = under.predictor("probs", "epistemic")
        for size in (64, 1):
            few = x[:size]
            f, (left, spread, *_) = forward(model, few), under.predict(few).function.shared_root
            ahead, sketch = (
                partial(forward, model, few),
                partial(draws, f, left, spread, base_points(DRAWS, classes, f)),
            )
            for what, work in (("predict", partial(answer, under, few)), ("predictor", partial(predictor, few))):
                work(), ahead(), sketch()
                times = [(cpu(work), cpu(ahead), cpu(sketch)) for _ in range(repeats)]
                took, forwards, drawn = (1e3 * median(column) for column in zip(*times, strict=True))
                share = f"{took / (3 * forwards + drawn):.2f} × (3 forwards + draws)  (target ≤ 1)"
                base = f"forward {forwards:.2f} ms, {DRAWS} draws {drawn:.1f} ms"
                print(f"head      prior {prior:g}, {what} {size}: {took:.1f} ms; {base}: {share}", flush=True)
        distances(under, x[:FEW], f"head      prior {prior:g}")


@torch.no_grad()
def draws(f: Tensor, left: Tensor, spread: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and mutual information from so many points: what a sketch without an error would do."""
    log_p = ((points[:, None] * spread) @ left.mT + f).log_softmax(-1)
    p = log_p.exp()
    probs, aleatoric = p.mean(0), -(p * log_p).sum(-1).mean(0)
    return probs, torch.special.entr(probs).sum(-1) - aleatoric


def distances(la: lapwing.Laplace, x: Tensor, label: str) -> None:
    """Print how far probabilities and mutual information are from those of very many points, which state their error.

    The points are those of `predict(samples=...)`, each of which integrates every logit given the others.
    """
    ours, truth = la.predict(x), la.predict(x, samples=REFERENCE)
    left, spread, *_ = ours.function.shared_root
    sketch = draws(ours.function.mean, left, spread, base_points(DRAWS, left.shape[0], left))
    for what, (probs, epistemic) in (("ours", (ours.probs, ours.epistemic)), (f"{DRAWS} draws", sketch)):
        apart = (probs - truth.probs).abs().sum(-1).max() / 2
        gap = (epistemic - truth.epistemic).abs().max()
        print(f"{label}, {what}: total variation {float(apart):.4f}, mutual information off by {float(gap):.4f}")
    stated = (float(each.monte_carlo_error.max()) for each in (ours, truth))
    print(f"{label}, stated errors: ours {next(stated):.4f}, of {REFERENCE:,} points {next(stated):.4f}", flush=True)


def fitted(model: nn.Module, batches: list, structure: str) -> lapwing.Laplace:
    return lapwing.fit(model, batches, "classification", structure=structure, select="last_layer", progress=False)


def answer(la: lapwing.Laplace, x: Tensor) -> tuple[Tensor, Tensor]:
    p = la.predict(x)
    return p.probs, p.epistemic


@torch.no_grad()
def forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def grid(count: int) -> tuple[float, ...]:
    return tuple(torch.logspace(-2, 3, count, dtype=torch.float64).tolist())


def cpu(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def in_turns(work: Callable[[], object], base: Callable[[], object], times: int) -> float:
    """Return the ratio of the median CPU times of two pieces of work that take turns."""
    work(), base()
    found = [(cpu(work), cpu(base)) for _ in range(times)]
    return median(w for w, _ in found) / median(b for _, b in found)


if __name__ == "__main__":
    main()
