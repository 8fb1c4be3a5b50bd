"""Programs that end with the process that started them, however it ends.

Run as a program, this file is the guard: a process that outlives the one it guards. It imports nothing but Python.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

# A program starts only after the guard has been told of it: whoever is killed in between leaves nothing behind.
_WHEN_TOLD = 'read -r told && exec "$@" < /dev/null'
_ENDING = 10.0  # seconds for killed processes to be gone


class Guard(AbstractContextManager["Guard"]):
    """Kills groups of processes once this process is gone, and then removes the files that are to go with them.

    It reads from a pipe whose other end is this process's alone, so that the end of file shows that it is gone: it
    ended, was killed (also with SIGKILL, which nobody can handle), or closed the guard.
    """

    def __init__(self, *removed: Path):
        command = [sys.executable, "-I", "-S", __file__, *map(str, removed)]
        self._process = Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)

    def start(self, command: Sequence[str], **options: Any) -> Popen[bytes]:
        """Start a program as the leader of a group, in a session of its own; ``options`` are those of Popen."""
        waiting = ["/bin/sh", "-c", _WHEN_TOLD, "sh", *command]
        process = Popen(waiting, stdin=PIPE, start_new_session=True, **options)
        assert process.stdin is not None
        self._tell(f"+{process.pid}")
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"\n")
        return process

    def forget(self, process: Popen[bytes]) -> None:
        """Leave a group alone that is gone: its number may become another's."""
        self._tell(f"-{process.pid}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it was killed, or closed
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of a group of processes that have ended
        return False
    return True


def _guard(removed: Sequence[str]) -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _ENDING
    while any(map(_is_there, groups)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for path in removed:
        with suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    _guard(sys.argv[1:])
