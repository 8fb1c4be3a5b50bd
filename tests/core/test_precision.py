"""What a GPU is told while fedem computes, and that it is told back; torch keeps these flags without a GPU too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from helpers import make_training
from torch import Tensor, nn
from torch.func import grad

from fedem.core.precision import PRECISIONS, model_gradient, products, where_models_compute, with_all_digits
from fedem.methods.mixer import weighted_means
from fedem.models import Model
from fedem.models.losses import CrossEntropy

GPU = torch.device("cuda")


def _flags() -> tuple[bool, bool]:
    """Whether products of matrices and convolutions may be in TF32."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


class Noted(nn.Linear):
    """A layer that notes the flags on its way there, and on the way back."""

    seen: ClassVar[list[tuple[bool, bool]]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(_flags())
        outputs = super().forward(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: self.seen.append(_flags()))
        return outputs


@pytest.fixture(params=[False, True])
def told(request: pytest.FixtureRequest) -> Iterator[tuple[bool, bool]]:
    """What somebody else has told torch, which is set back in the end."""
    before = _flags()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = request.param
    yield request.param, request.param
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("name", PRECISIONS)
def test_models_compute_as_asked_and_all_else_with_all_digits_and_then_all_is_set_back(
    name: str, told: tuple[bool, bool]
) -> None:
    order, seen, rounded = torch.backends.cudnn.deterministic, [], name != "float32"

    def fail() -> None:
        with products(name, GPU):
            seen.append(_flags())
            with where_models_compute():
                seen.append((*_flags(), torch.backends.cudnn.deterministic))
            seen.append(_flags())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [(False, False), (rounded, rounded, True), (False, False)]
    assert (*_flags(), torch.backends.cudnn.deterministic) == (*told, order)


def test_a_run_within_a_run_has_its_own_precision() -> None:
    with products("tf32", GPU), where_models_compute():
        with products("float32", GPU), where_models_compute():
            assert _flags() == (False, False)
        assert _flags() == (True, True)


def test_outside_of_a_run_and_on_a_cpu_torch_is_told_nothing(told: tuple[bool, bool]) -> None:
    with where_models_compute():
        assert _flags() == told
    with products("tf32", torch.device("cpu")), where_models_compute():
        assert _flags() == told


def test_models_and_their_gradients_are_rounded_and_no_mean_of_them() -> None:
    """Through all that a round does: scores, steps, and the mean over clients."""
    model = Model(lambda: nn.Sequential(Noted(4, 3)), CrossEntropy())
    training = make_training("fedem", model=model, loss="cross_entropy")
    seen: list[tuple[bool, bool]] = []

    def uploads() -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        yield torch.arange(2), {"weight": torch.ones(2, 3)}
        seen.append(_flags())

    Noted.seen.clear()
    with products("tf32", GPU):
        training.step(training.init())
        weighted_means(torch.ones(1, 2), uploads())
    assert set(Noted.seen) == {(True, True)}
    assert seen == [(False, False)]


@pytest.mark.parametrize("hessian_free", [False, True])
def test_differences_of_gradients_have_all_digits(hessian_free: bool) -> None:
    model = Model(lambda: nn.Sequential(Noted(4, 3)), CrossEntropy())
    training = make_training("perfedavg", model=model, loss="cross_entropy", hessian_free=hessian_free)
    Noted.seen.clear()
    with products("tf32", GPU):
        training.step(training.init())
    assert set(Noted.seen) == {(True, True), *[(False, False)] * hessian_free}


def test_all_digits_are_nothing_new_outside_of_a_run(told: tuple[bool, bool]) -> None:
    with with_all_digits(), where_models_compute():
        assert _flags() == told


def test_the_way_back_multiplies_as_the_way_there() -> None:
    layer, seen = Noted(2, 1), []

    def value(inputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = layer(inputs)
        return outputs.sum(), outputs.detach()

    with products("tf32", GPU):
        Noted.seen.clear()
        slope, besides = model_gradient(value, has_aux=True)(torch.ones(2))
        seen, after = list(Noted.seen), _flags()
    assert seen == [(True, True)] * 2
    assert after == (False, False)
    expected, same = grad(value, has_aux=True)(torch.ones(2))
    torch.testing.assert_close((slope, besides), (expected, same))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("groups", [1, 50])
def test_means_on_a_gpu_have_all_digits_of_models_that_hardly_differ(groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    trees = 1 + 1e-5 * torch.randn(60, 4000, generator=generator)
    weights = torch.rand(groups, 60, generator=generator, dtype=torch.float64)
    weights /= weights.sum(1, keepdim=True)
    with products("tf32", GPU):
        means = weighted_means(weights, [(torch.arange(60), {"weight": trees.cuda()})])["weight"]
    torch.testing.assert_close(means.cpu().double(), weights @ trees.double(), rtol=0, atol=1e-6)
