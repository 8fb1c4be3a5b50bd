"""Timing, and what it was measured on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

BUSY = 0.1
"""Cores busy with other processes above which timings can't be trusted: parallel steps wait for the slowest thread."""


class Effort(NamedTuple):
    """How often something is timed."""

    warm_up: int
    repeats: int


class Timing(NamedTuple):
    """Seconds of each repeat, in order."""

    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.repeats)

    def figures(self) -> dict[str, object]:
        """Return what goes into the JSON file."""
        return {"seconds": self.median, "fastest": min(self.repeats), "repeats": list(self.repeats)}


def measure(run: Callable[[], object], effort: Effort) -> Timing:
    """Time each of several calls after some that don't count."""
    for _ in range(effort.warm_up):
        run()
    seconds = []
    for _ in range(effort.repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return Timing(tuple(seconds))


class Operation(NamedTuple):
    """A kernel of a GPU or, on a CPU, one of torch's operations."""

    name: str
    seconds: float  # by itself, of all launches
    launches: int


def operations(run: Callable[[], object], device: torch.device) -> list[Operation]:
    """Return what a call has the device do."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        run()
    pairs = (
        (event, event.self_device_time_total if on_gpu else event.self_cpu_time_total) for event in found.key_averages()
    )
    return [Operation(event.key, microseconds / 1e6, event.count) for event, microseconds in pairs if microseconds]


class Disturbance:
    """How much of the machine other processes took since this was made."""

    def __init__(self) -> None:
        self._started, self._others = time.perf_counter(), _seconds_of_others()

    def cores(self) -> float | None:
        """Return how many cores others kept busy on average; None where the system does not tell (only Linux does)."""
        now = _seconds_of_others()
        if now is None or self._others is None:
            return None
        return max(0.0, now - self._others) / (time.perf_counter() - self._started)


def show_disturbance(console: Console, cores: float | None) -> None:
    """Print how many cores others kept busy, and whether that was too many; nothing where it is unknown."""
    if cores is None:
        return
    console.print(f"\nOther processes kept {cores:.2f} cores busy meanwhile.")
    if cores > BUSY:
        console.print(
            "That is too much for these figures to mean anything; run again on an idle machine.", soft_wrap=True
        )


def _seconds_of_others() -> float | None:
    """Return the processor time of the whole machine less that of this process and its finished children."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    # See proc(5): user, nice, system, idle, waiting, two kinds of interrupts, stolen by other virtual machines.
    ticks = [int(word) for word in path.read_text().splitlines()[0].split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def environment() -> dict[str, object]:
    """Name the processor, the number of threads and the versions."""
    return {
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
