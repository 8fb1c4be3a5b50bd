"""An LSTM that stacks: ``nn.LSTM`` has no vmap rule, so its recurrence is written here for many models at once.

The products with the inputs are plain torch. What is left of a layer, :class:`_Recurrence`, is a loop over time with few
operations a step, each over all models: its rule under vmap folds the mapped dimension into one that it already has.

Shapes: S stacked models or directions, T times, n samples, d inputs, h hidden units. The 4h gates stand in the order
output, input, forget, candidate: what goes through the same function, or has a gradient by the same way, is adjacent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fedem.errors import UserError

_State = tuple[Tensor, Tensor]


def stackable(module: nn.LSTM) -> bool:
    """Whether ``module`` can become a :class:`StackableLSTM`: all can but those that project their hidden state."""
    return module.proj_size == 0


class StackableLSTM(nn.LSTM):
    """``nn.LSTM`` in a form that stacks: same parameters, same values."""

    def forward(self, input: Tensor | PackedSequence, hx: _State | None = None) -> tuple[Tensor, _State]:  # type: ignore[override]
        """``[T, n, d] -> [T, n, h]`` and the last state, in all the layouts of ``nn.LSTM``."""
        inputs, state = self._time_first(input, hx)
        last: list[_State] = []
        for layer, start in enumerate(zip(*(part.split(self._directions) for part in state), strict=True)):
            if layer and self.dropout and self.training:
                inputs = _dropout(inputs, self.dropout)
            inputs, end = self._layer(layer, inputs, start)
            last.append(end)
        hidden, cell = (torch.cat(parts) for parts in zip(*last, strict=True))
        if input.ndim == 2:
            return inputs[:, 0], (hidden[:, 0], cell[:, 0])
        return inputs.transpose(0, 1) if self.batch_first else inputs, (hidden, cell)

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _time_first(self, inputs: Tensor | PackedSequence, state: _State | None) -> tuple[Tensor, _State]:
        """Return ``[T, n, d]`` and the start ``[layers, n, h]``; refuse what does not fit."""
        if self.proj_size:
            raise UserError(f"An LSTM with proj_size={self.proj_size} can't be stacked; allowed: 0.")
        if isinstance(inputs, PackedSequence):
            raise UserError("An LSTM that is stacked takes padded sequences as a tensor; a PackedSequence was received.")
        layout = ["samples", "times"] if self.batch_first and inputs.ndim == 3 else ["times", "samples"][: inputs.ndim - 1]
        if inputs.ndim == 2:
            inputs, state = inputs[:, None], state and (state[0][:, None], state[1][:, None])
        elif self.batch_first:
            inputs = inputs.transpose(0, 1)
        shape = (self.num_layers * self._directions, inputs.shape[1], self.hidden_size)
        if state is None:
            zeros = torch.zeros(shape, dtype=inputs.dtype, device=inputs.device)
            return inputs, (zeros, zeros)
        for part in state:
            if part.shape != shape:
                raise ValueError(f"An LSTM received a state of shape {list(part.shape)}; allowed: {list(shape)}.")
        return inputs, state

    def _layer(self, layer: int, inputs: Tensor, start: _State) -> tuple[Tensor, _State]:
        """Run one layer, ``[T, n, d] -> [T, n, directions * h]``, both directions as if they were two models."""
        weight, recurrent = (self._parameters_of(f"weight_{kind}_l{layer}") for kind in ("ih", "hh"))
        if self.bias:
            bias = self._parameters_of(f"bias_ih_l{layer}") + self._parameters_of(f"bias_hh_l{layer}")
        else:
            bias = torch.zeros(weight.shape[:2], dtype=weight.dtype, device=weight.device)
        sequences = torch.stack([inputs, inputs.flip(0)]) if self.bidirectional else inputs[None]
        gates = (sequences.flatten(1, 2) @ weight.mT).unflatten(1, inputs.shape[:2])
        hidden, cell, _, _ = _Recurrence.apply(bias, recurrent, gates, *start)
        outputs = torch.cat([hidden[0], hidden[1].flip(0)], dim=-1) if self.bidirectional else hidden[0]
        return outputs, (hidden[:, -1], cell)

    def _parameters_of(self, name: str) -> Tensor:
        """Stack the directions, ``[directions, 4h, ...]``, and bring torch's order of gates, i f g o, into ours."""
        names = (name, f"{name}_reverse")[: self._directions]
        return torch.stack([getattr(self, name) for name in names]).roll(self.hidden_size, dims=1)


def _dropout(inputs: Tensor, rate: float) -> Tensor:
    # Late: that file imports this one.
    from fedem.models.layers import keyed_dropout

    return keyed_dropout(inputs.transpose(0, 1), rate).transpose(0, 1)  # it wants the samples first


class _Recurrence(torch.autograd.Function):
    """``(bias [S, 4h], weight [S, 4h, h], gates [S, T, n, 4h], hidden [S, n, h], cell [S, n, h])``, gates still to come.

    Returns all hidden states ``[S, T, n, h]`` and the last cell ``[S, n, h]``; then, for the gradient alone, the gates
    and the cells.
    """

    @staticmethod
    def forward(*tensors: Tensor) -> Any:
        return torch.ops.fedem.lstm(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, weight, _, start, _ = inputs
        hidden, _, gates, cells = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, start, hidden, gates, cells)

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor | None, grad_cell: Tensor | None, *_: None) -> tuple[Tensor, ...]:
        weight, start, hidden, gates, cells = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if grad_hidden is None else grad_hidden
        grad_cell = torch.zeros_like(start) if grad_cell is None else grad_cell
        grad_gates, grad_start, grad_cell = _RecurrenceGradient.apply(
            weight, hidden, gates, cells, grad_hidden, grad_cell
        )
        before = torch.cat([start.unsqueeze(1), hidden[:, :-1]], dim=1)
        grad_weight = grad_gates.flatten(1, 2).mT @ before.flatten(1, 2)
        return grad_gates.sum((1, 2)), grad_weight, grad_gates, grad_start, grad_cell

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Any, Any]:
        return _fold(_Recurrence, 2, info.batch_size, in_dims, tensors)


