"""Samples that wait are those of the same network, and errors say where they come from."""

import pytest
import torch
from torch import nn

import lapwing


class Padded(nn.Module):
    """An encoder whose fast path without a graph gives other numbers at padded positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 30 * self.head(self.encoder(self.embed(ids), src_key_padding_mask=ids == 0).mean(1))


def sentences() -> list:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (48, 6), generator=generator)
    ids[torch.arange(6) >= torch.randint(2, 7, (48, 1), generator=generator)] = (
        0  # the fast path wants padding at the end
    )
    return list(zip(ids.split(8), torch.randint(4, (48,), generator=generator).split(8), strict=True))


def graph(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return model(ids).detach()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("select", ["all", "last_layer"])
def test_no_fast_path_without_a_graph(select: str) -> None:
    model, data = Padded().eval(), sentences()
    with torch.no_grad():
        assert not torch.allclose(model(data[0][0]), graph(model, data[0][0]), rtol=0.1)  # or there is nothing to test
    la = lapwing.fit(model, data, "classification", structure="diag", factor=lapwing.GGN(tolerance=0.2), select=select)
    truth = -sum(nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in data)  # with a graph: slow path
    torch.testing.assert_close(la.log_likelihood, truth.detach().double(), rtol=1e-5, atol=0)
    f = torch.cat([model(x) for x, _ in data]).detach()
    torch.testing.assert_close(torch.cat([la.predict(x).function.mean for x, _ in data]), f, rtol=1e-4, atol=1e-4)
    exact = lapwing.fit(
        model, data, "classification", structure="full", factor=lapwing.GGN(tolerance=0), select="last_layer"
    )
    features = torch.cat([model.encoder(model.embed(x), src_key_padding_mask=x == 0).mean(1) for x, _ in data]).detach()
    p = f.softmax(-1)
    trace = 900 * ((1 - p.square().sum(-1)) * (features.square().sum(-1) + 1)).sum()
    torch.testing.assert_close(exact.curvature.matrix.diagonal().sum(), trace, rtol=1e-4, atol=0)
    assert torch.backends.mha.get_fastpath_enabled()


class Root(nn.Module):
    """No derivative where its input is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 20 * self.outer((self.inner(x) * (x[:, :1] != 0)).abs().sqrt())


def test_an_error_of_a_sample_that_waited_names_its_batch() -> None:
    torch.manual_seed(0)
    x, y = 5 * torch.randn(40, 3), torch.randint(5, (40,))
    x[25, 0] = 0.0
    data = list(zip(x.split(8), y.split(8), strict=True))
    with pytest.raises(lapwing.BadData, match=r"batch .*\b3\b"):
        lapwing.fit(Root(), data, "classification", structure="diag", factor=lapwing.GGN(tolerance=0.1))
