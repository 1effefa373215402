"""Training with the evidence beside an untuned network and a validation-tuned weight decay, and what each costs.

    python experiments/online.py [--data mnist|fashion] [--network lenet|mlp] [--size 1000] [--epochs 100] [--seeds 2]
    python experiments/online.py --overhead

The first prints test accuracy and NLL of LeNet-5 or an MLP 784-100-10 trained (a) without a prior, (b) with the weight
decay out of six that is best on a tenth of the training data, then retrained on all, (c) by `lapwing.train` on all, its
network and its linearized predictive; and CPU seconds. The second prints the CPU time of `lapwing.train` on all of
MNIST over that of the same loop without the evidence. Needs LAPWING_DATA.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from lapwing.interfaces import datasets, networks

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


def compare(name: str, network: str, size: int, epochs: int, seed: int) -> dict[str, tuple[float, float, float]]:
    train, test = datasets.images(name, "train"), datasets.images(name, "test")
    train = train.split(size, generator=torch.Generator().manual_seed(seed))[0]
    x, y = train.inputs, train.targets
    tx, ty = test.inputs, test.targets
    found, every = {}, 4 * -(-size // 128)

    start = time.process_time()
    model = plain(fresh(seed, network), x, y, epochs, 0.0, seed)
    found["no prior"] = (*network_score(model, tx, ty), time.process_time() - start)

    start, cut = time.process_time(), size * 9 // 10
    held = {}
    for decay in DECAYS:
        model = plain(fresh(seed, network), x[:cut], y[:cut], epochs, decay, seed)
        held[decay] = network_score(model, x[cut:], y[cut:])[1]
    best = min(held, key=held.__getitem__)
    model = plain(fresh(seed, network), x, y, epochs, best, seed)
    found["weight decay by validation"] = (*network_score(model, tx, ty), time.process_time() - start)

    start = time.process_time()
    trained = lapwing.train(fresh(seed, network), (x, y), "classification", epochs=epochs, progress=False, every=every)
    cost = time.process_time() - start
    found["train, network"] = (*network_score(trained.module.eval(), tx, ty), cost)
    start, few = time.process_time(), 1000
    probs = torch.cat([p.probs for p in trained.laplace.predict_loader(list(tx[:few].split(100)))])
    found[f"train, linearized (first {few})"] = (*score(probs.double(), ty[:few]), time.process_time() - start)
    found[f"train, network (first {few})"] = (*network_score(trained.module.eval(), tx[:few], ty[:few]), 0.0)
    last = trained.history[-1]
    print("validation NLL by decay: " + ", ".join(f"{decay:g} {value:.3f}" for decay, value in held.items()))
    print(f"seed {seed}: decay {best:g}; precisions {last.precision[0]:.3g} … {last.precision[1]:.3g}", flush=True)
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--network", default="mlp", choices=("lenet", "mlp"))
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--overhead", action="store_true")
    given = parser.parse_args()
    if given.overhead:
        overhead(min(given.epochs, 10))
        raise SystemExit
    rows: dict[str, list] = {}
    for seed in range(given.seeds):
        for key, value in compare(given.data, given.network, given.size, given.epochs, seed).items():
            rows.setdefault(key, []).append(value)
    what = f"{given.data}, {given.network}, {given.size} images, {given.epochs} epochs, {given.seeds} seeds"
    print(f"{what}: accuracy %, NLL, CPU s")
    for key, values in rows.items():
        mean = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
        print(f"{key:32s} {mean[0]:7.2f} {mean[1]:8.4f} {mean[2]:8.1f}")
