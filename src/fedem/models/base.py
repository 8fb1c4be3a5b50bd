"""Any ``nn.Module`` as pure functions of a tree of parameters.

Shapes: n samples, K outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map as pytree_map

from fedem.errors import UserError
from fedem.models.losses import Loss
from fedem.settings import Settings
from fedem.tree import Tree, tree_stack


class FoldedLinear(nn.Linear):
    """``nn.Linear`` in a form that stacks well: same parameters, same values.

    Under vmap over components torch folds them into the rows of one matrix product only when the stacked factor is the
    left one and contiguous; else it copies the inputs once for each component. So the weight stands on the left, and
    the gradient that comes back is laid out afresh (it is far smaller than the inputs).
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., d] -> [..., K]``."""
        rows = inputs if inputs.ndim == 2 else inputs.reshape(-1, inputs.shape[-1])
        outputs = self.weight @ rows.mT
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient.reshape(-1).reshape(gradient.shape))
        if self.bias is not None:
            outputs = outputs + self.bias[:, None]
        # Contiguous as nn.Linear's output is: what follows may want to view it.
        outputs = outputs.mT.contiguous()
        return outputs if inputs.ndim == 2 else outputs.reshape(*inputs.shape[:-1], self.out_features)


@dataclass(frozen=True)
class ModelSpec(Settings, ABC):
    """A named model family: a frozen dataclass of its parameters that builds a module for given shapes."""

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Return a freshly initialised module."""


