"""The user's module, borrowed: evaluated in eval mode and given back bit-identical, also after an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapwing.errors import UnsupportedModel

P = ParamSpec("P")
T = TypeVar("T")


def unwrap(module: nn.Module) -> nn.Module:
    """The module behind `torch.compile` and (distributed) data parallel wrappers."""
    while True:
        if hasattr(module, "_orig_mod"):
            module = module._orig_mod  # type: ignore[assignment]
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        else:
            return module


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as if the caller had not switched to `torch.inference_mode()`: its results may need gradients."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return called


def ordinary(tensor: Tensor) -> Tensor:
    """A tensor that autograd can record: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


_WRITTEN: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def written_by_forward(module: nn.Module) -> set[str]:
    """Plain attributes that a forward pass of this submodule was seen to write (caches, counters, features)."""
    return _WRITTEN.get(module, set())


@contextmanager
def borrowed(module: nn.Module, selected: Iterable[str] = ()) -> Iterator[None]:
    """Eval mode, gradients for the selected parameters only; everything is put back afterwards.

    Letting only the selected parameters require grad keeps the backward pass out of frozen parts of the network.
    Buffers that the forward pass changes even in eval mode are restored. PyTorch's fast path of encoders is off: it is
    taken without a graph only and zeroes padded positions: outputs and derivatives would be those of two networks.
    """
    wanted = set(selected)
    fast = torch.backends.mha.get_fastpath_enabled()
    training = [(m, m.training) for m in module.modules()]
    params = list(module.named_parameters())
    required = [p.requires_grad for _, p in params]
    buffers = [(b, b._version, b.detach().clone()) for b in module.buffers()]
    plain = [m for m, _ in training if not isinstance(m, torch.jit.ScriptModule)]  # a scripted one keeps its own state
    attributes = [(m, dict(vars(m)), dict(m._buffers)) for m in plain]
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for m, _ in training:
            m.training = False
        for name, p in params:
            p.requires_grad_(name in wanted)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for m, values, own in attributes:  # what the forward pass has set or re-assigned
            changed = {k for k, v in vars(m).items() if k not in values or values[k] is not v} - {"training"}
            if changed:
                _WRITTEN.setdefault(m, set()).update(changed)
            m.__dict__.clear()
            m.__dict__.update(values)
            m._buffers.clear()
            m._buffers.update(own)
        for (_, p), flag in zip(params, required, strict=True):
            p.requires_grad_(flag)
        for m, mode in training:
            m.training = mode
        with torch.no_grad():
            for buffer, version, copy in buffers:
                if buffer._version != version:
                    buffer.copy_(copy)


@contextmanager
def differentiable_kernels() -> Iterator[None]:
    """Kernels that have forward-mode and second derivatives: math attention, no fused encoder, no fused RNN."""
    fast, fused = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags() would do, but warns about TF32 on some builds
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(fused)


def left_out(output: object) -> tuple[Tensor, ...]:
    """Tensors of the shape of the outputs that a tuple or list holds beside them, and that `output_tensor` leaves."""
    if not isinstance(output, (tuple, list)) or hasattr(output, "logits") or not output:
        return ()
    first, *others = output
    if not isinstance(first, Tensor):
        return ()
    return tuple(each for each in others if isinstance(each, Tensor) and each.shape == first.shape)


def output_tensor(output: object) -> Tensor:
    """The tensor of outputs in what a module returned: itself, `.logits`, `["logits"]`, or the first of a tuple."""
    from_attribute = getattr(output, "logits", None)
    if isinstance(output, Tensor):
        return output
    if isinstance(from_attribute, Tensor):
        return from_attribute
    if isinstance(output, dict) and isinstance(output.get("logits"), Tensor):
        return output["logits"]
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise UnsupportedModel(
        f"the model returned {type(output).__name__}; Lapwing needs a tensor, an object with `.logits`, or a tuple "
        "whose first entry is a tensor. Wrap the model in a module that returns its outputs."
    )


def is_causal_language_model(module: nn.Module) -> bool:
    """Whether labels are the inputs shifted by one, as Hugging Face's causal language models define their loss."""
    names = {type(m).__name__ for m in module.modules()}
    return any("ForCausalLM" in name or "LMHeadModel" in name for name in names)
