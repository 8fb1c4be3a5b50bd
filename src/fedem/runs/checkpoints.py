"""The checkpoints of a run: the newest and the one before, each a manifest that names tensor files.

checkpoint.json             what the newest consists of: files, their hashes, and facts beside the tensors
checkpoint-previous.json    the same of the one before
round-000012.safetensors    tensors; both may name a file, such as that of the best state

Every file is written beside its place and moved there at once: first tensors, then the manifest of the one before, the
newest manifest last. So a run killed at any moment leaves a whole checkpoint, and one of them is whole if a file of the
other is damaged later. A manifest holds the hash of each file, and its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedem.core.errors import UserError, counted, notify, reason
from fedem.core.files import digest, file_digest, plain, remove_leftovers, to_json, write_atomically
from fedem.core.schema import FILE_NAME, HASH, Flag, Listed, Maybe, Number, Table, Text, Whole, parse_json
from fedem.core.tensors import write_tensors
from fedem.core.tree import add_prefix, take_prefix, tree_sorted
from fedem.runs.rounds import State

MANIFEST, PREVIOUS = "checkpoint.json", "checkpoint-previous.json"
TENSORS = "*-*.safetensors"
_HASH = "blake2b"  # of a file, and of a manifest itself; those written before have none
_TREES = ("shared", "personal", "memory")
_TRIES = 100  # readings of a manifest whose files are being replaced

Manifest = dict[str, Any]
_ENTRY = Table({"round": Whole(least=0), "file": FILE_NAME}, {_HASH: HASH})
_NODES = Text("[0-9]+", "numbers of nodes")
_FACTS = Table(
    optional={
        "clients": Listed(Text()),
        "data": Text(),
        "best_validation": Maybe(Number()),
        "seconds": Number(least=0),
        "slowed": Number(above=0),
        "stopped_after": Whole(least=0),
        "settled": Flag(),
        "leaves": Table(others=Listed(Whole(least=0))),
        "bytes_per_sample": Whole(least=0),
        "plan": Text(),
        "run": Text(),
        "rollbacks": Listed(Whole(least=0)),
        "owners": Table(others=Text()),
        "watch": Table(
            optional={
                "aside": Table(others=Text(), names=_NODES),
                "strikes": Table(others=Whole(least=0), names=_NODES),
                "scale": Number(least=0),
            }
        ),
        "nodes": Table(others=Text(), names=_NODES),
    }
)
_MANIFEST = Table({"facts": _FACTS, "states": Table({"last": _ENTRY}, others=_ENTRY)}, {_HASH: HASH})


class DamagedError(UserError):
    """A file is missing or is not as it was written."""


@contextmanager
def naming_tensors(place: Path) -> Iterator[None]:
    """Say of the file or folder that tensors were read from whatever they make go wrong: they are of something else."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"The tensors in {place} are not those of its run ({reason(error)}).") from None


class Loaded(NamedTuple):
    """A checkpoint that is whole."""

    states: dict[str, State]  # by role, such as "last" and "best"
    facts: dict[str, Any]


class _Current(NamedTuple):
    content: bytes  # of the manifest
    last: str  # the file of the last state


