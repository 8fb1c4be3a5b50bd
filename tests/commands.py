"""Options of the command line that keep a run small."""

from __future__ import annotations

SMALL = ["--set", "data.num_clients=10", "--set", "data.dimension=6", "--set", "data.num_test=30", "--rounds", "4"]
TINY = ["--set", "data.num_clients=6", "--set", "data.dimension=4", "--set", "data.num_test=20", "--rounds", "2"]
