"""Imports go one way: a room imports only from itself and from earlier rooms, and never inside a function."""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import lapwing

ROOMS = (
    "errors",
    "storage",
    "linalg",
    "model",
    "likelihoods",
    "metrics",
    "curvature",
    "posterior",
    "predictive",
    "evidence",
    "plots",
    "evaluation",
    "baselines",
    "attacks",
    "saving",
    "extras",
    "summary",
    "tuning",
    "laplace",
    "fitting",
    "training",
    "sklearn",
    "lightning",
    "huggingface",
    "botorch",
    "compat",
    "cli",
    "testing",
)
DOORS = {  # a door is a class of another library, which it therefore imports when it is imported itself
    "sklearn": {"sklearn"},
    "lightning": {"lightning", "pytorch_lightning"},
    "huggingface": {"transformers", "peft"},
    "botorch": {"botorch", "gpytorch", "linear_operator"},
}
CORE = {"torch", "numpy", "safetensors", "tqdm"}
PACKAGE = Path(lapwing.__file__).parent
T = TypeVar("T")
FILES = sorted(PACKAGE.rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room(path: Path) -> str:
    """The room a file is in; '' for the front door (`__init__.py`, `__main__.py`), which may import every room."""
    parts = path.relative_to(PACKAGE).parts
    return "" if parts[0].startswith("__") else parts[0].removesuffix(".py")


def imported(node: ast.AST, path: Path) -> list[str]:
    """Absolute dotted names of the modules that an import statement reads."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.level:
        folder = path.relative_to(PACKAGE.parent).parts[: -node.level]
        base = ".".join((*folder, *([node.module] if node.module else [])))
    else:
        base = node.module or ""
    return [f"{base}.{alias.name}" for alias in node.names] if base == "lapwing" else [base]


def is_deferred(node: ast.AST) -> bool:
    """A function, or the block of `if TYPE_CHECKING:`, which no program runs."""
    checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether deferred) of every import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred = {id(inner) for outer in ast.walk(tree) if is_deferred(outer) for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        for module in imported(node, path):
            yield node.lineno, module, id(node) in deferred


def test_every_folder_is_a_known_room() -> None:
    assert {room(path) for path in FILES} - {""} <= set(ROOMS)


def test_no_two_files_have_one_name() -> None:
    """Whoever looks for a file by its name finds one; `training` is of `lapwing.train` and of the baselines."""
    names = Counter(path.stem for path in FILES if not path.stem.startswith("__") and path.stem != "training")
    assert not [stem for stem, count in names.items() if count > 1]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_one_way(path: Path) -> None:
    if not room(path):
        return
    here = ROOMS.index(room(path))
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for line, module, _ in imports(path)
        if module.split(".")[0] == "lapwing"
        and (module.count(".") == 0 or module.split(".")[1] not in {*ROOMS[: here + 1], "__version__"})
    ]
    assert not wrong, f"a room imports only from {ROOMS[: here + 1]}: {wrong}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_deferred_imports_are_optional_extras(path: Path) -> None:
    wrong = [
        f"{name(path)}:{line} imports {module} inside a function or for types only"
        for line, module, deferred in imports(path)
        if deferred and module.split(".")[0] in CORE | {"lapwing"}
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("path", FILES, ids=name)
def test_extras_are_imported_only_where_used(path: Path) -> None:
    known = CORE | {"lapwing"} | set(sys.stdlib_module_names) | DOORS.get(room(path), set())
    wrong = [
        f"{name(path)}:{line} imports {module} at module level"
        for line, module, deferred in imports(path)
        if not deferred and module.split(".")[0] not in known
    ]
    assert not wrong, f"an extra is imported inside the function that uses it: {wrong}"


def test_only_a_door_imports_itself() -> None:
    """`import lapwing` opens no door: nobody but the user imports one."""
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in FILES
        for line, module, _ in imports(path)
        if module.split(".")[0] == "lapwing"
        and module.count(".")
        and module.split(".")[1] in DOORS
        and room(path) != module.split(".")[1]
    ]
    assert not wrong, wrong


def test_the_parser_sees_relative_and_deferred_imports(tmp_path: Path) -> None:
    source = "def f():\n    from ..evidence import x\nimport torch\nfrom lapwing import metrics\n"
    tree = ast.parse(source)
    path = PACKAGE / "linalg" / "made_up.py"
    found = [module for node in ast.walk(tree) for module in imported(node, path)]
    assert sorted(found) == ["lapwing.evidence", "lapwing.metrics", "torch"]


def entered(job: Callable[[], T]) -> tuple[T, set[str]]:
    """Run a job; return its result and the files of the package in which functions ran."""
    files: set[str] = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(name(path))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return job(), files
    finally:
        sys.setprofile(before)


def test_a_posterior_over_all_weights_enters_nothing_of_last_layers_and_processes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    la, files = entered(lambda: lapwing.fit(model, (x, y), "classification", structure="kron", progress=False))
    assert {"fitting.py", "curvature/onepass.py"} <= files
    assert not files & {"model/features.py", "curvature/closed.py", "curvature/resume.py", "curvature/shards.py"}
    assert not files & {"errors.py", "laplace.py"}  # what is not given is not checked; the object is made last
    _, files = entered(lambda: la.predict(x).probs)
    assert {"predictive/predictive.py", "model/linearization.py"} <= files
    assert not files & {"model/features.py", "predictive/lastlayer.py"}
