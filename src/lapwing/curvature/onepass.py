"""One pass over the data, for every structure: run a batch, choose directions in output space, hand over rows.

A backward pass costs the same for every sample of a batch, whether the sample needs it or not. Confident classifiers
need nine directions for a few samples and none for most. So samples that need equally many directions share a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.closed import Closed, Reader, heads
from lapwing.curvature.factor import Directions, Factor, larger
from lapwing.curvature.problem import Problem
from lapwing.curvature.resume import Journal, OtherBatches
from lapwing.curvature.shards import add_up, add_up_numbers
from lapwing.errors import BadData
from lapwing.linalg import Jacobian
from lapwing.model import Batch, BlockRows, Digest, Linearization, Params, Plan, batch_size, take, tensors_in
from lapwing.model.batches import parts_of, sharded
from lapwing.model.calls import Inputs, concatenate, key_of, lists_values, per_sample, weighted

Update = Callable[[Jacobian, Tensor | None], None]
"""Takes rows, and the weights (n,) of the samples if these are the first rows of their batch."""
MakeRows = Callable[[Linearization, Tensor], Jacobian]
"""Makes the rows of a linearized network for directions (r, n, *event, c)."""

CHUNK = 2**26  # bytes of back-propagated gradients in memory at a time: larger blocks go back to the system when freed
KEPT = 2**25 - 2**14  # bytes; glibc returns memory in pieces of twice the largest block that it has seen freed
SMALL = 2**22  # bytes of gradients below which several directions go into one update
TOGETHER = 2**28  # bytes in memory where all directions of a sample come at once: few samples make slow backward passes
WORTH = 0.6  # share of the directions of a batch that must be needed to run the batch as it is
WAITING = 2**27  # bytes that waiting samples may take
OVERHEAD = 8  # samples that cost as much as starting one more backward pass


def pass_over(
    problem: Problem,
    update: Update,
    factor: Factor | None = None,
    *,
    label: str = "fit",
    row_bytes: int = 0,
    gradient: bool = True,
    inputs: Update | None = None,
    together: bool = False,
    state: Mapping[str, Tensor] | None = None,
    rows: MakeRows | None = None,
    digest: Digest | None = None,
    closed: Closed | None = None,
) -> Totals:
    """Pass over the data once, handing rows to `update` for a few samples and directions at a time.

    - `factor` replaces that of the problem.
    - `row_bytes` is the memory that the structure itself needs per row.
    - `gradient` asks for the gradient of the log-likelihood, which exact factors have.
    - `inputs` sees every sample that has to wait for others: once, without directions.
    - `together` hands over all directions of few samples rather than few directions of all samples.
    - `state` holds the tensors that `update` adds to. They are summed over processes. If the problem has a journal, an
      interrupted pass goes on from it.
    - `rows` makes the rows in place of `Linearization.jacobian`; no sample waits then.
    - `closed` takes the samples of a last layer instead of rows, without any backward pass, if the problem has a
      reader.
    - `digest` names the blocks of which the structure wants no rows, only what `BlockRows.gradient_gram` gives.

        totals = pass_over(problem, accumulator.update, state=accumulator.tensors)
    """
    factor = factor or problem.factor
    scored, pieces = gradient and factor.exact, Pieces(problem, row_bytes, together, digest)
    resume = None if state is None else problem.resume

    def run() -> Sums:
        if closed is not None and problem.reader is not None and problem.resume is None:
            return _closed_pass(problem, problem.reader, factor, closed, scored, label)
        journal = None if resume is None else resume.journal(label, problem.plan.signature)
        return _Pass(problem, update, factor, pieces, scored, inputs, rows, state or {}, journal).over(label)

    try:
        sums = run()
    except OtherBatches:
        problem.batches.require_reiterable("a checkpoint of other batches")
        assert resume is not None
        resume.journal(label, problem.plan.signature).path.unlink(missing_ok=True)
        sums = run()
    if state is not None and sharded():
        if scored:  # also where no sample of this shard needed a direction
            sums.gradient_of(problem.network.params)
        sums.add_up(state, problem.plan)
    return sums.totals()


def _closed_pass(problem: Problem, reader: Reader, factor: Factor, closed: Closed, scored: bool, label: str) -> Sums:
    """Pass over the data by forward passes alone; the structure adds up what the last layer saw."""
    sums, likelihood = Sums(), problem.likelihood
    params, places = problem.network.params, problem.plan.blocks[0].places.index
    with torch.no_grad():
        for head in heads(problem, reader, factor, label):
            f, y, weights = head.part.f, head.part.y, head.part.weights
            sums.statistics = sums.statistics + likelihood.statistics(f, y, weights)
            sums.seen += likelihood.count(f, y, weights)
            closed(head)
            if scored:
                sums.gradient_of(params)[places.to(params.device)] += head.gradient()
    return sums


@dataclass(frozen=True)
class Pieces:
    """How many samples and directions are in memory at a time."""

    problem: Problem
    row_bytes: int  # memory that a structure itself needs per row
    together: bool  # all directions of few samples rather than few directions of all samples
    digest: Digest | None = None

    @property
    def cap(self) -> int:
        """Bytes that rows may take at a time."""
        return min(self.problem.memory // 8, TOGETHER if self.together else CHUNK)

    @property
    def row(self) -> int:
        """Bytes per direction of one sample: all gradients of a backward pass, or those that stay if `together`."""
        plan = self.problem.plan
        return max(4 * (plan.kept if self.together else plan.width) + self.row_bytes, 1)

    def samples(self, directions: int) -> int:
        """Return how many samples to run at once, so that gradients, graph and directions fit into memory."""
        problem, rows = self.problem, self.cap // self.row
        together = 4 * problem.plan.under_way(directions) + directions * self.row_bytes
        root = 4 * directions * (problem.outputs // max(1, math.prod(problem.event)))
        return max(
            1,
            min(
                self.cap // max(together, 1) if self.together else rows,
                min(self.cap, CHUNK) // max(problem.plan.graph, 1),
                min(problem.memory // 8, TOGETHER) // max(root, 1),
            ),
        )

    def directions(self, at: Linearization, count: int) -> int:
        """Return how many directions to process at once: they fit, and share a backward pass or are small."""
        row = max(self._direction(at), 1)
        length = max(1, self.cap // row)
        return length if self.together else max(1, min(length, max(at.shared(count), SMALL // row)))

    def _direction(self, at: Linearization) -> int:
        """Return the bytes per direction of all samples.

        If gradients are digested, few of them stay in memory, and explicit rows and the direction itself count too.
        """
        if self.digest is None:
            return at.n * self.row
        explicit = sum(block.size for block in at.plan.blocks if block.kind == "rows")
        return 4 * (at.n * (at.kept_with(self.digest) + explicit) + at.f.numel()) + at.n * self.row_bytes


@dataclass(frozen=True, eq=False)
class Totals:
    """What a pass over the data adds up besides the curvature: statistics of the likelihood, the number of data, and
    the gradient of the log-likelihood (None for sampled factors)."""

    statistics: Tensor
    seen: float
    gradient: Tensor | None
    notes: tuple[str, ...] = ()


class Sums:
    """Sums of a pass that is still running."""

    def __init__(self) -> None:
        self.statistics = torch.zeros((), dtype=torch.float64)
        self.gradient: Tensor | None = None
        self.seen = self.curvature = self.dropped = 0.0
        self.samples = self.directions = 0

    def gradient_of(self, params: Params) -> Tensor:
        """Return the gradient so far, (P,): zeros at first."""
        if self.gradient is None:
            self.gradient = torch.zeros(params.size, dtype=torch.float64, device=params.device)
        return self.gradient

    def add(self, statistics: Tensor, chosen: Directions) -> None:
        self.statistics = self.statistics + statistics
        self.curvature += chosen.total
        self.dropped += chosen.dropped
        self.samples += len(chosen.needed)
        self.directions += int(chosen.needed.sum())

    def join(self, other: Sums) -> None:
        """Add the sums of another pass, without gradients."""
        self.statistics = self.statistics + other.statistics
        for name in ("seen", "curvature", "dropped", "samples", "directions"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_up(self, state: Mapping[str, Tensor], plan: Plan) -> None:
        """Add up these totals and the tensors of `state` over all processes."""
        add_up({**state, **{f"total {name}": t for name, t in vars(self).items() if isinstance(t, Tensor)}}, plan)
        numbers = {name: v for name, v in vars(self).items() if isinstance(v, int | float)}
        vars(self).update(add_up_numbers(numbers, self.statistics.device))

    def totals(self) -> Totals:
        notes: tuple[str, ...] = ()
        if self.dropped > 1e-6 * self.curvature:
            notes = (
                f"directions: {self.directions / max(self.samples, 1):.2g} per sample, "
                f"which leaves out {self.dropped / self.curvature:.2g} of the curvature in output space",
            )
        return Totals(self.statistics, self.seen, self.gradient, notes)


@dataclass(frozen=True, eq=False)
class Group:
    """Samples that run together."""

    inputs: Inputs
    directions: Directions
    score: Tensor | None
    batches: tuple[int, ...] = ()  # the batches that they come from, for messages

    def parts(self, size: int) -> Iterator[Group]:
        """Split into even parts of at most `size` samples."""
        n = len(self.directions.needed)
        for rows in torch.arange(n, device=self.directions.needed.device).chunk(-(-n // max(1, size))):
            yield self if len(rows) == n else self.take(rows)

    def take(self, rows: Tensor) -> Group:
        """Take some of the samples."""
        n, score = len(self.directions.needed), self.score
        part = None if score is None else score[rows]
        return Group(take(self.inputs, rows, n), self.directions.take(rows), part, self.batches)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*tensors_in(self.inputs), self.directions.columns))


@dataclass(eq=False)
class Regrouped:
    """Samples that wait until there are enough of their kind.

    Samples are of one kind if they need equally many directions, if the first direction is the score for all or none,
    and if shapes, names and other arguments of their inputs agree.
    """

    size: int = 1  # samples per group: as many as the largest batch so far has
    waiting: dict[tuple, list[Group]] = field(default_factory=dict)
    taking: bool = False  # whether the last batch was admitted

    def admit(
        self, inputs: Inputs, directions: Directions, score: Tensor | None, factor: Factor, number: int = 0
    ) -> bool:
        """Let the samples of a batch wait; False where running the batch as it is costs no more."""
        n, self.taking = batch_size(inputs), False
        self.size = max(self.size, n)
        build = None if directions.order is None else _build(inputs, n)
        if build is None:
            return False
        needed = self._with_scores(directions, score, factor)
        if float(needed.double().mean()) > WORTH * int(needed.max()):
            return False
        self.taking = True
        batch = Group(inputs, directions, score, (number,))
        alike = (directions.scale is None, build)
        for count in needed.unique().tolist():
            if count:
                rows = (needed == count).nonzero().flatten()
                self.waiting.setdefault((_rounded(count), alike), []).append(batch.take(rows))
        return True

    def _with_scores(self, directions: Directions, score: Tensor | None, factor: Factor) -> Tensor:
        """Return the directions per sample, at least one if it matters to the gradient of the log-likelihood."""
        if score is None:
            return directions.needed
        sizes = score.flatten(1).double().norm(dim=1)
        matters = larger(sizes, torch.finfo(score.dtype).eps if factor.tolerance is None else factor.tolerance)
        return torch.maximum(directions.needed, matters.to(directions.needed))

    def full(self) -> Iterator[Group]:
        """Yield groups that have reached their size, and the largest others while all take too much memory."""
        for key in list(self.waiting):
            if _samples(self.waiting[key]) >= self.size:
                yield _joined(self.waiting.pop(key))
        while sum(part.bytes for parts in self.waiting.values() for part in parts) > WAITING:
            largest = max(self.waiting, key=lambda key: _samples(self.waiting[key]))
            yield _joined(self.waiting.pop(largest))

    def rest(self) -> Iterator[Group]:
        """Yield everything that still waits. A few samples join a group that needs more directions."""
        levels = sorted(self.waiting.items(), key=lambda item: item[0][0])
        self.waiting = {}
        for alike in {key[1] for key, _ in levels}:
            own = [(key[0], parts) for key, parts in levels if key[1] == alike and parts]
            for (count, parts), following in zip_longest(own, own[1:]):
                if following and _samples(parts) * (following[0] - count) < OVERHEAD * (count + 2):
                    following[1].extend(parts)
                else:
                    yield _joined(parts)


def _build(inputs: Inputs, n: int) -> tuple | None:
    """Return a key that batches share if their samples may run together; None if samples cannot leave their batch.

    They cannot where a tensor belongs to the batch as a whole, where a list holds one plain value per sample, or where
    an argument is an object that cannot be compared.
    """
    if not all(per_sample(t, n) for t in tensors_in(inputs)) or lists_values(inputs, n):
        return None
    try:
        return key_of(inputs, lambda t: (t.shape[1:], t.dtype))
    except TypeError:
        return None


def _samples(parts: list[Group]) -> int:
    return sum(len(part.directions.needed) for part in parts)


def _rounded(count: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: larger groups are worth a few wasted directions."""
    power = 1 << max(0, count.bit_length() - 1)
    return next(level for level in (power, power + power // 2, 2 * power) if level >= count)


def _joined(parts: list[Group]) -> Group:
    if len(parts) == 1:
        return parts[0]
    inputs, first = concatenate([part.inputs for part in parts]), parts[0].directions
    columns = torch.cat([p.directions.columns for p in parts])
    needed = torch.cat([p.directions.needed for p in parts])
    order = torch.cat([p.directions.order for p in parts if p.directions.order is not None])
    scores = [p.score for p in parts if p.score is not None]
    batches = tuple(sorted({number for part in parts for number in part.batches}))
    scales = [p.directions.scale for p in parts if p.directions.scale is not None]
    joined = Directions(columns, needed, first.event, order, torch.cat(scales) if scales else None)
    return Group(inputs, joined, torch.cat(scores) if scores else None, batches)


@dataclass(eq=False)
class _Pass:
    """One pass over the data and its sums so far."""

    problem: Problem
    update: Update
    factor: Factor
    pieces: Pieces
    scored: bool  # whether the gradient of the log-likelihood is wanted
    inputs: Update | None
    rows: MakeRows | None
    state: Mapping[str, Tensor]
    journal: Journal | None
    sums: Sums = field(default_factory=Sums)
    waiting: Regrouped = field(default_factory=Regrouped)

    def over(self, label: str) -> Sums:
        """Read all batches."""
        torch.empty(KEPT, dtype=torch.uint8, device="cpu")  # freed at once, never written
        journal = self.journal
        with self.problem.network.borrow():
            for batch in self.problem.read(label):
                if journal is not None and journal.skips(batch):
                    self._restore(journal)
                    continue
                with self.problem.naming(batch):
                    if self._wait(batch):
                        self._run(self.waiting.full())
                    else:
                        self._take(batch)
                if journal is not None and journal.pauses:  # from time to time leave no sample waiting
                    self._run(self.waiting.rest())
                    self._save(journal)
            self._run(self.waiting.rest())
        if journal is not None:
            journal.require_end()
            self._save(journal, last=True)
        return self.sums

    def _restore(self, journal: Journal) -> None:
        if journal.restores:
            kept = journal.restore(self.state, self.problem.generator)
            vars(self.sums).update(kept["sums"])
            self.waiting.size, self.waiting.taking = kept["waiting"]

    def _save(self, journal: Journal, **options: bool) -> None:
        """Write the sums to the journal; no sample waits now."""
        kept = {"sums": dict(vars(self.sums)), "waiting": [self.waiting.size, self.waiting.taking]}
        journal.save(self.state, kept, self.problem.generator, **options)

    def _wait(self, batch: Batch) -> bool:
        """Let the samples of a batch wait after a forward pass without a graph; False where they should not."""
        if not self.waiting.taking or self.inputs is not None:
            return False
        counted = Sums()
        directions, score, _ = self._directions(batch, self.problem.network.forward(batch.inputs), counted)
        if not self.waiting.admit(batch.inputs, directions, score, self.factor, batch.number):
            return False
        self.sums.join(counted)
        return True

    def _take(self, batch: Batch) -> None:
        """Process a batch in parts that fit into memory, and the groups that its samples complete."""
        problem = self.problem
        for part in parts_of(batch, self.pieces.samples(self.factor.width(problem.outputs))):
            if self._admitted(part, problem.network.linearize(problem.plan, part.inputs)):
                self._run(self.waiting.full())

    def _admitted(self, batch: Batch, at: Linearization) -> bool:
        """Let samples wait, after the structure has seen their inputs, or process them; return whether they wait."""
        directions, score, fresh = self._directions(batch, at.f, self.sums)
        if self.rows is None and self.waiting.admit(batch.inputs, directions, score, self.factor, batch.number):
            if self.inputs is not None:
                self.inputs(at.jacobian(at.f.detach().new_zeros(0, *at.f.shape)), fresh)
            return True
        self._feed(at, directions, score, fresh, f"batch {batch.number}: ")
        return False

    def _run(self, groups: Iterable[Group]) -> None:
        """Process groups of samples that waited for each other."""
        network, plan = self.problem.network, self.problem.plan
        for group in groups:
            for part in group.parts(self.pieces.samples(group.directions.count)):
                where = f"batch {' or '.join(map(str, part.batches))}: "
                self._feed(network.linearize(plan, part.inputs), part.directions, part.score, None, where)

    def _directions(self, batch: Batch, f: Tensor, sums: Sums) -> tuple[Directions, Tensor | None, Tensor]:
        """Return directions, scores and weights (n,) of a batch, and add them to the sums; no target means weight 0."""
        problem, likelihood = self.problem, self.problem.likelihood
        y, f = problem.prepare(batch, f), f.detach()
        with torch.no_grad():
            asked: dict[str, Any] = {"scored": True} if self.scored else {}
            if self.factor.exact:
                asked["reach"] = _reach(batch.inputs, len(f))
            directions = self.factor.choose(likelihood, f, y, batch.weights, problem.generator, **asked)
            score = None
            if self.scored:  # φ·∇_f log p(y | f)
                score = weighted(likelihood.score(f, y) * likelihood.common_factor.detach().to(f), batch.weights)
            sums.add(likelihood.statistics(f, y, batch.weights), directions)
            sums.seen += likelihood.count(f, y, batch.weights)
            ones = torch.ones(len(f), dtype=problem.network.params.dtype, device=f.device)
            fresh = ones if batch.weights is None else batch.weights.to(ones)
            fresh = fresh * likelihood.counted(f, y)
        return directions, score, fresh

    def _feed(
        self, at: Linearization, directions: Directions, score: Tensor | None, fresh: Tensor | None, where: str
    ) -> None:
        """Hand over the rows of a part, as many directions at a time as fit into memory.

        If the first direction is the score, its backward pass gives the gradient of the log-likelihood too.
        """
        count = max(directions.count, 1)  # at least one, of zeros
        length, digest = self.pieces.directions(at, count), self.pieces.digest
        with torch.no_grad():
            if score is not None and (self.rows is not None or directions.scale is None or not at.joined):
                self._add_gradient(at.vjp(score))
                score = None
            for start in range(0, count, length):
                chosen = directions.between(start, min(start + length, count))
                if score is not None and directions.scale is not None:
                    jacobian, gradient = at.jacobian_and_vjp(chosen, score, directions.scale, digest)
                    self._add_gradient(gradient)
                    score = None
                else:
                    jacobian = at.jacobian(chosen, digest) if self.rows is None else self.rows(at, chosen)
                self._hand_over(jacobian, fresh, where)
                del jacobian  # before the next pass takes as much
                fresh = None

    def _hand_over(self, jacobian: Jacobian, fresh: Tensor | None, where: str) -> None:
        """Hand rows to the structure; errors name the batch.

        Rows that are not finite (a square root at zero) are refused, with the layer.
        """
        rows = jacobian.rows
        # values that are not finite spread to the earliest layers
        if isinstance(rows, BlockRows) and rows.gradients and not rows.gradients.finite(0):
            last = max(k for k in range(len(rows.gradients)) if not rows.gradients.finite(k))
            raise BadData(where + _no_derivative(rows, last))
        try:
            self.update(jacobian, fresh)
        except BadData as error:
            raise BadData(where + str(error)) from error

    def _add_gradient(self, found: Mapping[str, Tensor | None]) -> None:
        """Add Σ_n φ·∇_θ log p(y_n | f_n) to the flat gradient, which says how far the weights are from a mode."""
        params = self.problem.network.params
        total = self.sums.gradient_of(params)
        if params.index is not None:
            total += params.pick(params.flatten(found[name] for name in params.names))
            return
        for name, part in zip(params.names, total.split(params.sizes), strict=True):
            g = found[name]
            if g is not None:
                part += g.to_dense().reshape(-1)


def _no_derivative(rows: BlockRows, k: int) -> str:
    layer = f"{rows.at.records[k].name}({', '.join(sorted(rows.at.plan.steps[k].names))})"
    return (
        f"the gradient of the outputs at layer {layer} is not finite, or too large for its square to be, although the "
        "outputs are finite: an operation after it has no derivative there (a square root or a norm at zero), or a "
        "very steep one"
    )


def _reach(inputs: Inputs, n: int) -> Tensor | None:
    """Return the inputs of each sample, (n, k), whose squares multiply its curvature in the first layer.

    Where inputs have very different sizes (a feature in other units, or one that few samples have), directions matter
    that are small in output space.
    """
    own = [t.detach() for t in tensors_in(inputs) if t.is_floating_point() and t.ndim and len(t) == n]
    return torch.cat([t.reshape(n, -1) for t in own], 1) if own else None
