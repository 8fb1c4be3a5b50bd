"""The section [attack]: what hostile clients send, claim and train on, who they are, and whom figures are of."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import TINY
from helpers import DIMENSION, NAMES, SIZES, StopError, distance, make_federation, same_states, stop_at
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.metrics import roc_auc_score
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.core.random import client_keys
from fedem.data.dataset import Dataset
from fedem.data.federation import Federation
from fedem.data.samples import Pool, Samples
from fedem.methods import METHODS
from fedem.methods.wrappers.compression import Codec, Compression
from fedem.models import Linear, Model
from fedem.models.losses import Logistic
from fedem.runs.attacks import ATTACKS, Attack, Attackers, Backdoor, LabelFlip, LieSize, Noise, SignFlip
from fedem.runs.config import Config
from fedem.runs.evaluate import name_scores
from fedem.runs.rounds import DivergedError
from fedem.runs.trainer import Trainer

Array = NDArray[np.float64]
RATE = 0.3
# One step of gradient descent on all samples of a client.
ONE_STEP: dict[str, Any] = {
    "rounds": 1,
    "learning_rate": RATE,
    "batch_size": 0,
    "local_epochs": 1,
    "solver": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0},
    "dtype": "float64",
    "evaluate_every": 0,
}
SHORT: dict[str, Any] = {"rounds": 3, "learning_rate": 0.2, "batch_size": 4, "dtype": "float64"}
HARM = {"name": "sign_flip", "share": 2}


def _prepared(federation: Federation, **options: Any) -> Trainer:
    method = options.pop("method", "fedavg")
    config = Config.build({"data": {"name": "given"}}, fedem.runs.config.route(options, method))
    return Trainer.prepare(config, Dataset(federation))


def _hostile(attack: dict[str, Any], federation: Federation) -> list[int]:
    trainer = _prepared(federation, attack=attack)
    assert trainer.attackers is not None
    return trainer.attackers.are.nonzero().flatten().tolist()


def _flat(tree: dict[str, torch.Tensor]) -> Array:
    """The linear model's weights and its intercept, ``[5]``."""
    return torch.cat([tree["weight"].flatten(), tree["bias"].flatten()]).numpy()


def _change(start: Array, inputs: Array, labels: Array) -> Array:
    """What a step changes: - rate times the gradient of the mean logistic loss."""
    extended = np.column_stack([inputs, np.ones(len(inputs))])
    return -RATE * extended.T @ (expit(extended @ start) - labels) / len(labels)


def _little(honest: Array) -> Array:
    return honest.mean(0) - 0.7 * honest.std(0)


SENT: dict[str, tuple[dict[str, Any], Callable[[Array, Array], Array]]] = {
    "sign_flip": ({"scale": 2.5}, lambda own, honest: -2.5 * own),
    "scaling": ({"factor": 1000}, lambda own, honest: 1000 * own),
    "huge": ({"value": -1e12}, lambda own, honest: np.full_like(own, -1e12)),
    "collusion": ({"scale": 3.0}, lambda own, honest: -3 * honest.mean(0)),
    "little": ({"z": 0.7}, lambda own, honest: _little(honest)),
}


@pytest.mark.parametrize("name", SENT)
def test_a_servers_mean_is_that_of_what_hostile_clients_send(name: str) -> None:
    federation, (settings, sent) = make_federation(), SENT[name]
    attack = {"name": name, "share": 2, **settings}
    start = _flat(_prepared(federation, **ONE_STEP).training.init().shared)
    pairs = [[array.numpy() for array in federation.train.client(t)] for t in range(5)]
    changes, bad = np.array([_change(start, *pair) for pair in pairs]), _hostile(attack, federation)
    honest = np.delete(changes, bad, axis=0)
    for t in bad:
        changes[t] = sent(changes[t], honest)
    found = _flat(fedem.train(federation, "fedavg", attack=attack, **ONE_STEP).state().shared)
    np.testing.assert_allclose(found, start + np.array(SIZES) @ changes / sum(SIZES), rtol=1e-10)


