"""The gallery in docs/results/index.md: one picture and one sentence per experiment, in one line of a table each.

    python -m experiments._gallery        # writes the lines between the marks anew

Titles, sentences and verdicts come from the JSON files beside the page, all else from what the scripts say of
themselves. An experiment that writes its results there does this by itself.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lapwing.cli.repository import About, about, experiments, repository

VERDICTS = ("holds", "holds in part", "does not hold")
BEGIN, END = "<!-- gallery: made by python -m experiments._gallery -->", "<!-- end of the gallery -->"
SECTIONS = {
    "000": "Generalized Laplace (paper 000)",
    "001": "Kronecker factors (paper 001)",
    "002": "Evidence and linearized predictions (paper 002)",
    "003": "Without a matrix (paper 003)",
    "": "Our own questions",
}


@dataclass(frozen=True)
class Entry:
    """What the gallery shows of one experiment; `page` and `picture` are relative to the gallery, and may be empty."""

    page: str
    picture: str
    title: str
    text: str

    @classmethod
    def of(cls, name: str, known: About, folder: Path) -> Entry:
        """Read an experiment's results where they are in the folder, else what it says of itself."""
        made = folder / f"{name}.json"
        tail = f"`lapwing reproduce {name}`, {known.time}."
        if not made.exists():
            return cls(known.page, known.picture, f"`{name}`", f"{known.question} {tail}")
        result = json.loads(made.read_text(encoding="utf-8"))
        counts = Counter(claim["verdict"] for claim in result["claims"])
        told = ", ".join(f"{verdict}: {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
        picture = f"{name}.png" if (folder / f"{name}.png").exists() else ""
        sentence = result.get("sentence") or known.question
        return cls(f"{name}.md", picture, result["title"], f"{sentence} Claims ({told}). {tail}" if told else tail)

    @property
    def told(self) -> str:
        """Title and text."""
        return f"**{f'[{self.title}]({self.page})' if self.page else self.title}**. {self.text}"

    @property
    def row(self) -> str:
        """The line of a table: picture and text."""
        shown = f"![{self.title.strip('`')}]({self.picture})"
        return f"| {f'[{shown}]({self.page})' if self.page else shown} | {self.told.replace('|', chr(92) + '|')} |"


def gallery(folder: Path) -> str:
    """Return all sections as Markdown: in each a table of what has a picture, and a list of the rest."""
    found = {name: about(path) for name, path in experiments().items()}
    parts = []
    for key, heading in SECTIONS.items():
        inside = [Entry.of(name, each, folder) for name, each in found.items() if each.document == key]
        rows, rest = [each.row for each in inside if each.picture], [f"- {e.told}" for e in inside if not e.picture]
        parts += [f"## {heading}"] if inside else []
        parts += ["\n".join(["| | |", "|---|---|", *rows])] if rows else []
        parts += ["\n".join(rest)] if rest else []
    return "\n\n".join(parts)


def refresh(folder: Path) -> bool:
    """Write the gallery of a folder anew, where its index.md has the marks of one; say whether it has."""
    page = folder / "index.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if BEGIN not in text or END not in text:
        return False
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{gallery(folder)}\n\n{END}{after}", encoding="utf-8")
    return True


if __name__ == "__main__":
    refresh(repository() / "docs" / "results")
