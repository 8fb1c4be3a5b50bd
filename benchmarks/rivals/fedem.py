"""fedem's FedAvg with the engine that it chooses by itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from benchmarks.rivals.jobs import Clock, Job, Leaves, report
from fedem.core.tree import tree_index, tree_sorted
from fedem.data.federation import Federation, check_names
from fedem.data.samples import Pool, Samples
from fedem.engines import Batching, choose_engine
from fedem.methods import find_method
from fedem.models import CNN, Model
from fedem.models.losses import CrossEntropy
from fedem.runs.rounds import Training
from fedem.solvers import SGD
from fedem.solvers.schedules import Constant

SEED = 0


def prepare(job: Job, device: str) -> Training:
    """Prepare the rounds of a job; images are trained with the shipped ``cnn``, everything else as a module given."""
    names, offsets = check_names(None, len(job.offsets) - 1), torch.tensor(job.offsets)
    pool = Pool(job.inputs, job.targets)
    none = Samples(Pool(*(array[:0] for array in pool)), torch.zeros_like(offsets))
    federation = Federation(names, Samples(pool, offsets), none, none).check().to(torch.device(device))

    def build() -> nn.Module:
        if job.network != "cnn":
            return job.build()
        shipped = CNN(pixel_mean=0.0, pixel_deviation=1.0, dropout=0.0, dense_dropout=0.0)
        return shipped.build(federation.input_shape, int(job.targets.max()) + 1)

    method, model = find_method("fedavg"), Model(build, CrossEntropy())
    return Training(
        method.algorithm(model, SGD(weight_decay=0.0, momentum=0.0)),
        choose_engine("auto", 0, model, torch.device(device)),
        Batching(batch_size=job.batch_size, local_epochs=1),
        SEED,
        method.mixer(),
        Constant(job.learning_rate),
        federation,
        num_rounds=len(job.cohorts),
        cohort_size=len(job.cohorts[0]),
        device=torch.device(device),
    )


def train(job: Job, clock: Clock) -> Leaves:
    """Run the rounds from the job's first parameters; the cohorts are those that fedem draws anyway."""
    training = prepare(job, clock.device)
    state = training.init()
    # The shipped network has the same layers in the same order, under names of its own.
    given = zip(training.algorithm.model.leaf_shapes, job.start.values(), strict=True)
    state = replace(state, shared=tree_sorted({name: leaf[None].to(clock.device) for name, leaf in given}))
    clock()
    for cohort in job.cohorts:
        if training.sample(state.round).tolist() != cohort:
            raise RuntimeError(f"The cohort of round {state.round} is not the job's.")
        state, _ = training.step(state)
        clock()
    learnt = tree_index(state.shared, 0)
    return dict(zip(job.start, (learnt[name] for name in training.algorithm.model.leaf_shapes), strict=True))


if __name__ == "__main__":
    report(train)
