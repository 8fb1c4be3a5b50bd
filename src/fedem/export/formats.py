"""Files that hold a personal model with its computation, and how each is tried before it counts as written.

Shapes: M components, n samples, K classes (or target dimensions).
"""

from __future__ import annotations

import io
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.functional import max_pool2d

from fedem.core.em import mix
from fedem.core.errors import UserError, unknown
from fedem.core.files import write_atomically
from fedem.core.tree import Tree
from fedem.models.base import Model, component_of, leaves_of
from fedem.models.images import PooledConv2d
from fedem.runs.result import PersonalModel

TENSORS = "safetensors"
# How far a file's predictions may be from the model's, relative to the largest of them; by the parameters' type.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
_INPUT, _OUTPUT = "inputs", "predictions"  # of ONNX; the folder's README names them too


class Format(NamedTuple):
    """A kind of file that computes; the folder's README says how each is used."""

    file: str  # its name
    packages: tuple[str, ...]  # what must be installed to write and try it
    write: Callable[[PersonalModule, ExportedProgram, Tensor, Path], None]  # the last: inputs to try, and where to
    load: Callable[[Path], Callable[[Tensor], Tensor]]  # [n, ...] -> [n, K]


def check_formats(names: Iterable[str]) -> tuple[str, ...]:
    """Refuse formats that don't exist, or whose packages are missing; returns each once."""
    asked, known = tuple(dict.fromkeys(names)), (TENSORS, *FORMATS)
    if not asked:
        raise UserError(f"No format is given; allowed: {', '.join(known)}.")
    for name in asked:
        if name not in known:
            raise unknown("format", name, known)
        packages = FORMATS[name].packages if name in FORMATS else ()
        if missing := [package for package in packages if find_spec(package) is None]:
            install = f"pip install 'fedem[{name}]'"
            raise UserError(f"Format {name!r} needs {', '.join(missing)}, which is not installed: {install}.")
    return asked


def sample_inputs(personal: PersonalModel) -> Tensor:
    """Draw inputs of the kind that the model was trained on, ``[5, ...]``; the same each time."""
    shape, dtype = (5, *personal.format.inputs), personal.format.input_dtype
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    # Whole numbers are bytes or places in a list: which there are, the layers that look them up know.
    tables = [part.num_embeddings for part in personal.model.evaluation.modules() if isinstance(part, nn.Embedding)]
    highest = 256 if dtype == torch.uint8 else min(tables, default=2)
    return torch.randint(highest, shape, generator=generator, dtype=dtype)


def capture(personal: PersonalModel, inputs: Tensor) -> tuple[PersonalModule, ExportedProgram]:
    """Record what the model computes, for any number of samples; raises whatever torch.export has against it."""
    module = PersonalModule(personal)
    # It refuses what a trace would get wrong without a word: Python that decides by values or by the number of samples.
    with _quietly(), torch.no_grad():
        return module, torch.export.export(module, (inputs,), dynamic_shapes=({0: Dim("n")},))


def try_file(name: str, path: Path, inputs: Tensor, predictions: Tensor) -> float:
    """Load a file again and run it, on all samples and on one alone; returns the largest relative difference."""
    with _quietly():
        function, differences = FORMATS[name].load(path), []
        for wanted in (predictions, predictions[:1]):
            scale = wanted.abs().max().clamp(min=torch.finfo(wanted.dtype).tiny)
            differences.append(float((function(inputs[: len(wanted)]) - wanted).abs().max() / scale))
    worst, allowed = max(differences), TOLERANCES[predictions.dtype]
    if not all(difference <= allowed for difference in differences):  # NaN is refused as well
        raise UserError(f"its predictions differ by {worst:.1e} of the largest; allowed: {allowed:.0e}")
    return worst


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep torch from warning users of what does not concern them: TorchScript is no longer developed, ..."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings(action="ignore"):
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _write_torchscript(module: PersonalModule, _: ExportedProgram, inputs: Tensor, path: Path) -> None:
    buffer, slim = io.BytesIO(), io.BytesIO()
    with _quietly(), torch.no_grad():
        torch.jit.save(torch.jit.trace(module, (inputs,), check_trace=False), buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(slim, "w") as new:
        for name in old.namelist():
            if not name.endswith(".debug_pkl"):  # which lines of which files on this machine each operation came from
                new.writestr(name, old.read(name))
    write_atomically(path, slim.getvalue())


def _write_onnx(module: PersonalModule, program: ExportedProgram, inputs: Tensor, path: Path) -> None:
    with _quietly():
        exported = torch.onnx.export(program, dynamo=True, verbose=False, input_names=[_INPUT], output_names=[_OUTPUT])
        assert exported is not None, "torch returns None only when it writes a file itself"
        for node in exported.model.graph.all_nodes():
            node.metadata_props.clear()  # where on this machine each operation came from
        write_atomically(path, exported.model_proto.SerializeToString())


def _load_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run([_OUTPUT], {_INPUT: inputs.numpy()})[0])


FORMATS = {
    "torchscript": Format("model.pt", (), _write_torchscript, torch.jit.load),
    "onnx": Format("model.onnx", ("onnx", "onnxscript", "onnxruntime"), _write_onnx, _load_onnx),
}


class PersonalModule(nn.Module):
    """A personal model as a plain module, for files that are used without fedem.

    It takes inputs as in training and returns what :meth:`PersonalModel.predict` does, to rounding. Inside are bytes as
    numbers from 0 to 1, the standardising of images where the model does so, the mix of probabilities (or means), and
    the means' way back to the targets' own units. How a table's columns become inputs is not. The components are the
    model's own layers, before they are put into forms that stack.
    """

    log_weights: Tensor

    def __init__(self, personal: PersonalModel):
        super().__init__()
        components, log_weights = personal.mixture
        parameters = [component_of(components, m) for m in range(len(log_weights))]
        self.components = nn.ModuleList(_component(personal.model, one) for one in parameters)
        self.register_buffer("log_weights", log_weights.detach().cpu().clone())
        self._model, encoding = personal.model, personal.format.encoding
        self._decode = None if encoding is None else encoding.decode
        self.eval().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, ...] -> [n, K]``."""
        prepared = self._model.prepare(inputs)
        outputs = torch.stack([component(prepared) for component in self.components])
        predictions = mix(self._model.loss.probabilities(outputs), self.log_weights)
        return predictions if self._decode is None else self._decode(predictions)


class _PlainPooledConv2d(PooledConv2d):
    """``PooledConv2d`` of torch's own operations alone: a file can't hold a function of Python's."""

    def forward(self, inputs: Tensor) -> Tensor:
        pooled = max_pool2d(self._conv_forward(inputs, self.weight, None), 2)
        return pooled if self.bias is None else pooled + self.bias[:, None, None]


def _component(model: Model, parameters: Tree) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        # A copy: the function may hand out a module that somebody else uses.
        module = deepcopy(model.build()).to(model.dtype)
    with torch.no_grad():
        for name, leaf in leaves_of(module).items():
            leaf.copy_(parameters[name])
    for part in module.modules():
        if type(part) is PooledConv2d:
            part.__class__ = _PlainPooledConv2d
    return module
