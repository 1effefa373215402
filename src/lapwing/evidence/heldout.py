"""Held-out data: one pass keeps what every prior, temperature and noise needs to be scored without another.

`collect` reads the data and returns a `GramSweep`, whose `losses(settings)` scores any number of settings. The score of
an item is log p(y) for Gaussian outputs (`linked`).

The covariance of the outputs under precision c·H + τI is (1/c) J (H + ρI)⁻¹ Jᵀ with ρ = τ/c: one function of one number
ρ for each group of weights. In log ρ and log e the kernel 1/(e + ρ) is a sech, whose spectrum falls like exp(−πω), so
that a few nodes ρ_j per decade suffice:

    (e + ρ)⁻¹ ≈ Σ_j a_j(ρ) (e + ρ_j)⁻¹  for all e in the spectrum of H.

If the relative error is at most δ for each e, the combination of J (H + ρ_j I)⁻¹ Jᵀ lies between 1 − δ and 1 + δ
times the truth as a matrix: it stays positive semi-definite, and every variance is right to δ. With 2.5 nodes per
decade, δ ≈ 1e-4.

Ritter's factored damping of G ⊗ A is (g + √ρ)(a + √ρ) for each pair of eigenvalues, again a function of ρ alone, and
smoother: the same nodes serve it if the coefficients are fitted at pairs (g, a) as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapwing.errors import BadData, IncompatiblePrior, NotConverged, NotPositiveDefinite, TooLarge
from lapwing.evidence.settings import Groups, Setting, counted
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.marginal import normal_nodes
from lapwing.linalg import PSD, Rows
from lapwing.posterior import Belief
from lapwing.predictive import GaussianFunction, Prediction, predict_targets
from lapwing.predictive.function import COVARIANCES
from lapwing.predictive.softmax import CLOSE, SEED, Pairs, apart_from, kept_points

Score = Callable[[Tensor, Tensor, Tensor, Likelihood], Tensor]
"""(mean (N, C), covariance (N, C, C), canonical targets, likelihood) -> log p(y) of each item, (N,); differentiable."""
CHUNK = 2**22  # values of f in one Monte Carlo step
Adjust = Callable[[Tensor, Tensor, slice | Tensor], Tensor]
"""Changes covariances (S, items, C, C), given T/φ (S,) and which items, before they are scored."""
Batch = tuple[Tensor, Tensor, Rows]
"""f (B, *event, C), canonical targets, and rows (B, *event·C flattened) of ∂f/∂θ."""
PER_DECADE = 2.5  # nodes ρ_j
ALONG = 1.4  # settings per decade of a line that are computed at first
PADDING = 2  # nodes beyond either end, since the approximation is worst at the ends
RIDGE = 1e-12
TRIED, AGREE = 3, 1e-4  # settings by which an interpolation is checked, and nats per item to which they must agree
TOKENS = 512  # outputs per sample at several positions: beyond, the rows of all cost ten times what the draws do
LOOK = 48  # samples with the largest losses, and as many others, on which the settings of a line are compared first
MANY = 8 * LOOK  # samples from which such a look pays
CLEAR = 6.0  # standard errors by which a setting must be worse there for a smaller look to do
AT_ONCE = 64  # shifts whose coefficients are fitted together
OVERFLOW = 80.0  # exponents beyond this overflow in float32, with room for a sum
RELATIVE = 0.02  # the largest error, in parts of a probability, for which pairs of classes do
JITTER = 1e-6  # share of the mean variance added to the diagonal: the covariance of f may be singular


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes ρ_j (m,), ascending; other ρ are combinations of them with coefficients a_j(ρ).

    The coefficients are fitted at eigenvalues e (k,), the `spectrum`, and at `pairs` (g, a) of damped factors (l, 2).
    `power` is that of the kernel: 1 for covariances, (e + ρ)⁻¹, and ½ for draws, (e + ρ)^-½.
    """

    shifts: Tensor
    spectrum: Tensor
    pairs: Tensor | None = None
    power: float = 1.0

    @classmethod
    def spanning(
        cls, low: float, high: float, largest: float, factors: float | None = None, per_decade: float = PER_DECADE
    ) -> Nodes:
        """Place nodes for every ρ in [low, high] and eigenvalues up to `largest`, of damped factors up to `factors`."""
        step = 1 / per_decade
        first, last = math.log10(low) - PADDING * step, math.log10(high) + PADDING * step
        shifts = torch.logspace(first, last, max(2, math.ceil((last - first) / step) + 1), dtype=torch.float64)
        start, stop = math.log10(low) - 3, max(math.log10(max(largest, 1e-30)), math.log10(low) - 2)
        count = max(20, math.ceil(12 * (stop - start)))
        grid = torch.logspace(start, stop, count, dtype=torch.float64)
        pairs = None if factors is None else _factor_pairs(math.sqrt(low), factors)
        return cls(shifts, torch.cat([grid.new_zeros(1), grid]), pairs)

    def _ratios(self, rho: Tensor) -> Tensor:
        """(e + ρ)/(e + ρ_j) and (g + √ρ)(a + √ρ)/((g + √ρ_j)(a + √ρ_j)) to the power of the kernel, (*b, k + l, m)."""
        rho = rho[..., None, None]
        found = (self.spectrum[:, None] + rho) / (self.spectrum[:, None] + self.shifts)
        if self.pairs is not None:
            g, a = self.pairs[:, :1], self.pairs[:, 1:]
            root, roots = rho.sqrt(), self.shifts.sqrt()
            found = torch.cat([found, (g + root) * (a + root) / ((g + roots) * (a + roots))], -2)
        return found if self.power == 1.0 else found**self.power

    def coefficients(self, rho: Tensor) -> Tensor:
        """a(ρ): (*b) -> (*b, m), by least squares in the relative error; differentiable."""
        ratios = self._ratios(rho.double())
        size = ratios.square().mean(-2, keepdim=True).sqrt().detach()
        columns = ratios / size
        normal = columns.mT @ columns / columns.shape[-2]
        eye = torch.eye(len(self.shifts), dtype=normal.dtype)
        right = columns.mean(-2)
        return torch.linalg.solve(normal + RIDGE * eye, right) / size[..., 0, :]

    def error(self, rho: Tensor) -> float:
        """Return δ, the largest relative error of (e + ρ)⁻¹ over the spectrum and all given ρ."""
        worst = 0.0
        for few in rho.double().unique().split(AT_ONCE):
            fitted = (self._ratios(few) @ self.coefficients(few)[..., None])[..., 0]
            worst = max(worst, (fitted ** (1 / self.power) - 1).abs().max().item())
        return worst


