"""What a search is: a run, the values to try of some of its settings, and all that can be checked before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedem.config import Config
from fedem.data.base import Dataset
from fedem.errors import UserError
from fedem.federation import Federation
from fedem.job import Job
from fedem.records import Record
from fedem.samples import Samples
from fedem.sections import Layer, Sections, Values, overlay
from fedem.tuning.grids import Grids, check_sampler, layers_of


@dataclass(frozen=True)
class Search:
    """What is searched.

    Attributes:
        layers: the run whose settings are tried, the method's name among them.
        grids: the values to try of each setting, by ``section.key``.
        sampler: one of :data:`fedem.tuning.grids.SAMPLERS`.
        num_trials: how many; None where the sampler is "grid", which tries all combinations.
        seeds: a trial is one run for each.

    """

    layers: tuple[Layer, ...]
    grids: Grids
    sampler: str = "grid"
    num_trials: int | None = None
    seeds: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """How many trials there are to be."""
        combinations = math.prod(len(values) for values in self.grids.values())
        return combinations if self.num_trials is None else self.num_trials

    @property
    def base(self) -> Config:
        """The run whose settings are tried."""
        return Config.build(*self.layers)

    def config(self, values: Mapping[str, Any], seed: int) -> Config:
        """Return the run that has these values."""
        return Config.build(*self.layers, *layers_of(values), {"run": {"seed": seed}})

    def chosen_layer(self, values: Mapping[str, Any]) -> Sections:
        """Return what the user asked for, and the values chosen: what is to be written over the shipped settings."""
        return {name: section for name, section in overlay(*self.layers, *layers_of(values)).items() if section}

    def check(self) -> None:
        """Refuse what can't be searched, before any data are made."""
        check_sampler(self.sampler)
        given = overlay(*self.layers)
        if not self.grids:
            raise UserError("There is no setting to search; allowed: one or several, each as --grid section.key=...")
        for key, values in self.grids.items():
            section, _, name = key.partition(".")
            if not values:
                raise UserError(f"The grid of {key} is empty; allowed: one value or several.")
            if name in given.get(section, {}):
                raise UserError(f"{key} is both set and searched; allowed: one of --set and --grid.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            listed = ", ".join(map(str, self.seeds)) or "none"
            raise UserError(f"The seeds are {listed}; allowed: one or several, each once.")
        if self.sampler == "grid" and self.num_trials is not None:
            raise UserError(
                f"--trials is {self.num_trials}, but a grid is tried as a whole; allowed: with --sampler random or tpe."
            )
        if self.sampler != "grid" and (self.num_trials is None or self.num_trials < 1):
            raise UserError(f"--trials is {self.num_trials}; allowed: at least 1.")
        for combination in self._each_value():
            self.config(combination, self.seeds[0])

    def prepare(self) -> tuple[dict[int, Dataset], str]:
        """Make every seed's data, without their test part, and check the runs on them; returns them and the metric."""
        data = {seed: without_test(self.config(self._first, seed).make_data()) for seed in self.seeds}
        metric = ""
        for seed, dataset in data.items():
            job = Job.prepare(self.config(self._first, seed), dataset, None)
            metric = job.parts.model.loss.metric
            if not len(job.federation.validation):
                raise UserError(
                    f"The data of seed {seed} have no validation samples to choose by; allowed: a share or number of "
                    "them above 0 (data.validation, data.num_validation)."
                )
        for values in self._each_value():
            # What is made at a run's start, such as a graph, was tried above.
            Job.prepare(self.config(values, self.seeds[0]), data[self.seeds[0]], None, fresh=False)
        return data, metric

    def record(self) -> Record:
        """Name what decides which trials there are."""
        grids = {key: list(values) for key, values in self.grids.items()}
        return {"grids": grids, "sampler": self.sampler, "seeds": list(self.seeds)}

    @property
    def _first(self) -> Values:
        return {key: values[0] for key, values in self.grids.items()}

    def _each_value(self) -> Iterator[Values]:
        """Yield every value once, with the others' first: what a setting allows has no gaps, so ranges are fine too."""
        yield self._first
        for key, values in self.grids.items():
            yield from (self._first | {key: value} for value in values[1:])


def without_test(dataset: Dataset) -> Dataset:
    """Return the data without their test part, so that nothing can be chosen by it."""

    def dropped(federation: Federation) -> Federation:
        pool = federation.train.pool
        nothing = Samples.of(pool.inputs[:0], pool.targets[:0], torch.zeros_like(federation.test.offsets))
        unseen = None if federation.unseen is None else dropped(federation.unseen)
        return replace(federation, test=nothing, unseen=unseen)

    return dataset._replace(federation=dropped(dataset.federation))
