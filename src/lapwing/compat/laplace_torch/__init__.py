"""laplace-torch's names on this library: run code written for it with `from lapwing.compat.laplace_torch import …`.

laplace-torch's submodules are here too: `from lapwing.compat.laplace_torch.utils import LargestMagnitudeSubnetMask`,
`from lapwing.compat.laplace_torch.curvature import CurvlinopsGGN`.

`install()` makes this module importable as `laplace`, so that packages that import laplace-torch use it:

    import lapwing.compat.laplace_torch
    lapwing.compat.laplace_torch.install()
    from laplace import Laplace

The page docs/coming-from-laplace-torch.md says what is different.
"""

from lapwing.compat.laplace_torch.allweights import DiagLaplace, FullLaplace, KronLaplace, LowRankLaplace
from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.enums import (
    FunctionalApproximation,
    HessianStructure,
    Likelihood,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    TuningMethod,
)
from lapwing.compat.laplace_torch.front import Laplace
from lapwing.compat.laplace_torch.functional import FunctionalLaplace, FunctionalLLLaplace
from lapwing.compat.laplace_torch.installing import install, place_beside
from lapwing.compat.laplace_torch.lastweights import DiagLLLaplace, FullLLLaplace, KronLLLaplace, LLLaplace
from lapwing.compat.laplace_torch.marglik import marglik_training
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.compat.laplace_torch.subnet import DiagSubnetLaplace, FullSubnetLaplace, SubnetLaplace

__all__ = [
    "BaseLaplace", "DiagLLLaplace", "DiagLaplace", "DiagSubnetLaplace", "FullLLLaplace", "FullLaplace",
    "FullSubnetLaplace", "FunctionalApproximation", "FunctionalLLLaplace", "FunctionalLaplace", "HessianStructure",
    "KronLLLaplace", "KronLaplace", "LLLaplace", "Laplace", "Likelihood", "LinkApprox", "LowRankLaplace",
    "ParametricLaplace", "PredType", "PriorStructure", "SubnetLaplace", "SubsetOfWeights", "TuningMethod", "install",
    "marglik_training",
]  # fmt: skip

place_beside(__name__)
