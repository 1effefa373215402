"""Processes that are killed (`kill -9`) while they fit or write: the old file stays, and the next run goes on."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import storage
from lapwing.storage import load_tree, save_tree


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


KILLED = """
import os, signal, sys
from pathlib import Path
from lapwing.storage import replacing
with replacing(Path(sys.argv[1])) as part:
    part.write_bytes(b"half of")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    save_tree(path, [1])
    assert run(KILLED, path).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert load_tree(path) == [1]
    monkeypatch.setattr(storage, "BEGINNING", -1.0)
    save_tree(tmp_path / "another", [3])
    assert len(os.listdir(tmp_path)) == 3  # those of other files are left alone
    save_tree(path, [2])
    assert sorted(os.listdir(tmp_path)) == ["another", "state"]
    assert load_tree(path) == [2]


def test_a_finished_fit_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(KILLED, tmp_path / "fit.safetensors").returncode == -signal.SIGKILL
    monkeypatch.setattr(storage, "BEGINNING", -1.0)
    data = (torch.ones(4, 2), torch.ones(4, 1))
    lapwing.fit(nn.Linear(2, 1), data, "regression", structure="diag", checkpoint=tmp_path)
    assert os.listdir(tmp_path) == []


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(200, 6, generator=generator).double(), torch.randint(3, (200,), generator=generator)
    return list(zip(x.split(2), y.split(2), strict=True))


ENDLESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.storage.test_kills import data, model
import lapwing
from lapwing.curvature import resume
resume.SECONDS, resume.EVERY = 0.0, 2
net = model()
print("ready", flush=True)
while True:
    la = lapwing.fit(net, data(), "classification", structure="kron", checkpoint=sys.argv[2], progress=False)
    la.save(sys.argv[3])
"""


@pytest.mark.slow
def test_fits_and_files_survive_kills_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = tmp_path / "checkpoint", tmp_path / "out" / "model.lapwing"
    whole = lapwing.fit(model(), data(), "classification", structure="kron", progress=False)
    times = random.Random(0)
    for _ in range(4):
        command = [sys.executable, "-c", ENDLESS, str(Path(__file__).parents[2]), str(folder), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(times.uniform(0.2, 2.0))
            os.kill(process.pid, signal.SIGKILL)
        if path.exists():
            assert torch.equal(lapwing.load(path, model()).log_evidence(), whole.log_evidence())
        again = lapwing.fit(model(), data(), "classification", structure="kron", checkpoint=folder, progress=False)
        assert torch.equal(again.log_evidence(), whole.log_evidence())
    monkeypatch.setattr(storage, "BEGINNING", -1.0)
    monkeypatch.setattr(storage, "FORGOTTEN", -1.0)  # of a process killed before it could lock its folder
    lapwing.fit(model(), data(), "classification", structure="kron", checkpoint=folder, progress=False).save(path)
    assert os.listdir(folder) == []
    assert os.listdir(path.parent) == [path.name]
