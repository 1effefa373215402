"""Train a classifier while the evidence chooses one prior precision per layer, without a validation set.

python examples/train_with_evidence.py
"""

import torch
from torch import nn

import lapwing

torch.manual_seed(0)
angle = torch.rand(300) * 3.14
label = torch.randint(2, (300,))
x = torch.stack([angle.cos(), angle.sin()], 1) * (1 - 2 * label[:, None]) + torch.tensor([0.5, 0.25]) * label[:, None]
x = x + 0.15 * torch.randn_like(x)

model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2))
trained = lapwing.train(
    model,
    (x[:200], label[:200]),
    "classification",
    epochs=50,
    batch_size=50,
    optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
    prior="layerwise",
)
print(trained.table(6))
p = trained.laplace.predict(x[200:])
print(f"prior: {trained.laplace.prior}")
right, nll = (p.label == label[200:]).double().mean(), -p.log_prob(label[200:]).mean()
print(f"test accuracy {right.item():.1%}, NLL {nll.item():.3f}")
