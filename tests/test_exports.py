"""What `import lapwing` offers: sorted, documented, complete, and light."""

import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lapwing

ROOT = Path(__file__).parent.parent

# Every public name of the API contract. A name joins `lapwing.__all__` when it is built; a name that is built
# (its module attribute exists) and not exported fails here.
CONTRACT = {
    "fit", "load", "evaluate", "compare", "train", "log_evidence", "subnetwork", "metrics", "plots",
    "attacks", "baselines",
    "Laplace", "Prediction", "Posterior", "Prior", "Tempered", "Mixture", "Likelihood", "Report", "TemperatureScaled",
    "Categorical", "Gaussian", "Bernoulli", "Poisson", "HeteroscedasticGaussian", "BradleyTerry",
    "Diag", "BlockDiag", "Kron", "EKFAC", "Full", "LowRank", "Functional", "Nystrom", "MatrixFree", "VaLLA",
    "GGN", "MCFisher", "EmpiricalFisher", "Hessian", "KFRA",
    "LapwingError", "UnsupportedModel", "UnsupportedOperation", "BadData", "NotPositiveDefinite", "IncompatiblePrior",
    "NotReiterable", "TooLarge", "CorruptFile", "VersionMismatch", "NotConverged",
}  # fmt: skip


def built() -> set[str]:
    """Contract names that some module of the package defines."""
    names: set[str] = set()
    for found in pkgutil.walk_packages(lapwing.__path__, "lapwing."):
        if not found.name.endswith("__main__"):
            names |= CONTRACT & set(vars(importlib.import_module(found.name)))
    return names


def test_exported_names_are_sorted_and_unique() -> None:
    assert list(lapwing.__all__) == sorted(set(lapwing.__all__))


@pytest.mark.parametrize("name", lapwing.__all__)
def test_exported_name_exists_and_is_documented(name: str) -> None:
    value = getattr(lapwing, name)
    assert (value.__doc__ or "").strip(), f"lapwing.{name} has no docstring"


def test_built_contract_names_are_exported() -> None:
    assert built() <= set(lapwing.__all__), f"built but not exported: {sorted(built() - set(lapwing.__all__))}"


def test_version_matches_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert lapwing.__version__ == project["version"]


def test_import_is_light() -> None:
    """`import lapwing` reads no optional extra: only what torch itself and the core dependencies read."""
    code = (
        "import sys, torch, safetensors.torch, tqdm; before = set(sys.modules); import lapwing\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "extras = {'matplotlib', 'jinja2', 'sklearn', 'scipy', 'transformers', 'peft', 'PIL', 'typer', 'rich',"
        " 'botorch', 'lightning', 'pandas', 'pyro'}\n"
        "print(sorted(new & extras))"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_import_leaves_the_garbage_collector_as_it_was(before: str) -> None:
    program = f"import gc; gc.{before}(); import lapwing; print(gc.isenabled())"
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(before == "enable")


@pytest.mark.parametrize(
    "layers", ["nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 10)", "nn.Flatten(), nn.Linear(784, 10)"]
)
def test_a_fit_does_not_import_sympy(layers: str) -> None:
    """`torch.autograd.grad` with cotangents does, for half a second and 44 MB."""
    program = (
        "import sys, torch, lapwing; from torch import nn; x = torch.randn(8, 1, 28, 28)\n"
        f"model = nn.Sequential({layers})\n"
        "la = lapwing.fit(model, (x, torch.arange(8)), 'classification', structure='kron', progress=False)\n"
        "la.predict(x).probs; assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_wheel_ships_every_file_that_is_no_python() -> None:
    """setuptools leaves out what `package-data` does not name: py.typed, the template of reports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package = ROOT / "src" / "lapwing"
    found = {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert found == set(project["tool"]["setuptools"]["package-data"]["lapwing"])


def test_the_source_distribution_holds_what_its_tests_read() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    named = {word for line in lines if line.startswith(("include ", "graft ")) for word in line.split()[1:]}
    always = {"README.md", "LICENSE", "pyproject.toml", "MANIFEST.in", "src"}  # setuptools adds these
    held = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name != "site"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("this is no git checkout")
    assert {name.split("/")[0] for name in tracked} & held <= named | always
