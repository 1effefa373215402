"""`lapwing reproduce` and `lapwing bench`: run experiments and benchmarks, which only the repository has."""

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lapwing.cli.command import Answer, Command
from lapwing.errors import BadData

STDERR = 2  # the file descriptor of standard error, for the output of programs that --json keeps out of the answer


def repository(start: Path | None = None) -> Path:
    """Find the nearest folder with benchmarks/, upwards from `start`, or from this file and the current folder."""
    for place in (Path(__file__), Path.cwd()) if start is None else (start,):
        for folder in (place.resolve(), *place.resolve().parents):
            if (folder / "benchmarks" / "__main__.py").exists():
                return folder
    raise BadData(
        "benchmarks and experiments are not part of the installed package: get Lapwing's repository, for "
        "`make bench` or `lapwing reproduce` there"
    )


def experiments() -> dict[str, Path]:
    """Return the scripts of experiments/ by name."""
    return {path.stem: path for path in sorted((repository() / "experiments").glob("[!_]*.py"))}


@dataclass(frozen=True)
class About:
    """What an experiment says about itself: the first line of its docstring, and its dict `ABOUT`.

        ABOUT = {"paper": "001, Figs. 3 and 4", "minutes": 12, "quick": 1.5}

    `paper` names the document of docs/results/index.md and the section that the experiment is from, and is empty for a
    question of our own. `minutes` is how long the full run takes on two cores with the default seeds, `quick` how long
    `--quick` takes; None means not timed. `page` and `picture`, relative to docs/results/, are for results that share a
    page with others; an experiment that writes its own page needs neither.
    """

    question: str
    paper: str
    minutes: float | None
    quick: float | None = None
    page: str = ""
    picture: str = ""

    @property
    def time(self) -> str:
        """How long the full run takes, and the quick one, as text."""
        full = "not timed" if self.minutes is None else f"{self.minutes:g} min"
        return full if self.quick is None else f"{full}, quick {self.quick:g} min"

    @property
    def document(self) -> str:
        """The number of the paper alone, or nothing."""
        return self.paper.partition(",")[0]

    @property
    def source(self) -> str:
        """Where the experiment is from, as text."""
        return f"paper {self.paper}" if self.paper else "our own"


def about(path: Path) -> About:
    """Read what a script says about itself, without running it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    question = (ast.get_docstring(tree) or "").partition("\n")[0]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ABOUT":
            try:
                return About(question, **ast.literal_eval(node.value))
            except (TypeError, ValueError) as error:
                raise BadData(f"ABOUT of {path.name} must be a dict of plain values: {error}") from error
    raise BadData(f'{path.name} has no ABOUT: add ABOUT = {{"paper": "001, Fig. 2", "minutes": 12}}')


def _reproduce_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--list",
        action="store_true",
        help="print name, time, source and question of each experiment; docs/results/index.md names the papers",
    )
    add("name", nargs="?", metavar="NAME", help="name of an experiment, as --list prints it")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments; `NAME --help` lists them")


def _reproduce(options: argparse.Namespace) -> Answer:
    known = experiments()
    if options.list:
        found = {name: about(path) for name, path in known.items()}
        columns = [[name, each.time, each.source, each.question] for name, each in found.items()]
        widths = [max(map(len, column)) for column in zip(*columns)]
        for row in columns:
            print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip())
        return {"experiments": {name: asdict(each) for name, each in found.items()}}
    if options.name not in known:
        came = "no name was given" if options.name is None else f"there is no experiment {options.name!r}"
        raise BadData(f"{came}; there are {', '.join(known)} (--list says more)")
    root = str(known[options.name].parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{options.name}", *options.arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=STDERR if options.json else None,
    )
    if done.returncode:
        raise BadData(f"{options.name} stopped with exit code {done.returncode}; its own message is above")
    return {"name": options.name, "arguments": options.arguments, "seconds": time.perf_counter() - begin}


def _bench_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="few data and few measurements: ten minutes on two cores")
    add("--out", type=Path, default=Path("bench-output"), help="folder for the results (default: %(default)s)")
    add("--threads", type=int, nargs="+", default=[1], help="1 (default) measures CPU time, more measure wall time")
    add("--workload", help="only these networks, separated by commas, such as lenet,resnet20")
    add("--operation", help="only operations whose names begin with this, such as fit-kron")
    add("--ours-only", action="store_true", help="leave out laplace-torch and curvlinops")
    add("--resume", action="store_true", help="continue an interrupted run")


def _bench(options: argparse.Namespace) -> Answer:
    """Run `python -m benchmarks` in the repository."""
    arguments = ["--out", str(options.out.resolve()), "--threads", *map(str, options.threads)]
    for name in ("workload", "operation"):
        arguments += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    arguments += [f"--{name.replace('_', '-')}" for name in ("quick", "ours_only", "resume") if getattr(options, name)]
    output = STDERR if options.json else None
    done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=repository(), stdout=output)
    if done.returncode:
        raise BadData(f"the benchmark stopped with exit code {done.returncode}; its own message is above")
    return {"out": options.out, "results": json.loads((options.out / "bench.json").read_text(encoding="utf-8"))}


REPRODUCE = Command(
    "reproduce",
    "run one of the repository's experiments",
    "Run experiments/NAME.py of the repository that this package, or the current folder, belongs to. Arguments after "
    "NAME go to the experiment. Most experiments need the folder named by LAPWING_DATA.",
    "lapwing reproduce uci_regression --help",
    _reproduce_options,
    _reproduce,
)
BENCH = Command(
    "bench",
    "measure time and memory, and compare them with laplace-torch and curvlinops",
    "Measure fits, predictions and evidence in gradient epochs, also with laplace-torch and curvlinops, and write a "
    "table, a JSON file and a picture of growth. Needs the repository and the folder named by LAPWING_DATA.",
    "lapwing bench --quick --out bench-output",
    _bench_options,
    _bench,
)
