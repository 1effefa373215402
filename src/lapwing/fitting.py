"""`lapwing.fit` and `lapwing.load`: give a network a posterior, or read one from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lapwing.curvature import (
    Diag,
    Factor,
    Problem,
    Structure,
    available_memory,
    estimate_curvature,
    pose,
    resolve_factor,
    resolve_structure,
    with_noise_ratios,
)
from lapwing.curvature.curvature import mergeable
from lapwing.curvature.resume import Resume, require_folder
from lapwing.curvature.shards import filled, require_same, shared_convention, together
from lapwing.errors import BadData, CorruptFile, UnsupportedOperation, nearest, positive, require_generator, warn
from lapwing.laplace import Laplace
from lapwing.likelihoods import Likelihood, likelihood_from_spec, resolve_likelihood
from lapwing.model import (
    Batches,
    Network,
    Params,
    Subnetwork,
    choose_weights,
    explicit_subnetwork,
    explicit_weights,
    last_layer,
    select_names,
    unwrap,
)
from lapwing.model.batches import sharded
from lapwing.model.calls import outside_inference
from lapwing.model.stored import intact, require_same_module, restore_convention, restore_probe
from lapwing.model.watch import Watch, checksum
from lapwing.posterior import Belief, Prior, Tempered, resolve_prior, resolve_temperature
from lapwing.predictive.mixture import Mixture
from lapwing.predictive.predictive import Options
from lapwing.saving import read, read_members, restore_curvature, restore_params, restore_prior

F = TypeVar("F", bound=Callable[..., Any])

MEANT = {  # options that users of other libraries look for, and what to write here
    "noise": "likelihood=lapwing.Gaussian(noise=0.3)",
    "sigma_noise": "likelihood=lapwing.Gaussian(noise=0.3)",
    "last_layer": "select='last_layer'",
    "subset_of_weights": "select='last_layer'",
    "hessian_structure": "structure='kron'",
    "prior_precision": "prior=1.0",
}


def known_options(function: F) -> F:
    """Let a function answer an option that it does not have with the name that is most like it."""
    named = [name for name, each in signature(function).parameters.items() if each.kind is not each.POSITIONAL_ONLY]

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            if name not in named:
                meant = f". Write {MEANT[name]}" if name in MEANT else nearest(name, named)
                raise TypeError(f"{function.__name__} has no option {name!r}: it takes {', '.join(named)}{meant}")
        return function(*args, **options)

    return cast(F, checked)


@known_options
@outside_inference
def fit(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: str | Structure = "auto",
    factor: str | Factor = "ggn",
    select: Any = "all",
    prior: Any = 1.0,
    temperature: float | Tempered = 1.0,
    n_data: float | None = None,
    split: Callable[[Any], tuple] | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    memory: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    repair: bool = False,
) -> Laplace:
    """Give a trained network a Gaussian posterior over its weights, N(θ̂, (T/φ·H + Π)⁻¹).

    H is the curvature of the log-likelihood at the weights θ̂ of the network, Π the prior precision, φ the dispersion
    of the likelihood (σ² for a regression) and T the temperature.

    - `data`: a re-iterable of batches (a DataLoader, a list) or a pair (X, y). A batch is (x, y), ((x1, x2), y), a dict
      with labels, or anything that `split(batch) -> (inputs, targets[, weights])` reads. Arrays and data frames are
      converted to tensors. Labels of tokens are read as by the network's own loss, if it returns one.
    - `likelihood`: what the outputs mean: "classification", "regression", "binary", "counts", "heteroscedastic",
      "preference", or an object.
    - `structure`: the form of the curvature: "auto", "diag", "blockdiag", "kron", "ekfac", "full", "lowrank",
      "nystrom", "functional", "matrixfree", or an object such as `Kron(sharing="expand")`.
    - `factor`: how it is computed: "ggn", "mc" (Monte Carlo Fisher), "empirical", "hessian", "kfra", "auto", or an
      object.
    - `select`: which weights take part: "all", "last_layer", a glob such as "layer4.*", a list of names, a function
      (name, tensor) -> bool, or `subnetwork(...)`.
    - `prior`: a precision (see `Prior`). `temperature`: a power of the likelihood.
    - `n_data`: the size of the data set, if `data` is only a part of it or repeats it.
    - `generator`: the source of random numbers, for factors and structures that draw some.
    - `device`: a check, not a move: `fit` refuses a model that is on another device.
    - `memory`: bytes that the fit and predictions may use.
    - `checkpoint`: a folder from which an interrupted fit goes on (diag, blockdiag, kron, ekfac, full). Other batches
      or another order start over.
    - `progress`: True shows a progress bar, False none, None only on a terminal.
    - `repair`: raise the prior precision where the posterior would not be positive definite (exact Hessian).

    The module is evaluated in eval mode and is bit-identical afterwards. Under `torchrun`, after
    `torch.distributed.init_process_group`, all processes call `fit` with the same model and options, each with its own
    shard of the data (it may be empty); all get the posterior of all data. If one process fails, all raise an error.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification")
        >>> la.predict(x).probs.shape
        torch.Size([8, 3])
        >>> last = lapwing.fit(model, train_loader, "classification", select="last_layer", structure="kron", prior=10.0)
        >>> numbers = lapwing.fit(network, (inputs, targets), "regression")
    """
    with together() if sharded() else nullcontext():
        module = _module(model)
        family = resolve_likelihood(likelihood)
        chosen = resolve_structure(structure)
        directions = resolve_factor(factor)
        directions = chosen.factor(directions)
        chosen_prior, tempered = resolve_prior(prior), resolve_temperature(temperature)
        n_data = None if n_data is None else positive("n_data", n_data)
        budget = available_memory() if memory is None else int(positive("memory, a number of bytes,", memory))
        _require_kinds(split=split, generator=generator, checkpoint=checkpoint)
        where = _device(module, device)
        if generator is not None:
            require_generator(generator, where)
        batches = Batches(data, module, where, split)
        batches = filled(batches) if sharded() else batches
        select = explicit_subnetwork(select) if isinstance(select, Tensor) else select
        names = _names(module, select, batches)
        network = Network(module, Params.of(module, names), family.outputs)
        options: dict[str, Any] = {"generator": generator, "memory": budget, "progress": progress}
        if isinstance(select, Subnetwork):
            network = _narrowed(network, select, batches, family, directions, chosen_prior, tempered, options)
        if sharded():
            asked: dict[str, Any] = {"structure": chosen, "factor": directions, "n_data": n_data, "repair": repair}
            asked |= {"temperature": (float(tempered.T), tempered.prior)}
            require_same(_identity(network, family, chosen_prior) | {name: repr(each) for name, each in asked.items()})
        short: dict[str, Any] = {"closed": chosen.closed_form and checkpoint is None, "passes": chosen.passes()}
        problem = with_noise_ratios(pose(network, batches, family, directions, **short, **options))
        for doubt in problem.doubts:
            warn(doubt)
        # refuse a wrong prior before the work
        chosen_prior.resolve(names, network.params.sizes, index=network.params.index)
        if checkpoint is not None:
            problem = replace(problem, resume=_resume(Path(checkpoint), module, problem, chosen))
        curvature = estimate_curvature(problem, chosen, n_data)
        family = problem.likelihood if family.known else problem.likelihood.estimate(curvature.statistics)
        if problem.resume is not None:
            problem.resume.forget()
        again = data if batches.reiterable else None
        convention = shared_convention(batches.convention) if sharded() else batches.convention
        kept = Options(budget, split, progress, scalar=problem.scalar, convention=convention, data=again)
        watch = Watch.on(module, problem.example)
        belief = Belief(curvature, chosen_prior, family, tempered, repair=repair)
        _ = belief.posterior  # refuse now what has no posterior
        return Laplace(network, belief, kept, problem.plan, watch=watch)


def _identity(network: Network, family: Likelihood, prior: Prior) -> dict[str, str]:
    """Return what all processes of a fit must share, as texts by name."""
    params = network.params
    mean, matrix = prior.resolve(params.names, params.sizes, device=params.device, index=params.index)
    values = (t.detach().cpu().contiguous().numpy().tobytes() for t in (mean, matrix.diagonal()))
    return {
        "model": repr(checksum(network.module)),
        "likelihood": repr(family.spec()),
        "select": f"{params.names} {None if params.index is None else params.index.tolist()}",
        "prior": " ".join(hashlib.sha256(value).hexdigest() for value in values),
    }


def _require_kinds(
    split: Callable[[Any], tuple] | None, generator: torch.Generator | None, checkpoint: str | Path | None
) -> None:
    """Refuse options of the wrong kind before any work."""
    if split is not None and not callable(split):
        raise BadData(f"split is a function of a batch, got {split!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise BadData(f"generator is a torch.Generator, got {generator!r}: torch.Generator().manual_seed(0) makes one")
    if checkpoint is not None and not isinstance(checkpoint, str | Path):
        raise BadData(f"checkpoint is the path of a folder, got {checkpoint!r}")


def _resume(folder: Path, module: nn.Module, problem: Problem, chosen: Structure) -> Resume:
    """Return the files from which the fit goes on, for the same network, likelihood, factor and structure."""
    network, family, factor = problem.network, problem.likelihood, problem.factor
    if not (chosen.mergeable and factor.mergeable):
        raise UnsupportedOperation(f"checkpoint= serves structures {mergeable()} with a GGN or a Fisher; leave it out")
    require_folder(folder)
    index = network.params.index
    picked = "" if index is None else str(index.tolist())
    what = (repr(checksum(module)), repr(chosen), repr(factor), repr(family.spec()), repr(network.params.names), picked)
    return Resume(folder, hashlib.sha256("\n".join(what).encode()).hexdigest())


@overload
def load(
    path: str | Path,
    model: nn.Module,
    *,
    data: Any = None,
    likelihood: str | Likelihood | None = None,
    split: Callable[[Any], tuple] | None = None,
) -> Laplace: ...
@overload
def load(
    path: str | Path,
    model: Sequence[nn.Module],
    *,
    data: Any = None,
    likelihood: str | Likelihood | None = None,
    split: Callable[[Any], tuple] | None = None,
) -> Mixture: ...
@outside_inference
def load(
    path: str | Path,
    model: nn.Module | Sequence[nn.Module],
    *,
    data: Any = None,
    likelihood: str | Likelihood | None = None,
    split: Callable[[Any], tuple] | None = None,
) -> Laplace | Mixture:
    """Read a posterior that `la.save(path)` wrote, for the same model with the same weights.

    `likelihood` is needed for a likelihood of your own that is not registered. `data` (and `split`) are the data of the
    fit, which structure="matrixfree" reads again for every product. A mixture takes the list of its members' models,
    in the order in which they were mixed.

    Examples:
        >>> la.save("model.lapwing")
        >>> again = lapwing.load("model.lapwing", model)
        >>> torch.equal(again.predict(x).probs, la.predict(x).probs)
        True
    """
    if isinstance(path, nn.Module):
        raise BadData("load takes the file first and then the model: lapwing.load('model.lapwing', model)")
    path = Path(path)
    if not isinstance(model, list | tuple):
        return _restored(path, *read(path), _module(model), data, likelihood, split)
    members, weights = read_members(path)
    if len(members) != len(model):
        raise BadData(f"{path.name!r} holds a mixture of {len(members)} posteriors, and {len(model)} models were given")
    each = [_restored(path, *own, _module(m), data, likelihood, split) for own, m in zip(members, model)]
    with intact(path):
        return Mixture(each, weights if isinstance(weights, str) else torch.tensor(weights, dtype=torch.float64))


def load_bytes(content: bytes, model: nn.Module, likelihood: Likelihood | None = None) -> Laplace:
    """Read a posterior from the bytes of its file, as `load` does."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.lapwing"
        path.write_bytes(content)
        return load(path, model, likelihood=likelihood)


