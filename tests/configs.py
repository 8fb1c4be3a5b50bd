"""Configurations without a preset, and any that are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fedem.core.settings import Settings
from fedem.data import DATA
from fedem.data.partitions import PARTITIONS
from fedem.graphs import GRAPHS
from fedem.methods import METHODS
from fedem.methods.wrappers.defences import DEFENCES
from fedem.methods.wrappers.server_steps import SERVER_RULES
from fedem.models import MODELS
from fedem.models.losses import LOSSES
from fedem.runs.attacks import ATTACKS
from fedem.runs.config import Config
from fedem.solvers import SOLVERS
from fedem.solvers.schedules import SCHEDULES

ONE_KIND: dict[str, Mapping[str, type[Settings]]] = {
    "data": DATA,
    "partition": PARTITIONS,
    "graph": GRAPHS,
    "server": SERVER_RULES,
    "attack": ATTACKS,
    "defence": DEFENCES,
    "model": MODELS,
    "loss": LOSSES,
    "solver": SOLVERS,
    "schedule": SCHEDULES,
}
NAMED: dict[str, Mapping[str, tuple[type[Settings], ...]]] = {
    "method": {name: (row.algorithm, row.mixer) for name, row in METHODS.items()},
    **{section: {name: (kind,) for name, kind in table.items()} for section, table in ONE_KIND.items()},
}
SECTIONS = {"run", "batching", "compression", *NAMED}


def build(*layers: Mapping[str, Mapping[str, Any]]) -> Config:
    """Without a preset, so that nothing depends on the values shipped."""
    return Config.build(*layers, preset=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
layers = st.fixed_dictionaries(
    {
        "run": st.fixed_dictionaries(
            {},
            optional={
                "rounds": st.integers(1, 2**62),
                "seed": st.integers(0, 2**62),
                "clients_per_round": positive,
                "unseen": st.floats(0, 1, exclude_max=True),
                "device": st.text(),
            },
        ),
        "batching": st.fixed_dictionaries({}, optional={"batch_size": st.integers(0, 10_000)}),
        "data": st.one_of(
            st.fixed_dictionaries(
                {"name": st.just("file"), "path": st.text()},
                optional={"target_column": st.text(), "test": st.floats(0, 1, exclude_max=True)},
            ),
            st.fixed_dictionaries({"name": st.just("synthetic"), "clustered": st.booleans(), "size_mean": finite}),
        ),
        "partition": st.fixed_dictionaries(
            {"name": st.sampled_from(sorted(PARTITIONS)), "share": st.floats(0, 1, exclude_min=True)}
        ),
        "method": st.fixed_dictionaries({"name": st.sampled_from(sorted(METHODS))}),
        "loss": st.fixed_dictionaries({"name": st.sampled_from(["auto", *LOSSES])}),
        "solver": st.fixed_dictionaries(
            {"name": st.sampled_from(sorted(SOLVERS)), "weight_decay": st.floats(0, 1e300)}
        ),
        "schedule": st.fixed_dictionaries({"name": st.sampled_from(sorted(SCHEDULES)), "learning_rate": positive}),
    }
)
