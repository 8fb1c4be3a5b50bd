"""Every script of the gallery runs as it stands, and what it prints is so."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.gallery
GALLERY = Path(__file__).parents[2] / "docs" / "gallery"


@pytest.fixture
def printed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the script called by the parameter prints, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(GALLERY / f"{request.param}.py"), run_name="__main__")
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def _figure(printed: str, start: str) -> float:
    """The first number on the only line that starts like this."""
    (line,) = [line for line in printed.splitlines() if line.startswith(start)]
    return float(re.findall(r"\d\.\d+", line)[0])


@pytest.mark.parametrize("printed", ["quick_start"], indirect=True)
def test_quick_start_a_mixture_beats_one_model_and_many(printed: str) -> None:
    mixture, single, alone, oracle = (_figure(printed, title) for title in ("FedEM", "FedAvg", "Local", "oracle"))
    assert max(single, alone) + 0.02 < mixture < oracle + 0.01
    learnt, true = (_figure(printed, f"client 7{what}") for what in (" learnt", "'s true"))
    assert abs(learnt - true) < 0.2
    assert "loaded, it predicts the same: True" in printed


@pytest.mark.parametrize("printed", ["own_data"], indirect=True)
def test_own_data_shops_sell_by_their_kind(printed: str) -> None:
    assert _figure(printed, "FedEM") > 0.85 > 0.65 > _figure(printed, "FedAvg")
    for line in re.findall(r"^shop .*", printed, flags=re.MULTILINE):
        is_warm, sells_in_the_warm = "29 degrees" in line, "ice cream" in line
        assert line.endswith("many" if is_warm == sells_in_the_warm else "few")
    assert printed.count("degrees") == 4
    assert len(Path("shops.csv").read_text().splitlines()) == 1 + 8 * 80


@pytest.mark.parametrize("printed", ["unseen_clients"], indirect=True)
def test_unseen_clients_do_better_than_a_uniform_mixture(printed: str) -> None:
    rows = re.findall(r"^ +(0|5|20|all) +(0\.\d+) +(0\.\d+)$", printed, flags=re.MULTILINE)
    converged = {shown: float(accuracy) for shown, _, accuracy in rows}
    one_update = {shown: float(accuracy) for shown, accuracy, _ in rows}
    assert list(converged) == ["0", "5", "20", "all"]
    assert one_update["0"] == converged["0"]
    assert one_update["all"] > one_update["0"]
    assert min(converged["5"], converged["20"], converged["all"]) > converged["0"] + 0.01


@pytest.mark.parametrize("printed", ["decentralised"], indirect=True)
def test_decentralised_more_links_bring_clients_together(printed: str) -> None:
    *graphs, server = [line.split() for line in printed.splitlines()[1:]]
    assert [row[0] for row in graphs] == ["ring", "erdos_renyi", "complete"]
    sent, agreement, distances, accuracies = ([float(row[place]) for row in graphs] for place in (1, 2, 3, 4))
    assert agreement[0] < agreement[1] < agreement[2] == 1
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 1e-8
    # A client has two neighbours in the ring, and 15 where everybody is one.
    assert [sent[0] / float(server[1]), sent[2] / float(server[1])] == pytest.approx([2, 15], rel=0.03)
    # Over the complete graph it is FedEM but for rounding, which may turn a sample or two.
    assert accuracies[2] == pytest.approx(float(server[2]), abs=2e-3)


@pytest.mark.parametrize("printed", ["own_method"], indirect=True)
def test_own_method_finds_what_made_the_data(printed: str) -> None:
    assert "PersonalOffset: no violation found within radius" in printed
    before, after, noise = map(float, re.findall(r"\d\.\d{4}", printed.split("\nobjective")[1]))
    # An offset for each of 50 samples leaves less than the noise.
    assert 0.8 * noise < after < 1.1 * noise < before
    slope, of_one_line = map(float, re.findall(r"\d\.\d{3}", printed.split("\nslope")[1].splitlines()[0]))
    assert slope == pytest.approx(1.5, abs=0.01)
    # Inputs are N(0, 1) less the offset, itself N(0, 1): the covariance of both over the variance of inputs is -1/2.
    assert of_one_line == pytest.approx(1.5 - 1 / 2, abs=0.15)
    assert _figure(printed, "offsets are off by") < 0.1


@pytest.mark.parametrize("printed", ["label_shift"], indirect=True)
def test_label_shift_counted_shares_bring_one_model_near_the_best(printed: str) -> None:
    rows = re.findall(r"^(\w+) +(0\.\d+) +(0\.\d+)$", printed, flags=re.MULTILINE)
    as_it_is, with_shares = ({row[0]: float(row[place]) for row in rows} for place in (1, 2))
    best = _figure(printed, "best")
    assert list(as_it_is) == ["fedem", "fedavg", "local"]
    # One map is behind all posteriors once shares are taken out; without, none is.
    assert as_it_is["fedavg"] + 0.07 < with_shares["fedavg"] < best + 0.005
    assert with_shares["fedavg"] > best - 0.04
    assert as_it_is["fedem"] > as_it_is["fedavg"]
    assert with_shares["fedem"] > as_it_is["fedem"] + 0.03
    # A model of one's own learns the shares without being told.
    assert abs(with_shares["local"] - as_it_is["local"]) < 0.02


def test_every_script_is_tried() -> None:
    tried = set(re.findall(r'parametrize\("printed", \["(\w+)"\]', Path(__file__).read_text()))
    assert {path.stem for path in GALLERY.glob("*.py")} == tried


@pytest.mark.parametrize("printed", ["shared_layers"], indirect=True)
def test_shared_layers_heads_on_one_body_do_as_well_as_whole_networks(printed: str) -> None:
    single, whole, heads = (_figure(printed, f"{name} ") for name in ("fedavg", "fedem", "fedem-heads"))
    assert single + 0.1 < whole
    assert whole - 0.02 < heads
    sent = {line.split()[0]: float(line.split()[-1]) for line in printed.splitlines()[1:-1]}
    assert sent["fedem-heads"] < sent["fedem"] / 2
    assert Path("components.png").stat().st_size > 1000
