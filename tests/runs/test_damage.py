"""Run folders that are damaged: it is noticed and named, and nothing is lost that need not be."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import StopError, same_states, stop_at
from small_runs import small_config, small_run
from torch import Tensor

import fedem
from fedem.core.errors import Notice, UserError
from fedem.core.files import digest, write_json
from fedem.runs.checking import check_run
from fedem.runs.checkpoints import MANIFEST, PREVIOUS, Checkpoints
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import State


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six rounds, with checkpoints after every second one."""
    place = tmp_path_factory.mktemp("complete") / "run"
    small_run(place)
    return place


@pytest.fixture
def place(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "run"))


def _flip(path: Path, position: int = -3) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def _files(manifest: Path) -> set[str]:
    return {entry["file"] for entry in json.loads(manifest.read_text())["states"].values()}


def _state(number: int) -> State:
    return State(number, {"w": torch.full((3,), float(number))}, {"v": torch.arange(4.0)})


def test_a_manifest_holds_the_hashes_of_its_files(place: Path) -> None:
    saved = place / "checkpoints"
    for name in (MANIFEST, PREVIOUS):
        for entry in json.loads((saved / name).read_text())["states"].values():
            assert entry["blake2b"] == digest((saved / entry["file"]).read_bytes())
    rounds = [json.loads((saved / name).read_text())["states"]["last"]["round"] for name in (MANIFEST, PREVIOUS)]
    assert rounds == [6, 4]
    named = _files(saved / MANIFEST) | _files(saved / PREVIOUS)
    assert {path.name for path in saved.iterdir()} == {MANIFEST, PREVIOUS, *named}


def test_manifests_without_hashes_are_read(place: Path) -> None:
    before = fedem.Result.load(place)
    path = place / "checkpoints" / MANIFEST
    content = json.loads(path.read_text())
    del content["blake2b"]
    for entry in content["states"].values():
        del entry["blake2b"]
    path.write_text(json.dumps(content))
    assert same_states(fedem.Result.load(place).state(), before.state())


@pytest.mark.parametrize("name", ["../../../x", "/etc/x", "..", ".hidden", "a/b", "a\\b", "", "C:x"])
def test_a_manifest_names_files_beside_it_alone(place: Path, name: str) -> None:
    path = place / "checkpoints" / MANIFEST
    (place / "checkpoints" / PREVIOUS).unlink()
    content = json.loads(path.read_text())
    del content["blake2b"]
    content["states"]["last"]["file"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"checkpoint\.json can't be read: states\.last\.file is .*; allowed: the name"):
        fedem.Result.load(place)


def _damages(place: Path) -> dict[str, Callable[[], Any]]:
    saved = place / "checkpoints"
    last = saved / json.loads((saved / MANIFEST).read_text())["states"]["last"]["file"]
    fact = (saved / MANIFEST).read_text().replace('"seconds": ', '"seconds": 1')
    return {
        "a bit of a tensor": lambda: _flip(last),
        "a tensor file cut short": lambda: last.write_bytes(last.read_bytes()[:-10]),
        "a tensor file that is gone": last.unlink,
        "a manifest cut short": lambda: (saved / MANIFEST).write_bytes((saved / MANIFEST).read_bytes()[:100]),
        "another fact": lambda: (saved / MANIFEST).write_text(fact),
        "a manifest that is gone": (saved / MANIFEST).unlink,
    }


@pytest.mark.parametrize("damage", range(6))
def test_the_checkpoint_before_is_used_and_ends_in_the_same_bits(place: Path, complete: Path, damage: int) -> None:
    whole, [*damages] = fedem.Result.load(complete), _damages(place).items()
    what, harm = damages[damage]
    harm()
    named = "round-000006" if "tensor" in what else MANIFEST
    with pytest.warns(Notice, match=rf"{named}.* The checkpoint before it is used, which is of 4 rounds"):
        loaded = fedem.Result.load(place)
    assert loaded.state().round == 4
    assert "test_accuracy" not in loaded.summary  # the outcome is that of other states
    with pytest.warns(Notice, match="The checkpoint before it is used"):
        resumed = small_run(place, resume=True)
    again = fedem.Result.load(place)
    for role in ("last", "best"):
        assert same_states(whole.state(role), resumed.state(role))
        assert same_states(whole.state(role), again.state(role))
    assert (place / "clients.csv").read_bytes() == (complete / "clients.csv").read_bytes()
    assert [line["round"] for line in RunFolder(place).metrics()] == [1, 2, 3, 4, 5, 6]
    assert check_run(RunFolder(place)) == []


