"""Curvature of the log-likelihood: a factor (which directions in output space) and a structure (its form)."""

from lapwing.curvature.curvature import (
    Accumulator,
    Auto,
    Curvature,
    Estimate,
    Structure,
    accumulate,
    estimate_curvature,
    extend_curvature,
    layout_of,
    resolve_structure,
)
from lapwing.curvature.entries import BlockDiag, Diag, Full, Hessian
from lapwing.curvature.factor import GGN, EmpiricalFisher, Factor, MCFisher, resolve_factor
from lapwing.curvature.fewrows import Functional, LowRank, Nystrom
from lapwing.curvature.kron import EKFAC, Kron
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.curvature.onepass import Totals
from lapwing.curvature.problem import Problem, available_memory, pose, with_noise_ratios

__all__ = [
    "EKFAC", "GGN", "Accumulator", "Auto", "BlockDiag", "Curvature", "Diag", "EmpiricalFisher", "Estimate", "Factor",
    "Full", "Functional", "Hessian", "Kron", "LowRank", "MCFisher", "MatrixFree", "Nystrom", "Problem", "Structure",
    "Totals", "accumulate", "available_memory", "estimate_curvature", "extend_curvature", "layout_of", "pose",
    "resolve_factor", "resolve_structure", "with_noise_ratios",
]  # fmt: skip
