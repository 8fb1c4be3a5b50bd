"""scikit-learn's own checks of estimators: all of them pass, none is expected to fail."""

from __future__ import annotations

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

from fedem.sklearn import FedEMClassifier, FedEMRegressor

# Few steps, and no recording of them: the checks fit some two hundred times.
QUICK = {"rounds": 2, "learning_rate": 0.5, "settings": {"local_steps": 8, "engine": "one_by_one"}}


@parametrize_with_checks([FedEMClassifier(**QUICK), FedEMRegressor(**QUICK)], expected_failed_checks=lambda each: {})
def test_an_estimator_keeps_the_conventions(estimator: Any, check: Any) -> None:
    check(estimator)
