"""Every call of a private copy begins with what the user's module holds, not with what an earlier call has left."""

import pytest
import torch
from torch import Tensor, nn

import lapwing

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(6) % 3


class Keeps(nn.Module):
    """Keeps what it made of its weights in eval mode, and counts its calls in a buffer and in a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(4, 4), nn.Linear(4, 3), None
        self.register_buffer("calls", torch.zeros(()))
        self.plain = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.training:
            self.kept = self.a.weight.tanh()
        out = self.b((x @ self.kept.T + self.a.bias).tanh()) * (1 + self.calls + self.plain)
        self.calls += 1
        self.plain += 1
        return out


def make() -> Keeps:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Keeps().double()


def test_members_of_an_ensemble_do_not_share_what_the_first_has_kept() -> None:
    la = lapwing.fit(make(), (X, Y), "classification", structure="diag")
    ensemble = la.ensemble(4)
    expected = []
    for weights in ensemble:
        fresh = make().eval()
        fresh.load_state_dict(weights, strict=False)
        expected.append(fresh(X).softmax(-1).detach())
    torch.testing.assert_close(ensemble.predict(X).probs, torch.stack(expected).mean(0))


def test_differentiable_covariance_is_the_plain_one() -> None:
    la = lapwing.fit(make(), (X, Y), "classification", structure="diag")
    plain = la.predict(X).function.covariance
    torch.testing.assert_close(la.predict(X, differentiable=True).function.covariance.detach(), plain)


def test_a_tensor_kept_with_its_graph_is_refused() -> None:
    """Its graph leads to the user's parameters, so that the copy's would have no gradients."""
    module = make().eval()
    module(X)
    with pytest.raises(lapwing.UnsupportedModel, match=r"a\.weight"):
        lapwing.fit(module, (X, Y), "classification", structure="diag")
