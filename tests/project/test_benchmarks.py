"""The benchmarks run, their figures are figures, and they refuse to time different mathematics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import (
    attacks,
    busy,
    components,
    defences,
    gpu,
    images,
    kernels,
    many_clients,
    methods,
    neighbours,
    plain_loop,
    published_labels,
    spent,
    tables,
)
from benchmarks.__main__ import QUICK, TITLES, main
from benchmarks.agreement import TOLERANCE, DisagreementError, check_agreement
from benchmarks.engine import NUM_COMPONENTS, SEED
from torch import Tensor

from fedem.data import Synthetic
from fedem.methods import METHODS

pytestmark = pytest.mark.benchmark


def numbers(figures: Any) -> Iterator[float]:
    if isinstance(figures, dict):
        figures = list(figures.values())
    if isinstance(figures, list):
        for entry in figures:
            yield from numbers(entry)
    elif not isinstance(figures, str):
        yield figures


def test_quick_run_writes_figures_for_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    main(["--quick", "--out", str(out)])
    figures = json.loads(out.read_text())

    assert set(figures["rounds"]) == set(figures["agreement"]) == {"fedem", "fedavg"}
    for method, rounds in figures["rounds"].items():
        assert set(rounds) == {
            *TITLES,
            "plain_to_stacked",
            "shared_to_stacked",
            "index_to_stacked",
            "stacked_to_floor",
        }, method
        assert all(math.isfinite(number) and number > 0 for number in numbers(rounds)), rounds
        assert all(0 <= difference <= TOLERANCE for difference in numbers(figures["agreement"][method]))
    check_crowd(figures["many_clients"])
    assert figures["environment"]["threads"] > 0

    printed = capsys.readouterr().out
    assert all(title in printed for title in TITLES.values())
    assert f"torch {torch.__version__}" in printed


def check_crowd(crowd: dict[str, Any]) -> None:
    assert [group["num_clients"] for group in crowd["groups"]] == list(many_clients.QUICK.sizes)
    for group in crowd["groups"]:
        assert group["state_bytes_per_client"] == 4 * NUM_COMPONENTS["fedem"]
        assert group.pop("peak_increase_in_training_bytes") >= 0
    first, second = (group["seconds"] for group in crowd["groups"])
    assert crowd["ratios_to_first"] == [1, second / first]
    assert all(math.isfinite(number) and number > 0 for number in numbers(crowd)), crowd


def test_crowds_are_measured_up_to_a_million(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    many_clients.main(["--quick", "--out", str(out)])
    check_crowd(json.loads(out.read_text())["many_clients"])
    printed = capsys.readouterr().out
    assert "With 500 clients a round takes" in printed
    assert many_clients.MILLION.sizes[-1] == 10**6


def test_agreement_holds_for_every_method() -> None:
    federation = QUICK.source.make(SEED).federation
    for method in NUM_COMPONENTS:
        assert max(check_agreement(method, federation).values()) <= TOLERANCE


def without_weights(losses: Tensor, weights: Tensor) -> Tensor:
    return torch.softmax(-losses, dim=1)


def not_a_number(losses: Tensor, weights: Tensor) -> Tensor:
    return torch.full_like(losses, math.nan)


@pytest.mark.parametrize(
    ("name", "broken"),
    [("responsibilities", without_weights), ("responsibilities", not_a_number), ("MOMENTUM", 0.0)],
)
def test_agreement_catches_a_broken_loop(monkeypatch: pytest.MonkeyPatch, name: str, broken: object) -> None:
    federation = QUICK.source.make(SEED).federation
    monkeypatch.setattr(plain_loop, name, broken)
    with pytest.raises(DisagreementError, match="plain_loop and the stacked engine differ"):
        check_agreement("fedem", federation)


def test_both_loops_pass_over_every_sample_once() -> None:
    samples = QUICK.source.make(SEED).federation.train
    for prepare in plain_loop.LOOPS.values():
        for client in prepare(samples, 16):
            batches = list(client.batches())
            rows = torch.cat([positions for _, _, positions in batches])
            assert rows.sort().values.tolist() == list(range(len(client.targets)))
            assert torch.equal(torch.cat([inputs for inputs, _, _ in batches]), client.inputs[rows])
            assert max(len(targets) for _, targets, _ in batches) <= 16


def test_every_method_is_timed_beside_its_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    methods.main(["--quick", "--methods", "fedavg,fedem,pfedme,ditto,ifca,l2sgd,fedem-heads", "--out", str(out)])
    figures = json.loads(out.read_text())["methods"]
    # M gradients and M passes alone; five inner steps; two models; K passes and one gradient.
    counted = {name: figures[name]["gradients"] for name in ("fedavg", "fedem", "pfedme", "ditto", "ifca")}
    assert counted == pytest.approx({"fedavg": 1, "fedem": 4, "pfedme": 5, "ditto": 2, "ifca": 2})
    assert {figures[name]["model"] for name in counted} == {"linear"}
    assert figures["fedem-heads"]["model"] == "mlp"
    assert all(math.isfinite(number) and number > 0 for number in numbers(figures))
    assert "gradients" in capsys.readouterr().out


def test_every_method_that_is_to_be_timed_can_be() -> None:
    dataset = Synthetic(num_clients=3, dimension=4, max_samples=60, num_validation=0, num_test=0).make(0)
    for name in methods.TIMED:
        methods.prepare(name, methods.model_of(name), dataset)
    assert {*METHODS} - {*methods.TIMED} == {"fedbn"}


def test_ways_of_waiting_are_timed_beside_competitors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    busy.main(["--quick", "--out", str(out)])
    rounds = json.loads(out.read_text())["rounds"]
    assert {number: set(row) for number, row in rounds.items()} == {"0": set(busy.WAYS), "1": set(busy.WAYS)}
    assert all(math.isfinite(number) and number > 0 for number in numbers(rounds))
    assert "competitors" in capsys.readouterr().out


def test_images_are_timed_one_by_one_and_in_a_plain_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    images.main(["--quick", "--device", "cpu", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert set(figures["rounds"]) == {"one by one, float32", images.PLAIN}
    for row in figures["rounds"].values():
        assert all(math.isfinite(number) and number > 0 for number in numbers(row))
        assert row["images_per_second"] * row["seconds"] == pytest.approx(figures["data"]["num_images"])
    assert 0 <= figures["agreement"] <= TOLERANCE
    printed = capsys.readouterr().out
    assert all(name in printed for name in figures["rounds"])


def test_images_have_the_shape_of_the_papers() -> None:
    federation = images.make_federation(20, 2_000)
    assert federation.input_shape == (1, 28, 28)
    assert federation.train.pool.inputs.dtype == torch.uint8
    assert len(federation.train) == pytest.approx(1_200, abs=20)  # each client's share is rounded
    assert len(set(federation.train.sizes.tolist())) > 5


def test_tables_are_scored_beside_references(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    tables.main(["--quick", "--out", str(out)])
    found = {each["table"]: each for each in json.loads(out.read_text())["runs"]}
    assert {each["task"] for each in found.values()} == {"classes", "numbers"}
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(found)  # a Markdown table alone
    for name, each in found.items():
        assert set(each["references"]) == {"constant", "pooled_linear", "client_linear", "boosting"}
        scores = [each["fedem"], each["choose"], each["references"], each["to_the_winner"]]
        assert all(math.isfinite(number) for number in numbers(scores))
        # Paired by client, with the weights of the scores: the difference of the scores themselves.
        sign = 1 if each["task"] == "classes" else -1
        for reference, score in each["references"].items():
            gap = each["to_the_winner"][reference]["mean"]
            assert gap == pytest.approx(sign * (score - each["choose"]), abs=1e-9)
        assert not each["diverged"]
        assert any(line.startswith((f"| {name} |", f"| {name}* |")) for line in printed)


def test_every_table_says_how_it_is_made_and_is_the_same_again() -> None:
    assert len(tables.TABLES) >= 10
    assert len(tables.CHOSEN_ON) == 4
    assert set(tables.CHOSEN_ON) < set(tables.TABLES)
    for name, make in tables.TABLES.items():
        first = make(0)
        assert {"client", "y"} < set(first)
        assert first.equals(make(0)), name
        assert not first.equals(make(1)), name
        assert make.__doc__


@pytest.mark.parametrize(("name", "broken"), [("responsibilities", not_a_number), ("MOMENTUM", 0.0)])
def test_agreement_on_images_catches_a_broken_loop(monkeypatch: pytest.MonkeyPatch, name: str, broken: object) -> None:
    monkeypatch.setattr(images, name, broken)
    with pytest.raises(DisagreementError, match="plain loop and fedem's engine differ"):
        images.check_agreement(torch.device("cpu"))


def test_pseudo_samples_of_neighbours_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    neighbours.main(["--data", "sensors", "--methods", "fedavg", "--rounds", "1"])
    *_, line = capsys.readouterr().out.splitlines()
    data, method, *figures = (cell.strip() for cell in line.strip("|").split("|"))
    assert (data, method, len(figures)) == ("sensors", "fedavg", 1 + len(neighbours.STRENGTHS))
    assert all(0 < float(figure) < 1 for figure in figures)


def test_attacks_are_measured_by_defence_and_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--clients", "6", "--rounds", "2", "--dimension", "4", "--samples", "60", "--tests", "20"]
    out, picture = tmp_path / "attacks.json", tmp_path / "attacks.png"
    asked = [
        "--attacks",
        "sign flip,backdoor",
        "--shares",
        "0,0.3",
        "--seeds",
        "2",
        "--workers",
        "1",
        "--defences",
        "none",
    ]
    attacks.main([*asked, *size, "--out", str(out), "--picture", str(picture)])
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 2 * 2 * 3
    assert all(0 <= run["accuracy"] <= 1 for run in runs)
    assert [run["backdoor"] is not None for run in runs] == [run["attack"] == "backdoor" for run in runs]
    printed = capsys.readouterr().out
    mean = sum(100 * run["accuracy"] for run in runs if (run["method"], run["attack"]) == ("fedem", "sign flip")) / 2
    assert f"| sign flip | 30% | {mean:.1f} ±" in printed.partition("FedEM:")[2]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_numbers_of_components_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    components.main(["--true", "2", "--seeds", "1", "--rounds", "4", "--clients", "4", "--validation", "20"])
    *_, run, count = capsys.readouterr().out.splitlines()
    true, seed, found, *rises = (cell.strip() for cell in run.strip("|").split("|"))
    assert (true, seed, len(rises)) == ("2", "0", 2)
    assert 1 <= int(found) <= 8
    assert count == f"| 2 | all | {int(found == '2')} of 1 | | |"


def test_defences_are_timed_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, threads = tmp_path / "figures.json", torch.get_num_threads()
    try:
        defences.main(["--quick", "--rounds", "2", "--tries", "2", "--rules", "clip,median", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    found = json.loads(out.read_text())["found"]
    # Clipping leaves honest clients as they are; medians don't.
    assert [(line["method"], line["rule"], line["is_same"]) for line in found] == [
        ("fedavg", "clip", True),
        ("fedavg", "median", False),
        ("fedem", "clip", True),
        ("fedem", "median", False),
    ]
    assert all(line["round"] > 0 for line in found)
    assert "the same bits" in capsys.readouterr().out


def test_labels_as_published_are_of_the_first_rows_and_zero_at_the_end() -> None:
    """With one component that a client has all of, every row is labelled; else some rows at the end are not."""
    settings = {"num_clients": 40, "dimension": 20, "noise_scale": 0.0, "num_test": 200, "min_samples": 200}
    whole = Synthetic(num_components=1, **settings).make(0)
    shares = [
        float(each.federation.test.targets.double().mean()) for each in (whole, published_labels.published(whole, 1))
    ]
    assert shares == pytest.approx([0.5, 0.5], abs=0.02)
    mixed = Synthetic(num_components=3, dirichlet=1e6, **settings).make(0)  # a third of each, but for chance
    drawn, left = (each.federation.test for each in (mixed, published_labels.published(mixed, 1)))
    assert torch.equal(left.inputs, drawn.inputs)
    labels = left.targets.reshape(40, 200).double()
    assert not labels[:, 100:].any()
    assert float(labels[:, :50].mean()) == pytest.approx(0.5, abs=0.06)  # of 2,000 rows, five standard deviations


@pytest.mark.parametrize(("table", "paper"), [("table2", "74.7 / 66.7"), ("table3", "73.0 / 74.1")])
def test_both_kinds_of_labels_stand_beside_the_paper(
    table: str, paper: str, capsys: pytest.CaptureFixture[str]
) -> None:
    published_labels.main([f"--table={table}", "--seeds=1", "--rounds=1", "--clients=10", "--test=20"])
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| FedEM |"))
    assert row.endswith(f"| {paper} |")


def test_what_a_round_spends_its_time_on_is_told_of_each_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, settings = tmp_path / "figures.json", ["data.name=synthetic", "data.num_clients=3", "run.device=cpu"]
    spent.main([*settings, "--methods", "fedem,fedavg", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert list(figures["methods"]) == ["fedem", "fedavg"]
    printed = capsys.readouterr().out
    for name, row in figures["methods"].items():
        seconds = [kernel["seconds"] for kernel in row["kernels"]]
        assert seconds == sorted(seconds, reverse=True)
        assert row["busy_seconds"] == pytest.approx(sum(seconds))
        assert row["launches"] == sum(kernel["launches"] for kernel in row["kernels"]) > 0
        assert f"A round of {name}: {row['seconds']:.3f} s" in printed
        assert row["kernels"][0]["name"] in printed
    # Three components are scored, and products of matrices are what both do.
    assert any("mm" in kernel["name"] for kernel in figures["methods"]["fedavg"]["kernels"])


def test_kernels_are_run_by_what_is_shipped_and_by_other_tiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "kernels.json"
    kernels.main(["--quick", "--families", "shakespeare", "--out", str(out)])
    figures = json.loads(out.read_text())["kernels"]
    assert len(figures) == 6  # one, ten and a hundred models, forwards and backwards
    for name, rows in figures.items():
        assert [row["tile"] == "shipped" for row in rows] == [True, False]
        assert all(row["seconds"] > 0 and row["off"] < 1e-3 for row in rows), name
    printed = capsys.readouterr().out
    assert all(name in printed for name in figures)
    kernels.main(["--quick", "--shipped", "--families", "emnist"])
    assert "EMNIST, second convolution, of weights" in capsys.readouterr().out


def test_a_tile_that_computes_something_else_or_does_not_fit_is_told_apart() -> None:
    def run() -> list[Tensor]:
        busy = kernels.kernels._BUSY
        if busy == 1:
            raise RuntimeError("out of resource: shared memory\nin a kernel")
        return [torch.tensor([3.0, 4.0 if busy > 2 else 4.5])]

    job = kernels.Job(lambda *_: (run, 8), ({"_BUSY": 2}, {"_BUSY": 1}, {"_BUSY": 3}))
    shipped, wrong, large, right = kernels.run_job(job, torch.device("cpu"), True, 1e9)
    assert (shipped["off"], shipped["to_shipped"], right["off"]) == (0, 1, 0)
    assert wrong["off"] == pytest.approx(0.1)
    assert large == {"tile": "_BUSY = 1", "failed": "out of resource: shared memory"}
    assert kernels.kernels._BUSY > 3


@pytest.mark.parametrize(
    ("main", "wrong", "said"),
    [
        (spent.main, ["synthetic"], "allowed: section.key=value"),
        (spent.main, ["data.name=synthetic", "run.roundz=3"], "Did you mean 'rounds'?"),
        (spent.main, ["data.name=synthetic", "method.name=fedavg"], "allowed: --methods NAME,..."),
        (spent.main, ["data.name=synthetic", "model.name=cnn"], "fedem: "),
        (spent.main, ["--methods", "fedem,fedmm"], "Unknown method 'fedmm'; allowed: afl, "),
        (attacks.main, ["--attacks", "flip"], "Unknown attack 'flip'; allowed: backdoor, "),
        (attacks.main, ["--defences", "shield"], "Unknown defence 'shield'; allowed: "),
        (tables.main, ["--tables", "iris"], "Unknown table 'iris'; allowed: "),
        (kernels.main, ["--families", "imagenet"], "Unknown family 'imagenet'; allowed: cifar, emnist, shakespeare"),
        (gpu.main, ["--jobs", "vgg"], "no job's name has any of 'vgg'; allowed: parts of EMNIST, CNN; "),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    main: Callable[[list[str]], None], wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(wrong)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
