"""`tune()` alone keeps a classifier's posterior only where leave-one-out of the training data shows that it helps."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing
from lapwing.extras import loo


def line(n, seed):
    """Two overlapping classes in three dimensions."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    y = (x[:, 0] + torch.randn(n, dtype=torch.float64, generator=generator) > 0).long()
    return x, y


def trained(data, decay, width=None):
    torch.manual_seed(0)
    features = nn.Identity() if width is None else nn.Sequential(nn.Linear(3, width), nn.Tanh())
    model = nn.Sequential(features, nn.Linear(width or 3, 2)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=400, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        penalty = 0.5 * decay * sum(p.square().sum() for p in model.parameters())
        loss = F.cross_entropy(model(data[0]), data[1], reduction="sum") + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def nll(prediction, y):
    return -prediction.log_prob(y).mean().item()


def test_leave_one_out_by_refitting_agrees_with_the_decision():
    """At the mode of a small model, refits without each datum say whether the posterior helps, and tune() agrees."""
    data, tau = line(24, 3), 0.05
    model = trained(data, tau)
    la = lapwing.fit(model, data, "classification", structure="full", prior=tau)
    tuned = la.tune()
    found = next(message for message in tuned.tuning.messages if "leave-one-out" in message)
    chosen = la.tune(method="evidence")
    gains = []
    for k in range(24):
        keep = torch.arange(24) != k
        rest = (data[0][keep], data[1][keep])
        other = trained(rest, float(chosen.tuning.setting.precision))
        there = lapwing.fit(other, rest, "classification", structure="full", prior=chosen.prior)
        x, y = data[0][k : k + 1], data[1][k : k + 1]
        gains.append(F.cross_entropy(other(x), y).item() - nll(there.predict(x), y))
    gains = torch.tensor(gains)
    shown = gains.mean() > 2 * gains.std() / math.sqrt(24)
    assert tuned.tuning.deterministic == (not shown)
    assert "24 training data" in found


@pytest.mark.parametrize("width", [None, 20])
def test_what_is_not_shown_to_help_leaves_the_network_as_it_is(width):
    data = line(60, 0)
    model = trained(data, 1e-6, width)  # with 20 units it interpolates
    la = lapwing.fit(model, data, "classification", structure="full" if width is None else "kron")
    if width is None:
        tuned = la.tune()
    else:
        with pytest.warns(UserWarning, match="interpolates"):
            tuned = la.tune()
    if tuned.tuning.deterministic:
        x = torch.randn(30, 3, dtype=torch.float64)
        torch.testing.assert_close(tuned.predict(x).probs, model(x).softmax(-1).detach(), rtol=0, atol=1e-4)
        assert any("not shown to help" in message for message in tuned.tuning.messages)
        assert "not shown to help" in tuned.summary()
    else:
        assert any("the posterior is kept" in message for message in tuned.tuning.messages)
    test = line(4000, 1)
    assert nll(tuned.predict(test[0]), test[1]) <= F.cross_entropy(model(test[0]), test[1]).item() + 1e-6


def test_the_evidence_itself_and_a_loaded_posterior(tmp_path):
    data = line(60, 0)
    model = trained(data, 1e-6)
    la = lapwing.fit(model, data, "classification", structure="full")
    assert not la.tune(method="evidence").tuning.deterministic
    la.save(tmp_path / "a.lapwing")
    back = lapwing.load(tmp_path / "a.lapwing", model).tune()
    assert back.tuning.deterministic
    assert "no training data at hand" in back.tuning.messages[0]
    one_shot = lapwing.fit(model, iter([data]), "classification", structure="full").tune()
    assert one_shot.tuning.deterministic


def test_a_regression_keeps_what_the_evidence_chose():
    x, _ = line(60, 0)
    y = x[:, :1] + 0.3 * torch.randn(60, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(3, 1).double()
    assert not lapwing.fit(model, (x, y), "regression", structure="full").tune().tuning.deterministic


def test_a_few_data_that_move_far_decide_nothing(monkeypatch):
    """Newton steps that cost ten data a hundred nats each are no proof against small losses of all others."""
    data = line(200, 0)
    la = lapwing.fit(trained(data, 1.0), data, "classification", structure="full")
    posterior = torch.full((1000,), 0.05, dtype=torch.float64)
    network = torch.full((1000,), 0.04, dtype=torch.float64)
    network[:10] = 100.0

    def tune_loo(belief, groups, batches, *, rule, **options):
        rule(SimpleNamespace(losses=torch.stack([posterior, network]), home=1))
        return SimpleNamespace(messages=())

    monkeypatch.setattr(loo, "tune_loo", tune_loo)
    assert la.tune().tuning.deterministic
    network[:] = 0.08  # a gain of every datum is one
    assert not la.tune().tuning.deterministic
