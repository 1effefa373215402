"""What one pass over held-out data keeps, so that every prior, temperature and noise can be scored without another."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import BadData, IncompatiblePrior, TooLarge
from lapwing.evidence.groups import Groups
from lapwing.evidence.nodes import Nodes
from lapwing.evidence.scoring import Score, counted
from lapwing.evidence.tuning import Setting
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, Rows
from lapwing.posterior import Belief

CHUNK = 2**22  # elements of f that one Monte Carlo step holds
Adjust = Callable[[Tensor, float, slice | Tensor], Tensor]
"""(covariance (items, C, C), T/φ, which items) -> the covariance that is scored."""
Batch = tuple[Tensor, Tensor, Rows]
"""f (B, *event, C), canonical targets, and rows (B, *event·C flattened) of ∂f/∂θ."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """Outputs f (N, *event, C), targets, and grams (G, m, N·event, C(C+1)/2): J (H + ρ_j I)⁻¹ Jᵀ of each group."""

    f: Tensor
    y: Tensor
    grams: Tensor
    nodes: Nodes
    likelihood: Likelihood
    power: int
    tempers_prior: bool
    score: Score
    adjust: Adjust | None = None

    def _rho(self, tau: Tensor, temperature: Tensor, dispersion: Tensor) -> tuple[Tensor, Tensor]:
        """c = T/φ^k and ρ = τ/c of each group."""
        c = temperature / dispersion**self.power
        return c, (temperature * tau if self.tempers_prior else tau) / c

    def rho(self, setting: Setting) -> Tensor:
        """τ/c of each group, (G,)."""
        phi = self.likelihood.dispersion.item() if setting.dispersion is None else setting.dispersion
        scalars = torch.tensor([setting.temperature, phi], dtype=torch.float64)
        return self._rho(setting.precision.double(), scalars[0], scalars[1])[1]

    def coefficients(self, tau: Tensor, temperature: Tensor, dispersion: Tensor) -> Tensor:
        """How much of each gram the covariance holds, (G, m); differentiable."""
        c, rho = self._rho(tau.expand(self.grams.shape[0]), temperature, dispersion)
        return self.nodes.coefficients(rho) / c

    def covariance(self, coefficients: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """(items, C, C) of items start … stop − 1."""
        grams = self.grams[:, :, start:stop]
        flat = coefficients.to(grams).reshape(-1) @ grams.reshape(-1, grams.shape[2] * grams.shape[3])
        return unpack_symmetric(flat.reshape(grams.shape[2:]), self.f.shape[-1])

    def losses(self, setting: Setting) -> Tensor:
        """−log p(y) of each item that counts under a setting, float64."""
        phi = self.likelihood.dispersion.item() if setting.dispersion is None else setting.dispersion
        T, dispersion, logits = torch.tensor([setting.temperature, phi, setting.logit_temperature]).double()
        with torch.no_grad():
            coefficients = self.coefficients(setting.precision.double(), T, dispersion)
            every = torch.cat(list(self.parts(coefficients, dispersion, (T / dispersion**self.power).item(), logits)))
        return counted(self.f, self.y, self.likelihood, every)

    def nll(self, setting: Setting) -> float:
        """The mean NLL per item under a setting."""
        return self.losses(setting).mean().item()

    def subset(self, size: int) -> "Sweep":
        """About `size` data, evenly spread."""
        keep = torch.arange(0, len(self.f), max(1, len(self.f) // size))
        places = self.f[0, ..., 0].numel()
        index = (places * keep[:, None] + torch.arange(places)).reshape(-1)
        adjust = self.adjust
        if adjust is not None:
            inner = adjust
            adjust = lambda covariance, scale, part: inner(covariance, scale, index[part])  # noqa: E731
        return replace(self, f=self.f[keep], y=self.y[keep], grams=self.grams[:, :, index], adjust=adjust)

    def parts(self, coefficients: Tensor, dispersion: Tensor, scale: float, logits: Tensor) -> Iterator[Tensor]:
        """−log p(y) of chunks of items; scale is T/φ, and logits are divided by `logits`."""
        likelihood = self.likelihood
        if dispersion.requires_grad or dispersion.item() != likelihood.dispersion.item():
            likelihood = likelihood.with_dispersion(dispersion)
        f, y = self.flat
        step = max(1, CHUNK // (256 * f.shape[-1]))
        for start in range(0, len(f), step):
            part = slice(start, min(len(f), start + step))
            covariance = self.covariance(coefficients, part.start, part.stop)
            if self.adjust is not None:
                covariance = self.adjust(covariance, scale, part)
            mean = f[part]
            if logits.requires_grad or logits.item() != 1.0:
                mean, covariance = mean / logits.to(mean), covariance / logits.to(mean).square()
            yield -self.score(mean, covariance, y[part], likelihood).double()

    def spreads(self) -> Tensor:
        """How unequal the items are at each shift ρ_j: the standard deviation of their log-variances, (m,).

        Variances of f, or for classes of f less its average over them; NaN where rounding drowns one.
        """
        size = self.f.shape[-1]
        low, high = torch.tril_indices(size, size, device=self.f.device)
        shared = 1 / size if self.likelihood.shift_invariant and size > 1 else 0.0
        weights = torch.where(low == high, 1 - shared, -2 * shared)
        total = self.grams.sum(0)  # (m, items, C(C+1)/2)
        variances = total @ weights.to(total)
        rounding = 10 * size * torch.finfo(total.dtype).eps * total[..., low == high].amax(-1)
        logs = torch.where(variances > rounding, variances, torch.nan).double().log()
        items = torch.stack([counted(self.f, self.y, self.likelihood, each) for each in logs])
        return items.std(1) if items.shape[1] > 1 else torch.full_like(items[:, 0], torch.nan)

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """f (items, C) and the targets of each item."""
        f = self.f.reshape(-1, self.f.shape[-1])
        return f, self.y.reshape(f.shape[0], *self.y.shape[self.f.ndim - 1 :])


def collect(
    belief: Belief, groups: Groups, batches: Iterable[Batch], nodes: Nodes, *, score: Score, memory: int
) -> Sweep:
    """Read the data once and keep what scoring needs; a damped belief has its Kronecker blocks damped."""
    matrix, split = belief.curvature.matrix, belief.split
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    grams: list[Tensor] = []
    used = 0
    for f, y, rows in batches:
        part = _grams(matrix, groups, rows, nodes, f, split)
        used += part.numel() * part.element_size()
        if 2 * used > memory:
            read = sum(len(part) for part in outputs) + len(f)
            raise TooLarge(
                f"tuning on held-out data keeps {groups.count} × {len(nodes.shifts)} covariances of {f.shape[-1]} "
                f"outputs an item, more than {memory / 1e9:.3g} GB after {read} data. Use fewer validation data, "
                "prior='scalar', a narrower grid, or raise memory="
            )
        outputs.append(f.detach())
        targets.append(y)
        grams.append(part)
    if not outputs:
        raise BadData("the validation data hold no batch")
    return Sweep(
        torch.cat(outputs),
        torch.cat(targets),
        torch.cat(grams, 2),
        nodes,
        belief.likelihood,
        belief.power,
        belief.temperature.prior,
        score,
    )


def _grams(matrix: PSD, groups: Groups, rows: Rows, nodes: Nodes, f: Tensor, split: float | None = None) -> Tensor:
    """(G, m, B·event, C(C+1)/2) of one batch."""
    classes = f.shape[-1]
    places = f[0, ..., 0].numel()
    if rows.r != places * classes or rows.n != f.shape[0]:
        raise ValueError(f"rows of {rows.n} samples and {rows.r} directions do not fit outputs {tuple(f.shape)}")
    low, high = torch.tril_indices(classes, classes, device=f.device)
    offsets = classes * torch.arange(places, device=f.device)[:, None]
    pairs = torch.stack([(low + offsets).reshape(-1), (high + offsets).reshape(-1)])  # (2, event·C(C+1)/2)
    shifts = nodes.shifts.to(f.device)
    total = f.new_zeros(groups.count, len(shifts), rows.n * places, len(low))
    with torch.no_grad():
        for block, part, group in _blocks(matrix, groups, rows):
            products = block.shifted_products(part, shifts, pairs, split)  # (m, n, event·C(C+1)/2)
            total[group] += products.reshape(len(shifts), -1, len(low)).to(total)
    return total


def _blocks(matrix: PSD, groups: Groups, rows: Rows) -> Iterator[tuple[PSD, Rows, int]]:
    """Blocks with an eigenbasis inside one group, with their rows."""
    for block, index, part in matrix.blockwise_rows(groups.index, rows):
        if bool((index != index[0]).any()):
            each = "prior='layerwise', with" if block.is_diagonal else "structure='diag', 'kron' or 'ekfac' with"
            raise IncompatiblePrior(
                f"held-out tuning needs one precision per block of the curvature, and a {type(block).__name__} block "
                f"spans several. Use prior='scalar', {each} one precision a layer, or method='evidence'"
            )
        yield block, part, int(index[0])


def unpack_symmetric(flat: Tensor, size: int) -> Tensor:
    """(*b, C(C+1)/2), the lower triangle row by row -> (*b, C, C)."""
    low, high = torch.tril_indices(size, size, device=flat.device)
    where = torch.empty(size, size, dtype=torch.long, device=flat.device)
    where[low, high] = torch.arange(len(low), device=flat.device)
    where[high, low] = where[low, high]
    return flat[..., where]
