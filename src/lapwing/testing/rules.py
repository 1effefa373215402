"""The laws of a rule: its rows, sums and products are those of autograd, for every batch size, and a fit uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing.model import Network, Params
from lapwing.model.calls import map_tensors
from lapwing.model.rules import Call, MatrixRule, RowsRule, Rule, Samples

RTOL, ATOL = 1e-8, 1e-10


class RuleLaws:
    """Test case of a rule: name the rule, its torch function, and arguments of a call with n samples, in float64.

    Tensors that depend on the data must have the samples on the first axis; set `samples` where they have not.

    Examples:
        >>> from lapwing.model.rules import RULES
        >>> from lapwing.testing import RuleLaws
        >>> from lapwing.testing.rules import normal
        >>> class TestLinear(RuleLaws):
        ...     rule, function = RULES[nn.functional.linear], nn.functional.linear
        ...     def arguments(self, n):
        ...         return normal(n, 3), normal(4, 3), normal(4)
    """

    rule: ClassVar[Rule]
    function: ClassVar[Callable]
    options: ClassVar[dict[str, Any]] = {}  # named arguments of the call
    samples: ClassVar[Samples] = Samples(0)
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 5)
    directions: ClassVar[int] = 3

    def arguments(self, n: int) -> tuple:
        """Return the positional arguments of a call with n samples. Draw them with `normal`, or with your own seed."""
        raise NotImplementedError

    def test_calls_are_bound(self) -> None:
        for n in self.sizes:
            call, out = self._called(n)
            assert self.rule.accepts(call, self.samples, out.ndim), f"{self.rule} declines these samples"
            assert call.weight is not None or call.bias is not None, "a call needs a weight or a bias"
            assert call.inputs, "a call needs at least one data tensor"

    def test_rows_are_autograd(self) -> None:
        """The rows of weight and bias are the gradients of each sample, whatever the batch size."""
        for n in self.sizes:
            call, out = self._called(n)
            g = normal(self.directions, *out.shape, seed=1)
            truth = self._truth(call, out, g, n)
            for tensor, expected in zip((call.weight, call.bias), truth, strict=True):
                if tensor is not None and expected is not None:
                    _assert_close(self._rows(call, g, n, tensor), expected, f"rows of {_role(call, tensor)}, n = {n}")
            if isinstance(self.rule, RowsRule) and call.weight is not None and call.bias is not None:
                for found, expected in zip(self.rule.rows(call, g, self.samples, n), truth, strict=True):
                    assert expected is not None
                    _assert_close(found, expected, f"rows() of both, n = {n}")

    def test_rows_with_the_bias_folded_in(self) -> None:
        """`right` with ones gives the rows of weight and bias as one matrix, the bias in its last column."""
        for n, call, out in self._matrix_calls():
            if call.bias is None:
                continue
            g = normal(self.directions, *out.shape, seed=1)
            left, right = self.rule.left(call, g, self.samples, n), self.rule.right(call, self.samples, n, True)  # type: ignore[attr-defined]
            whole = torch.einsum("nrtqo,nstqi->nrqoi", left, right)
            weight, bias = self._truth(call, out, g, n)
            assert weight is not None
            assert bias is not None
            seen = torch.stack([torch.stack([self._view(call, row) for row in rows]) for rows in weight])
            _assert_close(whole[..., :-1], seen, f"columns of the weight, n = {n}")
            _assert_close(whole[..., -1].flatten(2), bias.flatten(2), f"column of the bias, n = {n}")

    def test_view_is_a_rearrangement(self) -> None:
        """`view` holds every entry of the weight once, as (groups, out, in)."""
        for n, call, out in self._matrix_calls():
            assert call.weight is not None
            places = torch.arange(call.weight.numel()).reshape(call.weight.shape)
            seen = self._view(call, places)
            assert seen.ndim == 3, f"expected (groups, out, in), got {tuple(seen.shape)}"
            assert torch.equal(seen.reshape(-1).sort().values, places.reshape(-1))
            q, o, i = seen.shape
            left = self.rule.left(call, normal(2, *out.shape), self.samples, n)  # type: ignore[attr-defined]
            right = self.rule.right(call, self.samples, n)  # type: ignore[attr-defined]
            assert left.shape[:2] == (n, 2)
            assert left.shape[3:] == (q, o)
            assert right.shape == (n, 1, left.shape[2], q, i)

    def test_sums_and_products_are_those_of_the_factors(self) -> None:
        """Every shortcut (`left_sum`, `right_gram`, …) gives what `left` and `right` give."""
        for n, call, out in self._matrix_calls():
            rule, samples = self.rule, self.samples
            assert isinstance(rule, MatrixRule)
            g = normal(self.directions, *out.shape, seed=1)
            left = rule.left(call, g, samples, n)
            _assert_close(rule.left_sum(call, g, samples, n), left.sum(2), f"left_sum, n = {n}")
            gram = torch.einsum("nrtqo,nrtqp->qop", left, left)
            _assert_close(rule.left_gram(call, g, samples, n), gram, f"left_gram, n = {n}")
            assert rule.positions(call, n) == left.shape[2], f"positions, n = {n}"
            for ones in (False, True) if call.bias is not None else (False,):
                right = rule.right(call, samples, n, ones)[:, 0].double()  # (n, t, q, i)
                _assert_close(rule.right_sum(call, samples, n, ones).double(), right.sum(1), f"right_sum, n = {n}")
                for weights in (None, torch.linspace(0.5, 2, n, dtype=torch.float64)):
                    w = torch.ones(n, dtype=torch.float64) if weights is None else weights
                    found, t = rule.right_gram(call, samples, n, ones, weights, torch.float64)
                    _assert_close(found, torch.einsum("n,ntqi,ntqj->qij", w, right, right), f"right_gram, n = {n}")
                    assert t == left.shape[2], f"positions of right_gram, n = {n}"

    def test_samples_may_be_cut(self) -> None:
        """The factors of some samples are a part of the factors of all, if samples are the first axis."""
        if self.samples.axis:
            return
        for n, call, out in self._matrix_calls():
            rule, few = self.rule, n - n // 2
            assert isinstance(rule, MatrixRule)
            if any(len(t) != n for t in call.inputs):
                return
            g = normal(2, *out.shape, seed=1)
            part = replace(call, inputs=tuple(t[:few] for t in call.inputs))
            whole = rule.left(call, g, self.samples, n)[:few]
            _assert_close(rule.left(part, g[:, :few], self.samples, few), whole, f"left of {few} of {n} samples")
            whole = rule.right(call, self.samples, n)[:few]
            _assert_close(rule.right(part, self.samples, few), whole, f"right of {few} of {n} samples")

    def test_a_fit_uses_the_rule(self) -> None:
        """The plan of a network with this operation reads it by its rule, and the Jacobian is that of autograd."""
        n = max(self.sizes)
        call, _ = self._called(n)
        module = _Around(self, call, n)
        inputs = tuple(t.detach().movedim(self.samples.axis, 0) for t in call.inputs)
        network = Network(module, Params.of(module, tuple(name for name, _ in module.named_parameters())), lambda f: f)
        with network.borrow():
            plan = network.plan(inputs)
            methods = [step.method for step in plan.steps if step.func == type(self).function]
            assert methods, f"the tape saw other functions: {[step.func for step in plan.steps]}"
            assert set(methods) == {"rule"}, f"read as {methods}, because {plan.notes or 'the rule declines'}"
            f = network.forward(inputs)
            eye = torch.eye(f.shape[1], dtype=f.dtype)[:, None].expand(-1, n, -1)
            found = network.linearize(plan, inputs).jacobian(eye).dense().detach()
        f = module(*inputs)
        rows = [torch.autograd.grad(out, list(module.parameters()), retain_graph=True) for out in f.reshape(-1)]
        truth = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
        _assert_close(found.reshape(truth.shape), truth, "Jacobian of a network")

    def _matrix_calls(self) -> list[tuple[int, Call, Tensor]]:
        return [(n, *self._called(n)) for n in self.sizes] if isinstance(self.rule, MatrixRule) else []

    def _called(self, n: int) -> tuple[Call, Tensor]:
        """Bind a call of n samples, and run it with gradients for weight and bias."""
        args, kwargs = map_tensors(lambda t: t.detach().clone(), (self.arguments(n), self.options))
        call = self.rule.bind(*args, **kwargs)
        assert call is not None, f"{self.rule} declines its own function's call with {n} samples"
        for tensor in (call.weight, call.bias):
            if tensor is not None:
                tensor.requires_grad_()
        return call, type(self).function(*args, **kwargs)

    def _truth(self, call: Call, out: Tensor, g: Tensor, n: int) -> tuple[Tensor | None, Tensor | None]:
        """Return ∂(g · out of a sample)/∂tensor by autograd, (n, r, *shape), for weight and bias."""
        each = self.samples.first(out * g, n, skip=1)  # (n, r, ...)
        return tuple(None if t is None else self._gradients(each, t) for t in (call.weight, call.bias))  # type: ignore[return-value]

    @staticmethod
    def _gradients(each: Tensor, tensor: Tensor) -> Tensor:
        rows = [[torch.autograd.grad(v.sum(), tensor, retain_graph=True)[0] for v in own] for own in each]
        return torch.stack([torch.stack(own) for own in rows])

    def _rows(self, call: Call, g: Tensor, n: int, tensor: Tensor) -> Tensor:
        rule, samples = self.rule, self.samples
        if tensor is call.bias:
            return rule.bias_rows(call, g, samples, n)
        if isinstance(rule, RowsRule):
            return rule.weight_rows(call, g, samples, n)
        assert isinstance(rule, MatrixRule)
        left, right = rule.left(call, g, samples, n), rule.right(call, samples, n)
        rows = torch.einsum("nrtqo,nstqi->nrqoi", left, right).flatten(2)
        places = torch.arange(tensor.numel()).reshape(tensor.shape)
        return rows[..., self._view(call, places).reshape(-1).argsort()].reshape(n, len(g), *tensor.shape)

    def _view(self, call: Call, weight: Tensor) -> Tensor:
        assert isinstance(self.rule, MatrixRule)
        return self.rule.view(call, weight)


class _Around(nn.Module):
    """A network with one call of the operation: its data are the inputs, its outputs three numbers per sample."""

    def __init__(self, laws: RuleLaws, call: Call, n: int) -> None:
        super().__init__()
        self.laws, self.n = laws, n
        self.weight = None if call.weight is None else nn.Parameter(call.weight.detach())
        self.bias = None if call.bias is None else nn.Parameter(call.bias.detach())

    def forward(self, *inputs: Tensor) -> Tensor:
        laws, n = self.laws, len(inputs[0])
        args, kwargs = laws.arguments(self.n), laws.options
        call = laws.rule.bind(*args, **kwargs)
        assert call is not None
        own = {id(t): x.movedim(0, laws.samples.axis) for t, x in zip(call.inputs, inputs, strict=True)}
        pairs = ((call.weight, self.weight), (call.bias, self.bias))
        own |= {id(t): p for t, p in pairs if t is not None and p is not None}
        args, kwargs = map_tensors(lambda t: own.get(id(t), t), (args, kwargs))
        out = type(laws).function(*args, **kwargs)
        flat = laws.samples.first(out, n).flatten(1).tanh()
        head = torch.linspace(-1, 1, 3 * flat.shape[1], dtype=flat.dtype).cos().reshape(flat.shape[1], 3)
        return torch.einsum("ni,io->no", flat, head)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw a float64 tensor of standard normal numbers, the same ones each time."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _role(call: Call, tensor: Tensor) -> str:
    return "the bias" if tensor is call.bias else "the weight"


def _assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=RTOL, atol=ATOL, msg=lambda text: f"{what}: {text}"
    )
