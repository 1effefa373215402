"""The log evidence against closed forms, dense algebra, quadrature and finite differences.

Candidates side by side, with fitted networks.
"""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.evidence import effective_parameters, log_evidence, stationarity
from lapwing.evidence.evidence import Comparison, compare
from lapwing.fitting import fit
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import PSD, Dense, Diagonal, EigenKronecker, Kronecker
from lapwing.posterior import Belief, Prior, Tempered
from tests.evidence.problems import Handmade, Problem, linear, mlp

STRUCTURES = ("full", "diag", "blockdiag", "kron", "ekfac")


def prior_of(problem: Problem, precision: object, mean: object = 0.0) -> tuple[torch.Tensor, PSD]:
    return Prior(precision, mean).resolve(problem.flat_names, problem.sizes)  # type: ignore[arg-type]


def marginal(problem: Problem, mean: torch.Tensor, precision: torch.Tensor, variance: float) -> torch.Tensor:
    """log N(y; Xμ₀, σ²I + XΠ⁻¹Xᵀ)."""
    x, y = problem.jacobian[:, 0], problem.y[:, 0]
    cov = variance * torch.eye(len(y), dtype=torch.float64) + x @ torch.linalg.solve(precision, x.T)
    return MultivariateNormal(x @ mean, cov).log_prob(y)


@pytest.mark.parametrize("tau", [1e-2, 0.7, 50.0])
def test_exact_for_linear_gaussian_at_the_mode(tau: float) -> None:
    problem = linear(tau=tau)
    got = log_evidence(problem.curvature(), prior_of(problem, tau), problem.likelihood, mean=problem.theta)
    expected = marginal(problem, torch.zeros(4).double(), tau * torch.eye(4).double(), 0.4**2)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("mode", [True, False])
def test_linear_mode_is_exact_anywhere(mode: bool) -> None:
    problem = linear(mode=mode)
    root = torch.randn(4, 4, dtype=torch.float64)
    precision, mean = root @ root.T + torch.eye(4).double(), torch.randn(4, dtype=torch.float64)
    prior = prior_of(problem, Dense(precision), mean)
    got = log_evidence(problem.curvature(), prior, problem.likelihood, mean=problem.theta, at="linear-mode")
    torch.testing.assert_close(got, marginal(problem, mean, precision, 0.4**2), rtol=1e-10, atol=0)


def test_stationarity_is_the_gain_of_the_linear_mode() -> None:
    problem = linear(mode=False)
    arguments = problem.curvature(), prior_of(problem, 0.7), problem.likelihood
    at_map = log_evidence(*arguments, mean=problem.theta)
    at_mode = log_evidence(*arguments, mean=problem.theta, at="linear-mode")
    assert stationarity(Belief.of(*arguments, mean=problem.theta)) == pytest.approx((at_mode - at_map).item(), rel=1e-9)
    still = linear(mode=True)
    quiet = stationarity(Belief.of(still.curvature(), prior_of(still, 0.7), still.likelihood, mean=still.theta))
    assert 0 <= quiet < 1e-20


def test_linear_mode_needs_a_gradient() -> None:
    problem = linear()
    curvature = Handmade(problem.matrix("full"), problem.curvature().statistics)
    with pytest.raises(UnsupportedOperation, match="at='map'"):
        log_evidence(curvature, prior_of(problem, 1.0), problem.likelihood, mean=problem.theta, at="linear-mode")
    with pytest.raises(ValueError, match="linear-mode"):
        log_evidence(curvature, prior_of(problem, 1.0), problem.likelihood, mean=problem.theta, at="mode")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.3, Tempered(2.5, prior=True)], ids=str)
@pytest.mark.parametrize("noise", [None, 0.5])
def test_matches_the_dense_formula(structure: str, temperature: float | Tempered, noise: float | None) -> None:
    problem = mlp(Categorical() if noise is None else Gaussian(noise), outputs=3)
    curvature = problem.curvature(structure)
    tempered = temperature if isinstance(temperature, Tempered) else Tempered(temperature)
    values = {"0.*": 0.5, "2.*": 3.0}
    got = log_evidence(
        curvature, prior_of(problem, values, 0.1), problem.likelihood, mean=problem.theta, temperature=temperature
    )
    prior = prior_of(problem, values)[1].dense() * (tempered.T if tempered.prior else 1.0)
    precision = tempered.T * curvature.matrix.dense() / (1.0 if noise is None else noise**2) + prior
    fit = tempered.T * problem.likelihood.log_prob(problem.f, problem.y).sum()
    offset = problem.theta - 0.1
    expected = fit - 0.5 * offset @ prior @ offset - 0.5 * (torch.logdet(precision) - torch.logdet(prior))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)
    assert got.dtype == torch.float64


