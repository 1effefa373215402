"""KFRA: Kronecker factors of a feed-forward network, with output factors from a recursion over its layers.

Botev, Ritter, Barber (2017), "Practical Gauss–Newton optimisation for deep learning"; Ritter, Botev, Barber (2018), "A
scalable Laplace approximation for neural networks", Eq. 15 in expectation and without D, as Gauss–Newton has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from lapwing.curvature.curvature import layout_of
from lapwing.curvature.factor import GGN
from lapwing.curvature.kron import LARGEST_FACTOR, KroneckerFactor, KroneckerSums, kept_as
from lapwing.curvature.onepass import Totals, pass_over
from lapwing.curvature.problem import Problem
from lapwing.errors import BadData, UnsupportedModel
from lapwing.linalg import PSD, BlockDiagonal, Diagonal, Jacobian, Kronecker
from lapwing.model import Block, BlockRows, Linearization, RecordedPass, batch_size, take
from lapwing.model.inputs import tolerance
from lapwing.model.linearization import pull
from lapwing.model.rules import RULES, MatrixRule, Rule
from lapwing.model.tape import first_reached
from lapwing.storage import register

CHECKED = 4  # output directions of the self-check


@register(name="kfra")
@dataclass(frozen=True, eq=False)
class KFRA(KroneckerFactor):
    """Kronecker factors of linear layers joined by elementwise functions, for `structure="kron"`.

    With pre-activations h, inputs a and slopes b = ∂a_{l+1}/∂h_l of each layer, and means over the whole data set, the
    input factors are E[a aᵀ] as in KFAC, and the output factors

        B_L = Σ_n J_nᵀ Λ_n J_n,  J_n = ∂f_n/∂h_L;    B_l = (W_{l+1}ᵀ B_{l+1} W_{l+1}) ∘ E[b bᵀ]

    where KFAC sums the exact terms over n: no direction is back-propagated beyond the last layer. KFRA is exact for one
    datum and equals KFAC at the last layer; in deeper layers KFAC (`factor="ggn"`) is usually closer to the GGN.

    The recursion runs over the selected layers; everything after the last of them is part of J. Networks that are not
    such a chain (convolutions, shared weights, skip connections, norms of a sample, outputs with positions) are
    refused. Means are over all data, so that results do not depend on the batches (decision 23).

        la = lapwing.fit(mlp, loader, "classification", structure="kron", factor=lapwing.KFRA())
    """

    def sums(self, problem: Problem) -> RecursiveSums:
        return RecursiveSums(problem)


def refusal(why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"factor KFRA is for a chain of linear layers joined by elementwise functions, but {why}. Use factor='ggn'."
    )


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer of the chain: its block, the record of its call and its weight (out, in)."""

    place: int
    block: Block
    record: int
    weight: Tensor

    @property
    def name(self) -> str:
        return ", ".join(self.block.names)


def read_chain(problem: Problem) -> tuple[Layer, ...]:
    """Return the linear layers in the order of their calls; refuse any other layer."""
    plan, flat = problem.plan, problem.network.params.flat
    if plan.dynamic or plan.looped:
        raise refusal(f"the rows of {', '.join(plan.looped)} come from a loop over samples")
    if problem.event:
        raise refusal(f"the outputs of a sample have positions, {problem.event}")
    layers = []
    for place, block in enumerate(plan.blocks):
        if block.kind == "unused":
            continue
        record = _require_linear(problem, block)
        assert block.shape is not None
        weight = block.places.take(flat).reshape(block.shape[1:])
        layers.append(Layer(place, block, record, weight[:, :-1] if block.bias else weight))
    if not layers:
        raise refusal("no selected parameter reaches the outputs")
    return tuple(sorted(layers, key=lambda layer: layer.record))


