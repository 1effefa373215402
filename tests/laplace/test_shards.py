"""Two processes with half of the data each get the posterior of all of it."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn

import lapwing

STRUCTURES = {name: {"structure": name} for name in ("diag", "blockdiag", "kron", "ekfac", "full")}
STRUCTURES["kfra"] = {"structure": "kron", "factor": "kfra"}


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, torch.randn(31, 4).double(), torch.randint(3, (31,))


def found(la: lapwing.Laplace) -> list[torch.Tensor]:
    assert la.curvature.gradient is not None
    return [la.curvature.matrix.dense(), la.curvature.gradient, la.log_evidence(), torch.tensor(la.curvature.n_data)]


def work(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    model, x, y = problem()
    part = slice(0, 20) if rank == 0 else slice(20, None)
    for name, choice in STRUCTURES.items():
        la = lapwing.fit(model, list(zip(x[part].split(7), y[part].split(7))), "classification", **choice)
        torch.save(found(la), f"{folder}/{name}-{rank}.pt")
    with pytest.raises(lapwing.UnsupportedOperation, match="processes"):
        lapwing.fit(model, (x, y), "classification", structure="functional")
    distributed.destroy_process_group()


def test_processes_add_up(tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    model, x, y = problem()
    for name, choice in STRUCTURES.items():
        whole = found(lapwing.fit(model, (x, y), "classification", **choice))
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        for a, b, expected in zip(first, second, whole, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, expected, rtol=1e-9, atol=1e-11)


class Ahead(nn.Module):
    """Tokens that predict the next one, by the loss that it returns itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        f = self.head(self.embedding(ids))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(f[:, :-1].mT, labels[:, 1:])}
        return {"logits": f, **loss}


def tokens() -> torch.Tensor:
    return torch.randint(5, (6, 4), generator=torch.Generator().manual_seed(0))


def read(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    ids = tokens()
    labels = ids if rank == 0 else torch.full_like(ids, -100)  # of which no process could tell
    la = lapwing.fit(Ahead().double(), [{"ids": ids, "labels": labels}], "classification", structure="diag")
    torch.save(la.predict({"ids": ids}).log_prob(ids), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_processes_read_labels_the_same_way(tmp_path: Path) -> None:
    multiprocessing.spawn(read, (str(tmp_path),), nprocs=2)
    la = lapwing.fit(Ahead().double(), [{"ids": tokens(), "labels": tokens()}], "classification", structure="diag")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    assert torch.allclose(first, la.predict({"ids": tokens()}).log_prob(tokens()))
    assert bool((first[:, -1] == 0).all())
