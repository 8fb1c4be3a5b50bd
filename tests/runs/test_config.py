"""Configurations: complete, and laid over each other in order."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from configs import NAMED, SECTIONS, build, layers, write
from hypothesis import given

from fedem.core.errors import UserError
from fedem.core.settings import Settings, names_of
from fedem.data import DATA, FromFile, Synthetic
from fedem.data.partitions import Dirichlet, Natural
from fedem.engines import Batching
from fedem.methods import METHODS
from fedem.models import MLP, MODELS, Linear
from fedem.models.losses import SquaredError
from fedem.runs.config import Config, RunSettings
from fedem.solvers import SGD, Adam, Newton
from fedem.solvers.schedules import Cosine, Step


class TestDefaults:
    def test_every_section_is_there(self) -> None:
        assert set(build().sections) == SECTIONS

    @pytest.mark.parametrize(("section", "settings"), [("run", RunSettings), ("batching", Batching)])
    def test_unnamed_sections_are_complete(self, section: str, settings: type[Settings]) -> None:
        assert set(build().sections[section]) == set(names_of(settings))

    @pytest.mark.parametrize(("section", "name"), [(section, name) for section in NAMED for name in NAMED[section]])
    def test_named_sections_are_complete(self, section: str, name: str) -> None:
        found = build({section: {"name": name}}).sections[section]
        assert set(found) == {"name", *names_of(*NAMED[section][name])}
        assert found["name"] == name

    def test_every_section_makes_its_settings(self) -> None:
        config = build()
        assert config.run == RunSettings()
        assert config.batching == Batching()
        assert config.data == Synthetic()
        assert config.partition == Natural()
        assert config.model == Linear()
        assert isinstance(config.solver, SGD)
        assert config.schedule == Step()

    def test_the_loss_is_guessed(self) -> None:
        assert build().loss is None

    def test_values_reach_the_settings(self) -> None:
        config = build(
            {
                "run": {"rounds": 7, "dtype": "float64"},
                "batching": {"local_steps": 3},
                "data": {"name": "file", "path": "here.csv"},
                "partition": {"name": "dirichlet", "alpha": 0.7},
                "model": {"bias": False},
                "loss": {"name": "squared_error", "variance": 2.0},
                "solver": {"name": "adam", "beta1": 0.5},
                "schedule": {"name": "cosine", "learning_rate": 0.3},
            }
        )
        assert config.run == RunSettings(rounds=7, dtype="float64")
        assert config.batching == Batching(local_steps=3)
        assert config.data == FromFile(path="here.csv")
        assert config.partition == Dirichlet(alpha=0.7)
        assert config.model == Linear(bias=False)
        assert config.loss == SquaredError(variance=2.0)
        assert config.solver == Adam(beta1=0.5)
        assert config.schedule == Cosine(learning_rate=0.3)

    def test_name_and_values_are_apart(self) -> None:
        config = build({"schedule": {"name": "cosine", "learning_rate": 0.3}})
        assert config.name("schedule") == "cosine"
        assert config.values("schedule") == {"learning_rate": 0.3, "backtrack": False}


class TestLayers:
    def test_later_layers_win(self) -> None:
        config = build({"run": {"rounds": 1}}, {"run": {"rounds": 2}}, {"run": {"rounds": 3}})
        assert config.run.rounds == 3

    def test_layers_keep_what_they_do_not_mention(self) -> None:
        config = build({"run": {"rounds": 5}}, {"run": {"seed": 6}}, {"batching": {"batch_size": 7}})
        assert (config.run.rounds, config.run.seed, config.batching.batch_size) == (5, 6, 7)

    def test_layers_are_not_changed(self) -> None:
        first, second = {"run": {"rounds": 5}}, {"run": {"seed": 6}}
        build(first, second)
        assert (first, second) == ({"run": {"rounds": 5}}, {"run": {"seed": 6}})

    def test_another_name_keeps_common_keys(self) -> None:
        config = build({"solver": {"name": "sgd", "weight_decay": 0.25, "momentum": 0.5}}, {"solver": {"name": "adam"}})
        assert config.solver == Adam(weight_decay=0.25)

    def test_another_name_drops_other_keys(self) -> None:
        config = build({"schedule": {"name": "step", "factor": 0.5}}, {"schedule": {"name": "cosine"}})
        assert "factor" not in config.sections["schedule"]

    def test_another_name_drops_the_defaults_of_the_first(self) -> None:
        assert build({"solver": {"name": "adam"}}).solver == Adam()

    def test_the_same_name_again_keeps_all(self) -> None:
        config = build({"solver": {"name": "sgd", "momentum": 0.5}}, {"solver": {"name": "sgd"}})
        assert config.sections["solver"]["momentum"] == 0.5

    def test_a_key_of_another_name_in_the_same_layer_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"key in \[solver\] 'momentum'; allowed: beta1"):
            build({"solver": {"name": "adam", "momentum": 0.5}})


class TestPresets:
    @pytest.fixture
    def presets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A preset for the synthetic data, in place of the one shipped."""
        monkeypatch.setattr("fedem.runs.config.files", lambda package: tmp_path)
        (tmp_path / "presets").mkdir()
        write(
            tmp_path / "presets" / "synthetic.toml",
            '[all.run]\nrounds = 11\n[all.solver]\nname = "adam"\nbeta1 = 0.5\n'
            "[all.schedule]\nlearning_rate = 0.25\n[fedavg.schedule]\nlearning_rate = 0.75\n"
            '[all.model]\nname = "mlp"\n[with.mlp.all.model]\nhidden = 7\n'
            "[with.mlp.fedavg.schedule]\nlearning_rate = 0.5\n",
        )
        return tmp_path / "presets"

    def test_what_holds_for_all_methods_applies(self, presets: Path) -> None:
        config = Config.build()
        assert config.run.rounds == 11
        assert config.solver == Adam(beta1=0.5)

    @pytest.mark.parametrize(("method", "rate"), [("fedem", 0.25), ("fedavg", 0.75), ("local", 0.25)])
    def test_what_holds_for_one_method_wins(self, presets: Path, method: str, rate: float) -> None:
        config = Config.build({"method": {"name": method}, "model": {"name": "linear"}})
        assert config.schedule.learning_rate == rate

    @pytest.mark.parametrize(("method", "rate"), [("fedem", 0.25), ("fedavg", 0.5)])
    def test_what_holds_with_a_model_wins_where_that_is_the_model(
        self, presets: Path, method: str, rate: float
    ) -> None:
        chosen = {"method": {"name": method}}
        for layer in ({}, {"model": {"name": "mlp"}}):
            config = Config.build(chosen, layer)
            assert config.model == MLP(hidden=7)
            assert config.schedule.learning_rate == rate
        assert Config.build(chosen, {"model": {"name": "linear"}}).model == Linear()

    def test_the_last_layer_decides_the_method(self, presets: Path) -> None:
        config = Config.build({"method": {"name": "fedem"}}, {"method": {"name": "fedavg"}})
        assert config.schedule.learning_rate == 0.5

    def test_other_data_have_no_preset(self, presets: Path) -> None:
        layer = {"data": {"name": "file", "path": "here.csv"}}
        assert Config.build(layer) == build(layer)

    def test_layers_win_over_the_preset(self, presets: Path) -> None:
        config = Config.build({"run": {"rounds": 3}, "schedule": {"learning_rate": 0.5}})
        assert (config.run.rounds, config.schedule.learning_rate) == (3, 0.5)

    def test_another_solver_drops_the_presets_values(self, presets: Path) -> None:
        assert Config.build({"solver": {"name": "newton"}}).solver == Newton()

    def test_a_preset_can_be_left_out(self, presets: Path) -> None:
        assert Config.build(preset=False).run == RunSettings()

    @pytest.mark.parametrize(("data", "method"), list(product(DATA, METHODS)))
    def test_every_shipped_preset_is_valid(self, data: str, method: str) -> None:
        config = Config.build({"data": {"name": data}, "method": {"name": method}})
        assert (config.name("data"), config.name("method")) == (data, method)

    @pytest.mark.parametrize("model", ["mobilenet_v2", "resnet18", "cnn"])
    def test_images_may_have_another_model_than_the_presets_with_nothing_left_of_it(self, model: str) -> None:
        config = Config.build({"data": {"name": "cifar10"}, "model": {"name": model}})
        assert config.model == MODELS[model]()

    def test_every_shipped_preset_is_for_known_data_and_methods(self) -> None:
        shipped = {
            resource.name.removesuffix(".toml"): tomllib.loads(resource.read_text(encoding="utf-8"))
            for resource in files("fedem.runs.presets").iterdir()
            if resource.name.endswith(".toml")
        }
        likes = {content.pop("like") for content in shipped.values() if "like" in content}
        assert likes <= set(shipped)
        assert set(shipped) <= {*DATA, "default", "own", *likes}
        for content in shipped.values():
            special = content.pop("with", {})
            assert set(special) <= set(MODELS)
            for each in (content, *special.values()):
                assert set(each) <= {"all", *METHODS}
                assert {section for sections in each.values() for section in sections} <= SECTIONS

    def test_a_preset_lies_on_top_of_the_one_it_is_like(self) -> None:
        ten, hundred = (
            Config.build({"data": {"name": name}, "method": {"name": "fedem"}}) for name in ("cifar10", "cifar100")
        )
        assert ten.model == hundred.model
        assert ten.solver == hundred.solver
        assert (ten.schedule.learning_rate, hundred.schedule.learning_rate) == (0.01, 0.03)  # each its own
        assert (ten.name("partition"), hundred.name("partition")) == ("dirichlet", "pachinko")

    def test_the_shipped_presets_are_used(self) -> None:
        """What holds for any data, and on top of it what holds for this one."""
        shipped = {
            name: tomllib.loads(files("fedem.runs.presets").joinpath(f"{name}.toml").read_text())
            for name in ("default", "own", "synthetic")
        }
        config = Config.build({"data": {"name": "synthetic"}, "method": {"name": "fedem"}})
        assert config.solver.momentum == shipped["default"]["all"]["solver"]["momentum"]
        assert config.solver.weight_decay == shipped["synthetic"]["all"]["solver"]["weight_decay"]
        assert config.schedule.learning_rate == shipped["synthetic"]["fedem"]["schedule"]["learning_rate"]
        mine = Config.build({"data": {"name": "file"}, "method": {"name": "fedem"}})
        assert mine.schedule.learning_rate == shipped["own"]["all"]["schedule"]["learning_rate"]
        assert mine.solver.momentum == shipped["default"]["all"]["solver"]["momentum"]


