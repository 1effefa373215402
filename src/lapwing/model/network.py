"""A module and its selected parameters as functions: f(x), rows of its Jacobian, products with weight directions.

A batch is cut into samples only after it is known which of its tensors hold one entry per sample, and outputs are used
only if those of a sample do not depend on the other samples of its batch (`Roles`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from lapwing.errors import LapwingError, UnsupportedModel, brief
from lapwing.model.calls import (
    APART,
    NOT_DETERMINISTIC,
    Inputs,
    Path,
    Types,
    arguments,
    as_called,
    batch_size,
    call,
    close,
    detached,
    explained,
    lists_values,
    map_named,
    map_tensors,
    named_tensors,
    output_tensor,
    share,
    take,
    tolerance,
    warnings_here,
)
from lapwing.model.copies import borrowed, in_use, private, without_fast_path, written_by_forward
from lapwing.model.forward import Recording, Values, agrees, push_forward
from lapwing.model.kernels import differentiable_kernels
from lapwing.model.linearization import Linearization, Outputs, pull
from lapwing.model.params import Params
from lapwing.model.selfcheck import CHECK_SAMPLES, SelfCheck
from lapwing.model.tape import (
    FixedNorms,
    Pass,
    Plan,
    PlanChanged,
    RecordedPass,
    dynamic_plan,
    first_reached,
    parameters_behind,
    run,
    source_of,
    unseen_names,
)

ROWS = 2**26  # bytes of gradients and rows in memory at a time, where products are computed from rows
FEW = 4  # samples that are run without the others of their batch
AT_ONCE = 128  # samples times weight vectors that run together, so that they take no more memory than such a batch

SMALL_BATCH = 32
"""Samples up to which several weight vectors run together. A larger batch keeps the processor busy by itself: ten
ResNet-20 then took twice as long together as one after another."""

Forward = Callable[[Inputs], Tensor]
"""Outputs f (n, *event, c) of a network, without gradients."""


@dataclass(eq=False)
class Roles:
    """Which inputs of a network hold one entry per sample, and which all samples share.

    A tensor whose first dimension differs from the number of samples is shared by all of them. One whose first
    dimension equals it may be either: a few samples are run without the others, and their outputs decide.
    """

    shared: set[tuple[Path, int]] = field(default_factory=set)  # tensors that all samples share, and lengths
    own: set[Path] = field(default_factory=set)  # tensors with one entry per sample
    largest: int = FEW  # samples of the largest batch whose outputs were compared

    def settle(self, inputs: Inputs, run: Forward) -> None:
        """Mark the tensors that all samples share, so that they are not cut like samples."""
        n = batch_size(inputs)
        found = {path: t for path, t in named_tensors(inputs) if t.ndim}
        whole = {path for path, t in found.items() if len(t) != n}
        self.shared |= {(path, len(found[path])) for path in whole}
        self.own -= whole
        equal = [path for path, t in found.items() if (path, len(t)) not in self.shared]
        doubtful = [path for path in equal[1:] if path not in self.own]
        if doubtful:
            self._find_out(inputs, run, doubtful)
        for path, t in found.items():
            if (path, len(t)) in self.shared:
                share(t)

    def _find_out(self, inputs: Inputs, run: Forward, doubtful: list[Path]) -> None:
        """Run a few samples with all doubtful tensors cut, then with one of them whole, then with all of them whole."""
        n = batch_size(inputs)
        try:
            whole = run(inputs)
        except (RuntimeError, ValueError, IndexError):
            return  # the caller that runs the batch reports the error
        if len(whole) != n or lists_values(inputs, n) or not bool(whole.isfinite().all()):
            return
        rows, came = _spread(n, min(FEW, n - 1) or 2), "other values"  # a batch of one: its sample twice
        for kept in chain([()], ((path,) for path in doubtful), [tuple(doubtful)]):
            few = self._cut(inputs, rows, {*kept})
            try:
                if _same(whole[rows.to(whole.device)], few, run):
                    self.shared |= {(path, n) for path in kept}
                    self.own |= {*doubtful} - {*kept}
                    self.largest = max(self.largest, n)
                    return
            except (RuntimeError, ValueError, IndexError) as error:
                came = f"an error ({type(error).__name__}: {error})"
        names = ", ".join(repr(".".join(map(str, path))) for path in doubtful)
        raise UnsupportedModel(
            f"the outputs of a sample depend on the other samples of its batch: without the others, {len(rows)} of a "
            f"batch of {n} give {came}, whether the inputs {names}, which have {n} entries too, are cut into samples "
            f"or shared by all. {APART}"
        )

    def _cut(self, inputs: Inputs, rows: Tensor, kept: set[Path]) -> Inputs:
        """Return some samples; tensors that are shared, or assumed to be, stay whole."""
        n = batch_size(inputs)

        def cut(path: Path, t: Tensor) -> Tensor:
            whole = not t.ndim or len(t) != n or (path, n) in self.shared or path in kept
            return t if whole else t[rows.to(t.device)]

        return map_named(cut, inputs)

    def require_apart(self, inputs: Inputs, f: Tensor, run: Forward) -> None:
        """Refuse outputs f of a batch, larger than any before, if a few of its samples alone have other outputs."""
        n = batch_size(inputs)
        if n <= self.largest or len(f) != n or lists_values(inputs, n) or not bool(f.isfinite().all()):
            return  # lists of plain values are not cut: a few samples cannot be run without the others
        rows = _spread(n, FEW).to(f.device)
        try:
            same = _same(f.detach()[rows], take(inputs, rows, n), run)
        except (RuntimeError, ValueError, IndexError) as error:
            raise refusal(n, FEW, error) from error
        if not same:
            raise UnsupportedModel(
                f"the outputs of a sample depend on the other samples of its batch: in a batch of {n} they differ from "
                f"those of the same sample in a batch of {FEW}. {APART}"
            )
        self.largest = n


def refusal(n: int, few: int, error: Exception) -> UnsupportedModel:
    """Return the error for a network that runs a batch, but not a few of its samples."""
    return UnsupportedModel(
        f"the network runs a batch of {n} samples but not {few} of them without the others "
        f"({type(error).__name__}: {error}). {APART}"
    )


def _same(f: Tensor, few: Inputs, run: Forward) -> bool:
    """Whether a few samples alone have outputs f, within the precision that the network computes in."""
    alone = run(few)
    if close(f, alone, tolerance([f.dtype])):
        return True
    with Types() as inside:
        again = run(few)
    rtol = tolerance(inside.seen)
    if not close(again, alone, rtol):
        raise UnsupportedModel(NOT_DETERMINISTIC)
    return close(f, alone, rtol)


def _spread(n: int, count: int) -> Tensor:
    """Return indices spread over the batch. The last is among them: layers with limited capacity drop that sample."""
    return torch.linspace(n - 1, 0, count).round().long().flip(0)


@dataclass(frozen=True, eq=False)
class Network:
    """The user's module, the parameters that get a posterior, and the shape f (n, *event, c) of its outputs.

    `outputs`, which the likelihood provides, turns what the module returns into that shape.
    """

    __repr__ = brief

    module: nn.Module
    params: Params
    outputs: Outputs
    _trusted: dict[str, bool] = field(default_factory=dict, init=False, repr=False)  # faster ways, once tried
    _plans: dict[str, Plan] = field(default_factory=dict, init=False, repr=False)  # plans of later inputs
    _roles: Roles = field(default_factory=Roles, init=False, repr=False)

    @contextmanager
    def borrow(self, differentiable: bool = False) -> Iterator[nn.Module]:
        """Lend a private copy of the module, in eval mode with gradients for the selected parameters.

        Inside, this thread's calls of the methods of this class use that copy; the module itself is not touched.
        """
        kernels = differentiable_kernels() if differentiable else nullcontext()
        with borrowed(self.module, self.params.names) as own, kernels:
            yield own

    def copied(self) -> AbstractContextManager[nn.Module]:
        """Make one private copy of the module for everything inside that borrows it."""
        return private(self.module, self.params.names)

    @property
    def lent(self) -> nn.Module:
        """The private copy that this thread has borrowed."""
        return in_use(self.module, self.params.names)

    @cached_property
    def last_linear(self) -> nn.Linear | None:
        """The linear layer, if the selected parameters are its weight alone, or its weight and bias; else None."""
        names = self.params.names
        if self.params.index is not None or len(names) > 2 or not names[0].endswith("weight"):
            return None
        owner = names[0].rpartition(".")[0]
        layer = self.module.get_submodule(owner)
        own = [f"{owner}." * bool(owner) + name for name in ("weight", "bias")]
        plain = type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
        if not plain or list(names) != own[: len(names)] or "forward" in vars(layer):
            return None
        uses = [id(p) for _, p in self.module.named_parameters(remove_duplicate=False)]
        return layer if all(uses.count(id(p)) == 1 for p in layer.parameters()) else None  # type: ignore[return-value]

    def forward(self, inputs: Inputs) -> Tensor:
        """Return f (n, *event, c) without gradients."""
        self.settle(inputs)
        f = self.outputs(output_tensor(self.returned(inputs))).detach()
        self.require_apart(inputs, f)
        return f

    def returned(self, inputs: Inputs) -> object:
        """Return what the module itself returns, without gradients."""
        with self.borrow() as module, torch.no_grad(), explained(inputs):
            return call(module, inputs)

    @contextmanager
    def explaining(self, inputs: Inputs) -> Iterator[None]:
        """Replace an error inside by a clear one if the cause is that the network does not take these inputs."""
        try:
            yield
        except LapwingError:
            raise
        except Exception:
            self.forward(inputs)
            raise

    def settle(self, inputs: Inputs) -> None:
        """Find out which inputs all samples share. This must be called before a batch is cut into samples."""
        self._roles.settle(inputs, self._plain)

    def require_apart(self, inputs: Inputs, f: Tensor | None = None) -> None:
        """Refuse a batch, larger than those seen before, whose samples depend on each other; f are its outputs."""
        if f is not None:
            self._roles.require_apart(inputs, f, self._plain)
        elif batch_size(inputs) > self._roles.largest:
            self.forward(inputs)

    def _plain(self, inputs: Inputs) -> Tensor:
        with self.borrow(), torch.no_grad():
            return self.functional(None, inputs).detach()

    def at_weights(self, theta: Tensor, inputs: Inputs) -> Tensor:
        """Return f at other weights theta (P,); with gradients enabled, they flow into theta and the inputs."""
        wanted = torch.is_grad_enabled()
        with self.borrow(), torch.set_grad_enabled(wanted):
            return self.functional(self.params.unflatten(theta), inputs)

    def at_each(self, weights: Tensor, inputs: Inputs) -> Tensor:
        """Return f at each row of weights (s, P), (s, n, *event, c).

        Small batches run at several weights at once (`torch.func.vmap`) if a first trial gives the same outputs as a
        loop; everything else runs in a loop. With gradients enabled, they flow into the weights and the inputs.
        """
        n = batch_size(inputs)
        with self.copied():
            if n <= SMALL_BATCH and len(weights) > 1 and self._runs_together(weights, inputs):
                try:
                    return torch.cat(list(self._together(weights, inputs, max(1, AT_ONCE // n))))
                except Exception:  # operations that these inputs need may have no batched form: the loop tells
                    self._trusted["together"] = False
            return torch.stack([self.at_weights(theta, inputs) for theta in weights])

    def _together(self, weights: Tensor, inputs: Inputs, size: int) -> Iterator[Tensor]:
        wanted = torch.is_grad_enabled()
        with self.borrow() as module, torch.set_grad_enabled(wanted):
            own = map_tensors(Tensor.clone, inputs)
            run = torch.func.vmap(lambda values: output_tensor(call(module, own, values)))
            for part in weights.split(size):
                with warnings_here("ignore", UserWarning, "There is a performance drop"):
                    raw = run(self.params.unflatten(part))
                yield torch.stack([self.outputs(each) for each in raw])

    def _runs_together(self, weights: Tensor, inputs: Inputs) -> bool:
        """Find out once, with two samples and two rows, whether the batched form gives the outputs of each row."""
        if "together" not in self._trusted:
            few = detached(take(inputs, slice(0, 2), batch_size(inputs)))
            pair = torch.stack([weights[0], weights[-1]]).detach()
            with torch.no_grad():
                expected = torch.stack([self.at_weights(theta, few) for theta in pair])
                try:
                    found = torch.cat(list(self._together(pair, few, 2)))
                    same = found.shape == expected.shape and close(found, expected, tolerance([found.dtype]))
                except Exception:  # PyTorch raises many kinds where an operation has no batched form
                    same = False
            self._trusted["together"] = same
        return self._trusted["together"]

    def functional(self, values: dict[str, Tensor] | None, inputs: Inputs) -> Tensor:
        """Return f with some parameters replaced by these values. Call it inside `borrow()`."""
        return self.outputs(output_tensor(call(self.lent, inputs, values)))

    def forward_with_graph(self, inputs: Inputs, values: Values | None = None) -> Tensor:
        """Return f with its graph, by a pass without the tape; heavy operations leave their results in `values`.

        Call it inside `borrow()`.
        """
        self.settle(inputs)
        with FixedNorms(), nullcontext() if values is None else Recording(values):
            f = self.functional(None, inputs)
        self.require_apart(inputs, f)
        return f

    def jvp(self, inputs: Inputs, tangents: Tensor) -> tuple[Tensor, Tensor]:
        """Return f (n, *event, c) and J v for tangents (s, P), (s, n, *event, c).

        Each product is one forward-mode pass. If forward mode disagrees with reverse mode, double backward is used, and
        if that disagrees too, the rows of the tape.
        """
        with self.borrow():
            for name, push in (("forward mode", self.jvp_forward), ("double backward", self.jvp_double_backward)):
                if self.trusts(name, push, inputs):
                    found = push(inputs, tangents)
                    if found is not None:
                        return found
            return self._jvp_by_rows(inputs, tangents)

    def trusts(self, name: str, push: Callable[[Inputs, Tensor], tuple[Tensor, Tensor] | None], inputs: Inputs) -> bool:
        """Whether products computed this way agree with reverse mode; found out once, with a few samples."""
        if name not in self._trusted:
            n = batch_size(inputs)
            few = detached(take(inputs, slice(0, CHECK_SAMPLES), n))
            with self.borrow():
                with Types() as types:
                    f = self.forward_with_graph(few)
                rtol = tolerance([*types.seen, *(p.dtype for p in self.params.values)])
                leaves = list(self.leaves().values())
                self._trusted[name] = agrees(lambda v: push(few, v), f, leaves, self.params, rtol)
        return self._trusted[name]

    def jvp_forward(self, inputs: Inputs, tangents: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return f and J v by forward mode, or None. Heavy operations at the weights are computed only once."""
        values = dict(zip(self.params.names, self.params.values, strict=True))
        moved = [self.params.tangent(v) for v in tangents]
        at = lambda p: self.functional(p, inputs)  # noqa: E731
        found = self._jvp_around_one_pass(at, values, moved) if len(moved) > 1 else None
        return push_forward(self.module, at, values, moved) if found is None else found

    def _jvp_by_rows(self, inputs: Inputs, tangents: Tensor) -> tuple[Tensor, Tensor]:
        """Return f and J v by one backward pass per output: slow, and right where other ways are not."""
        if "rows" not in self._plans:
            self._plans["rows"] = self.plan(detached(inputs))
        try:
            return _by_rows(self.linearize(self._plans["rows"], inputs), tangents)
        except PlanChanged:
            plan = dynamic_plan(self.params, "these inputs run other operations")
            return _by_rows(self.linearize(plan, inputs), tangents)

    def _jvp_around_one_pass(
        self, at: Callable[[dict[str, Tensor]], Tensor], values: dict[str, Tensor], moved: list[dict[str, Tensor]]
    ) -> tuple[Tensor, Tensor] | None:
        """Return all products around the results of one recorded pass; None where these lead to other outputs."""
        known = Values()
        with torch.no_grad(), Recording(known):
            f = at(values)
        found = push_forward(self.module, at, values, moved, known)
        return found if found is not None and close(found[0], f, tolerance([f.dtype])) else None

    def jvp_double_backward(self, inputs: Inputs, tangents: Tensor) -> tuple[Tensor, Tensor]:
        """Return f and J v = ∂(uᵀJ v)/∂u, for operations without a forward-mode derivative."""
        with differentiable_kernels():
            f = self.forward_with_graph(inputs)
            return f.detach(), self.second_pass(f, tangents)

    def second_pass(self, f: Tensor, tangents: Tensor) -> Tensor:
        """Return J v, (s, n, *event, c), for outputs f with their graph. Call it inside `borrow()`."""
        u = torch.zeros_like(f, requires_grad=True)
        back = pull(f, list(self.leaves().values()), u, create_graph=True) if f.requires_grad else ()
        if not any(g is not None and g.requires_grad for g in back):
            return f.detach().new_zeros(len(tangents), *f.shape)
        results = []
        for v in tangents:
            moved = self.params.tangent(v)
            pairs = [(g, moved[name]) for g, name in zip(back, self.params.names, strict=True) if g is not None]
            total = sum(((g.to_dense() * t).sum() for g, t in pairs), start=f.new_zeros(()))
            results.append(torch.autograd.grad(total, u, retain_graph=True)[0])
        return torch.stack(results).detach()

    def linearize(self, plan: Plan, inputs: Inputs, create_graph: bool = False) -> Linearization:
        """Return the network linearized at a batch. Call this, and use the result, inside `borrow()`.

        A batch that runs other operations than the plan's (another sequence length) is planned anew; raises
        `PlanChanged` where parameters would then fall into other blocks.
        """
        # a graph that outlives this call must not end in the user's parameters, whose .grad it would fill
        self.settle(inputs)
        module, leaves = self.lent, self.leaves()
        if create_graph:
            leaves = {name: p.detach().requires_grad_() for name, p in leaves.items()}
        if plan.dynamic:
            with FixedNorms():
                raw = output_tensor(call(module, inputs, leaves if create_graph else None))
            finished = Pass(raw, ())
        else:
            finished = run(module, inputs, leaves, replaced=create_graph)
            n, ids = batch_size(inputs), {id(p): name for name, p in leaves.items()}
            plan = self._fitting(plan, lambda p: p.matches(finished.records, n, ids), inputs)
            if not unseen_names(finished, ids) <= set(plan.looped):
                raise PlanChanged
        f = self.outputs(finished.outputs)
        self.require_apart(inputs, f)
        recorded = RecordedPass(finished, plan, self.params, leaves, f.shape[0], create_graph)
        return Linearization(module, inputs, self.outputs, f, recorded)

    def _fitting(self, plan: Plan, matches: Callable[[Plan], bool], inputs: Inputs) -> Plan:
        """Return a plan that reads these inputs: this one, the last one made for later inputs, or a new one."""
        enough = min(CHECK_SAMPLES, batch_size(inputs))
        for made in (plan, self._plans.get("later")):
            if made is not None and made.distinct >= enough and plan.compatible(made) and matches(made):
                return made
        anew = self._plans["later"] = self.plan(detached(inputs))
        if not (plan.compatible(anew) and matches(anew)):
            raise PlanChanged
        return anew

    def plan_of_first(self, inputs: Inputs) -> Plan:
        """Return the plan of the first inputs for which this was called; on the first call, make it."""
        if "first" not in self._plans:
            with self.borrow():
                self._plans["first"] = self.plan(detached(inputs))
        return self._plans["first"]

    def leaves(self) -> dict[str, Tensor]:
        """Return the selected parameters of the borrowed copy, by name."""
        live = dict(self.lent.named_parameters())
        return {name: live[name] for name in self.params.names}

    def plan(self, inputs: Inputs) -> Plan:
        """Make a plan from a few samples, and check its rows against autograd. Call it inside `borrow()`."""
        self.settle(inputs)
        self._require_private(inputs)
        return SelfCheck(self.lent, self.params, self.outputs, inputs).plan()

    def _require_private(self, inputs: Inputs) -> None:
        """Refuse a forward pass that reaches the user's module itself, although a private copy is run."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        n = batch_size(inputs)
        try:
            with torch.enable_grad():
                f = self.functional(None, take(inputs, slice(0, 2), n))
        except (RuntimeError, ValueError, IndexError) as error:
            if n > 2:
                raise refusal(n, 2, error) from error
            raise
        found = [names[id(leaf)] for leaf in parameters_behind(f.grad_fn) if id(leaf) in names]
        if found:
            raise UnsupportedModel(
                f"the forward pass uses parameter {found[0]!r} without going through `self` (for example by a global "
                "variable inside a function that it calls, or by a tensor computed from it earlier), so Lapwing cannot "
                "run it without touching your module. Use `self`, and compute such tensors in each forward pass."
            )

    def require_faithful(self, inputs: Inputs) -> None:
        """Refuse a network whose private copy gives other outputs than a plain call of the module.

        An example is a network that looks itself up in a table by its identity: the table has no entry for the copy.
        The module itself is called only if that leaves no traces: in eval mode, without hooks, and if forward writes
        nothing.
        """
        parts = list(self.module.modules())
        if any(m.training or m._forward_hooks or m._forward_pre_hooks or written_by_forward(m) for m in parts):
            return
        few = take(inputs, slice(0, 2), batch_size(inputs))
        args, kwargs = arguments(map_tensors(Tensor.clone, few))
        with self.borrow() as own, torch.no_grad(), as_called():
            versions = [b._version for b in own.buffers() if not b.is_inference()]
            found = output_tensor(own(*args, **kwargs))
            if versions != [b._version for b in own.buffers() if not b.is_inference()]:
                return
        args, kwargs = arguments(map_tensors(Tensor.clone, few))
        with without_fast_path(self.module), torch.no_grad(), as_called():
            expected = output_tensor(self.module(*args, **kwargs))
        if expected.shape != found.shape or not close(found, expected, tolerance([found.dtype])):
            raise UnsupportedModel(
                "a private copy of the network, which Lapwing runs in place of yours, gives other outputs than the "
                "network itself: its forward pass reads something that belongs to this very object (for example "
                "a table with an entry for id(self)). Keep it as an attribute of the module."
            )


def _by_rows(at: Linearization, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Return f and J v from the rows of all outputs, a few outputs at a time."""
    f = at.f.detach()
    n, outputs = len(f), f[0].numel()
    explicit = sum(block.size for block in at.plan.blocks if block.kind == "rows")
    step = max(1, ROWS // (8 * n * max(1, at.width + explicit)))
    found = []
    for start in range(0, outputs, step):
        eye = torch.eye(outputs, dtype=f.dtype, device=f.device)[start : start + step]
        directions = eye[:, None].expand(-1, n, -1).reshape(-1, *f.shape)
        with torch.no_grad():
            found.append(at.jacobian(directions).matvec(tangents))
    return f, torch.cat(found, -1).reshape(len(tangents), *f.shape).to(f.dtype)


def last_layer(module: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the parameters that produce the outputs: the last weight matrix and what follows it."""
    free = [name for name, p in module.named_parameters() if p.requires_grad]
    with borrowed(module, free) as own:
        live = dict(own.named_parameters())
        selected: dict[str, Tensor] = {name: live[name] for name in free}
        with explained(inputs):
            try:
                finished = run(own, take(inputs, slice(0, 1), batch_size(inputs)), selected)
            except (RuntimeError, ValueError, IndexError):  # inputs that cannot be cut into samples like this
                finished = run(own, inputs, selected)
        ids = {id(live[name]): name for name in free}
        small: Callable = lambda record: all(record.tensors[j].ndim < 2 for j in record.live)  # noqa: E731
        found = first_reached(finished, small)
        weights = (record.tensors[j] for record in found for j in record.live)
        names = {name for weight in weights for name in source_of(weight, ids).names}
    if not names:
        raise UnsupportedModel(
            "no parameter was seen to produce the outputs; name the last layer's parameters in select"
        )
    return tuple(name for name in free if name in names)
