"""Every public name has an example in its docstring, and every example of the package runs and prints what it says.

An example sees what `tests/given.py` gives, which docs/api/index.md tells the reader. Output that an example does not
show is not compared.
"""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lapwing
from tests.given import given
from tests.test_docs import registries

__all__ = ["registries"]  # a fixture: what an example registers is taken back

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
DOORS = ("sklearn", "lightning", "huggingface", "botorch")
OPEN = ("metrics", "plots", "baselines", "attacks", "testing", *DOORS)
# What users hold: each public method and property of these has an example of its own.
HELD = ("Laplace", "Prediction", "Mixture", "Posterior", "Prior", "Distilled", "Report", "Online", "Pruned", "Trained")
HELD += ("predictive.classes.ClassPrediction", "predictive.classes.LabelPrediction")
HELD += ("predictive.values.ValuePrediction", "evidence.curves.TemperatureCurve")
HELD += ("evidence.Comparison", "evidence.Tuning", "metrics.Rejection", "metrics.Reliability")
# Called by the library itself, or by those who extend it; their class has the example.
INTERNAL = {
    "Laplace.batches", "Laplace.stored", "Prediction.log_prob_of_targets", "Prediction.described", "Prediction.doubt",
    "Prior.resolve", "Prior.spec", "Prior.from_spec", "Mixture.network", "evidence.Tuning.of",
    "evidence.Tuning.applied",
}  # fmt: skip


def look_up(path: str) -> Any:
    *folders, name = path.split(".")
    return getattr(importlib.import_module(".".join(["lapwing", *folders])), name)


def function(value: Any) -> Any:
    """The function behind a method, a property or a class method."""
    value = getattr(value, "func", None) or getattr(value, "fget", None) or value
    return inspect.unwrap(getattr(value, "__func__", value))


def public(path: str) -> Iterator[tuple[str, Any]]:
    """The documented methods and properties that a class defines itself."""
    for name, value in vars(look_up(path)).items():
        called = function(value)
        if not name.startswith("_") and inspect.isfunction(called) and called.__doc__:
            yield f"{path}.{name}", called


def owned(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public functions and classes that a module defines itself."""
    for name, value in vars(module).items():
        known = inspect.isclass(value) or inspect.isfunction(value)
        if known and not name.startswith("_") and value.__module__ == module.__name__:
            yield name, value


def wanted() -> dict[str, Any]:
    """Everything that must have an example, by its path in the package."""
    found = {name: getattr(lapwing, name) for name in lapwing.__all__}
    for room in OPEN:
        module = importlib.import_module(f"lapwing.{room}")
        names = getattr(module, "__all__", None) or [name for name, _ in owned(module)]
        found |= {f"{room}.{name}": getattr(module, name) for name in names}
    for path in HELD:
        found |= dict(public(path))
    return {name: value for name, value in found.items() if name not in INTERNAL}


def examples() -> dict[str, list[doctest.Example]]:
    """The examples of all docstrings of the package, by path."""
    found: dict[str, list[doctest.Example]] = {}
    parse = doctest.DocTestParser().get_examples
    for info in pkgutil.walk_packages(lapwing.__path__, "lapwing."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == info.name}
        own |= {
            f"{name}.{inner}": function(method)
            for name, value in list(own.items())
            if inspect.isclass(value)
            for inner, method in vars(value).items()
            if callable(function(method))
        }
        for name, value in {"": module, **own}.items():
            parts = parse(text) if (text := getattr(value, "__doc__", None)) and isinstance(text, str) else []
            if parts:
                found[f"{info.name.removeprefix('lapwing.')}:{name}"] = parts
    return found


@pytest.mark.parametrize("name", wanted())
def test_a_public_name_has_an_example(name: str) -> None:
    text = inspect.getdoc(wanted()[name]) or ""
    assert ">>> " in text, f"{name} has no example: add a section 'Examples:' with lines >>> to its docstring"


def test_examples_stand_in_a_section_that_the_site_shows_as_code() -> None:
    """Anywhere else, >>> is a quotation in a quotation in a quotation to Markdown."""
    for path in Path(lapwing.__path__[0]).rglob("*.py"):
        for text in re.findall(r'"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL):
            head = re.split(r"^ *>>> ", text, maxsplit=1, flags=re.MULTILINE)[0]
            sound = head == text or re.search(r"^ *Examples(:|\n *-+)\n\s*$", head, re.MULTILINE)
            assert sound, f"{path.name}: put the lines >>> under 'Examples:'\n{text}"


EXAMPLES = examples()


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice, such as that of tuning without held-out data
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prints_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = given()
    test = doctest.DocTest(EXAMPLES[name], names, name, None, None, None)
    lines: list[str] = []
    with torch.random.fork_rng():
        doctest.DocTestRunner(Checker(), optionflags=FLAGS).run(test, out=lines.append)
    assert not lines, "".join(lines)


class Checker(doctest.OutputChecker):
    """Compares output only where the example shows some."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)
