"""Layers in forms that stack: same parameters, same values, for whatever number of models at once.

torch's own layers don't: dropout draws from a generator whose state depends on who is trained together, batch
normalisation sees the rows that pad a short batch, a linear layer copies its inputs for every model. A module is put
into these forms by :func:`make_stackable`; what they must know of the batch besides its inputs is a :class:`Pass`.

An LSTM has no vmap rule, so its recurrence is written here for many models at once. The products with the inputs are
plain torch. The rest of a layer, :class:`_Recurrence`, is a loop over time with few operations a step, each over all
models; its vmap rule folds the mapped dimension into one that is already there.

Shapes: n samples of a batch, padding included, C channels, H x W pixels; of an LSTM S stacked models or directions,
T times, d inputs, h hidden units. Its 4h gates stand in the order output, input, forget, candidate: the three sigmoids
are adjacent, and so are the three gates that the cell depends on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn.functional import batch_norm, pad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from fedem.core.errors import UserError
from fedem.core.random import derive

_LEVELS = 1 << 16  # a rate is rounded to 16 bits, so that one word serves four draws

Window = int | tuple[int, int]
Geometry = tuple[Window, Window, Window, Window, bool]  # kernel, stride, padding, dilation, and if windows may overhang
_State = tuple[Tensor, Tensor]


def call(function: Any, *arguments: Any) -> Any:
    """Call an autograd function, whose ``apply`` torch leaves untyped."""
    return function.apply(*arguments)


class StackableMaxPool2d(nn.MaxPool2d):
    """``nn.MaxPool2d`` with stacked models beside the channels, where a convolution's outputs have them.

    torch's rule for vmap lays them beside the samples, which copies the largest tensors of a network, both ways.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C, H', W']``, or without n."""
        stride = self.kernel_size if self.stride is None else self.stride
        geometry = (self.kernel_size, stride, self.padding, self.dilation, self.ceil_mode)
        return max_pool(inputs, geometry) if inputs.ndim == 4 else max_pool(inputs[None], geometry)[0]


def max_pool(inputs: Tensor, geometry: Geometry) -> Tensor:
    """Return the largest number of each window, ``[n, C, H, W] -> [n, C, H', W']``."""
    return call(_MaxPool, inputs, geometry)[0]


def _beside_channels(leaf: Tensor, dim: int | None, size: int) -> Tensor:
    """Fold a stacked dimension into the channels, ``[n, C, ...] -> [n, size * C, ...]``."""
    stacked = leaf.unsqueeze(1).expand(-1, size, *leaf.shape[1:]) if dim is None else leaf.movedim(dim, 1)
    return stacked.flatten(1, 2)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(inputs: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.max_pool2d_with_indices(inputs, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Geometry], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.geometry = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return call(_MaxPoolGradient, gradient, *ctx.saved_tensors, ctx.geometry), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], inputs: Tensor, geometry: Geometry) -> tuple[Any, tuple[int, int]]:
        pooled = call(_MaxPool, _beside_channels(inputs, dims[0], info.batch_size), geometry)
        return tuple(leaf.unflatten(1, (info.batch_size, -1)) for leaf in pooled), (1, 1)


class _MaxPoolGradient(torch.autograd.Function):
    """Its backward pass, with a rule of its own for the same reason."""

    @staticmethod
    def forward(gradient: Tensor, inputs: Tensor, indices: Tensor, geometry: Geometry) -> Tensor:
        kernel, stride, padding, dilation, _ = geometry
        gradient = gradient.contiguous()
        if kernel == stride and padding == 0 and dilation == 1:
            # Windows that don't overlap: every number goes to one place, and putting it there is much faster.
            return torch.ops.aten.max_unpool2d(gradient, indices, inputs.shape[-2:])
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, inputs, *geometry, indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Geometry], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """It puts numbers where the maxima were, so backwards they are picked up there."""
        (indices,) = ctx.saved_tensors
        return gradient.flatten(-2).gather(-1, indices.flatten(-2)).reshape(indices.shape), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        *leaves, geometry = arguments
        folded = [_beside_channels(leaf, dim, info.batch_size) for leaf, dim in zip(leaves, dims[:-1], strict=True)]
        return call(_MaxPoolGradient, *folded, geometry).unflatten(1, (info.batch_size, -1)), 1


@dataclass
class Pass:
    """What the layers must know of one training pass over a batch."""

    mask: Tensor | None  # [n] bool, false where a row is padding; None where no row is
    key: Tensor  # int64, the source of the pass's random numbers
    draws: int = 0  # layers that have drawn so far; each has a stream of its own


