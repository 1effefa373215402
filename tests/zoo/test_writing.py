"""Files under adverse conditions: full disks, killed writers, folders that cannot be written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature import resume
from lapwing.model import writing
from lapwing.model.trees import load_tree, save_tree
from lapwing.model.writing import replacing


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from lapwing.errors import CannotWrite
from lapwing.model.trees import save_tree
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # the kernel refuses to write more, as on a full disk
try:
    save_tree(Path(sys.argv[1]), torch.ones(100_000))
except CannotWrite as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_tree(path, [1])
    done = run(FULL_DISK, path)
    assert done.returncode == 0, done.stderr
    assert "could not be written (" in done.stdout
    assert "the file that was there is as it was" in done.stdout
    assert load_tree(path) == [1]
    assert os.listdir(tmp_path) == ["state"]


KILLED = """
import os, signal, sys
from pathlib import Path
from lapwing.model.writing import replacing
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
    monkeypatch.setattr(writing, "BEGINNING", -1.0)
    save_tree(tmp_path / "another", [3])
    assert len(os.listdir(tmp_path)) == 3  # those of other files are left alone
    save_tree(path, [2])
    assert sorted(os.listdir(tmp_path)) == ["another", "state"]
    assert load_tree(path) == [2]


def test_writers_at_work_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    monkeypatch.setattr(writing, "BEGINNING", -1.0)
    with replacing(path) as one:
        one.write_text("one")
        with replacing(path) as two:
            two.write_text("two")
        assert path.read_text() == "two"
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("place", ["file/folder", "file", "/proc/nothing"])
def test_checkpoints_that_cannot_be_written_are_noticed_at_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    model, data = nn.Linear(2, 1), (torch.ones(4, 2), torch.ones(4, 1))
    before = time.monotonic()
    with pytest.raises(lapwing.LapwingError, match="folder"):
        lapwing.fit(model, data, "regression", structure="diag", checkpoint=tmp_path / place)
    with pytest.raises(lapwing.LapwingError, match="folder"):
        lapwing.train(model, data, "regression", epochs=1, checkpoint=tmp_path / place)
    assert time.monotonic() - before < resume.SECONDS / 4


def test_saving_where_no_file_can_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    la = lapwing.fit(nn.Linear(2, 1), (torch.ones(4, 2), torch.ones(4, 1)), "regression", structure="diag")
    with pytest.raises(lapwing.CannotWrite, match="could not be written"):
        la.save(tmp_path / "file" / "model.lapwing")


def test_errors_of_the_data_are_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "out"):
        Path(tmp_path / "no data").read_bytes()
    assert os.listdir(tmp_path) == []


def test_a_finished_fit_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(KILLED, tmp_path / "fit.safetensors").returncode == -signal.SIGKILL
    monkeypatch.setattr(writing, "BEGINNING", -1.0)
    data = (torch.ones(4, 2), torch.ones(4, 1))
    lapwing.fit(nn.Linear(2, 1), data, "regression", structure="diag", checkpoint=tmp_path)
    assert os.listdir(tmp_path) == []
