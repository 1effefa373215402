"""Sums of outer products against their definition."""

from __future__ import annotations

import pytest
import torch

from lapwing.linalg.rows import PANEL, gram


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
@pytest.mark.parametrize("d", [1, PANEL, 2 * PANEL - 1, 2 * PANEL, 2 * PANEL + 1, 3 * PANEL + 5])
@pytest.mark.parametrize("m", [0, 7, PANEL, PANEL + 3])
def test_definition(m: int, d: int, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = torch.randn(*batch, m, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    found = gram(rows)
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.einsum("...mi,...mj->...ij", rows, rows))
    if d >= 2 * PANEL and m >= PANEL:
        assert torch.equal(found[..., :PANEL, PANEL:], found[..., PANEL:, :PANEL].mT)


def test_rows_that_are_strided() -> None:
    wide = torch.randn(2 * PANEL, 2, 3 * PANEL, dtype=torch.float64)
    rows = wide[:, 0]
    torch.testing.assert_close(gram(rows), rows.T @ rows)
    rows = wide.reshape(-1, 3 * PANEL).T[: PANEL + 1]
    torch.testing.assert_close(gram(rows), rows.T @ rows)


def test_gradients() -> None:
    rows = torch.randn(PANEL, 2 * PANEL, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2 * PANEL, dtype=torch.float64)
    (found,) = torch.autograd.grad(v @ gram(rows) @ v, rows)
    torch.testing.assert_close(found, 2 * torch.outer(rows.detach() @ v, v))
