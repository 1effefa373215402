"""Networks whose samples depend on each other only in larger batches, and batches that are one graph."""

import pytest
import torch
from torch import nn

import lapwing

from ..zoo.cases import assert_same


class Ghost(nn.Module):
    """Statistics of the batch, where there are eight samples or more."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x):
        z = self.body(x)
        return self.head(torch.tanh(z - z.mean(0) if len(z) >= 8 else z))


class Capacity(nn.Module):
    """Routing in which an expert takes at most so many samples of a batch."""

    def __init__(self, most=4):
        super().__init__()
        self.gate, self.head, self.most = nn.Linear(2, 2), nn.Linear(2, 3), most
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x):
        p, out = self.gate(x).softmax(-1), x.clone()
        for k, expert in enumerate(self.experts):
            rows = (p.argmax(-1) == k).nonzero().flatten()[: self.most]
            out = out.index_add(0, rows, expert(x[rows]) * p[rows, k : k + 1])
        return self.head(torch.tanh(out))


def data(n=32):
    torch.manual_seed(0)
    return torch.randn(n, 2).double(), torch.randint(3, (n,))


@pytest.mark.parametrize("model", [Ghost, Capacity])
@pytest.mark.parametrize("structure", ["diag", "kron", "matrixfree", "functional"])
def test_refused_by_the_fit(model, structure):
    x, y = data()
    with pytest.raises(lapwing.UnsupportedModel, match="other samples of its batch: in a batch of"):
        lapwing.fit(model().double(), [(x, y)], "classification", structure=structure)


@pytest.mark.parametrize("model", [Ghost, Capacity])
def test_refused_in_a_later_batch(model):
    x, y = data()
    with pytest.raises(lapwing.UnsupportedModel, match="in a batch of 28"):
        lapwing.fit(model().double(), [(x[:4], y[:4]), (x[4:], y[4:])], "classification", structure="diag")


@pytest.mark.parametrize("model", [Ghost, Capacity])
def test_refused_in_predictions(model):
    x, y = data()
    small = list(zip(x.split(4), y.split(4), strict=True))
    la = lapwing.fit(model().double(), small, "classification", structure="diag")
    la.predict(x[:4])
    for predict in (la.predict, lambda x: la.predict(x, method="sampled"), la.ensemble(2).predict):
        with pytest.raises(lapwing.UnsupportedModel, match="in a batch of 32"):
            predict(x)


def test_is_asked_for_larger_batches_only():
    x, y = data()
    model = nn.Linear(2, 3).double()
    la = lapwing.fit(model, (x, y), "classification", structure="diag")
    sizes = []
    la.module.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    la.network.forward(x)
    la.network.forward(x[:20])
    assert sizes == [32, 20]
    la.network.forward(torch.cat([x, x]))
    assert sizes == [32, 20, 64, 4]


class Convolution(nn.Module):
    """Two layers over the nodes of a graph."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x, edges):
        if edges.shape[0] != 2:  # an adjacency matrix
            return edges @ self.head(torch.tanh(edges @ self.body(x)))
        z = self.body(x)
        return self.head(torch.tanh(torch.zeros_like(z).index_add(0, edges[1], z[edges[0]])))


class Graphs(nn.Module):
    """One graph after the other, as the message says."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, edges):
        return torch.stack([self.net(*graph) for graph in zip(x, edges, strict=True)])


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("select", ["all", "last_layer"])
def test_nodes_of_a_graph(dense, select):
    x, y = data(12)
    near = torch.rand(12, 12) < 0.3
    edges = near.double() if dense else near.nonzero().T
    net = Convolution().double()
    with pytest.raises(lapwing.UnsupportedModel, match=r"make it one sample.*torch\.stack"):
        lapwing.fit(net, [((x, edges), y)], "classification", structure="full", select=select)
    one = [((x[None], edges[None]), y[None])]
    la = lapwing.fit(Graphs(net), one, "classification", structure="full")
    weights = list(net.parameters())
    f = net(x, edges)
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(v, weights, retain_graph=True)]) for v in f.flatten()]
    p, j = f.detach().softmax(-1), torch.stack(rows).reshape(12, 3, -1)
    exact = torch.einsum("nop,nor,nrq->pq", j, torch.diag_embed(p) - p[:, :, None] * p[:, None], j)
    assert_same(la.curvature.dense(), exact, 1e-9, "full")
