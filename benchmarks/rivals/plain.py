"""A loop in plain torch: what pfl does for each client, without pfl around it."""

from __future__ import annotations

import torch

from benchmarks.rivals.jobs import Clock, Job, Leaves, report, train_client


def train(given: Job, clock: Clock) -> Leaves:
    """Train client after client and average their models."""
    job, network = given.floats().to(clock.device), given.build().to(clock.device)
    shared = {name: leaf.detach().clone() for name, leaf in network.state_dict().items()}
    clock()
    for cohort in job.cohorts:
        mean = {name: torch.zeros_like(leaf) for name, leaf in shared.items()}
        total = sum(map(job.size, cohort))
        for client in cohort:
            network.load_state_dict(shared)
            train_client(network, job, client)
            for name, leaf in network.state_dict().items():
                mean[name].add_(leaf, alpha=job.size(client) / total)
        shared = mean
        clock()
    return shared


if __name__ == "__main__":
    report(train)