def _require_linear(problem: Problem, block: Block) -> int:
    """Return the record of the only call that uses a block."""
    steps, names = problem.plan.steps, ", ".join(block.names)
    used = [k for k, step in enumerate(steps) if not step.names.isdisjoint(block.names)]
    called = " and ".join(dict.fromkeys(getattr(steps[k].func, "__name__", "") for k in used))
    if len(used) > 1:
        raise refusal(f"{names} is used {len(used)} times ({called})")
    if block.kind != "matrix" or not _is_plain(RULES.get(steps[used[0]].func)):
        raise refusal(f"{names} is the parameter of {called}; select only weights (and biases) of linear layers")
    if kept_as(block) != "kron":
        raise refusal(f"{names} has a side beyond {LARGEST_FACTOR:,}")
    return used[0]


class RecursiveSums(KroneckerSums):
    """Σ a aᵀ of every layer, Σ b bᵀ between layers and Σ JᵀΛJ at the last; `finish` runs the recursion."""

    note = "output factors by the recursion of KFRA, over means of all data"

    def __init__(self, problem: Problem) -> None:
        self.layers, self.blocks, self.layout = read_chain(problem), problem.plan.blocks, layout_of(problem)
        self.problem, self.checked = problem, False
        params = problem.network.params
        zeros = partial(torch.zeros, dtype=params.dtype, device=params.device)
        self.tensors = {"weights": torch.zeros((), dtype=torch.float64, device=params.device)}
        for layer in self.layers:
            assert layer.block.shape is not None
            _, o, i = layer.block.shape
            self.tensors[f"{layer.place}.inputs"] = zeros(1, i, i)
            self.tensors[f"{layer.place}.slopes"] = zeros(o, o)
        del self.tensors[f"{self.last.place}.slopes"]
        self.tensors["outputs"] = zeros(1, *(self.last.weight.shape[0],) * 2)

    @property
    def last(self) -> Layer:
        return self.layers[-1]

    def fill(self, problem: Problem, label: str = "fit", gradient: bool = True) -> Totals:
        exact, state = GGN(limit=problem.outputs, tolerance=0.0), self.tensors
        return pass_over(
            problem, self.update, exact, label=label, gradient=gradient, together=True, state=state, rows=self._rows
        )

    def _rows(self, at: Linearization, directions: Tensor) -> Jacobian:
        if not self.checked:
            self.checked = True
            self._check(at)
        return at.jacobian_at(self.last.record, directions)

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        rows = jacobian.rows
        assert isinstance(rows, BlockRows)
        if fresh is not None:
            self._forward(rows, fresh)
        outputs = rows.gradient_gram(self.last.block, False, False)
        self._require_finite(outputs, self.last)
        self.tensors["outputs"] += outputs

    def _forward(self, rows: BlockRows, fresh: Tensor) -> None:
        """Add the sums that do not depend on directions, once per sample."""
        weights = None if bool((fresh == 1).all()) else fresh
        self._require_chain(rows.at)
        for layer in self.layers:
            found, positions = rows.input_gram(layer.block, False, False, weights)
            if positions != 1:
                raise refusal(f"{layer.name} is applied at {positions} positions of a sample")
            self.tensors[f"{layer.place}.inputs"] += found
        for layer, following in pairwise(self.layers):
            b = _slopes(rows.at, layer, following).to(fresh)
            self._require_finite(b, layer)
            self.tensors[f"{layer.place}.slopes"] += (b if weights is None else b * weights[:, None]).T @ b
        self.tensors["weights"] += fresh.sum()

    def _require_chain(self, at: RecordedPass) -> None:
        """Refuse a network in which a layer gets inputs from others than the one before it."""
        records, finished = at.records, at.finished
        own = first_reached(finished)
        if own != [records[self.last.record]]:
            raise refusal(f"the outputs come from {_names(at, own)}, not from {self.last.name} alone")
        for before, layer in zip((None, *self.layers), self.layers, strict=False):
            found = first_reached(finished, start=records[layer.record].upstream)
            if found != ([] if before is None else [records[before.record]]):
                wanted = "the inputs" if before is None else before.name
                raise refusal(f"{layer.name} comes after {_names(at, found)}, not after {wanted} alone")

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
        trial, exact = RecursiveSums(self.problem), one.jacobian(v).rows
        assert isinstance(exact, BlockRows)
        trial.update(one.jacobian_at(self.last.record, v), torch.ones(1, device=v.device).to(trial.tensors["outputs"]))
        for layer, found in zip(self.layers, trial.lefts(), strict=True):
            expected = exact.gradient_gram(layer.block, False, False)
            rtol = _tolerance(one.recorded.records[layer.record].out)  # outputs may have been cast to a wider dtype
            if not (found - expected).norm() <= rtol * expected.norm():
                raise refusal(
                    f"for one sample the recursion gives a matrix of norm {found.norm():.6g} at {layer.name}, and "
                    f"gradients give one of norm {expected.norm():.6g}"
                )

    def lefts(self) -> list[Tensor]:
        """Run the recursion from the last layer back: B_l of every layer, (1, out, out)."""
        found = [self.tensors["outputs"]]
        for layer, following in reversed(list(pairwise(self.layers))):
            weight = following.weight.to(found[0])
            found.insert(0, (weight.T @ found[0] @ weight) * self._mean(f"{layer.place}.slopes"))
        return [0.5 * (left + left.mT) for left in found]

    def _mean(self, name: str) -> Tensor:
        total = self.tensors["weights"]
        return self.tensors[name] / torch.where(total > 0, total, 1.0).to(self.tensors[name])

    def finish(self) -> BlockDiagonal:
        blocks: list[PSD] = [Diagonal(self.layers[0].weight.new_zeros(block.size)) for block in self.blocks]
        for layer, left in zip(self.layers, self.lefts(), strict=True):
            blocks[layer.place] = Kronecker(left, self._mean(f"{layer.place}.inputs"))
        return BlockDiagonal(self.layout, tuple(blocks), tuple(", ".join(block.names) for block in self.blocks))


