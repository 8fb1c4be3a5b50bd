"""Servers that step by an optimiser of their own: the rules against numpy, and rounds against rounds without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DIMENSION, advance, distance, make_federation, make_training, same_states, stacked
from torch import nn

from fedem.core.tree import Tree, take_prefix, tree_map
from fedem.engines import OneByOne
from fedem.methods import METHODS
from fedem.methods.mixer import Mixed, Mixer, Star
from fedem.methods.wrappers.compression import Codec, Compression
from fedem.methods.wrappers.local_layers import LocalLayers
from fedem.methods.wrappers.server_steps import (
    SERVER_RULES,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    ServerRule,
    ServerSteps,
)
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.runs.rounds import State, Training

RULES: dict[str, ServerRule] = {
    "momentum": FedAvgM(0.7, 0.6),
    "adagrad": FedAdagrad(0.2, 0.05),
    "adam": FedAdam(0.2, 0.05, beta1=0.8, beta2=0.6),
    "yogi": FedYogi(0.2, 0.05, beta1=0.8, beta2=0.6),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def numpy_steps(rule: Any, changes: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """The steps of Algorithm 2 of Reddi et al., and of Hsu et al.'s momentum, for one leaf's change in each round."""
    steps, m = [], np.zeros_like(changes[0])
    v = np.full_like(changes[0], getattr(rule, "tau", 0.0) ** 2)
    for d in changes:
        if isinstance(rule, FedAvgM):
            m = rule.momentum * m + d
            steps.append(rule.learning_rate * m)
            continue
        beta1 = 0.0 if isinstance(rule, FedAdagrad) else rule.beta1
        m = beta1 * m + (1 - beta1) * d
        if isinstance(rule, FedAdagrad):
            v = v + d**2
        elif isinstance(rule, FedAdam):
            v = rule.beta2 * v + (1 - rule.beta2) * d**2
        else:
            v = v - (1 - rule.beta2) * d**2 * np.sign(v - d**2)
        steps.append(rule.learning_rate * m / (np.sqrt(v) + rule.tau))
    return steps


def with_steps(training: Training, rule: ServerRule) -> Training:
    return replace(training, mixer=ServerSteps(training.mixer, rule, of_updates=training.codec is not None))


def with_codec(training: Training, compression: Compression) -> Training:
    codec = Codec(compression, training.algorithm.model, int(training.algorithm.is_mixture))
    return replace(training, codec=codec)


def plain_step(plain: Training, state: State) -> Tree:
    """Where the server would go from ``state``, if it took the mean."""
    memory = {name: leaf for name, leaf in state.memory.items() if not name.startswith(("base/", "moments/"))}
    return plain.step(replace(state, memory=memory))[0].shared


def normalising() -> Model:
    return Model(
        lambda: nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)), Logistic(), torch.float64
    )


@every_rule
def test_a_rule_is_the_papers(rule: ServerRule) -> None:
    rng = np.random.default_rng(3)
    # Changes above and below what v has seen, of both signs, and none.
    changes = [scale * rng.normal(size=(1, 4, 3)) for scale in (0.1, 1.0, 0.01, 0.0, 0.2, 3.0, 0.05)]
    moments = rule.init({"w": torch.zeros(1, 4, 3, dtype=torch.float64)})
    for change, expected in zip(changes, numpy_steps(rule, changes), strict=True):
        steps, moments = rule.step({"w": torch.from_numpy(change)}, moments)
        np.testing.assert_allclose(steps["w"].numpy(), expected, rtol=1e-12, atol=1e-15)


@every_rule
@pytest.mark.parametrize("method", ["fedavg", "fedem", "fedprox", "ditto"])
def test_a_run_steps_along_the_mean_of_the_changes(method: str, rule: ServerRule) -> None:
    plain = make_training(method, cohort_size=3)
    training = with_steps(plain, rule)
    states, changes = [training.init()], []
    for _ in range(4):
        mean = plain_step(plain, states[-1])
        changes.append(tree_map(torch.sub, mean, states[-1].shared))
        states.append(training.step(states[-1])[0])
    for name in states[0].shared:
        steps = numpy_steps(rule, [change[name].numpy() for change in changes])
        for before, after, step in zip(states, states[1:], steps, strict=False):
            np.testing.assert_allclose((after.shared[name] - before.shared[name]).numpy(), step, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("compression", [Compression(), Compression("int8", "int8")], ids=["whole", "compressed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_momentum_of_none_at_rate_one_is_the_mean_to_the_bit(compression: Compression, dtype: torch.dtype) -> None:
    model = Model(lambda: nn.Linear(DIMENSION, 1), Logistic(), dtype)
    federation = make_federation(dtype=np.float32 if dtype == torch.float32 else np.float64)
    plain = make_training("fedem", federation, model=model, cohort_size=3)
    if compression.is_on:
        plain = with_codec(plain, compression)
    found, known = advance(with_steps(plain, FedAvgM(1.0, 0.0)), 4), advance(plain, 4)
    memory = {name: leaf for name, leaf in found.memory.items() if not name.startswith("moments/")}
    assert same_states(replace(found, memory=memory), known)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.takes_server_steps])
def test_every_method_that_takes_it_steps_to_the_mean_and_beyond(method: str) -> None:
    plain = make_training(method)
    trainings = [plain, *(with_steps(plain, FedAvgM(1.0, momentum)) for momentum in (0.0, 0.5))]
    known, found, further = (replace(advance(training, 2), memory={}) for training in trainings)
    assert same_states(found, known)
    assert distance(further, known) > 1e-3


def test_momentum_follows_a_steady_change_faster_by_its_geometric_sum() -> None:
    rule, change = FedAvgM(1.0, 0.75), {"w": torch.ones(1, 2, dtype=torch.float64)}
    moments = rule.init(change)
    for _ in range(200):
        steps, moments = rule.step(change, moments)
    torch.testing.assert_close(steps["w"], 4 * change["w"])


@pytest.mark.parametrize("name", ["adagrad", "adam", "yogi"])
def test_adaptive_steps_do_not_depend_on_the_unit_of_the_changes(name: str) -> None:
    """With tau far below them, changes of another size lead to the same steps."""
    rule, rng = SERVER_RULES[name](tau=1e-12), np.random.default_rng(0)
    found = []
    changes = rng.normal(size=(6, 1, 5))
    for unit in (1.0, 1e3):
        moments = rule.init({"w": torch.zeros(1, 5, dtype=torch.float64)})
        for change in changes:
            steps, moments = rule.step({"w": torch.from_numpy(unit * change)}, moments)
        found.append(steps["w"])
    torch.testing.assert_close(*found)


@every_rule
def test_loop_equals_stacked(rule: ServerRule) -> None:
    states = [
        advance(with_steps(make_training("fedem", engine=engine), rule), 3)
        for engine in (OneByOne(), stacked(), stacked(2))
    ]
    assert distance(states[0], states[1]) < 1e-10
    assert distance(states[0], states[2]) < 1e-10


@every_rule
def test_a_mixture_of_one_is_fedavg(rule: ServerRule) -> None:
    mixture = with_steps(make_training("fedem", num_components=1), rule)
    fedavg = with_steps(make_training("fedavg"), rule)
    start = fedavg.init()
    # The seed draws other first models for a mixture.
    alike = replace(mixture.init(), shared=tree_map(lambda leaf: leaf[:, None], start.shared))
    one, single = advance(mixture, 3, alike), advance(fedavg, 3, start)
    for kind in ("shared", "memory"):
        components, model = getattr(one, kind), getattr(single, kind)
        assert components.keys() == model.keys()
        for name, leaf in model.items():
            torch.testing.assert_close(components[name][:, 0], leaf)


@pytest.mark.parametrize("compression", [Compression(), Compression("int8")], ids=["whole", "compressed"])
def test_buffers_and_counters_are_averaged(compression: Compression) -> None:
    plain = make_training("fedavg", make_federation(sizes=(7, 4, 12)), model=normalising())
    if compression.is_on:
        plain = with_codec(plain, compression)
    training = with_steps(plain, RULES["adam"])
    state = advance(training, 2)
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert take_prefix("moments/second", state.memory).keys() == state.shared.keys() - buffers
    after, mean = training.step(state)[0].shared, plain_step(plain, state)
    for name, leaf in mean.items():
        assert torch.equal(after[name], leaf) == (name in buffers), name
    assert bool((after["1.running_var"] > 0).all())


def test_leaves_that_are_frozen_stay() -> None:
    def build() -> nn.Module:
        network = nn.Sequential(nn.Linear(DIMENSION, 5), nn.Linear(5, 1))
        network[0].requires_grad_(False)
        return network

    training = with_steps(make_training("fedem", model=Model(build, Logistic(), torch.float64)), RULES["yogi"])
    start = training.init()
    after = advance(training, 2, start)
    assert take_prefix("moments/first", after.memory).keys() == {"1.weight", "1.bias"}
    for name, leaf in start.shared.items():
        changed = float((after.shared[name] - leaf).abs().max())
        assert (changed > 1e-3) == name.startswith("1."), name
        assert changed < 1e-12 or name.startswith("1."), name


@every_rule
@pytest.mark.parametrize("downloads", ["none", "int8"])
def test_compressed_messages_are_stepped_by_the_mean_that_they_say(rule: ServerRule, downloads: str) -> None:
    """What the server announces, and what it left unsaid, are its steps: those of the mean that it decoded."""
    plain = make_training("fedem", cohort_size=3)
    whole, heard = (with_codec(plain, Compression("int8", form)) for form in (downloads, "none"))
    training = with_steps(whole, rule)
    states, changes = [training.init()], []
    for _ in range(3):
        changes.append(tree_map(torch.sub, plain_step(heard, states[-1]), states[-1].shared))
        states.append(training.step(states[-1])[0])
    for name in states[0].shared:
        steps = numpy_steps(rule, [change[name].numpy() for change in changes])
        for before, after, step in zip(states, states[1:], steps, strict=False):
            made = after.shared[name] - before.shared[name]
            if downloads != "none":
                made = made + after.memory[f"rest/{name}"] - before.memory[f"rest/{name}"]
            np.testing.assert_allclose(made.numpy(), step, rtol=1e-9, atol=1e-12)


def local(training: Training, mixer: Mixer) -> Training:
    return replace(training, mixer=LocalLayers(mixer, training.algorithm.model.normalising))


def test_layers_that_stay_with_their_clients_are_not_stepped() -> None:
    plain = make_training("fedem", make_federation(sizes=(7, 4, 12)), model=normalising())
    kept, stepped = local(plain, Star()), local(plain, ServerSteps(Star(), RULES["adam"]))
    start = stepped.init()
    bare = {name: leaf for name, leaf in start.memory.items() if not name.startswith("base/")}
    mean, after = kept.step(replace(start, memory=bare))[0], stepped.step(start)[0]
    for name, leaf in mean.memory.items():
        assert torch.equal(after.memory[name], leaf), name
    assert take_prefix("base/moments/first", after.memory).keys() == after.shared.keys()
    for name, leaf in mean.shared.items():
        (step,) = numpy_steps(RULES["adam"], [(leaf - start.shared[name]).numpy()])
        np.testing.assert_allclose((after.shared[name] - start.shared[name]).numpy(), step, rtol=1e-9, atol=1e-13)


def test_what_the_mixer_within_remembers_and_says_is_kept() -> None:
    class Counting(Star):
        def init(self, start: Any) -> tuple[Tree, Tree]:
            return super().init(start)[0], {"rounds": torch.zeros(1, dtype=torch.int64)}

        def mix(self, shared: Tree, memory: Tree, *rest: Any) -> tuple[Mixed, Tree]:
            return super().mix(shared, {}, *rest)[0], {"rounds": memory["rounds"] + 1}

        def summary(self, memory: Tree, cohort_size: int) -> dict[str, float]:
            return {"rounds_mixed": float(memory["rounds"])}

    training = make_training("fedavg", cohort_size=2)
    mixer = ServerSteps(Counting(weighting="equal"), FedYogi())
    state = advance(replace(training, mixer=mixer), 3)
    assert mixer.summary(state.memory, 2) == {"rounds_mixed": 3.0}
    assert mixer.share(training.round(0, torch.tensor([1, 3])), 0.9) == 2 / 5
    assert torch.equal(mixer.welcome(state.shared, state.memory).shared["weight"], state.shared["weight"])