_CURRENT: ContextVar[Pass] = ContextVar("pass")


@contextmanager
def training_pass(mask: Tensor | None, key: Tensor) -> Iterator[None]:
    """Tell the layers what batch they are about to see."""
    token = _CURRENT.set(Pass(mask, key))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def keyed_dropout(inputs: Tensor, rate: float, whole_channels: bool = False) -> Tensor:
    """Zero each number, or each channel, with probability ``rate``, and scale the others to keep the mean."""
    # What is zeroed depends on the pass's key and on the place: the row, and the position within it. So neither the
    # padding below a batch nor the clients beside it change anything.
    if rate == 1:
        return torch.zeros_like(inputs)
    shape = inputs.shape[:2] if whole_channels else inputs.shape
    places = shape[1:].numel()
    current = _CURRENT.get()
    current.draws += 1
    rows = derive(current.key, current.draws, torch.arange(shape[0], device=inputs.device))
    words = derive(rows[:, None], torch.arange(-(-places // 4), device=inputs.device))
    # Each quarter of a word in turn to its top, where a signed comparison sees that quarter first.
    quarters = words[..., None] << torch.arange(0, 64, 16, device=inputs.device)
    kept = (quarters >= (round(rate * _LEVELS) - _LEVELS // 2) << 48).flatten(1)[:, :places]
    kept = kept.reshape(*shape, *(1,) * (inputs.ndim - len(shape)))
    return inputs * (kept * torch.tensor(1 / (1 - rate), dtype=inputs.dtype))


class KeyedDropout(nn.Dropout):
    """``nn.Dropout`` by keys."""

    whole_channels = False

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, ...]``, unchanged in evaluation mode."""
        return keyed_dropout(inputs, self.p, self.whole_channels) if self.training and self.p else inputs


class KeyedChannelDropout(KeyedDropout):
    """``nn.Dropout1d``, ``2d`` and ``3d`` by keys, ``[n, C, ...]``."""

    whole_channels = True


class MaskedBatchNorm(_BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` and ``3d`` over the rows of a batch that are not padding.

    It computes in the type of its statistics, whatever torch.autocast made of the inputs, and puts out theirs: stacked
    ones of two types have no rule, and sums of squares in few bits would be no statistics.
    """

    # They are there (:func:`make_stackable`).
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, ...]``."""
        return self._normalised(inputs.to(self.running_mean.dtype)).to(inputs.dtype)

    def _normalised(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return self._by(inputs, own=False)
        mask = _CURRENT.get().mask
        if mask is None and self.momentum is not None and len(inputs) * inputs.shape[2:].numel() > 1:
            self.num_batches_tracked.add_(1)
            return self._by(inputs, own=True)
        return self._masked(inputs, torch.ones(len(inputs), device=inputs.device) if mask is None else mask)

    def _by(self, inputs: Tensor, own: bool) -> Tensor:
        """Normalise by the batch's own statistics, all rows counting, or by the running ones."""
        kept = self.running_mean, self.running_var
        return batch_norm(inputs, *kept, self.weight, self.bias, own, self.momentum or 0.0, self.eps)

    def _masked(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Normalise by the statistics of the rows in ``mask`` ``[n]``."""
        running_mean, running_variance, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        channels, rows = (1, -1, *(1,) * (inputs.ndim - 2)), (-1, *(1,) * (inputs.ndim - 1))
        dims = [0, *range(2, inputs.ndim)]
        weights = mask.to(inputs.dtype).view(rows)
        count = weights.sum() * inputs.shape[2:].numel()
        # A channel with a single number is normalised by the running statistics, which then stay as they are.
        lonely = count <= 1
        mean = torch.where(lonely, running_mean, (weights * inputs).sum(dims) / count)
        centred = inputs - mean.view(channels)
        spread = (weights * centred.square()).sum(dims)
        variance = torch.where(lonely, running_variance, spread / count)
        tracked.add_((~lonely).long())
        pace = 1 / tracked.clamp(min=1).to(count.dtype) if self.momentum is None else count.new_full((), self.momentum)
        pace = torch.where(lonely, 0.0, pace)
        # As torch has it: the running variance is the unbiased one.
        unbiased = torch.where(lonely, running_variance, spread.detach() / (count - 1).clamp(min=1))
        running_mean.add_(pace * (mean.detach() - running_mean))
        running_variance.add_(pace * (unbiased - running_variance))
        outputs = centred * torch.rsqrt(variance + self.eps).view(channels)
        return outputs if self.weight is None else outputs * self.weight.view(channels) + self.bias.view(channels)


class FoldedLinear(nn.Linear):
    """``nn.Linear`` whose weight stands on the left, and whose gradient that comes back is laid out afresh.

    Under vmap over components torch folds them into the rows of one matrix product only when the stacked factor is the
    left one and contiguous; else it copies the inputs, far larger than that gradient, once for each component.
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


class WidenedConv2d(nn.Conv2d):
    """``nn.Conv2d`` of one input channel, in training with a second one: ones, which carry the bias.

    Stacked, a convolution of one channel is a depthwise one to torch, whose kernels for that are several times slower;
    and the bias would be added apart.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, 1, H, W] -> [n, O, H', W']``."""
        if not self.training or self.bias is None:
            return super().forward(inputs)
        assert not isinstance(self.padding, str), "_is_widened() has seen to it"
        above, left = self.padding
        # A place in a window that lies in the image wherever the window is.
        below, right = self.kernel_size[0] - 1 - above, self.kernel_size[1] - 1 - left
        carried = pad(self.bias[:, None, None, None], (left, right, above, below))
        weight = torch.cat([self.weight, carried], dim=1)
        return self._conv_forward(pad(inputs, (0, 0, 0, 0, 0, 1), value=1.0), weight, None)


def _is_widened(layer: nn.Conv2d) -> bool:
    """Say whether a convolution has one input channel and no peculiarities."""
    plain = layer.in_channels == 1 and layer.padding_mode == "zeros" and layer.dilation == (1, 1)
    if not plain or isinstance(layer.padding, str):
        return False
    # The place that carries the bias must lie in the image for the last window as well as for the first.
    return all(2 * side < size for side, size in zip(layer.padding, layer.kernel_size, strict=True))


class StackableLSTM(nn.LSTM):
    """``nn.LSTM`` in a form that stacks: same parameters, same values."""

    def forward(  # type: ignore[override]  # torch's is overloaded for packed sequences
        self, input: Tensor | PackedSequence, hx: _State | None = None
    ) -> tuple[Tensor, _State]:
        """``[T, n, d] -> [T, n, directions * h]`` and the last state, in all of ``nn.LSTM``'s layouts."""
        if isinstance(input, PackedSequence):
            raise UserError("A stackable LSTM received a PackedSequence; allowed: sequences padded to one tensor.")
        outputs, hidden, cell = self._time_first(input, hx)
        last = []
        starts = (part.split(1 + self.bidirectional) for part in (hidden, cell))
        for layer, start in enumerate(zip(*starts, strict=True)):
            if layer and self.dropout and self.training:
                # By rows, which are samples.
                outputs = keyed_dropout(outputs.transpose(0, 1), self.dropout).transpose(0, 1)
            outputs, end = self._layer(layer, outputs, start)
            last.append(end)
        hidden, cell = (torch.cat(parts) for parts in zip(*last, strict=True))
        if input.ndim == 2:
            return outputs[:, 0], (hidden[:, 0], cell[:, 0])
        return outputs.transpose(0, 1) if self.batch_first else outputs, (hidden, cell)

    def _time_first(self, inputs: Tensor, state: _State | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs ``[T, n, d]`` and the start ``[layers * directions, n, h]``; refuse what does not fit."""
        if self.proj_size:
            raise UserError(f"A stackable LSTM has proj_size={self.proj_size}; allowed: 0.")
        time = 1 if self.batch_first and inputs.ndim == 3 else 0
        if inputs.ndim not in (2, 3) or inputs.shape[-1] != self.input_size or not inputs.shape[time]:
            layout = f"[n, T, {self.input_size}]" if self.batch_first else f"[T, n, {self.input_size}]"
            expected = f"{layout} or [T, {self.input_size}] with T > 0"
            raise UserError(f"An LSTM received inputs of shape {list(inputs.shape)}; allowed: {expected}.")
        single = inputs.ndim == 2
        inputs = inputs.unsqueeze(1) if single else inputs.movedim(time, 0)
        samples = () if single else (inputs.shape[1],)
        allowed = (self.num_layers * (1 + self.bidirectional), *samples, self.hidden_size)
        state = state or (torch.zeros(allowed, dtype=inputs.dtype, device=inputs.device),) * 2
        for part in state:
            if part.shape != allowed:
                raise UserError(f"An LSTM received a state of shape {list(part.shape)}; allowed: {list(allowed)}.")
        hidden, cell = (part.unsqueeze(1) if single else part for part in state)
        return inputs, hidden, cell

    def _layer(self, layer: int, inputs: Tensor, start: _State) -> tuple[Tensor, _State]:
        """Run a layer, ``[T, n, d] -> [T, n, directions * h]``; two directions are two models, one reads back."""
        weight, recurrent = (self._stack(f"weight_{kind}_l{layer}") for kind in ("ih", "hh"))
        if self.bias:
            bias = self._stack(f"bias_ih_l{layer}") + self._stack(f"bias_hh_l{layer}")
        else:
            bias = torch.zeros(weight.shape[:2], dtype=weight.dtype, device=weight.device)
        sequences = torch.stack([inputs, inputs.flip(0)]) if self.bidirectional else inputs.unsqueeze(0)
        gates = (sequences.flatten(1, 2) @ weight.mT).unflatten(1, inputs.shape[:2])
        # In the parameters' type, whatever torch.autocast or the layer below made of the inputs: what adds up over many
        # times in few bits drifts.
        moving = (part.to(recurrent.dtype) for part in (gates, *start))
        hidden, cell, _, _ = call(_Recurrence, bias, recurrent, *moving)
        outputs = torch.cat([hidden[0], hidden[1].flip(0)], dim=-1) if self.bidirectional else hidden[0]
        return outputs, (hidden[:, -1], cell)

    def _stack(self, name: str) -> Tensor:
        """Stack a parameter's directions, ``[directions, 4h, ...]``, with torch's order of gates brought into ours."""
        names = (name, f"{name}_reverse") if self.bidirectional else (name,)
        return torch.stack([getattr(self, name) for name in names]).roll(self.hidden_size, dims=1)


class _Recurrence(torch.autograd.Function):
    """The loop over time of one layer.

    Takes the bias ``[S, 4h]``, the recurrent weight ``[S, 4h, h]``, the inputs' share in the gates ``[S, T, n, 4h]``,
    and the first hidden state and cell ``[S, n, h]``. Returns all hidden states ``[S, T, n, h]`` and the last cell; and
    for the gradient alone the activated gates and all cells ``[S, T + 1, n, h]``.
    """

    @staticmethod
    def forward(*tensors: Tensor) -> Any:
        return torch.ops.fedem.lstm(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, weight, _, start, _ = inputs
        hidden, _, gates, cells = output
        # Without zeros for what has no gradient: gates and cells never have one.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, start, hidden, gates, cells)

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor | None, grad_cell: Tensor | None, *_: None) -> tuple[Tensor, ...]:
        weight, start, hidden, gates, cells = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if grad_hidden is None else grad_hidden
        grad_cell = torch.zeros_like(start) if grad_cell is None else grad_cell
        grad_gates, *starts = call(_RecurrenceGradient, weight, hidden, gates, cells, grad_hidden, grad_cell)
        before = torch.cat([start.unsqueeze(1), hidden[:, :-1]], dim=1)
        grad_weight = grad_gates.flatten(1, 2).mT @ before.flatten(1, 2)
        return grad_gates.sum((1, 2)), grad_weight, grad_gates, *starts

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
        return _fold(_Recurrence, 2, info.batch_size, in_dims, *tensors)


class _RecurrenceGradient(torch.autograd.Function):
    """The same loop backwards.

    Takes the recurrent weight, what the loop returned but the last cell, and the gradients of all hidden states and of
    the last cell. Returns those of the gates before their activation, of the first hidden state and of the first cell.
    """

    @staticmethod
    def forward(*tensors: Tensor) -> Any:
        return torch.ops.fedem.lstm_gradient(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise UserError("The gradient of an LSTM was differentiated again; allowed: methods of first derivatives.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
        return _fold(_RecurrenceGradient, 1, info.batch_size, in_dims, *tensors)


def _fold(function: Any, num_parameters: int, size: int, in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
    """Call ``function`` once for all of a mapped dimension: as more models, or as more samples of the same models.

    The first ``num_parameters`` tensors are parameters ``[S, ...]``; the others and the outputs are ``[S, ..., n, _]``.
    """
    pairs = zip(tensors, in_dims, strict=True)
    mapped = [leaf.expand(size, *leaf.shape) if dim is None else leaf.movedim(dim, 0) for leaf, dim in pairs]
    if any(dim is not None for dim in in_dims[:num_parameters]):
        outputs = function.apply(*(leaf.flatten(0, 1) for leaf in mapped))
        return tuple(output.unflatten(0, (size, len(output) // size)) for output in outputs), (0,) * len(outputs)
    # The parameters, perhaps larger than all else, are not copied then.
    samples = (leaf.movedim(0, -3).flatten(-3, -2) for leaf in mapped[num_parameters:])
    outputs = function.apply(*tensors[:num_parameters], *samples)
    outputs = tuple(output.unflatten(-2, (size, output.shape[-2] // size)) for output in outputs)
    return outputs, tuple(output.ndim - 3 for output in outputs)


def _recur(
    bias: Tensor, weight: Tensor, gates: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run forwards, seven operations a step, in place within what is returned."""
    num_models, num_times, num_samples, size = *gates.shape[:3], hidden.shape[-1]
    gates = torch.add(gates, bias[:, None, None], out=gates.new_empty(gates.shape))
    all_hidden = gates.new_empty(num_models, num_times, num_samples, size)
    cells = gates.new_empty(num_models, num_times + 1, num_samples, size)
    cells[:, 0] = cell
    weight = weight.mT.contiguous()  # once, where the product would do it at each step
    parts = (gates, gates[..., : 3 * size], *gates.chunk(4, dim=-1), all_hidden, cells[:, :-1], cells[:, 1:])
    # All views beforehand: to slice costs as much as to launch.
    steps = zip(*(part.unbind(1) for part in parts), strict=True)
    for gate, sigmoids, output, write, keep, candidate, next_hidden, cell, next_cell in steps:
        gate.baddbmm_(hidden, weight)
        sigmoids.sigmoid_()
        candidate.tanh_()
        torch.mul(keep, cell, out=next_cell).addcmul_(write, candidate)
        torch.tanh(next_cell, out=next_hidden).mul_(output)
        hidden = next_hidden
    return all_hidden, cells[:, -1].clone(), gates, cells


def _recur_back(
    weight: Tensor, hidden: Tensor, gates: Tensor, cells: Tensor, grad_hidden: Tensor, grad_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run backwards, five operations a step; the slopes of all activations are found beforehand, at once."""
    size = hidden.shape[-1]
    output, write, keep, candidate = gates.chunk(4, dim=-1)
    tanh = cells[:, 1:].tanh()
    # Each gate's slope, s - s^2 of a sigmoid and 1 - t^2 of a tanh, times what the gate was multiplied by.
    grads = gates.new_empty(gates.shape)
    sigmoids = gates[..., : 3 * size]
    torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1, out=grads[..., : 3 * size])
    by_output, by_write, by_keep, by_candidate = grads.chunk(4, dim=-1)
    by_output.mul_(tanh)
    by_write.mul_(candidate)
    by_keep.mul_(cells[:, :-1])
    torch.mul(candidate, candidate, out=by_candidate)
    torch.addcmul(write, write, by_candidate, value=-1, out=by_candidate)
    # A hidden state is output * tanh; this is its slope towards the cell.
    slope = torch.addcmul(output, hidden, tanh, value=-1, out=tanh)
    # Copies, which the loop changes.
    grad_hidden, grad_cell = (grad.clone(memory_format=torch.contiguous_format) for grad in (grad_hidden, grad_cell))
    through_cell = grads.unflatten(-1, (4, size))[..., 1:, :]
    parts = (grad_hidden, slope, keep, grads, by_output, through_cell)
    steps = zip(*(reversed(part.unbind(1)) for part in parts), strict=True)
    later = None
    for grad, slope, keep, gate, by_output, through_cell in steps:
        if later is not None:
            grad.baddbmm_(later, weight)
        grad_cell.addcmul_(grad, slope)
        by_output.mul_(grad)
        through_cell.mul_(grad_cell.unsqueeze(-2))
        grad_cell.mul_(keep)
        later = gate
    return grads, grads[:, 0] @ weight, grad_cell


# As operations of torch's own kind: a recording then holds one entry for a whole loop.
_LIBRARY = library.Library("fedem", "DEF")
_LIBRARY.define("lstm" + library.infer_schema(_recur, mutates_args=()))
_LIBRARY.define("lstm_gradient" + library.infer_schema(_recur_back, mutates_args=()))
_LIBRARY.impl("lstm", _recur, "CompositeExplicitAutograd")
_LIBRARY.impl("lstm_gradient", _recur_back, "CompositeExplicitAutograd")


_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FoldedLinear,
    nn.Dropout: KeyedDropout,
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), KeyedChannelDropout),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), MaskedBatchNorm),
    nn.Conv2d: WidenedConv2d,
    nn.MaxPool2d: StackableMaxPool2d,
    nn.LSTM: StackableLSTM,
}
_ONLY_IF: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.Conv2d: _is_widened,
    nn.MaxPool2d: lambda layer: not layer.return_indices,
    nn.LSTM: lambda layer: not layer.proj_size,  # which projects its hidden state
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
        kind = type(part)
        if kind in _FORMS and _ONLY_IF.get(kind, lambda _: True)(part):
            part.__class__ = _FORMS[kind]
    return module
