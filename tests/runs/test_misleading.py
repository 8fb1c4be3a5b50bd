"""What a user is told who has taken one thing for another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import make_federation
from report_runs import trained
from shops import make_shops, write_shops
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.report.console import remarks
from fedem.report.page import build_page
from fedem.report.runs import gather, read_runs
from fedem.runs.evaluate import has_diverged

Run = Callable[..., tuple[int, str, str]]


def _net(width: int, *further: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1), *further)


class TestAnotherModel:
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (_net(16), r"its '0.weight' has shape \[16, 4\]; allowed: \[8, 4\]"),
            (lambda: nn.Linear(4, 1), r"its '0.weight' has shape none; allowed: \[8, 4\]"),
            (_net(8, nn.Linear(1, 1)), r"its '3.weight' has shape \[1, 1\]; allowed: none"),
        ],
    )
    def test_is_not_taken_for_the_one_that_was_trained(
        self, other: Callable[[], nn.Module], message: str, tmp_path: Path
    ) -> None:
        federation = make_federation()
        fedem.train(federation, model=_net(8), rounds=2, out=tmp_path / "run")
        with pytest.raises(UserError, match=message):
            fedem.Result.load(tmp_path / "run", model=other)
        with pytest.raises(UserError, match=message):
            fedem.train(federation, model=other, rounds=2, out=tmp_path / "run", resume=True)
        assert fedem.Result.load(tmp_path / "run", model=_net(8)).names == federation.names


class TestColumns:
    def _shops(self, folder: Path, **columns: object) -> str:
        rows = [row | columns for row in make_shops(3)]
        return str(write_shops(folder / "shops.csv", rows, tuple(rows[0])))

    def test_one_column_for_two_ends_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="are both 'shop'; allowed: two columns"):
            FromFile(path=self._shops(tmp_path), target_column="shop", client_column="shop").make(0)

    def test_a_misspelt_column_is_told_from_those_there_are(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no column 'soldd'.*There are: shop, weekday.*Did you mean 'sold'\?"):
            FromFile(path=self._shops(tmp_path), target_column="soldd", client_column="shop").make(0)

    def test_a_target_that_never_differs_is_refused(self, tmp_path: Path) -> None:
        path = self._shops(tmp_path, profit=1.5)
        with pytest.raises(UserError, match=r"'profit' has one value only \('1.5'\); allowed: at least two"):
            FromFile(path=path, target_column="profit", client_column="shop").make(0)

    def test_few_numbers_may_be_meant_as_classes(self, tmp_path: Path) -> None:
        rows = [row | {"grade": float(place % 3)} for place, row in enumerate(make_shops(3))]
        path = str(write_shops(tmp_path / "shops.csv", rows, tuple(rows[0])))
        encoding = FromFile(path=path, target_column="grade", client_column="shop").make(0).encoding
        assert encoding is not None
        assert "3 distinct numbers; data.task=classification makes them classes" in encoding.target.describe()


class TestFolders:
    def test_a_folder_of_runs_is_no_run(self, run: Run, tmp_path: Path) -> None:
        trained(tmp_path / "fedavg", "fedavg", 0)
        _, _, err = run("show", tmp_path)
        assert f"{tmp_path} holds no run (no config.toml). The folders in it do" in err

    def test_a_search_is_no_run(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "search.json").write_text("{}")
        code, _, err = run("report", tmp_path)
        assert code == 2
        assert "holds a search of settings" in err

    def test_a_configuration_that_is_refused_is_named(self, run: Run, tmp_path: Path) -> None:
        trained(tmp_path / "run", "fedavg", 0)
        file = tmp_path / "run" / "config.toml"
        file.write_text(file.read_text().replace("rounds = 4", "round = 4"))
        _, _, err = run("report", tmp_path / "run")
        assert f"{file}: Unknown key in [run] 'round'" in err

    def test_a_file_of_clients_cut_short_is_refused(self, tmp_path: Path) -> None:
        trained(tmp_path / "run", "fedavg", 0)
        file = tmp_path / "run" / "clients.csv"
        file.write_text("\n".join(file.read_text().splitlines()[:4]) + "\n")
        with pytest.raises(UserError, match=r"clients.csv has 3 clients that were trained, and summary.json 11"):
            read_runs([tmp_path / "run"])

    def test_a_server_that_has_no_client_s_scores_is_reported(self, tmp_path: Path) -> None:
        """As a deployed server leaves its run: an empty clients.csv, and no word of clients held out."""
        result = trained(tmp_path / "run", "fedem", 0, unseen=0.0)
        summary = {key: value for key, value in result.summary.items() if key != "num_unseen_clients"}
        states = {role: replace(state, personal={}) for role, state in result.states.items()}
        replace(result, names=(), clients=[], summary=summary, states=states).save(tmp_path / "server")
        page = build_page(gather([tmp_path / "server"]))
        assert "Scores against rounds" in page
        assert "Similarity of the components" in page
        assert set(re.findall(r"figure id=\"figure-(\w+)\"", page)) <= {"rounds", "bytes", "components", "diagnostics"}

    def test_a_run_of_a_method_that_is_not_here_is_shown_by_its_name(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setitem(fedem.METHODS, "mine", fedem.METHODS["fedavg"])
            fedem.train(make_federation(), "mine", rounds=1, out=tmp_path / "run")
        code, out, err = run("show", tmp_path / "run")
        assert (code, err) == (0, "")
        assert "mine" in out


def test_a_loss_beyond_reason_is_divergence() -> None:
    assert has_diverged({"train_accuracy": 0.4, "train_loss": 6e20})
    assert has_diverged({"train_accuracy": 0.4, "train_loss": None})
    assert not has_diverged({"train_accuracy": 0.4, "train_loss": 2.3})
    assert not has_diverged({"train_mean_squared_error": 4e3, "train_loss": 2e3})  # in whatever units


def test_a_search_does_not_choose_what_diverged(run: Run, tmp_path: Path) -> None:
    tiny = ("--set", "data.num_clients=6", "--set", "data.num_test=10", "--set", "data.dimension=4")
    grid = "schedule.learning_rate=0.1,1e5"
    code, out, err = run("tune", *tiny, "--method", "fedavg", "--rounds", "2", "--grid", grid, "--out", tmp_path / "t")
    assert code == 0, err
    assert "Chosen: schedule.learning_rate = 0.1" in out
    assert "Training diverged: the loss on the training samples is" in " ".join(out.split())
    folder = tmp_path / "t" / "trials" / "001" / "seed0"
    _, out, _ = run("show", folder)
    assert "training has diverged" in " ".join(out.split())


def test_what_methods_train_with_is_said_where_it_differs(run: Run, tmp_path: Path) -> None:
    tiny = ("--set", "data.num_clients=6", "--set", "data.num_test=10", "--set", "data.dimension=4")
    _, out, _ = run("compare", "--methods", "fedavg,local,fedem", *tiny, "--rounds", "1", "--seeds", "1", "--out", "c")
    said = " ".join(out.split())
    assert "Methods train differently: schedule.learning_rate is 0.1, but 2.0 for FedEM (M=3)." in said
    _, out, _ = run("compare", "--methods", "fedavg,local", *tiny, "--rounds", "1", "--seeds", "1", "--out", "d")
    assert "train differently" not in out


def test_a_result_and_its_data_are_told_in_a_line() -> None:
    federation = make_federation()
    assert repr(federation) == f"<Federation: 5 clients, {len(federation.train)} training samples of shape [4]>"
    assert repr(fedem.train(federation, rounds=1)).startswith("<Result of fedem on given: 5 clients, 1 round, test_")


def test_a_run_that_was_killed_predicts_with_a_note(run: Run, tmp_path: Path) -> None:
    path = write_shops(tmp_path / "shops.csv", make_shops(10))

    class StoppedError(Exception):
        pass

    def stop(record: dict[str, object]) -> None:
        if record["round"] == 3:
            raise StoppedError

    config = fedem.Config.build(
        {"data": {"name": "file", "path": str(path), "target_column": "sold", "client_column": "shop"}},
        {"run": {"rounds": 5, "checkpoint_every": 2, "evaluate_every": 0}},
    )
    with pytest.raises(StoppedError):
        fedem.run(config, config.make_data(), out=tmp_path / "run", listener=stop)
    code, _, err = run("predict", tmp_path / "run", "--data", path, "--out", tmp_path / "p.csv", "-q")
    assert code == 0, err
    assert "note: The run is not complete: 2 of its 5 rounds are done." in err


@pytest.mark.parametrize("method", ["fedem", "bfedem"])
def test_components_that_are_hardly_used_are_named(method: str) -> None:
    summary = fedem.train(make_federation(), method, rounds=1).summary
    assert sum(summary["weights_mean"]) == pytest.approx(1)
    assert not any("Hardly used" in line for line in remarks(summary | {"weights_mean": [0.3, 0.3, 0.4]}))
    (told,) = (line for line in remarks(summary | {"weights_mean": [0.001, 0.996, 0.003]}) if "Hardly used" in line)
    assert "component 0 (0.1%), 2 (0.3%)" in told
    assert ("bfedem" in told) == (method == "fedem")
