"""The folder of an exported model: written whole or not at all, and read again.

model.json           what the model is, and how inputs are made for it
model.safetensors    components ``[M, ...]`` and log weights ``[M]``
model.pt             TorchScript: inputs -> predictions
model.onnx           ONNX: the same
README.txt           how to use these
"""

import os
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from jinja2 import Environment, PackageLoader
from torch import Tensor

from fedem.core import VERSION
from fedem.core.errors import UserError, naming, reason
from fedem.core.files import write_atomically, write_json
from fedem.core.schema import ANYTHING, Flag, Listed, Maybe, Number, Table, Text, read_json
from fedem.core.tensors import write_tensors
from fedem.core.tree import add_prefix, take_prefix, tree_sorted, tree_to
from fedem.export.formats import FORMATS, TENSORS, capture, check_formats, sample_inputs, try_file
from fedem.methods.base import Mixture
from fedem.models.losses import CLASSES
from fedem.runs.config import GIVEN, Config
from fedem.runs.recipe import FORMAT, FURTHER, ModelSource, Recipe
from fedem.runs.result import PersonalModel, Result

_VERSION = 1
_DESCRIPTION, _TENSORS, _README = "model.json", "model.safetensors", "README.txt"
_DESCRIBED = Table(
    FORMAT
    | {"model": Table({"name": Text()}), "loss": Table({"name": Text()}), "dtype": Text(), "precision": Text()}
    | {"not_stackable": Maybe(Text())},
    FURTHER | {"label_shares": Flag(), "mixture_weights": Listed(Number(least=0))},
)
_START = {"weights": "", "jitter": 0.0}  # where training starts from: a file that an exported model does not need


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    differences: Mapping[str, float]  # by format written: how far its predictions are from the model's, of the largest
    refused: Mapping[str, str]  # by format that was not: why


def export_client(
    result: Result, client: str | None, out: str | Path, formats: Iterable[str] = (TENSORS,), which: str = "last"
) -> Exported:
    """Write the model of a client, fine-tuned if the run fine-tunes, to a new folder ``out``.

    For the ``client`` None: the components alone, uniformly weighted, as a newcomer without samples gets them. Formats
    are "safetensors", which :func:`load_exported` reads, "torchscript" and "onnx"; ``which`` is "last" or "best".
    """
    if client is None:
        nothing = torch.zeros(0, *result.recipe.format.inputs, dtype=result.recipe.format.input_dtype)
        personal = result.personalize(nothing, [], which=which)
    else:
        personal = result.client(client, which)
    done = result.state(which).round
    return export_personal(personal, result.config, out, formats, client=client, state=which, round=done)


def export_personal(
    personal: PersonalModel, config: Config, out: str | Path, formats: Iterable[str] = (TENSORS,), **about: Any
) -> Exported:
    """Write a personal model to a new folder; ``about`` is what else model.json is to say of it.

    Every file is loaded again and its predictions are compared with the model's. A format that does not allow the model
    is left out; none at all is an error.
    """
    if personal.neighbours is not None:
        problem = f"run.neighbours is {personal.neighbours.number}: the client looks at its training samples to predict"
        allowed = "a run, or one personalised, with run.neighbours 0; the components of any (--components)"
        raise UserError(f"{problem}, and an exported model has none; allowed: {allowed}.")
    asked, place = check_formats(formats), Path(out)
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise UserError(f"{place} is there already; choose a folder that is not.")
    cpu, (components, log_weights) = torch.device("cpu"), personal.mixture
    own = replace(personal, mixture=Mixture(tree_to(components, cpu), log_weights.to(cpu)))
    inputs = sample_inputs(own)
    exact = copy(own.model)
    exact.precision = "float32"  # files compute with all bits, whatever the run did
    predictions = replace(own, model=exact).predict(inputs)
    if not bool(torch.isfinite(predictions).all()):
        raise UserError("The model predicts NaN or infinite numbers, so it can't be exported.")
    differences, refused = dict[str, float](), dict[str, str]()
    with _appearing(place) as folder:
        _write_description(folder, own, config, about)
        if TENSORS in asked:
            tensors = add_prefix("components", own.mixture.components) | {"log_weights": own.mixture.log_weights}
            write_tensors(folder / _TENSORS, tensors)
            again = load_exported(folder, own.model.build if config.name("model") == GIVEN else None, "cpu")
            if not torch.equal(again.predict(inputs), own.predict(inputs)):
                raise UserError(f"{_TENSORS} did not come back as it was written; {place} is left out.")
            differences[TENSORS] = 0.0
        captured = None
        for name in (name for name in asked if name in FORMATS):
            path = folder / FORMATS[name].file
            try:
                captured = captured or capture(own, inputs)
                FORMATS[name].write(*captured, inputs, path)
                differences[name] = try_file(name, path, inputs, predictions)
            except Exception as error:  # compilers at work on anybody's code: whatever they raise is the reason
                path.unlink(missing_ok=True)
                lines = (line.strip() for line in str(error).splitlines() if line.strip())
                refused[name] = next(lines, type(error).__name__).rstrip(".")
        if not differences:
            raise UserError("; ".join(f"Format {name!r} is refused: {why}" for name, why in refused.items()) + ".")
        write_atomically(folder / _README, _readme(own, differences).encode())
    return Exported(place, differences, refused)


