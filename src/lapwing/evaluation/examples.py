"""Single items of a data set, as a reader sees them: a picture, a text or a row of numbers, with truth and answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.model.calls import batch_size, take, tensors_in
from lapwing.predictive import Prediction

SHOWN = 16  # items of each kind
NUMBERS = 8  # features of a row
TOKENS = 24

Describe = Callable[[Any], str | Tensor]


@dataclass(frozen=True, eq=False)
class Example:
    """One item: its picture (C, H, W) or text, its target, the prediction with its certainty, and its rank score."""

    picture: Tensor | None
    text: str
    truth: str
    answer: str
    certainty: str
    score: float

    @property
    def wrong(self) -> bool:
        """Whether the predicted class differs from the truth; False for numbers."""
        return bool(self.truth) and self.truth != self.answer and self.certainty.startswith("p ")

    @property
    def caption(self) -> str:
        """Return "truth → answer" and how sure the answer is, on two lines."""
        arrow = f"{self.truth} → " if self.truth else ""
        return f"{arrow}{self.answer}\n{self.certainty}" if self.answer else self.certainty


@dataclass(frozen=True, eq=False)
class Viewer:
    """How inputs and classes are shown: names of classes and of features, and the user's own description."""

    classes: Sequence[str] = ()
    features: Sequence[str] = ()
    describe: Describe | None = None

    def picked(self, prediction: Prediction, inputs: Any, y: Tensor | None, ranks: Tensor) -> tuple[Example, ...]:
        """Return the items of a batch with the highest ranks (B,), highest first."""
        found = []
        for index in ranks.argsort(descending=True, stable=True)[:SHOWN].tolist():
            picture, text = self.seen(take(inputs, slice(index, index + 1), batch_size(inputs)))
            words = prediction.described(index, y, self.classes)
            found.append(
                Example(picture, text, words["truth"], words["answer"], words["certainty"], float(ranks[index]))
            )
        return tuple(found)

    def seen(self, one: Any) -> tuple[Tensor | None, str]:
        """Return the picture or the text of inputs that hold one sample."""
        found = self.describe(one) if self.describe is not None else one
        if isinstance(found, str):
            return None, found
        if not isinstance(found, Tensor):
            found = found.get("input_ids", found) if isinstance(found, Mapping) else found
            tensors = [t.reshape(-1) for t in tensors_in(found)]
            return None, self._numbers(tensors[0] if len(tensors) == 1 else torch.cat([t.double() for t in tensors]))
        found = found.detach().cpu()
        if found.ndim == 4 and found.shape[1] in (1, 3):
            return found[0].clone(), ""
        if found.ndim == 3 and self.describe is not None and found.shape[0] in (1, 3):
            return found.clone(), ""
        return None, self._numbers(found.reshape(-1))

    def _numbers(self, row: Tensor) -> str:
        if not row.is_floating_point():
            shown = " ".join(str(int(v)) for v in row[:TOKENS])
            return f"{shown} …" if len(row) > TOKENS else shown
        numbered = ["x"] if len(row) == 1 else [f"x{k}" for k in range(len(row))]
        names = self.features if len(self.features) == len(row) else numbered
        shown = ", ".join(f"{name} {float(value):.4g}" for name, value in zip(names, row[:NUMBERS]))
        return f"{shown}, … ({len(row)} numbers)" if len(row) > NUMBERS else shown


def merged(parts: Sequence[tuple[Example, ...]]) -> tuple[Example, ...]:
    """Return the highest-ranked items of several batches."""
    every = [example for part in parts for example in part]
    return tuple(sorted(every, key=lambda example: -example.score)[:SHOWN])


def per_item(values: Tensor) -> Tensor:
    """Return the mean over all entries of each item, (B,), in float64 on the CPU; NaN ranks lowest."""
    means = values.detach().double().reshape(len(values), -1).mean(-1).cpu()
    return torch.where(means.isnan(), -torch.inf, means)
