"""What a trial tells of a model before it is trained: how much it puts out, and whether it can be stacked.

Stacked, a model stands beside others and some rows of its batches are padding. A layer that lets samples see each other
in a way that is not known here, or that draws from a generator, gives itself away by that.

Shapes: n samples, K outputs.
"""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves

from fedem.errors import UserError
from fedem.tree import Tree, tree_flat, tree_index, tree_stack, tree_to

if TYPE_CHECKING:
    from fedem.models.base import Model

_NO_RULE = (RuntimeError, ValueError)  # torch's for an operation that has no rule for vmap


def measure(model: Model, inputs: Tensor) -> int:
    """Count the bytes that all layers put out for these inputs."""
    total = 0

    def count(module: nn.Module, arguments: Any, output: Any) -> None:
        nonlocal total
        total += sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

    hooks = [part.register_forward_hook(count) for part in model.evaluation.modules()]
    try:
        model.outputs(tree_to(model.init(0), inputs.device), inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return total


def reason_not_to_stack(model: Model, inputs: Tensor) -> str | None:
    """Say why models can't be stacked; None when they can. Refuses what can't be trained or evaluated at all."""
    # In double precision where the module bears it: layers that normalise few samples amplify rounding.
    judge = type(model)(model.build, model.loss, torch.float64)
    try:
        _pull(judge, inputs)
    except RuntimeError:
        judge = model
    try:
        alone = _pull(judge, inputs)
    except _NO_RULE as error:
        raise UserError(f"The model can't be trained: {error}") from error
    _check_evaluation(judge, inputs)
    try:
        together, evaluates_alike = _pull_beside(judge, inputs), _evaluates_stacked(judge, inputs)
    except _NO_RULE as error:
        return shorten(str(error).splitlines()[0], 160)
    spoilt = [name for name in alone if name not in model.trainable and not _agree(together[name], alone[name])]
    if spoilt:
        return f"training changes {spoilt[0]!r}, which sees the padding of short batches"
    gradients = [{name: tree[name] for name in model.trainable} for tree in (together, alone)]
    if evaluates_alike and _agree(*map(tree_flat, gradients)):
        return None
    return "its results change with the padding of short batches or with who is trained beside"


def _pull(model: Model, inputs: Tensor, tree: Tree | None = None, mask: Tensor | None = None) -> Tree:
    """Return the gradient of something that depends on every output, and the buffers after a pass."""
    leaves = tree_to(model.init(1), inputs.device) if tree is None else tree
    key = torch.tensor(0, device=inputs.device)

    def objective(trained: Tree) -> tuple[Tensor, Tree]:
        outputs, buffers = model.training_outputs(leaves | trained, inputs, mask, key)
        squares = outputs.square().flatten(1).sum(1)
        return (squares if mask is None else squares * mask).sum(), buffers

    gradient, buffers = grad(objective, has_aux=True)({name: leaves[name] for name in model.trainable})
    pulled: Tree = gradient | buffers
    return pulled


def _pull_beside(model: Model, inputs: Tensor) -> Tree:
    """Return the same with another model beside it, and padding below the inputs."""
    # Other rows than there are, of numbers that occur.
    most, least = inputs.amax(0, keepdim=True), inputs.amin(0, keepdim=True)
    padded = torch.cat([inputs, most, least, most])
    mask = torch.arange(len(padded), device=inputs.device) < len(inputs)
    trees = tree_stack([tree_to(model.init(seed), inputs.device) for seed in (0, 1)])

    def pull(tree: Tree, inputs: Tensor, mask: Tensor) -> Tree:
        return _pull(model, inputs, tree, mask)

    both: Tree = vmap(pull)(trees, torch.stack([padded, padded]), torch.stack([mask, mask]))
    return tree_index(both, 1)


def _check_evaluation(model: Model, inputs: Tensor) -> None:
    """Refuse a module whose evaluation of a sample depends on the samples beside it."""
    parameters = tree_to(model.init(1), inputs.device)
    with torch.no_grad():
        apart = torch.cat([model.outputs(parameters, row) for row in inputs.split(1)])
        if not _agree(model.outputs(parameters, inputs), apart):
            raise UserError(
                "What the model predicts for a sample depends on the samples beside it, or on chance; allowed: modules "
                "that treat samples one by one in evaluation mode."
            )


def _evaluates_stacked(model: Model, inputs: Tensor) -> bool:
    """Say whether stacked models evaluate as single ones do, and so one model on stacked inputs."""
    trees = [tree_to(model.init(seed), inputs.device) for seed in (0, 1)]
    with torch.no_grad():
        alone = model.outputs(trees[1], inputs)
        models = vmap(model.outputs, in_dims=(0, None))(tree_stack(trees), inputs)
        clients = vmap(model.outputs, in_dims=(None, 0))(trees[1], torch.stack([inputs.flip(0), inputs]))
        return _agree(models[1], alone) and _agree(clients[1], alone)


def _agree(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same but for rounding; what isn't finite here may be so in both."""
    first, second = first.double().nan_to_num(), second.double().nan_to_num()
    return bool((first - second).norm() <= 1e-3 * second.norm() + 1e-6)
