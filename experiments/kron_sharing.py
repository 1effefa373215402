"""Which weight sharing is closer to the exact block: `Kron(sharing="expand")` or `"reduce"`? The default follows this.

    python -m experiments.kron_sharing [--seeds 3] [--out DIR]

prints, layer by layer, the cosine between Kronecker approximation and exact GGN block (1 is perfect), the ratio of
traces, and the share of the block's squared norm that EKFAC keeps with the eigenbasis of either.
"""

import argparse

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._study import study
from torch import nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "", "minutes": 0.9, "quick": 0.4}


SHARINGS = ("expand", "reduce")
POOLED = ("CNN", "pooled", "GRU")  # networks with one output per digit


def compare(model: nn.Module, data: list, parameter: str) -> dict[str, float]:
    """Cosine, ratio of traces and what EKFAC keeps, by sharing, for one layer."""
    exact = lapwing.fit(model, data, "classification", structure="blockdiag", select=[parameter]).curvature.dense()
    row = {}
    for sharing in SHARINGS:
        kron, ekfac = (
            lapwing.fit(model, data, "classification", structure=each, select=[parameter]).curvature.dense()
            for each in (lapwing.Kron(sharing), lapwing.EKFAC(sharing=sharing))
        )
        row[f"cosine, {sharing}"] = float((exact * kron).sum() / (exact.norm() * kron.norm()))
        row[f"trace, {sharing}"] = float(kron.trace() / exact.trace())
        row[f"EKFAC keeps, {sharing}"] = float((ekfac.norm() / exact.norm()) ** 2)
    return row


class Encoder(nn.Module):
    """One transformer layer over the 8 rows of a digit; pooled, or one output a row."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.embed, self.pooled = nn.Linear(8, 16), pooled
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.embed(x[:, 0]))
        return self.head(h.mean(1) if self.pooled else h)


class Recurrent(nn.Module):
    """A GRU over the rows of a digit, its last state classified."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x[:, 0])[0][:, -1])


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        rows = torch.arange(128) + 128 * (step % (len(x) // 128))
        optimizer.zero_grad()
        out = model(x[rows])
        target = y[rows] if out.ndim == 2 else y[rows, None].expand(-1, out.shape[1])
        F.cross_entropy(out.flatten(0, -2), target.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


def run(seed: int, given: argparse.Namespace) -> Scores:
    """A row per network and layer."""
    torch.manual_seed(seed)
    digits = datasets.digits()
    x, y = digits.inputs, digits.targets
    batch = [(x[: given.batch], y[: given.batch])]
    layers = ["embed.weight", "layer.self_attn.in_proj_weight", "layer.linear1.weight", "layer.linear2.weight"]
    tokens = [(x[: given.batch // 2], y[: given.batch // 2, None].expand(-1, 8))]
    each = {
        "CNN": (networks.small_cnn, batch, ["0.weight", "3.weight"]),
        "pooled": (lambda: Encoder(pooled=True), batch, layers),
        "GRU": (Recurrent, batch, ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]),
        "per token": (lambda: Encoder(pooled=False), tokens, layers),
    }
    rows = {}
    for name in given.only:
        make, data, parameters = each[name]
        model = train(make(), x, y, given.steps)
        rows |= {f"{name}: {parameter}": compare(model, data, parameter) for parameter in parameters}
    return rows


def judge(mean: Scores) -> list[Claim]:
    found = {}
    for name in dict.fromkeys(row.partition(":")[0] for row in mean):
        rows = [cells for row, cells in mean.items() if row.startswith(f"{name}:")]
        found[name] = [sum(cells[f"cosine, {sharing}"] for cells in rows) / len(rows) for sharing in SHARINGS]
    return [
        answered(
            "Should sharing be reduced where a network pools, and expanded where it has an output per token?",
            "Mean cosine with the exact blocks, expanded and reduced: "
            + "; ".join(f"{name} {expand:.3f}, {reduce:.3f}" for name, (expand, reduce) in found.items())
            + ".",
            "the mean cosine over layers is larger when reduced for each network with one output per digit (CNN, "
            "pooled encoder, GRU), and larger when expanded for the encoder with one output per token.",
            *((reduce > expand) == (name in POOLED) for name, (expand, reduce) in found.items()),
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"steps": 2, "batch": 16, "only": ["GRU"]}, quick={"steps": 150, "batch": 64}, seeds=3
    )
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--batch", type=int, default=128, help="digits that blocks are compared on")
    names = [*POOLED, "per token"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    study("kron_sharing", ABOUT, "Weight sharing: expand or reduce", run, judge, parser.parse_args())
