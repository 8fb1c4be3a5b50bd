"""All that kept runs show, made anew: the leaderboard, and each experiment's table, picture and report."""

from collections.abc import Iterator
from pathlib import Path

from fedem.core.errors import UserError
from fedem.report.board import board_page
from fedem.report.page import build_page
from fedem.report.pictures.canvas import alone
from fedem.report.pictures.declared import draw_experiment
from fedem.report.runs import gather
from fedem.report.studies import experiment_markdown
from fedem.studies import board, experiments
from fedem.studies.sweep import Labels

LEADERBOARD = "leaderboard.md"
_PICTURE = "svg"


def result_pages(place: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield names and contents of files, from the runs kept with the experiments in ``place``.

    These are ``leaderboard.md`` and, for each experiment, ``NAME/table.md``; where it is drawn along an axis or the
    rounds ``NAME/figure.svg``; and, unless its runs are another's, ``NAME/report.html`` with all their figures.
    """
    found = [experiments.read(place / name) for name in experiments.listed(place)]
    homes = {each.name: place / each.home / experiments.RESULTS for each in found}
    shown = [each for each in found if homes[each.name].is_dir()]
    if not shown:
        raise UserError(f"No experiment in {place} has kept runs; allowed: a folder with */{experiments.RESULTS}.")
    yield Path(LEADERBOARD), board_page(board.gather(place), place).encode()
    for each in shown:
        folder, own = homes[each.name], Path(each.name)
        entries = experiments.kept(each, folder)
        lines = experiments.tabulate(each, entries)
        yield own / "table.md", experiment_markdown(each, lines).encode()
        if each.along and (picture := draw_experiment(each, lines, entries)) is not None:
            yield own / f"figure.{_PICTURE}", alone(picture, _PICTURE)
        if each.home == each.name:
            called = {entry.folder.path: _name(entry.labels) for entry in entries}
            yield own / "report.html", build_page(gather([folder], called)).encode()


def _name(labels: Labels) -> str:
    """Return what a run is called beside others on the same data."""
    return experiments.SLASH.join(label for axis, label in labels.items() if axis != board.DATA)
