"""The table of methods -> what a user reads before choosing one."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from fedem.config import Config
from fedem.data import DATA
from fedem.methods import ALIASES, METHODS, Method
from fedem.mixing.graph import Graph
from fedem.sections import GIVEN, complete_section
from fedem.settings import Settings, kind_of, names_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_BOUNDS = {"min": "at least", "above": "above", "max": "at most", "below": "below"}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}
_ANY = "any data"
_OF_THE_DATA = ("data", "partition", "model")
_WIDTHS = (20, 20, 26)
_MARK = re.compile(r"(?::\w+:)?`+~?([^`]+)`+")
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", flags=re.MULTILINE)


class Setting(NamedTuple):
    """A setting as its dataclass describes it."""

    name: str
    default: str
    allowed: str
    meaning: str


def methods_table() -> Table:
    """Return a row a method, for eighty columns: what it does and its paper; below, who keeps and sends what."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def below(*cells: str) -> Table:
        """Columns of their own, as no cell can span several."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        for width in _WIDTHS:
            grid.add_column(width=width)
        grid.add_row(*cells, style="dim")
        return grid

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nmethod", no_wrap=True, style="bold")
    table.add_column(Group("what it trains (paper)", below("a client keeps", "is sent", "an unseen client")))
    for name, row in METHODS.items():
        paper = f"({row.paper})" if row.paper else ""
        gap = " " if len(row.summary) + len(paper) < sum(_WIDTHS) else "\n"
        table.add_row(name, Group(Text(f"{row.summary}{gap}{paper}"), below(row.personal, row.sent, row.unseen)))
    return table


def method_pages(name: str) -> Iterator[RenderableType]:
    """Yield all there is to say of the method called ``name``: facts, origin, settings, and what is shipped."""
    row = METHODS[name]
    yield _facts(name, row)
    yield from _origin(row)
    found = [setting for kind in (row.algorithm, row.mixer) for setting in settings_of(kind)]
    yield (
        settings_table("Settings of its own: --set method.KEY=VALUE", found)
        if found
        else "\nIt has no settings of its own."
    )
    if row.mixer is Graph:
        yield "\nIts graph is a section of its own: --graph NAME, --set graph.KEY=VALUE; fedem graphs tells them."
    yield _shipped(name)


def settings_of(kind: type[Settings]) -> list[Setting]:
    """Return what a user can set of an algorithm or a mixer."""
    meanings = {
        attribute: plain(" ".join(text.split()))
        for base in reversed(kind.__mro__)
        for attribute, text in _ATTRIBUTE.findall(_section(base))
    }
    entries = {entry.name: entry for entry in fields(kind)}
    return [
        Setting(name, _literal(entries[name].default), allowed(entries[name]), meanings.get(name, ""))
        for name in names_of(kind)
    ]


def allowed(entry: Field[Any]) -> str:
    """Say what a setting's field allows."""
    if "choices" in entry.metadata:
        return " or ".join(entry.metadata["choices"])
    limits = [f"{word} {entry.metadata[key]}" for key, word in _BOUNDS.items() if key in entry.metadata]
    return " and ".join(limits) or _KINDS[kind_of(entry)]


def shipped(name: str) -> dict[str, dict[str, Any]]:
    """Return the method's shipped settings, ``{data: {section.key: value}}``; only data with settings of their own.

    They are those that a preset changes for some data, and always the solver and the learning rate. Clients and models
    are the data's affair, whatever the method.
    """
    layers = {data: {"method": {"name": name}, "data": {"name": data}} for data in (GIVEN, *DATA)}
    built = {data: Config.build(layer) for data, layer in layers.items()}
    changed = {"solver.name", "schedule.name", "schedule.learning_rate"}
    for data, config in built.items():
        changed |= set(config.differences(Config.build(layers[data], preset=False)))
    told: dict[str, dict[str, Any]] = {}
    for data, config in built.items():
        values = {
            f"{place}.{key}": value
            for place, entries in config.sections.items()
            for key, value in entries.items()
            if place not in _OF_THE_DATA
            and f"{place}.{key}" in changed
            and not _goes_without_saying(config, place, key)
        }
        if data == GIVEN or values != told[_ANY]:
            told[_ANY if data == GIVEN else data] = values
    return told


def _goes_without_saying(config: Config, place: str, key: str) -> bool:
    """Whether a graph's setting is what it would be anyway, once its name is known."""
    chosen = config.sections[place]
    return place == "graph" and key != "name" and chosen[key] == complete_section(place, {"name": chosen["name"]})[key]


def _facts(name: str, row: Method) -> Table:
    from rich.table import Table

    also = [alias for alias, target in ALIASES.items() if target == name]
    table = Table.grid(padding=(0, 2, 0, 0))
    facts = {
        row.title: row.summary,
        "paper": row.paper or "-",
        "name": name + (f" (also {', '.join(also)})" if also else ""),
        "a client keeps": row.personal,
        "is sent": row.sent,
        "an unseen client": row.unseen,
    }
    for label, value in facts.items():
        table.add_row(label, value, style="bold" if label == row.title else "")
    return table


def _origin(row: Method) -> Iterator[RenderableType]:
    """Yield what the modules and classes of the algorithm and of the mixer say of themselves."""
    from rich.text import Text

    for kind in (row.algorithm, row.mixer):
        yield Text.assemble("\n", (kind.__name__, "bold"), f" in {kind.__module__}")
        module = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
        yield Text("\n\n".join(map(flowing, [*module.split("\n\n"), *paragraphs_of(kind)])).strip())


def paragraphs_of(kind: type) -> list[str]:
    """Return a class's docstring in paragraphs, without what it says of its fields."""
    return (inspect.getdoc(kind) or "").partition("Attributes:\n")[0].strip().split("\n\n")


def flowing(paragraph: str) -> str:
    """Undo the line breaks of a paragraph, but for lists and the like."""
    lines = paragraph.strip("\n").split("\n")
    return paragraph if any(line.startswith((" ", "-")) for line in lines) else " ".join(lines)


def plain(text: str) -> str:
    """Undo the marks that documentation has for names of code."""
    return _MARK.sub(r"\1", text)


def settings_table(title: str, found: list[Setting]) -> Table:
    """Return a row a setting."""
    table = _plain_table(title)
    for heading in ("key", "default", "allowed", "meaning"):
        table.add_column(heading, no_wrap=heading in ("key", "default"))
    for setting in found:
        table.add_row(*setting)
    return table


def _shipped(name: str) -> Table:
    table = _plain_table("Settings shipped for it, by data")
    told = shipped(name)
    usual = told.pop(_ANY)
    table.add_column("setting", no_wrap=True)
    table.add_column(_ANY, no_wrap=True)
    table.add_column("but")
    for key in dict.fromkeys(key for values in (usual, *told.values()) for key in values):
        others: dict[str, list[str]] = {}
        for data, values in told.items():
            others.setdefault(_literal(values.get(key, "-")), []).append(data)
        common = _literal(usual.get(key, "-"))
        others.pop(common, None)
        table.add_row(key, common, "; ".join(f"{value} for {', '.join(names)}" for value, names in others.items()))
    return table


def _plain_table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    box, padding = SIMPLE_HEAD, (0, 1, 0, 0)
    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=box, padding=padding, pad_edge=False)


def _section(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
