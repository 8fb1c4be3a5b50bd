"""An LSTM that stacks is ``nn.LSTM``: same values, same gradients, for one model and for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lstms import HIDDEN, INPUTS, SAMPLES, TIMES, Tree, close, draw, draw_parameters, everything, make_pair
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedem.engines.replay import Traced
from fedem.models.layers import training_pass


@pytest.mark.parametrize("given", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("layout", ["time first", "batch first", "unbatched", "unbatched, batch first"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forwards", "both ways"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layers", [1, 3])
def test_values_and_gradients_are_those_of_torch(
    layers: int, bias: bool, bidirectional: bool, layout: str, given: bool
) -> None:
    pair = make_pair(num_layers=layers, bias=bias, bidirectional=bidirectional, batch_first="batch first" in layout)
    batch = () if "unbatched" in layout else (SAMPLES,)
    shape = (*batch, TIMES) if layout == "batch first" else (TIMES, *batch)
    inputs, *state = draw(*shape, INPUTS), *draw(2, layers * (1 + bidirectional), *batch, HIDDEN)
    results = []
    for module in pair:
        leaves = [leaf.clone().requires_grad_() for leaf in (inputs, *(state if given else ()))]
        outputs = module(leaves[0], tuple(leaves[1:]) or None)
        gradients = torch.autograd.grad(everything(outputs), [*leaves, *module.parameters()])
        results.append((outputs, gradients))
    close(results[1], results[0])
    assert results[1][0][0].shape == (*shape, HIDDEN * (1 + bidirectional))


def test_gradients_are_those_of_finite_differences() -> None:
    _, module = make_pair(num_layers=2, bidirectional=True)
    parameters = {name: leaf.detach().requires_grad_() for name, leaf in module.named_parameters()}
    leaves = [leaf.requires_grad_() for leaf in (draw(2, 2, INPUTS), *draw(2, 4, 2, HIDDEN))]

    def flat(inputs: Tensor, hidden: Tensor, cell: Tensor, *values: Tensor) -> Any:
        outputs, state = functional_call(module, dict(zip(parameters, values, strict=True)), (inputs, (hidden, cell)))
        return outputs, *state

    assert torch.autograd.gradcheck(flat, (*leaves, *parameters.values()))


def test_a_gradient_of_one_output_alone() -> None:
    pair = make_pair(num_layers=2)
    inputs = draw(TIMES, SAMPLES, INPUTS)
    for pick in (lambda out: out[0], lambda out: out[1][0], lambda out: out[1][1], lambda out: out[0][-1]):
        close(*([p.grad for p in _backward(module, pick(module(inputs)).sum()).parameters()] for module in pair))


def _backward(module: nn.Module, value: Tensor) -> nn.Module:
    module.zero_grad()
    value.backward()
    return module


def test_no_samples_give_no_outputs() -> None:
    for module in make_pair(bidirectional=True):
        outputs, (hidden, cell) = module(draw(TIMES, 0, INPUTS))
        assert (outputs.shape, hidden.shape, cell.shape) == ((TIMES, 0, 2 * HIDDEN), (2, 0, HIDDEN), (2, 0, HIDDEN))
        assert torch.autograd.grad(outputs.sum(), module.weight_hh_l0)[0].abs().sum() == 0


def pull(module: nn.Module) -> Callable[..., tuple[tuple[Tree, Tensor], Any]]:
    """The gradient with respect to the parameters and the inputs, and the outputs besides."""

    def objective(parameters: Tree, inputs: Tensor) -> tuple[Tensor, Any]:
        outputs = functional_call(module, parameters, (inputs,))
        return everything(outputs), outputs

    return grad(objective, argnums=(0, 1), has_aux=True)


def pull_one(module: nn.Module, parameters: Tree, inputs: Tensor) -> tuple[tuple[Tree, Tensor], Any]:
    """The same by torch's own layer and automatic differentiation."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in parameters.items()}
    inputs = inputs.detach().requires_grad_()
    outputs = functional_call(module, leaves, (inputs,))
    gradients = torch.autograd.grad(everything(outputs), [*leaves.values(), inputs])
    return (dict(zip(leaves, gradients[:-1], strict=True)), gradients[-1]), outputs


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}], ids=["one", "deep"])
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)], ids=["all", "common inputs", "common parameters"])
def test_stacked_models_are_a_loop(in_dims: tuple[int | None, int | None], settings: dict[str, Any]) -> None:
    torchs, ours = make_pair(batch_first=True, **settings)
    parameters = draw_parameters(ours, *(3,) * (in_dims[0] == 0))
    inputs = draw(*(3,) * (in_dims[1] == 0), SAMPLES, TIMES, INPUTS)
    together = vmap(pull(ours), in_dims=in_dims)(parameters, inputs)
    for model in range(3):
        alone = pull_one(
            torchs,
            {name: leaf[model] if in_dims[0] == 0 else leaf for name, leaf in parameters.items()},
            inputs[model] if in_dims[1] == 0 else inputs,
        )
        close(torch.utils._pytree.tree_map(lambda leaf, model=model: leaf[model], together), alone)


