"""How alike the components of a mixture are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedem.checkpoint import MANIFEST
from fedem.report.gathered import Gathered
from fedem.report.pictures.canvas import Picture, panels
from fedem.report.reading import Numbers, Run
from fedem.result import Result
from fedem.sections import GIVEN
from fedem.tree import Tree

# A checkpoint holds every client's models where there is no server: reading much more would take longer than the page.
_MOST_BYTES = 200_000_000
_NUMBERED = 10


def similarity(data: Gathered) -> Picture | None:
    """Draw the cosines between components' trained parameters; of each mixture's first seed."""
    found = {method: cosines for method, runs in data.runs.items() if (cosines := cosines_of(runs[0])) is not None}
    if not found:
        return None
    figure, axes = panels(len(found), columns=3, height=2.6)
    for place, (method, cosines) in zip(axes, found.items(), strict=True):
        image = place.imshow(cosines, vmin=-1, vmax=1, cmap="PuOr_r", interpolation="nearest")
        place.grid(visible=False)
        if len(cosines) <= _NUMBERED:
            place.set(xticks=range(len(cosines)), yticks=range(len(cosines)))
            for row, values in enumerate(cosines):
                for column, value in enumerate(values):
                    # The middle of the colour map is white, its ends are dark, in light and dark pages alike.
                    shade = "white" if abs(value) > 0.6 else "black"
                    place.text(column, row, f"{value:.2f}", ha="center", va="center", color=shade)
        place.set(title=data.titles[method], xlabel="component", ylabel="component")
    figure.colorbar(image, ax=axes, label="cosine", shrink=0.8)
    method, cosines = next(iter(found.items()))
    apart = cosines[~np.eye(len(cosines), dtype=bool)]
    sentence = f"The components of {data.name(method)} have cosines from {apart.min():.2f} to {apart.max():.2f}."
    if recovery := data.runs[method][0].summary.get("recovery"):
        share = 100 * recovery["cluster_accuracy"]
        sentence += f" They give {share:.0f} % of the clients the component that is truly their largest."
    return Picture("Similarity of the components", sentence, figure)


def cosines_of(run: Run) -> Numbers | None:
    """Return the cosines between a mixture's components, ``[M, M]``; without a server, those that one client has.

    None for methods without components, models that only Python can make, and checkpoints that were removed or that
    take long to read.
    """
    if run.config.values("method").get("num_components", 1) < 2 or run.config.name("model") == GIVEN:
        return None
    if not (run.folder.checkpoints / MANIFEST).exists():
        return None
    if sum(file.stat().st_size for file in run.folder.checkpoints.glob("*.safetensors")) > _MOST_BYTES:
        return None
    result = Result.load(run.folder.path, device="cpu")
    # A server that was deployed knows no client: a newcomer without samples gets the same components.
    personal = result.client(result.names[0]) if result.names else result.personalize([], [])
    return cosines(personal.mixture.components, result.parts.model.trainable)


def cosines(components: Tree, trained: frozenset[str]) -> Numbers:
    """Return the cosines between the components' flattened trained leaves, ``[M, ...] -> [M, M]``."""
    leaves: list[Tensor] = [leaf.flatten(1).double() for name, leaf in components.items() if name in trained]
    directions = torch.nn.functional.normalize(torch.cat(leaves, 1), dim=1)
    return np.asarray((directions @ directions.T).clamp(-1, 1).numpy(), dtype=np.float64)
