"""``python -m benchmarks.defences``: what clipping costs a round, and whether honest rounds stay as they are.

A round's uploads are held and mixed again and again, with the rule and without by turns; what the rule takes longer is
compared with the whole round. Seconds are those of the processor, on one thread, the fewest of all tries.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.arguments import add_names
from benchmarks.measure import Disturbance, environment, show_disturbance
from fedem.core.tree import Tree, tree_map
from fedem.methods.mixer import Round, Uploads, gather
from fedem.methods.wrappers.defences import DEFENCES, Blocks, Defence, Defended, DefendedServer
from fedem.runs.config import Config, Layer
from fedem.runs.rounds import Training
from fedem.runs.trainer import Trainer

METHODS = ("fedavg", "fedem")
QUICK: Layer = {"data": {"num_clients": 6, "dimension": 6, "num_test": 20, "num_validation": 0}}


class Found(NamedTuple):
    """One rule beside one method."""

    method: str
    rule: str
    round: float
    """seconds of a round without the rule"""
    extra: float
    """seconds that mixing its uploads takes longer with the rule"""
    is_same: bool
    """whether all rounds ended in the same bits with it and without"""
    longest: float
    """the longest change of a round by the length that three quarters of its clients keep to, the largest of all"""

    @property
    def overhead(self) -> float:
        return self.extra / self.round


@dataclass(frozen=True)
class _Holding(Defence):
    """No defence, but it holds the uploads."""

    held: list[Any] = field(default_factory=list)

    def defend(self, start: Tree, this: Round, weights: Tensor, uploads: Uploads, blocks: Blocks) -> Defended:
        self.held[:] = uploads
        return Defended(this, self.held)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time rounds of each method and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defences", description=__doc__)
    add_names(parser, "--rules", "rule", DEFENCES, "clip")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tries", type=int, default=50, help="how often a round's uploads are mixed, each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny data; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, disturbance, found = Console(highlight=False), Disturbance(), []
    for method in METHODS:
        for rule in options.rules:
            found.append(line := compare(method, rule, options.rounds, options.tries, options.seed, options.quick))
            times = f"{1e3 * line.round:.1f} ms a round, {1e3 * line.extra:.2f} ms more with it"
            same = "the same bits" if line.is_same else "other models"
            console.print(
                f"{method}, {rule}: {times} ({line.overhead:+.1%}); {same}; longest {line.longest:.1f} q",
                soft_wrap=True,
            )
    figures = {"environment": environment(), "rounds": options.rounds, "found": [line._asdict() for line in found]}
    show_disturbance(console, disturbance.cores())
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2))


def compare(method: str, rule: str, rounds: int, tries: int, seed: int, quick: bool) -> Found:
    """Step through the rounds without the rule, and mix the uploads of each with it, too."""
    run: dict[str, Any] = {"rounds": rounds, "seed": seed, "evaluate_every": 0, "device": "cpu"}
    config = Config.build({"run": run, "method": {"name": method}}, QUICK if quick else {})
    plain = Trainer.prepare(config, config.make_data()).training
    blocks, holding = Blocks.of_method(plain.algorithm), _Holding()
    held = replace(plain, mixer=DefendedServer(plain.mixer, holding, blocks))
    defended = DefendedServer(plain.mixer, DEFENCES[rule](), blocks)
    state, least, same, longest = plain.init(), [float("inf")] * 3, True, 0.0
    for number in range(rounds):
        (after, _), seconds = _timed(held.step, state)
        least[0] = min(least[0], seconds)
        this, memory = _round(plain, number), state.memory
        found: dict[int, Any] = {}
        for _ in range(tries):
            for at, mixer in enumerate((plain.mixer, defended), 1):
                (found[at], _), seconds = _timed(mixer.mix, state.shared, memory, this, holding.held)
                least[at] = min(least[at], seconds)
        same = same and all(torch.equal(leaf, found[2].means[name]) for name, leaf in found[1].means.items())
        longest = max(longest, _longest(state.shared, holding.held, blocks))
        state = after
    return Found(method, rule, least[0], least[2] - least[1], same, longest)


def _round(training: Training, number: int) -> Round:
    return training.round(number, training.sample(number))


def _longest(shared: Tree, uploads: Sequence[tuple[Tensor, Tree]], blocks: Blocks) -> float:
    changes = tree_map(torch.sub, gather(uploads), shared)
    lengths = blocks.squares(sorted(blocks.trained), changes).amax(1).sqrt()
    return float(lengths.amax() / lengths.quantile(0.75, interpolation="lower"))


def _timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    started = time.process_time()
    result = call(*arguments)
    return result, time.process_time() - started


if __name__ == "__main__":
    main()