def _slopes(at: RecordedPass, layer: Layer, following: Layer) -> Tensor:
    """Return the slopes b = ∂a/∂h, (n, d), between two layers; refuse what is not elementwise for these samples.

    Only where ∂a/∂h is diagonal, its product with a vector is its product with ones, times the vector.
    """
    record, n = at.records[layer.record], at.n
    rule, call = at.bound[following.record]
    own, own_call = at.bound[layer.record]
    out, out_own = at.plan.steps[following.record].out, at.plan.steps[layer.record].out
    assert isinstance(rule, MatrixRule)
    assert isinstance(own, MatrixRule)
    assert out is not None
    assert out_own is not None
    a = call.data
    draw = torch.rand(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(a) + 0.5
    found = []
    for v in (torch.ones_like(a), draw):
        (g,) = pull(a, [record.edge], v)
        assert g is not None
        found.append(own.left(own_call, g.reshape(1, *record.out.shape), out_own, n).reshape(n, -1))
    b, probed = found
    factor = rule.right(replace(call, inputs=(draw,)), out, n).reshape(n, -1)
    if factor.shape == b.shape:
        error, size = (probed - b * factor).abs().amax(1), (b * factor).abs().amax(1)
        if bool((error <= _tolerance(a) * size).all()):
            return b
    if not bool(b.sum().isfinite()):
        return b
    raise refusal(f"what is between {layer.name} and {following.name} mixes units, or is a layer that was not selected")


def _is_plain(rule: Rule | None) -> bool:
    return isinstance(rule, MatrixRule) and rule.plain


def _tolerance(values: Tensor) -> float:
    return tolerance([values.dtype])


def _names(at: RecordedPass, records: list) -> str:
    """Name layers by their parameters, in the order of their calls."""
    found = [k for k, record in enumerate(at.records) if any(record is r for r in records)]
    return " and ".join(", ".join(sorted(at.plan.steps[k].names)) for k in found) or "no selected layer"
