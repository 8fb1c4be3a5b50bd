"""Experiments that are declared, not programmed: a file says which runs a table of the paper is made of."""

from fedem.experiments.declared import Experiment, find, listed, read
from fedem.experiments.entries import Entry, plan, sort_settings
from fedem.experiments.lines import Line, tabulate
from fedem.experiments.work import LatestData, check, work_off

__all__ = [
    "Entry",
    "Experiment",
    "LatestData",
    "Line",
    "check",
    "find",
    "listed",
    "plan",
    "read",
    "sort_settings",
    "tabulate",
    "work_off",
]
