"""Layers made one with the layer behind them: convolutions with normalisations, normalisations with activations."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from math import inf
from typing import NamedTuple

import torch
from torch import fx, nn

from fedem.core.tree import Tree
from fedem.models.normalisation import FixedBatchNorm, MaskedBatchNorm


class Fold(NamedTuple):
    """A convolution and the normalisation of what it puts out, by their names: in evaluation the two are one."""

    convolution: str
    normalisation: str
    eps: float
    affine: bool

    def apply(self, state: Tree) -> Tree:
        """Return the folded convolution's weight and bias."""
        weight, before = state[f"{self.convolution}.weight"], state.get(f"{self.convolution}.bias")
        mean, variance = (state[f"{self.normalisation}.running_{name}"] for name in ("mean", "var"))
        scale, shift = torch.rsqrt(variance + self.eps), torch.zeros_like(mean)
        if self.affine:
            scale, shift = scale * state[f"{self.normalisation}.weight"], state[f"{self.normalisation}.bias"]
        centre = mean if before is None else mean - before
        shape = (-1, *(1,) * (weight.ndim - 1))
        bias = shift - centre * scale
        return {f"{self.convolution}.weight": weight * scale.view(shape), f"{self.convolution}.bias": bias}


class _Tracer(fx.Tracer):
    """Follows what a network does with its layers, and not what a layer does."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(m.children())


def _pairs(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a layer and the one that alone sees its outputs, by their names; those that are called twice are left out.

    Nothing where what a network does depends on its inputs, and can't be followed.
    """
    try:
        nodes = list(_Tracer().trace(module).nodes)
    except Exception:  # a user's forward may raise anything on a stand-in for its inputs
        return
    calls = [node for node in nodes if node.op == "call_module"]
    once = {str(node.target) for node in calls if sum(other.target == node.target for other in calls) == 1}
    for node in calls:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
            continue
        name, before = str(node.target), str(source.target)
        if {name, before} <= once:
            yield before, name


def find_folds(module: nn.Module) -> list[Fold]:
    """Return the convolutions and normalisations that can be folded."""
    found = []
    for before, name in _pairs(module):
        convolution, layer = module.get_submodule(before), module.get_submodule(name)
        if isinstance(layer, MaskedBatchNorm) and isinstance(convolution, nn.Conv2d):
            found.append(Fold(before, name, layer.eps, layer.affine))
    return found


def join_activations(module: nn.Module) -> nn.Module:
    """Let normalisations by fixed statistics do what the rectifiers behind them did; changes ``module`` in place.

    So a number is read and written once, forwards and backwards, where it was twice and more.
    """
    for before, name in list(_pairs(module)):
        layer, activation = module.get_submodule(before), module.get_submodule(name)
        if isinstance(layer, FixedBatchNorm) and isinstance(activation, nn.ReLU | nn.ReLU6):
            layer.bounds = (0.0, 6.0 if isinstance(activation, nn.ReLU6) else inf)
            module.set_submodule(name, nn.Identity())
    return module


def without(module: nn.Module, folds: list[Fold]) -> nn.Module:
    """Return ``module`` without the normalisations that are folded, as a copy if there are some."""
    module = deepcopy(module) if folds else module
    for fold in folds:
        convolution = module.get_submodule(fold.convolution)
        assert isinstance(convolution, nn.Conv2d), "find_folds() has seen to it"
        convolution.bias = nn.Parameter(convolution.weight.new_zeros(convolution.out_channels))
        layer = module.get_submodule(fold.normalisation)
        if isinstance(layer, FixedBatchNorm) and layer.is_bounded:
            module.set_submodule(fold.normalisation, nn.Hardtanh(*layer.bounds))
        else:
            module.set_submodule(fold.normalisation, nn.Identity())
    return module


def folded(state: Tree, folds: list[Fold]) -> Tree:
    """Return the leaves of :func:`without`."""
    gone = tuple(f"{fold.normalisation}." for fold in folds)
    kept = {name: leaf for name, leaf in state.items() if not name.startswith(gone)}
    for fold in folds:
        kept |= fold.apply(state)
    return kept
