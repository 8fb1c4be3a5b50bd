"""The house rules: imports point one way, the core needs torch and numpy alone, names are public on purpose."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedem

SOURCE = Path(fedem.__file__).parent
# A room may import from its own line and from those above.
STOREYS = [
    {"errors", "tree", "settings", "precision"},
    {"randomness", "arrays", "samples", "splits", "team"},
    {"federation", "schedules", "solvers", "mixture", "compression"},
    {"data", "models", "graphs"},
    {"algorithms", "mixing", "centralized"},
    {"methods", "engines", "recovery"},
    {"rounds", "sections", "config"},
    {"personal", "checkpoint", "inexactness", "diagnostics", "surrogates"},
    {"evaluate"},
    {"records", "runs"},
    {"parts"},
    {"facts"},
    {"result"},
    {"settling", "export"},
    {"job"},
    {"training"},
    {"deploy"},
    {"cells"},
    {"comparison", "theory", "tuning"},
    {"experiments"},
    {"report"},
    {"cli"},
]
STOREY = {room: number for number, rooms in enumerate(STOREYS) for room in rooms}
APART = [("algorithms", "mixing"), ("data", "models")]


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Rooms of the package that a file imports from."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        rooms |= {module.split(".")[1] for module in modules if module.startswith("fedem.")}
    return rooms


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if _room(path) not in ("__init__", "__main__", "presets")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    for room in _imports(path) - {_room(path)}:
        assert STOREY[room] <= STOREY[_room(path)], f"{path.name} must not import from {room}"
    for pair in APART:
        assert not (_room(path) in pair and (_imports(path) - {_room(path)}) & set(pair))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_rooms_and_not_halls(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


def test_public_names_are_there_and_sorted() -> None:
    assert all(hasattr(fedem, name) for name in fedem.__all__)
    assert len(set(fedem.__all__)) == len(fedem.__all__)


def test_the_core_needs_torch_and_numpy_alone() -> None:
    script = """
import sys
absent = "scipy rich typer click tensorboard safetensors matplotlib networkx cvxpy optuna flwr onnx"
for name in absent.split():
    sys.modules[name] = None  # importing it is then an error
import fedem
data = fedem.Synthetic(num_clients=4, dimension=3, num_test=5).make(0)
result = fedem.train(data.federation, rounds=2, learning_rate=0.1)
print(result.summary["rounds"])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr
