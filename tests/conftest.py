"""Settings for the whole suite."""

from __future__ import annotations

import torch
from hypothesis import settings

# The same examples on every machine, and no limit on the time of one: the first use of torch alone takes a second.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("suite")

# Tensors as small as the tests' only wait for further threads.
torch.set_num_threads(1)
