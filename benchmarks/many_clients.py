"""A round costs what its cohort costs, however many clients there are."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine import NUM_COMPONENTS, SEED, make_training
from benchmarks.measure import Effort, measure
from fedem.core.tree import tree_bytes
from fedem.data.synthetic import Synthetic
from fedem.engines import Batching
from fedem.runs.rounds import Training

_FLOAT_BYTES = 4


class Crowd(NamedTuple):
    """Sizes of the measurement."""

    few: int = 1_000
    many: int = 100_000
    cohort_size: int = 100
    samples: int = 50
    dimension: int = 20
    effort: Effort = Effort(warm_up=20, repeats=50)


def compare(crowd: Crowd) -> dict[str, object]:
    """Measure few and many clients, each in a fresh process so that its memory is its own."""
    figures = {name: _in_fresh_process(crowd, count) for name, count in (("few", crowd.few), ("many", crowd.many))}
    ratio = figures["many"]["seconds"] / figures["few"]["seconds"]
    return {"cohort_size": crowd.cohort_size, **figures, "ratio_many_to_few": ratio}


def _in_fresh_process(crowd: Crowd, num_clients: int) -> dict[str, float]:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train_crowd, crowd, num_clients).result()


def _prepare(crowd: Crowd, num_clients: int, cohort_size: int) -> Training:
    source = Synthetic(
        num_clients=num_clients,
        dimension=crowd.dimension,
        min_samples=crowd.samples,
        max_samples=crowd.samples,
        num_validation=0,
        num_test=0,
    )
    return make_training("fedem", source.make(SEED).federation, Batching(), cohort_size)


def train_crowd(crowd: Crowd, num_clients: int) -> dict[str, float]:
    """Run FedEM rounds of a small cohort among ``num_clients`` clients in this process."""
    # The first gradient makes torch import a good deal; that memory is not of the training measured here.
    tiny = _prepare(crowd, 2, cohort_size=2)
    tiny.step(tiny.init())
    started = time.perf_counter()
    training = _prepare(crowd, num_clients, crowd.cohort_size)
    data_seconds = time.perf_counter() - started
    peak_of_data = _peak_bytes()
    resident = _forget_peak()
    state = training.init()

    def advance() -> None:
        nonlocal state
        state, _ = training.step(state)

    timing = measure(advance, crowd.effort)
    peak_of_training = _peak_bytes()
    bytes_per_client = tree_bytes(state.personal) / num_clients
    allowed = NUM_COMPONENTS["fedem"] * _FLOAT_BYTES
    if bytes_per_client != allowed:
        raise RuntimeError(f"A client's state takes {bytes_per_client:g} bytes; allowed: {allowed}, its weights.")
    return {
        "num_clients": num_clients,
        "seconds": timing.median,
        "fastest": min(timing.repeats),
        "data_seconds": data_seconds,
        "data_bytes": training.federation.train.num_bytes,
        "peak_bytes": max(peak_of_data, peak_of_training),
        "resident_bytes_before_training": resident,
        "peak_increase_in_training_bytes": max(0, peak_of_training - resident),
        "state_bytes_per_client": bytes_per_client,
    }


def _peak_bytes() -> int:
    """Return the most memory that this process ever had resident (or since :func:`_forget_peak`).

    Linux's getrusage counts what the parent had when it started this process, so the process's own mark comes first.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_peak() -> int:
    """Let the peak start afresh from what is resident now, and return that.

    Making the data needs more memory than training does, so its peak would hide that of training. Where the system
    can't forget (other than Linux), the peak so far is returned and the increase is understated.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()
