"""`lapwing.train`: modes, resuming, early stopping, and where it ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import BadData, CorruptFile


def problem(seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    x = torch.randn(48, 3)
    y = (x[:, 0] + 0.3 * torch.randn(48) > 0).long()
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 2)), (x, y)


def loader(data: tuple[Tensor, Tensor], seed: int = 0) -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(seed)
    dataset = torch.utils.data.TensorDataset(*data)
    return torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, generator=generator)


def test_linear_regression_ends_at_the_maximum_of_the_exact_evidence() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3).double()
    y = (x @ torch.tensor([1.0, -0.5, 0.2]).double() + 0.4 * torch.randn(50).double())[:, None]
    model = nn.Linear(3, 1, bias=False).double()
    made = lambda p: torch.optim.LBFGS(p, lr=1.0, tolerance_grad=1e-12, tolerance_change=1e-15)  # noqa: E731
    trained = lapwing.train(
        model,
        (x, y),
        "regression",
        epochs=25,
        burnin=0,
        optimizer=made,
        prior="scalar",
        structure="full",
        batch_size=50,
    )
    tau = torch.tensor(float(trained.laplace.prior.precision)).double().log().requires_grad_()
    noise = torch.as_tensor(trained.laplace.likelihood.noise).double().log().requires_grad_()
    covariance = (2 * noise).exp() * torch.eye(50).double() + x @ x.T / tau.exp()
    exact = torch.distributions.MultivariateNormal(torch.zeros(50).double(), covariance).log_prob(y[:, 0])
    assert trained.laplace.log_evidence().item() == pytest.approx(exact.item(), abs=1e-6)
    assert max(g.abs().item() for g in torch.autograd.grad(exact, (tau, noise))) < 1e-3


def test_the_module_trains_in_training_mode_and_comes_back_in_its_own() -> None:
    model, data = problem()
    model.eval()
    modes: list[tuple[bool, bool]] = []
    model[2].register_forward_hook(lambda m, i, o: modes.append((m.training, torch.is_grad_enabled())))
    lapwing.train(model, data, "classification", epochs=4, batch_size=16, burnin=0)
    assert not any(m.training for m in model.modules())
    assert modes.count((True, True)) == 12  # every optimizer step, also after the evidence looked in eval mode
    assert any(not training for training, _ in modes)


@pytest.mark.parametrize("kind", ["tensors", "loader"])
@pytest.mark.parametrize("prior", ["layerwise", "parameterwise"])
def test_resuming_is_exact(kind: str, prior: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "prior": prior,
        "structure": "diag",
        "every": 2,
        "burnin": 3,
        "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    }

    def run(epochs: int, folder: Path) -> lapwing.Trained:
        model, data = problem()
        torch.manual_seed(1)
        given: Any = data if kind == "tensors" else loader(data)
        return lapwing.train(
            model, given, "classification", epochs=epochs, checkpoint=folder, batch_size=16, keep="last", **options
        )

    whole = run(6, tmp_path / "whole")
    run(2, tmp_path / "parts")
    resumed = run(6, tmp_path / "parts")
    assert torch.equal(whole.laplace.params.flat, resumed.laplace.params.flat)
    assert torch.equal(whole.online.belief.precision, resumed.online.belief.precision)
    assert [m.evidence for m in whole.history] == [m.evidence for m in resumed.history]


def test_a_finished_training_is_read_back(tmp_path: Path) -> None:
    model, data = problem()
    first = lapwing.train(model, data, "classification", epochs=3, checkpoint=tmp_path)
    again = lapwing.train(problem(1)[0], data, "classification", epochs=3, checkpoint=tmp_path)
    assert torch.equal(first.laplace.params.flat, again.laplace.params.flat)


def test_another_training_and_broken_files_are_refused(tmp_path: Path) -> None:
    model, data = problem()
    lapwing.train(model, data, "classification", epochs=1, checkpoint=tmp_path)
    with pytest.raises(BadData, match="prior"):
        lapwing.train(model, data, "classification", epochs=1, checkpoint=tmp_path, prior="scalar")
    (tmp_path / "train.pt").write_bytes(b"no")
    with pytest.raises(CorruptFile, match="delete"):
        lapwing.train(model, data, "classification", epochs=1, checkpoint=tmp_path)


def test_it_stops_when_the_evidence_falls_and_returns_the_best_weights() -> None:
    model, data = problem()
    rise = lambda p: torch.optim.SGD(p, 0.3, maximize=False)  # noqa: E731
    worse = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 if e < 8 else -3.0)  # noqa: E731
    trained = lapwing.train(
        model, data, "classification", epochs=60, optimizer=rise, scheduler=worse, patience=4, burnin=0, samples=None
    )
    scores = [m.evidence for m in trained.history]
    assert trained.stopped
    assert len(scores) < 60
    assert scores.index(max(scores)) == len(scores) - 5
    assert trained.laplace.log_evidence().item() == pytest.approx(max(scores), abs=1e-3)


def test_validation_can_choose_the_weights() -> None:
    model, data = problem()
    val = (torch.randn(20, 3), torch.randint(2, (20,)))
    trained = lapwing.train(model, data, "classification", epochs=12, val=val, keep="validation", burnin=0)
    best = min(m.nll for m in trained.history)
    with torch.no_grad():
        nll = nn.functional.cross_entropy(model.eval()(val[0]), val[1]).item()
    assert nll == pytest.approx(best, rel=1e-5)
    assert f"{best:.4g}" in trained.table()


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "unit", "parameterwise"])
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "batch"])
def test_every_prior_and_structure_trains(prior: str, structure: str) -> None:
    if (structure, prior) in {("kron", "parameterwise"), ("ekfac", "parameterwise"), ("ekfac", "unit")}:
        with pytest.raises(lapwing.IncompatiblePrior):
            _ = _trained(prior, structure)
        return
    trained = _trained(prior, structure)
    assert all(m.evidence < 0 for m in trained.history)
    assert trained.laplace.predict(torch.randn(4, 3)).probs.shape == (4, 2)


def _trained(prior: str, structure: str) -> lapwing.Trained:
    model, data = problem()
    return lapwing.train(model, data, "classification", epochs=4, burnin=0, prior=prior, structure=structure)


def test_a_fixed_prior_stays_and_weight_decay_is_refused() -> None:
    model, data = problem()
    trained = lapwing.train(model, data, "classification", epochs=3, prior=7.0)
    assert float(trained.laplace.prior.precision) == 7.0
    with pytest.raises(BadData, match="weight_decay=0"):
        lapwing.train(
            model, data, "classification", epochs=1, optimizer=lambda p: torch.optim.SGD(p, 0.1, weight_decay=1e-4)
        )
    with pytest.raises(BadData, match="val="):
        lapwing.train(model, data, "classification", epochs=1, keep="validation")
    with pytest.raises(BadData, match="epochs"):
        lapwing.train(model, data, "classification", epochs=0)


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "ekfac"])
def test_a_chain_of_posteriors_is_the_posterior_of_all_data(structure: str) -> None:
    torch.manual_seed(0)
    x = torch.linalg.qr(torch.randn(40, 3).double())[0] if structure == "diag" else torch.randn(40, 3).double()
    y = (x @ torch.tensor([1.0, -0.5, 0.2]).double())[:, None] + 0.3 * torch.randn(40, 1).double()
    if structure == "diag":  # orthogonal inputs in both halves, so that nothing is lost
        x = torch.eye(3).double().repeat(14, 1)[:40]
    model, prior = nn.Linear(3, 1, bias=False).double(), lapwing.Prior(2.0)
    for rows in (slice(0, 20), slice(20, 40)):
        trained = lapwing.train(
            model, (x[rows], y[rows]), lapwing.Gaussian(0.3), epochs=3, batch_size=20, prior=prior, learn=(),
            structure=structure, keep="last",
            optimizer=lambda p: torch.optim.LBFGS(p, tolerance_grad=1e-12, tolerance_change=1e-15),
        )  # fmt: skip
        prior = lapwing.Prior.from_posterior(trained.laplace.posterior)
    precision = x.T @ x / 0.09 + 2.0 * torch.eye(3).double()
    torch.testing.assert_close(trained.laplace.posterior.precision.dense(), precision)
    mean = torch.linalg.solve(precision, x.T @ y / 0.09)[:, 0]
    torch.testing.assert_close(trained.laplace.posterior.mean, mean, rtol=1e-5, atol=1e-7)


def test_options_of_training_that_cannot_be_used_are_refused() -> None:
    model, data = nn.Linear(2, 2), (torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    with pytest.raises(lapwing.BadData, match="schedule_by is 'epoch' or 'step', got 'batch'"):
        lapwing.train(model, data, "classification", epochs=1, schedule_by="batch")
    with pytest.raises(lapwing.BadData, match="a torch optimizer or a function that makes one, got str"):
        lapwing.train(model, data, "classification", epochs=1, optimizer="adam")
