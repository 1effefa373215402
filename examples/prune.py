"""Find inputs that do not matter, and remove units that the data do not need: the result is a smaller network.

python examples/prune.py
"""

import torch
from torch import nn

import lapwing

torch.manual_seed(0)
x = torch.randn(200, 6)  # only the first two inputs matter
y = ((x[:, 0] * x[:, 1]) > 0).long()

model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
options = {"epochs": 60, "every": 12, "batch_size": 50, "optimizer": lambda p: torch.optim.Adam(p, 5e-3)}
inputs = lapwing.train(model, (x, y), "classification", prior="input", **options)
print("weights that the data determine, by input:", [f"{v:.1f}" for v in lapwing.relevance(inputs.laplace).tolist()])

units = lapwing.train(model, (x, y), "classification", prior="unit", **options)
held = torch.randn(1000, 6)
truth = ((held[:, 0] * held[:, 1]) > 0).long()
for share in (0.0, 0.3, 0.5, 0.7):
    small = lapwing.prune(units.laplace, share, structured=True)
    right = (small.module(held).argmax(1) == truth).double().mean().item()
    widths = [layer.out_features for layer in small.module if isinstance(layer, nn.Linear)]
    print(
        f"{share:.0%} of the units removed: widths {widths}, {small.sparsity:.0%} of the weights, accuracy {right:.1%}"
    )
