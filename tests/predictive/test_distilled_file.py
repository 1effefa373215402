"""A distilled predictor in a file: the same numbers in another process, for the same network only, and no pickle."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests import dense
from torch import Tensor, nn

import lapwing
from lapwing.errors import BadData, CorruptFile, UnsupportedModel
from lapwing.storage import read_file, write_file


def net(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def distilled(task: str = "classification") -> tuple[lapwing.Laplace, lapwing.Distilled, nn.Module, Tensor]:
    outputs = {"classification": 3, "counts": 1}.get(task, 2)
    model, x = dense.build(lambda: net(outputs), dtype=torch.float32), dense.randn(60, 4, dtype=torch.float32)
    y = {"classification": torch.arange(60) % 3, "counts": x[:, :1].abs().round()}.get(task, x[:, :2])
    la = lapwing.fit(model, (x, y), task, structure="kron", prior=5.0, progress=False)
    la = la.replace(logit_temperature=1.5) if task == "classification" else la
    return la, la.distill(x, epochs=3, ood={"far": 5 * x}), model, x


@pytest.mark.parametrize("task", ["classification", "regression", "counts"])
def test_a_predictor_comes_back(task: str, tmp_path: Path) -> None:
    _, fast, model, x = distilled(task)
    fast.save(tmp_path / "fast.lapwing")
    again = lapwing.Distilled.load(tmp_path / "fast.lapwing", model)
    one, other = fast.predict(x), again.predict(x)
    for name in ("mean", "epistemic", "total"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0)
    torch.testing.assert_close(one.function.covariance, other.function.covariance, rtol=0, atol=0)
    assert again.summary() == fast.summary()
    assert again.convention == fast.convention
    again.save(tmp_path / "again.lapwing")
    assert (tmp_path / "again.lapwing").read_bytes() == (tmp_path / "fast.lapwing").read_bytes()


def test_in_another_process(tmp_path: Path) -> None:
    _, fast, model, x = distilled()
    fast.save(tmp_path / "fast.lapwing")
    p = fast.predict(x)
    torch.save({"x": x, "probs": p.probs, "epistemic": p.epistemic, "weights": model.state_dict()}, tmp_path / "e.pt")
    code = """
        import torch
        from torch import nn
        import lapwing
        stored = torch.load("e.pt", weights_only=True)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        model.load_state_dict(stored["weights"])
        p = lapwing.Distilled.load("fast.lapwing", model).predict(stored["x"])
        torch.testing.assert_close(p.probs, stored["probs"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(p.epistemic, stored["epistemic"], rtol=1e-5, atol=1e-7)
        print("equal")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "equal", done.stderr


def test_the_file_holds_no_sample_of_the_data(tmp_path: Path) -> None:
    _, fast, _, x = distilled()
    fast.save(tmp_path / "fast.lapwing")
    with safe_open(tmp_path / "fast.lapwing", framework="pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            if tensor.shape[-1:] == (4,) and tensor.ndim == 2:
                assert not bool((tensor[:, None] == x).all(-1).any()), name


def test_other_networks_and_other_files_are_refused(tmp_path: Path) -> None:
    la, fast, model, _ = distilled()
    fast.save(tmp_path / "fast.lapwing")
    la.save(tmp_path / "la.lapwing")
    with pytest.raises(BadData, match=r"lapwing\.Distilled\.load"):
        lapwing.load(tmp_path / "fast.lapwing", model)
    with pytest.raises(BadData, match=r"lapwing\.load"):
        lapwing.Distilled.load(tmp_path / "la.lapwing", model)
    with pytest.raises(UnsupportedModel, match="other weights"):
        lapwing.Distilled.load(tmp_path / "fast.lapwing", dense.build(net, 1, torch.float32))
    with pytest.raises(UnsupportedModel, match="has shape"):
        lapwing.Distilled.load(tmp_path / "fast.lapwing", net(5))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(UnsupportedModel, match="other outputs"):
        lapwing.Distilled.load(tmp_path / "fast.lapwing", model)


def test_damaged_and_forged_files_are_refused(tmp_path: Path) -> None:
    _, fast, model, _ = distilled()
    path = tmp_path / "fast.lapwing"
    fast.save(path)
    tensors, header = read_file(path)
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CorruptFile, match="checksum"):
        lapwing.Distilled.load(path, model)
    header = {name: value for name, value in header.items() if name not in ("format", "digest", "aliases")}
    broken = {
        "not finite": ({**tensors, "head.weights": tensors["head.weights"] * torch.nan}, header),
        "fit no head": ({**tensors, "head.weights": -tensors["head.weights"]}, header),
        "fit together": ({**tensors, "head.low": tensors["head.low"][:1]}, header),
        "logit temperature": (tensors, header | {"logit_temperature": -1.0}),
    }
    for words, content in broken.items():
        write_file(path, *content)
        with pytest.raises(CorruptFile, match=words):
            lapwing.Distilled.load(path, model)
