"""Each method's own rule for clients unseen in training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import advance, make_personalizer, make_training
from newcomers import INPUTS, NEWCOMERS, losses_of, one_epoch_by_hand, predict_all
from torch import Tensor

from fedem.core.random import client_keys
from fedem.core.tree import Tree, take_prefix, tree_flat, tree_index
from fedem.data.federation import Federation
from fedem.data.samples import Pool, Samples
from fedem.engines import Batching
from fedem.runs.evaluate import evaluate
from fedem.runs.personalize import Predictors
from fedem.runs.rounds import State, Training
from fedem.solvers import SGD

# Method by method.


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "qffl", "afl", "scaffold", "perfedavg"])
def test_a_new_clients_predictor_is_the_shared_model(method: str) -> None:
    training = make_training(method)
    state = advance(training)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    shared = {name.removeprefix("model/"): leaf[0] for name, leaf in state.shared.items() if "control" not in name}
    expected = training.algorithm.model.loss.probabilities(training.algorithm.model.outputs(shared, INPUTS))
    for prediction in predict_all(training, found):
        torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("method", "as_setting"), [("fedem", False), ("fedem", True), ("bfedem", True)])
def test_one_iteration_of_fedem_is_one_update_of_em(method: str, as_setting: bool) -> None:
    """The paper's rule, asked for when a client is fitted, or by a setting of the run."""
    training = make_training(method, num_components=3, **({"unseen_updates": 1} if as_setting else {}))
    state = advance(training)
    asked = () if as_setting else (1,)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys, *asked)
    model = training.algorithm.model
    for position in range(3):
        data = NEWCOMERS.train.client(position)
        likelihoods = np.exp(
            -np.array([model.losses(tree_index(state.shared, (0, m)), *data).numpy() for m in range(3)])
        )
        responsibilities = likelihoods / likelihoods.sum(0)
        np.testing.assert_allclose(
            found.personal["log_weights"][position].exp().numpy(), responsibilities.mean(1), rtol=0, atol=1e-13
        )


def test_what_is_asked_for_goes_before_the_setting() -> None:
    training = make_training("fedem", unseen_updates=1)
    state, usual = advance(training, 10), make_training("fedem")
    fits = [
        make_personalizer(one).personalize(state, NEWCOMERS.train, NEWCOMERS.keys, *asked).personal["log_weights"]
        for one, asked in ((training, ()), (training, (0,)), (usual, ()), (usual, (0,)))
    ]
    assert not torch.allclose(fits[0], fits[1])
    assert torch.equal(fits[1], fits[2])
    assert torch.equal(fits[1], fits[3])


def test_more_iterations_of_fedem_fit_better() -> None:
    training = make_training("fedem", num_components=3, unseen_prior=0.0)
    state = advance(training, 10)
    personalizer = make_personalizer(training)
    losses = [
        losses_of(training, personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys, count), NEWCOMERS.train)
        for count in (1, 5, None)
    ]
    assert bool((losses[0] > losses[1]).all())
    assert bool((losses[1] >= losses[2] - 1e-6).all())


def _losses_under(training: Training, models: Tree) -> Tensor:
    """Each new client's loss under each of these models, ``[T, K]``."""
    model = training.algorithm.model
    count = len(next(iter(models.values())))
    rows = [
        [float(model.losses(tree_index(models, k), *NEWCOMERS.train.client(t)).sum()) for k in range(count)]
        for t in range(3)
    ]
    return torch.tensor(rows)


def test_a_new_client_joins_the_cluster_with_the_least_loss() -> None:
    training = make_training("clustered", mean_tolerance=1e9, member_tolerance=0.0)
    after = advance(training, 4)
    count = len(after.shared["bias"])
    assert count >= 4
    # Models as different as clusters may become.
    models = [training.algorithm.init_shared(seed) for seed in range(count)]
    shared = {name: 5 * torch.stack([model[name] for model in models]) for name in models[0]}
    state = State(after.round, shared, after.personal, after.memory)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    best = _losses_under(training, state.shared).argmin(1)
    assert torch.equal(found.reads, best)
    assert len(set(best.tolist())) > 1
    assert all(torch.equal(leaf, state.shared[name]) for name, leaf in found.shared.items())


