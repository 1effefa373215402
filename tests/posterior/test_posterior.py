"""The Gaussian posterior against torch's own multivariate normal, repairs and factored damping."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from lapwing.errors import BadData, IncompatiblePrior, NotPositiveDefinite, TooLarge, UnsupportedOperation
from lapwing.linalg import PSD, BlockDiagonal, Dense, Diagonal, Kronecker, Layout
from lapwing.posterior import Posterior, Tempered, factored_precision, make_posterior, resolve_temperature


def psd(size: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    root = torch.randn(rank, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (root.T @ root).to(dtype)


def constant(value: float, size: int) -> Diagonal:
    return Diagonal(torch.full((size,), value, dtype=torch.float64))


def kronecker(seed: int = 0) -> Kronecker:
    return Kronecker(psd(2, 2, seed)[None], psd(3, 2, seed + 1)[None])


MATRICES = {
    "dense": Dense(psd(6, 3)),
    "diagonal": Diagonal(torch.arange(6, dtype=torch.float64)),
    "kronecker": kronecker(),
    "blocks": BlockDiagonal(
        Layout(8, (torch.tensor([1, 2, 3, 5, 6, 7]), torch.tensor([0, 4]))), (kronecker(), Dense(psd(2, 1)))
    ),
}


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_agrees_with_a_multivariate_normal(matrix: PSD) -> None:
    mean = torch.linspace(-1, 1, matrix.size, dtype=torch.float64)
    posterior = make_posterior(mean, matrix, 0.7, constant(0.5, matrix.size))
    dense = 0.7 * matrix.dense() + 0.5 * torch.eye(matrix.size, dtype=torch.float64)
    normal = MultivariateNormal(mean, precision_matrix=dense)
    theta = torch.randn(3, 2, matrix.size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(posterior.log_prob(theta), normal.log_prob(theta))
    torch.testing.assert_close(posterior.variance, normal.variance)
    torch.testing.assert_close(posterior.covariance(), normal.covariance_matrix)
    assert posterior.increase == 0.0
    draws = posterior.sample(40_000, torch.Generator().manual_seed(3))
    assert draws.shape == (40_000, matrix.size)
    standard = (draws - mean) @ torch.linalg.cholesky(dense)
    torch.testing.assert_close(standard.T.cov(), torch.eye(matrix.size, dtype=torch.float64), atol=0.04, rtol=0)
    torch.testing.assert_close(standard.mean(0), torch.zeros(matrix.size, dtype=torch.float64), atol=0.03, rtol=0)


def test_samples_follow_the_generator() -> None:
    posterior = make_posterior(torch.zeros(6).double(), MATRICES["dense"], 1.0, constant(1.0, 6))
    first, second = (posterior.sample(4, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)


def test_log_prob_is_differentiable_in_prior_and_scale() -> None:
    tau = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    theta = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    matrix = MATRICES["dense"]

    def lapwing(c: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return make_posterior(torch.zeros(6).double(), matrix, c, Diagonal(t.expand(6))).log_prob(theta)

    assert torch.autograd.gradcheck(lapwing, (scale, tau))


def test_mean_must_fit() -> None:
    with pytest.raises(ValueError, match=r"shape \(6,\)"):
        Posterior(torch.zeros(5), MATRICES["dense"])


def test_covariance_says_its_bytes() -> None:
    posterior = Posterior(torch.zeros(300_000), Diagonal(torch.ones(300_000)))
    with pytest.raises(TooLarge, match=r"300000 weights needs 720 GB"):
        posterior.covariance()
    with pytest.raises(TooLarge, match="memory="):
        Posterior(torch.zeros(6).double(), MATRICES["dense"]).covariance(memory=100)


def test_indefinite_precision_raises_with_the_eigenvalue() -> None:
    hessian = Dense(torch.diag(torch.tensor([2.0, -3.0, 1.0], dtype=torch.float64)))
    with pytest.raises(NotPositiveDefinite, match=r"-2\.5.*repair=True"):
        make_posterior(torch.zeros(3), hessian, 1.0, constant(0.5, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repair_is_the_smallest_sufficient_increase(dtype: torch.dtype) -> None:
    rotation, _ = torch.linalg.qr(psd(4, 4, 5))
    values = torch.tensor([2.0, -3.0, 1.0, 0.0], dtype=torch.float64)
    hessian = Dense(((rotation * values) @ rotation.T).to(dtype))
    posterior = make_posterior(torch.zeros(4, dtype=dtype), hessian, 2.0, constant(0.5, 4), repair=True)
    assert 5.5 <= posterior.increase < 5.5001
    eigenvalues = torch.linalg.eigvalsh(posterior.precision.dense().double())
    assert 0 < eigenvalues.min() < 1e-3
    assert posterior.variance.isfinite().all()
    assert make_posterior(torch.zeros(4), hessian, 2.0, constant(7.0, 4), repair=True).increase == 0.0


def test_factored_damping_is_above_the_exact_precision() -> None:
    matrix = MATRICES["blocks"]
    assert isinstance(matrix, BlockDiagonal)
    prior = Diagonal(matrix.layout.scatter([torch.full((6,), 0.5).double(), torch.tensor([0.2, 0.3]).double()]))
    factored = factored_precision(matrix, 4.0, prior, split=3.0)
    exact = matrix.scale(4.0) + prior
    assert torch.linalg.eigvalsh(factored.dense() - exact.dense()).min() > -1e-10
    block = matrix.blocks[0]
    assert isinstance(block, Kronecker)
    eye2, eye3 = torch.eye(2).double(), torch.eye(3).double()
    expected = torch.kron(2 / 3 * block.left[0] + 0.5**0.5 * eye2, 2 * 3 * block.right[0] + 0.5**0.5 * eye3)
    index = matrix.layout.index[0]
    torch.testing.assert_close(factored.dense()[index][:, index], expected)
    alone = factored_precision(block, 4.0, constant(0.5, 6), split=3.0)
    torch.testing.assert_close(alone.dense(), expected)


def test_factored_damping_refuses() -> None:
    with pytest.raises(UnsupportedOperation, match="Dense"):
        factored_precision(MATRICES["dense"], 1.0, constant(1.0, 6))
    varying = Diagonal(torch.arange(1, 9).double())
    with pytest.raises(IncompatiblePrior, match="block 0"):
        factored_precision(MATRICES["blocks"], 1.0, varying)
    with pytest.raises(IncompatiblePrior, match="not a matrix"):
        factored_precision(MATRICES["blocks"], 1.0, Dense(torch.eye(8).double()))


def test_temperature_scales() -> None:
    phi = torch.tensor(0.25, dtype=torch.float64)
    cold = Tempered(3.0)
    assert cold.likelihood_scale(phi).item() == 12.0
    assert cold.likelihood_scale(phi, 2).item() == 48.0
    assert cold.prior_scale == 1.0
    assert Tempered(3.0, prior=True).prior_scale == 3.0
    assert resolve_temperature(2.0).T == 2.0
    assert resolve_temperature(cold) is cold
    assert not cold.is_bayes
    assert resolve_temperature(torch.tensor(1.0)).is_bayes
    assert repr(Tempered(0.5, prior=True)) == "Tempered(0.5, prior=True)"


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), torch.ones(2)])
def test_temperature_refuses(bad: object) -> None:
    with pytest.raises(ValueError, match="temperature"):
        resolve_temperature(bad)  # type: ignore[arg-type]


def test_temperature_zero_is_the_prior() -> None:
    scale = Tempered(0.0).likelihood_scale(torch.tensor(1.0).double())
    posterior = make_posterior(torch.zeros(6).double(), MATRICES["dense"], scale, constant(2.0, 6))
    torch.testing.assert_close(posterior.covariance(), 0.5 * torch.eye(6).double())
    with pytest.raises(ValueError, match="positive"):
        Tempered(0.0, prior=True)
    with pytest.raises(BadData, match="not str"):
        resolve_temperature("cold")  # type: ignore[arg-type]
