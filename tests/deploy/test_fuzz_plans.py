"""Plans, kept files and exported models with one thing changed: they are read, or refused with a message."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deployments import make_plan, write_sample
from exports import make_personal
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedem.core.errors import UserError
from fedem.core.files import toml_literal
from fedem.deploy.kept import Earlier, Kept
from fedem.deploy.plan import Plan
from fedem.export.folder import export_personal, load_exported

# What may stand in the place of any value.
OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 10**11, 10**30, 1e308, -0.5, "", "nan", "../../x", "a/b\0c", "\ud800",
    [], ["x"], [[1], None], {}, {"x": 1},
)  # fmt: skip


def _places(tree: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a tree of dictionaries and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*here, key)
        yield from _places(value, (*here, key))


def _changed(tree: Any, every: int) -> Iterator[tuple[str, Any]]:
    """The tree with one value replaced or gone, ``every`` so manieth of all such changes; and what was done."""
    number = 0
    for *above, last in _places(tree):
        for other in (*OTHERS, ...):
            number += 1
            if number % every:
                continue
            changed = copy.deepcopy(tree)
            parent = changed
            for key in above:
                parent = parent[key]
            if other is ...:
                del parent[last]
            else:
                parent[last] = other
            yield f"{[*above, last]} became {other!r}", changed


def _flipped(content: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """The content with one byte changed, or cut short."""
    generator = np.random.default_rng(0)
    for place in generator.integers(len(content), size=count).tolist():
        changed = bytearray(content)
        changed[place] ^= 1 << int(generator.integers(8))
        yield f"byte {place} changed", bytes(changed)
        yield f"cut at {place}", content[:place]


def _refused(cases: Iterator[tuple[str, Any]], write: Callable[[Any], None], read: Callable[[], object]) -> int:
    """How many of the cases are refused; whatever else than UserError is raised is told with what had been changed."""
    refused, failures = 0, []
    for what, case in cases:
        write(case)
        try:
            read()
        except UserError:
            refused += 1
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {error}"[:300])
    assert not failures, f"{len(failures)}: " + "\n".join(failures[:20])
    return refused


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(write_sample(tmp_path_factory.mktemp("sample")))[0]


def _read_plan(folder: Path) -> str:
    return Plan.load(folder).fingerprint


def test_plans_of_other_shapes(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path)
    path = tmp_path / "plan.json"
    content = path.read_text(encoding="utf-8")
    count = _refused(
        _changed(json.loads(content), 7),
        lambda case: path.write_text(json.dumps(case)) and None,
        lambda: _read_plan(tmp_path),
    )
    assert count > 20
    _refused(_flipped(content.encode(), 30), lambda case: path.write_bytes(case) and None, lambda: _read_plan(tmp_path))


def test_plans_of_other_settings(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path)
    path = tmp_path / "config.toml"
    content = path.read_bytes()

    def write(case: Any) -> None:
        lines = []
        for section, values in case.items():
            if not isinstance(values, dict):
                continue
            lines.append(f"[{section}]")
            plain = {key: value for key, value in values.items() if isinstance(value, bool | int | float | str | list)}
            lines += [f"{key} = {toml_literal(value)}" for key, value in plain.items()]
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")

    settings = tomllib.loads(content.decode())
    assert _refused(_changed(settings, 17), write, lambda: _read_plan(tmp_path)) > 20
    _refused(_flipped(content, 30), lambda case: path.write_bytes(case) and None, lambda: _read_plan(tmp_path))


def test_kept_files(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "state" / "trial" / "ann.safetensors"
    weights = {"log_weights": torch.zeros(3)}
    Kept(plan, 2, weights, plan.algorithm.init_shared(0), (Earlier(1, weights),), "run", "ann").save(path)
    content, tensors = path.read_bytes(), load_file(path)
    with safe_open(path, framework="pt") as file:
        kept = json.loads(file.metadata()["kept"])
    own = {key: value for key, value in kept.items() if key != "plan"} | {"plan": kept["plan"]["shapes"]}

    def write(case: Any) -> None:
        shapes = {"plan": kept["plan"] | {"shapes": case["plan"]}} if "plan" in case else {}
        save_file(tensors, path, metadata={"kept": json.dumps(case | shapes)})

    assert _refused(_changed(own, 7), write, lambda: Kept.load(path).plan.fingerprint) > 20
    _refused(
        _flipped(content, 50), lambda case: path.write_bytes(case) and None, lambda: Kept.load(path).plan.fingerprint
    )


def test_exported_models(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export_personal(*make_personal("mlp"), folder)
    described, tensors = folder / "model.json", folder / "model.safetensors"
    content, numbers = described.read_text(encoding="utf-8"), tensors.read_bytes()

    def read() -> object:
        return load_exported(folder, device="cpu")

    count = _refused(
        _changed(json.loads(content), 4), lambda case: described.write_text(json.dumps(case)) and None, read
    )
    assert count > 40
    _refused(_flipped(content.encode(), 30), lambda case: described.write_bytes(case) and None, read)
    described.write_text(content, encoding="utf-8")
    _refused(_flipped(numbers, 30), lambda case: tensors.write_bytes(case) and None, read)
