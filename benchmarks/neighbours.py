"""``python -m benchmarks.neighbours``: how much of everybody's curve goes into the weight of a client's neighbours.

A client's lambda_t minimises the loss on its own validation samples plus that of some pseudo-samples, which lose what
all clients lose in the mean. Here lambda_t is chosen on four fifths of every client's validation samples and judged on
the others, five times, for several numbers of pseudo-samples. Test samples are left out before anything is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.arguments import add_names
from benchmarks.tables import TABLES
from fedem.data.dataset import Dataset
from fedem.data.files import from_frame
from fedem.data.synthetic import Synthetic
from fedem.methods import METHODS
from fedem.runs.config import GIVEN, Config
from fedem.runs.neighbours import Neighbours, choose_weights, losses_by_weight, scale_of, with_votes
from fedem.runs.outputs import features_of
from fedem.runs.trainer import Progress, Trainer

STRENGTHS = (0.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 1e9)
FOLDS = 5


def _table(name: str) -> Dataset:
    return from_frame(TABLES[name](0), target="y", client="client")


DATA: dict[str, tuple[Callable[[], Dataset], dict[str, object]]] = {
    "digits": (lambda: _table("digits"), {"name": "mlp", "hidden": 64, "layers": 1}),
    "sensors": (lambda: _table("sensors"), {"name": "linear"}),
    "synthetic": (lambda: Synthetic(num_validation=18, num_test=0).make(0), {"name": "linear"}),
}
"""what is trained on, and the model"""


def validation_losses(data: str, method: str, number: int, rounds: int) -> list[Tensor]:
    """Train, and return the losses of each client's validation samples by lambda, ``[L, n]``."""
    make, model = DATA[data]
    dataset = make()
    dataset = dataset._replace(federation=dataset.federation.without_test())
    run = {"rounds": rounds, "evaluate_every": 0, "device": "cpu"}
    layers: dict[str, Mapping[str, object]] = {"method": {"name": method}, "run": run, "model": model}
    trainer = Trainer.prepare(Config.build({"data": {"name": GIVEN}}, layers), dataset)
    progress = Progress(trainer.training.init())
    while not trainer.is_over(progress):
        trainer.advance(progress)
    found, federation, own = trainer.predictors(progress.state), trainer.federation, trainer.recipe.model
    losses = []
    for position in range(federation.num_clients):
        inputs, targets = federation.train.client(position)
        asked, wanted = federation.validation.client(position)
        if len(targets) and len(wanted):
            mixture = found.of(trainer.recipe.algorithm, position)
            features = features_of(own, mixture, inputs)
            near = Neighbours(features, targets, scale_of(features), 1.0, number)
            losses.append(losses_by_weight(own, *with_votes(own, mixture, asked, near), wanted))
    return losses


def cross_validate(losses: Sequence[Tensor], pseudo_samples: float) -> float:
    """Return the mean loss on samples that took no part in the choice of lambda_t."""
    lost, count = 0.0, 0
    for fold in range(FOLDS):
        held = [torch.arange(each.shape[1]) % FOLDS == fold for each in losses]
        sums = torch.stack([each[:, ~out].sum(1) for each, out in zip(losses, held, strict=True)])
        curve = sums.sum(0) / sum(int((~out).sum()) for out in held)
        chosen = (10 * choose_weights(sums, curve, pseudo_samples)).round().long().tolist()
        for each, out, place in zip(losses, held, chosen, strict=True):
            lost, count = lost + float(each[place, out].sum()), count + int(out.sum())
    return lost / count


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line in Markdown for each data set and method."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__)
    add_names(parser, "--data", "data set", DATA)
    add_names(parser, "--methods", "method", METHODS, "fedavg,fedem,fedavg+,local")
    parser.add_argument("--neighbours", type=int, default=10, help="k")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args(arguments)
    titles = ["data", "method", "model alone", *(f"{strength:g}" for strength in STRENGTHS)]
    print(f"| {' | '.join(titles)} |\n| --- | --- |{' ---: |' * (len(titles) - 2)}")
    for data in options.data:
        for method in options.methods:
            losses = validation_losses(data, method, options.neighbours, options.rounds)
            alone = float(torch.cat([each[0] for each in losses]).mean())
            figures = [alone, *(cross_validate(losses, strength) for strength in STRENGTHS)]
            print(f"| {data} | {method} | {' | '.join(f'{figure:.4f}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    main()
