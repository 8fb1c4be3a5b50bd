"""An environment for each rival, built once from pinned requirements and kept under ``build/rivals``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_REQUIREMENTS = Path(__file__).parent / "requirements"
_FOLDER = ROOT / "build" / "rivals"


class UnavailableError(RuntimeError):
    """A rival can't be installed or imported here; the message is the last line that pip or Python printed."""


def python_of(rival: str) -> Path:
    """Return the interpreter of a rival's environment, which is built where it does not stand yet."""
    environment = _FOLDER / rival
    python, done = environment / "bin" / "python", environment / "installed.txt"
    # What a package asks for besides may not go together with the rest, so some are installed alone.
    files = [_REQUIREMENTS / f"{rival}.txt", _REQUIREMENTS / f"{rival}-alone.txt"]
    wanted = "".join(file.read_text() for file in files if file.exists())
    if done.exists() and done.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    for file, options in zip(files, ([], ["--no-deps"]), strict=True):
        if file.exists():
            pip = ["pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", str(file), *options]
            _run(python, "-m", *pip)
    _run(python, "-c", f"import benchmarks.rivals.{rival}")
    done.write_text(wanted)
    return python


def _run(python: Path, *arguments: str) -> None:
    command = [str(python), *arguments]
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if found.returncode:
        raise UnavailableError((found.stdout.strip() or "it failed without a word").splitlines()[-1])
