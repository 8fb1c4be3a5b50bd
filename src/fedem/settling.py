"""What must be settled between a configuration and its data before a run starts."""

from __future__ import annotations

import torch
from torch import Tensor

from fedem.config import Config
from fedem.data.base import Dataset
from fedem.engines import Batching
from fedem.errors import UserError
from fedem.federation import PARTS, Federation
from fedem.models.base import Model
from fedem.models.losses import LOSSES, guess_loss


def check_encoding(config: Config, dataset: Dataset) -> None:
    """Refuse to hold out clients that a table's encoding was fitted on."""
    asked, fitted = (config.run.unseen, config.run.seed), (dataset.unseen, dataset.seed)
    if dataset.encoding is not None and config.run.unseen and asked != fitted:
        raise UserError(
            f"run.unseen is {asked[0]} and run.seed {asked[1]}, but the table was encoded for {fitted[0]} and "
            f"{fitted[1]}, so by clients that would be held out; allowed: the same as when the table was read "
            "(from_frame(..., unseen=, seed=))."
        )


def settle_partition(config: Config, found: str) -> Config:
    """Write down what the partition came to, so that a run with this config.toml is refused on any other."""
    known = config.run.partition_hash
    if known and known != found:
        raise UserError(
            f"run.partition_hash is {known!r}, but the clients got other samples ({found or 'no partition'}); "
            "allowed: the same data and partition, or an empty run.partition_hash."
        )
    return config.replace("run", partition_hash=found)


def settle_loss(config: Config, targets: Tensor) -> Config:
    """Replace loss "auto" by the one that fits the targets, so that config.toml says what was done."""
    if config.loss is not None:
        return config
    kind = type(guess_loss(targets))
    return config.replace("loss", name=next(name for name, cls in LOSSES.items() if cls is kind))


def check_batches(model: Model, batching: Batching, federation: Federation) -> None:
    """Refuse batches of one sample where layers normalise over the batch."""
    if not model.normalises_batches:
        return
    sizes = federation.train.sizes
    lonely = (sizes % batching.widths(sizes) == 1) | (batching.widths(sizes) == 1)
    if bool(lonely.any()):
        name = federation.names[int(lonely.nonzero()[0])]
        raise UserError(
            f"Client {name!r} would train on a batch of one sample, which batch normalisation can't take; "
            "another batching.batch_size is needed, or a model without it."
        )


def all_targets(federation: Federation) -> Tensor:
    """Return the targets of all parts, clients held out included."""
    groups = [federation] + ([federation.unseen] if federation.unseen else [])
    return torch.cat([group.part(part).targets for group in groups for part in PARTS])
