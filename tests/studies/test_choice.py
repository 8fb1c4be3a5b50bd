"""``fedem choose``: successive halving over a portfolio, by validation, and what it says in the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import sem

import fedem
from fedem.core.errors import UserError
from fedem.studies import choice
from fedem.studies.choice import PLAIN, Candidate, Choice, Tried, _afford, _kept, candidates, paired, read_budget

SMALL = {
    "one_model": {"title": "one model for all", "method.name": "fedavg"},
    "own_models": {"title": "models of their own", "method.name": "local"},
    "three_components": {"title": "FedEM, three components", "models": ["linear"], "method.name": "fedem"},
}
# One step a round: the trials are quick.
HOW: dict[str, Any] = {"rounds": 24, "device": "cpu", "batch_size": 0, "learning_rate": 0.1}


def _frame(spread: float, seed: int = 0, clients: int = 8, rows: int = 28) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    owners = np.repeat(np.arange(clients), rows)
    inputs = rng.normal(size=(len(owners), 3))
    weights = np.array([2.0, -1.0, 0.5]) + spread * rng.normal(size=(clients, 3))
    targets = (inputs * weights[owners]).sum(1) + 0.3 * rng.normal(size=len(owners))
    return pd.DataFrame(inputs, columns=["a", "b", "c"]).assign(y=targets, client=[f"c{owner}" for owner in owners])


def _federation(spread: float, **how: Any) -> fedem.Federation:
    frame = _frame(spread, **how)
    groups = [group for _, group in frame.groupby("client")]
    pairs = [(group[["a", "b", "c"]].to_numpy(), group["y"].to_numpy()) for group in groups]
    return fedem.Federation.from_clients(pairs, validation=0.25, test=0.25)


def _no_references(trainer: Any) -> None:
    raise UserError("scikit-learn is missing.")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PORTFOLIO", SMALL)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Choice, Path, list[int]]:
    """A choice for clients with slopes of their own, where it was written, and how large each run's test part was."""
    seen: list[int] = []
    whole, out = choice.carry_out, tmp_path_factory.mktemp("choice") / "out"

    def spied(trainer: Any, **how: Any) -> Any:
        seen.append(len(trainer.federation.test))
        return whole(trainer, **how)

    wild = {"title": "a wild one", "models": ["linear"], "method.name": "local", "schedule.learning_rate": 1e9}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(choice, "PORTFOLIO", SMALL | {"wild": wild})
        patched.setattr(choice, "carry_out", spied)
        return fedem.choose(_federation(2.0), out=out, **HOW), out, seen


class TestChoice:
    def test_clients_with_slopes_of_their_own_get_models_of_their_own(
        self, chosen: tuple[Choice, Path, list[int]]
    ) -> None:
        found, out, _ = chosen
        assert found.winner.name == "own_models-linear"
        assert "clients differ" in found.reason
        by_name = {final.name: final for final in found.finals}
        gap = by_name["one_model-linear"].to_the_winner
        assert gap is not None
        assert gap.mean < -2 * gap.error
        assert (by_name["own_models-linear"].test or 9) < 0.7 * (by_name["one_model-linear"].test or 0)
        inputs = torch.zeros(1, 3)
        assert torch.equal(fedem.Result.load(out / "winner").predict("0", inputs), found.result.predict("0", inputs))

    def test_the_test_part_is_not_there_until_the_choice_is_made(self, chosen: tuple[Choice, Path, list[int]]) -> None:
        found, _, seen = chosen
        trials = sum(max(1, len(tried.scores)) for rung in found.rungs for tried in rung)
        assert not any(seen[:trials])
        assert len(seen) > trials
        assert all(seen[trials:])

    def test_all_of_a_rung_train_equally_long_on_the_same_samples(self, chosen: tuple[Choice, Path, list[int]]) -> None:
        rungs = [[tried for tried in rung if not tried.failure] for rung in chosen[0].rungs]
        assert [{tried.rounds for tried in rung} for rung in rungs] == [{3}, {6}, {24}]
        assert [{len(tried.scores) for tried in rung} for rung in rungs] == [{1}, {2}, {3}]
        assert [len(rung) for rung in rungs] == [5, 4, 4]

    def test_what_fails_is_named_and_the_others_go_on(self, chosen: tuple[Choice, Path, list[int]]) -> None:
        first, *later = chosen[0].rungs
        assert [tried.candidate.key for tried in first if tried.failure] == ["wild"]
        assert first[-1].failure
        assert all(tried.candidate.key != "wild" for rung in later for tried in rung)

    @pytest.mark.usefixtures("small")
    def test_clients_that_are_alike_get_one_model_and_are_told_so(self) -> None:
        found = fedem.choose(_federation(0.0, rows=16), in_order=True, **HOW)
        assert found.winner.key == "one_model"
        assert "one pooled model is best" in found.reason
        # Samples in order of time are not dealt anew.
        assert {len(tried.scores) for rung in found.rungs for tried in rung} == {1}

    def test_without_validation_samples_there_is_nothing_to_choose_by(self) -> None:
        bare = fedem.Federation.from_clients([(np.zeros((4, 2)), np.zeros(4))] * 2, validation=0.0, test=0.0)
        with pytest.raises(UserError, match="no validation samples to choose by"):
            fedem.choose(bare)

    def test_one_client_has_nothing_to_choose(self) -> None:
        with pytest.raises(UserError, match="There is 1 client; allowed: 2 or more"):
            fedem.choose(_federation(0.0, clients=1))


