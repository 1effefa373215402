"""Run a tutorial and write it as a page: text, code, and what the code printed and drew.

A tutorial is a script in jupytext's percent format: cells begin with `# %%`, text cells with `# %% [markdown]`. A
result is kept until the script or the package changes, in the folder named by LAPWING_DOCS_CACHE (default: lapwing-docs
among the temporary files). With LAPWING_DOCS_RUN=0 pages show code without output, which is enough to check the site.

    python docs/site/tutorials.py docs/tutorials/calibration.py      # prints the page
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def cells(script: str) -> list[tuple[str, str]]:
    """Return ("markdown" | "code", text) per cell; what stands before the first cell is left out."""
    found = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            found.append(("markdown", "\n".join(re.sub(r"^# ?", "", line) for line in body.strip().splitlines())))
        else:
            found.append(("code", body.strip("\n")))
    return found


def run_cell(code: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Execute one cell; return what it printed and the value of its last expression."""
    tree, value = ast.parse(code), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, "tutorial", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "tutorial", "eval"), names)
    return out.getvalue(), value


def described(text: str) -> str:
    """Return the last paragraph of a text cell without its marks: it says what the next picture shows."""
    return re.sub(r"[`*\[\]]|\(\S+\)", "", re.sub(r"\s+", " ", text.strip().split("\n\n")[-1].lstrip("# ")))


def run(script: Path) -> tuple[str, dict[str, bytes]]:
    """Execute the cells of a tutorial in order; return its page and its pictures by file name."""
    names: dict[str, Any] = {"__name__": "__main__"}
    page, pictures, said = [], {}, ""
    for kind, text in cells(script.read_text(encoding="utf-8")):
        if kind == "markdown":
            page.append(text)
            said = described(text)
            continue
        printed, value = run_cell(text, names)
        page.append(f"```python\n{text}\n```")
        if hasattr(value, "savefig"):
            name, buffer = f"{script.stem}-{len(pictures) + 1}.png", io.BytesIO()
            value.savefig(buffer, dpi=110, bbox_inches="tight")
            pictures[name] = buffer.getvalue()
            page.append(f"![{said}]({name})")
            value = None
        printed += "" if value is None else f"{value!r}\n"
        if printed.strip():
            page.append(f"```text\n{printed.rstrip()}\n```")
    source = f"https://github.com/lapwing-torch/lapwing/blob/main/docs/tutorials/{script.name}"
    page.append(f"*This page is the output of [`docs/tutorials/{script.name}`]({source}); `make docs` runs it.*")
    return "\n\n".join(page) + "\n", pictures


def plain(script: Path) -> str:
    """Return the page without what its code prints and draws."""
    parts = cells(script.read_text(encoding="utf-8"))
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in parts) + "\n"


def _key(script: Path) -> str:
    sources = [*sorted((ROOT / "src").rglob("*.py")), script, Path(__file__)]
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def rendered(script: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page and the pictures of a tutorial: kept ones where nothing has changed, else by a new process."""
    if os.environ.get("LAPWING_DOCS_RUN") == "0":
        return plain(script), {}
    folder = Path(os.environ.get("LAPWING_DOCS_CACHE", Path(tempfile.gettempdir()) / "lapwing-docs"))
    kept = folder / f"{script.stem}-{_key(script)}.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"running {script.name}", file=sys.stderr)
        begin = time.perf_counter()
        subprocess.run([sys.executable, __file__, str(script), str(kept)], check=True, cwd=ROOT)
        print(f"  {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    found = json.loads(kept.read_text(encoding="utf-8"))
    return found["page"], {name: b64decode(text) for name, text in found["pictures"].items()}


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("Agg")
    text, drawn = run(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        part = Path(sys.argv[2]).with_suffix(".part")
        encoded = {name: b64encode(content).decode() for name, content in drawn.items()}
        part.write_text(json.dumps({"page": text, "pictures": encoded}), encoding="utf-8")
        part.replace(sys.argv[2])
    else:
        print(text)
