"""An LSTM in a form that stacks: same parameters, same values as ``nn.LSTM``.

It has no vmap rule, so its recurrence is written here for many models at once. The products with the inputs are plain
torch. The rest of a layer, :class:`_Recurrence`, is a loop over time with few operations a step, each over all models;
its vmap rule folds the mapped dimension into one that is already there.

Shapes: n samples of a batch, padding included, S stacked models or directions, T times, d inputs, h hidden units. The
4h gates stand in the order output, input, forget, candidate: the three sigmoids are adjacent, and so are the three
gates that the cell depends on.
"""

from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fedem.core.errors import UserError
from fedem.models import layers
from fedem.models.layers import call, define, keyed_dropout

_State = tuple[Tensor, Tensor]


class StackableLSTM(nn.LSTM):
    """``nn.LSTM`` in a form that stacks: same parameters, same values."""

    @overload
    def forward(self, input: Tensor, hx: _State | None = None) -> tuple[Tensor, _State]: ...
    @overload
    def forward(self, input: PackedSequence, hx: _State | None = None) -> NoReturn: ...
    def forward(self, input: Tensor | PackedSequence, hx: _State | None = None) -> tuple[Tensor, _State]:
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
        outputs = torch.cat([hidden[0], hidden[1].flip(0)], dim=-1) if self.bidirectional else hidden.squeeze(0)
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
    cells = gates.new_empty(num_models, num_times + 1, num_samples, size)
    cells[:, 0] = cell
    if layers.has_kernels(gates):
        from fedem.models import kernels

        states, activated = torch.empty_like(cells), gates.new_empty(gates.shape)
        states[:, 0] = hidden
        kernels.recur(gates.contiguous(), bias.contiguous(), weight.contiguous(), activated, states, cells)
        return states[:, 1:].contiguous(), cells[:, -1].clone(), activated, cells
    gates = torch.add(gates, bias[:, None, None], out=gates.new_empty(gates.shape))
    weight = weight.mT.contiguous()  # once, where the product would do it at each step
    all_hidden = gates.new_empty(num_models, num_times, num_samples, size)
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
    if layers.has_kernels(gates):
        from fedem.models import kernels

        grads, grad_cell = gates.new_empty(gates.shape), grad_cell.clone(memory_format=torch.contiguous_format)
        given = weight.mT.contiguous(), gates.contiguous(), cells.contiguous()
        kernels.recur_back(*given, grads, grad_hidden.contiguous(), grad_cell)
        return grads, grads[:, 0] @ weight, grad_cell
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


define("lstm", _recur)
define("lstm_gradient", _recur_back)
