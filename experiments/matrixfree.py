"""Matrix-free posteriors on pretrained networks: solves, samples and evidence, with residuals and times.

LAPWING_DATA=... python experiments/matrixfree.py resnet20 --data 256 --rank 256
LAPWING_DATA=... python experiments/matrixfree.py llama --data 64
python experiments/matrixfree.py cost
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import lapwing
from lapwing.curvature import GGN
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.interfaces import datasets, networks
from lapwing.model import Batches, Network, Params
from lapwing.model.products import Products

warnings.filterwarnings("ignore", category=DeprecationWarning)


def resnet(depth: int, n: int) -> tuple[nn.Module, list, str]:
    data = datasets.images("cifar10", "train")[:n]
    x, y = networks.standardize(data.inputs), data.targets
    return networks.pretrained_resnet(depth), list(zip(x.split(64), y.split(64))), "classification"


def llama(n: int, length: int = 64) -> tuple[nn.Module, list, str]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(datasets.tinystories()).eval()
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(3, model.config.vocab_size, (n, 1), generator=generator)
    with torch.no_grad():
        torch.manual_seed(0)
        tokens = model.generate(start, max_length=length, min_length=length, do_sample=True, pad_token_id=0)
    return model, [{"input_ids": part, "labels": part} for part in tokens.split(16)], "classification"


def timed(what: str, run: Callable[[], object]) -> object:
    begin = time.perf_counter()
    result = run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"  {what:<34}{time.perf_counter() - begin:8.1f} s   peak {peak:.2f} GB", flush=True)
    return result


def report(model: nn.Module, data: list, likelihood: str, arguments: argparse.Namespace) -> None:
    structure = MatrixFree(
        rank=arguments.rank, probes=arguments.probes, steps=arguments.steps, tolerance=arguments.tolerance,
        unconverged="warn", sketch=arguments.sketch,
    )  # fmt: skip
    la = timed(
        "fit (sketch and log-determinant)",
        lambda: lapwing.fit(
            model, data, likelihood, structure=structure, prior=arguments.prior, factor=GGN(limit=10**9)
        ),
    )
    print(f"  {la.params.size:,} weights, {la.n_data:g} data, prior {arguments.prior:g}; {la.curvature.notes[-1]}")
    precision = la.posterior.precision
    ratio = precision.ratio_estimate()
    evidence = float(la.log_evidence())
    bar = 0.5 * float(ratio.error)
    print(f"  log evidence {evidence:.2f} ± {bar:.2g}; log|A|−log|Π| {float(ratio.value):.3f} ± {2 * bar:.2g}")
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2, la.params.size, generator=generator, dtype=torch.float64)
    found = timed("solve, 2 columns", lambda: precision.solution(v))
    print(f"  iterations {found.iterations}, products {found.products}, residuals {found.residuals.tolist()}")
    if arguments.samples:
        right = torch.randn(arguments.samples, la.params.size, generator=generator, dtype=torch.float64)

        def draw() -> object:
            root = float(arguments.prior) ** -0.5
            return precision._white_solution(right + root * precision.product.draw(arguments.samples, generator))

        found = timed(f"{arguments.samples} samples", draw)
        print(
            f"  iterations {found.iterations}, products {found.products}, "
            f"largest residual {float(found.residuals.max()):.2e}"
        )


def clock(products: Products, s: int) -> float:
    """CPU seconds of a gradient (s = 0) or of a GGN product with s vectors."""
    v = torch.randn(max(s, 1), products.network.params.size)
    seconds = []
    for _ in range(4):
        begin = time.process_time()
        if s:
            products.ggn(v, lambda batch, f, u: u)
        else:
            products.transposed(lambda batch, f: f[None], 1)
        seconds.append(time.process_time() - begin)
    return min(seconds)


def cost() -> None:
    """A GGN product in gradients, by time: one vector and eight."""
    for name, (model, data, _) in {"resnet20": resnet(20, 64), "llama": llama(16)}.items():
        names = tuple(n for n, _ in model.named_parameters())
        outputs = lambda raw: raw  # noqa: E731
        network = Network(model, Params.of(model, names), outputs)
        products = Products(network, Batches(data, model, torch.device("cpu")))
        seconds = {s: clock(products, s) for s in (0, 1, 8)}
        print(f"{name}: gradient {seconds[0]:.2f} s; product of 1 vector {seconds[1] / seconds[0]:.2f} gradients, "
              f"of 8 vectors {seconds[8] / seconds[0] / 8:.2f} each")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["resnet20", "llama", "cost"])
    parser.add_argument("--data", type=int, default=256)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prior", type=float, default=100.0)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--sketch", default="rows")
    arguments = parser.parse_args()
    if arguments.what == "cost":
        return cost()
    print(arguments)
    model, data, likelihood = resnet(20, arguments.data) if arguments.what == "resnet20" else llama(arguments.data)
    report(model, data, likelihood, arguments)


if __name__ == "__main__":
    main()
