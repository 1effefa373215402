"""Random generators belong to a device, like the tensors that are drawn with them."""

from __future__ import annotations

import torch

from lapwing.errors import BadData


def require_generator(generator: torch.Generator | None, device: torch.device) -> None:
    """Refuse a generator of another device than that of the network."""
    if generator is not None and generator.device != device:
        raise BadData(
            f"the generator is on {str(generator.device)!r} and the network on {str(device)!r}; pass "
            f"generator=torch.Generator({str(device)!r})"
        )
