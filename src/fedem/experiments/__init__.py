"""Experiments that are declared, not programmed: a file says which runs a table of the paper is made of."""

from fedem.experiments.declared import Experiment, find, listed, read
from fedem.experiments.entries import Entry, plan, sort_settings, work_off
from fedem.experiments.lines import Line, tabulate

__all__ = ["Entry", "Experiment", "Line", "find", "listed", "plan", "read", "sort_settings", "tabulate", "work_off"]