def test_damage_that_nothing_stands_in_for_is_refused_by_name(place: Path) -> None:
    (place / "checkpoints" / PREVIOUS).unlink()
    _flip(place / "checkpoints" / "round-000006.safetensors")
    for attempt in (lambda: fedem.Result.load(place), lambda: small_run(place, resume=True)):
        with pytest.raises(UserError, match=r"round-000006\.safetensors is damaged.*There is no other"):
            attempt()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda leaf: leaf[:-1], r"checkpoints has 'log_weights' of shape \[11, 3\] for 12 clients; allowed: a row"),
        (lambda leaf: leaf[:, :-1], r"parameters in .*checkpoints are not those of the model 'linear'"),
        (lambda leaf: leaf[:, 0], r"mixture weights in .*checkpoints are torch.float32 of shape \[\]"),
    ],
)
def test_tensors_of_another_run_are_refused(place: Path, changed: Callable[[Tensor], Tensor], said: str) -> None:
    saved = Checkpoints(place / "checkpoints")
    states, facts = saved.load()
    other = {"log_weights": changed(states["last"].personal["log_weights"]).contiguous()}
    shutil.rmtree(saved.path)
    Checkpoints(saved.path).save({"last": replace(states["last"], personal=other)}, facts)  # whole, with its hashes
    for attempt in (lambda: fedem.Result.load(place), lambda: small_run(place, resume=True)):
        with pytest.raises(UserError, match=said):
            attempt()


def test_a_state_that_is_not_finite_is_not_gone_on_with(place: Path) -> None:
    saved = Checkpoints(place / "checkpoints")
    states, facts = saved.load()
    other = {name: leaf * float("nan") for name, leaf in states["last"].shared.items()}
    shutil.rmtree(saved.path)
    Checkpoints(saved.path).save({"last": replace(states["last"], shared=other)}, facts)
    with pytest.raises(UserError, match=r"checkpoints has numbers in .* that are not finite"):
        small_run(place, resume=True)


