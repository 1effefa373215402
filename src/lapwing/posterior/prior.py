"""Gaussian priors over the selected weights, N(μ₀, Π⁻¹), in the forms that users write them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, IncompatiblePrior, UnsupportedOperation, nearest
from lapwing.linalg import PSD, Diagonal, unpack_sound
from lapwing.storage import pack, prefixed, under, unpack

Scalar = float | Tensor
Precision = Scalar | Mapping[str, Scalar] | PSD


@dataclass(frozen=True, eq=False)
class Prior:
    """N(μ₀, Π⁻¹) over the selected weights.

    `precision` is a scalar; a dict from parameter names or globs to scalars (the first pattern that matches a
    parameter holds); a flat tensor with one value per weight; or a `PSD` such as the precision of another posterior.
    `mean` is a scalar or a flat tensor. Tensors that require gradients keep them through `resolve`.

    Examples:
        >>> prior = lapwing.Prior({"*.bias": 0.1, "*": 10.0})
        >>> la = lapwing.fit(model, train_loader, "classification", prior=prior)
    """

    precision: Precision = 1.0
    mean: Scalar = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.precision, Mapping):
            object.__setattr__(self, "precision", dict(self.precision))
        for where, value in self._precisions():
            _check(value, where, "positive and finite", above=0.0)
        _check(self.mean, "the prior mean", "finite")

    @classmethod
    def from_weight_decay(
        cls, decay: float, n: float, *, outputs: int | None = None, noise: float | None = None
    ) -> "Prior":
        """Return the precision that a weight decay stands for: the loss was mean ℓ + (decay/2)‖θ‖² over `n` data.

        Where ℓ is a negative log-likelihood (cross-entropy, Poisson, …) the sum over data gives τ = n·decay. The mean
        squared error of K `outputs` is (2σ²/K) times a Gaussian's with standard deviation `noise` = σ, so that
        τ = n·K·decay/(2σ²): pass both. AdamW, dropout and label smoothing have no exact τ.

        Examples:
            >>> lapwing.Prior.from_weight_decay(5e-4, 120).precision  # of a cross-entropy, averaged over 120 data
            0.06
        """
        if (outputs is None) != (noise is None):
            raise IncompatiblePrior("the mean squared error needs both outputs= and noise=, cross-entropy neither")
        if not (decay > 0 and n > 0):
            raise IncompatiblePrior(f"weight decay and n must be positive, got {decay} and {n}: no decay is no prior")
        factor = 1.0 if outputs is None or noise is None else outputs / (2.0 * noise**2)
        return cls(n * decay * factor)

    @classmethod
    def from_posterior(cls, posterior: Any) -> "Prior":
        """Make yesterday's posterior (a `Posterior`, or the `Laplace` that holds it) today's prior: precision and mean.

        The sum of this precision and today's curvature is exact for diag, blockdiag, full and lowrank posteriors, and
        for any posterior under structure="full". It is exact for a Kronecker posterior with factored damping, whose
        precision is a product L ⊗ R (`la.damping("factored")`), and for layers with one output. For the other
        Kronecker and EKFAC posteriors the sum has no common eigenbasis: its diagonal is kept in the best of three bases
        (`lapwing.linalg.kronecker.add`), and the `neglected` of each block of `la.posterior.precision` says what
        share was dropped.

        Examples:
            >>> monday = lapwing.fit(model, train_loader, "classification", structure="full")
            >>> prior = lapwing.Prior.from_posterior(monday)
            >>> trained = lapwing.train(model, val_loader, "classification", prior=prior, structure="full", epochs=2)
        """
        found = getattr(posterior, "posterior", posterior)
        precision, mean = getattr(found, "precision", None), getattr(found, "mean", None)
        if not (isinstance(precision, PSD) and isinstance(mean, Tensor)):
            raise IncompatiblePrior(f"expected a posterior, la.posterior or la, got {type(posterior).__name__}")
        return cls(precision, mean.detach())

    @classmethod
    def per_block(
        cls, values: Sequence[Scalar] | Tensor, names: Sequence[Sequence[str]], mean: Scalar = 0.0
    ) -> "Prior":
        """Give each block one precision; `names` holds the parameter names of each block (`curvature.names`).

        Examples:
            >>> precisions = torch.tensor([1.0, 10.0])  # of the first and the second layer
            >>> prior = lapwing.Prior.per_block(precisions, [("0.weight", "0.bias"), ("2.weight", "2.bias")])
            >>> narrow = la.replace(prior=prior)
        """
        if len(values) != len(names):
            raise IncompatiblePrior(f"{len(names)} blocks need as many precisions, got {len(values)}")
        return cls({name: value for value, block in zip(values, names, strict=True) for name in block}, mean)

    @classmethod
    def per_unit(
        cls,
        model: nn.Module,
        layer: str,
        units: float | Sequence[float] | Tensor,
        inputs: float | Sequence[float] | Tensor = 1.0,
        *,
        bias: float = 1.0,
    ) -> "Prior":
        """Multiply one precision per output of a linear layer by one per input, τ_kj = units_k · inputs_j.

        For a last layer these are precisions per class and per feature; a number stands for all of them. `layer` is
        the name of the layer in the model. Its bias, if it has one, has the precisions units_k · `bias`. Structures
        take such a prior exactly, `kron` as the product diag(units) ⊗ diag(inputs); only `ekfac` refuses it.

        Examples:
            >>> prior = lapwing.Prior.per_unit(model, "2", units=[1.0, 1.0, 5.0])  # narrower for class 2
            >>> la = lapwing.fit(model, train_loader, "classification", select="last_layer", prior=prior)
        """
        try:
            found = model.get_submodule(layer)
        except AttributeError as error:
            names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
            raise IncompatiblePrior(
                f"the model has no layer {layer!r}; its linear layers are {_some(names)}{nearest(layer, names)}"
            ) from error
        if not isinstance(found, nn.Linear):
            raise IncompatiblePrior(f"the layer {layer!r} is a {type(found).__name__}; this prior is for a Linear")
        rows = _side(units, found.out_features, "units", layer)
        columns = _side(inputs, found.in_features, "inputs", layer)
        stem = f"{layer}." if layer else ""
        values: dict[str, Scalar] = {f"{stem}weight": (rows[:, None] * columns).flatten()}
        if found.bias is not None:
            _check(bias, f"the factor for the bias of {layer!r}", "positive and finite", above=0.0)
            values[f"{stem}bias"] = rows * bias
        return cls(values)

    def resolve(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        *,
        index: Tensor | None = None,
    ) -> tuple[Tensor, PSD]:
        """Return the mean (P,) and the precision Π as a matrix, for parameters `names` with `sizes`; gradients flow.

        `index` picks the P weights of a subnetwork out of the whole flat vector; flat tensors and matrices that were
        given then speak of the picked ones. A matrix keeps its own type and device.
        """
        total = sum(sizes) if index is None else index.numel()
        if isinstance(self.precision, PSD) and self.precision.size != total:
            raise IncompatiblePrior(f"the prior is over {self.precision.size} weights, the selection has {total}")
        mean = torch.as_tensor(self.mean, dtype=dtype, device=device)
        if mean.ndim and tuple(mean.shape) != (total,):
            raise IncompatiblePrior(f"the prior mean has shape {tuple(mean.shape)}; use a scalar or shape ({total},)")
        return mean if mean.ndim else mean.expand(total), self._matrix(names, sizes, dtype, device, index, total)

    def _matrix(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        index: Tensor | None,
        total: int,
    ) -> PSD:
        if isinstance(self.precision, PSD):
            return self.precision
        if isinstance(self.precision, Mapping):
            return _by_name(self.precision, names, sizes, dtype, device, index)
        values = torch.as_tensor(self.precision, dtype=dtype, device=device)
        if values.ndim and tuple(values.shape) != (total,):
            raise IncompatiblePrior(
                f"the prior precision has shape {tuple(values.shape)}; use a scalar, a dict from names to scalars or "
                f"shape ({total},), one per selected weight"
            )
        return Diagonal(values if values.ndim else values.expand(total))

    def _precisions(self) -> Iterator[tuple[str, Scalar]]:
        if isinstance(self.precision, Mapping):
            if not self.precision:
                raise IncompatiblePrior("the prior's dict is empty; map names or globs such as '*' to precisions")
            yield from ((f"the prior precision of {key!r}", value) for key, value in self.precision.items())
        elif not isinstance(self.precision, PSD):
            yield "the prior precision", self.precision

    def spec(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and a JSON-able description, for storage; `Prior.from_spec` reads them back."""
        tensors: dict[str, Tensor] = {}
        spec: dict[str, Any] = {"mean": _store(self.mean, "mean", tensors)}
        if isinstance(self.precision, PSD) and self.precision.iterative:
            raise UnsupportedOperation(
                "a prior that is a matrix-free posterior reads the data of that posterior in every product, and cannot "
                "be stored. Save that posterior, and fit again with Prior.from_posterior of what you load."
            )
        if isinstance(self.precision, PSD):
            packed, inner = pack(self.precision)
            tensors.update(prefixed("precision.", packed))
            spec |= {"kind": "matrix", "precision": inner}
        elif isinstance(self.precision, Mapping):
            keys = list(self.precision)
            values = [_store(self.precision[k], f"precision.{i}", tensors) for i, k in enumerate(keys)]
            spec |= {"kind": "names", "precision": [[k, v] for k, v in zip(keys, values, strict=True)]}
        else:
            spec |= {"kind": "values", "precision": _store(self.precision, "precision", tensors)}
        return tensors, spec

    @classmethod
    def from_spec(cls, tensors: Mapping[str, Tensor], spec: Mapping[str, Any], size: int | None = None) -> "Prior":
        """Rebuild the prior that `spec` described; a matrix is checked to be over `size` weights, if that is given."""
        mean = _restore(spec["mean"], tensors)
        if spec["kind"] == "matrix":
            inner, matrix = under("precision.", tensors), spec["precision"]
            if size is not None:
                return cls(unpack_sound(inner, matrix, size), mean)
            return cls(unpack(inner, matrix, PSD), mean)
        if spec["kind"] == "names":
            return cls({key: _restore(value, tensors) for key, value in spec["precision"]}, mean)
        return cls(_restore(spec["precision"], tensors), mean)

    def __repr__(self) -> str:
        mean = "" if _is_zero(self.mean) else f", mean={_brief(self.mean)}"
        return f"Prior({_brief(self.precision)}{mean})"


