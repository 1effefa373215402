"""What a measurement says, as plain records that go to JSON and back."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One implementation at one operation, in one process.

    `seconds` and `gradient` are medians over alternating repeats; `forward` is one forward pass over the inputs to
    predict, `covariances` the writing of one U diag(v) Uᵀ, outputs × outputs, for each of them; `peak` and
    `gradient_peak` are bytes above what the loaded model and data take.
    """

    by: str
    workload: str
    operation: str
    n: int
    threads: int
    clock: str = "cpu"
    seconds: float | None = None
    gradient: float | None = None
    forward: float | None = None
    covariances: float | None = None
    peak: int | None = None
    gradient_peak: int | None = None
    error: str | None = None
    bytes_asked: int | None = None
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def epochs(self) -> float | None:
        """Time in gradient epochs of the same model and data."""
        return ratio(self.seconds, self.gradient)

    @property
    def forwards(self) -> float | None:
        """Time in forward passes over the inputs to predict."""
        return ratio(self.seconds, self.forward)


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below where both are known."""
    return above / below if above is not None and below else None


def merged(runs: Sequence[Measurement]) -> Measurement:
    """One measurement from the repeats of a cell: the run with the median number of epochs, and the highest peak."""
    good = sorted((run for run in runs if run.epochs is not None), key=lambda run: run.epochs or 0.0)
    if not good:
        return runs[-1]
    middle = good[(len(good) - 1) // 2]
    fields = asdict(middle) | {"peak": max((run.peak for run in good if run.peak is not None), default=None)}
    fields["more"] = middle.more | {"epochs": [run.epochs for run in good]}
    return Measurement(**fields)


def middle(values: Sequence[float]) -> float:
    """The median; of no values, an error that says so."""
    if not values:
        raise ValueError("no repeats were measured")
    return median(values)


def dump(measurement: Measurement) -> str:
    return json.dumps(asdict(measurement))


def parse(text: str) -> Measurement:
    """The measurement in the last line of a process' output."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError(f"no measurement in the output: {text[-200:]!r}")
    return Measurement(**json.loads(lines[-1]))
