"""Configurations: complete, checked, laid over each other in order, and the same again from their own file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedem.config import Config, parse_assignment, read_toml, route
from fedem.data import DATA, FromFile, Synthetic
from fedem.data.partitions import PARTITIONS, Dirichlet, Natural
from fedem.engines import Batching
from fedem.errors import UserError
from fedem.methods import METHODS
from fedem.models import MODELS, Linear
from fedem.models.losses import LOSSES, SquaredError
from fedem.schedules import SCHEDULES, Cosine, Step
from fedem.sections import RunSettings
from fedem.settings import Settings, complete, names_of
from fedem.solvers import SGD, SOLVERS, Adam, Newton

ONE_KIND: dict[str, Mapping[str, type[Settings]]] = {
    "data": DATA,
    "partition": PARTITIONS,
    "model": MODELS,
    "loss": LOSSES,
    "solver": SOLVERS,
    "schedule": SCHEDULES,
}
NAMED: dict[str, Mapping[str, tuple[type[Settings], ...]]] = {
    "method": {name: (row.algorithm, row.mixer) for name, row in METHODS.items()},
    **{section: {name: (kind,) for name, kind in table.items()} for section, table in ONE_KIND.items()},
}
SECTIONS = {"run", "batching", *NAMED}


def build(*layers: Mapping[str, Mapping[str, Any]]) -> Config:
    """Without a preset, so that nothing depends on the values shipped."""
    return Config.build(*layers, preset=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Example(Settings):
    """One field of each kind."""

    count: int = field(default=3, metadata={"min": 1, "max": 9})
    share: float = field(default=0.5, metadata={"above": 0, "below": 1})
    flag: bool = False
    word: str = field(default="red", metadata={"choices": ("red", "green")})
    free: str = ""


class TestSettings:
    def test_defaults_are_allowed(self) -> None:
        assert Example() == Example(count=3, share=0.5, flag=False, word="red", free="")

    @pytest.mark.parametrize(("name", "value"), [("count", 1), ("count", 9), ("share", 0.001), ("share", 0.999)])
    def test_values_inside_the_bounds_are_allowed(self, name: str, value: Any) -> None:
        assert getattr(Example(**{name: value}), name) == value

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("count", 0, "at least 1 and at most 9"),
            ("count", 10, "at least 1 and at most 9"),
            ("share", 0.0, "above 0 and below 1"),
            ("share", 1.0, "above 0 and below 1"),
            ("share", 0, "above 0 and below 1"),
            ("count", 2.0, "a whole number"),
            ("count", True, "a whole number"),
            ("count", "3", "a whole number"),
            ("count", None, "a whole number"),
            ("share", "half", "a number"),
            ("share", True, "a number"),
            ("share", [0.5], "a number"),
            ("share", float("nan"), "a finite number"),
            ("share", float("inf"), "a finite number"),
            ("flag", 1, "true or false"),
            ("flag", "true", "true or false"),
            ("free", 5, "a word"),
            ("free", b"bytes", "a word"),
            ("word", 5, "a word"),
        ],
    )
    def test_a_bad_value_is_named(self, name: str, value: Any, allowed: str) -> None:
        with pytest.raises(UserError) as error:
            Example(**{name: value})
        assert str(error.value) == f"Example.{name} is {value!r}; allowed: {allowed}."

    def test_a_word_that_is_no_choice_gets_a_suggestion(self) -> None:
        with pytest.raises(UserError, match=r"Example\.word 'gren'; allowed: green, red\. Did you mean 'green'\?"):
            Example(word="gren")

    def test_whole_numbers_are_numbers(self) -> None:
        assert Step(learning_rate=1).learning_rate == 1

    def test_names_are_those_of_plain_fields(self) -> None:
        assert names_of(Example) == ("count", "share", "flag", "word", "free")

    def test_fields_that_hold_objects_are_not_set_by_users(self) -> None:
        names = names_of(METHODS["fedem"].algorithm)
        assert "num_components" in names
        assert not {"model", "solver"} & set(names)

    def test_complete_fills_in_the_defaults(self) -> None:
        values = complete("example", {"share": 0.25}, Example)
        assert values == {"count": 3, "share": 0.25, "flag": False, "word": "red", "free": ""}

    def test_complete_names_the_section(self) -> None:
        with pytest.raises(UserError, match=r"example\.count is 0; allowed"):
            complete("example", {"count": 0}, Example)

    def test_complete_suggests_a_key(self) -> None:
        with pytest.raises(UserError, match=r"key in \[example\] 'shar'.*Did you mean 'share'\?"):
            complete("example", {"shar": 0.5}, Example)


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
        assert config.values("schedule") == {"learning_rate": 0.3}


finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
layers = st.fixed_dictionaries(
    {
        "run": st.fixed_dictionaries(
            {},
            optional={
                "rounds": st.integers(1, 2**62),
                "seed": st.integers(0, 2**62),
                "clients_per_round": positive,
                "unseen": st.floats(0, 1, exclude_max=True),
                "device": st.text(),
            },
        ),
        "batching": st.fixed_dictionaries({}, optional={"batch_size": st.integers(0, 10_000)}),
        "data": st.one_of(
            st.fixed_dictionaries(
                {"name": st.just("file"), "path": st.text()},
                optional={"target_column": st.text(), "test": st.floats(0, 1, exclude_max=True)},
            ),
            st.fixed_dictionaries({"name": st.just("synthetic"), "clustered": st.booleans(), "size_mean": finite}),
        ),
        "partition": st.fixed_dictionaries(
            {"name": st.sampled_from(sorted(PARTITIONS)), "share": st.floats(0, 1, exclude_min=True)}
        ),
        "method": st.fixed_dictionaries({"name": st.sampled_from(sorted(METHODS))}),
        "loss": st.fixed_dictionaries({"name": st.sampled_from(["auto", *LOSSES])}),
        "solver": st.fixed_dictionaries(
            {"name": st.sampled_from(sorted(SOLVERS)), "weight_decay": st.floats(0, 1e300)}
        ),
        "schedule": st.fixed_dictionaries({"name": st.sampled_from(sorted(SCHEDULES)), "learning_rate": positive}),
    }
)


class TestToml:
    @given(layers)
    def test_reading_back_gives_the_same(self, layer: dict[str, dict[str, Any]]) -> None:
        config = build(layer)
        assert build(tomllib.loads(config.to_toml())) == config

    @given(layers)
    def test_reading_back_on_top_of_a_preset_gives_the_same(self, layer: dict[str, dict[str, Any]]) -> None:
        config = Config.build(layer)
        assert Config.build(tomllib.loads(config.to_toml())) == config

    @given(st.text(st.characters(max_codepoint=0x2100, codec="utf-8")))
    def test_any_path_comes_back(self, path: str) -> None:
        written = build({"data": {"name": "file", "path": path}}).to_toml()
        assert tomllib.loads(written)["data"]["path"] == path

    @pytest.mark.parametrize(
        "path",
        [
            'with "quotes"',
            "with 'quotes'",
            "C:\\data\\new",
            "line\nbreak",
            "\r\n",
            "\t",
            "\x00\x1f\x7f\x80",
            "naïve 数据 🙂",
            "# no comment",
            '"""',
            "\\u0041",
            "\u2028",
        ],
    )
    def test_an_awkward_path_comes_back_through_a_file(self, tmp_path: Path, path: str) -> None:
        config = build({"data": {"name": "file", "path": path}})
        assert build(read_toml(write(tmp_path / "run.toml", config.to_toml()))) == config

    @pytest.mark.parametrize("flag", [True, False])
    def test_flags_stay_flags(self, flag: bool) -> None:
        written = build({"solver": {"nesterov": flag}}).to_toml()
        assert tomllib.loads(written)["solver"]["nesterov"] is flag

    def test_whole_numbers_stay_whole(self) -> None:
        assert isinstance(tomllib.loads(build().to_toml())["run"]["rounds"], int)


