"""Exported models predict what the originals do, with fedem and without it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import CASES, make_personal, some_inputs
from patience import patient
from shops import COLUMNS, make_shops, write_shops
from small_runs import small_run
from torch import Tensor

import fedem
from fedem.core.em import fit_log_weights
from fedem.core.tree import tree_index
from fedem.data.tables import read_table
from fedem.export import PersonalModule, export_client, export_personal, load_exported
from fedem.methods.base import Mixture

Run = Callable[..., tuple[int, str, str]]
GUIDE = Path(__file__).parents[2] / "docs" / "export.md"
# Importing fedem is an error where this has run.
BLOCKED = "import sys, warnings\nsys.modules['fedem'] = None\nwarnings.simplefilter('ignore')\n"


def run_torchscript(path: Path, inputs: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predictions: Tensor = torch.jit.load(path)(inputs)
    return predictions


def without_fedem(script: str, folder: Path) -> str:
    command = [sys.executable, "-c", BLOCKED + script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patient(120), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "mobilenet_v2" else ()) for case in CASES]
)
def test_every_model_comes_back(case: str, tmp_path: Path) -> None:
    # To record a deep network takes seconds for each component.
    personal, config = make_personal(case, (1.0,) if case == "mobilenet_v2" else (0.7, 0.3))
    exported = export_personal(personal, config, tmp_path / "m", ["safetensors", "torchscript"])
    assert exported.refused == {}
    again = load_exported(tmp_path / "m")
    for count in (1, 2, 9):
        inputs = some_inputs(case, count)
        wanted = personal.predict(inputs)
        assert torch.equal(again.predict(inputs), wanted)
        torch.testing.assert_close(run_torchscript(tmp_path / "m" / "model.pt", inputs), wanted, rtol=1e-5, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "README.txt",
        "model.json",
        "model.pt",
        "model.safetensors",
    ]
    assert b"site-packages" not in (tmp_path / "m" / "model.pt").read_bytes()


def test_the_module_mixes_probabilities_and_not_logits() -> None:
    personal, _ = make_personal("mlp", weights=(0.9, 0.1))
    inputs = some_inputs("mlp", 4)
    module = PersonalModule(personal)
    assert not any(leaf.requires_grad for leaf in module.parameters())
    alone = [
        replace(personal, mixture=Mixture(tree_index(personal.mixture.components, slice(m, m + 1)), torch.zeros(1)))
        for m in range(2)
    ]
    by_hand = 0.9 * alone[0].predict(inputs) + 0.1 * alone[1].predict(inputs)
    torch.testing.assert_close(module(inputs), by_hand)


def test_a_weight_that_underflows_counts_for_nothing() -> None:
    personal, _ = make_personal("linear")
    settled = replace(personal, mixture=Mixture(personal.mixture.components, torch.tensor([0.0, -1e4])))
    inputs = some_inputs("linear", 3)
    torch.testing.assert_close(PersonalModule(settled)(inputs), settled.predict(inputs))


class TestRuns:
    def test_a_client_s_model_and_the_components(self, tmp_path: Path) -> None:
        result = small_run(None)
        inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=result.recipe.format.input_dtype)
        export_client(result, "3", tmp_path / "three", which="best")
        assert torch.equal(load_exported(tmp_path / "three").predict(inputs), result.predict("3", inputs, "best"))
        assert json.loads((tmp_path / "three" / "model.json").read_text())["client"] == "3"
        export_client(result, None, tmp_path / "all")
        everyone = load_exported(tmp_path / "all")
        assert torch.allclose(everyone.mixture_weights, torch.full((3,), 1 / 3))
        # As docs/export.md has it: a newcomer's weights from components alone.
        targets = torch.tensor([0, 1, 1, 0, 1, 0, 0])
        losses = everyone.model.component_losses(everyone.mixture.components, inputs, targets)
        wanted = result.personalize(inputs, targets).mixture_weights
        torch.testing.assert_close(fit_log_weights(losses, prior=1).exp(), wanted)

    def test_a_fine_tuned_client(self, tmp_path: Path) -> None:
        result, plain = small_run(None, fine_tune_epochs=2), small_run(None)
        inputs = torch.randn(5, 6, dtype=result.recipe.format.input_dtype)
        export_client(result, "0", tmp_path / "m")
        found = load_exported(tmp_path / "m").predict(inputs)
        assert torch.equal(found, result.predict("0", inputs))
        assert not torch.allclose(found, plain.predict("0", inputs))


class TestTables:
    def test_from_a_table_to_a_file_that_needs_no_fedem(self, run: Run, tmp_path: Path) -> None:
        """The commands and the script of docs/export.md."""
        shops, tomorrow = make_shops(20), make_shops(2, seed=1)
        write_shops(tmp_path / "shops.csv", shops)
        # However true and false are spelt.
        for row, spelling in zip(tomorrow, (str.title, str.upper) * len(tomorrow), strict=False):
            row["promotion"] = spelling(str(row["promotion"]))
        write_shops(tmp_path / "tomorrow.csv", tomorrow, COLUMNS[:-1])
        _, train, export = re.findall(r"```\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)[0].strip().splitlines()
        run(*re.findall(r"[^\s\"]+|(?<=\").+(?=\")", train.removeprefix("fedem ")), "--rounds", "3", "-q")
        chosen = export.removeprefix("fedem ").replace(",onnx", "")
        before, name, after = chosen.split('"')
        code, out, err = run(*before.split(), name, *after.split())
        assert code == 0, err
        assert "safetensors: the same to the bit" in out
        again = load_exported("shop_a")
        table = read_table(tmp_path / "tomorrow.csv", "sold", "shop")
        assert again.format.encoding is not None
        wanted = again.predict(again.format.encoding.inputs(table))
        assert torch.equal(wanted, fedem.Result.load("runs/shops").predict(name, again.format.encoding.inputs(table)))
        (script,) = re.findall(r"## TorchScript.*?```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
        lines = [line.split() for line in without_fedem(script, tmp_path).splitlines()]
        found = np.array([[float(number) for number in line[1:]] for line in lines])
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-6)
        labels = again.format.labels
        assert labels is not None
        assert [line[0] for line in lines] == [labels[place] for place in wanted.argmax(1)]

    def test_means_come_out_in_the_targets_own_units(self, tmp_path: Path) -> None:
        columns = (*COLUMNS[:-1], "units")
        path = write_shops(tmp_path / "shops.csv", make_shops(20), columns)
        dataset = fedem.FromFile(path=str(path), target_column="units", client_column="shop").make(0)
        result = fedem.train(dataset, method="fedem", rounds=3, num_components=2)
        export_client(result, "shop B", tmp_path / "m", ["safetensors", "torchscript"])
        inputs = dataset.federation.test.inputs[:20]
        wanted = result.predict("shop B", inputs)
        assert float(wanted.mean()) > 20  # and not standardised
        assert torch.equal(load_exported(tmp_path / "m").predict(inputs), wanted)
        torch.testing.assert_close(run_torchscript(tmp_path / "m" / "model.pt", inputs), wanted, rtol=1e-5, atol=1e-4)
