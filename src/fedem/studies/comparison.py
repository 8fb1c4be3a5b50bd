"""Methods side by side: a sweep whose one axis is the methods, and its figures over the seeds.

All methods of a seed have the same data and the same clients held out; each has the settings shipped for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

from fedem.core.errors import UserError
from fedem.core.files import write_csv, write_json
from fedem.core.schema import Listed, Maybe, Table, Text
from fedem.methods import METHODS, resolve_method, title_of
from fedem.runs.config import SECTIONS, Config, Layer, Sections
from fedem.runs.evaluate import LEFT_OUT, Record, metrics_of
from fedem.runs.folder import Failure
from fedem.studies import sweep
from fedem.studies.sweep import Entry, Gap, Labels, Spread, failures, outcomes, read_setting, reason

# What every method has for itself; and what none may have for itself, or they could not be compared.
_OWN = ("method", "graph", "server", "defence", "solver", "schedule")
_OWN_OF_RUN = ("run.fine_tune_epochs", "run.fine_tune_rate")
_SAME = ("data", "loss", "attack", "run.rounds", "run.unseen", "run.metrics")
_GIVEN = {"run.seed": "--seeds", "method.name": "--methods"}
_TRAINING = ("batching", "server", "defence", "solver", "schedule")
_POINTS = 20
_SCORES = ("test_{}", "bottom_decile", "unseen_test_{}", "train_{}")
_VARIANTS = ("_pooled", "_in_units", "_pooled_in_units")  # of a test score, where a run has them
_COSTS = ("seconds_per_round", "bytes_up_per_round", "bytes_down_per_round")
_ORACLE = {"test_{}": "oracle_{}", "bottom_decile": "oracle_bottom_decile", "test_loss": "oracle_loss"}


def resolve_methods(names: Sequence[str]) -> list[str]:
    """Return the methods called ``names``, each once; "all" is every one there is."""
    chosen = list(METHODS) if list(names) == ["all"] else [resolve_method(name) for name in names]
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"The methods are {', '.join(names) or 'none'}; allowed: all, or one or several, each once.")
    return chosen


def without_own(layers: Iterable[Layer]) -> list[Layer]:
    """Leave out what another method does not take over: how one method is set, solved and tuned."""
    return [
        {
            section: {key: value for key, value in values.items() if f"{section}.{key}" not in _OWN_OF_RUN}
            for section, values in layer.items()
            if section not in _OWN
        }
        for layer in layers
    ]


def without_shipped(layer: Layer, main: Config) -> Layer:
    """Leave out of the file of ``main`` what is shipped for its method: another has what is shipped for that one."""
    shipped = Config.build({"data": main.sections["data"], "method": {"name": main.name("method")}}).sections
    kept = dict(layer)
    for section, values in layer.items():
        if not SECTIONS[section].is_named:
            kept[section] = {key: value for key, value in values.items() if shipped[section].get(key) != value}
    return kept


def sort_settings(assignments: Iterable[str], methods: Sequence[str]) -> tuple[list[Layer], dict[str, list[Layer]]]:
    """Sort ``[METHOD:]section.key=value`` into the layers of all methods and those of each."""
    shared: list[Layer] = []
    own: dict[str, list[Layer]] = {name: [] for name in methods}
    for text in assignments:
        whose, colon, _ = text.partition("=")[0].rpartition(":")
        section, place, layer = read_setting(text, _GIVEN, whose + colon)
        method = resolve_method(whose.strip()) if colon else ""
        if not method and section in _OWN:
            allowed = f"METHOD:{section}.key=value, such as {methods[-1]}:{text}"
            raise UserError(f"--set got {text!r}, but every method has a [{section}] of its own; allowed: {allowed}.")
        if method and method not in methods:
            raise UserError(f"--set got {text!r}; allowed before the colon: {', '.join(methods)}.")
        if method and (section in _SAME or place in _SAME):
            raise UserError(f"--set got {text!r}, but {place} is the same for all methods; allowed: without {whose!r}.")
        (own[method] if method else shared).append(layer)
    return shared, own


def plan(
    out: Path, methods: Sequence[str], seeds: Sequence[int], shared: Sequence[Layer], own: Mapping[str, Sequence[Layer]]
) -> list[Entry]:
    """Return the runs in OUT/METHOD-seedS, seed by seed, with settings that all share and their own, checked."""
    rounds = Config.build(*shared, {"method": {"name": methods[0]}}).run.rounds
    usual: Sections = {"run": {"evaluate_every": max(1, rounds // _POINTS)}}  # so often that curves can be drawn

    def layers(labels: Labels) -> list[Layer]:
        return [usual, *shared, {"method": {"name": labels["method"]}}, *own.get(labels["method"], ())]

    return sweep.plan(out, {"method": methods}, seeds, layers, name=lambda labels, n: f"{labels['method']}-seed{n}")


@dataclass(frozen=True)
class Row:
    """A method's figures by their names in a summary, and its way there."""

    method: str
    title: str
    figures: dict[str, Spread]
    curve: dict[int, Spread]  # the test score after each round that was scored
    training: dict[str, Any] = field(default_factory=dict)  # settings of how clients train, by section.key


