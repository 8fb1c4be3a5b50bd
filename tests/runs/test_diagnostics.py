"""The measures of the convergence theorems against plain autograd, scipy and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from centralised_em import CentralizedEM, EMState
from helpers import DIMENSION, LOSSES, advance, make_federation, make_model, make_training
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy
from torch import Tensor, nn

from fedem.core.errors import UserError
from fedem.core.tree import Tree, tree_index, tree_map
from fedem.engines import Batching, Engine, OneByOne, Stacked
from fedem.methods import METHODS
from fedem.methods.decentralised import Graph
from fedem.models import Model
from fedem.runs.measures import Diagnosis, check_diagnosable, diagnose, estimate_dissimilarity
from fedem.runs.rounds import State, Training

EXACT = {"rtol": 1e-10, "atol": 1e-13}


def _clients_objectives(training: Training, components: Tree, weights: Tensor) -> list[Tensor]:
    """f_t of each client by torch's own modules and no code of ours; of ``[M, ...]`` and ``[T, M]``."""
    module, loss = training.algorithm.model.evaluation, training.algorithm.model.loss
    values = []
    for position, row in enumerate(weights):
        inputs, targets = training.federation.train.client(position)
        likelihood = sum(
            row[m] * (-loss.negative_log_likelihood(torch.func.functional_call(module, one, (inputs,)), targets)).exp()
            for m, one in enumerate(tree_index(components, k) for k in range(len(row)))
        )
        values.append(-likelihood.log().mean())
    return values


def _expected(training: Training, before: State, after: State) -> Diagnosis:
    """The same by autograd of f, client by client."""
    names = training.algorithm.model.trainable
    mean = tree_map(lambda leaf: leaf.double().mean(0).to(leaf.dtype), after.shared)
    single = "log_weights" not in after.personal
    if single:
        mean = tree_map(lambda leaf: leaf[None], mean)
    count = training.federation.num_clients
    pi, old = (torch.ones(count, 1) if single else s.personal["log_weights"].exp() for s in (after, before))
    leaves = {name: leaf.clone().requires_grad_(name in names) for name, leaf in mean.items()}
    trained = [leaves[name] for name in sorted(names)]
    objectives = _clients_objectives(training, leaves, pi.double())
    gradients = [torch.cat([g.flatten() for g in torch.autograd.grad(value, trained)]) for value in objectives]
    sizes = training.federation.train.sizes.double()
    shares = sizes / sizes.sum()
    # One update of EM for each client's weights, from the losses.
    updated = []
    for position, row in enumerate(pi.double()):
        inputs, targets = training.federation.train.client(position)
        losses = torch.stack(
            [training.algorithm.model.losses(tree_index(mean, m), inputs, targets) for m in range(len(row))]
        )
        joint = row[:, None] * (-losses).exp()
        updated.append((joint / joint.sum(0)).mean(1))
    objective = float(shares @ torch.stack([value.detach() for value in objectives]))
    later = float(shares @ torch.stack(_clients_objectives(training, mean, torch.stack(updated))))
    own = [after.shared[name].numpy() for name in names]
    return Diagnosis(
        objective,
        float(sum(s * g for s, g in zip(shares, gradients, strict=True)).square().sum()),
        objective - later,
        float(np.dot(shares.numpy(), [entropy(p, q) for p, q in zip(pi.numpy(), old.numpy(), strict=True)])),
        float(sum(((leaf - leaf.mean(0)) ** 2).sum() for leaf in own)),
        float(sum(s * g.square().sum() for s, g in zip(shares, gradients, strict=True))),
    )


def _compare(training: Training, before: State, after: State) -> Diagnosis:
    found = diagnose(training, before, after)
    np.testing.assert_allclose(found, _expected(training, before, after), **EXACT)
    return found


