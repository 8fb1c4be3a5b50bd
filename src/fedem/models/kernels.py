"""Triton kernels for many models at once: convolutions, pooling, normalisation and an LSTM, forwards and backwards.

To cuDNN, stacked convolutions are a grouped one, which it cuts into a call for each group. Here a launch serves all
models. Channels come last in memory, so that what is read and written together is adjacent.

Sums are in float32, whatever the type of the inputs, and in a fixed order: the same inputs give the same bits. Rows
of a model are counted in 32 bits, and its numbers in 64.

Shapes: S models, n samples, C input and O output channels, H x W pixels, R = n H W rows of a model, and K places of a
window. Tensors are ``[S, n, C, H, W]`` to torch and ``[S, n, H, W, C]`` in memory; functions here take and return the
latter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# What Triton compiles has no types that a checker knows, and its tuples grow.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedem.models.convolutions import Geometry, Pair

_LONGEST = 16  # tiles that a program passes over where it adds up, if there are others enough
_BUSY = 2048  # programs that occupy a GPU
_ALL = 264  # programs of which each of its multiprocessors has one or two
_MOST_BESIDE = 8  # pixels of a line that a program has at once
_FEW = 16  # channels: with fewer, a product's inner side is all places of a window at once


class Tile(NamedTuple):
    """The most of a product of matrices that one program computes."""

    rows: int
    columns: int
    inner: int = 128  # bytes of its inner side that are read at once
    stages: int = 3  # reads that are under way, and one that is multiplied


# `python -m benchmarks.kernels` tries others. Large ones read less twice, small ones give more programs.
_TILES = {
    "convolve, float32": Tile(256, 64),
    "convolve": Tile(128, 128),
    "gradient of weights": Tile(128, 128),
    "recur": Tile(64, 32),
    "recur, few models": Tile(64, 16, stages=4),
    "recur back": Tile(64, 32, 256, stages=4),
}

P = ParamSpec("P")
R = TypeVar("R")


def _launches(function: Callable[P, R]) -> Callable[P, R]:
    """Launch kernels on the GPU that the first tensor is on, whichever is the current one."""

    @wraps(function)
    def on_its_device(*arguments: P.args, **options: P.kwargs) -> R:
        with torch.cuda.device_of(arguments[0]):  # which is a tensor
            return function(*arguments, **options)

    return on_its_device


def _constants(geometry: Geometry) -> dict[str, int]:
    """Return what a kernel is compiled for."""
    (kernel_h, kernel_w), (stride_h, stride_w), (pad_h, pad_w) = geometry[:3]
    strides = {"STRIDE_H": stride_h, "STRIDE_W": stride_w, "PAD_H": pad_h, "PAD_W": pad_w}
    return {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w, **strides}


@_launches
def convolve(inputs: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Convolve, ``[S, n, H, W, C], [S, O, C, *] -> [S, n, H', W', O]``."""
    size = geometry.shrink((inputs.shape[2], inputs.shape[3]))
    if geometry.depthwise:
        return _filtered(inputs, weight, size, geometry, back=False)
    return _multiplied(inputs, weight.permute(0, 1, 3, 4, 2), size, geometry, back=False)


