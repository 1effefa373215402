"""One tiny cell from the command line to the table, without peers and without data from outside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.cell import ROOT

from benchmarks import __main__ as suite
from benchmarks import checkpoints
from experiments import _networks as networks
from lapwing.cli import main as cli
from lapwing.cli import repository as bench


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """MNIST's part and LeNet's weights as the benchmark keeps them, but random."""
    monkeypatch.setenv("LAPWING_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 1, 28, 28, generator=generator), torch.randint(10, (40,), generator=generator)
    checkpoints.kept_tensors("mnist-6000", lambda: {"x": x, "y": y})
    checkpoints.kept_tensors("lenet", lambda: networks.lenet().state_dict())
    return tmp_path


def test_one_cell_from_the_command_line(cache):
    command = [sys.executable, "-m", "benchmarks.run", "--workload", "lenet-last", "--operation", "probs-diag"]
    done = subprocess.run(
        [*command, "--n", "16", "--m", "2", "--repeats", "1", "--ours-only"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("lenet-last", "n=2", "epochs", "forwards", "peak"))


def test_the_suite_writes_table_json_and_goes_on_where_it_stopped(cache, tmp_path, capsys, monkeypatch):
    cell = suite.Cell("lenet-last", "fit-diag", 16, 1, inner=1)
    monkeypatch.setattr(suite.plan, "quick", lambda: iter([cell]))
    monkeypatch.setattr(suite, "import_times", lambda pythons: {"torch": 2.0, "lapwing": 2.2})
    arguments = ["--quick", "--ours-only", "--no-growth", "--out", str(tmp_path)]
    assert suite.main(arguments) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["cells"][0]["ours"]["error"] is None
    assert "1.10 × `import torch`" in (tmp_path / "bench.md").read_text()
    monkeypatch.setattr(suite, "run", lambda *_: pytest.fail("the cell was measured already"))
    assert suite.main([*arguments, "--resume"]) == 0
    monkeypatch.setattr(suite.plan, "quick", lambda: iter([cell, suite.replace(cell, n=17)]))
    assert suite.main([*arguments, "--known"]) == 0
    assert "LeNet-5, last layer" in capsys.readouterr().out


def test_the_command_is_told_without_paths():
    told = suite.command(["--quick", "--out", "/somewhere", "--threads", "1"])
    assert told == "python -m benchmarks --quick --threads 1"


def test_lapwing_bench_needs_the_repository(tmp_path, monkeypatch):
    assert bench.repository() == ROOT
    with pytest.raises(bench.BadData, match="make bench"):
        bench.repository(tmp_path)


def test_lapwing_bench_hands_its_options_on(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(
        bench.subprocess,
        "run",
        lambda command, cwd, stdout: seen.append(command[3:]) or subprocess.CompletedProcess(command, 3),
    )
    arguments = ["bench", "--quick", "--out", str(tmp_path), "--threads", "1", "2", "--workload", "lenet"]
    assert cli.main(arguments) == 1
    assert seen == [["--out", str(Path(tmp_path)), "--threads", "1", "2", "--workload", "lenet", "--quick"]]
    assert "exit code 3" in capsys.readouterr().err
