"""One damaged input for one reader: how long and how much memory it may take, and what counts as a failure.

A reader may refuse an input in one sentence that names the file or the value, or take it for what a check of our own
calls sane. Any other error is a failure, and so are a hang, memory without measure, the acceptance of what is not sane,
and a file that appears outside the folder where reading belongs.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import signal
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import ClassVar, NamedTuple
from unittest.mock import patch
from zlib import crc32

import numpy as np

from fedem.core.errors import Notice, UserError
from fuzzing.mutations import (
    Damage,
    Draw,
    damaged_cells,
    damaged_json,
    damaged_lines,
    damaged_tensors,
    damaged_toml_text,
    flipped,
    pick,
)

SECONDS = 30  # that reading one input may take, on a busy machine
BYTES = 4 << 30  # of address space that reading may take beside what the process has
REFUSED, ACCEPTED, TRACEBACK, HANG, WRONG, NAMELESS = OUTCOMES = (
    "refused", "accepted", "tracebacks", "hangs", "wrong acceptances", "refusals without a name",
)  # fmt: skip
FAILURES = OUTCOMES[2:]


class HangError(BaseException):
    """Reading took too long; no reader may catch it by accident."""


class Reader(ABC):
    """Something of fedem that reads, with valid inputs and ways to damage them.

    Attributes:
        title: what it is called in the table.
        slowness: how long an input takes compared with most; one that is slow gets fewer.
        refuses: whether some inputs are refused; not where what was read says itself whether it is sound.
        named: texts of which a refusal must hold at least one, where the path of the input is not what it names.
    """

    title: ClassVar[str]
    slowness: ClassVar[float] = 1.0
    named: ClassVar[tuple[str, ...]] = ()
    refuses: ClassVar[bool] = True

    def __init__(self, folder: Path):
        """Make valid inputs; whatever is written goes below ``folder``."""
        self.folder = folder

    @abstractmethod
    def damage(self, draw: Draw) -> str:
        """Put one damaged input in place; returns what was done, in a word or two."""

    @abstractmethod
    def read(self) -> object:
        """Read it, as a user's command would."""

    def judge(self, found: object) -> str:
        """Say what is not sane about what was accepted; nothing where all is."""
        return ""


class FolderReader(Reader):
    """A reader of a folder of files; one of them is damaged by the rules of its format.

    Attributes:
        damages: by how a file's name ends; the first that fits.
        touched: which of the files are damaged, by how their names end.
    """

    damages: ClassVar[Mapping[str, Damage]] = {
        ".jsonl": damaged_lines, ".json": damaged_json, ".csv": damaged_cells, ".safetensors": damaged_tensors,
        ".toml": damaged_toml_text, "": flipped,
    }  # fmt: skip
    touched: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.build(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        self.valid = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        self.choices = [name for name in self.valid if name.endswith(self.touched)]

    @abstractmethod
    def build(self, folder: Path) -> None:
        """Write a valid folder."""

    def restore(self) -> None:
        """Have the folder as it was."""
        shutil.rmtree(self.folder)
        for name, content in self.valid.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def damage(self, draw: Draw) -> str:
        self.restore()
        name = pick(draw, self.choices)
        path = self.folder / name
        match int(draw.integers(40)):
            case 0:
                path.unlink()
                return f"{name} is gone"
            case 1:
                path.unlink()
                path.mkdir()
                return f"{name} is a folder"
            case 2:
                path.unlink()
                path.symlink_to(path.name)
                return f"{name} leads to itself"
            case 3:  # a valid file in the place of another
                other = pick(draw, self.choices)
                path.write_bytes(self.valid[other])
                return f"{name} is {other}"
            case 4:
                return "nothing"
        path.write_bytes(self.damaged(name, self.valid[name], draw))
        return name

    def damaged(self, name: str, content: bytes, draw: Draw) -> bytes:
        """Return damaged content of a file."""
        own = next(damage for ending, damage in self.damages.items() if name.endswith(ending))
        return own(content, draw)


class Failure(NamedTuple):
    """What went wrong with one input."""

    outcome: str
    seed: int
    said: str


class Trial:
    """A reader in a folder of its own, and what came of the inputs so far."""

    def __init__(self, kind: type[Reader], place: Path):
        self.kind, self.place = kind, place.resolve()
        inside, self._outside = self.place / "inside", self.place / "outside"
        for folder in (inside, self._outside):
            folder.mkdir(parents=True)
        with _quiet(), _here(self._outside):
            self.reader = kind(inside)
        self.counts: Counter[str] = Counter()
        self.failures: list[Failure] = []

    def run(self, seeds: Iterator[int] | range, begun: Callable[[int], None] = lambda seed: None) -> Trial:
        """Try inputs; ``begun`` hears of each before."""
        with _here(self._outside), limited():
            for seed in seeds:
                begun(seed)
                outcome, said = self._one(seed)
                self.counts[outcome] += 1
                if outcome in FAILURES:
                    self.failures.append(Failure(outcome, seed, said))
        return self

    def _one(self, seed: int) -> tuple[str, str]:
        """Return what came of one input, and the error's text or the trace of it."""
        draw = np.random.default_rng([crc32(self.kind.title.encode()), seed])
        with _quiet():
            done = self.reader.damage(draw)
        try:
            with _quiet(), _in_time():
                found = self.reader.read()
                wrong = self.reader.judge(found)
        except UserError as error:
            outcome, said = self._of_refusal(str(error)), f"{error}"
        except OSError as error:  # which the command line says in one sentence, too
            said = _shortened(error)
            outcome = self._of_refusal(str(error)) if error.filename and error.strerror else TRACEBACK
        except HangError as error:
            outcome, said = HANG, _shortened(error)
        except Exception as error:
            outcome, said = TRACEBACK, _shortened(error)
        else:
            outcome, said = (WRONG, wrong) if wrong else (ACCEPTED, "")
        if strangers := sorted({*os.listdir(self.place), *os.listdir(self._outside)} - {"inside", "outside"}):
            outcome, said = WRONG, f"Outside its folder there are {strangers}."
            for name in strangers:
                for path in (self.place / name, self._outside / name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return outcome, f"{done}: {said}"

    def _of_refusal(self, said: str) -> str:
        names = [str(self.reader.folder), *self.reader.named]
        return REFUSED if "\n" not in said and any(name in said for name in names) else NAMELESS


def _shortened(error: BaseException) -> str:
    """Return an error and the lines of fedem that it went through, the last ones first."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "fedem" in Path(frame.filename).parts]
    way = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[:-7:-1])
    return f"{type(error).__name__}: {str(error)[:300]} [{way}]"


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed; notes to the user are fine, and any other warning is an error."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(),
        patch.object(os, "fsync"),  # what reaches a disk is no matter here, and it takes most of the time
    ):
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", Notice)
        yield


@contextmanager
def _here(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _in_time() -> Iterator[None]:
    """Raise in whatever takes too long; what is stuck outside of Python ends the process a while later."""

    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def limited() -> Iterator[None]:
    """Let the process take so much more memory, and no more: what asks for it gets a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def dump_when_stuck() -> None:
    """End this process, with its trace, if nothing has happened for long."""
    faulthandler.dump_traceback_later(4 * SECONDS, exit=True)