def _restored(
    path: Path,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    module: nn.Module,
    data: Any,
    likelihood: str | Likelihood | None,
    split: Callable[[Any], tuple] | None,
) -> Laplace:
    """Make a posterior from the tensors and the header of its file."""
    with intact(path):
        require_same_module(header, module, path)
        probe = restore_probe(tensors, header, module, path)
        params = restore_params(tensors, header, module)
        convention = restore_convention(header)
    given = None if likelihood is None else resolve_likelihood(likelihood)
    family = likelihood_from_spec(header["likelihood"], given)
    network = Network(module, params, family.outputs)

    def posed(factor: Factor) -> Problem:
        if data is None:
            raise BadData(
                f"{path.name!r} holds a matrix-free posterior, whose matrix is in its products with the data: "
                "load(path, model, data=train_loader) with the data of the fit"
            )
        batches = Batches(data, module, params.device, split, convention)
        batches.require_reiterable("structure='matrixfree'")
        return pose(network, batches, family, factor, memory=header["memory"])

    curvature = restore_curvature(tensors, header, params, posed, path)
    with intact(path):
        temperature, tempers_prior = header["temperature"]
        belief = Belief(
            curvature,
            restore_prior(tensors, header, params),
            family,
            Tempered(temperature, tempers_prior),
            header.get("logit_temperature", 1.0),
            header["damped"],
            header["repair"],
        )
        options = Options(header["memory"], split, scalar=header["scalar"], convention=convention)
        la = Laplace(network, belief, options, tuned=header["tuned"], watch=Watch.on(module, probe=probe))
        if found := family.flaw(curvature.statistics):
            raise CorruptFile(f"{path.name!r} is impossible: {found}; fit again, or restore a copy")
    return la


