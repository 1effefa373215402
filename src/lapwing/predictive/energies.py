"""A network that returns, beside its outputs, how large the inputs of its layers were: what a distilled head reads."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d

from lapwing.errors import UnsupportedModel
from lapwing.model import batch_size, take
from lapwing.model.calls import Inputs, arguments, close, output_tensor, tolerance
from lapwing.model.copies import without_fast_path, written_by_forward
from lapwing.model.linearization import Outputs

CALLS = 8
"""Layers, at most, whose inputs are looked at: the first, the last and others in between."""

WIDEST = 1024
"""Energies per layer, at most; a wider layer has neighboring features averaged."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_OPEN = threading.local()  # `calls`: the energies of this thread's pass so far, in the order of the calls


def _record(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Keep the mean square of each feature of a layer's input: a hook before its forward pass."""
    calls: list[Tensor | None] | None = getattr(_OPEN, "calls", None)
    if calls is None:
        return
    wanted, a = _OPEN.wanted, args[0] if args else None
    if not isinstance(a, Tensor) or a.ndim < 2 or (wanted is not None and len(calls) not in wanted):
        calls.append(None)
    else:
        calls.append(_mean_squares(a, 1 if isinstance(module, CONVOLUTIONS) else a.ndim - 1))


def _mean_squares(a: Tensor, axis: int) -> Tensor:
    """The mean square over all positions of each feature along `axis`, (B, c) with at most `WIDEST` features."""
    a = a.float() if a.dtype in (torch.float16, torch.bfloat16) else a
    others = [k for k in range(1, a.ndim) if k != axis]
    if others:
        count = 1
        for k in others:
            count = count * a.shape[k]
        square = torch.linalg.vector_norm(a, dim=others).square() / count
    else:
        square = a.square()
    return square if square.shape[-1] <= WIDEST else adaptive_avg_pool1d(square[:, None], WIDEST)[:, 0]


class EnergyNetwork(nn.Module):
    """A copy of a network that returns f (B, C) and energies (B, D): mean squares of the inputs of some layers, and 1.

    The uncertainty of the outputs that a layer's weights cause grows with the square of that layer's inputs, so
    energies say where it comes from, at the cost of a look at activations that are computed anyway. The copy is never
    written to, so that any number of threads may run it.

    Example: `f, energies = EnergyNetwork(module, outputs, x)(x)`.
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Outputs,
        example: Inputs | None = None,
        *,
        wanted: tuple[int, ...] = (),
        widths: tuple[int, ...] = (),
    ) -> None:
        """`example` shows which calls of layers to look at; without it, `wanted` and their `widths` say so."""
        super().__init__()
        if any(written_by_forward(each) for each in module.modules()):
            raise UnsupportedModel(
                "the forward pass of this network writes to its module (a counter, a cache), so that threads that "
                "share a predictor would disturb each other. Return such values instead of keeping them in self."
            )
        try:
            self.body = copy.deepcopy(module).requires_grad_(False).eval()
        except Exception as error:  # what cannot be copied raises many kinds
            raise UnsupportedModel(f"the network cannot be copied ({type(error).__name__}: {error})") from error
        self._outputs = outputs
        self._fast = any(
            isinstance(part, nn.MultiheadAttention | nn.TransformerEncoder) for part in self.body.modules()
        )
        for part in self.body.modules():
            if isinstance(part, (nn.Linear, *CONVOLUTIONS)):
                part.register_forward_pre_hook(_record)
        self._wanted: tuple[int, ...] | None = None
        self._wanted, self.widths = (wanted, widths) if example is None else self._look(example)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The calls of layers whose energies are read, in the order of the calls."""
        assert self._wanted is not None
        return self._wanted

    def _look(self, example: Inputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Choose the calls whose energies belong to samples: alone and in a batch they must be the same."""
        n = batch_size(example)
        few = max(1, n // 2)
        with torch.no_grad():
            whole, part = (self._calls(each)[1] for each in (example, take(example, slice(0, few), n)))
        good = [
            k
            for k, (a, b) in enumerate(zip(whole, part))
            if a is not None and b is not None and len(a) == n and len(b) == few
            if close(b, a[:few], tolerance([a.dtype]))
        ]  # fmt: skip
        if len(whole) != len(part):
            good = []
        count = min(CALLS, len(good))
        chosen = tuple(good[round(k * (len(good) - 1) / max(1, count - 1))] for k in range(count))
        return chosen, tuple(whole[k].shape[-1] for k in chosen)  # type: ignore[union-attr]

    def _calls(self, inputs: Inputs) -> tuple[Tensor, list[Tensor | None]]:
        args, kwargs = arguments(inputs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
        plain = without_fast_path(self.body) if self._fast and not torch.compiler.is_compiling() else nullcontext()
        calls: list[Tensor | None] = []
        _OPEN.calls, _OPEN.wanted = calls, self._wanted
        try:
            with plain:
                f = self._outputs(output_tensor(self.body(*args, **kwargs)))
        finally:
            _OPEN.calls = None
        return f, calls

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """f and energies at the arguments that the network takes."""
        f, calls = self._run(args, kwargs)
        assert self._wanted is not None
        found = [calls[k] for k in self._wanted if k < len(calls)]
        if [None if a is None else a.shape[-1] for a in found] != list(self.widths):
            raise UnsupportedModel("these inputs run other layers than those that the predictor was distilled from")
        one = f.new_ones(f.shape[0], 1)
        return f, torch.cat([*(a.to(f) for a in found if a is not None), one], -1)
