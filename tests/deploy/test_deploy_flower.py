"""The Flower app, server and clients in one process, against the simulator."""

from __future__ import annotations

import logging
from pathlib import Path

import deployments
import pytest
import shops
import torch

pytest.importorskip("flwr")

from flower_grid import Deployed, equal, simulated
from flwr.app import Context, Message, RecordDict
from flwr.app.exception import AppExitException
from flwr.supercore.exit.exit_code import EXIT_CODE_HELP

from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.deploy import server_app
from fedem.deploy.flower import messages
from fedem.deploy.kept import Kept
from fedem.deploy.node import Node
from fedem.methods.wrappers.defences import DEFENCES
from fedem.runs.result import Result
from fedem.runs.trainer import Trainer

METHODS = ("fedem", "fedavg", "scaffold", "ditto", "ifca", "qffl", "fedavg+", "fedbabu", "fedem-heads")


@pytest.mark.parametrize("method", METHODS)
def test_a_deployed_run_is_the_simulators(tmp_path: Path, method: str) -> None:
    model = {"name": "mlp", "hidden": 4} if method in ("fedbabu", "fedem-heads") else {"name": "linear"}
    there = Deployed(tmp_path, method={"name": method}, model=model, run={"dtype": "float64"})
    state, known = there.serve(), simulated(there.trainer)
    assert state.round == 3
    equal(state.shared, known.shared)
    tuned = there.trainer.predictors(known)
    for position, name in enumerate(there.trainer.federation.names):
        kept = there.kept(name)
        assert kept.shared is not None
        equal(kept.personal, tree_index(tuned.personal, position))
        equal(kept.shared, tree_index(tuned.shared, int(tuned.reads[position])))


def test_ifcas_deployed_clients_choose_anew(tmp_path: Path) -> None:
    """What a client keeps, and what it is scored with, is the best of the last models, whatever it chose before."""
    there = Deployed(tmp_path, method={"name": "ifca", "num_clusters": 3}, run={"dtype": "float64"})
    state = there.serve()
    models = tree_index(state.shared, 0)
    for name in there.trainer.federation.names:
        node = Node.open(there.plan, there.sample, name)
        data = there.trainer.federation.train.client(there.trainer.federation.position(name))
        losses = [float(there.plan.model.losses(tree_index(models, k), *data).sum()) for k in range(3)]
        worst = torch.full((3,), -torch.inf, dtype=torch.float64)
        worst[max(range(3), key=losses.__getitem__)] = 0.0
        assert node.score(models, {"log_weights": worst})["train"].loss == pytest.approx(min(losses))
        _, own = node.predictor(models, {"log_weights": worst})
        assert int(own["log_weights"].argmax()) == losses.index(min(losses))
        assert torch.equal(there.kept(name).personal["log_weights"], own["log_weights"])


def test_deployed_clients_fine_tune_at_the_first_rate_of_their_run(tmp_path: Path) -> None:
    """The run has other rounds than its plan, and inverse_sqrt's rate depends on how many."""
    sections = {"method": {"name": "fedavg+"}, "schedule": {"name": "inverse_sqrt", "learning_rate": 0.4}}
    there = Deployed(tmp_path, run={"dtype": "float64"}, **sections)
    state = there.serve(rounds=5)
    config, dataset = deployments.configure(there.sample, run={"dtype": "float64", "rounds": 5}, **sections)
    trainer = Trainer.prepare(config, dataset)
    known = simulated(trainer, 5)
    equal(state.shared, known.shared)
    tuned = trainer.predictors(known)
    for position, name in enumerate(trainer.federation.names):
        equal(there.kept(name).shared or {}, tree_index(tuned.shared, int(tuned.reads[position])))


def test_the_servers_folder_is_a_run_without_clients(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"evaluate_every": 2}, method={"name": "fedem"})
    there.serve()
    scores = there.trainer.scores(there.trainer.predictors(simulated(there.trainer)))
    assert [line["round"] for line in there.lines] == [1, 2, 3]
    assert ["test_accuracy" in line for line in there.lines] == [False, True, True]
    for part, entry in scores.items():
        assert there.lines[-1][f"{part}_accuracy"] == pytest.approx(entry.average, rel=1e-5)
        assert there.lines[-1][f"{part}_loss"] == pytest.approx(entry.loss, rel=1e-4)
    result = Result.load(there.run_folder)
    assert result.summary["rounds"] == 3
    assert result.summary["test_accuracy"] == there.lines[-1]["test_accuracy"]
    assert result.summary["bytes_up_per_round"] == there.lines[-1]["bytes_up"] > 0
    written = b"".join(path.read_bytes() for path in there.run_folder.rglob("*") if path.is_file())
    assert not any(name.encode() in written for name in deployments.NAMES)
    # An outsider is fitted to the components alone.
    inputs, targets = there.trainer.federation.train.client(0)
    assert result.personalize(inputs, ["few"] * len(targets)).mixture_weights.sum() == pytest.approx(1)


