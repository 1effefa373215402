"""Files under adverse conditions: full disks, killed writers, folders that cannot be written."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import storage
from lapwing.storage import load_tree, replacing, save_tree


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


FULL_DISK = """
import resource, sys, torch
from collections.abc import Iterator
from pathlib import Path
from lapwing.errors import CannotWrite
from lapwing.storage import save_tree
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
    assert "the older file of that name is unchanged" in done.stdout
    assert load_tree(path) == [1]
    assert os.listdir(tmp_path) == ["state"]


def test_writers_at_work_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    monkeypatch.setattr(storage, "BEGINNING", -1.0)
    with replacing(path) as one:
        one.write_text("one")
        with replacing(path) as two:
            two.write_text("two")
        assert path.read_text() == "two"
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["state"]


class Counted:
    """A hundred batches, and how many of them were read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(100):
            self.read += 1
            yield torch.ones(4, 2), torch.ones(4, 1)


@pytest.mark.parametrize("place", ["file/folder", "file", "/proc/nothing"])
def test_checkpoints_that_cannot_be_written_are_noticed_before_the_work(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    model, data = nn.Linear(2, 1), Counted()
    with pytest.raises(lapwing.LapwingError, match="folder"):
        lapwing.fit(model, data, "regression", structure="diag", checkpoint=tmp_path / place)
    assert data.read < 10
    with pytest.raises(lapwing.LapwingError, match="folder"):
        lapwing.train(model, data, "regression", epochs=1, checkpoint=tmp_path / place)


def test_saving_where_no_file_can_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    la = lapwing.fit(nn.Linear(2, 1), (torch.ones(4, 2), torch.ones(4, 1)), "regression", structure="diag")
    with pytest.raises(lapwing.CannotWrite, match="could not be written"):
        la.save(tmp_path / "file" / "model.lapwing")


def test_errors_of_the_data_are_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "out"):
        Path(tmp_path / "no data").read_bytes()
    assert os.listdir(tmp_path) == []
