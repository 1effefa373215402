"""Training with the evidence beside an untuned network and a validation-tuned weight decay, and what each costs.

    python -m experiments.online [--data mnist|fashion] [--network lenet|mlp] [--size 1000] [--epochs 100] [--seeds 3]
    python -m experiments.online --overhead

The first prints test accuracy and NLL of LeNet-5 or an MLP 784-100-10 trained (a) without a prior, (b) with the weight
decay out of six that is best on a tenth of the training data, then retrained on all, (c) by `lapwing.train` on all,
with precisions `--prior`; CPU seconds; means and standard errors over seeds, each with its own images; and the
difference to (a), paired by seed. `--linearized` adds the posterior's predictive on the first 1,000 test images.
`--validation` scores on 10,000 other training images and other seeds instead, to choose settings. The second prints the
CPU time of `lapwing.train` on all of MNIST over that of the same loop without the evidence. Needs LAPWING_DATA.
"""

import argparse
import time

import torch
from experiments._arguments import Experiment
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "002, Part I: evidence during training", "minutes": None, "page": "training.md"}

DECAYS = (0.0, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def plain(model: nn.Module, x: Tensor, y: Tensor, epochs: int, decay: float, seed: int) -> nn.Module:
    """Adam on the mean cross-entropy plus decay/2·‖θ‖²."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=generator).split(128):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x[rows]), y[rows])
            if decay:
                loss = loss + 0.5 * decay * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
    return model.eval()


def fresh(seed: int, network: str = "lenet") -> nn.Module:
    torch.manual_seed(seed)
    return networks.lenet() if network == "lenet" else networks.mlp([784, 100, 10], nn.ReLU)


def score(probs: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy in percent and NLL."""
    right = (probs.argmax(1) == y).double().mean() * 100
    return right.item(), -probs[torch.arange(len(y)), y].clamp_min(1e-30).log().mean().item()


def network_score(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        return score(torch.cat([model(part).double().softmax(1) for part in x.split(1000)]), y)


Scores = dict[str, tuple[float, float, float]]


def parts(given: argparse.Namespace, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train and to score on."""
    whole = datasets.images(given.data, "train")
    generator = torch.Generator().manual_seed(seed + 100 * given.validation)
    train, rest = whole.split(given.size, 10_000, generator=generator)[:2]
    test = rest if given.validation else datasets.images(given.data, "test")
    return train.inputs, train.targets, test.inputs, test.targets


def by_validation(given: argparse.Namespace, x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """The decay with the best NLL on a tenth of the data, then trained on all."""
    cut, held = len(y) * 9 // 10, {}
    for decay in DECAYS:
        model = plain(fresh(seed, given.network), x[:cut], y[:cut], given.epochs, decay, seed)
        held[decay] = network_score(model, x[cut:], y[cut:])[1]
    best = min(held, key=held.__getitem__)
    print(f"seed {seed}: decay {best:g}; NLL by decay " + ", ".join(f"{d:g} {v:.3f}" for d, v in held.items()))
    return plain(fresh(seed, given.network), x, y, given.epochs, best, seed)


def compare(given: argparse.Namespace, seed: int) -> Scores:
    """Accuracy, NLL and CPU seconds of each way to train."""
    x, y, tx, ty = parts(given, seed)
    found: Scores = {}

    start = time.process_time()
    model = plain(fresh(seed, given.network), x, y, given.epochs, 0.0, seed)
    found["no prior"] = (*network_score(model, tx, ty), time.process_time() - start)

    if not given.validation:
        start = time.process_time()
        model = by_validation(given, x, y, seed)
        found["weight decay by validation"] = (*network_score(model, tx, ty), time.process_time() - start)

    start, every = time.process_time(), given.every * -(-given.size // 128)
    trained = lapwing.train(
        fresh(seed, given.network), (x, y), "classification", epochs=given.epochs, every=every, prior=given.prior,
        progress=False,
    )  # fmt: skip
    cost = time.process_time() - start
    model = trained.module.eval()
    found["train, network"] = (*network_score(model, tx, ty), cost)
    if given.linearized:
        start, few = time.process_time(), 1000
        probs = torch.cat([p.probs for p in trained.laplace.predict_loader(list(tx[:few].split(100)))])
        found[f"train, linearized (first {few})"] = (*score(probs.double(), ty[:few]), time.process_time() - start)
        found[f"train, network (first {few})"] = (*network_score(model, tx[:few], ty[:few]), 0.0)
    low, high = trained.history[-1].precision
    print(f"seed {seed}: precisions {low:.3g} … {high:.3g}", flush=True)
    return found


def overhead(epochs: int) -> None:
    train = datasets.images("mnist", "train")
    start = time.process_time()
    plain(fresh(0), train.inputs, train.targets, epochs, 1e-5, 0)
    alone = time.process_time() - start
    start = time.process_time()
    trained = lapwing.train(fresh(0), (train.inputs, train.targets), "classification", epochs=epochs, progress=False)
    total = time.process_time() - start
    print(f"{epochs} epochs: plain {alone:.1f} CPU s, train {total:.1f}, ratio {total / alone:.2f}")
    print(trained.table())


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"size": 100, "epochs": 1, "seeds": 1, "every": 1})
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--network", default="mlp", choices=("lenet", "mlp"))
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prior", default="layerwise")
    parser.add_argument("--every", type=int, default=4, help="epochs between two steps of the evidence")
    parser.add_argument("--linearized", action="store_true")
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    given = parser.parse_args()
    if given.overhead:
        overhead(min(given.epochs, 10))
        raise SystemExit
    rows: dict[str, list] = {}
    for seed in range(given.seeds):
        for key, value in compare(given, seed).items():
            rows.setdefault(key, []).append(value)
    what = f"{given.data}, {given.network}, {given.size} images, {given.epochs} epochs, {given.seeds} seeds"
    print(f"{what}: accuracy %, NLL, CPU s; differences to no prior")
    base = torch.tensor(rows["no prior"], dtype=torch.float64)
    for key, values in rows.items():
        table = torch.tensor(values, dtype=torch.float64)
        root, correction = len(table) ** 0.5, min(1, len(table) - 1)
        mean, error = table.mean(0).tolist(), (table.std(0, correction=correction) / root).tolist()
        gain, doubt = (table - base).mean(0).tolist(), ((table - base).std(0, correction=correction) / root).tolist()
        print(
            f"{key:32s} {mean[0]:6.2f} ± {error[0]:.2f}  {mean[1]:.4f} ± {error[1]:.4f}  {mean[2]:6.1f};  "
            f"{gain[0]:+.2f} ± {doubt[0]:.2f}  {gain[1]:+.4f} ± {doubt[1]:.4f}"
        )
