"""What an LSTM that stacks refuses, rather than be wrong."""

from __future__ import annotations

import pytest
import torch
from lstms import HIDDEN, INPUTS, SAMPLES, TIMES, Tree, draw, make_pair
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn.utils.rnn import pack_sequence

from fedem.core.errors import UserError
from fedem.models.recurrence import StackableLSTM
from fedem.models.stackable import make_stackable


def test_what_can_not_be_stacked_is_refused() -> None:
    _, module = make_pair()
    assert isinstance(make_stackable(module), StackableLSTM)
    projecting = nn.LSTM(INPUTS, 3, proj_size=2)
    assert not isinstance(make_stackable(projecting), StackableLSTM)
    projecting.__class__ = StackableLSTM
    with pytest.raises(UserError, match=r"proj_size=2; allowed: 0"):
        projecting(torch.zeros(TIMES, INPUTS))
    with pytest.raises(UserError, match=r"PackedSequence; allowed: sequences padded"):
        module(pack_sequence([draw(TIMES, INPUTS)]))


@pytest.mark.parametrize("shape", [(TIMES,), (TIMES, SAMPLES, 1, INPUTS), (TIMES, SAMPLES, 4), (0, SAMPLES, INPUTS)])
def test_inputs_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    _, module = make_pair()
    with pytest.raises(UserError, match=r"allowed: \[T, n, 3\] or \[T, 3\] with T > 0"):
        module(draw(*shape))


def test_states_that_do_not_fit_are_refused() -> None:
    _, module = make_pair()
    fits = draw(1, SAMPLES, HIDDEN)
    for misfit in (draw(2, SAMPLES, HIDDEN), draw(1, 1, HIDDEN), draw(1, HIDDEN)):
        for state in ((fits, misfit), (misfit, fits)):
            with pytest.raises(UserError, match=r"allowed: \[1, 4, 2\]"):
                module(draw(TIMES, SAMPLES, INPUTS), state)
    with pytest.raises(UserError, match=r"allowed: \[1, 2\]"):
        module(draw(TIMES, INPUTS), (fits, fits))


def test_second_derivatives_are_refused_and_not_wrong() -> None:
    _, module = make_pair()
    inputs = draw(TIMES, SAMPLES, INPUTS)
    parameters = dict(module.named_parameters())

    def value(leaves: Tree, inputs: Tensor) -> Tensor:
        return functional_call(module, leaves, (inputs,))[0].sum()

    with pytest.raises(UserError, match="differentiated again"):
        jacrev(grad(value))(parameters, inputs)
    # Also where the parameters are constants, and where torch's own differentiation is used.
    with pytest.raises(UserError, match="differentiated again"):
        grad(lambda rows: grad(value, argnums=1)(parameters, rows).sum())(inputs)
    first = torch.autograd.grad(value(parameters, inputs), module.weight_hh_l0, create_graph=True)[0]
    with pytest.raises(UserError, match="differentiated again"):
        first.sum().backward()
