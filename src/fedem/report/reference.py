"""What can be chosen and set, made of the code itself: methods, graphs, and every section of settings."""

import inspect
import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedem.core.errors import UserError, check_known, unknown
from fedem.core.random import client_keys
from fedem.core.settings import Settings, allowed, entries_of
from fedem.data import DATA
from fedem.graphs import GRAPHS, Topology
from fedem.methods import ALIASES, METHODS, resolve_method
from fedem.report.console import labelled_table, rendered, simple_table
from fedem.runs.config import GIVEN, SECTIONS, Config
from fedem.runs.rounds import mixer_seed

_ANY = "any data"
_OF_THE_DATA = ("data", "partition", "model")  # whatever the method
_WIDTHS = (20, 20, 26)
_MARK = re.compile(r"(?::\w+:)?`+~?([^`]+)`+")
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", flags=re.MULTILINE)
# What Markdown would take for a mark, or for the end of a table's cell; no underscore within a word.
_MARKS = re.compile(r"[*|\\]|\b_|_\b")
_CODE = re.compile(r"(``[^`]+``)")
_PRESETS = (
    "The defaults are those of the code. What is shipped for a method and its data changes some of them: "
    "``fedem methods NAME`` shows what comes with a method, and a run's ``config.toml`` has all that held."
)


class Setting(NamedTuple):
    """A setting as its dataclass describes it."""

    name: str
    default: str
    allowed: str
    meaning: str


class Kind(NamedTuple):
    """A name that a section may have, such as a solver's, and what it stands for."""

    name: str  # empty where the section has no names
    about: list[str]  # paragraphs, as the code has them
    settings: list[Setting]


def settings_of(*kinds: type[Settings]) -> list[Setting]:
    """Return what a user can set of an algorithm, a mixer or other classes of settings."""
    found = []
    for kind in kinds:
        described = "".join(_documented(base)[1] for base in reversed(kind.__mro__))
        meanings = {attribute: _plain(" ".join(text.split())) for attribute, text in _ATTRIBUTE.findall(described)}
        for name, entry in entries_of(kind).items():
            found.append(Setting(name, _literal(entry.default), allowed(entry), meanings.get(name, "")))
    return found


def _documented(kind: type) -> tuple[list[str], str]:
    """Return a class's docstring in paragraphs, and beside them what it says of its fields."""
    about, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    return about.strip().split("\n\n"), attributes + "\n"


def _flowing(paragraph: str) -> str:
    """Undo the line breaks of a paragraph, but for lists and the like."""
    lines = paragraph.strip("\n").split("\n")
    return paragraph if any(line.startswith((" ", "-")) for line in lines) else " ".join(lines)


def _plain(text: str) -> str:
    """Undo the marks that documentation has for names of code."""
    return _MARK.sub(r"\1", text)


