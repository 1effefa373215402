"""Groups of weights that share one prior precision, and the precisions of a belief per group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, UnsupportedOperation, nearest
from lapwing.linalg import PSD, Diagonal
from lapwing.model import Params
from lapwing.posterior import Belief, Prior

KINDS = ("scalar", "layerwise", "unit", "input", "parameterwise")


@dataclass(frozen=True, eq=False)
class Groups:
    """A partition of the P selected weights into groups: weight p has precision τ[index[p]].

    `members` holds the parameter names of each group. It is empty if the groups are not made of whole parameters, as
    with one group for everything or one per weight.

        groups = Groups.layerwise(la.curvature.names, la.params.names, la.params.sizes)
    """

    index: Tensor
    count: int
    members: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.index.ndim != 1 or self.index.dtype != torch.long:
            raise ValueError(f"expected a flat tensor of integers, got {self.index.dtype} {tuple(self.index.shape)}")
        if self.members and len(self.members) != self.count:
            raise ValueError(f"{self.count} groups need as many lists of names, got {len(self.members)}")

    @classmethod
    def scalar(cls, size: int) -> "Groups":
        """Put all `size` weights into one group."""
        return cls(torch.zeros(size, dtype=torch.long), 1)

    @classmethod
    def parameterwise(cls, size: int) -> "Groups":
        """Make each weight a group of its own."""
        return cls(torch.arange(size), size)

    @classmethod
    def layerwise(
        cls,
        blocks: Sequence[Sequence[str]],
        names: Sequence[str],
        sizes: Sequence[int],
        index: Tensor | None = None,
    ) -> "Groups":
        """Make one group per block; `blocks` lists the parameter names of each (`curvature.names`).

        `names` and `sizes` describe the flat vector; `index` picks the weights of a subnetwork out of it.
        """
        where = {name: k for k, block in enumerate(blocks) for name in block}
        missing = [name for name in names if name not in where]
        if missing:
            raise ValueError(f"no block holds the parameter {missing[0]!r}; the blocks are {list(map(tuple, blocks))}")
        flat = torch.repeat_interleave(torch.tensor([where[name] for name in names]), torch.tensor(list(sizes)))
        return cls(flat if index is None else flat[index.cpu()], len(blocks), tuple(map(tuple, blocks)))

    @classmethod
    def of_prior(cls, belief: Belief) -> tuple["Groups", Tensor]:
        """Return the fewest groups in which the prior of a belief is constant, and its precision in each."""
        params, precision = belief.curvature.params, belief.resolved_prior[1].diagonal().detach().double().cpu()
        assert params is not None
        kinds = (
            cls.scalar(params.size),
            cls.layerwise(belief.curvature.names, params.names, params.sizes, params.index),
        )
        for groups in kinds:
            values = groups.precisions(belief)
            if torch.allclose(groups.expand(values), precision, rtol=1e-9):
                return groups, values
        raise IncompatiblePrior("a curve needs a prior that is constant per block; use a scalar or layerwise prior")

    @property
    def size(self) -> int:
        """P, the number of weights."""
        return self.index.numel()

    def expand(self, values: Tensor) -> Tensor:
        """Expand values per group (*batch, G) to values per weight (*batch, P)."""
        return values[..., self.index.to(values.device)]

    def diagonal(self, values: Tensor) -> Diagonal:
        """Return the diagonal matrix of values per group (G,); it knows which weights share a value."""
        if self.count == 1:
            return Diagonal(values[0].expand(self.size))
        return Diagonal.by_group(values, self.index)

    def total(self, values: Tensor) -> Tensor:
        """Sum values per weight (P,) over each group, (G,)."""
        zero = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zero.index_add(0, self.index.to(values.device), values)

    def label(self, group: int) -> str:
        """Return the name of a group for messages."""
        if self.members:
            return f"block {group} ({', '.join(self.members[group])})"
        return "all weights" if self.count == 1 else f"weight {group}"

    def prior(self, values: Tensor, mean: float | Tensor = 0.0) -> Prior:
        """Return the prior with precision values[g] on group g."""
        values = values.detach()
        if self.members:
            return Prior.per_block(values.tolist(), self.members, mean)
        return Prior(values.item() if self.count == 1 else self.expand(values), mean)

    def precisions(self, belief: Belief) -> Tensor:
        """Return the prior precisions of a belief, as geometric means over each group, (G,)."""
        return self.average(belief.resolved_prior[1])

    def average(self, matrix: PSD) -> Tensor:
        """Return the geometric means of a diagonal matrix over each group, (G,) on the CPU."""
        if not matrix.is_diagonal:
            raise UnsupportedOperation("a prior that is itself a posterior cannot be tuned; tune before chaining")
        logs = matrix.diagonal().detach().double().log().cpu()
        counts = self.total(torch.ones_like(logs))
        return (self.total(logs) / counts.clamp(min=1)).exp()

    def squares(self, belief: Belief) -> Tensor:
        """Return ‖θ̂ − μ₀‖² over each group, (G,) float64."""
        return self.total(belief.offset.detach().square())

    def applied(self, belief: Belief, values: Tensor) -> Belief:
        """Return the belief with precision values[g] on group g; gradients flow into the values."""
        return replace(belief, prior=Prior(self.diagonal(values), belief.prior.mean))


def partition(kind: str, blocks: Sequence[Sequence[str]], params: Params) -> Groups:
    """Group the selected weights by kind; `blocks` are `curvature.names`.

    "unit" groups the weights that feed one output of a block: a row of the weight matrix and its bias. "input" groups
    the weights that read one input of a block, a column of the weight matrix; the biases of the block are one more
    group. Both are products over rows and columns, which Kronecker structures accept. In a tensor without rows or
    columns (a norm's scale) each entry is a unit.

        groups = partition("layerwise", la.curvature.names, la.params)
    """
    if kind not in KINDS:
        raise UnsupportedOperation(f"prior is one of {', '.join(KINDS)}; got {kind!r}{nearest(kind, KINDS)}")
    if kind == "scalar":
        return Groups.scalar(params.size)
    if kind == "parameterwise":
        return Groups.parameterwise(params.size)
    if kind == "layerwise":
        return Groups.layerwise(blocks, params.names, params.sizes, params.index)
    where = {name: k for k, block in enumerate(blocks) for name in block}
    labels: dict[tuple[int, int, int], int] = {}
    parts = [_labels(kind, where[name], shape, labels) for name, shape in zip(params.names, params.shapes, strict=True)]
    flat = torch.cat(parts)
    index = flat if params.index is None else flat[params.index.cpu()]
    used, index = index.unique(return_inverse=True)
    return Groups(index, len(used))


def _labels(kind: str, block: int, shape: torch.Size, labels: dict[tuple[int, int, int], int]) -> torch.Tensor:
    """Number the entries of a tensor by unit or input; tensors of one block share the numbers in `labels`."""
    if kind == "input" and len(shape) < 2:
        return torch.full((shape.numel(),), labels.setdefault((block, 1, 0), len(labels)))
    axis = 1 if kind == "input" else 0
    count = shape[axis] if shape else 1
    numbers = torch.tensor([labels.setdefault((block, 0, k), len(labels)) for k in range(count)])
    if not shape:
        return numbers
    view = [1] * len(shape)
    view[axis] = count
    return numbers.reshape(view).expand(shape).reshape(-1)
