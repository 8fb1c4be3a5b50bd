"""The classes of settings -> whatever can be set, on a terminal or as a page.

A kind is what a name in a section stands for: a data set, a model, a solver, ... Sections without names have one kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fedem.errors import UserError, unknown
from fedem.methods import METHODS, resolve_method
from fedem.report.methods import Setting, flowing, paragraphs_of, plain, settings_of, settings_table
from fedem.sections import ABOUT, DEFAULTS, NAMED, UNNAMED, WITHOUT_SETTINGS, Kinds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SECTIONS = (*UNNAMED, *NAMED)

_EMPTY = '""'
_PRESETS = (
    "The defaults are those of the code. What is shipped for a method and its data changes some of them: "
    "``fedem methods NAME`` tells what comes with a method, and a run's ``config.toml`` has all that held."
)
_TITLE = """# Settings

Whatever can be set, by section: `--set section.key=value` on the command line, or the same in a TOML file. On the
command line `fedem settings` lists the sections, `fedem settings schedule` tells one of them, and
`fedem settings schedule.step` one of its names. This page is made from the code, by `fedem settings --markdown`.
"""
_MARKS = re.compile(r"[*|\\]|\b_|_\b")
"""what Markdown would take for a mark, or for the end of a table's cell; no underscore within a word"""
_CODE = re.compile(r"(``[^`]+``)")


class Kind(NamedTuple):
    """A name that a section may have."""

    name: str
    """empty where the section has no names"""
    about: list[str]
    """paragraphs, as the code has them"""
    settings: list[Setting]


def kinds_in(section: str) -> list[Kind]:
    """Return the names that a section may have, and what can be set with each."""
    if section in UNNAMED:
        return [Kind("", [], _settings_of(UNNAMED[section]))]
    kinds = [
        Kind(name, [METHODS[name].summary] if section == "method" else paragraphs_of(classes[0]), _settings_of(classes))
        for name, classes in NAMED[section].items()
    ]
    return kinds + [Kind(name, [text], []) for (place, name), text in WITHOUT_SETTINGS.items() if place == section]


def shared_settings(kinds: list[Kind]) -> list[Setting]:
    """Return the settings that are the same for all kinds which have any, if these are several."""
    first, *others = [kind.settings for kind in kinds if kind.settings]
    return [setting for setting in first if others and all(setting in other for other in others)]


def sections_pages() -> Iterator[RenderableType]:
    """Yield a row a section: what it is for, and its names."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("section", no_wrap=True, style="bold")
    table.add_column("what it sets")
    table.add_column("names")
    for section in SECTIONS:
        table.add_row(section, ABOUT[section], ", ".join(kind.name for kind in kinds_in(section)) or "-")
    yield table
    yield "fedem settings SECTION tells a section's keys, fedem settings SECTION.NAME those that go with a name."


def section_pages(asked: str) -> Iterator[RenderableType]:
    """Yield all there is to say of a ``section``, or of one of its names: ``section.name``."""
    from rich.text import Text

    section, dot, name = asked.partition(".")
    if section not in SECTIONS:
        raise unknown("section", section, SECTIONS)
    if dot:
        kind = _kind(section, name)
        yield Text.assemble((f"{section} {kind.name}", "bold"), *(f"\n\n{_flowing(text)}" for text in kind.about))
        yield _table(section, "Settings", kind.settings)
        return
    kinds = kinds_in(section)
    yield Text(" ".join([ABOUT[section], *_choice(section)]))
    shared = shared_settings(kinds)
    if shared:
        yield _table(section, "Whatever the name", shared)
    for kind in kinds:
        if kind.name:
            yield Text.assemble("\n", (kind.name, "bold"), f": {_flowing(kind.about[0])}")
        own = [setting for setting in kind.settings if setting not in shared]
        if own:
            yield _table(section, f"Settings of {section} {kind.name}".rstrip(), own)
    yield Text(f"\n{_flowing(_PRESETS)}")


def settings_page() -> str:
    """Return all sections as Markdown."""
    parts = [_TITLE, _marked(_PRESETS)]
    for section in SECTIONS:
        kinds = kinds_in(section)
        parts += [f"## {section}", " ".join([_marked(ABOUT[section]), *_choice(section, "`")])]
        if shared := shared_settings(kinds):
            parts += [f"Whatever the name:\n\n{_markdown_table(shared)}"]
        for kind in kinds:
            if kind.name:
                parts += [f"### {section}.{_marked(kind.name)}", *map(_marked, kind.about)]
            if own := [setting for setting in kind.settings if setting not in shared]:
                parts += [_markdown_table(own)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _kind(section: str, name: str) -> Kind:
    """Return what goes by a name in a section; of a method any name will do that it has."""
    if section in UNNAMED:
        raise UserError(f"[{section}] has no names, but {name!r} was asked for; allowed: fedem settings {section}.")
    kinds = {kind.name: kind for kind in kinds_in(section)}
    found = resolve_method(name) if section == "method" else name
    if found not in kinds:
        raise unknown(section, name, kinds)
    return kinds[found]


def _settings_of(classes: Kinds) -> list[Setting]:
    """Return what classes say of their fields; no word at all is written as TOML has it."""
    found = [setting for kind in classes for setting in settings_of(kind)]
    return [setting._replace(default=setting.default or _EMPTY) for setting in found]


def _flowing(paragraph: str) -> str:
    return plain(flowing(paragraph))


def _choice(section: str, quote: str = "") -> list[str]:
    """Say how a kind is chosen, where there are several."""
    if section in UNNAMED:
        return []
    default = DEFAULTS.get(section, {}).get("name")
    usual = f"; {quote}{default}{quote} unless it is set" if default else ""
    return [f"{quote}--set {section}.name=NAME{quote} chooses{usual}."]


def _table(section: str, title: str, found: list[Setting]) -> Table | str:
    return settings_table(f"{title}: --set {section}.KEY=VALUE", found) if found else "\nIt has no settings."


def _markdown_table(found: list[Setting]) -> str:
    rows = [
        f"| `{setting.name}` | `{setting.default}` | {_marked(setting.allowed)} | {_marked(setting.meaning)} |"
        for setting in found
    ]
    return "\n".join(["| key | default | allowed | meaning |", "| --- | --- | --- | --- |", *rows])


def _marked(text: str) -> str:
    """Return a docstring's text as Markdown: code stays code, and all else shows as it is."""
    return "".join(
        part if _CODE.fullmatch(part) else _MARKS.sub(r"\\\g<0>", plain(part)).replace("<", "&lt;")
        for part in _CODE.split(text)
    )
