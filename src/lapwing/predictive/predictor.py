"""Predictions as a plain module: what a server runs, and what `torch.export` and ONNX take."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from lapwing.errors import BadData, LapwingError, UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.model.calls import warnings_here
from lapwing.predictive.decompositions import WrittenOut
from lapwing.predictive.lastlayer import LastLayer
from lapwing.predictive.links import kind_of, predict_targets
from lapwing.predictive.prediction import Prediction
from lapwing.predictive.softmax import prepare
from lapwing.storage import replacing

SUFFIXES = (".pt2", ".onnx")
NOISY = ("torch.onnx", "onnxscript", "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")
CLASSES = ("probs", "label", "confidence")  # outputs that only predictions of classes and labels have
VALUES = ("variance", "stddev")  # outputs that only predictions of numbers have
COMMON = ("mean", "entropy", "epistemic", "aleatoric", "total", "novelty")


class Predictor(nn.Module):
    """The predictive distribution at x as a dict of tensors, one per name of `outputs`; in evaluation mode only.

    It holds its own copy of the weights, knows nothing of the posterior object that made it and writes to nothing, so
    that any number of threads may call it, and `torch.compile` and `torch.export` take it.

        predictor = la.predictor("probs", "epistemic")
        predictor(x)["probs"]
    """

    def __init__(
        self,
        layer: LastLayer,
        likelihood: Likelihood,
        outputs: Sequence[str],
        *,
        novelty: LastLayer | None = None,
        logit_temperature: float = 1.0,
        scalar: bool = False,
        samples: int | None = None,
    ) -> None:
        super().__init__()
        f = torch.zeros(1, layer.width, device=next(layer.parameters()).device)
        numbers = kind_of(likelihood, f) == "numbers"
        outputs = outputs or (("mean", "variance") if numbers else ("probs", "epistemic"))
        known = COMMON + (VALUES if numbers else CLASSES)
        unknown = [name for name in outputs if name not in known]
        if unknown:
            raise BadData(f"a predictor of {type(likelihood).__name__} has no {unknown[0]!r}: use {', '.join(known)}")
        self.layer = copy.deepcopy(layer)  # later training of the user's module does not change it
        self.novelty = novelty
        self._likelihood, self._outputs = likelihood, tuple(outputs)
        self._scale, self._scalar, self._samples = 1 / logit_temperature, scalar, samples
        self.requires_grad_(False).eval()

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The outputs asked for, at the arguments that the network itself takes."""
        if self.training:
            raise UnsupportedOperation("a predictor has no training mode: call predictor.eval()")
        return self.answer(*self.layer(*args, **kwargs))

    def answer(self, f: Tensor, a: Tensor) -> dict[str, Tensor]:
        """The outputs asked for, at outputs f of the network and inputs a of its last layer."""
        prediction = self.prediction(f, a)
        return {name: getattr(prediction, name) for name in self._outputs}

    def prediction(self, f: Tensor, a: Tensor) -> Prediction:
        """The same as a `Prediction`."""
        score = self.novelty
        return predict_targets(
            self.layer.function(f, a, self._likelihood.shift_invariant, self._scale),
            self._likelihood,
            samples=self._samples,
            novelty=None if score is None else lambda: score.information(f, a, self._likelihood),
            scalar=self._scalar,
        )


class _ForFile(nn.Module):
    """A predictor as `torch.export` takes it, which needs the names of arguments that are given by name.

    For ONNX the decompositions are written out; the network's own operations stay as they are.
    """

    def __init__(self, predictor: Predictor, names: Iterable[str], onnx: bool) -> None:
        super().__init__()
        self.predictor = predictor

        def forward(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            found = predictor.layer(*args, **kwargs)
            with WrittenOut() if onnx else nullcontext():
                return predictor.answer(*found)

        named = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
        forward.__signature__ = Signature([Parameter("args", Parameter.VAR_POSITIONAL), *named])  # type: ignore[attr-defined]
        self.forward = forward


def export(predictor: Predictor, path: str | Path, example: Any) -> None:
    """Write a predictor as one file, by its suffix `.pt2` (`torch.export`) or `.onnx`, with a dynamic batch dimension.

    The file runs without Lapwing and without the network's class. `example` is an input of at least two items.
    """
    path = Path(os.fspath(path))
    if path.suffix not in SUFFIXES:
        raise UnsupportedOperation(f"export writes {' or '.join(SUFFIXES)}, and {path.name!r} ends in neither")
    if path.suffix == ".onnx":
        _require_onnx()
    args, kwargs = _arguments(example)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not tensors or any(len(t) < 2 for t in tensors if t.ndim):
        raise BadData("the example is a batch of at least two items, so that the batch dimension can be told apart")
    batch = torch.export.Dim("batch")
    axes = lambda value: {0: batch} if isinstance(value, Tensor) and value.ndim else None  # noqa: E731
    dynamic: dict[str, Any] = {"args": tuple(map(axes, args))} if args else {}
    dynamic |= {name: axes(value) for name, value in kwargs.items()}
    fast, checks = torch.backends.mha.get_fastpath_enabled(), Distribution._validate_args
    torch.backends.mha.set_fastpath_enabled(False)  # its outputs are those of another network where there is padding
    Distribution.set_default_validate_args(False)  # a file cannot look at numbers, as the laws of PyTorch do by default
    try:
        with torch.no_grad(), warnings_here("ignore", Warning), _quiet(*NOISY):  # of PyTorch about its own parts
            f = predictor.layer(*args, **kwargs)[0]
            prepare(f.shape[-1], predictor._samples, f.dtype)
            predictor(*args, **kwargs)  # makes the points of likelihoods that are not a softmax
            try:
                module = _ForFile(predictor, kwargs, path.suffix == ".onnx").eval()
                program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
                if path.suffix == ".pt2":
                    with replacing(path) as part:
                        torch.export.save(program, part)
                else:
                    _write_onnx(program, path, predictor._outputs)
            except (LapwingError, ImportError):
                raise
            except Exception as error:  # PyTorch raises many kinds
                raise UnsupportedOperation(
                    f"PyTorch cannot write this predictor as {path.suffix!r} ({type(error).__name__}). An operation "
                    "of the network, or of a likelihood of your own, is the likely cause: try "
                    f"torch.{'onnx' if path.suffix == '.onnx' else 'export'}.export on it."
                ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        Distribution.set_default_validate_args(checks)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX files need onnx and onnxscript: pip install 'lapwing-torch[onnx]'") from error


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Keep back what loggers say below an error: an exporter reports which of its own steps it skips."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _write_onnx(program: torch.export.ExportedProgram, path: Path, names: Sequence[str]) -> None:
    written = torch.onnx.export(program, dynamo=True, verbose=False)
    assert written is not None
    graph = written.model.graph
    for value in (own for node in graph for own in node.outputs):
        value.name = f"{value.name}_inside"  # an operation of the network may have the name of an output, such as mean
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name
    with replacing(path) as part:
        written.save(part, external_data=False)
