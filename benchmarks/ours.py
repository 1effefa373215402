"""Each operation as Lapwing does it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lapwing
from benchmarks.operations import PRIOR, PRIORS, SAMPLES, Operation
from benchmarks.workloads import Task

Run = Callable[[], Any]
NARROW = 1e4  # a prior of the size that tuning finds, under which sampled networks keep their accuracy


def prepare(task: Task, op: Operation) -> tuple[Run, Callable[[Any], Tensor | None]]:
    """What to time, and how to read a comparable tensor from its result."""
    if op.action == "fit":
        return lambda: fit(task, op), lambda la: None if op.variant == "mc" else curvature(la, op)
    la = fit(task, op)
    if op.action == "predict":
        return lambda: la.predict(task.new).function.covariance, lambda covariance: covariance
    if op.action == "probs":
        link = "jvp" if op.variant == "jvp" else "auto"
        return lambda: la.predict(task.new, link=link).probs, lambda probs: probs
    if op.action == "distilled":
        fast = la.replace(prior=NARROW).distill(task.batches[:1], epochs=1)
        return lambda: both(fast.predict(task.new)), lambda probs: None
    if op.action == "ensemble":
        members = la.replace(prior=NARROW).ensemble(10)
        return lambda: members.predict(task.new).probs, lambda probs: None
    if op.action == "samples":
        return lambda: la.posterior.sample(SAMPLES, torch.Generator().manual_seed(0)), lambda draws: None
    if op.action == "evidence":
        priors = iter(PRIORS * 100)
        return lambda: la.replace(prior=next(priors)).log_evidence(), lambda _: la.replace(prior=PRIOR).log_evidence()
    return lambda: torch.stack([la.replace(prior=p).log_evidence() for p in PRIORS]), lambda values: values


def both(p: lapwing.Prediction) -> Tensor:
    """Probabilities, with the epistemic part computed on the way."""
    _ = p.epistemic
    return p.probs


def fit(task: Task, op: Operation) -> lapwing.Laplace:
    """A posterior that is ready to use: decompositions included, as in the peers' fit."""
    la = lapwing.fit(
        task.model,
        task.batches,
        "classification",
        structure=structure(op),
        factor=factor(op),
        select=task.select,
        prior=PRIOR,
        generator=torch.Generator().manual_seed(0),
        progress=False,
    )
    la.posterior.precision.logdet()
    return la


def curvature(la: lapwing.Laplace, op: Operation) -> Tensor:
    """The diagonal of the curvature, or the whole if it is dense."""
    return la.curvature.dense() if op.structure == "full" else la.curvature.matrix.diagonal()


def structure(op: Operation) -> Any:
    sharing = "expand" if op.variant in ("", "jvp") else "reduce" if op.variant == "reduce" else "auto"
    basis = lapwing.GGN(tolerance=0.0) if op.variant == "basis" else None
    kinds = {
        "diag": lapwing.Diag,
        "full": lapwing.Full,
        "kron": lambda: lapwing.Kron(sharing=sharing),
        "ekfac": lambda: lapwing.EKFAC(basis, sharing=sharing),
    }
    return kinds[op.structure]()


def factor(op: Operation) -> Any:
    if op.variant == "mc":
        return lapwing.MCFisher(samples=1)
    if op.variant == "1e-3":
        return lapwing.GGN(tolerance=1e-3)
    if op.variant == "default":
        return lapwing.GGN()
    return lapwing.GGN(tolerance=0.0)
