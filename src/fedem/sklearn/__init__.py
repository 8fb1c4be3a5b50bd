"""Estimators with scikit-learn's conventions, whose groups are the clients: ``pip install 'fedem[sklearn]'``."""

from fedem.core.errors import needed

needed("fedem.sklearn", "sklearn", extra="sklearn")

from fedem.sklearn.estimators import FedEMClassifier, FedEMRegressor  # noqa: E402  # scikit-learn is asked for first

__all__ = ["FedEMClassifier", "FedEMRegressor"]
