"""Held-out scores against plain Monte Carlo and dense posteriors: what `tune` scores is what `predict` gives.

Settings that differ in a common factor of their precisions: interpolated losses against those that are computed.
"""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.evidence import Groups, Setting, collect, heldout, linked
from lapwing.evidence.heldout import Nodes, Sweep, chebyshev, class_log_prob, enough, lines_of
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.posterior import Tempered
from lapwing.predictive import GaussianFunction, predict_targets
from tests import dense
from tests.evidence.problems import mlp
from tests.evidence.test_search import held_out


@pytest.mark.parametrize("classes", [3, 10, 65])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_scores_are_those_of_predictions(classes: int, scale: float) -> None:
    n = 24
    mean = 3 * dense.randn(n, classes)
    factor = dense.randn(n, classes, 3, seed=1)
    covariance = scale * (torch.eye(classes, dtype=torch.float64) + factor @ factor.mT / 3)
    y = torch.randint(classes, (n,), generator=dense.seeded(2))
    found = class_log_prob(mean, covariance, y, Categorical(), 128)

    root = torch.linalg.cholesky(covariance).float()
    noise = torch.randn(20_000, classes, dtype=torch.float32, generator=dense.seeded(3))
    probs = torch.stack([(mean[k].float() + noise @ root[k].mT).softmax(-1).mean(0) for k in range(n)])
    truth = probs.gather(-1, y[:, None])[:, 0].log().double()
    assert (found.mean() - truth.mean()).abs() < 0.02
    predicted = predict_targets(GaussianFunction(mean, covariance), Categorical()).log_prob(y)
    assert (found.mean() - predicted.mean()).abs() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_items_whose_exponentials_overflow_leave_the_others_as_they_are(dtype: torch.dtype) -> None:
    """Some items under a prior so wide that logits reach thousands: values and gradients are those of each alone."""
    mean = dense.randn(6, 4).to(dtype)
    factor = dense.randn(6, 4, 4, seed=1)
    sizes = torch.tensor([1.0, 1e6, 2.0, 1e12, 1.0, 1e4], dtype=torch.float64)
    covariance = (sizes[:, None, None] * (factor @ factor.mT + torch.eye(4))).to(dtype)
    y = torch.tensor([0, 1, 2, 3, 0, 1])

    def scored(part: slice | Tensor) -> tuple[Tensor, Tensor]:
        leaf = torch.ones((), dtype=dtype, requires_grad=True)
        found = class_log_prob(mean[part], leaf * covariance[part], y[part], Categorical(), 64)
        return found.detach(), torch.autograd.grad(found.sum(), leaf)[0]

    together, slope = scored(slice(None))
    alone = [scored(slice(k, k + 1)) for k in range(6)]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(together, torch.cat([value for value, _ in alone]), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(slope, sum(each for _, each in alone), rtol=100 * tolerance, atol=tolerance)
    assert bool(together.isfinite().all())


def test_labels_that_do_not_count_score_nothing() -> None:
    mean, covariance = dense.randn(3, 4), torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    found = class_log_prob(mean, covariance, torch.tensor([0, -100, 3]), Categorical(), 64)
    assert found[1] == 0
    assert (found[[0, 2]] < 0).all()


@pytest.mark.parametrize("chunk", [2**22, 2**13])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5)], ids=lambda v: type(v).__name__)
def test_settings_score_together_what_they_score_alone(
    likelihood: Likelihood, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is scored in one call: settings of several dispersions and logit temperatures, chunks of items."""
    monkeypatch.setattr(heldout, "CHUNK", chunk)
    problem = mlp(likelihood, outputs=3)
    groups = Groups.layerwise(problem.names, problem.flat_names, problem.sizes)
    belief = problem.belief(groups, "kron")
    sweep = collect(belief, groups, held_out(problem)[1], Nodes.spanning(1e-6, 1e6, 1e5), score=linked(), memory=2**30)
    noise = isinstance(likelihood, Gaussian)
    settings = [
        Setting(torch.tensor([tau, 2 * tau]).double(), T, phi if noise else None, logit_temperature=1.0 if noise else s)
        for tau, T, phi, s in itertools.product((0.1, 10.0), (1.0, 30.0), (0.1, 0.4), (1.0, 1.7))
    ]
    together = sweep.losses(settings)
    alone = torch.cat([sweep.losses([setting]) for setting in settings])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)
    f, y = sweep.flat
    for setting, losses in zip(settings, together, strict=True):
        law = likelihood if setting.dispersion is None else likelihood.with_dispersion(setting.dispersion)
        precision = replace(groups.applied(belief, setting.precision), likelihood=law)
        precision = replace(precision, temperature=Tempered(setting.temperature)).posterior.precision
        rows = problem.rows(held_out(problem)[0])[1]
        covariance = precision.quadratic(rows) / setting.logit_temperature**2
        expected = -linked()(f / setting.logit_temperature, covariance, y, law)
        torch.testing.assert_close(losses, expected, rtol=2e-3, atol=2e-3)


def test_an_interpolation_meets_a_smooth_function() -> None:
    u = torch.linspace(-4, 7, 101, dtype=torch.float64)
    nodes, matrix = chebyshev(u, 20)
    torch.testing.assert_close(matrix @ (1 / (1 + nodes.exp())), 1 / (1 + u.exp()), rtol=0, atol=2e-4)
    ends = chebyshev(nodes, 20)[1]
    torch.testing.assert_close(ends, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-12)


def test_lines_are_settings_that_differ_in_one_factor() -> None:
    settings = [Setting(torch.tensor([tau]), T) for T in (1.0, 2.0) for tau in (10.0, 0.1, 1.0)]
    settings.append(Setting(torch.empty(0), deterministic=True))
    assert lines_of(settings) == [[1, 2, 0], [4, 5, 3], [6]]
    assert enough([settings[6]]) == 3


def test_a_fine_grid_scores_as_its_settings_do_one_by_one() -> None:
    net = dense.build(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)))
    x, y = dense.randn(80, 3, seed=1), torch.randint(4, (80,), generator=dense.seeded(2))
    la = lapwing.fit(net, (x[:40], y[:40]), "classification", structure="kron", select="last_layer", progress=False)
    values = tuple(torch.logspace(-3, 3, 90, dtype=torch.float64).tolist())
    held = (x[40:], y[40:])
    fine = la.tune(held, learn=("prior",), grid={"prior": values})
    for start in range(0, 90, 15):  # too few settings to interpolate
        coarse = la.tune(held, learn=("prior",), grid={"prior": values[start : start + 15 : 3]})
        torch.testing.assert_close(
            fine.tuning.scores[start : start + 15 : 3], coarse.tuning.scores[:5], rtol=0, atol=2e-4
        )
    chosen = min(range(90), key=lambda k: fine.tuning.scores[k].item())
    alone = la.tune(held, learn=("prior",), grid={"prior": (values[chosen],)})
    assert abs(alone.tuning.scores[0] - fine.tuning.scores[chosen]) < 1e-4


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_a_fine_grid_scores_as_predictions_of_each_setting_do(structure: str) -> None:
    net = dense.build(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)))
    x, y = dense.randn(240, 3, seed=1), torch.randint(4, (240,), generator=dense.seeded(2))
    la = lapwing.fit(net, (x[:120], y[:120]), "classification", structure=structure, select="last_layer")
    values = torch.logspace(-2, 3, 102, dtype=torch.float64).tolist()
    tuning = la.tune((x[120:], y[120:]), learn=("prior",), grid={"prior": values}).tuning
    for k in range(0, 102, 12):
        assert tuning.settings[k].narrow == pytest.approx(values[k])
        truth = -la.replace(prior=values[k]).predict(x[120:]).log_prob(y[120:]).mean().item()
        assert tuning.scores[k].item() == pytest.approx(truth, abs=1e-3)


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("wrong", [0.0, 0.02, 0.3])
def test_a_look_at_a_few_samples_changes_no_choice(structure: str, wrong: float) -> None:
    """Also where a few wrong labels among easy ones decide, and of settings that are not hopeless no score."""
    net = dense.build(lambda: nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)))
    x = dense.randn(700, 3, seed=1)
    with torch.no_grad():
        net[2].weight.mul_(12.0)
        y = net(x).argmax(-1)
    hit = torch.rand(700, generator=dense.seeded(2)) < wrong
    y = torch.where(hit, torch.randint(4, (700,), generator=dense.seeded(3)), y)
    la = lapwing.fit(net, (x[:200], y[:200]), "classification", structure=structure, select="last_layer")
    values = tuple(torch.logspace(-4, 4, 120, dtype=torch.float64).tolist())
    held = (x[200:], y[200:])
    tuning = la.tune(held, learn=("prior",), grid={"prior": values}).tuning
    own = [k for k, each in enumerate(tuning.settings) if not each.deterministic][:120]
    truth = torch.tensor([-la.replace(prior=v).predict(held[0]).log_prob(held[1]).mean().item() for v in values[::6]])
    found = tuning.scores[own][::6].to(truth)
    assert found.argmin() == truth.argmin() or truth[found.argmin()] - truth.min() < 1e-3
    near = truth < truth.min() + 0.005
    torch.testing.assert_close(found[near], truth[near], rtol=0, atol=1e-3)
    torch.testing.assert_close(found, truth, rtol=0.3, atol=0.02)  # the others are estimates
    assert any("estimates from 96 of the data" in each for each in tuning.messages)


def test_a_line_that_is_not_smooth_gets_more_nodes_and_then_every_setting() -> None:
    """Losses with a steep step: an interpolation from few settings is refused, whatever it costs."""
    line = [Setting(torch.tensor([tau], dtype=torch.float64)) for tau in torch.logspace(-2, 3, 102).tolist()]

    def along(width: float) -> tuple[Tensor, Tensor, int]:
        asked = []

        def losses(settings: list[Setting]) -> Tensor:
            asked.extend(settings)
            u = torch.tensor([each.narrow for each in settings], dtype=torch.float64).log()
            return torch.sigmoid((u[:, None] - torch.tensor([0.0, 1.0, 3.0])) / width)

        sweep = SimpleNamespace(exact_losses=losses)
        sweep._refined = partial(Sweep._refined, sweep)
        found = Sweep._along(sweep, line)  # type: ignore[arg-type]
        count = len(asked)
        return found, losses(line), count

    counts = []
    for width in (4.0, 1.2, 0.01):
        found, truth, count = along(width)
        assert (found - truth).mean(1).abs().max() < 3e-4
        counts.append(count)
    assert counts[0] < counts[1] < counts[2]
    assert counts[0] < 20
    assert counts[2] > 102


def test_items_in_several_chunks_are_tuned_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descent goes backward through one chunk after the other."""
    net = dense.build(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)))
    x, y = dense.randn(120, 3, seed=1), torch.randint(4, (120,), generator=dense.seeded(2))
    la = lapwing.fit(net, (x[:60], y[:60]), "classification", structure="kron", progress=False)
    whole = la.tune((x[60:], y[60:])).tuning
    monkeypatch.setattr(heldout, "CHUNK", 2**14)  # 16 items
    parts = la.tune((x[60:], y[60:])).tuning
    assert whole.iterations > 0
    torch.testing.assert_close(parts.scores, whole.scores, rtol=1e-6, atol=1e-6)
