"""Settings chosen on the validation part: what is tried, and what comes of it."""

from fedem.tuning.grids import SAMPLERS, read_grids, usual_grids
from fedem.tuning.search import Search, without_test
from fedem.tuning.trials import Trial, Tuned, check_place, tune

__all__ = ["SAMPLERS", "Search", "Trial", "Tuned", "check_place", "read_grids", "tune", "usual_grids", "without_test"]