COMPARISON = Table(
    optional={"data": Text(), "metric": Text(), "methods": Listed(Table({"method": Text()})), "command": Maybe(Text())}
)


@dataclass(frozen=True)
class Failed:
    """A method of which some run failed."""

    method: str
    title: str
    failures: dict[int, Failure]  # by seed
    runs: list[Record]  # one record per seed

    @property
    def phrase(self) -> str:
        return f"failed: {next(iter(self.failures.values())).phrase}"


@dataclass(frozen=True)
class Comparison:
    """The result: one row per method, the best first; methods that failed are apart."""

    data: str
    metric: str
    rounds: int
    num_clients: int
    num_unseen_clients: int
    seeds: list[int]
    rows: list[Row]
    oracle: dict[str, Spread]  # empty when the truth is not known
    runs: list[Record]  # one record per method and seed, then per reference and seed
    failed: list[Failed] = field(default_factory=list)
    left_out: tuple[int, int] = (0, 0)  # fewest and most clients that the bottom decile of a seed leaves out
    references: list[Row] = field(default_factory=list)  # plain predictors on the same rows, the best first
    notes: list[str] = field(default_factory=list)  # what there is to say of them

    @property
    def gaps(self) -> dict[str, Gap]:
        """How far each method's test score, and each reference's, is from the first method's."""
        scores: dict[str, dict[int, float | None]] = {row.method: {} for row in (*self.rows, *self.references)}
        for run in self.runs:
            scores[run["method"]][run["seed"]] = run.get(f"test_{self.metric}")
        first = next(iter(scores.values()))
        return {method: Gap.of(own, first) for method, own in scores.items()}

    def save(self, folder: Path, command: str) -> None:
        """Write comparison.csv, one line per method and seed, and comparison.json, their means and deviations."""
        lost = [run for failed in self.failed for run in failed.runs]
        write_csv(folder / "comparison.csv", [*self.runs[0], "failed"], [*self.runs, *lost])
        names = ("data", "metric", "rounds", "num_clients", "num_unseen_clients", "seeds", "left_out")
        content = {"command": command} | {name: getattr(self, name) for name in names}
        gaps = self.gaps
        methods, references = (
            [
                {"method": row.method, "title": row.title, "figures": _records(row.figures)}
                | {"to_the_best": gaps[row.method]._asdict()}
                | {"curve": [{"round": number} | spread._asdict() for number, spread in row.curve.items()]}
                for row in rows
            ]
            for rows in (self.rows, self.references)
        )
        failed = [
            {"method": each.method, "title": each.title}
            | {"seeds": {str(seed): failure._asdict() for seed, failure in each.failures.items()}}
            for each in self.failed
        ]
        content |= {"methods": methods, "failed": failed, "oracle": _records(self.oracle) or None}
        write_json(folder / "comparison.json", content | ({"references": references} if references else {}))


def _records(spreads: Mapping[str, Spread]) -> Record:
    return {name: spread._asdict() for name, spread in spreads.items()}


