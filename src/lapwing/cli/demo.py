"""`lapwing demo`: train a network on real data, give it a posterior, and write a report."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lapwing.baselines.temperature import TemperatureScaled
from lapwing.cli import datasets
from lapwing.cli.command import Answer, Command
from lapwing.cli.datasets import Dataset
from lapwing.evaluation.evaluate import evaluate
from lapwing.evaluation.report import Report
from lapwing.fitting import fit
from lapwing.laplace import Laplace


def lenet(classes: int = 10) -> nn.Sequential:
    """Return LeNet-5 for 28×28 images of one channel, 61,706 weights (LeCun et al. 1998, with ReLU and max pooling)."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
    )  # fmt: skip


def small_cnn(classes: int = 10) -> nn.Sequential:
    """Return the network of `lapwing demo`: two convolutions and two linear layers for 8×8 images of one channel."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip


CLOTHES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Scenario:
    """Data in four parts, a network for them, and how long it is trained.

    The curvature is computed from the first `fitted` training items (None: from all), and scaled to all of them.
    """

    title: str
    train: Dataset
    validation: Dataset
    test: Dataset
    outside: Dataset
    outside_name: str
    network: Callable[[], nn.Module]
    epochs: int
    batch: int
    fitted: int | None = None
    classes: tuple[str, ...] = ()


def digits(generator: torch.Generator) -> Scenario:
    """Return digits 0 to 7 of scikit-learn's 8×8 digits to train on, with 8 and 9 outside."""
    data = datasets.digits()
    # few items to train on, so that predictions are uncertain, and enough held out to tune and to test
    train, validation, test = data[data.targets < 8].split(300, 400, generator=generator)
    return Scenario(
        title="Handwritten digits 0–7 (8×8)",
        train=train,
        validation=validation,
        test=test,
        outside=data[data.targets >= 8],
        outside_name="digits 8 and 9",
        network=lambda: small_cnn(8),
        epochs=150,
        batch=32,
    )


def mnist(generator: torch.Generator) -> Scenario:
    """Return MNIST, with the letters of notMNIST outside."""
    return _idx("mnist", "MNIST", "notmnist", "notMNIST", generator)


def fashion(generator: torch.Generator) -> Scenario:
    """Return Fashion-MNIST, with the digits of MNIST outside."""
    return _idx("fashion", "Fashion-MNIST", "mnist", "MNIST", generator)


def _idx(name: str, title: str, outside: str, outside_name: str, generator: torch.Generator) -> Scenario:
    train, validation = datasets.images(name, "train").split(55_000, 5_000, generator=generator)
    return Scenario(
        title=title,
        train=train,
        validation=validation,
        test=datasets.images(name, "test"),
        outside=datasets.images(outside, "test"),
        outside_name=outside_name,
        network=lenet,
        epochs=3,
        batch=128,
        fitted=10_000,
        classes=CLOTHES if name == "fashion" else (),
    )


SCENARIOS: dict[str, Callable[[torch.Generator], Scenario]] = {"digits": digits, "mnist": mnist, "fashion": fashion}


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: networks this small gain little from a second one, and on a busy machine waiting for it
    makes them ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr)


@one_thread()
def run(data: str, out: Path, *, seed: int = 0) -> Report:
    """Train, fit, tune and compare; print a table, write `out`/report.html and return the report."""
    out.mkdir(parents=True, exist_ok=True)
    scenario = SCENARIOS[data](torch.Generator().manual_seed(seed))
    sizes = (len(part) for part in (scenario.train, scenario.validation, scenario.test, scenario.outside))
    counts = "{:,} to train, {:,} to validate, {:,} to test; outside: {:,} of {}".format(*sizes, scenario.outside_name)
    _say(f"{scenario.title}: {counts}")
    model = train_network(scenario, seed)
    validation = (scenario.validation.inputs, scenario.validation.targets)
    scaled = TemperatureScaled.fit(model, validation)
    laplace = posterior(model, scenario)
    _say("tuning prior and temperature on the validation part …")
    laplace = laplace.tune(validation)
    assert laplace.tuning is not None
    report = evaluate(
        {"MAP": model, "MAP + temperature": scaled, "Laplace": laplace},
        (scenario.test.inputs, scenario.test.targets),
        ood={scenario.outside_name: scenario.outside.inputs},
        train=(scenario.train.inputs[: scenario.fitted], scenario.train.targets[: scenario.fitted]),
        classes=scenario.classes,
        progress=True,
    )
    print("\n".join(report.findings()))
    print(f"\n{report.table('accuracy', 'nll', 'ece', f'auroc {scenario.outside_name}')}\n")
    weights = sum(p.numel() for p in model.parameters())
    notes = (
        f"A network of {weights:,} weights. {counts}.",
        f"Temperature scaling found T = {scaled.temperature:.3f}. The posterior has the structure "
        f"{laplace.curvature.structure.name}; tuning on the validation part chose: {laplace.tuning.setting}.",
    )
    facts = {"seed": f"{seed}, of the split, the training and all draws", "command": "lapwing demo"}
    path = report.to_html(out / "report.html", heading=f"Lapwing demo: {scenario.title}", notes=notes, facts=facts)
    print(f"The report with its pictures: {path}")
    return report


def posterior(model: nn.Module, scenario: Scenario) -> Laplace:
    """Fit the posterior with its untuned prior."""
    part = scenario.train[: scenario.fitted]
    n = len(scenario.train)
    if len(part) < n:
        _say(f"curvature from {len(part):,} of the training items, standing for {n:,}")
    return fit(model, (part.inputs, part.targets), "classification", n_data=n, progress=True)


def train_network(scenario: Scenario, seed: int) -> nn.Module:
    """Train the MAP network with Adam, weight decay and a cosine schedule."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = scenario.network()
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(scenario.train.inputs, scenario.train.targets)
    loader = DataLoader(data, scenario.batch, shuffle=True, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    steps = scenario.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with tqdm(total=steps, desc="train", unit="step") as bar:
        for _ in range(scenario.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                schedule.step()
                bar.update()
    return model.eval()


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--data",
        choices=sorted(SCENARIOS),
        default="digits",
        help="digits: the 8×8 digits of scikit-learn without 8 and 9 (default); mnist, fashion: from LAPWING_DATA",
    )
    add("--out", type=Path, default=Path("demo-output"), help="folder for the report (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split, the training and all draws (default: %(default)s)")


def _run(options: argparse.Namespace) -> Answer:
    report = run(options.data, options.out, seed=options.seed)
    return {"out": options.out / "report.html", "data": options.data, "seed": options.seed, **report.to_dict()}


COMMAND = Command(
    "demo",
    "train a small network, fit a posterior, print a table, write an HTML report",
    "Train a small network on real data, fit and tune a posterior, compare it with the network alone and with "
    "temperature scaling, and write an HTML report.",
    "lapwing demo --data digits --out demo-output",
    _options,
    _run,
)
