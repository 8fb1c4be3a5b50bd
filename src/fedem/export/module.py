"""A personal model as a plain ``nn.Module``: what goes into files that are used without fedem.

Shapes: M components, n samples, K classes (or target dimensions).
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from fedem.mixture import mix
from fedem.models.base import Model
from fedem.models.convolutional import PooledConv2d
from fedem.result import PersonalModel
from fedem.tree import Tree, tree_index


class PersonalModule(nn.Module):
    """Inputs as in training -> what :meth:`PersonalModel.predict` returns, to rounding.

    Whatever the predictor does is inside: bytes become numbers from 0 to 1, images are standardised where the model
    does so, probabilities (or means) are mixed, and means are brought to the targets' own units. How a table's columns
    become inputs is not. The components are the model's own layers, before they are put into forms that stack.
    """

    log_weights: Tensor

    def __init__(self, personal: PersonalModel):
        super().__init__()
        components, log_weights = personal.mixture
        self.components = nn.ModuleList(
            _component(personal.model, tree_index(components, m)) for m in range(len(log_weights))
        )
        self.register_buffer("log_weights", log_weights.detach().cpu().clone())
        self._model = personal.model
        encoding = personal.shapes.encoding
        self._decode = None if encoding is None else encoding.decode
        self.eval().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, ...] -> [n, K]``."""
        prepared = self._model.prepare(inputs)
        outputs = torch.stack([component(prepared) for component in self.components])
        predictions = mix(self._model.loss.probabilities(outputs), self.log_weights)
        return predictions if self._decode is None else self._decode(predictions)


class _PlainPooledConv2d(PooledConv2d):
    """``PooledConv2d`` of torch's own operations alone: a file can't hold a function of Python's."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, O, h // 2, w // 2]``."""
        pooled = max_pool2d(self._conv_forward(inputs, self.weight, None), 2)
        return pooled if self.bias is None else pooled + self.bias[:, None, None]


def _component(model: Model, parameters: Tree) -> nn.Module:
    """Build one component's module and give it its parameters and buffers."""
    with torch.random.fork_rng(devices=[]):
        # A copy: the function may hand out a module that somebody else uses.
        module = deepcopy(model.build()).to(model.dtype)
    leaves = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(parameters[name])
    for part in module.modules():
        if type(part) is PooledConv2d:
            part.__class__ = _PlainPooledConv2d
    return module
