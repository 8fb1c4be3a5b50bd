"""Kernels compile for a GPU that is not there, and what they work on fits into its registers."""

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
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fedem.models import kernels
from fedem.models.convolutions import Geometry

def stack(kernel, floats=(), small=("weight",), warps=4, **constants):
    names, images = kernel.arg_names, ("images", "gradient", "outputs", *small)
    kinds, hints = {}, {}
    for position, name in enumerate(names):
        is_size = name in SIZES
        kinds[name] = "fp32" if name in floats else "i32" if is_size else "*bf16" if name in images else "*fp32"
        if name in constants:
            kinds[name] = "constexpr"
        elif name in ("num_rows", "channels") or kinds[name][0] == "*":
            hints[position,] = [["tt.divisibility", 16]]
    given = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=given, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [sys.argv[1], "-res-usage", "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", said)[1])

SIZES = (
    "parts", "steps", "lines", "num_rows", "num_samples", "high", "wide", "height", "width", "channels", "num_outputs"
)
BOUNDS = ("eps", "low", "high")
window = {"KERNEL_H": 5, "KERNEL_W": 5, "STRIDE_H": 2, "STRIDE_W": 2, "PAD_H": 1, "PAD_W": 1}
pixels = {"HIGH": 8, "WIDE": 8, "HEIGHT": 16, "WIDTH": 16}
tile = {"ROWS": 64, "COLUMNS": 64}
geometry = Geometry((5, 5), (2, 2), (1, 1), True)
def strips(wide, width, *back):
    return kernels._strips(128, wide, width, 240, geometry, *back).constants
product = {"warps": 8, "FLAT": False, "PRECISION": "tf32", "ROWS": 128, "COLUMNS": 128, "INNER": 64}
found = {
    "filter": stack(kernels._filter, small=(), **strips(8, 16), BACK=False),
    "filter, narrow": stack(kernels._filter, small=(), **strips(2, 4), BACK=False),
    "filter back": stack(kernels._filter, small=(), **strips(16, 8, True), BACK=True),
    "filter gradient": stack(kernels._filter_gradient, **strips(8, 16)),
    "filter gradient, narrow": stack(kernels._filter_gradient, **strips(2, 4)),
    "multiply": stack(kernels._multiply, **window, **product, BACK=False),
    "multiply gradient": stack(kernels._multiply_gradient, **window, **pixels, **product),
    "sums": stack(kernels._sums, **tile),
    "normalise back": stack(kernels._normalise_back, **tile, MASKED=False),
    "rescale": stack(kernels._rescale, BOUNDS, (), **tile),
    "rescale back": stack(kernels._rescale_back, BOUNDS, (), **tile),
}
print(json.dumps(found))
"""


@pytest.mark.skipif(TOOL is None or not TOOL.is_file(), reason="needs Triton and the tool that reads what it compiled")
def test_kernels_compile_for_a_gpu_and_spill_nothing(tmp_path: Path) -> None:
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
    stacks = json.loads(run.stdout.splitlines()[-1])
    assert len(stacks) == 11
    assert max(stacks.values()) <= 16, stacks  # bytes of a thread; a window of 25 places that was unrolled had 704
