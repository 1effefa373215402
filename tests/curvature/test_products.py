"""Products with Jacobians on every path, against Jacobians; elementary attention against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.model import Batches, Network, Params
from lapwing.model.forward import Recording, Tangents, Values, forward_mode
from lapwing.model.kernels import attention
from lapwing.model.products import Products


class Causal(nn.Module):
    """Fused attention, which has no forward-mode derivative, and a weight that the outputs do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head, self.idle = nn.Linear(4, 12), nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


class Recurrent(nn.Module):
    """Recurrent layers have several kernels, not all of which differentiate forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def dense(model: nn.Module, x: Tensor) -> Tensor:
    """J, (n·c, P), row by row."""
    rows = []
    for out in model(x).flatten():
        found = torch.autograd.grad(out, list(model.parameters()), retain_graph=True, allow_unused=True)
        rows.append(torch.cat([torch.zeros(p.numel()).to(p) if g is None else g.flatten()
                               for g, p in zip(found, model.parameters())]))  # fmt: skip
    return torch.stack(rows)


@pytest.mark.parametrize(
    "make",
    [Causal, Recurrent, lambda: nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.Flatten(), nn.Linear(15, 3))],
)
@pytest.mark.parametrize("s", [1, 3])
def test_products_in_blocks_and_alone(make: type[nn.Module], s: int) -> None:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    truth = dense(model, x)
    network = Network(model, Params.of(model, tuple(n for n, _ in model.named_parameters())), lambda raw: raw)
    products = Products(network, Batches([(x[:2], x[:2, 0, 0]), (x[2:], x[2:, 0, 0])], model, torch.device("cpu")))
    v = torch.randn(s, truth.shape[1], dtype=torch.float64)
    middle = lambda batch, f, u: 2 * u  # noqa: E731
    for _ in range(2):  # the first product learns which kernels the network needs
        torch.testing.assert_close(products.ggn(v, middle), 2 * v @ truth.T @ truth)
    out = torch.cat([inside for _, _, inside in products.jacobian(v)], 1)
    torch.testing.assert_close(out.flatten(1), v @ truth.T)
    torch.testing.assert_close(network.jvp(x, v)[1].flatten(1), v @ truth.T)
    assert all(p.grad is None for p in model.parameters())


def test_a_fused_recurrent_layer_in_float32() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(5, 3, 4)
    truth = dense(model.double(), x.double())
    network = Network(model.float(), Params.of(model, tuple(n for n, _ in model.named_parameters())), lambda raw: raw)
    products = Products(network, Batches([(x, x[:, 0, 0])], model, torch.device("cpu")))
    v = torch.randn(1, truth.shape[1])
    for _ in range(2):
        found = products.ggn(v.double(), lambda batch, f, u: u)
        torch.testing.assert_close(found, v.double() @ truth.T @ truth, rtol=1e-4, atol=1e-5)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()},
    "float": {"attn_mask": torch.tensor([[0.0, 1.0, -torch.inf, 2.0]] * 3, dtype=torch.float64)},
    "scale": {"scale": 0.3},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("mask", MASKS)
def test_elementary_attention_is_attention(mask: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    heads = 2 if mask == "grouped" else 4
    k, v = torch.randn(2, 2, heads, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(
        attention(q, k, v, **MASKS[mask]), F.scaled_dot_product_attention(q, k, v, **MASKS[mask])
    )


class Attending(nn.Module):
    """Attention whose mask, scale and groups vary."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask, self.grouped = mask, mask == "grouped"
        self.q, self.kv, self.head = nn.Linear(6, 24), nn.Linear(6, 24 if self.grouped else 48), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x[:, :3]).unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = (part.unflatten(-1, (-1, 6)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v, **MASKS[self.mask]).transpose(1, 2).flatten(2).mean(1))


class Named(nn.Module):
    """Heavy operations called with names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 2, 1)), nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv1d(input=x, weight=self.weight, bias=self.bias, stride=1)
        h = F.batch_norm(h, running_mean=torch.ones(3).to(h), running_var=2 * torch.ones(3).to(h), weight=self.scale)
        return F.linear(input=F.silu(input=h).mean(-1), weight=self.weight[..., 0].T)


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(2))


HEAVY = {
    **{f"attention {mask}": (lambda mask=mask: Attending(mask), (2, 4, 6)) for mask in MASKS},
    "conv1d": (lambda: net(nn.Conv1d(2, 3, 3, padding="same"), nn.SiLU(), nn.Conv1d(3, 2, 2, bias=False)), (2, 2, 5)),
    "conv2d": (lambda: net(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(True), nn.Conv2d(4, 4, 1, groups=2)), (2, 2, 5, 5)),
    "named": (Named, (2, 2, 5)),
    "conv3d": (lambda: net(nn.Conv3d(1, 2, 2), nn.Tanh()), (2, 1, 3, 3, 3)),
    "norm": (lambda: net(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1)), (2, 2, 4, 4)),
    "norm of inputs": (lambda: net(nn.BatchNorm1d(2), nn.Linear(4, 3), nn.SiLU(inplace=True)), (3, 2, 4)),
    "norm without weights": (lambda: net(nn.Linear(4, 3), nn.BatchNorm1d(2, affine=False), nn.Tanh()), (3, 2, 4)),
    "norm of a batch": (lambda: net(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2, track_running_stats=False)), (3, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("select", ["all", "weight", "bias"])
@pytest.mark.parametrize("name", HEAVY)
def test_forward_mode_by_hand(name: str, select: str) -> None:
    torch.manual_seed(0)
    make, shape = HEAVY[name]
    x = torch.randn(shape, dtype=torch.float64)
    model = make().double()
    model.train()(x)
    model.eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    names = tuple(n for n, _ in model.named_parameters() if select == "all" or n.endswith(select))
    network = Network(model, Params.of(model, names), lambda raw: raw)
    chosen = torch.cat([torch.full((p.numel(),), n in names) for n, p in model.named_parameters()])
    truth = dense(model, x)[:, chosen]
    products = Products(network, Batches([(x, x.flatten(1)[:, 0])], model, torch.device("cpu")), _slow={"vmap": True})
    v = torch.randn(2, truth.shape[1], dtype=torch.float64)
    torch.testing.assert_close(products.ggn(v, lambda batch, f, u: u), v @ truth.T @ truth)
    torch.testing.assert_close(network.jvp(x, v)[1].flatten(1), v @ truth.T)


def test_values_of_other_calls_and_overwritten_ones_are_not_taken() -> None:
    torch.manual_seed(0)
    layer, x, v = nn.Linear(3, 3), torch.randn(2, 3), torch.randn(3, 3)
    values = Values()
    with Recording(values), torch.no_grad():
        layer(x).relu_()
        layer(x)
    with torch.autograd.forward_ad.dual_level(), Tangents(values), torch.no_grad(), forward_mode():
        weight = torch.autograd.forward_ad.make_dual(layer.weight.detach(), v)
        for inputs in (x, x, x[:1]):
            found = torch.autograd.forward_ad.unpack_dual(F.linear(inputs, weight, layer.bias))
            torch.testing.assert_close(found.primal, inputs @ layer.weight.T + layer.bias)
            torch.testing.assert_close(found.tangent, inputs @ v.T)
