"""Softmax: the accurate root, layouts, ignored and soft targets, and what is refused."""

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from lapwing.errors import BadData
from lapwing.likelihoods import Categorical


def information(f):
    """diag(p) − p pᵀ in float64 with 1 − p_i as the sum of the others, which float64 holds for any logits."""
    p = f.double().softmax(-1)
    classes = p.shape[-1]
    others = (p[..., None, :] * (1 - torch.eye(classes, dtype=p.dtype))).sum(-1)
    return torch.diag_embed(p * others) - p[..., :, None] * p[..., None, :] * (1 - torch.eye(classes, dtype=p.dtype))


LOGITS = {
    "plain": lambda g: torch.randn(64, 10, generator=g),
    "confident": lambda g: 10 * torch.randn(64, 10, generator=g),
    "extreme": lambda g: torch.randn(64, 10, generator=g) + 40 * torch.eye(10)[torch.arange(64) % 10],
    "wide": lambda g: 3 * torch.randn(8, 200, generator=g),
    "two": lambda g: 20 * torch.randn(64, 2, generator=g),
    "ties": lambda g: torch.zeros(3, 7),
    "one-hot": lambda g: 300.0 * torch.eye(6),
}


@pytest.mark.parametrize("case", LOGITS)
def test_softmax_root_is_accurate_in_float32(case):
    """Entry by entry, |ΔΛ_ij| ≤ 1e-5 √(Λ_ii Λ_jj) from float32 logits, also where 1 − p₀ is 1e-17."""
    f = LOGITS[case](torch.Generator().manual_seed(0))
    assert f.dtype == torch.float32
    S = Categorical().factor(f).double()
    assert S.shape == (*f.shape, f.shape[-1] - 1)
    exact = information(f)
    scale = exact.diagonal(dim1=-2, dim2=-1).sqrt()
    error = (S @ S.mT - exact).abs() / (scale[..., :, None] * scale[..., None, :]).clamp(min=1e-30)
    assert error.max() < 1e-5


def test_columns_come_out_sorted():
    """The tail that is left after the first columns shrinks, so the last columns may be dropped."""
    f = 4 * torch.randn(50, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    S = Categorical().factor(f)
    largest = S.abs().amax(-2)
    assert (largest.diff(dim=-1) <= 1e-12).all()
    trace = S.square().sum((-2, -1))
    for kept in (3, 6):
        rest = S[..., kept:].square().sum((-2, -1))
        p = f.softmax(-1).sort(-1, descending=True).values[..., kept:].sum(-1)
        assert (rest <= p + 1e-12).all()
        assert rest.sum() < 0.3 * trace.sum()


def test_channels_first():
    likelihood = Categorical(class_dim=1)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(2, 4, 3, 5, generator=generator)
    y = torch.randint(4, (2, 3, 5), generator=generator)
    f = likelihood.outputs(raw)
    assert f.shape == (2, 3, 5, 4)
    want = -cross_entropy(raw, y, reduction="none")
    torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, y)), want)
    soft = one_hot(y, 4).movedim(-1, 1)
    torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, soft)), want)


def test_tokens_and_ignored_targets():
    likelihood = Categorical()
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (2, 6), generator=generator)
    y[0, 2:] = -100
    target = likelihood.targets(f, y)
    want = -cross_entropy(f.movedim(-1, 1), y, reduction="none")
    torch.testing.assert_close(likelihood.log_prob(f, target), want)
    assert torch.equal(likelihood.mask(f, target), y != -100)
    assert not likelihood.score(f, target)[0, 2:].any()
    assert not likelihood.factor(f, target)[0, 2:].any()
    assert not likelihood.sample_factor(f, target, torch.Generator())[0, 2:].any()
    assert likelihood.factor(f, target)[0, :2].any()
    torch.testing.assert_close(likelihood.log_likelihood(likelihood.statistics(f, target)), want.sum())
    assert likelihood.count(f, target) == 2


def test_ignore_index_may_be_any_number():
    likelihood = Categorical(ignore_index=255)
    f = torch.randn(3, 4)
    y = likelihood.targets(f, torch.tensor([1, 255, 3], dtype=torch.uint8))
    assert likelihood.log_prob(f, y)[1] == 0
    with pytest.raises(BadData, match="-100"):
        likelihood.targets(f, torch.tensor([1, -100, 3]))


