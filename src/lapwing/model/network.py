"""A module and its selected parameters as functions: f(x), rows of its Jacobian, products with weight directions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedModel
from lapwing.linalg import Jacobian
from lapwing.model.batches import Inputs, batch_size, call, map_tensors, take, tensors_in
from lapwing.model.forward import push_forward
from lapwing.model.gradients import Gradients
from lapwing.model.jacobian import LazyRows, Linearization, Outputs
from lapwing.model.module import borrowed, differentiable_kernels, output_tensor
from lapwing.model.params import Params
from lapwing.model.plan import (
    Plan,
    PlanChanged,
    Step,
    aligned,
    dynamic_plan,
    make_plan,
    read_steps,
    source_of,
    unseen_names,
)
from lapwing.model.samples import AMBIGUOUS, close
from lapwing.model.tangents import Recording, Values
from lapwing.model.tape import Pass, Record, first_reached, run

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}  # others: 5e-2; relative to the largest entry
CHECK_SAMPLES = 4


@dataclass(frozen=True, eq=False)
class Network:
    """The user's module, the parameters that get a posterior, and the shape f (n, *event, c) of its outputs.

    `outputs` turns what the module returns into that shape (the likelihood knows it).
    """

    module: nn.Module
    params: Params
    outputs: Outputs

    @contextmanager
    def borrow(self, differentiable: bool = False) -> Iterator[None]:
        """Use the module in eval mode with gradients for the selected parameters, and give it back as it was."""
        with borrowed(self.module, self.params.names):
            if differentiable:
                with differentiable_kernels():
                    yield
            else:
                yield

    def forward(self, inputs: Inputs) -> Tensor:
        """f (n, *event, c), no gradients."""
        return self.forward_raw(inputs)[0]

    def forward_raw(self, inputs: Inputs) -> tuple[Tensor, bool]:
        """f (n, *event, c), and whether the module itself returned (n,)."""
        with borrowed(self.module), torch.no_grad():
            raw = output_tensor(call(self.module, inputs))
            return self.outputs(raw).detach(), raw.ndim == 1

    def at_weights(self, theta: Tensor, inputs: Inputs) -> Tensor:
        """f at other weights theta (P,); gradients flow into theta and the inputs where the caller has them on."""
        wanted = torch.is_grad_enabled()
        with borrowed(self.module), torch.set_grad_enabled(wanted):
            return self._functional(self.params.unflatten(theta), inputs)

    def _functional(self, values: dict[str, Tensor], inputs: Inputs) -> Tensor:
        return self.outputs(output_tensor(call(self.module, inputs, values)))

    def jvp(self, inputs: Inputs, tangents: Tensor) -> tuple[Tensor, Tensor]:
        """f (n, *event, c) and J v for tangents (s, P) -> (s, n, *event, c), one forward-mode pass each.

        What the heavy operations give at the weights themselves is computed once for all.
        """
        values = dict(zip(self.params.names, self.params.values, strict=True))
        moved = [self.params.tangent(v) for v in tangents]
        known = Values()
        with self.borrow():
            if len(moved) > 1:
                with torch.no_grad(), Recording(known):
                    call(self.module, inputs)
            found = push_forward(self.module, lambda p: self._functional(p, inputs), values, moved, known)
            if found is not None:
                return found
            with differentiable_kernels():
                return self._jvp_by_double_backward(inputs, tangents)

    def _jvp_by_double_backward(self, inputs: Inputs, tangents: Tensor) -> tuple[Tensor, Tensor]:
        """J v = ∂(uᵀJ v)/∂u, for operations without a forward-mode derivative."""
        live = dict(self.module.named_parameters())
        weights = [live[name] for name in self.params.names]
        f = self.outputs(output_tensor(call(self.module, inputs)))
        u = torch.zeros_like(f, requires_grad=True)
        back = torch.autograd.grad(f, weights, u, create_graph=True, allow_unused=True)
        results = []
        for v in tangents:
            moved = self.params.tangent(v)
            pairs = [(g, moved[name]) for g, name in zip(back, self.params.names, strict=True) if g is not None]
            total = sum(((g * t).sum() for g, t in pairs), start=f.new_zeros(()))
            results.append(torch.autograd.grad(total, u, retain_graph=True)[0])
        return f.detach(), torch.stack(results).detach()

    def linearize(self, plan: Plan, inputs: Inputs, create_graph: bool = False) -> Linearization:
        """The network at a batch. Call, and use the result, inside `borrow()`.

        A batch that runs other operations than the plan's (another sequence length) is planned anew; raises
        `PlanChanged` where parameters would then fall into other blocks.
        """
        # a graph that outlives this call must not end in the user's parameters, whose .grad it would fill
        leaves = self._aliases() if create_graph else self._leaves()
        if plan.dynamic:
            finished = Pass(output_tensor(call(self.module, inputs, leaves if create_graph else None)), (), {})
        else:
            finished = run(self.module, inputs, leaves, replaced=create_graph)
            n, ids = batch_size(inputs), {id(p): name for name, p in leaves.items()}
            if not plan.matches(finished.records, n, ids) or plan.distinct < min(CHECK_SAMPLES, n):
                anew = self.plan(map_tensors(Tensor.detach, inputs))
                if not (plan.compatible(anew) and anew.matches(finished.records, n, ids)):
                    raise PlanChanged
                plan = anew
            if not unseen_names(finished, ids) <= set(plan.looped):
                raise PlanChanged
        f = self.outputs(finished.outputs)
        return Linearization(self.module, self.params, plan, inputs, finished, self.outputs, f, leaves, create_graph)

    def _leaves(self) -> dict[str, Tensor]:
        live = dict(self.module.named_parameters())
        return {name: live[name] for name in self.params.names}

    def _aliases(self) -> dict[str, Tensor]:
        return {name: p.detach().requires_grad_() for name, p in self._leaves().items()}

    def _tape(self, inputs: Inputs) -> Pass:
        return run(self.module, inputs, self._leaves())

    def plan(self, inputs: Inputs) -> Plan:
        """Read the network from a few samples, and check the rows against autograd (call inside `borrow()`)."""
        return _Check(self, inputs).plan()


class _Check:
    """The self-check: where samples sit, what the tape missed, and whether its numbers are autograd's."""

    def __init__(self, network: Network, inputs: Inputs) -> None:
        self.network = network
        size = batch_size(inputs)
        rows = _different_rows(inputs, size)
        self.distinct = len(rows)
        if len(rows) == 1:  # the same sample twice still shows which axis holds samples
            rows = rows.expand(2)
        self.few = take(inputs, rows, size)
        # not the middle one: a batch that a network reverses would leave it in its place
        self.n, self.which = len(rows), (len(rows) - 1) // 2 if len(rows) != 3 else 0
        self.alone = take(inputs, rows[self.which : self.which + 1], size)
        live = dict(network.module.named_parameters())
        self.leaves: dict[str, Tensor] = {name: live[name] for name in network.params.names}
        self.ids = {id(p): name for name, p in self.leaves.items()}
        types = [p.dtype for p in network.module.parameters() if p.is_floating_point()]
        self.rtol = TOLERANCES.get(min(types, key=lambda d: torch.finfo(d).bits), 5e-2)

    def plan(self) -> Plan:
        plan = self._plan()
        if not any(step.reason == AMBIGUOUS for step in plan.steps):
            return plan
        return self._plan_on_noise() or plan

    def _plan_on_noise(self) -> Plan | None:
        """Samples that look alike (a batch of zeros) told apart by noise, where the network stands noise."""
        generator = torch.Generator().manual_seed(0)

        def shake(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
            return t + noise * (0.1 * t.std(correction=0) if bool((t != t.flatten()[:1]).any()) else 1.0)

        noisy = _Check(self.network, map_tensors(shake, self.few))
        try:
            plan = noisy._plan()
        except (UnsupportedModel, RuntimeError, ValueError):
            return None
        return None if any(step.reason == AMBIGUOUS for step in plan.steps) else plan

    def _plan(self) -> Plan:
        network = self.network
        whole, single = network._tape(self.few), self._single()
        f, f_alone = network.outputs(whole.outputs), network.outputs(single.outputs)
        if not aligned(whole, single):
            self._independent(f, f_alone, ())
            return dynamic_plan(
                network.params, "a loop over samples for all weights: the operations depend on the data"
            )
        steps = read_steps(whole, single, self.n, self.which, self.ids, self.rtol)
        self._independent(f, f_alone, steps)
        looped = unseen_names(whole, self.ids)
        notes = _notes(whole, steps, looped)
        plan = make_plan(whole, steps, network.params, looped, notes, batched=False)
        directions = torch.randn(2, *f.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(f)
        plan = self._settle(plan, whole, f, directions)
        plan = self._try_batched(plan, whole, f, directions)
        plan = self._try_joined(plan, whole, f, directions)
        width = sum(record.out.numel() for record in whole.records) // self.n
        return replace(plan, distinct=self.distinct, width=width, reaching=_reaching(whole, f))

    def _single(self) -> Pass:
        try:
            return self.network._tape(self.alone)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModel(
                f"the network runs a batch but not one sample alone ({error}). A posterior needs independent samples: "
                "use running statistics in normalization layers, and the first dimension for the batch."
            ) from error

    def _independent(self, f: Tensor, f_alone: Tensor, steps: tuple[Step, ...]) -> None:
        """Refuse a network in which samples of a batch influence each other."""
        if f.shape[0] == self.n and close(f[self.which : self.which + 1], f_alone, self.rtol):
            return
        mixed = next((s for s in steps if "other samples" in s.reason), None)
        name = getattr(mixed.func, "__name__", "") if mixed is not None else ""
        place = (
            f" The first such operation on a parameter is {name}({', '.join(sorted(mixed.names))})." if mixed else ""
        )
        raise UnsupportedModel(
            f"the outputs of a sample depend on the other samples of its batch: alone it gives outputs of shape "
            f"{tuple(f_alone.shape)}, in a batch of {self.n} outputs of shape {tuple(f.shape)} and values.{place} "
            "A posterior needs independent samples: use running statistics in normalization layers, and the first "
            "dimension for the batch."
        )

    def _autograd(self, directions: Tensor) -> Iterator[dict[str, Tensor]]:
        """Gradients of one sample after the other by plain autograd, without the tape: {name: (r, size)}."""
        network = self.network
        f = network.outputs(output_tensor(call(network.module, self.few)))
        leaves = list(self.leaves.values())
        for k in range(self.n):
            rows: list[list[Tensor]] = [[] for _ in leaves]
            for v in directions:
                only = torch.zeros_like(f)
                only[k] = v[k].to(f)
                found: tuple[Tensor | None, ...] = (None,) * len(leaves)
                if f.requires_grad:
                    found = torch.autograd.grad(f, leaves, only, retain_graph=True, allow_unused=True)
                for row, g, p in zip(rows, found, leaves, strict=True):
                    row.append(torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten())
            yield {name: torch.stack(row) for name, row in zip(self.leaves, rows, strict=True)}

    def _linearization(self, plan: Plan, whole: Pass, f: Tensor) -> Linearization:
        network = self.network
        every = replace(network.params, index=None)
        return Linearization(network.module, every, plan, self.few, whole, network.outputs, f, self.leaves)

    def _tape_rows(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> Iterator[dict[str, Tensor]]:
        """The same from the tape: blocks are kept in factors and written out for two samples at a time (of
        those made in pieces, pieces of one would not show a rule that confuses samples)."""
        at = self._linearization(plan, whole, f)
        rows = at.jacobian(directions)
        rows = Jacobian(tuple(rows.rows), rows.layout)
        for start in range(0, self.n, 2):
            for own in rows.narrow(start, min(2, self.n - start)).dense():
                yield dict(zip(at.params.names, own.split(at.params.sizes, -1), strict=True))

    def _wrong(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> dict[str, tuple[float, float]]:
        """Parameters whose rows are not autograd's, with the norms of both."""
        names = list(self.leaves)
        sums = torch.zeros(3, len(names), dtype=torch.float64, device=f.device)
        for truth, rows in zip(self._autograd(directions), self._tape_rows(plan, whole, f, directions), strict=True):
            found = [(truth[name], rows[name], rows[name] - truth[name]) for name in names]
            sums += torch.tensor([[_norm(t).square() for t in kind] for kind in zip(*found, strict=True)]).to(sums)
        truth_norms, norms, errors = sums.sqrt()
        allowed = self.rtol * (truth_norms + 1e-2 * truth_norms.norm())
        return {
            name: (float(truth_norms[j]), float(norms[j]))
            for j, name in enumerate(names)
            if not errors[j] <= allowed[j]
        }

    def _settle(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> Plan:
        """Go from rule to generic rule to a loop over samples until the numbers are right."""
        bad: dict[str, tuple[float, float]] = {}
        for downgrade in (_to_generic, _to_loop, None):
            bad = self._attempt(plan, whole, f, directions)
            if not bad:
                return plan
            if downgrade is None:
                break
            plan = downgrade(plan, whole, self.network.params, list(bad))
        name, (expected, got) = next(iter(bad.items()))
        if not math.isfinite(expected):
            raise BadData(
                f"the gradient of the outputs with respect to {name!r} is not finite in the first batch, although the "
                "outputs are: an operation after it has no derivative there (a square root or a norm at zero)"
            )
        raise UnsupportedModel(
            f"the gradient of parameter {name!r} for one sample could not be reproduced: autograd on the batch has "
            f"norm {expected:.6g}, the sample alone {got:.6g}. The operation "
            "that uses it mixes samples or is not deterministic; freeze the parameter or evaluate that part per sample."
        )

    def _attempt(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> dict[str, tuple[float, float]]:
        """Parameters whose rows are wrong; a rule that raises counts against all its parameters."""
        try:
            return self._wrong(plan, whole, f, directions)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            broken: set[str] = set()
            for k, step in enumerate(plan.steps):
                if step.method != "loop":
                    try:
                        only = tuple(s if j == k else replace(s, method="loop") for j, s in enumerate(plan.steps))
                        trial = make_plan(whole, only, self.network.params, set(plan.looped), plan.notes, False)
                        next(self._tape_rows(trial, whole, f, directions))
                    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
                        broken |= step.names
            if not broken:
                raise
            return dict.fromkeys(sorted(broken), (0.0, 0.0))

    def _try_batched(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> Plan:
        """Several directions in one backward pass, where vmap has a rule for every operation and gets it right."""
        trial = replace(plan, batched=True)
        alone, together = self._linearization(plan, whole, f), self._linearization(trial, whole, f)
        if together.shared(len(directions)) < len(directions):
            return plan
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                found = together.gradients(directions)
        except (RuntimeError, UserWarning):
            return plan
        return trial if self._agree(alone.gradients(directions), found) else plan

    def _try_joined(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> Plan:
        """One backward pass to records and weights, where it brings to each what it brings alone: a hook on a record's
        output, for one, is not seen there if the pass goes on. Not in float16, where small scores vanish."""
        narrow = any(record.out.dtype == torch.float16 for record in whole.records)
        if plan.looped or not whole.records or not f.requires_grad or narrow:
            return plan
        at, v = self._linearization(plan, whole, f), directions[:1]
        rows, weights = at.jacobian_and_vjp(v, v[0], torch.ones(self.n, dtype=f.dtype, device=f.device))
        assert isinstance(rows.rows, LazyRows)
        both, alone = (_found(pair) for pair in ((rows.rows.gradients, weights), (at.gradients(v), at.vjp(v[0]))))
        return replace(plan, joined=True) if len(both) == len(alone) and self._agree(alone, both) else plan

    def _agree(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
        """Each by its own size: a small gradient may meet large inputs."""
        total = sum(float(_norm(g)) for g in expected)
        pairs = zip(expected, found, strict=True)
        return all(_norm(got - g) <= self.rtol * (_norm(g) + 1e-6 * total) for g, got in pairs)


def _found(pair: tuple[Gradients, dict[str, Tensor | None]]) -> list[Tensor]:
    """The gradients of records and those of weights that have one."""
    return [*pair[0], *(g.to_dense() for g in pair[1].values() if g is not None)]


def _norm(t: Tensor) -> Tensor:
    """In float64, of complex tensors too."""
    return torch.linalg.vector_norm(t.abs() if t.is_complex() else t, dtype=torch.float64)


def _different_rows(inputs: Inputs, size: int) -> Tensor:
    """Up to CHECK_SAMPLES rows spread over the batch, no two alike."""
    spread = torch.linspace(0, size - 1, min(size, 4 * CHECK_SAMPLES)).round().long().unique()
    chosen: list[int] = []
    for k in spread.tolist():
        one = list(tensors_in(take(inputs, slice(k, k + 1), size)))
        others = [list(tensors_in(take(inputs, slice(j, j + 1), size))) for j in chosen]
        if not any(all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) for other in others):
            chosen.append(k)
    step = max(1, len(chosen) // CHECK_SAMPLES)
    return torch.tensor(chosen[::step][:CHECK_SAMPLES])


def _reaching(whole: Pass, f: Tensor) -> tuple[bool, ...]:
    """Which records the outputs depend on."""
    if not whole.records or not f.requires_grad:
        return (False,) * len(whole.records)
    edges = [record.edge for record in whole.records]
    return tuple(g is not None for g in torch.autograd.grad(f.sum(), edges, retain_graph=True, allow_unused=True))


def _to_generic(plan: Plan, whole: Pass, params: Params, bad: list[str]) -> Plan:
    steps = tuple(
        replace(s, method="generic", reason="its rule disagreed with autograd")
        if s.method == "rule" and not s.names.isdisjoint(bad)
        else s
        for s in plan.steps
    )
    notes = (*plan.notes, f"generic rows for {', '.join(bad)}: the rule of their operation disagreed with autograd")
    return make_plan(whole, steps, params, set(plan.looped), notes, plan.batched)


def _to_loop(plan: Plan, whole: Pass, params: Params, bad: list[str]) -> Plan:
    notes = (*plan.notes, f"a loop over samples for {', '.join(bad)}: rows from the tape disagreed with autograd")
    return make_plan(whole, plan.steps, params, set(plan.looped) | set(bad), notes, plan.batched)


def _notes(whole: Pass, steps: tuple[Step, ...], unseen: set[str]) -> tuple[str, ...]:
    notes = []
    if unseen:
        notes.append(f"a loop over samples for {', '.join(sorted(unseen))}: used by an operation the tape cannot see")
    for record, step in zip(whole.records, steps, strict=True):
        if step.method == "loop":
            notes.append(f"a loop over samples for {', '.join(sorted(step.names))} in {record.name}: {step.reason}")
    return tuple(dict.fromkeys(notes))


def last_layer(module: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """Names of the parameters of whatever produces the outputs: the last weight matrix and what follows it."""
    free = [name for name, p in module.named_parameters() if p.requires_grad]
    with borrowed(module, free):
        live = dict(module.named_parameters())
        finished = run(module, take(inputs, slice(0, 1), batch_size(inputs)), {name: live[name] for name in free})
        ids = {id(live[name]): name for name in free}
        small: Callable = lambda record: all(record.tensors[j].ndim < 2 for j in record.live)  # noqa: E731
        found = first_reached(finished, small)
        names = {name for record in found for name in _names_of(record, ids)}
    if not names:
        raise UnsupportedModel(
            "no parameter was seen to produce the outputs; name the last layer's parameters in select"
        )
    return tuple(name for name in free if name in names)


def _names_of(record: Record, ids: dict[int, str]) -> set[str]:
    return {name for j in record.live for name in source_of(record.tensors[j], ids).names}
