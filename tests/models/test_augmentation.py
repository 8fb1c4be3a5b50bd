"""Images moved and mirrored by keys, and shown larger."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import interpolate

from fedem.core.errors import UserError
from fedem.models import MODELS
from fedem.models.base import Model
from fedem.models.layers import Enlarged, KeyedAugmentation, training_pass
from fedem.models.losses import CrossEntropy

IMAGES = torch.arange(1.0, 1 + 64 * 2 * 5 * 6).reshape(64, 2, 5, 6)


def _seen(layer: nn.Module, images: Tensor, key: int | Tensor = 7) -> Tensor:
    with training_pass(None, torch.as_tensor(key)):
        return layer(images)


def _moves(image: Tensor, flips: bool, shift: int) -> list[Tensor]:
    """Every way in which an image can be moved and mirrored."""
    found = []
    padded = nn.functional.pad(image, [shift] * 4)
    for down in range(2 * shift + 1):
        for across in range(2 * shift + 1):
            part = padded[:, down : down + image.shape[1], across : across + image.shape[2]]
            found.append(part)
            if flips:
                mirrored = nn.functional.pad(image.flip(-1), [shift] * 4)
                found.append(mirrored[:, down : down + image.shape[1], across : across + image.shape[2]])
    return found


@pytest.mark.parametrize(("flips", "shift"), [(True, 0), (False, 1), (True, 2)])
def test_an_image_is_one_of_those_that_it_may_become_and_all_of_these_occur(flips: bool, shift: int) -> None:
    layer, met = KeyedAugmentation(flips, shift), set()
    for key in range(8):
        for image, seen in zip(IMAGES, _seen(layer, IMAGES, key), strict=True):
            which = [number for number, move in enumerate(_moves(image, flips, shift)) if torch.equal(move, seen)]
            assert which
            met |= set(which)
    assert len(met) == (2 * shift + 1) ** 2 * (1 + flips)


def test_what_becomes_of_an_image_depends_on_its_key_and_row_alone() -> None:
    layer = KeyedAugmentation(True, 2)
    whole = _seen(layer, IMAGES)
    assert torch.equal(_seen(layer, IMAGES[:5]), whole[:5])
    assert not torch.equal(_seen(layer, IMAGES, 8), whole)
    keys = torch.tensor([7, 8])
    stacked = vmap(lambda images, key: _seen(layer, images, key))(IMAGES.expand(2, *IMAGES.shape), keys)
    assert torch.equal(stacked, torch.stack([_seen(layer, IMAGES, key) for key in keys]))
    assert torch.equal(layer.eval()(IMAGES), IMAGES)


@pytest.mark.parametrize(("times", "size"), [(2, (5, 6)), (3, (4, 1)), (5, (2, 3))])
def test_larger_images_are_torchs(times: int, size: tuple[int, int]) -> None:
    images = torch.rand(3, 2, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([interpolate(own, scale_factor=times, mode="bilinear") for own in images])
    torch.testing.assert_close(vmap(Enlarged(times))(images), expected)
    slopes = [
        torch.func.grad(lambda each, f=f: f(each).square().sum())(images[0])
        for f in (Enlarged(times), lambda own: interpolate(own, scale_factor=times, mode="bilinear"))
    ]
    torch.testing.assert_close(*slopes)


def test_a_network_sees_larger_images() -> None:
    spec = MODELS["mobilenet_v2"]
    larger = Model(lambda: spec(enlarge=2, flips=True, shift=2).build((3, 16, 16), 4), CrossEntropy())
    plain = Model(lambda: spec().build((3, 32, 32), 4), CrossEntropy())
    images, state = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), plain.init(0)
    assert state.keys() == larger.init(0).keys()
    shown = interpolate(images, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(larger.outputs(state, images), plain.outputs(state, shown), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0, 17])
def test_a_size_that_is_none_is_refused(value: int) -> None:
    with pytest.raises(UserError, match=rf"enlarge is {value}; allowed: at least 1 and at most 16"):
        MODELS["resnet18"](enlarge=value)