def test_soft_and_one_hot_targets():
    likelihood = Categorical()
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    q = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    q = q / q.sum(-1, keepdim=True)
    target = likelihood.targets(f, q)
    torch.testing.assert_close(likelihood.log_prob(f, target), (q * f.log_softmax(-1)).sum(-1))
    torch.testing.assert_close(likelihood.score(f, target), q - f.softmax(-1))
    torch.testing.assert_close(likelihood.factor(f, target), likelihood.factor(f))
    y = torch.tensor([0, 3, 1, 1, 2])
    for hard in (one_hot(y, 4), one_hot(y, 4).float(), one_hot(y, 4).bool()):
        torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, hard)), likelihood.log_prob(f, y))


def test_confident_score_does_not_cancel():
    f = torch.tensor([[40.0, 0.0, 1.0]])
    score = Categorical().score(f, torch.tensor([0]))
    exact = (f.double() - 40).exp()
    torch.testing.assert_close(score[0, 0].double(), exact[0, 1:].sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("y", "match"),
    [
        (torch.tensor([0, 12]), r"target 12 at index \(1,\) is outside the 10 classes 0…9"),
        (torch.tensor([0, -1]), "target -1 at index"),
        (torch.tensor([0.0, 1.0]), r"y\.long\(\)"),
        (torch.tensor([0.0, torch.nan]), "nan at index"),
        (torch.tensor([[0], [1]]), r"\(2, 1\).*\(2, 10\)"),
        (torch.tensor([0, 1, 2]), r"\(3,\).*\(2, 10\)"),
        (torch.full((2, 10), 0.2), "sum to 1"),
        (torch.tensor([[1.5, -0.5] + [0.0] * 8] * 2), "sum to 1"),
    ],
)
def test_bad_targets_are_named(y, match):
    with pytest.raises(BadData, match=match):
        Categorical().targets(torch.zeros(2, 10), y)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 7, 1)])
def test_one_logit_is_binary(shape):
    with pytest.raises(BadData, match='likelihood="binary"'):
        Categorical().outputs(torch.zeros(shape))


def test_class_dim_must_exist():
    with pytest.raises(BadData, match="class_dim=3"):
        Categorical(class_dim=3).outputs(torch.zeros(5, 4))
    with pytest.raises(BadData, match="class_dim=0"):
        Categorical(class_dim=0).outputs(torch.zeros(5, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scored_factor_begins_with_the_score(dtype):
    generator = torch.Generator().manual_seed(0)
    f = (torch.randn(60, 7, generator=generator, dtype=torch.float64) * torch.logspace(-1, 2, 60)[:, None]).to(dtype)
    y = torch.randint(0, 7, (60,), generator=generator)
    y[::3] = f[::3].argmax(-1)  # right and wrong classes, from vague to certain
    y[1] = -100
    likelihood = Categorical()
    found = likelihood.scored_factor(f, y)
    assert found is not None
    root, scale = found
    exact, p = f.double(), f.double().softmax(-1)
    score = (torch.nn.functional.one_hot(y.clamp(min=0), 7) - p) * (y >= 0)[:, None]
    curvature = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) * (y >= 0)[:, None, None]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(root.double() @ root.double().mT, curvature, rtol=tolerance, atol=tolerance)
    first = likelihood.score(f, y).double() * scale.double()[:, None]
    assert torch.allclose(first, root[..., 0].double(), rtol=20 * tolerance, atol=1e-30)
    assert torch.allclose(likelihood.score(exact, y), score, atol=1e-12)
    assert bool(scale.isfinite().all())


def test_no_scored_factor_where_the_score_is_another():
    class Smoothed(Categorical):
        def score(self, f, y):
            return 0.9 * super().score(f, y)

    f, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert Smoothed().scored_factor(f, y) is None
    assert Categorical().scored_factor(f, f.softmax(-1)) is None
    assert Categorical().scored_factor(f[:, None], y[:, None]) is None
