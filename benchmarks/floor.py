"""What no exact fit can go below: `python -m benchmarks.floor lenet resnet20`.

The exact curvature of C classes takes C − 1 backward passes to the outputs of all layers, one for each direction of the
softmax. This times them bare, by autograd alone, without anything that a structure does with what arrives, next to one
forward and one gradient epoch (CPU time, one thread, the best batch size of three). A fit also takes the gradient of
the log-likelihood, for the evidence away from a mode. A prediction with its covariance has C passes.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from benchmarks.workloads import WORKLOADS, Task
from lapwing.model.tape import run

SIZES = (32, 64, 128)


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__)
    top.add_argument("workload", nargs="+", choices=WORKLOADS)
    top.add_argument("--n", type=int, default=256)
    top.add_argument("--repeats", type=int, default=5)
    options = top.parse_args()
    torch.set_num_threads(1)
    for name in options.workload:
        task = WORKLOADS[name](options.n, 1)
        x, y = (torch.cat(parts) for parts in zip(*task.batches, strict=True))
        classes = task.model(x[:1]).shape[-1]
        epoch = timed(task.gradient, options.repeats)
        works = (partial(forward, task, x), partial(gradient, task, x, y), partial(direction, task, x))
        ahead, both, one = (min(timed(partial(w, size), options.repeats) for size in SIZES) / epoch for w in works)
        one -= ahead
        print(
            f"{name}: forward {ahead:.2f}, backward to all layers {one:.2f} each, gradient {both - ahead:.2f} epochs; "
            f"forward, {classes - 1} directions and gradient: {both + (classes - 1) * one:.2f} epochs; "
            f"forward and {classes} directions: {1 + classes * one / ahead:.1f} forward passes"
        )


def timed(work: Callable[[], None], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


@torch.no_grad()
def forward(task: Task, x: torch.Tensor, size: int) -> None:
    for part in x.split(size):
        task.model(part)


def gradient(task: Task, x: torch.Tensor, y: torch.Tensor, size: int) -> None:
    for part, targets in zip(x.split(size), y.split(size), strict=True):
        torch.autograd.grad(cross_entropy(task.model(part), targets), task.parameters)


def direction(task: Task, x: torch.Tensor, size: int) -> None:
    """A forward pass and one backward pass to the outputs of all operations with weights."""
    selected = dict(task.model.named_parameters())
    for part in x.split(size):
        finished = run(task.model, part, {n: p for n, p in selected.items() if p.requires_grad})
        edges = [record.edge for record in finished.records]
        torch.autograd.grad(finished.outputs, edges, torch.ones_like(finished.outputs))


if __name__ == "__main__":
    main()
