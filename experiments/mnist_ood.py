"""Good in and out of distribution at once: an MLP 784-200-200-10 on MNIST or Fashion-MNIST, tuned on held-out images.

    python -m experiments.mnist_ood mnist            # or fashion; --activation relu, --structure kron, --rule lowest

Trains on 55,000 images (20 epochs of Adam; cross-entropy with prior precision 1), tunes on the other 5,000 of the
training part, and prints for the MAP, for temperature scaling on the same 5,000 images and for the tuned posterior:
accuracy, NLL and ECE on the test images, then the AUROC of each score against three other data sets. Nothing is chosen
on test images. The trained network and the fit are kept in --cache.
Needs LAPWING_DATA.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from experiments._arguments import Experiment
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics

ABOUT = {"paper": "", "minutes": None, "page": "tuning.md"}

NAMES = ("mnist", "fashion", "kmnist", "notmnist")
TRAIN, BATCH, PRIOR = 55_000, 128, 1.0
SCORES = ("entropy", "mutual information", "max probability", "novelty")


def trained(data: datasets.Dataset, activation: str, path: Path, epochs: int, seed: int = 0) -> nn.Module:
    """The network at the mode of cross-entropy and prior, as far as the epochs bring it."""
    torch.manual_seed(seed)
    model = networks.mlp([784, 200, 200, 10], {"tanh": nn.Tanh, "relu": nn.ReLU}[activation])
    if path.exists():
        model.load_state_dict(load_file(path))
        return model.eval()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(data) // BATCH))
    for _ in range(epochs):
        for rows in torch.randperm(len(data)).split(BATCH)[: len(data) // BATCH]:
            optimizer.zero_grad()
            decay = 0.5 * PRIOR / len(data) * sum(p.square().sum() for p in model.parameters())
            (F.cross_entropy(model(data.inputs[rows]), data.targets[rows]) + decay).backward()
            optimizer.step()
            schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path)
    return model.eval()


def fitted(model: nn.Module, data: datasets.Dataset, structure: str, path: Path) -> lapwing.Laplace:
    if path.exists():
        return lapwing.load(path, model)
    batches = list(zip(data.inputs.split(1000), data.targets.split(1000)))
    la = lapwing.fit(model, batches, "classification", structure=structure, prior=PRIOR)
    la.save(path)
    return la


def scores(prediction: lapwing.Prediction) -> dict[str, Tensor]:
    """Each score of a batch, larger where the input looks stranger."""
    found = {"entropy": prediction.entropy, "max probability": -prediction.probs.amax(-1)}
    if prediction.score is not None:
        found |= {"mutual information": prediction.epistemic, "novelty": prediction.novelty}
    return found


def run(model: nn.Module | lapwing.Laplace, inputs: Tensor, divisor: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Probabilities and scores of all inputs."""
    probs, parts = [], []
    for x in inputs.split(500):
        if isinstance(model, lapwing.Laplace):
            prediction = model.predict(x)
            probs.append(prediction.probs)
            parts.append(scores(prediction))
        else:
            with torch.no_grad():
                p = (model(x) / divisor).softmax(-1)
            probs.append(p)
            parts.append({"entropy": metrics.entropy(p), "max probability": -p.amax(-1)})
    return torch.cat(probs), {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}


def line(name: str, probs: Tensor, targets: Tensor) -> str:
    return (
        f"{name:22s} accuracy {metrics.accuracy(probs, targets):.4f}  NLL {metrics.nll(probs, targets):.4f}  "
        f"ECE {metrics.ece(probs, targets):.4f}"
    )


def compare(models: dict[str, tuple], test: datasets.Dataset, outside: dict[str, Tensor]) -> None:
    """Print what each model does on the test images and how its scores tell other images from them."""
    for name, (model, divisor) in models.items():
        begin = time.perf_counter()
        probs, inside = run(model, test.inputs, divisor)
        others = {place: run(model, images, divisor)[1] for place, images in outside.items()}
        print(f"{line(name, probs, test.targets)}  ({time.perf_counter() - begin:.0f} s)")
        for score in (s for s in SCORES if s in inside):
            areas = "  ".join(f"{place} {metrics.auroc(inside[score], o[score]):.3f}" for place, o in others.items())
            print(f"    AUROC by {score:20s} {areas}", flush=True)


def main() -> None:
    parser = Experiment(__doc__, smoke={"train": 256, "validation": 100, "epochs": 1, "test": 100, "outside": 50})
    parser.add_argument("data", nargs="?", choices=("mnist", "fashion"), default="mnist")
    parser.add_argument("--activation", choices=("tanh", "relu"), default="tanh")
    parser.add_argument("--structure", default="ekfac")
    parser.add_argument("--rule", choices=("widest", "lowest"), default="widest")
    parser.add_argument("--train", type=int, default=TRAIN, help="training images")
    parser.add_argument("--validation", type=int, default=5_000, help="images to tune on")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--test", type=int, default=10_000, help="test images")
    parser.add_argument("--outside", type=int, default=2_000, help="images of each other data set")
    parser.add_argument("--cache", type=Path, default=Path(".cache/experiments"))
    options = parser.parse_args()
    train = datasets.images(options.data, "train")
    fit, validation = train[: options.train], train[TRAIN : TRAIN + options.validation]
    test = datasets.images(options.data, "test")[: options.test]
    outside = {n: datasets.images(n, "test").inputs[: options.outside] for n in NAMES if n != options.data}
    stem = options.cache / f"{options.data}-{options.activation}-0"
    model = trained(fit, options.activation, stem.with_suffix(".safetensors"), options.epochs)
    begin = time.perf_counter()
    la = fitted(model, fit, options.structure, stem.with_name(f"{stem.name}-{options.structure}.lapwing"))
    print(f"fit or load: {time.perf_counter() - begin:.0f} s", flush=True)
    held_out = (validation.inputs, validation.targets)
    scaled = lapwing.TemperatureScaled.fit(model, held_out)
    begin = time.perf_counter()
    la = la.tune(held_out, rule=options.rule)
    print(f"tune: {time.perf_counter() - begin:.0f} s\n{la.tuning.table(6)}\n", flush=True)  # type: ignore[union-attr]
    models = {"MAP": (model, 1.0), "temperature scaling": (model, scaled.temperature), "Laplace, tuned": (la, 1.0)}
    compare(models, test, outside)


if __name__ == "__main__":
    main()
