"""Samples that overlap or follow each other in time: cut in order, so that nothing of a test part is trained on."""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import stores
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.errors import UserError
from fedem.data import Shakespeare
from fedem.data.federation import PARTS, Federation
from fedem.data.partitions import Natural, Uniform
from fedem.data.samples import Pool
from fedem.data.shakespeare import encode
from fedem.data.store import prepare
from fedem.runs.config import Config, read_toml

Run = Callable[..., tuple[int, str, str]]
SHARES = st.sampled_from([0.0, 0.05, 0.2, 0.45])
WINDOW = 30


class TestCuts:
    @given(st.lists(st.integers(1, 60), min_size=1, max_size=4), SHARES, SHARES, st.integers(0, 12))
    def test_parts_follow_each_other_with_gaps_between(
        self, sizes: list[int], validation: float, test: float, gap: int
    ) -> None:
        clients = [(np.arange(size), np.arange(size)) for size in sizes]
        federation = Federation.from_clients(clients, validation=validation, test=test, gap=gap)
        for client, size in enumerate(sizes):
            parts = [federation.part(part).client(client).targets.tolist() for part in PARTS]
            there = [part for part in parts if part]
            assert parts[0][0] == 0
            assert there[-1][-1] == size - 1
            assert all(part == list(range(part[0], part[-1] + 1)) for part in there)
            for one, other in itertools.pairwise(there):
                assert other[0] - one[-1] - 1 == gap
            left = sum(map(len, parts))
            assert left == size - gap * (len(there) - 1)
            assert 2 * left >= size
            # The shares are of what is left, to the nearest sample.
            for part, share in zip(parts[1:], (validation, test), strict=True):
                assert len(part) in (0, round(share * left), left - 1)

    @given(st.integers(1, 60), SHARES, SHARES)
    def test_without_a_gap_parts_are_as_large_as_those_drawn(self, size: int, validation: float, test: float) -> None:
        shares = {"validation": validation, "test": test}
        cut, drawn = (Federation.from_clients([(np.eye(size), np.eye(size))], gap=gap, **shares) for gap in (0, None))
        assert [len(cut.part(part)) for part in PARTS] == [len(drawn.part(part)) for part in PARTS]

    @pytest.mark.parametrize(
        ("size", "expected"), [(40, [12, 4, 4]), (39, [23, 0, 6]), (20, [8, 0, 2]), (19, [19, 0, 0]), (1, [1, 0, 0])]
    )
    def test_short_clients_train_first_and_are_tested_next(self, size: int, expected: list[int]) -> None:
        federation = Federation.from_clients([(np.eye(size), np.eye(size))], gap=10)
        assert [len(federation.part(part)) for part in PARTS] == expected

    def test_other_orders_than_the_pools(self) -> None:
        pool = Pool(torch.arange(10)[:, None].float(), torch.arange(10))
        times = torch.tensor([5, 3, 9, 1, 7, 0, 2, 8, 6, 4])
        owned = (("a",), torch.arange(10), torch.tensor([0, 10]), torch.arange(10))
        federation = Federation.from_pool(pool, *owned, gap=0, order=times)
        assert [times[federation.part(part).rows].tolist() for part in PARTS] == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9]]

    def test_a_gap_below_zero_is_refused(self) -> None:
        with pytest.raises(UserError, match="gap between the parts is -1 samples; allowed: at least 0"):
            Federation.from_clients([([1.0, 2.0], [0, 1])], gap=-1)


def made_up(size: int, seed: int) -> str:
    """A text of words, such that no thirty characters come twice."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefghijklm"), rng.integers(2, 7))) for _ in range(200)]
    return " ".join(rng.choice(words, size // 5))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A play of three roles, one of them too short for a test part, prepared."""
    home = stores.make_home(tmp_path, monkeypatch)
    lines = {"ANN": made_up(3000, 0), "BOB": made_up(1500, 1), "CAT": made_up(60, 2)}
    speeches = ""
    for role, text in lines.items():
        third = len(text) // 3
        said = (text[:third], text[third : 2 * third], text[2 * third :])
        speeches += f"  {role}. {said[0].strip()}\n" + "".join(f"    {line.strip()}\n" for line in said[1:])
    (home / "data" / "pg100.txt").write_text(f"THE PLAY\n\nby William Shakespeare\n\n{speeches}", encoding="utf-8")
    prepare(Shakespeare(window=WINDOW))
    return home


