"""Methods around others: whatever they don't say otherwise, they do as the method within."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

from torch import Tensor

from fedem.methods.base import Algorithm, Batch, Local, Stage, Trained


def _as_base(hook: str) -> Any:
    return lambda self, *values, **named: getattr(self.base, hook)(*values, **named)


@dataclass(frozen=True, eq=False)
class Wrapped(Algorithm):
    """A client of ``base``, whose declarations are not taken over: a subclass says what still holds."""

    base: Algorithm

    @classmethod
    def of(cls, base: Algorithm) -> Self:
        return cls(base.model, base.solver, base)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A survey reads all samples, so it is only asked for where the method within has one.
        for name in ("has_survey", "fine_tune_setting", "has_several_models"):
            object.__setattr__(self, name, getattr(self.base, name))

    @cached_property
    def common(self) -> frozenset[str]:
        return self.base.common

    suitable_rate = _as_base("suitable_rate")
    init_shared = _as_base("init_shared")
    init_personal = _as_base("init_personal")
    score = _as_base("score")
    survey = _as_base("survey")
    begin = _as_base("begin")
    step = _as_base("step")
    tune = _as_base("tune")
    finish = _as_base("finish")
    summand = _as_base("summand")
    update = _as_base("update")
    predictor = _as_base("predictor")
    adapt = _as_base("adapt")
    check = _as_base("check")

    def stages(self, num_steps: Tensor) -> Sequence[Stage]:
        """Those of the method within; who steps otherwise does so throughout."""
        steps_otherwise = type(self).step is not Wrapped.step
        return super().stages(num_steps) if steps_otherwise else self.base.stages(num_steps)


@final
@dataclass(frozen=True, eq=False)
class FineTuned(Wrapped):
    """Any method's clients, training for themselves alone: a round ends with their u instead of an upload.

    Jiang, Konecny, Rush, Kannan: Improving Federated Learning Personalization via Model Agnostic Meta Learning, 2019,
    for FedAvg (FedAvg+).
    """

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.base.tune(local, batch, learning_rate)

    def finish(self, local: Local) -> Trained:
        """Keep u, and v_t as it is: what the method would make of it at the end of a round is for the others."""
        shared = self.base.finish(local).shared
        return Trained(shared, local.personal, shared)
