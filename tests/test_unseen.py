"""Clients unseen in training, and clients that train for themselves before they predict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import advance, make_federation, make_personalizer, make_training
from torch import Tensor

from fedem.checkpoint import same_states
from fedem.engines import Batching, OneByOne, Stacked
from fedem.engines.batches import BatchPlan
from fedem.errors import UserError
from fedem.evaluate import evaluate, predict
from fedem.federation import Federation
from fedem.methods import METHODS
from fedem.mixing.settled import Settled
from fedem.mixture import negative_log_likelihood
from fedem.personal import Personalizer, Predictors
from fedem.randomness import FINE_TUNE, client_keys, derive
from fedem.rounds import State, Training
from fedem.samples import Samples
from fedem.solvers import SGD
from fedem.tree import Tree, tree_flat, tree_index

SHARING = [method for method in METHODS if method != "local"]
every_method = pytest.mark.parametrize("method", METHODS)
every_sharing_method = pytest.mark.parametrize("method", SHARING)
both_engines = pytest.mark.parametrize("engine", [OneByOne(), Stacked()], ids=["one_by_one", "stacked"])

NEWCOMERS = make_federation(sizes=(6, 3, 15), names=("fay", "gus", "hal"), seed=9)
INPUTS = NEWCOMERS.train.inputs


def _predictions(training: Training, found: Predictors) -> Tensor:
    """Everybody's predictions on the same inputs, ``[T, n, K]``."""
    mixtures = [found.of(training.algorithm, position) for position in range(len(found.reads))]
    return torch.stack([predict(training.algorithm.model, mixture, INPUTS) for mixture in mixtures])


def _losses(training: Training, found: Predictors, samples: Samples) -> Tensor:
    """Everybody's mean loss on its own samples, ``[T]``."""
    model, means = training.algorithm.model, []
    for position in range(samples.num_clients):
        components, log_weights = found.of(training.algorithm, position)
        losses = torch.stack(
            [model.losses(tree_index(components, m), *samples.client(position)) for m in range(len(log_weights))]
        )
        means.append(negative_log_likelihood(losses, log_weights).mean())
    return torch.stack(means)


# Every method.


@both_engines
@every_sharing_method
def test_a_new_client_is_given_a_predictor(method: str, engine: OneByOne | Stacked) -> None:
    training = make_training(method)
    state = advance(training)
    found = make_personalizer(training, engine).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    predictions = _predictions(training, found)
    assert predictions.shape == (3, 24, 2)
    torch.testing.assert_close(predictions.sum(-1), torch.ones(3, 24, dtype=torch.float64))
    scores = evaluate(training.algorithm, engine, found, NEWCOMERS)
    torch.testing.assert_close(scores["train"].losses, _losses(training, found, NEWCOMERS.train), rtol=0, atol=1e-12)


def test_clients_that_train_alone_leave_nothing_to_a_new_one() -> None:
    training = make_training("local")
    with pytest.raises(UserError, match="train alone leave nothing to share"):
        make_personalizer(training).personalize(training.init(), NEWCOMERS.train, NEWCOMERS.keys)


@both_engines
@pytest.mark.parametrize("fine_tune_epochs", [0, 1])
@every_sharing_method
def test_a_new_client_without_samples_is_given_a_predictor_too(
    method: str, fine_tune_epochs: int, engine: OneByOne | Stacked
) -> None:
    training = make_training(method)
    state = advance(training)
    personalizer = make_personalizer(training, engine, fine_tune_epochs=fine_tune_epochs)
    x, y = NEWCOMERS.train.client(0)
    nobody = Samples(x[:0], y[:0], torch.tensor([0, 0]))
    alone = _predictions(training, personalizer.personalize(state, nobody, client_keys(["ida"])))
    assert bool(torch.isfinite(alone).all())
    torch.testing.assert_close(alone.sum(-1), torch.ones(1, 24, dtype=torch.float64))
    # Beside another who has samples.
    both = Samples(x, y, torch.tensor([0, 0, 6]))
    together = _predictions(training, personalizer.personalize(state, both, client_keys(["ida", "fay"])))
    torch.testing.assert_close(together[0], alone[0], rtol=0, atol=1e-12)
    fay = personalizer.personalize(state, Samples(x, y, torch.tensor([0, 6])), client_keys(["fay"]))
    torch.testing.assert_close(together[1], _predictions(training, fay)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("fine_tune_epochs", [0, 1])
@every_sharing_method
def test_several_new_clients_at_once_are_as_one_at_a_time(method: str, fine_tune_epochs: int) -> None:
    training = make_training(method)
    state = advance(training)
    personalizer = make_personalizer(training, fine_tune_epochs=fine_tune_epochs)
    together = _predictions(training, personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys))
    for position in range(3):
        here = torch.tensor([position])
        one = personalizer.personalize(state, NEWCOMERS.train.take(here), NEWCOMERS.keys[here])
        torch.testing.assert_close(_predictions(training, one)[0], together[position], rtol=0, atol=1e-12)