def _literal(value: Any) -> str:
    """Return a value as TOML has it, but words without their quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _settings_table(title: str, found: list[Setting]) -> Table:
    headings = ("key", "default", "allowed", "meaning")
    return simple_table(*headings, rows=found, title=f"\n{title}", whole=headings[:2])


def methods_table() -> Table:
    """Return one row per method, for eighty columns: what it does and its paper; below, who keeps and sends what."""

    def below(*cells: str) -> Table:
        grid = Table.grid(padding=(0, 1, 0, 0))  # columns of their own, as no cell can span several
        for width in _WIDTHS:
            grid.add_column(width=width)
        grid.add_row(*cells, style="dim")
        return grid

    table = simple_table("\nmethod", bold="\nmethod")
    table.add_column(Group("what it trains (paper)", below("a client keeps", "is sent", "an unseen client")))
    for name, row in METHODS.items():
        paper = f"({row.paper})" if row.paper else ""
        gap = " " if len(row.summary) + len(paper) < sum(_WIDTHS) else "\n"
        table.add_row(name, Group(Text(f"{row.summary}{gap}{paper}"), below(row.personal, row.sent, row.unseen)))
    return table


def method_pages(name: str) -> Iterator[RenderableType]:
    """Yield all there is to say of the method called ``name``: what it is, origin, settings, and what is shipped."""
    row = METHODS[name]
    also = [alias for alias, target in ALIASES.items() if target == name]
    about = {
        row.title: row.summary,
        "paper": row.paper or "-",
        "name": name + (f" (also {', '.join(also)})" if also else ""),
        "a client keeps": row.personal,
        "is sent": row.sent,
        "an unseen client": row.unseen,
    }
    yield labelled_table(about, bold=row.title)
    for kind in (row.algorithm, row.mixer):
        yield Text.assemble("\n", (kind.__name__, "bold"), f" in {kind.__module__}")
        module = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
        yield Text("\n\n".join(map(_flowing, [*module.split("\n\n"), *_documented(kind)[0]])).strip())
    found, own = settings_of(row.algorithm, row.mixer), "Settings of its own: --set method.KEY=VALUE"
    yield _settings_table(own, found) if found else "\nIt has no settings of its own."
    if row.mixer.over_graph:
        yield "\nIts graph is a section of its own: --graph NAME, --set graph.KEY=VALUE; fedem graphs lists them."
    title = "\nSettings shipped for it, by data"
    yield simple_table("setting", _ANY, "but", rows=_shipped_rows(name), title=title, whole=("setting", _ANY))


def shipped(name: str) -> dict[str, dict[str, Any]]:
    """Return the method's shipped settings, ``{data: {section.key: value}}``; only data with settings of their own."""
    layers = {data: {"method": {"name": name}, "data": {"name": data}} for data in (GIVEN, *DATA)}
    built = {data: Config.build(layer) for data, layer in layers.items()}
    # Solver and learning rate are always shown; besides them what a preset changes for some data.
    changed = {"solver.name", "schedule.name", "schedule.learning_rate"}
    for data, config in built.items():
        changed |= set(config.differences(Config.build(layers[data], preset=False)))
    found: dict[str, dict[str, Any]] = {}
    for data, config in built.items():
        values = {
            f"{place}.{key}": value
            for place, entries in config.sections.items()
            for key, value in entries.items()
            if f"{place}.{key}" in changed and place not in _OF_THE_DATA and not _is_implied(place, key, entries)
        }
        if data == GIVEN or values != found[_ANY]:
            found[_ANY if data == GIVEN else data] = values
    return found


def _is_implied(place: str, key: str, chosen: Mapping[str, Any]) -> bool:
    """Whether a graph's setting is what it would be anyway, once its name is known."""
    return place == "graph" and key != "name" and chosen[key] == SECTIONS[place].complete({"name": chosen["name"]})[key]


def _shipped_rows(name: str) -> Iterator[tuple[str, str, str]]:
    special = shipped(name)
    usual = special.pop(_ANY)
    for key in dict.fromkeys(key for values in (usual, *special.values()) for key in values):
        others: dict[str, list[str]] = {}
        for data, values in special.items():
            others.setdefault(_literal(values.get(key, "-")), []).append(data)
        common = _literal(usual.get(key, "-"))
        others.pop(common, None)
        yield key, common, "; ".join(f"{value} for {', '.join(names)}" for value, names in others.items())


def kinds_in(section: str) -> list[Kind]:
    """Return the names that a section may have, and what can be set with each."""
    found = SECTIONS[section]
    if not found.is_named:
        return [Kind("", [], settings_of(*found.kinds({})))]
    kinds = []
    for name in found.table:
        classes = found.kinds({"name": name})
        about = [METHODS[name].summary] if section == "method" else _documented(classes[0])[0]
        kinds.append(Kind(name, about, settings_of(*classes)))
    return kinds + [Kind(name, [text], []) for name, text in found.bare.items()]


def _parted(section: str) -> tuple[list[Setting], list[Kind]]:
    """Return the settings that all kinds which have any share, if these are several, and the kinds without them."""
    kinds = kinds_in(section)
    first, *others = [kind.settings for kind in kinds if kind.settings]
    shared = [setting for setting in first if others and all(setting in other for other in others)]
    return shared, [kind._replace(settings=[own for own in kind.settings if own not in shared]) for kind in kinds]


def sections_pages() -> Iterator[RenderableType]:
    """Yield one row per section: what it is for, and its names."""
    names = {section: ", ".join(kind.name for kind in kinds_in(section)) or "-" for section in SECTIONS}
    rows = ((section, SECTIONS[section].about, names[section]) for section in SECTIONS)
    yield simple_table("section", "what it sets", "names", rows=rows, bold="section")
    yield "fedem settings SECTION shows a section's keys, fedem settings SECTION.NAME those that go with a name."


