"""Pictures of mixture weights and components, and of who gains."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.spatial
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from report_runs import compared, drawn, gathered, regressed, trained

import fedem
from fedem.report.page import build_page
from fedem.report.pictures import clients as gains
from fedem.report.pictures import weights
from fedem.report.pictures import weights as components
from fedem.report.runs import Clients, Gathered, gather


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    return gathered(compared(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    return gathered(regressed(tmp_path_factory.mktemp("runs") / "run"))


# --- mixture weights

WEIGHTS = st.lists(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), min_size=1, max_size=20).map(
    lambda rows: np.array(rows) / np.sum(rows, axis=1, keepdims=True)
)


@given(WEIGHTS)
def test_clients_are_sorted_by_dominant_component_then_by_its_weight(found: NDArray[np.float64]) -> None:
    order = weights.by_dominant(found)
    assert sorted(order) == list(range(len(found)))
    keys = [(row.argmax(), -row.max()) for row in found[order]]
    assert keys == sorted(keys)


def test_the_heat_map_is_every_client_s_weights(data: Gathered) -> None:
    image = drawn("weights", data).figure.axes[0].images[0].get_array()
    known = data.runs["fedem"][0].clients.weights
    assert sorted(map(tuple, image.T)) == sorted(map(tuple, known))
    assert (np.diff(image.argmax(0)) >= 0).all()


@given(WEIGHTS)
def test_a_place_in_the_triangle_tells_the_weights(found: NDArray[np.float64]) -> None:
    corners = weights.in_triangle(np.eye(3))
    sides = [np.linalg.norm(corners[a] - corners[b]) for a, b in ((0, 1), (1, 2), (2, 0))]
    assert sides == pytest.approx([1, 1, 1])
    places = weights.in_triangle(found)
    # Barycentric coordinates, solved for.
    system = np.vstack([corners.T, np.ones(3)])
    again = np.linalg.solve(system, np.vstack([places.T, np.ones(len(places))])).T
    assert again == pytest.approx(found)


def test_the_triangle_has_a_dot_a_client(data: Gathered) -> None:
    lines = drawn("simplex", data).figure.axes[0].lines[1:]
    assert sum(len(line.get_xdata()) for line in lines) == len(data.runs["fedem"][0].clients.names)


@given(WEIGHTS)
def test_components_in_use_are_the_exponential_of_the_entropy(found: NDArray[np.float64]) -> None:
    assert weights.effective(found) == pytest.approx(np.exp(scipy.stats.entropy(found, axis=1)))


def test_components_in_use_go_from_one_to_all() -> None:
    assert weights.effective(np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1 / 3] * 3])) == pytest.approx([1, 2, 3])


# --- gains


def test_gains_are_differences_of_the_same_clients(data: Gathered) -> None:
    found = gains.pairs(data, "local", "fedem")
    assert len(found[0]) == sum(len(run.clients.names) for run in data.runs["fedem"])
    same = gains.pairs(data, "fedem", "fedem")
    assert (same[1] == same[0]).all()
    picture = drawn("gains", data)
    local, _, fedavg, _ = picture.figure.axes
    assert local.lines[0].get_xydata() == pytest.approx(100 * np.stack(found, 1))
    assert fedavg.lines[0].get_ydata() == pytest.approx(100 * found[1])
    assert f"for {(found[1] > found[0]).sum()} of {len(found[0])} clients" in picture.sentence
    differences = picture.figure.axes[1].lines[0].get_ydata()
    assert differences == pytest.approx(np.sort(100 * (found[1] - found[0])))


def test_clients_are_matched_by_name_and_not_by_place(data: Gathered) -> None:
    run = data.runs["local"][0]
    turned = Clients(run.clients.names[::-1], *(array[::-1] for array in list(vars(run.clients).values())[1:]))
    other = [dataclasses.replace(run, clients=turned), *data.runs["local"][1:]]
    again = dataclasses.replace(data, runs=data.runs | {"local": other})
    assert gains.pairs(again, "local", "fedem")[0].tolist() == gains.pairs(data, "local", "fedem")[0].tolist()


def test_where_errors_are_scored_fewer_is_better(errors: Gathered) -> None:
    found = gains.pairs(errors, "fedavg", "fedem")
    better = (found[1] < found[0]).sum()
    assert f"for {better} of {len(found[1])} clients" in drawn("gains", errors).sentence


# --- components


def test_cosines_are_of_trained_leaves_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    tree = {"a": torch.randn(4, 3, 2, generator=generator), "b": torch.randn(4, 5, generator=generator)}
    flat = np.concatenate([leaf.flatten(1).double().numpy() for leaf in tree.values()], 1)
    expected = 1 - scipy.spatial.distance.cdist(flat, flat, "cosine")
    trained = frozenset(("a", "b"))
    assert components.cosines(tree, trained) == pytest.approx(expected)
    assert components.cosines(tree | {"mean": torch.ones(4, 9)}, trained) == pytest.approx(expected)
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0])
    scaled = {name: torch.einsum("m...,m->m...", leaf, factors) for name, leaf in tree.items()}
    assert components.cosines(scaled, trained) == pytest.approx(expected)


def test_the_picture_has_the_cosines_of_the_saved_components(data: Gathered) -> None:
    image = np.asarray(drawn("components", data).figure.axes[0].images[0].get_array())
    result = fedem.Result.load(data.runs["fedem"][0].folder.path)
    found = result.client(result.names[0]).mixture.components
    flat = torch.cat([leaf.flatten(1) for leaf in found.values()], 1).double().numpy()
    assert image == pytest.approx(1 - scipy.spatial.distance.cdist(flat, flat, "cosine"))


def test_without_a_checkpoint_components_are_not_drawn(data: Gathered, tmp_path: Path) -> None:
    run = data.runs["fedem"][0]
    assert components.cosines_of(dataclasses.replace(run, folder=type(run.folder)(tmp_path))) is None


@pytest.mark.slow
def test_figures_speak_first_of_clients_that_mix(tmp_path: Path) -> None:
    """Whoever scores best: IFCA's clients choose one model each."""
    for method in ("ifca", "fedem", "local", "fedavg", "fedprox", "ditto", "apfl"):
        trained(tmp_path / method, method, 0, rounds=2)
    data = gather([tmp_path])
    assert weights.mixtures(data[0]) == ["fedem", "ifca"]
    title = re.search(r"<title>(.*?)</title>", build_page(data))
    assert title is not None
    assert title[1] == "synthetic: 7 methods"
