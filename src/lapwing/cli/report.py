"""`lapwing report`: compare a network with its posterior on labeled data, in a table and an HTML page."""

import argparse
from pathlib import Path

from lapwing.cli import command
from lapwing.cli.command import Command
from lapwing.errors import BadData
from lapwing.evaluation.evaluate import evaluate


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    command.add_model(parser)
    command.add_posterior(parser)
    add("data", metavar="DATA", help=f"test data: {command.DATA}")
    add(
        "--ood",
        type=named,
        action="append",
        default=[],
        metavar="NAME=DATA",
        help="data unlike the training data; may be given several times",
    )
    add(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="HTML page to write (default: %(default)s)",
    )
    add("--classes", type=command.names, metavar="NAMES", help="names of the classes, with commas")
    command.add_reading(parser)


def _run(options: argparse.Namespace) -> command.Answer:
    outside = dict(options.ood)
    if len(outside) < len(options.ood):
        raise BadData("two --ood data sets have the same name")
    command.require_other(options)
    if options.out.suffix not in (".html", ".htm"):
        raise BadData(f"a report is an HTML page: name it .html, not {options.out.name!r}")
    model = command.model_of(options)
    la = command.posterior_of(options, model)
    unlabeled = command.reading_of(options, labeled=False)
    labeled = command.reading_of(options)
    report = evaluate(
        {"MAP": model, "Laplace": la},
        labeled.read(options.data, model, la.likelihood),
        ood={name: unlabeled.read(text, model, la.likelihood) for name, text in outside.items()},
        train=None if options.train is None else labeled.read(options.train, model, la.likelihood),
        classes=options.classes,
    )
    print("\n".join(report.findings()))
    print(f"\n{report.table()}")
    files = {"model file": options.model, "weights": options.weights, "posterior": options.posterior}
    files |= {"test file": options.data, **{f"outside file: {name}": text for name, text in outside.items()}}
    page = report.to_html(
        options.out,
        heading=f"{type(model).__name__} on {Path(options.data).name}",
        facts={name: str(text) for name, text in files.items() if text is not None},
    )
    print(f"The report with its pictures: {page}")
    return {"out": page, **report.to_dict()}


def named(text: str) -> tuple[str, str]:
    """Read NAME=DATA."""
    name, _, data = text.partition("=")
    if not name or not data:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DATA, such as noise=noise.npz")
    return name, data


COMMAND = Command(
    "report",
    "compare the network with its posterior, in a table and an HTML page",
    "Score the network alone (MAP) and with its posterior (Laplace) on labeled data, and on data unlike the training "
    "data. Print what came out and the table, and write an HTML page with intervals, pictures and single items.",
    "lapwing report net.py:model net.lapwing test.npz --weights net.pt --ood noise=noise.npz --out report.html",
    _options,
    _run,
)
