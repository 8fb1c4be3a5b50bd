"""Run many inputs, each reader in a process of its own, and print a table: ``scripts/fuzz --inputs 100000``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzzing.harness import FAILURES, HANG, OUTCOMES, TRACEBACK, Trial, dump_when_stuck
from fuzzing.readers import READERS, shares

_STUCK = 1  # how a process ends whose trace was written because nothing happened


def _work(title: str, first: int, last: int) -> None:
    """Try inputs of one reader, and write lines of what is begun and what came of it."""
    kind = next(kind for kind in READERS if kind.title == title)

    def begun(seed: int) -> None:
        dump_when_stuck()
        print(json.dumps({"begun": seed, "counts": trial.counts, "failures": trial.failures}), flush=True)
        trial.counts.clear()
        trial.failures.clear()

    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        trial = Trial(kind, Path(place) / "reader")
        trial.run(range(first, last), begun)
        begun(last)


def _watched(title: str, count: int, first: int, show: int) -> tuple[Counter[str], float]:
    """Have a process try inputs; one that dies is started again behind the input that it died of."""
    counts: Counter[str] = Counter()
    started, seed, last = time.perf_counter(), first, first + count
    while seed < last:
        command = [sys.executable, "-m", "fuzzing", "--worker", title, "--first", str(seed), "--last", str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            begun = seed - 1
            for line in process.stdout:
                told = json.loads(line)
                begun = told["begun"]
                counts.update(told["counts"])
                for outcome, which, said in told["failures"]:
                    if sum(counts[name] for name in FAILURES) <= show:
                        print(f"{title}, input {which}, {outcome}: {said}", file=sys.stderr)
            trace = process.stderr.read()
        if process.returncode == 0:
            break
        if begun < seed:
            sys.exit(f"{title} can't be tried: {trace}")
        counts[HANG if "Timeout" in trace[:200] else TRACEBACK] += 1
        print(f"{title}, input {begun}: the process ended ({process.returncode}). {trace[-3000:]}", file=sys.stderr)
        seed = begun + 1
    return counts, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=5_000, help="of all readers together")
    parser.add_argument("--first", type=int, default=0, help="the seed of each reader's first input")
    parser.add_argument("--readers", default="", help="parts of their titles, with commas between; all by default")
    parser.add_argument("--show", type=int, default=5, help="failures of a reader that are written out")
    parser.add_argument("--times", action="store_true", help="also write how long each reader took")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--last", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return _work(asked.worker, asked.first, asked.last)
    parts = [part.strip().lower() for part in asked.readers.split(",")]
    chosen = [kind for kind in READERS if any(part in kind.title.lower() for part in parts)]
    total: Counter[str] = Counter()
    print(f"| reader | inputs | {' | '.join(OUTCOMES)} |\n| --- |{' ---: |' * (1 + len(OUTCOMES))}")
    for kind, count in shares(chosen, asked.inputs).items():
        counts, seconds = _watched(kind.title, count, asked.first, asked.show)
        total += counts
        print(_row(kind.title, counts), flush=True)
        if asked.times:
            print(f"{kind.title}: {seconds:.0f} s, {1000 * seconds / max(1, count):.1f} ms each", file=sys.stderr)
    print(_row("**all**", total))
    sys.exit(any(total[name] for name in FAILURES))


def _row(title: str, counts: Counter[str]) -> str:
    return f"| {title} | {counts.total():,} | {' | '.join(f'{counts[name]:,}' for name in OUTCOMES)} |"


if __name__ == "__main__":
    main()
