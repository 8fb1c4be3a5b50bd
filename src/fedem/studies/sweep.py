"""The runs of a comparison: which they are, what they share, and which of them are still to be trained.

A cell is one method with one seed: an ordinary run in a folder of its own. All cells of a seed have the same data and
the same clients held out; each method has the settings shipped for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedem.core.errors import UserError
from fedem.data.dataset import Dataset, DataSource
from fedem.data.partitions import Partition
from fedem.methods import METHODS, resolve_method
from fedem.runs.config import UNNAMED, Config, Layer, Sections, parse_assignment
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import Listener, Trainer, carry_out

# What every method has for itself; and what none may have for itself, or they could not be compared.
_OWN = ("method", "graph", "solver", "schedule")
_OWN_OF_RUN = ("fine_tune_epochs", "fine_tune_rate")
_SAME = ("data", "loss", "run.rounds", "run.unseen")
_POINTS = 20


class Cell(NamedTuple):
    """One method with one seed, and the folder of its run."""

    method: str
    seed: int
    config: Config
    folder: RunFolder

    @property
    def title(self) -> str:
        """The method's name and the seed."""
        return f"{METHODS[self.method].title} seed {self.seed}"


class Pending(NamedTuple):
    """A cell that was checked and is not complete yet."""

    cell: Cell
    dataset: Dataset
    note: str | None

    def carry_out(self, listener: Listener | None = None) -> None:
        """Train the cell, from where it was stopped if it was."""
        trainer = Trainer.prepare(self.cell.config, self.dataset, fresh=False)
        folder = self.cell.folder
        carry_out(trainer, out=folder.path, resume=folder.exists(), listener=listener)


def configure(shared: Sequence[Layer], method: str, own: Sequence[Layer] = ()) -> Config:
    """Return the run that ``shared`` describes with ``method``, with the settings shipped for it but for its own."""
    return Config.build(*shared, {"method": {"name": method}}, *own)


def without_own(layers: Iterable[Layer]) -> list[Layer]:
    """Leave out what another method does not take over: how one method is set, solved and tuned."""
    kept: list[Layer] = []
    for layer in layers:
        common = {section: values for section, values in layer.items() if section not in _OWN}
        if "run" in common:
            common["run"] = {key: value for key, value in common["run"].items() if key not in _OWN_OF_RUN}
        kept.append(common)
    return kept


def without_shipped(layer: Layer, main: Config) -> Layer:
    """Leave out of the file of ``main`` what is shipped for its method: another has what is shipped for that one."""
    shipped = Config.build({"data": main.sections["data"], "method": {"name": main.name("method")}}).sections
    return {
        section: {key: value for key, value in values.items() if shipped[section].get(key) != value}
        if section in UNNAMED
        else values
        for section, values in layer.items()
    }


def sort_settings(assignments: Iterable[str], methods: Sequence[str]) -> tuple[list[Layer], dict[str, list[Layer]]]:
    """Sort ``[METHOD:]section.key=value`` into the layers of all methods and those of each."""
    shared: list[Layer] = []
    own: dict[str, list[Layer]] = {name: [] for name in methods}
    for text in assignments:
        key, equals, value = text.partition("=")
        whose, colon, place = key.rpartition(":")
        layer = parse_assignment(f"{place}{equals}{value}")
        _check_setting(text, whose.strip() if colon else None, place.strip(), methods)
        if colon:
            own[resolve_method(whose.strip())].append(layer)
        else:
            shared.append(layer)
    return shared, own


def _check_setting(text: str, whose: str | None, place: str, methods: Sequence[str]) -> None:
    section = place.partition(".")[0]
    if place in ("run.seed", "method.name"):
        raise UserError(f"--set got {text!r}; {place} is given by --{'seeds' if section == 'run' else 'methods'}.")
    if whose is None:
        if section in _OWN:
            raise UserError(
                f"--set got {text!r}, but every method has a [{section}] of its own; "
                f"allowed: METHOD:{section}.key=value, such as {methods[-1]}:{text}."
            )
        return
    if resolve_method(whose) not in methods:
        raise UserError(f"--set got {text!r}; allowed before the colon: {', '.join(methods)}.")
    if section in _SAME or place in _SAME:
        raise UserError(f"--set got {text!r}, but {place} is the same for all methods; allowed: without {whose!r}.")


def resolve_methods(names: Sequence[str]) -> list[str]:
    """Return the methods called ``names``, each once; "all" is every one there is."""
    chosen = list(METHODS) if list(names) == ["all"] else [resolve_method(name) for name in names]
    twice = next((name for name in chosen if chosen.count(name) > 1), None)
    if twice is not None or not chosen:
        raise UserError(f"The methods are {', '.join(names) or 'none'}; allowed: all, or one or several, each once.")
    return chosen


def plan(
    out: Path, methods: Sequence[str], seeds: Sequence[int], shared: Sequence[Layer], own: Mapping[str, Sequence[Layer]]
) -> list[Cell]:
    """Return the cells, seed by seed; every configuration is checked.

    Unless the settings say how often to evaluate, it is so often that curves can be drawn.

    Args:
        out: where the cells' folders lie: OUT/METHOD-seedS.
        methods: names of methods.
        seeds: one run of each method for each.
        shared: settings of all methods.
        own: further settings of some.

    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"The seeds are {', '.join(map(str, seeds)) or 'none'}; allowed: one or several, each once.")
    rounds = configure(shared, methods[0]).run.rounds
    usual: Sections = {"run": {"evaluate_every": max(1, rounds // _POINTS)}}
    cells = []
    for seed in seeds:
        for method in methods:
            config = configure([usual, *shared, {"run": {"seed": seed}}], method, own.get(method, ()))
            cells.append(Cell(method, seed, config, RunFolder(out / f"{method}-seed{seed}")))
    return cells


def check_folder(out: Path, resume: bool) -> None:
    """Refuse a folder that can't be written or, unless it is to be resumed, holds anything; changes nothing."""
    folder = RunFolder(out)
    if folder.exists():
        raise UserError(f"{out} holds a run, not a comparison; choose another folder.")
    if resume and not out.is_dir():
        raise UserError(f"There is no comparison to resume in {out} (no such folder).")
    if not resume and out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; go on with --resume, or choose another folder.")
    folder.prepare(resume)


def prepare(cells: Iterable[Cell]) -> list[Pending]:
    """Make the data, once a seed, and check every cell on it; returns those that are not complete, seed by seed."""
    made: dict[tuple[DataSource, Partition, int, float], Dataset] = {}
    pending = []
    for cell in cells:
        recipe = (cell.config.data, cell.config.partition, cell.seed, cell.config.run.unseen)
        if recipe not in made:
            made[recipe] = cell.config.make_data()
        # Trainers are made again when their turn comes: on a GPU, each has a copy of the data.
        try:
            trainer = Trainer.prepare(cell.config, made[recipe], fresh=not cell.folder.exists())
        except UserError as error:
            raise UserError(f"{cell.method}, seed {cell.seed}: {error}") from None
        if cell.folder.exists():
            _check_cell(cell.folder, trainer)
        else:
            cell.folder.prepare()
        if cell.folder.summary() is None:
            pending.append(Pending(cell, made[recipe], trainer.note))
    return pending


def _check_cell(folder: RunFolder, trainer: Trainer) -> None:
    """Refuse a run that was begun with other settings or other data, or that another process is training."""
    with folder.locked():
        if not folder.reopen(trainer.config):
            return
        _, facts = folder.load()
    if facts.get("data") != trainer.federation.fingerprint:
        raise UserError(f"The data are not those that the run in {folder.path} was trained on.")