def _factor_pairs(low: float, largest: float) -> Tensor:
    """Return pairs g ≤ a from zero and three points per decade between `low` and `largest`, (l, 2)."""
    start, stop = math.log10(low) - 1.5, max(math.log10(max(largest, 1e-30)), math.log10(low) - 1)
    grid = torch.logspace(start, stop, max(6, math.ceil(3 * (stop - start))), dtype=torch.float64)
    return torch.combinations(torch.cat([grid.new_zeros(1), grid]), with_replacement=True)


def lines_of(settings: Sequence[Setting]) -> list[list[int]]:
    """Group the numbers of settings that differ in a common factor of their precisions alone, in its order."""
    found: dict[tuple, list[int]] = {}
    for k, each in enumerate(settings):
        shape = tuple((each.precision / each.precision[0]).tolist()) if len(each.precision) else ()
        key = (shape, each.temperature, each.dispersion, each.logit_temperature, each.deterministic)
        found.setdefault(key, []).append(k)
    return [sorted(line, key=lambda k: settings[k].narrow) for line in found.values()]


def enough(line: Sequence[Setting]) -> int:
    """Return how many settings on a line are computed first; the others are interpolated from them."""
    decades = 0.0 if len(line) < 2 else math.log10(line[-1].narrow / line[0].narrow)
    return math.ceil(ALONG * decades) + 3


