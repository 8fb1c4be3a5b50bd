"""What files may hold: whatever is wrong with one ends in a sentence that names it, the key and what is allowed."""

from __future__ import annotations

import json
import math
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.errors import UserError
from fedem.core.files import digest, file_digest
from fedem.core.schema import (
    FILE_NAME,
    Flag,
    Kind,
    Listed,
    Maybe,
    Number,
    Table,
    Text,
    Whole,
    parse_json,
    parse_toml,
    read_json,
    read_json_if_there,
    read_toml,
)

NESTED = Table(
    {"round": Whole(least=0), "states": Table(others=Listed(Number(above=0, most=1)))},
    {"note": Maybe(Text()), "is_over": Flag(), "kind": Text(choices=("a", "b"))},
    others=None,
)
GOOD: dict[str, Any] = {"round": 3, "states": {"last": [0.5, 1]}, "note": None, "is_over": True, "kind": "a"}
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_content_comes_back(value: Any) -> None:
    assert parse_json(json.dumps(value), "it") == value


@given(values, st.sampled_from([*GOOD]))
def test_whatever_stands_at_a_key_is_taken_or_refused_by_name(value: Any, key: str) -> None:
    found = NESTED.problem(GOOD | {key: value})
    assert found is None or (found.key.startswith(key) and found.allowed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"round": -1}, "round is -1; allowed: a whole number, at least 0"),
        ({"round": 1.5}, "round is 1.5; allowed: a whole number"),
        ({"round": True}, "round is True; allowed: a whole number"),
        ({"states": {"last": [1, 0]}}, r"states\.last\[1\] is 0; allowed: a number, above 0, at most 1"),
        ({"states": []}, r"states is \[\]; allowed: a table"),
        ({"note": 3}, "note is 3; allowed: a text, or null"),
        ({"is_over": 1}, "is_over is 1; allowed: true or false"),
        ({"kind": "c"}, "kind is 'c'; allowed: a, b"),
        ({"other": 1}, "other is unknown; allowed: note, is_over, kind, round, states"),
    ],
)
def test_what_is_not_allowed_is_named(changed: dict[str, Any], said: str) -> None:
    assert parse_json(json.dumps(GOOD), "it", NESTED) == GOOD
    with pytest.raises(UserError, match=said):
        parse_json(json.dumps(GOOD | changed), "it", NESTED)
    with pytest.raises(UserError, match="states is missing"):
        parse_json('{"round": 1}', "it", NESTED)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 70 + b"]" * 70, "nested too deeply"),
        (b'{"a": {"b": [1, NaN]}}', r"a\.b\[1\] is nan"),
        (b'{"a": -Infinity}', "a is -inf"),
        (b'{"a": 1e400}', "a is inf"),
        (b'{"a": 36893488147419103232}', "a is 36893488147419103232"),
        (b'{"a": ' + b"7" * 10_000 + b"}", "a is 7.778e\\+9999"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is there twice"),
        (b"\xff\xfe", "can't be read as JSON: 'utf-8' codec"),
        ('{"a": 1}'.encode("utf-16"), "can't be read as JSON"),
        (b"", "can't be read as JSON: Expecting value"),
        (b'{"a": 1', "can't be read as JSON"),
    ],
)
def test_json_that_no_file_has_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b".".join([b"a"] * 5_000) + b" = 1", "nested too deeply"),
        (b"[run]\nrounds = inf", r"run\.rounds is inf"),
        (b"a = [nan]", r"a\[0\] is nan"),
        (b"a = 1" + b"0" * 30, "a is 1000"),
        (b"a = 1" + b"0" * 9_000, "thousands of digits"),
        (b"a = 1\na = 2", "can't be read as an experiment"),
        (b"\xff", "can't be read as an experiment: 'utf-8' codec"),
    ],
)
def test_toml_that_no_file_has_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "it.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read_toml(path, "an experiment")
    assert str(path) in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert read_json_if_there(tmp_path / "none.json") is None
    with pytest.raises(FileNotFoundError):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(UserError, match="can't be read as JSON: Is a directory"):
        read_json(tmp_path)
    assert parse_toml("a = 1", "it") == {"a": 1}


@given(st.text(max_size=20))
def test_names_of_files_stay_beside(name: str) -> None:
    kind: Kind = FILE_NAME
    if kind.problem(name) is None:
        place = Path("folder").resolve()
        assert (place / name).resolve().parent == place
        assert not name.startswith(".")


@pytest.mark.parametrize("size", [0, 1, 2**22, 2**22 + 1, 10**7])
def test_a_hash_is_that_of_the_hashes_of_pieces(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * math.ceil(size / 256)
    content = content[:size]
    pieces = [content[start : start + 4 * 1024 * 1024] for start in range(0, size, 4 * 1024 * 1024)]
    inner = b"".join(blake2b(piece, digest_size=32).digest() for piece in pieces)
    wanted = blake2b(inner, digest_size=32).hexdigest()
    (tmp_path / "it").write_bytes(content)
    with (tmp_path / "it").open("rb") as file:
        assert digest(content) == file_digest(file) == wanted
