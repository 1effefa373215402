"""`lapwing predict`: predictions with their uncertainty, in a table."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lapwing.cli import command
from lapwing.cli.command import Command
from lapwing.cli.data import require_order
from lapwing.cli.predictions import Fields, fields_of, write_predictions, writer_for
from lapwing.laplace import Laplace


def _options(parser: argparse.ArgumentParser) -> None:
    command.add_model(parser)
    command.add_posterior(parser)
    parser.add_argument("data", metavar="DATA", help=f"inputs: {command.DATA}; targets are left unread")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="where to write: .csv, .npz or .safetensors"
    )
    parser.add_argument("--level", type=share, default=0.95, help="of the intervals in regression (%(default)s)")
    parser.add_argument(
        "--novelty", action="store_true", help="add the score of how unlike the training data an item is; takes longer"
    )
    command.add_reading(parser)


def _run(options: argparse.Namespace) -> None:
    command.require_other(options)
    writer_for(options.out)
    model = command.model_of(options)
    la = command.posterior_of(options, model)
    data = command.reading_of(options, labeled=False).read(options.data, model, la.likelihood)
    require_order(data, options.data)
    begin = time.perf_counter()
    count = write_predictions(options.out, _fields(la, data, options))
    print(f"{count:,} predictions in {time.perf_counter() - begin:.1f} s; written to {options.out}")


def _fields(la: Laplace, data: Any, options: argparse.Namespace) -> Iterator[Fields]:
    total = len(data) if hasattr(data, "__len__") else None
    for prediction in tqdm(la.predict_loader(data), "predict", total, disable=None, delay=1, leave=False):
        yield fields_of(prediction, level=options.level, novelty=options.novelty)


def share(text: str) -> float:
    """A number between 0 and 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


COMMAND = Command(
    "predict",
    "write predictions with their uncertainty to a file",
    "Write predictions to a file, one row an item in the order of the data. Classes: label, confidence, entropy, "
    "epistemic (mutual information), probs. Values: mean, stddev (noise included), the variances epistemic and "
    "aleatoric, and the bounds lower and upper of a central interval.",
    "lapwing predict net.py:model net.lapwing test.npz --weights net.pt --out predictions.csv",
    _options,
    _run,
)
