"""Monte Carlo dropout against all masks of a tiny network, one by one."""

import itertools

import pytest
import torch
from tests import dense
from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.baselines import MCDropout
from lapwing.errors import BadData, UnsupportedModel


def net(p: float = 0.4) -> nn.Sequential:
    return dense.build(lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(p), nn.Linear(4, 3)))


def enumerated(model: nn.Sequential, x: Tensor, p: float) -> Tensor:
    """E over the 2⁴ masks of the probabilities."""
    hidden = torch.tanh(model[0](x))
    total = torch.zeros(len(x), 3, dtype=x.dtype)
    for mask in itertools.product((0.0, 1.0), repeat=4):
        keep = torch.tensor(mask, dtype=x.dtype)
        weight = float((1 - p) ** keep.sum() * p ** (4 - keep.sum()))
        total += weight * model[3](hidden * keep / (1 - p)).softmax(-1)
    return total.detach()


def test_the_average_is_that_over_all_masks() -> None:
    model, x = net(), 2 * dense.randn(5, 2)
    p = MCDropout(model, "classification", samples=4000).predict(x)
    assert (p.probs - enumerated(model, x, 0.4)).abs().max() < 0.02  # four standard errors
    assert model.training
    assert p.epistemic.min() > 0


def test_predictions_do_not_depend_on_the_split_and_follow_a_generator() -> None:
    model, x = net(), dense.randn(6, 2)
    drop = MCDropout(model, "classification", samples=7)
    whole = drop.predict(x).probs
    assert torch.allclose(whole, torch.cat([drop.predict(x[:1]).probs, drop.predict(x[1:]).probs]), rtol=1e-12)
    draws = [drop.predict(x, generator=torch.Generator().manual_seed(s)).probs for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_functional_dropout_counts_and_batch_norm_stays_in_eval() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout2d(self.norm(self.conv(x)), 0.5, self.training)
            return self.head(x.flatten(1))

    model, x = dense.build(Own).train(), dense.randn(4, 1, 4, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    f = MCDropout(model, "classification", samples=20).predict(x).function.samples
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    maps = model.eval().norm(model.conv(x)).detach()
    for draw in f:  # every draw is the network with whole maps dropped, the same ones for all inputs
        fits = [
            torch.allclose(model.head((maps * torch.tensor(m).view(3, 1, 1) * 2).flatten(1)), draw)
            for m in itertools.product((0.0, 1.0), repeat=3)
        ]
        assert sum(fits) == 1


def test_dropout_of_a_weight_masks_each_entry() -> None:
    class Connect(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ F.dropout(self.weight, 0.5, self.training).T

    eye = torch.eye(3).double()
    f = MCDropout(dense.build(Connect), "classification", samples=40).predict(eye).function.samples  # (40, 3, 2): Wᵀ
    assert not torch.equal(f[..., 0], f[..., 1])


def test_gradients_reach_the_inputs() -> None:
    drop, x = MCDropout(net(), "classification", samples=5), dense.randn(3, 2).requires_grad_()
    value = lambda x: drop.predict(x, differentiable=True).log_prob(torch.tensor([0, 1, 2])).sum()  # noqa: E731
    assert torch.autograd.gradcheck(value, x)


def test_what_has_no_masks_is_refused() -> None:
    plain = dense.build(lambda: nn.Linear(2, 3))
    with pytest.raises(UnsupportedModel, match="no dropout was seen"):
        MCDropout(plain, "classification").predict(dense.randn(2, 2))
    with pytest.raises(UnsupportedModel, match="dropout inside"):
        MCDropout(nn.LSTM(2, 3, num_layers=2, dropout=0.1), "classification")
    with pytest.raises(BadData, match="noise"):
        MCDropout(net(), "regression")
    with pytest.raises(BadData, match="empty"):
        MCDropout(net(), "classification").predict(dense.randn(0, 2))


def test_alpha_dropout_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.AlphaDropout(0.2), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModel, match="alpha dropout has no masks that scale"):
        MCDropout(model, "classification").predict(torch.randn(2, 3))
