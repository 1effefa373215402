"""Iterative methods on matrices that are given by their products with blocks of row vectors."""

from lapwing.linalg.krylov.estimators import (
    Density,
    deflated_density,
    hutchinson,
    hutchpp,
    signs,
    slq_logdet,
    spheres,
    xdiag,
    xtrace,
)
from lapwing.linalg.krylov.lanczos import Eigenpairs, Tridiagonal, lanczos, largest_eigenpairs
from lapwing.linalg.krylov.nystrom import Preconditioner, Sketch, nystrom
from lapwing.linalg.krylov.results import Estimate, Matvec, Policy, Solution
from lapwing.linalg.krylov.solvers import conjugate_gradients, differentiable_logdet, differentiable_solve, lsmr

__all__ = [
    "Density",
    "Eigenpairs",
    "Estimate",
    "Matvec",
    "Policy",
    "Preconditioner",
    "Sketch",
    "Solution",
    "Tridiagonal",
    "conjugate_gradients",
    "deflated_density",
    "differentiable_logdet",
    "differentiable_solve",
    "hutchinson",
    "hutchpp",
    "lanczos",
    "largest_eigenpairs",
    "lsmr",
    "nystrom",
    "signs",
    "slq_logdet",
    "spheres",
    "xdiag",
    "xtrace",
]
