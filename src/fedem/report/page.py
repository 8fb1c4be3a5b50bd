"""Runs -> one page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

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
<p>{facts}</p>
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
_FIGURE = """<figure id="figure-{name}">
<h3 id="{name}-title">{title}</h3>
<p class="see">{sentence}</p>
<div class="wide">{drawing}</div>
</figure>"""


def build_page(data: Gathered) -> str:
    """Return the page's HTML: the same text for the same runs."""
    drawn = dict(_figures(data))
    titles = {name: title for name, (title, _) in drawn.items()}
    contents = {"scores": "Scores"} | {f"figure-{name}": title for name, title in titles.items()}
    contents |= {"runs": "Runs", "configuration": "Configuration"}
    sections = [
        _section("scores", "Scores after the last round", _headline(data)),
        _section("figures", "Figures", "\n".join(figure for _, figure in drawn.values())),
        _section("runs", "Runs", _runs(data)),
        _section("configuration", "Configuration, and how to run it again", _configuration(data)),
    ]
    return _PAGE.format(
        title=escape(f"{data.comparison.data}: {', '.join(map(data.name, data.runs))}"),
        style=STYLE,
        facts=escape(_facts(data)),
        contents="\n".join(f'<li><a href="#{place}">{escape(title)}</a></li>' for place, title in contents.items()),
        sections="\n".join(sections),
    )


def _figures(data: Gathered) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield names with titles and elements of the figures that apply."""
    for name, kind in FIGURES.items():
        picture = paint(kind.painter, data)
        if picture is not None:
            title, sentence = escape(picture.title), escape(picture.sentence)
            element = _FIGURE.format(name=name, title=title, sentence=sentence, drawing=inline(picture, name))
            yield name, (picture.title, element)


def _section(place: str, title: str, content: str) -> str:
    return f'<section id="{place}">\n<h2>{escape(title)}</h2>\n{content}\n</section>'


def _facts(data: Gathered) -> str:
    comparison = data.comparison
    held_out = f", {comparison.num_unseen_clients} held out of training" if comparison.num_unseen_clients else ""
    lengths = sorted({run.summary["rounds"] for runs in data.runs.values() for run in runs})
    seeds = ", ".join(map(str, comparison.seeds))
    return (
        f"{comparison.num_clients} clients{held_out}; {' or '.join(map(str, lengths))} rounds; "
        f"{'seed' if len(comparison.seeds) == 1 else 'seeds'} {seeds}. Averages over clients are weighted by training "
        "samples; ± is the sample standard deviation over the seeds; bands reach from the lowest seed to the highest; "
        "seconds and bytes (all clients together) are those of a round."
    )


def _headline(data: Gathered) -> str:
    # The table of the terminal, in HTML.
    table = comparison_table(data.comparison)
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    lines = comparison_remarks(data.comparison)
    for method, runs in data.runs.items():
        seed = f", seed {runs[0].seed}" if len(runs) > 1 else ""
        lines += [f"{data.name(method)}{seed}: {line}" for line in remarks(runs[0].summary)]
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return _table(str(table.title), headings, rows) + (f"\n<ul>{listed}</ul>" if lines else "")


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
    return _table(
        "Every run: scores of its last state, the round that was best by validation, seconds in all", headings, rows
    )


def _configuration(data: Gathered) -> str:
    parts = []
    if data.commands:
        parts.append(f"<pre>{escape(chr(10).join(data.commands))}</pre>")
    for method, runs in data.runs.items():
        seed = f", seed {runs[0].seed}; the other seeds differ in run.seed alone" if len(runs) > 1 else ""
        parts.append(
            f"<details><summary>{escape(data.titles[method] + seed)}</summary>\n"
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
