"""Exports that can't be: what is said, and that nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from exports import make_personal, some_inputs
from small_runs import small_run
from torch import Tensor, nn

import fedem
from fedem.core.errors import UserError
from fedem.core.tree import tree_map, tree_stack
from fedem.export import export_client, export_personal, formats, load_exported
from fedem.methods.base import Mixture
from fedem.models import Model
from fedem.models.losses import Logistic

Run = Callable[..., tuple[int, str, str]]


class Deciding(nn.Linear):
    """Decides in Python, by the values of its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs if float(inputs.sum()) > 0 else -outputs


def own_model(module: type[nn.Linear]) -> tuple[fedem.PersonalModel, fedem.Config]:
    """A personal model whose module was passed from Python."""
    personal, config = make_personal("linear")
    model = Model(lambda: module(6, 1), Logistic())
    model.not_stackable = "it decides"
    mixture = Mixture(tree_stack([model.init(0), model.init(1)]), personal.mixture.log_weights)
    return replace(personal, model=model, mixture=mixture), config.replace("model", name="given")


def test_a_format_that_the_model_does_not_allow_is_left_out(tmp_path: Path) -> None:
    personal, config = own_model(Deciding)
    exported = export_personal(personal, config, tmp_path / "m", ["safetensors", "torchscript"])
    assert list(exported.differences) == ["safetensors"]
    assert list(exported.refused) == ["torchscript"]
    assert exported.refused["torchscript"]
    assert not (tmp_path / "m" / "model.pt").exists()
    inputs = some_inputs("linear", 4)
    again = load_exported(tmp_path / "m", model=lambda: Deciding(6, 1))
    assert torch.equal(again.predict(inputs), personal.predict(inputs))
    with pytest.raises(UserError, match=r"pass model=\.\.\. again"):
        load_exported(tmp_path / "m")
    with pytest.raises(UserError, match="are not those of the model"):
        load_exported(tmp_path / "m", model=lambda: nn.Linear(5, 1))


def test_where_no_format_is_left_nothing_is_written(tmp_path: Path) -> None:
    personal, config = own_model(Deciding)
    with pytest.raises(UserError, match="Format 'torchscript' is refused: "):
        export_personal(personal, config, tmp_path / "m", ["torchscript"])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_predicts_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    personal, config = make_personal("linear")
    honest = formats.FORMATS["torchscript"]
    wrong = honest._replace(load=lambda path: lambda inputs: honest.load(path)(inputs) + 1e-3)
    monkeypatch.setitem(formats.FORMATS, "torchscript", wrong)
    exported = export_personal(personal, config, tmp_path / "m", ["safetensors", "torchscript"])
    assert "its predictions differ by" in exported.refused["torchscript"]
    assert not (tmp_path / "m" / "model.pt").exists()


def test_a_model_that_diverged(tmp_path: Path) -> None:
    personal, config = make_personal("linear")
    broken = tree_map(lambda leaf: leaf * torch.nan, personal.mixture.components)
    with pytest.raises(UserError, match="predicts NaN"):
        export_personal(replace(personal, mixture=personal.mixture._replace(components=broken)), config, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_where_training_started_from_is_not_needed(tmp_path: Path) -> None:
    personal, config = make_personal("mobilenet_v2")
    config = config.replace("model", weights="gone.pth", jitter=0.1)
    export_personal(personal, config, tmp_path / "m")
    inputs = some_inputs("mobilenet_v2", 2)
    assert torch.equal(load_exported(tmp_path / "m").predict(inputs), personal.predict(inputs))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["pickle"], "Unknown format 'pickle'; allowed: onnx, safetensors, torchscript"),
        ([], "No format is given; allowed: safetensors, torchscript, onnx"),
    ],
)
def test_unknown_formats(asked: list[str], said: str, tmp_path: Path) -> None:
    personal, config = make_personal("linear")
    with pytest.raises(UserError, match=said):
        export_personal(personal, config, tmp_path / "m", asked)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "onnxruntime" else ModuleSpec(name, None)

    monkeypatch.setattr(formats, "find_spec", find)
    personal, config = make_personal("linear")
    with pytest.raises(UserError, match=r"needs onnxruntime, which is not installed: pip install 'fedem\[onnx\]'"):
        export_personal(personal, config, tmp_path / "m", ["safetensors", "onnx"])


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    personal, config = make_personal("linear")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "empty").mkdir()
    for name in ("file", "full"):
        with pytest.raises(UserError, match=f"{name} is there already"):
            export_personal(personal, config, tmp_path / name)
    with pytest.raises(UserError, match="can't be written"):
        export_personal(personal, config, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"
    assert export_personal(personal, config, tmp_path / "empty").path == tmp_path / "empty"


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        personal, config = make_personal("linear")
        return export_personal(personal, config, tmp_path / "m").path

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="There is no exported model in"):
            load_exported(tmp_path / "nothing")

    def test_tensors_cut_short(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(UserError, match="can't be read"):
            load_exported(folder)
        path.unlink()
        with pytest.raises(UserError, match="export it with the format safetensors"):
            load_exported(folder)

    def test_other_descriptions(self, folder: Path) -> None:
        path = folder / "model.json"
        facts = json.loads(path.read_text())
        path.write_text(json.dumps(facts | {"version": 2}))
        with pytest.raises(UserError, match="version 2 of the format; allowed: 1"):
            load_exported(folder)
        path.write_text(json.dumps({key: value for key, value in facts.items() if key != "loss"}))
        with pytest.raises(UserError, match=r"model\.json can't be read: loss is missing"):
            load_exported(folder)
        path.write_text("{")
        with pytest.raises(UserError, match="can't be read"):
            load_exported(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "r"
    small_run(out)
    return out


class TestCommand:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--client", "nobody"], "Unknown client 'nobody'; allowed: one of the 12 clients"),
            ([], "Neither --client nor --components is given"),
            (["--client", "0", "--components"], "Both --client and --components are given"),
            (["--client", "0", "--format", "h5"], "Unknown format 'h5'"),
            (["--client", "0", "--which", "first"], "Unknown state 'first'"),
        ],
    )
    def test_what_can_t_be_exported(self, options: list[str], said: str, trained: Path, run: Run) -> None:
        code, _, err = run("export", trained, "--out", "m", *options)
        assert code == 2
        assert said in " ".join(err.split())
        assert not Path("m").exists()

    def test_a_refused_format_is_told_and_the_others_written(
        self, trained: Path, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise RuntimeError("no such operation.\nand much more")

        monkeypatch.setitem(formats.FORMATS, "torchscript", formats.FORMATS["torchscript"]._replace(write=refuse))
        code, out, err = run("export", trained, "--out", "m", "--components", "--format", "safetensors,torchscript")
        assert code == 2
        assert "Exported: m" in out
        assert "torchscript (no such operation)" in " ".join(err.split())
        assert load_exported("m").predict(torch.zeros(1, 6)).shape == (1, 2)

    def test_a_run_is_no_exported_model(self, trained: Path) -> None:
        with pytest.raises(UserError, match="There is no exported model in"):
            load_exported(trained)


def test_a_method_without_components_of_all(tmp_path: Path) -> None:
    data = fedem.Synthetic(num_clients=4, dimension=3, num_test=5).make(0)
    result = fedem.train(data.federation, method="local", rounds=1)
    with pytest.raises(UserError):
        export_client(result, None, tmp_path / "m")
    assert not (tmp_path / "m").exists()
