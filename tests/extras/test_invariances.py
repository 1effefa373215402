"""Learnable augmentation: the maps themselves, the bound and its gradient in the ranges, and what is learned."""

import math

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import BadData
from lapwing.evidence.online import batch_bound
from lapwing.extras.invariances import Affine, Averaged, invariant_bound
from lapwing.model import Batches, Network, Params


def test_a_quarter_turn_is_a_quarter_turn_and_a_shift_a_shift() -> None:
    x = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    turn = Affine(rotation=10.0)
    moved = turn.transform(x, torch.full((2, 1), math.pi / 2))
    torch.testing.assert_close(moved, torch.rot90(x, 1, (2, 3)), atol=1e-5, rtol=0)
    shift = Affine(translation=0.1)
    moved = shift.transform(x, torch.tensor([[2 / 6, 0.0]]).expand(2, 2))  # one pixel
    torch.testing.assert_close(moved[..., :-1], x[..., 1:], atol=1e-5, rtol=0)
    scale = Affine(scale=0.1)
    assert scale.kinds == ("scale_x", "scale_y")
    torch.testing.assert_close(scale.transform(x, torch.zeros(2, 2)), x, atol=1e-6, rtol=0)
    slanted = Affine(shear=0.1).transform(x, torch.full((2, 1), 0.5))
    assert not torch.allclose(slanted, x)


def test_ranges_start_where_they_were_told_and_bound_the_copies() -> None:
    augment = Affine(rotation=30.0, translation=0.2)
    assert augment.ranges["rotation"] == pytest.approx(30.0, rel=1e-5)
    assert augment.ranges["translation_x"] == pytest.approx(0.2, rel=1e-5)
    copies = augment(torch.rand(3, 1, 5, 5), 4, torch.Generator().manual_seed(0))
    assert copies.shape == (3, 4, 1, 5, 5)
    with pytest.raises(BadData, match="at least one"):
        Affine()
    with pytest.raises(BadData, match="positive"):
        Affine(rotation=-1.0)


def small() -> tuple[Averaged, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()
    return Averaged(model), torch.rand(4, 1, 5, 5).double(), torch.randint(3, (4,))


def network_of(module: nn.Module) -> Network:
    names = tuple(name for name, _ in module.named_parameters())
    return Network(module, Params.of(module, names), lapwing.Categorical().outputs)


def test_with_copies_that_do_not_differ_it_is_the_bound_of_the_network() -> None:
    averaged, x, y = small()
    same = x[:, None].expand(-1, 3, -1, -1, -1)
    network, alone = network_of(averaged), network_of(averaged.module)
    tau = torch.full((network.params.size,), 0.7).double()
    with network.borrow():
        plan = network.plan(same)
    value = invariant_bound(network, plan, same, y, lapwing.Categorical(), tau, 40)
    batch = next(iter(Batches((x, y), averaged.module, torch.device("cpu"))))
    with alone.borrow():
        plain = alone.plan(x)
    expected = batch_bound(
        alone, plain, batch, lapwing.Categorical(), lapwing.GGN(), center=0 * tau, precision=tau, n_data=40
    )
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)


def test_the_gradient_in_the_ranges_is_the_finite_difference() -> None:
    averaged, x, y = small()
    augment = Affine(rotation=20.0, translation=0.1, scale=0.1, shear=0.1).double()
    network = network_of(averaged)
    noise = torch.rand(4, 2, 6, generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    with network.borrow(), torch.no_grad():
        many = augment(x, 2)
    with network.borrow():
        plan = network.plan(many)

    def bound(raw: Tensor) -> Tensor:
        amounts = noise * nn.functional.softplus(raw)
        copies = augment.transform(x.repeat_interleave(2, 0), amounts.flatten(0, 1)).unflatten(0, (4, 2))
        tau = torch.full((network.params.size,), 0.7).double()
        return invariant_bound(network, plan, copies, y, lapwing.Categorical(), tau, 40)

    raw = augment.raw.detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(bound(raw), raw)
    for k in range(6):
        step = torch.zeros(6).double()
        step[k] = 1e-6
        difference = (bound(raw + step) - bound(raw - step)).item() / 2e-6
        assert slope[k].item() == pytest.approx(difference, rel=1e-4, abs=1e-5)


def bars(n: int, turned: bool) -> tuple[Tensor, Tensor]:
    """Short or long bars under any angle, or level and upright bars."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (n,), generator=generator)
    x = torch.zeros(n, 1, 9, 9)
    x[:, :, 4, 2:7] = 1.0
    if not turned:
        return torch.where(y[:, None, None, None] == 0, x, x.mT), y
    x[y == 0, :, 4, 2] = x[y == 0, :, 4, 6] = 0.0
    angle = (torch.rand(n, 1, generator=generator) * 2 - 1) * math.pi / 2
    with torch.no_grad():
        return Affine(rotation=1.0).transform(x, angle), y


def test_it_learns_a_wide_range_where_angles_do_not_matter_and_a_small_one_where_they_do() -> None:
    found = {}
    for turned in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(81, 12), nn.Tanh(), nn.Linear(12, 2))
        before = model[1].weight.detach().clone()
        learned = lapwing.learn_invariances(
            model, bars(60, turned), "classification", Affine(rotation=20.0), epochs=40, lr=1e-2, range_lr=0.1,
            copies=4, batch_size=30, evidence_batch=30,
        )  # fmt: skip
        assert not torch.equal(model[1].weight, before)
        assert len(learned.history) == 40
        found[turned] = learned.augmentation.ranges["rotation"]
        assert learned.predict(bars(10, turned)[0]).shape == (10, 2)
    assert found[True] > 60
    assert found[False] < 45


def test_data_that_are_no_images_are_refused() -> None:
    x, y = torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
    with pytest.raises(lapwing.BadData, match=r"got \(6, 8\), \(6,\)"):
        lapwing.learn_invariances(nn.Linear(8, 2), (x, y), "classification", lapwing.Affine(rotation=5.0), epochs=1)
