"""A run's folder: what is written while it runs, and read when it is over or was killed.

config.toml               the complete configuration; runs again as it is
metrics.jsonl             one line per round
metrics.damaged.jsonl     lines of it that could not be read, each with its number, where there were some
summary.json              the outcome, once the run is complete
failed.json               why it can't come to an end, where it can't
clients.csv               each client's scores and mixture weights
references.json           scores of plain predictors on the same rows, if they were asked for
checkpoints/              the states: tensors as safetensors, the rest as JSON, never pickle (see checkpoints.py)
tensorboard/              the metrics as TensorBoard events
.lock                     held by the process that trains; it is taken before the folder is looked at
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedem.core.errors import UserError, counted, naming, notify
from fedem.core.files import (
    holding,
    is_empty,
    plain,
    read_csv,
    remove_leftovers,
    write_atomically,
    write_csv,
    write_json,
)
from fedem.core.schema import (
    Flag,
    Kind,
    Listed,
    Maybe,
    Number,
    Table,
    Text,
    Whole,
    check,
    parse_json,
    read_json_if_there,
)
from fedem.data.federation import PARTS
from fedem.methods.base import AUTO
from fedem.models.metrics import METRICS
from fedem.runs.checkpoints import Checkpoints, Loaded
from fedem.runs.config import Config, read_config
from fedem.runs.evaluate import LEFT_OUT
from fedem.runs.rounds import State
from fedem.solvers.schedules import SCHEDULES

DIVERGED = "diverged"  # phrase of a failure
CONFIG, METRICS_FILE, SUMMARY_FILE, CLIENTS_FILE = "config.toml", "metrics.jsonl", "summary.json", "clients.csv"
DAMAGED_LINES, FAILED_FILE, REFERENCES_FILE = "metrics.damaged.jsonl", "failed.json", "references.json"
TRACES = (CONFIG, "checkpoints", METRICS_FILE, SUMMARY_FILE, FAILED_FILE)  # of a run
# What may differ when a run is resumed: none of it changes a result beyond rounding.
_FREE = {"run.device", "run.engine", "run.chunk_size", "run.checkpoint_every", "run.checkpoint_seconds"}

_FIGURE, _COUNT = Maybe(Number()), Whole(least=0)
_VARIANTS = ("", "_unweighted", "_pooled", "_undefined", "_in_units", "_pooled_in_units")
_AVERAGES = tuple(f"{part}_{name}" for part in PARTS for name in ("loss", *METRICS))
_SCORES = {f"{name}{variant}": _FIGURE for name in _AVERAGES for variant in _VARIANTS}
_COSTS = {"seconds": Number(least=0), **{f"bytes_{way}": Maybe(Number(least=0)) for way in ("up", "down")}}
_LINE = Table({"round": Whole(least=1), **_COSTS}, {"learning_rate": _FIGURE, "clients": _COUNT, **_SCORES})
_FIGURES = {
    **_SCORES,
    **{f"unseen_{name}": _FIGURE for name in _SCORES},
    **{f"oracle_{name}": _FIGURE for name in ("loss", "bottom_decile", *METRICS)},
    **dict.fromkeys(["bottom_decile", "test_base_rate", "target_deviation", "learning_rate"], _FIGURE),
    **{f"{cost}_per_round": _FIGURE for cost in _COSTS},
    "seconds_total": _FIGURE,
}
_BEST = Table({"round": _COUNT}, _FIGURES)
_RECOVERY = Table({"cluster_accuracy": Number()}, {"component_distances": Listed(_FIGURE)})
_COUNTS = ["num_unseen_clients", "num_parameters", "stopped_after", "max_rounds", "patience", "halvings", LEFT_OUT]
_COUNTS += ["hostile_clients", "initial_components", "alpha_rounds", "alpha_rounds_within_bound"]
# What is said of a run takes several figures together: by one of them, those that must be there with it.
_TOGETHER: dict[str, dict[str, Kind]] = {
    "stopped_after": {"max_rounds": _COUNT},
    "halvings": {"learning_rate": Number()},
    "components_history": {"initial_components": _COUNT},
    "consensus_p": {"consensus_tau": _COUNT},
    "alpha_rounds": {"alpha_max": _FIGURE, "alpha_bound": Number(), "alpha_rounds_within_bound": _COUNT},
    "dissimilarity_slope": {"dissimilarity_constant": _FIGURE},
}
SUMMARY = Table(
    {
        "method": Text(),
        "data": Text(),
        "rounds": _COUNT,
        "seed": Whole(),
        "num_clients": _COUNT,
        "num_components": Whole(least=1),
    },
    {
        **_FIGURES,
        **dict.fromkeys(_COUNTS, _COUNT),
        **dict.fromkeys(["consensus_p", "dissimilarity_slope"], _FIGURE),
        "backdoor_success": Number(),
        "components_history": Listed(Table({"round": _COUNT, "action": Text()})),
        "weights_mean": Listed(Number()),
        "best": Maybe(_BEST),
        "recovery": _RECOVERY,
        "unlabelled": Table({"note": Text()}),
        "diverged": Flag(),
        "note": Text(),
    },
)
FAILURE = Table({"phrase": Text(), "message": Text()})
REFERENCES = Listed(Table({"method": Text(), "title": Text()}, _FIGURES | {"clients": Listed(Table())}))


_NUMERIC = tuple(f"{name}_" for name in (*PARTS, "weight"))  # columns of clients.csv begin so
_NAMED = 5  # lines that a message names


class Line(NamedTuple):
    """A line of metrics.jsonl that can't be read."""

    number: int  # counted from 1
    content: bytes
    why: str


