"""What a client keeps between messages: one file, replaced whole, that never leaves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from fedem.core.errors import UserError, naming, reason
from fedem.core.schema import Flag, Listed, Table, Text, Whole, parse_json
from fedem.core.tensors import write_tensors
from fedem.core.tree import Tree, add_prefix, take_prefix
from fedem.deploy.plan import SHAPES, Plan
from fedem.methods.wrappers.compression import split_residual
from fedem.runs.checkpoints import naming_tensors
from fedem.runs.result import PersonalModel

_TREES = ("personal", "shared")
_COUNTS = {"is_first": False, "joined": 0, "rollbacks": 0}  # what files of before these came say nothing of
_CONTENT = Table(
    {
        "round": Whole(least=0),
        "trees": Listed(Text()),
        "run": Text(),
        "plan": Table({"config": Table(others=Table()), "shapes": SHAPES}),
    },
    {
        "client": Text(),
        "is_first": Flag(),
        "joined": Whole(least=0),
        "rollbacks": Whole(least=0),
        "earlier": Listed(Whole(least=0)),
    },
)
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
_LONGEST = 120  # characters of a name that are written out: systems allow 255 bytes


class Earlier(NamedTuple):
    """A client's personal tree as it was."""

    round: int  # rounds of the run done when it was; of the first one, when the client first took part
    personal: Tree


@dataclass(frozen=True, eq=False)
class Kept:
    """What a client has learnt, and what it was learnt under.

    Attributes:
        plan: what all agreed on.
        round: rounds of the run done when ``personal`` was.
        personal: v_t.
        shared: u as it was received last of all; None while the run goes on, since every message brings it.
        earlier: v_t before the client's last round and those before it, newest first. A server that repeats a round
            after a crash gets the same answer, and one that is rolled back takes the client back with it.
        run: which run of the experiment it is of, as its server, or its peers, call it.
        client: its name; empty in files that do not say.
        is_first: whether ``personal`` is still as drawn at first, since the client has taken part in no round.
        joined: rounds of the run done when the client first took part.
        rollbacks: how many rollbacks of its server the client has followed.
    """

    plan: Plan
    round: int
    personal: Tree
    shared: Tree | None = None
    earlier: Sequence[Earlier] = ()
    run: str = ""
    client: str = ""
    is_first: bool = False
    joined: int = 0
    rollbacks: int = 0

    @property
    def before(self) -> Tree | None:
        """v_t before the client's last round, or before it was made into the predictor; None where nothing was."""
        return self.earlier[0].personal if self.earlier else None

    def at(self, round_index: int) -> Kept | None:
        """Return what the client had kept when the run had that many rounds done; None where it had not taken part."""
        if self.round <= round_index:
            return self
        for position, entry in enumerate(self.earlier):
            if entry.round <= round_index:
                rest = self.earlier[position + 1 :]
                return replace(self, round=entry.round, personal=entry.personal, shared=None, earlier=rest)
        if round_index < self.joined:
            return None
        kept = [self.round, *(entry.round for entry in self.earlier)]
        raise UserError(f"What is kept is of rounds {', '.join(map(str, kept))}, and none of round {round_index}")

    def model(self, source: Path) -> PersonalModel:
        """Return the client's predictor, on the CPU; ``source`` is the file that this was read from."""
        if self.shared is None:
            raise UserError(f"{source} has no components: they come to the client when its run is over.")
        if self.is_first:
            raise UserError(f"{source} has nothing of its client yet, which has taken part in no round so far.")
        # It may have been trained on a device that is not here.
        config = self.plan.config.replace("run", device="cpu")
        # A server asks for the model that predicts, once the run is over, and then there is one before it.
        if config.run.fine_tune_epochs and self.before is None:
            found = (
                f"run.fine_tune_epochs is {config.run.fine_tune_epochs}: clients fine-tune on their samples when they"
            )
            why = f"predict, and {source} is of a peer, which keeps the model before that"
            raise UserError(f"{found} {why}; allowed for a peer's file: 0.")
        plan = Plan(config, self.plan.format)
        with naming(source), naming_tensors(source):
            mixture = plan.algorithm.predictor(self.shared, split_residual(self.personal)[0])
        plan.check_mixture(mixture, source)
        return PersonalModel(plan.model, mixture, plan.format)

    def save(self, path: Path) -> None:
        """Replace the file, which nobody else on the machine may read."""
        there = {name: tree for name in _TREES if (tree := getattr(self, name)) is not None}
        there |= {f"earlier-{number}": entry.personal for number, entry in enumerate(self.earlier)}
        tensors = {key: leaf for name, tree in there.items() for key, leaf in add_prefix(name, tree).items()}
        content = {"round": self.round, "trees": list(there), "run": self.run, "client": self.client}
        content |= {"plan": self.plan.to_json(), "is_first": self.is_first, "joined": self.joined}
        content |= {"earlier": [entry.round for entry in self.earlier], "rollbacks": self.rollbacks}
        for folder in (path.parent.parent, path.parent):  # an experiment's, in that of all
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_tensors(path, tensors, {"kept": json.dumps(content)}, private=True)

    @classmethod
    def load(cls, path: Path) -> Kept:
        """Read a file that :meth:`save` wrote."""
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file

        try:
            with safe_open(path, framework="pt") as file:
                content = parse_json((file.metadata() or {}).get("kept", ""), f"{path} (its metadata)", _CONTENT)
            tensors = load_file(path)
            trees = {name: take_prefix(name, tensors) for name in content["trees"]}
            plan, client = Plan.from_json(content["plan"]), content.get("client", "")
            done, shared, rest = content["round"], trees.get("shared"), content.get("earlier", [])
            for name in ("personal", *(f"earlier-{number}" for number in range(len(rest)))):
                if name not in trees:
                    raise UserError(f"there is no tree {name!r}")
            earlier = [Earlier(round_index, trees[f"earlier-{number}"]) for number, round_index in enumerate(rest)]
            if "before" in trees:  # files of before there were several
                earlier.append(Earlier(done if shared else done - 1, trees["before"]))
            counts = {key: content.get(key, default) for key, default in _COUNTS.items()}
            return cls(plan, done, trees["personal"], shared, tuple(earlier), content["run"], client, **counts)
        except FileNotFoundError:
            raise UserError(f"There is no kept file {path}.") from None
        except (OSError, ValueError, SafetensorError) as error:  # a user's error is one of values, too
            why = str(error) if isinstance(error, UserError) else reason(error)
            problem = f"The kept file {path} can't be read ({why})"
            raise UserError(f"{problem}; without it the client starts anew.") from None


def kept_path(folder: Path, experiment: str, client: str) -> Path:
    """Return where a client keeps what it learns in an experiment: ``folder/EXPERIMENT/CLIENT.safetensors``."""
    return folder / _safe("experiment", experiment) / f"{_safe('client', client)}.safetensors"


def _safe(what: str, name: str) -> str:
    """Return a name that any file system takes and that no other name gets, though capitals may count for nothing."""
    if not name:
        raise UserError(f"The name of the {what} is empty; allowed: at least one character.")
    content = name.encode(errors="surrogatepass")
    escaped = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02x}" for byte in content)
    if len(escaped) <= _LONGEST:
        return escaped
    return f"{escaped[:_LONGEST]}~{blake2b(content, digest_size=16).hexdigest()}"
