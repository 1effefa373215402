"""Parts of experiments that are kept, so that a run goes on where it was stopped and others need not repeat them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments._results import plain


def cached(folder: Path | None, name: str, options: Any, compute: Callable[[], Any]) -> Any:
    """Return what `compute` returns, as JSON holds it (tensors as lists); kept in a folder under name and options."""
    if folder is None:
        return plain(compute())
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{name}-{key}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    found = plain(compute())
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")
    return found
