"""What every method must do for clients unseen in training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import advance, make_federation, make_personalizer, make_training, same_states, stacked
from newcomers import NEWCOMERS, both_engines, every_method, every_sharing_method, losses_of, predict_all

from fedem.core.errors import UserError
from fedem.core.random import client_keys
from fedem.data.samples import Pool, Samples, offsets_of
from fedem.engines import Engine, OneByOne
from fedem.methods.mixer import Settled
from fedem.runs.evaluate import evaluate
from fedem.runs.rounds import State, Training


@cache
def trained(method: str) -> tuple[Training, State]:
    """A federation after two rounds; personalising leaves it as it is."""
    training = make_training(method)
    return training, advance(training, 2)


@both_engines
@every_sharing_method
def test_a_new_client_is_given_a_predictor(method: str, engine: Engine) -> None:
    training, state = trained(method)
    found = make_personalizer(training, engine).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    predictions = predict_all(training, found)
    assert predictions.shape == (3, 24, 2)
    torch.testing.assert_close(predictions.sum(-1), torch.ones(3, 24, dtype=torch.float64))
    scores = evaluate(training.algorithm, engine, found, NEWCOMERS)
    torch.testing.assert_close(scores["train"].losses, losses_of(training, found, NEWCOMERS.train), rtol=0, atol=1e-12)


@every_sharing_method
def test_whoever_else_is_fitted_a_new_client_gets_the_same(method: str) -> None:
    """One by one, or together with larger and smaller clients and some without samples."""
    training, state = trained(method)
    drawn = make_federation(sizes=(6, 3, 15, 1, 40), seed=9).train
    sizes = torch.tensor([6, 0, 3, 15, 0, 1, 40])
    many, keys = Samples(drawn.pool, offsets_of(sizes)), client_keys(list("abcdefg"))
    engines = (OneByOne(), stacked(), stacked(chunk_size=2), stacked(max_bytes=1))
    makers = [make_personalizer(training, engine) for engine in engines]
    expected, *others = [predict_all(training, maker.personalize(state, many, keys)) for maker in makers]
    for found in others:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    alone = [makers[1].personalize(state, many.take(at), keys[at]) for at in torch.arange(7).split(1)]
    torch.testing.assert_close(torch.cat([predict_all(training, one) for one in alone]), expected, rtol=0, atol=1e-10)


def test_clients_that_train_alone_leave_nothing_to_a_new_one() -> None:
    training = make_training("local")
    with pytest.raises(UserError, match="train alone leave nothing to share"):
        make_personalizer(training).personalize(training.init(), NEWCOMERS.train, NEWCOMERS.keys)


@both_engines
@pytest.mark.parametrize("fine_tune_epochs", [0, 1])
@every_sharing_method
def test_a_new_client_without_samples_is_given_a_predictor_too(
    method: str, fine_tune_epochs: int, engine: Engine
) -> None:
    training, state = trained(method)
    personalizer = make_personalizer(training, engine, fine_tune_epochs=fine_tune_epochs)
    x, y = NEWCOMERS.train.client(0)
    nobody = Samples(Pool(x[:0], y[:0]), torch.tensor([0, 0]))
    alone = predict_all(training, personalizer.personalize(state, nobody, client_keys(["ida"])))
    assert bool(torch.isfinite(alone).all())
    torch.testing.assert_close(alone.sum(-1), torch.ones(1, 24, dtype=torch.float64))
    # Beside another who has samples.
    both = Samples(Pool(x, y), torch.tensor([0, 0, 6]))
    together = predict_all(training, personalizer.personalize(state, both, client_keys(["ida", "fay"])))
    torch.testing.assert_close(together[0], alone[0], rtol=0, atol=1e-12)
    fay = personalizer.personalize(state, Samples(Pool(x, y), torch.tensor([0, 6])), client_keys(["fay"]))
    torch.testing.assert_close(together[1], predict_all(training, fay)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("fine_tune_epochs", [0, 1])
@every_sharing_method
def test_several_new_clients_at_once_are_as_one_at_a_time(method: str, fine_tune_epochs: int) -> None:
    training, state = trained(method)
    personalizer = make_personalizer(training, fine_tune_epochs=fine_tune_epochs)
    together = predict_all(training, personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys))
    for position in range(3):
        here = torch.tensor([position])
        one = personalizer.personalize(state, NEWCOMERS.train.take(here), NEWCOMERS.keys[here])
        torch.testing.assert_close(predict_all(training, one)[0], together[position], rtol=0, atol=1e-12)


@every_sharing_method
def test_a_new_client_leaves_the_federation_as_it_is(method: str) -> None:
    training, state = trained(method)
    twin = advance(training, 2)
    for fine_tune_epochs in (0, 1):
        personalizer = make_personalizer(training, fine_tune_epochs=fine_tune_epochs)
        personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
        personalizer.predictors(state, training.federation)
    assert same_states(state, twin)


@every_sharing_method
def test_engines_agree_on_new_clients(method: str) -> None:
    training, state = trained(method)
    for fine_tune_epochs in (0, 1):
        first, second, third = (
            predict_all(
                training,
                make_personalizer(training, engine, fine_tune_epochs=fine_tune_epochs).personalize(
                    state, NEWCOMERS.train, NEWCOMERS.keys
                ),
            )
            for engine in (OneByOne(), stacked(), stacked(2))
        )
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
        torch.testing.assert_close(first, third, rtol=0, atol=1e-12)


@every_method
def test_engines_agree_on_fine_tuned_clients(method: str) -> None:
    training, state = trained(method)
    scores = []
    for engine in (OneByOne(), stacked(), stacked(2)):
        found = make_personalizer(training, engine, fine_tune_epochs=1).predictors(state, training.federation)
        scores.append(evaluate(training.algorithm, engine, found, training.federation))
    for part in ("train", "test"):
        assert bool(torch.isfinite(scores[0][part].losses).all())
        for other in scores[1:]:
            torch.testing.assert_close(scores[0][part].losses, other[part].losses, rtol=0, atol=1e-12)


@every_sharing_method
def test_a_new_clients_predictor_can_be_settled(method: str) -> None:
    training, state = trained(method)
    personalizer = make_personalizer(training)
    found = personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    again = replace(personalizer, mixer=Settled()).predictors(found.settled(2), NEWCOMERS)
    assert torch.equal(predict_all(training, again), predict_all(training, found))
