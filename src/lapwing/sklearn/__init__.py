"""scikit-learn estimators with a posterior: `LaplaceClassifier` and `LaplaceRegressor`.

They need the extra `sklearn`: pip install 'lapwing-torch[sklearn]'.
"""

try:
    import sklearn
except ImportError as error:
    raise ImportError("lapwing.sklearn needs scikit-learn: pip install 'lapwing-torch[sklearn]'") from error

from lapwing.sklearn.estimators import LaplaceClassifier, LaplaceRegressor

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]

del sklearn
