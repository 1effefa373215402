"""A named, seeded way to make a small network and its inputs. No Lapwing code here."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Any  # a tensor, a tuple of tensors (called as model(*x)) or a dict (called as model(**x))
Maker = Callable[[int], Inputs]


@dataclass(frozen=True, eq=False)
class Architecture:
    """`kind` says what the output means: scalar (B,), vector (B, C), tokens (B, T, C) or image (B, C, H, W).

    `once`: every weight meets one vector per sample, so that Kronecker factors are exact for N = 1.
    `refusal`: a clear refusal is as good an answer as the right numbers.
    `tolerance`: relative; larger where the model itself computes in float32 (Hugging Face's RMS norms).
    """

    name: str
    factory: Callable[[], nn.Module]
    maker: Maker
    kind: str
    once: bool
    refusal: bool
    tolerance: float

    def build(self) -> nn.Module:
        """The module in float64, in training mode, its parameters moved off their symmetric initial values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            module = self.factory().double().train()
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(0.2 * torch.randn_like(p))
                for name, b in module.named_buffers():
                    if name.endswith("running_mean"):
                        b.copy_(0.3 * torch.randn_like(b))
                    elif name.endswith("running_var"):
                        b.copy_(0.5 + torch.rand_like(b))
        return module

    def inputs(self, n: int, seed: int = 0) -> Inputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()) + 1 + seed)
            return self.maker(n)


ZOO: dict[str, Architecture] = {}


def add(name: str, factory, maker: Maker, kind="vector", *, once=False, refusal=False, tolerance=1e-10) -> None:
    if name in ZOO:
        raise ValueError(f"two architectures are named {name!r}")
    ZOO[name] = Architecture(name, factory, maker, kind, once, refusal, tolerance)


def architecture(maker: Maker, kind: str = "vector", **options: Any):
    """Register the decorated factory under its own name."""

    def register(factory):
        add(factory.__name__, factory, maker, kind, **options)
        return factory

    return register


class Net(nn.Module):
    """Submodules, parameters and buffers (plain tensors) by name; the forward is a function of (self, *inputs)."""

    def __init__(self, call: Callable[..., Any], **parts: Any):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


def weight(*shape: int, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape), requires_grad=requires_grad)


def floats(*shape: int) -> Maker:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> Maker:
    return lambda n: torch.randint(high, (n, *shape))


def several(*makers: Maker) -> Maker:
    return lambda n: tuple(m(n) for m in makers)


def named(**makers: Maker) -> Maker:
    return lambda n: {k: m(n) for k, m in makers.items()}


def lengths(low: int, high: int) -> Maker:
    return lambda n: torch.randint(low, high + 1, (n,))


def padding(length: int) -> Maker:
    """True where a position is padding; the first position never is."""
    return lambda n: torch.arange(length) >= torch.randint(1, length + 1, (n, 1))


def attend(length: int) -> Maker:
    """A Hugging Face attention mask: 1 where a position counts."""
    return lambda n: (torch.arange(length) < torch.randint(2, length + 1, (n, 1))).long()
