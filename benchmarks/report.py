"""Tables from measured cells: `python -m benchmarks.report bench-output/bench.json --into docs/benchmarks.md`.

`--into` replaces what stands between the lines `<!-- bench: KIND -->` and `<!-- end -->` of a Markdown file. KIND is
`peers` (the rows that laplace-torch has too), `short` (the rows that have a target) or `long` (everything).
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import copyfile
from typing import Any

from benchmarks.cell import Cell, Outcome
from benchmarks.growth import findings
from benchmarks.operations import operation
from benchmarks.results import Measurement
from benchmarks.targets import Verdict, target

HEADER = (
    "network", "operation", "N", "Lapwing: gradient epochs", "Lapwing: MB", "peer", "peer: gradient epochs", "peer: MB",
    "time ratio", "memory ratio", "difference", "target", "target reached",
)  # fmt: skip
MARK = {True: "yes", False: "**no**", None: "–"}
NAMES = {
    "mlp": "MLP 784-1024-1024-10",
    "lenet": "LeNet-5",
    "lenet-last": "LeNet-5, last layer",
    "resnet20": "ResNet-20",
    "resnet20-frozen": "ResNet-20, norms frozen",
    "resnet18": "ResNet-18",
    "vit": "vision transformer",
    "llama": "Llama 260k",
    "head": "last layer 1,280 → 1,000",
}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one row per cell and peer."""
    rows = [row for outcome in outcomes for row in rows_of(outcome)]
    return markdown(HEADER, rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with escaped cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def rows_of(outcome: Outcome) -> list[list[str]]:
    cell, ours = outcome.cell, outcome.ours
    asked = target(cell.workload, cell.operation)
    verdict: Verdict = asked.reached(outcome) if asked else None
    first = [NAMES.get(cell.workload, cell.workload), cell.op.title, count(ours.n), *own(ours)]
    last = [asked.text if asked else "", MARK[verdict] if asked else ""]
    if not outcome.peers:
        return [[*first, "", "", "", "", "", "", *last]]
    rows = []
    for k, peer in enumerate(outcome.peers):
        apart = outcome.differences[k]
        ratios = [times(outcome.speed(k)), times(outcome.thrift(k)), "" if apart is None else f"{apart:.0e}"]
        head, tail = (first, last) if k == 0 else ([*first[:3], "", ""], ["", ""])
        rows.append([*head, named(peer, ours), *own(peer), *ratios, *tail])
    return rows


def own(m: Measurement) -> list[str]:
    """Return gradient epochs (and forward passes for a prediction) and megabytes, or the error of a failed run."""
    if m.error:
        return [shorten(m.error), ""]
    time = number(m.epochs)
    if operation(m.operation).of_new and m.forwards is not None:
        time += f" ({number(m.forwards)} forward passes)"
    return [time, "" if m.peak is None else number(m.peak / 1e6)]


def shorten(text: str, length: int = 90) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def count(n: int) -> str:
    return f"{n:,}"


def number(value: float | None) -> str:
    """Write a number with three figures, without exponents: 0.0123, 1.23, 12.3, 1,234."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(value: float | None) -> str:
    return "" if value is None else f"{number(value)} ×"


def short(outcomes: Sequence[Outcome]) -> str:
    """Return the rows that have a target, with the first peer: how the project stands against its own aims."""
    rows = []
    for outcome in outcomes:
        cell, asked = outcome.cell, target(outcome.cell.workload, outcome.cell.operation)
        if asked:
            what = [NAMES.get(cell.workload, cell.workload), cell.op.title, count(outcome.ours.n)]
            rows.append([*what, phrase(outcome.ours), beside(outcome), asked.text, MARK[asked.reached(outcome)]])
    return markdown(("network", "operation", "N", "Lapwing", "peer", "target", "target reached"), rows)


def beside(outcome: Outcome) -> str:
    """Say what the first peer needs, in its own figures and as multiples of ours."""
    if not outcome.peers:
        return ""
    peer = outcome.peers[0]
    said = f"{named(peer, outcome.ours)}: {phrase(peer)}"
    if outcome.speed(0) is None:
        return said
    return f"{said}; {times(outcome.speed(0))} the time, {times(outcome.thrift(0))} the memory"


def named(peer: Measurement, ours: Measurement) -> str:
    """Name the peer, with its number of data if that differs from ours."""
    return peer.by + ("" if peer.n == ours.n else f" (N {count(peer.n)})")


def phrase(m: Measurement) -> str:
    """Write epochs, forward passes and megabytes with their units, or the error of a failed run."""
    time, memory = own(m)
    return f"{time.replace(' (', ' epochs (') if '(' in time else f'{time} epochs'}, {memory} MB" if memory else time


def peers(outcomes: Sequence[Outcome]) -> str:
    """Return the rows that laplace-torch has too: what each side needs, in gradient epochs or forward passes."""
    rows = []
    for outcome in outcomes:
        for k, peer in enumerate(outcome.peers):
            if peer.by == "laplace-torch":
                what = [NAMES.get(outcome.cell.workload, outcome.cell.workload), outcome.cell.op.title]
                ratios = [times(outcome.speed(k)), times(outcome.thrift(k))]
                rows.append([*what, plainly(outcome.ours), plainly(peer), *ratios])
    return markdown(("network", "operation", "Lapwing", "laplace-torch", "time ratio", "memory ratio"), rows)


def plainly(m: Measurement) -> str:
    """Write one cost with its unit, and the memory above the model and the data."""
    if m.error:
        return "refuses the network" if "un-supported layers" in m.error else shorten(m.error)
    forwards = operation(m.operation).of_new and m.forwards is not None
    cost = f"{number(m.forwards)} forward passes" if forwards else f"{number(m.epochs)} gradient epochs"
    return cost if m.peak is None else f"{cost}, {number(m.peak / 1e6)} MB"


def growth_table(points: Sequence[tuple[str, float, Outcome]]) -> str:
    """Return a table of seconds and megabytes at each size."""
    rows = []
    for axis, size, outcome in points:
        for m in (outcome.ours, *outcome.peers):
            peak = "" if m.peak is None else number(m.peak / 1e6)
            seconds = shorten(m.error, 40) if m.error else number(m.seconds)
            rows.append([f"{axis} = {count(int(size))}", m.operation, m.by, seconds, number(m.gradient), peak])
    return markdown(("size", "operation", "library", "seconds", "seconds per gradient epoch", "MB"), rows)


def document(record: dict[str, Any]) -> str:
    """Return the whole report."""
    parts = [f"# Benchmark\n\n{conditions(record)}\n\n{import_line(record)}"]
    for threads, outcomes in by_threads(record).items():
        clock = "CPU time" if threads == 1 else "wall time"
        parts.append(f"## {threads} thread{'s' if threads > 1 else ''} ({clock})\n\n{table(outcomes)}")
    points = growth_of(record)
    if points:
        said = "\n".join(f"- {sentence}" for sentence in findings(points))
        parts.append(f"## How time and memory grow\n\n![growth](growth.png)\n\n{said}\n\n{growth_table(points)}")
    return "\n\n".join(parts) + "\n"


def conditions(record: dict[str, Any]) -> str:
    place = record["place"]
    busy = max(place["load"]) > 1.5 * place["cores"]
    warning = " The machine was busy with other work: these figures are provisional." if busy else ""
    return (
        f"{place['date']}, {place['processor']}, {place['cores']} cores, load {place['load'][0]:.1f} before and "
        f"{place['load'][1]:.1f} after; Python {place['python']}, torch {place['torch']}, "
        f"laplace-torch {place['laplace-torch']}, curvlinops {place['curvlinops']}; Lapwing at commit "
        f"{place['commit']}. "
        f"Printed by `{place['command']}` in {place['minutes']:.0f} minutes ({place['cpu_minutes']:.0f} of CPU time)."
        + warning
    )


def import_line(record: dict[str, Any]) -> str:
    """Say how long imports take, relative to `import torch`."""
    found = record.get("imports") or {}
    if not found.get("torch"):
        return "Import times were not measured."
    ours = found["lapwing"] / found["torch"]
    line = (
        f"`import lapwing` takes {ours:.2f} × `import torch` (target ≤ 1.15: {'reached' if ours <= 1.15 else 'missed'})"
    )
    if "laplace" in found:
        line += f"; `import laplace` takes {found['laplace'] / found['torch']:.2f} ×"
    return line + f". `import torch` takes {found['torch']:.2f} s."


def by_threads(record: dict[str, Any]) -> dict[int, list[Outcome]]:
    groups: dict[int, list[Outcome]] = {}
    for raw in record["cells"]:
        outcome = restored(raw)
        groups.setdefault(outcome.cell.threads, []).append(outcome)
    return groups


def growth_of(record: dict[str, Any]) -> list[tuple[str, float, Outcome]]:
    return [(raw["axis"], raw["size"], restored(raw["outcome"])) for raw in record.get("growth", ())]


def stored(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome)


def restored(raw: dict[str, Any]) -> Outcome:
    cell = dict(raw["cell"]) | {"peers": tuple(raw["cell"]["peers"])}
    peers = tuple(Measurement(**peer) for peer in raw["peers"])
    return Outcome(Cell(**cell), Measurement(**raw["ours"]), peers, tuple(raw["differences"]))


def insert(text: str, kind: str, content: str) -> str:
    """Replace what stands between the marks of this kind."""
    pattern = re.compile(rf"(<!-- bench: {kind} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def nested(text: str) -> str:
    """Return the report as a part of a page: without its title, and with headings one level lower."""
    return re.sub(r"^##", "###", text.split("\n", 2)[2], flags=re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    top.add_argument("record", type=Path)
    top.add_argument("--into", type=Path, nargs="*", default=())
    options = top.parse_args(arguments)
    record = json.loads(options.record.read_text())
    groups = by_threads(record)
    few = "\n\n".join(
        f"With {threads} thread{'s' if threads > 1 else ''}:\n\n{short(outcomes)}"
        for threads, outcomes in groups.items()
    )
    head = f"{conditions(record)}\n\n{import_line(record)}"
    if not options.into:
        print(document(record))
    for path in options.into:
        before = path.read_text()
        text = insert(before, "short", f"\n{head}\n\n{few}\n")
        text = insert(text, "peers", f"\n{peers(groups[min(groups)])}\n\n{head}\n")
        path.write_text(insert(text, "long", "\n" + nested(document(record))))
        drawn = options.record.with_name("growth.png")
        if "<!-- bench: long -->" in before and drawn.exists():
            copyfile(drawn, path.with_name("growth.png"))


if __name__ == "__main__":
    main()
