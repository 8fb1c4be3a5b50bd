"""What whoever starts a deployed run may set, and what each node sets for itself; keys are written-so or written_so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from fedem.errors import UserError
from fedem.settings import Settings, complete

_KEYWORDS = {"continue": "continued"}
"""keys that Python has no names for"""
_EXPERIMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class _Flat(Settings):
    """Settings in one flat table."""

    title: ClassVar[str]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Check the values that Flower hands over."""
        plain = {key.replace("-", "_"): value for key, value in values.items()}
        return cls(**complete(cls.title, {_KEYWORDS.get(key, key): value for key, value in plain.items()}, cls))


@dataclass(frozen=True)
class RunConfig(_Flat):
    """What whoever starts a run may set, for the server and, in a simulation, for all clients."""

    title: ClassVar[str] = "run config"

    experiment: str = "fedem"
    """what clients keep goes by this name, so a new run needs another one"""
    folder: str = "runs"
    """where the server writes the run, in a folder called like the experiment"""
    rounds: int = field(default=0, metadata={"min": 0})
    """0: as the plan says"""
    min_clients: int = field(default=2, metadata={"min": 1})
    """connected before a round starts, and good answers that it needs"""
    wait: float = field(default=600.0, metadata={"above": 0})
    """seconds that the server waits for them"""
    timeout: float = field(default=600.0, metadata={"above": 0})
    """seconds that clients have to answer"""
    continued: bool = False
    """"continue": go on after the last complete round"""
    data: str = ""
    """for Flower's simulation: a file of all clients"""
    state: str = ""
    """... and a folder for what they keep"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _EXPERIMENT.fullmatch(self.experiment):
            raise UserError(
                f"The run config has experiment {self.experiment!r}; allowed: letters, digits, '-', '_' and '.'."
            )


@dataclass(frozen=True)
class NodeConfig(_Flat):
    """What a node sets for itself."""

    title: ClassVar[str] = "node config"

    data: str = ""
    """a file, or a folder of files, with the client's samples"""
    client: str = ""
    """its name; may be left out where the data name one client alone"""
    state: str = ""
    """a folder for what the client keeps"""
    device: str = ""
    """auto, cpu, cuda, ...; as the plan says when left out"""
    partition_id: int = field(default=-1, metadata={"min": -1})
    num_partitions: int = field(default=0, metadata={"min": 0})

    def places(self, run: RunConfig) -> tuple[Path, Path]:
        """Return where the data are and where the state goes; in a simulation the run says so."""
        simulated = self.partition_id >= 0
        found = []
        for key in ("data", "state"):
            value = getattr(self, key) or (getattr(run, key) if simulated else "")
            if not value:
                raise UserError(
                    f"The node config has no {key!r}; allowed: a path"
                    + (", there or in the run config of a simulation." if simulated else ".")
                )
            found.append(Path(value))
        return found[0], found[1]
