"""Iterative methods on matrices that are given by their products with blocks of row vectors."""

from lapwing.linalg.krylov.estimators import signs, slq_logdet, spheres, xdiag
from lapwing.linalg.krylov.lanczos import Eigenpairs, Tridiagonal, lanczos, largest_eigenpairs
from lapwing.linalg.krylov.nystrom import Preconditioner, Sketch, nystrom
from lapwing.linalg.krylov.results import Estimate, Matvec, Policy, Solution
from lapwing.linalg.krylov.solvers import conjugate_gradients, differentiable_solve

__all__ = [
    "Eigenpairs",
    "Estimate",
    "Matvec",
    "Policy",
    "Preconditioner",
    "Sketch",
    "Solution",
    "Tridiagonal",
    "conjugate_gradients",
    "differentiable_solve",
    "lanczos",
    "largest_eigenpairs",
    "nystrom",
    "signs",
    "slq_logdet",
    "spheres",
    "xdiag",
]