def windows(federation: Federation, part: str, client: int) -> Iterator[bytes]:
    """Yield the windows of a part, each with the character after it."""
    inputs, targets = federation.part(part).client(client)
    yield from (row.tobytes() for row in torch.cat([inputs, targets[:, None].to(torch.int8)], 1).numpy())


def found_again(federation: Federation, part: str = "test", length: int = 25) -> float:
    """How often a look-up of the last characters of a part's windows in training windows gives the next character."""
    hits = []
    for client in range(federation.num_clients):
        after = {
            window[start : start + length]: window[start + length]
            for window in windows(federation, "train", client)
            for start in range(len(window) - length)
        }
        hits += [after.get(window[-length - 1 : -1]) == window[-1] for window in windows(federation, part, client)]
    return float(np.mean(hits))


class TestShakespeare:
    def test_no_two_parts_share_a_character(self, home: Path) -> None:
        federation = Shakespeare(window=WINDOW).make(0).federation
        text = (home / "data" / "pg100.txt").read_text(encoding="utf-8")
        assert federation.names == ("THE_PLAY_ANN", "THE_PLAY_BOB", "THE_PLAY_CAT")
        for client, name in enumerate(federation.names):
            # The role's text, put together from the file, and where each window stands in it.
            codes = encode(speech(text, name[-3:])).tobytes()
            covered = {
                part: {
                    place
                    for window in windows(federation, part, client)
                    for place in range(codes.index(window), codes.index(window) + WINDOW + 1)
                }
                for part in PARTS
            }
            train, validation, test = (covered[part] for part in PARTS)
            assert not (train & validation)
            assert not (train & test)
            assert not (validation & test)
            if name != "THE_PLAY_CAT":
                assert max(train) < min(validation) <= max(validation) < min(test)
        assert federation.test.sizes.tolist()[2] == federation.validation.sizes.tolist()[2] == 0
        assert (federation.train.sizes > 0).all()

    def test_looking_windows_up_no_longer_predicts_them(self, home: Path) -> None:
        leaking, clean = (Shakespeare(window=WINDOW, split=how).make(0).federation for how in ("random", "ordered"))
        assert found_again(leaking) > 0.95
        assert found_again(leaking, "validation") > 0.95
        federation = Shakespeare(window=WINDOW).make(0).federation
        assert found_again(federation) == found_again(federation, "validation") == 0
        assert federation.fingerprint == clean.fingerprint != leaking.fingerprint

    def test_shares_are_of_what_gaps_leave(self, home: Path) -> None:
        drawn, cut = (Shakespeare(window=WINDOW, split=how).make(0).federation for how in ("random", "ordered"))
        for client in range(2):
            total = sum(int(drawn.part(part).sizes[client]) for part in PARTS)
            left = total - 2 * WINDOW
            expected = [left - 2 * round(0.2 * left), round(0.2 * left), round(0.2 * left)]
            assert [int(cut.part(part).sizes[client]) for part in PARTS] == expected

    def test_clients_and_their_hash_stay(self, home: Path) -> None:
        drawn, cut = (Shakespeare(window=WINDOW, split=how).make(0) for how in ("random", "ordered"))
        assert drawn.partition_hash == cut.partition_hash != ""
        one, other = (made.federation.hold_out(0.34, 3) for made in (drawn, cut))
        assert one.unseen is not None
        assert other.unseen is not None
        assert one.unseen.names == other.unseen.names
        whole, position = cut.federation, cut.federation.position(other.unseen.names[0])
        for part in PARTS:
            assert list(windows(other.unseen, part, 0)) == list(windows(whole, part, position))

    def test_windows_dealt_at_random_are_not_cut_in_order(self, home: Path) -> None:
        with pytest.raises(
            UserError, match=r"overlap those of others; allowed: partition\.name natural, or data\.split"
        ):
            Shakespeare(window=WINDOW).make(0, Uniform(num_clients=4))
        made = Shakespeare(window=WINDOW, split="random").make(0, Uniform(num_clients=4))
        assert made.federation.num_clients == 4
        with pytest.raises(UserError, match="allowed: ordered, random"):
            Shakespeare(split="by time")


