"""``python -m benchmarks.components``: is the true number of components found on the paper's synthetic mixture?

With ``method.num_components = "auto"`` the number is final after half of the rounds at the latest, so that nothing more
is trained here. A line for each true number and seed has the number that was found, the largest rise of the loss, in
nats per sample, at which a component was removed, and the least one at which all were kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from fedem.runs.components import looks
from fedem.runs.config import Config
from fedem.runs.trainer import Progress, Trainer

TESTED = 0  # test samples of a client: nothing is scored


class Found(NamedTuple):
    """What became of one run's components."""

    number: int
    removed: float | None  # the largest rise of a component that was removed
    kept: float | None  # the least rise when all were kept

    def __str__(self) -> str:
        rises = ("-" if rise is None else f"{rise:.4f}" for rise in (self.removed, self.kept))
        return " | ".join([str(self.number), *rises])


def find(method: str, true: int, seed: int, rounds: int, **data: int) -> Found:
    """Train until the number of components is final."""
    run = {"rounds": rounds, "seed": seed, "evaluate_every": 0, "device": "cpu"}
    made = {"name": "synthetic", "num_components": true, "num_test": TESTED, **data}
    config = Config.build({"method": {"name": method, "num_components": "auto"}, "run": run, "data": made})
    trainer = Trainer.prepare(config, config.make_data())
    progress = Progress(trainer.training.init())
    while progress.rounds < rounds // 2:
        trainer.advance(progress)
    done = looks(progress.history)
    gone = [look["rise"] for _, look in done if look["action"] in ("merged", "pruned")]
    stayed = [look["rise"] for _, look in done if look["action"] in ("split", "kept") and "rise" in look]
    return Found(progress.history[-1]["num_components"], max(gone, default=None), min(stayed, default=None))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line in Markdown for each run, and how often the true number was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[1].strip().split("\n")[0])
    parser.add_argument("--method", default="fedem")
    parser.add_argument("--true", default="2,3,5", help="true numbers of components, with commas between them")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--validation", type=int, default=100, help="validation samples of a client; 0: by BIC")
    asked = parser.parse_args(arguments)
    print("| true M | seed | found | largest rise removed | least rise kept |\n| --- | --- | --- | --- | --- |")
    for true in map(int, asked.true.split(",")):
        right = 0
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            sizes = {"num_clients": asked.clients, "num_validation": asked.validation}
            found = find(asked.method, true, seed, asked.rounds, **sizes)
            right += found.number == true
            print(f"| {true} | {seed} | {found} |", flush=True)
        print(f"| {true} | all | {right} of {asked.seeds} | | |", flush=True)


if __name__ == "__main__":
    main()
