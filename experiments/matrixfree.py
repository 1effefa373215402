"""Matrix-free posteriors on pretrained networks: solves, samples and evidence, with residuals and times.

LAPWING_DATA=... python -m experiments.matrixfree resnet20 --data 1000 --rank 256 --probes 4 --steps 4
LAPWING_DATA=... python -m experiments.matrixfree llama --data 256 --length 16 --prior 10000
LAPWING_DATA=... python -m experiments.matrixfree resnet18 --data 256 --tolerance 1e-2 --samples 2
LAPWING_DATA=... python -m experiments.matrixfree cost
LAPWING_DATA=... python -m experiments.matrixfree memory

Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from experiments._arguments import Experiment
from torch import nn

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.curvature import GGN
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.linalg.solvers import Solution
from lapwing.model import Batches, Network, Params
from lapwing.model.products import Products

ABOUT = {"paper": "003", "minutes": None, "page": "matrixfree.md"}

warnings.filterwarnings("ignore", category=DeprecationWarning)


def resnet(depth: int, n: int, batch: int = 64) -> tuple[nn.Module, list, str]:
    data = datasets.images("cifar10", "train")[:n]
    x, y = networks.standardize(data.inputs), data.targets
    return networks.pretrained_resnet(depth), list(zip(x.split(batch), y.split(batch))), "classification"


def llama(n: int, length: int = 64, batch: int = 64) -> tuple[nn.Module, list, str]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(datasets.tinystories()).eval()
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(3, model.config.vocab_size, (n, 1), generator=generator)
    with torch.no_grad():
        torch.manual_seed(0)
        tokens = model.generate(start, max_length=length, min_length=length, do_sample=True, pad_token_id=0)
    return model, [{"input_ids": part, "labels": part} for part in tokens.split(batch)], "classification"


def timed(what: str, run: Callable[[], object]) -> object:
    begin, wall = time.process_time(), time.perf_counter()
    result = run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    spent = f"{time.process_time() - begin:8.1f} s CPU {time.perf_counter() - wall:8.1f} s wall"
    print(f"  {what:<24}{spent}   peak {peak:.2f} GB", flush=True)
    return result


def resnet18(n: int) -> tuple[nn.Module, list, str]:
    """The benchmark's: 11,181,642 weights, one epoch of 4,096 CIFAR-10 images enlarged to 64 × 64."""
    from benchmarks import workloads

    task = workloads.resnet18(n, 1)
    return task.model, [pair for x, y in task.batches for pair in zip(x.split(32), y.split(32))], "classification"


def report(model: nn.Module, data: list, likelihood: str, arguments: argparse.Namespace) -> None:
    structure = MatrixFree(
        rank=arguments.rank, probes=arguments.probes, steps=arguments.steps, tolerance=arguments.tolerance,
        unconverged="warn", sketch=arguments.sketch, columns=arguments.columns,
    )  # fmt: skip
    options = {"structure": structure, "prior": arguments.prior, "factor": GGN(tolerance=arguments.leave)}
    la = timed("fit (sketch)", lambda: lapwing.fit(model, data, likelihood, **options))
    print(f"  {la.params.size:,} weights, {la.n_data:g} data, prior {arguments.prior:g}; {la.curvature.notes[-1]}")
    precision = la.posterior.precision
    generator = torch.Generator().manual_seed(0)
    if arguments.samples:
        right = torch.randn(arguments.samples, la.params.size, generator=generator, dtype=torch.float64)

        def draw() -> object:
            root = float(arguments.prior) ** -0.5
            return precision._white_solution(right + root * precision.product.draw(arguments.samples, generator))

        show(timed(f"{arguments.samples} samples", draw))
    if arguments.solves:
        v = torch.randn(arguments.solves, la.params.size, generator=generator, dtype=torch.float64)
        show(timed(f"solve, {arguments.solves} columns", lambda: precision.solution(v)))
    if arguments.probes > 1:
        evidence = float(timed("log evidence", la.log_evidence))
        ratio = precision.ratio_estimate()
        bar = 0.5 * float(ratio.error)
        print(
            f"  log evidence {evidence:.2f} ± {bar:.2g} ({bar / abs(evidence):.2%}); log|A|−log|Π| "
            f"{float(ratio.value):.3f} ± {2 * bar:.2g} ({2 * bar / float(ratio.value):.2%})"
        )


