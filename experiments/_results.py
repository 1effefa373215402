"""What an experiment leaves: a table, a figure, its data, and a page that holds a paper to its words.

    result = Result("toy", "Toy regression x³", "001, Figs. 1 and 8", "python -m experiments.toy", seeds=(0,))
    result = result.with_rows([{"method": "kron", "NLL": 2.53}]).with_claims(Claim(...)).with_sentence("Kron is best.")
    result.finish(given.out, figure)      # prints the table; with a folder, writes toy.md, .json, .png and .svg

A folder with a gallery (`_gallery.py`), such as docs/results, gets its line of the experiment brought up to date.

A verdict is "holds", "holds in part" or "does not hold", with a reason; it follows from numbers by a rule that the
experiment states, never by hand. An experiment without a paper asks a question of our own (`answered`), whose answer is
"yes", "in part" or "no" by the same rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from experiments._gallery import ANSWERS, VERDICTS, refresh
from torch import Tensor

from lapwing.errors import BadData

SHOWN = 4  # significant digits


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, what was found here, and whether the sentence holds; `reason` is the rule that says so.

    With an empty `where` it is a question of our own, and the verdict is its answer.
    """

    quote: str
    where: str
    found: str
    verdict: str
    reason: str

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise BadData(f"a verdict is one of {', '.join(VERDICTS)}, got {self.verdict!r}")

    @property
    def told(self) -> str:
        """The verdict, or the answer to a question of our own."""
        return self.verdict if self.where else ANSWERS[self.verdict]

    @property
    def paragraphs(self) -> list[str]:
        """What a page says of it: the sentence or the question, the rule, what was found and the verdict."""
        said = f"> {self.quote}\n>\n> — {self.where}" if self.where else f"**{self.quote}**"
        return [said, f"Rule: {self.reason}", f"{self.found} **{self.told.capitalize()}.**"]


def answered(question: str, found: str, rule: str, *parts: bool) -> Claim:
    """Return a question of our own: "yes" where all parts of the rule are true, "in part" where some are, else "no"."""
    return Claim(question, "", found, verdict(*parts), rule)


def verdict(*parts: bool) -> str:
    """Return "holds" where all parts of a claim are true, "holds in part" where some are, else "does not hold"."""
    return VERDICTS[0] if parts and all(parts) else VERDICTS[1] if any(parts) else VERDICTS[2]


@dataclass(frozen=True)
class Result:
    """The outcome of one experiment. `data` is what the figure shows: numbers, lists and tensors by name."""

    name: str
    title: str
    paper: str
    command: str
    seeds: Sequence[int] = (0,)
    rows: Sequence[Mapping[str, Any]] = ()
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    sentence: str = ""

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a result from its JSON file."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**found | {"claims": [Claim(**each) for each in found["claims"]]})

    def with_sentence(self, sentence: str) -> Result:
        """Return the result with one sentence that says what came out; the gallery shows it."""
        return replace(self, sentence=sentence)

    def with_rows(self, rows: Sequence[Mapping[str, Any]]) -> Result:
        """Return the result with a table: one mapping from column to value per row."""
        return replace(self, rows=tuple(dict(row) for row in rows))

    def with_claims(self, *claims: Claim) -> Result:
        """Return the result with claims added."""
        return replace(self, claims=(*self.claims, *claims))

    def with_notes(self, *notes: str) -> Result:
        """Return the result with notes added: what was done differently, and why."""
        return replace(self, notes=(*self.notes, *notes))

    def with_data(self, **data: Any) -> Result:
        """Return the result with numbers for the JSON file."""
        return replace(self, data={**self.data, **data})

    def finish(self, out: Path | None, draw: Callable[[], Any] | None = None) -> None:
        """Print table and verdicts; with a folder, write the page, the data, and the figure that `draw` makes."""
        print(self.table())
        for claim in self.claims:
            said = f"“{claim.quote}” ({claim.where})." if claim.where else claim.quote
            print(f"{claim.told}: {said} Rule: {claim.reason} {claim.found}")
        if out is None:
            return
        out.mkdir(parents=True, exist_ok=True)
        if draw is not None:
            figure = draw()
            for suffix in ("png", "svg"):
                figure.savefig(out / f"{self.name}.{suffix}", bbox_inches="tight")
        (out / f"{self.name}.json").write_text(json.dumps(plain(asdict(self)), indent=1) + "\n", encoding="utf-8")
        (out / f"{self.name}.md").write_text(self.page(draw is not None), encoding="utf-8")
        refresh(out)
        print(f"written to {out}: {self.name}.md, .json" + (", .png, .svg" if draw is not None else ""))

    def table(self) -> str:
        """Return the rows as aligned text."""
        lines = _cells(self.rows)
        widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))] if lines else []
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)

    def page(self, figure: bool = True) -> str:
        """Return the page as Markdown: claims with verdicts, figure, table, notes, command."""
        seeds = f"seed {self.seeds[0]}" if len(self.seeds) == 1 else f"seeds {', '.join(map(str, self.seeds))}"
        source = f"Paper {self.paper}" if self.paper else "A question of our own"
        parts = [f"# {self.title}", f"{source}. Made by `{self.command}`, {seeds}."]
        repeated = any(claim.found == self.sentence for claim in self.claims)
        parts += [self.sentence] if self.sentence and not repeated else []
        for claim in self.claims:
            parts += claim.paragraphs
        parts += [f"![{self.title}]({self.name}.png)"] if figure else []
        lines = _cells(self.rows)
        if lines:
            rule = "|" + "---|" * len(lines[0])
            body = ["| " + " | ".join(line) + " |" for line in lines]
            parts.append("\n".join([body[0], rule, *body[1:]]))
        parts += ["\n".join(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n\n".join(parts) + "\n"


Scores = Mapping[str, Mapping[str, float]]
"""What a run found: a number per method and score."""


def gathered(runs: Sequence[Scores]) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Return the scores of several seeds by method and name: all of them, and their means."""
    each = {n: {key: [run[n][key] for run in runs] for key in row} for n, row in runs[0].items()}
    return each, {n: {key: sum(values) / len(values) for key, values in row.items()} for n, row in each.items()}


def spread(values: Sequence[float]) -> str:
    """Return the mean over seeds, with the standard deviation where there are several."""
    found = torch.tensor(list(values), dtype=torch.float64)
    mean = f"{found.mean():.{SHOWN}g}"
    if len(found) < 2:
        return mean
    equal = bool((found == found[0]).all())  # whose deviation need not be zero, by rounding
    return f"{mean} ± {0.0 if equal else found.std().item():.2g}"


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [names, *([_text(row.get(name, "")) for name in names] for row in rows)] if rows else []


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, float):
        return f"{value:.{SHOWN}g}"
    return str(value)


def plain(value: Any) -> Any:
    """Return a value as JSON holds it; numbers that are not finite are an error of the experiment."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise BadData(f"a result is {value}: an experiment writes finite numbers only")
    return value
