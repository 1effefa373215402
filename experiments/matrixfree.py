"""Matrix-free posteriors on pretrained networks: solves, samples and evidence, with residuals and times.

    python -m experiments.matrixfree resnet20 --data 1000 --rank 256 --probes 4 --steps 4 [--out DIR]
    python -m experiments.matrixfree llama --data 256 --length 16 --prior 10000
    python -m experiments.matrixfree resnet18 --data 256 --tolerance 1e-2 --samples 2
    python -m experiments.matrixfree cost       # CPU time of a GGN product in gradients
    python -m experiments.matrixfree memory     # peak memory of a GGN product in gradients

The seed draws what is solved for and sampled. Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, verdict
from experiments._study import study, told
from torch import nn

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.curvature import GGN
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.linalg.solvers import Solution
from lapwing.model import Batches, Network, Params
from lapwing.model.products import Products

ABOUT = {"paper": "003", "minutes": 2.3, "quick": 0.2, "page": "without_a_matrix.md"}

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


def timed(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What a function returns, CPU seconds, and the peak memory of the process so far."""
    begin = time.process_time()
    result = run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return result, {"CPU s": time.process_time() - begin, "peak GB": peak}


def resnet18(n: int) -> tuple[nn.Module, list, str]:
    """The benchmark's: 11,181,642 weights, one epoch of 4,096 CIFAR-10 images enlarged to 64 × 64."""
    from benchmarks import workloads

    task = workloads.resnet18(n, 1)
    return task.model, [pair for x, y in task.batches for pair in zip(x.split(32), y.split(32))], "classification"


def solves(seed: int, given: argparse.Namespace) -> Scores:
    """Costs of fit, samples, solves and evidence on a pretrained network, with residuals."""
    makes = {"resnet20": lambda n: resnet(20, n), "resnet18": resnet18, "llama": lambda n: llama(n, given.length)}
    model, data, likelihood = makes[given.what](given.data)
    structure = MatrixFree(
        rank=given.rank, probes=given.probes, steps=given.steps, tolerance=given.tolerance, unconverged="warn",
        sketch=given.sketch, columns=given.columns,
    )  # fmt: skip
    options = {"structure": structure, "prior": given.prior, "factor": GGN(tolerance=given.leave)}
    la, spent = timed(lambda: lapwing.fit(model, data, likelihood, **options))
    rows, precision = {"fit (sketch)": spent}, la.posterior.precision
    generator = torch.Generator().manual_seed(seed)
    if given.samples:
        right = torch.randn(given.samples, la.params.size, generator=generator, dtype=torch.float64)

        def draw() -> Solution:
            root = float(given.prior) ** -0.5
            return precision._white_solution(right + root * precision.product.draw(given.samples, generator))

        found, spent = timed(draw)
        rows[f"{given.samples} samples"] = spent | solved(found)
    if given.solves:
        v = torch.randn(given.solves, la.params.size, generator=generator, dtype=torch.float64)
        found, spent = timed(lambda: precision.solution(v))
        rows[f"solve, {given.solves} columns"] = spent | solved(found)
    if given.probes > 1:
        evidence, spent = timed(la.log_evidence)
        bar = 0.5 * float(precision.ratio_estimate().error)
        rows["log evidence"] = spent | {"value": float(evidence), "error": bar}
    return rows


def solved(found: Solution) -> dict[str, float]:
    return {"iterations": float(found.iterations), "products": float(found.products),
            "residual": float(found.residuals.max())}  # fmt: skip


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


def cost(seed: int, given: argparse.Namespace) -> Scores:
    """CPU time of a GGN product in gradients: of one vector, and of eight per vector."""
    rows = {}
    for name, (model, data, _) in {"resnet20": resnet(20, 64), "llama": llama(64, 32)}.items():
        network = Network(model, Params.of(model, tuple(n for n, _ in model.named_parameters())), lambda raw: raw)
        products = Products(network, Batches(data, model, torch.device("cpu")))
        torch.manual_seed(seed)
        seconds = {s: clock(products, s) for s in (0, 1, 8)}
        rows[name] = {"gradient": seconds[0], "one vector": seconds[1] / seconds[0],
                      "eight, per vector": seconds[8] / seconds[0] / 8}  # fmt: skip
    return rows


def memory(seed: int, given: argparse.Namespace) -> Scores:
    """Peak memory above the resting process, each in a process of its own: a gradient in GB, products in gradients."""
    rows = {}
    for name in ("resnet20", "llama"):
        peaks = []
        for s in (0, 1, 8):
            command = [sys.executable, "-c", f"from experiments.matrixfree import peak; peak({name!r}, {s})"]
            peaks.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]))
        rows[name] = {"gradient": peaks[0], "one vector": peaks[1] / peaks[0], "eight": peaks[2] / peaks[0]}
    return rows


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


def judge(mean: Scores) -> list[Claim]:
    where = "But Matrix-Vector Products are cheap"
    one = {name: cells["one vector"] for name, cells in mean.items() if "one vector" in cells}
    if one:
        found = f"A product with one vector costs, in gradients: {told(one)}."
        cheap = verdict(*(value <= 4 for value in one.values()))
        return [Claim(where, "the slide of that title", found, cheap, "cheap means at most four gradients.")]
    residuals = {name: cells["residual"] for name, cells in mean.items() if "residual" in cells}
    steps = {name: cells["iterations"] for name, cells in mean.items() if "iterations" in cells}
    return [
        Claim(
            "We can use Iterative Solvers!",
            where,
            f"Iterations of conjugate gradients: {told(steps)}. Largest relative residuals: {told(residuals)}.",
            verdict(all(value < 1000 for value in steps.values()), all(value <= 1e-2 for value in residuals.values())),
            "two parts: fewer than 1,000 iterations, where a direct method needs as many as there are weights, and no "
            "relative residual above 1e-2.",
        )
    ]


def run(seed: int, given: argparse.Namespace) -> Scores:
    return {"cost": cost, "memory": memory}.get(given.what, solves)(seed, given)


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={
            "data": 8,
            "rank": 4,
            "probes": 2,
            "steps": 2,
            "samples": 2,
            "solves": 1,
            "columns": 2,
            "tolerance": 0.1,
        },
        quick={"data": 32, "rank": 32, "probes": 2, "samples": 2, "solves": 1, "tolerance": 1e-2},
        seeds=3,
    )
    kinds = ["resnet20", "resnet18", "llama", "cost", "memory"]
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
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    given = parser.parse_args()
    notes = [
        "Solves are preconditioned by the sketch of the fit. Where it has as many rows as there are images, it holds "
        "nearly all of the curvature, and few iterations are left; [preconditioners](preconditioners.md) says how many "
        "there are without it. The peak of memory is that of the process until then.",
        "A seed draws the right-hand sides and the samples; the images and the probes of the evidence do not change.",
    ][: 2 * (given.what not in ("cost", "memory"))]
    study("matrixfree", ABOUT, "Solves, samples and evidence without a matrix", run, judge, given, notes=notes)
