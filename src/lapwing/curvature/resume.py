"""Resuming an interrupted fit: a folder holds the sums over the batches that were read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.shards import process_name
from lapwing.errors import BadData, CorruptFile, UnsupportedOperation
from lapwing.model import Batch
from lapwing.model.batches import sharded
from lapwing.model.calls import key_of
from lapwing.storage import load_tree, remove_leftovers, require_writable, save_tree

EVERY = 16  # after this many batches no sample waits for others, so that a pass can go on from here exactly
SECONDS = 20.0  # least time between two files


class OtherBatches(Exception):
    """Raised when other batches come than those whose sums are in the file."""


def require_folder(folder: Path) -> None:
    """Refuse a checkpoint folder that cannot be written, before the work."""
    if folder.exists() and not folder.is_dir():
        raise BadData(f"checkpoint={str(folder)!r} is a file; name a folder")
    require_writable(folder)


@dataclass(frozen=True, eq=False)
class Resume:
    """A folder with one file of sums per pass. A fit goes on from them if it has the same `identity`."""

    folder: Path
    identity: str

    def journal(self, label: str, plan: str) -> Journal:
        name = "".join(letter if letter.isalnum() else "-" for letter in label).strip("-")
        where = f"{name}-{process_name()}" if sharded() else name
        return Journal(self.folder / f"{where}.safetensors", f"{self.identity}|{plan}")

    def forget(self) -> None:
        """Remove the files of a fit that is complete."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)  # another process may have been first
        remove_leftovers(self.folder, "*.safetensors")


def _content(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    """Return the type, the shape and a hash of the values of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    values = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(values, digest_size=16).hexdigest()


class Journal:
    """The file of one pass over the data: how many batches it holds, and a hash of all that were read."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path, self.identity = path, identity
        self.read, self.chain = 0, hashlib.blake2b(digest_size=16)
        self.begun = self.saved = time.monotonic()
        self.found: dict[str, Any] | None = None
        try:
            found = load_tree(path) if path.exists() else None
        except CorruptFile:
            found = None
        if isinstance(found, dict) and found.get("identity") == identity and _complete(found):
            self.found = found

    def skips(self, batch: Batch) -> bool:
        """Whether the file holds this batch; raises `OtherBatches` if it holds others."""
        try:
            whole = key_of((batch.inputs, batch.targets, batch.weights), _content)
        except TypeError as error:
            raise UnsupportedOperation(
                f"checkpoint= recognizes batches by their content, and batch {batch.number} holds {error}, which "
                "cannot be compared: pass tensors, numbers and strings, or leave checkpoint= out"
            ) from error
        self.chain.update(repr(whole).encode())
        self.read += 1
        if self.found is None or self.read > self.found["read"]:
            return False
        if self.read == self.found["read"] and self.chain.hexdigest() != self.found["chain"]:
            raise OtherBatches
        return True

    @property
    def restores(self) -> bool:
        """Whether the last batch of the file has just been skipped."""
        return self.found is not None and self.read == self.found["read"]

    def restore(self, state: Mapping[str, Tensor], generator: torch.Generator | None) -> dict[str, Any]:
        """Put the sums of the file into the accumulator, and return the sums and samples of the pass itself."""
        assert self.found is not None
        shapes = {name: value.shape for name, value in self.found["state"].items()}
        if shapes != {name: value.shape for name, value in state.items()}:
            raise OtherBatches
        for name, value in self.found["state"].items():
            state[name].copy_(value)
        if generator is not None and self.found["generator"] is not None:
            generator.set_state(self.found["generator"])
        return dict(self.found["kept"])

    @property
    def pauses(self) -> bool:
        return self.read % EVERY == 0

    def save(
        self,
        state: Mapping[str, Tensor],
        kept: Mapping[str, Any],
        generator: torch.Generator | None,
        last: bool = False,
    ) -> None:
        """Write the file if the last one was written some time ago; at the end, if the pass took some time."""
        if time.monotonic() - (self.begun if last else self.saved) < SECONDS:
            return
        tree = {"identity": self.identity, "read": self.read, "chain": self.chain.hexdigest(), "kept": dict(kept)}
        tree |= {"state": dict(state), "generator": None if generator is None else generator.get_state()}
        save_tree(self.path, tree)
        self.saved = time.monotonic()

    def require_end(self) -> None:
        """Raise `OtherBatches` if the data end before the last batch of the file."""
        if self.found is not None and self.read < self.found["read"]:
            raise OtherBatches


def _complete(found: Mapping[str, Any]) -> bool:
    """Whether a file holds all that `Journal.save` writes, with finite sums."""
    kinds = {"read": int, "chain": str, "kept": dict, "state": dict, "generator": Tensor | None}
    if not all(name in found and isinstance(found[name], kind) for name, kind in kinds.items()):
        return False
    state = found["state"].values()
    return set(found["kept"]) == {"sums", "waiting"} and all(bool(value.isfinite().all()) for value in state)
