"""`Laplace(model, likelihood, subset_of_weights, hessian_structure)`, which has a class per subset and structure."""

from __future__ import annotations

from typing import Any

from torch import nn

from lapwing.compat.laplace_torch.allweights import DiagLaplace, FullLaplace, KronLaplace, LowRankLaplace
from lapwing.compat.laplace_torch.enums import FunctionalApproximation, HessianStructure, Likelihood, SubsetOfWeights
from lapwing.compat.laplace_torch.functional import FunctionalLaplace, FunctionalLLLaplace
from lapwing.compat.laplace_torch.lastweights import DiagLLLaplace, FullLLLaplace, KronLLLaplace
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.compat.laplace_torch.subnet import DiagSubnetLaplace, FullSubnetLaplace

KINDS: tuple[type[Any], ...] = (
    FullLaplace,
    KronLaplace,
    DiagLaplace,
    LowRankLaplace,
    FunctionalLaplace,
    FullLLLaplace,
    KronLLLaplace,
    DiagLLLaplace,
    FunctionalLLLaplace,
    FullSubnetLaplace,
    DiagSubnetLaplace,
)


def Laplace(
    model: nn.Module,
    likelihood: Likelihood | str,
    subset_of_weights: SubsetOfWeights | str = SubsetOfWeights.LAST_LAYER,
    hessian_structure: HessianStructure | str = HessianStructure.KRON,
    *args: Any,
    functional_approximation: FunctionalApproximation | str = FunctionalApproximation.SOD,
    **kwargs: Any,
) -> ParametricLaplace:
    """Return an unfitted posterior of the class for these weights and this structure.

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
    la.fit(train_loader)
    """
    if functional_approximation != FunctionalApproximation.SOD:
        raise ValueError(
            f"functional_approximation={functional_approximation!r} is not part of this layer: use "
            "lapwing.fit(..., structure=lapwing.Nystrom(rank)) or lapwing.VaLLA"
        )
    kinds = {kind._key: kind for kind in KINDS}
    chosen = kinds.get((str(getattr(subset_of_weights, "value", subset_of_weights)),
                        str(getattr(hessian_structure, "value", hessian_structure))))  # fmt: skip
    if chosen is None:
        raise ValueError(
            f"there is no posterior for subset_of_weights={subset_of_weights!r} with "
            f"hessian_structure={hessian_structure!r}; there is one for {sorted(kinds)}"
        )
    return chosen(model, likelihood, *args, **kwargs)