def show(found: Solution) -> None:
    residuals = " ".join(f"{r:.1e}" for r in found.residuals.tolist())
    print(f"  iterations {found.iterations}, products {found.products}, residuals {residuals}", flush=True)


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
    for name, (model, data, _) in {"resnet20": resnet(20, 64), "llama": llama(64, 32)}.items():
        names = tuple(n for n, _ in model.named_parameters())
        outputs = lambda raw: raw  # noqa: E731
        network = Network(model, Params.of(model, names), outputs)
        products = Products(network, Batches(data, model, torch.device("cpu")))
        seconds = {s: clock(products, s) for s in (0, 1, 8)}
        print(f"{name}: gradient {seconds[0]:.2f} s; product of 1 vector {seconds[1] / seconds[0]:.2f} gradients, "
              f"of 8 vectors {seconds[8] / seconds[0] / 8:.2f} each")  # fmt: skip


def memory() -> None:
    """Peak memory above the resting process, each in a process of its own: a gradient, a product of 1 and of 8."""
    for name in ("resnet20", "llama"):
        peaks = []
        for s in ("0", "1", "8"):
            command = [sys.executable, "-m", "experiments.matrixfree", "peak", "--network", name, "--data", s]
            peaks.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]))
        print(f"{name}: gradient {peaks[0]:.2f} GB; product of 1 vector {peaks[1] / peaks[0]:.2f} ×, "
              f"of 8 vectors {peaks[2] / peaks[0]:.2f} ×", flush=True)  # fmt: skip


def peak(name: str, s: int) -> None:
    model, data, _ = resnet(20, 256, 256) if name == "resnet20" else llama(64, batch=64)
    network = Network(model, Params.of(model, tuple(n for n, _ in model.named_parameters())), lambda raw: raw)
    products = Products(network, Batches(data, model, torch.device("cpu")))
    small = Products(network, Batches([_one(data[0])], model, torch.device("cpu")))
    v = torch.randn(max(s, 1), network.params.size)
    run = lambda p: p.ggn(v, lambda batch, f, u: u) if s else p.transposed(lambda batch, f: f[None], 1)  # noqa: E731
    for _ in range(2):
        run(small)  # libraries and caches
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak of loading
    before = _kilobytes("VmRSS")
    run(products)
    print((_kilobytes("VmHWM") - before) / 1e6)


def _kilobytes(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key))


def _one(batch: object) -> object:
    return {k: v[:1] for k, v in batch.items()} if isinstance(batch, dict) else tuple(t[:1] for t in batch)


def main() -> None:
    parser = Experiment(__doc__, smoke={
        "data": 8, "rank": 4, "probes": 2, "steps": 2, "samples": 2, "solves": 1, "columns": 2, "tolerance": 0.1,
    })  # fmt: skip
    kinds = ["resnet20", "resnet18", "llama", "cost", "memory", "peak"]
    parser.add_argument("what", nargs="?", choices=kinds, default="resnet20")
    parser.add_argument("--data", type=int, default=256)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prior", type=float, default=100.0)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--leave", type=float, help="share of the curvature in output space that samples may leave out")
    parser.add_argument("--sketch", default="rows")
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--solves", type=int, default=2)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    arguments = parser.parse_args()
    if arguments.what == "cost":
        return cost()
    if arguments.what == "memory":
        return memory()
    if arguments.what == "peak":
        return peak(arguments.network, arguments.data)
    print(arguments)
    make = {"resnet20": lambda n: resnet(20, n), "resnet18": resnet18, "llama": lambda n: llama(n, arguments.length)}[
        arguments.what
    ]
    model, data, likelihood = make(arguments.data)
    report(model, data, likelihood, arguments)


if __name__ == "__main__":
    main()
