"""Mixtures in one file: the same numbers after loading, and clear errors for other models."""

from pathlib import Path

import pytest
import torch
from torch import nn

import lapwing


def regressor(seed: int) -> tuple[nn.Module, lapwing.Laplace, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x[:, :1].sin() + 0.1 * torch.randn(60, 1, generator=generator)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    structure = ("kron", "full", "diag")[seed]
    return model, lapwing.fit(model, (x, y), "regression", structure=structure, progress=False), x


@pytest.mark.parametrize("weights", ["uniform", "evidence", torch.tensor([1.0, 3.0, 2.0])])
def test_a_mixture_is_the_same_after_loading(weights: str | torch.Tensor, tmp_path: Path) -> None:
    models, members, inputs = zip(*(regressor(seed) for seed in range(3)))
    mixture = lapwing.Mixture(members, weights)
    mixture.save(tmp_path / "mixture.lapwing")
    again = lapwing.load(tmp_path / "mixture.lapwing", list(models))
    torch.testing.assert_close(again.probabilities, mixture.probabilities, rtol=1e-12, atol=0)
    here, there = mixture.predict(inputs[0]), again.predict(inputs[0])
    noises = {float(part.likelihood.noise_variance(part.function.mean)) for part in here.members}
    assert len(noises) == 3  # each member keeps the noise of its own residuals
    for name in ("mean", "aleatoric", "epistemic", "entropy"):
        torch.testing.assert_close(getattr(there, name), getattr(here, name), rtol=0, atol=0)


def test_other_models_are_refused(tmp_path: Path) -> None:
    (one, first, _), (two, second, _) = regressor(0), regressor(1)
    path, single = tmp_path / "mixture.lapwing", tmp_path / "one.lapwing"
    lapwing.Mixture([first, second]).save(path)
    first.save(single)
    with pytest.raises(lapwing.BadData, match=r"holds a mixture: lapwing.load\(.*\[model1, model2"):
        lapwing.load(path, one)
    with pytest.raises(lapwing.BadData, match="2 posteriors, and 1 models"):
        lapwing.load(path, [one])
    with pytest.raises(lapwing.UnsupportedModel, match="other weights"):
        lapwing.load(path, [two, one])
    with pytest.raises(lapwing.BadData, match="holds one posterior"):
        lapwing.load(single, [one, two])


def test_members_without_a_posterior_are_refused(tmp_path: Path) -> None:
    model, la, _ = regressor(0)
    with pytest.raises(lapwing.BadData, match="is a Sequential, which has no predict"):
        lapwing.Mixture([la, model])
    ensemble = lapwing.baselines.DeepEnsemble([model, model], lapwing.Gaussian(0.1))
    with pytest.raises(lapwing.UnsupportedOperation, match="a DeepEnsemble in a mixture cannot be saved"):
        lapwing.Mixture([la, ensemble]).save(tmp_path / "mixture.lapwing")
    assert not list(tmp_path.iterdir())
