"""The code blocks of pages that promise it run as they stand, one after the other."""

import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lapwing import storage
from lapwing.model.rules import RULES
from lapwing.predictive.links import LINKS

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("baselines.md", "botorch.md", "coming-from-laplace-torch.md", "extending.md", "lightning.md", "serving.md")


def sections() -> list[tuple[str, str]]:
    """(page and heading, the code of that section), for every section that has code."""
    found = []
    for page in PAGES:
        for part in re.split(r"^## ", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            code = "\n".join(re.findall(r"```python\n(.*?)```", part, re.DOTALL))
            found.append((f"{page}: {part.splitlines()[0]}", code))
    return [(name, code) for name, code in found if code]


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Take back what a page registers: other tests have classes of the same names, or mean the real laplace-torch."""
    tables = (storage._classes, storage._names, RULES, LINKS)
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "laplace"}
    before = [{key: copy.copy(value) for key, value in table.items()} for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)
    for name in [name for name in sys.modules if name.split(".")[0] == "laplace"]:
        del sys.modules[name]
    sys.modules.update(modules)


@pytest.mark.parametrize(("name", "code"), sections(), ids=[name for name, _ in sections()])
def test_the_code_of_a_section_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.strip(), "a section prints what came out"
