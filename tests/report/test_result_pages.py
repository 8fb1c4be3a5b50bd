"""All that kept runs show: pictures along an experiment's axis; tables, pictures and reports by one command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from kept import MADE_UP, declare_made_up, keep

from fedem.core.errors import UserError
from fedem.report.board import board_page
from fedem.report.pages import LEADERBOARD, result_pages
from fedem.report.pictures.canvas import Picture
from fedem.report.pictures.curves import against_bytes
from fedem.report.pictures.declared import draw_experiment
from fedem.report.runs import gather
from fedem.report.studies import experiment_markdown
from fedem.runs.folder import METRICS_FILE
from fedem.studies import board
from fedem.studies.experiments import RESULTS, Experiment, kept, read, tabulate
from fedem.studies.sweep import Entry

ROOT = Path(__file__).parents[2]


def _declare(place: Path, along: str, name: str = "drawn") -> Experiment:
    (place / name).mkdir(parents=True)
    content = MADE_UP.replace('place = "Table 9"', f'place = "Figure 9"\nalong = "{along}"')
    (place / name / "experiment.toml").write_text(content)
    return read(place / name)


def _keep_some(experiment: Experiment, place: Path) -> Path:
    out = place / experiment.name / RESULTS
    for seed, (one, other) in enumerate([(0.6, 0.7), (0.64, 0.74)]):
        keep(experiment, out, "Here", "Local", [one] * 4, seed=seed)
        keep(experiment, out, "Here", "FedEM", [other] * 4, seed=seed)
    keep(experiment, out, "There", "FedAvg", [0.5, 0.5, 0.5, 0.5, 0.4])
    return out


def _drawn(experiment: Experiment, out: Path) -> Picture | None:
    entries = kept(experiment, out)
    return draw_experiment(experiment, tabulate(experiment, entries), entries)


def _score(entry: Entry, scores: Mapping[int, float]) -> None:
    """Give a kept run the rounds after which it was scored, and one in which it was not."""
    plain = {"seconds": 0.1, "bytes_up": 8, "bytes_down": 8}
    scored = ({"round": number, "test_accuracy": score} | plain for number, score in scores.items())
    lines = [{"round": 9} | plain, *scored]
    (entry.folder.path / METRICS_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_picture_has_a_panel_for_each_data_set_and_figure_and_what_is_not_run_is_left_out(tmp_path: Path) -> None:
    experiment = _declare(tmp_path, "method")
    picture = _drawn(experiment, _keep_some(experiment, tmp_path))
    assert picture is not None
    assert picture.title == "Made up\nmean ± deviation over the seeds 0, 1"
    panes = picture.figure.axes
    assert [axes.get_title(loc="left") or axes.get_title() for axes in panes] == ["Here", "Here", "There", "There"]
    assert [axes.get_ylabel() for axes in panes[:2]] == ["test, %", "bottom decile, %"]
    assert [text.get_text() for text in panes[0].get_xticklabels()] == ["Local", "FedAvg", "FedEM"]
    (line,) = panes[0].lines
    np.testing.assert_allclose(line.get_xydata(), [[0, 62], [2, 72]])
    (band,) = panes[0].collections
    low, high = (pick(band.get_paths()[0].vertices[:, 1]) for pick in (np.min, np.max))
    deviation = 100 * np.std([0.6, 0.64], ddof=1)
    assert (low, high) == pytest.approx((62 - deviation, 72 + deviation))
    np.testing.assert_allclose(panes[2].lines[0].get_xydata(), [[1, 48]])
    np.testing.assert_allclose(panes[3].lines[0].get_xydata(), [[1, 40]])


def test_choices_on_other_axes_are_lines(tmp_path: Path) -> None:
    experiment = _declare(tmp_path, "data")
    picture = _drawn(experiment, _keep_some(experiment, tmp_path))
    assert picture is not None
    assert [line.get_label() for line in picture.figure.axes[0].lines] == ["Local", "FedEM", "FedAvg"]
    (legend,) = picture.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["Local", "FedEM", "FedAvg"]


def test_along_the_rounds_lines_are_of_runs_scored_on_the_way(tmp_path: Path) -> None:
    experiment = _declare(tmp_path, "rounds")
    out = tmp_path / experiment.name / RESULTS
    _score(keep(experiment, out, "Here", "Local", [0.5] * 4, run_evaluate_every=0), {30: 0.5})
    _score(keep(experiment, out, "Here", "Local", [0.6] * 4, seed=1), {10: 0.3, 20: 0.4, 30: 0.6})
    _score(keep(experiment, out, "Here", "Local", [0.8] * 4, seed=2), {10: 0.5, 30: 0.8})
    keep(experiment, out, "Here", "FedEM", [0.7] * 4, run_evaluate_every=0)
    picture = _drawn(experiment, out)
    assert picture is not None
    assert picture.title == "Made up\nmean ± deviation over the seeds 1, 2", "seed 0 was scored at its end alone"
    (axes,) = picture.figure.axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("test, %", "communication rounds")
    (line,) = axes.lines
    assert line.get_label() == "Local"
    np.testing.assert_allclose(line.get_xydata(), [[10, 40], [30, 70]])
    (band,) = axes.collections
    assert np.max(band.get_paths()[0].vertices[:, 1]) == pytest.approx(70 + 100 * np.std([0.6, 0.8], ddof=1))


def test_without_scores_on_the_way_there_are_no_lines_along_the_rounds(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    experiment = _declare(tmp_path, "rounds")
    _keep_some(experiment, tmp_path)
    assert _drawn(experiment, tmp_path / "drawn" / RESULTS) is None
    told = run("experiment", "table", "drawn", "--experiments", tmp_path, "--figure", tmp_path / "figure.png")[2]
    assert "is complete and was scored on the way (run.evaluate_every), so there is nothing to draw" in told


def test_a_ratio_is_not_known_along_the_rounds(tmp_path: Path) -> None:
    content = MADE_UP.replace('"bottom_decile"]', '"test_loss / FedAvg"]').partition("[paper]")[0]
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "experiment.toml").write_text(f'along = "rounds"\n{content}')
    with pytest.raises(UserError, match=r"figures = .*'test_loss / FedAvg'.*; allowed: names of what is recorded"):
        read(tmp_path / "drawn")


def test_nothing_is_drawn_where_nothing_was_run(tmp_path: Path) -> None:
    experiment = _declare(tmp_path, "method")
    assert _drawn(experiment, tmp_path / "none") is None


def test_an_axis_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown axis in .*, along 'colour'; allowed: data, method, rounds\."):
        _declare(tmp_path, "colour")


def test_one_command_makes_everything_anew(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    place = tmp_path / "made"
    drawn, plain = _declare(place, "method"), declare_made_up(place, name="plain")
    declare_made_up(place, name="not-run")
    _keep_some(drawn, place)
    keep(plain, place / "plain" / RESULTS, "Here", "FedEM", [0.7] * 4)
    code, out, err = run("experiment", "pages", "--experiments", place, "--out", "pages", "--quiet")
    assert (code, err) == (0, "")
    assert "Pages: 6 files in pages" in out
    pages = tmp_path / "pages"
    found = {str(path.relative_to(pages)) for path in pages.rglob("*") if path.is_file()}
    names = {"drawn/table.md", "drawn/figure.svg", "drawn/report.html", "plain/table.md", "plain/report.html"}
    assert found == names | {LEADERBOARD}
    assert (pages / LEADERBOARD).read_text(encoding="utf-8") == board_page(board.gather(place), place)
    lines = tabulate(plain, kept(plain, place / "plain" / RESULTS))
    assert (pages / "plain/table.md").read_text(encoding="utf-8") == experiment_markdown(plain, lines)
    assert "<svg" in (pages / "drawn/report.html").read_text(encoding="utf-8")
    before = (pages / "drawn/figure.svg").read_bytes()
    assert "is there already" in run("experiment", "pages", "--experiments", place, "--out", "pages")[2]
    assert run("experiment", "pages", "--experiments", place, "--out", "pages", "--force", "--quiet")[0] == 0
    assert (pages / "drawn/figure.svg").read_bytes() == before, "the same figures are the same bytes"


def test_an_experiment_with_anothers_runs_has_a_table_and_no_report_of_its_own(tmp_path: Path) -> None:
    _keep_some(_declare(tmp_path, "method"), tmp_path)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "experiment.toml").write_text(MADE_UP.replace('place = "Table 9"', 'runs = "drawn"'))
    names = {str(name) for name, _ in result_pages(tmp_path)}
    assert {name for name in names if name.startswith("part")} == {str(Path("part/table.md"))}


def test_reports_call_runs_as_the_experiment_does(tmp_path: Path) -> None:
    (tmp_path / "shares").mkdir()
    methods = """
