"""q-FFL: clients with larger losses weigh more, by a power q.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020 (q-FedAvg, Alg. 2).
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map
from fedem.methods.base import Batch, Local, Method, Trained, register
from fedem.methods.mixer import Mixed, OneGroup, Round, Uploads, by_samples, weighted_means
from fedem.methods.steps import SingleModel, inner_product, mean_loss, require_gradient_steps, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class QFFL(SingleModel):
    """The objective is sum_t n_t/n f_t(u)^(q+1) / (q+1).

    Attributes:
        q: 0 is FedAvg; the larger, the more the worst clients count.
    """

    uploads_model: ClassVar[bool] = False

    q: float = field(default=1.0, metadata={"min": 0})

    def check(self, inputs: Tensor) -> None:
        """The smoothness is one over the learning rate, so a step must be a multiple of a gradient."""
        require_gradient_steps("qffl", self.solver)

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each sample's loss under u as received, ``[n]``."""
        return {"losses": self.model.losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        local, samples = super().begin(shared, personal, scores, mask)
        context = add_prefix("received", trained_leaves(self.model, shared))
        context["loss"] = mean_loss(scores["losses"], mask)
        context["rate"] = torch.zeros((), dtype=self.model.dtype, device=mask.device)
        return local._replace(context=context), samples

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """FedAvg's step; the learning rate is 1/L."""
        stepped = super().step(local, batch, learning_rate)
        return stepped._replace(context=local.context | {"rate": learning_rate.expand_as(local.context["rate"])})

    def finish(self, local: Local) -> Trained:
        """Upload d = L (u - w), f, and h = q |d|^2 / f + L: what the paper's clients send, all but the factor f^q."""
        received, trained = take_prefix("received", local.context), trained_leaves(self.model, local.shared)
        # By a loss of zero h would be infinite.
        loss = local.context["loss"].clamp(min=torch.finfo(self.model.dtype).eps)
        smoothness = 1 / local.context["rate"].clamp(min=torch.finfo(self.model.dtype).tiny)
        push = tree_map(lambda u, w: smoothness * (u - w), received, trained)
        buffers = {name: leaf for name, leaf in local.shared.items() if name not in trained}
        # Losses may be so large that |d|^2 alone overflows.
        slope = tree_map(lambda d: d / loss.sqrt(), push)
        curvature = self.q * inner_product(slope, slope) + smoothness
        upload = add_prefix("push", push) | add_prefix("buffers", buffers) | {"curvature": curvature, "loss": loss}
        return Trained(upload, local.personal, local.shared)

    def summand(self, upload: Tree) -> Tree:
        """The loss gives way to the logarithm of f^q, which itself may overflow."""
        rest = {name: leaf for name, leaf in upload.items() if name != "loss"}
        return rest | {"log_mass": self.q * upload["loss"].double().log()}

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """U <- u - sum f^q d / sum f^q h."""
        push = take_prefix("push", mean)
        moved = tree_map(lambda d, u: u - d / mean["curvature"], push, {name: shared[name] for name in push})
        return shared | take_prefix("buffers", mean) | moved


@final
@dataclass(frozen=True)
class ByMass(OneGroup):
    """A server that adds up by n_t / n and a mass of each client's own, known by its logarithm, ``log_mass``.

    Sums are in units of the largest mass so far: whoever divides one by another need not know which that was. Buffers
    are averaged by samples alone.
    """

    is_server_mean: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        shares, largest, sums = by_samples(this), -math.inf, dict[str, Tensor]()

        def watched() -> Uploads:
            nonlocal largest, sums
            for positions, trees in uploads:
                log_mass = trees["log_mass"].cpu()
                before, largest = largest, max(largest, float(log_mass.max()))
                weights, shrunk = shares.clone(), math.exp(before - largest)
                weights[:, positions] *= (log_mass - largest).exp()
                buffers = {name: leaf for name, leaf in trees.items() if name.startswith("buffers/")}
                massive = {name: leaf for name, leaf in trees.items() if name not in {*buffers, "log_mass"}}
                part = weighted_means(weights, [(positions, massive)])
                sums = tree_map(lambda new, old, shrunk=shrunk: new + shrunk * old, part, sums) if sums else part
                yield positions, buffers

        means = weighted_means(shares, watched()) | sums
        return Mixed(torch.zeros(1, dtype=torch.int64), means, len(this.clients)), memory


register(Method("qffl", QFFL, ByMass, title="q-FFL", summary="one model, clients with larger losses weigh more",
                paper="Li et al. 2020", sent="a model; two numbers up", position=140))  # fmt: skip
