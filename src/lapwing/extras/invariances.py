"""Learn which transformations do not matter, by a stochastic bound of the evidence (Immer et al. 2022, 2023).

The network predicts with the mean of its outputs over random copies of the input. The evidence of that network depends
on the ranges of the copies: wider ranges make its outputs vary less with the weights (a smaller log-determinant), and
ranges that are too wide fit the data worse. Both terms are differentiable in the ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm

from lapwing.curvature import Kron, estimate_curvature, pose
from lapwing.errors import BadData
from lapwing.evidence.ascent import move
from lapwing.evidence.online import bracket_bound
from lapwing.evidence.settings import Groups, partition
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model import Batches, Network, Params, Plan, select_names
from lapwing.model.batches import require_one_process
from lapwing.posterior import Belief, Prior

PRIOR_SAMPLES = 256  # images that one step of the precisions reads


@dataclass(frozen=True, eq=False)
class Learned:
    """The result of `learn_invariances`: the averaging network, the augmentation, and the ranges after every epoch."""

    network: Averaged
    augmentation: Affine
    history: tuple[dict[str, float], ...]
    evidence: tuple[float, ...]  # the bound, averaged over an epoch
    precision: Tensor  # (blocks,)

    @torch.no_grad()
    def predict(self, x: Tensor, copies: int = 32, generator: torch.Generator | None = None) -> Tensor:
        """Return the mean output over `copies` random copies of each image."""
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        return torch.cat([self.network(self.augmentation(part, copies, generator)) for part in x.split(64)])


def invariant_bound(
    network: Network, plan: Plan, copies: Tensor, y: Tensor, likelihood: Likelihood, precision: Tensor, n_data: float
) -> Tensor:
    """Return the stochastic bound for augmented inputs (n, copies, …); gradients reach them and `precision` (P,)."""
    with network.borrow(differentiable=True):
        at = network.linearize(plan, copies, create_graph=True)
        y = likelihood.targets(at.f.detach(), y)
        ratio = n_data / at.n
        root = likelihood.smooth_factor(at.f, y)  # (n, c, r)
        rows = at.jacobian(root.movedim(-1, 0))
        scale = likelihood.common_factor.detach().double() ** -1
        bracket = bracket_bound(rows, precision, scale, ratio)
        fit = ratio * likelihood.log_prob(at.f, y).double().sum()
    squares = network.params.flat.double().square()
    return fit - 0.5 * (precision.double() * squares).sum() - 0.5 * bracket


def learn_invariances(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    likelihood: str | Likelihood,
    augmentation: Affine,
    *,
    epochs: int,
    lr: float = 1e-3,
    range_lr: float = 0.05,
    copies: int = 8,
    batch_size: int = 128,
    evidence_batch: int = 32,
    every: int = 2,
    burnin: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Learned:
    """Train a network on images while the evidence learns the ranges of an affine augmentation and layerwise priors.

    Each step draws `copies` of every image and descends on the log joint of their mean output (Adam, `lr`, decayed to
    zero). After `burnin` steps (by default a tenth of them), every `every`-th step moves the ranges (Adam, `range_lr`,
    on their softplus scale) to increase the stochastic bound of `evidence_batch` images. For small batches the bound is
    loose and would choose precisions that are too large, so these come from the evidence with Kronecker factors, once
    per epoch. The module is trained in place.

    Examples:
        >>> convolutional = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        >>> augment = lapwing.Affine(rotation=5.0)
        >>> found = lapwing.learn_invariances(convolutional, (images, y), "classification", augment, epochs=1, copies=2)
        >>> ranges = found.augmentation.ranges
    """
    require_one_process("learn_invariances")
    x, y = data
    if x.ndim != 4 or len(x) != len(y):
        raise BadData(f"data is a pair of images (n, c, h, w) and targets (n,); got {tuple(x.shape)}, {tuple(y.shape)}")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    place = generator.device
    family, averaged, n = resolve_likelihood(likelihood), Averaged(model), len(y)
    names = select_names(averaged, "all")
    first = Network(averaged, Params.of(averaged, names), family.outputs)
    with first.borrow(), torch.no_grad():
        few = augmentation(x[:8], copies, generator)
    with first.borrow():
        plan = first.plan(few)
    groups = partition("layerwise", tuple(block.names for block in plan.blocks), first.params)
    tau = torch.ones(groups.count, dtype=torch.float64, device=first.params.device)
    live = dict(averaged.named_parameters())
    grouped = [(k, live[name]) for k, block in enumerate(plan.blocks) for name in block.names]
    steps = epochs * -(-n // batch_size)
    burnin = steps // 10 if burnin is None else burnin
    weights = torch.optim.Adam(averaged.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(weights, steps, lr * 1e-2)
    hyper = torch.optim.Adam(augmentation.parameters(), range_lr, maximize=True)
    slow = torch.optim.lr_scheduler.CosineAnnealingLR(hyper, max(1, (steps - burnin) // every), 0.0)
    history, bounds, step = [], [], 0
    hide = None if progress is None else not progress
    for _ in tqdm(range(epochs), desc="invariances", disable=hide, delay=0 if progress else 1, leave=False):
        found = []
        for rows in torch.randperm(n, generator=generator, device=place).to(x.device).split(batch_size):
            averaged.train()
            with torch.no_grad():
                many = augmentation(x[rows], copies, generator)
            weights.zero_grad()
            f = family.outputs(averaged(many))
            misfit = -family.log_prob(f, family.targets(f.detach(), y[rows])).sum() / len(rows)
            pulls = [tau[k] * p.square().sum() for k, p in grouped]
            (misfit + 0.5 * torch.stack(pulls).sum() / n).backward()
            weights.step()
            schedule.step()
            step += 1
            if step > burnin and step % every == 0:
                chosen = torch.randint(n, (evidence_batch,), generator=generator, device=place).to(x.device)
                network = Network(averaged, Params.of(averaged, names), family.outputs)
                many = augmentation(x[chosen], copies, generator)
                value = invariant_bound(network, plan, many, y[chosen], family, groups.expand(tau), n)
                hyper.zero_grad()
                value.backward()
                hyper.step()
                slow.step()
                found.append(value.item())
        if step > burnin:
            chosen = torch.randperm(n, generator=generator, device=place)[:PRIOR_SAMPLES].to(x.device)
            parts = zip(x[chosen].split(64), y[chosen].split(64), strict=True)
            with torch.no_grad():
                batches = [(augmentation(part, copies, generator), labels) for part, labels in parts]
            network = Network(averaged, Params.of(averaged, names), family.outputs)
            tau = _precisions(network, batches, family, groups, tau, n)
        history.append(augmentation.ranges)
        bounds.append(sum(found) / len(found) if found else math.nan)
    averaged.eval()
    return Learned(averaged, augmentation, tuple(history), tuple(bounds), tau)


def _precisions(
    network: Network, batches: list, family: Likelihood, groups: Groups, tau: Tensor, n_data: float
) -> Tensor:
    """Move the layerwise precisions one step towards the maximum of the evidence."""
    problem = pose(network, Batches(batches, network.module, network.params.device), family, progress=False)
    curvature = estimate_curvature(problem, Kron(), n_data)
    return move(Belief(curvature, Prior(1.0), family), groups, tau).precision


KINDS = ("rotation", "translation_x", "translation_y", "scale_x", "scale_y", "shear")
UNITS = {"rotation": 180 / math.pi}  # shown in degrees


class Affine(nn.Module):
    """Images (n, c, h, w) under a random affine map: each part uniform in ± its range, which is a parameter.

    Ranges are in natural units: `rotation` in degrees, `translation` in half image widths, `scale` in logarithms,
    `shear` as a slope; None leaves a part out. Positive by construction (softplus). Gradients flow into the ranges
    through bilinear interpolation, so that any differentiable objective can learn them.

    Examples:
        >>> augment = lapwing.Affine(rotation=5.0)
        >>> augment(images, copies=4).shape  # (n, copies, c, h, w)
        torch.Size([8, 4, 1, 8, 8])
        >>> {name: round(value, 2) for name, value in augment.ranges.items()}
        {'rotation': 5.0}
    """

    def __init__(
        self,
        rotation: float | None = None,
        translation: float | None = None,
        scale: float | None = None,
        shear: float | None = None,
    ) -> None:
        super().__init__()
        turned = None if rotation is None else math.radians(rotation)
        given = (turned, translation, translation, scale, scale, shear)
        chosen = {kind: value for kind, value in zip(KINDS, given, strict=True) if value is not None}
        if not chosen or any(not (value > 0 and math.isfinite(value)) for value in chosen.values()):
            raise BadData(
                "an affine augmentation needs at least one of rotation (degrees), translation, scale, shear, each a "
                "positive range to start from"
            )
        self.kinds = tuple(chosen)
        self.raw = nn.Parameter(torch.tensor([math.log(math.expm1(v)) for v in chosen.values()]))

    @property
    def extent(self) -> Tensor:
        """The ranges as one tensor with gradients, in radians, half widths, logarithms and slopes."""
        return functional.softplus(self.raw)

    @property
    def ranges(self) -> dict[str, float]:
        """The ranges by name; rotation in degrees.

        Examples:
            >>> list(lapwing.Affine(rotation=5.0, shear=0.1).ranges)
            ['rotation', 'shear']
        """
        pairs = zip(self.kinds, self.extent.tolist(), strict=True)
        return {kind: value * UNITS.get(kind, 1.0) for kind, value in pairs}

    def forward(self, x: Tensor, copies: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Return random copies of images, (n, c, h, w) -> (n, copies, c, h, w)."""
        n = x.shape[0]
        place = None if generator is None else generator.device
        noise = torch.rand(n, copies, len(self.kinds), generator=generator, device=place).to(x) * 2 - 1
        many = x[:, None].expand(n, copies, *x.shape[1:]).flatten(0, 1)
        return self.transform(many, (noise * self.extent.to(x)).flatten(0, 1)).unflatten(0, (n, copies))

    def transform(self, x: Tensor, amounts: Tensor) -> Tensor:
        """Return images (m, c, h, w) moved by amounts (m, kinds)."""
        part = dict(zip(self.kinds, amounts.unbind(-1), strict=True))
        zero = torch.zeros_like(amounts[:, 0])
        angle = part.get("rotation", zero)
        wide, high = part.get("scale_x", zero).exp(), part.get("scale_y", zero).exp()
        slope = part.get("shear", zero)
        cos, sin = angle.cos(), angle.sin()
        # rotation · shear · scale, acting on the coordinates that are read
        rows = [
            torch.stack([cos * wide, (cos * slope - sin) * high, part.get("translation_x", zero)], -1),
            torch.stack([sin * wide, (sin * slope + cos) * high, part.get("translation_y", zero)], -1),
        ]
        grid = functional.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)


class Averaged(nn.Module):
    """The mean output of a network over copies of its input, (n, copies, …) -> (n, outputs)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x.flatten(0, 1))
        return out.unflatten(0, x.shape[:2]).mean(1)