class TestTheRule:
    """Ten clients whose losses differ by ``gap`` from those of the best, 0, 0.1, 0, 0.1 ... with a standard error."""

    ERROR = sem([0.0, 0.1] * 5)

    def _decided(self, **gaps: float) -> tuple[str, str]:
        federation = _federation(0.0, clients=10)
        names = federation.names

        def tried(key: str, gap: float) -> Tried:
            # Around the gap, by the same amount on both sides.
            scores = {name: 1.0 + gap + (0.05 if number % 2 else -0.05) for number, name in enumerate(names)}
            return Tried(Candidate(key, "linear", key, ()), 9, [1.0 + gap], [scores])

        best = Tried(
            Candidate("five_components", "linear", "five_components", ()), 9, [1.0], [dict.fromkeys(names, 1.0)]
        )
        rung = [best, *(tried(key, gap * self.ERROR) for key, gap in sorted(gaps.items(), key=lambda pair: pair[1]))]
        winner, reason = choice._decide(rung, choice.METRICS["log_loss"], federation)
        return winner.key, reason

    def test_the_simplest_within_one_standard_error_is_chosen(self) -> None:
        assert self._decided(own_models=0.9, three_components=0.5, one_model=3)[0] == "own_models"
        assert self._decided(own_models=1.1, three_components=0.5, one_model=3)[0] == "three_components"
        assert self._decided(own_models=1.1, three_components=1.1, one_model=3)[0] == "five_components"

    def test_that_clients_differ_must_be_shown_against_one_model_for_all(self) -> None:
        winner, reason = self._decided(own_models=0.5, one_model=1.9)
        assert winner == "one_model"
        assert "one pooled model is best" in reason
        winner, reason = self._decided(own_models=3, one_model=2.1)
        assert winner == "five_components"
        assert reason.endswith("clients differ.")


def test_where_nothing_comes_to_an_end_the_first_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    wild = {"title": "a wild one", "models": ["linear"], "method.name": "local", "schedule.learning_rate": 1e9}
    monkeypatch.setattr(choice, "PORTFOLIO", {"wild": wild})
    with pytest.raises(UserError, match=r"No candidate came to an end\. a wild one \(linear\): Training diverged"):
        fedem.choose(_federation(1.0), **HOW)


@pytest.mark.slow
def test_the_whole_portfolio_can_be_trained() -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(24, 3)) for _ in range(4)]
    clients = [(x, (x[:, 0] + rng.normal(size=24) > 0).astype(int)) for x in inputs]
    federation = fedem.Federation.from_clients(clients, validation=0.25, test=0.25)
    found = fedem.choose(federation, rounds=8, device="cpu")
    assert not [tried.failure for rung in found.rungs for tried in rung if tried.failure]
    assert len(found.rungs[0]) == len(candidates(("linear", "mlp"), "classes", 4)) == 23


@pytest.mark.slow
def test_mixtures_for_images_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {*PLAIN, "heads", "heads_label_shares", "components_label_shares"}
    monkeypatch.setattr(choice, "PORTFOLIO", {key: entry for key, entry in choice.PORTFOLIO.items() if key in ours})
    rng = np.random.default_rng(0)
    inputs = [rng.integers(0, 256, (12, 1, 16, 16), dtype=np.uint8) for _ in range(3)]
    clients = [(x, (x[:, 0, :4, :4].mean((1, 2)) > 128).astype(int)) for x in inputs]
    federation = fedem.Federation.from_clients(clients, validation=0.25, test=0.25)
    found = fedem.choose(federation, rounds=2, device="cpu", budget="1h")
    assert not [tried.failure for rung in found.rungs for tried in rung if tried.failure]
    assert {tried.candidate.key for tried in found.rungs[0]} == ours


class TestPortfolio:
    def test_what_does_not_suit_is_left_out(self) -> None:
        every = {each.name for each in candidates(("linear", "mlp"), "classes", 10)}
        assert {"related_models-linear", "label_shares-linear"} <= every
        assert "related_models-mlp" not in every
        assert "label_shares-linear" not in {each.name for each in candidates(("linear",), "numbers", 10)}
        assert "related_models-linear" not in {each.name for each in candidates(("linear",), "numbers", 301)}

    def test_heads_and_mixtures_with_label_shares_are_for_images(self) -> None:
        ours = {"heads", "heads_label_shares", "components_label_shares"}
        assert ours <= {each.key for each in candidates(("cnn",), "classes", 10)}
        assert ours & {each.key for each in candidates(("cnn",), "numbers", 10)} == {"heads"}
        assert not ours & {each.key for each in candidates(("linear", "mlp"), "classes", 10)}

    def test_every_entry_is_a_run_that_can_be_described(self) -> None:
        for each in candidates(("linear", "mlp", "cnn"), "classes", 10):
            fedem.Config.build({"data": {"name": "given"}}, *each.layers)


