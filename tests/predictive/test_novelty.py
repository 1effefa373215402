"""`Prediction.novelty` against dense algebra, and what it must not depend on."""

import torch
from torch import nn

import lapwing
from lapwing.predictive.novelty import FLOOR


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
    p = model(x[:5]).softmax(-1).detach()
    information = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    v = rows @ torch.linalg.solve(h + floor, rows.mT)
    expected = 0.5 * torch.linalg.slogdet(torch.eye(3, dtype=h.dtype) + v @ information).logabsdet
    torch.testing.assert_close(la.predict(x[:5]).novelty, expected.detach(), rtol=1e-8, atol=0.0)


def test_novelty_knows_nothing_of_prior_noise_and_temperature() -> None:
    model, x = network(), torch.randn(20, 2, dtype=torch.float64)
    la = lapwing.fit(model, (x, model(x).detach()), "regression", structure="kron")
    other = la.replace(prior=50.0, temperature=3.0, likelihood=lapwing.Gaussian(0.1))
    torch.testing.assert_close(la.predict(x).novelty, other.predict(x).novelty, rtol=1e-12, atol=0.0)


def test_novelty_grows_away_from_the_data() -> None:
    model, x = nn.Linear(2, 1).double(), torch.randn(50, 2, dtype=torch.float64)
    la = lapwing.fit(model, (x, model(x).detach()), "regression", structure="full")
    near, far = la.predict(x).novelty, la.predict(10 * x).novelty
    assert bool((far > near).all())


def test_many_outputs_are_scored_by_their_variances() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 70).double(), torch.randn(30, 3, dtype=torch.float64)
    la = lapwing.fit(model, (x, torch.randint(70, (30,))), "classification", structure="diag")
    p = model(x[:4]).softmax(-1).detach()
    level = la.curvature.dense().diagonal()
    variance = 1 / (level + FLOOR * level.sum() / len(level))
    w, b = variance[: 70 * 3].reshape(70, 3), variance[70 * 3 :]
    v = x[:4].square() @ w.T + b
    expected = 0.5 * (p * (1 - p) * v).sum(-1).log1p()
    torch.testing.assert_close(la.predict(x[:4]).novelty, expected, rtol=1e-8, atol=0.0)
