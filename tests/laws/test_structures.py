"""Laws of structures: every one that is registered obeys them, on small networks of dense and shared weights."""

from __future__ import annotations

import pytest
from torch import Tensor

import lapwing
from lapwing.curvature import Structure
from lapwing.linalg import Layout
from lapwing.storage import named
from lapwing.testing import StructureLaws


def within_blocks(ggn: Tensor, layout: Layout) -> Tensor:
    kept = ggn.new_zeros(ggn.shape)
    for index in layout.index:
        kept[index[:, None], index] = ggn[index[:, None], index]
    return kept


EXPECTED = {lapwing.Diag: lambda ggn, _: ggn.diagonal().diag(), lapwing.BlockDiag: within_blocks}
SUMS = (lapwing.Diag, lapwing.BlockDiag, lapwing.Kron, lapwing.Full, lapwing.Functional)  # updates are exact


def laws(kind: type[Structure]) -> type[StructureLaws]:
    own: dict = {"structure": kind(), "updates": kind in SUMS}
    if kind in EXPECTED:
        own["expected"] = lambda _, ggn, layout: EXPECTED[kind](ggn, layout)
    return type("Laws", (StructureLaws,), own)


OURS = {name: laws(kind) for name, kind in named(Structure).items() if kind.__module__.startswith("lapwing.")}


@pytest.mark.parametrize("law", [name for name in dir(StructureLaws) if name.startswith("test_")])
@pytest.mark.parametrize("name", OURS)
def test_laws(name: str, law: str) -> None:
    getattr(OURS[name](), law)()
