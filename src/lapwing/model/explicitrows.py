"""Rows of weights that do not form a matrix of the plan, written out: a number per sample, direction and weight.

A norm's scale, an embedding or a weight that is normalized before its use has such rows. They come from the rule of the
operation that reads the weight, or from replaying that operation for one sample after the other; what is computed from
parameters before it meets the data is then pulled back to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.linalg import MatrixRows, Term
from lapwing.model.calls import map_tensors
from lapwing.model.rules import Call, MatrixRule, RowsRule, Samples
from lapwing.model.tape import Record, RecordedPass, Source


class OutputGradients(Protocol):
    """The gradients at every record, (r, *out.shape) each, and rows that are finished already."""

    @property
    def rows(self) -> Mapping[int, list[Tensor]]: ...

    def __getitem__(self, k: int) -> Any: ...

    def passes(self, k: int) -> Iterator[Tensor]: ...


def explicit_rows(at: RecordedPass, gradients: OutputGradients, k: int) -> dict[str, Tensor]:
    """Return the rows of record k for every parameter behind it, {name: (n, r, size)}."""
    record, step = at.records[k], at.plan.steps[k]
    by_tensor = _by_rule(at, gradients, k) if step.method == "rule" else _by_replay(at, gradients[k], k)
    rows: dict[str, Tensor] = {}
    for j, source, found in zip(record.live, step.sources, by_tensor, strict=True):
        for name, part in _pull_back(at, record.tensors[j], step.args[j], source, found).items():
            rows[name] = rows[name] + part if name in rows else part
    return rows


def _by_rule(at: RecordedPass, gradients: OutputGradients, k: int) -> list[Tensor]:
    """Return (n, r, *shape) for each live tensor."""
    (rule, call_), out, record = at.bound[k], at.samples(k), at.records[k]
    if isinstance(rule, MatrixRule):
        return [_matrix_rows(rule, call_, record.tensors[j], gradients[k], out, at.n) for j in record.live]
    assert isinstance(rule, RowsRule)
    if k in gradients.rows:
        return gradients.rows[k]
    each = [small_rows(rule, call_, record, g, out, at.n) for g in gradients.passes(k)]
    return each[0] if len(each) == 1 else [torch.cat(rows, 1) for rows in zip(*each, strict=True)]


def _matrix_rows(rule: MatrixRule, call_: Call, tensor: Tensor, g: Tensor, out: Samples, n: int) -> Tensor:
    """Write out the rows of a weight matrix or its bias."""
    if tensor is call_.bias:
        return rule.bias_rows(call_, g, out, n)
    factors = Term(rule.left(call_, g, out, n), rule.right(call_, out, n, False))
    places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    order = rule.view(call_, places).reshape(-1).argsort()
    return MatrixRows((factors,)).matrix().flatten(2)[..., order].reshape(n, len(g), *tensor.shape)


def small_rows(rule: RowsRule, call_: Call, record: Record, g: Tensor, out: Samples, n: int) -> list[Tensor]:
    """Return the rows of a rule for each live tensor, (n, r, *shape)."""
    if len(record.live) == 2:
        weight, bias = rule.rows(call_, g, out, n)
        return [bias if record.tensors[j] is call_.bias else weight for j in record.live]
    kinds = [rule.bias_rows if record.tensors[j] is call_.bias else rule.weight_rows for j in record.live]
    return [rows(call_, g, out, n) for rows in kinds]


def _by_replay(at: RecordedPass, gradients: Tensor, k: int) -> list[Tensor]:
    """Replay the call for one sample after the other and take its vector–Jacobian products."""
    record, r = at.records[k], len(gradients)
    g = at.samples(k).first(gradients, at.n, skip=1)  # (n, r, *out of one sample)
    found: list[list[Tensor]] = [[] for _ in record.live]
    with torch.enable_grad():
        for m in range(at.n):
            replay, leaves = _sample_call(record, at.plan.steps[k].args, m, at.n, at.create_graph)
            result = replay()
            parts = _vjps(result, leaves, g[m].reshape(r, *result.shape), at.create_graph)
            for rows, part in zip(found, parts, strict=True):
                rows.append(part)
    return [torch.stack(rows) for rows in found]


def _sample_call(
    record: Record, layouts: tuple[Samples | None, ...], m: int, n: int, create_graph: bool
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return the recorded call with its arguments cut to sample m, and the fresh leaves that replace its weights."""
    pieces: dict[int, Tensor] = {}
    leaves: list[Tensor] = []
    for j, (tensor, layout) in enumerate(zip(record.tensors, layouts, strict=True)):
        piece = tensor if layout is None else layout.first(tensor, n)[m]
        if j in record.live:
            # with create_graph the rows may depend on the weight's value, but never on its path to the parameters
            piece = piece.detach().requires_grad_()
            leaves.append(piece)
        elif not create_graph:
            piece = piece.detach()
        pieces[id(tensor)] = piece

    def swap(tensor: Tensor) -> Tensor:
        return pieces.get(id(tensor), tensor)

    args, kwargs = map_tensors(swap, record.args), map_tensors(swap, record.kwargs)
    return (lambda: record.func(*args, **kwargs)), leaves


def _pull_back(
    at: RecordedPass, tensor: Tensor, samples: Samples | None, source: Source, rows: Tensor
) -> dict[str, Tensor]:
    """Turn rows with respect to a weight into rows with respect to the parameters that it is made from."""
    if source.direct:
        own = rows.transpose(-1, -2) if source.transposed else rows
        return {source.names[0]: own.reshape(*rows.shape[:2], -1)}
    leaves = [at.leaves[name] for name in source.names]
    n, r = rows.shape[:2]
    if samples is None:
        grads = _vjps(tensor, leaves, rows.flatten(0, 1), at.create_graph)
        return {name: g.reshape(n, r, -1) for name, g in zip(source.names, grads, strict=True)}
    per_sample: dict[str, list[Tensor]] = {name: [] for name in source.names}
    with torch.enable_grad():
        each = samples.first(tensor, n)
    for m in range(n):
        with torch.enable_grad():
            part = each[m]
        grads = _vjps(part, leaves, rows[m].reshape(r, *part.shape), at.create_graph)
        for name, g in zip(source.names, grads, strict=True):
            per_sample[name].append(g.reshape(r, -1))
    return {name: torch.stack(parts) for name, parts in per_sample.items()}


def _vjps(tensor: Tensor, leaves: list[Tensor], cotangents: Tensor, create_graph: bool) -> list[Tensor]:
    """Return vᵀ ∂tensor/∂leaf for cotangents (k, *tensor.shape), (k, *leaf.shape) each, by a loop over cotangents."""
    each = []
    for v in cotangents:
        grads = torch.autograd.grad(
            tensor, leaves, v.to(tensor.dtype), retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        each.append([torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(grads, leaves, strict=True)])
    if not each:
        return [p.new_zeros(0, *p.shape) for p in leaves]
    return [torch.stack(rows) for rows in zip(*each, strict=True)]
