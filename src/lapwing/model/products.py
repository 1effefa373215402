"""Products with the Jacobian of a network over data, by forward- and reverse-mode passes, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lapwing.errors import BadData
from lapwing.model.batches import Batch, Batches
from lapwing.model.calls import Inputs, batch_size, per_sample, take, tensors_in
from lapwing.model.forward import Values, forward_mode, lacks_derivative, push_forward
from lapwing.model.kernels import elementary_attention
from lapwing.model.linearization import pull, pull_all
from lapwing.model.network import Network

SMALL = 20_000  # weights up to which several vectors share one vectorized pass
BLOCK = 3  # vectors from which, in networks with attention, one graph of the gradient pays for both directions

Middle = Callable[[Batch, Tensor, Tensor], Tensor]
"""(batch, f (n, *event, c), u (s, n, *event, c)) → Λ u, like u."""

Keep = Callable[[Batch, Tensor], Tensor | None]
"""(batch, f) → the samples that count, (k,), or None: all."""


@dataclass(frozen=True, eq=False)
class Products:
    """Products with the Jacobian J of all data; several vectors (s, P) share passes where possible.

    A product Jᵀ Λ J v of one vector costs a forward pass, a forward-mode and a reverse-mode pass around its values:
    about 1.7 gradients in operations, 1.3 for each further vector. Passes run in the network's own dtype; sums over
    batches are kept in float64. Operations without a forward-mode derivative (recurrent layers) are replaced by ones
    that have it, step by step, after one failure each; blocks of vectors in networks with attention take both
    directions from one graph of the gradient.
    """

    network: Network
    batches: Batches
    progress: bool | None = None
    _slow: dict[str, bool] = field(default_factory=dict, repr=False)

    def jvp(self, inputs: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return f (n, *event, c) and J v (s, n, *event, c) for v (s, P)."""
        if self._vectorizes("vmap", len(v)) and self.network.trusts("vectorized", self._jvp_at_once, inputs):
            try:
                return self._jvp_at_once(inputs, v)
            except (NotImplementedError, RuntimeError):
                self._slow["vmap"] = True
        return self.network.jvp(inputs, v)

    def _jvp_at_once(self, inputs: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
        params = self.network.params
        values = dict(zip(params.names, params.values, strict=True))
        run = lambda p: self.network.functional(p, inputs)  # noqa: E731
        push = lambda row: torch.func.jvp(run, (values,), (params.tangent(row),))[1]  # noqa: E731
        with self.network.borrow(), elementary_attention(), torch.no_grad(), forward_mode():
            return run(values), torch.func.vmap(push)(v.to(params.dtype))

    def vjp(self, inputs: Inputs, pull: Callable[[Tensor], Tensor]) -> Tensor:
        """Return Jᵀ u, (s, P), for u (s, n, *event, c) = pull(f), from one recorded forward pass for all s."""
        with self.network.borrow():
            f = self.network.forward_with_graph(inputs)
            with torch.no_grad():
                u = pull(f.detach())
            return self._pull_back(f, u)

    def _pull_back(self, f: Tensor, u: Tensor) -> Tensor:
        params, leaves = self.network.params, list(self.network.leaves().values())
        total = torch.zeros(len(u), params.size, dtype=params.dtype, device=f.device)
        if not f.requires_grad:
            return total
        if self._vectorizes("batched", len(u)):
            try:
                return self._pull_back_at_once(f, u, leaves)
            except (NotImplementedError, RuntimeError):
                self._slow["batched"] = True
        for k, row in enumerate(u):
            total[k] = params.pick(params.flatten(pull(f, leaves, row)))
        return total

    def _vectorizes(self, what: str, s: int) -> bool:
        """Whether s vectors share a vectorized pass, which costs little more than one in small networks."""
        return s > 1 and self.network.params.size <= SMALL and what not in self._slow

    def _pull_back_at_once(self, f: Tensor, u: Tensor, leaves: list[Tensor]) -> Tensor:
        params = self.network.params
        found = pull_all(f, leaves, u)
        parts = [p.new_zeros(len(u), p.numel()) if g is None else g.reshape(len(u), -1) for g, p in zip(found, leaves)]
        return params.pick(torch.cat([part.to(params.dtype) for part in parts], -1))

    def ggn(self, v: Tensor, middle: Middle, label: str = "products", keep: Keep | None = None) -> Tensor:
        """Return Σ_n J_nᵀ Λ_n J_n v for v (s, P), in float64, over the samples that `keep` names."""
        total = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
        for batch in self._kept(label, keep):
            total += self._of_batch(batch, v, middle)
        return total

    def _kept(self, label: str, keep: Keep | None) -> Iterator[Batch]:
        """Yield the batches without the samples that `keep` leaves out."""
        for batch in self._read(label):
            n = batch_size(batch.inputs)
            mixed = not all(per_sample(t, n) for t in tensors_in(batch.inputs))
            rows = None if keep is None or mixed else keep(batch, self.network.forward(batch.inputs))
            if rows is None or len(rows) == n:
                yield batch
            elif len(rows):
                weights = None if batch.weights is None else batch.weights[rows]
                inputs, targets = take(batch.inputs, rows, n), take(batch.targets, rows, n)
                yield replace(batch, inputs=inputs, targets=targets, weights=weights)

    def _of_batch(self, batch: Batch, v: Tensor, middle: Middle) -> Tensor:
        network, inputs = self.network, batch.inputs
        if self._vectorizes("vmap", len(v)) or not network.trusts("forward mode", network.jvp_forward, inputs):
            f, inside = self.jvp(inputs, v)
            with torch.no_grad():
                u = middle(batch, f, inside)
            return self.vjp(inputs, lambda _: u)
        if len(v) >= BLOCK and self._slow.get("attention") and self._differentiates_twice(inputs):
            try:
                return self._by_one_graph(batch, v, middle)
            except (NotImplementedError, RuntimeError) as error:
                if not lacks_derivative(error):
                    raise
                self._slow["double"] = True
        return self._by_one_pass(batch, v, middle)

    def _differentiates_twice(self, inputs: Inputs) -> bool:
        network = self.network
        return "double" not in self._slow and network.trusts("double backward", network.jvp_double_backward, inputs)

    def _by_one_pass(self, batch: Batch, v: Tensor, middle: Middle) -> Tensor:
        """Return Jᵀ Λ J v: J v by forward mode around the values of a recorded pass, whose graph then gives Jᵀ."""
        params, values = self.network.params, Values()
        moved = [params.tangent(row) for row in v]
        with self.network.borrow():
            base = {name: p.detach() for name, p in self.network.leaves().items()}
            f = self.network.forward_with_graph(batch.inputs, values)
            self._slow["attention"] = values.attends
            run = lambda p: self.network.functional(p, batch.inputs)  # noqa: E731
            found = push_forward(self.network.module, run, base, moved, values)
            found = self.network.jvp(batch.inputs, v) if found is None else found
            with torch.no_grad():
                u = middle(batch, f.detach(), found[1])
            return self._pull_back(f, u)

    def _by_one_graph(self, batch: Batch, v: Tensor, middle: Middle) -> Tensor:
        """Return Jᵀ Λ J v: J v as the derivative of u ↦ (Jᵀu)ᵀv, then Jᵀ through the same recorded pass."""
        with self.network.borrow(), elementary_attention():
            f = self.network.forward_with_graph(batch.inputs)
            pushed = self.network.second_pass(f, v)
            with torch.no_grad():
                image = middle(batch, f.detach(), pushed)
            return self._pull_back(f, image)

    def transposed(
        self, pull: Callable[[Batch, Tensor], Tensor], s: int, label: str = "products", keep: Keep | None = None
    ) -> Tensor:
        """Return Σ_n J_nᵀ u_n, (s, P) in float64, for u = pull(batch, f) (s, n, *event, c)."""
        params = self.network.params
        total = torch.zeros(s, params.size, dtype=torch.float64, device=params.device)
        for batch in self._kept(label, keep):
            total += self.vjp(batch.inputs, lambda f, batch=batch: pull(batch, f))  # type: ignore[misc]
        return total

    def jacobian(self, v: Tensor, label: str = "products") -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield (batch, f, J v) for every batch."""
        for batch in self._read(label):
            yield batch, *self.jvp(batch.inputs, v)

    def _read(self, label: str) -> Iterator[Batch]:
        hide = None if self.progress is None else not self.progress
        length, delay = self.batches.length, 0 if self.progress else 5
        seen = tqdm(self.batches, desc=label, total=length, disable=hide, delay=delay, leave=False)
        for batch in seen:
            if batch.weights is not None and bool((batch.weights < 0).any()):
                raise BadData(f"batch {batch.number}: weights must be ≥ 0")
            self.network.settle(batch.inputs)
            yield batch
