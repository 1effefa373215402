"""One loop over data for every structure: forward with the tape, directions, rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lapwing.curvature.factor import GGN, Directions, Factor, MCFisher
from lapwing.curvature.regroup import Group, Regrouped
from lapwing.curvature.resume import Journal, OtherBatches, Resume
from lapwing.curvature.shards import add_up, add_up_numbers, sharded
from lapwing.errors import BadData
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Jacobian
from lapwing.model import Batch, Batches, LazyRows, Linearization, Network, Plan, batch_size, tensors_in
from lapwing.model.batches import parts_of
from lapwing.model.tape import run

Update = Callable[[Jacobian, Tensor | None], None]
"""Rows, and the weights (n,) of the samples if these are the first rows of their batch."""
MakeRows = Callable[[Linearization, Tensor], Jacobian]
"""Rows of a network at a batch, for directions (r, n, *event, c)."""


CHUNK = 2**26  # bytes of back-propagated gradients under way at a time: more goes back to the system when it is freed
KEPT = 2**25 - 2**14  # bytes; glibc gives back memory in pieces of twice the largest block that it has seen freed
SMALL = 2**22  # bytes of gradients below which several directions go into one update
FEW = 255  # samples: a pass over no more of them takes no time worth any error
TOGETHER = 2**28  # where all directions of a sample are wanted at once: backward passes of few samples are slow


def available_memory() -> int:
    """Half of the memory that the machine says is free, in bytes; 4 GB where it does not say."""
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        return free // 2
    except (OSError, StopIteration):
        pages = getattr(os, "sysconf", lambda _: 0)("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return pages * os.sysconf("SC_PAGE_SIZE") // 2 if pages else 4 * 2**30


@dataclass(frozen=True, eq=False)
class Totals:
    """What a pass over the data adds up besides the curvature."""

    statistics: Tensor
    seen: float
    gradient: Tensor | None
    notes: tuple[str, ...] = ()


class _Sums:
    """Running totals of a pass."""

    def __init__(self) -> None:
        self.statistics: Tensor | None = None
        self.gradient: Tensor | None = None
        self.seen = self.curvature = self.dropped = 0.0
        self.samples = self.directions = 0

    def add(self, statistics: Tensor, chosen: Directions) -> None:
        self.statistics = statistics if self.statistics is None else self.statistics + statistics
        self.curvature += chosen.total
        self.dropped += chosen.dropped
        self.samples += len(chosen.needed)
        self.directions += int(chosen.needed.sum())

    def join(self, other: _Sums) -> None:
        """Those of another pass, without gradients."""
        assert other.statistics is not None
        self.statistics = other.statistics if self.statistics is None else self.statistics + other.statistics
        for name in ("seen", "curvature", "dropped", "samples", "directions"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_up(self) -> None:
        """Over all processes."""
        assert self.statistics is not None
        add_up({name: t for name, t in vars(self).items() if isinstance(t, Tensor)})
        numbers = {name: v for name, v in vars(self).items() if isinstance(v, int | float)}
        vars(self).update(add_up_numbers(numbers, self.statistics.device))

    def totals(self) -> Totals:
        assert self.statistics is not None
        notes: tuple[str, ...] = ()
        if self.dropped > 1e-6 * self.curvature:
            notes = (
                f"directions: {self.directions / max(self.samples, 1):.2g} a sample, "
                f"which leaves out {self.dropped / self.curvature:.2g} of the curvature in output space",
            )
        return Totals(self.statistics, self.seen, self.gradient, notes)


@dataclass(frozen=True, eq=False)
class Problem:
    """A network, data and a likelihood: everything a structure needs to estimate its curvature."""

    network: Network
    plan: Plan
    batches: Batches
    likelihood: Likelihood
    factor: Factor
    event: tuple[int, ...]  # event dimensions of the outputs of the first batch
    outputs: int  # outputs a sample
    generator: torch.Generator | None = None
    memory: int = field(default_factory=available_memory)
    progress: bool | None = None
    first: Batch | None = None  # already read from a one-shot iterator
    rest: Iterator[Batch] | None = None
    scalar: bool = False  # the network returns (B,)
    resume: Resume | None = None  # where interrupted passes go on
    batch: int = 0  # samples of the first batch

    @property
    def few(self) -> bool:
        """Whether the data are known to be few."""
        return self.batches.length is not None and self.batches.length * self.batch <= FEW

    def sweep(
        self,
        update: Update,
        factor: Factor | None = None,
        label: str = "fit",
        row_bytes: int = 0,
        gradient: bool = True,
        inputs: Update | None = None,
        together: bool = False,
        state: Mapping[str, Tensor] | None = None,
        rows: MakeRows | None = None,
    ) -> Totals:
        """Pass over the data once, handing rows to `update` for a few samples and directions at a time.

        Where samples need different numbers of directions, those that need alike are brought together and run again.
        `row_bytes` is what the structure itself needs for each row, `gradient` asks for that of the log-likelihood (of
        exact factors only). `inputs` sees every sample that is run again when it is first run, without directions.
        `together` hands over all directions of fewer samples, rather than fewer directions of all samples. With
        `state`, the tensors that `update` adds to, an interrupted pass goes on where the problem keeps a journal.
        `rows` makes them in place of `Linearization.jacobian`, of every batch as it comes: no samples are regrouped.
        """
        journal = None if self.resume is None or state is None else self.resume.journal(label, self.plan.signature)
        try:
            sums = self._sweep(update, factor, label, row_bytes, gradient, inputs, together, state or {}, journal, rows)
        except OtherBatches:
            self.batches.require_reiterable("a checkpoint of other batches")
            assert journal is not None
            journal.path.unlink(missing_ok=True)
            return self.sweep(update, factor, label, row_bytes, gradient, inputs, together, state, rows)
        if state is not None and sharded():
            add_up(state)
            sums.add_up()
        return sums.totals()

    def _sweep(
        self,
        update: Update,
        factor: Factor | None,
        label: str,
        row_bytes: int,
        gradient: bool,
        inputs: Update | None,
        together: bool,
        state: Mapping[str, Tensor],
        journal: Journal | None,
        rows: MakeRows | None,
    ) -> _Sums:
        factor = factor or self.factor
        torch.empty(KEPT, dtype=torch.uint8, device="cpu")  # freed at once, never written
        wanted = gradient and isinstance(factor, GGN)
        sums = _Sums()
        waiting = Regrouped()
        run = partial(self._run, update=update, sums=sums, row_bytes=row_bytes, together=together)
        with self.network.borrow():
            for batch in self._batches(label):
                if journal is not None and journal.skips(batch):
                    if journal.restores:
                        kept = journal.restore(state, self.generator)
                        vars(sums).update(kept["sums"])
                        waiting.size, waiting.taking = kept["waiting"]
                    continue
                if waiting.taking and inputs is None and self._wait(batch, factor, wanted, waiting, sums):
                    run(waiting.full())
                    self._pause(journal, run, waiting, state, sums)
                    continue
                for part in parts_of(batch, self._samples(factor.width(self.outputs), row_bytes, together)):
                    at = self.network.linearize(self.plan, part.inputs)
                    directions, score, fresh = self._directions(part, at.f, factor, wanted, sums)
                    if rows is None and waiting.admit(part.inputs, directions, score, factor, batch.number):
                        if inputs is not None:
                            inputs(at.jacobian(at.f.detach().new_zeros(0, *at.f.shape)), fresh)
                        del at
                        run(waiting.full())
                    else:
                        checked = self._finite(update, f"batch {batch.number}: ")
                        self._feed(checked, at, directions, score, sums, fresh, row_bytes, together, rows)
                        del at
                self._pause(journal, run, waiting, state, sums)
            run(waiting.rest())
        if journal is not None:
            journal.require_end()
            journal.save(state, _kept(sums, waiting), self.generator, last=True)
        return sums

    def _pause(
        self,
        journal: Journal | None,
        run: Callable[[Iterable[Group]], None],
        waiting: Regrouped,
        state: Mapping[str, Tensor],
        sums: _Sums,
    ) -> None:
        """From time to time leave no sample waiting, and write down what there is."""
        if journal is not None and journal.pauses:
            run(waiting.rest())
            journal.save(state, _kept(sums, waiting), self.generator)

    def _directions(
        self, batch: Batch, f: Tensor, factor: Factor, wanted: bool, sums: _Sums
    ) -> tuple[Directions, Tensor | None, Tensor]:
        """Directions, scores and weights (n,) of a batch, counted; samples without a target that counts weigh 0."""
        y, f = self.prepare(batch, f), f.detach()
        with torch.no_grad():
            scored = {"scored": True} if wanted else {}
            directions = factor.choose(self.likelihood, f, y, batch.weights, self.generator, **scored)
            score = self._score(f, y, batch) if wanted else None
            sums.add(self.likelihood.statistics(f, y, batch.weights), directions)
            sums.seen += self.likelihood.count(f, y, batch.weights)
            ones = torch.ones(len(f), dtype=self.network.params.dtype, device=f.device)
            fresh = ones if batch.weights is None else batch.weights.to(ones)
            fresh = fresh * self.likelihood.counted(f, y)
        return directions, score, fresh

    def _wait(self, batch: Batch, factor: Factor, wanted: bool, waiting: Regrouped, sums: _Sums) -> bool:
        """Bring the samples of a batch to those that wait, by a forward pass without a graph; or decline it."""
        counted = _Sums()
        directions, score, _ = self._directions(batch, self.network.forward(batch.inputs), factor, wanted, counted)
        if not waiting.admit(batch.inputs, directions, score, factor, batch.number):
            return False
        sums.join(counted)
        return True

    def _run(self, groups: Iterable[Group], update: Update, sums: _Sums, row_bytes: int, together: bool) -> None:
        """Rows of samples that were brought together."""
        for group in groups:
            for part in group.parts(self._samples(group.directions.count, row_bytes, together)):
                at = self.network.linearize(self.plan, part.inputs)
                checked = self._finite(update, f"batch {' or '.join(map(str, part.batches))}: ")
                self._feed(checked, at, part.directions, part.score, sums, None, row_bytes, together)

    def _score(self, f: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """φ·∇_f log p(y | f), times the weights."""
        score = self.likelihood.score(f, y) * self.likelihood.dispersion.detach().to(f)
        return _weighted(score, batch.weights)

    def prepare(self, batch: Batch, f: Tensor) -> Tensor:
        """Validated targets; errors name the batch, and the operation where values stopped being finite."""
        inputs = (t for t in tensors_in(batch.inputs) if t.is_floating_point())
        if not (bool(f.isfinite().all()) and all(bool(t.isfinite().all()) for t in inputs)):
            raise BadData(self._not_finite(batch))
        if batch.weights is not None and batch.weights.shape != f.shape[:1]:
            came = tuple(batch.weights.shape)
            raise BadData(f"batch {batch.number}: weights of shape {came} for {len(f)} samples; one a sample is needed")
        if batch.weights is not None and not bool(((batch.weights >= 0) & batch.weights.isfinite()).all()):
            bad = batch.weights[~((batch.weights >= 0) & batch.weights.isfinite())][0].item()
            raise BadData(f"batch {batch.number}: a sample weight is {bad}; weights are finite and at least 0")
        try:
            return self.likelihood.targets(f.detach(), batch.targets)
        except BadData as error:
            raise BadData(f"batch {batch.number}: {error}") from error

    def _not_finite(self, batch: Batch) -> str:
        bad = [t for t in tensors_in(batch.inputs) if t.is_floating_point() and not bool(t.isfinite().all())]
        if bad:
            where = (~bad[0].isfinite()).nonzero()[0].tolist()
            return f"batch {batch.number}: the inputs hold {bad[0][tuple(where)].item()} at index {tuple(where)}"
        names = dict(self.network.module.named_parameters())
        ids = {id(p): name for name, p in names.items()}
        for name, p in names.items():
            if not bool(p.isfinite().all()):
                return f"batch {batch.number}: parameter {name!r} of the network is not finite"
        finished = run(self.network.module, batch.inputs, {n: names[n] for n in self.network.params.names})
        for record in finished.records:
            if not bool(record.out.isfinite().all()):
                owners = ", ".join(ids.get(id(record.tensors[j]), "a derived weight") for j in record.live)
                return f"batch {batch.number}: the outputs of layer {record.name}({owners}) are not finite"
        return f"batch {batch.number}: the outputs of the network are not finite, after its last layer with weights"

    def _batches(self, label: str) -> Iterator[Batch]:
        source: Any = self.batches
        if self.rest is not None and self.first is not None:
            source = chain([self.first], self.rest)
        hide = None if self.progress is None else not self.progress
        yield from tqdm(
            source, desc=label, total=self.batches.length, disable=hide, delay=0 if self.progress else 1, leave=False
        )

    def _add_gradient(self, sums: _Sums, found: Mapping[str, Tensor | None]) -> None:
        """Σ_n φ·∇_θ log p(y_n | f_n), flat: how far the weights are from a mode."""
        params = self.network.params
        live = dict(self.network.module.named_parameters())
        flat = params.flatten(
            {name: torch.zeros_like(live[name]) if g is None else g.to_dense() for name, g in found.items()}
        )
        flat = (flat if params.index is None else flat[params.index]).double()
        sums.gradient = flat if sums.gradient is None else sums.gradient + flat

    def _finite(self, update: Update, where: str) -> Update:
        """The same update, refusing rows that are not finite (a square root at zero) with batch and parameters; what
        the update itself refuses gets the batch too."""

        def checked(jacobian: Jacobian, fresh: Tensor | None) -> None:
            rows = jacobian.rows
            # what is not finite spreads to the earliest layers and to their sum, so one number tells
            if isinstance(rows, LazyRows) and rows.gradients and not bool(rows.gradients[0].sum().isfinite()):
                bad = [j for j, g in enumerate(rows.gradients) if not bool(g.isfinite().all())]
                if bad:
                    raise BadData(where + _no_derivative(rows, bad[-1]))
            try:
                update(jacobian, fresh)
            except BadData as error:
                raise BadData(where + str(error)) from error

        return checked

    def _cap(self, together: bool) -> int:
        """Bytes that the rows under way may take."""
        return min(self.memory // 8, TOGETHER if together else CHUNK)

    def _samples(self, directions: int, row_bytes: int, together: bool) -> int:
        """How many to run at a time: as fit with the gradients of one direction, or of all, with their graph, and with
        the directions themselves."""
        cap = self._cap(together)
        rows = cap // max(4 * self.plan.width + row_bytes, 1)
        root = 4 * directions * (self.outputs // max(1, math.prod(self.event)))
        return max(
            1,
            min(
                rows // max(directions, 1) if together else rows,
                cap // max(self.plan.graph, 1),
                min(self.memory // 8, TOGETHER) // max(root, 1),
            ),
        )

    def _feed(
        self,
        update: Update,
        at: Linearization,
        directions: Directions,
        score: Tensor | None,
        sums: _Sums,
        fresh: Tensor | None,
        row_bytes: int,
        together: bool,
        rows: MakeRows | None = None,
    ) -> None:
        """Rows of a piece, as many directions at a time as fit, or as share a backward pass or are small; and
        the gradient of the log-likelihood, from the pass of the first direction where that is along the score."""
        row, count = at.n * (4 * self.plan.width + row_bytes), max(directions.count, 1)  # if of zeros
        length = max(1, self._cap(together) // max(row, 1))
        if not together:
            length = max(1, min(length, max(at.shared(count), SMALL // max(row, 1))))
        with torch.no_grad():
            if score is not None and (rows is not None or directions.scale is None or not at.joined):
                self._add_gradient(sums, at.vjp(score))
                score = None
            for start in range(0, count, length):
                chosen = directions.between(start, min(start + length, count))
                if score is not None and directions.scale is not None:
                    jacobian, gradient = at.jacobian_and_vjp(chosen, score, directions.scale)
                    self._add_gradient(sums, gradient)
                    score = None
                else:
                    jacobian = at.jacobian(chosen) if rows is None else rows(at, chosen)
                update(jacobian, fresh)
                del jacobian  # before the next pass takes as much
                fresh = None


def _kept(sums: _Sums, waiting: Regrouped) -> dict[str, Any]:
    """What a pass knows where no sample waits."""
    return {"sums": dict(vars(sums)), "waiting": [waiting.size, waiting.taking]}


def _no_derivative(rows: LazyRows, k: int) -> str:
    layer = f"{rows.at.finished.records[k].name}({', '.join(sorted(rows.at.plan.steps[k].names))})"
    return (
        f"the gradient of the outputs at layer {layer} is not finite, although the outputs are: an operation after it "
        "has no derivative there (a square root or a norm at zero)"
    )


def _weighted(s: Tensor, weights: Tensor | None) -> Tensor:
    """Directions (n, ...) times one weight a sample."""
    return s if weights is None else s * weights.to(s).reshape(-1, *(1,) * (s.ndim - 1))


def pose(
    network: Network, batches: Batches, likelihood: Likelihood, factor: Factor | None = None, **options: Any
) -> Problem:
    """Read the first batch, plan the tape and check it. `factor=None` chooses: exact where feasible, else sampled."""
    iterator = iter(batches)
    first = next(iterator)
    if not batches.reiterable:
        options |= {"first": first, "rest": iterator}
    f, scalar = network.forward_raw(first.inputs)
    options |= {"scalar": scalar, "batch": batch_size(first.inputs)}
    if f.shape[0] != batch_size(first.inputs):
        raise BadData(f"a batch of {batch_size(first.inputs)} samples gave outputs of shape {tuple(f.shape)}")
    notes: tuple[str, ...] = ()
    if factor is None:
        factor = GGN()
        if f[0].numel() > factor.limit:
            factor = MCFisher()
            notes = (f"Monte Carlo Fisher, because the exact GGN has {f[0].numel():,} output directions a sample",)
    if isinstance(factor, GGN):
        factor.require(f)
    with network.borrow():
        # before the self-check, which would only see that numbers disagree
        Problem(network, Plan((), (), ()), batches, likelihood, factor, (), 0).prepare(first, f)
        plan = network.plan(first.inputs)
    plan = replace(plan, notes=plan.notes + notes)
    return Problem(network, plan, batches, likelihood, factor, tuple(f.shape[1:-1]), f[0].numel(), **options)
