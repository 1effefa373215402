"""What a structure is, and the curvature that it computes: Σ Jᵀ S Sᵀ J of a problem, stored in some form.

A structure of your own subclasses `Structure`, and `lapwing.register` gives it a name for `fit` and for files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lapwing.curvature.closed import Head
from lapwing.curvature.factor import Factor
from lapwing.curvature.onepass import Totals, pass_over
from lapwing.curvature.problem import Problem
from lapwing.curvature.shards import require_same, together
from lapwing.errors import BadData, TooLarge, UnsupportedOperation, brief, nearest
from lapwing.linalg import PSD, Jacobian, Layout, Places
from lapwing.model import Block, Network, Params, Plan, PlanChanged, dynamic_plan
from lapwing.model.batches import sharded
from lapwing.storage import name_of, named, pack, register

FULL_BELOW = 1500  # "auto" keeps the whole matrix up to this many weights
FUNCTIONAL_BELOW = 512  # "auto" keeps all Jacobian rows up to this many
CHEAPER = ("ekfac", "kron", "diag")  # alternatives that errors name, cheapest last
OTHER_OPERATIONS = "the new data use other operations of the network than the data of the fit"


class Accumulator(ABC):
    """Sums over data as named tensors, which add up exactly over processes and interrupted fits."""

    tensors: dict[str, Tensor]

    @abstractmethod
    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        """Add rows; `fresh` holds the weights (n,) of the samples if these are the first rows of their batch."""

    def closed(self, head: Head) -> None:
        """Add samples of a last layer in closed form, where `has_closed` says that the sums allow it."""
        raise NotImplementedError

    @property
    def has_closed(self) -> bool:
        return type(self).closed is not Accumulator.closed

    @abstractmethod
    def finish(self) -> PSD:
        """Return the curvature of the data so far. It may reuse the memory of the sums, which are then gone."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """The result of a structure: the matrix, the totals of the pass, and sums that `extend` needs later."""

    matrix: PSD
    totals: Totals
    state: dict[str, Tensor] = field(default_factory=dict)  # sums that `extend` needs beside the matrix
    notes: tuple[str, ...] = ()


class Structure(ABC):
    """A form in which the curvature is stored. A subclass says what it costs and how it is computed.

    docs/extending.md adds one step by step.
    """

    subnetworks = True  # whether single weights can be selected
    mergeable = False  # whether it consists of sums, so that interrupted fits can go on and processes add up
    closed_form = False  # whether the curvature of a last layer comes from its inputs, without a backward pass
    reads_data = False  # whether the matrix is in its products with the data, which loading then needs again
    bound: Literal["exact", "lower", "upper"] | None = None  # of the evidence with the full matrix

    @abstractmethod
    def bytes(self, plan: Plan, itemsize: int) -> int:
        """Return the bytes of the curvature and its decomposition, for these blocks and numbers of `itemsize` bytes.

        Examples:
            >>> lapwing.Full().bytes(la.plan, itemsize=4) > lapwing.Kron().bytes(la.plan, itemsize=4)
            True
        """

    def needed(self, problem: Problem) -> int | None:
        """Return the bytes for this problem; None where they depend on a number of data that is not known."""
        return self.bytes(problem.plan, problem.network.params.dtype.itemsize)

    @abstractmethod
    def estimate(self, problem: Problem) -> Estimate:
        """Estimate the curvature, passing over the data as often as needed."""

    def chosen(self, problem: Problem) -> tuple[Structure, str]:
        """Return the structure to use for a problem, with the reason if it is not this one."""
        return self, ""

    def continues(self, matrix: PSD, problem: Problem) -> bool:
        """Whether a matrix has blocks of the kinds that this structure would use for the problem."""
        return True

    def extend(self, problem: Problem, matrix: PSD, state: dict[str, Tensor]) -> Estimate:
        """Add the data of a problem to an earlier, unscaled curvature. The default equals a fit on all data."""
        more = self.estimate(problem)
        return replace(more, matrix=matrix + more.matrix)

    def passes(self) -> int:
        """Return how often the data are read.

        Examples:
            >>> lapwing.Kron().passes(), lapwing.EKFAC().passes()
            (1, 2)
        """
        return 1

    def factor(self, factor: Factor | None) -> Factor | None:
        """Return the factor to use in place of the one asked for; None chooses by the number of directions."""
        return factor

    def stored(self, matrix: PSD) -> tuple[dict[str, Tensor], Any]:
        """Return tensors and a description of the matrix, for a file."""
        return pack(matrix)

    def restored(self, tensors: Mapping[str, Tensor], description: Any, problem: Problem) -> PSD:
        """Rebuild a matrix from a file; only structures that read the data of the fit again define this."""
        raise UnsupportedOperation(f"structure={self.name!r} does not read the data of the fit again")

    def moved(self, matrix: PSD, network: Network, device: torch.device | str) -> PSD:
        """Return the matrix on another device, where the network is already."""
        return matrix.to(device)

    @property
    def name(self) -> str:
        return name_of(type(self))

    def require(self, problem: Problem) -> None:
        """Refuse a problem before memory is taken: the message has the number of bytes and the alternatives."""
        params = problem.network.params
        itemsize = params.dtype.itemsize
        plan = problem.plan if params.index is None else shrunk(problem.plan, params.size)
        needed = self.bytes(plan, itemsize)
        if needed > problem.memory:
            raise TooLarge(
                f"structure={self.name!r} for {params.size:,} weights needs {in_words(needed)}; the budget is "
                f"{in_words(problem.memory)}. {self.alternatives(plan, itemsize, problem.memory)}"
            )
        if params.index is not None and not self.subnetworks:
            raise UnsupportedOperation(
                f"structure={self.name!r} keeps whole weight matrices and cannot take single weights. "
                "Use structure='full', 'diag' or 'lowrank' with a subnetwork."
            )
        if sharded() and not (self.mergeable and problem.factor.mergeable):
            raise UnsupportedOperation(
                f"structure={self.name!r} does not add up over processes. Use {mergeable()} with a GGN or a Fisher, "
                "or fit in one process"
            )
        if self.passes() > 1:
            problem.batches.require_reiterable(f"structure={self.name!r}")

    def alternatives(self, plan: Plan, itemsize: int, memory: int) -> str:
        structures = named(Structure)
        fits = [s for s in (structures[name]() for name in CHEAPER) if s.bytes(plan, itemsize) <= memory]
        ways = ", ".join(f"structure={s.name!r} ({in_words(s.bytes(plan, itemsize))})" for s in fits)
        return f"Use {ways + ', ' if ways else ''}select='last_layer' or fewer weights, or raise memory=."


@register
@dataclass(frozen=True, eq=False)
class Auto(Structure):
    """Choose a structure by the number of weights and outputs, the data and the memory; `la.summary()` says why."""

    mergeable = closed_form = True

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return 0

    def passes(self) -> int:
        return 2  # at most, before the choice

    def estimate(self, problem: Problem) -> Estimate:
        return self.chosen(problem)[0].estimate(problem)

    def chosen(self, problem: Problem) -> tuple[Structure, str]:
        params, plan, served = problem.network.params, problem.plan, problem.factor.structures
        kinds: Mapping[str, Callable[..., Structure]] = named(Structure)
        itemsize = params.dtype.itemsize
        if params.index is not None:
            return kinds["full"](), "full, because the selection asks for a dense structure"
        if served:
            return kinds[served[0]](), f"{served[0]}, because factor {type(problem.factor).__name__} asks for it"
        if params.size <= FULL_BELOW and kinds["full"]().bytes(plan, itemsize) <= problem.memory:
            return kinds["full"](), f"full, because {params.size:,} weights are few (up to {FULL_BELOW:,})"
        if problem.length is not None and problem.batches.reiterable and not sharded():
            rows, needed = problem.length * problem.factor.width(problem.outputs), kinds["functional"]().needed(problem)
            if rows <= FUNCTIONAL_BELOW and rows < params.size and needed is not None and needed <= problem.memory:
                return kinds["functional"](), (
                    f"functional, because the data have at most {rows:,} output directions, fewer than {params.size:,} "
                    f"weights: exact for this factor, in {needed / 1e6:,.3g} MB"
                )
        if problem.batches.reiterable and kinds["ekfac"]().bytes(plan, itemsize) <= problem.memory:
            exact = kinds["matrixfree"]().bytes(plan, itemsize)
            return kinds["ekfac"](), (
                f"ekfac, because {params.size:,} weights are too many for a full matrix (structure='matrixfree' would "
                f"be exact, with {exact / 1e6:,.3g} MB and two gradients of all data for every product)"
            )
        if kinds["kron"]().bytes(plan, itemsize) <= problem.memory:
            return kinds["kron"](), "kron, because the data can be read only once or ekfac exceeds the memory budget"
        small = kinds["matrixfree"](rank=32, columns=4, probes=4, steps=10, samples=32, predictive="samples")
        needed = small.bytes(plan, itemsize)
        if problem.batches.reiterable and needed <= problem.memory and not sharded():
            return small, (
                f"matrixfree, because Kronecker factors exceed the memory budget and {needed / 1e6:,.3g} MB of vectors "
                "do not; every product reads all data, about two gradients of them"
            )
        return kinds["diag"](), "diag, because Kronecker factors exceed the memory budget"


def resolve_structure(structure: str | Structure) -> Structure:
    """Return the structure that `structure=` means, an object or a name."""
    if isinstance(structure, Structure):
        return structure
    structures = named(Structure)
    if structure not in structures:
        known = sorted(structures.keys() - {"auto"})
        if isinstance(structure, type):
            raise UnsupportedOperation(f"structure is an object, not a class: pass {structure.__name__}()")
        meant = ". Did you mean 'kron'?" if structure in ("kfac", "KFAC") else nearest(structure, structures)
        raise UnsupportedOperation(f"structure is one of {known} or 'auto', got {structure!r}{meant}")
    try:
        return structures[structure]()
    except TypeError as error:
        raise UnsupportedOperation(f"structure={structure!r} needs arguments ({error}): pass an object") from error


def mergeable() -> str:
    """Name the structures whose sums over parts of the data add up, for messages."""
    return ", ".join(name for name, kind in named(Structure).items() if kind.mergeable and name != "auto")


def shrunk(plan: Plan, size: int) -> Plan:
    """Return the plan of a subnetwork: one block of explicit rows."""
    return replace(plan, blocks=(Block(("subnetwork",), "rows", Places.range(0, size)),))


def in_words(count: int) -> str:
    """Write a number of bytes in MB or GB."""
    if count >= 1e12:
        return f"{count / 1e9:,.0f} GB"
    return f"{count / 1e9:,.3g} GB" if count >= 1e8 else f"{count / 1e6:,.3g} MB"


def blocks_of(problem: Problem) -> tuple[Block, ...]:
    """Return the blocks into which rows are divided: the blocks of the plan, or one block for a subnetwork."""
    params = problem.network.params
    return problem.plan.blocks if params.index is None else shrunk(problem.plan, params.size).blocks


def layout_of(problem: Problem) -> Layout:
    params = problem.network.params
    return problem.plan.layout if params.index is None else Layout.contiguous([params.size])


def accumulate(problem: Problem, accumulator: Accumulator, row_bytes: int = 0) -> Estimate:
    """Pass over the data once and hand all rows to an accumulator."""
    closed = accumulator.closed if accumulator.has_closed else None
    totals = pass_over(
        problem, accumulator.update, row_bytes=row_bytes, together=True, state=accumulator.tensors, closed=closed
    )
    return Estimate(accumulator.finish(), totals)


@dataclass(frozen=True, eq=False)
class Curvature:
    """Σ Jᵀ S Sᵀ J over the data at unit dispersion, without prior, noise or temperature.

    `statistics` give the log-likelihood for any noise, `gradient` is Σ φ·∇θ log p (None for sampled factors). Both and
    the matrix are scaled to `n_data`; `seen` counts the data that were read.

        la.curvature.matrix, la.curvature.n_data
    """

    __repr__ = brief

    matrix: PSD
    layout: Layout
    names: tuple[tuple[str, ...], ...]
    statistics: Tensor
    n_data: float
    seen: float
    structure: Structure
    factor: Factor
    gradient: Tensor | None = None
    notes: tuple[str, ...] = ()
    state: dict[str, Tensor] = field(default_factory=dict, repr=False)
    params: Params | None = field(default=None, repr=False)  # the weights it was computed at

    @property
    def size(self) -> int:
        return self.matrix.size

    def dense(self) -> Tensor:
        """Return the curvature as a (P, P) tensor in the flat order of the parameters."""
        return self.matrix.dense()

    def to(self, network: Network, device: torch.device | str) -> Curvature:
        """Copy the curvature to another device, for a network whose parameters are there already."""
        return replace(
            self,
            matrix=self.structure.moved(self.matrix, network, device),
            statistics=self.statistics.to(device),
            gradient=None if self.gradient is None else self.gradient.to(device),
            state={name: value.to(device) for name, value in self.state.items()},
            params=network.params,
        )

    def fingerprint(self) -> str:
        """Return a text that differs between curvatures, to compare the results of several processes."""
        numbers = [self.n_data, self.seen, *self.statistics.reshape(-1).tolist()]
        return f"{self.structure!r} {self.factor!r} {numbers} {float(self.matrix.diagonal().sum())}"


def estimate_curvature(problem: Problem, structure: Structure, n_data: float | None = None) -> Curvature:
    """Run the structure over the data and scale the result to the size of the data set that it stands for."""
    structure, why = structure.chosen(problem)
    notes = (f"structure: {why}",) if why else ()
    _require(problem, structure)
    if sharded():
        require_same({"structure": repr(structure)})
    problem, estimate = _robustly(problem, structure, structure.estimate)
    if not isinstance(estimate, Estimate):
        raise UnsupportedOperation(
            f"{type(structure).__name__}.estimate returned {type(estimate).__name__}; it must return an Estimate, "
            "which accumulate(problem, accumulator) makes"
        )
    notes = (*notes, *problem.plan.notes, *estimate.notes, *estimate.totals.notes)
    return _finish(problem, structure, estimate, n_data, notes)


def extend_curvature(problem: Problem, curvature: Curvature) -> Curvature:
    """Add the data of a problem to a curvature; `n_data` grows by what is seen."""
    structure = curvature.structure
    _require(problem, structure)
    ratio = curvature.n_data / curvature.seen
    raw = curvature.matrix if ratio == 1 else curvature.matrix.scale(1 / ratio)

    def extend(problem: Problem) -> Estimate:
        return structure.extend(_in_blocks_of(curvature, problem), raw, curvature.state)

    problem, estimate = _robustly(_in_blocks_of(curvature, problem), structure, extend)
    more = estimate.totals
    gradient = None
    if curvature.gradient is not None and more.gradient is not None:
        gradient = curvature.gradient / ratio + more.gradient
    totals = Totals(curvature.statistics / ratio + more.statistics, curvature.seen + more.seen, gradient)
    notes = tuple(dict.fromkeys((*curvature.notes, *estimate.notes)))
    n_data = curvature.n_data + more.seen
    return _finish(problem, structure, replace(estimate, totals=totals), n_data, notes)


def _in_blocks_of(curvature: Curvature, problem: Problem) -> Problem:
    """Return the problem with the blocks of the curvature, which come from the tape or from a loop over samples."""
    without = replace(problem, plan=dynamic_plan(problem.network.params, "a loop over samples, as in the fit"))
    for same in (problem, without):
        if curvature.layout.same_as(layout_of(same)) and curvature.structure.continues(curvature.matrix, same):
            return same
    raise UnsupportedOperation(OTHER_OPERATIONS)


def _require(problem: Problem, structure: Structure) -> None:
    structure.require(problem)
    served = problem.factor.structures
    if served and structure.name not in served:
        raise UnsupportedOperation(
            f"factor {type(problem.factor).__name__} needs structure={' or '.join(map(repr, served))}, not "
            f"{structure.name!r}. Use one of these, or factor='ggn'."
        )


def _robustly(
    problem: Problem, structure: Structure, estimate: Callable[[Problem], Estimate]
) -> tuple[Problem, Estimate]:
    """Estimate, and start over without the tape where the operations change from batch to batch."""
    try:
        with together() if sharded() else nullcontext():
            return problem, estimate(problem)
    except PlanChanged:
        problem.batches.require_reiterable("a network whose operations change from batch to batch")
        if problem.reader is not None:  # these data take another way from the last layer: use the tape instead
            with problem.network.borrow():
                first = next(iter(problem.batches)).inputs
                plan = problem.network.plan(first)
            return _robustly(replace(problem, plan=plan, reader=None), structure, estimate)
        note = "a loop over samples for all weights: the operations change from batch to batch"
        problem = replace(problem, plan=dynamic_plan(problem.network.params, note))
        structure.require(problem)
        return problem, estimate(problem)


def _finish(
    problem: Problem, structure: Structure, estimate: Estimate, n_data: float | None, notes: tuple[str, ...]
) -> Curvature:
    totals = estimate.totals
    if not totals.seen > 0:
        raise BadData("no datum counts: all weights are zero")
    n = totals.seen if n_data is None else float(n_data)
    ratio = n / totals.seen
    unused = [name for block in problem.plan.blocks if block.kind == "unused" for name in block.names]
    if unused:
        notes = (*notes, f"no curvature, only the prior: {', '.join(unused)} do not reach the outputs")
    params = problem.network.params
    names = (params.names,) if params.index is not None else tuple(block.names for block in problem.plan.blocks)
    return Curvature(
        matrix=estimate.matrix if ratio == 1 else estimate.matrix.scale(ratio),
        layout=layout_of(problem),
        names=names,
        statistics=totals.statistics * ratio,
        n_data=n,
        seen=totals.seen,
        structure=structure,
        factor=problem.factor,
        gradient=None if totals.gradient is None else (totals.gradient * ratio).to(params.dtype),
        notes=tuple(dict.fromkeys(notes)),
        state=estimate.state,
        params=params,
    )
