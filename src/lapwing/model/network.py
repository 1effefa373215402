"""A module and its selected parameters as functions: f(x), rows of its Jacobian, products with weight directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import UnsupportedModel
from lapwing.model.backward import pull
from lapwing.model.batches import Inputs, batch_size, call, map_tensors, take
from lapwing.model.forward import push_forward
from lapwing.model.jacobian import Linearization
from lapwing.model.module import borrowed, differentiable_kernels, output_tensor
from lapwing.model.params import Params
from lapwing.model.plan import Plan, PlanChanged, source_of, unseen_names
from lapwing.model.reading import Outputs
from lapwing.model.samples import close
from lapwing.model.selfcheck import CHECK_SAMPLES, TOLERANCES, SelfCheck
from lapwing.model.tangents import Recording, Values
from lapwing.model.tape import Pass, Record, first_reached, run


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
        raw = output_tensor(self.returned(inputs))
        return self.outputs(raw).detach(), raw.ndim == 1

    def returned(self, inputs: Inputs) -> object:
        """What the module itself returns, no gradients."""
        with borrowed(self.module), torch.no_grad():
            return call(self.module, inputs)

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
        at = lambda p: self._functional(p, inputs)  # noqa: E731
        with self.borrow():
            found = self._jvp_around_one_pass(at, values, moved) if len(moved) > 1 else None
            found = push_forward(self.module, at, values, moved) if found is None else found
            if found is not None:
                return found
            with differentiable_kernels():
                return self._jvp_by_double_backward(inputs, tangents)

    def _jvp_around_one_pass(
        self, at: Callable[[dict[str, Tensor]], Tensor], values: dict[str, Tensor], moved: list[dict[str, Tensor]]
    ) -> tuple[Tensor, Tensor] | None:
        """All products around the values of one recorded pass; None where they then lead to other outputs."""
        known = Values()
        with torch.no_grad(), Recording(known):
            f = at(values)
        found = push_forward(self.module, at, values, moved, known)
        rtol = TOLERANCES.get(f.dtype, 5e-2)
        return found if found is not None and close(found[0], f, rtol) else None

    def _jvp_by_double_backward(self, inputs: Inputs, tangents: Tensor) -> tuple[Tensor, Tensor]:
        """J v = ∂(uᵀJ v)/∂u, for operations without a forward-mode derivative."""
        live = dict(self.module.named_parameters())
        weights = [live[name] for name in self.params.names]
        f = self.outputs(output_tensor(call(self.module, inputs)))
        u = torch.zeros_like(f, requires_grad=True)
        back = pull(f, weights, u, create_graph=True)
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

    def plan(self, inputs: Inputs) -> Plan:
        """Read the network from a few samples, and check the rows against autograd (call inside `borrow()`)."""
        return SelfCheck(self.module, self.params, self.outputs, inputs).plan()


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
