"""Labels: one of C classes, yes or no, or the preferred one of two candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Categorical as CategoricalLaw
from torch.distributions import Independent, Normal
from torch.nn.functional import logsigmoid, softplus

from lapwing.errors import BadData
from lapwing.likelihoods.likelihood import Likelihood, as_target, masked, match_shape, require, require_finite
from lapwing.likelihoods.marginal import NormalMarginal, Outputs
from lapwing.model.calls import promote
from lapwing.storage import register

SIMPLEX = 1e-3  # how far from 1 the sum of probabilities may be, by rounding in half precision


@register(name="classification")
@dataclass(frozen=True, eq=False)
class Categorical(Likelihood):
    """p(y = c | f) = softmax(f)_c over the classes on `class_dim` of what the network returns.

    Targets: class indices (B, *event), of which `ignore_index` does not count; or one-hot or soft labels q laid out
    as the network's output, for which log p(q | f) = Σ_c q_c log p_c. Λ = diag(p) − p pᵀ does not depend on y.

    Examples:
        >>> la = lapwing.fit(model, train_loader, lapwing.Categorical())  # or "classification"
        >>> segmentation = lapwing.Categorical(class_dim=1)  # outputs (B, C, H, W), targets (B, H, W)
        >>> masked = lapwing.Categorical(ignore_index=-1)  # targets of −1 do not count
    """

    links: ClassVar[tuple[str, ...]] = ("mc", "probit", "bridge", "bridge_norm", "quadrature")

    class_dim: int = -1
    ignore_index: int = -100
    shift_invariant = has_logits = takes_class_indices = True

    @property
    def softmax(self) -> bool:
        return type(self).conditional is Categorical.conditional

    def conditional(self, f: Tensor) -> CategoricalLaw:
        return CategoricalLaw(logits=f, validate_args=False)

    def outputs(self, raw: Tensor) -> Tensor:
        if raw.ndim == 1 and raw.shape[0] > 1:
            raise BadData(
                f"outputs of shape {tuple(raw.shape)} have no dimension for the classes; expected (items, classes). "
                'Pass a single item as x[None], or use likelihood="binary" (Bernoulli) for one logit per item.'
            )
        if raw.ndim < 2 or raw.shape[self._dim(raw.ndim)] == 1:
            raise BadData(
                f"outputs of shape {tuple(raw.shape)} have a single logit, and a softmax over one class is always 1. "
                'Use likelihood="binary" (Bernoulli) for one logit, or let the network return one logit per class.'
            )
        return promote(raw.movedim(self._dim(raw.ndim), -1))

    def _dim(self, ndim: int) -> int:
        if not -ndim < self.class_dim < ndim or self.class_dim == 0:
            raise BadData(f"class_dim={self.class_dim} does not exist or is the batch in outputs of {ndim} dimensions.")
        return self.class_dim

    def targets(self, f: Tensor, y: Any) -> Tensor:
        """Return indices (B, *event) as int64, or probabilities (B, *event, C) in the dtype of f."""
        y = as_target(f, y)
        if y.ndim == f.ndim and f.ndim > 1:
            y = y.movedim(self._dim(f.ndim), -1)
        return class_targets(f, y, self.ignore_index)

    def doubts(self, f: Tensor, y: Tensor) -> list[str]:
        if bool((f >= 0).all()) and bool(((f.sum(-1) - 1).abs() < SIMPLEX).all()):
            return [
                "the outputs of the network are probabilities (nonnegative, each row sums to 1): a softmax seems to be "
                "its last layer, and it will be applied twice. Return the logits, without the softmax, or wrap the "
                "network in a module that returns probs.log()"
            ]
        return []

    def mask(self, f: Tensor, y: Tensor) -> Tensor | None:
        return None if y.ndim == f.ndim else y != self.ignore_index

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return class_log_prob(f, y, self.mask(f, y))

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return class_score(f, y, self.mask(f, y))

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return K−1 columns by decreasing class probability: the last ones may be dropped. See `softmax_root`."""
        return masked(softmax_root(promote(f)), None if y is None else self.mask(f, y))

    def curvature_product(self, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """Return p ∘ u − p (pᵀu)."""
        p = f.softmax(-1)
        image = p * (u - (p * u).sum(-1, keepdim=True))
        mask = self.mask(f, y)
        return image if mask is None else image * mask[..., None]

    def curvature_sum(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return diag(Σ w p) − Σ w p pᵀ in float64, without a K × K matrix per item.

        Its rows sum to zero, so that the diagonal comes from the other entries, without a difference that cancels where
        one class is nearly certain.
        """
        if type(self).factor is not Categorical.factor:
            return super().curvature_sum(f, y, weights)
        p, mask = f.double().softmax(-1), self.mask(f, y)
        w = p.new_ones(len(p)) if weights is None else weights.to(p)
        w = w.reshape(-1, *(1,) * (f.ndim - 2)).expand(f.shape[:-1])
        w = (w if mask is None else w * mask).reshape(-1, 1)
        p = p.reshape(-1, f.shape[-1])
        products = (w * p).mT @ p
        products.fill_diagonal_(0.0)
        return products.sum(1).diag() - products

    def curvature_diagonal(self, f: Tensor, y: Tensor, basis: Tensor | None = None) -> Tensor:
        """Return Σ_c p_c b_c² − (Σ_c p_c b_c)² per column b of the basis, without a K × K matrix per item."""
        if type(self).factor is not Categorical.factor:
            return super().curvature_diagonal(f, y, basis)
        p, mask = f.double().softmax(-1), self.mask(f, y)
        highest, first = p.max(-1, keepdim=True)
        others = p.scatter(-1, first, 0.0)  # differences to a class that is nearly certain would cancel
        rest = others.sum(-1, keepdim=True)
        if basis is None:
            found = (p * (1 - p)).scatter(-1, first, highest * rest)
        else:
            basis = basis.double()
            own, mean = basis[first[..., 0]], others @ basis
            square = others @ basis.square() - 2 * own * mean + own.square() * rest
            found = (square - (mean - own * rest).square()).clamp(min=0)
        return masked(found.to(promote(f)), mask)

    def root_noise(self, f: Tensor, y: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw √p ∘ ε − p (√pᵀε)."""
        p = f.softmax(-1)
        noise = torch.randn(n, *f.shape, generator=generator, dtype=f.dtype, device=f.device)
        half = p.sqrt() * noise
        drawn = half - p * half.sum(-1, keepdim=True)
        mask = self.mask(f, y)
        return drawn if mask is None else drawn * mask[..., None]

    def smooth_factor(self, f: Tensor, y: Tensor) -> Tensor:
        """Return diag(√p) − p√pᵀ, which has no singular derivative."""
        half = (0.5 * f.log_softmax(-1)).exp()
        return torch.diag_embed(half) - half.square()[..., :, None] * half[..., None, :]

    def scored_factor(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the root with the class of the target first, whose column is √(p_y / (1 − p_y)) · (e_y − p)."""
        own = type(self).score is Categorical.score and type(self).factor is Categorical.factor
        if f.ndim != 2 or y.ndim != 1 or not own or bool(self.dispersion != 1):
            return None
        f, mask = promote(f), self.mask(f, y)
        index = (y if mask is None else y.masked_fill(~mask, 0))[:, None]
        p = f.softmax(-1)
        rest = p.scatter(-1, index, 0.0).sum(-1)  # 1 − p_y, which would cancel
        ratio = p.gather(-1, index)[:, 0] / rest.clamp(min=torch.finfo(f.dtype).tiny)
        return masked(softmax_root(f, index), mask), masked(torch.where(rest > 0, ratio, 0.0).sqrt(), mask)

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return sample_classes(f, generator)


@register(name="binary")
@dataclass(frozen=True, eq=False)
class Bernoulli(Likelihood):
    """p(y_k = 1 | f) = sigmoid(f_k), independent over the C labels given f. Λ = diag(p(1−p)).

    Targets: 0 or 1, or soft labels between, of the shape of f; (B, *event) too where there is one logit.

    Examples:
        >>> labels = torch.stack([y == 0, y == 1, y == 2], -1)  # (8, 3): three labels per item
        >>> la = lapwing.fit(model, (x, labels), lapwing.Bernoulli())  # or "binary"
        >>> la.predict(x).probs.shape
        torch.Size([8, 3])
    """

    links: ClassVar[tuple[str, ...]] = ("quadrature", "mc", "probit")
    has_logits = True

    def conditional(self, f: Tensor) -> Independent:
        return Independent(BernoulliLaw(logits=f, validate_args=False), 1, validate_args=False)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        y = match_shape(as_target(f, y), f.shape, f.shape[-1:], "Bernoulli").to(promote(f).dtype)
        require_finite(f, y)
        signs = bool((y.abs() == 1).all())
        hint = "For labels -1 and 1 pass (y + 1) / 2." if signs else ""
        require((y >= 0) & (y <= 1), y, "[0, 1]: Bernoulli takes labels 0 and 1 (for more classes: Categorical)", hint)
        return y

    def doubts(self, f: Tensor, y: Tensor) -> list[str]:
        f = promote(f).detach()
        if bool((f >= 0).all() & (f <= 1).all()):
            p = f.clamp(1e-6, 1 - 1e-6)
            if self.log_prob(p.logit(), y).mean() > self.log_prob(f, y).mean():
                return [
                    "the outputs of the network lie between 0 and 1 and explain the targets better as probabilities "
                    "than as logits: a sigmoid seems to be its last layer, and it will be applied twice. Return the "
                    "logits, without the sigmoid"
                ]
        return []

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return y f − log(1 + e^f), written so that neither part is large where the label is right."""
        f = promote(f)
        return -(y * softplus(-f) + (1 - y) * softplus(f)).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        f = promote(f)
        return y * torch.sigmoid(-f) - (1 - y) * torch.sigmoid(f)

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        f = promote(f)
        return torch.diag_embed(((logsigmoid(f) + logsigmoid(-f)) / 2).exp())

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(promote(f).detach().sigmoid(), generator=generator)


def softmax_root(f: Tensor, first: Tensor | None = None) -> Tensor:
    """Return S (..., C, C−1) with S Sᵀ = diag(p) − p pᵀ, p = softmax(f).

    It is the Cholesky factor with the classes by decreasing p, after the class `first` (..., 1) if that is given.

    With tail sums q_j = Σ_{i>j} p_i, column j is √(p_j q_j / q_{j−1}) · (e_j − t_j), where t_j = p_{>j} / q_j is the
    distribution over the remaining classes. Nothing is subtracted, so confident float32 logits lose no accuracy.
    """
    order = (f if first is None else f.scatter(-1, first, torch.inf)).argsort(-1, descending=True)
    p = f.gather(-1, order).softmax(-1)
    tail = p.flip(-1).cumsum(-1).flip(-1)  # (..., C): Σ_{i>=j} p_i
    q, before = tail[..., 1:], tail[..., :-1]  # q_j and q_{j−1}, (..., C−1)
    zero = q == 0  # everything after class j has underflowed
    size = (p[..., :-1] * (q / before.masked_fill(before == 0, 1.0))).sqrt()
    # a share of the tail, so at most 1; above the diagonal a subnormal q would make it infinite
    rest = (p[..., :, None] / q.masked_fill(zero, 1.0)[..., None, :]).clamp(max=1.0)  # (..., C, C−1)
    classes = f.shape[-1]
    eye = torch.eye(classes, classes - 1, dtype=f.dtype, device=f.device)
    below = torch.ones(classes, classes - 1, dtype=f.dtype, device=f.device).tril(-1)
    root = (eye - below * rest) * size[..., None, :]
    return root.gather(-2, order.argsort(-1)[..., None].expand(root.shape))


def class_targets(f: Tensor, y: Tensor, ignore_index: int | None) -> Tensor:
    """Return class indices as int64 (B, *event), or checked probabilities (B, *event, C)."""
    classes = f.shape[-1]
    if y.shape == f.shape:
        y = y.to(promote(f).dtype)
        require_finite(f, y)
        total = y.sum(-1)
        require((y >= 0).all(-1) & ((total - 1).abs() < 1e-2), y, "the probabilities: soft labels are ≥ 0 and sum to 1")
        return y
    if y.shape != f.shape[:-1]:
        raise BadData(
            f"targets have shape {tuple(y.shape)}, but outputs (B, *event, C) = {tuple(f.shape)} need class indices of "
            f"shape {tuple(f.shape[:-1])}, or one-hot or soft labels laid out as the outputs."
        )
    require_finite(f, y)
    if y.is_floating_point() or y.is_complex():
        raise BadData(
            f"class indices must be integers, got {y.dtype} (first value {y.flatten()[:1].tolist()}): "
            + ("use y.long()." if _whole(y) else 'numbers that are not whole are targets of likelihood="regression".')
        )
    y = y.long()
    if y.numel() and int(y.min()) >= 0 and int(y.max()) < classes:
        return y
    inside = (y >= 0) & (y < classes)
    allowed = f"the {classes} classes 0…{classes - 1}"
    if ignore_index is not None:
        inside, allowed = inside | (y == ignore_index), f"{allowed} (or ignore_index={ignore_index})"
    counted = y[y != ignore_index] if ignore_index is not None else y
    from_one = counted.numel() > 0 and int(counted.min()) == 1 and int(counted.max()) == classes
    require(inside, y, allowed, "Labels start at 0: pass y - 1." if from_one else "")
    return y


def _whole(y: Tensor) -> bool:
    return not y.is_complex() and bool((y == y.round()).all())


def class_log_prob(f: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return log p(y|f), Σ q log p for soft labels, (B, *event)."""
    log_p = promote(f).log_softmax(-1)
    if y.ndim == f.ndim:
        return (y * log_p).sum(-1)
    index = y if mask is None else y.masked_fill(~mask, 0)
    return masked(log_p.gather(-1, index[..., None])[..., 0], mask)


def class_score(f: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return e_y − p (q − p for soft labels), with 1 − p_y as the sum of the other entries, which does not cancel."""
    p = promote(f).softmax(-1)
    if y.ndim == f.ndim:
        return y - p
    index = (y if mask is None else y.masked_fill(~mask, 0))[..., None]
    others = p.scatter(-1, index, 0.0)
    return masked((-others).scatter(-1, index, others.sum(-1, keepdim=True)), mask)


def sample_classes(f: Tensor, generator: torch.Generator | None) -> Tensor:
    p = promote(f).detach().softmax(-1)
    return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator).reshape(p.shape[:-1])


@register(name="preference")
@dataclass(frozen=True, eq=False)
class BradleyTerry(Likelihood):
    """p(candidate i is preferred | f) = exp f_i / (exp f_0 + exp f_1) for rewards f (B, 2) of two candidates.

    y (B,) in {0, 1} is the index of the preferred one; soft preferences are (B, 2). Λ = p₀p₁ (1, −1)(1, −1)ᵀ.

    A network that also takes single items and returns one reward for each, (B,) or (B, 1), predicts the distribution of
    these rewards: `la.predict(items).mean` and `.stddev`.

    Examples:
        >>> class Reward(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.score = nn.Linear(4, 1)
        ...     def forward(self, items):  # pairs (B, 2, 4) -> (B, 2); single items (B, 4) -> (B,)
        ...         return self.score(items)[..., 0]
        >>> pairs, preferred = torch.randn(20, 2, 4), torch.randint(2, (20,))
        >>> la = lapwing.fit(Reward(), (pairs, preferred), lapwing.BradleyTerry())  # or "preference"
        >>> la.predict(x).stddev.shape  # of the rewards of single items
        torch.Size([8, 1])
    """

    links: ClassVar[tuple[str, ...]] = ("quadrature", "mc")
    has_logits = takes_class_indices = True

    def conditional(self, f: Tensor) -> CategoricalLaw:
        return CategoricalLaw(logits=f, validate_args=False)

    def outputs(self, raw: Tensor) -> Tensor:
        f = super().outputs(raw)
        if f.shape[-1] > 2:
            raise _no_pairs(raw)
        return f

    def targets(self, f: Tensor, y: Any) -> Tensor:
        if f.shape[-1] != 2:
            raise _no_pairs(f)
        return class_targets(f, as_target(f, y), None)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return class_log_prob(f, y, None)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return class_score(f, y, None)

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        log_p = promote(f).log_softmax(-1)
        size = (log_p.sum(-1) / 2).exp()
        return torch.stack([size, -size], -1)[..., None]

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return sample_classes(f, generator)


@dataclass(frozen=True, eq=False)
class Reward(Likelihood):
    """The reward f (B, 1) of a single item, from a network that was fitted to preferences. Nobody observes it.

    Predictions are the distribution of f itself, without noise. Λ = ¼ is the information in one comparison with a known
    item of equal reward.

        la = lapwing.fit(model, pairs, "preference");  la.predict(items).mean
    """

    links: ClassVar[tuple[str, ...]] = ("exact", "mc")

    def conditional(self, f: Tensor) -> Normal:
        return Normal(f, torch.zeros_like(f), validate_args=False)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        raise BadData(
            "rewards of single items are not observed, so that there is no log-probability of one. Predict a pair: "
            "la.predict(pairs).log_prob(preferred)."
        )

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.full_like(promote(f), 0.5)[..., None]

    def marginal(self, f: Outputs) -> NormalMarginal:
        return NormalMarginal(f.mean, torch.zeros_like(f.mean), f.variance, lambda: f.item_covariance)


BradleyTerry.by_outputs = {1: Reward}


def _no_pairs(f: Tensor) -> BadData:
    return BadData(
        f"outputs of shape {tuple(f.shape)}: BradleyTerry needs the rewards of two candidates, (B, 2). "
        "Stack them: torch.stack([reward(x0), reward(x1)], -1)."
    )
