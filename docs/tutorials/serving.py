# %% [markdown]
# # Serving: uncertainty at the price of a forward pass
#
# Most services fit the last layer only. A prediction is then the forward pass of the network and a few products with small matrices, and
# it can be written to a file that needs neither Lapwing nor the class of the network.

# %%
import tempfile
import threading
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
order = torch.randperm(len(x))
train, val, test = order[:1000], order[1000:1300], order[1300:]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)
)
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimizer.step()
model = model.eval()

# %%
la = lapwing.fit(model, (x[train], y[train]), "classification", select="last_layer", structure="kron")
la = la.tune((x[val], y[val]))
print(lapwing.evaluate({"network": model, "last layer": la}, (x[test], y[test])).table("accuracy", "nll", "ece"))

# %% [markdown]
# ## Make a plain module for servers
# `la.predictor` returns an `nn.Module` that no longer needs `la`. Any number of threads may call it.

# %%
predictor = la.predictor("probs", "epistemic")
answers = {}


def serve(k):
    answers[k] = predictor(x[test[k]][None])["probs"]


threads = [threading.Thread(target=serve, args=(k,)) for k in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
together = predictor(x[test[:8]])["probs"]
print("the same as all at once:", all(torch.allclose(answers[k][0], together[k], atol=1e-6) for k in range(8)))

# %% [markdown]
# ## Write a file that runs without Lapwing
# `torch.export.load` reads `.pt2` files, ONNX Runtime reads `.onnx` files. The batch dimension is dynamic.

# %%
path = Path(tempfile.mkdtemp()) / "digits.pt2"
la.export(path, x[:2])
loaded = torch.export.load(path).module()
answer = loaded(x[test[:5]])
print({name: tuple(value.shape) for name, value in answer.items()})
print(f"largest difference from la.predict: {float((answer['probs'] - la.predict(x[test[:5]]).probs).abs().max()):.1e}")
