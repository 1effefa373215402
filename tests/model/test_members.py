"""Networks that run together give what each gives on its own, and those that cannot run together run one by one."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import lapwing
from lapwing.model.network import AT_ONCE, SMALL_BATCH


class Tied(nn.Module):
    """A weight used twice, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.conv(x)).relu_().mean((2, 3)))
        return self.head(self.inner(self.inner(h).tanh()))


class Branching(nn.Module):
    """Decides by a number that it computes from its weights, which has no batched form."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(36, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        h = h.tanh() if float(self.first.weight.detach().abs().sum()) > 0 else h
        return self.head(h)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.rnn, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.encoder(x.squeeze(1)))[0][:, -1])


def fitted(
    kind: type[nn.Module], dtype: torch.dtype = torch.float64, **options: object
) -> tuple[nn.Module, Tensor, lapwing.Laplace]:
    torch.manual_seed(0)
    model = kind().to(dtype)
    x, y = torch.randn(48, 1, 6, 6, dtype=dtype), torch.randint(3, (48,))
    model.train()
    model(x)  # statistics of its own
    model.eval()
    return model, x, lapwing.fit(model, (x, y), "classification", structure="diag", prior=10.0, **options)


def one_by_one(model: nn.Module, ensemble: object, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack([functional_call(model, weights, (x,)) for weights in ensemble])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "together"), [(Tied, True), (Branching, False), (Recurrent, None)])
@pytest.mark.parametrize("items", [1, 5, SMALL_BATCH, SMALL_BATCH + 1])
def test_members_give_what_each_gives_on_its_own(kind: type[nn.Module], together: bool | None, items: int) -> None:
    model, x, la = fitted(kind)
    ensemble = la.ensemble(7)
    found = ensemble.predict(x[:items])
    expected = one_by_one(model, ensemble, x[:items])
    torch.testing.assert_close(found.function.samples, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.probs, expected.softmax(-1).mean(0))
    if items > SMALL_BATCH:
        assert "together" not in la.network._trusted  # a large batch runs one by one
    elif together is not None:
        assert la.network._trusted["together"] is together


def test_members_run_a_few_at_a_time() -> None:
    model, x, la = fitted(Tied)
    ensemble = la.ensemble(AT_ONCE // 16 + 3)
    torch.testing.assert_close(ensemble.predict(x[:16]).function.samples, one_by_one(model, ensemble, x[:16]))


def test_sampled_predictions_use_the_same_code() -> None:
    model, x, la = fitted(Tied)
    weights = la.posterior.sample(9, torch.Generator().manual_seed(3))
    found = la.predict(x[:4], method="sampled", samples=9, generator=torch.Generator().manual_seed(3))
    expected = one_by_one(model, [la.params.unflatten(theta) for theta in weights], x[:4])
    torch.testing.assert_close(found.function.samples, expected)
    assert la.network._trusted["together"]


def test_part_of_the_weights_and_float32() -> None:
    for select in ("head.*", lapwing.subnetwork(9, by="magnitude")):
        model, x, la = fitted(Tied, torch.float32, select=select)
        ensemble = la.ensemble(6)
        torch.testing.assert_close(ensemble.predict(x[:3]).function.samples, one_by_one(model, ensemble, x[:3]))


def test_gradients_reach_the_inputs() -> None:
    model, x, la = fitted(Tied)
    ensemble, a, b = la.ensemble(4), x[:3].clone().requires_grad_(), x[:3].clone().requires_grad_()
    ensemble.predict(a, differentiable=True).probs[:, 0].sum().backward()
    torch.stack([functional_call(model, weights, (b,)) for weights in ensemble]).softmax(-1).mean(0)[
        :, 0
    ].sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert all(p.grad is None for p in model.parameters())
