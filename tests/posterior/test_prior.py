"""Priors in every form a user may write them."""

import json

import pytest
import torch

from lapwing.errors import BadData, IncompatiblePrior
from lapwing.linalg import Dense, Diagonal
from lapwing.posterior import Posterior, Prior, resolve_prior

NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")
SIZES = (6, 3, 6, 2)
TOTAL = 17


def diagonal(prior: Prior, **kwargs: object) -> torch.Tensor:
    _, matrix = prior.resolve(NAMES, SIZES, **kwargs)
    assert isinstance(matrix, Diagonal)
    return matrix.values


def test_scalar() -> None:
    mean, matrix = Prior(2.5, 0.5).resolve(NAMES, SIZES, torch.float32)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, torch.full((TOTAL,), 0.5))
    torch.testing.assert_close(matrix.diagonal(), torch.full((TOTAL,), 2.5))


def test_flat_tensor_keeps_order() -> None:
    values = torch.rand(TOTAL, dtype=torch.float64) + 0.1
    torch.testing.assert_close(diagonal(Prior(values)), values)


def test_dict_takes_the_first_match() -> None:
    got = diagonal(Prior({"head.bias": 7.0, "head.*": 2.0, "*": 1.0}))
    expected = torch.tensor([1.0] * 9 + [2.0] * 6 + [7.0] * 2, dtype=torch.float64)
    torch.testing.assert_close(got, expected)


def test_dict_takes_flat_values_of_one_parameter() -> None:
    got = diagonal(Prior({"body.bias": torch.tensor([1.0, 2.0, 3.0]), "*": 5.0}))
    torch.testing.assert_close(got[6:9], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"head.*": 1.0}, "body.weight"),
        ({"tail.*": 1.0, "*": 2.0}, "'tail.*' matches none"),
        ({"*": 1.0, "head.bias": 2.0}, "'head.bias' never holds"),
        ({}, "empty"),
        (0.0, "positive"),
        (float("nan"), "positive"),
        (float("inf"), "positive"),
        ({"*": -1.0}, "positive"),
        (torch.ones(3), "shape"),
        (torch.ones(3, 3), "shape"),
    ],
)
def test_refuses(precision: object, message: str) -> None:
    with pytest.raises(IncompatiblePrior, match=message.replace("*", r"\*")):
        diagonal(Prior(precision))  # type: ignore[arg-type]


def test_refuses_a_mean_of_the_wrong_size() -> None:
    with pytest.raises(IncompatiblePrior, match="prior mean"):
        Prior(1.0, torch.zeros(3)).resolve(NAMES, SIZES)


def test_refuses_other_types() -> None:
    with pytest.raises(BadData, match="not str"):
        resolve_prior("auto")  # type: ignore[arg-type]
    with pytest.raises(BadData, match="not str"):
        Prior({"*": "1"})  # type: ignore[dict-item]


def test_gradients_flow_to_every_form() -> None:
    scalar = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    mean = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    flat, matrix = Prior(scalar, mean).resolve(NAMES, SIZES)
    (matrix.logdet() + flat.sum()).backward()
    torch.testing.assert_close(scalar.grad, torch.tensor(TOTAL / 2.0, dtype=torch.float64))
    torch.testing.assert_close(mean.grad, torch.tensor(float(TOTAL), dtype=torch.float64))
    head, rest = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (2.0, 4.0))
    _, matrix = Prior({"head.*": head, "*": rest}).resolve(NAMES, SIZES)
    matrix.logdet().backward()
    torch.testing.assert_close(torch.stack([head.grad, rest.grad]), torch.tensor([8 / 2.0, 9 / 4.0]).double())


