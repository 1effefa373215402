"""Draw the pictures of README and of the quickstart by running the quickstart's own code.

    python docs/site/pictures.py docs/figures
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def sections() -> list[dict[str, Any]]:
    """Run every Python block of the quickstart, in the current folder, and return the names that each leaves behind."""
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        names: dict[str, Any] = {"__name__": "page"}
        exec(block, names)
        found.append(names)
    return found


def draw(folder: Path) -> None:
    """Write the quickstart's pictures, and before_and_after.png: the network alone, and with its 95 % band."""
    from matplotlib import use
    from matplotlib.figure import Figure

    use("Agg")
    folder = folder.resolve()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        _, names, _ = sections()
        for picture in Path(place).glob("*.png"):
            shutil.copyfile(picture, folder / f"quickstart_{picture.name}")
    x, y, grid, p = (names[name] for name in ("x", "y", "grid", "p"))
    low, high = (edge[:, 0] for edge in p.interval(0.95))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    before, after = figure.subplots(1, 2, sharey=True)
    for axes, title in ((before, "before: the network"), (after, "after: the network with Lapwing")):
        axes.plot(grid[:, 0], p.mean[:, 0], color="#00796b", lw=2)
        axes.plot(x[:, 0], y[:, 0], "o", color="#333333", ms=4)
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlim=(-4, 4), ylim=(-4, 4), xticks=[], yticks=[])
    after.fill_between(grid[:, 0], low, high, color="#00796b", alpha=0.2, lw=0)
    figure.savefig(folder / "before_and_after.png", dpi=130)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
