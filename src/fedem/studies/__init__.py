"""Many runs: comparisons, declared experiments, searches, and trials of the theorems."""

from fedem.studies.tuning import Search, tune, usual_grids

__all__ = ["Search", "tune", "usual_grids"]
