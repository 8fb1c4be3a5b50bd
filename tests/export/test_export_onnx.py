"""ONNX files predict what the originals do, without fedem and without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import make_personal, some_inputs
from patience import patient

from fedem.export import export_personal

onnxruntime = pytest.importorskip("onnxruntime")
for package in ("onnx", "onnxscript"):
    pytest.importorskip(package)

GUIDE = Path(__file__).parents[2] / "docs" / "export.md"


@pytest.mark.parametrize("case", ["regression", "cnn", pytest.param("lstm", marks=pytest.mark.slow)])
def test_models_run_for_any_number_of_samples(case: str, tmp_path: Path) -> None:
    personal, config = make_personal(case)
    exported = export_personal(personal, config, tmp_path / "m", ["onnx"])
    assert (list(exported.differences), exported.refused) == (["onnx"], {})
    session = onnxruntime.InferenceSession(tmp_path / "m" / "model.onnx")
    for count in (1, 2, 9):
        inputs = some_inputs(case, count)
        (found,) = session.run(["predictions"], {"inputs": inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), personal.predict(inputs), rtol=1e-5, atol=1e-5)
    assert b"site-packages" not in (tmp_path / "m" / "model.onnx").read_bytes()


def test_the_guide_s_script_needs_neither_fedem_nor_torch(tmp_path: Path) -> None:
    personal, config = make_personal("linear")
    export_personal(personal, config, tmp_path / "shop_a", ["onnx"])
    inputs = some_inputs("linear", 4)
    (script,) = re.findall(r"## ONNX.*?```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    lines = [
        "import json, sys",
        "sys.modules['fedem'] = sys.modules['torch'] = None",
        f"inputs = {inputs.tolist()}",
        script,
        "print(json.dumps(predictions.tolist()))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout), personal.predict(inputs).numpy(), rtol=1e-5)
