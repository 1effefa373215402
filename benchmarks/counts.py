"""Multiplications of one sample, counted from the shapes of its layers: `python -m benchmarks.counts lenet resnet20`.

A layer that multiplies o × i weights at t positions takes t·o·i forward, as much for a backward pass to its inputs
(not that of the first layer), and as much again for the gradient of its weights. The exact curvature of C classes
takes C − 1 backward passes, of which one also brings the gradient; a covariance takes C of them. To these come, from
inputs a (t, i) and gradients g (r, t, o) of every layer, the rows Σ_t g ⊗ a where there are several positions, their
rotation into an eigenbasis on the cheaper side of that sum, and their products with each other; or, for Kronecker
factors, the products a aᵀ and g gᵀ at every position (expand: those of a without patches where that is cheaper).
"""

import argparse
from dataclasses import dataclass

import torch

from benchmarks.workloads import WORKLOADS, Task
from lapwing.likelihoods import Categorical
from lapwing.model import Linearization, Network, Params
from lapwing.model.rules.convolution import Convolution, band_cost, correlation_cost


@dataclass(frozen=True)
class Layer:
    """A weight of q groups of o × i numbers that meets t positions of a sample; `square` is what a aᵀ takes."""

    q: int
    o: int
    i: int
    t: int
    square: int

    @property
    def forward(self) -> int:
        return self.q * self.o * self.i * self.t

    def rows(self, r: int) -> int:
        return r * self.forward if self.t > 1 else 0

    def rotation(self, r: int) -> int:
        """Of gradients and inputs at every position, or of the rows."""
        before = self.t * (r * self.o**2 + self.i**2)
        return self.q * (min(before, r * self.o * self.i * (self.o + self.i)) if self.t > 1 else before)

    def products(self, r: int) -> int:
        return r**2 * self.q * self.o * (self.i if self.t > 1 else 1)

    def factors(self, r: int) -> int:
        return self.square + self.q * r * self.t * self.o**2


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=__doc__)
    top.add_argument("workload", nargs="+", choices=WORKLOADS)
    for name in top.parse_args().workload:
        print(f"{name}: " + described(*layers(WORKLOADS[name](1, 1))))


def layers(task: Task) -> tuple[list[Layer], int]:
    """Its layers in the order of a forward pass, and the number of outputs."""
    model = task.model
    names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    network = Network(model, Params.of(model, names), Categorical().outputs)
    with network.borrow():
        plan = network.plan(task.new[:1])
        at = network.linearize(plan, task.new[:1])
        found = []
        for block in plan.blocks:
            if block.kind == "matrix" and block.shape is not None:
                found.append(layer(at, block.uses[0][0], *block.shape))
        return found, at.f.shape[-1]


def layer(at: Linearization, record: int, q: int, o: int, i: int) -> Layer:
    rule, call = at.recorded.bound[record]
    t = rule.positions(call, 1)  # type: ignore[attr-defined]
    square = q * t * i**2
    if isinstance(rule, Convolution) and call.weight is not None:
        (height, width), options = call.weight.shape[2:], call.options
        if rule.correlates(call):
            square = correlation_cost(call.data.shape, (height, width), options["edges"])
        elif rule.banded(call):
            square = band_cost(call.data.shape, (height, width), t, options["stride"], options["edges"])
    return Layer(q, o, i, t, square)


def described(found: list[Layer], c: int) -> str:
    """In millions, and in forward passes or gradients."""
    ahead = sum(each.forward for each in found)
    back = ahead - found[0].forward
    gradient = 2 * ahead + back
    rows, turned, products = (
        sum(getattr(each, name)(c) for each in found) for name in ("rows", "rotation", "products")
    )
    whole = ahead + c * back + rows + turned + products
    exact = 2 * ahead + (c - 1) * back
    factors = sum(each.factors(c - 1) for each in found)
    moments = sum(each.rows(c - 1) + each.rotation(c - 1) for each in found)
    return (
        f"forward {_millions(ahead)}, gradient {_millions(gradient)}; a covariance: {c} backward passes "
        f"{_millions(c * back)}, rows {_millions(rows)}, rotation {_millions(turned)}, products {_millions(products)}, "
        f"in all {whole / ahead:.1f} forward passes; an exact fit: {c - 1} backward passes with a gradient "
        f"{exact / gradient:.1f} gradients, factors of the expand kind {factors / gradient:.1f} more, rows in an "
        f"eigenbasis {moments / gradient:.1f} more"
    )


def _millions(count: int) -> str:
    return f"{count / 1e6:.3g} M"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
