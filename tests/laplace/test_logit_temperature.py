"""A temperature on the logits: temperature scaling on top of the posterior."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import BadData, UnsupportedOperation


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def fitted(prior: float = 1.0) -> lapwing.Laplace:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return lapwing.fit(net, data(), "classification", structure="full", prior=prior)


def test_probabilities_are_those_of_the_divided_logits() -> None:
    la, x = fitted(), data()[0][:6]
    hot = la.replace(logit_temperature=2.5)
    f = la.predict(x).function
    noise = torch.randn(100_000, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draws = f.mean + torch.einsum("bij,sbj->sbi", torch.linalg.cholesky(f.covariance), noise)
    expected = (draws / 2.5).softmax(-1).mean(0)
    torch.testing.assert_close(hot.predict(x).probs, expected, rtol=0, atol=3e-3)


def test_without_a_posterior_it_is_temperature_scaling() -> None:
    la, x = fitted(prior=1e12), data()[0]
    expected = (la.module(x) / 1.7).softmax(-1).detach()
    torch.testing.assert_close(la.replace(logit_temperature=1.7).predict(x).probs, expected, rtol=0, atol=1e-8)


def test_evidence_and_novelty_do_not_see_it() -> None:
    la, x = fitted(), data()[0]
    hot = la.replace(logit_temperature=3.0)
    assert hot.log_evidence() == la.log_evidence()
    assert torch.equal(hot.predict(x).novelty, la.predict(x).novelty)
    assert "logits divided by 3" in hot.summary()
    assert "divided" not in la.summary()


@pytest.mark.parametrize("method", ["linearized", "sampled"])
def test_stored_and_read_back(tmp_path: Path, method: str) -> None:
    la, x = fitted().replace(logit_temperature=0.6), data()[0]
    la.save(tmp_path / "a.lapwing")
    back = lapwing.load(tmp_path / "a.lapwing", la.module)
    assert back.logit_temperature == 0.6
    assert torch.equal(back.predict(x, method=method).probs, la.predict(x, method=method).probs)


def test_members_of_an_ensemble_share_it() -> None:
    la, x = fitted(), data()[0]
    members = la.ensemble(4)
    expected = torch.stack([torch.func.functional_call(la.module, w, (x,)) / 2 for w in members]).softmax(-1).mean(0)
    torch.testing.assert_close(la.replace(logit_temperature=2.0).ensemble(4).predict(x).probs, expected.detach())


def test_refusals() -> None:
    la = fitted()
    with pytest.raises(BadData, match="positive"):
        la.replace(logit_temperature=0.0)
    net = nn.Linear(3, 1).double()
    regression = lapwing.fit(net, (data()[0], data()[0][:, :1]), lapwing.Gaussian(1.0))
    with pytest.raises(UnsupportedOperation, match="divides logits"):
        regression.replace(logit_temperature=2.0)
