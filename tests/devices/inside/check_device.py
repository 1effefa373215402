"""The test device itself: it notices planted mistakes, and computes what the CPU computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from lapwing.model.forward import forward_mode
from tests.devices.elsewhere import counting, device

HERE = device()


def there(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HERE)


def product(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """J v by forward-mode derivatives."""
    with forward_mode(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent
    assert tangent is not None
    return tangent


MIXED: dict[str, Callable[[Tensor], object]] = {
    "a tensor without device=": lambda t: t + torch.ones(3),
    "torch.tensor of numbers": lambda t: t * torch.tensor([1.0, 2.0, 3.0]),
    "a range as an index of index_select": lambda t: t.index_select(0, torch.arange(2)),
    "a CPU index of gather": lambda t: t.gather(0, torch.zeros(1, 3, dtype=torch.long)),
    "an index that is elsewhere for a CPU tensor": lambda t: torch.ones(3)[(t > 0).long()],
    "a mask that is elsewhere for a CPU tensor": lambda t: torch.ones(3, 3)[t > 0],
    "a matrix product": lambda t: t @ torch.eye(3),
    "a linear layer on the CPU": lambda t: F.linear(t, torch.ones(2, 3)),
    "a convolution on the CPU": lambda t: F.conv1d(t[None], torch.ones(2, 3, 1)),
    "cat": lambda t: torch.cat([t, torch.ones(3, 3)]),
    "a CPU scalar in a stack": lambda t: torch.stack([t.sum(), torch.zeros(())]),
    "out of place into the CPU": lambda t: torch.ones(3, 3).add_(t),
    "a sum into a CPU scalar": lambda t: torch.zeros(()).add_(t.sum()),
    "where": lambda t: torch.where(t > 0, t, torch.ones(3, 3)),
    "solve": lambda t: torch.linalg.solve(t, torch.ones(3, 1)),
    "from_numpy": lambda t: t + torch.from_numpy(torch.ones(3).numpy()),
    "numpy": lambda t: t.numpy(),
    "a CPU generator": lambda t: torch.randn(3, device=t.device, generator=torch.Generator()),
    "a CPU generator in multinomial": lambda t: torch.multinomial(t.exp(), 1, generator=torch.Generator()),
    "a generator of elsewhere on the CPU": lambda t: torch.randn(3, generator=torch.Generator(t.device)),
}


@pytest.mark.parametrize("name", MIXED)
def test_mistakes_are_noticed(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError, IndexError), match=r"device|elsewhere|generator"):
        MIXED[name](there(3, 3))


def test_mistakes_are_noticed_under_transforms() -> None:
    t, wrong = there(3, 3), torch.ones(3)
    for attempt in (
        lambda: product(lambda x: x * wrong, t, t),
        lambda: product(lambda x: x * t, t, torch.ones(3, 3)),
        lambda: torch.func.vmap(lambda x: x * wrong)(t),
        lambda: torch.func.jacrev(lambda x: x * wrong)(t),
        lambda: torch.autograd.grad((t.requires_grad_() * 2).sum(0), t, torch.ones(3)),
    ):
        with pytest.raises(RuntimeError, match=r"device|elsewhere"):
            attempt()


def test_what_a_gpu_allows_is_allowed() -> None:
    t = there(3, 3)
    assert (t * torch.tensor(2.0)).device == t.device  # a CPU scalar
    assert t[torch.tensor([0, 2])].shape == (2, 3)  # a CPU index
    t[torch.tensor([0])] = torch.tensor(1.0)
    assert torch.zeros(3, 3).copy_(t).device.type == "cpu"
    assert torch.equal(t.masked_fill(t > 0, torch.tensor(0.0)), torch.where(t > 0, 0.0, t))


@pytest.mark.parametrize("kind", ["mlp", "conv", "lstm", "gru", "attention"])
def test_networks_compute_as_on_the_cpu(kind: str) -> None:
    torch.manual_seed(0)
    model, x = {
        "mlp": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(3, 4)),
        "conv": lambda: (
            nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.MaxPool2d(2)),
            torch.randn(3, 2, 6, 6),
        ),
        "lstm": lambda: (nn.LSTM(4, 3, batch_first=True, bidirectional=True), torch.randn(2, 5, 4)),
        "gru": lambda: (nn.GRU(4, 3, num_layers=2, batch_first=True), torch.randn(2, 5, 4)),
        "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
    }[kind]()
    model.eval().double()

    def gradients(x: Tensor) -> list[Tensor]:
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        return [g.cpu() for g in torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    expected = gradients(x.double())
    model.to(HERE)
    torch.testing.assert_close(gradients(x.double().to(HERE)), expected)


def test_transforms_compute_as_on_the_cpu() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.GELU(), nn.Flatten(), nn.Linear(6, 2)).double()
    x = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0)).double()

    def results(x: Tensor) -> list[Tensor]:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        rows = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)))(weights)
        return [*(r.cpu() for r in rows.values()), product(model, x, torch.ones_like(x)).cpu()]

    expected = results(x)
    model.to(HERE)
    torch.testing.assert_close(results(x.to(HERE)), expected)


def test_views_share_memory_and_gradients() -> None:
    t = there(3, 4)
    before = t.cpu()
    t.view(-1)[2:5].add_(1)
    t.T.unfold(0, 2, 1)[0].mul_(2)
    expected = before.clone()
    expected.view(-1)[2:5].add_(1)
    expected.T.unfold(0, 2, 1)[0].mul_(2)
    torch.testing.assert_close(t.cpu(), expected)
    leaf = t.clone().requires_grad_()
    row = (leaf * 1)[1].view(2, 2).mul_(3)
    row.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.sum().item() == 12


def test_generators_draw_what_the_cpu_draws() -> None:
    draw = lambda where: torch.randn(5, device=where, generator=torch.Generator(where).manual_seed(3)).cpu()  # noqa: E731
    torch.testing.assert_close(draw(HERE), draw(torch.device("cpu")))


def test_seeds_and_states_of_the_device() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    with torch.random.fork_rng(devices=[HERE], device_type=HERE.type):
        first = torch.randn(3, device=HERE)
    torch.testing.assert_close(torch.randn(3, device=HERE), first)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_waits_and_copies_are_counted() -> None:
    t = there(3, 3)
    with counting() as found:
        _ = (t * 2).sum().exp().softmax(0)
    assert found == {}
    with counting() as found:
        _ = float(t.sum()), bool((t > 0).all()), t.sum().item(), t.tolist(), t.cpu()
    assert found == {"aten::_local_scalar_dense": 3, "download": 2}
    with counting() as found:
        _ = t[t > 0], t + torch.ones(3).to(t.device), t[torch.tensor([0])]
    assert found == {"aten::nonzero": 1, "aten::index (mask)": 1, "upload": 2}
