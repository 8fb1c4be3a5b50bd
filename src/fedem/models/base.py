"""Any ``nn.Module`` as pure functions of a tree of parameters, and what a trial shows before it is trained.

The trial measures how much a model puts out, and whether it can be stacked: then it stands beside others and some rows
of its batches are padding. A layer that lets samples see each other in a way that is not known here, or that draws from
a generator, gives itself away by that.

Shapes: n samples, K outputs, M components.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import combinations
from operator import itemgetter, methodcaller
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map as pytree_map

from fedem.core.errors import UserError, counted
from fedem.core.precision import where_models_compute
from fedem.core.settings import Settings
from fedem.core.tree import Tree, tree_flat, tree_index, tree_stack, tree_to
from fedem.models import layers
from fedem.models.folding import find_folds, folded, without
from fedem.models.layers import training_pass
from fedem.models.losses import Loss
from fedem.models.normalisation import FixedBatchNorm, MaskedBatchNorm
from fedem.models.stackable import make_stackable

Builder = Callable[[], nn.Module]
_NO_RULE = (RuntimeError, ValueError)  # torch's for an operation that has no rule for vmap


@dataclass(frozen=True)
class ModelSpec(Settings, ABC):
    """A named model family: a frozen dataclass of its parameters that builds a module for given shapes."""

    def check(self, lowest: int, highest: int) -> None:
        """Refuse whole numbers as inputs, from ``lowest`` to ``highest``, that the model has no place for."""

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Return a freshly initialised module."""


@dataclass(frozen=True)
class Auto(ModelSpec):
    """Chosen by the data, once for a run: cnn for images (from 8 x 8), else linear or mlp, the better by validation.

    Both are trained for a quarter of the rounds, from 10 to 50, without the test part. It is linear without a trial
    where there are no validation samples, or where the method trains no other.
    """

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        raise UserError("model.name is 'auto', which training settles; allowed before that: the name of a model.")


