"""``python -m benchmarks.spent SETTING ...``: what a round of any run spends its time on.

Settings are as ``fedem train --set`` has them. After rounds in which shapes are recorded one is timed, and one more is
profiled: how long the GPU is busy, with how many launches, and which kernels take longest. On a CPU these are torch's
operations. Each method is trained in turn where several are named:

python -m benchmarks.spent data.name=cifar100 run.precision=bfloat16 run.device=cuda --methods fedavg,fedbabu
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import add_names, refused
from benchmarks.engine import advancing
from benchmarks.measure import Effort, environment, measure, operations
from fedem.core.errors import UserError
from fedem.methods import METHODS
from fedem.runs.config import Config, parse_assignment
from fedem.runs.trainer import Trainer

EFFORT = Effort(4, 3)  # shapes are recorded in the first rounds
_SHOWN = 12  # kernels
_WIDTH = 70  # of their names, which templates make long


def look(config: Config) -> dict[str, Any]:
    """Time rounds and profile one: seconds, seconds busy, launches, and both of each kernel, the longest first."""
    trainer = Trainer.prepare(config, config.make_data()).placed()
    device = trainer.recipe.device
    with trainer.recipe.products():
        advance = advancing(trainer.training)
        rounds = measure(advance, EFFORT)
        kernels = sorted(operations(advance, device), key=lambda kernel: -kernel.seconds)
    busy, launches = sum(kernel.seconds for kernel in kernels), sum(kernel.launches for kernel in kernels)
    longest = [kernel._asdict() for kernel in kernels]
    return {"seconds": rounds.median, "busy_seconds": busy, "launches": launches, "kernels": longest}


def main(arguments: Sequence[str] | None = None) -> None:
    """Look at a round of each method, print a table of each and, if asked, write all figures to a file as they come."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spent", description=__doc__)
    parser.add_argument(
        "settings", nargs="*", type=refused(parse_assignment), metavar="SETTING", help="section.key=value"
    )
    add_names(parser, "--methods", "method", METHODS, "fedem")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    options = parser.parse_args(arguments)
    if any("name" in layer.get("method", {}) for layer in options.settings):
        parser.error("method.name is given; allowed: --methods NAME,...")
    try:
        configs = {name: Config.build(*options.settings, {"method": {"name": name}}) for name in options.methods}
    except UserError as error:
        parser.error(str(error))
    figures: dict[str, Any] = {"environment": environment(), "settings": options.settings, "methods": {}}
    console = Console(highlight=False, markup=False, width=120)
    for name, config in configs.items():
        try:
            row = figures["methods"][name] = look(config)
        except UserError as error:
            parser.error(f"{name}: {error}")
        shares = f"busy for {row['busy_seconds']:.3f} with {row['launches']:,} launches"
        title = f"A round of {name}: {row['seconds']:.3f} s, {shares}"
        console.print(title)
        table = Table(box=box.ASCII2)
        for heading in ("longest", "seconds", "launches"):
            table.add_column(heading, justify="left" if heading == "longest" else "right", no_wrap=True)
        for kernel in row["kernels"][:_SHOWN]:
            table.add_row(kernel["name"][:_WIDTH], f"{kernel['seconds']:.4f}", f"{kernel['launches']:,}")
        console.print(table)
        if options.out:
            options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
