"""Learn prior and noise inside a training loop of your own, with one call per epoch.

python examples/own_training_loop.py
"""

import torch
from torch import nn

import lapwing

torch.manual_seed(0)
x = torch.rand(128, 1) * 6 - 3
y = x.sin() + 0.2 * torch.randn_like(x)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
online = lapwing.Online("regression", n_data=len(x), prior="layerwise")
for epoch in range(40):
    for inputs, targets in loader:
        optimizer.zero_grad()
        online.loss(model, inputs, targets).backward()
        optimizer.step()
    if epoch >= 10:
        online = online.step(model, loader)

la = lapwing.fit(model, loader, online.likelihood, structure="kron", prior=online.belief.prior)
p = la.predict(torch.tensor([[0.0], [6.0]]))
print(f"noise {float(la.likelihood.noise):.3f} (the data have 0.2), log evidence {float(la.log_evidence()):.1f}")
print(f"standard deviation of y inside the data {p.stddev[0].item():.2f}, far outside {p.stddev[1].item():.2f}")
