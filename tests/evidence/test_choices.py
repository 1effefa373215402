"""What held-out data may choose: the temperature only where it is of use, priors between those of the grid."""

import math
from dataclasses import replace

import pytest
import torch

from lapwing.evidence import Groups, Setting, collect, linked, tune_validation, widest
from lapwing.evidence.heldout import Batch, GramSweep, Nodes
from lapwing.evidence.search import fit_logits, tells_apart, wider
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.linalg import DenseRows, Diagonal
from tests.evidence.problems import Handmade, believed, mlp
from tests.evidence.test_search import held_out, run

KNOWN, N = 4, 60  # weights that the data determine, of 8; held-out items


def two_spaces(unequal: bool, likelihood: Likelihood, outputs: int) -> tuple[Handmade, list[Batch]]:
    """A linear model whose data determine the first half of the weights; inputs reach the other half with a share that
    is the same for all, or differs a hundredfold."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    known, rest = (each / each.norm(dim=1, keepdim=True) for each in (draw(N, KNOWN), draw(N, KNOWN)))
    share = 10 ** draw(N, 1).clamp(-1, 1) if unequal else 1.0
    x = torch.cat([known, 0.01 * share * rest], 1) * (0.3 * draw(N, 1)).exp()
    jacobian = torch.einsum("np,ck->nckp", x, torch.eye(outputs).double()).flatten(2)
    curvature = torch.cat([torch.full((KNOWN,), 1e3), torch.zeros(KNOWN)]).double().repeat(outputs)
    f = draw(N, outputs)
    y = likelihood.sample_target(f, generator)
    return Handmade(Diagonal(curvature), torch.zeros(1)), [(f, y, DenseRows(jacobian))]


def sweep_of(curvature: Handmade, batches: list[Batch], likelihood: Likelihood, nodes: Nodes) -> GramSweep:
    groups = Groups.scalar(batches[0][2].size)
    belief = believed(curvature, likelihood, groups, torch.zeros(groups.size))
    return collect(belief, groups, batches, nodes, score=linked(), memory=2**30)


@pytest.mark.parametrize(
    ("likelihood", "outputs"), [(Categorical(), 3), (Gaussian(0.5), 1)], ids=["classes", "numbers"]
)
@pytest.mark.parametrize("unequal", [False, True])
def test_temperature_is_kept_where_the_null_space_tells_no_inputs_apart(
    likelihood: Likelihood, outputs: int, unequal: bool
) -> None:
    curvature, batches = two_spaces(unequal, likelihood, outputs)
    groups = Groups.scalar(batches[0][2].size)
    belief = believed(curvature, likelihood, groups, torch.zeros(groups.size))
    tuning = tune_validation(belief, groups, batches, rule=widest())
    tried = {setting.temperature for setting in tuning.settings}
    assert (len(tried) > 1) == unequal
    assert any("the temperature is kept" in message for message in tuning.messages) != unequal
    told = tune_validation(belief, groups, batches, learn=("prior", "temperature"), steps=0)
    assert len({setting.temperature for setting in told.settings}) == 6
    given = tune_validation(belief, groups, batches, grid={"temperature": (1.0, 7.0)}, steps=0)
    assert {setting.temperature for setting in given.settings} == {1.0, 7.0}


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5)], ids=lambda v: type(v).__name__)
def test_spreads_are_those_of_dense_variances(likelihood: Likelihood) -> None:
    problem = mlp(likelihood, outputs=3)
    nodes = Nodes.spanning(1e-2, 1e3, 1e3)
    batches = held_out(problem)[1]
    spreads = sweep_of(problem.curvature("full"), batches, likelihood, nodes).spreads()
    eye = torch.eye(problem.theta.numel()).double()
    free = torch.eye(3).double() - (1 / 3 if isinstance(likelihood, Categorical) else 0.0)
    jacobian = torch.cat([rows.dense().reshape(rows.n, 3, -1) for _, _, rows in batches])
    for rho, got in zip(nodes.shifts, spreads, strict=True):
        covariance = jacobian @ torch.linalg.inv(problem.ggn + rho * eye) @ jacobian.mT
        variances = torch.einsum("cd,nde,ec->n", free, covariance, free)
        assert got.item() == pytest.approx(variances.log().std().item(), rel=1e-6)


def test_rounding_is_not_a_spread() -> None:
    """A variance that all logits share drowns the rest in float32; such shifts do not count."""
    nodes = Nodes.spanning(1.0, 10.0, 1.0)
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(20, 3, 3, generator=generator)
    own = (root @ root.mT)[:, *torch.tril_indices(3, 3)]
    level = torch.logspace(8, 0, len(nodes.shifts))[:, None, None]
    f, y = torch.zeros(20, 3), torch.zeros(20).long()
    sweep = GramSweep(f, y, nodes, Categorical(), 1, False, (own + level)[None], linked())
    spreads = sweep.spreads()
    assert spreads[0].isnan()
    torch.testing.assert_close(spreads[-1], spreads[-2], rtol=1e-3, atol=0)
    assert not tells_apart(sweep)


def test_half_way_to_the_next_wider() -> None:
    def at(tau: float, T: float = 1.0, s: float = 1.0) -> Setting:
        return Setting(torch.tensor([tau]).double(), T, logit_temperature=s)

    tried = [at(1.0, s=4.0), at(0.01), at(10.0, T=2.0), at(100.0), replace(at(5.0), deterministic=True)]
    found = wider(tried[3], tried)
    assert found is not None
    assert (found.narrow, found.temperature, found.logit_temperature) == (pytest.approx(10.0), 1.0, pytest.approx(2.0))
    assert wider(tried[1], tried) is None
    assert wider(tried[2], tried) is None


def test_the_widest_prior_is_found_between_those_of_the_grid() -> None:
    """The chosen prior passes the test; one an eighth of the grid's step wider does not."""
    problem = mlp(Categorical(), outputs=3, scale=0.5)
    draw = lambda f: problem.likelihood.sample_target(f, torch.Generator().manual_seed(1))  # noqa: E731
    own = [(f, draw(f), rows) for f, _, rows in held_out(problem)[1]]
    rule = widest(0.01)
    tuning = run(problem, "ekfac", batches=own, learn=("prior",), rule=rule)
    grid = {"prior": (tuning.setting.narrow / 10 ** (1 / 8), tuning.setting.narrow)}
    assert tuning.setting.narrow not in [10.0**k for k in range(-4, 6)]
    pair = run(problem, "ekfac", batches=own, learn=("prior",), rule=rule, grid=grid, steps=0)
    assert pair.setting.narrow == pytest.approx(tuning.setting.narrow)


def test_scores_far_beyond_the_range_of_exponentials() -> None:
    """Where f_c − f_y overflows, log p is still that of logarithms: −(f_c − f_y) for a narrow posterior."""
    f = torch.tensor([[0.0, 300.0, 0.0], [5.0, 0.0, 0.0]])
    y = torch.tensor([0, 0])
    got = linked()(f, 1e-8 * torch.eye(3).expand(2, 3, 3), y, Categorical())
    expected = f.log_softmax(-1)[torch.arange(2), y]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_logits_beyond_the_bar_are_left() -> None:
    problem = mlp(Categorical(), outputs=3, scale=3.0)
    nodes = Nodes.spanning(1e-2, 1e3, 1e3)
    sweep = sweep_of(problem.curvature("full"), held_out(problem)[1], Categorical(), nodes)
    setting = Setting(torch.ones(1).double())
    assert fit_logits(sweep, [setting], bar=0.0)[0] is setting
    (better,) = fit_logits(sweep, [setting])
    assert math.isfinite(better.logit_temperature)
    assert sweep.losses([better]).mean() < sweep.losses([setting]).mean()
