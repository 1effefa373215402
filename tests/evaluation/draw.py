"""Run the code of docs/report.md; `python -m tests.evaluation.draw docs/figures` keeps its pictures."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"!\[([^\]]+)\]\(figures/(\w+\.png)\)", PAGE)


def run() -> dict[str, Any]:
    """Run the blocks of the page, from top to bottom in the current folder, and return their names."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/report.md", "exec"), names)
    return names


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run()
        for _, name in PICTURES:
            shutil.copy(name, target / name)
