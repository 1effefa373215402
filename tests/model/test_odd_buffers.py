"""Sparse, conjugate and meta buffers have no plain bytes: they are fitted, and changes of sparse ones are noticed."""

import pytest
import torch
from torch import Tensor, nn

import lapwing

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


class Graph(nn.Module):
    """A sparse adjacency, as graph networks keep it."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        eye = torch.eye(4)
        self.register_buffer("edges", eye.to_sparse_csr() if layout == "csr" else eye.to_sparse())
        self.register_buffer("phase", torch.ones(4, dtype=torch.complex64).conj())
        self.register_buffer("nothing", torch.empty(3, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((self.edges @ x.T).T * self.phase.real)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_odd_buffers_are_fitted_and_watched(layout: str) -> None:
    module = Graph(layout)
    la = lapwing.fit(module, (X, Y), "classification", structure="diag")
    torch.testing.assert_close(la.predict(X).function.mean, module.eval()(X).detach())
    module.edges = module.edges * 2
    with pytest.raises(lapwing.UnsupportedModel, match="changed since the fit"):
        la.predict(X)
