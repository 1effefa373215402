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
    command.add_reading(parser)


def _run(options: argparse.Namespace) -> None:
    outside = dict(options.ood)
    if len(outside) < len(options.ood):
        raise BadData("two --ood data sets have the same name")
    command.require_other(options)
    if options.out.suffix not in (".html", ".htm"):
        raise BadData(f"a report is an HTML page: name it .html, not {options.out.name!r}")
    model = command.model_of(options)
    la = command.posterior_of(options, model)
    unlabeled = command.reading_of(options, labeled=False)
    report = evaluate(
        {"MAP": model, "Laplace": la},
        command.reading_of(options).read(options.data, model, la.likelihood),
        ood={name: unlabeled.read(text, model, la.likelihood) for name, text in outside.items()},
    )
    print(report.table())
    page = report.to_html(
        options.out,
        heading=f"{type(model).__name__} on {Path(options.data).name}",
        notes=tuple(la.summary().split("\n")),
    )
    print(f"The report with its pictures: {page}")


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
    "data. Print the table, and write it with pictures to an HTML page.",
    "lapwing report net.py:model net.lapwing test.npz --weights net.pt --ood noise=noise.npz --out report.html",
    _options,
    _run,
)
