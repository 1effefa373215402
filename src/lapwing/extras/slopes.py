"""What is between two layers of a network, for the recursion of KFRA: slopes per unit or channel, and how they act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import UnsupportedModel
from lapwing.model import Block, RecordedPass
from lapwing.model.calls import tolerance
from lapwing.model.linearization import pull


def refusal(why: str) -> UnsupportedModel:
    return UnsupportedModel(
        "factor KFRA is for linear layers and convolutions joined by elementwise functions, sums and pools, but "
        f"{why}. Use factor='ggn'."
    )


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer or convolution: its block, the record of its call, and its weight (out, channels · kernel)."""

    place: int
    block: Block
    record: int
    weight: Tensor

    @property
    def name(self) -> str:
        return ", ".join(self.block.names)

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """Columns of the weight, with the one of the bias."""
        assert self.block.shape is not None
        return self.block.shape[2]

    def single(self, at: RecordedPass) -> bool:
        """Whether the layer is a linear map of vectors, so that a sample may use it at one position only."""
        return at.matrix(self.record)[0].plain

    def outgoing(self, at: RecordedPass, g: Tensor) -> Tensor:
        """Return values at the outputs by sample, position and channel, (n, t, out)."""
        rule, call = at.matrix(self.record)
        return rule.left(call, g.reshape(1, *g.shape), at.samples(self.record), at.n)[:, 0, :, 0]


@dataclass(frozen=True, eq=False)
class Between:
    """How layer `second` reads layer `first`, through functions of single units, sums of branches and pools.

    A convolution, and a linear layer after a pool over all positions, reads `channels`: inputs have the channels of the
    first layer's outputs, at `places` positions. A linear layer after a flattened image is not of this kind: it has one
    input per channel and position (`flat`).
    """

    first: Layer
    second: Layer
    positions: int  # of the outputs of the first layer
    places: int  # of the inputs of the second layer
    flat: bool
    shares: Tensor  # of positions at which each place of the kernel lies on data, (kernel,)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of `products`."""
        return self.positions if self.flat else 1, self.first.outputs, self.first.outputs

    @property
    def single(self) -> bool:
        """Whether both layers have one position, so that nothing is averaged over positions."""
        return self.positions == self.places == len(self.shares) == 1

    def slopes(self, at: RecordedPass) -> Tensor:
        """Return b = ∂a/∂h by sample, position and channel of the first layer, (n, t, out); refuse what mixes them.

        Derivatives along paths through other selected layers do not count. Where every output acts on one input of its
        own channel, and only there, the product of ∂a/∂h with a vector of the channels is that with ones, times the
        vector, and a vector of signs changes signs alone.
        """
        a = at.matrix(self.second.record)[1].data
        generator = torch.Generator().manual_seed(0)
        signs = (torch.randint(2, a.shape, generator=generator) * 2 - 1).to(a)
        draw, expected = self._draw(at, a, generator)
        with _closed(at):
            edge = at.records[self.first.record].edge
            found = [pull(a, [edge], v)[0] for v in (torch.ones_like(a), draw, signs)]
        if any(g is None for g in found):
            raise refusal(f"{self.second.name} does not depend on {self.first.name} in every batch")
        b, drawn, signed = (self.first.outgoing(at, g) for g in found if g is not None)
        if not bool(b.sum().isfinite()):
            return b
        limit = tolerance([a.dtype]) * b.abs().amax((1, 2), keepdim=True)
        fine = ((drawn - b * expected).abs() <= 2 * limit).all() & ((signed.abs() - b.abs()).abs() <= limit).all()
        if not bool(fine):
            raise refusal(
                f"what is between {self.first.name} and {self.second.name} mixes units, or is a layer that was not "
                "selected"
            )
        return b

    def _draw(self, at: RecordedPass, a: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random inputs of the second layer, constant over positions, and what they are at the first's."""
        rule, call = at.matrix(self.second.record)
        if rule.plain:
            draw = (torch.rand(a.shape, dtype=torch.float64, generator=generator) + 0.5).to(a)
            units = rule.right(replace(call, inputs=(draw,)), at.samples(self.second.record), at.n)[:, 0, :, 0]
            return draw, units.reshape(at.n, self.first.outputs, -1).mT if self.flat else units
        channels = (torch.rand(*a.shape[:2], dtype=torch.float64, generator=generator) + 0.5).to(a)
        return channels.reshape(*a.shape[:2], *(1,) * (a.ndim - 2)).expand(a.shape), channels[:, None]

    def products(self, b: Tensor, weights: Tensor) -> Tensor:
        """Return Σ_n w Σ_t b bᵀ per place of the second layer, (1, out, out), or (t, out, out) for a flat one."""
        own = b * weights.to(b)[:, None, None]
        if self.flat:
            return own.permute(1, 2, 0) @ b.transpose(0, 1)
        return (own.flatten(0, 1).mT @ b.flatten(0, 1))[None] / self.places

    def pulled_back(self, left: Tensor, slopes: Tensor) -> Tensor:
        """Return the term of the second layer in B of the first, (out, out): Wᵀ B W ∘ E[b bᵀ], summed over places."""
        weight = self.second.weight.to(left)
        if self.flat:
            own = weight.reshape(len(weight), self.first.outputs, self.positions).permute(2, 0, 1)
            return ((own.mT @ left @ own) * slopes).sum(0)
        own = weight.reshape(len(weight), self.first.outputs, -1).permute(2, 0, 1)  # (kernel, out, channels)
        through = (self.shares.to(left)[:, None, None] * (own.mT @ left @ own)).sum(0)
        return through * slopes[0]


def between(at: RecordedPass, first: Layer, second: Layer) -> Between:
    """Describe how a layer reads another from one pass; `Between.slopes` checks it on every batch."""
    rule, call = at.matrix(second.record)
    mixes = refusal(f"what is between {first.name} and {second.name} mixes units, or is a layer that was not selected")
    positions = first.outgoing(at, at.records[first.record].out).shape[1]
    shares = rule.kernel_shares(call)
    assert shares is not None
    channels, odd = divmod(second.weight.shape[1], len(shares))
    assert not odd
    if rule.plain:
        flat = positions > 1 and channels == positions * first.outputs
        if not flat and channels != first.outputs:
            raise mixes
        return Between(first, second, positions, 1, flat, shares)
    if channels != first.outputs or len(call.data) != at.n:
        raise mixes
    return Between(first, second, positions, call.data.shape[2:].numel(), False, shares)


@contextmanager
def _closed(at: RecordedPass) -> Iterator[None]:
    """Let no derivative pass through a recorded layer: a pass back ends at the first one on every path."""

    def stop(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in grads)

    hooks = [record.edge.node.register_prehook(stop) for record in at.records]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
