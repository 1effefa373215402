"""The scikit-learn estimators with their defaults beside scikit-learn's own, on UCI tables.

    python -m experiments.sklearn_estimators [--sets energy banana ...] [--seeds 3] [--validation] [--out DIR]

gives, for regression, the test NLL in the units of the data, the RMSE, the share of targets inside the central 95 %
interval, and CPU seconds of fitting and predicting; for classification the test NLL, the accuracy, the expected
calibration error and the seconds. A seed is a split. `MLP` is the network of
scikit-learn with its defaults on standardized inputs (and targets), whose noise is the standard deviation of its
training residuals; `MLP, early` stops early. `GP` has an anisotropic squared-exponential kernel with noise (isotropic
for classes), fitted to at most 1,000 training samples, which stand for the rest. `--validation` scores on a fifth of
the training part instead of the test part: that is how the defaults of the estimators were chosen. `--tune` is that of
the estimators of Lapwing, and `--limit N` trains on N samples at random. Needs LAPWING_DATA.
"""

import argparse
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._study import study
from sklearn.compose import TransformedTargetRegressor
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from experiments import _datasets as datasets
from lapwing import metrics
from lapwing.sklearn import LaplaceClassifier, LaplaceRegressor

ABOUT = {"paper": "", "minutes": 8.4, "quick": 0.4}

REGRESSION = ("bostonHousing", "concrete", "energy", "kin8nm", "naval-propulsion-plant", "protein-tertiary-structure")
CLASSIFICATION = ("australian", "banana", "breast_cancer", "digits", "ionosphere", "vehicle")
LARGEST = 1000  # training samples of a Gaussian process
WIDE = 4  # panels of the figure per line

Data = tuple[np.ndarray, np.ndarray]


def parts(name: str, split: int, validation: bool) -> tuple[Data, Data]:
    """Return the training and the test part; with `validation`, two parts of the training part."""
    if name in REGRESSION:
        train, test = ((d.inputs.numpy(), d.targets.numpy()) for d in datasets.uci_regression(name).fold(split))
    else:
        data = datasets.uci_classification(name)
        x, tx, y, ty = train_test_split(data.inputs.numpy(), data.targets.numpy(), test_size=0.3, random_state=split)
        train, test = (x, y), (tx, ty)
    if validation:
        x, tx, y, ty = train_test_split(*train, test_size=0.2, random_state=split)
        train, test = (x, y), (tx, ty)
    return train, test


def kernel(features: int) -> Any:
    return ConstantKernel() * RBF(np.ones(features), (1e-2, 1e4)) + WhiteKernel(0.1, (1e-6, 10.0))


class Residuals:
    """A regressor whose standard deviation is that of its training residuals."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def fit(self, x: np.ndarray, y: np.ndarray) -> "Residuals":
        self.model.fit(x, y)
        self.deviation = np.sqrt(np.mean((y - self.model.predict(x)) ** 2))
        return self

    def predict(self, x: np.ndarray, return_std: bool) -> tuple[np.ndarray, np.ndarray]:
        mean = self.model.predict(x)
        return mean, np.full(len(mean), self.deviation)


class Process:
    """A Gaussian process for regression on standardized inputs and targets."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> "Process":
        self.scaler = StandardScaler().fit(x)
        self.model = GaussianProcessRegressor(kernel(x.shape[1]), normalize_y=True, random_state=0)
        self.model.fit(self.scaler.transform(x), y)
        return self

    def predict(self, x: np.ndarray, return_std: bool) -> tuple[np.ndarray, np.ndarray]:
        return self.model.predict(self.scaler.transform(x), return_std=return_std)


def regressors(seed: int, given: argparse.Namespace) -> dict[str, Any]:
    def network(**options: Any) -> Residuals:
        inner = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed, **options))
        return Residuals(TransformedTargetRegressor(inner, transformer=StandardScaler()))

    return {
        "LaplaceRegressor": LaplaceRegressor(random_state=seed, tune=given.tune),
        "MLP": network(),
        "MLP, early": network(early_stopping=True, max_iter=1000),
        "GP": Process(),
    }


def classifiers(seed: int, features: int, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "LaplaceClassifier": LaplaceClassifier(random_state=seed, tune=given.tune),
        "MLP": make_pipeline(StandardScaler(), MLPClassifier(random_state=seed)),
        "MLP, early": make_pipeline(
            StandardScaler(), MLPClassifier(random_state=seed, early_stopping=True, max_iter=1000)
        ),
        "GP": make_pipeline(StandardScaler(), GaussianProcessClassifier(ConstantKernel() * RBF(), random_state=seed)),
    }


