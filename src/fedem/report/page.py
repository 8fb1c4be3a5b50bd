"""Runs -> one page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from fedem.methods import title_of
from fedem.report.comparisons import comparison_remarks, comparison_table
from fedem.report.gathered import Gathered
from fedem.report.pictures import FIGURES
from fedem.report.pictures.canvas import inline, paint
from fedem.report.style import STYLE
from fedem.report.tables import remarks

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>Averages over clients are weighted by training samples; ± is the sample standard deviation over the seeds; bands
reach from the lowest seed to the highest; seconds and bytes (all clients together) are those of a round.</p>
</header>
<nav aria-label="Contents"><ul>
{contents}
</ul></nav>
<main>
{sections}
</main>
</body>
</html>
"""
_NAMED = 6
"""methods in the title; more are counted"""
_FIGURE = """<figure id="figure-{name}">
<h3 id="{name}-title">{title}</h3>
<p class="see">{sentence}</p>
<div class="wide">{drawing}</div>
</figure>"""


class _Figure(NamedTuple):
    place: str
    title: str
    element: str


def build_page(sets: Sequence[Gathered]) -> str:
    """Return the page's HTML, of runs on one or several data sets: the same text for the same runs."""
    drawn = [list(_figures(data)) for data in sets]
    contents = {"scores": "Scores"}
    for data, figures in zip(sets, drawn, strict=True):
        # A page about several data sets has too many figures to list them all.
        listed = {data.place: data.titled("Figures")} if data.place else {each.place: each.title for each in figures}
        contents |= {f"figure-{place}": title for place, title in listed.items()}
    contents |= {"runs": "Runs", "configuration": "Configuration"}
    sections = [
        _section("scores", "Scores after the last round", "\n".join(map(_headline, sets))),
        *(
            _section(
                f"figure-{data.place}" if data.place else "figures",
                data.titled("Figures"),
                "\n".join(each.element for each in figures),
            )
            for data, figures in zip(sets, drawn, strict=True)
        ),
        _section("runs", "Runs", "\n".join(map(_runs, sets))),
        _section("configuration", "Configuration, and how to run it again", "\n".join(map(_configuration, sets))),
    ]
    methods = dict.fromkeys(title_of(runs[0].method) for data in sets for runs in data.runs.values())
    return _PAGE.format(
        title=escape(f"{', '.join(data.comparison.data for data in sets)}: {_listed(list(methods))}"),
        style=STYLE,
        contents="\n".join(f'<li><a href="#{place}">{escape(title)}</a></li>' for place, title in contents.items()),
        sections="\n".join(sections),
    )


def _listed(titles: Sequence[str]) -> str:
    return ", ".join(titles) if len(titles) <= _NAMED else f"{len(titles)} methods"


def _figures(data: Gathered) -> Iterator[_Figure]:
    """Yield the figures that apply."""
    for name, kind in FIGURES.items():
        picture = paint(kind.painter, data)
        if picture is not None:
            place = f"{data.place}-{name}" if data.place else name
            title, sentence = escape(picture.title), escape(picture.sentence)
            element = _FIGURE.format(name=place, title=title, sentence=sentence, drawing=inline(picture, place))
            yield _Figure(place, picture.title, element)


def _section(place: str, title: str, content: str) -> str:
    return f'<section id="{place}">\n<h2>{escape(title)}</h2>\n{content}\n</section>'


def _facts(data: Gathered) -> str:
    comparison = data.comparison
    held_out = f", {comparison.num_unseen_clients} held out of training" if comparison.num_unseen_clients else ""
    lengths = sorted({run.summary["rounds"] for runs in data.runs.values() for run in runs})
    unit = "accuracy in %" if data.accuracy else "mean squared error"
    seeds = f"{'seed' if len(comparison.seeds) == 1 else 'seeds'} {', '.join(map(str, comparison.seeds))}"
    return (
        f"{comparison.data}: {comparison.num_clients} clients{held_out}; {' or '.join(map(str, lengths))} rounds; "
        f"{unit}, {seeds}{'' if data.has_equal_seeds else ', of which not every row has all'}"
    )


def _headline(data: Gathered) -> str:
    # The table of the terminal, in HTML.
    columns = comparison_table(data.comparison).columns
    cells = {str(column.header).replace("\n", " "): [str(cell) for cell in column.cells] for column in columns}
    if not data.has_equal_seeds:
        counts = [str(len(runs)) for runs in data.runs.values()]
        cells["seeds"] = counts + [""] * (len(cells["method"]) - len(counts))
    lines = comparison_remarks(data.comparison)
    for title, places in data.differences.items():
        lines.append(f"The rows of {title} differ in {', '.join(places)}.")
    for method, runs in data.runs.items():
        seed = f", seed {runs[0].seed}" if len(runs) > 1 else ""
        lines += [f"{data.name(method)}{seed}: {line}" for line in remarks(runs[0].summary)]
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    table = _table(_facts(data), cells, zip(*cells.values(), strict=True))
    return table + (f"\n<ul>{listed}</ul>" if lines else "")


def _runs(data: Gathered) -> str:
    headings = ["method", "seed", "rounds", data.label, "bottom decile", "best round", "seconds", "folder"]
    rows = []
    for method, runs in data.runs.items():
        for run in runs:
            scores = [run.summary.get(name) for name in (data.score, "bottom_decile")]
            best, seconds = run.summary.get("best"), run.summary.get("seconds_total")
            rows.append(
                [
                    data.titles[method],
                    str(run.seed),
                    str(run.summary["rounds"]),
                    *("-" if score is None else data.told(score) for score in scores),
                    str(best["round"]) if best else "-",
                    "-" if seconds is None else f"{seconds:.1f}",
                    str(run.folder.path),
                ]
            )
    caption = "Every run: scores of its last state, the round that was best by validation, seconds in all"
    return _table(data.titled(caption), headings, rows)


def _configuration(data: Gathered) -> str:
    parts = []
    if data.commands:
        parts.append(f"<pre>{escape(chr(10).join(data.commands))}</pre>")
    for method, runs in data.runs.items():
        seed = f", seed {runs[0].seed}; the other seeds differ in run.seed alone" if len(runs) > 1 else ""
        parts.append(
            f"<details><summary>{escape(data.titled(data.titles[method]) + seed)}</summary>\n"
            f"<pre>{escape(runs[0].config.to_toml())}</pre></details>"
        )
    return "\n".join(parts)


def _table(caption: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )
