"""Clustered FL: clusters of clients that split when their members pull in different directions.

Sattler, Mueller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy
Constraints, IEEE TNNLS 2020.

Shapes: T clients, C clients of the cohort, P parameters.
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix, tree_cat, tree_flat, tree_index, tree_repeat
from fedem.methods.base import Method, register
from fedem.methods.fedavg import FedAvg
from fedem.methods.mixer import Mixed, Mixer, Round, Served, Start, Uploads, gather, weighted_means


@final
@dataclass(frozen=True)
class Clusters(Mixer):
    """One group per cluster. The memory: each client's cluster, size and last update, and whether that was made there.

    Updates are of what is trained: batch statistics always move. A cluster whose mean update is small (it has nearly
    converged) while a member's is large (it is not happy there) splits in two, so that the largest cosine similarity
    between updates across the cut is small. Both halves start from what their own members uploaded.

    Attributes:
        mean_tolerance: epsilon_1: a cluster splits only when its mean update is shorter than this.
        member_tolerance: epsilon_2: and when its longest update is longer than this.
        linkage: how the cut is found. "single" minimises the largest similarity across it, the paper's criterion, and
            tends to cut off single clients where updates are noisy; "complete", as in the authors' code, looks at the
            least similar pairs instead, and "average" at all.
        min_members: a cluster with fewer members than twice this does not split.
        separation: gamma_max, how far members of one kind may be from their mean update, as a share of its length. A
            cluster splits only when sqrt((1 - a) / 2) is above it, where a is the largest similarity across the cut: so
            members within this distance of one direction are never parted. 0 makes every cut.
    """

    averages: ClassVar[bool] = True

    mean_tolerance: float = field(default=0.4, metadata={"above": 0})
    member_tolerance: float = field(default=1.6, metadata={"min": 0})
    linkage: str = field(default="complete", metadata={"choices": ("average", "complete", "single")})
    min_members: int = field(default=1, metadata={"min": 1})
    separation: float = field(default=0.0, metadata={"min": 0, "below": 1})

    def init(self, start: Start) -> tuple[Tree, Tree]:
        count, shared = len(start.keys), start.shared
        updates = {name: leaf.new_zeros(count, *leaf.shape) for name, leaf in shared.items() if name in start.trained}
        nobody = torch.zeros(count, dtype=torch.int64)
        memory = {"cluster": nobody, "sizes": nobody.clone(), "fresh": torch.zeros(count, dtype=torch.bool)}
        return tree_repeat(shared, 1), memory | add_prefix("updates", updates)

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        return Served(shared, memory["cluster"].cpu()[clients])

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        trees, memory = gather(uploads), {name: leaf.clone() for name, leaf in memory.items()}
        cluster, sizes, fresh = (memory[name] for name in ("cluster", "sizes", "fresh"))
        clients = this.clients.to(cluster.device)
        latest = take_prefix("updates", memory)
        for name, update in latest.items():
            update[clients] = trees[name] - shared[name][cluster[clients]]
        updates = tree_flat(latest, 1)
        fresh[clients] = True
        sizes[clients] = this.sizes.to(sizes.device)
        parents: dict[int, int] = {}
        for group in cluster[clients].unique().tolist():
            members = (cluster == group).nonzero().flatten()
            # A decision needs everybody's word since the cluster was formed.
            if bool(fresh[members].all()):
                half = self._leaving(members, updates[members], sizes[members])
                if half is not None:
                    parents[int(cluster.max()) + 1] = group
                    cluster[half] = int(cluster.max()) + 1
                    fresh[members] = False
        here = cluster[clients]
        groups = here.unique()
        counts = this.sizes.to(here.device).double() * (here == groups[:, None])
        means = weighted_means(counts / counts.sum(1, keepdim=True), [(torch.arange(len(clients)), trees)])
        # A new cluster none of whose members took part this round starts from its parent's tree.
        for new in sorted(parents.keys() - set(groups.tolist())):
            groups = torch.cat([groups, groups.new_tensor([new])])
            means = tree_cat([means, tree_index(shared, slice(parents[new], parents[new] + 1))])
        return Mixed(groups.cpu(), means, len(clients)), memory

    def summary(self, memory: Tree, cohort_size: int) -> dict[str, float]:
        return {"num_clusters": len(memory["cluster"].unique())}

    def _leaving(self, members: Tensor, updates: Tensor, sizes: Tensor) -> Tensor | None:
        """Return the members that form a cluster of their own; None when it stays whole."""
        if len(members) < 2 * self.min_members:
            return None
        mean = (sizes / sizes.sum()).to(updates.dtype) @ updates
        if float(mean.norm()) >= self.mean_tolerance or float(updates.norm(dim=1).max()) <= self.member_tolerance:
            return None
        side = bipartition(updates, self.linkage)
        across = _cosines(updates)[side][:, ~side].max()
        if self.separation and float(((1 - across) / 2).clamp(min=0).sqrt()) <= self.separation:
            return None
        smaller = side if 2 * int(side.sum()) <= len(side) else ~side
        return members[smaller] if int(smaller.sum()) >= self.min_members else None


def bipartition(updates: Tensor, linkage: str) -> Tensor:
    """Cut clients in two by the cosines between their updates ``[m, P]``; returns a side for each, ``[m]`` bool."""
    from scipy.cluster.hierarchy import cut_tree
    from scipy.cluster.hierarchy import linkage as link
    from scipy.spatial.distance import squareform

    distances = (1 - _cosines(updates)).clamp(min=0).fill_diagonal_(0).cpu().numpy()
    labels = cut_tree(link(squareform(distances, checks=False), linkage), 2)[:, 0]
    return torch.from_numpy(labels == labels[0]).to(updates.device)


def _cosines(updates: Tensor) -> Tensor:
    directions = torch.nn.functional.normalize(updates.double(), dim=1)
    return directions @ directions.T


register(Method("clustered", FedAvg, Clusters, title="Clustered FL",
                summary="FedAvg in clusters that split where updates disagree", paper="Sattler et al. 2020",
                unseen="joins the cluster with the least loss", position=80))  # fmt: skip
