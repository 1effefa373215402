# %% [markdown]
# # Networks with posteriors in scikit-learn
#
# `LaplaceClassifier` and `LaplaceRegressor` are scikit-learn estimators. They build and train a small network for the data, or take one of
# yours, and give it a posterior. They work in pipelines, searches and cross-validation.

# %%
import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lapwing.sklearn import LaplaceClassifier, LaplaceRegressor

# %% [markdown]
# ## Regression with standard deviations
# The data are 442 patients. `predict(X, return_std=True)` gives one standard deviation per patient, which includes the noise.

# %%
X, y = load_diabetes(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=150, random_state=0)
model = LaplaceRegressor(random_state=0).fit(X_train, y_train)
mean, std = model.predict(X_test, return_std=True)
inside = np.abs(y_test - mean) < 1.96 * std
print(f"R² {model.score(X_test, y_test):.2f}; the 95 % intervals contain {inside.mean():.0%} of the test patients")

# %% [markdown]
# ## Classification with calibrated probabilities
# The data are 569 tumors, and scikit-learn's own network is the comparison. The logarithmic loss punishes confidence in a wrong answer.

# %%
X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=200, random_state=0)
models = {
    "MLPClassifier": make_pipeline(StandardScaler(), MLPClassifier((50, 50), max_iter=500, random_state=0)),
    "LaplaceClassifier": LaplaceClassifier(random_state=0),
}
for name, model in models.items():
    model.fit(X_train, y_train)
    print(f"{name:18s} accuracy {model.score(X_test, y_test):.3f}, log loss {log_loss(y_test, model.predict_proba(X_test)):.3f}")

# %% [markdown]
# ## Choose the architecture in a grid search

# %%
search = GridSearchCV(LaplaceClassifier(epochs=50, random_state=0), {"hidden": [(16,), (50, 50)]}, scoring="neg_log_loss", cv=2)
search.fit(X_train, y_train)
print(search.best_params_, f"log loss {-search.score(X_test, y_test):.3f}")