# For clients and for components: whether parameters and inputs are stacked.
STACKS = {
    "clients' own components on common samples": ((0, 0), (0, None)),
    "common components": ((None, 0), (0, None)),
    "one model each": ((0, 0), (None, 0)),
    "all stacked": ((0, 0), (0, 0)),
    "samples of components": ((0, None), (0, 0)),
    "common to all": ((0, None), (0, None)),
}


@pytest.mark.parametrize("in_dims", STACKS.values(), ids=STACKS)
def test_nested_stacks_are_two_loops(in_dims: tuple[tuple[int | None, int | None], ...]) -> None:
    clients, components = 3, 2
    torchs, ours = make_pair(num_layers=2)

    def stack(argument: int) -> list[int]:
        return [size for size, dims in zip((clients, components), in_dims, strict=True) if dims[argument] is not None]

    def at(leaf: Tensor, argument: int, *place: int) -> Tensor:
        return leaf[tuple(index for index, dims in zip(place, in_dims, strict=True) if dims[argument] is not None)]

    parameters, inputs = draw_parameters(ours, *stack(0)), draw(*stack(1), TIMES, SAMPLES, INPUTS)
    together = vmap(vmap(pull(ours), in_dims=in_dims[1]), in_dims=in_dims[0])(parameters, inputs)
    for client in range(clients):
        for component in range(components):
            place = (client, component)
            alone = pull_one(
                torchs, {name: at(leaf, 0, *place) for name, leaf in parameters.items()}, at(inputs, 1, *place)
            )
            close(torch.utils._pytree.tree_map(lambda leaf, place=place: leaf[place], together), alone)


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)], ids=["all", "common inputs", "common parameters"])
def test_gradients_from_outside_a_stack_add_up_over_what_is_common(in_dims: tuple[int | None, int | None]) -> None:
    torchs, ours = make_pair()
    parameters = draw_parameters(ours, *(3,) * (in_dims[0] == 0))
    inputs = draw(*(3,) * (in_dims[1] == 0), TIMES, SAMPLES, INPUTS)

    def stacked(parameters: Tree, inputs: Tensor) -> Tensor:
        one = vmap(lambda tree, rows: everything(functional_call(ours, tree, (rows,))), in_dims=in_dims)
        return one(parameters, inputs).square().sum()

    def loop(parameters: Tree, inputs: Tensor) -> Tensor:
        trees = [{n: leaf[m] if in_dims[0] == 0 else leaf for n, leaf in parameters.items()} for m in range(3)]
        rows = inputs if in_dims[1] == 0 else [inputs] * 3
        return sum(everything(functional_call(torchs, *pair)).square() for pair in zip(trees, rows, strict=True))

    leaves = [leaf.requires_grad_() for leaf in (*parameters.values(), inputs)]
    expected = torch.autograd.grad(loop(parameters, inputs), leaves)
    close(torch.autograd.grad(stacked(parameters, inputs), leaves), expected)
    close([*grad(stacked)(parameters, inputs).values()], [*expected[:-1]])


