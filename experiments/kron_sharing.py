"""Which weight sharing is closer to the exact block: `Kron(sharing="expand")` or `"reduce"`? The default follows this.

    python -m experiments.kron_sharing

prints, layer by layer, the cosine between Kronecker approximation and exact GGN block (1 is perfect), the ratio of
traces, and the share of the block's squared norm that EKFAC keeps with the eigenbasis of either.
"""

import torch
from experiments._arguments import Experiment
from torch import nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "", "minutes": None}


def compare(name: str, model: nn.Module, data: list, parameters: list[str]) -> None:
    for parameter in parameters:
        exact = lapwing.fit(model, data, "classification", structure="blockdiag", select=[parameter]).curvature.dense()
        row = []
        for sharing in ("expand", "reduce"):
            kron = lapwing.fit(model, data, "classification", structure=lapwing.Kron(sharing), select=[parameter])
            ekfac = lapwing.fit(
                model, data, "classification", structure=lapwing.EKFAC(sharing=sharing), select=[parameter]
            )
            approximate, moments = kron.curvature.dense(), ekfac.curvature.dense()
            cosine = (exact * approximate).sum() / (exact.norm() * approximate.norm())
            row += [cosine, approximate.trace() / exact.trace(), (moments.norm() / exact.norm()) ** 2]
        print(f"{name:12s} {parameter:28s}" + "".join(f"{float(v):9.3f}" for v in row))


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


def main() -> None:
    parser = Experiment(__doc__, smoke={"steps": 2, "batch": 16, "only": ["GRU"]})
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--batch", type=int, default=128, help="digits that blocks are compared on")
    names = ["CNN", "pooled", "GRU", "per token"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    given = parser.parse_args()
    torch.manual_seed(0)
    head = f"{'':12s} {'':28s}" + "".join(f"{h:>9s}" for h in ("cosine", "trace", "ekfac") * 2)
    print(f"{'':41s}{'expand':>27s}{'reduce':>27s}\n{head}")
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
    for name in given.only:
        make, data, parameters = each[name]
        compare(name, train(make(), x, y, given.steps), data, parameters)


if __name__ == "__main__":
    main()
