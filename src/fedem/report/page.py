"""Runs -> one page that needs nothing else: no network, no script, no font. Its markup lies in ``templates/``."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from markupsafe import Markup

from fedem.methods import title_of
from fedem.report.answer import answer
from fedem.report.console import remarks, rendered
from fedem.report.pictures import FIGURES
from fedem.report.pictures.canvas import COLOURS, inline, paint
from fedem.report.runs import Gathered
from fedem.report.studies import comparison_remarks, comparison_rows

# The same hues as COLOURS, light enough for a dark ground.
_LIT = (
    *("#5aaeea", "#ff9d4d", "#4fcb94", "#ff6f9f", "#b09bf2", "#cf9a68", "#4fd3e6", "#e3cf3c", "#a9b5be", "#f3a3d3"),
    *("#ab00f3", "#7e6387", "#007ec6", "#127e00", "#996cfc", "#75fc90", "#7e87bd", "#ea0000", "#c6636c", "#fc00ab"),
    *("#cf1b75", "#c61bb4", "#ea24ea", "#f36c2d", "#2d5afc", "#00ab2d", "#367e36", "#e1c6c6", "#f3bda2"),
)
_NAMED = 6  # methods in the title; more are counted


def build_page(sets: Sequence[Gathered]) -> str:
    """Return the page's HTML, of runs on one or several data sets: the same text for the same runs."""
    methods = dict.fromkeys(title_of(runs[0].method) for data in sets for runs in data.runs.values())
    listed = ", ".join(methods) if len(methods) <= _NAMED else f"{len(methods)} methods"
    title = f"{', '.join(data.comparison.data for data in sets)}: {listed}"
    makers = {"scores": _scores, "remarks": _remarks, "figures": _figures, "runs": _runs}
    parts = [
        {"data": data, "answer": answer(data), **{name: list(make(data)) for name, make in makers.items()}}
        for data in sets
    ]
    return rendered("page.html", title=title, parts=parts, light=COLOURS, dark=_LIT)


def _figures(data: Gathered) -> Iterator[dict[str, str]]:
    for name, kind in FIGURES.items():
        if (picture := paint(kind.painter, data)) is not None:
            place = f"{data.place}-{name}" if data.place else name
            drawing = Markup(inline(picture, place))
            yield {"name": place, "title": picture.title, "sentence": picture.sentence, "drawing": drawing}


def _scores(data: Gathered) -> Iterator[dict[str, str]]:
    counts = chain((str(len(runs)) for runs in data.runs.values()), repeat(""))  # failed methods and oracle have none
    for row, count in zip(comparison_rows(data.comparison, brief=True), counts, strict=False):
        seeds = {} if data.has_equal_seeds else {"seeds": count}
        yield {heading.replace("\n", " "): cell for heading, cell in row.items()} | seeds


def _remarks(data: Gathered) -> Iterator[str]:
    yield from comparison_remarks(data.comparison)
    yield from data.notes
    for title, places in data.differences.items():
        yield f"The rows of {title} differ in {', '.join(places)}."
    for method, runs in data.runs.items():
        seed = f", seed {runs[0].seed}" if len(runs) > 1 else ""
        yield from (f"{data.name(method)}{seed}: {line}" for line in remarks(runs[0].summary))


def _runs(data: Gathered) -> Iterator[dict[str, str]]:
    for method, run in ((method, run) for method, runs in data.runs.items() for run in runs):
        summary, best, seconds = run.summary, run.summary.get("best"), run.summary.get("seconds_total")
        texts = {f"test {each.unit}": data.in_words(summary.get(name), each) for name, each in data.metrics.items()}
        yield {
            "method": data.titles[method],
            "seed": str(run.seed),
            "rounds": str(summary.get("max_rounds", summary["rounds"])),
            data.label: texts.pop(data.label),
            "bottom decile": data.in_words(summary.get("bottom_decile")),
            **texts,
            "best round": str(best["round"]) if best else "-",
            "seconds": "-" if seconds is None else f"{seconds:.1f}",
            "folder": str(run.folder.path),
        }
