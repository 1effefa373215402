"""Data for the command line: .safetensors, .npz and .csv files, or an object defined in the user's Python code."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from lapwing.cli.models import guarded, made, read_object
from lapwing.errors import BadData, LapwingError, NotReiterable
from lapwing.likelihoods import Likelihood
from lapwing.model import Batches, batch_size, take, tensors_in
from lapwing.model.calls import call, map_tensors
from lapwing.model.copies import borrowed

COLUMNS = " (--target and --no-target say which columns are targets and not inputs)"
FORMATS = ".safetensors, .npz or .csv, or file.py:name"


@dataclass(frozen=True, eq=False)
class Rows:
    """Whole tensors, read in batches of `size` rows; without targets, a batch is only the inputs."""

    inputs: Any
    targets: Tensor | None
    size: int

    @property
    def count(self) -> int:
        return batch_size(self.inputs)

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.count, self.size):
            rows = slice(start, start + self.size)
            x = take(self.inputs, rows, self.count)
            yield x if self.targets is None else (x, self.targets[rows])


@dataclass(frozen=True, eq=False)
class Reading:
    """How files are read: the size of batches, and which columns of a table are targets (None means the last).

    `labeled=False` is for predictions: missing targets are no error. `targets=()` means that there are none.
    """

    size: int = 256
    targets: tuple[str, ...] | None = None
    labeled: bool = True

    def read(self, text: str, module: nn.Module, likelihood: Likelihood | None = None) -> Any:
        """Read the data that `text` names: inputs in the dtype of the model, targets as the likelihood takes them."""
        data = self._source(text)
        if isinstance(data, Rows):
            if data.targets is None and self.labeled:
                how = "--target names their columns" if text.endswith(".csv") else "name the array of targets 'y'"
                raise BadData(f"{text} has no targets: {how}")
            data = suited(data, module, likelihood)
        require_readable(data, module, text)
        return data

    def _source(self, text: str) -> Any:
        path = Path(text)
        if path.suffix in READERS:
            if not path.is_file():
                raise BadData(f"there is no data file {text!r}")
            inputs, targets = READERS[path.suffix](path, self)
            return _rows(inputs, targets, self.size, text)
        if ":" not in text:
            raise BadData(f"{text!r} is not data that Lapwing reads: pass {FORMATS}; nothing is unpickled")
        return self._object(made(read_object(text), text), text)

    def _object(self, found: Any, text: str) -> Any:
        if isinstance(found, Tensor):
            return _rows(found, None, self.size, text)
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Tensor):
            return _rows(*found, self.size, text)
        if isinstance(found, Dataset):
            return DataLoader(found, self.size)
        if hasattr(found, "__next__"):
            raise NotReiterable(
                f"{text} is a {type(found).__name__}, which can be read once: name a DataLoader or a list"
            )
        if not hasattr(found, "__iter__"):
            raise BadData(
                f"{text} is a {type(found).__name__}: name a DataLoader, a Dataset, a list of batches or (X, y)"
            )
        return found


def require_readable(data: Any, module: nn.Module, text: str) -> None:
    """Run the model on the first batch, so that unsuitable data are refused before any work."""
    first = guarded(lambda: next(iter(data), None), f"reading {text}")
    if first is None:
        raise BadData(f"{text} holds no batches")
    parameter = next(module.parameters(), torch.empty(0))
    batches = Batches(data, module, parameter.device)
    inputs = batches.placed(batches.inputs_of(first))
    try:
        with borrowed(module) as own, torch.no_grad():
            call(own, inputs)
    except LapwingError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_in(inputs))
        raise BadData(
            f"the model cannot take inputs of shape {shapes}, the first batch of {text}: "
            f"{type(error).__name__}: {error}{COLUMNS if text.endswith('.csv') else ''}"
        ) from error


def require_order(data: Any, text: str) -> None:
    """Refuse a loader that shuffles: predictions could not be matched with inputs."""
    if isinstance(data, DataLoader) and not _in_order(data):
        raise BadData(
            f"{text} shuffles or has its own sampler, but predictions are written in the order of the data: name a "
            "loader with shuffle=False"
        )


def _in_order(loader: DataLoader) -> bool:
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return True
    if batches is None:
        return type(loader.sampler) is SequentialSampler
    return type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler


def _rows(inputs: Any, targets: Tensor | None, size: int, text: str) -> Rows:
    if not any(t.ndim for t in tensors_in(inputs)) or not batch_size(inputs):
        raise BadData(f"{text} holds no rows")
    if targets is not None and (not targets.ndim or len(targets) != batch_size(inputs)):
        raise BadData(f"{text} has {batch_size(inputs)} rows of x, but y has shape {tuple(targets.shape)}")
    return Rows(inputs, targets, size)


def suited(rows: Rows, module: nn.Module, likelihood: Likelihood | None) -> Rows:
    """Convert floating-point numbers to the dtype of the network, and classes to integers."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    inputs = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, rows.inputs)
    y = rows.targets
    if y is not None and y.is_floating_point():
        indices = likelihood is not None and likelihood.takes_class_indices and y.ndim == 1
        classes = indices and bool((y == y.round()).all())
        y = y.long() if classes else y.to(torch.promote_types(dtype, torch.float32))  # as likelihoods compute
    return replace(rows, inputs=inputs, targets=y)


