"""Small models with everything written out, so that the evidence can be checked by brute force."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lapwing.evidence import Groups
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.linalg import PSD, BlockDiagonal, Dense, Diagonal, EigenKronecker, Jacobian, Kronecker, Layout
from lapwing.linalg.rows import MatrixRows, Term
from lapwing.posterior import Belief, Prior, Tempered, resolve_temperature


@dataclass(frozen=True, eq=False)
class Handmade:
    """What `log_evidence` and tuning read of a curvature."""

    matrix: PSD
    statistics: Tensor
    dispersion_power: int = 1
    gradient: Tensor | None = None
    n_data: float = 1.0
    params: None = None

    @property
    def factor(self) -> "Handmade":
        return self


OF_THE_BELIEF = ("start", "center", "temperature", "logit_temperature", "split")


def believed(
    curvature: Handmade,
    likelihood: Likelihood,
    groups: Groups,
    theta: Tensor,
    *,
    start: float | Tensor = 1.0,
    center: float | Tensor = 0.0,
    temperature: float | Tempered = 1.0,
    split: float | None = None,
    **options: Any,
) -> Belief:
    """A belief with a curvature made by hand; `split` = √n asks for factored damping."""
    values = torch.as_tensor(start, dtype=torch.float64).expand(groups.count)
    if split is not None:
        curvature, options = replace(curvature, n_data=split**2), {**options, "damped": True}
    prior = Prior(groups.expand(values), center)
    return Belief(curvature, prior, likelihood, resolve_temperature(temperature), mean=theta, **options)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Problem:
    """A net written out: J (n, c, P), outputs, targets, θ̂, the dense GGN at unit dispersion, blocks and rows."""

    jacobian: Tensor
    f: Tensor
    y: Tensor
    theta: Tensor
    likelihood: Likelihood
    names: tuple[tuple[str, ...], ...]
    flat_names: tuple[str, ...]
    sizes: tuple[int, ...]
    layout: Layout
    rows: Callable[[Tensor], tuple[Tensor, Jacobian]]
    x: Tensor

    @property
    def ggn(self) -> Tensor:
        half = torch.einsum("ncp,ncr->nrp", self.jacobian, self.likelihood.factor(self.f, self.y)).flatten(0, 1)
        return half.T @ half

    @property
    def gradient(self) -> Tensor:
        score = self.likelihood.score(self.f, self.y) * self.likelihood.dispersion
        return torch.einsum("ncp,nc->p", self.jacobian, score)

    def curvature(self, structure: str = "full") -> Handmade:
        statistics = self.likelihood.statistics(self.f, self.y)
        return Handmade(self.matrix(structure), statistics, gradient=self.gradient)

    def belief(self, groups: Groups, structure: str = "full", **options: Any) -> Belief:
        """The belief at θ̂; `start` are prior precisions (one or one per group), `center` is the prior mean."""
        return believed(self.curvature(structure), self.likelihood, groups, self.theta, **options)

    def matrix(self, structure: str) -> PSD:
        ggn = self.ggn
        if structure == "full":
            return Dense(ggn)
        if structure == "diag":
            return Diagonal(ggn.diagonal().clone())
        blocks = [ggn[index][:, index] for index in self.layout.index]
        if structure == "blockdiag":
            return BlockDiagonal(self.layout, tuple(map(Dense, blocks)))
        return BlockDiagonal(self.layout, tuple(self._kronecker(structure)))

    def _kronecker(self, structure: str) -> list[PSD]:
        _, jacobian = self.rows(self.x)
        root = self.likelihood.factor(self.f, self.y)
        found: list[PSD] = []
        for part in jacobian.rows:
            assert isinstance(part, MatrixRows)
            g = torch.einsum("nco,ncr->nro", part.terms[0].left[:, :, 0, 0], root)
            a = part.terms[0].right[:, 0, 0, 0]
            left, right = torch.einsum("nro,nrp->op", g, g), a.T @ a / len(a)
            kron = Kronecker(left[None], right[None])
            if structure == "kron":
                found.append(kron)
                continue
            u, v = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
            values = torch.einsum("nro,ni->oi", (g @ u).square(), (a @ v).square())
            found.append(EigenKronecker(u[None], v[None], values[None]))
        return found


def mlp(
    likelihood: Likelihood,
    *,
    n: int = 30,
    inputs: int = 3,
    hidden: int = 5,
    outputs: int = 2,
    seed: int = 0,
    scale: float = 1.0,
) -> Problem:
    """A tanh network with one hidden layer and random weights, its targets drawn from the likelihood."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    x = torch.randn(n, inputs, dtype=torch.float64)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
        f = net(x)
        noise = 0.3 * torch.randn_like(f)
    y = f + noise if isinstance(likelihood, Gaussian) else likelihood.sample_target(f)
    params = {k: v.detach() for k, v in net.named_parameters()}
    sizes = tuple(v.numel() for v in params.values())
    starts = [sum(sizes[:k]) for k in range(4)]

    def jacobian_at(z: Tensor) -> Tensor:
        parts = vmap(jacrev(lambda p, v: functional_call(net, p, (v,))), (None, 0))(params, z)
        return torch.cat([part.flatten(2) for part in parts.values()], -1)

    def folded(weight: int, bias: int, o: int, i: int) -> Tensor:
        w = torch.arange(starts[weight], starts[weight] + o * i).reshape(o, i)
        b = torch.arange(starts[bias], starts[bias] + o)[:, None]
        return torch.cat([w, b], 1).reshape(-1)

    layout = Layout(sum(sizes), (folded(0, 1, hidden, inputs), folded(2, 3, outputs, hidden)))

    def rows(z: Tensor) -> tuple[Tensor, Jacobian]:
        ones = torch.ones(len(z), 1, dtype=z.dtype)
        h = (z @ params["0.weight"].T + params["0.bias"]).tanh()
        out = h @ params["2.weight"].T + params["2.bias"]
        back = params["2.weight"] * (1 - h.square())[:, None]  # (n, c, hidden)
        eye = torch.eye(outputs, dtype=z.dtype).expand(len(z), -1, -1)
        first = Term(back[:, :, None, None], torch.cat([z, ones], 1)[:, None, None, None])
        second = Term(eye[:, :, None, None], torch.cat([h, ones], 1)[:, None, None, None])
        return out, Jacobian((MatrixRows((first,)), MatrixRows((second,))), layout)

    flat = torch.cat([v.reshape(-1) for v in params.values()])
    names = (("0.weight", "0.bias"), ("2.weight", "2.bias"))
    return Problem(jacobian_at(x), f, y, flat, likelihood, names, tuple(params), sizes, layout, rows, x)


def linear(
    *, n: int = 25, p: int = 4, noise: float = 0.4, seed: int = 0, mode: bool = True, tau: float = 0.7
) -> Problem:
    """Bayesian linear regression, at its mode under prior precision `tau` or at a random θ̂."""
    torch.manual_seed(seed)
    x = torch.randn(n, p, dtype=torch.float64)
    y = x @ torch.randn(p, dtype=torch.float64) + noise * torch.randn(n, dtype=torch.float64)
    ridge = x.T @ x / noise**2 + tau * torch.eye(p, dtype=torch.float64)
    theta = torch.linalg.solve(ridge, x.T @ y / noise**2) if mode else torch.randn(p, dtype=torch.float64)
    layout = Layout.contiguous([p])

    def rows(z: Tensor) -> tuple[Tensor, Jacobian]:
        raise NotImplementedError

    f, y = (x @ theta)[:, None], y[:, None]
    return Problem(x[:, None], f, y, theta, Gaussian(noise), (("w",),), ("w",), (p,), layout, rows, x)