class TestReadToml:
    def test_sections_come_back(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.toml", '[run]\nrounds = 3\n[solver]\nname = "adam"\n')
        assert read_toml(path) == {"run": {"rounds": 3}, "solver": {"name": "adam"}}

    def test_an_empty_file_changes_nothing(self, tmp_path: Path) -> None:
        assert build(read_toml(write(tmp_path / "run.toml", ""))) == build()

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no configuration file .*missing\.toml"):
            read_toml(tmp_path / "missing.toml")

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="can't be read as TOML"):
            read_toml(tmp_path)

    @pytest.mark.parametrize("text", ["[run", "[run]\nrounds = ", "[run]\nrounds = 1\nrounds = 2", "rounds"])
    def test_broken_toml_names_the_file_and_the_line(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(UserError, match=r"run\.toml can't be read as TOML: .*(line \d|end of document)"):
            read_toml(write(tmp_path / "run.toml", text))

    def test_a_file_in_another_encoding_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run.toml").write_bytes(b"[run]\ndevice = '\xe9'\n")
        with pytest.raises(UserError, match=r"run\.toml can't be read as TOML"):
            read_toml(tmp_path / "run.toml")

    def test_an_unknown_section_gets_a_suggestion(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"section in .*run\.toml 'solvers'.*Did you mean 'solver'\?"):
            read_toml(write(tmp_path / "run.toml", "[solvers]\nmomentum = 0.5\n"))

    def test_a_key_outside_the_sections_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="'learning_rate'"):
            read_toml(write(tmp_path / "run.toml", "learning_rate = 0.5\n"))

    @pytest.mark.parametrize("text", ["run = 3", "[[run]]\nrounds = 3"])
    def test_a_section_that_is_none_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(UserError, match=r"'run' in .*run\.toml is .*3.*; allowed: a section \[run\]"):
            read_toml(write(tmp_path / "run.toml", text))


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
        monkeypatch.setattr("fedem.config.files", lambda package: tmp_path)
        write(
            tmp_path / "synthetic.toml",
            '[all.run]\nrounds = 11\n[all.solver]\nname = "adam"\nbeta1 = 0.5\n'
            "[all.schedule]\nlearning_rate = 0.25\n[fedavg.schedule]\nlearning_rate = 0.75\n",
        )
        return tmp_path

    def test_what_holds_for_all_methods_applies(self, presets: Path) -> None:
        config = Config.build()
        assert config.run.rounds == 11
        assert config.solver == Adam(beta1=0.5)

    @pytest.mark.parametrize(("method", "rate"), [("fedem", 0.25), ("fedavg", 0.75), ("local", 0.25)])
    def test_what_holds_for_one_method_wins(self, presets: Path, method: str, rate: float) -> None:
        assert Config.build({"method": {"name": method}}).schedule.learning_rate == rate

    def test_the_last_layer_decides_the_method(self, presets: Path) -> None:
        config = Config.build({"method": {"name": "fedem"}}, {"method": {"name": "fedavg"}})
        assert config.schedule.learning_rate == 0.75

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

    def test_every_shipped_preset_is_for_known_data_and_methods(self) -> None:
        for resource in files("fedem.presets").iterdir():
            if resource.name.endswith(".toml"):
                content = tomllib.loads(resource.read_text(encoding="utf-8"))
                assert resource.name.removesuffix(".toml") in (*DATA, "default")
                assert set(content) <= {"all", *METHODS}
                assert {section for sections in content.values() for section in sections} <= SECTIONS

    def test_the_shipped_presets_are_used(self) -> None:
        """What holds for any data, and on top of it what holds for this one."""
        shipped = {
            name: tomllib.loads(files("fedem.presets").joinpath(f"{name}.toml").read_text())
            for name in ("default", "synthetic")
        }
        config = Config.build({"data": {"name": "synthetic"}, "method": {"name": "fedem"}})
        assert config.solver.momentum == shipped["default"]["all"]["solver"]["momentum"]
        assert config.solver.weight_decay == shipped["synthetic"]["all"]["solver"]["weight_decay"]
        assert config.schedule.learning_rate == shipped["synthetic"]["fedem"]["schedule"]["learning_rate"]
        mine = Config.build({"data": {"name": "file"}, "method": {"name": "fedem"}})
        assert mine.schedule.learning_rate == shipped["default"]["fedem"]["schedule"]["learning_rate"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("section", "name", "suggestion"),
        [
            ("data", "sinthetic", "synthetic"),
            ("method", "feddem", "fedem"),
            ("model", "linaer", "linear"),
            ("loss", "logistics", "logistic"),
            ("solver", "adma", "adam"),
            ("schedule", "cosin", "cosine"),
        ],
    )
    def test_an_unknown_name_gets_a_suggestion(self, section: str, name: str, suggestion: str) -> None:
        with pytest.raises(UserError, match=rf"Unknown {section} '{name}'; allowed: .*Did you mean '{suggestion}'\?"):
            Config.build({section: {"name": name}})

    @pytest.mark.parametrize(
        ("section", "key", "suggestion"),
        [
            ("run", "round", "rounds"),
            ("batching", "batchsize", "batch_size"),
            ("data", "num_client", "num_clients"),
            ("method", "components", "num_components"),
            ("model", "biass", "bias"),
            ("solver", "momentun", "momentum"),
            ("schedule", "learningrate", "learning_rate"),
        ],
    )
    def test_an_unknown_key_gets_a_suggestion(self, section: str, key: str, suggestion: str) -> None:
        with pytest.raises(UserError, match=rf"key in \[{section}\] '{key}'; .*Did you mean '{suggestion}'\?"):
            Config.build({section: {key: 1}})

    @pytest.mark.parametrize("section", ["run", "batching"])
    def test_a_section_without_names_takes_none(self, section: str) -> None:
        with pytest.raises(UserError, match=rf"key in \[{section}\] 'name'"):
            Config.build({section: {"name": "quick"}})

    @pytest.mark.parametrize(
        ("section", "key", "value"),
        [
            ("run", "rounds", True),
            ("run", "rounds", 2.0),
            ("run", "rounds", "many"),
            ("run", "rounds", 0),
            ("run", "rounds", -1),
            ("run", "seed", -1),
            ("run", "clients_per_round", 0.0),
            ("run", "clients_per_round", -0.5),
            ("run", "clients_per_round", "all"),
            ("run", "clients_per_round", float("nan")),
            ("run", "unseen", 1.0),
            ("run", "unseen", -0.1),
            ("run", "device", 0),
            ("run", "chunk_size", -1),
            ("run", "evaluate_every", -1),
            ("run", "checkpoint_every", 0),
            ("batching", "batch_size", -1),
            ("batching", "batch_size", True),
            ("batching", "local_epochs", 0),
            ("data", "num_clients", 0),
            ("data", "noise_scale", -1.0),
            ("data", "clustered", 1),
            ("method", "num_components", 0),
            ("method", "num_components", 3.0),
            ("model", "bias", "no"),
            ("solver", "momentum", 1.0),
            ("solver", "momentum", "0.9"),
            ("solver", "nesterov", 0),
            ("schedule", "learning_rate", 0),
            ("schedule", "learning_rate", float("inf")),
            ("schedule", "learning_rate", float("nan")),
            ("schedule", "learning_rate", [0.1]),
            ("schedule", "factor", -0.1),
        ],
    )
    def test_a_bad_value_is_named(self, section: str, key: str, value: Any) -> None:
        with pytest.raises(UserError) as error:
            Config.build({section: {key: value}})
        assert str(error.value).startswith(f"{section}.{key} is {value!r}; allowed: ")

    @pytest.mark.parametrize(
        ("key", "value", "suggestion"), [("engine", "staked", "stacked"), ("dtype", "float46", "float64")]
    )
    def test_a_word_that_is_no_choice_gets_a_suggestion(self, key: str, value: str, suggestion: str) -> None:
        with pytest.raises(UserError, match=rf"run\.{key} '{value}'; .*Did you mean '{suggestion}'\?"):
            Config.build({"run": {key: value}})

    def test_the_guessed_loss_takes_no_settings(self) -> None:
        with pytest.raises(UserError, match=r"\[loss\] has 'variance', but 'auto' takes no settings"):
            Config.build({"loss": {"variance": 2.0}})

    @pytest.mark.parametrize("section", ["data", "partition", "model"])
    def test_what_was_given_from_python_takes_no_settings(self, section: str) -> None:
        with pytest.raises(UserError, match=rf"\[{section}\] has 'path', but 'given' takes no settings"):
            Config.build({section: {"name": "given", "path": "here"}})

    @pytest.mark.parametrize("section", ["data", "partition", "model"])
    def test_what_was_given_from_python_cannot_be_made_again(self, section: str) -> None:
        config = Config.build({section: {"name": "given"}})
        with pytest.raises(UserError, match=f"The {section} of this run w.* passed from Python"):
            getattr(config, section)


