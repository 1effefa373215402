"""Layers that read the same tensor share the sum over their inputs, its factor and its decomposition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.linalg import BlockDiagonal, EigenKronecker, Kronecker, move, once, pack
from lapwing.model.rules.rule import Linear


class Attention(nn.Module):
    """Query, key and value of the same positions, the value of twice as many units and without a bias; pooled."""

    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(5, 8, bias=False)
        self.out, self.copies = nn.Linear(8, 3), copies

    def forward(self, x: Tensor) -> Tensor:
        own = x.clone if self.copies else lambda: x
        weights = (self.q(own()) @ self.k(own()).mT).softmax(-1)
        return self.out((weights @ self.v(own())).mean(1))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 6, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (12,), generator=generator)


def fitted(copies: bool = False, **options: Any) -> lapwing.Laplace:
    torch.manual_seed(0)
    x, y = data()
    return lapwing.fit(
        Attention(copies).double(), [(x[:7], y[:7]), (x[7:], y[7:])], "classification", progress=False, **options
    )


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_same_factors_as_from_copies(sharing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("right_gram", "right_sum"):
        own = getattr(Linear, name)

        def counted(self: Linear, *args: Any, own: Any = own, name: str = name, **options: Any) -> Any:
            calls.append(name)
            return own(self, *args, **options)

        monkeypatch.setattr(Linear, name, counted)
    shared, few = fitted(structure=lapwing.Kron(sharing=sharing)).curvature.matrix, len(calls)
    apart, many = fitted(copies=True, structure=lapwing.Kron(sharing=sharing)).curvature.matrix, len(calls) - few
    assert isinstance(shared, BlockDiagonal)
    assert isinstance(apart, BlockDiagonal)
    assert (few, many) == (2 * 3, 2 * 4)  # of two batches; q and k have a bias, v has none
    for a, b in zip(shared.blocks, apart.blocks, strict=True):
        torch.testing.assert_close(a.dense(), b.dense(), rtol=1e-12, atol=1e-14)


def test_equal_factors_are_one(tmp_path: Path) -> None:
    la = fitted(structure="kron")
    x, y = data()
    la.save(tmp_path / "shared")
    back = lapwing.load(tmp_path / "shared", la.module)
    matrices = la.curvature.matrix, back.curvature.matrix, move(la.curvature.matrix, "cpu")
    for matrix in (*matrices, la.curvature.matrix.scale(2.0)):
        assert isinstance(matrix, BlockDiagonal)
        q, k, v, out = matrix.blocks
        assert all(isinstance(block, Kronecker) for block in (q, k, v, out))
        assert q.right is k.right
        assert q.right_spectrum is k.right_spectrum
        assert q.left_spectrum is not k.left_spectrum
        assert v.right_spectrum is not q.right_spectrum
    tensors, aliases = once(pack(la.curvature.matrix)[0])
    assert aliases == {"blocks.1.right": "blocks.0.right"}
    assert "blocks.1.right" not in tensors
    assert torch.equal(la.log_evidence(), back.log_evidence())
    assert torch.equal(la.predict(x).probs, back.predict(x).probs)
    torch.testing.assert_close(la.update([(x, y)]).log_evidence(), back.update([(x, y)]).log_evidence())


def test_bases_of_ekfac_are_one(tmp_path: Path) -> None:
    la = fitted(structure="ekfac")
    la.save(tmp_path / "shared")
    for other in (lapwing.load(tmp_path / "shared", la.module), la.to("cpu")):
        matrix = other.curvature.matrix
        assert isinstance(matrix, BlockDiagonal)
        q, k, *_ = matrix.blocks
        assert isinstance(q, EigenKronecker)
        assert isinstance(k, EigenKronecker)
        assert q.right is k.right
        torch.testing.assert_close(matrix.dense(), la.curvature.matrix.dense(), rtol=0, atol=0)
        assert torch.equal(other.log_evidence(), la.log_evidence())


def test_a_tensor_that_changes_in_place_is_read_as_it_is() -> None:
    """Rows are refused or right where a buffer is overwritten between two layers; never those of the first."""

    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = x.clone()
            first = self.a(h)
            h.mul_(2)
            return first + self.b(h)

    torch.manual_seed(0)
    x, y = data()
    x = x[:, 0]
    model = Overwriting().double()
    try:
        la = lapwing.fit(model, (x, y), "classification", structure="kron", progress=False)
    except (lapwing.LapwingError, RuntimeError):
        return
    a, b = la.curvature.matrix.blocks  # type: ignore[attr-defined]
    ones = torch.ones(12, 1, dtype=torch.float64)
    for block, inputs in ((a, x), (b, 2 * x)):
        whole = torch.cat([inputs, ones], 1)
        torch.testing.assert_close(block.right[0], whole.T @ whole / 12)
