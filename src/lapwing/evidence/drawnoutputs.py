"""Held-out data with many outputs per item, such as tokens × vocabulary: draws of f in place of their covariances.

A draw of f under precision c·H + τI is f̂ + c^-½ J U (e + ρ)^-½ z with H = U diag(e) Uᵀ, ρ = τ/c and a standard normal
z. The kernel (e + ρ)^-½ is as smooth in log ρ as (e + ρ)⁻¹ is, so that products J U (e + ρ_j)^-½ z at a few nodes ρ_j
give the draw of every setting by a linear combination, with the same random numbers for all settings. Each node and z
cost one forward-mode product, and C × C covariances are never formed.

Beyond `ALL` classes an item keeps its own class, the most probable others, and some that are drawn from the rest in
proportion to their probability. These stand for the rest with weights that make the sum of exponentials exact at f̂ and
unbiased under every draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import BadData, IncompatiblePrior, TooLarge
from lapwing.evidence.heldout import Nodes, Sweep
from lapwing.evidence.settings import Groups
from lapwing.linalg import PSD
from lapwing.posterior import Belief
from lapwing.predictive.predictive import Pushed
from lapwing.predictive.softmax import SEED

PAIRS = 16  # draws of z; each counts with its mirror image −z
PER_DECADE = 1.25  # nodes: variances are then right to about 1 %, far below the noise of the draws
BEYOND = 30.0  # multiples of the largest eigenvalue beyond which draws only shrink with ρ, so that no node is needed
ALL, TOP, TAIL = 1024, 512, 256  # classes up to which all are kept; beyond, how many of the largest and of the rest
POSITIONS = 64  # items that one sample may give, evenly spread
LEAST = 16  # items without which nothing is tuned
CHUNK = 2**22  # values of f in one step
FEW = 256  # items on which logit temperatures are guessed
SETTINGS = 8  # settings that are scored together
CERTAIN = 1.0  # squared relative error of an average up to which its logarithm is corrected


def nodes_of_draws(nodes: Nodes, largest: float) -> Nodes:
    """Return the nodes for draws that span what these nodes for covariances span."""
    low, high = nodes.shifts[0].item(), nodes.shifts[-1].item()
    high = min(high, max(BEYOND * largest, 10 * low))
    count = max(3, math.ceil(math.log10(high / low) * PER_DECADE) + 1)
    shifts = torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64)
    return Nodes(shifts, nodes.spectrum, nodes.pairs, 0.5)


@dataclass(frozen=True, eq=False)
class Items:
    """Part of the kept items: means (i, K) at K classes and draws (G·m, i, S, K) of f at every node minus the mean.

    `own` (i,) is the place of each item's label, `weights` (i, K) are log-weights of the classes, None if all are kept.
    """

    mean: Tensor
    own: Tensor
    weights: Tensor | None
    draws: Tensor

    def __len__(self) -> int:
        return len(self.mean)

    def take(self, index: Tensor | slice) -> Items:
        """Return some of the items."""
        weights = None if self.weights is None else self.weights[index]
        return Items(self.mean[index], self.own[index], weights, self.draws[:, index])


@dataclass(frozen=True, eq=False)
class DrawnSweep(Sweep):
    """Keeps draws of f at every node for each item: outputs f (N, C) and targets (N,) of the items that are kept."""

    items: tuple[Items, ...]
    groups_: int
    notes_: tuple[str, ...] = ()

    @property
    def groups(self) -> int:
        return self.groups_

    @property
    def at_once(self) -> int:
        return SETTINGS

    @property
    def notes(self) -> tuple[str, ...]:
        return self.notes_

    def parts(self, coefficients: Tensor, dispersion: Tensor, scale: Tensor, logits: Tensor) -> Iterator[Tensor]:
        flat, divisor = coefficients.flatten(1).to(self.f), logits.to(self.f)[:, None, None, None]
        for kept in self.items:
            step = max(1, CHUNK // (len(flat) * kept.draws[0, 0].numel()))
            for start in range(0, len(kept), step):
                yield -_log_prob(kept.take(slice(start, start + step)), flat, divisor).double()

    def subset(self, size: int) -> DrawnSweep:
        """Keep at most `FEW` items: each costs as much as many samples with few outputs."""
        stride = max(1, -(-len(self.f) // min(size, FEW)))
        return self.take(torch.arange(0, len(self.f), stride, device=self.f.device))

    def take(self, keep: Tensor) -> DrawnSweep:
        parts, start = [], 0
        for kept in self.items:
            inside = keep[(keep >= start) & (keep < start + len(kept))] - start
            parts += [kept.take(inside)] if len(inside) else []
            start += len(kept)
        return replace(self, f=self.f[keep], y=self.y[keep], items=tuple(parts))

    def spreads(self) -> Tensor:
        logs = []
        for kept in self.items:
            draws = kept.draws.unflatten(0, (self.groups_, -1))
            for start in range(0, len(kept), 64):
                few = draws[:, :, start : start + 64].sum(0)
                few = few - few.mean(-1, keepdim=True)
                logs.append(few.square().mean((-2, -1)).double())
        variances = torch.cat(logs, 1)  # (m, items)
        found = torch.where(variances > 0, variances, torch.nan).log()
        return found.std(1) if found.shape[1] > 1 else torch.full_like(found[:, 0], torch.nan)


def _log_prob(kept: Items, coefficients: Tensor, divisor: Tensor) -> Tensor:
    """Return log E[softmax(f)_y] under each setting, (S, items), for coefficients (S, G·m).

    The logarithm of an average of n draws is too small by half its squared relative error, which is added.
    """
    moved = (coefficients @ kept.draws.flatten(1)).unflatten(1, kept.draws.shape[1:])  # (S, i, s, K)
    own = kept.own[:, None, None].expand(*moved.shape[:-1], 1)
    found = []
    for sign in (1.0, -1.0):
        f = (kept.mean[:, None] + sign * moved) / divisor
        top = f.gather(-1, own)[..., 0]
        f = f if kept.weights is None else f + kept.weights[:, None]
        found.append(top - f.logsumexp(-1))
    each = torch.stack(found)  # (2, S, i, s)
    count = each.shape[-1]
    value = each.logsumexp((0, -1)) - math.log(2 * count)
    ratios = (each - value[..., None]).exp().mean(0)  # of pairs to their average
    error = ratios.var(-1, correction=1) / count
    return value + error.clamp(max=CERTAIN) / 2


def collect_draws(
    belief: Belief, groups: Groups, batches: Iterable[Pushed], nodes: Nodes, *, memory: int
) -> DrawnSweep:
    """Read data until memory is full, and keep the draws of their items that count."""
    matrix, G = belief.curvature.matrix, groups.count
    _require_one_group_per_block(matrix, groups)
    parts: list[Items] = []
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    read, room, full = 0, LEAST, False
    for number, (f, y, push) in enumerate(batches):
        classes = f.shape[-1]
        each = G * len(nodes.shifts) * PAIRS * _width(classes) * f.element_size() + 16 * classes * f.element_size()
        room = memory // 2 // each - sum(map(len, parts))
        if room < LEAST and not parts:
            raise TooLarge(
                f"tuning on held-out data keeps {G} × {len(nodes.shifts)} × {PAIRS} draws of {classes} outputs per "
                f"item, {each / 1e6:.3g} MB, and needs at least {LEAST} items; the budget is {memory / 1e9:.3g} GB. "
                "Use prior='scalar', a narrower grid, or raise memory="
            )
        index = _chosen(belief, f, y)[: max(0, room)]
        if len(index):
            mean, label = f.reshape(-1, classes)[index], y.reshape(-1)[index].long()
            generator = torch.Generator(f.device).manual_seed(SEED + number)
            chosen, own, weights = _kept_classes(mean, label, generator)
            draws = _draws(matrix, groups, push, nodes, f, index, chosen, generator, belief.split, memory)
            parts.append(Items(mean if chosen is None else mean.gather(1, chosen), own, weights, draws))
            outputs.append(mean)
            targets.append(label)
        read += len(f)
        if room - len(index) < 1:
            full = True
            break
    if not parts:
        raise BadData("the validation data hold no batch with a target that counts")
    kept = sum(map(len, parts))
    notes = ["all items share the draws of the weights, whose own error is in none of the standard errors"]
    notes += [f"scored by {2 * PAIRS} draws of f at {kept} items of {read} data"]
    notes += ["the budget of memory= was full then; later data were not read"] if full else []
    return DrawnSweep(
        torch.cat(outputs), torch.cat(targets), nodes, belief.likelihood, belief.power, belief.temperature.prior,
        tuple(parts), G, tuple(notes),
    )  # fmt: skip


def _require_one_group_per_block(matrix: PSD, groups: Groups) -> None:
    for block, index in matrix.blockwise(groups.index):
        if not block.is_diagonal and bool((index != index[0]).any()):
            raise IncompatiblePrior(
                f"held-out tuning needs one precision per block of the curvature, and a {type(block).__name__} block "
                "spans several. Use prior='scalar', structure='diag', 'kron' or 'ekfac' with one precision per layer, "
                "or method='evidence'"
            )


def _width(classes: int) -> int:
    """Return how many classes an item keeps."""
    return classes if classes <= ALL else TOP + TAIL


def _chosen(belief: Belief, f: Tensor, y: Tensor) -> Tensor:
    """Return the places of the items to keep among all items of a batch: those that count, evenly spread."""
    places = f[0, ..., 0].numel()
    mask = belief.likelihood.mask(f, y)
    counts = torch.ones(len(f), places, dtype=torch.bool) if mask is None else mask.reshape(len(f), places).cpu()
    found = []
    for number, row in enumerate(counts):
        inside = row.nonzero()[:, 0]
        if len(inside) > POSITIONS:
            inside = inside[torch.linspace(0, len(inside) - 1, POSITIONS).round().long()]
        found.append(number * places + inside)
    return torch.cat(found).to(f.device)


def _kept_classes(
    mean: Tensor, label: Tensor, generator: torch.Generator
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return which classes each item keeps (i, K), the place of its label among them (i,), and log-weights (i, K).

    Of many classes the label comes first, then the largest others with weight 1, then draws from the rest, c with
    probability q_c, each with weight 1/(TAIL·q_c).
    """
    if mean.shape[-1] <= ALL:
        return None, label, None
    rest = mean.scatter(1, label[:, None], -torch.inf)
    top = rest.topk(TOP - 1, -1).indices
    rest = rest.scatter(1, top, -torch.inf)
    log_q = rest.double().log_softmax(-1)
    tail = torch.multinomial(log_q.exp(), TAIL, replacement=True, generator=generator)
    weights = mean.new_zeros(len(mean), TOP + TAIL)
    weights[:, TOP:] = (-log_q.gather(1, tail) - math.log(TAIL)).to(mean.dtype)
    return torch.cat([label[:, None], top, tail], 1), torch.zeros_like(label), weights


