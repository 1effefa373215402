"""Prior and noise inside a training loop, against closed forms of linear-Gaussian models and brute force."""

import math

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.evidence.ascent import move
from lapwing.evidence.online import batch_bound
from lapwing.evidence.settings import partition
from lapwing.model import Batches, Network, Params


def regression(n: int = 60, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, dtype=torch.float64, generator=generator)
    w = torch.tensor([1.5, -0.7, 0.0, 0.2], dtype=torch.float64)[:d]
    return x, (x @ w + 0.3 * torch.randn(n, dtype=torch.float64, generator=generator))[:, None]


def exact_evidence(x: Tensor, y: Tensor, tau: Tensor, noise: float) -> Tensor:
    """log N(y; 0, σ²I + X diag(τ)⁻¹ Xᵀ)."""
    covariance = noise**2 * torch.eye(len(x), dtype=x.dtype) + (x / tau) @ x.T
    return torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=x.dtype), covariance).log_prob(y[:, 0])


def at_mode(x: Tensor, y: Tensor, tau: Tensor, noise: float) -> nn.Linear:
    model = nn.Linear(x.shape[1], 1, bias=False).double()
    ridge = x.T @ x + noise**2 * torch.diag(tau)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(ridge, x.T @ y).T)
    return model


@pytest.mark.parametrize("kind", ["scalar", "parameterwise"])
def test_alternating_with_the_exact_mode_ends_at_the_maximum_of_the_exact_evidence(kind: str) -> None:
    x, y = regression()
    online = lapwing.Online(lapwing.Gaussian(1.0), n_data=60, prior=kind, structure="full", bounds=(1e-3, 1e3))
    tau, noise = torch.ones(4, dtype=torch.float64), 1.0
    for _ in range(60):
        online = online.step(at_mode(x, y, tau, noise), (x, y))
        tau = online.belief.precision.expand(4)
        noise = float(online.likelihood.noise)
    assert online.belief.evidence == pytest.approx(exact_evidence(x, y, tau, noise).item(), abs=1e-8)
    logs = torch.cat([online.belief.precision.log(), torch.tensor([math.log(noise)])]).requires_grad_()
    value = exact_evidence(x, y, logs[:-1].exp().expand(4), logs[-1].exp())
    slope = torch.autograd.grad(value, logs)[0]
    free = torch.cat([online.belief.precision < 999, torch.tensor([True])])  # the idle input runs to the bound
    assert slope[free].abs().max() < 1e-3
    assert kind == "scalar" or online.belief.precision[2] > 100


def test_a_step_is_bounded_by_its_reach() -> None:
    x, y = regression()
    model = at_mode(x, y, torch.ones(4, dtype=torch.float64), 1.0)
    online = lapwing.Online(lapwing.Gaussian(5.0), n_data=60, prior="scalar", structure="full", start=1e4, reach=0.5)
    after = online.step(model, (x, y))
    assert after.belief.precision.item() == pytest.approx(1e4 * math.exp(-0.5))
    assert float(after.likelihood.noise) == pytest.approx(5.0 * math.exp(-0.25))
    assert online.belief.steps == 0


