"""Sums of outer products."""

from __future__ import annotations

from torch import Tensor

PANEL = 128  # columns of a product; smaller ones, and sums of fewer rows, gain nothing


def gram(rows: Tensor) -> Tensor:
    """rowsᵀ rows, (*b, m, d) → (*b, d, d). Of a large one the upper half is multiplied, and mirrored."""
    m, d = rows.shape[-2:]
    if rows.requires_grad or d < 2 * PANEL or m < PANEL:
        return rows.mT @ rows
    total = rows.new_empty(*rows.shape[:-2], d, d)
    for start in range(0, d, PANEL):
        stop = min(start + PANEL, d)
        panel = rows[..., start:stop].mT @ rows[..., start:]
        total[..., start:stop, start:] = panel
        total[..., stop:, start:stop] = panel[..., stop - start :].mT
    return total
