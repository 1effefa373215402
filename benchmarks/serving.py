"""What fits and predictions cost a server, beside laplace-torch.

    .venv-peers/bin/python -m benchmarks.serving [--repeats 3] [lenet] [head]

Both libraries run in one process with one thread and take turns on the same tensors; figures are medians of CPU times
in milliseconds, and a ratio above 1 means that Lapwing is faster. `lenet` has ten classes, `head` is a last layer with
a thousand. Probabilities by laplace-torch come from its default link, the probit approximation; Lapwing's come from the
integral itself, with the mutual information, under a tuned prior (a wide posterior takes longer). A prediction that
would make laplace-torch write out a Jacobian of more than 8 GB is not run, and its size is shown instead.
"""

import argparse
import copy
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import lapwing
from benchmarks.laplace_torch import imported
from benchmarks.lastlayer import answer, cpu, forward, grid
from benchmarks.workloads import WORKLOADS

LARGEST = 8e9  # bytes of a Jacobian that is still written out
FEATURES, CLASSES, DATA = 64, 1000, 128  # of `head`: few, since an exact fit by laplace-torch takes long here
MEMBERS = 10

Work = Callable[[], object]


class Batches:
    """Batches as laplace-torch reads them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.batches = list(zip(x.split(64), y.split(64), strict=True))
        self.dataset = range(len(y))

    def __iter__(self) -> Any:
        return iter(self.batches)


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    top.add_argument("what", nargs="*", help="lenet, head; both without a name")
    top.add_argument("--repeats", type=int, default=3)
    options = top.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| what | forward, ms | Lapwing, ms | laplace-torch, ms | ratio |\n|---|---|---|---|---|")
    for name in options.what or ("lenet", "head"):
        {"lenet": lenet, "head": head}[name](options.repeats)


def lenet(repeats: int) -> None:
    """Ten classes: the last layer, an ensemble of ten over all weights, and a distilled predictor."""
    task = WORKLOADS["lenet"](1536, 1)
    x, y = (torch.cat(parts) for parts in zip(*task.batches, strict=True))
    model, train, held = task.model.eval(), Batches(x[:1024], y[:1024]), Batches(x[1024:], y[1024:])
    for structure in ("kron", "full"):
        last_layer(f"LeNet-5, last layer, {structure}", model, structure, train, held, repeats)
    ours = lapwing.fit(model, train.batches, "classification", structure="kron", progress=False).tune(held.batches)
    theirs = peer(model, "all", "kron", train)
    members, fast = ours.ensemble(MEMBERS), ours.distill(x[:500])
    for size in (64, 1):
        new = x[:size]
        base = lambda: forward(model, new)  # noqa: B023, E731
        sampled = lambda: theirs(new, pred_type="nn", link_approx="mc", n_samples=MEMBERS)  # noqa: B023, E731
        whole = lambda: theirs(new, pred_type="glm", link_approx="probit")  # noqa: B023, E731
        drawn, label = lambda: members.predict(new).probs, f"ensemble of {MEMBERS}"  # noqa: B023
        say(f"LeNet-5, all weights, {label}, batch {size}", drawn, sampled, base, repeats)
        say(f"LeNet-5, all weights, predict, batch {size}", lambda: answer(ours, new), whole, base, repeats)  # noqa: B023
        say(f"LeNet-5, distilled predictor, batch {size}", lambda: answer(fast, new), whole, base, repeats)  # noqa: B023


def head(repeats: int) -> None:
    """A thousand classes on made-up features."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(2 * DATA) % CLASSES
    centers = torch.randn(CLASSES, FEATURES, generator=generator)
    x = centers[y] + 1.5 * torch.randn(len(y), FEATURES, generator=generator)
    model = nn.Sequential(nn.Identity(), nn.Linear(FEATURES, CLASSES)).eval()
    with torch.no_grad():
        model[1].weight.copy_(centers / FEATURES**0.5)
    train, held = Batches(x[:DATA], y[:DATA]), Batches(x[DATA:], y[DATA:])
    last_layer(f"head {FEATURES} → {CLASSES:,}, kron", model, "kron", train, held, repeats)


def last_layer(name: str, model: nn.Module, structure: str, train: Batches, held: Batches, repeats: int) -> None:
    """Fit, predict and tune with both libraries."""

    def epoch(batches: Batches) -> Work:
        return lambda: [forward(model, x) for x, _ in batches]

    def fit() -> lapwing.Laplace:
        options: dict[str, Any] = {"structure": structure, "select": "last_layer", "progress": False}
        return lapwing.fit(model, train.batches, "classification", **options)

    say(f"{name}, fit", fit, lambda: peer(model, "last_layer", structure, train), epoch(train), repeats)
    ours, theirs = fit(), peer(model, "last_layer", structure, train)
    jacobian = 4.0 * model(train.batches[0][0][:1]).shape[-1] * ours.params.size
    say(
        f"{name}, tune, 21 priors on held-out data",
        lambda: ours.tune(held.batches, learn=("prior",), grid={"prior": grid(21)}),
        lambda: theirs.optimize_prior_precision(
            method="gridsearch", pred_type="glm", link_approx="probit", val_loader=held, grid_size=21
        ),
        epoch(held),
        1,
        64 * jacobian,
    )
    ours = ours.tune(held.batches)
    for size in (64, 1):
        new = train.batches[0][0][:size]
        probs = lambda: theirs(new, pred_type="glm", link_approx="probit")  # noqa: B023, E731
        ahead, label = lambda: forward(model, new), f"{name}, predict, batch {size}"  # noqa: B023
        say(label, lambda: answer(ours, new), probs, ahead, 5 * repeats, size * jacobian)  # noqa: B023


def peer(model: nn.Module, select: str, structure: str, train: Batches) -> Any:
    """Fit the same posterior with laplace-torch and the exact GGN of its default backend."""
    Laplace, CurvlinopsGGN = imported()
    la = Laplace(
        copy.deepcopy(model),  # it writes to the module it is given
        "classification",
        subset_of_weights=select,
        hessian_structure=structure,
        backend=CurvlinopsGGN,
    )
    la.fit(train)
    return la


def say(what: str, ours: Work, theirs: Work, base: Work, repeats: int, bytes_asked: float = 0.0) -> None:
    """Print one row: all three take turns after a run to warm up; `bytes_asked` are those of the peer's Jacobian."""
    works = [base, ours, *([theirs] if bytes_asked <= LARGEST else [])]
    if repeats > 1:
        for work in works:
            work()
    times = [[cpu(work) for work in works] for _ in range(repeats)]
    ahead, own, *other = (1e3 * median(column) for column in zip(*times, strict=True))
    shown = f"{other[0]:.2f} | {other[0] / own:.1f}" if other else f"a Jacobian of {bytes_asked / 1e9:.0f} GB | –"
    print(f"| {what} | {ahead:.2f} | {own:.2f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
