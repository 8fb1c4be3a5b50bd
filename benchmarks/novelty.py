"""``python -m benchmarks.novelty``: what is said of newcomers' images that are unlike those of training.

EMNIST's clients train an MLP; of those that were held out, the images are shown as they are, turned, as negatives, and
replaced by noise, each time without labels. Prepare EMNIST first: ``fedem data prepare emnist``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedem.runs.config import Config
from fedem.runs.trainer import run
from fedem.runs.unlabelled import NOVEL


def _noise(images: Tensor) -> Tensor:
    """Bytes drawn evenly, in the place of each pixel."""
    return torch.randint(0, 256, images.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


SHOWN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda images: images,
    "turned by 90 degrees": lambda images: images.rot90(1, (2, 3)),
    "negatives": lambda images: 255 - images,
    "noise": _noise,
}


def measure(share: float, clients: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """Train, and return the novelty of every held-out client, by how its images are shown."""
    config = Config.build(
        {
            "data": {"name": "emnist"},
            "partition": {"name": "uniform", "num_clients": clients, "share": share},
            "method": {"name": "fedem", "num_components": 2},
            "model": {"name": "mlp", "hidden": 64},
            "batching": {"batch_size": 16},
            "schedule": {"learning_rate": 0.1},
            "run": {"rounds": rounds, "seed": seed, "unseen": 0.2, "unlabelled": True, "evaluate_every": 0},
        }
    )
    dataset = config.make_data()
    result = run(config, dataset)
    unseen = dataset.federation.hold_out(config.run.unseen, config.run.seed).unseen
    if unseen is None:
        raise SystemExit("No client is held out: ask for more clients.")
    images = [unseen.train.client(position)[0] for position in range(unseen.num_clients)]

    def novelty(inputs: Tensor) -> float:
        seen = result.personalize(inputs).seen
        assert seen is not None  # there were no labels
        return seen.novelty

    return {name: [novelty(show(own)) for own in images] for name, show in SHOWN.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.novelty", description=__doc__)
    parser.add_argument("--share", type=float, default=0.2, help="of EMNIST's images")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = measure(**vars(options))
    print(
        "| images of held-out clients | clients | least novelty | greatest | called unlike anything seen in training |"
    )
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, scores in found.items():
        called = sum(score < NOVEL for score in scores)
        print(f"| {name} | {len(scores)} | {min(scores):.2f} | {max(scores):.2f} | {called} |")


if __name__ == "__main__":
    main()
