"""`Prediction.novelty` against dense algebra, and what it must not depend on."""

import torch
from torch import nn

import lapwing
from lapwing.predictive.novelty import FLOOR, information_gain


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def test_novelty_is_the_information_of_one_more_target() -> None:
    model, x = network(), torch.randn(20, 2, dtype=torch.float64)
    y = torch.randint(3, (20,))
    la = lapwing.fit(model, (x, y), "classification", structure="full")
    weights = dict(model.named_parameters())
    jacobian = torch.func.jacrev(lambda p, z: torch.func.functional_call(model, p, (z,)))(weights, x[:5])
    rows = torch.cat([jacobian[name].reshape(5, 3, -1) for name in weights], -1)
    h = la.curvature.dense()
    floor = FLOOR * h.trace() / len(h) * torch.eye(len(h), dtype=h.dtype)
    p = (model(x[:5]) / 2).softmax(-1).detach()
    information = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / 4
    v = rows @ torch.linalg.solve(h + floor, rows.mT)
    expected = 0.5 * torch.linalg.slogdet(torch.eye(3, dtype=h.dtype) + v @ information).logabsdet
    torch.testing.assert_close(la.predict(x[:5]).novelty, expected.detach(), rtol=1e-8, atol=0.0)


def test_novelty_knows_nothing_of_prior_noise_and_temperature() -> None:
    model, x = network(), torch.randn(20, 2, dtype=torch.float64)
    la = lapwing.fit(model, (x, model(x).detach()), lapwing.Gaussian(1.0), structure="kron")
    other = la.replace(prior=50.0, temperature=3.0, likelihood=lapwing.Gaussian(0.1))
    torch.testing.assert_close(la.predict(x).novelty, other.predict(x).novelty, rtol=1e-12, atol=0.0)


def test_novelty_grows_away_from_the_data() -> None:
    model, x = nn.Linear(2, 1).double(), torch.randn(50, 2, dtype=torch.float64)
    la = lapwing.fit(model, (x, model(x).detach()), lapwing.Gaussian(1.0), structure="full")
    near, far = la.predict(x).novelty, la.predict(10 * x).novelty
    assert bool((far > near).all())


def test_many_outputs_are_scored_by_their_variances() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 70).double(), torch.randn(30, 3, dtype=torch.float64)
    la = lapwing.fit(model, (x, torch.randint(70, (30,))), "classification", structure="diag")
    p = (model(x[:4]) / 2).softmax(-1).detach()
    level = la.curvature.dense().diagonal()
    variance = 1 / (level + FLOOR * level.sum() / len(level))
    w, b = variance[: 70 * 3].reshape(70, 3), variance[70 * 3 :]
    v = x[:4].square() @ w.T + b
    expected = 0.5 * (p * (1 - p) * v / 4).sum(-1).log1p()
    torch.testing.assert_close(la.predict(x[:4]).novelty, expected, rtol=1e-8, atol=0.0)


def test_a_common_shift_of_the_logits_is_no_novelty() -> None:
    """No data determine the bias that all classes share; a direction that only shifts them counts for nothing."""
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64)
    x[:, 2] = 0.0
    model = nn.Linear(3, 4).double()
    with torch.no_grad():
        model.weight[:, 2] = 1.0
    la = lapwing.fit(model, (x, torch.randint(4, (40,))), "classification", structure="full")
    f = model(x[:3]).detach()
    shift = torch.ones(4, 4, dtype=torch.float64)
    assert information_gain(f, 1e6 * shift.expand(3, 4, 4), la.likelihood).abs().max() < 1e-6
    contrast = torch.eye(4).double() - 0.25
    assert information_gain(f, 1e6 * contrast.expand(3, 4, 4), la.likelihood).min() > 5


def test_confidence_hides_less_than_it_would() -> None:
    """A sure prediction under a wide covariance: half its logits leave more to learn than all of them."""
    f = torch.tensor([[12.0, 0.0, -12.0]], dtype=torch.float64)
    covariance = 100 * torch.eye(3, dtype=torch.float64)[None]
    root = lapwing.Categorical().factor(f)
    plain = 0.5 * torch.logdet(torch.eye(root.shape[-1]).double() + root.mT @ covariance @ root)
    assert information_gain(f, covariance, lapwing.Categorical()) > 10 * plain


def test_values_are_not_softened() -> None:
    covariance = torch.tensor([[[3.0]]], dtype=torch.float64)
    gain = information_gain(torch.zeros(1, 1).double(), covariance, lapwing.Gaussian(0.1))
    torch.testing.assert_close(gain, 0.5 * torch.tensor([4.0], dtype=torch.float64).log())