# All pairs of a method, a loss and an engine.
@pytest.mark.parametrize(
    ("method", "loss", "engine"),
    [
        (("fedem", "fedavg")[(number + position) % 2], loss, engine)
        for number, loss in enumerate(LOSSES)
        for position, engine in enumerate((OneByOne(), Stacked(), Stacked(chunk_size=2, record_after=0)))
    ],
    ids=str,
)
def test_all_figures_are_those_of_autograd(method: str, loss: str, engine: Engine) -> None:
    training = make_training(method, make_federation(loss), loss=loss, engine=engine)
    before = advance(training, 1)
    after, _ = training.step(before)
    found = _compare(training, before, after)
    assert found.consensus == 0
    assert found.dissimilarity > found.gradient_norm2 > 0
    assert (found.improvement, found.weights_kl) == (0, 0) if method == "fedavg" else found.weights_kl > 0
    assert found._asdict().keys() == set(Diagnosis._fields)


@pytest.mark.parametrize("method", ["dfedem", "dsgd"])
def test_where_every_client_has_models_of_its_own_their_plain_mean_is_diagnosed(method: str) -> None:
    training = make_training(method)
    assert isinstance(training.mixer, Graph)
    before = advance(training, 1)
    after, _ = training.step(before)
    assert len(after.shared["weight"]) == training.federation.num_clients
    assert _compare(training, before, after).consensus > 1e-6


def _normalised() -> Model:
    """Layers that do something else in training, and one that is frozen."""

    def build() -> nn.Module:
        layers = nn.Sequential(nn.Linear(DIMENSION, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(), nn.Linear(3, 1))
        layers[0].bias.requires_grad_(False)
        return layers

    return Model(build, LOSSES["logistic"], torch.float64)


def test_evaluation_mode_and_trained_leaves_alone() -> None:
    training = make_training("fedem", make_federation(sizes=(9, 14)), model=_normalised())
    before = advance(training, 2)
    _compare(training, before, training.step(before)[0])


def test_large_models_are_measured_in_the_batches_they_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training("fedavg", make_federation(sizes=(9,)))
    before = training.init()
    after, _ = training.step(before)
    whole = diagnose(training, before, after)
    widths: list[int] = []
    losses = Model.losses

    def watched(self: Model, parameters: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        widths.append(len(inputs))
        return losses(self, parameters, inputs, targets)

    monkeypatch.setattr(Model, "losses", watched)
    monkeypatch.setattr(Model, "is_large", True)
    for engine in (OneByOne(), Stacked()):
        large = make_training("fedavg", make_federation(sizes=(9,)), batching=Batching(4), engine=engine)
        np.testing.assert_allclose(diagnose(large, before, after), whole, **EXACT)
        # All at once for the scores, which need no gradient.
        assert sorted(widths) == [1, 4, 4, 9]
        widths.clear()


def test_single_precision_measures_about_the_same() -> None:
    training = make_training(model=make_model(dtype=torch.float32))
    before = advance(training, 1)
    after, _ = training.step(before)
    double = make_training()
    first, second = (
        State(state.round, *({k: v.double() for k, v in tree.items()} for tree in (state.shared, state.personal)))
        for state in (before, after)
    )
    np.testing.assert_allclose(
        diagnose(training, before, after), diagnose(double, first, second), rtol=1e-4, atol=1e-10
    )


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 30), vanished=st.booleans())
def test_updating_the_weights_never_worsens_f(seed: int, scale: float, vanished: bool) -> None:
    training = make_training("fedem", make_federation(sizes=(7, 12)))
    start = training.init()
    draws = torch.Generator().manual_seed(seed)
    shared = tree_map(lambda leaf: scale * torch.randn(leaf.shape, generator=draws, dtype=leaf.dtype), start.shared)
    logs = torch.randn(start.personal["log_weights"].shape, generator=draws, dtype=torch.float64) * scale
    if vanished:
        logs[:, 0] = -torch.inf
    state = State(1, shared, {"log_weights": logs.log_softmax(1)})
    found = diagnose(training, state, state)
    expected = _expected(training, state, state)
    assert expected.improvement >= -1e-12
    assert found.weights_kl == 0
    np.testing.assert_allclose(found.improvement, expected.improvement, rtol=1e-7, atol=1e-11)
    assert np.isfinite(found).all()


