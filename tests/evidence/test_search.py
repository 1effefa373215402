"""Tuning on held-out data: one pass against brute-force posteriors, and the choices that follow."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

import lapwing
from lapwing.errors import BadData, IncompatiblePrior, TooLarge, UnsupportedOperation
from lapwing.evidence import Groups, Rule, Setting, Trials, Tuning, linked, lowest, tune_validation, widest
from lapwing.evidence.heldout import Batch, Nodes
from lapwing.evidence.settings import baselines
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from lapwing.linalg import DenseRows, Diagonal
from lapwing.posterior import Prior, Tempered, factored_precision
from lapwing.predictive import GaussianFunction, predict_targets
from tests.evidence.problems import OF_THE_BELIEF, Problem, mlp

STRUCTURES = ("full", "diag", "blockdiag", "kron", "ekfac")


def held_out(problem: Problem, n: int = 40, size: int = 16, seed: int = 9) -> tuple[Tensor, list[Batch]]:
    """Inputs of which half are far from the training data, targets from a rougher truth, in batches."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, problem.x.shape[1], dtype=torch.float64, generator=generator)
    x[: n // 2] *= 3
    f, _ = problem.rows(x)
    noisy = f + torch.randn(f.shape, dtype=torch.float64, generator=generator)
    y = noisy if isinstance(problem.likelihood, Gaussian) else problem.likelihood.sample_target(noisy, generator)
    batches = []
    for k in range(0, n, size):
        part, rows = problem.rows(x[k : k + size])
        batches.append((part, y[k : k + size], rows))
    return x, batches


def groups_of(problem: Problem, kind: str) -> Groups:
    if kind == "layerwise":
        return Groups.layerwise(problem.names, problem.flat_names, problem.sizes)
    return Groups.scalar(problem.theta.numel())


def run(problem: Problem, structure: str, kind: str = "scalar", **kwargs: Any) -> Tuning:
    batches = kwargs.pop("batches", None) or held_out(problem)[1]
    groups = groups_of(problem, kind)
    given = {name: kwargs.pop(name) for name in OF_THE_BELIEF if name in kwargs}
    return tune_validation(problem.belief(groups, structure, **given), groups, batches, **kwargs)


def brute_force(
    problem: Problem, structure: str, prior: Prior, tempered: Tempered, likelihood: Likelihood, score: Any
) -> float:
    """The NLL from a posterior formed for this setting alone."""
    _, precision = prior.resolve(problem.flat_names, problem.sizes)
    scale = tempered.likelihood_scale(likelihood.dispersion)
    posterior = problem.matrix(structure).scale(scale) + precision.scale(tempered.prior_scale)
    total = count = 0.0
    for f, y, rows in held_out(problem)[1]:
        total -= score(f, posterior.quadratic(rows), y, likelihood).sum().item()
        count += len(f)
    return total / count


CASES = [(s, k, False) for s in STRUCTURES for k in ("scalar", "layerwise") if (s, k) != ("full", "layerwise")]


@pytest.mark.parametrize(("structure", "kind", "tempers_prior"), [*CASES, ("ekfac", "layerwise", True)])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5)], ids=lambda v: type(v).__name__)
def test_one_pass_equals_a_posterior_for_each_setting(
    likelihood: Likelihood, structure: str, kind: str, tempers_prior: bool
) -> None:
    problem = mlp(likelihood, outputs=3)
    learn = ("prior", "temperature", "dispersion") if isinstance(likelihood, Gaussian) else ("prior", "temperature")
    grid = {"prior": (1e-3, 0.1, 1e4), "temperature": (0.1, 100.0)}
    if "dispersion" in learn:
        grid["dispersion"] = (0.3, 1.2)
    tuning = run(problem, structure, kind, grid=grid, learn=learn, temperature=Tempered(1.0, tempers_prior), steps=3)
    plain = [s for s in tuning.settings if not s.deterministic]
    mixed = 0 if kind == "scalar" else 2 * len(groups_of(problem, kind).members)  # one block changed at a time
    assert len(plain) == (12 if "dispersion" in learn else 6) + mixed
    assert {tau for s in plain for tau in s.precision.tolist()} <= {*grid["prior"]}
    groups = groups_of(problem, kind)
    for setting, score in zip(tuning.settings, tuning.scores.tolist()):
        if setting.deterministic:
            continue
        same = likelihood if setting.dispersion is None else Gaussian(math.sqrt(setting.dispersion))
        tempered = Tempered(setting.temperature, tempers_prior)
        expected = brute_force(problem, structure, groups.prior(setting.precision), tempered, same, linked())
        assert score == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", ["scalar", "layerwise"])
