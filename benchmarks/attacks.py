"""``python -m benchmarks.attacks``: what is left of the honest clients' accuracy, by attack, defence and attackers.

Every method is trained on the synthetic mixture with every attack, share of hostile clients and defence that is asked
for; a defence is one that the installed fedem has a section for, and "none" is the server as it is. Prints a table in
Markdown for each method, and draws a heat map. Without attackers all attacks are one, so that is trained once.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedem
from benchmarks.arguments import add_names
from fedem.core.errors import UserError
from fedem.methods import METHODS
from fedem.methods.base import title_of
from fedem.runs.config import SECTIONS, Config, parse_assignment
from fedem.runs.rounds import DivergedError

NONE = "none"
# The titles of rows, and what is set in [attack].
ATTACKS: dict[str, dict[str, Any]] = {
    "sign flip": {"name": "sign_flip"},
    "scaling by 10": {"name": "scaling", "factor": 10},
    "scaling by 1000": {"name": "scaling", "factor": 1000},
    "noise": {"name": "noise"},
    "huge": {"name": "huge"},
    "collusion": {"name": "collusion"},
    "little is enough": {"name": "little"},
    "lie about size": {"name": "lie_size"},
    "label flip": {"name": "label_flip"},
    "backdoor": {"name": "backdoor"},
}


class Size(NamedTuple):
    """How large the federation is, and how long it trains."""

    clients: int = 50
    rounds: int = 50
    dimension: int = 60
    samples: int = 200  # for training, of a client at most
    tests: int = 200


class Case(NamedTuple):
    """One run."""

    method: str
    attack: str  # title; "none" where nobody is hostile
    share: float
    defence: str  # its name, perhaps with settings behind it
    seed: int


class Outcome(NamedTuple):
    """What became of it."""

    accuracy: float | None  # of the honest clients; None where training diverged
    backdoor: float | None = None  # share of their test samples that get the attackers' label, where they want one


Outcomes = dict[Case, Outcome]


def defences() -> list[str]:
    """Return what the installed fedem can do against attackers, nothing first."""
    return [NONE, *(SECTIONS["defence"].table if "defence" in SECTIONS else ())]


def configure(case: Case, size: Size) -> Config:
    """Make a run's configuration."""
    name, _, settings = case.defence.partition(":")
    layers: list[dict[str, dict[str, Any]]] = [
        {
            "run": {"rounds": size.rounds, "seed": case.seed, "evaluate_every": 0, "device": "cpu"},
            "data": {
                "num_clients": size.clients,
                "dimension": size.dimension,
                "max_samples": size.samples,
                "num_test": size.tests,
                "num_validation": 0,
            },
            "method": {"name": case.method},
            "attack": {"name": NONE} if case.attack == NONE else ATTACKS[case.attack] | {"share": case.share},
        }
    ]
    if name != NONE:
        layers.append({"defence": {"name": name}})
        layers += [parse_assignment(f"defence.{setting}") for setting in settings.split(";") if setting]
    return Config.build(*layers)


def train(size: Size, case: Case) -> Outcome:
    """Carry out one run."""
    torch.set_num_threads(1)  # cases run beside each other
    config = configure(case, size)
    try:
        summary = fedem.run(config, config.make_data()).summary
    except DivergedError:
        return Outcome(None)
    return Outcome(None if summary.get("diverged") else summary["test_accuracy"], summary.get("backdoor_success"))


def cases(
    methods: Sequence[str], attacks: Sequence[str], shares: Sequence[float], against: Sequence[str], seeds: int
) -> list[Case]:
    """Return all runs, each once."""
    harm = [(attack, share) for attack in attacks for share in shares if share]
    pairs = [(NONE, 0.0)] * (0.0 in shares) + harm
    return [
        Case(method, attack, share, defence, seed)
        for method in methods
        for defence in against
        for attack, share in pairs
        for seed in range(seeds)
    ]


def table(outcomes: Outcomes, method: str) -> str:
    """Return one method's figures in Markdown, in percent: means over seeds, and how far the seeds are apart."""
    mine = [case for case in outcomes if case.method == method]
    against = list(dict.fromkeys(case.defence for case in mine))
    lines = [["attack", "hostile", *against]]
    for attack, share in dict.fromkeys((case.attack, case.share) for case in mine):
        cells = [
            _text([outcome for case, outcome in outcomes.items() if case[:4] == (method, attack, share, defence)])
            for defence in against
        ]
        lines.append([attack, f"{share:.0%}", *cells])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(outcomes: Sequence[Outcome]) -> str:
    known = [100 * each.accuracy for each in outcomes if each.accuracy is not None]
    if len(known) < len(outcomes):
        return f"diverged ({len(outcomes) - len(known)} of {len(outcomes)})"
    text = f"{statistics.mean(known):.1f}"
    if len(known) > 1:
        text += f" ± {statistics.stdev(known):.1f}"
    marked = [100 * each.backdoor for each in outcomes if each.backdoor is not None]
    return f"{text}, mark {statistics.mean(marked):.0f}" if marked else text


