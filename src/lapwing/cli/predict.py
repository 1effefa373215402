"""`lapwing predict` and `lapwing report`: write predictions for data, or compare their scores with the network's."""

import argparse
import csv
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from lapwing.cli import command
from lapwing.cli.command import Command
from lapwing.cli.data import require_order
from lapwing.errors import BadData
from lapwing.evaluation.evaluate import evaluate
from lapwing.laplace import Laplace
from lapwing.predictive.table import columns_of
from lapwing.storage import replacing

Fields = Mapping[str, Tensor]


def _predict_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    command.add_model(parser)
    command.add_posterior(parser)
    add("data", metavar="DATA", help=f"inputs: {command.DATA}; targets are not read")
    add("--out", type=Path, required=True, metavar="FILE", help="file to write: .csv, .npz or .safetensors")
    add(
        "--level",
        type=command.share,
        default=0.95,
        help="probability of intervals in regression (default: %(default)s)",
    )
    add("--novelty", action="store_true", help="add a score of how unlike the training data an input is; takes longer")
    command.add_reading(parser)


def _predict(options: argparse.Namespace) -> command.Answer:
    command.require_other(options)
    writer_for(options.out)
    model = command.model_of(options)
    la = command.posterior_of(options, model)
    data = command.reading_of(options, labeled=False).read(options.data, model, la.likelihood)
    require_order(data, options.data)
    begin = time.perf_counter()
    names: dict[str, None] = {}
    count = write_predictions(options.out, _fields(la, data, options, names))
    spent = time.perf_counter() - begin
    print(f"{count:,} predictions in {spent:.1f} s; written to {options.out}")
    return {"out": options.out, "items": count, "seconds": spent, "fields": list(names)}


def _fields(la: Laplace, data: Any, options: argparse.Namespace, names: dict[str, None]) -> Iterator[Fields]:
    """Yield the fields to write for each batch, one row per item, and collect their names in `names`."""
    total = len(data) if hasattr(data, "__len__") else None
    for prediction in tqdm(la.predict_loader(data), "predict", total, disable=None, delay=1, leave=False):
        fields = prediction.fields(options.level)
        if options.novelty:
            fields["novelty"] = prediction.novelty
        names.update(dict.fromkeys(fields))
        yield {name: value.detach().cpu() for name, value in fields.items()}


def write_predictions(path: Path, batches: Iterable[Fields]) -> int:
    """Write the fields of all batches, completely or not at all, and return the number of items."""
    with replacing(path) as temporary:
        return writer_for(path)(temporary, batches)


def writer_for(path: Path) -> Callable[[Path, Iterable[Fields]], int]:
    """Return the writer for the suffix of a file."""
    if path.suffix not in WRITERS:
        raise BadData(f"predictions are written as {', '.join(WRITERS)}, not as {path.name!r}")
    return WRITERS[path.suffix]


def table_of(fields: Fields) -> dict[str, Tensor]:
    """Return the columns of a table with one row per item; tokens and pixels have no such table."""
    for name, value in fields.items():
        if value.ndim > 2:
            raise BadData(
                f"{name!r} has shape {tuple(value.shape)}, which does not fit a table: write to .npz or .safetensors"
            )
    return columns_of(fields, 1)


def _write_csv(path: Path, batches: Iterable[Fields]) -> int:
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for fields in batches:
            columns = table_of(fields)
            if not count:
                writer.writerow(columns)
            shown = [[format(v, ".8g") for v in column.tolist()] for column in columns.values()]
            writer.writerows(zip(*shown, strict=True))
            count += len(shown[0])
    return count


def _write_whole(path: Path, batches: Iterable[Fields]) -> int:
    parts = list(batches)
    whole = {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}
    if path.suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in whole.items()})  # type: ignore[arg-type]
    else:
        save_file(whole, path)
    return len(next(iter(whole.values())))


WRITERS = {".csv": _write_csv, ".npz": _write_whole, ".safetensors": _write_whole}


def _report_options(parser: argparse.ArgumentParser) -> None:
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


def _report(options: argparse.Namespace) -> command.Answer:
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


PREDICT = Command(
    "predict",
    "write predictions with their uncertainty to a file",
    "Write predictions to a file, one row per input in the order of the data. For classes: label, confidence, "
    "entropy, epistemic (mutual information) and probs. For values: mean, stddev (noise included), the variances "
    "epistemic and aleatoric, and the bounds lower and upper of a central interval.",
    "lapwing predict net.py:model net.lapwing test.npz --weights net.pt --out predictions.csv",
    _predict_options,
    _predict,
)
REPORT = Command(
    "report",
    "compare the network with its posterior, in a table and an HTML page",
    "Score the network alone (MAP) and with its posterior (Laplace) on labeled data, and on data unlike the training "
    "data. Print findings and a table, and write an HTML page with intervals, pictures and single items.",
    "lapwing report net.py:model net.lapwing test.npz --weights net.pt --ood noise=noise.npz --out report.html",
    _report_options,
    _report,
)