def resolve_prior(prior: Precision | Prior) -> Prior:
    """Return the prior that `prior=` means: a number, a dict, a tensor, a matrix or a `Prior`."""
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, int | float | Tensor | Mapping | PSD):
        return Prior(prior)
    raise BadData(
        f"prior must be a precision (a number, a dict from names or globs to numbers, a flat tensor), or a Prior, "
        f"not {type(prior).__name__}"
    )


def _by_name(
    precision: Mapping[str, Scalar],
    names: Sequence[str],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    index: Tensor | None,
) -> Diagonal:
    """Return one value per weight, from the first pattern that matches each parameter."""
    used = [_first_match(precision, name) for name in names]
    _check_patterns(precision, names, used)
    values = {pattern: torch.as_tensor(precision[pattern], dtype=dtype, device=device) for pattern in precision}
    if not any(value.ndim for value in values.values()) and any(value.requires_grad for value in values.values()):
        first = {id(precision[pattern]): k for k, pattern in reversed([*enumerate(values)])}  # one tensor, one level
        level = torch.tensor([first[id(precision[pattern])] for pattern in used])
        group = torch.repeat_interleave(level, torch.tensor([*sizes]))
        return Diagonal.by_group(torch.stack([*values.values()]), group if index is None else group[index.cpu()])
    parts = []
    for name, size, pattern in zip(names, sizes, used, strict=True):
        value = values[pattern]
        if value.ndim and tuple(value.shape) != (size,):
            raise IncompatiblePrior(
                f"the prior precision of {name!r} has shape {tuple(value.shape)}; use a scalar or shape ({size},)"
            )
        parts.append(value.expand(size))
    each = torch.cat(parts)
    return Diagonal(each if index is None else each[index.to(each.device)])


