"""``python -m benchmarks.defences``: what clipping costs a round, and whether honest rounds stay as they are.

Rounds with and without it alternate, from the same states, in one process, on one thread; seconds are those of the
processor.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks.measure import Disturbance, environment, show_disturbance
from fedem.methods.wrappers.defences import DEFENCES, Blocks, DefendedServer
from fedem.runs.config import Config, Layer
from fedem.runs.rounds import State, Training
from fedem.runs.trainer import Trainer

METHODS = ("fedavg", "fedem")
QUICK: Layer = {"data": {"num_clients": 6, "dimension": 6, "num_test": 20, "num_validation": 0}}


class Found(NamedTuple):
    """One rule beside one method."""

    method: str
    rule: str
    seconds_plain: float
    seconds_defended: float
    overhead: float
    """the seconds of the fastest round with the rule by those of the fastest without, less one"""
    is_same: bool
    """whether all rounds ended in the same bits with it and without"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Time rounds of each method and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defences", description=__doc__)
    parser.add_argument("--rules", default="clip", help=f"of {', '.join(DEFENCES)}, with commas between")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny data; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, disturbance, found = Console(highlight=False), Disturbance(), []
    for method in METHODS:
        for rule in options.rules.split(","):
            found.append(compare(method, rule, options.rounds, options.seed, options.quick))
            line = found[-1]
            milliseconds = f"{1e3 * line.seconds_plain:.1f} ms, {1e3 * line.seconds_defended:.1f} ms with it"
            same = "the same bits" if line.is_same else "other models"
            console.print(f"{method}, {rule}: {milliseconds} ({line.overhead:+.1%}); {same}")
    figures = {"environment": environment(), "rounds": options.rounds, "found": [line._asdict() for line in found]}
    show_disturbance(console, disturbance.cores())
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2))


def compare(method: str, rule: str, rounds: int, seed: int, quick: bool) -> Found:
    """Step through the rounds without the rule, and try each with it."""
    run: dict[str, Any] = {"rounds": rounds, "seed": seed, "evaluate_every": 0, "device": "cpu"}
    config = Config.build({"run": run, "method": {"name": method}}, QUICK if quick else {})
    plain = Trainer.prepare(config, config.make_data()).training
    blocks = Blocks.of_method(plain.algorithm)
    defended = replace(plain, mixer=DefendedServer(plain.mixer, DEFENCES[rule](), blocks))
    state, pairs, same = plain.init(), list[tuple[float, float]](), True
    _timed(defended, state)
    for number in range(rounds):
        order = (plain, defended) if number % 2 else (defended, plain)
        timed = {training is plain: _timed(training, state) for training in order}
        pairs.append((timed[True][1], timed[False][1]))
        state, other = timed[True][0], timed[False][0]
        same = same and all(torch.equal(leaf, other.shared[name]) for name, leaf in state.shared.items())
    # The fastest: whatever disturbs a round makes it slower.
    without, with_it = (min(column) for column in zip(*pairs, strict=True))
    return Found(method, rule, without, with_it, with_it / without - 1, same)


def _timed(training: Training, state: State) -> tuple[State, float]:
    # Of the processor: what others do on the machine must not count.
    started = time.process_time()
    after, _ = training.step(state)
    return after, time.process_time() - started


if __name__ == "__main__":
    main()
