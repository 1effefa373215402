"""What is measured: a trained network, the data its curvature is taken from, the inputs to predict.

Every workload is a function `(n, m) -> Task` with n data to fit and m inputs to predict.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache as once
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.checkpoints import kept_tensors, trained
from benchmarks.models import FlatTokens, NextTokens, ResNet18, VisionTransformer, wide_head
from experiments import _datasets as datasets
from experiments import _networks as networks

BATCH = 128  # of the fit and of the gradient epoch
KEPT = 6000  # items of each data set that measurements draw from


@dataclass(frozen=True, eq=False)
class Task:
    """A classifier in evaluation mode, batches (x, y) to fit, inputs to predict.

    `flat` is the network as a peer can read it, one row of outputs a target, where its own outputs are (B, T, C).
    """

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    new: Tensor
    select: str = "all"
    flat: nn.Module | None = None

    @property
    def n(self) -> int:
        return sum(len(x) for x, _ in self.batches)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the posterior is over."""
        module = list(self.model.children())[-1] if self.select == "last_layer" else self.model
        return [p for p in module.parameters() if p.requires_grad]

    def gradient(self) -> None:
        """One gradient epoch: forward and backward over the data, the gradients thrown away."""
        for x, y in self.batches:
            loss = functional.cross_entropy(self.rows(x), y.flatten(), reduction="sum")
            torch.autograd.grad(loss, self.parameters)

    def gradient_of_new(self) -> None:
        """Forward and backward over the inputs to predict, as their gradient epoch."""
        torch.autograd.grad(self.rows(self.new).logsumexp(-1).sum(), self.parameters)

    @torch.no_grad()
    def forward_of_new(self) -> Tensor:
        """The network's outputs at the inputs to predict."""
        return self.rows(self.new)

    def covariances(self) -> Callable[[], Tensor]:
        """U diag(v) Uᵀ, outputs × outputs, for each input: what a closed-form predictive has to write in any case."""
        m, c = len(self.new), self.forward_of_new().shape[-1]
        basis, values = torch.randn(c, c), torch.rand(m, 1, c)
        return lambda: (basis * values) @ basis.mT

    def rows(self, x: Tensor) -> Tensor:
        """Outputs as (rows, classes)."""
        return self.model(x).flatten(0, -2)


def _task(model: nn.Module, x: Tensor, y: Tensor, n: int, m: int, **options: Any) -> Task:
    """The first n of the training data; the next m as the inputs to predict."""
    if n + m > len(x):
        raise ValueError(f"{n} + {m} items asked for, {len(x)} there")
    batches = [(x[k : min(k + BATCH, n)], y[k : min(k + BATCH, n)]) for k in range(0, n, BATCH)]
    return Task(model, batches, x[n : n + m], **options)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


@once
def _mnist() -> tuple[Tensor, Tensor]:
    data = datasets.images("mnist", "train")
    return data.inputs, data.targets


@once
def _cifar() -> tuple[Tensor, Tensor]:
    data = datasets.images("cifar10", "train")
    return networks.standardize(data.inputs), data.targets


def _first(name: str, data: Callable[[], tuple[Tensor, Tensor]], n: int) -> tuple[Tensor, Tensor]:
    """The first n of a data set, from a file: every measurement is a process of its own, and decoding takes seconds."""
    kept = kept_tensors(f"{name}-{KEPT}", lambda: dict(zip("xy", (part[:KEPT] for part in data()))))
    if n > KEPT:
        raise ValueError(f"{n} items asked for, the benchmark keeps {KEPT} of {name}")
    return kept["x"][:n], kept["y"][:n]


def mlp(n: int, m: int, width: int = 1024) -> Task:
    model = _seeded(lambda: networks.mlp([784, width, width, 10], nn.ReLU))
    return _task(trained(f"mlp{width}", model, _mnist, epochs=1, rate=1e-3), *_first("mnist", _mnist, n + m), n, m)


def lenet(n: int, m: int) -> Task:
    return _task(trained("lenet", _seeded(networks.lenet), _mnist, epochs=3), *_first("mnist", _mnist, n + m), n, m)


def lenet_last(n: int, m: int) -> Task:
    """The last layer alone, 850 weights: small enough for a full curvature."""
    return replace(lenet(n, m), select="last_layer")