class TestParseAssignment:
    @pytest.mark.parametrize(
        ("text", "section", "key", "value"),
        [
            ("solver.momentum=0.5", "solver", "momentum", 0.5),
            ("run.rounds=7", "run", "rounds", 7),
            ("run.rounds = 7", "run", "rounds", 7),
            ("schedule.learning_rate=1e-3", "schedule", "learning_rate", 1e-3),
            ("solver.nesterov=true", "solver", "nesterov", True),
            ("solver.name=adam", "solver", "name", "adam"),
            ('solver.name="adam"', "solver", "name", "adam"),
            ("run.device=cuda:0", "run", "device", "cuda:0"),
            ("data.path=/tmp/some file.csv", "data", "path", "/tmp/some file.csv"),
            ("data.path=a=b.csv", "data", "path", "a=b.csv"),
            ("data.path='5'", "data", "path", "5"),
            ("data.path=", "data", "path", ""),
        ],
    )
    def test_an_assignment_is_parsed(self, text: str, section: str, key: str, value: Any) -> None:
        parsed = parse_assignment(text)
        assert parsed == {section: {key: value}}
        assert type(parsed[section][key]) is type(value)

    @pytest.mark.parametrize("text", ["", "rounds", "rounds=3", "run.rounds", "=3", ".=3", "run.=3", ".rounds=3"])
    def test_what_is_no_assignment_is_named(self, text: str) -> None:
        with pytest.raises(UserError) as error:
            parse_assignment(text)
        assert repr(text) in str(error.value)
        assert "section.key=value" in str(error.value)

    def test_an_unknown_section_gets_a_suggestion(self) -> None:
        with pytest.raises(UserError, match=r"Unknown section 'shedule'.*Did you mean 'schedule'\?"):
            parse_assignment("shedule.learning_rate=0.3")

    def test_an_unknown_key_is_refused_when_laid_over(self) -> None:
        with pytest.raises(UserError, match=r"key in \[run\] 'rouns'.*Did you mean 'rounds'\?"):
            build(parse_assignment("run.rouns=3"))

    def test_a_wrong_type_is_refused_when_laid_over(self) -> None:
        with pytest.raises(UserError, match=r"run\.rounds is 'many'; allowed: a whole number"):
            build(parse_assignment("run.rounds=many"))


class TestRoute:
    def test_no_options_choose_the_method_alone(self) -> None:
        assert route({}, "fedavg") == {"method": {"name": "fedavg"}}

    @pytest.mark.parametrize(
        ("key", "value", "section"),
        [
            ("rounds", 5, "run"),
            ("seed", 3, "run"),
            ("batch_size", 16, "batching"),
            ("local_epochs", 2, "batching"),
            ("num_components", 4, "method"),
            ("momentum", 0.5, "solver"),
            ("weight_decay", 0.5, "solver"),
            ("learning_rate", 0.5, "schedule"),
            ("factor", 0.5, "schedule"),
            ("bias", False, "model"),
        ],
    )
    def test_an_option_finds_its_section(self, key: str, value: Any, section: str) -> None:
        routed = route({key: value}, "fedem")
        assert routed[section][key] == value
        assert build(routed).sections[section][key] == value

    def test_a_word_chooses_by_name(self) -> None:
        assert route({"solver": "adam"}, "fedem")["solver"] == {"name": "adam"}

    def test_options_of_the_solver_chosen_are_known(self) -> None:
        config = build(route({"beta1": 0.5, "solver": "adam"}, "fedem"))
        assert config.solver == Adam(beta1=0.5)

    def test_options_of_the_loss_chosen_are_known(self) -> None:
        config = build(route({"loss": "squared_error", "variance": 2.0}, "fedem"))
        assert config.loss == SquaredError(variance=2.0)

    def test_options_of_another_solver_are_refused(self) -> None:
        with pytest.raises(UserError, match="Unknown option 'momentum'"):
            route({"solver": "adam", "momentum": 0.5}, "fedem")

    def test_options_of_another_method_are_refused(self) -> None:
        with pytest.raises(UserError, match="Unknown option 'num_components'"):
            route({"num_components": 2}, "fedavg")

    def test_a_whole_section_may_be_given(self) -> None:
        config = build(route({"schedule": {"name": "cosine", "learning_rate": 0.5}, "run": {"rounds": 4}}, "fedem"))
        assert config.schedule == Cosine(learning_rate=0.5)
        assert config.run.rounds == 4

    def test_a_section_may_be_given_without_its_name(self) -> None:
        config = build(route({"solver": {"momentum": 0.25}}, "fedem"))
        assert config.solver == SGD(momentum=0.25)

    def test_a_section_and_an_option_of_it_go_together(self) -> None:
        config = build(route({"schedule": {"name": "cosine"}, "learning_rate": 0.5}, "fedem"))
        assert config.schedule == Cosine(learning_rate=0.5)

    def test_the_options_are_not_changed(self) -> None:
        options = {"solver": {"momentum": 0.25}, "weight_decay": 0.5}
        route(options, "fedem")
        assert options == {"solver": {"momentum": 0.25}, "weight_decay": 0.5}

    def test_an_unknown_option_gets_a_suggestion(self) -> None:
        with pytest.raises(UserError, match=r"Unknown option 'learning_rat'; .*Did you mean 'learning_rate'\?"):
            route({"learning_rat": 0.5}, "fedem")

    def test_an_unknown_method_gets_a_suggestion(self) -> None:
        with pytest.raises(UserError, match=r"Unknown method 'feddem'; .*Did you mean 'fedem'\?"):
            route({}, "feddem")

    def test_an_unknown_solver_gets_a_suggestion(self) -> None:
        with pytest.raises(UserError, match=r"Unknown solver 'adma'; .*Did you mean 'adam'\?"):
            route({"solver": "adma"}, "fedem")

    @pytest.mark.parametrize("method", METHODS)
    def test_no_option_belongs_to_two_sections(self, method: str) -> None:
        for solver, schedule in product(SOLVERS.values(), SCHEDULES.values()):
            chosen = (RunSettings, Batching, METHODS[method].algorithm, solver, schedule)
            keys = [key for settings in chosen for key in names_of(settings)]
            assert len(keys) == len(set(keys))

    def test_no_option_is_called_as_a_section(self) -> None:
        keys = {key for table in NAMED.values() for kinds in table.values() for key in names_of(*kinds)}
        assert not (keys | set(names_of(RunSettings)) | set(names_of(Batching))) & (SECTIONS | {"name"})


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