def test_a_claimed_size_is_what_the_server_weighs_by() -> None:
    federation, attack = make_federation(), {"name": "lie_size", "share": 2, "claim": 1000}
    start = _flat(_prepared(federation, **ONE_STEP).training.init().shared)
    changes = np.array([_change(start, *(each.numpy() for each in federation.train.client(t))) for t in range(5)])
    sizes = np.array(SIZES)
    sizes[_hostile(attack, federation)] = 1000
    found = _flat(fedem.train(federation, "fedavg", attack=attack, **ONE_STEP).state().shared)
    np.testing.assert_allclose(found, start + sizes @ changes / sizes.sum(), rtol=1e-12)
    alike = [
        fedem.train(federation, "fedavg", weighting="equal", **ONE_STEP, **more) for more in ({}, {"attack": attack})
    ]
    assert same_states(alike[0].state(), alike[1].state()), "where clients count alike, a claim is for nothing"


@pytest.mark.parametrize(
    ("name", "settings"), [("label_flip", {}), ("backdoor", {"poisoned": 1.0, "size": 2, "value": 4})]
)
def test_samples_are_changed_before_training_and_nothing_else(name: str, settings: dict[str, Any]) -> None:
    federation, attack = make_federation(), {"name": name, "share": 2, **settings}
    start = _flat(_prepared(federation, **ONE_STEP).training.init().shared)
    changes, bad = [], _hostile(attack, federation)
    for t in range(5):
        inputs, labels = (array.numpy().copy() for array in federation.train.client(t))
        if t in bad and name == "label_flip":
            labels = 1 - labels
        elif t in bad:
            inputs[:, -2:], labels[:] = 4, 0
        changes.append(_change(start, inputs, labels))
    before = federation.fingerprint
    found = _flat(fedem.train(federation, "fedavg", attack=attack, **ONE_STEP).state().shared)
    np.testing.assert_allclose(found, start + np.array(SIZES) @ changes / sum(SIZES), rtol=1e-12)
    assert replace(federation).fingerprint == before


def test_labels_go_by_a_shift_or_the_other_way_round() -> None:
    pool = Pool(torch.zeros(6, 1), torch.tensor([0, 1, 2, 3, 4, 0]))
    key = torch.tensor(0)
    assert LabelFlip().corrupted(pool, key, 5).targets.tolist() == [4, 3, 2, 1, 0, 4]
    assert LabelFlip(shift=2).corrupted(pool, key, 5).targets.tolist() == [2, 3, 4, 0, 1, 2]


def test_a_mark_is_a_square_of_an_image_and_so_many_samples_get_it() -> None:
    inputs = torch.arange(7 * 2 * 5 * 4).reshape(7, 2, 5, 4).to(torch.uint8)
    backdoor = Backdoor(size=2, value=0.5, target=3, poisoned=0.4)
    found = backdoor.corrupted(Pool(inputs, torch.full((7,), 9)), torch.tensor(5), 10)
    marked = found.targets == 3
    assert int(marked.sum()) == 3
    assert torch.equal(found.inputs[~marked], inputs[~marked])
    expected = inputs[marked].clone()
    expected[:, :, 3:, 2:] = 128
    assert torch.equal(found.inputs[marked], expected)
    # Others of another client.
    drawn = [backdoor.corrupted(Pool(inputs, torch.full((7,), 9)), torch.tensor(key), 10).targets for key in range(9)]
    assert len({tuple(each.tolist()) for each in drawn}) > 1


def test_only_hostile_clients_samples_are_others_and_only_for_training() -> None:
    federation = make_federation()
    shuffled = federation.take(torch.tensor([3, 0, 4, 1, 2]))  # rows of a pool, and not the pool
    trainer = _prepared(shuffled, attack={"name": "label_flip", "share": 2})
    assert trainer.attackers is not None
    for t, bad in enumerate(trainer.attackers.are.tolist()):
        mine, known = trainer.training.federation.train.client(t), shuffled.train.client(t)
        assert torch.equal(mine.inputs, known.inputs)
        assert torch.equal(mine.targets, 1 - known.targets if bad else known.targets)
    assert trainer.training.federation.test is trainer.federation.test
    assert trainer.federation.train is shuffled.train


