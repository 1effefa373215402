"""What the site does beyond Markdown: formulas, the changelog, lists of folders, and tutorials with their output.

mkdocs calls the `on_*` functions. `$$…$$` on lines of their own and `$…$` inside a line are LaTeX and become MathML,
which browsers draw without any script.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from tutorials import rendered

ROOT = Path(__file__).parent.parent.parent
REPOSITORY = "https://github.com/lapwing-torch/lapwing/blob/main"
BLOCK = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<![\w$\\`])\$([^$\n`]+?)\$(?![\w$])")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def drawn(latex: str, **options: str) -> str:
    """Convert LaTeX to MathML, and refuse commands that the converter would leave in the page as they are."""
    written = str(convert(latex, **options))
    if left := re.findall(r"\\[A-Za-z]+", written):
        raise ValueError(f"the formula {latex!r} has commands that cannot be drawn: {', '.join(left)}")
    return written


def formulas(text: str) -> str:
    """Write the LaTeX of a page as MathML, leaving code alone."""
    parts = CODE.split(text)
    for k in range(0, len(parts), 2):
        part = BLOCK.sub(lambda m: f'\n<div class="formula">{drawn(m[1], display="block")}</div>\n', parts[k])
        parts[k] = INLINE.sub(lambda m: f'<span class="formula">{drawn(m[1])}</span>', part)
    return "".join(parts)


def on_config(config: Any) -> Any:
    """Add the pages that experiments have written to the navigation, below the results."""
    results = next(part["Results"] for part in config["nav"] if isinstance(part, dict) and "Results" in part)
    results += [page for page in written() if page not in results]
    return config


def written() -> list[str]:
    """Name the pages that experiments have written: those with data beside them."""
    return [f"results/{path.stem}.md" for path in sorted((ROOT / "docs" / "results").glob("*.json"))]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made: the changelog, and every tutorial with its output."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changelog))
    folder = ROOT / "docs" / "tutorials"
    for script in sorted(folder.glob("*.py")):
        page, pictures = rendered(script)
        files.append(File.generated(config, f"tutorials/{script.stem}.md", content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Draw formulas, and send links that leave docs/ to the repository."""
    up = "../" * (page.file.src_uri.count("/") + 1)
    markdown = re.sub(rf"\]\({re.escape(up)}(?!\.)", f"]({REPOSITORY}/", markdown)
    return formulas(markdown)
