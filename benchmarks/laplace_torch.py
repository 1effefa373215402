"""Each operation as laplace-torch does it, on the same tensors without a DataLoader, and the bytes it would ask for."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.operations import PRIOR, PRIORS, SAMPLES, Operation
from benchmarks.workloads import Shape, Task


class Loader:
    """Batches as laplace-torch reads them: an iterable with the length of its `dataset`."""

    def __init__(self, task: Task) -> None:
        flat = task.flat is not None
        self.batches = [(x, y.flatten() if flat else y) for x, y in task.batches]
        self.dataset = range(sum(len(y) for _, y in self.batches))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def prepare(task: Task, op: Operation) -> tuple[Callable[[], Any], Callable[[Any], Tensor | None]]:
    """What to time, and how to read a comparable tensor from its result."""
    imported()  # its import, seconds and a hundred megabytes, is not part of what it does
    if op.action == "fit":
        return lambda: fit(task, op), lambda la: None if op.variant == "mc" else curvature(la, op)
    la = fit(task, op)
    if op.action == "predict":
        return lambda: la._glm_predictive_distribution(task.new)[1], lambda covariance: covariance
    if op.action == "probs":
        # its default link; Lapwing's own is nearer to the integral, so the results are not compared
        return lambda: la(task.new, pred_type="glm", link_approx="probit"), lambda probs: None
    if op.action == "samples":
        return lambda: la.sample(SAMPLES), lambda draws: None
    evidence = lambda p: la.log_marginal_likelihood(prior_precision=torch.tensor(p)).detach()  # noqa: E731
    if op.action == "evidence":
        priors = iter(PRIORS * 100)
        return lambda: evidence(next(priors)), lambda _: evidence(PRIOR)
    return lambda: torch.stack([evidence(p) for p in PRIORS]), lambda values: values


def imported() -> tuple[Any, Any]:
    """Laplace and CurvlinopsGGN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace.curvature import CurvlinopsGGN

        from laplace import Laplace
    return Laplace, CurvlinopsGGN


def fit(task: Task, op: Operation) -> Any:
    Laplace, CurvlinopsGGN = imported()
    if op.variant == "1e-3" or op.structure == "ekfac":
        raise NotImplementedError(f"laplace-torch has no {op.name}")
    options: dict[str, Any] = {"backend": CurvlinopsGGN, "backend_kwargs": {"stochastic": op.variant == "mc"}}
    if op.variant == "reduce":
        options["asdl_fisher_kwargs"] = {"kfac_approx": "reduce"}
    la = Laplace(
        copy.deepcopy(task.flat or task.model),  # it writes to the module it is given
        "classification",
        subset_of_weights=task.select,
        hessian_structure=op.structure,
        prior_precision=PRIOR,
        **options,
    )
    la.fit(Loader(task))
    return la


def curvature(la: Any, op: Operation) -> Tensor:
    """The diagonal of its curvature, or the whole if it is dense."""
    return la.H_facs.diag() if op.structure == "kron" else la.H


def bytes_asked(op: Operation, shape: Shape, *, batch: int, new: int, last_layer: bool, size: int = 4) -> int:
    """At least the bytes it allocates at once, counted from its source (version 0.3); batch and new are rows.

    A diagonal fit and a prediction write the Jacobian (rows, outputs, parameters) out, and multiply it into a second
    one of that size. Where it is not the last layer's, `torch.func.jacrev` goes through all rows × outputs at once,
    each with the gradient of the largest activation of every row. A full fit multiplies an identity of parameters²,
    beside the result.
    """
    if op.structure == "full":
        return 3 * size * shape.parameters**2
    if op.structure != "diag" and not op.of_new:
        return 0
    rows = new if op.of_new else batch
    jacobian = 2 * size * rows * shape.outputs * shape.parameters
    return jacobian if last_layer else max(jacobian, size * rows**2 * shape.outputs * shape.activations)
