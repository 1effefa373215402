"""Training with the evidence beside an untuned network and a validation-tuned weight decay, and what each costs.

    python -m experiments.online [--data mnist|fashion] [--network lenet|mlp] [--size 1000] [--seeds 3] [--out DIR]
    python -m experiments.online --overhead

The first gives test accuracy and NLL of LeNet-5 or an MLP 784-100-10 trained (a) without a prior, (b) with the weight
decay out of six that is best on a tenth of the training data, then retrained on all, (c) by `lapwing.train` on all,
with precisions `--prior`; CPU seconds; and the differences to (a), paired by seed, each with its own images.
`--linearized` adds the posterior's predictive on the first 1,000 test images.
`--validation` scores on 10,000 other training images and other seeds instead, to choose settings. The second gives the
CPU time of `lapwing.train` on all of MNIST over that of the same loop without the evidence. Needs LAPWING_DATA.
"""

import argparse
import time

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, verdict
from experiments._results import Scores as Table
from experiments._study import study, told
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "002, Part I: evidence during training", "minutes": 0.98, "quick": 0.2, "page": "training.md"}

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
    return plain(fresh(seed, given.network), x, y, given.epochs, best, seed)


def compare(given: argparse.Namespace, seed: int) -> dict[str, tuple[float, float, float]]:
    """Accuracy, NLL and CPU seconds of each way to train."""
    x, y, tx, ty = parts(given, seed)
    found = {}

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
    return found


def overhead(seed: int, given: argparse.Namespace) -> Table:
    """CPU seconds of training on MNIST with the evidence, and of the same loop without it."""
    train = datasets.images("mnist", "train")
    train = train if given.size is None else train[: given.size]
    start = time.process_time()
    plain(fresh(seed), train.inputs, train.targets, given.epochs, 1e-5, seed)
    alone = time.process_time() - start
    start = time.process_time()
    lapwing.train(fresh(seed), (train.inputs, train.targets), "classification", epochs=given.epochs, progress=False)
    total = time.process_time() - start
    return {"plain loop": {"CPU s": alone, "ratio": 1.0}, "train": {"CPU s": total, "ratio": total / alone}}


def run(seed: int, given: argparse.Namespace) -> Table:
    if given.overhead:
        return overhead(seed, given)
    found = compare(given, seed)
    base, rows = found["no prior"], {}
    for name, (right, nll, spent) in found.items():
        gaps = {"accuracy − no prior": right - base[0], "NLL − no prior": nll - base[1]}
        rows[name] = {"accuracy (%)": right, "NLL": nll, "CPU s": spent, **gaps}
    return rows


def judge(mean: Table) -> list[Claim]:
    where, spent = "CIFAR-10 Classification", {name: cells["CPU s"] for name, cells in mean.items()}
    if "plain loop" in mean:
        ratio = mean["train"]["ratio"]
        rule, quote = "at most twice the CPU time of the same loop.", "in only 2x runtime"
        return [Claim(quote, where, f"Training takes {ratio:.2f} times the CPU time.", verdict(ratio <= 2), rule)]
    nll = {name: cells["NLL"] for name, cells in mean.items()}
    claims = [
        Claim(
            "MargLik generalizes better",
            where,
            f"Test NLL: {told(nll)}.",
            verdict(nll["train, network"] < nll["no prior"]),
            "the test NLL after training with the evidence is below that without a prior.",
        )
    ]
    tried = "weight decay by validation"
    if tried in nll:
        claims.append(
            Claim(
                "Validation-based selection requires many iterations",
                "Example: Gradient-Based Model Selection",
                f"CPU seconds: {told(spent)}. Test NLL: {told(nll)}.",
                verdict(spent["train, network"] < spent[tried], nll["train, network"] <= nll[tried]),
                "training with the evidence takes less CPU time than trying six weight decays, and its test NLL is not "
                "higher.",
            )
        )
    return claims


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"size": 100, "epochs": 1, "every": 1}, quick={"size": 500, "epochs": 40}, seeds=3
    )
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--network", default="mlp", choices=("lenet", "mlp"))
    parser.add_argument("--size", type=int, help="images; 1,000 to compare, all for --overhead")
    parser.add_argument("--epochs", type=int, help="100 to compare, 2 for --overhead")
    parser.add_argument("--prior", default="layerwise")
    parser.add_argument("--every", type=int, default=4, help="epochs between two steps of the evidence")
    parser.add_argument("--linearized", action="store_true")
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    given = parser.parse_args()
    given.epochs = given.epochs or (2 if given.overhead else 100)
    given.size = given.size or (None if given.overhead else 1000)
    study("online", ABOUT, "Training with the evidence", run, judge, given)
