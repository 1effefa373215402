"""`lapwing doctor`: what it says is what the library does."""

import re
import sys
from pathlib import Path

import pytest
import torch

import lapwing
from lapwing.cli import main as cli

ROOT = Path(__file__).parents[2]
NET = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.spare = nn.Linear(5, 7), nn.Linear(7, 3), nn.Parameter(torch.zeros(2))
        self.power = nn.Parameter(torch.ones(7))
    def forward(self, x):
        return self.b(torch.pow(torch.sigmoid(self.a(x)), self.power))

class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3)
    def forward(self, x):
        return self.a(x - x.mean(0))

odd, mixing = Odd(), Mixing()
mlp = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4 * 26 * 26, 10))
conv.requires_grad_(True)[0].requires_grad_(False)
words = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(64, 2))
bare = nn.ReLU()
recurrent = nn.LSTM(3, 4)
many = nn.Linear(4, 5000)
one = nn.Linear(4, 1)
X, Y = torch.randn(30, 64), torch.randint(10, (30,))
pair = (X, Y)
values = (torch.randn(30, 64), torch.randn(30, 10))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def doctor(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> str:
    assert cli.main(["doctor", f"net.py:{name}", *words]) == 0
    return capsys.readouterr().out


def test_its_memory_is_that_of_refusals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What doctor says a full matrix needs is what fit says when it refuses one."""
    said = doctor(capsys, "mlp", "--memory", "1MB")
    stated = re.search(r"full +([\d.,]+ [MG]B) .*, too large", said)
    live = sys.modules[f"net@{folder}"]
    with pytest.raises(lapwing.TooLarge) as caught:
        lapwing.fit(live.mlp, live.pair, "classification", structure="full", memory=10**6)
    assert stated is not None
    assert f"needs {stated[1]}; the budget is 1 MB" in str(caught.value)
    assert re.search(r"diag +[\d.]+ MB +reads the data 1 ×$", said, re.MULTILINE)


def test_the_memory_of_rows_is_that_of_refusals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = doctor(capsys, "mlp", "--data", "net.py:pair", "--memory", "1MB")
    stated = re.search(r"functional +([\d.]+) MB .*, too large", said)
    live = sys.modules[f"net@{folder}"]
    with pytest.raises(lapwing.TooLarge) as caught:
        lapwing.fit(live.mlp, live.pair, "classification", structure="functional", memory=10**6)
    assert stated is not None
    assert f"about {float(stated[1]) / 1e3:.3g} GB, the budget is 0.001 GB" in str(caught.value)


@pytest.mark.parametrize("name", ["mlp", "odd"])
def test_it_says_what_auto_does(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = doctor(capsys, name)
    live = sys.modules[f"net@{folder}"]
    n = 10_000
    size = {"mlp": 64, "odd": 5}[name]
    classes = {"mlp": 10, "odd": 3}[name]
    data = (torch.randn(n, size), torch.randint(classes, (n,)))
    la = lapwing.fit(getattr(live, name), data, "classification", structure="auto", factor="mc")
    note = next(note for note in la.curvature.notes if note.startswith("structure: "))
    auto = re.search(r"^auto +(.*)$", said, re.MULTILINE)
    assert auto is not None
    assert note.removeprefix("structure: ") == auto[1]
    assert re.search(rf"^ *{la.curvature.structure.name} .*← auto$", said, re.MULTILINE)


def test_with_data_the_number_of_rows_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "functional, because the data have at most 300 output directions" in doctor(
        capsys, "mlp", "--data", "net.py:pair"
    )


def test_operations_without_a_rule_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = doctor(capsys, "odd")
    assert re.search(r"linear +2 ×  by its rule: a.weight \+ a.bias, b.weight \+ b.bias", said)
    assert re.search(r"pow +1 ×  no rule: replayed sample by sample: power", said)
    assert "warning: spare do not reach the outputs" in said
    each = doctor(capsys, "odd", "--verbose")
    assert len(re.findall(r"linear +1 ×  by its rule", each)) == 2


def test_inputs_are_guessed_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    said = doctor(capsys, "conv")
    assert "inputs of shape (3, 28, 28) float32, a guess" in said
    assert "112 of them are frozen" in said
    assert "a batch norm has seen no data yet" in said
    assert "it is in training mode" in said
    assert "inputs of shape (16,) int64, a guess" in doctor(capsys, "words")
    given = doctor(capsys, "conv", "--input", "3,28,28", "--n-data", "77", "--likelihood", "classification")
    assert "77 inputs of shape (3, 28, 28)" in given
    assert "guess" not in given


def test_likelihoods_are_guessed_from_outputs_and_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert "taken as regression (a guess" in doctor(capsys, "one")
    assert "taken as classification (a guess" in doctor(capsys, "mlp", "--data", "net.py:pair")
    assert "taken as regression (a guess" in doctor(capsys, "mlp", "--data", "net.py:values")


def test_many_outputs_and_parts_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    said = doctor(capsys, "many")
    assert "too many for the exact GGN (up to 2,048): fit with --factor auto" in said
    assert "lapwing fit net.py:many DATA --likelihood LIKELIHOOD --factor auto " in said
    assert "full, because 410 weights are few" in doctor(capsys, "mlp", "--select", "last_layer")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["net.py:bare"], "has no parameters"),
        (["net.py:mixing"], "a.weight"),
        (["net.py:recurrent"], "cannot be guessed"),
        (["net.py:mlp", "--input", "7"], "inputs of shape (8, 7) float32, the first batch of --input"),
        (["net.py:mlp", "--select", "gone"], "matches no parameter"),
        (["net.py:one", "--likelihood", "classification"], "single logit"),
    ],
)
def test_networks_that_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
