"""Whatever is read from outside may be damaged, or the work of somebody else: it is read, or refused in words.

A few inputs for each reader; ``scripts/fuzz`` tries as many as one likes, by the same code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedem.core.errors import UserError
from fuzzing.census import NOT_TRIED, TRIED, reading_modules
from fuzzing.harness import ACCEPTED, FAILURES, NAMELESS, REFUSED, TRACEBACK, WRONG, Reader, Trial
from fuzzing.mutations import Draw
from fuzzing.readers import READERS, shares

INPUTS = 2_500  # of all readers together
_ENOUGH = 25  # inputs, for some to be refused and some to be accepted


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_damaged_inputs_are_refused_in_words_or_sane(kind: type[Reader], tmp_path: Path) -> None:
    count = shares(READERS, INPUTS)[kind]
    trial = Trial(kind, tmp_path / "reader").run(range(count))
    assert not trial.failures, f"{len(trial.failures)} of {count}: " + "\n".join(map(str, trial.failures[:5]))
    assert trial.counts.total() == count
    if count >= _ENOUGH:  # or nothing was tried beyond the first check, or nothing was damaged
        assert trial.counts[ACCEPTED] >= 1
        assert trial.counts[REFUSED] >= (1 if kind.refuses else 0)


def test_everything_that_reads_is_known() -> None:
    titles = {kind.title for kind in READERS}
    assert {title for tried in TRIED.values() for title in tried} <= titles
    assert not TRIED.keys() & NOT_TRIED.keys()
    found = dict(reading_modules())
    unknown = {module: call for module, call in found.items() if module not in TRIED and module not in NOT_TRIED}
    assert not unknown, "they read, and no reader is said to try them"
    assert (TRIED.keys() | NOT_TRIED.keys()) <= found.keys()


def test_every_reader_gets_its_share() -> None:
    found = shares(READERS, 100_000)
    assert sum(found.values()) == 100_000
    assert min(found.values()) >= 100


class _Careless(Reader):
    """Does, by turns, all that no reader may do."""

    title = "careless"
    told = ("traceback", "outside", "insane", "nameless", "several\nlines", "folder", "fine")

    def damage(self, draw: Draw) -> str:
        self.turn = getattr(self, "turn", -1) + 1
        return self.told[self.turn]

    def read(self) -> object:
        what = self.told[self.turn]
        if what == "traceback":
            raise KeyError(what)
        if what == "outside":
            Path("escaped").touch()
        if what in ("nameless", "several\nlines"):
            raise UserError(what)
        if what == "folder":
            raise UserError(f"{self.folder} can't be read.")
        return what

    def judge(self, found: object) -> str:
        return "It is not sane." if found == "insane" else ""


def test_failures_are_noticed(tmp_path: Path) -> None:
    trial = Trial(_Careless, tmp_path / "reader").run(range(7))
    expected = {TRACEBACK: 1, WRONG: 2, NAMELESS: 2, REFUSED: 1, ACCEPTED: 1}
    assert {name: count for name, count in trial.counts.items() if count} == expected
    assert len(trial.failures) == 5
    assert all(failure.outcome in FAILURES for failure in trial.failures)


class _Hungry(Reader):
    title = "hungry"

    def damage(self, draw: Draw) -> str:
        return "asks for memory"

    def read(self) -> object:
        return bytearray(1 << 40)


def test_memory_is_limited(tmp_path: Path) -> None:
    trial = Trial(_Hungry, tmp_path / "reader").run(range(1))
    assert trial.failures[0].outcome == TRACEBACK
    assert "MemoryError" in trial.failures[0].said