@every_sharing_method
def test_a_new_client_leaves_the_federation_as_it_is(method: str) -> None:
    training = make_training(method)
    state, twin = advance(training), advance(training)
    for fine_tune_epochs in (0, 1):
        personalizer = make_personalizer(training, fine_tune_epochs=fine_tune_epochs)
        personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
        personalizer.predictors(state, training.federation)
    assert same_states(state, twin)


@every_sharing_method
def test_engines_agree_on_new_clients(method: str) -> None:
    training = make_training(method)
    state = advance(training)
    for fine_tune_epochs in (0, 1):
        first, second, third = (
            _predictions(
                training,
                make_personalizer(training, engine, fine_tune_epochs=fine_tune_epochs).personalize(
                    state, NEWCOMERS.train, NEWCOMERS.keys
                ),
            )
            for engine in (OneByOne(), Stacked(), Stacked(2))
        )
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
        torch.testing.assert_close(first, third, rtol=0, atol=1e-12)


@every_method
def test_engines_agree_on_fine_tuned_clients(method: str) -> None:
    training = make_training(method)
    state = advance(training)
    scores = []
    for engine in (OneByOne(), Stacked(), Stacked(2)):
        found = make_personalizer(training, engine, fine_tune_epochs=1).predictors(state, training.federation)
        scores.append(evaluate(training.algorithm, engine, found, training.federation))
    for part in ("train", "test"):
        assert bool(torch.isfinite(scores[0][part].losses).all())
        for other in scores[1:]:
            torch.testing.assert_close(scores[0][part].losses, other[part].losses, rtol=0, atol=1e-12)


@every_sharing_method
def test_a_new_clients_predictor_can_be_settled(method: str) -> None:
    training = make_training(method)
    personalizer = make_personalizer(training)
    found = personalizer.personalize(advance(training), NEWCOMERS.train, NEWCOMERS.keys)
    again = replace(personalizer, mixer=Settled()).predictors(found.settled(3), NEWCOMERS)
    assert torch.equal(_predictions(training, again), _predictions(training, found))


# Fine-tuning.

# pFedMe's own models come from other batches, and FedFOMO's clients keep some samples for other ends.
LOWERING = [method for method in METHODS if method not in ("pfedme", "fedfomo")]


def _tunable(method: str) -> Training:
    """Plain descent over whole batches."""
    settings = {"inner_rate": 0.02} if method == "perfedavg" else {}
    return make_training(method, solver=SGD(), batching=Batching(0, local_epochs=3), **settings)


def _gently(training: Training, learning_rate: float = 0.01) -> Personalizer:
    return replace(make_personalizer(training, fine_tune_epochs=1), learning_rate=learning_rate)


@pytest.mark.parametrize("method", LOWERING)
def test_fine_tuning_lowers_everybodys_training_loss(method: str) -> None:
    """A client that trains for itself alone descends its own loss, whatever its method does for the others."""
    training = _tunable(method)
    state = advance(training, 5)
    before = make_personalizer(training).predictors(state, training.federation)
    after = _gently(training).predictors(state, training.federation)
    samples = training.federation.train
    fall = _losses(training, before, samples) - _losses(training, after, samples)
    assert bool((fall > 0).all()), fall