class Failure(NamedTuple):
    """Why a run can't come to an end."""

    phrase: str  # for a table
    message: str


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path, self.checkpoints = path, path / "checkpoints"
        self.saved = Checkpoints(self.checkpoints)

    def exists(self) -> bool:
        return (self.path / CONFIG).is_file()

    def prepare(self, resume: bool = False) -> None:
        """Refuse a folder that can't be written or, unless it is to be resumed, that holds a run; changes nothing."""
        if not resume and any((self.path / name).exists() for name in TRACES):
            raise UserError(f"{self.path} holds a run already; choose another folder, or go on training it (--resume).")
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UserError(f"The run's folder {self.path} can't be written: {there} is not a folder we may write to.")

    @contextmanager
    def created(self, config: Config) -> Iterator[None]:
        """Hold the folder of a new run: the lock comes first, then the look at what is there, then config.toml."""
        self.prepare()  # leaves nothing behind where the answer is no already
        with self.locked():
            self.prepare()
            try:
                write_atomically(self.path / CONFIG, config.to_toml().encode())
            except OSError as error:
                raise UserError(f"The run's folder {self.path} can't be written: {error.strerror}.") from None
            yield

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """Hold the folder of a run that is to be gone on with."""
        if not self.exists():
            raise UserError(f"There is no run to go on with in {self.path} (no {CONFIG}).")
        with self.locked():
            yield

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder, which is made if it is not there: no other process writes to it."""
        return holding(self.path, f"Another process is training into {self.path}; wait until it ends, or stop it.")

    def check_length(self, config: Config) -> None:
        """Refuse to make the run shorter, or longer where the learning rates of the rounds done would be others."""
        before, asked = self.config().run.rounds, config.run.rounds
        run = f"The run in {self.path} was started with {counted(before, 'round')}, and {asked} are asked for"
        if asked < before:
            raise UserError(f"{run}; allowed when it is resumed: {before} or more.")
        facts, kept = self.standing() if asked > before else ({}, 0)
        stopped = facts.get("stopped_after")
        if stopped is not None and kept < stopped:
            why = f"it ended after {counted(stopped, 'round')}, of which the state of round {kept} alone is kept"
            mend = f"a new run of {counted(asked, 'round')}"
            raise UserError(f"{run}, but {why} (run.patience is {self.config().run.patience}); allowed: {mend}.")
        if asked > before and config.method.values.get("num_components") == AUTO:
            why = (
                f"method.num_components is {AUTO!r}, and it goes by the number of rounds when components are looked at"
            )
            raise UserError(f"{run}, but {why}; allowed: a new run of {counted(asked, 'round')}.")
        if asked > before and config.schedule.depends_on_length:
            growing = ", ".join(name for name, kind in SCHEDULES.items() if not kind.depends_on_length)
            why = f"schedule.name is {config.name('schedule')!r}, whose learning rates go by the number of rounds"
            mend = f"a new run of {counted(asked, 'round')}, or one whose schedule.name is {growing}, which may grow"
            raise UserError(f"{run}, but {why}; allowed: {mend}.")

    def departures(self, config: Config) -> list[str]:
        """Return ``section.key`` of what the run has other than ``config``, but for where and how it is worked off.

        The rate of fine-tuning is nothing where neither has any.
        """
        made = self.config()
        changed = set(made.differences(config)) - _FREE
        if not (made.run.fine_tune_epochs or config.run.fine_tune_epochs):
            changed.discard("run.fine_tune_rate")
        return sorted(changed)

    def reopen(self, config: Config, longer: bool = False) -> bool:
        """Open the folder to go on with its run; returns whether there is a checkpoint to go on from.

        The run may get ``longer``. It is not complete then, and the folder says so from that moment on.
        """
        changed = set(self.departures(config))
        if grown := longer and "run.rounds" in changed:
            self.check_length(config)
            changed.remove("run.rounds")
        # Nobody sets the hash: it is found, and says who owns which samples.
        if settings := ", ".join(sorted(changed - {"run.partition_hash"})):
            mend = "resume it as it was, or start a new one"
            raise UserError(f"The run in {self.path} was started with other settings ({settings}); {mend}.")
        if changed:
            raise UserError(f"The data are not those that the run in {self.path} was trained on.")
        remove_leftovers(self.path)
        if grown:
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
            write_atomically(self.path / CONFIG, config.to_toml().encode())
        return self.saved.exist()

    def open_metrics(self, done: int) -> IO[str]:
        """Open metrics.jsonl to append, with the lines of the first ``done`` rounds alone; each is written at once.

        Lines that can't be read are put aside.
        """
        path = self.path / METRICS_FILE
        good, _ = self.put_aside()
        write_atomically(path, "".join(self.line(line) for line in good if line["round"] <= done).encode())
        return path.open("a", buffering=1, encoding="utf-8")

    def put_aside(self) -> tuple[list[dict[str, Any]], list[Line]]:
        """Move lines of metrics.jsonl that can't be read to a file of their own; returns the others, and these."""
        good, damaged = self.read_metrics()
        if damaged:
            aside = self.path / DAMAGED_LINES
            # Bytes that are no text come back by the same rule.
            texts = [(line.number, line.content.decode(errors="surrogateescape")) for line in damaged]
            lines = [json.dumps({"line": number, "content": text}) for number, text in texts]
            before = aside.read_text(encoding="utf-8").splitlines() if aside.exists() else []
            lines = [*before, *(line for line in lines if line not in before)]
            write_atomically(aside, "".join(f"{line}\n" for line in lines).encode())
            write_atomically(self.path / METRICS_FILE, "".join(map(self.line, good)).encode())
        return good, damaged

    @staticmethod
    def line(record: Mapping[str, Any]) -> str:
        return json.dumps(plain(record), allow_nan=False) + "\n"

    def save(self, states: Mapping[str, State], metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint; see :meth:`Checkpoints.save`."""
        self.saved.save(states, metadata)

    def finish(self, summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        # Clients held out may have parts that the others lack, and the server of a network has no client's figures.
        columns = dict.fromkeys(["client", "role", *(key for row in clients for key in row)])
        write_csv(self.path / CLIENTS_FILE, columns, clients)
        write_json(self.path / SUMMARY_FILE, summary)

    def fail(self, failure: Failure | None) -> None:
        """Write down why the run can't come to an end; None where it is tried again."""
        if failure is None:
            (self.path / FAILED_FILE).unlink(missing_ok=True)
        else:
            write_json(self.path / FAILED_FILE, failure._asdict())

    def failure(self) -> Failure | None:
        """Read why the run can't come to an end; None where nothing is known of that."""
        content = read_json_if_there(self.path / FAILED_FILE, FAILURE)
        return None if content is None else Failure(content["phrase"], content["message"])

    def clear(self) -> None:
        """Remove what a failed run has written, so that it can be trained from its start."""
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        # The configuration goes last: without it nobody would know whose the rest is.
        for name in (SUMMARY_FILE, CLIENTS_FILE, METRICS_FILE, DAMAGED_LINES, FAILED_FILE, CONFIG):
            (self.path / name).unlink(missing_ok=True)

    def config(self) -> Config:
        path = self.check().path / CONFIG
        with naming(path):
            return read_config(path)

    def check(self) -> RunFolder:
        if not self.exists():
            many = any(self.path.glob(f"*/{CONFIG}"))
            hint = " The folders in it do: name one of them, or see `fedem report`." if many else ""
            raise UserError(f"{self.path} holds no run (no {CONFIG}).{hint}")
        return self

    def metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl; damaged lines are left out with a note, a last one cut short by a kill without."""
        good, damaged = self.read_metrics()
        if damaged:
            lines = ", ".join(str(line.number) for line in damaged[:_NAMED]) + (", ..." if damaged[_NAMED:] else "")
            left_out = f"left out: {counted(len(damaged), 'line')} that can't be read ({lines})"
            notify(f"Of {self.path / METRICS_FILE} {left_out}. {damaged[0].why} `fedem check` says more.")
        return good

    def read_metrics(self) -> tuple[list[dict[str, Any]], list[Line]]:
        """Read the records of the rounds, and the lines that are none."""
        path, good, damaged = self.path / METRICS_FILE, dict[int, dict[str, Any]](), list[Line]()
        try:
            *lines, rest = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], []
        for number, content in enumerate([*lines, rest], start=1):
            if not content.strip():
                continue
            try:
                record = parse_json(content, f"{path}, line {number}", _LINE)
                if record["round"] in good:
                    raise UserError(f"{path}, line {number} is a second one of round {record['round']}.")
                good[record["round"]] = record
            except UserError as error:
                if number <= len(lines):  # else it was being written when its process was killed
                    damaged.append(Line(number, content, str(error)))
        return list(good.values()), damaged

    def summary(self) -> dict[str, Any] | None:
        """Read summary.json; None when the run is not complete."""
        path = self.path / SUMMARY_FILE
        summary: dict[str, Any] | None = read_json_if_there(path, SUMMARY)
        if summary is not None:
            # Each part that was scored has a loss, and the best state was scored as the last one was.
            scores = dict.fromkeys([name for name in summary if name in _AVERAGES], _FIGURE)
            losses: dict[str, Kind] = dict.fromkeys([f"{name.partition('_')[0]}_loss" for name in scores], _FIGURE)
            for name in _TOGETHER.keys() & summary.keys():
                losses |= _TOGETHER[name]
            check(path, summary, Table(losses, {"best": Maybe(Table(scores))}))
        return summary

    def save_references(self, records: Sequence[Mapping[str, Any]]) -> None:
        write_json(self.path / REFERENCES_FILE, records)

    def references(self) -> list[dict[str, Any]]:
        """Read what plain predictors score on the run's rows; nothing where nobody asked for it."""
        return read_json_if_there(self.path / REFERENCES_FILE, REFERENCES) or []

    def clients(self) -> list[dict[str, str]]:
        """Read clients.csv, one row per client."""
        path = self.path / CLIENTS_FILE
        try:
            rows = read_csv(path)
        except FileNotFoundError:
            raise UserError(f"{self.path} has no {CLIENTS_FILE}: the run is not complete.") from None
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path} can't be read: {error}.") from None
        for number, row in enumerate(rows, start=2):
            columns = [name for name in row if isinstance(name, str)]
            for name in ("client", "role"):
                if name not in columns:
                    raise UserError(f"{path} can't be read: it has no column {name!r}.")
            if len(columns) < len(row) or None in row.values():
                allowed = counted(len(columns), "cell")
                raise UserError(f"{path} can't be read: line {number} has more or fewer cells; allowed: {allowed}.")
            for name, value in row.items():
                if name.startswith(_NUMERIC) and not _is_number(value):
                    problem = f"line {number} has {name} = {value!r}"
                    raise UserError(f"{path} can't be read: {problem}; allowed: a number, or nothing.")
        return rows

    def load(self) -> Loaded:
        """Read the states of the newest checkpoint that is whole."""
        return self.saved.load()

    def standing(self) -> tuple[dict[str, Any], int]:
        """Return what the newest checkpoint says beside its tensors, and its round; nothing where there is none."""
        manifest = self.saved.newest()
        return (manifest["facts"], manifest["states"]["last"]["round"]) if manifest else ({}, 0)

    def baselines(self) -> list[RunFolder]:
        """Runs of other methods on the same data, in folders below."""
        return [RunFolder(path.parent) for path in sorted(self.path.glob(f"baselines/*/{CONFIG}"))]


def _is_number(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def check_here(names: Sequence[str]) -> None:
    """Refuse, for what needs clients' models, a run over a network: of its clients the server keeps nothing."""
    if not names:
        where = "on their nodes, each model in STATE/EXPERIMENT/CLIENT.safetensors, which `fedem export` takes there"
        raise UserError(f"The run was one over a network: its clients' models and samples are {where}.")


def new_folder(base: Path, name: str) -> Path:
    """Return ``base/name``, or ``base/name-2``, ... if that is taken."""
    number = 1
    while not is_empty(path := base / (name if number == 1 else f"{name}-{number}")):
        number += 1
    return Path(os.path.relpath(path)) if not base.is_absolute() else path
