"""An architecture with data and a likelihood; the brute-force truth about it; a fit that watches over the module."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import lapwing

from . import oracle
from .architectures import ZOO
from .architectures.registry import Inputs

SIZES = (2, 1, 2)  # batches of different size, one of them of one sample
LIKELIHOODS = ("regression", "classification")
CASES = [(name, likelihood) for name in ZOO for likelihood in LIKELIHOODS]


@dataclass(frozen=True, eq=False)
class Case:
    """What is given to `fit`, and what brute force says: f (N, *event, C), J (N, D, P), Λ (N, D, D)."""

    name: str
    likelihood: str | Any
    x: Inputs
    y: Tensor
    names: tuple[str, ...]
    f: Tensor
    j: Tensor
    lam: Tensor
    score: Tensor  # (N, D)

    @property
    def ggn(self) -> Tensor:
        return oracle.ggn(self.j, self.lam)

    @property
    def tolerance(self) -> float:
        return ZOO[self.name].tolerance

    def batches(self, sizes: tuple[int, ...] = SIZES) -> list:
        """The first sum(sizes) samples."""
        out, start = [], 0
        for size in sizes:
            rows = slice(start, start + size)
            out.append((oracle.take(self.x, rows), self.y[rows]))
            start += size
        return out

    def blocks(self, names: Any) -> list[Tensor]:
        """Positions of each block of parameter names in the flat vector."""
        module = true_module(self.name)
        return [oracle.positions(module, list(block)) for block in names]


def true_module(name: str) -> nn.Module:
    """In evaluation mode, with gradients that are derivatives."""
    module = ZOO[name].build().eval()
    module = getattr(module, "_orig_mod", module)
    for m in module.modules():
        if isinstance(m, nn.Embedding):
            m.scale_grad_by_freq = False  # otherwise autograd divides by counts
    return module


@lru_cache(maxsize=8)
def case(name: str, likelihood: str, n: int = sum(SIZES)) -> Case:
    arch = ZOO[name]
    module, x = true_module(name), arch.inputs(n)
    names = tuple(oracle.selected(module))
    class_dim = 1 if arch.kind == "image" and likelihood == "classification" else -1
    f = oracle.outputs(module, x, class_dim)
    j = oracle.jacobian(module, x, class_dim=class_dim)
    generator = torch.Generator().manual_seed(7)
    if likelihood == "regression":
        y = torch.randn(f.shape, dtype=f.dtype, generator=generator)
        y = y[..., 0] if arch.kind == "scalar" else y
        return Case(
            name, lapwing.Gaussian(1.0), x, y, names, f, j, oracle.hessian_gaussian(f), oracle.score_gaussian(f, y)
        )
    if f.shape[-1] == 1:
        y = torch.randint(2, f.shape, generator=generator)
        y = y[..., 0] if arch.kind == "scalar" else y
        return Case(name, "binary", x, y, names, f, j, oracle.hessian_bernoulli(f), oracle.score_bernoulli(f, y))
    y = torch.randint(f.shape[-1], f.shape[:-1], generator=generator)
    chosen = lapwing.Categorical(class_dim=1) if class_dim == 1 else "classification"
    return Case(name, chosen, x, y, names, f, j, oracle.hessian_categorical(f), oracle.score_categorical(f, y))


def fit(case: Case, structure: Any, *, sizes: tuple[int, ...] = SIZES, train: bool = True, **options: Any) -> Any:
    """`lapwing.fit` on a fresh module, which must come out as it went in."""
    module = ZOO[case.name].build().train(train)
    before = Snapshot(module)
    la = lapwing.fit(module, case.batches(sizes), case.likelihood, structure=structure, **options)
    before.check(module)
    assert plain(la.params.names) == case.names
    return la


def plain(names: Any) -> tuple[str, ...]:
    """Names without torch.compile's prefix."""
    return tuple(n.removeprefix("_orig_mod.") for n in names)


def relative(a: Tensor, b: Tensor) -> float:
    """max |a − b| / max |b|."""
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


def assert_same(a: Tensor, b: Tensor, tolerance: float = 1e-10, what: str = "") -> None:
    error = relative(a, b)
    assert error <= tolerance, f"{what}: relative error {error:.2e}, allowed {tolerance:.0e}"


class Snapshot:
    """Everything about a module that a fit must leave alone."""

    def __init__(self, module: nn.Module):
        self.state = {k: v.clone() for k, v in module.state_dict().items()}
        self.parts = {k: self.describe(m) for k, m in module.named_modules()}
        self.params = {k: (id(p), p.requires_grad, copy.deepcopy(p.grad)) for k, p in module.named_parameters()}
        self.modes = torch.is_grad_enabled(), torch.get_default_dtype(), torch.backends.mkldnn.flags

    @staticmethod
    def describe(m: nn.Module) -> dict[str, Any]:
        return {
            "training": m.training,
            "attributes": set(vars(m)) if not isinstance(m, torch.jit.ScriptModule) else set(),
            "class": type(m),
            "hooks": {k: list(v) for k, v in vars(m).items() if k.endswith("_hooks")},
        }

    def check(self, module: nn.Module) -> None:
        state = module.state_dict()
        assert list(state) == list(self.state), "the state dict has other keys"
        for k, v in state.items():
            assert torch.equal(v, self.state[k]), f"{k} has changed"
        for k, m in module.named_modules():
            assert self.describe(m) == self.parts[k], f"module {k!r} has changed"
        for k, p in module.named_parameters():
            identity, requires_grad, grad = self.params[k]
            assert (id(p), p.requires_grad) == (identity, requires_grad), f"parameter {k} has changed"
            assert (p.grad is None and grad is None) or torch.equal(p.grad, grad), f"the gradient of {k} has changed"
        assert self.modes == (torch.is_grad_enabled(), torch.get_default_dtype(), torch.backends.mkldnn.flags)
