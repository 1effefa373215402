"""A wide residual network on CIFAR-10 (paper 001, Fig. 5 and Table 2): entropy of right and wrong classifications.

    python -m experiments.wide_resnet [--epochs 10] [--bfloat16] [--seeds 3] [--out docs/results]

A small wide residual network (Zagoruyko and Komodakis 2016), trained with and without dropout inside its blocks, stands
in for WRN-28-8 on CIFAR-100; larger ones run with --depth, --widen and --train. The network itself, MC dropout (where
there is dropout) and weights sampled from a Kronecker posterior (batch norms included, curvature from randomly cropped
and flipped images, prior and pseudo-observations chosen on validation images) classify test images. Printed are
accuracy and mean entropy of right and wrong classifications; the figure is their inverse ECDF. Needs LAPWING_DATA.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed, trained_once
from experiments._dropout_network import predicted
from experiments._results import Claim, Result, spread, verdict
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.baselines import DeepEnsemble, MCDropout

ABOUT = {"paper": "001, Fig. 5 and Table 2", "minutes": 9, "quick": 0.67}

BATCH = 100
DECAY = 5e-4
GRID = {"prior": (10.0, 100.0, 1000.0, 10_000.0), "temperature": (1.0, 10.0, 100.0, 1000.0)}
PAPER = "dropout: deterministic 79.12, MC dropout 79.20, Kronecker 79.10; without: deterministic 79.18, Kronecker 79.36"


class Block(nn.Module):
    """bn-relu-conv-(dropout)-bn-relu-conv plus a shortcut, which is a 2×2 convolution where the size changes."""

    def __init__(self, width: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, channels, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.dropout = nn.Dropout(dropout)
        kernel = 2 if stride == 2 else 1  # appendix G: no 1×1 convolutions with a stride
        change = stride != 1 or width != channels
        self.shortcut = nn.Conv2d(width, channels, kernel, stride, bias=False) if change else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.relu(self.norm2(self.dropout(h))))


def wide_resnet(depth: int, widen: int, dropout: float, classes: int = 10) -> nn.Sequential:
    """WRN-depth-widen, depth 6n + 4."""
    n, widths = (depth - 4) // 6, (16, 16 * widen, 32 * widen, 64 * widen)
    blocks = [
        Block(widths[g] if k == 0 else widths[g + 1], widths[g + 1], 2 if g and k == 0 else 1, dropout)
        for g in range(3)
        for k in range(n)
    ]
    head = (nn.BatchNorm2d(widths[3]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[3], classes))
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), *blocks, *head)


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Crop at random from four pixels of padding, and flip at random."""
    n, size = len(x), x.shape[-1]
    padded = F.pad(x, (4, 4, 4, 4))
    shift = torch.randint(9, (2, n), generator=generator)
    rows, columns = (torch.arange(size) + each[:, None] for each in shift)
    flip = torch.rand(n, generator=generator) < 0.5
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    return padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Augmented:
    """Images that are cropped and flipped anew in each of `passes` passes."""

    images: Tensor
    labels: Tensor
    passes: int
    seed: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.passes):
            for x, y in zip(self.images.split(BATCH), self.labels.split(BATCH)):
                yield augmented(x, generator), y

    def __len__(self) -> int:
        return self.passes * -(-len(self.images) // BATCH)


def trained(data: tuple[Tensor, Tensor], dropout: float, given: Any, seed: int) -> nn.Module:
    """SGD with Nesterov momentum 0.9, rate 0.1 lowered by a cosine, weight decay 5e-4, cropped and flipped images."""
    torch.manual_seed(seed)
    generator, (x, y) = torch.Generator().manual_seed(seed), data
    model = wide_resnet(given.depth, given.widen, dropout).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=DECAY)
    steps = given.epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=max(steps, 2))
    start = time.monotonic()
    for epoch in range(given.epochs):
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            seen = augmented(x[rows], generator).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=given.bfloat16):
                loss = F.cross_entropy(model(seen), y[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)
    return model.to(memory_format=torch.contiguous_format).eval()


Row = dict[str, float]
Entropies = dict[str, dict[str, Tensor]]


def run(seed: int, given: Any) -> tuple[dict[str, Row], Entropies, dict[str, str]]:
    """Scores and entropies by network and method, and what was chosen."""
    images, test = datasets.images("cifar10", "train"), datasets.images("cifar10", "test")
    part = images.split(given.train, generator=torch.Generator().manual_seed(seed))[0]
    x, y = networks.standardize(part.inputs), part.targets
    val = networks.standardize(test.inputs[: given.val]), test.targets[: given.val]  # first and last, as the paper
    judged = networks.standardize(test.inputs[-given.test :]), test.targets[-given.test :]
    grid = {key: values[-given.settings :] for key, values in GRID.items()}
    table, entropies, chosen = {}, {}, {}
    for dropout in (0.3, 0.0):
        told = {key: getattr(given, key) for key in ("depth", "widen", "train", "epochs", "bfloat16")}
        model = trained_once(
            given.cache, "wide-resnet", told | {"seed": seed, "dropout": dropout},
            wide_resnet(given.depth, given.widen, dropout),
            lambda dropout=dropout: trained((x, y), dropout, given, seed),
        )  # fmt: skip
        kind = "dropout" if dropout else "no dropout"
        methods: dict[str, Any] = {"deterministic": DeepEnsemble([model], "classification")}
        if dropout:
            methods["MC dropout"] = MCDropout(model, "classification", samples=given.samples)
        la = lapwing.fit(
            model, Augmented(x[: given.curvature], y[: given.curvature], given.passes, seed), "classification",
            structure="kron", prior=DECAY * len(x), n_data=len(x), progress=False,
        ).damping("factored")  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "sampled weights have lost")
            la = la.tune(
                val, predictive="sampled", grid=grid, learn=("prior", "temperature"), rule="lowest", progress=False
            )
        chosen[kind], methods["Kronecker"] = str(la.tuning and la.tuning.setting), la.ensemble(given.samples)
        print(f"{kind}: {chosen[kind]}", flush=True)
        for name, predictor in methods.items():
            probs = predicted(predictor, judged[0], "probs").double()
            right, entropy = probs.argmax(-1) == judged[1], torch.special.entr(probs).sum(-1)
            own = entropies[f"{kind}, {name}"] = {
                "right": entropy[right].sort().values, "wrong": entropy[~right].sort().values,
            }  # fmt: skip
            table[f"{kind}, {name}"] = {
                "accuracy %": 100 * right.double().mean().item(),
                "NLL": -probs.gather(1, judged[1][:, None]).clamp(min=1e-30).log().mean().item(),
                "entropy if right": own["right"].mean().item(),
                "entropy if wrong": own["wrong"].mean().item(),
                "AUROC of errors": lapwing.metrics.auroc(own["right"], own["wrong"]).item(),
            }
    return table, entropies, chosen