def long_lines(settings: Sequence[Setting]) -> list[list[int]]:
    """Return those lines with so many settings that most are interpolated."""
    return [line for line in lines_of(settings) if len(line) >= 3 * enough([settings[k] for k in line])]


def chebyshev(u: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return Chebyshev's nodes between the ends of u, and the matrix that interpolates from them to u (barycentric)."""
    angle = torch.linspace(0, math.pi, count, dtype=torch.float64)
    low, high = u.min(), u.max()
    nodes = (low + high) / 2 - (high - low) / 2 * angle.cos()
    weights = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0).double()
    weights[[0, -1]] /= 2
    gaps = u[:, None] - nodes
    exact = gaps == 0
    parts = weights / gaps.masked_fill(exact, 1.0)
    parts = torch.where(exact.any(1, keepdim=True), exact.double(), parts)
    return nodes, parts / parts.sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Sweep(ABC):
    """Held-out data after one pass: enough to score any setting without another pass.

    These are outputs f (N, *event, C), their targets y, and the nodes ρ_j. `power` is that of the dispersion φ in the
    precision T/φ^power · H + Π; `tempers_prior` says whether the temperature multiplies the prior too.
    """

    f: Tensor
    y: Tensor
    nodes: Nodes
    likelihood: Likelihood
    power: int
    tempers_prior: bool

    @property
    @abstractmethod
    def groups(self) -> int:
        """G, the number of precisions that a setting has."""

    @property
    @abstractmethod
    def at_once(self) -> int:
        """How many settings to score together."""

    @abstractmethod
    def parts(self, coefficients: Tensor, dispersion: Tensor, scale: Tensor, logits: Tensor) -> Iterator[Tensor]:
        """Yield −log p(y) of chunks of items under several settings of one dispersion, (S, items).

        `coefficients` are (S, G, m); `scale` = T/φ and `logits`, which divide the logits, are (S,).
        """

    @abstractmethod
    def take(self, keep: Tensor) -> Sweep:
        """Keep the samples with these ascending numbers."""

    def subset(self, size: int) -> Sweep:
        """Keep about `size` samples, evenly spread."""
        return self.take(torch.arange(0, len(self.f), max(1, len(self.f) // size), device=self.f.device))

    @abstractmethod
    def spreads(self) -> Tensor:
        """Measure how unequal the items are at each node: the standard deviation of their log-variances, (m,).

        For classes, the variance is that of f minus its average over the classes. NaN where a variance is below
        rounding.
        """

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say about the pass."""
        return ()

    def shortcuts(self, settings: Sequence[Setting]) -> tuple[str, ...]:
        """Say which scores are not computed one by one."""
        if not long_lines(settings):
            return ()
        far = f"; far from the best one they are estimates from {2 * LOOK} of the data" if len(self.f) >= MANY else ""
        return (f"most scores of a fine grid of priors are interpolated, to {AGREE:g} nats{far}",)

    def _rho(self, tau: Tensor, temperature: Tensor, dispersion: Tensor) -> tuple[Tensor, Tensor]:
        """c = T/φ^k (*b) and ρ = τ/c (*b, G) for precisions (*b, G), temperatures and dispersions (*b)."""
        c = temperature / dispersion**self.power
        return c, (temperature[..., None] * tau if self.tempers_prior else tau) / c[..., None]

    def _scalars(self, settings: Sequence[Setting]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Precisions (S, G), temperatures, dispersions and logit temperatures (S,) of settings, in float64."""
        own = self.likelihood.dispersion.item()
        told = [(s.temperature, own if s.dispersion is None else s.dispersion, s.logit_temperature) for s in settings]
        T, phi, logits = torch.tensor(told, dtype=torch.float64).unbind(1)
        return torch.stack([s.precision.double() for s in settings]), T, phi, logits

    def rho(self, settings: Sequence[Setting]) -> Tensor:
        """Return ρ = τ/c of each setting and group, (S, G)."""
        return self._rho(*self._scalars(settings)[:3])[1]

    def coefficients(self, tau: Tensor, temperature: Tensor, dispersion: Tensor) -> Tensor:
        """Return the weight of what each node keeps in a setting's covariance or draws, (*b, G, m); differentiable."""
        c, rho = self._rho(tau.expand(*tau.shape[:-1], self.groups), temperature, dispersion)
        c = c[..., None, None] ** self.nodes.power
        if rho.requires_grad:
            return self.nodes.coefficients(rho) / c
        distinct, place = rho.unique(return_inverse=True)  # the settings of a grid share many ratios
        found = torch.cat([self.nodes.coefficients(few) for few in distinct.split(AT_ONCE)])
        return found[place] / c

    def losses(self, settings: Sequence[Setting]) -> Tensor:
        """Return −log p(y) of every item that counts under every setting, (S, N) float64.

        Many settings that differ in a common factor of their precisions alone are interpolated between a few of them:
        the losses are smooth functions of its logarithm, as the kernel 1/(e + ρ) is. Of many items, those far from the
        best are estimated (`_hopeful`).
        """
        found: dict[int, Tensor] = {}
        for line in long_lines(settings):
            found |= dict(zip(line, self._hopeful([settings[k] for k in line])))
        others = [k for k in range(len(settings)) if k not in found]
        if others:
            found |= dict(zip(others, self.exact_losses([settings[k] for k in others])))
        return torch.stack([found[k] for k in range(len(settings))])

    def _hopeful(self, line: Sequence[Setting]) -> Tensor:
        """Return the losses of settings in the order of their precisions, (S, N); of hopeless ones their means alone.

        A look at a few samples says which settings may be the best: the samples that the network alone predicts worst,
        where most can be won, and others evenly spread. Settings beyond those get the losses of the last of them, plus
        the mean difference that the look has found.
        """
        n, mask = len(self.f), self.likelihood.mask(self.f, self.y)
        if n < MANY or (mask is not None and not bool(mask.all())):
            return self._along(line)
        alone = -self.likelihood.log_prob(self.f, self.y).detach().double().reshape(n, -1).sum(1)
        order = alone.argsort(descending=True, stable=True)
        even = order[LOOK:][:: (n - LOOK) // LOOK]
        keep, by = torch.cat([order[:LOOK], even]).sort()
        items = torch.arange(self.f[..., 0].numel(), device=keep.device).reshape(n, -1)
        easy = (by >= LOOK)[:, None].expand(-1, items.shape[1]).flatten()
        share = torch.where(easy, (n - LOOK) / len(even), 1.0).double() / items.numel()
        few = self.take(keep)._along(line)
        gaps = few - few[(few @ share).argmin()]
        mean, error = gaps @ share, gaps[:, easy].std(1) * share.max() * easy.sum().sqrt()
        hopeful = (mean <= CLEAR * error + AGREE).nonzero()[:, 0]
        first, last = int(hopeful[0]), int(hopeful[-1])
        seen, at = few[first : last + 1], items[keep].flatten()
        losses = self._refined(
            line[first : last + 1], lambda found: bool((((found[:, at] - seen) @ share).abs() <= 2 * AGREE).all())
        )
        nearest = torch.arange(len(line), device=keep.device).clamp(first, last)
        return losses[nearest - first] + (mean - mean[nearest])[:, None]

    def _along(self, line: Sequence[Setting]) -> Tensor:
        """Return the losses of settings in the order of their precisions, interpolated between some, (S, N).

        Some settings are computed as well, whose mean loss the interpolation must not miss by more than `AGREE` nats.
        """
        tried = [round(k * (len(line) - 1) / (TRIED + 1)) for k in range(1, TRIED + 1)]
        exact = self.exact_losses([line[k] for k in tried])
        found = self._refined(line, lambda found: bool(((found[tried] - exact).mean(1).abs() <= AGREE).all()))
        found[tried] = exact
        return found

    def _refined(self, line: Sequence[Setting], agrees: Callable[[Tensor], bool]) -> Tensor:
        """Interpolate the losses of settings between nodes.

        Where they do not agree with what is known, as many nodes again are put between the first ones; where that is
        not enough, or saves nothing, all settings are computed.
        """
        u = torch.tensor([each.narrow for each in line], dtype=torch.float64).log()
        count, known = enough(line), torch.empty(0)
        for _ in range(2 if count < len(line) else 0):
            nodes, matrix = chebyshev(u, count)
            new = nodes[1::2] if len(known) else nodes  # every second node is one of the first
            factors = (new - u[0]).exp()
            values = self.exact_losses([replace(line[0], precision=factor * line[0].precision) for factor in factors])
            if len(known):
                values = torch.stack([*known, *values])[_interleaved(len(known))]
            found = matrix.to(values) @ values
            if agrees(found):
                return found
            count, known = 2 * count - 1, values
        return self.exact_losses(line)

    def exact_losses(self, settings: Sequence[Setting]) -> Tensor:
        """Return the losses of settings one by one: those that share a dispersion together, as fit into a chunk."""
        items = self.f[..., 0].numel()
        tau, T, phi, logits = self._scalars(settings)
        found = torch.empty(len(settings), items, dtype=torch.float64, device=self.f.device)
        with torch.no_grad():
            coefficients = self.coefficients(tau, T, phi)
            for dispersion in phi.unique():
                for few in (phi == dispersion).nonzero()[:, 0].split(self.at_once):
                    parts = self.parts(coefficients[few], dispersion, (T / phi**self.power)[few], logits[few])
                    found[few.to(found.device)] = torch.cat(list(parts), 1)
        mask = self.likelihood.mask(self.f, self.y)
        return found if mask is None else found[:, mask.reshape(-1)]


def _interleaved(count: int) -> list[int]:
    """Return the positions of the `count` first nodes after `count` − 1 new ones were put between them."""
    return [k // 2 if k % 2 == 0 else count + k // 2 for k in range(2 * count - 1)]


@dataclass(frozen=True, eq=False)
class GramSweep(Sweep):
    """Held-out data with the covariance of every item's outputs, per group of weights and node.

    `grams` (G, m, N·event, C(C+1)/2) are the lower triangles of J (H + ρ_j I)⁻¹ Jᵀ. `adjust` may change covariances
    before they are scored, as leave-one-out does.
    """

    grams: Tensor
    score: Score
    adjust: Adjust | None = None

    @property
    def groups(self) -> int:
        return self.grams.shape[0]

    @property
    def at_once(self) -> int:
        return max(1, self._step // self.f[..., 0].numel())

    def covariance(self, coefficients: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the covariances of f for items start … stop − 1, (*b, items, C, C)."""
        grams = self.grams[:, :, start:stop]
        flat = coefficients.to(grams).flatten(-2) @ grams.reshape(-1, grams.shape[2] * grams.shape[3])
        return unpack_symmetric(flat.reshape(*flat.shape[:-1], *grams.shape[2:]), self.f.shape[-1])

    def take(self, keep: Tensor) -> GramSweep:
        places = self.f[0, ..., 0].numel()
        index = (places * keep[:, None] + torch.arange(places, device=keep.device)).reshape(-1)
        adjust = self.adjust
        if adjust is not None:
            inner = adjust
            adjust = lambda covariance, scale, part: inner(covariance, scale, index[part])  # noqa: E731
        return replace(self, f=self.f[keep], y=self.y[keep], grams=self.grams[:, :, index], adjust=adjust)

    @property
    def _step(self) -> int:
        """How many items to score at once."""
        return max(1, CHUNK // (256 * self.f.shape[-1]))

    def parts(self, coefficients: Tensor, dispersion: Tensor, scale: Tensor, logits: Tensor) -> Iterator[Tensor]:
        likelihood = self.likelihood
        if dispersion.requires_grad or dispersion.item() != likelihood.dispersion.item():
            likelihood = likelihood.with_dispersion(dispersion)
        f, y = self.flat
        several = len(coefficients)
        plain = not logits.requires_grad and bool((logits == 1.0).all())
        for start in range(0, len(f), self._step):  # each part has its own graph: a descent goes back by parts
            part = slice(start, min(len(f), start + self._step))
            mean, weights = f[part].expand(several, -1, -1), coefficients
            divisor = logits.to(f)[:, None, None]
            if not plain:
                mean = mean / divisor
            if not plain and self.adjust is None:  # cheaper than to divide every covariance
                weights = weights / logits.to(weights)[:, None, None].square()
            covariance = self.covariance(weights, part.start, part.stop)
            if self.adjust is not None:
                covariance = self.adjust(covariance, scale, part)
                covariance = covariance if plain else covariance / divisor.square()[..., None]
            targets = y[part].expand(several, *y[part].shape)
            flat = (mean.flatten(0, 1), covariance.flatten(0, 1), targets.flatten(0, 1))
            yield -self.score(*flat, likelihood).double().unflatten(0, (several, -1))

    def spreads(self) -> Tensor:
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
        """f (items, C) and the targets of every item."""
        f = self.f.reshape(-1, self.f.shape[-1])
        return f, self.y.reshape(f.shape[0], *self.y.shape[self.f.ndim - 1 :])


def needs_draws(belief: Belief, f: Tensor, y: Tensor, link: str, memory: int, samples: int) -> bool:
    """Tell whether draws (`drawnoutputs`) should take the place of covariances, for data of so many samples like these.

    They do for class labels with more outputs per sample than predictions form covariances of, with more than `TOKENS`
    at several positions, or with covariances that would take more than a quarter of the memory, if the curvature has an
    eigenbasis.
    """
    classes = f.shape[-1]
    if not (belief.likelihood.softmax and classes > 2 and y.ndim == f.ndim - 1 and link in ("auto", "mc")):
        return False
    nodes = 40  # what a tuning of prior and temperature takes
    covariances = samples * f[0].numel() * (classes + 1) // 2 * nodes * f.element_size()
    many = f[0].numel() > (COVARIANCES if f.ndim == 2 else TOKENS) or covariances > memory // 4
    one = torch.ones(1, dtype=torch.float64, device=f.device)
    return many and belief.curvature.matrix.shifted_draws(1, one) is not None


def collect(
    belief: Belief, groups: Groups, batches: Iterable[Batch], nodes: Nodes, *, score: Score, memory: int
) -> GramSweep:
    """Read the data once and keep what scoring needs; the blocks of a damped belief are damped."""
    matrix, split = belief.curvature.matrix, belief.split
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    grams: list[Tensor] = []
    used = 0
    for f, y, rows in batches:
        used += _gram_bytes(f, groups, nodes)
        if 2 * used > memory:  # known before it is taken: the grams of a batch are held twice while they are made
            read = sum(len(part) for part in outputs) + len(f)
            raise TooLarge(
                f"tuning on held-out data keeps {groups.count} × {len(nodes.shifts)} covariances of {f.shape[-1]} "
                f"outputs per item, more than {memory / 1e9:.3g} GB after {read} data. Use fewer validation data, "
                "prior='scalar', a narrower grid, or raise memory="
            )
        try:
            part = _grams(matrix, groups, rows, nodes, f, split)
        except (NotConverged, NotPositiveDefinite) as error:
            if not matrix.iterative:
                raise
            raise NotConverged(
                f"tuning on held-out data solves with shifts from {nodes.shifts[0]:.1g} to {nodes.shifts[-1]:.1g}, and "
                f"products with this curvature are too inexact for the smallest ({error}) Pass a narrower grid, as in "
                "tune(val, grid={'prior': (0.1, 1.0, 10.0), 'temperature': (1.0,)}), or use a network in float64"
            ) from error
        outputs.append(f.detach())
        targets.append(y)
        grams.append(part)
    if not outputs:
        raise BadData("the validation data hold no batch")
    return GramSweep(
        torch.cat(outputs),
        torch.cat(targets),
        nodes,
        belief.likelihood,
        belief.power,
        belief.temperature.prior,
        torch.cat(grams, 2),
        score,
    )


def _gram_bytes(f: Tensor, groups: Groups, nodes: Nodes) -> int:
    """Return the memory that the grams of a batch take."""
    classes = f.shape[-1]
    return f.numel() * (classes + 1) // 2 * groups.count * len(nodes.shifts) * f.element_size()


def _grams(matrix: PSD, groups: Groups, rows: Rows, nodes: Nodes, f: Tensor, split: float | None = None) -> Tensor:
    """Compute the grams of one batch, (G, m, B·event, C(C+1)/2)."""
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
    """Yield the blocks of the matrix with their rows and their group; refuse a block that spans several groups."""
    for block, index, part in matrix.blockwise_rows(groups.index, rows):
        if bool((index != index[0]).any()):
            each = "prior='layerwise', with" if block.is_diagonal else "structure='diag', 'kron' or 'ekfac' with"
            raise IncompatiblePrior(
                f"held-out tuning needs one precision per block of the curvature, and a {type(block).__name__} block "
                f"spans several. Use prior='scalar', {each} one precision per layer, or method='evidence'"
            )
        yield block, part, int(index[0])


def unpack_symmetric(flat: Tensor, size: int) -> Tensor:
    """Expand lower triangles, row by row, (*b, C(C+1)/2) to symmetric matrices (*b, C, C)."""
    low, high = torch.tril_indices(size, size, device=flat.device)
    where = torch.empty(size, size, dtype=torch.long, device=flat.device)
    where[low, high] = torch.arange(len(low), device=flat.device)
    where[high, low] = where[low, high]
    return flat[..., where]


def own_nodes() -> tuple[Tensor, Tensor]:
    """Return coarse nodes (Q,) and log weights for N(0, 1); the integrand is smooth, so that few suffice.

    It takes every tenth node of `normal_nodes`. Below the lowest lie 5e-4 of the mass, where the probability, which
    grows with the logit, is smallest.
    """
    nodes, log_weights = normal_nodes(torch.empty(0, dtype=torch.float64))
    likely = (nodes > -3.3) & (nodes < 5.2)
    return nodes[likely][::10], log_weights[likely][::10].log_softmax(0)


OWN = own_nodes()
"""The rule for the logit of the class that is scored."""


def linked(link: str = "auto", samples: int = 256) -> Score:
    """Make the score under the link that prediction will use; class probabilities by Monte Carlo take a faster way."""

    def score(mean: Tensor, covariance: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
        several = mean.shape[-1] > 2 and y.ndim == mean.ndim - 1
        if likelihood.softmax and several and link in ("auto", "mc"):
            return class_log_prob(mean, covariance, y, likelihood, samples)
        function = GaussianFunction(mean, covariance)
        return predict_targets(function, likelihood, link=link, samples=samples).log_prob(y)

    return score


def class_log_prob(mean: Tensor, covariance: Tensor, y: Tensor, likelihood: Likelihood, samples: int) -> Tensor:
    """Compute log E[softmax(f)_y] for the class y of each item, (N,), by pairs of classes or by points.

    Pairs do where their error is bounded by a small part of the probability (`RELATIVE`).
    """
    mask = likelihood.mask(mean, y)
    own = (y if mask is None else y.masked_fill(~mask, 0)).long()
    value, error = Pairs.of(mean, partial(apart_from, covariance)).log_prob(own[:, None])
    least = value.detach().exp() * RELATIVE
    open_ = (~(error <= least.clamp(max=CLOSE))).nonzero()[:, 0]
    if len(open_):
        rest = _log_prob_by_points(mean[open_], covariance[open_], own[open_], samples)
        value = rest if len(open_) == len(mean) else value.index_put((open_,), rest)
    return value if mask is None else torch.where(mask, value, 0.0)


def _log_prob_by_points(mean: Tensor, covariance: Tensor, y: Tensor, samples: int) -> Tensor:
    """Compute log E[softmax(f)_y] from points.

    The other logits take fixed points. Given these, f_y is Gaussian and its softmax is the sigmoid of f_y minus their
    log-sum-exp, which leaves a one-dimensional integral, as in `expected_softmax`. Classes come first so that sums run
    over whole vectors; logarithms are used only where exponentials would overflow.
    """
    base = kept_points(samples, mean.shape[-1] - 1, SEED, mean.dtype).to(mean.device)  # (S, C − 1)
    own = y[:, None]
    order = torch.arange(mean.shape[-1], device=mean.device).expand(len(mean), -1)
    order = order.scatter(1, own, mean.shape[-1] - 1).scatter(1, order[:, -1:], own)  # the own class last
    root, center = contrast_root(covariance, order), mean.gather(1, order)
    ahead = root[:, :-1, :-1] - root[:, -1:, :-1]
    spread = (ahead.transpose(0, 1).reshape(-1, base.shape[1]) @ base.T).unflatten(0, (-1, len(mean)))
    spread = spread.add_((center[:, :-1] - center[:, -1:]).T[:, :, None])  # (C − 1, N, S): f_c − E[f_y | others]
    nodes, log_weights = (each.to(mean) for each in OWN)
    steps = root[:, -1, -1][:, None, None] * nodes  # (N, 1, Q): f_y − E[f_y | others]
    overflow = spread.detach().amax((0, 2)) > OVERFLOW
    if not bool(overflow.any()):
        return _by_exponentials(spread, steps, log_weights)
    far, near = overflow.nonzero()[:, 0], (~overflow).nonzero()[:, 0]
    inner = logsigmoid(steps[far] - spread[:, far].logsumexp(0)[..., None]) + log_weights
    value = mean.new_zeros(len(mean)).index_put((far,), inner.flatten(1).logsumexp(1) - math.log(samples))
    return value.index_put((near,), _by_exponentials(spread[:, near], steps[near], log_weights))


def _by_exponentials(spread: Tensor, steps: Tensor, log_weights: Tensor) -> Tensor:
    """Average the sigmoids of f_y − log Σ exp(f_c) over points and nodes; `spread` is overwritten."""
    inner = (spread.exp_().sum(0)[..., None] * (-steps).exp()).add_(1).reciprocal_()
    return (inner.mean(1) @ log_weights.exp()).log()


def contrast_root(covariance: Tensor, order: Tensor) -> Tensor:
    """Return the Cholesky factor (N, C, C) of the covariance of f minus its average over the classes.

    The softmax ignores that average, and no data determine it: under a wide prior its variance is so much larger than
    the others that rounding alone may leave the whole matrix indefinite. So it is replaced by a variance of the size of
    the others. `order` (N, C) permutes the classes. Computed in float64 with a ridge at the level of rounding, raised
    where the factorization fails.
    """
    wide = covariance.double()
    rows = wide.mean(-1, keepdim=True)
    inner = wide - rows - rows.mT + rows.mean(-2, keepdim=True)
    level = inner.detach().diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=0)
    noise = 0.5 * wide.shape[-1] * torch.finfo(covariance.dtype).eps
    rounding = noise * wide.detach().diagonal(dim1=-2, dim2=-1).amax(-1)
    ridge = JITTER * level + rounding + torch.finfo(covariance.dtype).tiny
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    inner = inner + level[:, None, None]
    inner = inner.gather(1, order[:, :, None].expand(inner.shape)).gather(2, order[:, None].expand(inner.shape))
    root, failed = torch.linalg.cholesky_ex(inner + ridge[:, None, None] * eye)
    for _ in range(3):
        if not bool(failed.any()):
            break
        ridge = torch.where(failed > 0, 10 * ridge, ridge)
        root, failed = torch.linalg.cholesky_ex(inner + ridge[:, None, None] * eye)
    return root.to(covariance.dtype)


def item_scores(prediction: Prediction, y: Tensor) -> list[Tensor]:
    """Return −log p(y), the entropy and, for labels, the share of right ones, of each item, (items,) float64."""
    entropy = prediction.entropy.double().reshape(len(y), -1).mean(-1)
    found = [-prediction.log_prob(y).double(), entropy]
    label = getattr(prediction, "label", None)
    if label is None:
        return found
    truth = y.argmax(-1) if y.ndim > label.ndim else y  # soft labels have one more dimension
    return [*found, (label == truth).double().reshape(len(y), -1).mean(-1)]