def _draws(
    matrix: PSD,
    groups: Groups,
    push: Callable[[Tensor], Tensor],
    nodes: Nodes,
    f: Tensor,
    index: Tensor,
    chosen: Tensor | None,
    generator: torch.Generator,
    split: float | None,
    memory: int,
) -> Tensor:
    """Return draws of f minus its mean and minus its average over the classes, (G·m, items, S, K)."""
    G, m, classes = groups.count, len(nodes.shifts), f.shape[-1]
    found = f.new_empty(G, m, len(index), PAIRS, _width(classes))
    at_once = max(1, min(PAIRS, memory // 16 // (m * matrix.size * matrix.dtype.itemsize)))
    for start in range(0, PAIRS, at_once):
        count = min(at_once, PAIRS - start)
        tangents = matrix.shifted_draws(count, nodes.shifts.to(f.device), generator, split)
        assert tangents is not None, "needs_draws asks for an eigenbasis"
        for g in range(G):
            inside = tangents if G == 1 else tangents * (groups.index.to(f.device) == g)
            flat = inside.flatten(0, 1)
            few = max(1, min(64, memory // 16 // (f.numel() * f.element_size())))
            for k in range(0, len(flat), few):
                moved = push(flat[k : k + few]).reshape(-1, f[..., 0].numel(), classes)[:, index]
                moved = moved - moved.mean(-1, keepdim=True)
                if chosen is not None:
                    moved = moved.gather(-1, chosen.expand(len(moved), -1, -1))
                at = torch.arange(k, k + len(moved), device=f.device)
                found[g, at // count, :, start + at % count] = moved.to(found.dtype)
    return found.flatten(0, 1)
