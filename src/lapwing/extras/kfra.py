"""KFRA: Kronecker factors of a network, with output factors from a recursion over its layers.

Botev, Ritter, Barber (2017), "Practical Gauss–Newton optimisation for deep learning"; Ritter, Botev, Barber (2018), "A
scalable Laplace approximation for neural networks", Eq. 15 in expectation and without D, as Gauss–Newton has it, with
convolutions and residual joins as in its appendix G.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from lapwing.curvature.curvature import layout_of
from lapwing.curvature.factor import GGN
from lapwing.curvature.kron import LARGEST_FACTOR, KroneckerFactor, KroneckerSums, kept_as
from lapwing.curvature.onepass import Totals, pass_over
from lapwing.curvature.problem import Problem
from lapwing.errors import BadData, UnsupportedModel
from lapwing.extras.slopes import Between, Layer, between, refusal
from lapwing.linalg import PSD, BlockDiagonal, Diagonal, Jacobian, Kronecker
from lapwing.linalg.rows import gram
from lapwing.model import Block, BlockRows, Linearization, RecordedPass, batch_size, take
from lapwing.model.calls import tolerance
from lapwing.model.rules import RULES, MatrixRule
from lapwing.model.tape import first_reached
from lapwing.storage import register

CHECKED = 4  # output directions of the self-check


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
        assert block.shape is not None
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
    one = block.kind == "matrix" and block.shape is not None and block.shape[0] == 1
    if not one or not isinstance(RULES.get(steps[used[0]].func), MatrixRule):
        raise other_operation(names, called)
    if kept_as(block) != "kron":
        raise refusal(f"{names} has a side beyond {LARGEST_FACTOR:,}")
    return used[0]


class RecursiveSums(KroneckerSums):
    """Σ a aᵀ of every layer, Σ b bᵀ between layers and Σ JᵀΛJ at the last; `finish` runs the recursion.

    With groups of `batch` data the recursion runs for each of them, and the sums are those of its results.
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
        """Σ JᵀΛJ of some samples at the last layer."""
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
            for pair, link in self._read(k):
                term = link.pulled_back(found[pair[1]], slopes[pair])
                found[k] = term if k not in found else found[k] + term
        return [0.5 * (found[k] + found[k].mT) for k in range(len(self.layers))]

    def _read(self, k: int) -> Iterator[tuple[tuple[int, int], Between]]:
        return ((pair, link) for pair, link in self.links.items() if pair[0] == k)

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
