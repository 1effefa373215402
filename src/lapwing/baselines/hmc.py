"""Hamiltonian Monte Carlo by Pyro's No-U-Turn sampler: the reference for networks of hundreds of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lapwing.baselines.mixing import WeightDistribution, Weighted
from lapwing.baselines.training import Task, TaskOptions
from lapwing.errors import BadData, TooLarge, require_generator, require_whole, warn
from lapwing.likelihoods import Likelihood
from lapwing.model.batches import Batch
from lapwing.model.calls import warnings_here

LARGEST = 5000  # weights; more need days
CONVERGED = 1.05  # R-hat of the outputs above which the chains have not mixed
CHECKED = 64  # training inputs at whose outputs R-hat is computed
JITTER = 0.1  # standard deviation of the starting points around the weights of the network


@dataclass(frozen=True, eq=False)
class HMC(WeightDistribution):
    """Weights (S, P) drawn from the posterior itself by NUTS (Hoffman and Gelman 2014), from Pyro (extra `baselines`).

    `r_hat` and `ess` (P,) are the split R-hat and the effective sample size of every weight. Weights that can trade
    places never mix, and need not. Judge by `output_r_hat` and `output_ess`, the same numbers for the network's outputs
    at training inputs. A fit warns if an R-hat of the outputs exceeds 1.05.

    Examples:
        >>> network, data = network.double(), (inputs.double(), targets.double())
        >>> hmc = baselines.HMC.fit(network, data, lapwing.Gaussian(0.3), samples=5, warmup=5, chains=1, depth=3)
        >>> hmc.predict(data[0]).stddev.shape
        torch.Size([40, 1])
    """

    weights: Tensor
    r_hat: Tensor
    ess: Tensor
    output_r_hat: Tensor
    output_ess: Tensor
    divergences: int = 0

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        data: Any,
        likelihood: str | Likelihood,
        *,
        samples: int = 500,
        warmup: int = 500,
        chains: int = 2,
        depth: int = 10,
        progress: bool | None = None,
        **options: Unpack[TaskOptions],
    ) -> HMC:
        """Draw `samples` weights per chain after `warmup` steps of adaptation, over all data at once.

        Chains start near the weights of the model and run one after the other. `depth` limits the doublings of a
        trajectory. Networks in float64 are safer: rounding in float32 costs acceptance. The other options (prior,
        n_data, generator, split) are those of `TaskOptions`; `n_data` rescales the log-likelihood as in `lapwing.fit`.
        The module is not written to. Pyro draws from PyTorch's global random numbers: they are as before afterwards,
        but other threads should not use them meanwhile.
        """
        try:
            from pyro.infer import MCMC, NUTS
            from pyro.ops.stats import effective_sample_size, split_gelman_rubin
        except ImportError as error:
            raise ImportError("HMC needs pyro-ppl: pip install 'lapwing-torch[baselines]'") from error
        for name, value in {"samples": samples, "warmup": warmup, "chains": chains, "depth": depth}.items():
            require_whole(name, value)
        if samples < 4:
            raise BadData(f"R-hat needs at least 4 samples per chain, got {samples}")
        options.setdefault("batch_size", 2**20)
        task = Task.of(model, data, likelihood, "HMC", **options)
        if task.params.size > LARGEST:
            raise TooLarge(
                f"HMC is for networks of hundreds of weights, at most {LARGEST}; this one has {task.params.size}. Use "
                "MeanField, SWAG or lapwing.fit"
            )
        kept = [batch for _, batch in task.each(1)]
        found, divergences = [], 0
        with task.running(), torch.random.fork_rng(), warnings_here("ignore", UserWarning):
            energy = _potential(task, kept)
            for _ in range(chains):
                seed = int(torch.randint(2**31, (), generator=task.generator, device=task.generator.device))
                torch.manual_seed(seed)
                start = task.params.flat + JITTER * torch.randn_like(task.params.flat)
                kernel = NUTS(potential_fn=lambda at: energy(at["theta"]), max_tree_depth=depth)
                run = MCMC(
                    kernel,
                    num_samples=samples,
                    warmup_steps=warmup,
                    initial_params={"theta": start},
                    disable_progbar=not progress,
                )
                run.run()
                found.append(run.get_samples()["theta"].detach())
                divergences += sum(len(each) for each in run.diagnostics()["divergences"].values())
            draws = torch.stack(found)  # (chains, samples, P)
            outputs = _outputs(task, kept[0], draws)
        network = Weighted.of(task.module, task.params, task.likelihood, task.convention)
        found_r_hat = split_gelman_rubin(outputs, 0, 1)
        worst = found_r_hat.max().item()
        if not worst <= CONVERGED:
            warn(
                f"the chains have not mixed: an R-hat of the outputs is {worst:.3g} ({CONVERGED} is aimed at). Use "
                "more samples and warmup."
            )
        return cls(
            network,
            draws.flatten(0, 1),
            split_gelman_rubin(draws.double(), 0, 1),
            effective_sample_size(draws.double(), 0, 1),
            found_r_hat,
            effective_sample_size(outputs, 0, 1),
            divergences,
        )

    def summary(self) -> str:
        """Return one line: how many draws, R-hat and effective sample size of outputs and weights, divergences."""
        parts = [f"{len(self.weights)} draws"]
        for name, r_hat, ess in (
            ("outputs", self.output_r_hat, self.output_ess),
            ("weights", self.r_hat, self.ess),
        ):
            parts.append(f"{name}: R-hat at most {r_hat.max():.3f}, effective sample size at least {ess.min():.0f}")
        return "; ".join([*parts, f"{self.divergences} divergences"])

    @property
    def samples(self) -> int:
        """The number of networks that predict: all draws, unless `predict` gets a number."""
        return len(self.weights)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n of the drawn weights, at most all of them: evenly spread, or at random with a generator."""
        require_generator(generator, self.weights.device)
        n = min(n, self.samples)
        if generator is not None:
            return self.weights[torch.randperm(self.samples, generator=generator, device=generator.device)[:n]]
        rows = torch.linspace(0, self.samples - 1, n, device=self.weights.device)
        return self.weights[rows.round().long()]


