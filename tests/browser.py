"""A real browser without a window, driven through pipes by the DevTools protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patience import patient

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
# Where a browser reads commands and writes answers.
_COMMANDS, _ANSWERS = 3, 4


class Tab:
    """A page in a browser; ``events`` holds whatever it has told of itself."""

    def __init__(self, commands: int, answers: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._commands, self._answers = commands, answers
        self._rest, self._count, self._session = b"", 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call the browser and return its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters} | self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda found: found.get("id") == self._count)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def open(self, place: Path) -> None:
        """Show a file and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=place.as_uri())
        if "Page.loadEventFired" not in [event["method"] for event in self.events]:
            self._wait(lambda found: found.get("method") == "Page.loadEventFired")

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 800) -> None:
        """Take the screen of a phone."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)

    def prefer(self, media: str = "screen", scheme: str = "light") -> None:
        """Show on a medium, in the light or in the dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def _wait(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + patient(60)
        while True:
            while b"\0" in self._rest:
                text, _, self._rest = self._rest.partition(b"\0")
                message: dict[str, Any] = json.loads(text)
                if "method" in message:
                    self.events.append(message)
                if wanted(message):
                    return message
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._answers, 1 << 16) if ready else b""
            assert piece, "the browser does not answer"
            self._rest += piece


@contextmanager
def browsing(folder: Path) -> Iterator[Tab]:
    """Start a browser whose profile is in ``folder``, and end it."""
    assert CHROMIUM is not None
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]

    def place() -> None:
        os.dup2(read_commands, _COMMANDS)
        os.dup2(write_answers, _ANSWERS)

    process = subprocess.Popen(
        [CHROMIUM, *words, f"--user-data-dir={folder}"],
        preexec_fn=place,
        pass_fds=(_COMMANDS, _ANSWERS),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Tab(commands, answers)
    finally:
        # Without its commands a browser ends by itself.
        os.close(commands)
        try:
            process.wait(patient(60))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
