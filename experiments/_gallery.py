"""The gallery in docs/results/index.md: what of the papers is tried where, then a picture and a sentence of each.

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
ANSWERS = dict(zip(VERDICTS, ("yes", "in part", "no")))  # of questions of our own
BEGIN, END = "<!-- gallery: made by python -m experiments._gallery -->", "<!-- end of the gallery -->"
SECTIONS = {
    "000": "Generalized Laplace (paper 000)",
    "001": "Kronecker factors (paper 001)",
    "002": "Evidence and linearized predictions (paper 002)",
    "003": "Without a matrix (paper 003)",
    "": "Our own questions",
}

COVERED = (
    ("001", "toy regression x³ beside HMC, untuned and tuned (Figs. 1, 8)", ("toy_cubic",)),
    ("001", "MNIST dropout network: entropy on notMNIST (Fig. 2), accuracies (Table 1)", ("mnist_dropout",)),
    ("001", "untargeted and targeted attacks (Figs. 3, 4)", ("mnist_attacks",)),
    ("001", "with and without augmentation, minibatch against exact Hessian (Figs. 6, 7)", ("mnist_ablation",)),
    ("001", "wide residual network, right and wrong classifications (Fig. 5, Table 2)", ("wide_resnet",)),
    ("001", "curvature from many augmented passes (section 5.4)", ("augmented_curvature",)),
    ("001", "evidence-weighted averaging, active learning (outlook)", ("evidence_averaging", "active_learning")),
    ("001", "KFRA beside KFAC (appendices B, C and G)", ("kfra",)),
    ("001", "distilling the posterior into one forward pass (appendix D)", ("distill",)),
    ("000", "toy cubic by structure (Fig. 2)", ("toy_structures",)),
    ("000", "accuracy and entropy against T: LeNet-5, ResNet-20 (Figs. 3, 4)", ("temperature_curves",)),
    ("000", "the same out of distribution (Fig. 5), T and τ in Eq. 23–24", ("temperature_ood",)),
    ("000", "priors against its out-of-distribution weakness (outlook)", ("ood_priors",)),
    ("002", "evidence per structure as lower bounds", ("evidence_bounds",)),
    ("002", "one prior per layer on CIFAR-10 during training, runtime ratio", ("cifar10_priors",)),
    ("002", "architecture comparison, invariances, pruning", ("architectures", "invariances", "pruning")),
    ("002", "the sampled predictive underfits, in one and two dimensions", ("underfitting",)),
    ("002", "heteroscedastic toy", ("heteroscedastic_toy",)),
    ("002", "CRISPR-Cas13 knockdown, beside homoscedastic and β-NLL networks", ("crispr",)),
    ("002", "the linearized model as a Gaussian process", ("function_space",)),
    ("002", "training with the evidence: what it costs, UCI regression", ("online", "uci_regression")),
    ("002", "the tuned linearized predictive on UCI classification", ("uci_classification",)),
    ("003", "matrix-free solves, samples and evidence against size", ("matrixfree", "growth")),
    ("003", "a low-rank curvature in three ways", ("lowrank",)),
    ("003", "structures beside the exact GGN", ("structures",)),
    ("003", "preconditioners of conjugate gradients", ("preconditioners",)),
    ("003", "inputs of another kind", ("novel_inputs",)),
)
"""The experiments of the papers: document, what is tried there, and the scripts that try it here."""


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
        told = verdicts_told(result)
        picture = f"{name}.png" if (folder / f"{name}.png").exists() else ""
        sentence = result.get("sentence") or known.question
        return cls(f"{name}.md", picture, result["title"], f"{sentence} {told}. {tail}" if told else tail)

    @property
    def told(self) -> str:
        """Title and text."""
        return f"**{f'[{self.title}]({self.page})' if self.page else self.title}**. {self.text}"

    @property
    def row(self) -> str:
        """The line of a table: picture and text."""
        shown = f"![{self.title.strip('`')}]({self.picture})"
        return f"| {f'[{shown}]({self.page})' if self.page else shown} | {self.told.replace('|', chr(92) + '|')} |"


def verdicts_told(result: dict) -> str:
    """Return how many claims of papers got which verdict, and how many questions of our own which answer."""
    parts = []
    for kind, words, of_paper in (("Claims", dict(zip(VERDICTS, VERDICTS)), True), ("Answers", ANSWERS, False)):
        counts = Counter(claim["verdict"] for claim in result["claims"] if bool(claim["where"]) == of_paper)
        told = ", ".join(f"{word}: {counts[verdict]}" for verdict, word in words.items() if counts[verdict])
        parts += [f"{kind} ({told})"] if told else []
    return "; ".join(parts)


def covered(folder: Path, known: dict[str, About]) -> str:
    """Return a table with one line per script of `COVERED`: paper, experiment, page, size of the run, verdicts."""
    lines = ["| paper | experiment | page and name | size of the run on the page | claims |", "|---|---|---|---|---|"]
    for document, text, names in COVERED:
        for name in names:
            made = folder / f"{name}.json"
            if made.exists():
                result = json.loads(made.read_text(encoding="utf-8"))
                size = result["command"].partition(f"experiments.{name}")[2].strip()
                tail = f"`{size}` | {verdicts_told(result)}" if size else f"as by default | {verdicts_told(result)}"
                lines.append(f"| {document} | {text} | [`{name}`]({name}.md) | {tail} |")
            else:
                lines.append(f"| {document} | {text} | [`{name}`]({known[name].page}) | on the page | on the page |")
    return "\n".join(lines)


def gallery(folder: Path) -> str:
    """Return all sections as Markdown: in each a table of what has a picture, and a list of the rest."""
    found = {name: about(path) for name, path in experiments().items()}
    parts = ["## What of the papers is tried where", covered(folder, found)]
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
