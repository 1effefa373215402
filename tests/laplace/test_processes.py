"""Two processes that differ, fail or have no data: both end with the right posterior, or both with an error."""

import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn

import lapwing
from lapwing.curvature import resume

SECONDS = 240  # for all cases together; an exchange that hangs ends after a quarter of that


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Exit(nn.Module):
    """Takes another exit where the first input is far below zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4).double(), nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) if bool((x[:, 0] > -100).all()) else self.c(x)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(30, 4, generator=generator).double(), torch.randint(0, 3, (30,), generator=generator)


def far(rows: slice) -> Tensor:
    """Inputs some of which take the other exit."""
    x = data()[0].clone()
    x[rows, 0] = -200.0
    return x


def shard(x: Tensor, y: Tensor, rank: int, size: int = 5) -> list[tuple[Tensor, Tensor]]:
    """The first or the second half."""
    own = slice(0, 15) if rank == 0 else slice(15, None)
    return list(zip(x[own].split(size), y[own].split(size)))


def ggn(model: nn.Module, x: Tensor) -> Tensor:
    """Σ Jᵀ(diag p − ppᵀ)J by one gradient per sample and output."""
    params, total = list(model.parameters()), 0
    for row in x:
        f = model(row[None])[0]
        grads = [torch.autograd.grad(out, params, retain_graph=True, allow_unused=True) for out in f]
        each = [[torch.zeros_like(p) if g is None else g for p, g in zip(params, own)] for own in grads]
        jacobian = torch.stack([torch.cat([g.reshape(-1) for g in own]) for own in each])
        p = f.detach().softmax(-1)
        total = total + jacobian.T @ (p.diag() - p[:, None] * p) @ jacobian
    return total


def fit(model: nn.Module, batches: Any, likelihood: Any = "classification", **options: Any) -> lapwing.Laplace:
    return lapwing.fit(model, batches, likelihood, **{"structure": "full", "progress": False} | options)


# --- cases: each is called on both processes and returns what it found, or raises --------------------------------


def differing(**options: tuple[Any, Any]) -> Callable[[int], Any]:
    """A fit in which the processes are given different options."""
    return lambda rank: fit(mlp(), shard(*data(), rank), **{name: both[rank] for name, both in options.items()})


class Breaks:
    """Data whose second batch cannot be read on process 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(shard(*data(), self.rank)):
            if self.rank == 1 and number == 1:
                raise OSError("the disk is gone")
            yield batch


class Killed(Breaks):
    """Data that end process 1 at once."""

    def __iter__(self) -> Iterator[Any]:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from shard(*data(), self.rank)


def broken(rank: int) -> Any:
    return fit(mlp(), Breaks(rank))


def not_finite(rank: int) -> Any:
    x, y = data()
    x[22, 1] = torch.nan
    return fit(mlp(), shard(x, y, rank))


def other_weights(rank: int) -> Any:
    return fit(mlp(rank), shard(*data(), rank))


def exits(rows: slice, **options: Any) -> Callable[[int], Any]:
    return lambda rank: fit(Exit(), shard(far(rows), data()[1], rank), **options).curvature.matrix.dense()


def nothing_on_one(empty: Callable[[], Any], **options: Any) -> Callable[[int], Any]:
    x, y = data()
    return lambda rank: fit(mlp(), (x, y) if rank == 0 else empty(), **options).curvature.dense()


def one_shot(rank: int) -> Any:
    return fit(mlp(), iter(shard(*data(), rank))).curvature.dense()


def updated(rank: int) -> Any:
    x, y = data()
    half = fit(mlp(), shard(x[:10], y[:10], 0) if rank == 0 else [])
    return half.update(list(zip(x[10:].chunk(2)[rank].split(4), y[10:].chunk(2)[rank].split(4)))).curvature.dense()


def other_noise(rank: int) -> Any:
    x, _ = data()
    return fit(mlp(), [(x, x[:, :3])], lapwing.Gaussian(1.0 + rank))


