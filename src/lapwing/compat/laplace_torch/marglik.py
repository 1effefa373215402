"""`marglik_training`: train while the evidence chooses prior precisions and noise (Immer et al. 2021, Alg. 1)."""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from tqdm import trange

from lapwing.compat.laplace_torch.backends import CurvatureInterface, CurvlinopsGGN
from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.enums import HessianStructure, Likelihood, PriorStructure, SubsetOfWeights
from lapwing.compat.laplace_torch.front import Laplace
from lapwing.compat.laplace_torch.functions import expand_prior_precision, fix_prior_prec_structure
from lapwing.errors import BadData


def marglik_training(
    model: nn.Module,
    train_loader: Any,
    likelihood: Likelihood | str = Likelihood.CLASSIFICATION,
    hessian_structure: HessianStructure | str = HessianStructure.KRON,
    backend: type[CurvatureInterface] = CurvlinopsGGN,
    optimizer_cls: Any = torch.optim.Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: Any = None,
    scheduler_kwargs: dict[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 1e-1,
    prior_structure: PriorStructure | str = PriorStructure.LAYERWISE,
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float = 1.0,
    sigma_noise_init: float = 1.0,
    temperature: float = 1.0,
    fix_sigma_noise: bool = False,
    progress_bar: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
) -> tuple[BaseLaplace, nn.Module, list[float], list[float]]:
    """Train a model, taking steps on the evidence of its posterior after every `marglik_frequency` epochs.

    Returns the posterior at the weights and settings with the best evidence, the model with these weights, and the
    negative evidence and loss over time. The model stays in its mode (training or evaluation); in laplace-torch it
    is in evaluation mode after the first fit. The temperature divides the likelihood in the loss too.

        la, model, margliks, losses = marglik_training(model, loader, likelihood="regression")
    """
    if not hasattr(train_loader, "dataset"):
        kind = type(train_loader).__name__
        raise BadData(f"marglik_training takes a DataLoader, whose data set it counts, got a {kind}")
    regression = likelihood == Likelihood.REGRESSION
    options = {**(optimizer_kwargs or {})}
    if options.get("weight_decay"):
        options["weight_decay"] = 0.0  # the prior takes its place
    weights = [p for p in model.parameters() if p.requires_grad]
    device, dtype, size = weights[0].device, weights[0].dtype, sum(p.numel() for p in weights)
    n = len(train_loader.dataset)
    log_prior = fix_prior_prec_structure(0.0, prior_structure, len(weights), size, device, dtype)
    log_prior = (log_prior + torch.tensor(prior_prec_init, dtype=dtype).log().to(device)).requires_grad_()
    log_sigma = torch.full((1,), float(sigma_noise_init), device=device, dtype=dtype).log().requires_grad_()
    learned = [log_prior, log_sigma] if regression and not fix_sigma_noise else [log_prior]
    optimizer = optimizer_cls(model.parameters(), **options)
    scheduler = None if scheduler_cls is None else scheduler_cls(optimizer, **(scheduler_kwargs or {}))
    hyper = torch.optim.Adam(learned, lr=lr_hyp)
    criterion = nn.MSELoss() if regression else nn.CrossEntropyLoss()
    given = {"backend": backend, "temperature": temperature, "dict_key_x": dict_key_x, "dict_key_y": dict_key_y}

    def fitted(**more: Any) -> Any:
        precision = log_prior.detach().exp()
        sigma = log_sigma.detach().exp()[0] if regression else 1.0
        chosen = {"sigma_noise": sigma, "prior_precision": precision, **given, **more}
        la: Any = Laplace(model, likelihood, SubsetOfWeights.ALL, hessian_structure, **chosen)
        la.fit(train_loader)
        return la

    def epoch() -> float:
        total = 0.0
        for data in train_loader:
            x, y = (data, data[dict_key_y]) if isinstance(data, MutableMapping) else (data[0].to(device), data[1])
            optimizer.zero_grad()
            factor = (1 / (2 * log_sigma.detach().exp() ** 2) if regression else 1.0) / temperature
            precision = expand_prior_precision(log_prior.detach().exp(), model)
            theta = parameters_to_vector(weights)
            loss = criterion(model(x), y.to(device)) + (0.5 * (precision * theta) @ theta / n / factor).sum()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
            if scheduler is not None:
                scheduler.step()
        return total / n

    best: tuple[float, Any, Tensor, Tensor] | None = None
    margliks: list[float] = []
    losses: list[float] = []
    for number in trange(1, n_epochs + 1, disable=not progress_bar, desc="[Training]"):
        losses.append(epoch())
        if number % marglik_frequency or number < n_epochs_burnin:
            continue
        la = fitted()
        for _ in range(n_hypersteps):
            hyper.zero_grad()
            used = log_prior.detach().clone(), log_sigma.detach().clone()
            sigma = log_sigma.exp() if len(learned) > 1 else None
            value = -la.log_marginal_likelihood(log_prior.exp(), sigma)
            value.backward()
            hyper.step()
            margliks.append(value.item())
        if best is None or margliks[-1] < best[0]:
            best = margliks[-1], deepcopy(model.state_dict()), *used
    if best is not None:
        model.load_state_dict(best[1])
        with torch.no_grad():
            log_prior.copy_(best[2])
            log_sigma.copy_(best[3])
    return fitted(enable_backprop=enable_backprop), model, margliks, losses