def claims(mean: Mapping[str, Row]) -> list[Claim]:
    told = lambda key: ", ".join(f"{name} {row[key]:.3g}" for name, row in mean.items())  # noqa: E731
    more = [
        mean[f"{kind}, {name}"][key] > mean[f"{kind}, deterministic"][key]
        for kind, name in (("dropout", "MC dropout"), ("dropout", "Kronecker"), ("no dropout", "Kronecker"))
        for key in ("entropy if right", "entropy if wrong")
    ]
    moved = {
        kind: mean[f"{kind}, Kronecker"]["accuracy %"] - mean[f"{kind}, deterministic"]["accuracy %"]
        for kind in ("dropout", "no dropout")
    }
    drop = [mean[f"dropout, {name}"] for name in ("MC dropout", "Kronecker")]
    near = [abs(drop[0][key] - drop[1][key]) < 0.2 * drop[0][key] for key in ("entropy if right", "entropy if wrong")]
    return [
        Claim(
            "In general, the network tends to be more uncertain on its misclassifications than its correct ones "
            "regardless of whether it was trained with or without Dropout and of the method used for prediction.",
            "section 5.4, Fig. 5",
            f"Mean entropy where wrong: {told('entropy if wrong')}; where right: {told('entropy if right')}.",
            verdict(all(row["entropy if wrong"] > row["entropy if right"] for row in mean.values())),
            "the mean entropy must be higher where predictions are wrong than where they are right, for all networks "
            "and methods.",
        ),
        Claim(
            "Both Dropout and the Laplace approximation similarly increase the uncertainty in the predictions, however "
            "this is irrespective of the correctness of the classification.",
            "section 5.4, Fig. 5",
            f"AUROC of errors by entropy: {told('AUROC of errors')}.",
            verdict(all(more), all(near)),
            "an increase for both methods, right and wrong; similar means within a fifth of the entropy on the network "
            "with dropout.",
        ),
        Claim(
            "Our experiments show that the Kronecker factored Laplace approximation can be scaled to modern "
            "convolutional networks and maintain good classification accuracy.",
            "section 5.4 and Table 2",
            f"Accuracies in percent: {told('accuracy %')} (the paper, CIFAR-100: {PAPER}). The Kronecker "
            f"posterior changes them by {', '.join(f'{each:+.1f} ({kind})' for kind, each in moved.items())}.",
            verdict(all(abs(each) < 1 for each in moved.values())),
            "the accuracy changes by less than one percent, up or down, with and without dropout.",
        ),
    ]


