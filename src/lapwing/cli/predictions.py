"""Predictions as files: .csv row by row, .npz and .safetensors as arrays."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lapwing.errors import BadData
from lapwing.predictive import Prediction
from lapwing.writing import replacing

Fields = Mapping[str, Tensor]


def fields_of(prediction: Prediction, *, level: float = 0.95, novelty: bool = False) -> Fields:
    """Return what is written of a prediction, by name, one row per item."""
    fields = prediction.fields(level)
    if novelty:
        fields["novelty"] = prediction.novelty
    return {name: value.detach().cpu() for name, value in fields.items()}


def write_predictions(path: Path, batches: Iterable[Fields]) -> int:
    """Write the fields of all batches, at once or not at all, and return the number of items."""
    with replacing(path) as temporary:
        return writer_for(path)(temporary, batches)


def writer_for(path: Path) -> Callable[[Path, Iterable[Fields]], int]:
    """The writer of a file's kind."""
    if path.suffix not in WRITERS:
        raise BadData(f"predictions are written as {', '.join(WRITERS)}, not as {path.name!r}")
    return WRITERS[path.suffix]


def columns_of(fields: Fields) -> dict[str, Tensor]:
    """Columns (n,): a field of several values an item becomes `name_0`, `name_1`, …"""
    columns = {}
    for name, value in fields.items():
        if value.ndim > 2:
            raise BadData(
                f"{name!r} has shape {tuple(value.shape)}, which is no table: write predictions to .npz or .safetensors"
            )
        if value.ndim == 1 or value.shape[1] == 1:
            columns[name] = value.reshape(-1)
        else:
            columns |= {f"{name}_{k}": value[:, k] for k in range(value.shape[1])}
    return columns


def _write_csv(path: Path, batches: Iterable[Fields]) -> int:
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for fields in batches:
            columns = columns_of(fields)
            if not count:
                writer.writerow(columns)
            shown = [[format(v, ".8g") for v in column.tolist()] for column in columns.values()]
            writer.writerows(zip(*shown, strict=True))
            count += len(shown[0])
    return count


def _write_npz(path: Path, batches: Iterable[Fields]) -> int:
    whole = _joined(batches)
    np.savez(path, **{name: value.numpy() for name, value in whole.items()})  # type: ignore[arg-type]
    return len(next(iter(whole.values())))


def _write_safetensors(path: Path, batches: Iterable[Fields]) -> int:
    whole = _joined(batches)
    save_file(whole, path)
    return len(next(iter(whole.values())))


def _joined(batches: Iterable[Fields]) -> dict[str, Tensor]:
    parts = list(batches)
    return {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}


WRITERS = {".csv": _write_csv, ".npz": _write_npz, ".safetensors": _write_safetensors}
