"""Configurations that can not be meant are refused with what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from fedem.core.errors import UserError
from fedem.runs.config import Config


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
            ("batching", "batch_size", -2),
            ("batching", "batch_size", True),
            ("batching", "local_epochs", -1),
            ("data", "num_clients", 0),
            ("data", "noise_scale", -1.0),
            ("data", "clustered", 1),
            ("method", "num_components", 0),
            ("method", "num_components", 3.0),
            ("model", "bias", "no"),
            ("solver", "momentum", 1.0),
            ("solver", "momentum", "0.9"),
            ("solver", "nesterov", 0),
            ("schedule", "learning_rate", -1),
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