def test_a_kill_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before each move of a file in turn, what is there is the checkpoint before or the new one."""
    real, moves = os.replace, 0

    def killed(source: Any, target: Any) -> None:
        nonlocal moves
        moves -= 1
        if moves < 0:
            raise StopError
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    for allowed in range(3):
        saved, moves = Checkpoints(tmp_path / str(allowed)), 100
        saved.save({"last": _state(1), "best": _state(1)}, {})
        saved.save({"last": _state(2), "best": _state(1)}, {})
        moves = allowed
        with pytest.raises(StopError):
            saved.save({"last": _state(3), "best": _state(3)}, {})
        found, damage = Checkpoints(saved.path).find()
        assert (found.states["last"].round if found else 0, damage) == (2, [])


def test_two_checkpoints_share_files_and_no_others_stay(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    for number in range(1, 6):
        saved.save({"last": _state(number), "best": _state(min(number, 2))}, {})
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {f"round-{n:06d}.safetensors" for n in (2, 4, 5)}
    # What is added to the same last state leaves the one before as it is.
    saved.save({"last": _state(5), "best": _state(2), "tuned-last": _state(5)}, {})
    assert json.loads((tmp_path / PREVIOUS).read_text())["states"]["last"]["round"] == 4


def test_a_damaged_file_of_the_same_name_is_written_again(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save({"last": _state(1)}, {})
    Checkpoints(tmp_path).save({"last": _state(2)}, {})
    _flip(tmp_path / "round-000002.safetensors")
    saved = Checkpoints(tmp_path)
    with pytest.warns(Notice, match="of 1 round"):
        saved.load()
    saved.save({"last": _state(2)}, {})
    assert same_states(Checkpoints(tmp_path).load().states["last"], _state(2))


def test_lines_that_cannot_be_read_are_put_aside_and_no_others(place: Path) -> None:
    path = place / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    wrong = {1: b'{"round": 2, "seco\xff', 3: lines[3].replace(b'"round": 4', b'"round": "x"')}
    content = b"".join(wrong.get(number, line) + b"\n" for number, line in enumerate(lines))
    path.write_bytes(content + lines[5][:30])  # and one that was being written
    with pytest.warns(Notice, match=r"left out: 2 lines that can't be read \(2, 4\)"):
        assert [line["round"] for line in RunFolder(place).metrics()] == [1, 3, 5, 6]
    assert path.read_bytes().startswith(content)
    with pytest.warns(Notice, match="left out: 2 lines"):
        small_run(place, resume=True)
    assert [line["round"] for line in RunFolder(place).metrics()] == [1, 3, 5, 6]
    aside = [json.loads(line) for line in (place / "metrics.damaged.jsonl").read_text().splitlines()]
    kept = {line["line"]: line["content"].encode(errors="surrogateescape") for line in aside}
    assert kept == {number + 1: line for number, line in wrong.items()}


def test_a_search_for_components_needs_all_records(tmp_path: Path) -> None:
    auto = {"method": {"num_components": "auto"}}
    config = fedem.Config.build(small_config().sections, auto)
    data = config.make_data()
    with pytest.raises(StopError):
        fedem.run(config, data, out=tmp_path / "run", listener=stop_at(5))
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text("\n".join(["damaged", *path.read_text().splitlines()[1:]]) + "\n")
    with (
        pytest.warns(Notice, match="left out: 1 line"),
        pytest.raises(UserError, match=r"no record of 1 round, such as round 1, but .*num_components is 'auto'"),
    ):
        fedem.run(config, data, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("summary.json", b"[" * 100_000, "nested too deeply"),
        ("summary.json", b'{"rounds": 1e999}', "rounds is inf"),
        ("summary.json", b'{"rounds": 1, "rounds": 2}', "'rounds' is there twice"),
        ("summary.json", b"\xff\xfe", "summary.json can't be read as JSON"),
        ("summary.json", b"[]", "the content is .*allowed: a table"),
        ("failed.json", b'{"phrase": 3, "message": ""}', "phrase is 3; allowed: a text"),
        ("references.json", b'{"a": 1}', "allowed: a list"),
        ("config.toml", b"a = " + b"[" * 100_000, "nested too deeply"),
        ("config.toml", b"[run]\nrounds = 1" + b"0" * 40, "run.rounds is 1"),
        ("clients.csv", b"client,role,test_loss\nann,train,many\n", "line 2 has test_loss = 'many'"),
    ],
)
def test_damaged_files_end_in_a_sentence(place: Path, name: str, content: bytes, said: str) -> None:
    if name != "summary.json" and name != "clients.csv":
        (place / "summary.json").unlink()
    (place / name).write_bytes(content)
    folder = RunFolder(place)
    with pytest.raises(UserError, match=said):
        _ = folder.config(), folder.summary(), folder.failure(), folder.references(), folder.clients()
    (found,) = [finding for finding in check_run(folder) if finding.path == place / name]
    assert str(place / name) in found.problem


def test_a_check_finds_nothing_wrong_with_a_run_as_it_was_written(place: Path) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert check_run(RunFolder(place)) == []
    assert check_run(RunFolder(place), repair=True) == []
    assert before == {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_repair_puts_right_what_can_be_and_loses_nothing(place: Path) -> None:
    saved, metrics = place / "checkpoints", place / "metrics.jsonl"
    _flip(saved / "round-000006.safetensors")
    damaged = (saved / "round-000006.safetensors").read_bytes()
    metrics.write_text("nonsense\n" + metrics.read_text())
    (place / ".summary.json.tmp").touch()
    (saved / "round-000001.safetensors").write_bytes(b"half a file")
    found = check_run(RunFolder(place))
    assert [finding.path.name for finding in found] == [
        "round-000006.safetensors", "metrics.jsonl", ".summary.json.tmp", "round-000001.safetensors",
    ]  # fmt: skip
    assert not any(finding.mended for finding in found)
    assert "of 4 rounds, to the same bits" in found[0].follows
    mended = check_run(RunFolder(place), repair=True)
    assert [finding.mended for finding in mended if finding.path != place / "summary.json"] == [
        "moved to round-000006.safetensors.damaged; the checkpoint of 4 rounds took its place",
        "moved to metrics.damaged.jsonl", "removed", "removed",
    ]  # fmt: skip
    # The outcome is that of the round whose state was lost, until the run has gone on.
    (left,) = [finding for finding in check_run(RunFolder(place)) if finding.counts]
    assert left.path == place / "summary.json"
    assert "of round 6, and the checkpoint of round 4" in left.problem
    assert (saved / "round-000006.safetensors.damaged").read_bytes() == damaged
    assert fedem.Result.load(place).state().round == 4
    small_run(place, resume=True)
    assert check_run(RunFolder(place)) == []
    assert (saved / "round-000006.safetensors.damaged").read_bytes() == damaged


def test_repair_waits_for_nobody(place: Path) -> None:
    (place / ".other.tmp").touch()
    with RunFolder(place).locked():
        assert check_run(RunFolder(place)) == []  # it may be being written
        with pytest.raises(UserError, match="Another process is training"):
            check_run(RunFolder(place), repair=True)


def test_the_command_names_what_is_wrong(place: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("check", place.parent)
    assert (code, "1 run: nothing is wrong" in out) == (0, True)
    write_json(place.parent / "search.json", {"grids": {}})
    _flip(place / "checkpoints" / "round-000006.safetensors")
    code, out, err = run("check", place.parent)
    assert (code, "round-000006.safetensors is damaged" in out, "sampler is missing" in out) == (1, True, True)
    assert "2 things are wrong in 1 run; --repair" in err
    assert run("check", place / "nothing")[0] == 2


def test_a_reader_never_fails_while_a_run_writes(tmp_path: Path) -> None:
    """A writer saves as fast as it can; whoever loads meanwhile gets one of the checkpoints, whole."""
    small_run(tmp_path / "run")
    states, facts = RunFolder(tmp_path / "run").load()
    over = threading.Event()

    def write() -> None:
        folder = RunFolder(tmp_path / "run")
        number = 6
        while not over.is_set():
            number += 1
            folder.save({role: replace(state, round=number) for role, state in states.items()}, facts)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {fedem.Result.load(tmp_path / "run").state().round for _ in range(40)}
    finally:
        over.set()
        writer.join()
    assert len(seen) > 1
    last = RunFolder(tmp_path / "run").load().states["last"]
    assert same_states(last, replace(states["last"], round=last.round))
