"""Groups of weights that share a prior precision, by name: all, a block, a unit, an input, a weight."""

from collections.abc import Sequence

import torch

from lapwing.errors import UnsupportedOperation
from lapwing.evidence.groups import Groups
from lapwing.model import Params

KINDS = ("scalar", "layerwise", "unit", "input", "parameterwise")


def partition(kind: str, blocks: Sequence[Sequence[str]], params: Params) -> Groups:
    """The groups of a kind for the selected weights; `blocks` are `curvature.names`.

    "unit" joins what feeds one output of a block: a row of the weight and its bias. "input" joins what reads one input
    of a block, a column of the weight; biases of a block are then one group. Both are products over rows and columns,
    which Kronecker structures accept. A tensor without rows or columns (a norm's scale) counts each entry as a unit.
    """
    if kind not in KINDS:
        raise UnsupportedOperation(f"a prior is learned as one of {', '.join(KINDS)}; got {kind!r}")
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
    """A number for each entry of a tensor; the same key is the same number in every tensor of a block."""
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
