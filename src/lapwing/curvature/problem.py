"""The problem that a structure solves: a network with its plan, data, a likelihood and a factor."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lapwing.curvature.closed import Reader
from lapwing.curvature.factor import GGN, Factor, MCFisher
from lapwing.curvature.resume import Resume
from lapwing.curvature.shards import add_up
from lapwing.errors import BadData, UnsupportedModel
from lapwing.likelihoods import Likelihood
from lapwing.model import Batch, Batches, Network, Plan, batch_size, take, tensors_in
from lapwing.model.batches import parts_of, sharded
from lapwing.model.calls import Inputs, finite, left_out, output_tensor
from lapwing.model.features import features_of
from lapwing.model.products import Products
from lapwing.model.tape import run

SEEN = 8  # samples that run before the network is planned
FEW = 255  # samples: a pass over so few is so short that no shortcut is worth an error


def available_memory() -> int:
    """Return half of the free memory of the machine, in bytes; 4 GB if the machine does not report it."""
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        return free // 2
    except (OSError, StopIteration):
        pages = getattr(os, "sysconf", lambda _: 0)("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return pages * os.sysconf("SC_PAGE_SIZE") // 2 if pages else 4 * 2**30


@dataclass(frozen=True, eq=False)
class Problem:
    """A network, data and a likelihood: everything a structure needs to estimate its curvature."""

    network: Network
    plan: Plan
    batches: Batches
    likelihood: Likelihood
    factor: Factor
    event: tuple[int, ...]  # event dimensions of the outputs of the first batch
    outputs: int  # outputs per sample
    generator: torch.Generator | None = None
    memory: int = field(default_factory=available_memory)
    progress: bool | None = None
    first: Batch | None = None  # already read from a one-shot iterator
    rest: Iterator[Batch] | None = None
    scalar: bool = False  # the network returns (B,)
    resume: Resume | None = None  # the files from which interrupted passes go on
    batch: int = 0  # samples of the first batch
    example: Inputs = None  # the first samples
    doubts: tuple[str, ...] = ()  # warnings: the first outputs and targets contradict the likelihood
    reader: Reader | None = None  # reads the features of a last layer; None: the tape is used
    remembered: tuple[list[Batch], int] | None = None  # the samples read first, and how many of them to keep

    @property
    def length(self) -> int | None:
        """The number of data, rounded up to batches as large as the first; None where it is not known."""
        return None if self.batches.length is None else self.batches.length * self.batch

    @property
    def few(self) -> bool:
        """Whether the data are known to be few."""
        return self.length is not None and self.length <= FEW

    @property
    def products(self) -> Products:
        """Products with the Jacobian over these data."""
        return Products(self.network, self.batches, self.progress)

    def prepare(self, batch: Batch, f: Tensor) -> Tensor:
        """Check a batch and return its targets; errors name the batch and the operation whose values are not finite."""
        inputs = (t for t in tensors_in(batch.inputs) if t.is_floating_point())
        if not (finite(f) and all(finite(t) for t in inputs)):
            raise BadData(self._not_finite(batch))
        if batch.weights is not None and batch.weights.shape != f.shape[:1]:
            came = tuple(batch.weights.shape)
            raise BadData(f"batch {batch.number}: weights of shape {came} for {len(f)} samples; give one per sample")
        if batch.weights is not None and not bool(((batch.weights >= 0) & batch.weights.isfinite()).all()):
            bad = batch.weights[~((batch.weights >= 0) & batch.weights.isfinite())][0].item()
            raise BadData(f"batch {batch.number}: a sample weight is {bad}; weights are finite and at least 0")
        try:
            return self.likelihood.targets(f.detach(), batch.targets)
        except BadData as error:
            raise BadData(f"batch {batch.number}: {error}") from error

    @contextmanager
    def naming(self, batch: Batch) -> Iterator[None]:
        """Name the batch in errors about inputs that the network does not take."""
        try:
            with self.network.explaining(batch.inputs):
                yield
        except BadData as error:
            words = str(error)
            raise BadData(words if words.startswith("batch") else f"batch {batch.number}: {words}") from error

    def _not_finite(self, batch: Batch) -> str:
        bad = [t for t in tensors_in(batch.inputs) if t.is_floating_point() and not bool(t.isfinite().all())]
        if bad:
            where = (~bad[0].isfinite()).nonzero()[0].tolist()
            found = f"the inputs hold {bad[0][tuple(where)].item()} at index {tuple(where)}"
            return f"batch {batch.number}: {found}; fill or drop such items"
        for name, p in self.network.module.named_parameters():
            if not bool(p.isfinite().all()):
                return f"batch {batch.number}: parameter {name!r} of the network is not finite"
        with self.network.borrow() as module:
            leaves = self.network.leaves()
            finished = run(module, batch.inputs, leaves)
        ids = {id(p): name for name, p in leaves.items()}
        for record in finished.records:
            if not bool(record.out.isfinite().all()):
                owners = ", ".join(ids.get(id(record.tensors[j]), "a derived weight") for j in record.live)
                return f"batch {batch.number}: the outputs of layer {record.name}({owners}) are not finite"
        return f"batch {batch.number}: the outputs of the network are not finite, after its last layer with weights"

    def remembering(self, samples: int) -> Problem:
        """Return a problem that remembers the first samples it reads, up to this number."""
        return replace(self, remembered=([], samples))

    @property
    def remembered_alone(self) -> Problem:
        """The problem of the remembered samples alone."""
        assert self.remembered is not None
        (first, *others), _ = self.remembered
        return replace(self, first=first, rest=iter(others), remembered=None, resume=None, progress=False)

    def read(self, label: str) -> Iterator[Batch]:
        """Yield the batches, with a progress bar."""
        source: Any = self.batches
        if self.rest is not None and self.first is not None:
            source = chain([self.first], self.rest)
        hide = None if self.progress is None else not self.progress
        bar = tqdm(
            source, desc=label, total=self.batches.length, disable=hide, delay=0 if self.progress else 1, leave=False
        )
        for batch in bar:
            self.network.settle(batch.inputs)
            self._remember(batch)
            yield batch

    def _remember(self, batch: Batch) -> None:
        if self.remembered is not None:
            kept, wanted = self.remembered
            missing = wanted - sum(batch_size(part.inputs) for part in kept)
            if missing > 0:
                kept.append(next(parts_of(batch, missing)))


def pose(
    network: Network,
    batches: Batches,
    likelihood: Likelihood,
    factor: Factor | None = None,
    *,
    closed: bool = False,
    passes: int = 1,
    **options: Any,
) -> Problem:
    """Read the first batch, plan the tape and check it. `factor=None` takes the exact GGN where feasible, else MC.

    `closed`: the structure takes the features of a last layer. If only a last layer is selected, neither tape nor
    backward passes are then needed. `passes` is how often the structure reads the data.
    """
    iterator = iter(batches)
    first = next(iterator)
    if not batches.reiterable:
        options |= {"first": first, "rest": iterator}
    unplanned = Problem(network, Plan((), (), ()), batches, likelihood, factor or GGN(), (), 0)
    with network.borrow():
        network.settle(first.inputs)
        seen = _look(unplanned, first)
        network.require_faithful(first.inputs)
    f, size = seen.f, batch_size(first.inputs)
    options |= {"scalar": seen.scalar, "batch": size, "example": take(first.inputs, slice(0, 2), size)}
    options |= {"doubts": seen.doubts}
    notes = seen.notes
    if factor is None:
        factor = GGN()
        if f[0].numel() > factor.limit:
            factor = MCFisher()
            notes += (f"Monte Carlo Fisher, because the exact GGN has {f[0].numel():,} output directions per sample",)
    factor.require(f)
    features = None
    if closed and factor.has_directions and network.last_linear is not None:
        features = features_of(network, first.inputs)
    if features is not None and features.event == f.shape[1:] and (f.ndim == 2 or factor.exact):
        keep = passes > 1 or likelihood.estimates_first(f.shape[-1])
        memory = options.get("memory", available_memory())
        options |= {"reader": Reader(features, keep, memory // 4)}
        plan = features.plan
    else:
        if closed and features is None and network.last_linear is not None:
            notes += ("backward passes, because what follows the last layer is not one fixed affine map",)
        with network.borrow():
            try:
                plan = network.plan(first.inputs)
            except (UnsupportedModel, BadData):
                _look_at_all(unplanned, first)
                raise
    plan = replace(plan, notes=plan.notes + notes)
    return Problem(network, plan, batches, likelihood, factor, tuple(f.shape[1:-1]), f[0].numel(), **options)


def with_noise_ratios(problem: Problem) -> Problem:
    """Estimate an unknown dispersion before the pass where the curvature depends on it, as on ratios between outputs.

    This takes one forward pass over the data, or over the first batch if the data can be read only once. A common
    factor of the noise needs no pass: it stays free after the fit.
    """
    likelihood, network = problem.likelihood, problem.network
    outputs = problem.outputs // math.prod(problem.event)
    if not likelihood.estimates_first(outputs):
        return problem
    first = None if problem.batches.reiterable else problem.first
    total = torch.zeros(1, dtype=torch.float64, device=network.params.device)
    reader = problem.reader if first is None else None
    with network.borrow(), torch.no_grad():
        for part in () if reader is None else reader.parts(problem, "noise"):
            total = total + likelihood.statistics(part.f, part.y, part.weights)
        for batch in () if reader is not None else problem.read("noise") if first is None else [first]:
            f = network.forward(batch.inputs)
            total = total + likelihood.statistics(f, problem.prepare(batch, f), batch.weights)
    if sharded():
        add_up({"statistics": total})
    plan = problem.plan
    if first is not None:
        note = "the ratios between the noise of the outputs come from the first batch: the data can be read only once"
        plan = replace(plan, notes=(*plan.notes, note))
    return replace(problem, likelihood=likelihood.estimate(total), plan=plan)


@dataclass(frozen=True, eq=False)
class Look:
    """Outputs of a few samples, whether the network returns (B,), and doubts and notes about the outputs."""

    f: Tensor
    scalar: bool
    doubts: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def at(cls, problem: Problem, raw: object, f: Tensor, scalar: bool, y: Tensor) -> Look:
        """Look at outputs f of samples with targets y; `raw` is what the network returned."""
        doubts = problem.likelihood.doubts(f, y)
        others = left_out(raw)
        if others:
            doubts.append(
                f"the network returns {len(others) + 1} tensors of shape {tuple(others[0].shape)}, such as a mean and "
                "a standard deviation, and only the first is used. If the second belongs to the prediction, return one "
                "tensor torch.cat([mean, log_variance], -1) and pass HeteroscedasticGaussian(parametrization='mean'); "
                "if not, return only the first"
            )
        notes: tuple[str, ...] = ()
        if f.shape[-1] > 1 and problem.likelihood.shift_invariant and bool((f.logsumexp(-1).abs() < 1e-3).all()):
            notes = (
                "the outputs are log-probabilities: the default link gives the same predictions as with logits, but "
                "link='probit' and 'bridge' assume logits, and p.function is the distribution of log-probabilities",
            )
        return cls(f, scalar, tuple(doubts), notes)


def _look(problem: Problem, first: Batch) -> Look:
    """Look at a few samples of the first batch, and refuse bad data with a clear message.

    The self-check would only see that numbers disagree.
    """
    n, network = batch_size(first.inputs), problem.network
    try:
        raw = network.returned(take(first.inputs, slice(0, SEEN), n))
        f, scalar = _read(network, raw)
        if len(f) == min(n, SEEN) > 0:
            # repeat the outputs of a few samples, so that all targets are checked
            y = problem.prepare(first, f[torch.arange(n, device=f.device) % len(f)])
            return Look.at(problem, raw, f, scalar, y[: len(f)])
    except Exception:
        pass  # the whole batch may do better, or give a better message
    return _look_at_all(problem, first)


def _look_at_all(problem: Problem, first: Batch) -> Look:
    """Look at all samples of the first batch."""
    with problem.naming(first):
        raw = problem.network.returned(first.inputs)
    f, scalar = _read(problem.network, raw)
    if len(f) != batch_size(first.inputs):
        raise BadData(f"a batch of {batch_size(first.inputs)} samples gave outputs of shape {tuple(f.shape)}")
    return Look.at(problem, raw, f, scalar, problem.prepare(first, f))


def _read(network: Network, raw: object) -> tuple[Tensor, bool]:
    """Return f (n, *event, c) from what the module returned, and whether that was (n,)."""
    tensor = output_tensor(raw)
    return network.outputs(tensor).detach(), tensor.ndim == 1
