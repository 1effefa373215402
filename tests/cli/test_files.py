"""What the command line reads: every kind of file, and one clear line for everything that is wrong with one."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from lapwing import BadData, Categorical, Gaussian, NotReiterable
from lapwing.cli.data import Reading, Rows
from lapwing.cli.models import read_model, read_object
from lapwing.cli.predict import write_predictions
from lapwing.errors import LapwingError

NET = """
import functools
import torch
from torch import nn
from parts import Part

model = nn.Linear(2, 3)
class Nested:
    inner = nn.Linear(2, 3)

def make(): return Part()
partial = functools.partial(nn.Linear, 2, 3)
def sized(width): return nn.Linear(width, 3)
def broken(): raise KeyError("weights")
def text(): return "model"
def stream(): return iter([(torch.zeros(4, 2), torch.zeros(4).long())])
def failing():
    raise OSError("no disk")
    yield
number = 3
nothing = []
class Failing:
    def __iter__(self): return failing()
late = Failing()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "parts.py").write_text(
        "from torch import nn\nclass Part(nn.Linear):\n    def __init__(self): super().__init__(2, 3)\n"
    )
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    return tmp_path


def read(text: str, model: nn.Module | None = None, **options: object) -> Rows:
    found = Reading(**options).read(text, model or nn.Linear(2, 3), Categorical())  # type: ignore[arg-type]
    assert isinstance(found, Rows)
    return found


# --- objects and models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["net.py:model", "net.py:make", "net.py:Nested.inner", "net.py:partial", "./net.py:make", "parts:Part"]
)
def test_models_by_name(folder: Path, text: str) -> None:
    assert isinstance(read_model(text), nn.Linear)


