"""How much memory the machine can still give."""

import os
from pathlib import Path


def free_host_bytes() -> int:
    """Return the bytes that can still be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # no Linux: what was never touched is a lower bound
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
