"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from experiments import _datasets as datasets
from experiments import _networks as networks

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def trained() -> dict[str, object]:
    """What the examples take for granted: a trained model, loaders and an input."""
    torch.manual_seed(0)
    data = datasets.digits()
    model = networks.mlp([64, 16, 10])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.inputs[:300]), data.targets[:300]).backward()
        optimizer.step()
    loader = {
        name: DataLoader(TensorDataset(data.inputs[part], data.targets[part]), batch_size=100)
        for name, part in {"train_loader": slice(0, 300), "val_loader": slice(300, 500)}.items()
    }
    inputs = torch.linspace(-2, 2, 40)[:, None]
    regression = {"network": networks.mlp([1, 4, 1]), "inputs": inputs, "targets": inputs.sin()}
    return {"model": model, "x": data.inputs[500:520], "torch": torch, **loader, **regression}


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names = trained()
    classification, regression, comparison = BLOCKS
    exec(compile(classification, "README.md", "exec"), names)
    prediction, posterior = names["p"], names["la"]
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(20))
    torch.testing.assert_close(posterior.predict(names["x"]).probs, prediction.probs)
    exec(compile(regression, "README.md", "exec"), names)
    low, high = names["p"].interval(0.95)
    assert bool((low < names["p"].mean).all() and (names["p"].mean < high).all())
    names["la"] = posterior
    exec(compile(comparison, "README.md", "exec"), names)
    assert "NLL" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_the_first_example_has_six_lines() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) == 6
