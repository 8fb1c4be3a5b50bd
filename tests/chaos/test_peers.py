"""Peers, and the place where they meet, killed at random moments: the others go on, and who comes back joins them."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from killing import one_in
from patience import patient
from peering import Deployment, Process, free_port, wait_for

from fedem.core.errors import counted

pytestmark = pytest.mark.network
NAMES = ("ann", "bob", "cem")
PLACE = "meeting place"


class Peers:
    """Three peers, of whom two are enough, and where they meet; whatever is killed is started again."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.deployment, self._folder, self._stack, self._port = Deployment(folder, 100_000), folder, stack, free_port()
        self.processes: dict[str, Process] = {}
        for name in (PLACE, *NAMES):
            self.start(name)

    def start(self, name: str) -> None:
        if name == PLACE:
            process = Process(self._folder, "meet", "--port", str(self._port))
        else:
            process = self.deployment.peer(self._port, [name], least=2, most=len(NAMES))
        self.processes[name] = self._stack.enter_context(process)

    def rounds(self) -> dict[str, int]:
        """Return the rounds that everybody has finished and kept; a file that is torn can't be read."""
        kept = {name: list(self.deployment.state.glob(f"*/{name}.safetensors")) for name in NAMES}
        return {name: self.deployment.kept(name).round if paths else 0 for name, paths in kept.items()}

    def wait_until_all_go_on(self, number: int) -> None:
        """Wait for each of those there to finish a round that ``number`` clients take part in, after now."""
        there = [name for name in NAMES if self.processes[name].is_running()]
        before = {name: self._last(name) for name in there}

        def gone_on() -> bool:
            return all(
                any(line["clients"] == number for line in self.deployment.lines(name) if line["round"] > before[name])
                for name in there
            )

        wait_for(gone_on, list(self.processes.values()) if number == len(NAMES) else [self.processes[PLACE]], 300)

    def _last(self, name: str) -> int:
        lines = self.deployment.lines(name)
        return int(lines[-1]["round"]) if lines else 0


def test_peers_outlive_kills_at_any_moment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance, kills = random.Random(10), one_in(50, least=1)
    killed: list[str] = []
    with ExitStack() as stack:
        peers = Peers(tmp_path, stack)
        peers.wait_until_all_go_on(len(NAMES))
        for number in range(kills):
            time.sleep(chance.uniform(0, patient(5)))  # perhaps they train, perhaps they meet
            before = peers.rounds()
            # Mostly peers; in every fifth kill the place where they meet.
            victim = PLACE if number % 5 == 4 else chance.choice(NAMES)
            peers.processes[victim].kill()
            killed.append(victim)
            if victim != PLACE and chance.random() < 0.5:
                done = peers.rounds()
                peers.wait_until_all_go_on(len(NAMES) - 1)
                assert peers.rounds()[victim] == done[victim], "it keeps what it had"
            peers.start(victim)
            after = peers.rounds()
            assert all(after[name] >= before[name] for name in NAMES), "what is kept never goes back"
            if chance.random() < 0.5:  # else the next kill falls where they may not have met yet
                peers.wait_until_all_go_on(len(NAMES))
        peers.wait_until_all_go_on(len(NAMES))
        for name in NAMES:
            rounds = [line["round"] for line in peers.deployment.lines(name)]
            assert rounds == sorted(set(rounds)), "no round is done twice"
    with capsys.disabled():
        places = killed.count(PLACE)
        of = f"{counted(kills - places, 'kill')} of a peer, {places} of the meeting place"
        print(f"\n{of}: the others went on, and who came back joined them")
