"""Files whose checksum fits and whose contents are impossible: refused, with `CorruptFile`, when they are loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import lapwing
from lapwing import storage
from lapwing.evidence.loop import Checkpoint
from lapwing.storage import load_tree, save_tree

STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank", "functional", "nystrom", "valla")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(20, 3, generator=generator).double(), torch.randint(2, (20,), generator=generator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sound file per structure."""
    place = tmp_path_factory.mktemp("sound")
    for name in (*STRUCTURES, "matrixfree"):
        lapwing.fit(model(), data(), "classification", structure=name).save(place / name)
    first = lapwing.fit(model(), data(), "classification", structure="full")
    second = lapwing.fit(
        model(), data(), "classification", structure="full", prior=lapwing.Prior.from_posterior(first.posterior)
    )
    second.save(place / "chained")
    by_layer = lapwing.Prior({"0.*": 1.0, "*": torch.tensor(2.0)}, mean=torch.zeros(first.params.size))
    few = lapwing.fit(model(), data(), "classification", select=lapwing.subnetwork(5), prior=by_layer.precision)
    few.save(place / "subnetwork")
    noisy = (data()[0], data()[0][:, :2])
    lapwing.fit(model(), noisy, lapwing.Gaussian(0.5), structure="diag", prior=by_layer).save(place / "regression")
    return place


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        return {k: file.get_tensor(k) for k in file.keys()}, json.loads(file.metadata()[storage.KEY])


def forge(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> Path:
    """Write contents with a checksum that fits them."""
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    header = {k: v for k, v in header.items() if k != "digest"}
    save_file(tensors, path, metadata={storage.KEY: json.dumps(header | {"digest": storage._digest(tensors, header)})})
    return path


def load(path: Path) -> lapwing.Laplace:
    return lapwing.load(path, model(), data=data())


def require_refused(path: Path, why: str) -> None:
    try:
        load(path)
    except lapwing.CorruptFile:
        return
    except (lapwing.UnsupportedModel, lapwing.BadData) as error:
        if not why.startswith(("parameters", "fingerprint", "statistics", "seen", "probe")):
            pytest.fail(f"{why}: {error}")
        return
    pytest.fail(f"a file with a forged {why} was loaded")


def nan(value: Tensor) -> Tensor:
    value = value.clone()
    value.reshape(-1)[-1] = torch.nan
    return value


def negative(value: Tensor) -> Tensor:
    return -value.abs() - 1


def longer(value: Tensor) -> Tensor:
    return torch.cat([value, value]) if value.ndim else value[None].expand(2)


KINDS = (*STRUCTURES, "matrixfree", "chained", "subnetwork", "regression")


@pytest.mark.parametrize("name", KINDS)
def test_forging_without_a_change_is_read(name: str, folder: Path, tmp_path: Path) -> None:
    load(forge(tmp_path / name, *contents(folder / name)))


@pytest.mark.parametrize("change", [nan, longer], ids=["NaN", "another shape"])
@pytest.mark.parametrize("name", KINDS)
def test_no_tensor_may_be_anything(name: str, change: Callable[[Tensor], Tensor], folder: Path, tmp_path: Path) -> None:
    tensors, header = contents(folder / name)
    for key, value in tensors.items():
        unseen = key.startswith("state.") or (key, name) == ("statistics", "regression")  # data of more outputs
        if value.is_floating_point() and value.numel() and not (change is longer and unseen):
            require_refused(forge(tmp_path / name, {**tensors, key: change(value)}, header), key)


@pytest.mark.parametrize("name", KINDS)
def test_no_curvature_is_negative(name: str, folder: Path, tmp_path: Path) -> None:
    tensors, header = contents(folder / name)
    signed = ("basis", "statistics", "gradient", "prior.mean")  # these may have any sign
    for key, value in tensors.items():
        other = key.endswith(signed) or key.startswith(("state.", "probe."))
        if value.is_floating_point() and value.numel() and not other:
            require_refused(forge(tmp_path / name, {**tensors, key: negative(value)}, header), key)


def forged_tensors(tensors: dict[str, Tensor], part: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    found = {key: change(value) for key, value in tensors.items() if key.startswith("matrix.") and part in key}
    assert found
    return {**tensors, **found}


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("full", "matrix", lambda m: m + torch.ones_like(m).triu(1)),
        ("full", "matrix", lambda m: m - 2 * m.diagonal().max() * torch.eye(len(m)).double()),
        ("kron", "left", lambda m: m + torch.ones_like(m).triu(1)),
        ("kron", "right", lambda m: m - 2 * m.diagonal(dim1=1, dim2=2).max() * torch.eye(m.shape[-1]).double()),
        ("ekfac", "left", lambda u: u + 0.1),
        ("ekfac", "right", lambda u: 2 * u),
        ("matrixfree", "basis", lambda u: 2 * u),
        ("diag", "values", lambda v: v.long()),
        ("full", "matrix", lambda m: torch.full_like(m, torch.inf)),
    ],
)
def test_matrices_are_of_their_kind(
    name: str, part: str, change: Callable[[Tensor], Tensor], folder: Path, tmp_path: Path
) -> None:
    tensors, header = contents(folder / name)
    path = forge(tmp_path / name, forged_tensors(tensors, part, change), header)
    with pytest.raises(lapwing.CorruptFile):
        load(path)


WRONG = (None, True, -1, 0, "text", [], {}, [[]], {"type": "GGN"}, float("nan"), 10**15, [-1.0, False], [["no"]])