class TestReplace:
    def test_values_change(self) -> None:
        assert build().replace("run", rounds=5, seed=6) == build({"run": {"rounds": 5, "seed": 6}})

    def test_the_first_stays_as_it_is(self) -> None:
        config = build()
        config.replace("run", rounds=5)
        assert config == build()

    def test_another_name_keeps_common_keys(self) -> None:
        config = build({"solver": {"weight_decay": 0.25, "momentum": 0.5}})
        assert config.replace("solver", name="adam").solver == Adam(weight_decay=0.25)

    def test_the_guessed_loss_can_be_settled(self) -> None:
        assert build().replace("loss", name="squared_error").loss == SquaredError()

    def test_a_bad_value_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"run\.rounds is 0; allowed"):
            build().replace("run", rounds=0)

    def test_an_unknown_key_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"key in \[run\] 'round'"):
            build().replace("run", round=3)


class TestDifferences:
    def test_equal_configurations_have_none(self) -> None:
        assert build().differences(build()) == []

    def test_every_changed_value_is_named(self) -> None:
        other = build({"run": {"rounds": 5}, "data": {"dimension": 7}, "schedule": {"factor": 0.5}})
        assert sorted(build().differences(other)) == ["data.dimension", "run.rounds", "schedule.factor"]

    def test_another_name_names_the_keys_of_both(self) -> None:
        first, second = (build({"solver": {"name": name}}) for name in ("sgd", "newton"))
        keys = {"name"} | set(names_of(SGD)) ^ set(names_of(Newton))
        assert set(first.differences(second)) == {f"solver.{key}" for key in keys}

    @given(layers, layers)
    def test_both_ways_are_alike(self, first: dict[str, dict[str, Any]], second: dict[str, dict[str, Any]]) -> None:
        one, other = build(first), build(second)
        assert set(one.differences(other)) == set(other.differences(one))
        assert (one.differences(other) == []) == (one == other)
