"""All that kept runs show, made anew: the leaderboard, and each experiment's table, picture and report."""

from collections.abc import Iterator
from pathlib import Path

from fedem.core.errors import UserError
from fedem.report.board import board_page
from fedem.report.page import build_page
from fedem.report.pictures.canvas import alone
from fedem.report.runs import gather
from fedem.report.studies import draw_experiment, experiment_markdown
from fedem.studies import board, experiments

LEADERBOARD = "leaderboard.md"
_PICTURE = "svg"


def result_pages(place: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield names and contents of files, from the runs kept with the experiments in ``place``.

    These are ``leaderboard.md`` and, for each experiment, ``NAME/table.md``; where it is drawn along an axis
    ``NAME/figure.svg``; and, unless its runs are another's, ``NAME/report.html`` with all their figures.
    """
    found = [experiments.read(place / name) for name in experiments.listed(place)]
    homes = {each.name: place / each.home / experiments.RESULTS for each in found}
    shown = [each for each in found if homes[each.name].is_dir()]
    if not shown:
        raise UserError(f"No experiment in {place} has kept runs; allowed: a folder with */{experiments.RESULTS}.")
    yield Path(LEADERBOARD), board_page(board.gather(place)).encode()
    for each in shown:
        folder, own = homes[each.name], Path(each.name)
        lines = experiments.tabulate(each, experiments.kept(each, folder))
        yield own / "table.md", experiment_markdown(each, lines).encode()
        if each.along and (picture := draw_experiment(each, lines)) is not None:
            yield own / f"figure.{_PICTURE}", alone(picture, _PICTURE)
        if each.home == each.name:
            yield own / "report.html", build_page(gather([folder])).encode()