@pytest.mark.parametrize("kind", ["scalar", "layerwise", "unit", "input"])
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_a_long_reach_ends_where_the_evidence_is_flat(kind: str, structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(40, 3).double(), torch.randint(2, (40,))
    la = lapwing.fit(model, (x, y), "classification", structure=structure)
    groups = partition(kind, la.curvature.names, la.params)
    start = torch.ones(groups.count, dtype=torch.float64)
    found = move(la.belief, groups, start, reach=20.0, tolerance=1e-7)
    logs = found.precision.log().requires_grad_()
    value = la.replace(prior=lapwing.Prior(groups.expand(logs.exp()))).log_evidence()
    assert found.evidence == pytest.approx(value.item(), abs=1e-6)
    assert torch.autograd.grad(value, logs)[0].abs().max() < 1e-5
    online = lapwing.Online("classification", n_data=40, prior=kind, structure=structure, reach=20.0)
    belief = online.step(model, (x, y)).belief
    torch.testing.assert_close(belief.precision.log(), logs.detach(), atol=5e-3, rtol=0)


def test_units_share_rows_and_biases_and_inputs_share_columns() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    params = Params.of(model, tuple(name for name, _ in model.named_parameters()))
    blocks = (("0.weight", "0.bias"), ("2.weight", "2.bias"))
    units = partition("unit", blocks, params).index.tolist()
    assert units == [0, 0, 0, 1, 1, 1, 0, 1, 2, 2, 3, 3, 2, 3]
    inputs = partition("input", blocks, params).index.tolist()
    assert inputs == [0, 1, 2, 0, 1, 2, 3, 3, 4, 5, 4, 5, 6, 6]


def test_the_loss_is_the_log_joint_per_datum() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(10, 3).double(), torch.randn(10, 2).double()
    online = lapwing.Online(lapwing.Gaussian(0.5), n_data=10, start=3.0)
    joint = torch.distributions.Normal(model(x), 0.5).log_prob(y).sum()
    joint = joint - 1.5 * sum(p.square().sum() for p in model.parameters())
    assert online.loss(model, x, y).item() == pytest.approx(-0.25 * joint.item() / 10, rel=1e-6)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_the_penalty_of_a_posterior_is_its_quadratic_form(structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randint(2, (20,))
    la = lapwing.fit(model, (x, y), "classification", structure=structure)
    online = lapwing.Online("classification", n_data=20, prior=lapwing.Prior.from_posterior(la.posterior))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    offset = torch.cat([p.reshape(-1) for p in model.parameters()]) - la.params.flat
    expected = 0.5 * offset @ la.posterior.precision.dense() @ offset / 20
    assert online.penalty(model).item() == pytest.approx(expected.item(), rel=1e-6)
    online.penalty(model).backward()
    assert model[0].weight.grad is not None


def test_the_batch_bound_of_the_whole_data_is_the_evidence_and_of_parts_below_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(24, 3).double(), torch.randint(3, (24,))
    la = lapwing.fit(model, (x, y), "classification", structure="full", prior=0.7)
    exact = la.log_evidence().item()
    tau = torch.full((la.params.size,), 0.7, dtype=torch.float64)

    def bound(rows: slice) -> float:
        batch = next(iter(Batches((x[rows], y[rows]), model, torch.device("cpu"))))
        return batch_bound(
            la.network, la.plan, batch, la.likelihood, lapwing.GGN(), center=0 * tau, precision=tau, n_data=24
        ).item()

    assert bound(slice(None)) == pytest.approx(exact, abs=1e-8)
    parts = [bound(slice(k, k + 6)) for k in range(0, 24, 6)]
    assert sum(parts) / 4 < exact


def test_the_gradient_of_the_batch_bound_is_the_finite_difference() -> None:
    x, y = regression(12)
    model = at_mode(x, y, torch.ones(4, dtype=torch.float64), 1.0)
    network = Network(model, Params.of(model, ("weight",)), lapwing.Gaussian().outputs)
    batch = next(iter(Batches((x, y), model, torch.device("cpu"))))
    with network.borrow():
        plan = network.plan(x)

    def bound(point: Tensor) -> Tensor:
        return batch_bound(
            network, plan, batch, lapwing.Gaussian(point[-1].exp()), lapwing.GGN(),
            center=torch.zeros(4, dtype=torch.float64), precision=point[:4].exp(), n_data=30,
        )  # fmt: skip

    assert torch.autograd.gradcheck(bound, torch.randn(5, dtype=torch.float64).requires_grad_())


def test_steps_on_batches_go_uphill() -> None:
    x, y = regression()
    model = at_mode(x, y, torch.ones(4, dtype=torch.float64), 1.0)
    online = lapwing.Online(lapwing.Gaussian(2.0), n_data=60, prior="scalar", structure="batch", start=100.0)
    first = exact_evidence(x, y, torch.full((4,), 100.0).double(), 2.0)
    for _ in range(60):
        online = online.step(model, [(x, y)])
    last = exact_evidence(x, y, online.belief.precision.expand(4), float(online.likelihood.noise))
    assert last > first + 20


def test_the_module_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    lapwing.Online("classification", n_data=20).step(model, (x, y))
    assert all(m.training for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_subset_stands_for_all_data() -> None:
    x, y = regression(60)
    model = at_mode(x, y, torch.ones(4, dtype=torch.float64), 1.0)
    online = lapwing.Online(lapwing.Gaussian(0.3), 60, "scalar", structure="full", samples=30, learn=(), start=1.0)
    belief = online.step(model, [(x[:30], y[:30]), (x[30:], y[30:])]).belief
    la = lapwing.fit(model, (x[:30], y[:30]), lapwing.Gaussian(0.3), structure="full", n_data=60)
    assert belief.evidence == pytest.approx(la.log_evidence().item(), abs=1e-8)


def test_what_cannot_be_learned_is_refused() -> None:
    with pytest.raises(UnsupportedOperation, match="prior is one of"):
        lapwing.Online("classification", 10, prior="each")
    with pytest.raises(UnsupportedOperation, match="noise"):
        lapwing.Online("classification", 10, learn=("noise",))
    with pytest.raises(BadData, match="n_data"):
        lapwing.Online("classification", 0)