class Checkpoints:
    """The folder of a run's checkpoints."""

    def __init__(self, path: Path):
        self.path = path
        self._current: _Current | None = None  # the checkpoint that was written or read here last, and is whole
        self._hashes: dict[str, str] = {}  # of the files that were

    def exist(self) -> bool:
        return any((self.path / name).exists() for name in (MANIFEST, PREVIOUS))

    def save(self, states: Mapping[str, State], facts: Mapping[str, Any]) -> None:
        """Write ``states`` by role, each once, such as "last" and "best", and ``facts``; drop what nothing names."""
        self.path.mkdir(parents=True, exist_ok=True)
        before, entries = self._whole(), dict[str, Any]()
        for role, state in states.items():
            # Round by round a state has one value; whatever else has a prefix to its role.
            name = f"{role.rpartition('-')[0] or 'round'}-{state.round:06d}.safetensors"
            # A file that was not written or read here may be half of one, or damaged.
            if name not in self._hashes or not (self.path / name).exists():
                tree = {key: leaf for part in _TREES for key, leaf in add_prefix(part, getattr(state, part)).items()}
                self._hashes[name] = write_tensors(self.path / name, tree, {"round": str(state.round)})
            entries[role] = {"round": state.round, "file": name, _HASH: self._hashes[name]}
        # As it will be read: names that are numbers become texts.
        manifest = json.loads(json.dumps({"facts": plain(dict(facts)), "states": entries}))
        current = _Current(to_json(manifest | {_HASH: _own_hash(manifest)}), entries["last"]["file"])
        # One that has the same last state would be lost with it: what is added to that leaves the one before in place.
        if before is not None and before.last != current.last:
            write_atomically(self.path / PREVIOUS, before.content)
        write_atomically(self.path / MANIFEST, current.content)
        self._current = current
        self.remove_unnamed()

    def remove_unnamed(self) -> list[str]:
        """Remove tensor files that no manifest names, and what a killed process left; returns their names."""
        removed = []
        for file in self.unnamed():
            file.unlink()
            self._hashes.pop(file.name, None)
            removed.append(file.name)
        remove_leftovers(self.path)
        return removed

    def unnamed(self) -> list[Path]:
        """Return tensor files that no manifest names; none where a manifest can't be read, which might name them."""
        named: set[str] = set()
        for name in (MANIFEST, PREVIOUS):
            try:
                named |= {entry["file"] for entry in self.manifest(name)["states"].values()}
            except FileNotFoundError:
                continue
            except DamagedError:
                return []
        return [file for file in sorted(self.path.glob(TENSORS)) if file.name not in named]

    def forget_previous(self) -> None:
        """Have the newest checkpoint stand alone."""
        (self.path / PREVIOUS).unlink(missing_ok=True)

    def load(self) -> Loaded:
        """Read the newest checkpoint or, where that is damaged, the one before, with a note; refuse where both are."""
        loaded, damage = self.find()
        if loaded is None and not damage:
            raise UserError(f"There is no checkpoint in {self.path} (missing: {self.path / MANIFEST}).")
        if loaded is None:
            mend = f"`fedem check` says more; without {self.path} --resume trains from the start"
            raise UserError(f"The checkpoint can't be read: {' '.join(damage)} There is no other; {mend}.")
        if damage:
            done = counted(loaded.states["last"].round, "round")
            notify(f"{' '.join(damage)} The checkpoint before it is used, which is of {done}.")
        return loaded

    def find(self) -> tuple[Loaded | None, list[str]]:
        """Return the newest checkpoint that is whole, if any, and what is wrong with those after it."""
        damage: list[str] = []
        for name in (MANIFEST, PREVIOUS):
            try:
                return self._load(name), damage
            except DamagedError as error:
                damage.append(str(error))
            except FileNotFoundError:
                if name == MANIFEST and (self.path / PREVIOUS).exists():
                    damage.append(f"{self.path / name} is missing.")
        return None, damage

    def _whole(self) -> _Current | None:
        """Return the newest checkpoint that is whole."""
        if self._current is None and self.exist():
            self.find()
        return self._current

    def _load(self, name: str) -> Loaded:
        for _ in range(_TRIES):
            content = self._content(name)
            try:
                manifest = self._parse(name, content)
                files = {entry["file"]: entry.get(_HASH) for entry in manifest["states"].values()}
                read = {file: self._read(file, wanted) for file, wanted in files.items()}
            except DamagedError:
                # Whoever trains meanwhile replaces manifests before it removes what they name.
                if self._content(name) == content:
                    raise
                continue
            states: dict[str, State] = {}
            for role, entry in manifest["states"].items():
                tensors, _ = read[entry["file"]]
                states[role] = State(entry["round"], *(tree_sorted(take_prefix(part, tensors)) for part in _TREES))
            self._current = _Current(content, manifest["states"]["last"]["file"])
            self._hashes = {file: found for file, (_, found) in read.items()}
            return Loaded(states, manifest["facts"])
        raise UserError(f"{self.path / name} is replaced faster than its files can be read; try again.")

    def newest(self) -> Manifest | None:
        """Read the newest manifest that can be read, and not its files; None where there is none."""
        for name in (MANIFEST, PREVIOUS):
            with suppress(FileNotFoundError, DamagedError):
                return self.manifest(name)
        return None

    def manifest(self, name: str) -> Manifest:
        """Read a manifest, and not its files; one that is not there is a FileNotFoundError."""
        return self._parse(name, self._content(name))

    def _content(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:  # a folder in its place, or a disk that fails
            raise DamagedError(f"{self.path / name} can't be read: {error.strerror}.") from None

    def _parse(self, name: str, content: bytes) -> Manifest:
        path = self.path / name
        try:
            manifest: Manifest = parse_json(content, path, _MANIFEST)
        except UserError as error:
            raise DamagedError(str(error)) from None
        if manifest.get(_HASH, "") not in ("", _own_hash(manifest)):
            raise DamagedError(f"{path} is damaged: its content is not what its hash says.")
        return manifest

    def _read(self, name: str, wanted: str | None) -> tuple[dict[str, Tensor], str]:
        """Read the tensors of a file, whose hash is ``wanted`` if it is known; returns them and the hash."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / name
        try:
            with path.open("rb") as file:
                found = file_digest(file)
                if wanted is not None and found != wanted:
                    raise DamagedError(f"{path} is damaged: its content is not what its hash in the manifest says.")
                tensors = load_file(path)
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    raise DamagedError(f"{path} was replaced while it was read.")
                return tensors, found
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing.") from None
        except (OSError, SafetensorError) as error:
            raise DamagedError(f"{path} can't be read ({reason(error)}).") from None

    def problems(self, name: str) -> dict[Path, str]:
        """Return what is wrong with the files of a checkpoint, by file."""
        path = self.path / name
        try:
            manifest = self.manifest(name)
        except FileNotFoundError:
            return {path: f"{path} is missing."}
        except DamagedError as error:
            return {path: str(error)}
        found: dict[Path, str] = {}
        for file, wanted in {entry["file"]: entry.get(_HASH) for entry in manifest["states"].values()}.items():
            try:
                self._read(file, wanted)
            except DamagedError as error:
                found[self.path / file] = str(error)
        return found

    def step_back(self) -> None:
        """Have the checkpoint before be the newest."""
        write_atomically(self.path / MANIFEST, (self.path / PREVIOUS).read_bytes())


def _own_hash(manifest: Manifest) -> str:
    content = {key: value for key, value in manifest.items() if key != _HASH}
    return digest(json.dumps(content, sort_keys=True).encode())