def test_a_stacked_start_and_dimensions_that_are_not_the_first() -> None:
    torchs, ours = make_pair()
    inputs, hidden, cell = draw(TIMES, SAMPLES, 3, INPUTS), draw(1, 3, SAMPLES, HIDDEN), draw(1, SAMPLES, HIDDEN)
    weight = draw(4 * HIDDEN, HIDDEN, 3)

    def call(module: nn.Module, weight: Tensor, inputs: Tensor, hidden: Tensor) -> Any:
        return functional_call(module, {"weight_hh_l0": weight}, (inputs, (hidden, cell)))

    together = vmap(lambda *leaves: call(ours, *leaves), in_dims=(2, 2, 1))(weight, inputs, hidden)
    for model in range(3):
        alone = call(torchs, weight[:, :, model], inputs[:, :, model], hidden[:, model])
        close((together[0][model], tuple(part[model] for part in together[1])), alone)


def test_single_sequences_are_the_rows_of_a_batch() -> None:
    torchs, ours = make_pair(num_layers=2)
    inputs = draw(SAMPLES, TIMES, INPUTS)
    close(vmap(ours)(inputs)[0], torchs(inputs.transpose(0, 1))[0].transpose(0, 1))


def test_dropout_between_layers_is_keyed_by_the_sample() -> None:
    _, module = make_pair(num_layers=2, dropout=0.5, batch_first=True)
    inputs = draw(SAMPLES, 40, INPUTS)

    def run(rows: Tensor, key: int) -> Tensor:
        with training_pass(None, torch.tensor(key)):
            return module(rows)[0].detach()

    whole = run(inputs, 1)
    close(run(inputs[:2], 1), whole[:2])
    assert not torch.allclose(run(inputs, 2), whole)
    together = vmap(run, in_dims=(0, None))(inputs.expand(3, *inputs.shape), 1)
    close(together[2], whole)
    module.eval()
    close(run(inputs, 1), run(inputs, 2))


def test_a_recording_gives_the_same_bits_and_has_no_entry_for_each_time() -> None:
    _, module = make_pair(num_layers=2)
    stacked = vmap(vmap(pull(module), in_dims=(0, None)))
    replay = Traced(lambda parameters, inputs, _: stacked(parameters, inputs), after=0)
    sizes = []
    for times in (2, 60):
        inputs = draw(3, times, SAMPLES, INPUTS)
        replay(draw_parameters(module, 3, 2), inputs, inputs)
        again = draw_parameters(module, 3, 2)
        torch.testing.assert_close(replay(again, inputs, inputs), stacked(again, inputs), rtol=0, atol=0)
        sizes.append(len([*replay._recordings.values()][-1].graph.nodes))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("given", [False, True], ids=["from zero", "from a state"])
def test_what_comes_in_few_bits_is_added_up_in_the_parameters(given: bool) -> None:
    torchs, ours = (module.float() for module in make_pair(num_layers=2, bidirectional=True))
    inputs, state = draw(TIMES, SAMPLES, INPUTS).bfloat16(), tuple(draw(2, 4, SAMPLES, HIDDEN).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(inputs, state if given else None)
        # Also where the gradient is taken inside.
        gradients = torch.autograd.grad(everything(got), [*ours.parameters()])
    exact = torchs(inputs.float(), tuple(part.float() for part in state) if given else None)
    torch.testing.assert_close(got, exact, rtol=0, atol=3e-2)
    expected = torch.autograd.grad(everything(exact), [*torchs.parameters()])
    for leaf, reference in zip(gradients, expected, strict=True):
        assert leaf.dtype == torch.float32
        assert float((leaf - reference).norm()) < 0.05 * float(reference.norm())
