"""``python -m benchmarks.kernels``: our kernels for many models by themselves, by what is shipped and by other tiles.

Shapes are those of EMNIST (the paper's CNN, in TF32), of CIFAR (EfficientNet-Lite0's depthwise convolutions with
images enlarged to 64 pixels, in bfloat16) and of Shakespeare (a layer of the LSTM over 80 characters, in TF32); batches
of 128. The floor of a kernel is how long a copy takes that moves as many bytes as the kernel must: each input is read
once and each output written once. What other tiles compute is compared with what is shipped.

Without a GPU nothing can be timed; --quick has Triton interpret the kernels on tiny shapes, to see that they run.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import add_names
from benchmarks.measure import Effort, environment, measure

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from fedem.core.precision import products, where_models_compute
from fedem.models import kernels
from fedem.models.convolutions import Geometry, Pair
from fedem.models.kernels import Tile

SHIPPED = "shipped"
_COPIED = 2**28  # numbers of a copy that is timed for the floor

Change = Mapping[str, object]  # of tiles by their names, or of a constant of the module
Work = tuple[Callable[[], Sequence[Tensor]], int]  # what is timed and returns what it wrote; bytes that it must move


class Job(NamedTuple):
    """What is timed, made on a device, tiny or not; and what else to try."""

    make: Callable[[torch.device, bool], Work]
    others: Sequence[Change] = ()


def _bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _convolution(
    way: str, models: int, channels: int, outputs: int, side: int, geometry: Geometry, dtype: torch.dtype
) -> Callable[[torch.device, bool], Work]:
    """Return what makes a convolution of square images, or one of its two gradients."""

    def make(device: torch.device, tiny: bool) -> Work:
        num_models, samples, pixels, num_inputs, num_outputs = (
            (2, 1, 6, 3, 3) if tiny else (models, 128, side, channels, outputs)
        )
        size: Pair = (pixels, pixels)
        shape = num_models, num_outputs, 1 if geometry.depthwise else num_inputs, *geometry.window
        inputs = torch.randn(num_models, samples, *size, num_inputs, device=device, dtype=dtype)
        weight = torch.randn(shape, device=device, dtype=dtype)
        gradient = torch.randn(num_models, samples, *geometry.shrink(size), num_outputs, device=device, dtype=dtype)
        ways: dict[str, Callable[[], Tensor]] = {
            "forwards": lambda: kernels.convolve(inputs, weight, geometry),
            "backwards": lambda: kernels.convolve_back(gradient, weight, size, geometry),
            "of weights": lambda: kernels.weight_gradient(inputs, gradient, geometry),
        }
        return lambda: [ways[way]()], _bytes_of(inputs, weight, gradient)

    return make


def _recurrence(way: str, models: int) -> Callable[[torch.device, bool], Work]:
    """Return what makes the loop over time of an LSTM's layer."""

    def make(device: torch.device, tiny: bool) -> Work:
        times, samples, size = (2, 3, 5) if tiny else (80, 128, 256)
        num_models = min(models, 2) if tiny else models

        def draw(*shape: int) -> Tensor:
            return torch.randn(num_models, *shape, device=device) / size**0.5

        weight, shares = draw(4 * size, size), draw(times, samples, 4 * size)
        states, cells = draw(times + 1, samples, size), draw(times + 1, samples, size)
        gates, bias = torch.empty_like(shares), draw(4 * size)

        def forwards() -> Sequence[Tensor]:
            kernels.recur(shares, bias, weight, gates, states, cells)
            return gates, states, cells

        activated, turned, outer = draw(times, samples, 4 * size).sigmoid(), draw(size, 4 * size), draw(samples, size)
        grad_hidden, grads = draw(times, samples, size), torch.empty_like(shares)

        def backwards() -> Sequence[Tensor]:
            grad_cell = outer.clone()
            kernels.recur_back(turned, activated, cells, grads, grad_hidden, grad_cell)
            return grads, grad_cell

        if way == "forwards":
            return forwards, _bytes_of(shares, weight, gates, states, cells)
        return backwards, _bytes_of(turned, activated, cells, grads, grad_hidden)

    return make


def _emnist() -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    plain = Geometry((3, 3), (1, 1), (0, 0), False)
    shapes = {"first": (2, 32, 28), "second": (32, 64, 26)}
    tiles = [Tile(128, 64), Tile(128, 64, stages=4), Tile(256, 64, stages=2), Tile(128, 32, stages=4)]
    sums = [Tile(64, 64), Tile(32, 64, 256), Tile(128, 128, 256), Tile(128, 128, stages=4)]
    for layer, (channels, outputs, side) in shapes.items():
        for way in ("forwards", "backwards", "of weights"):
            if (layer, way) == ("first", "backwards"):
                continue  # pixels have no gradient
            others: list[Change] = [{"convolve, float32": tile} for tile in tiles]
            if way == "of weights":
                others = [{"gradient of weights": tile} for tile in sums] + [{"_FEW": 64}]
            make = _convolution(way, 20, channels, outputs, side, plain, torch.float32)
            jobs[f"EMNIST, {layer} convolution, {way}"] = Job(make, others)
    return jobs


