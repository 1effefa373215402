"""Few held-out items: what `tune` chooses is about as good as temperature scaling of the same items."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing
from lapwing.evidence.settings import best_logit_temperature


@pytest.mark.slow
@pytest.mark.parametrize("items", [100])
def test_tuning_stays_near_temperature_scaling(items):
    generator = torch.Generator().manual_seed(0)

    def data(n):
        x = torch.randn(n, 4, generator=generator)
        logits = torch.stack([x[:, 0] + x[:, 1], x[:, 2] * x[:, 3], x[:, 0] - x[:, 2]], 1)
        return x, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))
    train = data(80)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(300):  # until it is far too sure
        optimizer.zero_grad()
        F.cross_entropy(model(train[0]), train[1]).backward()
        optimizer.step()
    la = lapwing.fit(model, train, "classification", structure="full")
    x, y = data(3000)
    excess = []
    for _ in range(5):
        few = data(items)
        with torch.no_grad():
            scale = best_logit_temperature(model(few[0]), few[1], la.likelihood)
            scaled = F.cross_entropy(model(x) / scale, y).item()
        excess.append(-la.tune(few).predict(x).log_prob(y).mean().item() - scaled)
    assert sum(excess) / len(excess) < 0.005
