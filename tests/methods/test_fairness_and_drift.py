"""q-FFL, AFL and SCAFFOLD against their papers' formulas, and what they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import NAMES, advance, make_federation, make_model, make_training, scores_of
from least_squares import WHOLE, conflict, mean_square, quadratic_problem, shares, slope, vector
from mixers import in_pieces, make_round, random_tensor
from torch import Tensor

from fedem.data.federation import Federation
from fedem.engines import Batching, Engine, OneByOne, Stacked
from fedem.methods.qffl import ByMass
from fedem.solvers import SGD
from fedem.solvers.schedules import Constant

# Fairness.


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
def test_qffls_server_takes_the_papers_step(q: float) -> None:
    federation, rate = make_federation("squared_error"), 0.05
    training = make_training(
        "qffl", federation, loss="squared_error", solver=SGD(), batching=WHOLE, schedule=Constant(rate), q=q
    )
    state = training.init()
    u = vector(state.shared)[0]
    for _ in range(3):
        pushes, curvatures = [], []
        for position in range(5):
            w = u
            for _ in range(4):
                w = w - rate * slope(federation, position, w)
            loss, change = mean_square(federation, position, u), (u - w) / rate
            pushes.append(loss**q * change)
            curvatures.append(q * loss ** (q - 1) * change @ change + loss**q / rate)
        u = u - shares(federation) @ pushes / (shares(federation) @ curvatures)
        state, _ = training.step(state)
        np.testing.assert_allclose(vector(state.shared)[0], u, rtol=0, atol=1e-12)


@pytest.mark.parametrize("common", [-5000.0, -40.0, 0.0, 700.0, 1e6])
@pytest.mark.parametrize("order", [[[0, 1, 2, 3]], [[2], [0], [3], [1]], [[3, 1], [2, 0]]])
def test_a_common_factor_of_all_masses_counts_for_nothing(common: float, order: list[list[int]]) -> None:
    """Ratios of sums by masses m_t are those by c m_t, for c that no number can hold; a mass of 0 is just none."""
    log_mass = torch.tensor([0.3, -1.0, 2.0, -900.0], dtype=torch.float64)
    push, curvature = random_tensor(4, 3), random_tensor(4, seed=1).abs()
    uploads = {"push/w": push, "curvature": curvature, "buffers/mean": random_tensor(4, seed=2)}
    this = make_round([4, 1, 7, 2])
    share = this.sizes.double() / 14
    pieces = in_pieces(uploads | {"log_mass": log_mass + common}, order)
    means = ByMass().mix({}, {}, this, pieces)[0].means
    mass = share * log_mass.exp()
    torch.testing.assert_close(means["push/w"][0] / means["curvature"], mass @ push / (mass @ curvature))
    torch.testing.assert_close(means["buffers/mean"][0], share @ uploads["buffers/mean"])


@pytest.mark.parametrize("q", [0.5, 5.0, 40.0])
@pytest.mark.parametrize("engine", [Stacked(chunk_size=2), OneByOne()], ids=["chunks", "one by one"])
def test_qffls_powers_do_not_overflow(q: float, engine: Engine) -> None:
    """Losses of 1e10 to powers that float32, and that of 40 that float64 has no numbers for."""
    ends, scale = [], 1e5
    for dtype, kind in ((np.float32, torch.float32), (np.float64, torch.float64)):
        clients = make_federation("squared_error")
        parts = [
            tuple(
                (part * scale).astype(dtype) if position else part.astype(dtype) for position, part in enumerate(pair)
            )
            for pair in ([leaf.numpy() for leaf in clients.train.client(index)] for index in range(5))
        ]
        training = make_training(
            "qffl",
            Federation.from_parts(parts, parts, parts, NAMES),
            loss="squared_error",
            model=make_model("squared_error", kind),
            engine=engine,
            solver=SGD(),
            batching=WHOLE,
            schedule=Constant(0.05),
            q=q,
        )
        start = training.init()
        zero = replace(start, shared={name: torch.zeros_like(leaf) for name, leaf in start.shared.items()})
        ends.append(vector(advance(training, 3, zero).shared)[0] / scale)
    assert np.abs(ends[1]).max() > 1e-3
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=2e-4 * np.abs(ends[1]).max())


def _final_losses(method: str, rounds: int, **settings: object) -> Tensor:
    training = make_training(
        method,
        conflict(),
        loss="squared_error",
        solver=SGD(),
        batching=Batching(0),
        schedule=Constant(0.1),
        **settings,
    )
    return scores_of(training, advance(training, rounds))["train"].losses


def test_afl_equalises_the_losses_of_clients_inconflict() -> None:
    fedavg, afl = _final_losses("fedavg", 40), _final_losses("afl", 40, climb_rate=0.04)
    assert float(afl.max()) < float(fedavg.max()) - 0.5
    assert float(afl.max() - afl.min()) < 0.3 * float(fedavg.max() - fedavg.min())


def test_qffl_lowers_the_largest_loss_of_clients_inconflict() -> None:
    by_q = [float(_final_losses("qffl", 40, q=q).max()) for q in (0.0, 1.0, 4.0)]
    assert by_q[0] > by_q[1] + 0.1 > by_q[2] + 0.2


def test_afls_weights_move_towards_the_worst_client() -> None:
    training = make_training(
        "afl", conflict(), loss="squared_error", solver=SGD(), batching=Batching(0), climb_rate=0.01
    )
    state = training.init()
    assert state.memory["weights"].tolist() == [0.5, 0.5]
    losses = scores_of(training, state)["train"].losses
    after, _ = training.step(state)
    # Projected back, each weight gains what its loss exceeds the mean by.
    expected = 0.5 + 0.01 * (losses - losses.mean())
    torch.testing.assert_close(after.memory["weights"], expected, rtol=0, atol=1e-12)
    assert float(after.memory["weights"][1]) > 0.51


# SCAFFOLD.


def _error(method: str, sizes: tuple[int, ...], rate: float = 0.15, **settings: object) -> float:
    """How far from the optimum a method is after 40 rounds with several local steps over whole batches."""
    federation, optimum = quadratic_problem(sizes)
    engine, batching = Stacked(record_after=4), Batching(0, local_steps=4)
    common = {"loss": "squared_error", "engine": engine, "batching": batching, "schedule": Constant(rate)}
    shared = advance(make_training(method, federation, **(common | {"solver": SGD()} | settings)), 40).shared
    model = {name.removeprefix("model/"): leaf for name, leaf in shared.items() if not name.startswith("control/")}
    return float(np.abs(vector(model)[0] - optimum).max())


@pytest.mark.slow
def test_scaffold_reaches_the_optimum_that_fedavg_misses() -> None:
    assert _error("fedavg", (10, 20, 30)) > 0.1
    assert _error("scaffold", (10, 20, 30)) < 1e-9


@pytest.mark.slow
def test_scaffold_reaches_the_optimum_with_momentum() -> None:
    assert _error("scaffold", (10, 20, 30), 0.07, solver=SGD(momentum=0.5)) < 1e-6


@pytest.mark.slow
def test_scaffold_reaches_the_optimum_with_shorter_steps_of_the_server() -> None:
    assert _error("scaffold", (10, 20, 30), server_rate=0.6) < 1e-3


@pytest.mark.slow
def test_scaffold_reaches_the_optimum_with_sampled_clients_of_one_size() -> None:
    assert _error("fedavg", (20, 20, 20), cohort_size=2) > 0.1
    assert _error("scaffold", (20, 20, 20), cohort_size=2) < 1e-6


@pytest.mark.slow
def test_scaffold_reaches_the_optimum_with_sampled_clients_of_several_sizes() -> None:
    """The server's control must stay the mean of the clients', by the same weights as the models'."""
    assert _error("scaffold", (10, 20, 30), cohort_size=2) < 1e-6


