# %% [markdown]
# # A posterior in Lightning
#
# `LaplaceCallback` fits a posterior when training ends, at the weights of the best checkpoint. The posterior is saved inside the
# checkpoint, and `trainer.predict` returns predictions with uncertainty.

# %%
import logging
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing.lightning import LaplaceCallback, load_posterior

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(x))
train, val, test = (DataLoader(TensorDataset(x[part], y[part]), 100) for part in (order[:500], order[500:800], order[800:]))

# %%
folder = tempfile.mkdtemp()
callback = LaplaceCallback("classification", structure="kron")
checkpoint = ModelCheckpoint(folder, "best", monitor="val_loss")
trainer = pl.Trainer(
    max_epochs=15, callbacks=[callback, checkpoint], accelerator="cpu", logger=False,
    enable_progress_bar=False, enable_model_summary=False,
)
module = Classifier()
trainer.fit(module, train, val)
print(callback.la.tuned)

# %%
predictions = trainer.predict(module, test)
print(f"{len(predictions)} batches; probabilities {tuple(predictions[0].probs.shape)}, epistemic {tuple(predictions[0].epistemic.shape)}")

# %% [markdown]
# ## Load the posterior from the checkpoint
# The checkpoint contains the posterior, as tensors and plain types. Another program loads it like this:

# %%
again = Classifier.load_from_checkpoint(checkpoint.best_model_path).eval()
la = load_posterior(checkpoint.best_model_path, again)
print(lapwing.evaluate({"network": again, "Laplace": la}, test).table("accuracy", "nll", "ece"))