@_launches
def convolve_back(gradient: Tensor, weight: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    """Return the gradient of inputs of ``size``, ``[S, n, H', W', O], [S, O, C, *] -> [S, n, H, W, C]``."""
    if geometry.depthwise:
        return _filtered(gradient, weight, size, geometry, back=True)
    return _multiplied(gradient, weight.permute(0, 2, 3, 4, 1), size, geometry, back=True)


def _multiplied(images: Tensor, weight: Tensor, size: Pair, geometry: Geometry, back: bool) -> Tensor:
    """Convolve by a weight ``[S, O, k_h, k_w, C]``."""
    (models, samples, height, width, channels), weight = images.shape, weight.contiguous()
    num_rows, num_outputs = samples * size[0] * size[1], weight.shape[1]
    outputs = images.new_empty(models, samples, *size, num_outputs)
    tile = _TILES["convolve, float32" if images.dtype == torch.float32 else "convolve"]
    blocks = _blocks(num_rows, num_outputs, channels, images, tile)
    grid = triton.cdiv(num_rows, blocks["ROWS"]), triton.cdiv(num_outputs, blocks["COLUMNS"]), models
    how = {"BACK": back, "FLAT": channels < _FEW, **blocks}
    sizes = num_rows, *size, height, width, channels, num_outputs
    _multiply[grid](images, weight, outputs, *sizes, **_constants(geometry), **how)
    return outputs


def _filtered(images: Tensor, weight: Tensor, size: Pair, geometry: Geometry, back: bool) -> Tensor:
    """Convolve each channel by itself, by a weight ``[S, C, 1, k_h, k_w]``."""
    models, samples, height, width, channels = images.shape
    outputs = images.new_empty(models, samples, *size, channels)
    weight = weight.squeeze(2).permute(0, 2, 3, 1).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    strips = _strips(samples, size[1], width, channels, geometry, back)
    columns = triton.cdiv(channels, strips.columns)
    # A program passes over the lines of an image one after the other: what one has read is near when the next needs it.
    parts = min(size[0], triton.cdiv(_BUSY, strips.number * columns * models))
    lines = triton.cdiv(size[0], parts)
    grid = strips.number * triton.cdiv(size[0], lines), columns, models
    _filter[grid](images, weight, outputs, samples, size[0], height, lines, BACK=back, **strips.constants)
    return outputs


@_launches
def weight_gradient(inputs: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of the weight, ``[S, n, H, W, C], [S, n, H', W', O] -> [S, O, C, *]``."""
    (models, samples, height, width, channels), (*_, high, wide, outputs) = inputs.shape, gradient.shape
    num_rows, places = samples * high * wide, geometry.window[0] * geometry.window[1]
    # A sum over the rows, or a product whose inner side is the rows, which may be cut into parts.
    if geometry.depthwise:
        strips = _strips(samples, wide, width, channels, geometry)
        tiles = strips.number * high
        grid, parts = _in_parts(geometry.window[0], triton.cdiv(channels, strips.columns), models, tiles)
        found = _room(inputs, models, parts, places, 1, channels)
        _filter_gradient[grid](inputs, gradient, found, parts, samples, high, height, **strips.constants)
    else:
        flat = channels < _FEW
        sides = [places * channels] if flat else [channels] * places
        blocks = _blocks(sides[0], outputs, num_rows, inputs, _TILES["gradient of weights"])
        units = sum(triton.cdiv(side, blocks["ROWS"]) for side in sides)
        columns = triton.cdiv(outputs, blocks["COLUMNS"])
        grid, parts = _in_parts(units, columns, models, triton.cdiv(num_rows, blocks["INNER"]))
        found = _room(inputs, models, parts, places, channels, outputs)
        # Compiled in: to divide by what is not known takes many instructions, in each turn of a loop.
        pixels = {"HIGH": high, "WIDE": wide, "HEIGHT": height, "WIDTH": width}
        given = inputs, gradient, found, parts, num_rows, channels, outputs
        _multiply_gradient[grid](*given, **_constants(geometry), **pixels, FLAT=flat, **blocks)
    whole = found[:, 0] if parts == 1 else found.sum(1).to(inputs.dtype)
    return whole.unflatten(1, geometry.window).permute(0, 4, 3, 1, 2)


def _in_parts(units: int, columns: int, models: int, tiles: int) -> tuple[tuple[int, int, int], int]:
    """Return the grid of programs that add up over ``tiles`` of rows, and into how many parts these are cut for it."""
    parts = max(1, min(_BUSY // (units * columns * models), tiles // _LONGEST))
    return (units * parts, columns, models), parts


def _room(like: Tensor, models: int, parts: int, *shape: int) -> Tensor:
    """Return where sums are put, ``[S, parts, ...]``, with all their digits where parts are added up."""
    dtype = like.dtype if parts == 1 else torch.float32
    return torch.empty(models, parts, *shape, dtype=dtype, device=like.device)


def _blocks(rows: int, columns: int, inner: int, tensor: Tensor, tile: Tile, sums: int = 1) -> dict[str, Any]:
    """Return how one program multiplies matrices: how much of them, powers of two from 16 up, and with what."""
    sides = zip((rows, columns, inner), (*tile[:2], tile.inner // tensor.element_size()), strict=True)
    high, wide, deep = (max(16, min(most, triton.next_power_of_2(side))) for side, most in sides)
    how = {"PRECISION": _precision(tensor), "num_stages": tile.stages}
    return {"ROWS": high, "COLUMNS": wide, "INNER": deep, "num_warps": 8 if sums * high * wide > 8192 else 4, **how}


class _Strips(NamedTuple):
    """How images are cut for programs: into pixels beside each other in a line, of some samples, in some channels."""

    number: int  # of all: of each line, for all samples
    columns: int  # channels of a strip
    constants: dict[str, int]  # what a kernel is compiled for


def _strips(samples: int, wide: int, width: int, channels: int, geometry: Geometry, back: bool = False) -> _Strips:
    """Cut lines of ``wide`` pixels, which see lines of ``width``, as evenly as they come; ``back`` by whole strides."""
    window, stride, padding = (pair[1] for pair in geometry[:3])
    step = stride if back else 1
    steps = triton.cdiv(wide, step)
    in_line = triton.cdiv(steps, max(1, _MOST_BESIDE // step))
    beside = step * triton.cdiv(steps, in_line)
    # The pixels that the first strip sees, and how far the next one's are from these.
    if back:
        left, right, apart = -((window - 1 - padding) // stride), (beside - 1 + padding) // stride, beside // stride
    else:
        left, right, apart = -padding, (beside - 1) * stride + window - 1 - padding, beside * stride
    if in_line == 1:  # what is outside is known
        left, right = max(left, 0), min(right, width - 1)
    widest = min((64, 32), key=lambda side: -channels % side)  # that leaves the last tile the least empty
    # All numbers of a strip are to fit into registers.
    rows, columns = _tile(samples, channels, max(1, 4096 // triton.next_power_of_2(beside)), widest)
    seen = {"WIDE": wide, "WIDTH": width, "LEFT": left, "RIGHT": right, "APART": apart}
    tile = {"STRIPS": in_line, "BESIDE": beside, "CHANNELS": channels, "ROWS": rows, "COLUMNS": columns}
    return _Strips(triton.cdiv(samples, rows) * in_line, columns, {**_constants(geometry), **seen, **tile})


def _tile(rows: int, columns: int, numbers: int = 4096, widest: int = 64) -> Pair:
    """Return how many rows and columns one program passes over together."""
    across = min(widest, triton.next_power_of_2(columns))
    return max(1, min(numbers // across, triton.next_power_of_2(rows))), across


def _precision(tensor: Tensor) -> str:
    """Return how products of float32 are computed: as torch computes its own."""
    return "tf32" if tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def _seen(
    row, high, wide, height, width, down, across,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Return which row of ``[n, height, width]`` one of ``[n, high, wide]`` sees in a place of its window, if any."""
    sample, inner = row // (high * wide), row % (high * wide)
    h, w = inner // wide, inner % wide
    if BACK:  # from an input to the output whose window has it in that place
        h, w = h + PAD_H - down, w + PAD_W - across
        there = (h >= 0) & (w >= 0) & (h % STRIDE_H == 0) & (w % STRIDE_W == 0)
        h, w = h // STRIDE_H, w // STRIDE_W
    else:
        h, w = h * STRIDE_H - PAD_H + down, w * STRIDE_W - PAD_W + across
        there = (h >= 0) & (w >= 0)
    there = there & (h < height) & (w < width)
    return ((sample * height + h) * width + w).to(tl.int64), there


@triton.jit
def _add_product(left, right, there, total, PRECISION: tl.constexpr):
    """Add to ``[ROWS, COLUMNS]`` the product of ``[ROWS, INNER]`` and of what is read, ``[COLUMNS, INNER]``, turned.

    Tensor cores want float32 side by side along the inner side; what lies so in memory is copied four numbers at once.
    """
    return tl.dot(left, tl.trans(tl.load(right, mask=there, other=0.0)), total, input_precision=PRECISION)


@triton.jit
def _multiply(
    images, weight, outputs, num_rows, high, wide, height, width, channels, num_outputs,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BACK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Multiply rows of windows by a model's weight ``[O, k_h k_w C]``, place by place."""
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_seen = num_rows // (high * wide) * height * width
    images += model * num_seen * channels
    weight += model * KERNEL_H * KERNEL_W * channels * num_outputs
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    parts = 1 if FLAT else tl.cdiv(channels, INNER)
    steps = tl.cdiv(KERNEL_H * KERNEL_W * channels, INNER) if FLAT else KERNEL_H * KERNEL_W * parts
    for step in range(steps):
        if FLAT:
            inner = step * INNER + tl.arange(0, INNER)
            known = inner < KERNEL_H * KERNEL_W * channels
            place, channel = (inner // channels)[None, :], inner % channels
            seen, there = _seen(
                row[:, None], high, wide, height, width, place // KERNEL_W, place % KERNEL_W,
                STRIDE_H, STRIDE_W, PAD_H, PAD_W, BACK,
            )  # fmt: skip
            there = there & (row < num_rows)[:, None]
        else:
            place, channel = step // parts, step % parts * INNER + tl.arange(0, INNER)
            inner, known = place * channels + channel, channel < channels
            seen, there = _seen(
                row, high, wide, height, width, place // KERNEL_W, place % KERNEL_W,
                STRIDE_H, STRIDE_W, PAD_H, PAD_W, BACK,
            )  # fmt: skip
            seen, there = seen[:, None], (there & (row < num_rows))[:, None]
        left = tl.load(images + seen * channels + channel[None, :], mask=there & known[None, :], other=0.0)
        right = weight + column[:, None] * KERNEL_H * KERNEL_W * channels + inner[None, :]
        total = _add_product(left, right, (column < num_outputs)[:, None] & known[None, :], total, PRECISION)
    outputs += model * num_rows * num_outputs
    kept = (row < num_rows)[:, None] & (column < num_outputs)[None, :]
    tl.store(outputs + row.to(tl.int64)[:, None] * num_outputs + column[None, :], total, mask=kept)


@triton.jit(do_not_specialize=["parts"])
def _multiply_gradient(
    images, gradient, found, parts, num_rows, channels, num_outputs,
    HIGH: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Multiply what places of all windows saw by the gradients of what was put out."""
    model, unit, part = tl.program_id(2).to(tl.int64), tl.program_id(0) // parts, tl.program_id(0) % parts
    if FLAT:
        inner = unit * ROWS + tl.arange(0, ROWS)
        known = inner < KERNEL_H * KERNEL_W * channels
        place, channel = (inner // channels)[None, :], inner % channels
    else:
        pieces = tl.cdiv(channels, ROWS)
        place, channel = unit // pieces, unit % pieces * ROWS + tl.arange(0, ROWS)
        inner, known = place * channels + channel, channel < channels
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_seen = num_rows // (HIGH * WIDE) * HEIGHT * WIDTH
    images += model * num_seen * channels
    gradient += model * num_rows * num_outputs
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    length = tl.cdiv(tl.cdiv(num_rows, INNER), parts) * INNER
    for first in range(part * length, tl.minimum((part + 1) * length, num_rows), INNER):
        row = first + tl.arange(0, INNER)
        seen, there = _seen(
            row[:, None], HIGH, WIDE, HEIGHT, WIDTH, place // KERNEL_W, place % KERNEL_W,
            STRIDE_H, STRIDE_W, PAD_H, PAD_W, False,
        )  # fmt: skip
        there = there & (row < num_rows)[:, None] & known[None, :]
        left = tl.load(images + seen * channels + channel[None, :], mask=there, other=0.0)
        right = tl.load(
            gradient + row.to(tl.int64)[:, None] * num_outputs + column[None, :],
            mask=(row < num_rows)[:, None] & (column < num_outputs)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    found += (model * parts + part) * KERNEL_H * KERNEL_W * channels * num_outputs
    kept = known[:, None] & (column < num_outputs)[None, :]
    tl.store(found + inner[:, None] * num_outputs + column[None, :], total, mask=kept)


@triton.jit
def _strip(
    num_samples, high, lines,
    STRIPS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a program's strip of a line and its first line, its samples and channels, and which of these there are."""
    strip, rest = tl.program_id(0) % STRIPS, tl.program_id(0) // STRIPS
    parts = tl.cdiv(high, lines)
    sample = (rest // parts * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return strip, rest % parts * lines, sample, channel, (sample < num_samples) & (channel < CHANNELS)


@triton.jit
def _pixel(
    line, strip, place: tl.constexpr, kept,
    WIDTH: tl.constexpr, STRIPS: tl.constexpr, APART: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return the pixel at a ``place`` of a strip in a line of some images; 0 where it is outside."""
    start = strip * APART
    there = kept
    if (place < 0) or ((STRIPS - 1) * APART + place >= WIDTH):  # in some strip
        there = kept & (start + place >= 0) & (start + place < WIDTH)
    return tl.load(line + start * CHANNELS + place * CHANNELS, mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_samples", "lines"])
def _filter(
    images, weight, outputs, num_samples, high, height, lines,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BACK: tl.constexpr,
    STRIPS: tl.constexpr, BESIDE: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Convolve each channel by itself; what some pixels beside each other see is read once."""
    model = tl.program_id(2).to(tl.int64)
    strip, top, sample, channel, kept = _strip(num_samples, high, lines, STRIPS, CHANNELS, ROWS, COLUMNS)
    images += (model * num_samples + sample) * height * WIDTH * CHANNELS + channel
    weight += model * KERNEL_H * KERNEL_W * CHANNELS + channel
    outputs += (model * num_samples + sample) * high * WIDE * CHANNELS + channel
    for h in range(top, tl.minimum(top + lines, high)):
        totals = (tl.zeros((ROWS, COLUMNS), dtype=tl.float32),) * BESIDE
        if BACK:  # from an input to the outputs whose windows have it, which are a stride apart
            step, seen = STRIDE_H, h + PAD_H
            first, last = tl.maximum(seen % STRIDE_H, seen - (height - 1) * STRIDE_H), tl.minimum(seen + 1, KERNEL_H)
        else:
            step, seen = 1, h * STRIDE_H - PAD_H
            first, last = tl.maximum(-seen, 0), tl.minimum(height - seen, KERNEL_H)
        for down in range(first, last, step):
            scales = ()
            for across in tl.static_range(KERNEL_W):
                place = (down * KERNEL_W + across) * CHANNELS
                scales += (tl.load(weight + place, mask=channel < CHANNELS, other=0.0),)
            line = images + ((seen - down) // STRIDE_H if BACK else seen + down) * WIDTH * CHANNELS
            for place in tl.static_range(LEFT, RIGHT + 1):
                pixel = _pixel(line, strip, place, kept, WIDTH, STRIPS, APART, CHANNELS)
                added = ()
                for which in tl.static_range(BESIDE):
                    total = totals[which]
                    for across in tl.static_range(KERNEL_W):
                        if across - PAD_W == (which - place * STRIDE_W if BACK else place - which * STRIDE_W):
                            total += pixel * scales[across]
                    added += (total,)
                totals = added
        for which in tl.static_range(BESIDE):
            w = strip * BESIDE + which
            tl.store(outputs + (h * WIDE + w) * CHANNELS, totals[which], mask=kept & (w < WIDE))


@triton.jit(do_not_specialize=["parts", "num_samples"])
def _filter_gradient(
    images, gradient, found, parts, num_samples, high, height,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    STRIPS: tl.constexpr, BESIDE: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Sum, for each channel and the places in a line of the window, what they saw times the gradients of outputs."""
    # The lines of a part one after the other: what one has read is near when the next one needs it.
    model, down, part = tl.program_id(2).to(tl.int64), tl.program_id(0) % KERNEL_H, tl.program_id(0) // KERNEL_H
    channel = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    images += model * num_samples * height * WIDTH * CHANNELS + channel
    gradient += model * num_samples * high * WIDE * CHANNELS + channel
    totals = (tl.zeros((ROWS, COLUMNS), dtype=tl.float32),) * KERNEL_W  # added up over their rows once, in the end
    # Lines that see one of the images' in this place of the window.
    top = tl.cdiv(tl.maximum(PAD_H - down, 0), STRIDE_H)
    bottom = tl.minimum(high, tl.cdiv(tl.maximum(height + PAD_H - down, 0), STRIDE_H))
    lines = tl.maximum(bottom - top, 0)
    number = tl.cdiv(num_samples, ROWS) * lines
    length = tl.cdiv(number, parts)
    for turn in range(part * length, tl.minimum((part + 1) * length, number)):
        sample, h = (turn // lines * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None], top + turn % lines
        kept = (sample < num_samples) & (channel < CHANNELS)
        sloped = gradient + (sample * high + h) * WIDE * CHANNELS
        line = images + (sample * height + h * STRIDE_H - PAD_H + down) * WIDTH * CHANNELS
        for strip in range(STRIPS):
            slopes = ()
            for which in tl.static_range(BESIDE):
                slopes += (_pixel(sloped, strip, which, kept, WIDE, STRIPS, BESIDE, CHANNELS),)
            for place in tl.static_range(LEFT, RIGHT + 1):
                pixel = _pixel(line, strip, place, kept, WIDTH, STRIPS, APART, CHANNELS)
                added = ()
                for across in tl.static_range(KERNEL_W):
                    total = totals[across]
                    for which in tl.static_range(BESIDE):
                        if across - PAD_W == place - which * STRIDE_W:
                            total += pixel * slopes[which]
                    added += (total,)
                totals = added
    found += ((model * parts + part) * KERNEL_H + down) * KERNEL_W * CHANNELS + channel
    for across in tl.static_range(KERNEL_W):
        tl.store(found + across * CHANNELS, tl.sum(totals[across], axis=0)[None, :], mask=channel < CHANNELS)


@_launches
def pool(images: Tensor, places: Tensor | None, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the largest number of each window and its place in it, ``[n, H, W, C] -> [n, H', W', C]``.

    With ``places`` given, return the numbers there.
    """
    (samples, height, width, channels), size = images.shape, geometry.shrink((images.shape[1], images.shape[2]))
    outputs = images.new_empty(samples, *size, channels)
    given = places is not None
    places = torch.empty_like(outputs, dtype=torch.int8) if places is None else places
    num_rows = samples * size[0] * size[1]
    rows, columns = _tile(num_rows, channels)
    grid = triton.cdiv(num_rows, rows), triton.cdiv(channels, columns)
    how = {"GIVEN": given, "ROWS": rows, "COLUMNS": columns}
    _pool[grid](images, outputs, places, num_rows, *size, height, width, channels, **_constants(geometry), **how)
    return outputs, places


@triton.jit
def _pool(
    images, outputs, places, num_rows, high, wide, height, width, channels,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, GIVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = (row < num_rows)[:, None] & (channel < channels)[None, :]
    own = row[:, None] * channels + channel[None, :]
    best = tl.full((ROWS, COLUMNS), float("-inf"), dtype=tl.float32)
    found = tl.zeros((ROWS, COLUMNS), dtype=tl.int8)
    if GIVEN:
        found = tl.load(places + own, mask=kept, other=-1)
    for place in tl.static_range(KERNEL_H * KERNEL_W):
        seen, there = _seen(
            row, high, wide, height, width, place // KERNEL_W, place % KERNEL_W,
            STRIDE_H, STRIDE_W, PAD_H, PAD_W, False,
        )  # fmt: skip
        inside = kept & there[:, None]
        where = images + seen[:, None] * channels + channel[None, :]
        pixel = tl.load(where, mask=inside, other=float("-inf")).to(tl.float32)
        if GIVEN:
            best = tl.where(found == place, pixel, best)
        else:
            better = (pixel > best) | (pixel != pixel)  # what is not a number is passed on
            best, found = tl.where(better, pixel, best), tl.where(better, place, found).to(tl.int8)
    tl.store(outputs + own, best, mask=kept)
    if not GIVEN:
        tl.store(places + own, found, mask=kept)


@_launches
def pool_back(numbers: Tensor, places: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    """Add numbers up where their places are, ``[n, H', W', C] -> [n, H, W, C]``."""
    samples, high, wide, channels = numbers.shape
    outputs = numbers.new_empty(samples, *size, channels)
    num_rows = samples * size[0] * size[1]
    rows, columns = _tile(num_rows, channels)
    grid = triton.cdiv(num_rows, rows), triton.cdiv(channels, columns)
    how = {"ROWS": rows, "COLUMNS": columns}
    _pool_back[grid](numbers, places, outputs, num_rows, *size, high, wide, channels, **_constants(geometry), **how)
    return outputs


@triton.jit
def _pool_back(
    numbers, places, outputs, num_rows, high, wide, height, width, channels,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = (row < num_rows)[:, None] & (channel < channels)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for place in tl.static_range(KERNEL_H * KERNEL_W):
        seen, there = _seen(
            row, high, wide, height, width, place // KERNEL_W, place % KERNEL_W,
            STRIDE_H, STRIDE_W, PAD_H, PAD_W, True,
        )  # fmt: skip
        inside, where = kept & there[:, None], seen[:, None] * channels + channel[None, :]
        is_its = tl.load(places + where, mask=inside, other=-1) == place
        total += tl.load(numbers + where, mask=inside & is_its, other=0.0).to(tl.float32)
    tl.store(outputs + row[:, None] * channels + channel[None, :], total, mask=kept)


@_launches
def moments(rows: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return means and variances, ``[S, R, C] -> [S, C]``, of the rows ``[S, R]`` that are counted (None: all)."""
    models, num_rows, channels = rows.shape
    mean, variance = torch.empty(2, models, channels, dtype=torch.float32, device=rows.device)
    high, across = _tile(num_rows, channels)
    grid = triton.cdiv(channels, across), models
    mask = rows if counted is None else counted
    how = {"MASKED": counted is not None, "ROWS": high, "COLUMNS": across}
    _moments[grid](rows, mask, mean, variance, num_rows, channels, **how)
    return mean, variance


@triton.jit
def _moments(
    images, mask, mean, variance, num_rows, channels,
    MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Join the counts, means and sums of squares of parts, which loses no digits (Chan et al. 1983)."""
    model = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    images += model * num_rows * channels
    count = 0.0
    centre, square = tl.zeros((COLUMNS,), dtype=tl.float32), tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        weight = (row < num_rows).to(tl.float32)
        if MASKED:
            weight = tl.load(mask + model * num_rows + row, mask=row < num_rows, other=0).to(tl.float32)
        kept = (row < num_rows)[:, None] & (channel < channels)[None, :]
        pixel = tl.load(images + row.to(tl.int64)[:, None] * channels + channel[None, :], mask=kept, other=0.0).to(
            tl.float32
        )
        own = tl.sum(weight)
        middle = tl.sum(pixel * weight[:, None], axis=0) / tl.maximum(own, 1.0)
        away = pixel - middle[None, :]
        joined = tl.maximum(count + own, 1.0)
        gap = middle - centre
        square += tl.sum(away * away * weight[:, None], axis=0) + gap * gap * (count * own / joined)
        centre += gap * (own / joined)
        count += own
    place = model * channels + channel
    tl.store(mean + place, centre, mask=channel < channels)
    tl.store(variance + place, square / tl.maximum(count, 1.0), mask=channel < channels)


@_launches
def normalise(rows: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return ``(rows - mean) * scale + shift``, ``[S, R, C]`` by ``[S, C]``, in the type of the rows."""
    models, num_rows, channels = rows.shape
    outputs = torch.empty_like(rows)
    high, across = _tile(num_rows, channels)
    grid = triton.cdiv(num_rows, high), triton.cdiv(channels, across), models
    _normalise[grid](rows, mean, scale, shift, outputs, num_rows, channels, ROWS=high, COLUMNS=across)
    return outputs


@triton.jit
def _normalise(
    images, mean, scale, shift, outputs, num_rows, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place, known = model * channels + channel, channel < channels
    middle = tl.load(mean + place, mask=known, other=0.0)
    slope, level = tl.load(scale + place, mask=known, other=0.0), tl.load(shift + place, mask=known, other=0.0)
    where = model * num_rows * channels + row.to(tl.int64)[:, None] * channels + channel[None, :]
    kept = (row < num_rows)[:, None] & known[None, :]
    pixel = tl.load(images + where, mask=kept, other=0.0).to(tl.float32)
    tl.store(outputs + where, (pixel - middle[None, :]) * slope[None, :] + level[None, :], mask=kept)


@_launches
def sums(rows: Tensor, gradient: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return, over all rows, the sums of the gradient and of the gradient times ``rows - mean``, ``[S, C]``."""
    models, num_rows, channels = rows.shape
    plain, crossed = torch.empty(2, models, channels, dtype=torch.float32, device=rows.device)
    high, across = _tile(num_rows, channels)
    grid = triton.cdiv(channels, across), models
    _sums[grid](rows, gradient, mean, plain, crossed, num_rows, channels, ROWS=high, COLUMNS=across)
    return plain, crossed


@triton.jit
def _sums(
    images, gradient, mean, plain, crossed, num_rows, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place, known = model * channels + channel, channel < channels
    middle = tl.load(mean + place, mask=known, other=0.0)
    first_sum, second_sum = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        where = model * num_rows * channels + row.to(tl.int64)[:, None] * channels + channel[None, :]
        kept = (row < num_rows)[:, None] & known[None, :]
        pixel = tl.load(images + where, mask=kept, other=0.0).to(tl.float32)
        slope = tl.load(gradient + where, mask=kept, other=0.0).to(tl.float32)
        first_sum += slope
        second_sum += slope * (pixel - middle[None, :])
    tl.store(plain + place, tl.sum(first_sum, axis=0), mask=known)
    tl.store(crossed + place, tl.sum(second_sum, axis=0), mask=known)


@_launches
def normalise_back(
    rows: Tensor, gradient: Tensor, counted: Tensor | None, mean: Tensor, scale: Tensor, level: Tensor, slope: Tensor
) -> Tensor:
    """Return ``scale * gradient - level - slope * (rows - mean)``, the last two for counted rows alone."""
    models, num_rows, channels = rows.shape
    outputs = torch.empty_like(rows)
    high, across = _tile(num_rows, channels)
    grid = triton.cdiv(num_rows, high), triton.cdiv(channels, across), models
    mask = rows if counted is None else counted
    how = {"MASKED": counted is not None, "ROWS": high, "COLUMNS": across}
    _normalise_back[grid](rows, gradient, mask, mean, scale, level, slope, outputs, num_rows, channels, **how)
    return outputs


@triton.jit
def _normalise_back(
    images, gradient, mask, mean, scale, level, slope, outputs, num_rows, channels,
    MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place, known = model * channels + channel, channel < channels
    middle, factor = tl.load(mean + place, mask=known, other=0.0), tl.load(scale + place, mask=known, other=0.0)
    lift, tilt = tl.load(level + place, mask=known, other=0.0), tl.load(slope + place, mask=known, other=0.0)
    where = model * num_rows * channels + row.to(tl.int64)[:, None] * channels + channel[None, :]
    kept = (row < num_rows)[:, None] & known[None, :]
    pixel = tl.load(images + where, mask=kept, other=0.0).to(tl.float32)
    own = tl.load(gradient + where, mask=kept, other=0.0).to(tl.float32)
    through = lift[None, :] + tilt[None, :] * (pixel - middle[None, :])
    if MASKED:
        weight = tl.load(mask + model * num_rows + row, mask=row < num_rows, other=0).to(tl.float32)
        through = through * weight[:, None]
    tl.store(outputs + where, own * factor[None, :] - through, mask=kept)


@_launches
def rescale(rows: Tensor, leaves: Sequence[Tensor], eps: float, bounds: tuple[float, float]) -> Tensor:
    """Normalise rows by what is given: ``(rows - mean) / sqrt(variance + eps) * weight + bias``, between two bounds.

    ``leaves`` are means, variances, weights and biases, ``[S, C]``; rows are ``[S, R, C]``, and so is what is returned.
    """
    models, num_rows, channels = rows.shape
    outputs = torch.empty_like(rows)
    high, across = _tile(num_rows, channels)
    grid = triton.cdiv(num_rows, high), triton.cdiv(channels, across), models
    _rescale[grid](rows, *leaves, outputs, eps, *bounds, num_rows, channels, ROWS=high, COLUMNS=across)
    return outputs


@triton.jit
def _line(mean, variance, weight, bias, place, known, eps):
    """Return the middle of some channels and what is multiplied and added once it is taken off."""
    middle, spread = tl.load(mean + place, mask=known, other=0.0), tl.load(variance + place, mask=known, other=1.0)
    inverse = 1 / tl.sqrt(spread + eps)
    factor, level = tl.load(weight + place, mask=known, other=0.0), tl.load(bias + place, mask=known, other=0.0)
    return middle, inverse, factor * inverse, level


@triton.jit
def _rescale(
    images, mean, variance, weight, bias, outputs, eps, low, high, num_rows, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = channel < channels
    middle, _, scale, level = _line(mean, variance, weight, bias, model * channels + channel, known, eps)
    where = model * num_rows * channels + row.to(tl.int64)[:, None] * channels + channel[None, :]
    kept = (row < num_rows)[:, None] & known[None, :]
    pixel = tl.load(images + where, mask=kept, other=0.0).to(tl.float32)
    found = (pixel - middle[None, :]) * scale[None, :] + level[None, :]
    found = tl.where(found < low, low, tl.where(found > high, high, found))  # what is not a number is passed on
    tl.store(outputs + where, found, mask=kept)


@_launches
def rescale_back(
    gradient: Tensor, rows: Tensor, leaves: Sequence[Tensor], eps: float, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows ``[S, R, C]``, of the weights and of the biases ``[S, C]``, in one pass."""
    models, num_rows, channels = rows.shape
    outputs = torch.empty_like(rows)
    high, across = _tile(num_rows, channels)
    tiles = triton.cdiv(num_rows, high)
    steps = max(1, min(_LONGEST, tiles // _LONGEST))
    grid = triton.cdiv(tiles, steps), triton.cdiv(channels, across), models
    sums = torch.empty(2, models, grid[0], channels, dtype=torch.float32, device=rows.device)
    how = {"ROWS": high, "COLUMNS": across}
    _rescale_back[grid](rows, gradient, *leaves, outputs, sums, eps, *bounds, steps, num_rows, channels, **how)
    of_weight, of_bias = sums.sum(2)
    return outputs, of_weight, of_bias


@triton.jit(do_not_specialize=["steps"])
def _rescale_back(
    images, gradient, mean, variance, weight, bias, outputs, sums, eps, low, high, steps, num_rows, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part, model = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = channel < channels
    middle, inverse, scale, level = _line(mean, variance, weight, bias, model * channels + channel, known, eps)
    crossed, plain = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(steps):
        row = (part * steps + step) * ROWS + tl.arange(0, ROWS)
        where = model * num_rows * channels + row.to(tl.int64)[:, None] * channels + channel[None, :]
        kept = (row < num_rows)[:, None] & known[None, :]
        away = tl.load(images + where, mask=kept, other=0.0).to(tl.float32) - middle[None, :]
        slope = tl.load(gradient + where, mask=kept, other=0.0).to(tl.float32)
        found = away * scale[None, :] + level[None, :]
        slope = tl.where((found <= low) | (found >= high), 0.0, slope)
        tl.store(outputs + where, slope * scale[None, :], mask=kept)
        crossed += slope * away
        plain += slope
    spot = (model * tl.num_programs(0) + part) * channels + channel
    tl.store(sums + spot, tl.sum(crossed, axis=0) * inverse, mask=known)
    num_models = tl.num_programs(2).to(tl.int64)
    tl.store(sums + num_models * tl.num_programs(0) * channels + spot, tl.sum(plain, axis=0), mask=known)


@_launches
def recur(shares: Tensor, bias: Tensor, weight: Tensor, gates: Tensor, hidden: Tensor, cells: Tensor) -> None:
    """Run an LSTM's loop over time, a launch for each time.

    ``shares`` ``[S, T, n, 4h]`` are the inputs' part of the gates, to which ``bias`` ``[S, 4h]`` is added; ``gates``
    become the activated ones: output, input, forget, candidate. ``hidden`` and ``cells`` ``[S, T + 1, n, h]`` hold the
    first ones; ``weight`` is ``[S, 4h, h]``.
    """
    models, times, samples, size = *shares.shape[:3], hidden.shape[-1]
    blocks, grid = _recurrent(models, samples, size, shares, "recur", "recur, few models")
    given = shares, bias, weight, gates, hidden, cells
    for time in range(times):
        _recur[grid](*given, time, times, samples, SIZE=size, **blocks)


def _recurrent(
    models: int, samples: int, size: int, tensor: Tensor, *names: str
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Return how programs share the work of a time, and how many there are, by the first tile that occupies a GPU."""
    for name in names:
        blocks = _blocks(samples, size, size, tensor, _TILES[name], sums=4)  # of four gates
        grid = triton.cdiv(samples, blocks["ROWS"]), triton.cdiv(size, blocks["COLUMNS"]), models
        if math.prod(grid) >= _ALL:
            break
    return blocks, grid


@triton.jit(do_not_specialize=["time"])
def _recur(
    shares, bias, weight, gates, hidden, cells, time, num_times, num_samples, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    before = (model * (num_times + 1) + time) * num_samples  # of states
    weight += model * 4 * SIZE * SIZE
    leave, enter = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    keep, candidate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, SIZE, INNER):
        inner = start + tl.arange(0, INNER)
        seen = (row < num_samples)[:, None] & (inner < SIZE)[None, :]
        left = tl.load(hidden + (before + row)[:, None] * SIZE + inner[None, :], mask=seen, other=0.0)
        right = weight + column[:, None] * SIZE + inner[None, :]
        there = (column < SIZE)[:, None] & (inner < SIZE)[None, :]
        leave = _add_product(left, right, there, leave, PRECISION)
        enter = _add_product(left, right + SIZE * SIZE, there, enter, PRECISION)
        keep = _add_product(left, right + 2 * SIZE * SIZE, there, keep, PRECISION)
        candidate = _add_product(left, right + 3 * SIZE * SIZE, there, candidate, PRECISION)
    row, column, kept = _places(num_samples, SIZE, ROWS, COLUMNS)
    gate = ((model * num_times + time) * num_samples + row) * 4 * SIZE + column
    level = bias + model * 4 * SIZE + column
    leave = tl.sigmoid(_gate(leave, shares + gate, level, kept))
    enter = tl.sigmoid(_gate(enter, shares + gate + SIZE, level + SIZE, kept))
    keep = tl.sigmoid(_gate(keep, shares + gate + 2 * SIZE, level + 2 * SIZE, kept))
    candidate = _tanh(_gate(candidate, shares + gate + 3 * SIZE, level + 3 * SIZE, kept))
    old = (before + row) * SIZE + column
    new = old + num_samples * SIZE
    cell = keep * tl.load(cells + old, mask=kept, other=0.0) + enter * candidate
    tl.store(cells + new, cell, mask=kept)
    tl.store(hidden + new, leave * _tanh(cell), mask=kept)
    tl.store(gates + gate, leave, mask=kept)
    tl.store(gates + gate + SIZE, enter, mask=kept)
    tl.store(gates + gate + 2 * SIZE, keep, mask=kept)
    tl.store(gates + gate + 3 * SIZE, candidate, mask=kept)


@triton.jit
def _places(num_samples, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows and columns of a program's tile one after the other, and which there are.

    As a line, a product is brought into the order of memory once; else all that it meets is brought into its own.
    """
    place = tl.arange(0, ROWS * COLUMNS)
    row, column = tl.program_id(0) * ROWS + place // COLUMNS, tl.program_id(1) * COLUMNS + place % COLUMNS
    return row, column, (row < num_samples) & (column < SIZE)


@triton.jit
def _gate(total, share, level, kept):
    """Return a gate before its activation, as a line."""
    return total.ravel() + tl.load(share, mask=kept, other=0.0) + tl.load(level, mask=kept, other=0.0)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@_launches
def recur_back(
    weight: Tensor, gates: Tensor, cells: Tensor, grads: Tensor, grad_hidden: Tensor, grad_cell: Tensor
) -> None:
    """Run the loop backwards, a launch for each time.

    ``gates`` ``[S, T, n, 4h]`` and ``cells`` ``[S, T + 1, n, h]`` are what the loop left.
    ``grads`` become the gates' gradients before their activation; ``grad_hidden`` ``[S, T, n, h]`` is read,
    ``grad_cell`` ``[S, n, h]`` becomes that of the first cell; ``weight`` is ``[S, h, 4h]``.
    """
    models, times, samples, size = grad_hidden.shape
    blocks, grid = _recurrent(models, samples, size, grads, "recur back")
    given = weight, gates, cells, grads, grad_hidden, grad_cell
    for time in reversed(range(times)):
        _recur_back[grid](*given, time, times, samples, SIZE=size, **blocks)


@triton.jit(do_not_specialize=["time"])
def _recur_back(
    weight, gates, cells, grads, grad_hidden, grad_cell, time, num_times, num_samples, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight += model * 4 * SIZE * SIZE
    own = (model * num_times + time) * num_samples
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if time < num_times - 1:
        later = own + num_samples + row
        for start in range(0, 4 * SIZE, INNER):
            inner = start + tl.arange(0, INNER)
            seen = (row < num_samples)[:, None] & (inner < 4 * SIZE)[None, :]
            left = tl.load(grads + later[:, None] * 4 * SIZE + inner[None, :], mask=seen, other=0.0)
            there = (column < SIZE)[:, None] & (inner < 4 * SIZE)[None, :]
            total = _add_product(left, weight + column[:, None] * 4 * SIZE + inner[None, :], there, total, PRECISION)
    row, column, kept = _places(num_samples, SIZE, ROWS, COLUMNS)
    total = total.ravel() + tl.load(grad_hidden + (own + row) * SIZE + column, mask=kept, other=0.0)
    gate = (own + row) * 4 * SIZE + column
    leave = tl.load(gates + gate, mask=kept, other=0.0)
    enter = tl.load(gates + gate + SIZE, mask=kept, other=0.0)
    keep = tl.load(gates + gate + 2 * SIZE, mask=kept, other=0.0)
    candidate = tl.load(gates + gate + 3 * SIZE, mask=kept, other=0.0)
    before = ((model * (num_times + 1) + time) * num_samples + row) * SIZE + column
    cell = tl.load(cells + before, mask=kept, other=0.0)
    tanh = _tanh(tl.load(cells + before + num_samples * SIZE, mask=kept, other=0.0))
    through = grad_cell + (model * num_samples + row) * SIZE + column
    slope = tl.load(through, mask=kept, other=0.0) + total * leave * (1 - tanh * tanh)
    tl.store(grads + gate, total * tanh * leave * (1 - leave), mask=kept)
    tl.store(grads + gate + SIZE, slope * candidate * enter * (1 - enter), mask=kept)
    tl.store(grads + gate + 2 * SIZE, slope * cell * keep * (1 - keep), mask=kept)
    tl.store(grads + gate + 3 * SIZE, slope * enter * (1 - candidate * candidate), mask=kept)
    tl.store(through, slope * keep, mask=kept)
