# %% [markdown]
# # Segmentation: one uncertainty per pixel
#
# A network that labels every pixel has as many outputs as pixels × classes. Lapwing reads outputs of shape (batch, classes, height,
# width) with `Categorical(class_dim=1)`; `factor="mc"` estimates the curvature from sampled labels, because the exact curvature would
# need one direction per pixel and class.

# %%
import torch
from matplotlib.figure import Figure
from torch import nn

import lapwing

torch.manual_seed(0)


def scenes(count, radius=(3.0, 6.0)):
    """Noisy images with a bright disc, and the mask of the disc."""
    rows, columns = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    center = 6 + 12 * torch.rand(count, 2, 1, 1)
    size = radius[0] + (radius[1] - radius[0]) * torch.rand(count, 1, 1)
    mask = ((rows - center[:, 0]) ** 2 + (columns - center[:, 1]) ** 2 < size**2).long()
    return (mask + 0.6 * torch.randn(count, 24, 24))[:, None], mask


images, masks = scenes(100)
model = nn.Sequential(
    nn.Conv2d(1, 16, 7, padding=3), nn.ReLU(), nn.Conv2d(16, 16, 7, padding=3), nn.ReLU(), nn.Conv2d(16, 2, 1)
)
optimizer = torch.optim.Adam(model.parameters(), 5e-3)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), masks).backward()
    optimizer.step()

# %% [markdown]
# The posterior is fitted on the training images and tuned on ten more; then it predicts four new ones. Every field of the prediction has
# one value per pixel.

# %%
la = lapwing.fit(
    model, (images, masks), lapwing.Categorical(class_dim=1), structure="kron", factor="mc",
    generator=torch.Generator().manual_seed(0),
).tune(scenes(10))
new, truth = scenes(4)
p = la.predict(new, samples=512)
wrong = p.label != truth
print("probabilities", tuple(p.probs.shape), "epistemic", tuple(p.epistemic.shape))
print(f"pixels right: {float(1 - wrong.float().mean()):.1%}")
print(f"epistemic uncertainty of wrong pixels: {float(p.epistemic[wrong].mean() / p.epistemic[~wrong].mean()):.0f} times that of right ones")

# %% [markdown]
# The uncertainty is largest along the edges of the discs, where the images say least about the class.

# %%
figure = Figure(figsize=(8, 5.6), layout="constrained")
axes = figure.subplots(3, 4)
for k in range(4):
    axes[0, k].imshow(new[k, 0], cmap="gray")
    axes[1, k].imshow(p.entropy[k], cmap="magma", vmin=0, vmax=0.7)
    axes[2, k].imshow(p.epistemic[k], cmap="magma", vmin=0, vmax=0.3)
for one in axes.flat:
    one.set_axis_off()
for row, title in enumerate(("image", "entropy per pixel", "epistemic uncertainty per pixel")):
    axes[row, 0].set_title(title, loc="left")
figure
