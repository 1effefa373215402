"""Checks of numbers from a file: each says in words what is wrong, or nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def flaw_of_values(name: str, values: Any, *, signed: bool = False) -> str:
    """Say what is wrong with values that should be finite and, unless `signed`, not negative."""
    values = torch.as_tensor(values)
    if not values.is_floating_point():
        return f"{name} is of type {values.dtype}"
    bad = ~values.isfinite() if signed else ~(values.isfinite() & (values >= 0))
    return f"{name} holds {values[bad].reshape(-1)[0].item()}" if bool(bad.any()) else ""


def flaw_of_scalar(name: str, value: Any) -> str:
    """Say what is wrong with a value that should be one number that is not negative."""
    shape = tuple(torch.as_tensor(value).shape)
    return f"{name} has shape {shape}" if shape else flaw_of_values(name, value)


def flaw_of_symmetric(name: str, matrix: Tensor, *, signed: bool = False) -> str:
    """Say what is wrong with matrices (*b, n, n) that should be symmetric and, unless `signed`, semi-definite."""
    if found := flaw_of_values(name, matrix, signed=True):
        return found
    matrix = matrix if matrix.dtype.itemsize >= 4 else matrix.float()
    largest = matrix.abs().max() if matrix.numel() else matrix.new_zeros(())
    if not float(largest):
        return ""
    unit = matrix / largest
    rounding = torch.finfo(matrix.dtype).eps ** 0.5
    if bool(((unit - unit.mT).abs() > rounding).any()):
        return f"{name} is not symmetric"
    if signed:
        return ""
    slack = rounding * unit.diagonal(dim1=-2, dim2=-1).abs().sum(-1, keepdim=True) + 1e-30
    _, failed = torch.linalg.cholesky_ex(unit + torch.diag_embed(slack.expand(unit.shape[:-1])))
    return f"{name} has an eigenvalue below zero" if bool(failed.any()) else ""


def flaw_of_basis(name: str, rows: Tensor, values: Tensor | None = None) -> str:
    """Say what is wrong with rows (*b, k, n) that should be orthonormal; rows of small `values` (k,) count less."""
    if found := flaw_of_values(name, rows, signed=True):
        return found
    rows = rows if rows.dtype.itemsize >= 4 else rows.float()
    each = torch.ones(rows.shape[-2]) if values is None or not len(values) else values / values.max().clamp(min=1e-300)
    each = each.to(rows)
    rows = rows * each.sqrt()[:, None]
    off = rows @ rows.mT - torch.diag(each)
    return f"{name} is not orthonormal" if bool((off.abs() > torch.finfo(rows.dtype).eps ** 0.5).any()) else ""


def flaw_of_ranks(ranks: Any) -> str:
    """Say what is wrong with a pair of ranks, each of which should be None or a whole number from zero."""
    fine = len(ranks) == 2 and all(rank is None or (type(rank) is int and rank >= 0) for rank in ranks)
    return "" if fine else f"the ranks are {ranks}"


def first_flaw(*found: str) -> str:
    """Return the first message that is not empty."""
    return next(filter(None, found), "")