def _module(model: Any) -> nn.Module:
    module = unwrap(model) if isinstance(model, nn.Module) else model
    if not isinstance(module, nn.Module):
        raise BadData(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return module


def _device(module: nn.Module, device: torch.device | str | None) -> torch.device:
    devices = {p.device for p in module.parameters()}
    if not devices:
        raise BadData("the model has no parameters: there is nothing to put a posterior on")
    if len(devices) > 1:
        raise BadData(f"the model's parameters are on several devices ({', '.join(map(str, devices))}); move it to one")
    (found,) = devices
    for name, p in module.named_parameters():
        if isinstance(p, UninitializedParameter) or p.is_meta:
            raise BadData(f"parameter {name!r} has no values yet: run the model once, or load its weights")
        if p.is_inference():
            raise BadData(
                f"parameter {name!r} was made in torch.inference_mode() and cannot be differentiated: copy it"
            )
        if not bool(p.isfinite().all()):
            raise BadData(f"parameter {name!r} of the network is not finite")
    try:
        wanted = found if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadData(f"device={device!r} is no device; the model is on {str(found)!r}") from error
    if wanted.type != found.type:
        raise BadData(f"device={str(device)!r}, but the model is on {str(found)!r}: move the model first")
    return found


def _names(module: nn.Module, select: Any, batches: Batches) -> tuple[str, ...]:
    if isinstance(select, Subnetwork):
        select = select.within
    if isinstance(select, str) and select == "last_layer":
        batches.require_reiterable("select='last_layer'")
        return last_layer(module, next(iter(batches)).inputs)
    return select_names(module, select)


def _narrowed(
    network: Network,
    select: Subnetwork,
    batches: Batches,
    family: Likelihood,
    factor: Factor | None,
    prior: Any,
    tempered: Tempered,
    options: dict[str, Any],
) -> Network:
    """Restrict a network to single weights."""
    params = network.params
    if select.indices is not None:
        index = explicit_weights(select.indices, params.total).to(params.device)
        return replace(network, params=replace(params, index=index))
    scores: Tensor = params.flat
    if select.by == "variance":
        batches.require_reiterable("choosing a subnetwork by variance")
        problem = with_noise_ratios(pose(network, batches, family, factor, **options))
        curvature = estimate_curvature(problem, Diag())
        family = family if family.known else problem.likelihood.estimate(curvature.statistics)
        scale = tempered.likelihood_scale(family.common_factor, curvature.factor.dispersion_power)
        precision = curvature.matrix.scale(scale) + prior.resolve(params.names, params.sizes, device=params.device)[1]
        scores = precision.inverse_diagonal()
    index = choose_weights(scores.detach(), select.size, select.by, options["generator"])
    return replace(network, params=replace(params, index=index))