def speech(text: str, role: str) -> str:
    lines = text.split(f"  {role}. ", 1)[1].split("\n")
    end = next(number for number in range(1, len(lines)) if not lines[number].startswith("    "))
    return " ".join((lines[0], *(line[4:] for line in lines[1:end]), ""))


class TestRunsOfBefore:
    """Runs that were written when all windows were drawn at random have no data.split in their files."""

    @pytest.fixture
    def old(self, home: Path, run: Run) -> Path:
        small = ["--set", f"data.window={WINDOW}", "--set", "model.hidden=4", "--set", "batching.local_steps=2"]
        out = home / "old"
        code, _, err = run(
            *("train", "--data", "shakespeare", "--method", "fedavg", "--rounds", "2", *small, "--device", "cpu"),
            *("--set", "data.split=random", "--set", "run.checkpoint_every=1", "--out", out, "-q"),
        )
        assert code == 0, err
        text = (out / "config.toml").read_text(encoding="utf-8")
        assert 'split = "random"\n' in text
        (out / "config.toml").write_text(text.replace('split = "random"\n', ""), encoding="utf-8")
        (out / "summary.json").unlink()
        return out

    def test_they_are_resumed_as_they_were(self, old: Path, run: Run) -> None:
        before = (old / "clients.csv").read_bytes()
        code, _, err = run("train", "--out", old, "--resume", "-q")
        assert code == 0, err
        assert (old / "clients.csv").read_bytes() == before
        code, _, err = run("train", "--out", old, "--resume", "--set", "data.split=ordered", "-q")
        assert code == 2
        assert "started with other settings (data.split); resume it as it was, or start a new one" in err

    @pytest.mark.slow
    @pytest.mark.parametrize("more", [[], ["--seed", "5"]])
    def test_their_files_mean_the_same(self, old: Path, run: Run, more: list[str]) -> None:
        code, _, err = run("train", old / "config.toml", *more, "--out", old.parent / "new", "-q")
        assert code == 0, err
        written = tomllib.loads((old.parent / "new" / "config.toml").read_text(encoding="utf-8"))
        assert written["data"]["split"] == "random"
        if not more:
            assert (old.parent / "new" / "clients.csv").read_bytes() == (old / "clients.csv").read_bytes()

    def test_a_file_written_by_hand_takes_the_default(self, tmp_path: Path) -> None:
        (tmp_path / "mine.toml").write_text('[data]\nname = "shakespeare"\n\n[run]\nrounds = 3\n')
        assert Config.build(read_toml(tmp_path / "mine.toml")).sections["data"]["split"] == "ordered"
        (tmp_path / "mine.toml").write_text('[data]\nname = ["x"]\n\n[run]\npartition_hash = "12"\n')
        with pytest.raises(UserError, match=r"Unknown data \['x'\]"):
            Config.build(read_toml(tmp_path / "mine.toml"))


@pytest.mark.slow
def test_the_real_text() -> None:
    if not os.environ.get("FEDEM_DATA") or Shakespeare().place() is None:
        pytest.skip("FEDEM_DATA does not hold the text, prepared")
    roles = Natural(max_clients=12)
    assert found_again(Shakespeare(split="random").make(0, roles).federation) > 0.99
    assert found_again(Shakespeare().make(0, roles).federation) < 0.01