class Model:
    """A module and a loss, as pure functions of a tree of parameters and buffers.

    Args:
        source: a module, or a function that builds a freshly initialised one each time it is called. A module given as
            such must be able to start afresh: each part with parameters needs ``reset_parameters``, as torch's own
            layers have. Components that all started equal would stay equal.
        loss: the negative log-likelihood of its outputs.
        dtype: of the parameters; floating inputs are converted to it. Inputs of type uint8 are divided by 255.

    """

    def __init__(self, source: nn.Module | Callable[[], nn.Module], loss: Loss, dtype: torch.dtype = torch.float32):
        self.loss = loss
        self.dtype = dtype
        self.build = _rebuilder(source) if isinstance(source, nn.Module) else source
        # Built here and not on first use: under vmap nothing may draw random numbers.
        self._training, self._evaluation = self._skeleton(training=True), self._skeleton(training=False)
        self.not_stackable = _reason_not_to_stack(self._training)
        """why models can't be stacked through vmap; None when they can"""
        self.bytes_per_sample = 0
        """of all outputs of all layers for one sample, once :meth:`probe` has seen one"""

    def _skeleton(self, training: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            # A copy: the function may hand out a module that somebody else uses.
            module = deepcopy(self.build()).to(self.dtype).train(training)
        for part in module.modules():
            if type(part) is nn.Linear:
                part.__class__ = FoldedLinear
        return module

    @cached_property
    def trainable(self) -> frozenset[str]:
        """Names of the leaves that are trained; the others are buffers."""
        return frozenset(name for name, leaf in self._evaluation.named_parameters() if leaf.requires_grad)

    def init(self, seed: int) -> Tree:
        """Draw initial parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = deepcopy(self.build()).to(self.dtype)
        leaves = dict(module.named_parameters()) | dict(module.named_buffers())
        return {name: leaf.detach().clone() for name, leaf in leaves.items()}

    @cached_property
    def normalises_batches(self) -> bool:
        """Whether a layer normalises over the samples of a batch."""
        return any(isinstance(part, _BatchNorm) for part in self._training.modules())

    @cached_property
    def num_parameters(self) -> int:
        """Number of trained numbers of one component."""
        return sum(leaf.numel() for name, leaf in self._evaluation.named_parameters() if name in self.trainable)

    def _prepare(self, inputs: Tensor) -> Tensor:
        if inputs.dtype == torch.uint8:
            return inputs.to(self.dtype) / 255
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs

    def outputs(self, parameters: Tree, inputs: Tensor) -> Tensor:
        """Run the module in evaluation mode, ``[n, ...] -> [n, K]``."""
        outputs: Tensor = functional_call(self._evaluation, parameters, (self._prepare(inputs),))
        return outputs

    def losses(self, parameters: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each sample in evaluation mode, ``[n]``."""
        return self.loss.negative_log_likelihood(self.outputs(parameters, inputs), self._targets(targets))

    def training_losses(self, parameters: Tree, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tree]:
        """Negative log-likelihood of each sample in training mode, ``[n]``, and the buffers as the pass left them."""
        outputs, buffers = self._training_outputs(parameters, inputs)
        return self.loss.negative_log_likelihood(outputs, self._targets(targets)), buffers

    def _training_outputs(self, parameters: Tree, inputs: Tensor) -> tuple[Tensor, Tree]:
        # Modules change their buffers in place, so they get copies.
        state = {name: leaf if name in self.trainable else leaf.clone() for name, leaf in parameters.items()}
        outputs: Tensor = functional_call(self._training, state, (self._prepare(inputs),))
        return outputs, {name: leaf.detach() for name, leaf in state.items() if name not in self.trainable}

    def _targets(self, targets: Tensor) -> Tensor:
        return targets.to(self.dtype) if targets.is_floating_point() else targets

    def probe(self, inputs: Tensor) -> None:
        """Try a few inputs: measure what the layers put out, and whether stacked models train as single ones do.

        What is found is noted in ``bytes_per_sample`` and ``not_stackable``.
        """
        trees = [self.init(0), self.init(1)]
        self.bytes_per_sample = self._measure(trees[0], inputs[:1])
        if self.not_stackable is not None:
            return

        def pull(tree: Tree, inputs: Tensor) -> tuple[Tree, Tree]:
            """The gradient of something that depends on every output, and the buffers."""

            def objective(trained: Tree) -> tuple[Tensor, Tree]:
                outputs, buffers = self._training_outputs(tree | trained, inputs)
                return outputs.square().sum(), buffers

            gradient, buffers = grad(objective, has_aux=True)({name: tree[name] for name in self.trainable})
            return gradient, buffers

        try:
            together, _ = vmap(pull)(tree_stack(trees), torch.stack([inputs, inputs]))
            alone, buffers = pull(trees[1], inputs)
        # torch raises any of these for an operation without a vmap rule.
        except (RuntimeError, NotImplementedError, ValueError) as error:
            self.not_stackable = str(error).splitlines()[0]
            return
        changed = [name for name, leaf in buffers.items() if not torch.equal(leaf, trees[1][name])]
        if changed:
            self.not_stackable = f"training changes {changed[0]!r}, which would see the padding of short batches"
        elif not all(
            torch.allclose(together[name][1], leaf, rtol=1e-3, atol=1e-4, equal_nan=True)
            for name, leaf in alone.items()
        ):
            self.not_stackable = "stacked and single gradients differ"

    def _measure(self, tree: Tree, inputs: Tensor) -> int:
        """Count the bytes that the layers put out for these inputs."""
        total = 0

        def count(module: nn.Module, arguments: Any, output: Any) -> None:
            nonlocal total
            total += sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

        hooks = [part.register_forward_hook(count) for part in self._evaluation.modules()]
        try:
            self.outputs(tree, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return total

    def over_components(self, function: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
        """Return ``function`` of one component as one of M stacked ones, by vmap where the module allows it.

        ``in_dims`` says for each argument whether it is stacked (0) or common to all components (None).
        """
        if self.not_stackable is None:
            return vmap(function, in_dims=in_dims)

        def loop(*arguments: Any) -> Any:
            stacked = next(argument for argument, dim in zip(arguments, in_dims, strict=True) if dim == 0)
            count = len(tree_leaves(stacked)[0])
            results = [
                function(
                    *(
                        argument if dim is None else pytree_map(lambda leaf, m=m: leaf[m], argument)
                        for argument, dim in zip(arguments, in_dims, strict=True)
                    )
                )
                for m in range(count)
            ]
            return pytree_map(lambda *leaves: torch.stack(leaves), *results)

        return loop

    def check(self, inputs: Tensor, targets: Tensor) -> None:
        """Try a few samples; refuse a module whose output does not fit the loss or the inputs."""
        if not self.trainable:
            raise UserError("The model has no parameters to train.")
        parameters = self.init(0)
        try:
            outputs = self.outputs(parameters, inputs[:2])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"The model can't take inputs of shape {list(inputs.shape[1:])}: {error}") from error
        if outputs.ndim != 2 or len(outputs) != len(inputs[:2]):
            raise UserError(
                f"The model puts out shape {list(outputs.shape)} for {len(inputs[:2])} samples; allowed: [n, outputs]."
            )
        self.loss.check(outputs.shape[1], targets)


def _rebuilder(source: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that copies ``source`` and initialises the copy afresh."""
    for name, part in source.named_modules():
        own = any(leaf.requires_grad for leaf in part.parameters(recurse=False))
        if own and not callable(getattr(part, "reset_parameters", None)):
            raise UserError(
                f"Part {name or 'the module'!r} ({type(part).__name__}) has parameters but no reset_parameters(), so "
                "components could not start differently; pass a function that builds the module instead."
            )

    def rebuild() -> nn.Module:
        module = deepcopy(source)
        for part in module.modules():
            # What is frozen was given for its values.
            if any(leaf.requires_grad for leaf in part.parameters(recurse=False)):
                part.reset_parameters()  # type: ignore[operator]  # its presence is checked above
        return module

    return rebuild


def _reason_not_to_stack(module: nn.Module) -> str | None:
    """Return what the padding of short batches or torch's own randomness would spoil, if anything."""
    reasons: tuple[tuple[type[nn.Module], str], ...] = (
        (_BatchNorm, "batch normalisation would see the padding of short batches"),
        (_DropoutNd, "dropout draws from torch's global generator"),
        (nn.RNNBase, "torch has no vmap rule for its recurrent layers"),
    )
    for part in module.modules():
        for kind, reason in reasons:
            if isinstance(part, kind) and getattr(part, "p", 1) > 0:
                return f"{type(part).__name__}: {reason}"
    return None
