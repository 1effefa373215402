"""KFRA: Kronecker factors of a network, with output factors from a recursion over its layers.

Botev, Ritter, Barber (2017), "Practical Gauss–Newton optimisation for deep learning"; Ritter, Botev, Barber (2018), "A
scalable Laplace approximation for neural networks", Eq. 15 in expectation and without D, as Gauss–Newton has it, with
convolutions and residual joins as in its appendix G. `Between` is what is between two layers: slopes per unit or
channel, and how they act.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from lapwing.curvature.curvature import layout_of
from lapwing.curvature.factor import GGN
from lapwing.curvature.kron import LARGEST_FACTOR, KroneckerFactor, KroneckerSums, kept_as
from lapwing.curvature.onepass import Totals, pass_over
from lapwing.curvature.problem import Problem
from lapwing.errors import BadData, UnsupportedModel
from lapwing.linalg import PSD, BlockDiagonal, Diagonal, Jacobian, Kronecker
from lapwing.linalg.rows import gram
from lapwing.model import Block, BlockRows, Linearization, RecordedPass, batch_size, take
from lapwing.model.calls import tolerance
from lapwing.model.linearization import pull
from lapwing.model.rules import RULES, MatrixRule
from lapwing.model.tape import first_reached
from lapwing.storage import register

CHECKED = 4  # output directions of the self-check


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
        """Number of columns of the weight, with one more for a bias."""
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

        Derivatives along paths through other selected layers do not count. Two products show that every output acts on
        one input of its own channel: only then ∂a/∂h times a vector of the channels equals ∂a/∂h times ones, times the
        vector, and a vector of signs changes nothing but signs.
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
        """Return random inputs of the second layer, constant over positions, and their values at the first layer."""
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


@register(name="kfra")
@dataclass(frozen=True, eq=False)
class KFRA(KroneckerFactor):
    """Kronecker factors of linear layers and convolutions joined by elementwise functions, for `structure="kron"`.

    With pre-activations h, inputs a and slopes b = ∂a_m/∂h_l of each layer l and each layer m that reads it, and means
    over the whole data set, the input factors are E[a aᵀ] as in KFAC, and the output factors

        B_L = Σ_n J_nᵀ Λ_n J_n,  J_n = ∂f_n/∂h_L;    B_l = Σ_m (W_mᵀ B_m W_m) ∘ E[b bᵀ]

    where KFAC sums the exact terms over n: no direction is back-propagated beyond the last layer. In a chain of linear
    layers KFRA is exact for one datum and equals KFAC at the last layer; in deeper layers KFAC (`factor="ggn"`) is
    usually closer to the GGN. After a residual join the matrices of both branches are added (the sum over m), which
    leaves out their cross terms (appendix G). Convolutions treat positions as independent and alike: B is over
    channels, summed over positions, and W_mᵀ B_m W_m is summed over the places of the kernel, each with the share of
    positions at which it lies on data.

    `batch=m` runs the recursion for every m data and adds up the results, as the paper does with m = 100. With m = 1
    that is the exact E[B] (appendix C), which `factor="ggn"` computes much faster. Groups do not reach over the batches
    of the loader, nor over the parts of a batch that fit into memory. By default means are over all data, so that
    results do not depend on batches (decisions 23 and 36).

    The recursion runs over the selected layers; everything after the last of them is part of J. Tied weights, grouped
    convolutions, selected norms, outputs with positions and operations that mix channels or let a value act at several
    positions (softmax, norms of a sample, overlapping pools) are refused.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure="kron", factor=lapwing.KFRA())
    """

    batch: int | None = field(default=None, metadata={"later": True})

    def __post_init__(self) -> None:
        whole = isinstance(self.batch, int) and not isinstance(self.batch, bool) and self.batch > 0
        if self.batch is not None and not whole:
            raise BadData(f"batch is how many data share a recursion, a whole number from 1 or None, got {self.batch}")

    def sums(self, problem: Problem) -> RecursiveSums:
        return RecursiveSums(problem, self.batch)


def read_layers(problem: Problem) -> tuple[Layer, ...]:
    """Return the linear layers and convolutions in the order of their calls; refuse any other layer."""
    plan, flat = problem.plan, problem.network.params.flat
    if plan.dynamic or plan.looped:
        raise refusal(f"the rows of {', '.join(plan.looped)} come from a loop over samples")
    if problem.event:
        raise refusal(f"the outputs of a sample have positions, {problem.event}")
    layers = []
    for place, block in enumerate(plan.blocks):
        if block.kind == "unused":
            continue
        record = _require_known(problem, block)
        weight = block.places.take(flat).reshape(block.shape[1:])
        layers.append(Layer(place, block, record, weight[:, :-1] if block.bias else weight))
    if not layers:
        raise refusal("no selected parameter reaches the outputs")
    return tuple(sorted(layers, key=lambda layer: layer.record))


def _require_known(problem: Problem, block: Block) -> int:
    """Return the record of the only call that uses a block."""
    steps, names = problem.plan.steps, ", ".join(block.names)
    used = [k for k, step in enumerate(steps) if not step.names.isdisjoint(block.names)]
    called = " and ".join(dict.fromkeys(getattr(steps[k].func, "__name__", "") for k in used))
    if len(used) > 1:
        raise refusal(f"{names} is used {len(used)} times ({called})")
    one = block.kind == "matrix" and block.shape[0] == 1
    if not one or not isinstance(RULES.get(steps[used[0]].func), MatrixRule):
        raise other_operation(names, called)
    if kept_as(block) != "kron":
        raise refusal(f"{names} has a side beyond {LARGEST_FACTOR:,}")
    return used[0]


class RecursiveSums(KroneckerSums):
    """Σ a aᵀ of every layer, Σ b bᵀ between layers and Σ JᵀΛJ at the last; `finish` runs the recursion.

    With groups of `batch` data the recursion runs for each group, and its results are summed.
    """

    def __init__(self, problem: Problem, batch: int | None = None, links: dict | None = None) -> None:
        self.layers, self.blocks, self.layout = read_layers(problem), problem.plan.blocks, layout_of(problem)
        self.problem, self.batch, self.checked = problem, batch, links is not None
        over = "means of all data" if batch is None else f"means of {batch} data at a time"
        self.note = f"output factors by the recursion of KFRA, over {over}"
        self.links: dict[tuple[int, int], Between] = self._look() if links is None else links
        params = problem.network.params
        zeros = partial(torch.zeros, dtype=params.dtype, device=params.device)
        count = partial(torch.zeros, (), dtype=torch.float64, device=params.device)
        self.tensors = {"weights": count()}
        for layer in self.layers:
            self.tensors[f"{layer.place}.inputs"] = zeros(1, *(layer.inputs,) * 2)
            self.tensors[f"{layer.place}.rows"] = count()
            if batch is not None:
                self.tensors[f"{layer.place}.outputs"] = zeros(layer.outputs, layer.outputs)
        if batch is None:
            self.tensors["outputs"] = zeros(self.last.outputs, self.last.outputs)
            self.tensors |= {self._name(pair): zeros(*link.shape) for pair, link in self.links.items()}
        self._slopes: dict[tuple[int, int], Tensor] = {}
        self._fresh = torch.zeros(0)

    @property
    def last(self) -> Layer:
        return self.layers[-1]

    @cached_property
    def chain(self) -> bool:
        """Whether every layer has one position and is read by one other layer, so that one sample is exact."""
        firsts = [first for first, _ in self.links]
        return len(set(firsts)) == len(firsts) and all(link.single for link in self.links.values())

    def _name(self, pair: tuple[int, int]) -> str:
        first, second = (self.layers[k].place for k in pair)
        return f"{first}>{second}.slopes"

    def _look(self) -> dict[tuple[int, int], Between]:
        """Find which layer reads which, and what is between them, from the first samples."""
        with self.problem.network.borrow(), torch.enable_grad():
            at = self.problem.network.linearize(self.problem.plan, self.problem.example).recorded
            for layer in self.layers:
                rule, call = at.matrix(layer.record)
                if rule.kernel_shares(call) is None:
                    raise other_operation(layer.name, at.records[layer.record].name)
            pairs = self._pairs(at)
            return {pair: between(at, *(self.layers[k] for k in pair)) for pair in pairs}

    def _pairs(self, at: RecordedPass) -> list[tuple[int, int]]:
        """Return the pairs (reads from, layer), by position in `layers`; refuse outputs that come from elsewhere."""
        records, finished = at.records, at.finished
        position = {id(records[layer.record]): k for k, layer in enumerate(self.layers)}
        own = first_reached(finished)
        if own != [records[self.last.record]]:
            raise refusal(f"the outputs come from {_names(at, own)}, not from {self.last.name} alone")
        pairs = []
        for k, layer in enumerate(self.layers):
            found = first_reached(finished, start=records[layer.record].upstream)
            pairs += [(position[id(record)], k) for record in found]
        alone = {*range(len(self.layers) - 1)} - {first for first, _ in pairs}
        if alone:
            raise refusal(f"no selected layer reads {self.layers[min(alone)].name}")
        return sorted(pairs)

    def fill(self, problem: Problem, label: str = "fit", gradient: bool = True) -> Totals:
        exact, state = GGN(limit=problem.outputs, tolerance=0.0), self.tensors
        return pass_over(
            problem, self.update, exact, label=label, gradient=gradient, together=True, state=state, rows=self._rows
        )

    def _rows(self, at: Linearization, directions: Tensor) -> Jacobian:
        if not self.checked:
            self.checked = True
            if self.chain:
                self._check(at)
        return at.jacobian_at(self.last.record, directions)

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        rows = jacobian.rows
        assert isinstance(rows, BlockRows)
        if fresh is not None:
            self._forward(rows, fresh)
        if self.batch is None:
            outputs = rows.gradient_gram(self.last.block, False, False)[0]
            self._require_finite(outputs, self.last)
            self.tensors["outputs"] += outputs
            return
        for chosen in torch.arange(jacobian.n).split(self.batch):  # the recursion is linear in what it starts from
            found = self._recursion(self._outputs(rows, chosen), self._means(chosen))
            for layer, left in zip(self.layers, found, strict=True):
                self.tensors[f"{layer.place}.outputs"] += left

    def _outputs(self, rows: BlockRows, chosen: Tensor) -> Tensor:
        """Return Σ JᵀΛJ of some samples at the last layer."""
        rule, call = rows.at.matrix(self.last.record)
        g = rule.left(call, rows.gradients[self.last.record], rows.at.samples(self.last.record), rows.n)
        outputs = gram(g[chosen.to(g.device)].flatten(0, 2)[:, 0].to(rows.dtype))
        self._require_finite(outputs, self.last)
        return outputs

    def _means(self, chosen: Tensor) -> dict[tuple[int, int], Tensor]:
        chosen = chosen.to(self._fresh.device)
        weights = self._fresh[chosen]
        total = torch.where(weights.sum() > 0, weights.sum(), 1.0)
        return {pair: link.products(self._slopes[pair][chosen], weights) / total for pair, link in self.links.items()}

    def _forward(self, rows: BlockRows, fresh: Tensor) -> None:
        """Add the sums that do not depend on directions, once per sample."""
        weights = None if bool((fresh == 1).all()) else fresh
        pairs = self._pairs(rows.at)
        if pairs != [*self.links]:
            raise refusal("which layer reads which depends on the data")
        for layer in self.layers:
            found, positions = rows.input_gram(layer.block, False, False, weights)
            if positions != 1 and layer.single(rows.at):
                raise refusal(f"{layer.name} is applied at {positions} positions of a sample")
            self.tensors[f"{layer.place}.inputs"] += found
            self.tensors[f"{layer.place}.rows"] += fresh.sum() * positions
        self._slopes, self._fresh = {}, fresh
        for pair, link in self.links.items():
            b = link.slopes(rows.at).to(fresh)
            self._require_finite(b, link.first)
            if self.batch is None:
                self.tensors[self._name(pair)] += link.products(b, fresh)
            else:
                self._slopes[pair] = b
        self.tensors["weights"] += fresh.sum()

    @staticmethod
    def _require_finite(values: Tensor, layer: Layer) -> None:
        if not bool(values.sum().isfinite()):
            raise BadData(
                f"a derivative after layer {layer.name} is not finite, although the outputs are: an operation after it "
                "has no derivative there (a square root or a norm at zero)"
            )

    def _check(self, at: Linearization) -> None:
        """Check the recursion against autograd on one sample, for which it is exact."""
        n, network = batch_size(at.inputs), self.problem.network
        middle = (n - 1) // 2
        with torch.enable_grad():
            one = network.linearize(at.plan, take(at.inputs, slice(middle, middle + 1), n))
        generator = torch.Generator().manual_seed(0)
        shape = (min(CHECKED, one.f.numel()), *one.f.shape)
        v = torch.randn(shape, dtype=torch.float64, generator=generator).to(one.f)
        trial, exact = RecursiveSums(self.problem, None, self.links), one.jacobian(v).rows
        assert isinstance(exact, BlockRows)
        trial.update(one.jacobian_at(self.last.record, v), torch.ones(1, device=v.device).to(trial.tensors["outputs"]))
        for layer, found in zip(self.layers, trial.lefts(), strict=True):
            expected = exact.gradient_gram(layer.block, False, False)[0]
            rtol = tolerance(
                [one.recorded.records[layer.record].out.dtype]
            )  # outputs may have been cast to a wider one
            if not (found - expected).norm() <= rtol * expected.norm():
                raise refusal(
                    f"for one sample the recursion gives a matrix of norm {found.norm():.6g} at {layer.name}, and "
                    f"gradients give one of norm {expected.norm():.6g}"
                )

    def lefts(self) -> list[Tensor]:
        """Return B_l of every layer, (out, out), by the recursion or from the sums of its results."""
        if self.batch is not None:
            return [self.tensors[f"{layer.place}.outputs"] for layer in self.layers]
        return self._recursion(self.tensors["outputs"], {pair: self._mean(self._name(pair)) for pair in self.links})

    def _recursion(self, outputs: Tensor, slopes: dict[tuple[int, int], Tensor]) -> list[Tensor]:
        """Run the recursion from the last layer back."""
        found: dict[int, Tensor] = {len(self.layers) - 1: outputs}
        for k in reversed(range(len(self.layers) - 1)):
            for pair, link in self.links.items():
                if pair[0] == k:
                    term = link.pulled_back(found[pair[1]], slopes[pair])
                    found[k] = term if k not in found else found[k] + term
        return [0.5 * (found[k] + found[k].mT) for k in range(len(self.layers))]

    def _mean(self, name: str, count: str = "weights") -> Tensor:
        total = self.tensors[count]
        return self.tensors[name] / torch.where(total > 0, total, 1.0).to(self.tensors[name])

    def finish(self) -> BlockDiagonal:
        blocks: list[PSD] = [Diagonal(self.layers[0].weight.new_zeros(block.size)) for block in self.blocks]
        for layer, left in zip(self.layers, self.lefts(), strict=True):
            inputs = self._mean(f"{layer.place}.inputs", f"{layer.place}.rows")
            blocks[layer.place] = Kronecker(left[None], inputs)
        return BlockDiagonal(self.layout, tuple(blocks), tuple(", ".join(block.names) for block in self.blocks))


def other_operation(names: str, called: str) -> UnsupportedModel:
    return refusal(
        f"{names} is the parameter of {called}; select only weights (and biases) of linear layers and of convolutions "
        "with one group"
    )


def _names(at: RecordedPass, records: list) -> str:
    """Name layers by their parameters, in the order of their calls."""
    found = [k for k, record in enumerate(at.records) if any(record is r for r in records)]
    return " and ".join(", ".join(sorted(at.plan.steps[k].names)) for k in found) or "no selected layer"
