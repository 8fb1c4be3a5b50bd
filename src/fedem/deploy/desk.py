"""Where an agent and its workers, which come and go, leave notes for each other."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedem.deploy.holding import end_with_holder, held


@dataclass(frozen=True)
class Desk:
    """What an agent and its workers, which come and go, tell each other: files of a folder that goes with the agent."""

    folder: Path
    agent: int
    """the agent's process"""
    round_timeout: int

    @classmethod
    @contextmanager
    def opened(cls, round_timeout: int) -> Iterator[Desk]:
        """Open a desk whose agent is this process."""
        with tempfile.TemporaryDirectory(prefix="fedem-") as folder:
            desk = cls(Path(folder), os.getpid(), round_timeout)
            with held(desk._held, "The agent's folder"):
                yield desk

    def end_with_agent(self) -> None:
        """Have this process, a worker, end when the agent is gone."""
        end_with_holder(self._held)

    @property
    def has_met(self) -> bool:
        """Whether a worker of this agent was accepted by others before."""
        return self._met.exists()

    def note_met(self, run: str) -> None:
        """Remember that the others accepted this process, and which run it is that they have in common."""
        self._met.write_text(run, encoding="utf-8")

    @property
    def run(self) -> str:
        """Which run a worker of this agent took part in; empty before."""
        return self._met.read_text(encoding="utf-8") if self.has_met else ""

    @property
    def _held(self) -> Path:
        return self.folder / "agent"

    @property
    def _met(self) -> Path:
        return self.folder / "met"

    @property
    def _reason(self) -> Path:
        return self.folder / "reason"

    def leave(self, reason: str) -> None:
        """Make the agent leave the meeting for good; nobody comes back from here."""
        self._reason.write_text(reason, encoding="utf-8")
        os.kill(self.agent, signal.SIGTERM)
        signal.pause()

    def reason(self) -> str | None:
        """Return why a worker had to leave, if one had."""
        return self._reason.read_text(encoding="utf-8") if self._reason.exists() else None
