"""Settings that differ in a common factor of their precisions: interpolated losses against those that are computed."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.evidence.heldout import Sweep
from lapwing.evidence.lines import chebyshev, enough, lines_of
from lapwing.evidence.tuning import Setting
from tests import dense


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