def load_exported(path: str | Path, model: ModelSource | None = None, device: str = "auto") -> PersonalModel:
    """Read a personal model back from its folder; it predicts what the original did, to the bit.

    ``model`` is the user's own model, if the run was trained with one; ``device`` is where to put it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    try:
        version = read_json(folder / _DESCRIPTION, Table({"version": ANYTHING}))["version"]
        if version != _VERSION:
            raise UserError(f"{folder} has version {version!r} of the format; allowed: {_VERSION}.")
        description = read_json(folder / _DESCRIPTION, _DESCRIBED)
        with naming(folder / _DESCRIPTION):
            recipe = _recipe(description, model, device)
        tensors: dict[str, Tensor] = load_file(folder / _TENSORS)
        mixture = Mixture(tree_sorted(take_prefix("components", tensors)), tensors["log_weights"])
    except FileNotFoundError as error:
        hint = " (export it with the format safetensors)" if (folder / _DESCRIPTION).is_file() else ""
        raise UserError(f"There is no exported model in {folder}: {error.filename} is missing{hint}.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"The exported model in {folder} can't be read ({reason(error)}).") from None
    except KeyError as error:
        raise UserError(f"{folder / _TENSORS} can't be read: it has no tensor {error}.") from None
    except (TypeError, AttributeError, RuntimeError) as error:  # the last from torch, of absurd sizes
        described = f"{folder / _DESCRIPTION} is not a description of a model"
        raise UserError(f"{described} ({reason(error)}).") from None
    recipe.check_mixture(mixture, folder / _TENSORS)
    components, log_weights = tree_to(mixture.components, recipe.device), mixture.log_weights.to(recipe.device)
    return PersonalModel(recipe.model, Mixture(components, log_weights), recipe.format)


def _recipe(description: Mapping[str, Any], model: ModelSource | None, device: str) -> Recipe:
    if model is None and description["model"]["name"] == GIVEN:
        raise UserError("This model was passed from Python when it was trained; pass model=... again to load it.")
    run = {"dtype": description["dtype"], "precision": description["precision"]}
    run["label_shares"] = description.get("label_shares", False)
    config = Config.build({"model": description["model"], "loss": description["loss"], "run": run}, preset=False)
    return Recipe.from_metadata(config, description, model, device)


def _write_description(folder: Path, personal: PersonalModel, config: Config, about: Mapping[str, Any]) -> None:
    description = {
        "version": _VERSION,
        "fedem": VERSION,
        "method": config.name("method"),
        **about,
        "mixture_weights": personal.mixture_weights.tolist(),
        "model": {key: _START.get(key, value) for key, value in config.sections["model"].items()},
        "loss": config.sections["loss"],
        **{key: config.sections["run"][key] for key in ("dtype", "precision", "label_shares")},
        "not_stackable": personal.model.not_stackable,
        **personal.format.to_json(),
    }
    write_json(folder / _DESCRIPTION, description)


def _readme(own: PersonalModel, written: Container[str]) -> str:
    templates = Environment(loader=PackageLoader("fedem.export"), trim_blocks=True, keep_trailing_newline=True)
    content = {"format": own.format, "is_classifier": own.model.loss.task == CLASSES, "written": written}
    return templates.get_template("README.txt.jinja").render(content)


@contextmanager
def _appearing(place: Path) -> Iterator[Path]:
    """Give a folder to write to that takes its place once all is in it, and goes if something fails."""
    folder = place.absolute().with_name(f".{place.name}.{token_hex(4)}.tmp")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"The folder {place} can't be written: {error.strerror}.") from None
    try:
        yield folder
        os.replace(folder, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