def test_differentiable_in_prior_mean_noise_and_temperature() -> None:
    problem = mlp(Gaussian(0.5))
    curvature = problem.curvature("full")

    def evidence(taus: torch.Tensor, mean: torch.Tensor, noise: torch.Tensor, T: torch.Tensor) -> torch.Tensor:
        prior = Prior.per_block(taus, problem.names, mean).resolve(problem.flat_names, problem.sizes)
        return log_evidence(curvature, prior, Gaussian(noise), mean=problem.theta, temperature=T)

    values = ([0.5, 2.0], 0.1, 0.4, 1.3)
    assert torch.autograd.gradcheck(evidence, tuple(torch.tensor(v).double().requires_grad_() for v in values))


def test_differentiable_per_weight() -> None:
    problem = mlp(Categorical(), n=8)
    for structure in ("full", "diag", "blockdiag"):
        curvature = problem.curvature(structure)

        def evidence(taus: torch.Tensor, curvature: Handmade = curvature) -> torch.Tensor:
            return log_evidence(curvature, prior_of(problem, taus), problem.likelihood, mean=problem.theta)

        taus = torch.rand(problem.theta.numel(), dtype=torch.float64) + 0.1
        assert torch.autograd.gradcheck(evidence, taus.requires_grad_())


@pytest.mark.parametrize("seed", range(8))
def test_structures_that_are_lower_bounds(seed: int) -> None:
    """log|A| of a PSD matrix is at most that of its diagonal in any basis: diag, blockdiag, ekfac ≤ full."""
    problem = mlp(Categorical(), n=6, outputs=3, seed=seed, scale=3.0)
    found = {
        name: log_evidence(problem.curvature(name), prior_of(problem, 0.1), problem.likelihood, mean=problem.theta)
        for name in STRUCTURES
    }
    assert found["diag"] <= found["blockdiag"] <= found["full"]
    assert found["ekfac"] <= found["blockdiag"]


def test_kfac_is_no_lower_bound() -> None:
    """Where large inputs meet large gradients, E[ggᵀ] ⊗ E[aaᵀ] has less volume than the truth, and more evidence."""
    generator = torch.Generator().manual_seed(0)
    above = {"kron": 0, "ekfac": 0}
    for _ in range(20):
        size = torch.randn(500, 1, generator=generator, dtype=torch.float64).mul(0.5).exp()
        g, a = (size * torch.randn(500, k, generator=generator, dtype=torch.float64) for k in (3, 4))
        rows = torch.einsum("no,ni->noi", g, a).flatten(1)
        left, right = g.T @ g, a.T @ a / 500
        u, v = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
        ekfac = EigenKronecker(u[None], v[None], ((g @ u).square().T @ (a @ v).square())[None])
        prior = Prior(0.1).resolve(("w",), (12,))
        full, kron, eigen = (
            log_evidence(Handmade(m, torch.zeros(1).double()), prior, Categorical(), mean=torch.zeros(12).double())
            for m in (Dense(rows.T @ rows), Kronecker(left[None], right[None]), ekfac)
        )
        above = {"kron": above["kron"] + int(kron > full), "ekfac": above["ekfac"] + int(eigen > full)}
    assert above["kron"] > 15
    assert above["ekfac"] == 0


def test_close_to_quadrature_for_one_weight() -> None:
    """log ∫ p(y|wx) N(w; 0, 1/τ) dw of a logistic regression at its mode, N large."""
    torch.manual_seed(0)
    x = torch.randn(400, dtype=torch.float64)
    y = (torch.rand(400) < torch.sigmoid(0.8 * x)).long()
    tau = 0.5
    f_of = lambda w: torch.stack([torch.zeros_like(x), w * x], -1)  # noqa: E731
    grid = torch.linspace(-3, 4, 20_001, dtype=torch.float64)
    logits = grid[:, None] * x
    joint = (y * logits - torch.nn.functional.softplus(logits)).sum(1) - 0.5 * tau * grid**2
    exact = torch.logsumexp(joint, 0) + math.log(grid[1] - grid[0]) + 0.5 * math.log(tau / (2 * math.pi))
    mode = grid[joint.argmax()]
    likelihood = Categorical()
    f = f_of(mode)
    half = torch.einsum("nc,ncr->nr", torch.stack([torch.zeros_like(x), x], -1), likelihood.factor(f))
    curvature = Handmade(Diagonal(half.square().sum()[None]), likelihood.statistics(f, y))
    got = log_evidence(curvature, Prior(tau).resolve(("w",), (1,)), likelihood, mean=mode[None])
    assert got.item() == pytest.approx(exact.item(), abs=0.01)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_effective_parameters(structure: str) -> None:
    problem = mlp(Gaussian(0.5))
    curvature = problem.curvature(structure)
    belief = Belief.of(curvature, prior_of(problem, 2.0), problem.likelihood, 0.5, mean=problem.theta)
    got = effective_parameters(belief)
    scaled = 0.5 * curvature.matrix.dense() / 0.25
    expected = torch.linalg.solve(scaled + 2.0 * torch.eye(len(scaled)).double(), scaled).trace()
    assert got == pytest.approx(expected.item(), rel=1e-9)


