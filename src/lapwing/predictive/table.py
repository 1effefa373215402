"""Predictions as tables: columns, a data frame, and a few rows of HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    import pandas

SHOWN = 8  # rows in a notebook
WIDE = 12  # columns in a notebook


def columns_of(fields: Mapping[str, Tensor], row_dims: int) -> dict[str, Tensor]:
    """Return columns (n,) from fields whose first `row_dims` dimensions count rows.

    A field with several values per row becomes `name_0`, `name_1`, …
    """
    columns: dict[str, Tensor] = {}
    for name, value in fields.items():
        flat = value.detach().cpu().reshape(value.shape[:row_dims].numel(), value.shape[row_dims:].numel())
        single = flat.shape[1] == 1
        columns |= {name if single else f"{name}_{k}": flat[:, k] for k in range(flat.shape[1])}
    return columns


def frame_of(fields: Mapping[str, Tensor], row_dims: int, index: Any = None) -> pandas.DataFrame:
    """Return a data frame with one row per item, or per item and position ("item", "position", …)."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_frame() needs pandas: pip install 'lapwing-torch[pandas]'") from error
    columns = {name: column.numpy() for name, column in columns_of(fields, row_dims).items()}
    shape = next(iter(fields.values())).shape[:row_dims]
    if index is None and row_dims > 1:
        names = ["item", *(("position",) if row_dims == 2 else (f"position_{k}" for k in range(row_dims - 1)))]
        index = pandas.MultiIndex.from_arrays([axis.ravel() for axis in np.indices(tuple(shape))], names=names)
    return pandas.DataFrame(columns, index=index)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", note: str = "") -> str:
    """Return a small HTML table in which every text is escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        style = ' style="text-align: right"'
        return "<tr>" + "".join(f"<{tag}{style if k else ''}>{html.escape(c)}</{tag}>" for k, c in enumerate(cells))

    head = f"<thead>{line('th', header)}</tr></thead>" if header else ""
    body = "\n".join(f"{line('td', row)}</tr>" for row in rows)
    parts = [f"<p><b>{html.escape(caption)}</b></p>" if caption else "", f"<table>{head}<tbody>{body}</tbody></table>"]
    return "\n".join([part for part in parts if part] + ([f"<p>{html.escape(note)}</p>"] if note else []))


def html_of(caption: str, fields: Mapping[str, Tensor], row_dims: int, total: int) -> str:
    """Return the rows of some fields as HTML, with a note on the rows and columns that are left out."""
    columns = columns_of(fields, row_dims)
    names = list(columns)[:WIDE]
    values = [columns[name].tolist() for name in names]
    rows = [[str(k), *(f"{v:.4g}" for v in row)] for k, row in enumerate(zip(*values))]
    left = [f"{total - len(rows):,} more rows"] if total > len(rows) else []
    left += [f"{len(columns) - WIDE:,} more columns"] if len(columns) > WIDE else []
    return html_table(["", *names], rows, caption, " and ".join(left))
