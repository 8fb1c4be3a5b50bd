"""Any method whose clients train copies of u alone, with local solvers that go on from round to round.

Otherwise a solver starts afresh each round, as in the paper. Then a round of a few steps ends before momentum has
gathered; kept momentum was found on the client's own way, and u has been moved by the others since.
"""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix
from fedem.methods.base import Local, Mixture, Trained
from fedem.methods.wrappers import Wrapped

_KEPT = "solver"  # prefix of what v_t gains


@final
@dataclass(frozen=True, eq=False)
class KeptMomentum(Wrapped):
    """The method, and a solver's state that a client keeps beside v_t: ``solver/...``, as its last round left it."""

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        return self.base.init_personal(shared, key) | self._afresh(shared)

    def _afresh(self, shared: Tree) -> Tree:
        return add_prefix(_KEPT, self.base.start(shared))

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        local, samples = self.base.begin(shared, _rest(personal), scores, mask)
        return local._replace(solver_state=take_prefix(_KEPT, personal)), samples

    def finish(self, local: Local) -> Trained:
        trained = self.base.finish(local)
        return trained._replace(personal=trained.personal | add_prefix(_KEPT, local.solver_state))

    def survey(self, shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        return self.base.survey(shared, _rest(personal), inputs, targets, mask)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return self.base.predictor(shared, _rest(personal))

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        """A client that never trained has no momentum yet."""
        fitted = self.base.adapt(shared, scores, mask, max_iterations)
        return None if fitted is None else fitted | self._afresh(shared)


def _rest(personal: Tree) -> Tree:
    return {name: leaf for name, leaf in personal.items() if not name.startswith(f"{_KEPT}/")}
