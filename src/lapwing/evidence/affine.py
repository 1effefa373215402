"""Random affine transformations of images whose ranges can be learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from lapwing.errors import BadData

KINDS = ("rotation", "translation_x", "translation_y", "scale_x", "scale_y", "shear")
UNITS = {"rotation": 180 / math.pi}  # shown in degrees


class Affine(nn.Module):
    """Images (n, c, h, w) under a random affine map: each part uniform in ± its range, which is a parameter.

    Ranges are in natural units: `rotation` in degrees, `translation` in half image widths, `scale` in logarithms,
    `shear` as a slope; None leaves a part out. Positive by construction (softplus). Gradients flow into the ranges
    through bilinear interpolation, so that any differentiable objective can learn them.

        augment = lapwing.Affine(rotation=5.0)
        augment(images, copies=8)        # (n, 8, c, h, w)
        augment.ranges                   # {"rotation": 5.0}
    """

    def __init__(
        self,
        rotation: float | None = None,
        translation: float | None = None,
        scale: float | None = None,
        shear: float | None = None,
    ) -> None:
        super().__init__()
        turned = None if rotation is None else math.radians(rotation)
        given = (turned, translation, translation, scale, scale, shear)
        chosen = {kind: value for kind, value in zip(KINDS, given, strict=True) if value is not None}
        if not chosen or any(not (value > 0 and math.isfinite(value)) for value in chosen.values()):
            raise BadData(
                "an affine augmentation needs at least one of rotation (degrees), translation, scale, shear, each a "
                "positive range to start from"
            )
        self.kinds = tuple(chosen)
        self.raw = nn.Parameter(torch.tensor([math.log(math.expm1(v)) for v in chosen.values()]))

    @property
    def extent(self) -> Tensor:
        """The ranges as one tensor with gradients, in radians, half widths, logarithms and slopes."""
        return functional.softplus(self.raw)

    @property
    def ranges(self) -> dict[str, float]:
        """The ranges by name; rotation in degrees."""
        pairs = zip(self.kinds, self.extent.tolist(), strict=True)
        return {kind: value * UNITS.get(kind, 1.0) for kind, value in pairs}

    def forward(self, x: Tensor, copies: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """(n, c, h, w) -> (n, copies, c, h, w)."""
        n = x.shape[0]
        place = None if generator is None else generator.device
        noise = torch.rand(n, copies, len(self.kinds), generator=generator, device=place).to(x) * 2 - 1
        many = x[:, None].expand(n, copies, *x.shape[1:]).flatten(0, 1)
        return self.transform(many, (noise * self.extent.to(x)).flatten(0, 1)).unflatten(0, (n, copies))

    def transform(self, x: Tensor, amounts: Tensor) -> Tensor:
        """Images (m, c, h, w) moved by amounts (m, kinds)."""
        part = dict(zip(self.kinds, amounts.unbind(-1), strict=True))
        zero = torch.zeros_like(amounts[:, 0])
        angle = part.get("rotation", zero)
        wide, high = part.get("scale_x", zero).exp(), part.get("scale_y", zero).exp()
        slope = part.get("shear", zero)
        cos, sin = angle.cos(), angle.sin()
        # rotation · shear · scale, acting on the coordinates that are read
        rows = [
            torch.stack([cos * wide, (cos * slope - sin) * high, part.get("translation_x", zero)], -1),
            torch.stack([sin * wide, (sin * slope + cos) * high, part.get("translation_y", zero)], -1),
        ]
        grid = functional.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)


class Averaged(nn.Module):
    """The mean output of a network over copies of its input, (n, copies, …) -> (n, outputs)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x.flatten(0, 1))
        return out.unflatten(0, x.shape[:2]).mean(1)
