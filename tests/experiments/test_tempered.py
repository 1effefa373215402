"""What the temperature experiments measure, on cases with known answers."""

import torch
from experiments._tempered import converged, scaling_error
from torch import nn

import lapwing


def test_where_a_curve_has_converged() -> None:
    temperatures = [0.1, 1.0, 10.0, 100.0]
    assert converged(temperatures, torch.tensor([2.0, 1.05, 1.0, 1.0])) == 1.0
    assert converged(temperatures, torch.tensor([2.0, 1.2, 1.05, 1.0])) == 10.0
    assert converged(temperatures, torch.tensor([2.0, 1.05, 1.5, 1.0])) == 100.0  # it must stay there
    assert converged(temperatures, torch.tensor([1.0, 1.0, 1.0, 1.0])) == 0.1


def test_both_sides_of_the_scaling_agree_and_a_wrong_one_would_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = (torch.randn(30, 3).double(), torch.randint(2, (30,)))
    la = lapwing.fit(model, data, "classification", structure="diag", progress=False)
    assert scaling_error({"Diag": la}, 0.7, 3.0) < 1e-12
    curvature = la.curvature.matrix.dense().diagonal()
    found = la.replace(prior=0.7, temperature=3.0).posterior.variance
    torch.testing.assert_close(found, 1 / (3.0 * curvature + 0.7))