def estimated_noise(rank: int) -> Any:
    x, _ = data()
    return fit(mlp(), shard(x, x[:, :3] * torch.tensor([1.0, 2.0, 5.0]), rank), "regression").likelihood.noise


def residuals() -> Tensor:
    x, _ = data()
    with torch.no_grad():
        return (mlp()(x) - x[:, :3] * torch.tensor([1.0, 2.0, 5.0])).square().mean(0).sqrt()


def tuned_without_data(rank: int) -> Any:
    return fit(mlp(), shard(*data(), rank), n_data=1000).tune(learn="prior").prior.precision


def tuned(rank: int) -> Any:
    return fit(mlp(), shard(*data(), rank)).tune(data())


def evaluated(rank: int) -> Any:
    return lapwing.evaluate({"Laplace": fit(mlp(), shard(*data(), rank))}, data())


def trained(rank: int) -> Any:
    return lapwing.train(mlp(), data(), "classification", epochs=1)


def moved(rank: int) -> Any:
    return fit(mlp(), shard(*data(), rank)).linear_mode(data())


def stepped(rank: int) -> Any:
    return lapwing.Online("classification", 30).step(mlp(), data())


def resumed(rank: int) -> Any:
    """The second fit goes on from what the first one left behind when it broke off, in the same folder."""
    folder = Path(os.environ["LAPWING_TEST_FOLDER"], "checkpoint")
    x, y = data()
    own = [(a, b) for a, b in zip(x.split(1), y.split(1))][rank::2]
    resume.SECONDS, resume.EVERY = 0.0, 2

    def until_it_breaks() -> Iterator[Any]:
        yield from own[:9]
        raise OSError("interrupted")

    with pytest.raises((OSError, lapwing.LapwingError)):
        fit(mlp(), type("Data", (), {"__iter__": lambda self: until_it_breaks()})(), checkpoint=folder)
    left = sorted(path.name for path in folder.glob("*.safetensors"))
    assert left == ["fit-0-of-2.safetensors", "fit-1-of-2.safetensors"]
    found = fit(mlp(), own, checkpoint=folder).curvature.dense()
    resume.SECONDS, resume.EVERY = 20.0, 16
    return found


REFUSED = {
    "weights": (other_weights, "differ in model"),
    "noise": (other_noise, "differ in likelihood"),
    "structure": (differing(structure=("diag", "full")), "differ in structure"),
    "factor": (differing(factor=("ggn", "empirical")), "differ in factor"),
    "tolerance": (differing(factor=("ggn", lapwing.GGN(tolerance=0.5))), "differ in factor"),
    "select": (differing(select=("all", "last_layer")), "differ in select"),
    "random select": (
        lambda rank: fit(
            mlp(),
            shard(*data(), rank),
            select=lapwing.subnetwork(5, by="random"),
            generator=torch.Generator().manual_seed(rank),
        ),
        "differ in select",
    ),
    "prior": (differing(prior=(1.0, 2.0)), "differ in prior"),
    "temperature": (differing(temperature=(1.0, 2.0)), "differ in temperature"),
    "n_data": (differing(n_data=(None, 100)), "differ in n_data"),
    "reading": (broken, "the disk is gone"),
    "not finite": (not_finite, "nan"),
    "no data at all": (lambda rank: fit(mlp(), []), "no samples"),
    "bad option on one": (lambda rank: fit(mlp(), shard(*data(), rank), n_data=-1 if rank else None), "n_data"),
    "tune": (tuned, "does not add up over processes"),
    "train": (trained, "does not add up over processes"),
    "evaluate": (evaluated, "does not add up over processes"),
    "linear_mode": (moved, "does not add up over processes"),
    "Online": (stepped, "does not add up over processes"),
}
EMPTY = (list, lambda: [(data()[0][:0], data()[1][:0])], lambda: iter(()), lambda: (data()[0][:0], data()[1][:0]))
RIGHT: dict[str, tuple[Callable[[int], Any], Callable[[], Tensor]]] = {
    "another exit late": (exits(slice(25, None)), lambda: ggn(Exit(), far(slice(25, None)))),
    "another exit from the start": (exits(slice(15, None)), lambda: ggn(Exit(), far(slice(15, None)))),
    "another exit, diag": (
        exits(slice(25, None), structure="diag"),
        lambda: ggn(Exit(), far(slice(25, None))).diagonal().diag(),
    ),
    "one-shot data": (one_shot, lambda: ggn(mlp(), data()[0])),
    "noise of several outputs": (estimated_noise, residuals),
    "update": (updated, lambda: ggn(mlp(), data()[0])),
    "resumed": (resumed, lambda: ggn(mlp(), data()[0])),
    "auto": (
        lambda rank: fit(mlp(), shard(*data(), rank), structure="auto").curvature.dense(),
        lambda: ggn(mlp(), data()[0]),
    ),
} | {f"empty shard {k}": (nothing_on_one(empty), lambda: ggn(mlp(), data()[0])) for k, empty in enumerate(EMPTY)}
STRUCTURES = {name: {"structure": name} for name in ("diag", "blockdiag", "kron", "ekfac")}
STRUCTURES["kfra"] = {"structure": "kron", "factor": "kfra"}
SAME = {"tune without data": tuned_without_data} | {
    f"empty shard, {name}": nothing_on_one(list, **choice) for name, choice in STRUCTURES.items()
}
CASES = {name: case for name, (case, _) in (REFUSED | RIGHT).items()} | SAME


