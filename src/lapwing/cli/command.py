"""The class of a command, and the arguments that several commands share."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lapwing.cli.data import Reading
from lapwing.cli.models import read_model
from lapwing.errors import BadData, UnsupportedModel
from lapwing.fitting import load
from lapwing.laplace import Laplace
from lapwing.likelihoods import Likelihood, likelihood_from_spec
from lapwing.saving import read
from lapwing.storage import named

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
Answer = Mapping[str, Any]
"""The results of a command by name: numbers, texts, paths, tensors, and lists or mappings of these."""

READ = ("model", "weights", "posterior", "data", "train", "tune")  # options that name what is read
DATA = ".safetensors or .npz with x and y, .csv with a header, or file.py:name"


@dataclass(frozen=True, eq=False)
class Command:
    """One command of the command line. `run` prints a text for people and returns the object that --json prints."""

    name: str
    summary: str
    description: str
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Answer]

    def add(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add this command to a parser."""
        sub = commands.add_parser(
            self.name,
            help=self.summary,
            description=textwrap.fill(self.description, 100),
            epilog=f"example: {self.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,  # an example on one line can be copied
        )
        sub.add_argument(
            "--json", action="store_true", help="print one JSON object on standard output, other text on standard error"
        )
        self.options(sub)
        sub.set_defaults(run=self.run)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --weights and --device."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="the network: path/to/file.py:name or package.module:name")
    add("--weights", type=Path, metavar="FILE", help="file with the weights: .safetensors, or a state dict in .pt")
    add("--device", help="device to compute on, such as cuda (default: the device of the model)")


def add_posterior(parser: argparse.ArgumentParser) -> None:
    """Add POSTERIOR, and --train, which a matrix-free posterior needs."""
    add = parser.add_argument
    add("posterior", type=Path, metavar="POSTERIOR", help="the file that `lapwing fit` wrote")
    add("--train", metavar="DATA", help="training data: for structure matrixfree, and for feature scores of a report")


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how data files are read."""
    parser.add_argument(
        "--batch-size", type=positive, default=256, metavar="N", help="rows per batch (default: %(default)s)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--target", type=names, metavar="NAMES", help="target columns of a .csv (default: the last)")
    which.add_argument(
        "--no-target", dest="target", action="store_const", const=(), help="treat every column of a .csv as a feature"
    )


def add_fit(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add the options for the likelihood, the selected weights, the size of the data set and the memory."""
    add = parser.add_argument
    add("--likelihood", choices=named(Likelihood), required=required, help="what the outputs of the network mean")
    add("--select", type=names, default=("all",), metavar="NAMES", help="all (default), last_layer, or names and globs")
    add("--n-data", type=above_zero, metavar="N", help="size of the data set, if the data are only a part of it")
    add("--memory", type=memory, metavar="SIZE", help="memory to use, such as 4GB (default: half of what is free)")


def model_of(options: argparse.Namespace) -> nn.Module:
    """Return the network with its weights, on its device."""
    model = read_model(options.model, options.weights, options.device)
    if not any(True for _ in model.parameters()):
        raise BadData("the model has no parameters: there is nothing to put a posterior on")
    return model


def reading_of(options: argparse.Namespace, labeled: bool = True) -> Reading:
    return Reading(options.batch_size, options.target, labeled)


def posterior_of(options: argparse.Namespace, model: nn.Module) -> Laplace:
    """Read a posterior from a file; errors name options that may be missing."""
    train = None
    if options.train is not None:
        family = likelihood_from_spec(read(options.posterior)[1]["likelihood"])
        train = reading_of(options).read(options.train, model, family)
    try:
        return load(options.posterior, model, data=train)
    except UnsupportedModel as error:
        hint = "" if options.weights else " (--weights FILE)"
        raise UnsupportedModel(f"{error}{hint}") from error
    except BadData as error:
        raise BadData(f"{error}{'' if options.train else ' (--train DATA)'}") from error


def selection_of(options: argparse.Namespace) -> Any:
    return options.select[0] if len(options.select) == 1 else list(options.select)


def require_other(options: argparse.Namespace, but: str = "") -> None:
    """Refuse to overwrite a file that is read (MODEL, DATA, …); `but` names an option whose file may be replaced."""
    path = options.out
    if path.is_dir():
        raise BadData(f"--out {path} is a folder; name a file")
    read = [getattr(options, name, None) for name in READ if name != but]
    texts = [str(each) for each in (*read, *(data for _, data in getattr(options, "ood", ()))) if each is not None]
    files = [*texts, *(text.rpartition(":")[0] for text in texts if ":" in text)]
    if any(path.resolve() == Path(file).resolve() for file in files):
        raise BadData(f"--out {path} is also an input; choose another name")


def plain(value: Any) -> Any:
    """Convert results to JSON types: tensors to lists, paths to texts, infinite numbers and NaN to null."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def number(kind: type, low: float, high: float, words: str) -> Callable[[str], Any]:
    """Return a function that reads an `int` or `float` between two bounds; the bounds themselves are refused."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low < value < high:
            raise argparse.ArgumentTypeError(f"{text} is not {words}")
        return value

    return read


positive = number(int, 0, math.inf, "a whole number above zero")
above_zero = number(float, 0, math.inf, "a number above zero")
seed = number(int, -1, 2**63, "a whole number between 0 and 2**63")
share = number(float, 0, 1, "a number between 0 and 1")


def names(text: str) -> tuple[str, ...]:
    """Read names separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def memory(text: str) -> int:
    """Read a number of bytes: 4GB, 500MB or a plain number."""
    number, factor = text.upper().removesuffix("B"), 1
    for unit, size in UNITS.items():
        if text.upper().endswith(unit):
            number, factor = text[: -len(unit)], size
    return int(above_zero(number) * factor) or 1
