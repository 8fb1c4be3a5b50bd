"""Any module in a form that stacks: each of its layers as one of ours, with the same parameters and values."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedem.core.errors import UserError
from fedem.models.convolutions import StackableConv2d, WidenedConv2d, is_plain, is_widened
from fedem.models.layers import FoldedLinear, KeyedChannelDropout, KeyedDropout
from fedem.models.normalisation import MaskedBatchNorm
from fedem.models.pooling import StackableMaxPool2d, StackableMean2d
from fedem.models.recurrence import StackableLSTM

_Fits = Callable[[Any], bool]


def _always(layer: nn.Module) -> bool:
    return True


# Of each kind of layer its forms, of which the first that fits is taken; a layer that none fits stays as it is.
_FORMS: dict[type[nn.Module], tuple[tuple[type[nn.Module], _Fits], ...]] = {
    nn.Linear: ((FoldedLinear, _always),),
    nn.Dropout: ((KeyedDropout, _always),),
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), ((KeyedChannelDropout, _always),)),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), ((MaskedBatchNorm, _always),)),
    nn.Conv2d: ((WidenedConv2d, is_widened), (StackableConv2d, is_plain)),
    nn.MaxPool2d: ((StackableMaxPool2d, lambda layer: not layer.return_indices),),
    nn.AdaptiveAvgPool2d: ((StackableMean2d, lambda layer: layer.output_size in (1, (1, 1))),),
    nn.LSTM: ((StackableLSTM, lambda layer: not layer.proj_size),),  # which projects its hidden state
}


def make_stackable(module: nn.Module) -> nn.Module:
    """Put the layers of ``module``, in place, into forms that stack; subclasses of a user's own are left alone."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and not part.track_running_stats:
            said = f"Part {name!r} ({type(part).__name__}) keeps no running statistics"
            so = "so what it predicts for a sample would depend on the samples beside it"
            raise UserError(f"{said}, {so}; allowed: track_running_stats=True.")
        if any(is_lazy(leaf) for leaf in part.parameters(recurse=False)):
            said = f"Part {name!r} ({type(part).__name__}) has no shape before its first input"
            raise UserError(f"{said}; allowed: layers of given sizes.")
        for form, fits in _FORMS.get(type(part), ()):
            if fits(part):
                part.__class__ = form
                break
    return module
