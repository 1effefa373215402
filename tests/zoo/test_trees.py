"""Nested state in one file, exactly as it was."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lapwing.errors import BadData, CorruptFile
from lapwing.storage import load_tree, save_tree


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def test_state_of_an_optimizer_comes_back(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    tree = {"optimizer": optimizer.state_dict(), "tied": [net.weight, net.weight.T], "empty": torch.zeros(0, 3),
            "scores": (float("inf"), -1.5, None, True), 3: torch.bfloat16, "random": torch.get_rng_state(),
            "half": torch.ones(2, dtype=torch.bfloat16), "scalar": torch.tensor(2)}  # fmt: skip
    save_tree(tmp_path / "state", tree)
    assert same(load_tree(tmp_path / "state"), tree)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_tree(path, {"weights": torch.arange(100.0)})
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptFile):
        load_tree(path)
    path.write_bytes(bytes(content[:40]))
    with pytest.raises(CorruptFile):
        load_tree(path)


def test_what_cannot_be_stored_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_tree(path, [1])
    with pytest.raises(BadData, match="Linear"):
        save_tree(path, {"module": nn.Linear(1, 1)})
    assert load_tree(path) == [1]
