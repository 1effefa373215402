"""Temperature scaling against scipy's minimizer and its own symmetries."""

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from lapwing.baselines.temperature import TemperatureScaled, best_temperature
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian


def logits_and_labels(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(300, 4, generator=generator, dtype=torch.float64)
    y = torch.multinomial((2 * f).softmax(-1), 1, generator=generator)[:, 0]
    return scale * f, y


def test_minimum_matches_scipy() -> None:
    f, y = logits_and_labels()
    loss = nn.functional.cross_entropy
    expected = minimize_scalar(lambda t: loss(f / t, y).item(), bounds=(0.01, 10), options={"xatol": 1e-10})
    assert best_temperature(f, y, Categorical()) == pytest.approx(expected.x, rel=1e-6)
    assert best_temperature(f, y, Categorical()) == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_temperature_follows_the_scale_of_the_logits(scale: float) -> None:
    f, y = logits_and_labels()
    expected = scale * best_temperature(f, y, Categorical())
    assert best_temperature(scale * f, y, Categorical()) == pytest.approx(expected, rel=1e-6)


def test_binary_and_ignored_targets() -> None:
    f, y = logits_and_labels()
    two = torch.stack([torch.zeros(300), f[:, 0]], -1).double()
    label = (y == 0).long()
    binary = best_temperature(f[:, :1], label.double()[:, None], Bernoulli())
    assert binary == pytest.approx(best_temperature(two, label, Categorical()), rel=1e-6)
    more_f, more_y = torch.cat([f, 50 * f.roll(1, -1)]), torch.cat([y, torch.full_like(y, -100)])
    ignoring = best_temperature(more_f, more_y, Categorical(ignore_index=-100))
    assert ignoring == pytest.approx(best_temperature(f, y, Categorical()), rel=1e-6)


def test_scaled_model_divides_logits_and_leaves_the_module_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model.train()
    x = torch.randn(20, 3)
    y = torch.where(torch.rand(20) < 0.7, model[0](x).argmax(-1), torch.randint(4, (20,)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaled = TemperatureScaled.fit(model, (x, y))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    torch.testing.assert_close(scaled(x), model(x).detach() / scaled.temperature)


def test_all_right_has_no_minimum_and_says_so() -> None:
    f, y = 5 * torch.eye(4, dtype=torch.float64), torch.arange(4)
    with pytest.warns(UserWarning, match="no minimum"):
        assert best_temperature(f, y, Categorical()) == pytest.approx(0.01, rel=0.01)


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(UnsupportedOperation, match="use it with Categorical"):
        TemperatureScaled.fit(nn.Linear(2, 1), (torch.zeros(3, 2), torch.zeros(3)), Gaussian())
    with pytest.raises(BadData, match="no samples"):
        TemperatureScaled.fit(nn.Linear(2, 2), [])


def test_logits_that_are_not_finite_are_refused() -> None:
    f = torch.tensor([[0.0, -torch.inf]])
    with pytest.raises(BadData, match="the validation NLL is not finite"):
        best_temperature(f, torch.tensor([1]), Categorical())
