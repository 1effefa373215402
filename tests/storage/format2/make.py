"""Write the files of this folder with a version of Lapwing that writes format 2 (any before November 2026).

PYTHONPATH=<old checkout>/src python tests/storage/format2/make.py
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing
from lapwing.curvature import resume

HERE = Path(__file__).parent
STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank", "functional", "nystrom", "valla", "matrixfree")


def model() -> nn.Module:
    """A network whose weights are numbers that need no random generator."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(torch.arange(1.0 + k, p.numel() + 1 + k).sin().reshape(p.shape) * 0.7)
    return net


def data() -> tuple[Tensor, Tensor]:
    x = (1.3 * torch.arange(36.0)).sin().reshape(12, 3).double()
    return x, (torch.arange(12) * 5 // 3) % 2


def numbers(la: Any) -> dict[str, Any]:
    x, _ = data()
    predicted = la.predict(x[:3]).function
    return {
        "log_evidence": float(la.log_evidence()),
        "mean": predicted.mean.tolist(),
        "variance": predicted.variance.tolist(),
        "precision": la.posterior.precision.diagonal().tolist(),
    }


def posteriors() -> Iterator[tuple[str, Any]]:
    """Names and Laplace objects, one per structure and a few other kinds of contents."""
    x, y = data()
    for name in STRUCTURES:
        structure = lapwing.LowRank(rank=5) if name == "lowrank" else name
        yield name, lapwing.fit(model(), (x, y), "classification", structure=structure, prior=2.0, progress=False)
    full = lapwing.fit(model(), (x, y), "classification", structure="full", progress=False)
    chained = lapwing.Prior.from_posterior(full.posterior)
    yield "chained", lapwing.fit(model(), (x, y), "classification", structure="full", prior=chained, progress=False)
    by_layer = {"0.*": 1.0, "*": torch.tensor(2.0)}
    options = {"prior": by_layer, "temperature": lapwing.Tempered(0.5, prior=True), "progress": False}
    few = lapwing.subnetwork(5, by="magnitude")
    yield "subnetwork", lapwing.fit(model(), (x, y), "classification", select=few, **options)
    basis = lapwing.EKFAC(basis=lapwing.GGN(tolerance=0.0), sharing="expand")
    yield "regression", lapwing.fit(model(), (x, x[:, :2]), lapwing.Gaussian([0.5, 0.25]), structure=basis, **options)


def train(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lapwing.train(model(), data(), "classification", epochs=2, checkpoint=folder, progress=False)


def interrupted(folder: Path) -> None:
    """Leave the journal of a fit behind that was stopped after ten of twelve batches."""
    resume.SECONDS, resume.EVERY = 0.0, 2
    x, y = data()

    class Breaks:
        def __iter__(self) -> Iterator[Any]:
            yield from zip(x.split(1)[:10], y.split(1)[:10], strict=True)
            raise OSError("interrupted")

    try:
        lapwing.fit(model(), Breaks(), "classification", structure="kron", checkpoint=folder, progress=False)
    except OSError:
        pass


if __name__ == "__main__":
    expected = {}
    for name, la in posteriors():
        la.save(HERE / f"{name}.lapwing")
        expected[name] = numbers(la)
    (HERE / "numbers.json").write_text(json.dumps(expected, indent=1))
    train(HERE / "training")
    interrupted(HERE / "fit")