def figure(entropies: Entropies) -> Any:
    """The share of images whose entropy exceeds a value, for right (dashed) and wrong classifications."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(11, 4), layout="constrained")
    colors = {"deterministic": "C0", "MC dropout": "C1", "Kronecker": "C2"}
    for axes, kind in zip(canvas.subplots(1, 2, sharey=True), ("dropout", "no dropout")):
        for name, both in entropies.items():
            own, method = name.split(", ")
            if own != kind:
                continue
            for side, style in (("wrong", "-"), ("right", "--")):
                values = both[side]
                above = 1 - torch.arange(1, len(values) + 1) / max(len(values), 1)
                axes.plot(values, above, style, color=colors[method], label=f"{method}, {side}")
        axes.set(xlabel="predictive entropy (nats)", ylabel="share above", title=f"trained with {kind}")
        axes.legend(frameon=False, fontsize=8)
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("wide_resnet", run, given)
    each = {n: {key: [table[n][key] for table, _, _ in runs] for key in row} for n, row in runs[0][0].items()}
    mean = {n: {key: sum(values) / len(values) for key, values in row.items()} for n, row in each.items()}
    names = ("seeds", "depth", "widen", "train", "val", "test", "epochs", "curvature", "passes", "samples", "settings")
    result = Result(
        "wide_resnet",
        "A wide residual network: entropy of right and wrong classifications",
        "001, Fig. 5 and Table 2",
        "python -m experiments.wide_resnet "
        + " ".join(f"--{name} {getattr(given, name)}" for name in names)
        + (" --bfloat16" if given.bfloat16 else ""),
        list(seeds),
    )
    told = lambda key: ", ".join(f"{value:g}" for value in GRID[key][-given.settings :])  # noqa: E731
    settings = "; ".join(f"{kind}: {setting}" for kind, setting in runs[0][2].items())
    result = (
        result.with_rows([{"network, method": n, **{k: spread(v) for k, v in row.items()}} for n, row in each.items()])
        .with_claims(*claims(mean))
        .with_sentence(
            "Accuracy in percent, and AUROC of its errors by the entropy: "
            + "; ".join(f"{n} {row['accuracy %']:.1f}, {row['AUROC of errors']:.3f}" for n, row in mean.items())
            + "."
        )
        .with_notes(
            f"WRN-{given.depth}-{given.widen} on {given.train} images of CIFAR-10, {given.epochs} epochs, stands in "
            "for WRN-28-8 on all of CIFAR-100 for 200 epochs. Validation and test images are the first and the last of "
            "the test set, as in the paper.",
            f"Curvature from {given.passes} augmented draws of each of {given.curvature} images, rescaled to "
            f"{given.train} (the paper draws 5,000 per image). Chosen on validation images (seed {seeds[0]}): "
            f"{settings}.",
            f"Tried: prior precisions {told('prior')}; T {told('temperature')}.",
            f"An accuracy of {given.test} images has a standard error of at most {50 / given.test**0.5:.1f} points; "
            "methods are compared on the same images. ± is the standard deviation over seeds, where there are several."
            + (" Networks were trained in bfloat16 and predict in float32." if given.bfloat16 else ""),
        )
    )
    shown = {n: {s: v[:: max(1, len(v) // 200)] for s, v in both.items()} for n, both in runs[0][1].items()}
    result.with_data(scores=each, entropies=shown).finish(given.out, lambda: figure(runs[0][1]))


if __name__ == "__main__":
    tiny = {"train": 100, "val": 6, "test": 60, "epochs": 1, "curvature": 20, "passes": 1, "samples": 3, "settings": 1}
    parser = Experiment(
        __doc__,
        smoke=tiny,
        quick={
            "train": 1000, "val": 60, "test": 300, "epochs": 4, "curvature": 100, "passes": 1, "samples": 5,
            "settings": 2,
        },
    )  # fmt: skip
    add = parser.add_argument
    add("--depth", type=int, default=10, help="6n + 4 (the paper: 22, for n = 3)")
    add("--widen", type=int, default=1, help="(the paper: 8)")
    add("--bfloat16", action="store_true", help="train in bfloat16, which is faster where the processor knows it")
    add("--train", type=int, default=20_000, help="training images")
    add("--val", type=int, default=150, help="validation images: the first of the test set")
    add("--test", type=int, default=1000, help="test images: the last of the test set")
    add("--epochs", type=int, default=10, help="(the paper: 200)")
    add("--curvature", type=int, default=500, help="training images of which curvature is computed")
    add("--passes", type=int, default=1, help="augmented draws of each of them (the paper: 5,000)")
    add("--samples", type=int, default=10, help="networks or masks per prediction")
    add("--settings", type=int, default=3, help="of prior and T each that are tried, the strongest ones; at most four")
    main(parser.parse_args())