def summarize(entries: Sequence[Entry], beside: Mapping[int, Sequence[Record]] | None = None) -> Comparison:
    """Read the figures of runs that are all over; a method may lack some of the seeds, or have failed with some.

    The references of each seed may stand ``beside``, with figures by the same names.
    """
    if (missing := next((entry for entry in entries if not entry.is_over), None)) is not None:
        raise UserError(f"The run in {missing.folder.path} is not complete.")
    lost = {method: by_seed for (method,), by_seed in failures(entries).items()}
    everything = {method: by_seed for (method,), by_seed in outcomes(entries).items()}
    summaries = {method: by_seed for method, by_seed in everything.items() if method not in lost}
    if not summaries:
        raise UserError(f"No method came to an end. {' '.join(starmap(reason, lost.items()))}")
    seeds = list(dict.fromkeys(entry.seed for entry in entries if entry.labels["method"] in summaries))
    # What does not depend on the method can be read of any.
    baseline = {seed: summary for by_seed in summaries.values() for seed, summary in by_seed.items()}
    first = baseline[seeds[0]]
    metric = metrics_of(first)[0].name
    score, unseen = f"test_{metric}", f"unseen_test_{metric}"
    known = (f"test_{each.name}" for by_seed in summaries.values() for each in metrics_of(next(iter(by_seed.values()))))
    further = [name for name in dict.fromkeys(known) if name != score]
    variants = [f"{name}{ending}" for name in (score, *further) for ending in _VARIANTS if f"{name}{ending}" in first]
    names = [*(name.format(metric) for name in _SCORES), *further, *variants, "test_loss", *_COSTS]
    names += ["test_base_rate"] if "test_base_rate" in first else []
    if not any(unseen in summary for by_seed in summaries.values() for summary in by_seed.values()):
        names.remove(unseen)
    rows = []
    for method, by_seed in summaries.items():
        own = [entry for entry in entries if entry.labels["method"] == method]
        figures = {name: Spread.of(summary.get(name) for summary in by_seed.values()) for name in names}
        scored = [{line["round"]: line.get(score) for line in entry.folder.metrics()} for entry in own]
        points = {number: [each.get(number) for each in scored] for number in scored[0]}
        curve = {number: Spread.of(values) for number, values in points.items() if None not in values}
        sections = own[0].config.sections
        training = {f"{name}.{key}": value for name in _TRAINING for key, value in sections[name].items()}
        rows.append(Row(method, run_title(next(iter(by_seed.values()))), figures, curve, training))
    rows.sort(key=lambda row: row.figures[score].rank(metric))
    truth = {name.format(metric): key for name, other in _ORACLE.items() if (key := other.format(metric)) in first}
    truth |= {name: key for name in further if (key := name.replace("test", "oracle", 1)) in first}
    oracle = {name: Spread.of(baseline[seed].get(key) for seed in seeds) for name, key in truth.items()}

    def record(method: str, seed: int, summary: Record) -> Record:
        found = {"method": method, "seed": seed, "rounds": summary.get("rounds")}
        return found | {name: summary.get(name) for name in (*names, *truth.values())}

    runs = [record(row.method, seed, summary) for row in rows for seed, summary in summaries[row.method].items()]
    failed = []
    for method, causes in lost.items():
        tried = [entry.seed for entry in entries if entry.labels["method"] == method]
        why = {seed: causes[seed].message if seed in causes else None for seed in tried}
        lines = [record(method, seed, everything[method].get(seed, {})) | {"failed": why[seed]} for seed in tried]
        title = next(entry.config.name("method") for entry in entries if entry.labels["method"] == method)
        failed.append(Failed(method, title_of(title), causes, lines))
    others: dict[str, dict[int, Record]] = {}
    for seed, records in (beside or {}).items():
        for each in records:
            others.setdefault(each["method"], {})[seed] = each
    plain = []
    for name, own_records in others.items():
        spreads = {key: Spread.of(each.get(key) for each in own_records.values()) for key in names if key not in _COSTS}
        plain.append(Row(name, run_title(next(iter(own_records.values()))), spreads, {}))
    plain.sort(key=lambda row: row.figures[score].rank(metric))
    runs += [record(row.method, seed, each) for row in plain for seed, each in others[row.method].items()]
    noted = (each for own in others.values() for each in own.values() if "note" in each)
    notes = list(dict.fromkeys(f"{run_title(each)}: {each['note']}" for each in noted))
    rounds = first["max_rounds" if "max_rounds" in first else "rounds"]  # asked for: fewer may count
    sizes = (rounds, first["num_clients"], first.get("num_unseen_clients", 0))
    counts = [summary.get(LEFT_OUT, 0) for summary in baseline.values()]
    left_out, name = (min(counts), max(counts)), data_name(entries[0].config)
    return Comparison(name, metric, *sizes, seeds, rows, oracle, runs, failed, left_out, plain, notes)


def data_name(config: Config) -> str:
    """Return what the data are called in a table: a file's name, or the data set's."""
    return Path(config.values("data").get("path") or config.name("data")).name


def run_title(summary: Mapping[str, Any]) -> str:
    """Return what a run's method is called in a table, with its number of components if there are several."""
    if "title" in summary:
        return str(summary["title"])
    components = f" (M={summary['num_components']})" if summary["num_components"] > 1 else ""
    return title_of(summary["method"]) + components
