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
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map as pytree_map

from fedem.errors import UserError
from fedem.models.building import rebuilder
from fedem.models.layers import MaskedBatchNorm, make_stackable, training_pass
from fedem.models.losses import Loss
from fedem.models.probing import measure, reason_not_to_stack
from fedem.settings import Settings
from fedem.tree import Tree


@dataclass(frozen=True)
class ModelSpec(Settings, ABC):
    """A named model family: a frozen dataclass of its parameters that builds a module for given shapes."""

    def check(self, lowest: int, highest: int) -> None:
        """Refuse whole numbers as inputs, from ``lowest`` to ``highest``, that the model has no place for."""

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
        precision: of products (:mod:`fedem.precision`); "bfloat16" computes in that type where torch deems it safe.

    """

    def __init__(
        self,
        source: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        dtype: torch.dtype = torch.float32,
        precision: str = "tf32",
    ):
        self.loss = loss
        self.dtype, self.precision = dtype, precision
        self.build = rebuilder(source) if isinstance(source, nn.Module) else source
        # Built here and not on first use: under vmap nothing may draw random numbers.
        self._training, self.evaluation = self._skeleton(training=True), self._skeleton(training=False)
        self.not_stackable: str | None = None
        """why models can't be stacked through vmap, once :meth:`probe` has found that they can't"""
        self.bytes_per_sample = 0
        """of all outputs of all layers for one sample, once :meth:`probe` has seen one"""

    def _skeleton(self, training: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            built = self.build()
            if not isinstance(built, nn.Module):
                raise UserError(f"The function that builds the model returned {built!r}; allowed: an nn.Module.")
            # A copy: the function may hand out a module that somebody else uses.
            return make_stackable(deepcopy(built).to(self.dtype).train(training))

    @cached_property
    def leaf_shapes(self) -> dict[str, list[int]]:
        """Shapes of all parameters and buffers by their names."""
        leaves = dict(self.evaluation.named_parameters()) | dict(self.evaluation.named_buffers())
        return {name: list(leaf.shape) for name, leaf in leaves.items()}

    @cached_property
    def trainable(self) -> frozenset[str]:
        """Names of the leaves that are trained; the others are buffers."""
        return frozenset(name for name, leaf in self.evaluation.named_parameters() if leaf.requires_grad)

    def init(self, seed: int) -> Tree:
        """Draw initial parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = deepcopy(self.build()).to(self.dtype)
        leaves = dict(module.named_parameters()) | dict(module.named_buffers())
        return {name: leaf.detach().clone() for name, leaf in leaves.items()}

    @cached_property
    def normalises_batches(self) -> bool:
        """Whether a layer of an unknown kind normalises over the samples of a batch, so that one can't stand alone."""
        parts = self._training.modules()
        return any(isinstance(part, _BatchNorm) and not isinstance(part, MaskedBatchNorm) for part in parts)

    @cached_property
    def is_twice_differentiable(self) -> bool:
        """Whether second derivatives can be had: not through recurrences, nor through running statistics."""
        return not any(isinstance(part, _BatchNorm | nn.RNNBase) for part in self._training.modules())

    @cached_property
    def normalising(self) -> frozenset[str]:
        """Names of the leaves of batch normalisations: their scales, shifts and statistics."""
        return frozenset(
            f"{name}.{leaf}" if name else leaf
            for name, part in self._training.named_modules()
            if isinstance(part, _BatchNorm)
            for leaf in (*dict(part.named_parameters()), *dict(part.named_buffers()))
        )

    @cached_property
    def num_parameters(self) -> int:
        """Number of trained numbers of one component."""
        return sum(leaf.numel() for name, leaf in self.evaluation.named_parameters() if name in self.trainable)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Turn samples as they are stored into numbers as the module takes them: bytes become shares of 255."""
        if inputs.dtype == torch.uint8:
            return inputs.to(self.dtype) / 255
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs.long()

    def outputs(self, parameters: Tree, inputs: Tensor) -> Tensor:
        """Run the module in evaluation mode, ``[n, ...] -> [n, K]``."""
        return self._call(self.evaluation, parameters, inputs)

    def _call(self, module: nn.Module, state: Tree, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            outputs: Tensor = functional_call(module, state, (self.prepare(inputs),))
        return outputs.to(self.dtype)

    def losses(self, parameters: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each sample in evaluation mode, ``[n]``."""
        return self.loss.negative_log_likelihood(self.outputs(parameters, inputs), self._targets(targets))

    def training_losses(
        self, parameters: Tree, inputs: Tensor, targets: Tensor, mask: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tree]:
        """Negative log-likelihood of each sample in training mode, ``[n]``, and the buffers as the pass left them.

        ``mask`` ``[n]`` is false where a row is padding (None: nowhere); layers that draw do so by ``key`` (int64).
        """
        outputs, buffers = self.training_outputs(parameters, inputs, mask, key)
        return self.loss.negative_log_likelihood(outputs, self._targets(targets)), buffers

    def training_outputs(
        self, parameters: Tree, inputs: Tensor, mask: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tree]:
        """Run the module in training mode, ``[n, ...] -> [n, K]``; the same arguments, without targets."""
        # Modules change their buffers in place, so they get copies.
        state = {name: leaf if name in self.trainable else leaf.clone() for name, leaf in parameters.items()}
        with training_pass(mask, key):
            outputs = self._call(self._training, state, inputs)
        return outputs, {name: leaf.detach() for name, leaf in state.items() if name not in self.trainable}

    def _targets(self, targets: Tensor) -> Tensor:
        return targets.to(self.dtype) if targets.is_floating_point() else targets

    def probe(self, inputs: Tensor) -> None:
        """Try a few inputs, on their device; what is found is noted in ``bytes_per_sample`` and ``not_stackable``."""
        self.bytes_per_sample = measure(self, inputs[:1])
        self.not_stackable = reason_not_to_stack(self, inputs)

    def component_outputs(self, components: Tree, inputs: Tensor) -> Tensor:
        """Run M stacked models in evaluation mode, ``[M, ...], [n, ...] -> [M, n, K]``."""
        outputs: Tensor = self._over_components(self.outputs, (0, None), self._evaluates_one_by_one)(components, inputs)
        return outputs

    def component_losses(self, components: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each sample under each of M models, ``[M, n]``."""
        losses: Tensor = self._over_components(self.losses, (0, None, None), self._evaluates_one_by_one)(
            components, inputs, targets
        )
        return losses

    @cached_property
    def is_large(self) -> bool:
        """Whether one pass of one model keeps a machine busy: convolutions and recurrences are faster unstacked."""
        return any(isinstance(part, _ConvNd | nn.RNNBase) for part in self.evaluation.modules())

    @property
    def _evaluates_one_by_one(self) -> bool:
        return self.is_large or self.not_stackable is not None

    def over_components(self, function: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
        """Return a step of one component as one of M stacked ones, by vmap where the module allows it.

        ``in_dims`` says for each argument whether it is stacked (0) or common to all components (None).
        """
        return self._over_components(function, in_dims, self.not_stackable is not None)

    def _over_components(
        self, function: Callable[..., Any], in_dims: tuple[int | None, ...], one_by_one: bool
    ) -> Callable[..., Any]:
        if not one_by_one:
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