"FedAvg small" = { "method.name" = "fedavg" }
"kNN-Per" = { "method.name" = "fedavg", "run.neighbours" = 3 }
"""
    before, axis, _ = MADE_UP.partition("[axes.method]")
    (tmp_path / "shares" / "experiment.toml").write_text(before + axis + methods)
    experiment, out = read(tmp_path / "shares"), tmp_path / "shares" / RESULTS
    for seed in (0, 1):
        keep(experiment, out, "Here", "FedAvg small", [0.6] * 4, seed=seed)
        keep(experiment, out, "Here", "kNN-Per", [0.7] * 4, seed=seed)
    pages = dict(result_pages(tmp_path))
    page = pages[Path("shares/report.html")].decode()
    assert "The best method is kNN-Per" in page
    assert "FedAvg small" in page
    (plain,) = gather([out])
    assert set(plain.titles.values()) == {"FedAvg (run.neighbours=0)", "FedAvg (run.neighbours=3)"}
    called = {entry.folder.path: entry.labels["method"] for entry in kept(experiment, out)}
    (named,) = gather([out], called)
    assert set(named.titles.values()) == {"FedAvg small", "kNN-Per"}
    assert [len(runs) for runs in named.runs.values()] == [2, 2]


def test_a_method_whose_rounds_are_not_kept_has_no_line_in_a_report(tmp_path: Path) -> None:
    experiment = _declare(tmp_path, "method")
    out = _keep_some(experiment, tmp_path)
    for entry in kept(experiment, out):
        if (entry.labels["data"], entry.labels["method"]) == ("Here", "Local"):
            _score(entry, {10: 0.4, 20: 0.6})
    page = dict(result_pages(tmp_path))[Path("drawn/report.html")].decode()
    assert "Scores against bytes sent" in page
    here = next(data for data in gather([out]) if any(run.history for runs in data.runs.values() for run in runs))
    picture = against_bytes(here)
    assert picture is not None
    # It ends at 62% in the summaries and at 60% in the rounds that are kept.
    assert picture.sentence.startswith(
        "On reaching 60.0 %, the worst of the final scores, for the first time, Local has sent 0.048 kB"
    )
    lines = picture.figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["Local"]
    assert [line.get_xdata().tolist() for line in lines] == [[0.032, 0.048]]


@pytest.mark.slow
def test_all_that_is_kept_here_has_pages() -> None:
    places = {path.parent.name for path in (ROOT / "experiments").glob(f"*/{RESULTS}")}
    names = {str(name) for name, _ in result_pages(ROOT / "experiments")}
    assert names >= {str(Path(place, page)) for place in places for page in ("table.md", "report.html")}


def test_experiments_without_kept_runs_have_no_pages(tmp_path: Path) -> None:
    declare_made_up(tmp_path)
    with pytest.raises(UserError, match=r"No experiment in .* has kept runs; allowed: a folder with \*/results"):
        list(result_pages(tmp_path))


def test_a_table_is_drawn_where_it_is_asked_for(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    place = tmp_path / "made"
    _keep_some(_declare(place, "method"), place)
    declare_made_up(place, name="plain")
    ask = ("experiment", "table", "drawn", "--experiments", place)
    code, out, _ = run(*ask, "--figure", "new/figure.png")
    assert code == 0
    assert "Made up" in out
    assert (tmp_path / "new/figure.png").read_bytes().startswith(b"\x89PNG")
    assert "is there already" in run(*ask, "--figure", "new/figure.png")[2]
    assert "unknown ending of --figure" in run(*ask, "--figure", "figure.doc")[2].lower()
    assert "drawn along nothing; allowed for: drawn." in run(*ask[:2], "plain", *ask[3:], "--figure", "figure.png")[2]
    assert "nothing to draw" in run(*ask, "--out", tmp_path / "empty", "--figure", "figure.png")[2]
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.parametrize("name", ["components", "participation", "unseen_samples", "convergence"])
def test_the_papers_pictures_against_a_quantity_are_declared(name: str) -> None:
    experiment = read(ROOT / "experiments" / name)
    assert _drawn(experiment, ROOT / "experiments" / experiment.home / RESULTS)
