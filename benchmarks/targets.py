"""Speed and memory that Lapwing aims at beside its peers, as conditions on measured cells."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.cell import Outcome
from benchmarks.results import ratio
from benchmarks.workloads import SHAPES

Verdict = bool | None
"""None: not measured, so neither reached nor missed."""


@dataclass(frozen=True)
class Target:
    """What was asked for, in words, and whether an outcome has it."""

    text: str
    reached: Callable[[Outcome], Verdict]


def epochs(limit: float) -> Target:
    """At most so many gradient epochs."""
    return Target(f"≤ {limit:g} epochs", lambda outcome: at_most(outcome.ours.epochs, limit))


def faster(times: float, thrift: float = 20.0) -> Target:
    """So many times as fast as the peer, in at most 1/thrift of its memory."""

    def reached(outcome: Outcome) -> Verdict:
        if not outcome.peers:
            return None
        return both(at_least(outcome.speed(0), times), at_least(outcome.thrift(0), thrift))

    return Target(f"≥ {times:g} × faster, ≤ 1/{thrift:g} of the memory", reached)


def forwards(limit: float) -> Target:
    """At most so many forward passes."""
    return Target(f"≤ {limit:g} forward passes", lambda outcome: at_most(outcome.ours.forwards, limit))


def near_covariances(times: float) -> Target:
    """Not much more than the forward pass and the covariances that are asked for."""

    def reached(outcome: Outcome) -> Verdict:
        ours = outcome.ours
        if ours.forward is None or ours.covariances is None:
            return None
        return at_most(ratio(ours.seconds, ours.forward + ours.covariances), times)

    return Target(f"≤ {times:g} × (forward + covariances)", reached)


def no_covariances() -> Target:
    """Less memory than one outputs × outputs matrix for each input would take."""

    def reached(outcome: Outcome) -> Verdict:
        outputs = SHAPES[outcome.cell.workload].outputs
        return at_most(outcome.ours.peak, 4 * outcome.cell.m * outputs**2)

    return Target("less memory than one outputs × outputs matrix per input", reached)


def within(limit: int) -> Target:
    """Works, in so many bytes."""

    def reached(outcome: Outcome) -> Verdict:
        return False if outcome.ours.error else at_most(outcome.ours.peak, limit)

    return Target(f"works within {limit / 1e9:g} GB", reached)


TARGETS: dict[tuple[str, str], Target] = {
    ("lenet", "fit-diag"): epochs(6),
    ("resnet20", "fit-diag"): epochs(8),
    ("lenet", "fit-diag-1e-3"): epochs(3.5),
    ("resnet20", "fit-diag-1e-3"): epochs(2),
    ("lenet", "fit-kron"): epochs(4),
    ("resnet20", "fit-kron"): epochs(5),
    ("lenet", "fit-kron-reduce"): epochs(4),
    ("resnet20", "fit-kron-reduce"): epochs(5),
    ("lenet", "fit-kron-1e-3"): epochs(3),
    ("resnet20", "fit-kron-1e-3"): epochs(2),
    ("lenet", "fit-kron-mc"): epochs(1.5),
    ("resnet20", "fit-kron-mc"): epochs(1.5),
    ("lenet", "fit-ekfac"): epochs(9),
    ("lenet", "fit-ekfac-reduce"): epochs(9),
    ("resnet20", "fit-ekfac"): epochs(14),
    ("resnet20", "fit-ekfac-reduce"): epochs(14),
    ("lenet", "fit-ekfac-basis"): epochs(9),
    ("resnet20", "fit-ekfac-basis"): epochs(14),
    ("lenet", "fit-ekfac-1e-3"): epochs(6),
    ("resnet20", "fit-ekfac-1e-3"): epochs(3.5),
    ("lenet", "predict-kron"): faster(150),
    ("resnet20", "predict-kron"): faster(30),
    ("resnet20", "probs-kron-jvp"): forwards(25),
    ("resnet20", "distilled-kron"): forwards(1.2),
    ("lenet", "distilled-kron"): forwards(1.2),
    ("resnet20", "ensemble-kron"): forwards(12),
    ("lenet", "ensemble-kron"): forwards(12),
    ("head", "predict-kron"): near_covariances(3),
    ("head", "probs-kron"): no_covariances(),
    ("resnet18", "fit-ekfac"): within(4 * 10**9),
    ("resnet18", "predict-ekfac"): within(4 * 10**9),
    ("lenet", "sweep-kron"): epochs(1),
    ("lenet", "sweep-diag"): epochs(1),
}


def target(workload: str, operation: str) -> Target | None:
    """The target of a cell, if it has one.

    The frozen ResNet-20 has those of the whole one, beside a peer that can run; how the curvature behind a prediction
    was estimated does not matter.
    """
    name = operation if operation.startswith("fit") else operation.removesuffix("-mc")
    return TARGETS.get((workload.removesuffix("-frozen"), name))


def at_most(value: float | None, limit: float) -> Verdict:
    return None if value is None else value <= limit


def at_least(value: float | None, limit: float) -> Verdict:
    return None if value is None else value >= limit


def both(one: Verdict, other: Verdict) -> Verdict:
    """Missed if either is; unknown if either is unknown."""
    if one is False or other is False:
        return False
    return None if one is None or other is None else True
