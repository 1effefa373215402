"""Trained weights, made once and kept in a cache folder."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm


def cache() -> Path:
    """The folder named by LAPWING_CACHE, else `lapwing-cache` among the temporary files."""
    return Path(os.environ.get("LAPWING_CACHE") or Path(tempfile.gettempdir()) / "lapwing-cache")


def kept_tensors(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors from the cache; made and kept there if they are missing."""
    path = cache() / f"{name}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        save_file({key: value.contiguous() for key, value in make().items()}, part)
        part.rename(path)
    return load_file(path)


def trained(name: str, model: nn.Module, data: Callable[[], tuple[Tensor, Tensor]], **options: Any) -> nn.Module:
    """The model with its weights from the cache; trained there and then if they are missing."""

    def weights() -> dict[str, Tensor]:
        train(model, *data(), label=name, **options)
        return model.state_dict()

    model.load_state_dict(kept_tensors(name, weights))
    return model.eval()


def train(
    model: nn.Module, x: Tensor, y: Tensor, *, epochs: float, rate: float = 2e-3, batch: int = 128, label: str = ""
) -> None:
    """Adam with weight decay and a cosine schedule; seeded. A fraction of an epoch is allowed."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-2)
    steps = int(epochs * len(x) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for _ in tqdm(range(steps), desc=f"train {label}", unit="step", delay=1, leave=False, mininterval=5):
        chosen = torch.randint(len(x), (batch,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
