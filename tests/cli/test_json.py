"""--json of every command: one object on standard output, and the same numbers as the library's."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import lapwing
from lapwing.cli import main as cli
from lapwing.cli.command import plain

NET = """
import torch
from torch import nn

def classes():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

def values():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

def wide():
    return nn.Sequential(nn.Linear(4, 900), nn.Tanh(), nn.Linear(900, 900), nn.Tanh(), nn.Linear(900, 3))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(NET)
    generator = np.random.default_rng(0)
    for name, n in (("train", 80), ("val", 60), ("test", 50)):
        x = generator.normal(size=(n, 4)).astype("float32")
        np.savez(f"{name}.npz", x=x, y=np.argmax(x[:, :3] + generator.normal(size=(n, 3)), 1))
    np.savez("far.npz", x=(4 * generator.normal(size=(30, 4))).astype("float32"))
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert cli.main([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    found: dict = json.loads(said.out)
    return found


def test_a_classifier_from_end_to_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = answer(capsys, "doctor", "net.py:classes", "--data", "train.npz", "--likelihood", "classification")
    assert seen["weights"] == 51
    assert seen["settings"]["structure"]["value"] == "full"
    assert seen["settings"]["likelihood"] == {"value": "classification", "because": "you said so"}
    assert seen["structures"]["full"]["bytes"] > 51 * 51 * 4
    fitted = answer(capsys, *seen["next"].split()[1:2], "net.py:classes", "train.npz", "--likelihood", "classification",
                    "--out", "net.lapwing")  # fmt: skip
    assert fitted["structure"] == "full"
    assert fitted["weights"] == 51
    assert fitted["seconds"]["fit"] > 0
    tuned = answer(capsys, "tune", "net.py:classes", "net.lapwing", "val.npz", "--out", "tuned.lapwing")
    la = lapwing.load("tuned.lapwing", sys.modules[f"net@{folder}"].classes())
    assert tuned["temperature"] == float(la.temperature.T)
    assert tuned["prior"] == str(la.prior)
    assert tuned["summary"][0] == la.summary().split("\n")[0]
    rows = answer(capsys, "predict", "net.py:classes", "tuned.lapwing", "test.npz", "--out", "p.csv")
    assert rows["items"] == 50
    assert rows["fields"] == ["label", "confidence", "entropy", "epistemic", "probs"]
    scored = answer(capsys, "report", "net.py:classes", "tuned.lapwing", "test.npz", "--ood", "far=far.npz",
                    "--train", "train.npz", "--classes", "left,right,up")  # fmt: skip
    assert scored["out"] == "report.html"
    assert "auroc_mahalanobis" in scored["models"]["Laplace"]["ood"]["far"]
    low, high = scored["models"]["Laplace"]["intervals"]["nll"]
    assert low < scored["models"]["Laplace"]["nll"] < high
    assert scored["findings"][0] in re.sub("&#\\d+;", "", Path("report.html").read_text(encoding="utf-8"))
    assert "right" in Path("report.html").read_text(encoding="utf-8")


def test_a_regression_has_intervals_with_the_learned_noise(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    generator = np.random.default_rng(0)
    for name, n in (("train", 300), ("new", 2000)):
        x = generator.uniform(-3, 3, size=n)
        rows = np.stack([x, np.sin(x) + 0.25 * generator.normal(size=n)], 1)
        np.savetxt(f"{name}.csv", rows, delimiter=",", header="x,y", comments="")
    table = torch.from_numpy(np.loadtxt("train.csv", delimiter=",", skiprows=1)).float()
    sys.path.insert(0, str(folder))
    namespace: dict = {}
    exec(NET, namespace)
    model = namespace["values"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(400):
        optimizer.zero_grad()
        (model(table[:, :1]) - table[:, 1:]).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), "values.pt")
    fitted = answer(capsys, "fit", "net.py:values", "train.csv", "--weights", "values.pt", "--likelihood", "regression",
                    "--tune-evidence", "--out", "values.lapwing")  # fmt: skip
    assert np.ravel(fitted["noise"])[0] == pytest.approx(0.25, rel=0.15)
    assert cli.main(["predict", "net.py:values", "values.lapwing", "new.csv", "--weights", "values.pt",
                     "--out", "p.csv"]) == 0  # fmt: skip
    header = Path("p.csv").read_text().splitlines()[0].split(",")
    columns = dict(zip(header, np.loadtxt("p.csv", delimiter=",", skiprows=1).T))
    truth = np.loadtxt("new.csv", delimiter=",", skiprows=1)[:, 1]
    held = ((columns["lower"] <= truth) & (truth <= columns["upper"])).mean()
    assert held == pytest.approx(0.95, abs=0.02)
    np.testing.assert_allclose(columns["stddev"] ** 2, columns["epistemic"] + columns["aleatoric"], rtol=1e-4)
    assert cli.main(["report", "net.py:values", "values.lapwing", "new.csv", "--weights", "values.pt"]) == 0
    assert "The 95 % intervals of Laplace hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "select", "why"),
    [
        (["--memory", "1MB"], "last_layer", "exceed 1 MB"),
        ([], "all", "a fit takes at most about"),
        (["--select", "4.*"], "4.*", "you said so"),
    ],
)
def test_doctor_chooses_weights(capsys: pytest.CaptureFixture[str], words: list[str], select: str, why: str) -> None:
    found = answer(capsys, "doctor", "net.py:wide", "--data", "train.npz", *words)
    assert found["settings"]["select"]["value"] == select
    assert why in found["settings"]["select"]["because"]
    assert (f"--select {select}" in found["next"]) == (select != "all")


def test_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "reproduce", "--list")
    assert "tolerance" in found["experiments"]


def test_the_output_of_an_experiment_goes_to_standard_error() -> None:
    command = [sys.executable, "-m", "lapwing", "reproduce", "--json", "tolerance", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "tolerance"
    assert "usage: tolerance.py" in done.stderr


def test_errors_leave_standard_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "gone.py:net", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("lapwing: ")


@pytest.mark.parametrize("name", [command.name for command in cli.COMMANDS])
def test_every_command_has_it_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    said = capsys.readouterr().out
    assert "--json" in said
    assert f"example: lapwing {name}" in said


def test_values_that_json_does_not_know() -> None:
    odd = {"a": torch.tensor([1.0, float("nan")]), 2: (Path("x"), float("inf"), None, True), "n": torch.tensor(3)}
    found = plain(odd)
    assert found == {"a": [1.0, None], "2": ["x", None, None, True], "n": 3}