def test_factored_damping_in_one_pass(kind: str) -> None:
    """Ritter's damped posterior, formed for each setting alone, scores what the sweep says."""
    problem = mlp(Categorical(), outputs=3)
    split = len(problem.x) ** 0.5
    grid = {"prior": (1e-3, 0.1, 1e2), "temperature": (0.1, 1.0, 100.0)}
    learn = ("prior", "temperature")
    tuning = run(problem, "kron", kind, grid=grid, learn=learn, steps=2, split=split)
    score, groups = linked(), groups_of(problem, kind)
    for setting, value in zip(tuning.settings, tuning.scores.tolist()):
        if setting.deterministic:
            continue
        _, prior = groups.prior(setting.precision).resolve(problem.flat_names, problem.sizes)
        posterior = factored_precision(problem.matrix("kron"), setting.temperature, prior, split=split)
        total = sum(
            score(f, posterior.quadratic(r), y, problem.likelihood).sum().item() for f, y, r in held_out(problem)[1]
        )
        assert value == pytest.approx(-total / 40, rel=1e-3, abs=1e-4)
    exact = run(problem, "kron", kind, grid=grid, learn=learn, steps=0)
    assert (tuning.scores[:9] - exact.scores[:9]).abs().max() > 1e-3


def test_nodes_carry_damped_factors() -> None:
    nodes = Nodes.spanning(1e-5, 1e5, 1e6, 1e4)
    rho = torch.logspace(-5, 5, 41, dtype=torch.float64)
    stated = nodes.error(rho)
    assert stated < 2e-3
    generator = torch.Generator().manual_seed(0)
    g, a = 10 ** (14 * torch.rand(2, 400, dtype=torch.float64, generator=generator) - 10)
    root, roots = rho.sqrt()[:, None], nodes.shifts.sqrt()
    kernels = 1 / ((g[:, None] + roots) * (a[:, None] + roots))  # (400, m)
    approximate = nodes.coefficients(rho) @ kernels.T
    assert (approximate * (g + root) * (a + root) - 1).abs().max() <= 1.5 * stated


def test_variances_are_within_the_stated_error() -> None:
    nodes = Nodes.spanning(1e-6, 1e6, 1e5)
    rho = torch.logspace(-6, 6, 97, dtype=torch.float64)
    stated = nodes.error(rho)
    assert stated < 1e-3
    e = 10 ** (20 * torch.rand(5000, dtype=torch.float64) - 15)
    approximate = (nodes.coefficients(rho)[:, None] / (e[:, None] + nodes.shifts)).sum(-1)
    exact = 1 / (e + rho[:, None])
    assert (approximate / exact - 1).abs().max() <= 1.05 * stated


