"""What a client keeps between messages: one file, replaced whole, that never leaves it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from fedem.core.errors import UserError
from fedem.core.files import write_atomically
from fedem.core.schema import Flag, Listed, Table, Text, Whole, parse_json
from fedem.core.tree import Tree, add_prefix, take_prefix
from fedem.deploy.plan import SHAPES, Plan

_TREES = ("personal", "before", "shared")
_CONTENT = Table(
    {
        "round": Whole(least=0),
        "trees": Listed(Text(choices=_TREES)),
        "run": Text(),
        "plan": Table({"config": Table(others=Table()), "shapes": SHAPES}),
    },
    {"client": Text(), "is_first": Flag()},
)
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
_LONGEST = 120  # characters of a name that are written out: systems allow 255 bytes


@dataclass(frozen=True, eq=False)
class Kept:
    """What a client has learnt, and what it was learnt under.

    Attributes:
        plan: what all agreed on.
        round: rounds of the run done when ``personal`` was.
        personal: v_t.
        shared: u as it was received last of all; None while the run goes on, since every message brings it.
        before: v_t before the client's last round, so that a server that repeats it after a crash gets the same answer.
        run: which run of the experiment it is of, as its server, or its peers, call it.
        client: its name; empty in files that do not say.
        is_first: whether ``personal`` is still as drawn at first, since the client has taken part in no round.
    """

    plan: Plan
    round: int
    personal: Tree
    shared: Tree | None = None
    before: Tree | None = None
    run: str = ""
    client: str = ""
    is_first: bool = False

    def save(self, path: Path) -> None:
        """Replace the file, which nobody else on the machine may read."""
        from safetensors.torch import save

        there = {name: tree for name in _TREES if (tree := getattr(self, name)) is not None}
        tensors = {
            # Copies: trees may share leaves, which the format does not take.
            key: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tree in there.items()
            for key, leaf in add_prefix(name, tree).items()
        }
        content = {"round": self.round, "trees": list(there), "run": self.run, "client": self.client}
        content |= {"plan": self.plan.to_json(), "is_first": self.is_first}
        for folder in (path.parent.parent, path.parent):  # an experiment's, in that of all
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, save(tensors, metadata={"kept": json.dumps(content)}), private=True)

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
            first = content.get("is_first", False)
            return cls(plan, content["round"], **trees, run=content["run"], client=client, is_first=first)
        except FileNotFoundError:
            raise UserError(f"There is no kept file {path}.") from None
        except (OSError, ValueError, SafetensorError) as error:  # a user's error is one of values, too
            problem = f"The kept file {path} can't be read ({error})"
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
