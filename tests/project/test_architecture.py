"""The house rules that no linter holds: nothing beside the packages, public names on purpose, few needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import fedem

SOURCE = Path(fedem.__file__).parent


def test_everything_lies_in_a_package() -> None:
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_public_names_are_there_and_sorted() -> None:
    assert all(hasattr(fedem, name) for name in fedem.__all__)
    assert len(set(fedem.__all__)) == len(fedem.__all__)


def test_public_names_come_from_where_they_are_said_to() -> None:
    homes = {name: module for module, names in fedem._HOMES.items() for name in names}
    assert {*homes, "__version__", "graphs", "surrogates"} == set(fedem.__all__)
    assert set(fedem.__all__) <= set(dir(fedem))
    # What a type checker reads is what is imported.
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        (node.module, name.name) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert imported == {("fedem", "graphs"), ("fedem", "surrogates"), *((home, name) for name, home in homes.items())}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attrgetter("nothing")(fedem)


@pytest.mark.slow
def test_the_core_needs_torch_and_numpy_alone() -> None:
    script = """
import sys
absent = "scipy rich typer click tensorboard safetensors matplotlib networkx pandas pyarrow pooch optuna flwr onnx"
for name in absent.split():
    sys.modules[name] = None  # importing it is then an error
import pytest

import fedem
data = fedem.Synthetic(num_clients=4, dimension=3, num_test=5).make(0)
result = fedem.train(data.federation, rounds=2, learning_rate=0.1)
print(result.summary["rounds"])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr
