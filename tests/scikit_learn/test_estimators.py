"""The scikit-learn estimators: numbers against closed forms, every way to give a network, and scikit-learn's tools."""

import os
import pickle
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

import lapwing
from lapwing.sklearn import LaplaceClassifier, LaplaceRegressor

RNG = np.random.RandomState(0)
X = RNG.randn(80, 3)
Y = X[:, 0] - 0.5 * X[:, 1] ** 2 + 0.1 * RNG.randn(80)
LABELS = np.array(["no", "yes"])[(X[:, 0] + 0.3 * RNG.randn(80) > 0).astype(int)]
QUICK: dict[str, Any] = {"hidden": (8,), "epochs": 40, "random_state": 0}


@pytest.mark.slow
@parametrize_with_checks([LaplaceRegressor(), LaplaceClassifier()])
def test_every_check_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


ARRAY_API = """
from sklearn.utils.estimator_checks import estimator_checks_generator
from lapwing.sklearn import LaplaceClassifier, LaplaceRegressor
for estimator in (LaplaceClassifier(epochs=20), LaplaceRegressor(epochs=20)):
    for one, check in estimator_checks_generator(estimator):
        if getattr(check, "func", check).__name__ == "check_array_api_input":
            check(one)
            print("passed")
"""


@pytest.mark.slow
def test_the_check_that_scikit_learn_skips_unless_a_variable_is_set() -> None:
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    done = subprocess.run([sys.executable, "-c", ARRAY_API], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["passed", "passed"], done.stderr


FEW = {
    "check_estimators_dtypes", "check_estimators_nan_inf", "check_fit2d_1sample", "check_n_features_in",
    "check_dict_unchanged", "check_classifiers_one_label", "check_estimators_unfitted", "check_regressor_multioutput",
    "check_estimators_pickle", "check_parameters_default_constructible",
}  # fmt: skip


@pytest.mark.parametrize(
    "estimator", [LaplaceRegressor(**QUICK), LaplaceClassifier(**QUICK)], ids=["numbers", "classes"]
)
def test_a_few_checks_of_scikit_learn(estimator: Any) -> None:
    done = set()
    for _, check in estimator_checks_generator(estimator):
        name = getattr(check, "func", check).__name__
        if name in FEW:
            check(clone(estimator))
            done.add(name)
    assert len(done) == len(FEW) - 1  # one is for classifiers, one for regressors


def ridge() -> tuple[nn.Linear, float, np.ndarray]:
    """A linear network at the mode of its posterior, the variance of its residuals, and the posterior covariance."""
    module = nn.Linear(3, 1).double()
    features = np.column_stack([X, np.ones(len(X))])
    noise = 1.0
    for _ in range(100):  # the fit estimates the noise from the residuals at the weights
        precision = features.T @ features / noise + np.eye(4)
        weights = np.linalg.solve(precision, features.T @ Y / noise)
        noise = float(np.mean((Y - features @ weights) ** 2))
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(weights[None, :3]))
        module.bias.copy_(torch.from_numpy(weights[3:]))
    return module, noise, np.linalg.inv(features.T @ features / noise + np.eye(4))


def test_a_trained_linear_network_is_bayesian_linear_regression() -> None:
    module, noise, covariance = ridge()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = LaplaceRegressor(module, structure="full", prior=1.0, tune=None).fit(X, Y)
    new = RNG.randn(6, 3)
    features = np.column_stack([new, np.ones(6)])
    want = features @ covariance @ features.T + noise * np.eye(6)
    mean, whole = model.predict(new, return_cov=True)
    np.testing.assert_allclose(mean, features @ np.append(module.weight.detach(), module.bias.detach()))
    np.testing.assert_allclose(whole, want, rtol=1e-6)
    np.testing.assert_allclose(model.predict(new, return_std=True)[1], np.sqrt(np.diag(want)), rtol=1e-6)
    np.testing.assert_allclose(model.predict(new), mean)
    drawn = model.sample_y(new, 40_000, random_state=1)
    assert drawn.shape == (6, 40_000)
    np.testing.assert_allclose(np.cov(drawn), want, atol=0.05 * want.max())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert model.module_ is module
    with pytest.raises(ValueError, match="exclude each other"):
        model.predict(new, return_std=True, return_cov=True)


def test_several_outputs() -> None:
    targets = np.column_stack([Y, 100 * X[:, 2] + 3000])
    model = LaplaceRegressor(**QUICK).fit(X, targets)
    mean, std = model.predict(X[:5], return_std=True)
    assert mean.shape == std.shape == (5, 2)
    whole = model.predict(X[:5], return_cov=True)[1]
    assert whole.shape == (5, 5, 2)
    np.testing.assert_allclose(np.sqrt(whole[range(5), range(5)]), std, rtol=1e-6)
    assert model.sample_y(X[:5], 3).shape == (5, 2, 3)
    p = model.laplace_.predict(torch.from_numpy(X[:5]))
    np.testing.assert_allclose(mean, p.mean.numpy())
    assert model.score(X, targets) > 0.8
    assert LaplaceRegressor(**QUICK).fit(X, Y[:, None]).predict(X[:5]).shape == (5, 1)


def test_classes_of_any_name() -> None:
    model = LaplaceClassifier(**QUICK).fit(X, LABELS)
    probs = model.predict_proba(X)
    assert list(model.classes_) == ["no", "yes"]
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(probs, model.laplace_.predict(torch.from_numpy(X)).probs.numpy(), rtol=1e-9)
    np.testing.assert_array_equal(model.predict(X), model.classes_[probs.argmax(1)])
    np.testing.assert_allclose(model.predict_log_proba(X), np.log(probs))
    assert model.score(X, LABELS) == np.mean(model.predict(X) == LABELS) > 0.8
    drawn = model.sample_y(X[:4], 4000)
    assert drawn.shape == (4, 4000)
    np.testing.assert_allclose((drawn == "yes").mean(1), probs[:4, 1], atol=0.04)
    assert model.predictive(X[:4]).epistemic.shape == (4,)
    with pytest.raises(NotFittedError):
        LaplaceClassifier().predictive(X)
    with pytest.raises(ValueError, match="one class"):
        LaplaceClassifier().fit(X, np.zeros(80))


def test_a_trained_classifier_may_know_more_classes() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    model = LaplaceClassifier(module, tune=None).fit(X, 1 + np.arange(80) % 3)
    assert list(model.classes_) == [0, 1, 2, 3, 4]
    la = lapwing.fit(module, (X, 1 + torch.arange(80) % 3), "classification")
    np.testing.assert_allclose(model.predict_proba(X), la.predict(X).probs.numpy(), rtol=1e-5, atol=1e-6)
    two = nn.Linear(3, 2)
    assert list(LaplaceClassifier(two, tune=None).fit(X, LABELS).classes_) == ["no", "yes"]