class Known(torch.autograd.Function):
    """A number whose gradient is known already, so that autograd need not look for it."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return outer[0] * gradient, None, None


def _potential(task: Task, batches: list[Batch]) -> Callable[[Tensor], Tensor]:
    """Return −log p(D, θ) as a function of the flat weights, up to a constant; inside `task.running`.

    Small networks spend most of a step outside of arithmetic: in calls of modules, and in autograd's records. So the
    function and its gradient are traced once and replayed as a list of operations. A network that branches on values of
    tensors cannot be traced and runs as it is.
    """
    start = task.params.flat
    with torch.no_grad():
        values = task.params.unflatten(start)
        targets = [task.likelihood.targets(task.outputs(batch, values), batch.targets) for batch in batches]
    seen = sum(
        float(len(torch.as_tensor(batch.targets))) if batch.weights is None else float(batch.weights.double().sum())
        for batch in batches
    )

    def energy(theta: Tensor) -> Tensor:
        values = task.params.unflatten(theta)
        losses = (task.nll(batch, values, targets=y)[0] for batch, y in zip(batches, targets))
        return sum(losses, start=theta.new_zeros(())) * (task.n_data / seen) + task.distance(theta)

    try:
        both = make_fx(torch.func.grad_and_value(energy))(start)
        gradient, value = both(start + 0.1)
        own = (start + 0.1).requires_grad_()
        with torch.enable_grad():
            known = energy(own)
        if not (torch.allclose(known, value) and torch.allclose(torch.autograd.grad(known, own)[0], gradient)):
            return energy
    except (RuntimeError, NotImplementedError, TypeError, BadData):  # an error inside the network is a BadData
        return energy

    def replayed(theta: Tensor) -> Tensor:
        with torch.no_grad():
            gradient, value = both(theta.detach())
        return Known.apply(theta, value, gradient)

    return replayed


def _outputs(task: Task, batch: Batch, draws: Tensor) -> Tensor:
    """Return the outputs of every draw at a few training inputs, (chains, samples, items·C), float64."""
    with torch.no_grad():
        rows = [task.outputs(batch, task.params.unflatten(theta)) for theta in draws.flatten(0, 1)]
    few = torch.stack([row[:CHECKED].double().flatten() for row in rows])
    return few.unflatten(0, draws.shape[:2])