def data(seed: int = 0, n: int = 80) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def trained(hidden: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()
    x, y = data()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        weights = sum(p.square().sum() for p in net.parameters())
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum") + 0.5 * weights
        loss.backward()
        return loss

    optimizer.step(closure)
    return net


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    small, large = trained(1), trained(8)
    models = {
        "small": fit(small, data(), "classification", structure="full"),
        "large": fit(large, data(), "classification", structure="full"),
        "kron": fit(large, data(), "classification", structure="kron"),
        "cold": fit(large, data(), "classification", structure="kron", temperature=3.0),
    }
    return compare(models, data(1, 50))


def test_numbers_are_those_of_the_fitted_objects(comparison: Comparison) -> None:
    la = fit(trained(8), data(), "classification", structure="full")
    row = comparison.candidates["large"]
    assert row.log_evidence == pytest.approx(la.log_evidence().item(), rel=1e-6)
    assert row.effective == pytest.approx(la.effective_parameters, rel=1e-6)
    assert row.shift == pytest.approx(la.stationarity, abs=1e-6)
    x, y = data(1, 50)
    assert row.nll == pytest.approx(-la.predict(x).log_prob(y).mean().item(), rel=1e-5)
    assert row.parameters == 50
    assert row.n_data == 80
    assert row.milliseconds is not None
    assert row.milliseconds > 0


def test_the_model_that_can_learn_the_task_wins(comparison: Comparison) -> None:
    rows = comparison.candidates
    assert rows["large"].log_evidence > rows["small"].log_evidence
    assert rows["large"].nll is not None
    assert rows["small"].nll is not None
    assert rows["large"].nll < rows["small"].nll


def test_warnings_and_table(comparison: Comparison) -> None:
    text = comparison.table()
    assert text.splitlines()[1].startswith(comparison.best)
    assert any("kron, cold: the evidence of this structure is no bound" in w for w in comparison.warnings)
    assert any("cold: temperature ≠ 1" in w for w in comparison.warnings)
    assert any("large, kron, cold: one network in several structures" in w for w in comparison.warnings)
    assert str(comparison) == text
    assert comparison.to_dict()["small"]["parameters"] == 8


def test_what_evidence_cannot_tell_apart() -> None:
    one, two = (fit(trained(3, seed), data(), "classification", structure="full") for seed in (0, 0))
    found = compare({"one": one, "two": two})
    assert any("within the" in w for w in found.warnings)
    assert found.candidates["one"].nll is None
    assert "–" in found.table()
    fewer = fit(trained(3), data(n=40), "classification", structure="full")
    assert any("different sizes" in w for w in compare({"one": one, "fewer": fewer}).warnings)


def test_a_network_far_from_its_mode() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(4)
    found = compare({"random": fit(net, data(), "classification", structure="full")})
    assert any("far from a mode" in w for w in found.warnings)


def test_needs_a_model() -> None:
    with pytest.raises(BadData, match="at least one"):
        compare({})


def test_matrix_free_candidates_count_their_error() -> None:
    net = trained(3)
    models = {
        "exact": fit(net, data(), "classification", structure="full"),
        "free": fit(net, data(), "classification", structure="matrixfree"),
    }
    found = compare(models)
    exact, free = found.candidates["exact"], found.candidates["free"]
    assert free.megabytes is None
    assert free.uncertainty >= exact.uncertainty
    assert abs(free.log_evidence - exact.log_evidence) <= free.uncertainty
    assert free.effective == pytest.approx(exact.effective, rel=0.2)
    assert "free" in found.table()


def test_checkpoints_and_architectures_in_one_table() -> None:
    models = {f"width {k}": fit(trained(k), data(), "classification", structure="full").tune(method="evidence")
              for k in (1, 4)}  # fmt: skip
    found = compare(models, data(1, 50))
    order = [line.split("  ")[0] for line in found.table().splitlines()[1:3]]
    by_evidence = sorted(models, key=lambda name: -models[name].log_evidence().item())
    assert order == by_evidence
    assert found.best == by_evidence[0]


def test_held_out_data_are_read_as_those_of_the_fit() -> None:
    """A dict with two labels, of which `split` takes the second."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    net = nn.Linear(4, 3)
    batch = {"x": x, "labels": (y + 1) % 3, "second": y}
    la = fit(net, [batch], "classification", structure="full", prior=1e6, split=lambda b: (b["x"], b["second"]))
    truth = nn.functional.cross_entropy(net(x), y).item()
    assert compare({"one": la}, [batch]).candidates["one"].nll == pytest.approx(truth, rel=1e-3)