def work(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "LAPWING_TEST_FOLDER": folder}
    limit = datetime.timedelta(seconds=SECONDS / 4)
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2, timeout=limit)
    found: dict[str, tuple[str, Any]] = {}
    for name, case in CASES.items():
        try:
            found[name] = "done", case(rank)
        except Exception as error:
            kind = "refused" if isinstance(error, lapwing.LapwingError) else "raw"
            found[name] = kind, f"{type(error).__name__}: {error}"
        distributed.barrier()
    if rank == 1:
        torch.save(found, f"{folder}/{rank}.pt")
    try:
        fit(mlp(), Killed(rank))
    except lapwing.LapwingError as error:
        found["killed"] = "refused", str(error)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("processes"))
    running = multiprocessing.spawn(work, (folder,), nprocs=2, join=False)
    end = time.monotonic() + SECONDS
    try:
        while not running.join(timeout=1, grace_period=SECONDS / 4):
            if time.monotonic() > end:
                for process in running.processes:
                    process.kill()
                pytest.fail(f"the processes have not come to an end after {SECONDS} s")
    except multiprocessing.ProcessExitedException as error:
        if error.error_index != 1:  # which the last case kills
            raise
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse(name: str, outcomes: list[dict[str, tuple[str, Any]]]) -> None:
    for rank, found in enumerate(outcomes):
        kind, words = found[name]
        expected = "raw" if name == "reading" and rank == 1 else "refused"  # the user's own error stays what it is
        assert kind == expected, words
        assert REFUSED[name][1] in words


@pytest.mark.parametrize("name", RIGHT)
def test_both_are_right(name: str, outcomes: list[dict[str, tuple[str, Any]]]) -> None:
    expected = RIGHT[name][1]()
    for found in outcomes:
        kind, matrix = found[name]
        assert kind == "done", matrix
        torch.testing.assert_close(matrix, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_empty_shard_changes_nothing(name: str, outcomes: list[dict[str, tuple[str, Any]]]) -> None:
    expected = fit(mlp(), data(), **STRUCTURES[name]).curvature.dense()
    for found in outcomes:
        kind, matrix = found[f"empty shard, {name}"]
        assert kind == "done", matrix
        torch.testing.assert_close(matrix, expected, rtol=1e-9, atol=1e-11)


def test_tuning_without_data_is_the_same(outcomes: list[dict[str, tuple[str, Any]]]) -> None:
    (kind, one), (_, two) = (found["tune without data"] for found in outcomes)
    assert kind == "done", one
    assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))


def test_a_killed_process_is_noticed(outcomes: list[dict[str, tuple[str, Any]]]) -> None:
    kind, words = outcomes[0]["killed"]
    assert kind == "refused"
    assert "another process has ended" in words
