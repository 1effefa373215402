"""Networks and options that a fit cannot use raise, and the message names what is allowed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from tests.laplace.small import X, Y, fit, net


def test_nothing_to_put_a_posterior_on() -> None:
    with pytest.raises(lapwing.BadData, match="no parameters"):
        fit(nn.Tanh())
    frozen = net().requires_grad_(False)
    with pytest.raises(lapwing.BadData, match="every parameter of the model is frozen"):
        fit(frozen)
    with pytest.raises(lapwing.BadData, match=r"select='head\.\*' matches no parameter; there are '0\.weight'"):
        fit(select="head.*")
    with pytest.raises(lapwing.BadData, match=r"torch\.nn\.Module, got"):
        fit(torch.relu)


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    la = fit(model, structure="kron")
    assert la.params.names == ("0.weight", "2.weight", "2.bias")
    assert not model[0].bias.requires_grad
    with pytest.raises(lapwing.BadData, match=r"'0\.bias', which is frozen"):
        fit(model, select=["0.bias"])


@pytest.mark.parametrize("option", [{"structure": "kfac"}, {"factor": "fisher"}], ids=str)
def test_unknown_choices_name_the_known(option: dict[str, Any]) -> None:
    with pytest.raises(lapwing.UnsupportedOperation, match=r"is one of \[.*\] or 'auto'"):
        fit(**option)


def test_a_class_in_place_of_a_structure_is_told_what_to_pass() -> None:
    with pytest.raises(lapwing.UnsupportedOperation, match=r"an object, not a class: pass Kron\(\)"):
        fit(structure=lapwing.Kron)


@pytest.mark.parametrize("prior", [-1.0, 0.0, math.nan, torch.ones(5), {"nothing.*": 1.0}])
def test_impossible_priors(prior: Any) -> None:
    with pytest.raises(lapwing.IncompatiblePrior):
        fit(prior=prior)


def test_arguments_of_fit_are_checked() -> None:
    with pytest.raises(lapwing.BadData, match="X has 24 samples, y has 5"):
        fit(data=(X, Y[:5]))
    with pytest.raises(lapwing.BadData, match="has no targets"):
        fit(data=[(X, None)])
    with pytest.raises(lapwing.BadData, match="number of bytes, must be positive and finite, got '1GB'"):
        fit(memory="1GB")
    for n_data in (0, -1, math.nan, math.inf):
        with pytest.raises(lapwing.BadData, match="n_data must be positive and finite"):
            fit(n_data=n_data)
    for select in (None, net()[0]):
        with pytest.raises(lapwing.BadData, match="select is 'all', 'last_layer', a glob"):
            fit(select=select)
    with pytest.raises(lapwing.BadData, match="empty list"):
        fit(select=[])
    with pytest.raises(lapwing.LapwingError, match="temperature must be at least 0, got"):
        fit(temperature=-1.0)


@pytest.mark.parametrize("model", [nn.LazyLinear(3), nn.Linear(3, 3, device="meta")], ids=["lazy", "meta"])
def test_weights_without_values(model: nn.Module) -> None:
    with pytest.raises(lapwing.BadData, match="has no values yet"):
        fit(model)


def test_a_repaired_posterior_tells_its_story() -> None:
    la = fit(structure="full", factor="hessian", prior=1e-3, repair=True)
    assert la.posterior.increase > 0
    assert "raised by" in la.summary()
    assert la.log_evidence().isfinite()
    with pytest.raises(lapwing.NotPositiveDefinite, match="repair=True"):
        fit(structure="full", factor="hessian", prior=1e-3)


def test_one_precision_a_weight_is_not_for_held_out_data() -> None:
    with pytest.raises(lapwing.IncompatiblePrior, match=r"prior='layerwise'.*method='evidence'"):
        fit(structure="diag").tune((X, Y), prior="parameterwise")


class Polar(nn.Module):
    """Complex weights, then real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.out = nn.Linear(3, 4, dtype=torch.complex64), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.turn(x.to(torch.complex64)).abs().tanh())


def test_complex_weights_are_refused_by_name() -> None:
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    with pytest.raises(lapwing.UnsupportedModel, match=r"complex weights \(turn.weight, turn.bias\).*select="):
        lapwing.fit(Polar(), (x, y), "classification", structure="full")
    la = lapwing.fit(Polar(), (x, y), "classification", structure="full", select="last_layer")
    assert la.predict(x).probs.isfinite().all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("structure", ["diag", "kron", "blockdiag", "full"])
def test_layers_without_units(structure: str) -> None:
    """They add nothing: as without them, with the bias of the next layer."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.arange(8) % 2

    class Widthless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.after, self.real = nn.Linear(3, 0), nn.Linear(0, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.real(x) + self.after(self.none(x))

    class Without(nn.Module):
        def __init__(self, like: Widthless) -> None:
            super().__init__()
            self.bias, self.real = nn.Parameter(like.after.bias.detach().clone()), like.real

        def forward(self, x: Tensor) -> Tensor:
            return self.real(x) + self.bias

    widthless = Widthless()
    la, want = (
        lapwing.fit(model, (x, y), "classification", structure=structure) for model in (widthless, Without(widthless))
    )
    torch.testing.assert_close(la.predict(x).probs, want.predict(x).probs)
    torch.testing.assert_close(la.log_evidence(), want.log_evidence())


def test_a_model_on_several_devices_and_another_device_are_refused() -> None:
    model, data = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.randn(4, 2), torch.zeros(4).long())
    with pytest.raises(lapwing.BadData, match="the model is on 'cpu': move the model first"):
        lapwing.fit(model, data, "classification", device="meta")
    model[1].to("meta")
    with pytest.raises(lapwing.BadData, match="on several devices"):
        lapwing.fit(model, data, "classification")
