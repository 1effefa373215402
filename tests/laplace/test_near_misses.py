"""What a person meets first: suggestions for near misses, warnings at their own line, short texts, notebooks."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing.errors import brief, nearest, warn
from tests.laplace.small import X, Y, fit, net

CALLS: dict[str, tuple[Any, str]] = {
    "select='last'": (lambda: fit(select="last"), "Did you mean 'last_layer'"),
    "select='lastlayer'": (lambda: fit(select="lastlayer"), "Did you mean 'last_layer'"),
    "select='0.wieght'": (lambda: fit(select="0.wieght"), "Did you mean '0.weight'"),
    "structure='kronecker'": (lambda: fit(structure="kronecker"), "Did you mean 'kron'"),
    "structure='diagonal'": (lambda: fit(structure="diagonal"), "Did you mean 'diag'"),
    "structure='low_rank'": (lambda: fit(structure="low_rank"), "Did you mean 'lowrank'"),
    "structure='Full'": (lambda: fit(structure="Full"), "Did you mean 'full'"),
    "factor='GGN'": (lambda: fit(factor="GGN"), "Did you mean 'ggn'"),
    "likelihood='classifcation'": (lambda: fit(likelihood="classifcation"), "Did you mean 'classification'"),
    "prior={'0.wieght'}": (lambda: fit(prior={"0.wieght": 1.0, "*": 2.0}), "Did you mean '0.weight'"),
    "predict(loader)": (lambda: fit().predict(DataLoader(TensorDataset(X, Y))), "predict_loader"),
    "predict(link='montecarlo')": (lambda: fit().predict(X, link="probitt"), "Did you mean 'probit'"),
    "predict(method='sample')": (lambda: fit().predict(X, method="sample"), "Did you mean 'sampled'"),
    "tune(method='valid')": (lambda: fit().tune((X, Y), method="valid"), "Did you mean 'validation'"),
    "tune(prior='layer_wise')": (lambda: fit().tune((X, Y), prior="layer_wise"), "Did you mean 'layerwise'"),
    "tune(rule='low')": (lambda: fit().tune((X, Y), rule="low"), "Did you mean 'lowest'"),
    "tune(learn='temprature')": (lambda: fit().tune((X, Y), learn="temprature"), "Did you mean 'temperature'"),
    "damping('factor')": (lambda: fit(structure="kron").damping("factor"), "Did you mean 'factored'"),
    "report.table('acc')": (lambda: lapwing.evaluate({"la": fit()}, (X, Y)).table("acc"), "Did you mean 'accuracy'"),
}


@pytest.mark.parametrize("call", CALLS)
def test_near_misses_get_a_suggestion(call: str) -> None:
    act, words = CALLS[call]
    with pytest.raises((lapwing.LapwingError, ValueError), match=words):
        act()


def test_no_suggestion_for_what_is_like_nothing() -> None:
    assert nearest("banana", ("kron", "diag")) == ""
    assert nearest(3, ("kron",)) == ""
    with pytest.raises(lapwing.UnsupportedOperation, match=r"got 'banana'$"):
        fit(structure="banana")


def test_warnings_point_at_the_line_of_the_user() -> None:
    wide = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
    regression = (X, X[:, :1])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        lapwing.fit(wide, regression, "regression", structure="diag").tune()
        lapwing.evaluate({"MAP": wide}, regression, likelihood="regression")
        lapwing.fit(nn.Sequential(net(), nn.Softmax(-1)), (X, Y), "classification", structure="diag")
        warn("plain")
    assert [w.filename for w in seen] == [__file__] * 4


def test_reprs_hold_no_weights() -> None:
    la = fit(structure="kron")
    tuned = la.tune((X, Y))
    parts = [la, la.network, la.params, la.belief, la.curvature, la.curvature.matrix, la.posterior, la.watch]
    parts += [la.posterior.precision, tuned.tuning, la.ensemble(2), lapwing.Mixture([la, la]), la.predict(X)]
    parts += [la.predict(X).function, lapwing.evaluate({"la": la}, (X, Y)), la.temperature_curve((X, Y))]
    parts += [fit(structure=name).posterior.precision for name in ("diag", "full", "ekfac", "lowrank", "blockdiag")]
    parts += [lapwing.Prior(torch.rand(38)), la.linear_mode((X, Y))]
    for part in parts:
        text = repr(part)
        assert len(text) < 1500
        assert "tensor([" not in text
        assert "\n" not in text
    assert brief(la.params) == repr(la.params)


def test_notebooks() -> None:
    la = fit()
    page = la._repr_html_()
    assert "<table>" in page
    assert "Laplace posterior over 38 weights of Sequential" in page
    assert "Categorical" in page
    tuned = la.tune((X, Y))
    assert "tuned by" in tuned._repr_html_()
    report = lapwing.evaluate({"<b>": la, "tuned": tuned}, (X, Y))
    page = report._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<td>tuned</td>" in page
    assert "NLL in nats" in page


def test_a_report_as_a_frame() -> None:
    pandas = pytest.importorskip("pandas")
    la = fit()
    report = lapwing.evaluate({"MAP": la.module, "Laplace": la}, (X, Y), ood={"far": X + 5})
    frame = report.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == ["MAP", "Laplace"]
    assert list(frame.columns) == [column.name for column in report.columns()]
    assert frame.loc["Laplace", "nll"] == report.row("Laplace")["nll"]
    assert frame.loc["Laplace", "auroc far"] == report.to_dict()["models"]["Laplace"]["ood"]["far"]["auroc"]
    assert frame["accuracy"].dtype == float


def test_a_bar_of_a_tune_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    la = fit()
    la.tune((X, Y), progress=False)
    assert "tune" not in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert la.tune((X, Y), progress=True).options.progress is None
    assert "tune" in capsys.readouterr().err