@pytest.mark.parametrize("method", [method for method in LOWERING if method != "local"])
def test_fine_tuning_lowers_every_new_clients_training_loss(method: str) -> None:
    training = _tunable(method)
    state = advance(training, 5)
    personalizers = [_gently(training, rate) for rate in (1e-9, 0.01)]
    if method == "perfedavg":
        personalizers[0] = replace(personalizers[0], fine_tune_epochs=0)
    before, after = (
        _losses(training, personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys), NEWCOMERS.train)
        for personalizer in personalizers
    )
    assert bool((before - after > 0).all()), before - after


def _one_epoch(training: Training, start: Tree, samples: Samples, keys: Tensor, position: int, rate: float) -> Tree:
    """One pass of torch's own SGD over a client's samples, in the order that its key gives."""
    data = samples.client(position)
    layer = torch.nn.Linear(4, 1).double()
    layer.load_state_dict(start)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9, weight_decay=0.01)
    plan = BatchPlan(Batching(4), samples.sizes[position : position + 1], derive(keys[position], FINE_TUNE, 0)[None])
    for step in range(int(plan.steps)):
        rows = plan.batch(step, 1).positions[0]
        optimizer.zero_grad()
        training.algorithm.model.loss.negative_log_likelihood(layer(data[0][rows]), data[1][rows]).mean().backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in layer.state_dict().items()}


@both_engines
@pytest.mark.parametrize("method", ["fedavg+", "fedprox", "qffl", "afl", "scaffold"])
def test_one_epoch_of_fine_tuning_is_one_epoch_of_sgd_from_the_shared_model(
    method: str, engine: OneByOne | Stacked
) -> None:
    """FedAvg+ (Jiang et al.), and the same for the other methods with one model."""
    training = make_training(method, engine=engine, **({"mu": 0.0} if method == "fedprox" else {}))
    state = advance(training)
    personalizer = make_personalizer(training, fine_tune_epochs=1)
    shared = {name.removeprefix("model/"): leaf[0] for name, leaf in state.shared.items() if "control" not in name}
    seen = personalizer.predictors(state, training.federation)
    unseen = personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    for found, federation in ((seen, training.federation), (unseen, NEWCOMERS)):
        for position in range(federation.num_clients):
            expected = _one_epoch(training, shared, federation.train, federation.keys, position, 0.2)
            components = found.of(training.algorithm, position).components
            for name, leaf in expected.items():
                torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


def test_per_fedavgs_fine_tuning_takes_its_inner_step() -> None:
    training = make_training("perfedavg", inner_rate=0.03)
    state = advance(training)
    found = make_personalizer(training, fine_tune_epochs=1).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    start = tree_index(state.shared, 0)
    for position in range(3):
        expected = _one_epoch(training, start, NEWCOMERS.train, NEWCOMERS.keys, position, 0.03)
        components = found.of(training.algorithm, position).components
        for name, leaf in expected.items():
            torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


def test_local_clients_fine_tune_their_own_models() -> None:
    training = make_training("local")
    state = advance(training)
    found = make_personalizer(training, fine_tune_epochs=1).predictors(state, training.federation)
    federation = training.federation
    for position in range(5):
        start = tree_index(state.shared, position)
        expected = _one_epoch(training, start, federation.train, federation.keys, position, 0.2)
        components = found.of(training.algorithm, position).components
        for name, leaf in expected.items():
            torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


# Method by method.


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "qffl", "afl", "scaffold", "perfedavg"])
def test_a_new_clients_predictor_is_the_shared_model(method: str) -> None:
    training = make_training(method)
    state = advance(training)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    shared = {name.removeprefix("model/"): leaf[0] for name, leaf in state.shared.items() if "control" not in name}
    expected = training.algorithm.model.loss.probabilities(training.algorithm.model.outputs(shared, INPUTS))
    for prediction in _predictions(training, found):
        torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-14)


def test_one_iteration_of_fedem_is_one_update_of_em() -> None:
    training = make_training("fedem", num_components=3)
    state = advance(training)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys, 1)
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


