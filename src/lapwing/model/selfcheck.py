"""The self-check of a fit: where samples are in each tensor, what the tape missed, and whether rows are right."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedModel
from lapwing.linalg import Rows
from lapwing.model.calls import (
    APART,
    NOT_DETERMINISTIC,
    Inputs,
    Types,
    batch_size,
    call,
    close,
    map_tensors,
    output_tensor,
    take,
    tensors_in,
    tolerance,
    warnings_here,
)
from lapwing.model.linearization import Gradients, Linearization, Outputs, pull
from lapwing.model.params import Params
from lapwing.model.tape import (
    AMBIGUOUS,
    Pass,
    Plan,
    PlanChanged,
    RecordedPass,
    Step,
    aligned,
    dynamic_plan,
    make_plan,
    raised,
    read_steps,
    run,
    unseen_names,
)

BATCHED_SAMPLE = 2**14  # gradients per sample, over all directions and layers, up to which directions share a pass
CHECK_SAMPLES = 4
PIECE = 2**18  # numbers of a row that are converted to float64 at a time


class Fault(NamedTuple):
    """What is wrong with the rows of a parameter: norms by autograd and from the tape, or the exception on the way."""

    expected: float = 0.0
    got: float = 0.0
    raised: str = ""

    def __str__(self) -> str:
        return self.raised or f"disagreed with autograd (norm {self.got:.4g} instead of {self.expected:.4g})"


class SelfCheck:
    """Makes a plan from a few samples of a batch, and compares its rows with autograd."""

    def __init__(self, module: nn.Module, params: Params, outputs: Outputs, inputs: Inputs) -> None:
        self.module, self.params, self.outputs = module, params, outputs
        size = batch_size(inputs)
        rows = _different_rows(inputs, size)
        self.distinct = len(rows)
        if len(rows) == 1:  # the same sample twice still shows which axis holds samples
            rows = rows.expand(2)
        self.few = take(inputs, rows, size)
        # not the middle one, which stays in its place if a network reverses the batch
        self.n, self.which = len(rows), (len(rows) - 1) // 2 if len(rows) != 3 else 0
        self.alone = take(inputs, rows[self.which : self.which + 1], size)
        live = dict(module.named_parameters())
        self.leaves: dict[str, Tensor] = {name: live[name] for name in params.names}
        self.ids = {id(p): name for name, p in self.leaves.items()}
        self.rtol = tolerance(p.dtype for p in module.parameters() if p.is_floating_point())
        self.types = Types()

    def plan(self) -> Plan:
        """Make a plan within the precision of the parameters, or of the least precise operation if that fails."""
        try:
            plan = self._plan_of_different()
            if not (plan.looped and self._loosened()):
                return plan
        except UnsupportedModel:
            if not self._loosened():
                raise
        return self._plan_of_different()

    def _loosened(self) -> bool:
        before, self.rtol = self.rtol, max(self.rtol, tolerance(self.types.seen))
        return self.rtol > before

    def _plan_of_different(self) -> Plan:
        plan = self._plan()
        if not any(step.reason == AMBIGUOUS for step in plan.steps):
            return plan
        return self._plan_on_noise() or plan

    def _plan_on_noise(self) -> Plan | None:
        """Add noise to samples that look alike (a batch of zeros), and plan with these if the network takes them."""
        generator = torch.Generator().manual_seed(0)

        def shake(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
            return t + noise * (0.1 * t.std(correction=0) if bool((t != t.flatten()[:1]).any()) else 1.0)

        noisy = SelfCheck(self.module, self.params, self.outputs, map_tensors(shake, self.few))
        try:
            plan = noisy._plan()
        except (UnsupportedModel, RuntimeError, ValueError):
            return None
        return None if any(step.reason == AMBIGUOUS for step in plan.steps) else plan

    def _plan(self) -> Plan:
        whole, single = self._tape(self.few), self._single()
        f, f_alone = self.outputs(whole.outputs), self.outputs(single.outputs)
        if not aligned(whole, single):
            self._independent(f, f_alone, ())
            return dynamic_plan(self.params, "a loop over samples for all weights: the operations depend on the data")
        steps = read_steps(whole, single, self.n, self.which, self.ids, self.rtol)
        self._independent(f, f_alone, steps)
        self._same(f)
        self._require_no_changing_hooks()
        looped = unseen_names(whole, self.ids)
        notes = _notes(whole, steps, looped)
        plan = make_plan(whole, steps, self.params, looped, notes, batched=False)
        directions = torch.randn(2, *f.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(f)
        plan = self._settle(plan, whole, f, directions)
        plan = self._try_batched(plan, whole, f, directions)
        plan = self._try_joined(plan, whole, f, directions)
        at, graph = self._linearization(plan, whole, f), self._graph_bytes() // self.n
        plan = replace(plan, width=at.width, kept=at.kept, graph=graph)
        return replace(plan, distinct=self.distinct, reaching=_reaching(whole, f))

    @cached_property
    def plain(self) -> Tensor:
        """Outputs of the few samples without the tape, with their graph."""
        return self.outputs(output_tensor(call(self.module, self.few)))

    def _same(self, f: Tensor) -> None:
        """Refuse outputs under the tape that are not the network's own."""
        if f.shape != self.plain.shape or not close(f, self.plain, self.rtol):
            raise UnsupportedModel(NOT_DETERMINISTIC)

    def _require_no_changing_hooks(self) -> None:
        """Refuse backward hooks of submodules that change gradients; those that only watch are fine."""
        parts = [(name, m) for name, m in self.module.named_modules() if m._backward_hooks or m._backward_pre_hooks]
        if not parts or not self.plain.requires_grad:
            return
        found = self._autograd(self.plain, torch.ones_like(self.plain)[None])
        tables = [(m, m._backward_hooks, m._backward_pre_hooks) for _, m in parts]
        try:
            for m, _, _ in tables:
                m._backward_hooks, m._backward_pre_hooks = OrderedDict(), OrderedDict()
            plain = self.outputs(output_tensor(call(self.module, self.few)))
        finally:
            for m, hooks, before in tables:
                m._backward_hooks, m._backward_pre_hooks = hooks, before
        if not self._agree([self._autograd(plain, torch.ones_like(plain)[None])], [found]):
            raise UnsupportedModel(
                f"a backward hook of {', '.join(repr(name or type(m).__name__) for name, m in parts[:5])} changes "
                "gradients, and curvature needs derivatives as they are. Remove the hook before the fit "
                "(handle.remove())."
            )

    def _graph_bytes(self) -> int:
        """Return the bytes that a forward pass of the few samples keeps for its backward pass, without parameters and
        buffers; 0 if the network does not allow hooks on them."""
        module = self.module
        tensors = (t for t in (*module.parameters(), *module.buffers()) if t.layout == torch.strided)
        own = {t.untyped_storage().data_ptr() for t in tensors}
        sizes: dict[int, int] = {}

        def see(t: Tensor) -> Tensor:
            if t.layout == torch.strided and (place := t.untyped_storage().data_ptr()) not in own:
                sizes[place] = t.untyped_storage().nbytes()
            return t

        try:
            with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
                call(module, self.few)
        except (RuntimeError, NotImplementedError):  # torch.func inside the network
            return 0
        return sum(sizes.values())

    def _tape(self, inputs: Inputs) -> Pass:
        with self.types:
            return run(self.module, inputs, self.leaves)

    def _single(self) -> Pass:
        try:
            return self._tape(self.alone)
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedModel(f"the network runs a batch but not one sample alone ({error}). {APART}") from error

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
            f"the outputs of a sample depend on the other samples of its batch: in a batch of {self.n} (outputs "
            f"of shape {tuple(f.shape)}) it has other outputs than alone (shape {tuple(f_alone.shape)}).{place} "
            + APART
        )

    def _autograd(self, f: Tensor, cotangents: Tensor) -> Tensor:
        """Return gradients by plain autograd without the tape, (r, P), with one backward pass per cotangent."""
        params, leaves = self.params, list(self.leaves.values())
        rows = torch.zeros(len(cotangents), params.total, dtype=params.dtype, device=f.device)
        if f.requires_grad:
            for v, row in zip(cotangents, rows, strict=True):
                for g, own in zip(pull(f, leaves, v), row.split(params.sizes), strict=True):
                    if g is not None:
                        own.copy_(g.to_dense().flatten())
        return rows

    def _linearization(self, plan: Plan, whole: Pass, f: Tensor) -> Linearization:
        every = replace(self.params, index=None)
        recorded = RecordedPass(whole, plan, every, self.leaves, f.shape[0])
        return Linearization(self.module, self.few, self.outputs, f, recorded)

    def _blocks(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> list[Rows]:
        """Return the rows from the tape, one `Rows` per block."""
        return list(self._linearization(plan, whole, f).jacobian(directions).rows)

    def _wrong(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> dict[str, Fault]:
        """Return the parameters whose rows are not autograd's.

        Rows of a direction are compared in a weighted sum over samples, for which autograd needs one backward pass. No
        two weights are equal, so rows of the wrong sample are noticed. If the sums differ, rows are compared sample by
        sample, since half precision inside a network rounds the sum.
        """
        blocks = self._blocks(plan, whole, f, directions)
        graph = self.plain
        wrong: dict[str, Fault] = {}
        for weights in (self._weights(len(directions)), self._one_by_one(len(directions))):
            norms = torch.stack([self._norms(plan, blocks, graph, directions, w.to(f)) for w in weights]).norm(dim=0)
            total = norms[:, 0].norm()  # if half precision overflows, it is not finite, and would allow any error
            wrong = {
                name: Fault(float(expected), float(got))
                for name, (expected, got, error) in zip(self.leaves, norms, strict=True)
                if not (total.isfinite() and error <= self.rtol * (expected + 1e-2 * total))
            }
            if not wrong:
                break
        return wrong

    def _norms(self, plan: Plan, blocks: list[Rows], graph: Tensor, directions: Tensor, weights: Tensor) -> Tensor:
        """Return norms of autograd's weighted rows, of the tape's, and of their difference, (parameters, 3)."""
        truth = self._autograd(graph, directions * weights.reshape(weights.shape + (1,) * (graph.ndim - 1)))
        found = torch.empty_like(truth)
        for place, rows in zip(plan.layout.places, blocks, strict=True):
            place.put(found, _weighted(rows, weights).to(found.dtype))
        pairs = zip(truth.split(self.params.sizes, -1), found.split(self.params.sizes, -1), strict=True)
        return torch.stack([torch.stack([_norm(t), _norm(g), _norm(g.sub_(t))]) for t, g in pairs]).cpu()

    def _weights(self, r: int) -> Tensor:
        """Return weights (1, r, samples): powers of two up to 1, since products with them are exact.

        Every second direction has them in reverse order, so that no two samples have the same ratio in both directions.
        """
        powers = 2.0 ** torch.arange(1 - self.n, 1, dtype=torch.float64)
        return torch.stack([powers.flip(0) if k % 2 else powers for k in range(r)])[None]

    def _one_by_one(self, r: int) -> Tensor:
        """Return weights (samples, r, samples) that pick one sample at a time."""
        return torch.eye(self.n, dtype=torch.float64)[:, None].expand(-1, r, -1)

    def _settle(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> Plan:
        """Try rules, then replayed calls, then a loop over samples, until the rows are right."""
        bad: dict[str, Fault] = {}
        for downgrade in (_to_generic, _to_loop, None):
            bad = self._attempt(plan, whole, f, directions)
            if not bad:
                return plan
            if downgrade is None:
                break
            plan = downgrade(plan, whole, self.params, bad)
        name, (expected, got, _) = min(bad.items(), key=lambda item: math.isfinite(item[1][0]))
        if not math.isfinite(expected):
            raise BadData(
                f"the gradient of the outputs with respect to {name!r} is not finite in the first batch, although the "
                "outputs are: an operation after it has no derivative there (a square root or a norm at zero)"
            )
        try:
            self._autograd(f, directions)
        except RuntimeError as error:
            reason = str(error).split(" Hint:")[0]
            raise UnsupportedModel(f"autograd cannot differentiate the network: {reason}") from error
        raise UnsupportedModel(
            f"the gradient of parameter {name!r} for one sample could not be reproduced: autograd on the batch has "
            f"norm {expected:.6g}, the sample alone {got:.6g}. The operation "
            "that uses it mixes samples or is not deterministic; freeze the parameter or evaluate that part per sample."
        )

    def _attempt(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> dict[str, Fault]:
        """Return the parameters whose rows are wrong; a rule that raises counts against all its parameters."""
        try:
            return self._wrong(plan, whole, f, directions)
        except (UnsupportedModel, PlanChanged):
            raise
        except Exception:
            broken: dict[str, Fault] = {}
            for k, step in enumerate(plan.steps):
                if step.method != "loop":
                    try:
                        only = tuple(s if j == k else replace(s, method="loop") for j, s in enumerate(plan.steps))
                        trial = make_plan(whole, only, self.params, set(plan.looped), plan.notes, False)
                        for rows in self._blocks(trial, whole, f, directions):
                            rows.narrow(0, min(2, self.n)).dense()
                    except Exception as error:
                        broken |= dict.fromkeys(sorted(step.names), Fault(raised=raised(error)))
            if not broken:
                raise
            return broken

    def _try_batched(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> Plan:
        """Let several directions share a backward pass if vmap has a rule for every operation and gets it right.

        Networks that spend their time inside operations rather than between them do not gain from it.
        """
        if f[0].numel() * sum(record.out.numel() for record in whole.records) > BATCHED_SAMPLE * self.n:
            return plan
        trial = replace(plan, batched=True)
        alone, together = self._linearization(plan, whole, f), self._linearization(trial, whole, f)
        if together.shared(len(directions)) < len(directions):
            return plan
        try:
            with warnings_here("error", UserWarning):
                found = together.gradients(directions)
        except (RuntimeError, UserWarning):
            return plan
        return trial if self._agree(alone.gradients(directions), found) else plan

    def _try_joined(self, plan: Plan, whole: Pass, f: Tensor, directions: Tensor) -> Plan:
        """Let one backward pass go to records and weights if it finds the same gradients as two passes.

        With a hook on a record's output, for example, the gradients differ. Float16 keeps two passes, since small
        scores would vanish.
        """
        narrow = any(record.out.dtype == torch.float16 for record in whole.records)
        if plan.looped or not whole.records or not f.requires_grad or narrow:
            return plan
        at, v = self._linearization(plan, whole, f), directions[:1]
        both, alone = (_found(pair) for pair in (at.gradients_and_vjp(v[0]), (at.gradients(v), at.vjp(v[0]))))
        return replace(plan, joined=True) if len(both) == len(alone) and self._agree(alone, both) else plan

    def _agree(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
        """Whether gradients agree, each relative to its own size: a small gradient may meet large inputs."""
        total = sum(float(_norm(g)) for g in expected)
        pairs = zip(expected, found, strict=True)
        return all(_norm(got - g) <= self.rtol * (_norm(g) + 1e-6 * total) for g, got in pairs)


def _found(pair: tuple[Gradients, dict[str, Tensor | None]]) -> list[Tensor]:
    """Return the gradients of records, and of the weights that have one."""
    return [*pair[0], *(g.to_dense() for g in pair[1].values() if g is not None)]


def _weighted(rows: Rows, weights: Tensor) -> Tensor:
    """Return Σ_n weights[r, n] J[n, r], (r, size).

    Rows are written out for one sample at a time, or for two if they are formed in pieces: pieces of one sample would
    not show a rule that confuses samples.
    """
    step = 2 if rows.deferred else 1
    total = torch.zeros(rows.r, rows.size, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    for start in range(0, rows.n, step):
        if not weights[:, start : start + step].any():
            continue
        few = rows.narrow(start, min(step, rows.n - start)).dense()
        for own, w in zip(few, weights[:, start : start + step].T, strict=True):
            total.addcmul_(own.to(total.dtype), w[:, None].to(total))
    return total


def _norm(t: Tensor) -> Tensor:
    """Return the norm in float64, of complex tensors too. Pieces are converted one after the other."""
    if t.ndim and t.shape[-1] > PIECE:
        return torch.stack([_norm(piece) for piece in t.split(PIECE, -1)]).norm()
    return torch.linalg.vector_norm(t.abs() if t.is_complex() else t, dtype=torch.float64)


def _different_rows(inputs: Inputs, size: int) -> Tensor:
    """Return the indices of up to CHECK_SAMPLES samples spread over the batch, no two equal."""
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
    """Return which records the outputs depend on."""
    if not whole.records or not f.requires_grad:
        return (False,) * len(whole.records)
    edges = [record.edge for record in whole.records]
    return tuple(g is not None for g in torch.autograd.grad(f.sum(), edges, retain_graph=True, allow_unused=True))


def _to_generic(plan: Plan, whole: Pass, params: Params, bad: dict[str, Fault]) -> Plan:
    """Replay the calls of rules that were wrong, and say which rules these are."""
    steps, notes = list(plan.steps), [*plan.notes]
    for k, step in enumerate(plan.steps):
        found = [bad[name] for name in sorted(step.names) if name in bad]
        if step.method == "rule" and found:
            steps[k] = replace(step, method="generic", reason=f"its rule {found[0]}")
            notes.append(_generic_note(steps[k]))
    return make_plan(whole, tuple(steps), params, set(plan.looped), tuple(dict.fromkeys(notes)), plan.batched)


def _to_loop(plan: Plan, whole: Pass, params: Params, bad: dict[str, Fault]) -> Plan:
    """Run every sample alone for parameters whose replayed calls were wrong too."""
    note = f"a loop over samples for {', '.join(bad)}: replaying their operation {next(iter(bad.values()))}"
    return make_plan(whole, plan.steps, params, set(plan.looped) | set(bad), (*plan.notes, note), plan.batched)


def _generic_note(step: Step) -> str:
    names, operation = ", ".join(sorted(step.names)), getattr(step.func, "__name__", step.func)
    return f"{operation} is replayed per sample for the rows of {names}, which is slow: {step.reason}"


def _notes(whole: Pass, steps: tuple[Step, ...], unseen: set[str]) -> tuple[str, ...]:
    notes = []
    if unseen:
        notes.append(f"a loop over samples for {', '.join(sorted(unseen))}: used by an operation the tape cannot see")
    for record, step in zip(whole.records, steps, strict=True):
        if step.method == "loop":
            notes.append(f"a loop over samples for {', '.join(sorted(step.names))} in {record.name}: {step.reason}")
        elif step.method == "generic" and step.reason:
            notes.append(_generic_note(step))
    return tuple(dict.fromkeys(notes))
