"""Any method that averages models, for clients that differ in the shares of their labels.

Where p(x | y) is common to all clients and p_t(y) is not, p_t(y | x) is proportional to p_t(y) p(x | y). So a client
adds the logarithms of its label shares to the outputs of the shared models, in training as in prediction. Menon and
others (ICLR 2021) shift outputs like this against rare classes, Zhang and others (ICML 2022) in federated learning, in
training alone. The shift is a leaf of the model (:class:`Shifted`), zero in u: a client puts its own there when a round
begins, and takes it out before it uploads. It is not trained, and nobody else sees it.

Shapes: M components, n samples of the client, K outputs of a model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, fx, nn

from fedem.core.errors import UserError
from fedem.core.tree import Tree
from fedem.methods.base import Local, Mixture, Trained
from fedem.methods.wrappers import Wrapped
from fedem.models.base import rebuilder

_PSEUDO_COUNT = 0.5  # of every class, so that one not seen yet is rare and not impossible (Jeffreys' prior)
SHIFT = "label_shift"  # name of the leaf


@final
@dataclass(frozen=True, eq=False)
class LabelShares(Wrapped):
    """The method on models that are shifted for each client. v_t gains ``label_shift``, ``[K]``."""

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        like = shared[SHIFT]
        return self.base.init_personal(shared, key) | {SHIFT: like.new_zeros(like.shape[-1])}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """The labels ``[n]`` and, for a mixture, each component's outputs without shift, ``[M, K, n]``."""
        if not self.base.is_mixture:
            return {"labels": targets}
        return {"labels": targets, "outputs": self.model.component_outputs(shared, inputs).movedim(1, -1)}

    def _scores(self, scores: Tree, shift: Tensor) -> Tree:
        """Each component's loss on each sample with the shift, ``[M, n]``, if there are outputs."""
        if "outputs" not in scores:
            return {}
        outputs = scores["outputs"].movedim(-1, 1) + shift
        labels = scores["labels"].expand(outputs.shape[:2])
        return {"losses": self.model.loss.negative_log_likelihood(outputs, labels)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        shift = self._shift(scores["labels"], mask, shared[SHIFT])
        local, samples = self.base.begin(_shifted(shared, shift), _rest(personal), self._scores(scores, shift), mask)
        return local._replace(personal=local.personal | {SHIFT: shift}), samples

    def _shift(self, labels: Tensor, mask: Tensor, like: Tensor) -> Tensor:
        """Return what a client with these labels adds to outputs: log shares or, to a single one, the log odds."""
        num_outputs = like.shape[-1]
        classes = torch.arange(max(num_outputs, 2), device=labels.device)
        counts = ((labels == classes[:, None]) & mask).sum(1).to(like.dtype) + _PSEUDO_COUNT
        log_shares = (counts / counts.sum()).log()
        return log_shares if num_outputs > 1 else log_shares[1:] - log_shares[:1]

    def finish(self, local: Local) -> Trained:
        upload, personal, shared = self.base.finish(local)
        return Trained(_plain(upload), personal, _plain(shared))

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return self.base.predictor(_shifted(shared, personal[SHIFT]), _rest(personal))

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        shift = self._shift(scores["labels"], mask, shared[SHIFT])
        fitted = self.base.adapt(_shifted(shared, shift), self._scores(scores, shift), mask, max_iterations)
        return None if fitted is None else fitted | {SHIFT: shift}


def _shifted(shared: Tree, shift: Tensor) -> Tree:
    return shared | {SHIFT: shift.expand(shared[SHIFT].shape)}


def _plain(tree: Tree) -> Tree:
    """Take the shift out of what a client trained, wherever the method has put it."""
    return {name: torch.zeros_like(leaf) if name.rpartition("/")[2] == SHIFT else leaf for name, leaf in tree.items()}


def _rest(personal: Tree) -> Tree:
    return {name: leaf for name, leaf in personal.items() if name != SHIFT}


@fx.wrap  # else nobody could follow what the network does, and its normalisations would not be folded
def _add(outputs: Tensor, shift: Tensor) -> Tensor:
    if outputs.shape[-1:] != shift.shape:
        given = f"The model puts out {outputs.shape[-1]} numbers for each sample"
        allowed = f"allowed with run.label_shares: {len(shift)}, as the classes that occur need"
        raise UserError(f"{given}; {allowed}.")
    return outputs + shift


@final
class Shifted(nn.Module):
    """A network and a buffer ``label_shift`` that is added to its outputs, zero unless a client puts its own there."""

    label_shift: Tensor

    def __init__(self, network: nn.Module, num_outputs: int):
        super().__init__()
        self.network = network
        self.register_buffer(SHIFT, torch.zeros(num_outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, ...] -> [n, K]``."""
        return _add(self.network(inputs), self.label_shift)


def shifted(source: nn.Module | Callable[[], nn.Module], num_outputs: int) -> Callable[[], nn.Module]:
    """Return a function that builds what ``source`` is or builds, with room for a shift."""
    build = rebuilder(source) if isinstance(source, nn.Module) else source

    def built() -> nn.Module:
        network = build()
        return network if isinstance(network, Shifted) else Shifted(network, num_outputs)

    return built
