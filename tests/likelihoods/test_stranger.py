"""A likelihood of a stranger: a negative binomial with a learned dispersion, in one class and one registration."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.testing import LikelihoodLaws

ALPHA = 0.6


@lapwing.register(name="overdispersed")
@dataclass(frozen=True, eq=False)
class NegativeBinomial(Likelihood):
    """Counts of mean μ = exp f and variance μ + αμ²; α is unknown unless it is given. Λ = μ / (1 + αμ)."""

    alpha: float | Tensor | None = None
    dispersion_name = "alpha"
    scales_curvature = False

    def conditional(self, f):
        count = 1 / self.dispersion.to(f)
        return torch.distributions.NegativeBinomial(count, logits=f - count.log(), validate_args=False)

    def factor(self, f, y=None):
        mean = f.exp()
        return torch.diag_embed((mean / (1 + self.dispersion.detach().to(f) * mean)).sqrt())

    @property
    def known(self):
        return self.alpha is not None

    @property
    def dispersion(self):
        return torch.as_tensor(1.0 if self.alpha is None else self.alpha, dtype=torch.float64)

    def with_dispersion(self, dispersion):
        return NegativeBinomial(dispersion)


class TestNegativeBinomial(LikelihoodLaws):
    likelihood, outputs = NegativeBinomial(ALPHA), 2


def counts(n: int, seed: int, alpha: float = ALPHA) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    mean = (1.0 + x[:, :1] * 0.8 - 0.5 * x[:, 1:]).exp()
    shape = torch.full_like(mean, 1 / alpha)
    return x, torch.poisson(torch._standard_gamma(shape, generator=generator) * alpha * mean, generator=generator)


@pytest.fixture(scope="module")
def fitted() -> tuple[nn.Module, lapwing.Laplace]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x, y = counts(400, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.poisson_nll_loss(model(x), y).backward()
        optimizer.step()
    return model, lapwing.fit(model, (x, y), "overdispersed", structure="kron", progress=False)


def log_likelihood(alpha: float, mean: Tensor, y: Tensor) -> float:
    """Σ log p(y), written out."""
    r = 1 / alpha
    parts = torch.lgamma(y + r) - math.lgamma(r) - torch.lgamma(y + 1)
    return (parts + r * math.log(r) + y * mean.log() - (y + r) * (mean + r).log()).sum().item()


def maximum_likelihood(mean: Tensor, y: Tensor) -> float:
    """The α of the largest likelihood, by bisection of its slope in log α."""
    low, high = math.log(1e-3), math.log(1e3)
    for _ in range(60):
        middle = (low + high) / 2
        up, down = (log_likelihood(math.exp(middle + h), mean, y) for h in (1e-4, -1e-4))
        low, high = (middle, high) if up > down else (low, middle)
    return math.exp(low)


def test_the_fit_estimates_the_dispersion(fitted) -> None:
    model, la = fitted
    x, y = counts(400, 1)
    best = maximum_likelihood(model(x).exp().detach(), y)
    assert float(la.likelihood.dispersion) == pytest.approx(best, rel=1e-4)
    assert best == pytest.approx(ALPHA, rel=0.3)
    assert la.log_likelihood.item() == pytest.approx(log_likelihood(best, model(x).exp().detach(), y), rel=1e-8)


def test_the_curvature_is_that_of_the_estimate(fitted) -> None:
    model, la = fitted
    x, y = counts(400, 1)
    again = lapwing.fit(model, (x, y), la.likelihood, structure="kron", progress=False)
    torch.testing.assert_close(again.curvature.dense(), la.curvature.dense())


def test_held_out_data_learn_it(fitted) -> None:
    model, la = fitted
    x, y = counts(600, 2)
    best = maximum_likelihood(model(x).exp().detach(), y)
    tuned = la.tune((x, y), learn=("prior", "alpha"), rule="lowest")
    assert float(tuned.likelihood.dispersion) == pytest.approx(best, rel=0.1)  # a posterior explains some of the spread
    assert "alpha" in str(tuned.tuning.setting)
    assert any("curvature" in message and "alpha" in message for message in tuned.tuning.messages)
    same = la.tune((x, y), learn=("prior", "dispersion"), rule="lowest")
    assert float(same.likelihood.dispersion) == float(tuned.likelihood.dispersion)
    chosen = la.tune((x, y), grid={"alpha": [0.1, 0.5, 2.0]}, rule="lowest")
    assert float(chosen.likelihood.dispersion) == pytest.approx(0.5)
    given = lapwing.fit(model, counts(400, 1), NegativeBinomial(3.0), structure="kron", progress=False)
    assert given.likelihood.alpha == 3.0
    assert float(given.tune((x, y)).likelihood.dispersion) == pytest.approx(best, rel=0.15)


def test_the_evidence_learns_it(fitted) -> None:
    model, _ = fitted
    x, y = counts(400, 1)
    best = maximum_likelihood(model(x).exp().detach(), y)
    given = lapwing.fit(model, (x, y), NegativeBinomial(2.0), structure="kron", progress=False)
    tuned = given.tune(method="evidence")
    assert float(tuned.likelihood.dispersion) == pytest.approx(best, rel=1e-3)
    assert tuned.log_evidence() > given.log_evidence()
    with pytest.raises(lapwing.UnsupportedOperation, match="no dispersion to learn"):
        lapwing.fit(model, (x, y), "counts", progress=False).tune(method="evidence", learn="dispersion")


def test_predictions_hold_the_extra_variance(fitted) -> None:
    model, la = fitted
    x, y = counts(50, 3)
    p = la.predict(x)
    mean, alpha = model(x).exp().detach(), float(la.likelihood.dispersion)
    assert (p.aleatoric >= 0.95 * (mean + alpha * mean.square())).all()
    assert p.log_prob(y).shape == (50,)
    report = lapwing.evaluate({"Laplace": la, "Poisson": model}, (x, y), likelihood="counts", progress=False)
    assert report.row("Laplace")["nll"] < report.row("Poisson")["nll"]


def test_it_is_saved_loaded_moved_and_compared(fitted, tmp_path: Path) -> None:
    model, la = fitted
    x, _ = counts(50, 3)
    la.save(tmp_path / "counts.lapwing")
    again = lapwing.load(tmp_path / "counts.lapwing", model)
    assert type(again.likelihood) is NegativeBinomial
    torch.testing.assert_close(again.predict(x).mean, la.predict(x).mean)
    torch.testing.assert_close(again.log_evidence(), la.log_evidence())
    moved = la.to("cpu")
    torch.testing.assert_close(moved.predict(x).mean, la.predict(x).mean)
    other = lapwing.fit(model, counts(400, 1), "counts", structure="kron", progress=False)
    found = lapwing.compare({"negative binomial": la, "Poisson": other})
    assert "negative binomial" in str(found)
    updated = la.update(counts(100, 4))
    assert float(updated.likelihood.dispersion) > 0
    with pytest.raises(lapwing.UnsupportedOperation, match="another curvature"):
        la.replace(likelihood=NegativeBinomial(3.0))


def test_it_is_found_by_name() -> None:
    assert type(resolve_likelihood("overdispersed")) is NegativeBinomial


class NoDistribution(Likelihood):
    """Forgets to make a distribution."""

    def conditional(self, f: Tensor) -> Tensor:  # type: ignore[override]
        return f


def test_a_conditional_that_is_no_distribution_is_named() -> None:
    with pytest.raises(lapwing.UnsupportedOperation, match=r"NoDistribution\.conditional returned Tensor; it"):
        lapwing.fit(nn.Linear(1, 1), (torch.ones(4, 1), torch.ones(4, 1)), NoDistribution(), progress=False)


@lapwing.register(name="grades")
@dataclass(frozen=True, eq=False)
class Grades(Likelihood):
    """Grades 0 to 3 by one output f: p(y ≤ k) = sigmoid(k − 1 − f). A categorical law whose outputs are no logits."""

    per_item: bool = True

    def conditional(self, f):
        below = (torch.arange(3).to(f) - 1 - f).sigmoid()  # (..., 3)
        edges = torch.cat([torch.zeros_like(f), below, torch.ones_like(f)], -1)
        probs = edges.diff(dim=-1).clamp(min=1e-12)
        return torch.distributions.Categorical(probs if self.per_item else probs[..., None, :])


class TestGrades(LikelihoodLaws):
    likelihood, outputs = Grades(), 1


def grader(select: str) -> tuple[lapwing.Laplace, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(60, 2)
    return lapwing.fit(model, (x, torch.randint(4, (60,))), "grades", select=select, progress=False), x


def test_classes_that_have_no_logits_are_predicted_served_and_distilled() -> None:
    la, x = grader("last_layer")
    p = la.predict(x[:5])
    f = p.function.mean.double() + p.function.variance.double().sqrt() * torch.randn(5, 100_000, dtype=torch.float64)
    torch.testing.assert_close(p.probs.double(), Grades().conditional(f[..., None]).probs.mean(1), rtol=0, atol=0.01)
    found = la.predictor()(x[:5])
    assert set(found) == {"probs", "epistemic"}
    torch.testing.assert_close(found["probs"], p.probs)
    with pytest.raises(lapwing.BadData, match="no 'variance': use mean"):
        la.predictor("variance")
    la, x = grader("all")
    fast = la.distill(x, epochs=0)
    assert fast.distances["held out"].divergence < 0.1
    assert set(fast.predictor()(x[:5])) == {"probs", "epistemic"}


def test_a_file_needs_no_checks_of_pytorch_and_no_logits(tmp_path: Path) -> None:
    la, x = grader("last_layer")
    la.export(tmp_path / "grades.pt2", x[:3])
    found = torch.export.load(tmp_path / "grades.pt2").module()(x[:7])
    torch.testing.assert_close(found["probs"], la.predict(x[:7]).probs, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="to satisfy the constraint"):  # they are switched on again
        torch.distributions.Normal(0.0, -1.0)


def test_a_categorical_law_per_output_is_refused() -> None:
    with pytest.raises(lapwing.UnsupportedOperation, match=r"one per item, of batch_shape \(4,\).* use f\[\.\.\., 0\]"):
        lapwing.fit(nn.Linear(1, 1), (torch.ones(4, 1), torch.ones(4).long()), Grades(per_item=False), progress=False)


@lapwing.register
@dataclass(frozen=True, eq=False)
class Cuts(Likelihood):
    """Grades by one output, as `Grades`, between cut points that are an option."""

    cuts: tuple[float, ...] | Tensor = (-1.0, 1.0)

    def conditional(self, f):
        below = (torch.as_tensor(self.cuts).to(f) - f).sigmoid()
        edges = torch.cat([torch.zeros_like(f), below, torch.ones_like(f)], -1)
        return torch.distributions.Categorical(edges.diff(dim=-1).clamp(min=1e-12))


class TestCuts(LikelihoodLaws):
    likelihood, outputs = Cuts((-0.5, 0.5, 1.0)), 1


def test_a_tuple_of_options_is_stored_and_a_tensor_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(2, 1), (torch.randn(20, 2), torch.randint(3, (20,)))
    la = lapwing.fit(model, data, Cuts((-0.5, 0.5)), progress=False)
    la.save(tmp_path / "cuts.lapwing")
    again = lapwing.load(tmp_path / "cuts.lapwing", model)
    assert again.likelihood.cuts == (-0.5, 0.5)
    torch.testing.assert_close(again.predict(data[0]).probs, la.predict(data[0]).probs)
    la = lapwing.fit(model, data, Cuts(torch.tensor([-0.5, 0.5])), progress=False)
    with pytest.raises(lapwing.UnsupportedOperation, match=r"a file cannot hold 'cuts' of Cuts, a Tensor: the options"):
        la.save(tmp_path / "refused.lapwing")
    assert not (tmp_path / "refused.lapwing").exists()