def test_more_iterations_of_fedem_fit_better() -> None:
    training = make_training("fedem", num_components=3)
    state = advance(training, 10)
    personalizer = make_personalizer(training)
    losses = [
        _losses(training, personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys, count), NEWCOMERS.train)
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
    falls = _losses(fedavg, shared_alone, NEWCOMERS.train) - _losses(training, found, NEWCOMERS.train)
    assert bool((falls > 0).all())


def test_a_new_client_of_ditto_solves_its_own_problem_around_the_shared_model() -> None:
    """As many passes as asked for; with many, the minimiser of f + pull/2 |v - u|^2."""
    training = make_training("ditto", solver=SGD(), batching=Batching(0), pull=0.5)
    state = advance(training)
    personalizer = make_personalizer(training)
    found = personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys, 150)
    model, shared = training.algorithm.model, tree_index(state.shared, 0)
    for position in range(3):
        own = {name: leaf.clone().requires_grad_() for name, leaf in tree_index(found.personal, position).items()}
        value = model.losses(own, *NEWCOMERS.train.client(position)).mean()
        value = value + 0.25 * sum((own[name] - shared[name]).square().sum() for name in own)
        slopes = torch.autograd.grad(value, list(own.values()))
        assert max(float(slope.abs().max()) for slope in slopes) < 1e-6


@pytest.mark.parametrize("method", ["l2sgd", "fedu", "mocha"])
def test_a_new_client_without_samples_takes_the_mean_of_all_models(method: str) -> None:
    training = make_training(method)
    state = advance(training)
    x, y = NEWCOMERS.train.client(0)
    nobody = Samples(x[:0], y[:0], torch.tensor([0, 0]))
    found = make_personalizer(training).personalize(state, nobody, client_keys(["ida"]))
    mixture = found.of(training.algorithm, 0)
    for name in ("weight", "bias"):
        leaf = state.shared[f"task/{name}" if method == "mocha" else name]
        torch.testing.assert_close(mixture.components[name][0], leaf.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", ["l2sgd", "fedu"])
def test_a_new_client_fine_tunes_the_mean_of_all_models(method: str) -> None:
    training = make_training(method)
    state = advance(training)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys, 1)
    start = {name: leaf.mean(0) for name, leaf in state.shared.items()}
    for position in range(3):
        expected = _one_epoch(training, start, NEWCOMERS.train, NEWCOMERS.keys, position, 0.2)
        components = found.of(training.algorithm, position).components
        for name, leaf in expected.items():
            torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


def test_a_new_client_of_pfedhn_learns_an_embedding_from_the_mean_of_all() -> None:
    training = make_training("pfedhn", embedding_rate=0.3)
    state = advance(training)
    mixer, memory = training.mixer, state.memory

    def made(vector: torch.Tensor) -> dict[str, torch.Tensor]:
        one = {**memory, "embeddings": vector[None]}
        return tree_index(mixer.serve(state.shared, one, torch.tensor([0]), 0).shared, 0)

    embedding = memory["embeddings"].mean(0).requires_grad_()
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys, 1)
    for position in range(3):
        start = {name: leaf.detach() for name, leaf in made(embedding).items()}
        trained = _one_epoch(training, start, NEWCOMERS.train, NEWCOMERS.keys, position, 0.2)
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
        found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys, passes)
        losses.append(evaluate(training.algorithm, training.engine, found, NEWCOMERS)["train"].loss)
    assert losses[1] < losses[0]


def test_an_old_client_that_comes_back_as_new_is_served_as_well_as_before() -> None:
    """Whoever trained the model fits it: the loss of a returning client is that of its kind, not of a stranger."""
    for method in ("fedem", "clustered", "ifca"):
        settings = {"mean_tolerance": 1e9, "member_tolerance": 0.0} if method == "clustered" else {}
        training = make_training(method, **settings)
        state = advance(training, 8)
        personalizer = make_personalizer(training)
        federation: Federation = training.federation
        seen = _losses(training, personalizer.predictors(state, federation), federation.train)
        again = personalizer.personalize(state, federation.train, federation.keys)
        assert bool((_losses(training, again, federation.train) <= seen + 1e-5).all())