@pytest.mark.parametrize("name", ["kron", "regression", "subnetwork"])
def test_no_entry_of_the_header_may_be_anything(name: str, folder: Path, tmp_path: Path) -> None:
    """Values that could have been stored may come back as they are; nothing else is read, and no error is raw."""
    tensors, header = contents(folder / name)
    for key in header:
        for value in WRONG:
            path = forge(tmp_path / name, tensors, {**header, key: value})
            try:
                la = load(path)
            except lapwing.LapwingError:
                continue
            assert key in HARMLESS, (key, value)
            assert 0 < la.n_data < 1e300


HARMLESS = {"digest", "notes", "tuned", "memory", "n_data", "seen", "scalar", "damped", "repair", "logit_temperature",
            "written", "aliases", "format", "layout", "blocks", "convention"}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_data", -3.0),
        ("n_data", float("nan")),
        ("seen", 0),
        ("temperature", [-1.0, False]),
        ("temperature", [float("inf"), False]),
        ("logit_temperature", 0.0),
        ("memory", -5),
        ("likelihood", {"family": "Gaussian", "noise": -1.0}),
        ("likelihood", {"family": "Gaussian", "noise": [0.5, 0.0]}),
        ("likelihood", {"family": "Gaussian", "nose": 1.0}),
        ("structure", {"type": "GGN", "options": {}}),
        ("structure", {"type": "Kron", "options": {"sharing": "nothing"}}),
        ("factor", {"type": "Diag", "options": {}}),
        ("prior", {"mean": 0.0, "kind": "values", "precision": -1.0}),
        ("prior", {"mean": float("nan"), "kind": "values", "precision": 1.0}),
        ("prior", {"mean": 0.0, "kind": "names", "precision": [["0.*", 1.0]]}),
        ("layout", {"size": 10**13, "blocks": [[0, 10**13]]}),
        ("blocks", [["another.weight"]]),
    ],
)
def test_impossible_settings_are_refused(key: str, value: Any, folder: Path, tmp_path: Path) -> None:
    tensors, header = contents(folder / "regression")
    path = forge(tmp_path / "file", tensors, {**header, key: value})
    with pytest.raises(lapwing.CorruptFile):
        load(path)


def test_indices_outside_the_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors, header = contents(folder / "subnetwork")
    for index in (tensors["index"] + 10**6, tensors["index"] * 0, -tensors["index"] - 1, tensors["index"].double()):
        path = forge(tmp_path / "file", {**tensors, "index": index}, header)
        with pytest.raises(lapwing.CorruptFile):
            load(path)


def nested(depth: int = 100_000) -> str:
    return "[" * depth + "]" * depth


def test_deep_headers_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors, _ = contents(folder / "diag")
    for text in (nested(), '{"format": 2, "digest": ' + nested() + "}"):
        save_file(tensors, tmp_path / "deep", metadata={storage.KEY: text})
        with pytest.raises(lapwing.CorruptFile):
            load(tmp_path / "deep")


@pytest.mark.parametrize(
    "text", [nested(), '{"dict": 3}', '{"no kind": []}', '{"dtype": "nn"}', '{"tensor": "7"}', "{}", "no JSON"]
)
def test_trees_that_were_never_stored_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tree"
    save_file({}, path, metadata={"tree": text, "digest": storage._tree_digest({}, text)})
    with pytest.raises(lapwing.CorruptFile):
        load_tree(path)


@pytest.mark.parametrize("what", ["module", "optimizer", "belief", "counts", "random", "history"])
def test_forged_checkpoints_of_a_training_are_refused(what: str, tmp_path: Path) -> None:
    def train() -> None:
        lapwing.train(model(), data(), "classification", epochs=1, checkpoint=tmp_path)

    train()
    (path,) = tmp_path.iterdir()
    tree = load_tree(path)
    for value in (None, [], {"a": 1}, {"0.weight": torch.full((4, 3), torch.nan).double()}):
        save_tree(path, {**tree, what: value})
        if (what, value) != ("history", []):
            with pytest.raises(lapwing.CorruptFile):
                train()
    assert Checkpoint.__doc__


def test_a_forged_journal_is_left_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.curvature.resume.SECONDS", 0.0)
    monkeypatch.setattr("lapwing.curvature.resume.EVERY", 2)
    x, y = data()
    whole = lapwing.fit(model(), (x, y), "classification", structure="full")

    class Breaks:
        def __iter__(self) -> Any:
            yield from zip(x.split(2)[:5], y.split(2)[:5])
            raise OSError("interrupted")

    def interrupt() -> Path:
        with pytest.raises(OSError, match="interrupted"):
            lapwing.fit(model(), Breaks(), "classification", structure="full", checkpoint=tmp_path)
        (path,) = tmp_path.glob("*.safetensors")
        return path

    good = load_tree(interrupt())
    (name,) = good["state"]
    for state in (
        {name: torch.nan * good["state"][name]},
        {name: good["state"][name][:1]},
        {},
        {"other": good["state"][name]},
    ):
        save_tree(interrupt(), {**good, "state": state})
        batches = list(zip(x.split(2), y.split(2)))
        again = lapwing.fit(model(), batches, "classification", structure="full", checkpoint=tmp_path)
        torch.testing.assert_close(again.curvature.dense(), whole.curvature.dense(), rtol=1e-9, atol=1e-12)