class TestBudget:
    @pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400)])
    def test_lengths_of_time(self, text: str, seconds: float) -> None:
        assert read_budget(text) == seconds

    @pytest.mark.parametrize("text", ["", "soon", "10", "-1m", "0s", "infh", "nanm"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(UserError, match="allowed: a length of time above 0, such as 90s, 10m or 2h"):
            read_budget(text)

    def test_little_time_takes_candidates_first_then_dealings_then_rounds(self) -> None:
        left = [Candidate(f"k{number}", "linear", "", ()) for number in range(4)]
        before = [Tried(each, 10, [0.5], seconds=10.0) for each in left]  # a second a round
        # 100 rounds: every candidate costs 100 s per dealing, the end 300 s.
        assert _afford(before, left, 1500, 3, 100) == (left, 3, 100)
        assert _afford(before, left, 1200, 3, 100) == (left[:3], 3, 100)
        assert _afford(before, left, 700, 3, 100) == (left[:2], 2, 100)
        assert _afford(before, left, 250, 3, 100) == (left[:2], 1, 50)
        assert _afford(before, left, 1, 3, 100) == (left[:2], 1, 10)

    def test_one_model_for_all_is_always_among_those_that_go_on(self) -> None:
        others = [Candidate(f"k{number}", "linear", "", ()) for number in range(4)]
        pooled = [Candidate("one_model", model, "", ()) for model in ("mlp", "linear")]
        assert _kept([*others, *pooled], 3) == [others[0], pooled[0], others[1]]
        assert _kept([*pooled, *others], 2) == pooled
        assert _kept(others, 2) == others[:2]

    def test_what_there_was_no_time_for_is_named(self, run: Callable[..., Any], monkeypatch: Any) -> None:
        """Through the command line, with a table."""
        monkeypatch.setattr(choice, "PORTFOLIO", SMALL)
        _frame(2.0, rows=12).to_csv("mine.csv", index=False)
        columns = ["--client-column", "client", "--target-column", "y", "--device", "cpu", "--rounds", "8"]
        monkeypatch.setattr(choice, "beside", _no_references)
        code, said, _ = run("choose", "mine.csv", *columns, "--budget", "0.001s", "--out", "out")
        said = " ".join(said.split())
        assert code == 0
        assert "8 clients with 12 to 12 rows each" in said
        assert "of their variance is between clients" in said
        assert "Not tried for want of time: models of their own (linear)" in said
        assert "There are no references: scikit-learn is missing." in said
        assert "Chosen: out/winner" in said
        told = json.loads(Path("out/choice.json").read_text())
        assert (told["winner"], len(told["untried"])) == ("one_model-linear", 4)
        assert "one model for all (linear)" in Path("out/choice.md").read_text()
        code, *_ = run("predict", "out/winner", "--data", "mine.csv", "--out", "predicted.csv")
        assert code == 0
        assert len(pd.read_csv("predicted.csv")) == 96

    def test_a_folder_that_holds_something_is_refused_before_training(self, tmp_path: Path) -> None:
        (tmp_path / "choice.json").write_text("")
        with pytest.raises(UserError, match="is not empty; allowed: a new folder"):
            fedem.choose(_federation(1.0), out=tmp_path)

    def test_a_budget_that_is_none_is_refused_before_anything_is_read(self, run: Callable[..., Any]) -> None:
        code, _, said = run("choose", "nowhere.csv", "--budget", "soon")
        assert code == 2
        assert "The budget is 'soon'" in said


class TestPaired:
    def test_with_equal_weights_it_is_the_plain_standard_error(self) -> None:
        rng = np.random.default_rng(0)
        ours, others = rng.normal(size=(2, 9))
        names = [str(t) for t in range(9)]
        gap = paired(
            dict(zip(names, ours, strict=True)), dict(zip(names, others, strict=True)), dict.fromkeys(names, 3.0)
        )
        assert gap.mean == pytest.approx((ours - others).mean())
        assert gap.error == pytest.approx(sem(ours - others))

    def test_clients_without_a_score_are_left_out(self) -> None:
        gap = paired({"a": 1.0, "b": float("nan"), "c": 3.0}, {"a": 0.0, "b": 0.0, "c": 1.0}, {"a": 1, "b": 5, "c": 3})
        assert gap.mean == pytest.approx((1 * 1 + 3 * 2) / 4)


def test_samples_dealt_anew_are_the_same_ones() -> None:
    federation = _federation(1.0)
    anew = federation.redealt(1)
    assert torch.equal(anew.train.sizes, federation.train.sizes)
    assert anew.test is federation.test
    moved = 0
    for t in range(federation.num_clients):
        before, after = (
            torch.cat([each.train.client(t).targets, each.validation.client(t).targets]) for each in (federation, anew)
        )
        assert torch.equal(before.sort().values, after.sort().values)
        moved += not torch.equal(anew.validation.client(t).targets, federation.validation.client(t).targets)
    assert moved == federation.num_clients
    assert not torch.equal(anew.train.targets, federation.redealt(2).train.targets)
