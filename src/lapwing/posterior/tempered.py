"""Tempered posteriors: p(D|θ)^T p(θ), or (p(D|θ) p(θ))^T."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import BadData


@dataclass(frozen=True, eq=False)
class Tempered:
    """How often the data count: the posterior precision is T·H/φ + Π, or T·(H/φ + Π) with `prior=True`.

    T > 1 sharpens, T = 1 is Bayes, T → 0 is the prior. T is the same as a number of pseudo-observations per datum
    (laplace-torch's temperature is 1/T). Generalized Laplace, Eq. 21–24; the fully tempered form is Eq. 3.
    """

    T: float | Tensor = 1.0
    prior: bool = False

    def __post_init__(self) -> None:
        value = torch.as_tensor(self.T).detach()
        if value.ndim:
            raise BadData(f"temperature must be a number or a 0-d tensor, got shape {tuple(value.shape)}")
        lowest = 0.0 < value.item() if self.prior else 0.0 <= value.item()
        if not (lowest and torch.isfinite(value)):
            raise BadData(f"temperature must be {'positive' if self.prior else 'at least 0'}, got {value.item()}")

    def likelihood_scale(self, dispersion: Tensor, power: int = 1) -> Tensor:
        """T/φ^power: what multiplies the stored curvature, 0-d; gradients flow into T and φ."""
        return torch.as_tensor(self.T, dtype=dispersion.dtype, device=dispersion.device) / dispersion**power

    @property
    def prior_scale(self) -> float | Tensor:
        """The factor of the prior precision: T if the prior is tempered, else 1."""
        return self.T if self.prior else 1.0

    @property
    def _number(self) -> float:
        return self.T.item() if isinstance(self.T, Tensor) else float(self.T)

    @property
    def is_bayes(self) -> bool:
        """Whether T is 1, so that the evidence is that of the model itself."""
        return self._number == 1.0

    def __repr__(self) -> str:
        return f"Tempered({self._number:.6g}{', prior=True' if self.prior else ''})"


def resolve_temperature(temperature: float | Tensor | Tempered) -> Tempered:
    """Return what `temperature=` means: a number or a `Tempered`."""
    if isinstance(temperature, Tempered):
        return temperature
    if isinstance(temperature, bool) or not isinstance(temperature, int | float | Tensor):
        raise BadData(f"temperature must be a number, a 0-d tensor or Tempered(T), not {type(temperature).__name__}")
    return Tempered(temperature)