def test_noise_is_gaussian_and_as_long_as_asked_for() -> None:
    changes, keys = torch.zeros(3, 40_000, dtype=torch.float64), torch.arange(3)
    changes[:, 0] = torch.tensor([1.0, 2.0, 0.0])
    sent = Noise(multiple=5.0).falsified(changes, keys, torch.empty(0))
    assert float(sent[0].norm()) == pytest.approx(5, rel=0.02)
    assert float(sent[1].norm()) == pytest.approx(10, rel=0.02)
    assert not bool(sent[2].any())
    standard = sent[0] / sent[0].std()
    assert float(standard.mean()) == pytest.approx(0, abs=0.02)
    assert float((standard.abs() < 1).double().mean()) == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.01)
    assert abs(float(torch.corrcoef(sent[:2])[0, 1])) < 0.02


def test_noise_differs_from_round_to_round() -> None:
    federation, attack = make_federation(), {"name": "noise", "share": 1}
    trainer = _prepared(federation, attack=attack, **SHORT)
    state, training = trainer.training.init(), trainer.training
    first, again = training.step(state)[0], training.step(state)[0]
    assert same_states(first, again)
    later = training.step(replace(state, round=1))[0]
    assert distance(replace(first, round=2), later) > 0.01


def test_who_is_hostile_goes_by_seed_and_names() -> None:
    names = [f"client {number}" for number in range(40)]
    keys = client_keys(names)

    quarter = SignFlip(share=0.25)

    def chosen(order: list[int], seed: int, attack: Attack = quarter) -> set[str]:
        found = Attackers.among(keys[order], attack, seed)
        return {names[order[t]] for t in found.are.nonzero().flatten().tolist()}

    plain, mixed = list(range(40)), torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
    assert chosen(plain, 0) == chosen(mixed, 0) == chosen(plain, 0, LieSize(share=0.25))
    assert len(chosen(plain, 0)) == 10
    assert chosen(plain, 0) != chosen(plain, 1)
    assert chosen(plain, 0, SignFlip(share=4)) < chosen(plain, 0), "more attackers are the same ones and further ones"


def _figures(result: fedem.Result) -> dict[str, Any]:
    """What a summary says of the training, and neither of the machine nor of attackers."""
    others = ("seconds", "peak", "hostile", "backdoor")
    return {key: value for key, value in result.summary.items() if not key.startswith(others)}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_hostile_clients_are_no_attack(name: str) -> None:
    plain, found = (
        fedem.train(make_federation(), "fedem", unseen=0.2, **SHORT, **more)
        for more in ({}, {"attack": {"name": name, "share": 0}})
    )
    assert same_states(plain.state(), found.state())
    assert found.clients == plain.clients
    assert found.summary["hostile_clients"] == 0
    assert _figures(plain) == _figures(found)
    assert "hostile_clients" not in plain.summary


SEVERAL = [
    ("fedem", {}),
    ("fedem", {"compression": {"updates": "int8", "downloads": "bfloat16", "threshold": 0.3}}),
    ("fedavg", {"clients_per_round": 3, "server": "momentum"}),
    ("dfedem", {"graph": "ring"}),
    ("clustered", {}),
]


@pytest.mark.parametrize(
    ("case", "name"), [(SEVERAL[index % len(SEVERAL)], name) for index, name in enumerate(("none", *ATTACKS))]
)
def test_engines_and_chunks_agree(case: tuple[str, dict[str, Any]], name: str) -> None:
    method, more = case
    attack = {"name": name} | ({} if name == "none" else {"share": 2})
    settings = {"attack": attack, "evaluate_every": 0, **SHORT, **more}
    loop, *stacked = (
        fedem.train(make_federation(), method, engine=engine, chunk_size=size, **settings).state()
        for engine, size in (("one_by_one", 0), ("stacked", 0), ("stacked", 2))
    )
    size = max(float(leaf.abs().max()) for leaf in loop.shared.values())
    assert all(distance(loop, each) < 1e-10 * size for each in stacked)


