"""How clients count in a server's average: by their samples, or all alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import shops
import torch
from helpers import advance, distance, make_federation, make_training

import fedem
from fedem.core.settings import names_of
from fedem.data.federation import Federation
from fedem.engines import Batching
from fedem.methods import METHODS, Star
from fedem.runs.config import Config, read_toml
from fedem.solvers import SGD

BEHIND_A_STAR = [name for name, row in METHODS.items() if row.mixer is Star]
# Halves of a batch would not be those of a batch said twice; and a client alone in its cluster counts for all of it.
_WHOLE = {"perfedavg": {"independent": False}, "ifca": {"num_clusters": 2}}


def _said_twice(federation: Federation, position: int) -> Federation:
    """The same clients, one of whom has every training sample twice."""
    parts = [federation.train.client(t) for t in range(federation.num_clients)]
    parts[position] = tuple(torch.cat([part, part]) for part in parts[position])
    tests = [federation.test.client(t) for t in range(federation.num_clients)]
    return Federation.from_parts(parts, tests, tests, federation.names)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in BEHIND_A_STAR if name != "fedbn"])  # variances are over n - 1
def test_saying_everything_twice_counts_for_more_only_by_samples(method: str) -> None:
    """The client's mean loss is the same, and so is all that it sends; what share takes part is counted likewise."""
    federation = make_federation()
    common = {"solver": SGD(0.01), "batching": Batching(0, local_epochs=2), "cohort_size": 3}
    for weighting, changes in (("equal", False), ("samples", True)):
        settings = common | _WHOLE.get(method, {}) | {"weighting": weighting}
        states = [
            advance(make_training(method, data, **settings), 3) for data in (federation, _said_twice(federation, 2))
        ]
        assert (distance(*states) > 1e-6) == changes
        if not changes:
            assert distance(*states) < 1e-12


def test_every_method_whose_server_averages_has_the_setting_and_no_other() -> None:
    having = {name for name, row in METHODS.items() if "weighting" in names_of(row.algorithm, row.mixer)}
    assert having == set(BEHIND_A_STAR) > {"pfedme", "apfl", "ifca", "perfedavg"}
    assert not having & {"dfedem", "dsgd", "local", "clustered", "afl"}


def test_a_run_takes_it_and_one_that_was_written_without_it_counts_samples(tmp_path: Path) -> None:
    result = fedem.train(make_federation(), "apfl", rounds=1, weighting="equal", out=tmp_path / "run")
    assert result.recipe.mixer == Star("equal")
    text = (tmp_path / "run" / "config.toml").read_text()
    assert 'weighting = "equal"' in text
    (tmp_path / "old.toml").write_text(text.replace('weighting = "equal"\n', ""))
    assert Config.build(read_toml(tmp_path / "old.toml")).sections["method"]["weighting"] == "samples"
    with pytest.raises(fedem.UserError, match=r"weighting.*'size'; allowed: equal, samples"):
        fedem.train(make_federation(), "apfl", rounds=1, weighting="size")


def test_it_is_of_a_server_and_not_of_a_graph() -> None:
    refusal = r"method\.weighting is 'equal', which is of a server, but graph\.name is 'ring'; allowed: samples"
    with pytest.raises(fedem.UserError, match=refusal):
        fedem.train(make_federation(), "fedavg", graph="ring", rounds=1, weighting="equal")


@pytest.mark.parametrize("method", ["apfl", "scaffold", "ifca"])
def test_flowers_server_counts_as_the_simulator_does(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    import deployments
    from flower_grid import Deployed, equal, simulated

    def unequal(folder: Path) -> Path:
        whole = shops.make_shops(24, names=deployments.NAMES)
        return shops.write_shops(
            folder / "shops.csv",
            [row for row in whole if row["shop"] != "shop B"] + [row for row in whole if row["shop"] == "shop B"][:8],
        )

    monkeypatch.setattr(deployments, "write_sample", unequal)
    states = []
    for weighting in ("samples", "equal"):
        (tmp_path / weighting).mkdir()
        settings = {"name": method, "weighting": weighting}
        there = Deployed(tmp_path / weighting, method=settings, run={"dtype": "float64"})
        assert len(set(there.trainer.federation.train.sizes.tolist())) > 1
        states.append(there.serve())
        equal(states[-1].shared, simulated(there.trainer).shared)
    assert any(not torch.allclose(leaf, states[1].shared[name]) for name, leaf in states[0].shared.items())