def test_a_file_is_run_once(folder: Path) -> None:
    assert read_object("net.py:model") is read_object("./net.py:model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("net.py", "names no object"),
        ("gone.py:model", "there is no Python file"),
        ("gone.module:model", "importing gone.module failed: ModuleNotFoundError"),
        ("net.py:mdoel", "net.py has no 'mdoel'; it has Part, model"),
        ("net.py:sized", "needs arguments \\(width\\)"),
        ("net.py:broken", "calling net.py:broken failed: KeyError: 'weights'"),
        ("net.py:text", "is a str, not a torch.nn.Module"),
        ("net.py:number", "is a int, not a torch.nn.Module"),
        ("bad.py:model", "importing bad.py failed, line 2: NameError: name 'nn' is not defined"),
        ("typo.py:model", "importing typo.py failed: SyntaxError"),
        ("script.py:model", "importing script.py failed, line 2: SystemExit: 2"),
    ],
)
def test_models_that_cannot_be(folder: Path, text: str, message: str) -> None:
    (folder / "bad.py").write_text("import torch\nmodel = nn.Linear(2, 2)\n")
    (folder / "typo.py").write_text("model = (\n")
    (folder / "script.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(BadData, match=message):
        read_model(text)


@pytest.mark.parametrize("kind", ["plain", "state_dict", "model", "parallel", "safetensors"])
def test_weights(folder: Path, kind: str) -> None:
    weights = {name: torch.randn_like(value) for name, value in nn.Linear(2, 3).state_dict().items()}
    path = folder / f"{kind}.{'safetensors' if kind == 'safetensors' else 'pt'}"
    stored: object = weights
    if kind in ("state_dict", "model"):
        stored = {kind: weights, "epoch": 3}
    elif kind == "parallel":
        stored = {f"module.{name}": value for name, value in weights.items()}
    if kind == "safetensors":
        save_file(weights, path)
    else:
        torch.save(stored, path)
    found = read_model("net.py:make", path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_counters_of_batch_norm_may_be_missing(folder: Path) -> None:
    (folder / "norm.py").write_text("from torch import nn\ndef make(): return nn.BatchNorm1d(2)\n")
    state = nn.BatchNorm1d(2).state_dict()
    state.pop("num_batches_tracked")
    save_file(dict(state), folder / "w.safetensors")
    assert read_model("norm.py:make", folder / "w.safetensors").num_batches_tracked == 0


def test_second_names_of_tied_weights_may_be_missing(folder: Path) -> None:
    (folder / "tied.py").write_text(
        "from torch import nn\ndef make():\n    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))\n"
        "    net[1].weight = net[0].weight\n    return net\n"
    )
    state = {
        name: torch.randn(3, 3) if "weight" in name else torch.ones(3) for name in ("0.weight", "0.bias", "1.bias")
    }
    save_file(state, folder / "w.safetensors")
    found = read_model("tied.py:make", folder / "w.safetensors")
    assert torch.equal(found[1].weight, state["0.weight"])
    save_file({name: value for name, value in state.items() if name != "1.bias"}, folder / "v.safetensors")
    with pytest.raises(BadData, match=r"it lacks 1\.bias"):
        read_model("tied.py:make", folder / "v.safetensors")


class Unsafe:
    """What pickle would run."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"weight": torch.zeros(3, 2)}, "it lacks bias"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "extra": torch.zeros(1)}, "has extra, which the model"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(4)}, r"bias \(4,\) instead of \(3,\)"),
        ({f"layer{k}": torch.zeros(1) for k in range(9)}, "layer3 and 5 more"),
        (
            {"weight": torch.zeros(3, 2, dtype=torch.complex64), "bias": torch.zeros(3)},
            r"weight complex \(3, 2\) instead",
        ),
        ({0: torch.zeros(3, 2), 1: torch.zeros(3)}, "contains no state dict"),
        ({"epoch": 3}, "contains no state dict"),
        (torch.zeros(3), "contains no state dict"),
        (Unsafe(), "is not a file of tensors only"),
        (b"not a checkpoint", "is not a file of tensors only"),
        (None, "there is no file of weights"),
    ],
)
def test_weights_that_do_not_belong(folder: Path, stored: object, message: str) -> None:
    path = folder / "w.pt"
    if isinstance(stored, bytes):
        path.write_bytes(stored)
    elif stored is not None:
        torch.save(stored, path)
    with pytest.raises(BadData, match=message) as caught:
        read_model("net.py:make", path)
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


def test_a_damaged_safetensors_file_of_weights(folder: Path) -> None:
    (folder / "w.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(BadData, match="is not a file of tensors only"):
        read_model("net.py:make", folder / "w.safetensors")


# --- data ---------------------------------------------------------------------------------------------------------


def test_arrays_come_in_the_dtype_of_the_network(folder: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(5, 2)), np.array([0.0, 1, 2, 1, 0])
    np.savez("a.npz", x=x, y=y)
    np.savez("b.npz", X=x, y=y.astype(np.int32), other=np.array(["text"]))
    save_file({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, "c.safetensors")
    for name in ("a.npz", "b.npz", "c.safetensors"):
        for dtype in (torch.float32, torch.float64):
            rows = read(name, nn.Linear(2, 3).to(dtype), size=2)
            assert torch.equal(rows.inputs, torch.from_numpy(x).to(dtype))
            assert rows.targets is not None
            assert not rows.targets.is_floating_point()
            assert [len(batch[0]) for batch in rows] == [2, 2, 1]
            assert len(rows) == 3
    values = Reading().read("a.npz", nn.Linear(2, 1), Gaussian())
    assert values.targets.dtype == torch.float32


def test_whole_numbers_as_inputs_stay_so(folder: Path) -> None:
    np.savez("ids.npz", x=np.arange(6).reshape(3, 2), y=np.zeros(3, int))
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 3))
    assert read("ids.npz", model).inputs.dtype == torch.int64


def test_columns_of_a_table(folder: Path) -> None:
    Path("t.csv").write_text("\ufeff\na, b,c\n1,2,0\n3,4e0,1\n\n", encoding="utf-8")
    rows = read("t.csv")
    assert rows.inputs.tolist() == [[1, 2], [3, 4]]
    assert rows.targets is not None
    assert rows.targets.tolist() == [0, 1]
    chosen = read("t.csv", targets=("a",))
    assert chosen.inputs.tolist() == [[2, 0], [4, 1]]
    two = Reading(targets=("c", "a")).read("t.csv", nn.Linear(1, 2), Gaussian())
    assert two.targets.tolist() == [[0, 1], [1, 3]]
    none = read("t.csv", nn.Linear(3, 3), targets=(), labeled=False)
    assert none.targets is None
    assert none.inputs.shape == (2, 3)
    absent = read("t.csv", nn.Linear(3, 3), targets=("price",), labeled=False)
    assert absent.inputs.shape == (2, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("1,2,3\n4,5,6\n", "write the names of the columns into its first line"),
        ("a,a,y\n1,2,3\n", "names two columns alike"),
        ("a,b,y\n1,2\n", "line 2: 2 cells under 3 columns"),
        ("a,b,y\n1,2,0\n1,2,cat\n", "line 3, column 'y': 'cat' is not a number"),
        ("a,b,y\n1,,0\n", "line 2, column 'b': '' is not a number"),
        ("a,b,y\n1,2_000,0\n", "line 2, column 'b': '2_000' is not a number"),
        (b"\xff\xfea\x00,\x00y\x00", "in UTF-8 with commas"),
        ("a,b,y\n1,2," + "0" * 200_000 + "\n", "in UTF-8 with commas"),
        ("a,b,y\n", "holds no rows"),
        ("y\n1\n", "no column but the target"),
        ("a,y\n1,2\n", "--no-target"),
    ],
)
def test_tables_that_cannot_be_read(folder: Path, content: str | bytes, message: str) -> None:
    Path("t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadData, match=message):
        read("t.csv")


def test_a_target_that_is_not_there(folder: Path) -> None:
    Path("t.csv").write_text("a,b,c\n1,2,3\n")
    with pytest.raises(BadData, match="has no column 'price'; it has a, b, c"):
        read("t.csv", targets=("price",))
    with pytest.raises(BadData, match=r"t\.csv has no targets: --target names their columns"):
        read("t.csv", nn.Linear(3, 3), targets=())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 2))}, "has no targets"),
        ({"y": np.zeros(4)}, "has no array 'x'"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3)}, "4 rows of x, but y has shape"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "holds no rows"),
        ({"x": np.zeros((4, 2)), "y": np.array(["a"] * 4)}, "plain numbers"),
        ({"x": np.zeros((4, 2)), "y": np.array([{}] * 4)}, "plain numbers"),
        ({"x": np.zeros((4, 5)), "y": np.zeros(4)}, r"inputs of shape \(4, 5\) float32, the first batch of a.npz"),
        ({"x": np.zeros((4, 2), np.uint8), "y": np.zeros(4)}, r"inputs of shape \(4, 2\) uint8"),
    ],
)
def test_arrays_that_do_not_fit(folder: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez("a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(BadData, match=message):
        read("a.npz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gone.npz", "there is no data file"),
        ("junk.npz", "plain numbers"),
        ("junk.safetensors", "is not a safetensors file"),
        ("data.pkl", "nothing is unpickled"),
        ("net.py:number", "is a int: name a DataLoader"),
        ("net.py:nothing", "holds no batches"),
        ("net.py:late", "reading net.py:late failed: OSError: no disk"),
        ("net.py:gone", "has no 'gone'"),
    ],
)
def test_data_that_cannot_be_read(folder: Path, text: str, message: str) -> None:
    Path("junk.npz").write_bytes(b"junk")
    Path("junk.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(BadData, match=message):
        read(text)


def test_a_stream_is_refused(folder: Path) -> None:
    with pytest.raises(NotReiterable, match="can be read once"):
        read("net.py:stream")


def test_a_dataset_is_read_in_batches(folder: Path) -> None:
    (folder / "sets.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "data = TensorDataset(torch.zeros(5, 2), torch.zeros(5).long())\n"
    )
    loader = Reading(size=2).read("sets.py:data", nn.Linear(2, 3), Categorical())
    assert isinstance(loader, DataLoader)
    assert [len(x) for x, _ in loader] == [2, 2, 1]


# --- predictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p.csv", "p.npz", "p.safetensors"])
def test_an_interrupted_file_leaves_the_old_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("old")

    def batches():
        yield {"mean": torch.zeros(3)}
        raise LapwingError("stop")

    with pytest.raises(LapwingError):
        write_predictions(path, batches())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_targets_keep_single_precision(folder: Path) -> None:
    """A network of few bits, targets of many: 1001 is no bfloat16."""
    np.savez("few.npz", x=np.zeros((4, 2)), y=1001.0 + np.arange(4.0))
    rows = Reading().read("few.npz", nn.Linear(2, 1).bfloat16(), Gaussian())
    assert rows.inputs.dtype == torch.bfloat16
    assert rows.targets.tolist() == [1001, 1002, 1003, 1004]
