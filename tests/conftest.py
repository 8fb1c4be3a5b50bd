"""Settings for the whole suite."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# The same examples on every machine, and no limit on the time of one: the first use of torch alone takes a second.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("suite")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
