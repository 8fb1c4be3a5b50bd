"""The locks hold what constraints.txt holds, with hashes, and together all that an install needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "locks"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
BASE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
UNLOCKED = {"tables", "huggingface"}  # one is empty, and the other's versions are not pinned
FILES = ["torch", "base", *sorted(EXTRAS.keys() - UNLOCKED)]


class Lock(NamedTuple):
    """A file of requirements."""

    parts: list[str]  # the other files that it names
    versions: dict[str, str]
    hashes: dict[str, list[str]]


def _read(name: str) -> Lock:
    """Read a lock; a line that is neither a comment, a part, a version nor a hash is an error."""
    lock = Lock([], {}, {})
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", "")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if part := re.fullmatch(r"-r ([\w-]+)\.txt", line):
            lock.parts.append(part[1])
            continue
        found = re.fullmatch(r"([^-]\S*) *(;.*?)? +((?: *--hash=\S+)*)", line)
        assert found, f"{name}.txt: {line[:80]}"
        requirement = Requirement(f"{found[1]} {found[2] or ''}")
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        lock.versions[canonicalize_name(requirement.name)] = pin.version
        lock.hashes[canonicalize_name(requirement.name)] = found[3].split()
    return lock


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (Requirement(line) for line in lines if not line.startswith("#"))
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


def _whole(name: str) -> dict[str, str]:
    """All versions that a file installs."""
    lock = _read(name)
    return {key: version for part in lock.parts for key, version in _whole(part).items()} | lock.versions


def test_there_is_a_lock_for_every_extra_that_is_pinned() -> None:
    assert {path.stem for path in LOCKS.iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_every_line_has_hashes(name: str) -> None:
    for package, hashes in _read(name).hashes.items():
        assert hashes, package
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in hashes), package


@pytest.mark.parametrize("name", [name for name in FILES if name != "torch"])
def test_versions_are_those_of_the_constraints(name: str) -> None:
    assert _read(name).versions.items() <= _pins().items()


def test_all_constraints_are_locked_and_the_build_of_torch_stands_apart() -> None:
    pins, torch = _pins(), _read("torch").versions
    assert _whole("dev") == {name: version for name, version in pins.items() if name != "torch"}
    assert all(pins.get(name, version) == version for name, version in torch.items())
    assert all(name.startswith(("cuda-", "nvidia-")) for name in torch.keys() - pins.keys())


@pytest.mark.parametrize("name", [name for name in FILES if name != "torch"])
def test_what_the_project_asks_for_is_locked_in_a_version_it_allows(name: str) -> None:
    versions = _whole(name) | {"torch": _pins()["torch"]}
    asked = [Requirement(line) for line in (*BASE, *EXTRAS.get(name, ()))]
    for requirement in asked:
        if requirement.name == "fedem":
            assert set(requirement.extras) <= set(_read(name).parts)
        else:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