def _from_safetensors(path: Path, reading: Reading) -> tuple[Tensor, Tensor | None]:
    try:
        return _pair(load_file(path), path)
    except SafetensorError as error:
        raise BadData(f"{path.name} is not a safetensors file: {error}") from error


def _from_npz(path: Path, reading: Reading) -> tuple[Tensor, Tensor | None]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            wanted = [name for name in arrays.files if name in ("x", "X", "y")]
            return _pair({name: torch.from_numpy(arrays[name]) for name in wanted}, path)
    except (ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, LapwingError):
            raise
        raise BadData(f"{path.name} holds no arrays x and y of plain numbers: {error}") from error


def _pair(found: dict[str, Tensor], path: Path) -> tuple[Tensor, Tensor | None]:
    x = found.get("x", found.get("X"))
    if x is None:
        raise BadData(f"{path.name} has no array 'x'; targets are 'y'")
    return x, found.get("y")


def _from_csv(path: Path, reading: Reading) -> tuple[Tensor, Tensor | None]:
    """Read columns of numbers under a header: the target columns, and all others as features, in their order."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = [name.strip() for name in next(filter(None, lines), [])]
            _require_header(header, path)
            table = [_numbers(row, header, path, lines.line_num) for row in lines if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path.name} is not a table of numbers in UTF-8 with commas: {error}") from error
    values = torch.tensor(table, dtype=torch.float64).reshape(len(table), len(header))
    chosen = [header.index(name) for name in _targets(header, reading, path)]
    features = [k for k in range(len(header)) if k not in chosen]
    if not features:
        raise BadData(f"{path.name} has no column but the target; if this is a feature, pass --no-target")
    y = values[:, chosen[0]] if len(chosen) == 1 else values[:, chosen]
    return values[:, features], y if chosen else None


def _targets(header: list[str], reading: Reading, path: Path) -> tuple[str, ...]:
    if reading.targets is None:
        return (header[-1],)
    absent = [name for name in reading.targets if name not in header]
    if absent and reading.labeled:
        raise BadData(f"{path.name} has no column {absent[0]!r}; it has {', '.join(header)}")
    return tuple(name for name in reading.targets if name in header)


def _require_header(header: list[str], path: Path) -> None:
    if not header:
        raise BadData(f"{path.name} is empty")
    if all(_is_number(name) for name in header):
        raise BadData(f"{path.name} begins with numbers: write the names of the columns into its first line")
    if len(set(header)) < len(header):
        raise BadData(f"{path.name} names two columns alike: {', '.join(header)}. Rename one of them")


def _numbers(row: list[str], header: list[str], path: Path, line: int) -> list[float]:
    if len(row) != len(header):
        raise BadData(f"{path.name}, line {line}: {len(row)} cells under {len(header)} columns")
    try:
        return [_number(cell) for cell in row]
    except ValueError:
        name, cell = next((n, c) for n, c in zip(header, row, strict=True) if not _is_number(c))
        raise BadData(
            f"{path.name}, line {line}, column {name!r}: {cell!r} is not a number; write classes as 0, 1, 2, …"
        ) from None


def _number(cell: str) -> float:
    if "_" in cell:  # which Python allows between digits
        raise ValueError
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


READERS = {".safetensors": _from_safetensors, ".npz": _from_npz, ".csv": _from_csv}
