"""What is wrong with a folder of runs: with each run in it, and with the files of the set that they are."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedem.core.errors import UserError
from fedem.core.schema import Kind, Listed, Table, Text, read_json
from fedem.runs.checking import Finding, check_run, set_aside
from fedem.runs.folder import CONFIG, METRICS_FILE, SUMMARY_FILE, RunFolder
from fedem.studies.comparison import COMPARISON
from fedem.studies.tuning import SEARCH, TRIAL, TUNED

# By name: what a file of a set holds, what follows if it is damaged, and whether it is made again from the runs.
_FILES: dict[str, tuple[Kind, str, bool]] = {
    "comparison.json": (COMPARISON, "fedem compare --resume makes it again from the runs", True),
    "tune.json": (TUNED, "fedem tune --resume makes it again from the trials", True),
    "trial.json": (
        TRIAL,
        "fedem tune can't go on; without it --resume makes the trial anew",
        True,
    ),
    "search.json": (SEARCH, "the search can't be gone on with", False),
    "choice.json": (Table({"rungs": Listed(Listed(Table()))}), "what was tried is not known any more", False),
    "theory.json": (Table({"outcome": Text(), "points": Listed(Table())}), "the study's figures are lost", False),
}


def runs_below(path: Path) -> list[RunFolder]:
    """Return the runs in a folder and in those below it, also one that has lost its configuration."""
    traces = (f"**/{CONFIG}", f"**/{METRICS_FILE}", f"**/{SUMMARY_FILE}", "**/checkpoints/checkpoint*.json")
    found = {trace.parent for pattern in traces for trace in path.glob(pattern)}
    places = sorted({place.parent if place.name == "checkpoints" else place for place in found})
    return [RunFolder(place) for place in places]


def check(path: Path, repair: bool = False) -> tuple[int, list[Finding]]:
    """Read everything below ``path``; returns how many runs there are, and what is wrong."""
    if not path.is_dir():
        raise UserError(f"There is no folder {path}; allowed: the folder of a run, or of several.")
    runs, files = runs_below(path), [file for name in _FILES for file in sorted(path.glob(f"**/{name}"))]
    if not runs and not files:
        raise UserError(f"{path} holds no run (no {CONFIG}); allowed: the folder of a run, or of several.")
    return len(runs), [*(found for run in runs for found in check_run(run, repair)), *_of_sets(files, repair)]


def _of_sets(files: Sequence[Path], repair: bool) -> Iterator[Finding]:
    for file in files:
        kind, follows, comes_again = _FILES[file.name]
        try:
            read_json(file, kind)
        except UserError as error:
            yield Finding(file, str(error), follows, set_aside(file) if repair and comes_again else "")
