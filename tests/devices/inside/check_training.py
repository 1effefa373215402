"""Training, pruning, invariances, mixtures over devices and interrupted work on the test device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import BadData, LapwingError, UnsupportedModel
from tests.devices.elsewhere import device
from tests.devices.workout import seeded

HERE, HOST = device(), torch.device("cpu")
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)).double()
Y = torch.arange(24) % 3


def mlp(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def both(run: Any) -> None:
    """Run on both devices and compare."""
    found = [run(place) for place in (HOST, HERE)]
    torch.testing.assert_close([v.cpu() for v in found[1]], [v.cpu() for v in found[0]], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full", "batch"])
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "unit", "input", "parameterwise"])
def test_train(structure: str, prior: str) -> None:
    def run(place: torch.device) -> list[Tensor]:
        try:
            trained = lapwing.train(
                mlp().to(place), (X, Y), "classification", epochs=3, structure=structure, prior=prior, burnin=1,
                batch_size=8, samples=16, factor="ggn", generator=seeded(place), val=(X, Y),
            )  # fmt: skip
        except LapwingError as error:
            return [torch.tensor(float(len(type(error).__name__)))]
        return [trained.laplace.predict(X).mean, trained.laplace.log_evidence(), torch.tensor(len(trained.table()))]

    both(run)


def test_train_with_noise() -> None:
    def run(place: torch.device) -> list[Tensor]:
        found = []
        for structure in ("kron", "batch"):
            trained = lapwing.train(
                mlp(2).to(place), (X.to(place), X[:, :2].to(place)), "regression", epochs=3, structure=structure,
                burnin=1, batch_size=8, samples=16, learn=("prior", "noise"),
            )  # fmt: skip
            found += [trained.laplace.predict(X).variance, trained.laplace.log_evidence()]
        return found

    both(run)


def test_training_resumes(tmp_path: Path) -> None:
    def run(place: torch.device) -> list[Tensor]:
        folder = tmp_path / place.type
        options: dict[str, Any] = {"burnin": 0, "batch_size": 8, "structure": "kron"}
        once = lapwing.train(mlp().to(place), (X, Y), "classification", epochs=4, **options)
        lapwing.train(mlp().to(place), (X, Y), "classification", epochs=2, checkpoint=folder, **options)
        twice = lapwing.train(mlp().to(place), (X, Y), "classification", epochs=4, checkpoint=folder, **options)
        torch.testing.assert_close(twice.laplace.params.flat, once.laplace.params.flat)
        return [twice.laplace.predict(X).mean]

    both(run)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full"])
def test_fits_resume(structure: str, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def data(stop: bool) -> Any:
        class Batches:
            reads = 0

            def __iter__(self) -> Any:
                for k, part in enumerate(zip(X.split(8), Y.split(8), strict=True)):
                    self.reads += 1
                    if stop and self.reads > 3 and k == 2:
                        raise Interrupted
                    yield part

        return Batches()

    model = mlp().to(HERE)
    expected = lapwing.fit(model, data(False), "classification", structure=structure)
    with pytest.raises(Interrupted):
        lapwing.fit(model, data(True), "classification", structure=structure, checkpoint=tmp_path)
    resumed = lapwing.fit(model, data(False), "classification", structure=structure, checkpoint=tmp_path)
    torch.testing.assert_close(resumed.log_evidence(), expected.log_evidence())


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full", "lowrank", "functional", "matrixfree"])
def test_posteriors_move_and_travel_in_files(structure: str, tmp_path: Path) -> None:
    prior = lapwing.Prior({"*": 2.0}, mean=0.1)
    model, moved = mlp(), mlp()
    la = lapwing.fit(model, (X, Y), "classification", structure=structure, prior=prior)
    expected, evidence = la.predict(X).mean, la.log_evidence()
    la = lapwing.fit(moved, (X, Y), "classification", structure=structure, prior=prior)
    moved.to(HERE)
    with pytest.raises(UnsupportedModel, match=r"module is on 'elsewhere:0' and this posterior on 'cpu'.*la\.to"):
        la.predict(X)
    there = la.to(HERE)
    torch.testing.assert_close(there.predict(X).mean.cpu(), expected)
    torch.testing.assert_close(there.log_evidence().cpu(), evidence)
    tuned = there.tune((X, Y)) if structure != "matrixfree" else there.replace(prior=3.0)
    torch.testing.assert_close(tuned.predict(X).probs.cpu(), tuned.to(HERE).predict(X).probs.cpu())
    there.save(tmp_path / "there")
    home = lapwing.load(tmp_path / "there", model, data=(X, Y))
    torch.testing.assert_close(home.predict(X).mean, expected)
    back = lapwing.load(tmp_path / "there", moved, data=(X, Y))
    torch.testing.assert_close(back.predict(X).mean.cpu(), expected)
    moved.to(HOST)
    torch.testing.assert_close(back.to("cpu").predict(X).mean, expected)


@pytest.mark.parametrize(
    "prior",
    [
        torch.full((43,), 2.0),
        {"0.*": torch.tensor(2.0, requires_grad=True), "*": torch.tensor(3.0, requires_grad=True)},
        torch.tensor(2.0, requires_grad=True),
        lapwing.Prior(2.0, mean=torch.zeros(43)),
        {"0.*": 1.0, "2.weight": 2.0, "*": 3.0},
    ],
    ids=["flat", "dict with gradients", "scalar with a gradient", "mean", "dict"],
)
def test_priors_on_the_host_join_a_posterior_elsewhere(prior: Any) -> None:
    def run(place: torch.device) -> list[Tensor]:
        la = lapwing.fit(mlp().to(place), (X, Y), "classification", structure="diag").replace(prior=prior)
        value = la.log_evidence()
        leaves = [prior] if isinstance(prior, Tensor) else [*prior.values()] if isinstance(prior, dict) else []
        leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        return [value.detach(), *(torch.autograd.grad(value, leaves) if leaves else ())]

    both(run)


def test_a_posterior_becomes_a_prior() -> None:
    def run(place: torch.device) -> list[Tensor]:
        model = mlp().to(place)
        first = lapwing.fit(model, (X[:12], Y[:12]), "classification", structure="diag")
        prior = lapwing.Prior.from_posterior(first.posterior)
        la = lapwing.fit(model, (X[12:], Y[12:]), "classification", structure="diag", prior=prior)
        return [la.log_evidence(), la.predict(X).probs]

    both(run)


@pytest.mark.parametrize("structured", [False, True], ids=["weights", "units"])
@pytest.mark.parametrize("by", ["posterior", "signal", "magnitude"])
def test_pruning(by: str, structured: bool) -> None:
    def run(place: torch.device) -> list[Tensor]:
        la = lapwing.fit(mlp().to(place), (X, Y), "classification", structure="kron")
        pruned = lapwing.prune(la, 0.5, by=by, structured=structured)
        return [pruned.module(X.to(place)).detach(), torch.tensor(pruned.sparsity), lapwing.relevance(la)]

    both(run)


def test_invariances() -> None:
    images = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(2)).double()

    def run(place: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).double().to(place)
        augment = lapwing.Affine(rotation=5.0).to(place)
        learned = lapwing.learn_invariances(
            model, (images.to(place), Y[:12].to(place)), "classification", augment, epochs=3, batch_size=6, copies=2
        )
        return [torch.tensor(list(learned.augmentation.ranges.values())), model(images.to(place)).detach()]

    both(run)


def test_temperature_scaling() -> None:
    def run(place: torch.device) -> list[Tensor]:
        scaled = lapwing.TemperatureScaled.fit(mlp().to(place), (X, mlp()(X).argmax(1).where(X[:, 0] > -1, Y)))
        return [torch.as_tensor(scaled.temperature)]

    both(run)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_generators_of_the_other_device_are_refused(structure: str) -> None:
    wrong = torch.Generator().manual_seed(0)
    model = mlp().to(HERE)
    mc = lapwing.MCFisher(1)
    with pytest.raises(BadData, match=r"generator.*cpu.*elsewhere"):
        lapwing.fit(model, (X, Y), "classification", structure=structure, factor=mc, generator=wrong)
    la = lapwing.fit(model, (X, Y), "classification", structure=structure, factor=mc, generator=seeded(HERE))
    for attempt in (
        lambda: la.predict(X, generator=wrong),
        lambda: la.predict(X, method="sampled", generator=wrong),
        lambda: la.ensemble(3, wrong),
        lambda: la.posterior.sample(3, wrong),
        lambda: la.update((X, Y), generator=wrong),
        lambda: lapwing.train(model, (X, Y), "classification", epochs=1, generator=wrong),
        lambda: lapwing.fit(
            model, (X, Y), "classification", select=lapwing.subnetwork(3, by="random"), generator=wrong
        ),
    ):
        with pytest.raises(BadData, match=r"generator.*cpu.*elsewhere"):
            attempt()
