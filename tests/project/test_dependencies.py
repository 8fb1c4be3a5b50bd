"""Whatever the package imports is declared: by the project, or by the extra whose modules import it."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedem

SOURCE = Path(fedem.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Files and folders, and the extra that installs what they import beside the project's own dependencies.
EXTRAS = {
    "data/files.py": "huggingface",
    "deploy/__init__.py": "flower",
    "deploy/flower": "flower",
    "export/formats.py": "onnx",
    "models/metrics.py": "metrics",
    "sklearn": "sklearn",
    "studies/references.py": "metrics",
    "studies/tuning.py": "tune",
}
# Imported where it is there: torch brings it along on machines with a GPU.
COMES_ALONG = {"models/kernels.py": "triton"}
# Import names of packages that an environment for tests need not have.
DISTRIBUTIONS = {"datasets": ["datasets"], "triton": ["triton"]} | packages_distributions()


def _declared(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def _imports(path: Path) -> Iterator[str]:
    """The top packages that a module imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]


def _needed(path: Path) -> Iterator[tuple[str, str]]:
    """The packages that a module refuses to work without, and the extra that it names for them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id="needed"), args=[_, *packages], keywords=keywords):
                extra = next((word.value.value for word in keywords if isinstance(word.value, ast.Constant)), "")
                yield from ((str(one.value), str(extra)) for one in packages if isinstance(one, ast.Constant))


def _allowed(place: str) -> set[str]:
    """What the module at ``place`` may import."""
    own = _declared(PROJECT["dependencies"])
    for prefix, extra in EXTRAS.items():
        if place == prefix or place.startswith(f"{prefix}/"):
            own |= _declared(PROJECT["optional-dependencies"][extra])
    return own | ({COMES_ALONG[place]} if place in COMES_ALONG else set())


def test_what_is_imported_is_declared() -> None:
    undeclared, found = [], set()
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        for name in _imports(path):
            if name == "fedem" or name in sys.stdlib_module_names:
                continue
            owners = {canonicalize_name(owner) for owner in DISTRIBUTIONS[name]}
            found |= owners
            if not owners & _allowed(place):
                undeclared.append(f"{place} imports {name}, of {', '.join(sorted(owners))}")
    assert not undeclared
    assert {"torch", "pillow", "scikit-learn", "cryptography"} <= found


def test_messages_name_the_extra_that_brings_the_package() -> None:
    found = [pair for path in sorted(SOURCE.rglob("*.py")) for pair in _needed(path)]
    assert len(found) >= 7
    for name, extra in found:
        lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
        assert {canonicalize_name(owner) for owner in DISTRIBUTIONS[name]} & _declared(lines), (name, extra)


def test_the_table_of_extras_is_not_larger_than_it_need_be() -> None:
    base = _declared(PROJECT["dependencies"])
    for prefix, extra in EXTRAS.items():
        paths = [SOURCE / prefix] if prefix.endswith(".py") else sorted((SOURCE / prefix).rglob("*.py"))
        owners = {
            canonicalize_name(owner)
            for path in paths
            for name in _imports(path)
            for owner in DISTRIBUTIONS.get(name, ())
        }
        assert owners & (_declared(PROJECT["optional-dependencies"][extra]) - base), prefix
