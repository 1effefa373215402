"""Several networks that differ in their weights only, run together as one batched network where that pays."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lapwing.model.inputs import Inputs, batch_size, close, detached, map_tensors, take, tolerance
from lapwing.model.module import call, output_tensor, warnings_here
from lapwing.model.network import Network

SMALL_BATCH = 32
"""Items up to which networks run together. A larger batch keeps the processor busy by itself: ten ResNet-20 then took
twice as long together as one after another."""

AT_ONCE = 128
"""Items times networks under way at a time, so that members take no more memory than a batch of this size."""

_TOGETHER: WeakKeyDictionary[Network, bool] = WeakKeyDictionary()  # whether running together gives the same outputs


def run_members(network: Network, weights: Tensor, inputs: Inputs) -> Tensor:
    """Return f at each row of weights (s, P), (s, n, *event, c).

    Small batches run through several members at once (`torch.func.vmap`), if a first trial gives what the members give
    one by one; everything else runs in a loop. With gradients enabled, they flow into the weights and the inputs.
    """
    items = batch_size(inputs)
    with network.copied():
        if items <= SMALL_BATCH and len(weights) > 1 and _runs_together(network, weights, inputs):
            try:
                return torch.cat(list(_together(network, weights, inputs, max(1, AT_ONCE // items))))
            except Exception:  # operations that these inputs need may have no batched form: the loop tells
                _TOGETHER[network] = False
        return torch.stack([network.at_weights(theta, inputs) for theta in weights])


def _together(network: Network, weights: Tensor, inputs: Inputs, size: int) -> Iterator[Tensor]:
    wanted = torch.is_grad_enabled()
    with network.borrow() as module, torch.set_grad_enabled(wanted):
        own = map_tensors(Tensor.clone, inputs)
        run = torch.func.vmap(lambda values: output_tensor(call(module, own, values)))
        for part in weights.split(size):
            with warnings_here("ignore", UserWarning, "There is a performance drop"):
                raw = run(network.params.unflatten(part))
            yield torch.stack([network.outputs(each) for each in raw])


def _runs_together(network: Network, weights: Tensor, inputs: Inputs) -> bool:
    """Find out once, with two samples and two members, whether the batched form gives the members' own outputs."""
    if network not in _TOGETHER:
        few = detached(take(inputs, slice(0, 2), batch_size(inputs)))
        pair = torch.stack([weights[0], weights[-1]]).detach()
        with torch.no_grad():
            expected = torch.stack([network.at_weights(theta, few) for theta in pair])
            try:
                found = torch.cat(list(_together(network, pair, few, 2)))
                _TOGETHER[network] = found.shape == expected.shape and close(found, expected, tolerance([found.dtype]))
            except Exception:  # PyTorch raises many kinds where an operation has no batched form
                _TOGETHER[network] = False
    return _TOGETHER[network]