def scored(model: Any, train: Data, test: Data, numbers: bool) -> dict[str, float]:
    """Return NLL, error or accuracy, coverage or calibration error, and seconds."""
    start = time.process_time()
    (x, y), (tx, ty) = train, test
    if isinstance(model, Process) or "gaussianprocess" in str(getattr(model, "named_steps", "")):
        x, y = x[:LARGEST], y[:LARGEST]  # the rows are in random order
    model.fit(x, y)
    truth = torch.from_numpy(ty)
    if numbers:
        mean, std = (
            torch.from_numpy(np.asarray(part, dtype=np.float64)) for part in model.predict(tx, return_std=True)
        )
        covered = metrics.coverage(mean - 1.959964 * std, mean + 1.959964 * std, truth)
        found = [metrics.gaussian_nll(mean, std, truth), metrics.rmse(mean, truth), covered]
    else:
        probs = torch.from_numpy(model.predict_proba(tx)).clamp(min=1e-12)
        found = [metrics.nll(probs, truth), metrics.accuracy(probs, truth), metrics.ece(probs, truth)]
    heads = ("NLL", "RMSE", "coverage 95 %") if numbers else ("NLL", "accuracy", "ECE")
    return dict(zip(heads, map(float, found))) | {"CPU s": time.process_time() - start}


def run(seed: int, given: argparse.Namespace) -> Scores:
    """Rows by table and model; a seed is a split."""
    warnings.simplefilter("ignore")  # of scikit-learn's own models that they have not converged
    rows = {}
    for name in given.sets:
        train, test = parts(name, seed, given.validation)
        if given.limit:
            chosen = np.random.RandomState(seed).permutation(len(train[0]))[: given.limit]
            train = train[0][chosen], train[1][chosen]
        models = regressors(seed, given) if name in REGRESSION else classifiers(seed, train[0].shape[1], given)
        for label, model in models.items():
            if not given.only or label.startswith(tuple(given.only)):
                rows[f"{name}, {label}"] = scored(model, train, test, name in REGRESSION)
    return rows


def judge(mean: Scores) -> list[Claim]:
    ours = {row: cells["NLL"] for row, cells in mean.items() if ", Laplace" in row}
    gaps = {}
    for row, nll in ours.items():
        name = row.partition(",")[0]
        others = [cells["NLL"] for each, cells in mean.items() if each.startswith(f"{name}, MLP")]
        if others:
            gaps[name] = nll - min(others)
    return [
        answered(
            "Are the estimators with their defaults better than scikit-learn's networks?",
            "Test NLL less that of the better of scikit-learn's two networks: "
            + (", ".join(f"{name} {gap:+.3f}" for name, gap in gaps.items()) or "not compared")
            + f". Test NLL of Lapwing's: {', '.join(f'{row} {nll:.3f}' for row, nll in ours.items())}.",
            "the NLL is below that of the better of scikit-learn's two networks, table by table.",
            *(gap < 0 for gap in gaps.values()),
        )
    ]


def figure(each: Mapping[str, Mapping[str, list[float]]]) -> Any:
    """Draw a panel per table with the test NLL of each model: a dot per seed and a bar at the mean."""
    from matplotlib.figure import Figure

    tables = list(dict.fromkeys(row.partition(", ")[0] for row in each))
    lines = -(-len(tables) // WIDE)
    canvas = Figure(figsize=(3.2 * WIDE, 1.4 * lines + 0.2), layout="constrained")
    panels = canvas.subplots(lines, WIDE, squeeze=False).flatten()
    for axes, table in zip(panels, tables):
        models = {row.partition(", ")[2]: cells["NLL"] for row, cells in each.items() if row.startswith(f"{table}, ")}
        for k, values in enumerate(models.values()):
            axes.plot(values, [k] * len(values), ".", color="#2b6cb0", ms=5)
            axes.plot([sum(values) / len(values)], [k], "|", color="black", ms=11)
        axes.set_title(f"{table}, NLL", loc="left", fontsize=9)
        axes.set_yticks(
            range(len(models)), [name.removesuffix("Regressor").removesuffix("Classifier") for name in models]
        )
        axes.set_ylim(len(models) - 0.5, -0.5)
        axes.locator_params(axis="x", nbins=4)
        axes.grid(axis="y", lw=0.3)
        axes.tick_params(labelsize=8)
    for axes in panels[len(tables) :]:
        axes.axis("off")
    return canvas


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"sets": ["ionosphere"], "only": ["Laplace"]},
        quick={"sets": ["energy", "ionosphere"]}, seeds=3,
    )  # fmt: skip
    parser.add_argument("--sets", nargs="+", default=[*REGRESSION, *CLASSIFICATION])
    parser.add_argument("--only", nargs="+", help="beginnings of the names of models")
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--tune", choices=("auto", "validation", "evidence"), default="auto")
    parser.add_argument("--limit", type=int)
    notes = [
        "A seed is a published split of a regression table, or a random one (70/30) of a classification table. MLP and "
        "“MLP, early” (early stopping) are scikit-learn's networks with their defaults; for regression their standard "
        f"deviation is that of the training residuals. The Gaussian process has at most {LARGEST} training samples.",
    ]
    title = "The scikit-learn estimators"
    study("sklearn_estimators", ABOUT, title, run, judge, parser.parse_args(), notes=notes, figure=figure)
