"""Backward passes with cotangents of our own, one and many at a time, against `torch.autograd.grad` with each."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import lapwing
from lapwing.model import linearization
from lapwing.model.forward import forward_mode
from lapwing.model.linearization import pull, pull_all

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def distances(x: Tensor) -> Tensor:
    """`torch.vmap` has a wrong derivative of this."""
    return torch.cdist(x, X[:4] + 1)


def convolution(x: Tensor) -> Tensor:
    return torch.conv1d(x[:, None], torch.ones(2, 1, 2, dtype=x.dtype)).tanh()


def recurrent(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return nn.GRU(1, 4, batch_first=True).double()(x[:, :, None])[0]


FUNCTIONS = {
    "elementwise": torch.sin,
    "distances": distances,
    "convolution": convolution,
    "recurrent": recurrent,
    "sorted": lambda x: x.sort(1).values.cumsum(1),
    "itself": lambda x: x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("own", [True, False])
def test_cotangents_one_and_many_at_a_time(name: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not own:  # as in a PyTorch that has no such function
        monkeypatch.setattr(linearization, "_vmap", None)
    x, unused = X.clone().requires_grad_(), torch.ones(2, requires_grad=True)
    f = FUNCTIONS[name](x)
    v = torch.randn(4, *f.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = torch.stack([torch.autograd.grad(f, x, each, retain_graph=True)[0] for each in v])
    with torch.no_grad():  # as in a fit
        for _ in range(2):  # the graph is kept
            found, nothing = pull_all(f, [x, unused], v)
            assert found is not None
            assert nothing is None
            torch.testing.assert_close(found, want)
        one, nothing = pull(f, [x, unused], v[0])
    assert one is not None
    assert nothing is None
    torch.testing.assert_close(one, want[0])


def test_cotangents_of_another_shape_are_refused() -> None:
    x = X.clone().requires_grad_()
    for call in (lambda: pull(x.sin(), [x], torch.ones(3)), lambda: pull_all(x.sin(), [x], torch.ones(2, 3))):
        with pytest.raises(RuntimeError, match=r"cotangents of shape .* for outputs of shape \(5, 3\)"):
            call()


def test_complex_outputs() -> None:
    x = torch.complex(X, X.flip(0)).requires_grad_()
    f = x.square()
    v = torch.complex(X.cos(), X.sin()).expand(2, 5, 3) * torch.tensor([1.0, 2.0])[:, None, None]
    (found,) = pull_all(f, [x], v)
    assert found is not None
    torch.testing.assert_close(
        found, torch.stack([torch.autograd.grad(f, x, each, retain_graph=True)[0] for each in v])
    )


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_inputs_with_a_forward_mode_tangent(structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    la = lapwing.fit(model, (X, torch.tensor([0, 1, 0, 1, 1])), "classification", structure=structure, progress=False)
    with forward_ad.dual_level(), forward_mode():
        got = la.predict(forward_ad.make_dual(X[:2], torch.ones_like(X[:2]))).probs
    torch.testing.assert_close(got, la.predict(X[:2]).probs)
