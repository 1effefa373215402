"""Candidates side by side, with fitted networks."""

import pytest
import torch
from torch import Tensor, nn

from lapwing.errors import BadData
from lapwing.evidence.compare import Comparison, compare
from lapwing.fitting import fit


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