def draw(outcomes: Outcomes, path: Path) -> None:
    """Draw a heat map for each method: attacks and shares down, defences across; crosses where training diverged."""
    import numpy as np

    from fedem.report.pictures.canvas import INK, Picture, alone, inked, panels

    methods = list(dict.fromkeys(case.method for case in outcomes))
    against = list(dict.fromkeys(case.defence for case in outcomes))
    rows = list(dict.fromkeys((case.attack, case.share) for case in outcomes))

    def mean(method: str, row: tuple[str, float], defence: str) -> float:
        found = [each.accuracy for case, each in outcomes.items() if case[:4] == (method, *row, defence)]
        known = [100 * each for each in found if each is not None]
        return statistics.mean(known) if found and len(known) == len(found) else np.nan

    values = [np.array([[mean(method, row, each) for each in against] for row in rows]) for method in methods]
    every = np.concatenate(values)
    known = every[np.isfinite(every)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 100.0)
    with inked():
        figure, axes = panels(len(methods), height=max(2.4, 0.24 * len(rows) + 1.2))
        labels = [f"{attack}, {share:.0%}" for attack, share in rows]
        for number, (place, method, grid) in enumerate(zip(axes, methods, values, strict=True)):
            image = place.imshow(grid, vmin=low, vmax=high, aspect="auto")
            place.grid(visible=False)
            place.set_title(title_of(method))
            place.set_xticks(range(len(against)), against, rotation=45, ha="right")
            place.set_yticks(range(len(rows)), [""] * len(rows) if number % 2 else labels)  # two panels in a row
            for y, x in np.ndindex(grid.shape):
                is_known = np.isfinite(grid[y, x])
                dark = is_known and grid[y, x] < (low + high) / 2
                shown = f"{grid[y, x]:.0f}" if is_known else "x"
                place.text(x, y, shown, ha="center", va="center", fontsize=6, color="white" if dark else INK)
        figure.colorbar(image, ax=axes, label="test accuracy of the honest clients in %", aspect=40)
    picture = Picture("What attacks leave of the accuracy", "The honest clients' test accuracy.", figure)
    path.write_bytes(alone(picture, path.suffix.removeprefix(".")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all cases, print tables and draw a picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    add_names(parser, "--methods", "method", METHODS, "fedavg,fedem")
    add_names(parser, "--attacks", "attack", ATTACKS)
    parser.add_argument("--shares", default="0,0.1,0.2,0.3", help="of the clients that are hostile")
    here = "; settings may follow, mean:max_weight=0.1;other=2"
    parser.add_argument("--defences", default=NONE, help=f"here there are {', '.join(defences())}, or all{here}")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    parser.add_argument("--workers", type=int, default=2, help="runs beside each other")
    for name, value in Size()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the heat map here")
    asked = parser.parse_args(arguments)
    size = Size(*(getattr(asked, name) for name in Size._fields))
    against = defences() if asked.defences == "all" else asked.defences.split(",")
    shares = [float(share) for share in asked.shares.split(",")]
    planned = cases(asked.methods, asked.attacks, shares, against, asked.seeds)
    try:
        for case in planned:
            configure(case, size)  # refused before any work
    except UserError as error:
        parser.error(str(error))
    if asked.workers == 1:
        found = [train(size, case) for case in planned]
    else:
        with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(partial(train, size), planned, chunksize=4))
    outcomes = dict(zip(planned, found, strict=True))
    if asked.out:
        lines = [case._asdict() | outcome._asdict() for case, outcome in outcomes.items()]
        asked.out.write_text(json.dumps({"size": size._asdict(), "runs": lines}, indent=1), encoding="utf-8")
    for method in dict.fromkeys(case.method for case in planned):
        print(f"\n{title_of(method)}:\n\n{table(outcomes, method)}")
    if asked.picture:
        draw(outcomes, asked.picture)


if __name__ == "__main__":
    main()