class _RecurrenceGradient(torch.autograd.Function):
    """``(weight, hidden, gates, cells, gradient of all hidden states, gradient of the last cell)``, as above.

    Returns the gradients of the gates before their activation, of the first hidden state and of the first cell.
    """

    @staticmethod
    def forward(*tensors: Tensor) -> Any:
        return torch.ops.fedem.lstm_gradient(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise UserError("An LSTM's gradient can't be differentiated again; choose a method without second derivatives.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Any, Any]:
        return _fold(_RecurrenceGradient, 1, info.batch_size, in_dims, tensors)


def _fold(
    function: type[torch.autograd.Function],
    num_parameters: int,
    size: int,
    in_dims: tuple[int | None, ...],
    tensors: tuple[Tensor, ...],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Call ``function`` once for ``size`` models: as so many more models, or, when they are equal, as more samples.

    The first ``num_parameters`` tensors are parameters ``[S, ...]``; the others are ``[S, ..., n, h or 4h]``.
    """
    same = all(dim is None for dim in in_dims[:num_parameters])
    folded = []
    for position, (tensor, dim) in enumerate(zip(tensors, in_dims, strict=True)):
        if same and position < num_parameters:
            folded.append(tensor)
            continue
        front = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(front.movedim(0, -3).flatten(-3, -2) if same else front.flatten(0, 1))
    outputs = function.apply(*folded)
    if same:
        outputs = tuple(output.unflatten(-2, (size, output.shape[-2] // size)) for output in outputs)
        return outputs, tuple(output.ndim - 3 for output in outputs)
    return tuple(output.unflatten(0, (size, len(output) // size)) for output in outputs), (0,) * len(outputs)


def _recur(
    bias: Tensor, weight: Tensor, gates: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run forwards in seven operations a step, in place within what is returned."""
    num_models, num_times, num_samples, _ = gates.shape
    size = hidden.shape[-1]
    gates = torch.add(gates, bias[:, None, None], out=gates.new_empty(gates.shape))
    all_hidden = gates.new_empty(num_models, num_times, num_samples, size)
    cells = gates.new_empty(num_models, num_times + 1, num_samples, size)
    cells[:, 0] = cell
    weight = weight.mT.contiguous()  # once, where the product would do it at each step
    parts = (gates, gates[..., : 3 * size], *gates.chunk(4, dim=-1), all_hidden, cells[:, :-1], cells[:, 1:])
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
    """Run backwards in five operations a step; the derivatives of all activations are made beforehand, at once."""
    output, write, keep, candidate = gates.chunk(4, dim=-1)
    tanh = cells[:, 1:].tanh()
    # What each gate's gradient is multiplied by: s - s^2 of a sigmoid s, 1 - t^2 of a tanh t, and the gate's partner.
    grads = gates.new_empty(gates.shape)
    sigmoids = gates[..., : -candidate.shape[-1]]
    torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1, out=grads[..., : -candidate.shape[-1]])
    by_output, by_write, by_keep, by_candidate = grads.chunk(4, dim=-1)
    by_output.mul_(tanh)
    by_write.mul_(candidate)
    by_keep.mul_(cells[:, :-1])
    torch.mul(candidate, candidate, out=by_candidate)
    torch.addcmul(write, write, by_candidate, value=-1, out=by_candidate)
    # The way from a hidden state, output * tanh, to its cell.
    slope = torch.addcmul(output, hidden, tanh, value=-1, out=tanh)
    # Copies, which the loop may change.
    grad_hidden, grad_cell = (grad.clone(memory_format=torch.contiguous_format) for grad in (grad_hidden, grad_cell))
    others = grads.unflatten(-1, (4, -1))[..., 1:, :]  # input, forget and candidate are reached through the cell
    parts = (grad_hidden, slope, keep, grads, by_output, others)
    steps = zip(*(reversed(part.unbind(1)) for part in parts), strict=True)
    later = None
    for grad, slope, keep, gate, by_output, others in steps:
        if later is not None:
            grad.baddbmm_(later, weight)
        grad_cell.addcmul_(grad, slope)
        by_output.mul_(grad)
        others.mul_(grad_cell.unsqueeze(-2))
        grad_cell.mul_(keep)
        later = gate
    return grads, grads[:, 0] @ weight, grad_cell


# As operations of torch, so that a recording of a stacked function holds one entry for each and not for every time step.
_LIBRARY = torch.library.Library("fedem", "DEF")
_LIBRARY.define(
    "lstm(Tensor bias, Tensor weight, Tensor gates, Tensor hidden, Tensor cell) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "lstm_gradient(Tensor weight, Tensor hidden, Tensor gates, Tensor cells, Tensor grad_hidden, Tensor grad_cell)"
    " -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("lstm", _recur, "CompositeExplicitAutograd")
_LIBRARY.impl("lstm_gradient", _recur_back, "CompositeExplicitAutograd")
