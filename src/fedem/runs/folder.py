"""A run's folder: what is written while it runs, and read when it is over or was killed.

config.toml               the complete configuration; runs again as it is
metrics.jsonl             one line per round
summary.json              the outcome, once the run is complete
failed.json               why it can't come to an end, where it can't
clients.csv               each client's scores and mixture weights
references.json           scores of plain predictors on the same rows, if they were asked for
checkpoints/              the states: tensors as safetensors, the rest as JSON, never pickle
tensorboard/              the metrics as TensorBoard events

A checkpoint is a manifest (JSON) that names the tensor files it consists of. Every file is written beside its place and
moved there at once, the manifest last; so a reader, or a run killed at any moment, sees either the old checkpoint or
the new one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch import Tensor

from fedem.core.errors import UserError, counted, naming
from fedem.core.files import locked, plain, read_csv, remove_leftovers, write_atomically, write_csv, write_json
from fedem.core.tree import add_prefix, take_prefix, tree_sorted
from fedem.methods.base import AUTO
from fedem.runs.config import Config, read_toml
from fedem.runs.rounds import State
from fedem.solvers.schedules import SCHEDULES

MANIFEST = "checkpoint.json"
DIVERGED = "diverged"  # phrase of a failure
_FAILED = "failed.json"
_TREES = ("shared", "personal", "memory")
# What may differ when a run is resumed: none of it changes a result beyond rounding.
_FREE = {"run.device", "run.engine", "run.chunk_size", "run.checkpoint_every", "run.checkpoint_seconds"}


class Failure(NamedTuple):
    """Why a run can't come to an end."""

    phrase: str  # for a table
    message: str


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path, self.checkpoints = path, path / "checkpoints"

    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    def prepare(self, resume: bool = False) -> None:
        """Refuse a folder that can't be written or, unless it is to be resumed, that holds a run; changes nothing."""
        traces = ("config.toml", "checkpoints", "metrics.jsonl", "summary.json", _FAILED)
        if not resume and any((self.path / name).exists() for name in traces):
            raise UserError(f"{self.path} holds a run already; go on with it (--resume), or choose another folder.")
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UserError(f"The run's folder {self.path} can't be written: {there} is not a folder we may write to.")

    def create(self, config: Config) -> None:
        self.prepare()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "config.toml", config.to_toml().encode())
        except OSError as error:
            raise UserError(f"The run's folder {self.path} can't be written: {error.strerror}.") from None

    def check_length(self, config: Config) -> None:
        """Refuse to make the run shorter, or longer where the learning rates of the rounds done would be others."""
        before, asked = self.config().run.rounds, config.run.rounds
        run = f"The run in {self.path} was started with {counted(before, 'round')}, and {asked} are asked for"
        if asked < before:
            raise UserError(f"{run}; allowed when it is resumed: {before} or more.")
        manifest = (_read_json(self.checkpoints / MANIFEST) if asked > before else None) or {}
        stopped = manifest.get("facts", {}).get("stopped_after")
        if stopped is not None and (kept := manifest["states"]["last"]["round"]) < stopped:
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

    def reopen(self, config: Config, longer: bool = False) -> bool:
        """Open the folder to go on with its run; returns whether there is a checkpoint to go on from.

        The run may get ``longer``. It is not complete then, and the folder says so from that moment on.
        """
        changed = set(self.config().differences(config)) - _FREE
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
            (self.path / "summary.json").unlink(missing_ok=True)
            write_atomically(self.path / "config.toml", config.to_toml().encode())
        return (self.checkpoints / MANIFEST).exists()

    def locked(self) -> AbstractContextManager[bool]:
        return locked(self.path / ".lock", refusal=f"Another process is training into {self.path}.")

    def open_metrics(self, done: int) -> IO[str]:
        """Open metrics.jsonl to append, with the lines of the first ``done`` rounds alone; each is written at once."""
        path = self.path / "metrics.jsonl"
        write_atomically(path, "".join(self.line(line) for line in self.metrics() if line["round"] <= done).encode())
        return path.open("a", buffering=1, encoding="utf-8")

    @staticmethod
    def line(record: Mapping[str, Any]) -> str:
        return json.dumps(plain(record), allow_nan=False) + "\n"

    def save(self, states: Mapping[str, State], metadata: Mapping[str, Any]) -> None:
        """Write ``states`` by role, each once, such as "last" and "best", and ``metadata``; drop what nothing names."""
        from safetensors.torch import save

        self.checkpoints.mkdir(parents=True, exist_ok=True)
        path, entries, kept = self.checkpoints / MANIFEST, {}, set()
        if path.exists():  # a file that no manifest names was left by a killed run and is written again
            kept = {entry["file"] for entry in json.loads(path.read_text(encoding="utf-8"))["states"].values()}
        for role, state in states.items():
            # Round by round a state has one value; whatever else has a prefix to its role.
            name = f"{role.rpartition('-')[0] or 'round'}-{state.round:06d}.safetensors"
            entries[role] = {"round": state.round, "file": name}
            if name not in kept:
                tree = {key: leaf for part in _TREES for key, leaf in add_prefix(part, getattr(state, part)).items()}
                tensors = {key: leaf.contiguous().cpu() for key, leaf in tree.items()}
                write_atomically(self.checkpoints / name, save(tensors, metadata={"round": str(state.round)}))
                kept.add(name)
        write_json(path, {"facts": dict(metadata), "states": entries})
        for file in self.checkpoints.glob("*-*.safetensors"):
            if all(file.name != entry["file"] for entry in entries.values()):
                file.unlink()
        remove_leftovers(self.checkpoints)

    def finish(self, summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        # Clients held out may have parts that the others lack, and the server of a network has no client's figures.
        columns = dict.fromkeys(["client", "role", *(key for row in clients for key in row)])
        write_csv(self.path / "clients.csv", columns, clients)
        write_json(self.path / "summary.json", summary)

    def fail(self, failure: Failure | None) -> None:
        """Write down why the run can't come to an end; None where it is tried again."""
        if failure is None:
            (self.path / _FAILED).unlink(missing_ok=True)
        else:
            write_json(self.path / _FAILED, failure._asdict())

    def failure(self) -> Failure | None:
        """Read why the run can't come to an end; None where nothing is known of that."""
        content = _read_json(self.path / _FAILED)
        return None if content is None else Failure(str(content.get("phrase")), str(content.get("message")))

    def clear(self) -> None:
        """Remove what a failed run has written, so that it can be trained from its start."""
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in ("summary.json", "clients.csv", "metrics.jsonl", "config.toml"):
            (self.path / name).unlink(missing_ok=True)
        self.fail(None)

    def config(self) -> Config:
        path = self.check().path / "config.toml"
        with naming(path):
            return Config.build(read_toml(path), preset=False)

    def check(self) -> RunFolder:
        if not self.exists():
            many = any(self.path.glob("*/config.toml"))
            hint = " The folders in it do: name one of them, or see `fedem report`." if many else ""
            raise UserError(f"{self.path} holds no run (no config.toml).{hint}")
        return self

    def metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl; a last line cut short by a kill is left out."""
        lines: list[dict[str, Any]] = []
        with suppress(FileNotFoundError, json.JSONDecodeError):
            for text in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                lines.append(json.loads(text))
        return lines

    def summary(self) -> dict[str, Any] | None:
        """Read summary.json; None when the run is not complete."""
        return _read_json(self.path / "summary.json")

    def save_references(self, records: Sequence[Mapping[str, Any]]) -> None:
        write_json(self.path / "references.json", records)

    def references(self) -> list[dict[str, Any]]:
        """Read what plain predictors score on the run's rows; nothing where nobody asked for it."""
        path = self.path / "references.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def clients(self) -> list[dict[str, str]]:
        path = self.path / "clients.csv"
        if not path.exists():
            raise UserError(f"{self.path} has no clients.csv: the run is not complete.")
        return read_csv(path)

    def load(self) -> tuple[dict[str, State], dict[str, Any]]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = self.checkpoints
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            states: dict[str, State] = {}
            for role, entry in manifest["states"].items():
                tensors: dict[str, Tensor] = load_file(folder / entry["file"])
                states[role] = State(entry["round"], *(tree_sorted(take_prefix(name, tensors)) for name in _TREES))
            return states, manifest["facts"]
        except FileNotFoundError as error:
            raise UserError(f"There is no checkpoint in {folder} (missing: {error.filename}).") from None
        except (OSError, KeyError, TypeError, json.JSONDecodeError, SafetensorError) as error:
            raise UserError(f"The checkpoint in {folder} can't be read ({type(error).__name__}: {error}).") from None

    def baselines(self) -> list[RunFolder]:
        """Runs of other methods on the same data, in folders below."""
        return [RunFolder(path.parent) for path in sorted(self.path.glob("baselines/*/config.toml"))]


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a file; None where there is none, or nothing in it."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8")) or None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}.") from None


def check_here(names: Sequence[str]) -> None:
    """Refuse, for what needs clients' models, a run over a network: of its clients the server keeps nothing."""
    if not names:
        where = "on their nodes, each model in STATE/EXPERIMENT/CLIENT.safetensors, which `fedem export` takes there"
        raise UserError(f"The run was one over a network: its clients' models and samples are {where}.")


def new_folder(base: Path, name: str) -> Path:
    """Return ``base/name``, or ``base/name-2``, ... if that is taken."""
    number = 1
    while (path := base / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return Path(os.path.relpath(path)) if not base.is_absolute() else path
