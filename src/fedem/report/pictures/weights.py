"""Mixtures: clients' weights, how mixed clients are, how alike components. Shapes: T clients, M components."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import entr

from fedem.core.tree import Tree
from fedem.models.base import num_components
from fedem.report.pictures.canvas import COLOURS, INK, MOST_DOTS, Picture, dots, legend, outline, panels, thinned
from fedem.report.runs import Gathered, Numbers, Run
from fedem.runs.config import GIVEN
from fedem.runs.result import Result

_BINS, _NUMBERED, _SETTLED = 25, 10, 0.9
_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(3) / 2]])  # of an equilateral triangle of side one
# A checkpoint holds every client's models where there is no server: reading much more would take longer than the page.
_MOST_BYTES = 200_000_000


def heat_map(data: Gathered) -> Picture | None:
    """Draw every client's weights, clients sorted by their largest component; of each mixture's first seed."""
    if not (found := _first(data)):
        return None
    figure, axes = panels(len(found), columns=1, height=1.9)
    for place, (method, weights) in zip(axes, found.items(), strict=True):
        extent = (0, len(weights), weights.shape[1] - 0.5, -0.5)
        # An image, not a patch per client: its size in a page does not grow with the federation.
        image = place.imshow(weights[by_dominant(weights)].T, vmin=0, vmax=1, aspect="auto", extent=extent)
        place.grid(visible=False)
        place.set(title=_panel(data, method), xlabel="clients, sorted by dominant component", ylabel="component")
        place.set_yticks(range(weights.shape[1]))
    figure.colorbar(image, ax=axes, label="mixture weight", aspect=30)
    method, weights = next(iter(found.items()))
    shares = 100 * np.bincount(weights.argmax(1), minlength=weights.shape[1]) / len(weights)
    largest = f"each component is the largest for {shares.min():.0f} to {shares.max():.0f} % of the clients"
    settled = f"{100 * np.mean(weights.max(1) > _SETTLED):.0f} % of the clients give more than {100 * _SETTLED:.0f} %"
    sentence = f"In {data.name(method)} {largest}, and {settled} of their weight to one."
    return Picture("Mixture weights of the clients", sentence, figure)


def simplex(data: Gathered) -> Picture | None:
    """Draw clients as points of a triangle, for mixtures of three; of each mixture's first seed."""
    if not (found := {method: weights for method, weights in _first(data).items() if weights.shape[1] == 3}):
        return None
    figure, axes = panels(len(found), height=3.4)
    for place, (method, weights) in zip(axes, found.items(), strict=True):
        shown = weights[thinned(len(weights), MOST_DOTS)]
        place.plot(*_CORNERS[[0, 1, 2, 0]].T, color=INK, linewidth=1)
        for component, offset in enumerate((-12, -12, 4)):
            how: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "color": COLOURS[component]}
            place.annotate(f"component {component}", _CORNERS[component], (0, offset), **how)
            dots(place, in_triangle(shown[shown.argmax(1) == component]), COLOURS[component])
        place.set_aspect("equal")
        place.set_axis_off()
        place.set(xlim=(-0.2, 1.2), ylim=(-0.12, 1.0))
        some = f", {len(shown):,} of {len(weights):,} clients" if len(shown) < len(weights) else ""
        place.set_title(_panel(data, method) + some)
    method, weights = next(iter(found.items()))
    three, two, one = (100 * np.mean((weights > 0.1).sum(1) == count) for count in (3, 2, 1))
    sentence = f"Of {data.name(method)}'s clients {three:.0f} % mix all three components (each above 10 %), "
    sentence += f"{two:.0f} % mix two and {one:.0f} % use one."
    return Picture("Clients in the simplex of three components", sentence, figure)