class Model:
    """A module and a loss, as pure functions of a tree of parameters and buffers.

    Args:
        source: a module, or a function that builds a freshly initialised one each time it is called. A module given as
            such must be able to start afresh: each part with parameters needs ``reset_parameters``, as torch's own
            layers have. Components that all started equal would stay equal.
        loss: the negative log-likelihood of its outputs.
        dtype: of the parameters; floating inputs are converted to it. Inputs of type uint8 are divided by 255.
        precision: of products; "bfloat16" computes in that type where torch deems it safe.
        class_weights: what a sample of each class counts in training, ``[K]``; None: all the same.
    """

    def __init__(
        self,
        source: nn.Module | Builder,
        loss: Loss,
        dtype: torch.dtype = torch.float32,
        precision: str = "tf32",
        class_weights: Sequence[float] | None = None,
    ):
        self.loss, self.class_weights = loss, class_weights
        self.dtype, self.precision = dtype, precision
        self.build = rebuilder(source) if isinstance(source, nn.Module) else source
        # Built here and not on first use: under vmap nothing may draw random numbers.
        self._training, self.evaluation = self._skeleton(training=True), self._skeleton(training=False)
        self._folds = find_folds(self.evaluation)
        self._scoring = without(self.evaluation, self._folds)
        self.not_stackable: str | None = None
        """why models can't be stacked through vmap, once :meth:`probe` has found that they can't"""
        self.bytes_per_sample = 0
        """that training holds for one sample, once :meth:`probe` has seen one"""

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
        return {name: list(leaf.shape) for name, leaf in leaves_of(self.evaluation).items()}

    @cached_property
    def trainable(self) -> frozenset[str]:
        """Names of the leaves that are trained; the others are buffers."""
        return frozenset(name for name, leaf in self.evaluation.named_parameters() if leaf.requires_grad)

    @cached_property
    def _unchanging(self) -> frozenset[str]:
        """Names of the leaves that a pass leaves as they are: what is trained, and statistics that are fixed."""
        parts = self.evaluation.named_modules()
        fixed = {f"{name}." for name, part in parts if isinstance(part, FixedBatchNorm)}
        return self.trainable | {name for name in self.leaf_shapes if name[: name.rfind(".") + 1] in fixed}

    def init(self, seed: int) -> Tree:
        """Draw initial parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = deepcopy(self.build()).to(self.dtype)
        return {name: leaf.detach().clone() for name, leaf in leaves_of(module).items()}

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
            for leaf in leaves_of(part)
        )

    @cached_property
    def head_layer(self) -> str:
        """Name of the last layer that is trained; empty where the module is that layer itself."""
        return _layer_of([name for name in self.leaf_shapes if name in self.trainable][-1])

    @cached_property
    def head(self) -> frozenset[str]:
        """Names of the leaves of that layer."""
        return frozenset(name for name in self.leaf_shapes if _layer_of(name) == self.head_layer)

    @property
    def body(self) -> frozenset[str]:
        """Names of all other leaves."""
        return frozenset(self.leaf_shapes) - self.head

    def leaves_called(self, words: str) -> frozenset[str]:
        """Return the leaves that ``words``, with commas between, name; a word that names none is refused.

        A word is "batch_norm", "head" for the last layer that is trained, "body" for all but that, "50%" for the first
        half of the layers, or another share of the depth; or the name of a layer or a leaf, or a part of it between
        dots. "*" stands for anything.
        """
        return frozenset().union(*(self._leaves_called(word) for word in words.split(",")))

    def _leaves_called(self, word: str) -> frozenset[str]:
        found = frozenset(name for name in self.leaf_shapes if _is_called(name, word))
        if word == "batch_norm":
            found = self.normalising
        elif not found and word in ("head", "body"):
            found = self.head if word == "head" else self.body
        elif share := re.fullmatch(r"(\d+(?:\.\d+)?)%", word):
            depth = list(dict.fromkeys(map(_layer_of, self.leaf_shapes)))
            first = depth[: round(float(share[1]) / 100 * len(depth))]
            found = frozenset(name for name in self.leaf_shapes if _layer_of(name) in first)
        if not found:
            names = ", ".join(self.leaf_shapes) + (", batch_norm" if self.normalising else "")
            allowed = f"head, body, a share of the depth such as 50%, {names}, or a part of these"
            raise UserError(f"The model has no layers called {word!r}; allowed: {allowed}.")
        return found

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
        if self._is_folded(inputs):
            return self._call(self._scoring, folded(parameters, self._folds), inputs)
        return self.unfolded_outputs(parameters, inputs)

    def _is_folded(self, inputs: Tensor) -> bool:
        """Whether normalisations are folded for these: where a kernel has them, it costs less than to add biases."""
        return bool(self._folds) and (self.dtype == torch.float64 or not layers.has_kernels(inputs))

    def unfolded_outputs(self, parameters: Tree, inputs: Tensor) -> Tensor:
        """Do the same by all layers, as training has them."""
        return self._call(self.evaluation, parameters, inputs)

    def features(self, parameters: Tree, inputs: Tensor) -> Tensor:
        """Return what the last trained layer gets in evaluation mode, flattened, ``[n, ...] -> [n, F]``.

        Where that layer is the first one, these are the inputs.
        """
        return self.outputs_and_features(parameters, inputs)[1]

    def outputs_and_features(self, parameters: Tree, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`outputs` and :meth:`features`, ``[n, K]`` and ``[n, F]``, by one pass."""
        given: list[Any] = []

        def notice(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            given.extend((*arguments, *named.values())[:1])

        # A layer that is folded into the one before gets something else than it got.
        is_there = self._is_folded(inputs) and all(fold.normalisation != self.head_layer for fold in self._folds)
        module = self._scoring if is_there else self.evaluation
        hook = module.get_submodule(self.head_layer).register_forward_pre_hook(notice, with_kwargs=True)
        try:
            outputs = (self.outputs if is_there else self.unfolded_outputs)(parameters, inputs)
        finally:
            hook.remove()
        found = given[-1] if given else None
        if not isinstance(found, Tensor) or found.ndim < 2 or len(found) != len(inputs):
            got = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else "no tensor"
            said = (
                f"The model's last trained layer, {self.head_layer!r}, gets {got} for {counted(len(inputs), 'sample')}"
            )
            raise UserError(f"{said}; allowed for features: a layer that is called with [n, ...].")
        return outputs, found.flatten(1).to(self.dtype)

    def _call(self, module: nn.Module, state: Tree, inputs: Tensor) -> Tensor:
        lower = torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")
        with where_models_compute(), lower:
            return functional_call(module, state, (self.prepare(inputs),)).to(self.dtype)

    def losses(self, parameters: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each sample in evaluation mode, ``[n]``."""
        return self.loss.negative_log_likelihood(self.outputs(parameters, inputs), self._targets(targets))

    def training_losses(
        self, parameters: Tree, inputs: Tensor, targets: Tensor, mask: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tree]:
        """Negative log-likelihood of each sample in training mode, ``[n]``, and the buffers as the pass left them.

        That is times the weight of its class, where classes have some: this alone is what local steps minimise.
        ``mask`` ``[n]`` is false where a row is padding (None: nowhere); layers that draw do so by ``key`` (int64).
        """
        outputs, buffers = self.training_outputs(parameters, inputs, mask, key)
        losses = self.loss.negative_log_likelihood(outputs, self._targets(targets))
        if self.class_weights is not None:
            # By plain numbers: a tensor of weights made or moved under grad or vmap could not be kept.
            shares = [weight * (targets == label).to(losses.dtype) for label, weight in enumerate(self.class_weights)]
            losses = losses * sum(shares[1:], shares[0])
        return losses, buffers

    def training_outputs(
        self, parameters: Tree, inputs: Tensor, mask: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tree]:
        """Run the module in training mode, ``[n, ...] -> [n, K]``; the same arguments, without targets."""
        # Modules change their buffers in place, so they get copies.
        state = {name: leaf if name in self._unchanging else leaf.clone() for name, leaf in parameters.items()}
        with training_pass(mask, key):
            outputs = self._call(self._training, state, inputs)
        return outputs, {name: leaf.detach() for name, leaf in state.items() if name not in self.trainable}

    def _targets(self, targets: Tensor) -> Tensor:
        return targets.to(self.dtype) if targets.is_floating_point() else targets

    def probe(self, inputs: Tensor) -> None:
        """Try a few inputs, on their device; what is found is noted in ``bytes_per_sample`` and ``not_stackable``."""
        self.bytes_per_sample = _measure(self, inputs[:1])
        self.not_stackable = _reason_not_to_stack(self, inputs)

    def component_outputs(self, components: Tree, inputs: Tensor) -> Tensor:
        """Run M stacked models in evaluation mode, ``[M, ...], [n, ...] -> [M, n, K]``.

        A leaf with one row is common to all M. What it does to the inputs is done once.
        """
        return self.each_component(components, self.outputs, self.is_large)(inputs)

    def component_outputs_and_features(self, components: Tree, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return also what their last layers get, ``[M, n, F]``; likewise."""
        return self.each_component(components, self.outputs_and_features, self.is_large)(inputs)

    def component_losses(self, components: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each sample under each of M models, ``[M, n]``; likewise."""
        return self.each_component(components, self.losses, self.is_large)(inputs, targets)

    def component_training_losses(
        self, components: Tree, inputs: Tensor, targets: Tensor, mask: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tree]:
        """Do the same in training mode, ``[M, n]``, and return the buffers; arguments as in ``training_losses``."""

        def one(component: Tree, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tree]:
            return self.training_losses(component, inputs, targets, mask, key)

        losses, buffers = self.each_component(components, one)(inputs, targets)
        return losses, {name: leaf[: len(components[name])] for name, leaf in buffers.items()}

    def each_component(
        self, components: Tree, function: Callable[..., Any], one_by_one: bool = False
    ) -> Callable[..., Any]:
        """Return ``function`` of a component and samples as one of the samples alone, its results stacked."""
        count = num_components(components)
        common = {name for name, leaf in components.items() if len(leaf) < count}
        if common and self.not_stackable is None:
            # Leaves without a dimension of their own: vmap does once what depends on nothing else.
            trees = {name: leaf[0] if name in common else leaf for name, leaf in components.items()}
            dims = {name: None if name in common else 0 for name in components}
            return lambda *samples: vmap(function, in_dims=(dims, *(None for _ in samples)))(trees, *samples)
        whole = {name: leaf.expand(count, *leaf.shape[1:]) for name, leaf in components.items()}
        return lambda *samples: self.over_components(function, (0, *(None for _ in samples)), one_by_one)(
            whole, *samples
        )

    @cached_property
    def is_large(self) -> bool:
        """Whether one pass of one model keeps a machine busy: convolutions and recurrences are faster unstacked."""
        return any(isinstance(part, _ConvNd | nn.RNNBase) for part in self.evaluation.modules())

    def over_components(
        self, function: Callable[..., Any], in_dims: tuple[int | None, ...], one_by_one: bool = False
    ) -> Callable[..., Any]:
        """Return a step of one component as one of M stacked ones, by vmap where the module allows it and it pays.

        ``in_dims`` says for each argument whether it is stacked (0) or common to all components (None).
        """

        def loop(*arguments: Any) -> Any:
            pairs = list(zip(arguments, in_dims, strict=True))
            components = range(len(tree_leaves(arguments[in_dims.index(0)])[0]))
            each = ([x if dim is None else pytree_map(itemgetter(m), x) for x, dim in pairs] for m in components)
            return pytree_map(lambda *leaves: torch.stack(leaves), *(function(*own) for own in each))

        def either(*arguments: Any) -> Any:
            on_cpu = tree_leaves(arguments[in_dims.index(0)])[0].device.type == "cpu"
            return (loop if on_cpu and self.is_large else vmap(function, in_dims=in_dims))(*arguments)

        return loop if one_by_one or self.not_stackable is not None else either

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
            said = f"The model puts out shape {list(outputs.shape)} for {len(inputs[:2])} samples"
            raise UserError(f"{said}; allowed: [n, outputs].")
        self.loss.check(outputs.shape[1], targets)


def _layer_of(leaf: str) -> str:
    """Return the name of the layer that holds a leaf."""
    return leaf.rpartition(".")[0]


def _is_called(leaf: str, word: str) -> bool:
    """Whether a word names a leaf, one of the layers that hold it, or a part of its name between dots."""
    parts = leaf.split(".")
    named = (".".join(parts[first:last]) for first, last in combinations(range(len(parts) + 1), 2))
    return any(fnmatchcase(name, word) for name in named)


def num_components(components: Tree) -> int:
    """Return M, of M stacked models: leaves that all have in common have one row."""
    return max(len(leaf) for leaf in components.values())


def component_of(components: Tree, index: int) -> Tree:
    """Return one of M stacked models."""
    return {name: leaf[index if len(leaf) > 1 else 0] for name, leaf in components.items()}


def leaves_of(module: nn.Module) -> Tree:
    """Return all parameters and buffers by their names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def rebuilder(source: nn.Module) -> Builder:
    """Return a function that copies ``source`` and initialises the copy afresh."""
    # What is frozen was given for its values.
    own = [name for name, part in source.named_modules() if any(leaf.requires_grad for leaf in part.parameters(False))]
    for name in own:
        part = source.get_submodule(name)
        if not callable(getattr(part, "reset_parameters", None)):
            said = f"Part {name or 'the module'!r} ({type(part).__name__}) has parameters but no reset_parameters()"
            so = "so components could not start differently; pass a function that builds the module instead"
            raise UserError(f"{said}, {so}.")

    afresh = methodcaller("reset_parameters")

    def rebuild() -> nn.Module:
        module = deepcopy(source)
        for name in own:
            afresh(module.get_submodule(name))
        return module

    return rebuild


def _measure(model: Model, inputs: Tensor) -> int:
    """Count the bytes that training holds for these inputs.

    All outputs of layers are kept; a layer within others puts out what they do once. Gradients are given back one after
    the other: there are two at a time, of what a layer put out and of what it got.
    """
    found: list[Tensor] = []  # held until the end: memory that is given back may be had by the next layer

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        found.extend(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

    hooks = [part.register_forward_hook(note) for part in model.evaluation.modules()]
    try:
        model.unfolded_outputs(tree_to(model.init(0), inputs.device), inputs)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = {leaf.data_ptr(): leaf.numel() * leaf.element_size() for leaf in found}.values()
    return sum(sizes) + 2 * max(sizes, default=0)


def _reason_not_to_stack(model: Model, inputs: Tensor) -> str | None:
    """Say why models can't be stacked; None when they can. Refuses what can't be trained or evaluated at all."""
    # In double precision where the module bears it: layers that normalise few samples amplify rounding.
    for judge in (Model(model.build, model.loss, torch.float64), model):
        try:
            trees = [tree_to(judge.init(seed), inputs.device) for seed in (0, 1)]
            alone = _pull(judge, trees[1], inputs)
            break
        except _NO_RULE as error:
            if judge is model:
                raise UserError(f"The model can't be trained: {error}") from error
    with torch.no_grad():
        evaluated = judge.outputs(trees[1], inputs)
        apart = torch.cat([judge.outputs(trees[1], row) for row in inputs.split(1)])
    if not _agree(evaluated, apart):
        said = "What the model predicts for a sample depends on the samples beside it, or on chance"
        raise UserError(f"{said}; allowed: modules that treat samples one by one in evaluation mode.")
    try:
        together = _pull_beside(judge, trees, inputs)
        with torch.no_grad():
            by_model = vmap(judge.outputs, in_dims=(0, None))(tree_stack(trees), inputs)[1]
            by_client = vmap(judge.outputs, in_dims=(None, 0))(trees[1], torch.stack([inputs.flip(0), inputs]))[1]
    except _NO_RULE as error:
        return shorten(str(error).splitlines()[0], 160)
    spoilt = [name for name in alone if name not in model.trainable and not _agree(together[name], alone[name])]
    if spoilt:
        return f"training changes {spoilt[0]!r}, which sees the padding of short batches"
    gradients = [{name: tree[name] for name in model.trainable} for tree in (together, alone)]
    if not all(_agree(*pair) for pair in ((by_model, evaluated), (by_client, evaluated), map(tree_flat, gradients))):
        return "its results change with the padding of short batches or with who is trained beside"
    return _reason_of_precision(model, inputs) if model.precision == "bfloat16" else None


def _reason_of_precision(model: Model, inputs: Tensor) -> str | None:
    """Say why models can't be stacked as they compute, their few bits forbidding comparisons; refuse as above."""
    trees = [tree_to(model.init(seed), inputs.device) for seed in (0, 1)]
    try:
        _pull(model, trees[1], inputs)
    except _NO_RULE as error:
        said = f"The model can't be trained in {model.precision}: {error}"
        raise UserError(f"{said}; allowed: run.precision tf32 or float32.") from error
    try:
        vmap(partial(_pull, model))(tree_stack(trees), torch.stack([inputs, inputs]))
        _pull_beside(model, trees, inputs)
    except _NO_RULE as error:
        return shorten(str(error).splitlines()[0], 160)
    return None


def _pull(model: Model, leaves: Tree, inputs: Tensor, mask: Tensor | None = None) -> Tree:
    """Return the gradient of something that depends on every output, and the buffers after a pass."""
    key = torch.tensor(0, device=inputs.device)

    def objective(trained: Tree) -> tuple[Tensor, Tree]:
        outputs, buffers = model.training_outputs(leaves | trained, inputs, mask, key)
        squares = outputs.square().flatten(1).sum(1)
        return (squares if mask is None else squares * mask).sum(), buffers

    gradient, buffers = grad(objective, has_aux=True)({name: leaves[name] for name in model.trainable})
    return gradient | buffers


def _pull_beside(model: Model, trees: list[Tree], inputs: Tensor) -> Tree:
    """Return the same of the second of two models that stand beside each other, with padding below the inputs."""
    # Other rows than there are, of numbers that occur.
    most, least = inputs.amax(0, keepdim=True), inputs.amin(0, keepdim=True)
    padded = torch.cat([inputs, most, least, most])
    mask = torch.arange(len(padded), device=inputs.device) < len(inputs)
    both = vmap(partial(_pull, model))(tree_stack(trees), torch.stack([padded, padded]), torch.stack([mask, mask]))
    return tree_index(both, 1)


def _agree(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same but for rounding; what isn't finite here may be so in both."""
    first, second = first.double().nan_to_num(), second.double().nan_to_num()
    return bool((first - second).norm() <= 1e-3 * second.norm() + 1e-6)