def test_every_send_has_the_timeout(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"rounds": 1})
    there.serve(timeout=7)
    assert set(there.grid.timeouts) == {7}


def test_sampling_asks_some_and_spares_others(tmp_path: Path) -> None:
    settings = {"rounds": 8, "clients_per_round": 0.34, "evaluate_every": 0}
    there = Deployed(tmp_path, run=settings)
    there.serve()
    asked = [node for node, kind in there.grid.sent if kind == "train"]
    assert len(asked) == 8
    assert set(asked) == set(there.nodes)
    there.serve(experiment="again")
    assert [node for node, kind in there.grid.sent if kind == "train"] == 2 * asked


@pytest.mark.parametrize("method", ["scaffold", "fedem"])
def test_under_sampling_clients_of_other_sizes_count_as_in_the_simulator(tmp_path: Path, method: str) -> None:
    # Clients called like their nodes are sampled as the simulator samples them.
    names = ("11", "12", "13", "14")
    rows = [row for at, name in enumerate(names) for row in shops.make_shops(15 * 2**at, seed=at, names=(name,))]
    sample = shops.write_shops(tmp_path / "shops.csv", rows)
    run = {"dtype": "float64", "rounds": 6, "clients_per_round": 2, "evaluate_every": 0}
    there = Deployed(tmp_path, sample=sample, method={"name": method}, run=run)
    state, known = there.serve(), simulated(there.trainer, 6)
    cohorts = [there.trainer.training.sample(at).tolist() for at in range(6)]
    assert len(set(map(tuple, cohorts))) > 1
    asked = [node for node, kind in there.grid.sent if kind == "train"]
    assert sorted(asked) == sorted(11 + at for cohort in cohorts for at in cohort)
    equal(state.shared, known.shared)
    # Who is not asked to train has been asked how many samples there are, once, and only where it matters.
    counted = [node for node, kind in there.grid.sent if kind == "query.count"]
    assert counted == ([11, 12, 13, 14] if method == "scaffold" else [])


@pytest.mark.parametrize("reached", ["train", "evaluate"])
def test_a_run_goes_on_after_its_last_complete_round(tmp_path: Path, reached: str) -> None:
    there = Deployed(tmp_path, run={"dtype": "float64", "evaluate_every": 1})

    def fail(node: int, asked: Message, answer: Message) -> Message:
        # A round is counted once its answers are mixed.
        if (asked.metadata.message_type, asked.metadata.group_id) == (reached, "1" if reached == "train" else "2"):
            raise KeyboardInterrupt  # all clients before this one have trained, and keep what they have learnt
        return answer

    there.grid.spoil = fail
    with pytest.raises(KeyboardInterrupt):
        there.serve()
    there.grid.spoil = lambda node, asked, answer: answer
    with pytest.raises(UserError, match="holds a run already"):
        there.serve()
    assert Result.load(there.run_folder).summary["rounds"] == 1, "a killed run can be looked at"
    state, known = there.serve(**{"continue": True}), simulated(there.trainer)
    assert [line["round"] for line in there.lines] == [1, 2, 3]
    equal(state.shared, known.shared)
    for position, name in enumerate(there.trainer.federation.names):
        equal(there.kept(name).personal, tree_index(known.personal, position))


def test_a_finished_run_that_is_continued_hands_over_again(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"fine_tune_epochs": 1, "dtype": "float64"})
    there.serve()
    first = there.kept("shop B")
    there.serve(**{"continue": True})
    equal(first.personal, there.kept("shop B").personal)
    assert len(there.lines) == 3


def test_a_run_is_continued_under_its_own_plan_alone(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"rounds": 1})
    there.serve()
    with pytest.raises(UserError, match=r"started with 1 round, and 5 are asked for, but schedule\.name is 'step'"):
        there.serve(rounds=5, **{"continue": True})


def test_a_run_at_a_constant_rate_may_be_continued_for_longer(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "dtype": "float64"}, schedule={"name": "constant"})
    there.serve()
    state = there.serve(rounds=3, **{"continue": True})
    assert [line["round"] for line in there.lines] == [1, 2, 3]
    equal(state.shared, simulated(there.trainer).shared)


def test_what_a_user_is_to_read_is_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path)
    settings = there.run_config | {"continue": True}
    with pytest.raises(AppExitException, match="There is no run to go on with") as caught:
        server_app(tmp_path / "plan")(there.grid, Context(1, 1, {}, RecordDict(), settings))
    # What Flower does with it: a run that ends so has failed.
    logging.getLogger("flwr").error("%s raised an exception", "ServerApp", exc_info=caught.value)
    assert caplog.messages == [str(caught.value)]
    assert "Traceback" not in caplog.text
    assert not EXIT_CODE_HELP.get(caught.value.exit_code)


