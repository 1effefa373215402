"""Where blocks sit: few numbers in place of an index, against the index itself."""

import json

import pytest
import torch
from torch import Tensor

from lapwing.linalg import Layout, Places
from lapwing.linalg.blocks import Run


def with_bias(start: int, bias: int, o: int, i: int) -> Tensor:
    weight, last = torch.arange(start, start + o * i).view(o, i), torch.arange(bias, bias + o).view(o, 1)
    return torch.cat([weight, last], 1).flatten()


INDEX = {  # the index, and how many rows and runs tell it (0: none)
    "a range": (torch.arange(3, 17), 1, 1),
    "one entry": (torch.tensor([5]), 1, 1),
    "nothing": (torch.arange(0), 1, 0),
    "a weight and its bias": (with_bias(0, 12, 4, 3), 4, 2),
    "a bias before its weight": (with_bias(4, 0, 4, 3), 4, 2),
    "a bias far away": (with_bias(0, 30, 4, 3), 4, 2),
    "a weight of one column and its bias": (with_bias(0, 4, 4, 1), 4, 2),
    "a weight of one row and its bias": (with_bias(2, 5, 1, 3), 1, 1),
    "a weight of one row and a bias far away": (with_bias(2, 9, 1, 3), 1, 2),
    "two ranges": (torch.cat([torch.arange(8, 12), torch.arange(0, 4)]), 1, 2),
    "ranges that go on in the wrong order": (
        torch.cat([torch.arange(4, 8), torch.arange(0, 4), torch.arange(8, 12)]),
        0,
        0,
    ),
    "three columns": (
        torch.cat(
            [torch.arange(0, 6).view(3, 2), torch.arange(6, 9).view(3, 1), torch.arange(20, 32).view(3, 4)], 1
        ).flatten(),
        3,
        3,
    ),
    "a small transposed weight": (torch.arange(12).view(4, 3).T.flatten(), 3, 4),
    "a transposed weight": (torch.arange(30).view(10, 3).T.flatten(), 0, 0),
    "a weight of one row, backwards": (torch.arange(6).flip(0), 0, 0),
    "a weight and its bias but for the last": (torch.cat([with_bias(0, 12, 4, 3)[:-1], torch.tensor([20])]), 0, 0),
    "a cut weight and its bias": (with_bias(0, 12, 4, 3)[:-1], 0, 0),
    "every other": (torch.arange(0, 40, 2), 0, 0),
    "shuffled": (torch.randperm(40, generator=torch.Generator().manual_seed(0)), 0, 0),
}


@pytest.mark.parametrize("name", INDEX)
def test_places_are_their_index(name: str) -> None:
    index, rows, runs = INDEX[name]
    places = Places.of(index)
    check(places, index)
    if name != "nothing":
        assert (places.explicit is None) == bool(rows)
    if rows:
        assert (places.rows, len(places.runs)) == (rows, runs)
        assert Places.from_spec(json.loads(json.dumps(places.spec()))).same_as(places)


@pytest.mark.parametrize(("o", "i"), [(4, 3), (1, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_turned_matrices(o: int, i: int, bias: bool) -> None:
    """A weight kept as (in, out), with and without a bias."""
    index = torch.arange(5, 5 + o * i).view(i, o).T
    index = torch.cat([index, torch.arange(30, 30 + o).view(o, 1)], 1) if bias else index
    places = Places(o, (Run(5, i, True), *([Run(30, 1)] if bias else [])))
    check(places, index.flatten())
    assert Places.from_spec(json.loads(json.dumps(places.spec()))).same_as(places)
    assert places.same_as(Places(explicit=index.flatten()))
    assert not places.same_as(Places(explicit=index.flatten().flip(0))) or o * i == 1


def check(places: Places, index: Tensor) -> None:
    assert len(places) == len(index)
    assert torch.equal(places.index, index)
    v = torch.randn(2, 3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for flat in (v, v[0, 0], v.transpose(0, 1), v.repeat_interleave(2, -1)[..., ::2]):  # the last with a stride
        assert torch.equal(places.take(flat), flat[..., index])
        want, got = flat.clone(), flat.clone()
        want[..., index] = -flat[..., index].cos()
        places.put(got, -flat[..., index].cos())
        assert torch.equal(got, want)
    assert places.within(50)
    if len(index):
        assert places.within(int(index.max()) + 1)
        assert not places.within(int(index.max()))


def test_places_that_differ() -> None:
    for name, (index, *_) in INDEX.items():
        for other, (another, *_) in INDEX.items():
            assert Places.of(index).same_as(Places.of(another)) == (name == other)


def test_random_rows_of_runs() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        o, *widths = (int(k) for k in torch.randint(1, 5, (4,), generator=generator))
        starts = torch.randperm(3, generator=generator) * 20
        grids = [torch.arange(int(s), int(s) + o * w).view(o, w) for s, w in zip(starts, widths, strict=True)]
        index = torch.cat(grids, 1).flatten()
        places = Places.of(index)
        assert torch.equal(places.index, index)
        assert places.explicit is None


def test_files_of_an_earlier_format() -> None:
    assert Places.from_spec([3, 17]).same_as(Places.of(torch.arange(3, 17)))


def test_gradients_through_a_layout() -> None:
    index = with_bias(0, 12, 4, 3), torch.randperm(8, generator=torch.Generator().manual_seed(0)) + 16
    layout = Layout(24, index)
    parts = [torch.randn(2, len(i), dtype=torch.float64, requires_grad=True) for i in index]
    assert torch.autograd.gradcheck(lambda *p: layout.scatter(p).sin(), parts)
    flat = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: layout.gather(v.sin()), [flat])
    torch.testing.assert_close(layout.scatter(layout.gather(flat)), flat, rtol=0, atol=0)
