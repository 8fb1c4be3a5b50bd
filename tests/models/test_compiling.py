"""Kernels compile for GPUs that are not there: what they work on fits in, and is copied sixteen bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Not imported here: who does so first decides whether Triton compiles or interprets.
FOUND = find_spec("triton")
TOOL = Path(FOUND.origin).parent / "backends/nvidia/bin/cuobjdump" if FOUND and FOUND.origin else None

# A process of its own: where tests have Triton interpret kernels, it compiles none.
_COMPILE = """
import json, re, subprocess, sys
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fedem.models import kernels
from fedem.models.convolutions import Geometry

IMAGES = ("images", "gradient", "outputs")

def look(kernel, floats=(), small=(*IMAGES, "weight"), num_warps=4, num_stages=3, gpu=90, **constants):
    names, kinds, hints = kernel.arg_names, {}, {}
    for position, name in enumerate(names):
        is_size = name in SIZES
        kinds[name] = "fp32" if name in floats else "i32" if is_size else "*bf16" if name in small else "*fp32"
        if name in constants:
            kinds[name] = "constexpr"
        elif name in ("num_rows", "channels", "num_outputs") or kinds[name][0] == "*":
            hints[position,] = [["tt.divisibility", 16]]
    given = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=given, attrs=hints)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=options)
    Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [sys.argv[1], "-res-usage", "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    copies = re.findall(r"cp[.]async[.]c[ag][.]shared[.]global [^;]*, 0x(\\w+)", compiled.asm["ptx"])
    stack, sizes = int(re.search(r"STACK:(\\d+)", said)[1]), sorted({int(size, 16) for size in copies})
    return {"stack": stack, "copied": sizes, "shared": compiled.metadata.shared}

SIZES = (
    "parts", "steps", "lines", "num_rows", "num_samples", "high", "wide", "height", "width", "channels", "num_outputs",
    "time", "num_times",
)
BOUNDS = ("eps", "low", "high")
window = {"KERNEL_H": 5, "KERNEL_W": 5, "STRIDE_H": 2, "STRIDE_W": 2, "PAD_H": 1, "PAD_W": 1}
pixels = {"HIGH": 8, "WIDE": 8, "HEIGHT": 16, "WIDTH": 16}
tile = {"ROWS": 64, "COLUMNS": 64}
geometry = Geometry((5, 5), (2, 2), (1, 1), True)
def strips(wide, width, *back):
    return kernels._strips(128, wide, width, 240, geometry, *back).constants
tf32 = {"PRECISION": "tf32"}
product = {"num_warps": 8, "FLAT": False, **tf32, "ROWS": 128, "COLUMNS": 128, "INNER": 64}
whole = {"small": (), **window, "BACK": False, "FLAT": False}
whole |= kernels._blocks(9999, 64, 32, torch.empty(0), kernels._TILES["convolve, float32"]) | tf32
def recurrent(name):
    return {"small": (), "SIZE": 256, **kernels._recurrent(1, 128, 256, torch.empty(0), name)[0], **tf32}
found = {
    "filter": look(kernels._filter, small=IMAGES, **strips(8, 16), BACK=False),
    "filter, narrow": look(kernels._filter, small=IMAGES, **strips(2, 4), BACK=False),
    "filter back": look(kernels._filter, small=IMAGES, **strips(16, 8, True), BACK=True),
    "filter gradient": look(kernels._filter_gradient, **strips(8, 16)),
    "filter gradient, narrow": look(kernels._filter_gradient, **strips(2, 4)),
    "multiply": look(kernels._multiply, **window, **product, BACK=False),
    "multiply gradient": look(kernels._multiply_gradient, **window, **pixels, **product),
    "multiply, float32": look(kernels._multiply, **whole),
    "recur": look(kernels._recur, **recurrent("recur")),
    "recur, few": look(kernels._recur, **recurrent("recur, few models")),
    "recur back": look(kernels._recur_back, **recurrent("recur back")),
    "sums": look(kernels._sums, **tile),
    "normalise back": look(kernels._normalise_back, **tile, MASKED=False),
    "rescale": look(kernels._rescale, BOUNDS, (), **tile),
    "rescale back": look(kernels._rescale_back, BOUNDS, (), **tile),
}
smaller = {
    "multiply, float32": look(kernels._multiply, **whole, gpu=89),
    "recur": look(kernels._recur, **recurrent("recur"), gpu=89),
    "recur back": look(kernels._recur_back, **recurrent("recur back"), gpu=89),
}
print(json.dumps({"found": found, "smaller": smaller}))
"""


@pytest.mark.skipif(TOOL is None or not TOOL.is_file(), reason="needs Triton and the tool that reads what it compiled")
def test_kernels_fit_into_gpus_and_copy_sixteen_bytes_at_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(TOOL)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    compiled = json.loads(run.stdout.splitlines()[-1])
    found = compiled["found"]
    assert len(found) == 15
    stacks = {name: kernel["stack"] for name, kernel in found.items()}
    assert max(stacks.values()) <= 16, stacks  # bytes of a thread; a window of 25 places that was unrolled had 704
    # Sixteen bytes at once, which a factor that does not lie along the inner side of its product would not be.
    copied = {name: kernel["copied"] for name, kernel in found.items() if name.startswith(("multiply", "recur"))}
    assert all(sizes == [16] for sizes in copied.values()), copied
    # What programs of an H200 share, and of the GPUs that people have at home.
    assert max(kernel["shared"] for kernel in found.values()) <= 227 * 1024, found
    assert max(kernel["shared"] for kernel in compiled["smaller"].values()) <= 99 * 1024, compiled["smaller"]
