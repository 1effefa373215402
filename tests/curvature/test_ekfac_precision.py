"""EKFAC where reduced Kronecker factors are singular: rounding must not choose the basis."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import lapwing


def images(n: int, seed: int) -> Tensor:
    """Smooth ones, whose neighboring pixels have nearly equal means."""
    coarse = torch.randn(n, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return interpolate(coarse, size=8, mode="bicubic")


class Attention(nn.Module):
    """The gradients of all keys of a sample sum to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x[:, 0]).chunk(3, -1)
        return self.head(((q @ k.mT).softmax(-1) @ v).mean(1))


NETWORKS = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 4)
    ),
    "instance norm": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.InstanceNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(216, 4)
    ),
    "attention": Attention,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_float32_and_float64_give_the_same_posterior(name: str) -> None:
    torch.manual_seed(0)
    net = NETWORKS[name]().float().double().eval()
    x, y = images(300, 1).float().double(), torch.randint(4, (300,))
    found = []
    for dtype in (torch.float64, torch.float32):
        batches = [(x[k : k + 50].to(dtype), y[k : k + 50]) for k in range(0, 300, 50)]
        la = lapwing.fit(net.to(dtype), batches, "classification", structure="ekfac", prior=0.1, progress=False)
        p = la.predict(images(20, 2).to(dtype))
        found.append((p.function.variance.double(), la.log_evidence()))
    (exact, evidence), (rounded, other) = found
    assert ((rounded - exact) / exact).abs().max() < 1e-3
    assert (other - evidence).abs() < 0.02