def resnet20(n: int, m: int) -> Task:
    """With its batch norms, in evaluation mode; their scales and shifts have a posterior too."""
    return _task(networks.pretrained_resnet(20), *_first("cifar10", _cifar, n + m), n, m)


def resnet20_frozen(n: int, m: int) -> Task:
    """Batch norms without a posterior, which is what peers can do."""
    model = networks.pretrained_resnet(20)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.requires_grad_(False)
    return _task(model, *_first("cifar10", _cifar, n + m), n, m)


def resnet18(n: int, m: int) -> Task:
    """CIFAR-10 enlarged to 64×64."""
    model = trained("resnet18", _seeded(ResNet18), _larger_cifar, epochs=1)
    x, y = _first("cifar10", _cifar, n + m)
    return _task(model, _larger(x), y, n, m)


def _larger_cifar() -> tuple[Tensor, Tensor]:
    x, y = _cifar()
    return _larger(x[:4096]), y[:4096]


def _larger(images: Tensor) -> Tensor:
    return functional.interpolate(images, scale_factor=2.0, mode="nearest")


def vit(n: int, m: int) -> Task:
    return _task(
        trained("vit", _seeded(VisionTransformer), _cifar, epochs=0.5), *_first("cifar10", _cifar, n + m), n, m
    )


@once
def _features() -> tuple[Tensor, Tensor]:
    """A thousand Gaussian classes in 1,280 dimensions, ten draws each, so far apart that a linear layer tells them."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(10_000) % 1000
    centers = torch.randn(1000, 1280, generator=generator)
    return centers[y] + 1.5 * torch.randn(len(y), 1280, generator=generator), y


def head(n: int, m: int) -> Task:
    """The last layer of an ImageNet classifier, 1,280 → 1,000, on made-up features."""
    model = trained("head", _seeded(wide_head), _features, epochs=4)
    return _task(model, *_features(), n, m, select="last_layer")


def llama(n: int, m: int) -> Task:
    """The pretrained 260k Llama: the next token at 32 positions of stories that it wrote, 512 outputs each."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = NextTokens(AutoModelForCausalLM.from_pretrained(datasets.tinystories())).eval()
    tokens = kept_tensors("stories", lambda: {"x": _written(model, 1024)})["x"]
    return _task(model, tokens[:, :-1], tokens[:, 1:], n, m, flat=FlatTokens(model))


@torch.no_grad()
def _written(model: nn.Module, count: int, length: int = 33) -> Tensor:
    """Token sequences (count, length) sampled from the model, from the token that begins a story."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.ones(count, 1, dtype=torch.long)
    for _ in range(length - 1):
        probs = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], 1)
    return tokens


WORKLOADS: dict[str, Callable[[int, int], Task]] = {
    "mlp": mlp,
    "mlp64": partial(mlp, width=64),
    "mlp128": partial(mlp, width=128),
    "mlp256": partial(mlp, width=256),
    "mlp512": partial(mlp, width=512),
    "lenet": lenet,
    "lenet-last": lenet_last,
    "resnet20": resnet20,
    "resnet20-frozen": resnet20_frozen,
    "resnet18": resnet18,
    "vit": vit,
    "llama": llama,
    "head": head,
}


@dataclass(frozen=True)
class Shape:
    """For memory estimates: parameters with a posterior, outputs and largest activation of a row, rows per item."""

    parameters: int
    outputs: int
    activations: int
    rows: int = 1
    last_layer: bool = False


SHAPES = {
    "mlp": Shape(1_863_690, 10, 1024),
    "mlp64": Shape(55_050, 10, 64),
    "mlp128": Shape(118_282, 10, 128),
    "mlp256": Shape(269_322, 10, 256),
    "mlp512": Shape(669_706, 10, 512),
    "lenet": Shape(61_706, 10, 6 * 28 * 28),
    "lenet-last": Shape(850, 10, 6 * 28 * 28, last_layer=True),
    "resnet20": Shape(269_722, 10, 16 * 32 * 32),
    "resnet20-frozen": Shape(268_346, 10, 16 * 32 * 32),
    "resnet18": Shape(11_181_642, 10, 64 * 32 * 32),
    "vit": Shape(1_007_370, 10, 64 * 512),
    "llama": Shape(260_032, 512, 512, rows=32),
    "head": Shape(1_281_000, 1000, 1280, last_layer=True),
}