def _cifar() -> dict[str, Job]:
    jobs = {}
    for window, stride, channels, side in ((3, 1, 32, 32), (5, 1, 240, 8), (3, 2, 240, 8), (5, 1, 672, 4)):
        geometry = Geometry((window, window), (stride, stride), (window // 2, window // 2), True)
        for way in ("forwards", "backwards", "of weights"):
            name = f"CIFAR, depthwise {window} x {window}, stride {stride}, {side} pixels, {way}"
            others = [{"_MOST_BESIDE": 4}, {"_MOST_BESIDE": 16}, {"_BUSY": 1024}, {"_BUSY": 4096}]
            jobs[name] = Job(_convolution(way, 24, channels, channels, side, geometry, torch.bfloat16), others)
    return jobs


def _shakespeare() -> dict[str, Job]:
    jobs = {}
    forwards = [Tile(64, 32, stages=4), Tile(64, 16), Tile(32, 16, stages=4), Tile(32, 16, 256), Tile(16, 32, 256)]
    backwards = [Tile(64, 32, 128, 4), Tile(64, 16, 256, 4), Tile(32, 32, 256, 4), Tile(32, 16, 512), Tile(128, 32)]
    for models in (1, 10, 100):
        for way, names, tiles in (
            ("forwards", ("recur", "recur, few models"), forwards),
            ("backwards", ("recur back",), backwards),
        ):
            others: list[Change] = [dict.fromkeys(names, tile) for tile in tiles]
            plural = "s" if models > 1 else ""
            jobs[f"Shakespeare, LSTM of {models} model{plural}, {way}"] = Job(_recurrence(way, models), others)
    return jobs


FAMILIES = {"emnist": _emnist, "cifar": _cifar, "shakespeare": _shakespeare}


def _is_shipped(change: Change) -> bool:
    """Whether a change would change nothing."""
    return all(kernels._TILES.get(name, vars(kernels).get(name)) == value for name, value in change.items())


def _changed(change: Change) -> ExitStack:
    """Return what makes a change as long as it is open."""
    stack = ExitStack()
    for name, value in change.items():
        if name in kernels._TILES:
            stack.enter_context(patch.dict(kernels._TILES, {name: value}))
        else:
            stack.enter_context(patch.object(kernels, name, value))
    return stack


def _called(change: Change) -> str:
    """Say a change in a few words."""
    if not change:
        return SHIPPED
    name, value = next(iter(change.items()))
    if not isinstance(value, Tile):
        return f"{name} = {value}"
    return f"{value.rows} x {value.columns}, {value.inner} bytes, {value.stages} stages"


def _seconds(run: Callable[[], object], on_gpu: bool) -> float:
    """Time what a call launches, captured as a graph, so that the launches themselves are not what is timed."""
    if not on_gpu:
        return measure(run, Effort(0, 1)).median
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(run, rep=20, return_mode="median")) / 1e3


def _copy_rate(device: torch.device, tiny: bool) -> float:
    """Return how many bytes a copy moves in a second, read and written."""
    source = torch.ones(1024 if tiny else _COPIED, device=device)
    target = torch.empty_like(source)
    return _bytes_of(source, target) / _seconds(lambda: target.copy_(source), device.type == "cuda")


def _off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative distance, |found - expected| / |expected|; what is not a number is infinitely off."""
    pairs = list(zip(found, expected, strict=True))
    off = max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)
    return off if all(bool(torch.isfinite(one).all()) for one, _ in pairs) else float("inf")


def run_job(job: Job, device: torch.device, tiny: bool, rate: float) -> list[dict[str, Any]]:
    """Time a job by each of its tiles, the shipped ones first."""
    run, moved = job.make(device, tiny)
    rows: list[dict[str, Any]] = []
    expected: list[Tensor] = []
    for change in ({}, *(change for change in job.others if not _is_shipped(change))):
        row: dict[str, Any] = {"tile": _called(change)}
        with _changed(change):
            try:
                found = [leaf.clone() for leaf in run()]
            except Exception as error:  # Triton's own, of a tile that is larger than a GPU's memory for it
                if not change:
                    raise
                rows.append(row | {"failed": str(error).splitlines()[0]})
                continue
            expected = expected or found
            seconds = _seconds(run, device.type == "cuda")
        floor = moved / rate
        to_shipped = seconds / rows[0]["seconds"] if rows else 1.0
        row |= {"seconds": seconds, "to_floor": seconds / floor, "to_shipped": to_shipped}
        rows.append(row | {"off": _off(found, expected)})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Time each kernel, print a table of each and, if asked, write all figures to a file as they come."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    add_names(parser, "--families", "family", FAMILIES)
    parser.add_argument("--shipped", action="store_true", help="leave out other tiles, whose compilation takes seconds")
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny shapes; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        parser.error("there is no GPU, and without one nothing can be timed; allowed: --quick.")
    rate = _copy_rate(device, options.quick)
    figures: dict[str, Any] = {"environment": environment(), "bytes_copied_in_a_second": rate, "kernels": {}}
    console = Console(highlight=False, markup=False, width=110)
    console.print(f"A copy moves {rate / 1e12:.2f} TB/s, read and written.")
    with products("tf32", device), where_models_compute():
        for family in options.families:
            for name, job in FAMILIES[family]().items():
                others = () if options.shipped else job.others[: 1 if options.quick else None]
                job = job._replace(others=others)
                rows = figures["kernels"][name] = run_job(job, device, options.quick, rate)
                console.print(_table(name, rows))
                if options.out:
                    options.out.write_text(json.dumps(figures, indent=2) + "\n")


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=name, box=box.ASCII2, title_justify="left")
    for heading in ("tile", "microseconds", "to its floor", "to shipped", "off"):
        table.add_column(heading, justify="left" if heading == "tile" else "right")
    for row in rows:
        if "failed" in row:
            table.add_row(row["tile"], row["failed"][:50])
        else:
            ratios = (f"{row[key]:.2f}" for key in ("to_floor", "to_shipped"))
            table.add_row(row["tile"], f"{row['seconds'] * 1e6:.1f}", *ratios, f"{row['off']:.0e}")
    return table


if __name__ == "__main__":
    main()