def test_a_late_client_trains_from_its_first_weights(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"dtype": "float64", "evaluate_every": 0})
    late = there.nodes.pop(13)
    starts: list[Kept] = []

    def join(node: int, asked: Message, answer: Message) -> Message:
        if asked.metadata.group_id == "1":
            there.nodes[13] = late
        if (node, asked.metadata.message_type) == (13, "train"):
            starts.append(there.kept(late["client"]))
        return answer

    there.grid.spoil = join
    there.serve()
    (start,) = starts
    assert start.round == 3
    position = there.trainer.federation.position(late["client"])
    equal(start.before or {}, tree_index(there.trainer.training.init().personal, position))
    assert [line["clients"] for line in there.lines] == [2, 2, 3]


def test_a_client_that_never_trained_is_scored_and_keeps_fitted_weights(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"dtype": "float64", "rounds": 1, "evaluate_every": 1})
    late = there.nodes.pop(13)

    def join(node: int, asked: Message, answer: Message) -> Message:
        there.nodes[13] = late
        return answer

    there.grid.spoil = join
    state = there.serve()
    node = Node.open(there.plan, there.sample, late["client"])
    equal(there.kept(node.name).personal, node.fit(tree_index(state.shared, 0)))
    assert there.grid.sent.count((13, "evaluate")) == 1


def test_a_simulations_nodes_are_told_by_partition(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"dtype": "float64"})
    there.grid.run_config |= {"data": str(there.sample), "state": str(tmp_path / "state")}
    for at, node in enumerate(list(there.nodes)):
        there.nodes[node] = {"partition-id": at, "num-partitions": 3}
    context = Context(1, 1, {}, RecordDict(), there.grid.run_config)
    server_app(tmp_path / "plan")(there.grid, context)
    equal(Result.load(there.run_folder).state().shared, simulated(there.trainer).shared)


@pytest.mark.parametrize("updates", ["int8", "bfloat16", "none"])
def test_small_uploads_travel_as_they_are(tmp_path: Path, updates: str) -> None:
    compression = {"updates": updates, "threshold": 0.2}
    there = Deployed(tmp_path, compression=compression, run={"dtype": "float64"})
    equal(there.serve().shared, simulated(there.trainer).shared)


def test_small_uploads_of_heads_have_the_whole_body(tmp_path: Path) -> None:
    heads = {"method": {"name": "fedem-heads"}, "model": {"name": "mlp", "hidden": 4}}
    there = Deployed(tmp_path, compression={"updates": "int8", "threshold": 0.2}, run={"dtype": "float64"}, **heads)
    equal(there.serve().shared, simulated(there.trainer).shared)


@pytest.mark.parametrize("updates", ["none", "int8"])
@pytest.mark.parametrize("server", ["momentum", "adagrad", "adam", "yogi"])
def test_the_server_steps_as_the_simulators_does_also_when_it_goes_on(
    tmp_path: Path, server: str, updates: str
) -> None:
    steps = {"server": {"name": server}, "compression": {"updates": updates}, "schedule": {"name": "constant"}}
    there = Deployed(tmp_path, run={"dtype": "float64"}, **steps)
    there.serve(rounds=2)
    state, known = there.serve(rounds=3, **{"continue": True}), simulated(there.trainer)
    equal(state.shared, known.shared)
    equal(state.memory, known.memory)


@pytest.mark.parametrize("updates", ["none", "int8"])
@pytest.mark.parametrize("defence", DEFENCES)
def test_uploads_are_guarded_as_in_the_simulator(tmp_path: Path, defence: str, updates: str) -> None:
    sections = {"defence": {"name": defence, "max_weight": 0.4}, "compression": {"updates": updates}}
    there = Deployed(tmp_path, run={"dtype": "float64"}, **sections)
    equal(there.serve().shared, simulated(there.trainer).shared, 1e-6)


def test_a_hostile_upload_is_clipped(tmp_path: Path) -> None:
    """One of four sends a model a million times off; clipped, the result is near that of the others."""
    names, ends = ("ann", "bob", "cem", "dan"), {}
    for defence in ("none", "clip"):
        folder = tmp_path / defence
        folder.mkdir()
        sample = deployments.write_sample(folder, names=names)
        there = Deployed(folder, sample=sample, run={"dtype": "float64"}, defence={"name": defence})
        honest = there.trainer.training.step(there.trainer.training.init())[0].shared

        def spoil(node: int, asked: Message, answer: Message) -> Message:
            if node == 11 and "arrays" in answer.content.array_records:
                arrays = answer.content.array_records["arrays"]
                far = {name: torch.from_numpy(array.numpy()) + 1e6 for name, array in arrays.items()}
                answer.content["arrays"] = messages.to_record(far)
            return answer

        there.grid.spoil = spoil
        found = there.serve(rounds=1, **{"max-norm": 0}).shared  # else such an upload is left out before
        ends[defence] = max(float((leaf - honest[name]).abs().max()) for name, leaf in found.items())
    assert ends["none"] > 1e5
    assert ends["clip"] < 100
