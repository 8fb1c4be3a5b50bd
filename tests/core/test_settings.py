"""Settings: every field is checked by what its metadata allow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from fedem.core.errors import UserError
from fedem.core.settings import Settings, complete, names_of
from fedem.methods import METHODS
from fedem.solvers.schedules import Step


@dataclass(frozen=True)
class Example(Settings):
    """One field of each kind."""

    count: int = field(default=3, metadata={"min": 1, "max": 9})
    share: float = field(default=0.5, metadata={"above": 0, "below": 1})
    flag: bool = False
    word: str = field(default="red", metadata={"choices": ("red", "green")})
    free: str = ""
    either: int | str = field(default=2, metadata={"min": 1, "choices": ("auto",)})


class TestSettings:
    def test_defaults_are_allowed(self) -> None:
        assert Example() == Example(count=3, share=0.5, flag=False, word="red", free="")

    @pytest.mark.parametrize(
        ("name", "value"),
        [("count", 1), ("count", 9), ("share", 0.001), ("share", 0.999), ("either", 1), ("either", "auto")],
    )
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
            ("either", 0, "at least 1, or auto"),
            ("either", "red", "at least 1, or auto"),
            ("either", 1.5, "at least 1, or auto"),
            ("either", True, "at least 1, or auto"),
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
        assert names_of(Example) == ("count", "share", "flag", "word", "free", "either")

    def test_fields_that_hold_objects_are_not_set_by_users(self) -> None:
        names = names_of(METHODS["fedem"].algorithm)
        assert "num_components" in names
        assert not {"model", "solver"} & set(names)

    def test_complete_fills_in_the_defaults(self) -> None:
        values = complete("example", {"share": 0.25}, Example)
        assert values == {"count": 3, "share": 0.25, "flag": False, "word": "red", "free": "", "either": 2}

    def test_complete_names_the_section(self) -> None:
        with pytest.raises(UserError, match=r"example\.count is 0; allowed"):
            complete("example", {"count": 0}, Example)

    def test_complete_suggests_a_key(self) -> None:
        with pytest.raises(UserError, match=r"key in \[example\] 'shar'.*Did you mean 'share'\?"):
            complete("example", {"shar": 0.5}, Example)