@pytest.mark.parametrize("cohort_size", [5, 2])
def test_scaffolds_control_is_the_mean_of_the_clients_controls(cohort_size: int) -> None:
    federation = make_federation()
    training = make_training("scaffold", federation, cohort_size=cohort_size)
    state = advance(training, 4)
    by_size = federation.train.sizes.double() / len(federation.train)
    for name, leaf in state.personal.items():
        mean = torch.tensordot(by_size, leaf, 1)
        torch.testing.assert_close(state.shared[f"control/{name}"][0], mean, rtol=0, atol=1e-12)


def test_scaffolds_controls_are_the_mean_gradients_of_the_local_steps() -> None:
    federation, rate = make_federation("squared_error", sizes=(9, 14)), 0.05
    training = make_training(
        "scaffold", federation, loss="squared_error", solver=SGD(), batching=WHOLE, schedule=Constant(rate)
    )
    state = training.init()
    for _ in range(3):
        model = vector({name: state.shared[f"model/{name}"] for name in ("bias", "weight")})[0]
        control = vector({name: state.shared[f"control/{name}"] for name in ("bias", "weight")})[0]
        expected = []
        for position in range(2):
            w, slopes = model, []
            for _ in range(4):
                slopes.append(slope(federation, position, w))
                w = w - rate * (slopes[-1] + control - vector(state.personal)[position])
            expected.append(np.mean(slopes, axis=0))
        state, _ = training.step(state)
        np.testing.assert_allclose(vector(state.personal), expected, rtol=0, atol=1e-11)