class Normed(nn.Module):
    """A network of the user's own with batch normalization and dropout, in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


FACTORIES: dict[str, dict[str, Any]] = {
    "class": {"module": Normed},
    "function": {"module": lambda inputs, outputs: nn.Linear(inputs, outputs)},
    "function without arguments": {"module": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))},
    "raw inputs": {"module": Normed, "standardize": False},
    "plain gradient descent": {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    "L-BFGS": {"optimizer": partial(torch.optim.LBFGS, lr=0.1, line_search_fn="strong_wolfe"), "epochs": 3},
    "last layer": {"select": "last_layer"},
    "batches of one": {"batch_size": 1, "epochs": 2},
    "nothing held out": {"validation_fraction": 0.0},
    "evidence": {"tune": "evidence"},
}


@pytest.mark.parametrize("name", FACTORIES)
def test_ways_to_give_a_network_and_its_training(name: str) -> None:
    state = torch.random.get_rng_state()
    model = LaplaceClassifier(**{**QUICK, **FACTORIES[name]}).fit(X, LABELS)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.score(X, LABELS) > 0.8
    assert model.n_epochs_ >= 1
    assert not model.module_.training
    again = clone(model).fit(X, LABELS)
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


def test_what_cannot_be_used_is_refused() -> None:
    for options, words in (
        ({"module": "net"}, "module is None, a trained"),
        ({"module": lambda: 3}, "made a int"),
        ({"optimizer": lambda parameters: None}, "it returns a torch optimizer"),
        ({"tune": "best"}, "tune is 'auto'"),
        ({"validation_fraction": 1.5}, "share between 0 and 1"),
        ({"tune": "validation", "validation_fraction": 0.0}, "needs held-out data"),
        ({"learning_rate": 1e300}, "the training diverged"),
        ({"epochs": 0}, "epochs is a whole number of at least 1, got 0. Pass a network that is trained"),
        ({"patience": 0}, "patience is a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size is a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            LaplaceRegressor(**{**QUICK, **options}).fit(X, Y)
    with pytest.raises(ValueError, match="3 features"):
        LaplaceRegressor(**QUICK).fit(X, Y).predict(X[:, :2])


def test_what_is_held_out() -> None:
    """All of it stops the training, unless held-out data tune: by default where there are enough of them."""
    x, y = torch.randn(2000, 1), torch.zeros(2000, 1)
    parts = {
        ("auto", 40): (40, None, None),
        ("auto", 2000): (1600, 200, 200),
        ("validation", 200): (160, 20, 20),
        ("validation", 80): (64, 16, None),
        ("evidence", 2000): (1600, 400, None),
        (None, 2000): (1600, 400, None),
    }
    for (tune, n), expected in parts.items():
        found = LaplaceRegressor(tune=tune)._split(x[:n], y[:n], 0)
        assert tuple(None if part is None else len(part[0]) for part in found) == expected, (tune, n)
        assert sum(len(part[0]) for part in found if part is not None) == n
    few = x[:1480], y[:1480]
    for kind, expected in ((LaplaceRegressor, (1184, 148, 148)), (LaplaceClassifier, (1184, 296, None))):
        found = kind()._split(*few, 0)
        assert tuple(None if part is None else len(part[0]) for part in found) == expected


def test_the_default_is_wider_far_from_few_data() -> None:
    rng = np.random.RandomState(0)
    x = rng.uniform(-2, 2, (100, 2))
    y = np.sin(2 * x[:, 0]) + 0.1 * rng.randn(100)
    for seed in range(3):
        _, std = LaplaceRegressor(random_state=seed).fit(x, y).predict([[0.0, 0.0], [10.0, 10.0]], return_std=True)
        assert 0.05 < std[0] < 0.4
        assert std[1] > 3 * std[0]


def test_the_tools_of_scikit_learn() -> None:
    pipeline = make_pipeline(StandardScaler(), LaplaceClassifier(**QUICK))
    assert cross_val_score(pipeline, X, LABELS, cv=2).mean() > 0.7
    search = GridSearchCV(LaplaceRegressor(**QUICK), {"hidden": [(), (4,)]}, cv=2).fit(X, Y)
    assert search.best_params_ == {"hidden": (4,)}
    calibrated = CalibratedClassifierCV(LaplaceClassifier(**QUICK), cv=2).fit(X, LABELS)
    assert calibrated.predict_proba(X).shape == (80, 2)
    trained = cross_val_score(LaplaceRegressor(ridge()[0]), X, Y, cv=2)  # cloning copies a trained module
    assert trained.shape == (2,)


@pytest.mark.parametrize(
    "options", [{}, {"select": "last_layer"}, {"structure": "kron"}, {"structure": "diag"}], ids=str
)
def test_pickles(options: dict[str, Any]) -> None:
    model = LaplaceRegressor(**QUICK, **options).fit(X, Y)
    back = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(back.predict(X, return_std=True), model.predict(X, return_std=True), rtol=1e-9)
    assert back.laplace_.predict(torch.from_numpy(X)).novelty.shape == (80,)
    assert pickle.loads(pickle.dumps(LaplaceRegressor())).get_params() == LaplaceRegressor().get_params()


def test_frames_keep_their_names() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abc"))
    model = LaplaceRegressor(**QUICK).fit(frame, pandas.Series(Y, index=range(80, 0, -1)))
    assert list(model.feature_names_in_) == list("abc")
    np.testing.assert_array_equal(model.predict(frame), LaplaceRegressor(**QUICK).fit(X, Y).predict(X))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["b", "a", "c"]])


def test_inputs_and_targets_far_from_zero_and_a_constant_column() -> None:
    far = np.column_stack([1e6 + 1e3 * X, np.full(80, 7.0)])
    near = LaplaceRegressor(**QUICK).fit(np.column_stack([X, np.full(80, 7.0)]), Y)
    model = LaplaceRegressor(**QUICK).fit(far, 1e4 + 100 * Y)
    mean, std = near.predict(np.column_stack([X, np.full(80, 7.0)]), return_std=True)
    np.testing.assert_allclose(model.predict(far, return_std=True)[0], 1e4 + 100 * mean, rtol=1e-4)
    np.testing.assert_allclose(model.predict(far, return_std=True)[1], 100 * std, rtol=1e-2)


def test_without_scikit_learn() -> None:
    code = "import sys; sys.modules['sklearn'] = None\nimport lapwing.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("lapwing.sklearn needs scikit-learn: pip install 'lapwing-torch[sklearn]'")


def test_one_hidden_layer_may_be_a_number() -> None:
    x = np.random.RandomState(0).randn(30, 2)
    models = [LaplaceRegressor(hidden=hidden, epochs=3, random_state=0).fit(x, x[:, 0]) for hidden in (8, (8,))]
    np.testing.assert_array_equal(models[0].predict(x), models[1].predict(x))
