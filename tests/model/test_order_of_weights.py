"""Where plans place the entries of weights, against weights whose entries are their own positions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lapwing.linalg import Places
from lapwing.model.params import Params, orders


class Holder(nn.Module):
    """Parameters one after the other in the flat vector: something before, a weight, something between, a bias."""

    def __init__(self, weight: tuple[int, ...], bias: int) -> None:
        super().__init__()
        self.before, self.weight = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(weight))
        self.between, self.bias = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(bias))


VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], bool]] = {  # shape, view, few numbers suffice
    "linear": ((4, 3), lambda w: w[None], True),
    "one output": ((1, 3), lambda w: w[None], True),
    "one input": ((4, 1), lambda w: w[None], True),
    "transposed": ((3, 4), lambda w: w.T[None], True),
    "transposed, one output": ((3, 1), lambda w: w.T[None], True),
    "convolution": ((4, 3, 2, 2), lambda w: w.reshape(1, 4, -1), True),
    "groups": ((4, 3, 2, 2), lambda w: w.reshape(2, 2, -1), True),
    "transposed convolution": ((3, 4, 6, 6), lambda w: w.reshape(1, 3, 4, -1).transpose(1, 2).flatten(2), False),
    "a strided view": ((4, 2, 9), lambda w: w.permute(1, 0, 2), False),
    "channels last": ((12, 3, 5), lambda w: w.permute(2, 1, 0).reshape(1, 5, -1), False),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("bias", [True, False])
def test_places_of_a_weight(name: str, bias: bool) -> None:
    shape, view, few = VIEWS[name]
    seen = view(torch.zeros(shape))
    holder = Holder(shape, seen.shape[0] * seen.shape[1])
    params = Params.of(holder, tuple(name for name, _ in holder.named_parameters()))
    (order,) = orders(params, "weight", [view])
    assert order.shape == tuple(seen.shape)
    where = {
        name: torch.arange(o, o + s) for name, o, s in zip(params.names, params.offsets, params.sizes, strict=True)
    }
    want = view(where["weight"].view(shape))
    if bias:
        want = torch.cat([want, where["bias"].view(*want.shape[:2], 1)], 2)
    places = order.places(params, "weight", "bias" if bias else None)
    assert torch.equal(places.index, want.flatten())
    assert places.explicit is None or not few
    assert places.same_as(Places(explicit=want.flatten()))


def test_weights_that_are_seen_in_two_ways() -> None:
    """The same order, that of the transpose, and another one: by strides and by positions."""
    params = Params.of(Holder((4, 3), 1), ("weight",))
    plain, turned = lambda w: w[None], lambda w: w.T[None]
    for views in ([plain, plain, turned], [plain, lambda w: w[None].clone(), turned]):
        first, second, third = orders(params, "weight", views)
        assert first.same_as(second)
        assert not third.same_as(first)
        assert third.swapped().same_as(first)
        assert first.swapped().same_as(third)
    square = Params.of(Holder((3, 3), 1), ("weight",))
    first, second = orders(square, "weight", [plain, turned])
    assert not first.same_as(second)
    assert first.swapped().same_as(second)
    thin = Params.of(Holder((3, 1), 1), ("weight",))
    first, second = orders(thin, "weight", [plain, lambda w: w.T[None].transpose(1, 2)])
    assert first.same_as(second)