def test_a_new_client_of_ifca_joins_the_cluster_with_the_least_loss() -> None:
    training = make_training("ifca", num_clusters=4)
    state = advance(training, 4)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    best = _losses_under(training, tree_index(state.shared, 0)).argmin(1)
    weights = found.personal["log_weights"].exp()
    assert torch.equal(weights.argmax(1), best)
    assert torch.equal(weights.max(1).values, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("method", ["ditto", "pfedme", "apfl"])
def test_a_new_client_trains_a_model_of_its_own_beside_the_shared_one(method: str) -> None:
    training = make_training(method, solver=SGD())
    state = advance(training)
    found = make_personalizer(training, unseen_epochs=3).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    assert all(torch.equal(leaf, state.shared[name]) for name, leaf in found.shared.items())
    own = {name.removeprefix("own/"): leaf for name, leaf in found.personal.items() if name != "alpha"}
    changes = tree_flat(own, 1) - tree_flat(state.shared, 1)
    assert bool((changes.norm(dim=1) > 1e-2).all())
    assert float((changes[0] - changes[1]).norm()) > 1e-2
    shared_alone = Predictors(state.shared, torch.zeros(3, dtype=torch.int64), {})
    fedavg = make_training("fedavg")
    falls = losses_of(fedavg, shared_alone, NEWCOMERS.train) - losses_of(training, found, NEWCOMERS.train)
    assert bool((falls > 0).all())


def test_a_new_client_of_ditto_solves_its_own_problem_around_the_shared_model() -> None:
    """As many passes as asked for; with many, the minimiser of f + pull/2 |v - u|^2."""
    training = make_training("ditto", solver=SGD(), batching=Batching(0), pull=0.5)
    state = advance(training)
    personalizer = make_personalizer(training, unseen_epochs=150)
    found = personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    model, shared = training.algorithm.model, tree_index(state.shared, 0)
    for position in range(3):
        own = {
            name: leaf.clone().requires_grad_()
            for name, leaf in take_prefix("own", tree_index(found.personal, position)).items()
        }
        value = model.losses(own, *NEWCOMERS.train.client(position)).mean()
        value = value + 0.25 * sum((own[name] - shared[name]).square().sum() for name in own)
        slopes = torch.autograd.grad(value, list(own.values()))
        assert max(float(slope.abs().max()) for slope in slopes) < 1e-6


@pytest.mark.parametrize("method", ["l2sgd", "fedu", "mocha"])
def test_a_new_client_without_samples_takes_the_mean_of_all_models(method: str) -> None:
    training = make_training(method)
    state = advance(training)
    x, y = NEWCOMERS.train.client(0)
    nobody = Samples(Pool(x[:0], y[:0]), torch.tensor([0, 0]))
    found = make_personalizer(training).personalize(state, nobody, client_keys(["ida"]))
    mixture = found.of(training.algorithm, 0)
    for name in ("weight", "bias"):
        leaf = state.shared[f"task/{name}" if method == "mocha" else name]
        torch.testing.assert_close(mixture.components[name][0], leaf.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", ["l2sgd", "fedu"])
def test_a_new_client_fine_tunes_the_mean_of_all_models(method: str) -> None:
    training = make_training(method)
    state = advance(training)
    found = make_personalizer(training, unseen_epochs=1).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    start = {name: leaf.mean(0) for name, leaf in state.shared.items()}
    for position in range(3):
        expected = one_epoch_by_hand(training, start, NEWCOMERS.train, NEWCOMERS.keys, position, 0.2)
        components = found.of(training.algorithm, position).components
        for name, leaf in expected.items():
            torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


def test_a_new_client_of_pfedhn_learns_an_embedding_from_the_mean_of_all() -> None:
    training = make_training("pfedhn", embedding_rate=0.3)
    state = advance(training)
    mixer, memory = training.mixer, state.memory

    def made(vector: torch.Tensor) -> dict[str, torch.Tensor]:
        one = {**memory, "embeddings": vector[None]}
        return tree_index(mixer.read(state.shared, one, torch.tensor([0])).shared, 0)

    embedding = memory["embeddings"].mean(0).requires_grad_()
    found = make_personalizer(training, unseen_epochs=1).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    for position in range(3):
        start = {name: leaf.detach() for name, leaf in made(embedding).items()}
        trained = one_epoch_by_hand(training, start, NEWCOMERS.train, NEWCOMERS.keys, position, 0.2)
        # Half the squared distance to the trained model has the gradient that the server sends back.
        half = sum((made(embedding)[name] - leaf).square().sum() / 2 for name, leaf in trained.items())
        (slope,) = torch.autograd.grad(half, embedding)
        expected = made((embedding - 0.3 * slope).detach())
        components = found.of(training.algorithm, position).components
        for name, leaf in expected.items():
            torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


def test_more_passes_fit_a_new_client_of_pfedhn_better() -> None:
    training = make_training("pfedhn", num_rounds=20)
    state = advance(training, 20)
    losses = []
    for passes in (1, 30):
        maker = make_personalizer(training, unseen_epochs=passes)
        found = maker.personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
        losses.append(evaluate(training.algorithm, training.engine, found, NEWCOMERS)["train"].loss)
    assert losses[1] < losses[0]


def test_an_old_client_that_comes_back_as_new_is_served_as_well_as_before() -> None:
    """Whoever trained the model fits it: the loss of a returning client is that of its kind, not of a stranger."""
    for method in ("fedem", "clustered", "ifca"):
        own = {"clustered": {"mean_tolerance": 1e9, "member_tolerance": 0.0}, "fedem": {"unseen_prior": 0.0}}
        training = make_training(method, **own.get(method, {}))
        state = advance(training, 8)
        personalizer = make_personalizer(training)
        federation: Federation = training.federation
        seen = losses_of(training, personalizer.predictors(state, federation), federation.train)
        again = personalizer.personalize(state, federation.train, federation.keys)
        assert bool((losses_of(training, again, federation.train) <= seen + 1e-5).all())
