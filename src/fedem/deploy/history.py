"""A deployed run's last checkpoints, and the way back to one of them.

RUN/history/000012/checkpoints/     the checkpoint of round 12 as it was written
RUN/metrics.undone.jsonl            lines of rounds that were rolled back, and which round that led to
RUN/uploads.undone.jsonl            likewise
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from fedem.core.errors import UserError
from fedem.core.files import write_atomically
from fedem.core.schema import Table, Whole, parse_json
from fedem.runs.folder import RunFolder

UPLOADS = "uploads.jsonl"  # one line per round: what the server noticed of each upload
_LINES = ("metrics.jsonl", UPLOADS)
_LINE = Table({"round": Whole(least=1)})


class History:
    """The last checkpoints of a run's folder."""

    def __init__(self, folder: RunFolder):
        self.folder, self.path = folder, folder.path / "history"

    def rounds(self) -> list[int]:
        """Return the rounds that the run can be rolled back to, in ascending order."""
        return sorted(int(path.name) for path in self.path.glob("*") if path.name.isdigit())

    def add(self, round_number: int, keep: int) -> None:
        """Keep the checkpoint that was saved last, which is of this round, and the ``keep - 1`` before it."""
        place, unfinished = self._place(round_number), self.path / ".unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        # Files of a checkpoint are replaced, and never changed: a second name is as good as a copy.
        shutil.copytree(self.folder.checkpoints, unfinished / "checkpoints", copy_function=_link)
        if place.exists():
            self._remove(round_number)
        os.replace(unfinished, place)
        for earlier in self.rounds()[:-keep]:
            self._remove(earlier)

    def drop_after(self, round_number: int) -> None:
        """Remove what is of later rounds, which do not belong to the run any more."""
        for later in [each for each in self.rounds() if each > round_number]:
            self._remove(later)

    def at(self, round_number: int) -> RunFolder:
        """Return a folder with the checkpoint of that round."""
        if round_number not in (rounds := self.rounds()):
            kept = ", ".join(map(str, rounds)) or "none"
            raise UserError(f"{self.folder.path} can't go back to round {round_number}; kept are rounds: {kept}.")
        return RunFolder(self._place(round_number))

    def _remove(self, round_number: int) -> None:
        # Out of the list first: killed amid it, no round would be listed that has lost some of its files.
        removed = self.path / ".removed"
        shutil.rmtree(removed, ignore_errors=True)
        os.replace(self._place(round_number), removed)
        shutil.rmtree(removed)

    def _place(self, round_number: int) -> Path:
        return self.path / f"{round_number:06d}"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without second names
        shutil.copy2(source, target)


def open_uploads(folder: RunFolder, done: int) -> IO[str]:
    """Open uploads.jsonl to append, with the lines of the first ``done`` rounds alone; it is its owner's alone."""
    path = folder.path / UPLOADS
    lines = [folder.line(line) for line in _read_lines(path) if line["round"] <= done]
    write_atomically(path, "".join(lines).encode(), private=True)
    return path.open("a", buffering=1, encoding="utf-8")


def rollback(folder: RunFolder, round_number: int) -> int:
    """Return a run to the checkpoint of an earlier round, from which it can be continued; returns the round it had.

    What is known of clients, such as who is set aside, stays as it is now. Where it was killed, the same command
    completes it.
    """
    folder.check()
    with folder.locked():
        history = History(folder)
        kept = history.at(round_number)
        states, _ = kept.load()
        if (found := states["last"].round) != round_number:  # the one before, where that of the round is damaged
            which = f"that of round {round_number} is damaged, and the one before it is of round {found}"
            rounds = ", ".join(str(each) for each in history.rounds() if each != round_number) or "none"
            raise UserError(f"{kept.checkpoints} can't be gone back to: {which}; other rounds that are kept: {rounds}.")
        present, facts = folder.load()
        last = present["last"].round
        rollbacks = facts.get("rollbacks", [])
        if last != round_number:
            for name in _LINES:
                _set_apart(folder.path / name, round_number)
            # By this list clients know what of their own is undone, also those that come back much later.
            folder.save(states, facts | {"rollbacks": [*rollbacks, round_number]})
        elif rollbacks[-1:] != [round_number]:
            return last
        folder.saved.forget_previous()  # it is of a round that is undone
        for name in ("summary.json", "clients.csv"):
            (folder.path / name).unlink(missing_ok=True)
        folder.open_metrics(round_number).close()
        open_uploads(folder, round_number).close()
        history.drop_after(round_number)
    return last


def _set_apart(path: Path, round_number: int) -> None:
    """Add the lines of later rounds to the file of those undone, unless they are there since a killed rollback."""
    target = path.with_name(f"{path.stem}.undone{path.suffix}")
    before = _read_lines(target)
    undone = [line | {"rolled_back_to": round_number} for line in _read_lines(path) if line["round"] > round_number]
    lines = [*before, *(line for line in undone if line not in before)]
    if lines != before:
        write_atomically(target, "".join(map(RunFolder.line, lines)).encode(), private=True)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of lines; a last one cut short by a kill is left out, and any other that is damaged is refused."""
    try:
        *whole, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    lines = []
    for number, text in enumerate(whole, start=1):
        try:
            lines += [parse_json(text, f"{path}, line {number}", _LINE)] if text else []
        except UserError as error:
            raise UserError(f"{error} Remove that line to go on without it.") from None
    with suppress(UserError):
        lines.append(parse_json(rest, path, _LINE))
    return lines