def test_centralised_em_ends_where_the_gradient_vanishes() -> None:
    federation = make_federation("cross_entropy", sizes=(40, 25))
    noise = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (len(federation.train),), generator=noise)
    # Labels without any pattern can't be separated, so that there is a finite optimum without weight decay.
    federation.train.pool.targets.copy_(targets)
    training = make_training("fedem", federation, loss="cross_entropy", num_components=1)
    start = training.init()
    em = CentralizedEM(training.algorithm.model)
    *_, end = em.steps(EMState(tree_index(start.shared, 0), start.personal["log_weights"]), federation.train, 2)
    state = State(1, tree_map(lambda leaf: leaf[None], end.components), {"log_weights": end.log_weights})
    found = diagnose(training, start, state)
    assert found.gradient_norm2 < 1e-16 < 1e-3 < diagnose(training, start, start).gradient_norm2
    # All gradients can't vanish at once: clients differ.
    assert found.dissimilarity > 1e-4
    assert found.objective == pytest.approx(em.objective(end, federation.train), rel=1e-12)


@pytest.mark.slow
def test_centralised_em_of_a_mixture_ends_at_a_stationary_point() -> None:
    federation = make_federation("squared_error", sizes=(40, 30, 50))
    training = make_training("fedem", federation, loss="squared_error", num_components=2)
    start = training.init()
    em = CentralizedEM(training.algorithm.model)
    first = EMState(tree_index(start.shared, 0), start.personal["log_weights"])
    *_, last, end = em.steps(first, federation.train, 100)
    states = [
        State(1, tree_map(lambda leaf: leaf[None], entry.components), {"log_weights": entry.log_weights})
        for entry in (last, end)
    ]
    found = diagnose(training, *states)
    assert found.gradient_norm2 < 1e-12
    assert found.improvement < 1e-9
    assert found.dissimilarity > 1e-4


def test_the_same_method_is_recorded_once() -> None:
    training = make_training(engine=Stacked())
    state = training.init()
    diagnose(training, state, state)
    count = len(training.engine._replays)
    for _ in range(3):
        state, _ = training.step(state)
        diagnose(training, state, state)
    assert len(training.engine._replays) <= count + 2


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=20))
def test_dissimilarity_holds_at_every_point(points: list[tuple[float, float]]) -> None:
    records = [{"gradient_norm2": x, "dissimilarity": x + y} for x, y in points]
    constant, slope = estimate_dissimilarity([{"round": 1}, {"dissimilarity": None}, *records])
    for line in records:
        bound = constant**2 + slope**2 * line["gradient_norm2"]
        assert line["dissimilarity"] <= bound * (1 + 1e-9) + 1e-9


def test_dissimilarity_on_a_line_is_the_line() -> None:
    records = [{"gradient_norm2": x, "dissimilarity": 4 + 9 * x} for x in (0.0, 1.0, 5.0)]
    assert estimate_dissimilarity(records) == pytest.approx((2, 3))
    # Where it falls with the gradient, or there is one point, the constant has to do.
    assert estimate_dissimilarity(records[:1]) == (2, 0)
    falling = [{"gradient_norm2": x, "dissimilarity": 16 - x} for x in (0.0, 1.0, 5.0)]
    assert estimate_dissimilarity(falling) == (4, 0)
    with pytest.raises(UserError, match=r"set run\.diagnose_every"):
        estimate_dissimilarity([{"round": 1}])


DIAGNOSED = {"fedem", "bfedem", "fedem-heads", "fedavg", "fedavg+", "dfedem", "dsgd"}


@pytest.mark.parametrize("method", METHODS)
def test_who_can_be_diagnosed(method: str) -> None:
    training = make_training(method)
    if method in DIAGNOSED:
        check_diagnosable(training.algorithm, training.mixer)
        return
    with pytest.raises(UserError, match=r"can't be diagnosed.*allowed"):
        check_diagnosable(training.algorithm, training.mixer)
    with pytest.raises(UserError, match="can't be diagnosed"):
        diagnose(training, training.init(), training.init())


def test_clients_who_count_alike_minimise_another_function() -> None:
    training = make_training("fedavg", weighting="equal")
    with pytest.raises(UserError, match=r"method\.weighting is 'equal' can't be diagnosed.*allowed: samples"):
        check_diagnosable(training.algorithm, training.mixer)
