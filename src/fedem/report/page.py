"""Runs -> one page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from fedem.methods import title_of
from fedem.report.console import remarks
from fedem.report.pictures import FIGURES
from fedem.report.pictures.canvas import inline, paint
from fedem.report.runs import Gathered
from fedem.report.studies import COLOURS, comparison_remarks, comparison_table

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
    unit = data.metric.unit
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
    headings = [
        "method",
        "seed",
        "rounds",
        data.label,
        "bottom decile",
        *(f"test {metric.unit}" for metric in data.further.values()),
        "best round",
        "seconds",
        "folder",
    ]
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
                    *map(data.in_words, scores),
                    *(data.in_words(run.summary.get(name), metric) for name, metric in data.further.items()),
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


# How a page looks: in the light and in the dark, on a phone and on paper.

# The same hues, light enough for a dark ground.
_LIT = (
    "#5aaeea",
    "#ff9d4d",
    "#4fcb94",
    "#ff6f9f",
    "#b09bf2",
    "#cf9a68",
    "#4fd3e6",
    "#e3cf3c",
    "#a9b5be",
    "#f3a3d3",
)


def _variables(colours: tuple[str, ...]) -> str:
    return " ".join(f"--colour-{number}: {colour};" for number, colour in enumerate(colours))


STYLE = f"""
:root {{ --ground: #ffffff; --ink: #20262c; --soft: #5b6770; --grid: #dde2e7; --link: #0b5fa5; {_variables(COLOURS)} }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ --ground: #14181c; --ink: #e6eaee; --soft: #a3afb9; --grid: #343c44; --link: #7cc0f2; {_variables(_LIT)} }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 46rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid var(--grid); }}
h3 {{ font-size: 1.05rem; margin: 0; }}
a {{ color: var(--link); }}
header p, caption {{ color: var(--soft); text-align: left; font-size: 0.9rem; }}
nav ul {{ display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; padding: 0; list-style: none; font-size: 0.9rem; }}
figure {{ margin: 2rem 0; }}
.see {{ margin: 0.25rem 0 0.75rem; }}
/* What is wider than the screen is moved under a finger; a shade says so, until its end covers the shade. */
.wide {{ overflow-x: auto; background:
  linear-gradient(var(--ground), var(--ground)) right / 2rem 100% no-repeat local,
  linear-gradient(to left, var(--grid), transparent) right / 1rem 100% no-repeat scroll; }}
.wide svg {{ display: block; max-width: 100%; height: auto; }}
caption {{ max-width: calc(min(100vw, 46rem) - 2rem); }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.3rem 0.6rem 0.3rem 0; text-align: right; vertical-align: bottom;
  border-bottom: 1px solid var(--grid); white-space: nowrap; }}
thead th {{ white-space: normal; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ overflow-x: auto; padding: 0.75rem; border: 1px solid var(--grid); border-radius: 4px; font-size: 0.8rem; }}
summary {{ cursor: pointer; }}
@media print {{
  html {{ font-size: 10pt; }}
  body {{ max-width: none; padding: 0; }}
  nav {{ display: none; }}
  table {{ font-size: 0.8rem; }}
  figure, tr, details {{ break-inside: avoid; }}
  h2, h3 {{ break-after: avoid; }}
  .wide {{ overflow: visible; background: none; }}
  .wide svg {{ min-width: 0 !important; max-width: 80%; }}
  td:last-child {{ overflow-wrap: anywhere; white-space: normal; }}
  tr:first-child {{ break-before: avoid; }}
  caption {{ max-width: none; }}
  pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
  /* Paper can't be opened. */
  details::details-content {{ content-visibility: visible; }}
  details pre {{ columns: 3; font-size: 0.7rem; }}
}}
"""
