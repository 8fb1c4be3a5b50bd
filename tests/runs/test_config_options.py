"""Single settings given by name: read as values and put in the section that they belong to."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from configs import NAMED, SECTIONS, build

from fedem.core.errors import UserError
from fedem.core.settings import names_of
from fedem.engines import Batching
from fedem.methods import METHODS
from fedem.models.losses import SquaredError
from fedem.runs.config import RunSettings, parse_assignment, route
from fedem.solvers import SGD, SOLVERS, Adam
from fedem.solvers.schedules import SCHEDULES, Cosine


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