def _side(values: float | Sequence[float] | Tensor, count: int, name: str, layer: str) -> Tensor:
    """Return one precision per unit or input, (count,), from as many or from one for all."""
    found = torch.as_tensor(values, dtype=torch.float64).detach()
    if found.shape not in ((), (count,)):
        raise IncompatiblePrior(f"the layer {layer!r} has {count} {name}, and got {tuple(found.shape)} precisions")
    _check(found, f"the precision of the {name} of {layer!r}", "positive and finite", above=0.0)
    return found.expand(count)


def _check(value: Any, where: str, allowed: str, above: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise BadData(f"{where} must be a number or a tensor, not {type(value).__name__}")
    if not isinstance(value, Tensor) and above < value < math.inf:
        return
    values = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if values.ndim > 1:
        raise IncompatiblePrior(f"{where} has shape {tuple(values.shape)}; use a scalar or a flat tensor")
    values = values.double() if not values.is_floating_point() else values
    bad = ~((values > above) & torch.isfinite(values))
    if bad.any():
        raise IncompatiblePrior(f"{where} must be {allowed}, got {values[bad].flatten()[0].item()}")


def _first_match(patterns: Mapping[str, Scalar], name: str) -> str:
    for pattern in patterns:
        if pattern == name or fnmatchcase(name, pattern):
            return pattern
    raise IncompatiblePrior(
        f"the prior says nothing about the selected parameter {name!r}; its patterns are {list(patterns)}. Add one, "
        "or '*' as the last for all the rest"
    )


def _check_patterns(patterns: Mapping[str, Scalar], names: Sequence[str], used: Sequence[str]) -> None:
    for pattern in patterns:
        if pattern in used:
            continue
        hits = [name for name in names if pattern == name or fnmatchcase(name, pattern)]
        if not hits:
            raise IncompatiblePrior(
                f"the prior's pattern {pattern!r} matches none of the parameters {_some(names)}"
                f"{nearest(pattern, names)}"
            )
        raise IncompatiblePrior(
            f"the prior's pattern {pattern!r} never holds: earlier patterns already took {_some(hits)}. Put it first"
        )


def _some(names: Sequence[str], shown: int = 8) -> str:
    tail = f", … ({len(names)} in all)" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + tail


def _store(value: Scalar, key: str, tensors: dict[str, Tensor]) -> float | str:
    if isinstance(value, Tensor):
        tensors[key] = value.detach().clone()
        return key
    return float(value)


def _restore(value: float | str, tensors: Mapping[str, Tensor]) -> Scalar:
    return tensors[value] if isinstance(value, str) else value


def _is_zero(value: Scalar) -> bool:
    return not isinstance(value, Tensor) and value == 0


def _brief(value: Precision) -> str:
    if isinstance(value, PSD):
        return f"{type(value).__name__} of {value.size}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_brief(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Tensor) and value.numel() != 1:
        v = value.detach()
        return f"{v.numel()} values in [{v.min().item():.3g}, {v.max().item():.3g}]"
    return f"{value.item() if isinstance(value, Tensor) else value:.6g}"