def section_pages(asked: str) -> Iterator[RenderableType]:
    """Yield all there is to say of a ``section``, or of one of its names: ``section.name``."""
    section, dot, name = asked.partition(".")
    check_known("section", [section], SECTIONS)
    keys = f"--set {section}.KEY=VALUE"
    if dot:
        if not SECTIONS[section].is_named:
            raise UserError(f"[{section}] has no names, but {name!r} was asked for; allowed: fedem settings {section}.")
        found = resolve_method(name) if section == "method" else name
        kinds = {kind.name: kind for kind in kinds_in(section)}
        if (kind := kinds.get(found)) is None:
            raise unknown(section, name, kinds)
        about = "".join(f"\n\n{_plain(_flowing(text))}" for text in kind.about)
        yield Text.assemble((f"{section} {kind.name}", "bold"), about)
        yield _settings_table(f"Settings: {keys}", kind.settings) if kind.settings else "\nIt has no settings."
        return
    yield Text(f"{SECTIONS[section].about} {_choice(section)}".strip())
    shared, parted = _parted(section)
    if shared:
        yield _settings_table(f"Whatever the name: {keys}", shared)
    for kind in parted:
        if kind.name:
            yield Text.assemble("\n", (kind.name, "bold"), f": {_plain(_flowing(kind.about[0]))}")
        if kind.settings:
            yield _settings_table(f"{f'Settings of {section} {kind.name}'.rstrip()}: {keys}", kind.settings)
    yield Text(f"\n{_plain(_PRESETS)}")


def settings_page() -> str:
    """Return all sections as Markdown."""
    about = {section: f"{_marked(SECTIONS[section].about)} {_choice(section, '`')}".strip() for section in SECTIONS}
    sections = {section: (about[section], *_parted(section)) for section in SECTIONS}
    return rendered("settings.md", presets=_PRESETS, sections=sections, marked=_marked).strip() + "\n"


def _choice(section: str, quote: str = "") -> str:
    """Say how a kind is chosen, where there are several."""
    if not SECTIONS[section].is_named:
        return ""
    default = SECTIONS[section].default
    usual = f"; {quote}{default}{quote} unless it is set" if default else ""
    return f"{quote}--set {section}.name=NAME{quote} chooses{usual}."


def _marked(text: str) -> str:
    """Return a docstring's text as Markdown: code stays code, and all else shows as it is."""
    return "".join(
        part if _CODE.fullmatch(part) else _MARKS.sub(r"\\\g<0>", _plain(part)).replace("<", "&lt;")
        for part in _CODE.split(text)
    )


def graphs_table() -> Table:
    """Return one row per graph."""
    own = {kind.name: ", ".join(setting.name for setting in kind.settings) or "-" for kind in _parted("graph")[1]}
    rows = [(name, _about(kind).partition("\n")[0], own[name]) for name, kind in GRAPHS.items()]
    return simple_table("graph", "what it is", "settings of its own", rows=rows, bold="graph")


def graph_pages(name: str) -> Iterator[RenderableType]:
    """Yield all there is to say of the graph called ``name``."""
    yield Text.assemble((name, "bold"), "\n", _about(GRAPHS[name]))
    yield _settings_table("Settings: --set graph.KEY=VALUE", settings_of(GRAPHS[name]))


def _about(kind: type[Topology]) -> str:
    return _plain("\n\n".join(map(_flowing, _documented(kind)[0])))


def describe(topology: Topology, num_clients: int, seed: int) -> Table:
    """Build the graph as a run with this seed would for clients called 0, 1, ..., and return its figures."""
    keys, source = client_keys([str(index) for index in range(num_clients)]), mixer_seed(seed)
    matrices = topology.matrices(keys, source)
    pairs = np.unique(np.concatenate(topology.edges(keys, source)), axis=0)
    degrees = np.bincount(pairs.flatten(), minlength=num_clients)
    own = matrices.diagonal(dim1=1, dim2=2)
    found = topology.consensus(matrices, keys)
    about = "about " if found.is_estimate else ""
    rounds = found.tau * math.log(2) / -math.log1p(-found.p) if found.p < 1 else 0.0
    often = "each round" if found.tau == 1 else f"every {found.tau} rounds"
    halved = f"every {about}{rounds:.3g} rounds" if rounds > found.tau else often
    figures = {
        "clients, links": f"{num_clients:,}, {len(pairs):,}",
        "neighbours": f"{degrees.min()} to {degrees.max()}, {degrees.mean():.1f} on average",
        "own weight": f"{float(own.min()):.4f} to {float(own.max()):.4f}",
        "spectral gap": f"{found.spectral_gap:.6f}",
        "consensus": f"p = {about}{found.p:.6f}, tau = {found.tau}",
        "disagreement halves": f"{halved}, in squared distance",
    }
    return labelled_table(figures)
