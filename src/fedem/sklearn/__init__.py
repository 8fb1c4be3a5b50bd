"""Estimators with scikit-learn's conventions, whose groups are the clients: ``pip install 'fedem[sklearn]'``."""

from fedem.core.errors import needed

try:
    from fedem.sklearn.estimators import FedEMClassifier, FedEMRegressor
except ImportError:
    needed("fedem.sklearn", "sklearn", extra="sklearn")
    raise

__all__ = ["FedEMClassifier", "FedEMRegressor"]
