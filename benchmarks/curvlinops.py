"""The fits that curvlinops offers: Kronecker factors and EKFAC, without a posterior."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from benchmarks.operations import Operation
from benchmarks.workloads import Task


def prepare(task: Task, op: Operation) -> tuple[Callable[[], Any], Callable[[Any], Tensor | None]]:
    """What to time; its factors are laid out by module and are not compared."""
    if op.action != "fit" or op.structure not in ("kron", "ekfac") or op.variant == "1e-3":
        raise NotImplementedError(f"curvlinops has no {op.name}")
    imported()  # not part of what it does
    return lambda: fit(task, op), lambda _: None


def imported() -> tuple[Any, Any]:
    """The operators of KFAC and EKFAC."""
    from curvlinops import EKFACLinearOperator, KFACLinearOperator

    return KFACLinearOperator, EKFACLinearOperator


def fit(task: Task, op: Operation) -> Any:
    kind = imported()[op.structure == "ekfac"]
    operator = kind(
        task.flat or task.model,
        nn.CrossEntropyLoss(reduction="sum"),
        task.parameters,
        [(x, y.flatten()) for x, y in task.batches],
        fisher_type="mc" if op.variant == "mc" else "type-2",
        kfac_approx="reduce" if op.variant == "reduce" else "expand",
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    if op.structure == "ekfac":
        operator.compute_eigenvalue_correction()
    return operator