@pytest.mark.parametrize("name", ["noise", "little", "backdoor"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    def run(out: Path, **more: Any) -> fedem.Result:
        attack, settings = {"name": name, "share": 2}, {"rounds": 4, "checkpoint_every": 2, "clients_per_round": 4}
        return fedem.train(make_federation(), "fedem", attack=attack, out=out, **settings, **more)

    whole = run(tmp_path / "whole")
    with pytest.raises(StopError):
        run(tmp_path / "stopped", listener=stop_at(3))
    resumed = run(tmp_path / "stopped", resume=True)
    assert same_states(whole.state(), resumed.state())
    assert resumed.clients == whole.clients
    with pytest.raises(UserError, match=r"attack\.share"):
        fedem.train(
            make_federation(), "fedem", attack={"name": name, "share": 1}, out=tmp_path / "whole", resume=True, rounds=4
        )


def test_compressed_messages_are_falsified_as_the_server_reads_them() -> None:
    federation, settings = make_federation(), ONE_STEP | {"compression": {"updates": "bfloat16"}}
    start = _flat(_prepared(federation, **ONE_STEP).training.init().shared)
    changes = np.array([_change(start, *(each.numpy() for each in federation.train.client(t))) for t in range(5)])
    read = torch.from_numpy(changes).to(torch.bfloat16).double().numpy()
    read[_hostile(HARM, federation)] *= -1  # exact in any floating type
    found = fedem.train(federation, "fedavg", attack=HARM, **settings)
    np.testing.assert_allclose(_flat(found.state().shared), start + np.array(SIZES) @ read / sum(SIZES), rtol=1e-12)
    plain = fedem.train(federation, "fedavg", **settings)
    assert found.history[0]["bytes_up"] == plain.history[0]["bytes_up"]


@pytest.mark.parametrize("updates", ["none", "bfloat16", "int8"])
def test_a_message_is_rewritten_in_its_own_form(updates: str) -> None:
    model = Model(lambda: Linear().build((DIMENSION,), 1), Logistic(), torch.float64)
    codec = Codec(Compression(updates, threshold=0.2), model, 1)
    old = {name: torch.zeros(3, *shape, dtype=torch.float64) for name, shape in model.leaf_shapes.items()}
    generator = torch.Generator().manual_seed(0)
    new = {name: torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator) for name, leaf in old.items()}
    log_weights = torch.tensor([0.5, 0.1, 0.4]).log()
    message, _ = codec.encode(new, old, {"log_weights": log_weights}, codec.first_residual(old))
    other = {name: -7 * leaf for name, leaf in new.items()}
    rewritten = codec.rewrite(message, other)
    assert {name: (leaf.dtype, leaf.shape) for name, leaf in rewritten.items()} == {
        name: (leaf.dtype, leaf.shape) for name, leaf in message.items()
    }
    for name, leaf in codec.decode(rewritten).items():
        assert not bool(leaf[1].any()), "a component that was not sent stays so"
        sent = leaf[[0, 2]]
        torch.testing.assert_close(sent, other[name][[0, 2]], rtol=1e-2, atol=float(sent.abs().max()) / 100)


def test_layers_that_stay_with_a_client_are_not_falsified() -> None:
    model = nn.Sequential(nn.Linear(DIMENSION, 3), nn.Linear(3, 1))
    settings: dict[str, Any] = {"model": model, "local_layers": "head", **ONE_STEP}
    plain = fedem.train(make_federation(), "fedavg", **settings).state()
    found = fedem.train(make_federation(), "fedavg", attack={"name": "huge", "share": 2}, **settings).state()
    assert all(torch.equal(found.memory[name], plain.memory[name]) for name in plain.memory)
    assert float(found.shared["0.weight"].abs().min()) > 1e28


def test_buffers_go_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(DIMENSION, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    federation = make_federation(sizes=(7, 4, 10, 14, 5))
    settings: dict[str, Any] = {"model": model, **ONE_STEP}
    plain = fedem.train(federation, "fedavg", **settings).state().shared
    found = fedem.train(federation, "fedavg", attack=HARM, **settings).state().shared
    for name, leaf in found.items():
        assert torch.equal(leaf, plain[name]) == ("running" in name or "num_batches" in name), name


def test_figures_are_of_honest_clients() -> None:
    federation = make_federation(sizes=(12, 10, 14, 9, 11, 13), names=(*NAMES, "fay"))
    settings = SHORT | {"evaluate_every": 1, "metrics": "accuracy,roc_auc"}
    result = fedem.train(federation, "fedem", attack={"name": "label_flip", "share": 2}, **settings)
    rows = [row for row in result.clients if not row["hostile"]]
    assert [len(result.clients), len(rows), result.summary["hostile_clients"]] == [6, 4, 2]
    sizes = [row["train_samples"] for row in rows]
    for figure in ("test_accuracy", "test_loss", "train_accuracy", "validation_accuracy"):
        assert result.summary[figure] == pytest.approx(np.average([row[figure] for row in rows], weights=sizes))
    assert result.summary["test_accuracy_unweighted"] == pytest.approx(np.mean([row["test_accuracy"] for row in rows]))
    assert result.summary["bottom_decile"] == min(row["test_accuracy"] for row in rows)
    assert result.history[-1]["test_accuracy"] == result.summary["test_accuracy"]
    weights = np.mean([[row[f"weight_{m}"] for m in range(3)] for row in rows], axis=0)
    np.testing.assert_allclose(result.summary["weights_mean"], weights, rtol=1e-6)
    scores, labels = [], []
    for row in rows:
        inputs, targets = federation.test.client(federation.position(row["client"]))
        scores.append(result.predict(row["client"], inputs)[:, 1].numpy())
        labels.append(targets.numpy())
    assert result.summary["test_roc_auc_pooled"] == pytest.approx(
        roc_auc_score(np.concatenate(labels), np.concatenate(scores))
    )
    best = max(line["validation_accuracy"] for line in result.history)
    assert result.origin["best_validation"] == best


def test_new_rows_are_scored_for_honest_clients() -> None:
    federation = make_federation()
    result = fedem.train(federation, "fedavg", attack={"name": "huge", "share": 2}, **SHORT)
    honest = [row["client"] for row in result.clients if not row["hostile"]]
    inputs, targets = federation.train.inputs.numpy(), federation.train.targets.numpy()
    owners = np.repeat(federation.names, federation.train.sizes.numpy())
    figures, rows = result.score_encoded(inputs, targets, owners)
    among = np.isin(owners, honest)
    assert len(rows) == 5
    assert figures["accuracy"] == result.score_encoded(inputs[among], targets[among], owners[among])[0]["accuracy"]


def test_how_often_a_mark_gets_its_label() -> None:
    federation = make_federation("cross_entropy", sizes=(20, 18, 25, 22, 24))
    attack = {"name": "backdoor", "share": 2, "target": 2, "size": 1, "value": 3.0}
    result = fedem.train(federation, "fedem", attack=attack, **SHORT | {"rounds": 10})
    given = []
    for row in result.clients:
        inputs, targets = federation.test.client(federation.position(row["client"]))
        marked = inputs[targets != 2].clone()
        marked[:, -1] = 3.0
        if not row["hostile"]:
            given += (result.predict(row["client"], marked).argmax(1) == 2).tolist()
    assert result.summary["backdoor_success"] == pytest.approx(np.mean(given))
    assert 0 < len(given) < len(federation.test)
    nobody = fedem.train(federation, "fedem", attack=attack | {"share": 0}, **SHORT | {"rounds": 10})
    assert nobody.summary["backdoor_success"] < result.summary["backdoor_success"]


def test_divergence_is_laid_to_whom_it_may_be_due() -> None:
    federation = make_federation("squared_error")
    attack = {"name": "huge", "share": 2, "value": 3e38}
    with pytest.raises(DivergedError) as found:
        fedem.train(federation, "fedavg", rounds=9, attack=attack, learning_rate=0.1)
    told = str(found.value)
    assert "2 clients are hostile (attack.name huge)" in told
    assert "schedule.learning_rate" not in told
    with pytest.raises(DivergedError, match=r"a smaller schedule\.learning_rate .* or a client's data or upload"):
        fedem.train(federation, "fedavg", rounds=9, learning_rate=1e30)


UPLOADERS = {name for name, row in METHODS.items() if row.algorithm.uploads_model}


@pytest.mark.parametrize("method", sorted(set(METHODS) - UPLOADERS))
def test_models_can_not_be_falsified_where_none_are_sent(method: str) -> None:
    told = rf"attack\.name is 'noise', .* clients of method {method} upload more or less than a model; .*: fedem, "
    with pytest.raises(UserError, match=told):
        fedem.train(make_federation(), method, rounds=1, attack="noise")


def test_their_samples_and_sizes_may_be_wrong_all_the_same() -> None:
    for method, name in itertools.product(("scaffold", "ifca"), ("label_flip", "lie_size")):
        plain = fedem.train(make_federation(), method, rounds=1).state()
        assert distance(plain, fedem.train(make_federation(), method, rounds=1, attack=name).state()) > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attack": "sign-flip"}, "Unknown attack 'sign-flip'; .* Did you mean 'sign_flip'"),
        ({"attack": {"name": "none", "share": 0.1}}, "'none' takes no settings"),
        ({"attack": {"name": "noise", "share": -0.1}}, r"attack\.share is -0\.1; allowed: at least 0"),
        ({"attack": {"name": "noise", "share": 5}}, r"attack\.share is 5; allowed: .* number of clients from 1 to 4"),
        ({"attack": {"name": "noise", "share": 1.5}}, r"attack\.share is 1\.5; allowed: a share from 0 and below 1"),
        ({"attack": {"name": "scaling", "factor": 0}}, r"attack\.factor is 0; allowed: above 0"),
        ({"attack": {"name": "label_flip", "shift": 4}}, r"attack\.shift is 4, which leaves all 2 labels"),
        ({"attack": {"name": "backdoor", "target": 2}}, r"attack\.target is 2; allowed: a class, from 0 to 1"),
        ({"attack": {"name": "backdoor", "size": 5}}, r"attack\.size is 5, .* shape \[4\]; allowed: 1 to 4"),
        ({"attack": "noise", "diagnose_every": 1}, r"run\.diagnose_every is 1, but attack\.name is 'noise'"),
        ({"attack": "noise", "measure_alpha_every": 2}, r"run\.measure_alpha_every is 2, but attack\.name is 'noise'"),
    ],
)
def test_what_can_not_be_is_refused_before_work(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fedem.train(make_federation(), "fedem", rounds=1, **options)


@pytest.mark.parametrize("name", ["label_flip", "backdoor"])
def test_numbers_have_no_labels_to_falsify(name: str) -> None:
    told = f"attack.name is '{name}', but targets of SquaredError are no labels; .* attack.name sign_flip, "
    with pytest.raises(UserError, match=told):
        fedem.train(make_federation("squared_error"), "fedem", rounds=1, attack=name)


def test_a_mark_must_be_a_number_that_inputs_can_have() -> None:
    def refuse(dtype: torch.dtype, value: float, reason: str) -> None:
        pool = Pool(torch.arange(8).reshape(4, 2).to(dtype), torch.tensor([0, 1, 0, 1]))
        samples = Samples(pool, torch.tensor([0, 2, 4]))
        with pytest.raises(UserError, match=reason):
            Backdoor(size=1, value=value).check(Federation(("a", "b"), samples, samples, samples), 2)

    refuse(torch.uint8, 1.5, r"attack\.value is 1\.5; allowed: a share of 255 from 0 to 1, as inputs are uint8")
    refuse(torch.int64, 8, r"attack\.value is 8; allowed: a whole number from 0 to 7, as inputs are int64")
    refuse(torch.int64, 0.5, r"attack\.value is 0\.5; allowed: a whole number")


def test_whoever_is_fitted_after_an_attack_is_honest() -> None:
    result = fedem.train(make_federation(), "fedem", attack=HARM, **SHORT)
    fitted = result.with_unseen(make_federation())
    assert all("hostile" not in row for row in fitted.clients)
    inputs, targets = (each.numpy() for each in make_federation().train.client(0))
    assert fitted.score(inputs, targets, NAMES[0])["clients"] == 1


def test_the_command_line_takes_it(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    asked = ["--set", "attack.name=sign_flip", "--set", "attack.share=2", "--set", "run.unseen=0.2"]
    code, _, err = run("train", *TINY, "--method", "fedavg", *asked, "--out", str(tmp_path / "run"))
    assert code == 0, err
    with (tmp_path / "run" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["hostile"] for row in rows if row["role"] == "train"].count("True") == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["hostile_clients"] == 2
    again = fedem.runs.trainer.reassess(tmp_path / "run")
    assert again.summary["test_accuracy"] == fedem.Result.load(tmp_path / "run").summary["test_accuracy"]
    code, page, _ = run("settings", "attack.backdoor")
    assert code == 0
    assert "poisoned" in page


def test_scores_name_no_figures_of_hostile_clients_alone() -> None:
    """Where no honest client has samples, there is no average."""
    result = _prepared(make_federation(), attack=HARM)
    scores = result.scores(result.predictors(result.training.init()))
    named = name_scores({"test": replace(scores["test"], counted=torch.zeros(5, dtype=torch.bool))})
    assert math.isnan(named["test_accuracy"])
    assert math.isnan(named["bottom_decile"])