def test_node_coefficients_are_differentiable() -> None:
    nodes = Nodes.spanning(1e-1, 1e1, 10.0)
    rho = torch.tensor([0.3, 4.0], dtype=torch.float64, requires_grad=True)
    e = torch.tensor([0.0, 0.5, 9.0], dtype=torch.float64)

    def kernel(rho: Tensor) -> Tensor:
        return (nodes.coefficients(rho)[:, None] / (e[:, None] + nodes.shifts)).sum(-1)

    assert torch.autograd.gradcheck(kernel, rho, atol=1e-6)
    (slope,) = torch.autograd.grad(kernel(rho).sum(), rho)
    expected = -(1 / (e + rho.detach()[:, None]).square()).sum(1)
    torch.testing.assert_close(slope, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", ["scalar", "layerwise"])
def test_descent_improves_on_the_grid_and_is_stationary(kind: str) -> None:
    problem = mlp(Categorical(), outputs=3)
    tuning = run(problem, "ekfac", kind, steps=60, learn=("prior", "temperature"))
    grid = [s for s, setting in zip(tuning.scores.tolist(), tuning.settings) if not setting.deterministic][:-1]
    refined = tuning.settings[-2]
    assert tuning.scores[-2] <= min(grid) + 1e-9
    assert tuning.iterations > 0
    if kind == "layerwise":
        assert refined.precision[0] != refined.precision[1]
    groups = groups_of(problem, kind)
    centre = tuning.scores[-2].item()
    for factor in (0.8, 1.25):
        moved = groups.prior(refined.precision * factor)
        nearby = brute_force(problem, "ekfac", moved, Tempered(refined.temperature), problem.likelihood, linked())
        assert nearby > centre - 5e-4


def test_regression_learns_the_noise() -> None:
    problem = mlp(Gaussian(5.0))
    tuning = run(problem, "full", learn=("prior", "dispersion"))
    assert isinstance(tuning.likelihood, Gaussian)
    assert float(tuning.likelihood.noise) < 2.0
    fixed = run(problem, "full", learn=("prior",))
    assert tuning.score < fixed.score - 0.1
    assert tuning.score <= tuning.baselines["MAP, noise fitted"]


def test_temperature_alone_keeps_a_layerwise_prior() -> None:
    problem = mlp(Categorical(), outputs=3)
    start = torch.tensor([0.5, 8.0])
    tuning = run(problem, "kron", "layerwise", start=start, learn=("temperature",))
    for setting in tuning.settings[:-1]:
        torch.testing.assert_close(setting.precision, start.double(), rtol=1e-6, atol=0)
    assert len({s.temperature for s in tuning.settings[:-1]}) == 7


def test_deterministic_limit_wins_and_says_so() -> None:
    """Targets that are always the network's own label: every widening hurts."""
    problem = mlp(Categorical(), outputs=3, scale=3.0)
    sure = [(f, f.argmax(-1), rows) for f, _, rows in held_out(problem)[1]]
    grid = {"prior": (0.1, 1.0, 10.0), "temperature": (1.0,)}
    held = run(problem, "full", batches=sure, grid=grid, learn=("prior", "temperature"), steps=0)
    assert not held.deterministic
    assert held.setting.precision.item() == 10.0
    tuning = run(problem, "full", batches=sure, grid={"temperature": (1.0,)}, learn=("prior", "temperature"), steps=0)
    assert tuning.deterministic
    assert tuning.score == pytest.approx(tuning.baselines["MAP"])
    assert "the network without a posterior was chosen" in tuning.messages[0]
    _, precision = tuning.prior.resolve(problem.flat_names, problem.sizes)
    rows = sure[0][2]
    wide = (problem.matrix("full") + precision).quadratic(rows)
    assert wide.abs().max() < 1e-6
    assert "deterministic" in tuning.table()


def trials(*rows: list[float]) -> Trials:
    """Settings with precision 0.1, 1, 10, … and these losses; the last is the network as it is."""
    last = Setting(torch.empty(0), deterministic=True)
    settings = (*(Setting(torch.tensor([10.0 ** (k - 1)])) for k in range(len(rows) - 1)), last)
    return Trials(settings, torch.tensor(rows, dtype=torch.float64), {}, len(rows) - 1)


def few(margin: float = 0.002, errors: float = 1.0, sure: float = 2.0) -> Rule:
    """The rule at work on four items."""
    return widest(margin, errors, sure, least=2)


def test_widest_rule() -> None:
    """The widest setting whose paired excess over the best, with its standard error, stays within the margin."""
    best = [1.0, 2.0, 3.0, 4.0]
    noisy = [1.4, 1.7, 3.4, 3.7]  # excess 0.05, standard error 0.202
    steady = [1.1, 2.1, 3.1, 4.1]  # excess 0.1 on every item: no error at all
    poor = [2.0, 3.0, 4.0, 5.0]
    assert lowest(trials(steady, noisy, best, poor)) == 2
    assert few(0.12)(trials(noisy, steady, best, poor)) == 1
    assert few(0.26)(trials(noisy, steady, best, poor)) == 0
    assert few(0.12, errors=0.0)(trials(noisy, steady, best, poor)) == 0
    assert few()(trials(noisy, steady, best, poor)) == 2
    found = trials(noisy, steady, best, poor)
    mean, error = found.excess(found.losses[2])
    torch.testing.assert_close(mean, torch.tensor([0.05, 0.1, 0.0, 1.0]).double())
    difference = torch.tensor(noisy).double() - torch.tensor(best).double()
    spread = ((difference - difference.mean()).square().sum() / 3).sqrt()  # n − 1
    assert error[0].item() == pytest.approx(spread.item() / 2)


def test_one_datum_chooses_nothing() -> None:
    """However much a setting gains on it: its spread is unknown."""
    found = trials([0.1], [0.5], [9.0])
    assert found.gain(0) == (pytest.approx(8.9), math.inf)
    assert widest()(found) == 2


def test_a_start_outside_its_range_is_moved_inside() -> None:
    """Logits of an overconfident network ask for more than the range holds; nothing that was tried is NaN."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    net[2].weight.data *= 20
    data = (torch.randn(50, 4), torch.randint(3, (50,)))  # labels it knows nothing about
    tuning = lapwing.fit(net, data, "classification", structure="kron").tune(data).tuning
    for setting in tuning.settings:
        assert bool(setting.precision.isfinite().all())
        assert math.isfinite(setting.temperature)
        assert math.isfinite(setting.logit_temperature)
    assert not any("nan" in message for message in tuning.messages)


def test_widest_rule_leaves_the_network_only_for_a_gain_that_shows() -> None:
    home = [1.0, 2.0, 3.0, 4.0]
    lucky = [0.5, 2.4, 2.5, 4.4]  # gain 0.05, standard error 0.26
    same = [1.0005, 2.0005, 3.0005, 4.0005]
    assert lowest(trials(lucky, home)) == 0
    assert few()(trials(lucky, home)) == 1
    assert few(sure=0.1)(trials(lucky, home)) == 0
    assert few()(trials(lucky, same, home)) == 1  # not worse than the network, to within the margin
    assert widest()(trials(lucky, same, home)) == 2  # four items show nothing


def test_widest_rule_compares_with_the_repaired_network() -> None:
    """A gain over the network as it is does not count where temperature scaling has it too."""
    home, scaled = [2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0]
    lucky = [0.5, 2.4, 2.5, 4.4]
    found = trials(lucky, scaled, home)
    assert few()(found) == 0  # by itself
    assert few()(replace(found, reference=1)) == 1


def test_widest_rule_chooses_among_the_equals_of_the_lowest() -> None:
    problem = mlp(Categorical(), outputs=3, scale=0.5)
    draw = lambda f: problem.likelihood.sample_target(f, torch.Generator().manual_seed(1))  # noqa: E731
    own = [(f, draw(f), rows) for f, _, rows in held_out(problem)[1]]
    learn = ("prior", "temperature")
    narrow = run(problem, "ekfac", batches=own, learn=learn)
    wide = run(problem, "ekfac", rule=widest(0.01), batches=own, learn=learn)
    assert wide.setting.narrow < narrow.setting.narrow
    assert any("more per item" in message for message in wide.messages)
    torch.testing.assert_close(wide.scores, narrow.scores)


def test_logits_are_divided_by_default() -> None:
    """Overconfident logits are divided, with as few items as there are; right ones hardly."""
    problem = mlp(Categorical(), outputs=3, scale=0.5)
    draw = lambda f: problem.likelihood.sample_target(f, torch.Generator().manual_seed(2))  # noqa: E731
    calm = [(f, draw(f), rows) for f, _, rows in held_out(problem)[1]]
    loud = [(8 * f, y, rows) for f, y, rows in calm]
    grid = {"prior": (1.0, 100.0), "temperature": (1.0,)}
    for batches, low, high in ((calm, 0.4, 1.7), (loud, 2.0, 20.0)):
        divided = [s for s in run(problem, "diag", batches=batches, grid=grid).settings if not s.deterministic]
        assert low < min(s.logit_temperature for s in divided) < high


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("items", [1, 3, 19])
def test_hardly_any_items_make_nothing_absurd(items: int, right: bool) -> None:
    """Temperature scaling of items that are all classified right is infinitely sure; here the scale is held."""
    problem = mlp(Categorical(), outputs=3, scale=3.0)
    f, _, rows = held_out(problem, n=items, size=items)[1][0]
    y = f.argmax(-1) if right else f.argmin(-1)
    tuning = run(problem, "full", batches=[(f, y, rows)], rule=widest())
    assert tuning.deterministic
    assert 0.1 < tuning.setting.logit_temperature < 20.0

    def penalized(s: float) -> float:
        return -problem.likelihood.log_prob(f / s, y).sum().item() + math.log(s) ** 2 / 2

    s = tuning.setting.logit_temperature
    assert penalized(s) < min(penalized(0.99 * s), penalized(1.01 * s))


def test_one_item_does_not_set_the_noise() -> None:
    problem = mlp(Gaussian(), outputs=1)
    f, _, rows = held_out(problem, n=1, size=1)[1][0]
    tuning = run(problem, "full", batches=[(f, f.clone(), rows)], rule=widest())
    assert tuning.likelihood.dispersion.item() == pytest.approx(2 / 3)  # the noise in force counts as two items


def test_a_not_a_number_is_never_chosen() -> None:
    broken = [float("nan")] * 3
    assert lowest(trials(broken, [1.0] * 3, [2.0] * 3)) == 1
    assert few()(trials(broken, [1.0] * 3, [2.0] * 3)) == 1


@pytest.mark.parametrize("structure", ["ekfac", "full"])
def test_logit_temperature_against_brute_force(structure: str) -> None:
    """Each score is that of a posterior formed for the setting, its logits divided; the best is a minimum."""
    problem = mlp(Categorical(), outputs=3, scale=3.0)
    learn = ("prior", "temperature", "logit_temperature")
    tuning = run(problem, structure, learn=learn, grid={"prior": (0.1, 10.0), "temperature": (1.0, 100.0)})

    def divided(s: float) -> Any:
        score = linked()
        return lambda f, v, y, likelihood: score(f / s, v / s**2, y, likelihood)

    groups = groups_of(problem, "scalar")
    posteriors = [k for k, s in enumerate(tuning.settings) if not s.deterministic]
    for k in posteriors:
        s = tuning.settings[k]
        prior, tempered = groups.prior(s.precision), Tempered(s.temperature)
        expected = brute_force(problem, structure, prior, tempered, problem.likelihood, divided(s.logit_temperature))
        assert tuning.scores[k].item() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    limit, home = [k for k, s in enumerate(tuning.settings) if s.deterministic]
    assert tuning.scores[home].item() == pytest.approx(tuning.baselines["MAP"])
    best = tuning.baselines["temperature scaling"]
    assert best <= tuning.scores[limit].item() <= best + 0.01  # held near what it was
    assert tuning.score <= best + 1e-9
    chosen = tuning.setting
    for factor in (0.9, 1.1):
        s = chosen.logit_temperature * factor
        prior, tempered = groups.prior(chosen.precision), Tempered(chosen.temperature)
        there = brute_force(problem, structure, prior, tempered, problem.likelihood, divided(s))
        center = tuning.settings[limit].logit_temperature  # near temperature scaling, by 40 items together
        held = [2 * (math.log(each) - math.log(center)) ** 2 / 40 for each in (s, chosen.logit_temperature)]
        assert there + held[0] > tuning.score + held[1] - 2e-4


def test_candidates_of_the_logit_temperature() -> None:
    problem = mlp(Categorical(), outputs=3)
    grid = {"prior": (1.0,), "logit_temperature": (0.5, 2.0)}
    tuning = run(problem, "diag", learn=("prior", "logit_temperature"), grid=grid, steps=0)
    assert [s.logit_temperature for s in tuning.settings[:2]] == [0.5, 2.0]
    kept = run(problem, "diag", learn=("prior",), grid={"prior": (1.0,)}, logit_temperature=2.0, steps=0)
    assert kept.scores[0].item() == pytest.approx(tuning.scores[1].item())
    assert kept.logit_temperature == 2.0
    with pytest.raises(UnsupportedOperation, match="divides logits"):
        run(mlp(Gaussian(0.3)), "diag", learn=("logit_temperature",))


def test_score_is_that_of_the_prediction() -> None:
    """The faster way for classes converges to the prediction's own log_prob; every other link goes through it."""
    problem = mlp(Categorical(), outputs=3)
    posterior = problem.matrix("full") + Diagonal(torch.ones(problem.theta.numel()).double())
    f, y, rows = held_out(problem)[1][0]
    covariance = posterior.quadratic(rows)
    function = GaussianFunction(f, covariance)
    for link, samples, tolerance in (("auto", 4096, 3e-3), ("probit", 256, 0.0), ("bridge", 256, 0.0)):
        expected = predict_targets(function, problem.likelihood, link=link, samples=samples).log_prob(y)
        got = linked(link, samples)(f, covariance, y, problem.likelihood)
        torch.testing.assert_close(got, expected, rtol=0, atol=max(tolerance, 1e-12))
    ignored = torch.where(torch.arange(len(y)) < 3, -100, y)
    got = linked()(f, covariance, ignored, problem.likelihood)
    assert (got[:3] == 0).all()
    torch.testing.assert_close(got[3:], linked()(f, covariance, y, problem.likelihood)[3:])


def test_a_variance_that_all_logits_share_is_harmless() -> None:
    """In float32 it drowns the differences that count; the score must be that of the differences alone."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(50, 4, 4, generator=generator)
    f, y = torch.randn(50, 4, generator=generator), torch.randint(4, (50,), generator=generator)
    inner = root @ root.mT
    for level in (1e2, 1e4):
        got = linked()(f, inner + level, y, Categorical())
        torch.testing.assert_close(got, linked()(f, inner, y, Categorical()), rtol=0, atol=5e-6 * level)


def test_gaussian_score_is_the_closed_form() -> None:
    problem = mlp(Gaussian(0.5))
    posterior = problem.matrix("full").scale(4.0) + Diagonal(torch.ones(problem.theta.numel()).double())
    f, y, rows = held_out(problem)[1][0]
    covariance = posterior.quadratic(rows)
    normal = MultivariateNormal(f, covariance + 0.25 * torch.eye(2).double())
    torch.testing.assert_close(linked()(f, covariance, y, problem.likelihood), normal.log_prob(y))


def test_baselines() -> None:
    problem = mlp(Categorical(), outputs=3, scale=4.0)
    f = torch.cat([b[0] for b in held_out(problem)[1]])
    y = torch.cat([b[1] for b in held_out(problem)[1]])
    rivals = baselines(f, y, problem.likelihood, dispersion=False)
    found = {name: losses.mean().item() for name, losses in rivals.items()}
    cross_entropy = torch.nn.functional.cross_entropy
    assert found["MAP"] == pytest.approx(cross_entropy(f, y).item())
    tried = [cross_entropy(f * s, y).item() for s in torch.logspace(-2, 2, 2001).tolist()]
    assert found["temperature scaling"] == pytest.approx(min(tried), abs=1e-4)
    assert found["temperature scaling"] <= min(tried) + 1e-9
    regression = mlp(Gaussian(0.5))
    f, y = regression.f, regression.y
    found = {name: losses.mean().item() for name, losses in baselines(f, y, Gaussian(0.5), dispersion=True).items()}
    tried = [-Gaussian(s).log_prob(f, y).mean().item() for s in torch.logspace(-2, 1, 2001).tolist()]
    assert found["MAP, noise fitted"] == pytest.approx(min(tried), abs=1e-5)


def test_other_likelihoods_and_event_dimensions() -> None:
    binary = mlp(Bernoulli(), outputs=2)
    assert run(binary, "ekfac", grid={"prior": (0.1, 10.0), "temperature": (1.0, 10.0)}, steps=2).score > 0
    problem = mlp(Categorical(), outputs=6)
    tokens = replace(problem, likelihood=Categorical())
    f, _, rows = held_out(problem, n=12, size=12)[1][0]
    batch = (f.reshape(12, 2, 3), torch.arange(24).reshape(12, 2) % 3, rows)
    batch[1][0, 0] = -100
    groups = groups_of(problem, "scalar")
    tuning = tune_validation(
        tokens.belief(groups, "ekfac"),
        groups,
        [batch],
        grid={"prior": (0.3,), "temperature": (2.0,)},
        learn=("prior", "temperature"),
        steps=0,
    )
    posterior = problem.matrix("ekfac").scale(2.0) + Diagonal(torch.full((problem.theta.numel(),), 0.3).double())
    whole = posterior.quadratic(rows).reshape(12, 2, 3, 2, 3)
    covariance = torch.stack([whole[:, 0, :, 0], whole[:, 1, :, 1]], 1)
    total = linked()(batch[0].reshape(24, 3), covariance.reshape(24, 3, 3), batch[1].reshape(24), tokens.likelihood)
    assert tuning.scores[0].item() == pytest.approx(-total.sum().item() / 23, rel=1e-4)


def test_memory_and_refusals() -> None:
    problem = mlp(Categorical(), outputs=3)
    with pytest.raises(TooLarge, match="prior='scalar'"):
        run(problem, "ekfac", memory=10_000)
    with pytest.raises(IncompatiblePrior, match="Dense block spans several"):
        run(problem, "full", "layerwise")
    with pytest.raises(UnsupportedOperation, match="no dispersion"):
        run(problem, "full", learn=("dispersion",))
    with pytest.raises(ValueError, match="can choose"):
        run(problem, "full", learn=("depth",))
    with pytest.raises(ValueError, match="not in learn"):
        run(problem, "full", learn=("prior",), grid={"temperature": (1.0,)})
    with pytest.raises(ValueError, match="positive"):
        run(problem, "full", grid={"prior": (0.0, 1.0)})
    with pytest.raises(BadData, match="no batch"):
        run(problem, "full", batches=iter(()))
    gaussian = mlp(Gaussian(0.3))
    with pytest.raises(BadData, match="no batch"):
        run(gaussian, "full", batches=iter(()), learn=("dispersion",))
    f, y, rows = held_out(problem)[1][0]
    with pytest.raises(ValueError, match="do not fit outputs"):
        run(problem, "full", batches=[(f[:2], y[:2], rows)])


def test_data_are_read_once() -> None:
    problem = mlp(Gaussian(0.5))

    def once() -> Iterator[Batch]:
        yield from held_out(problem)[1]

    tuning = run(problem, "full", batches=once(), learn=("prior", "dispersion"))
    assert len(tuning.settings) == 10 * 15 + 3


def test_dense_rows_serve_every_structure() -> None:
    problem = mlp(Categorical(), outputs=3)
    factored = held_out(problem)[1]
    dense = [(f, y, DenseRows(rows.dense())) for f, y, rows in factored]
    grid = {"prior": (0.1, 10.0), "temperature": (1.0,)}
    for structure in STRUCTURES:
        a, b = (run(problem, structure, batches=batches, grid=grid, steps=0) for batches in (factored, dense))
        torch.testing.assert_close(a.scores, b.scores)