def entropy(data: Gathered) -> Picture | None:
    """Draw how many components clients use, all seeds together."""
    if not (methods := mixtures(data)):
        return None
    pooled = {method: np.concatenate([run.clients.weights for run in data.runs[method]]) for method in methods}
    found = {method: effective(weights) for method, weights in pooled.items()}
    most = max(weights.shape[1] for weights in pooled.values())
    figure, (axes,) = panels(1, height=3.2)
    for method, numbers in found.items():
        outline(axes, numbers, np.linspace(1, most, _BINS + 1), data, method)
    axes.set(xlabel="components in use: exp(entropy of the weights)", xlim=(1, most))
    legend(figure, axes)
    used = f"{np.median(found[methods[0]]):.2f} of {pooled[methods[0]].shape[1]} components"
    sentence = f"The median client of {data.name(methods[0])} uses the equivalent of {used}."
    return Picture("How mixed the clients are", sentence, figure)


def mixtures(data: Gathered) -> list[str]:
    """Return the methods whose clients have mixture weights in all seeds, last those that choose one component."""
    weights = {method: [run.clients.weights for run in runs] for method, runs in data.runs.items()}
    found = [method for method, seeds in weights.items() if all(own.size and np.isfinite(own).all() for own in seeds)]
    return sorted(found, key=lambda method: all((own.max(1) == 1).all() for own in weights[method]))


def by_dominant(weights: Numbers) -> NDArray[np.int64]:
    """Return the clients' positions sorted by largest component, then by its weight, ``[T, M] -> [T]``."""
    return np.lexsort((-weights.max(1), weights.argmax(1))).astype(np.int64)


def in_triangle(weights: Numbers) -> Numbers:
    """Return places in an equilateral triangle of side one, ``[T, 3] -> [T, 2]``."""
    return weights @ _CORNERS


def effective(weights: Numbers) -> Numbers:
    """Return the exponential of the weights' entropy: from 1, a component alone, to M, all alike; ``[T, M] -> [T]``."""
    return np.exp(entr(weights).sum(1))


def _first(data: Gathered) -> dict[str, Numbers]:
    return {method: data.runs[method][0].clients.weights for method in mixtures(data)}


def _panel(data: Gathered, method: str) -> str:
    return f"{data.titles[method]}, seed {data.runs[method][0].seed}"


def similarity(data: Gathered) -> Picture | None:
    """Draw the cosines between components' trained parameters; of each mixture's first seed."""
    found = {method: cosines for method, runs in data.runs.items() if (cosines := cosines_of(runs[0])) is not None}
    if not found:
        return None
    figure, axes = panels(len(found), columns=3, height=2.6)
    for place, (method, cosines) in zip(axes, found.items(), strict=True):
        image = place.imshow(cosines, vmin=-1, vmax=1, cmap="PuOr_r")
        place.grid(visible=False)
        if len(cosines) <= _NUMBERED:
            place.set(xticks=range(len(cosines)), yticks=range(len(cosines)))
            for (row, column), value in np.ndenumerate(cosines):
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
    """Return the cosines between components, ``[M, M]``, without a server one client's; None if they can't be read."""
    saved = run.folder.checkpoints
    if (
        "num_components" not in run.config.values("method")
        or run.summary["num_components"] < 2
        or run.config.name("model") == GIVEN
        or not run.folder.saved.exist()
        or sum(file.stat().st_size for file in saved.glob("*.safetensors")) > _MOST_BYTES
    ):
        return None
    result = Result.load(run.folder.path, device="cpu")
    # A server that was deployed knows no client: a newcomer without samples gets the same components.
    personal = result.client(result.names[0]) if result.names else result.personalize([], [])
    return cosines(personal.mixture.components, result.recipe.model.trainable)


def cosines(components: Tree, trained: frozenset[str]) -> Numbers:
    """Return the cosines between the components' flattened trained leaves, ``[M, ...] -> [M, M]``."""
    trees, count = [leaf for name, leaf in components.items() if name in trained], num_components(components)
    leaves = [leaf.flatten(1).double() for leaf in trees if len(leaf) == count]  # and none that all have in common
    directions = torch.nn.functional.normalize(torch.cat(leaves, 1), dim=1)
    return (directions @ directions.T).clamp(-1, 1).numpy()
