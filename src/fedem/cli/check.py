"""``fedem check``: what is wrong with runs."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedem.core.errors import counted
from fedem.report.console import aside, say, waiting
from fedem.studies.checking import check as look


def check(
    path: Annotated[Path, Argument(metavar="RUN", help="The folder of a run, or of several: a comparison, ...")],
    repair: Annotated[
        bool, Option("--repair", help="Put right what can be: take the checkpoint before, move damaged lines aside.")
    ] = False,
) -> None:
    """Read everything in a run's folder, or in a folder of runs: what is damaged or missing, and what follows.

    The hashes of all tensor files are compared with those in the manifests, and all JSON and TOML with what such a file
    may hold. Exit code 0 if nothing is wrong, 1 if something is.

    With --repair the checkpoint before takes the place of a damaged one, lines of metrics.jsonl that can't be read move
    to metrics.damaged.jsonl, other damaged files that can be made again move aside, and what killed processes left is
    removed. Nothing is deleted that can't be made again. Exit code 0 if nothing is wrong any more.

    Examples:
      fedem check runs/first

      fedem check runs/first --repair
    """
    with waiting("Reading", quiet=False):
        number, findings = look(path, repair)
    for found in findings:
        say(f"{found.problem} What follows: {found.follows}." + (f" Done: {found.mended}." if found.mended else ""))
    left = sum(found.counts for found in findings)
    if left:
        hint = "" if repair else "; --repair puts right what can be"
        aside(f"{counted(left, 'thing is', 'things are')} wrong in {counted(number, 'run')}{hint}.")
        raise SystemExit(1)
    say(f"{counted(number, 'run')}: nothing is {'left ' if findings else ''}wrong.")
