"""How good the predictions of both libraries are on the same network and data, each used as its README says.

    .venv-peers/bin/python -m benchmarks.quality                 # ResNet-20 and LeNet-5, last layer, kron; five splits

Half of the test images of a split tunes, the other half judges. laplace-torch is fitted with its defaults and tuned by
the evidence (`optimize_prior_precision(method="marglik")`, its README's way) or on the held-out half
(`method="gridsearch"` over 21 values); Lapwing by `la.tune()` and `la.tune(val)`. Prints NLL, ECE and AUROC of the
entropy against images from elsewhere (SVHN, KMNIST) as means over random halves with their standard deviations. Needs
LAPWING_DATA; without laplace-torch in the environment its rows are left out.
"""

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from benchmarks.workloads import lenet, resnet20
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics

Pair = tuple[Tensor, Tensor]
Predict = Callable[[Tensor], Tensor]


def loader(data: Pair) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data), batch_size=128)


def problems(test: int, train: int) -> Iterator[tuple[str, nn.Module, Pair, Pair, Tensor]]:
    """Name, network, training data, test data, and images from elsewhere."""
    cifar, svhn = datasets.images("cifar10", "test")[:test], datasets.images("svhn", "test")[:test]
    task = resnet20(train, 1)
    seen = datasets.images("cifar10", "train")[:train]
    inputs = networks.standardize
    yield (
        "ResNet-20", task.model, (inputs(seen.inputs), seen.targets), (inputs(cifar.inputs), cifar.targets),
        inputs(svhn.inputs),
    )  # fmt: skip
    task = lenet(train, 1)
    digits, kana = datasets.images("mnist", "test")[:test], datasets.images("kmnist", "test")[:test]
    seen = datasets.images("mnist", "train")[:train]
    yield "LeNet-5", task.model, (seen.inputs, seen.targets), (digits.inputs, digits.targets), kana.inputs


def network(model: nn.Module) -> Predict:
    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(part).softmax(-1) for part in x.split(500)])

    return predict


def ours(la: lapwing.Laplace) -> Predict:
    return lambda x: torch.cat([la.predict(part).probs for part in x.split(500)])


def theirs(model: nn.Module, train: Pair) -> Any:
    """laplace-torch as it is fitted by default: last layer, kron."""
    from laplace import Laplace

    la = Laplace(copy.deepcopy(model), "classification")
    la.fit(loader(train))
    return la


def called(la: Any) -> Predict:
    """Its default prediction: the linearized network with the probit link."""
    return lambda x: torch.cat([la(part).detach() for part in x.split(500)])


def ways(model: nn.Module, train: Pair, peer: bool) -> tuple[dict[str, Predict], dict[str, Callable[[Pair], Predict]]]:
    """Return predictions that need no held-out data, and those that are tuned on some."""
    la = lapwing.fit(model, loader(train), "classification", select="last_layer", structure="kron", progress=False)
    alone: dict[str, Predict] = {"the network": network(model), "Lapwing, la.tune()": ours(la.tune())}
    tuned: dict[str, Callable[[Pair], Predict]] = {"Lapwing, la.tune(val)": lambda val: ours(la.tune(loader(val)))}
    if peer:
        alone["laplace-torch, as fitted"] = called(theirs(model, train))
        other = theirs(model, train)
        other.optimize_prior_precision(method="marglik")
        alone["laplace-torch, marglik"] = called(other)

        def grid(val: Pair) -> Predict:
            found = theirs(model, train)
            found.optimize_prior_precision(method="gridsearch", val_loader=loader(val), grid_size=21)
            return called(found)

        tuned["laplace-torch, gridsearch on val"] = grid
    return alone, tuned


def judged(probs: Tensor, targets: Tensor, elsewhere: Tensor) -> tuple[float, float, float]:
    """NLL, ECE and the AUROC of the entropy."""
    return (
        float(metrics.nll(probs, targets)), float(metrics.ece(probs, targets)),
        float(metrics.auroc(metrics.entropy(probs), metrics.entropy(elsewhere))),
    )  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--test", type=int, default=4000, help="test images, halved by each split")
    options.add_argument("--train", type=int, default=4096, help="training images that the posteriors are fitted to")
    options.add_argument("--splits", type=int, default=5)
    asked = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        import laplace  # noqa: F401

        peer = True
    except ImportError:
        peer = False
    print("| network | predictions by | NLL | ECE | AUROC |\n| --- | --- | --- | --- | --- |")
    for name, model, train, (x, y), outside in problems(asked.test, asked.train):
        alone, tuned = ways(model, train, peer)
        found: dict[str, list[tuple[float, float, float]]] = {}
        same = {way: (predict(x), predict(outside)) for way, predict in alone.items()}
        for split in range(asked.splits):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(split))
            val, rest = order[: len(x) // 2], order[len(x) // 2 :]
            for way, (probs, elsewhere) in same.items():
                found.setdefault(way, []).append(judged(probs[rest], y[rest], elsewhere))
            for way, tune in tuned.items():
                predict = tune((x[val], y[val]))
                found.setdefault(way, []).append(judged(predict(x[rest]), y[rest], predict(outside)))
        for way, rows in found.items():
            mean, spread = torch.tensor(rows).mean(0), torch.tensor(rows).std(0)
            cells = [f"{m:.4f} ± {s:.4f}" for m, s in zip(mean.tolist(), spread.tolist())]
            print(f"| {name} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
