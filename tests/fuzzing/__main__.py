"""Run many inputs in a process of their own, and print a table: ``scripts/fuzz --inputs 100000``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from fuzzing.harness import FAILURES, HANG, OUTCOMES, TRACEBACK, Trial, dump_when_stuck
from fuzzing.readers import READERS, shares

_OWN = 3  # how a process ends that could not make an input
_BY_TITLE = {kind.title: kind for kind in READERS}

Left = dict[str, list[int]]  # by title of a reader: the seeds that are left, from the first up to the last


def _work(left: Left) -> None:
    """Try inputs, and write lines of what is begun and what came of those before."""
    for title, (first, last) in left.items():
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            dump_when_stuck()
            trial = Trial(_BY_TITLE[title], Path(place) / "reader")
            _tell(trial, first)
            trial.run(range(first, last), partial(_tell, trial))
            _tell(trial, last)


def _tell(trial: Trial, seed: int) -> None:
    """Say which input is begun, and what came of those since this was said last."""
    dump_when_stuck()
    told = {"title": trial.kind.title, "begun": seed, "seconds": time.process_time()}
    print(json.dumps(told | {"counts": trial.counts, "failures": trial.failures}), flush=True)
    trial.counts.clear()
    trial.failures.clear()


class Audit:
    """What came of the inputs so far; rows are printed once a reader is through."""

    def __init__(self, left: Left, show: int, times: bool):
        self.left, self._show, self._times = left, show, times
        self.counts = {title: Counter[str]() for title in left}
        self._seconds = 0.0  # of the processor, when the reader began

    def run(self) -> None:
        """Have a process try inputs; one that dies is followed by another, behind the input that it died of."""
        while self.left:
            command = [sys.executable, "-m", "fuzzing", "--worker", json.dumps(self.left)]
            with tempfile.TemporaryFile("w+") as errors:
                with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        self._hear(**json.loads(line))
                errors.seek(0)
                trace = errors.read()
            if not self.left:
                return
            title = next(iter(self.left))
            if process.returncode in (0, _OWN):
                sys.exit(f"{title} can't be tried: {trace}")
            seed = self.left[title][0]
            self.counts[title][HANG if "Timeout" in trace[:200] else TRACEBACK] += 1
            self._say(f"{title}, input {seed}: the process ended ({process.returncode}). {trace[-3000:]}")
            self._seconds = 0.0
            self._hear(title, seed + 1, {}, [], 0.0)

    def _hear(self, title: str, begun: int, counts: dict[str, int], failures: list[Any], seconds: float) -> None:
        self.counts[title].update(counts)
        for outcome, seed, said in failures:
            if sum(self.counts[title][name] for name in FAILURES) <= self._show:
                self._say(f"{title}, input {seed}, {outcome}: {said}")
        if not self.counts[title] and not counts:
            self._seconds = seconds
        self.left[title][0] = begun
        if begun == self.left[title][1]:
            print(row(title, self.counts[title]), flush=True)
            if self._times:
                each = 1000 * (seconds - self._seconds) / max(1, self.counts[title].total())
                self._say(f"{title}: {seconds - self._seconds:.1f} s of a processor, {each:.1f} ms each")
            del self.left[title]

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def row(title: str, counts: Counter[str]) -> str:
    return f"| {title} | {counts.total():,} | {' | '.join(f'{counts[name]:,}' for name in OUTCOMES)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=5_000, help="of all readers together")
    parser.add_argument("--first", type=int, default=0, help="the seed of each reader's first input")
    parser.add_argument("--readers", default="", help="parts of their titles, with ';' between; all by default")
    parser.add_argument("--show", type=int, default=5, help="failures of a reader that are written out")
    parser.add_argument("--times", action="store_true", help="also write how long each reader took")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        try:
            return _work(json.loads(asked.worker))
        except Exception:
            traceback.print_exc()
            sys.exit(_OWN)
    parts = [part.strip().lower() for part in asked.readers.split(";")]
    chosen = [kind for kind in READERS if any(part in kind.title.lower() for part in parts)]
    if not chosen:
        sys.exit(f"No reader has one of {parts} in its title; there are: {'; '.join(_BY_TITLE)}.")
    left = {kind.title: [asked.first, asked.first + count] for kind, count in shares(chosen, asked.inputs).items()}
    print(f"| reader | inputs | {' | '.join(OUTCOMES)} |\n| --- |{' ---: |' * (1 + len(OUTCOMES))}", flush=True)
    audit = Audit(left, asked.show, asked.times)
    audit.run()
    total = sum(audit.counts.values(), Counter[str]())
    print(row("**all**", total))
    sys.exit(any(total[name] for name in FAILURES))


if __name__ == "__main__":
    main()