def test_per_block() -> None:
    values = torch.tensor([3.0, 5.0], dtype=torch.float64, requires_grad=True)
    got = diagonal(Prior.per_block(values, (NAMES[:2], NAMES[2:])))
    torch.testing.assert_close(got.detach(), torch.tensor([3.0] * 9 + [5.0] * 8, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(got.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([9.0, 8.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="2 blocks"):
        Prior.per_block([1.0], (NAMES[:2], NAMES[2:]))


def test_subnetwork_picks_after_names_are_matched() -> None:
    index = torch.tensor([0, 8, 15])
    got = diagonal(Prior({"head.*": 2.0, "*": 1.0}), index=index)
    torch.testing.assert_close(got, torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64))
    assert diagonal(Prior(3.0), index=index).shape == (3,)


@pytest.mark.parametrize(("outputs", "noise"), [(None, None), (3, 0.5)])
def test_weight_decay_is_the_gradient_of_the_training_loss(outputs: int | None, noise: float | None) -> None:
    """(n/loss scale)·(decay/2)‖θ‖² = (τ/2)‖θ‖² where the scaled loss is the negative log-likelihood."""
    n, decay = 40, 1e-3
    tau = Prior.from_weight_decay(decay, n, outputs=outputs, noise=noise).precision
    generator = torch.Generator().manual_seed(0)
    f, y = torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    theta = torch.randn(5, generator=generator, dtype=torch.float64)
    penalty = decay / 2 * theta.square().sum()
    if noise is None:
        labels = y.argmax(-1)
        mean_loss = torch.nn.functional.cross_entropy(f, labels)
        nll = torch.nn.functional.cross_entropy(f, labels, reduction="sum")
    else:
        mean_loss = torch.nn.functional.mse_loss(f, y)
        nll = ((f - y).square() / (2 * noise**2)).sum()
    ratio = nll / mean_loss
    torch.testing.assert_close(ratio * penalty, tau / 2 * theta.square().sum())


def test_weight_decay_needs_both_or_neither() -> None:
    with pytest.raises(ValueError, match="both outputs= and noise="):
        Prior.from_weight_decay(1e-3, 10, outputs=2)
    with pytest.raises(ValueError, match="positive"):
        Prior.from_weight_decay(0.0, 10)


def test_from_posterior_adds_up() -> None:
    root = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean = torch.arange(5.0, dtype=torch.float64)
    posterior = Posterior(mean, Dense(root @ root.T) + Diagonal(torch.ones(5, dtype=torch.float64)))
    prior = Prior.from_posterior(posterior)
    center, matrix = prior.resolve(("w",), (5,))
    torch.testing.assert_close(center, mean)
    both = Dense(root.T @ root) + matrix
    torch.testing.assert_close(both.dense(), root.T @ root + root @ root.T + torch.eye(5).double())
    with pytest.raises(IncompatiblePrior, match="5 weights"):
        prior.resolve(("w",), (4,))


@pytest.mark.parametrize(
    "prior",
    [
        Prior(0.1, 0.25),
        Prior({"head.*": 2.0, "*": torch.tensor(1.5)}),
        Prior(torch.rand(TOTAL) + 0.1, torch.randn(TOTAL)),
        Prior(Diagonal(torch.rand(TOTAL) + 0.1)),
    ],
    ids=["scalar", "names", "flat", "matrix"],
)
def test_spec_round_trip(prior: Prior) -> None:
    tensors, spec = prior.spec()
    again = Prior.from_spec(tensors, json.loads(json.dumps(spec)))
    (mean, matrix), (mean2, matrix2) = prior.resolve(NAMES, SIZES), again.resolve(NAMES, SIZES)
    torch.testing.assert_close(mean, mean2, rtol=0, atol=0)
    torch.testing.assert_close(matrix.diagonal(), matrix2.diagonal(), rtol=0, atol=0)


def test_resolve_prior_at_the_front_door() -> None:
    prior = Prior(3.0)
    assert resolve_prior(prior) is prior
    assert resolve_prior(2).precision == 2
    assert resolve_prior({"*": 2.0}).precision == {"*": 2.0}
    assert repr(Prior({"*": 2.0})) == "Prior({'*': 2})"
    assert repr(Prior(torch.tensor([1.0, 2.0]), 0.5)) == "Prior(2 values in [1, 2], mean=0.5)"
