"""The contract of a method, written for one client; and the table of methods, to which each file adds its rows.

A method is a step of federated surrogate optimisation. Near (u, v_t) a client builds a surrogate g_t of its loss, sets
v_t to its minimiser and improves u with a local solver; the clients' u are then mixed. Here u is ``shared`` and v_t is
``personal``, both trees of tensors.

No function sees other clients, a device or a network. An engine runs them for one client or, through
``torch.func.vmap``, for many at once; so they are pure and don't branch on values.

Shapes: n samples of the client, B samples of a batch, M components.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, final

from torch import Tensor

from fedem.core.errors import UserError, check_known
from fedem.core.settings import Settings, names_of
from fedem.core.tree import Tree
from fedem.methods.mixer import Mixer
from fedem.models.base import Model
from fedem.solvers import Solver


class Batch(NamedTuple):
    """Some of a client's samples. Rows whose weight is zero are padding."""

    inputs: Tensor  # [B, ...]
    targets: Tensor  # [B]
    weights: Tensor  # [B], summing to one: the objective of a batch is the mean over its samples
    samples: Tree  # [..., B], the batch's columns of what begin made for each sample
    key: Tensor  # int64, the source of the random numbers of whatever layers draw
    masks: tuple[Tensor, ...] = ()  # one [B] bool, false where a row is padding; none without (vmap takes no None)


class Local(NamedTuple):
    """What a client holds during a round."""

    shared: Tree  # its copy of u
    personal: Tree  # v_t
    solver_state: Tree  # what the local solver remembers from step to step
    context: Tree  # what begin fixed for the round, such as u as it was received


class Trained(NamedTuple):
    """A client at the end of a round."""

    upload: Tree  # what it sends
    personal: Tree  # v_t
    shared: Tree  # u, or its trained leaves, in the form received: what a client that trained alone predicts with


class Mixture(NamedTuple):
    """A client's predictor: a mixture of models. One model is a mixture of one."""

    components: Tree  # [M, ...]
    log_weights: Tensor  # [M]


Step = Callable[[Local, Batch, Tensor], Local]  # a client, its batch, the learning rate -> the client after the step


class Stage(NamedTuple):
    """Steps of a round that clients take before those of the next stage.

    The functions are the same ones in each round: an engine records what comes back.
    """

    step: Step
    num_steps: Tensor  # [C] int64; who takes more steps in a round takes no fewer in any stage
    enter: Callable[[Local], Local] | None = None  # what a client does first


@dataclass(frozen=True, eq=False)
class Algorithm(Settings, ABC):
    """A method for one client. Subclasses are final frozen dataclasses whose further fields are hyper-parameters.

    Class variables declare what a run may do with the method; nothing else decides it.
    """

    uploads_model: ClassVar[bool] = False
    """whether a client uploads u as it trained it, no more and no less: such a method goes over a graph and among
    peers, and layers may stay with their clients"""
    compressible: ClassVar[bool] = False  # whether, besides, the server just averages: messages may be rounded updates
    takes_label_shares: ClassVar[bool] = False  # whether label shares may shift outputs: clients have only copies of u
    minimises_likelihood: ClassVar[bool] = False
    """whether it minimises the f of the paper's theorems by steps on responsibility-weighted losses (all one for a
    single model): such a method can be diagnosed, and its alpha measured"""
    is_mixture: ClassVar[bool] = False
    """whether u is M components [M, ...], v_t their ``log_weights`` [M], which ``adapt`` has from ``losses`` [M, n]"""
    has_several_models: ClassVar[bool] = False
    """whether u is several models [M, ...]; mixtures are: then each is judged by itself where uploads are guarded"""
    steps_personal: ClassVar[bool] = False  # whether v_t is trained by steps of the same learning rate as u
    needs_share: ClassVar[bool] = False  # whether ``update`` goes by its ``share``: a server then asks who has how much
    parts_model: ClassVar[bool] = False  # whether it tells a model's last layer from the others: there must be others
    chooses_anew: ClassVar[bool] = False  # whether v_t is a choice by samples and u alone, made when a client predicts
    fine_tune_setting: ClassVar[str] = ""  # the setting that is its rate of fine-tuning; empty: the schedule's first
    has_scores: ClassVar[bool] = False  # whether ``score`` is overridden; set by itself
    has_survey: ClassVar[bool] = False  # whether ``survey`` is overridden; set by itself

    model: Model
    solver: Solver

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.compressible = cls.compressible and cls.uploads_model
        cls.has_several_models = cls.has_several_models or cls.is_mixture
        cls.has_scores = cls.score is not Algorithm.score
        cls.has_survey = cls.survey is not Algorithm.survey

    @cached_property
    def common(self) -> frozenset[str]:
        """Names of the leaves of u that all components have in common, where u is several models: they have one row."""
        return frozenset()

    @final
    def with_solver(self, solver: Solver) -> Self:
        """Return the same method, and any method within it, with another local solver."""
        held = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # and nothing that is no field
        inner: dict[str, Any] = {k: v.with_solver(solver) for k, v in held.items() if isinstance(v, Algorithm)}
        return replace(self, solver=solver, **inner)

    def suitable_rate(self, curvature: float) -> float:
        """Return a learning rate for clients whose mean losses bend by no more than ``curvature``."""
        return 1 / curvature

    @abstractmethod
    def init_shared(self, seed: int) -> Tree:
        """Draw the initial u."""

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """Return a client's initial v_t beside the initial u; ``key`` (int64) is the source of its random numbers.

        Names of leaves must not begin with ``residual/``, which is for compressed messages.
        """
        return {}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Return what the surrogate needs to know of each sample under u, ``[..., n]``.

        A column depends on its own sample alone, so an engine may cut or join samples as it likes.
        """
        return {}

    def survey(self, shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        """Return what the surrogate needs to know of all samples together under (u, v_t), such as a full gradient.

        ``begin`` gets the leaves among the scores. A client's samples must then fit into memory at once.
        """
        return {}

    @abstractmethod
    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """Build the surrogate near (u, v_t), as received and as kept, and set v_t to its minimiser.

        ``scores`` are those of all training samples, ``[..., n]``, and what ``survey`` found; ``mask`` ``[n]`` is false
        where a column is padding. Returns the client's state, and what fixes the surrogate by sample, ``[..., n]``.
        """

    def start(self, parameters: Tree) -> Tree:
        """Return the local solver's first state for the trained leaves of ``parameters``."""
        return self.solver.init({name: leaf for name, leaf in parameters.items() if name in self.model.trainable})

    @abstractmethod
    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Take one step of the local solver."""

    def stages(self, num_steps: Tensor) -> Sequence[Stage]:
        """Return the stages of a round in which clients take ``num_steps`` ``[C]``; they add up to these."""
        return (Stage(self.step, num_steps),)

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Take one step of fine-tuning, when a client trains for itself alone."""
        return self.step(local, batch, learning_rate)

    def finish(self, local: Local) -> Trained:
        """Return what the client uploads, its v_t and its u."""
        return Trained(local.shared, local.personal, local.shared)

    def summand(self, upload: Tree) -> Tree:
        """Return what an upload counts as in the mean; it may have other leaves than u, a numerator and its mass."""
        return upload

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """Take the server's step from u and the mean of the summands, ``share`` of everybody having taken part.

        It is counted as the mixer counts clients in its means: by samples, unless it counts them alike.
        """
        return mean

    @abstractmethod
    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """Return the client's predictor."""

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        """Fit v_t for a client unseen in training, from u and the scores of its samples (perhaps none).

        ``scores`` and ``mask`` are those of ``begin``; a client without samples has no columns.
        ``max_iterations`` bounds an iterative rule, 0 meaning to convergence and None what the method's settings say.
        Where v_t can't be had from scores, return None: the client then trains its v_t by the method's own steps, and u
        stays as it is.
        """
        return None

    def check(self, inputs: Tensor) -> None:
        """Refuse a model that the method can't train; ``inputs`` are a few samples."""


@dataclass(frozen=True)
class Method:
    """A row of the table: an algorithm, a mixer, and what to say of them."""

    name: str
    algorithm: type[Algorithm]
    mixer: type[Mixer]
    title: str
    summary: str
    paper: str = ""
    personal: str = "nothing"  # what a client keeps to itself
    sent: str = "a model"  # what goes up and down in a round
    unseen: str = "takes the shared model"  # what a client unseen in training does
    local_layers: str = "none"  # layers that stay with their clients, in the words of ``Model.leaves_called``
    aliases: tuple[str, ...] = ()  # other names that users may say
    position: int = 1000  # where it stands in lists; methods from outside come last

    def build(self, model: Model, solver: Solver, settings: dict[str, Any]) -> tuple[Algorithm, Mixer]:
        """Build the two from a user's checked settings."""
        for_mixer = {key: value for key, value in settings.items() if key in names_of(self.mixer)}
        rest = {key: value for key, value in settings.items() if key not in for_mixer}
        return self.algorithm(model, solver, **rest), self.mixer(**for_mixer)

    def trains_as(self, other: "Method") -> bool:
        """Whether the two differ in their settings alone, as FedAvg and FedAvg+ do."""
        return all(getattr(self, part) == getattr(other, part) for part in ("algorithm", "mixer", "local_layers"))

    def layers_kept(self, asked: str) -> str:
        """Return which layers stay with clients: what a run asks for or, if that is "none", what the row says."""
        return self.local_layers if asked == "none" else asked

    @property
    def shares_all(self) -> bool:
        """Whether clients keep no layers of their own, unless a run asks for it."""
        return self.local_layers == "none"

    @property
    def needs_layers(self) -> bool:
        """Whether it takes no model of a single layer."""
        return self.algorithm.parts_model or not self.shares_all

    @property
    def has_averaging_server(self) -> bool:
        """Whether all that is between clients is a server that averages what everybody sends, whole models."""
        return self.mixer.is_server_mean and self.shares_all

    @property
    def goes_over_graph(self) -> bool:
        """Whether clients can average with their neighbours, in the simulator and among peers."""
        return self.algorithm.uploads_model and (self.mixer.is_server_mean or self.mixer.over_graph)

    @property
    def is_compressible(self) -> bool:
        """Whether messages may be compressed."""
        return self.algorithm.compressible and self.has_averaging_server

    @property
    def takes_server_steps(self) -> bool:
        """Whether the server averages models and does nothing else, so that it may step by an optimiser of its own."""
        return self.algorithm.compressible and self.mixer.is_server_mean and self.mixer.adds_up

    @property
    def may_keep_momentum(self) -> bool:
        """Whether clients train copies of u, by one kind of steps: their solvers may go on from round to round."""
        has_one_stage = self.algorithm.stages is Algorithm.stages
        return has_one_stage and self.algorithm.uploads_model and not self.algorithm.steps_personal

    @property
    def takes_defence(self) -> bool:
        """Whether the server averages models, and nothing else, so that they may be guarded before it does."""
        return self.algorithm.uploads_model and self.mixer.is_server_mean and self.mixer.adds_up

    @property
    def takes_label_shares(self) -> bool:
        """Whether clients may shift outputs by the shares of their labels."""
        return self.algorithm.takes_label_shares and self.mixer.averages

    @property
    def is_diagnosable(self) -> bool:
        """Whether its rounds can be judged by the measures of the paper's theorems."""
        return self.algorithm.minimises_likelihood and self.mixer.seeks_consensus and self.shares_all


AUTO = "auto"  # for a method's num_components where their number is found while training

METHODS: dict[str, Method] = {}
ALIASES: dict[str, str] = {}


def register(*methods: Method) -> None:
    """Add rows to the table, so that every command and function knows the methods by their names."""
    for method in methods:
        for name in (method.name, *method.aliases):
            if name in METHODS or name in ALIASES:
                raise UserError(f"There is a method {name!r} already; a new one needs another name.")
        METHODS[method.name] = method
        ALIASES.update(dict.fromkeys(method.aliases, method.name))


def names_where(holds: Callable[[Method], bool]) -> str:
    """Name the methods of which something holds, as messages list them."""
    return ", ".join(name for name, row in METHODS.items() if holds(row))


def find_method(name: str) -> Method:
    """Return the row called ``name``."""
    check_known("method", [name], METHODS)
    return METHODS[name]


def resolve_method(name: str) -> str:
    """Return the name in the table that ``name`` stands for."""
    found = ALIASES.get(name, name)
    find_method(found)  # a row may stand in the table under another name than its own
    return found


def title_of(name: str) -> str:
    """Return a method's title; of one that is not here, such as the row of another program, its name."""
    return METHODS[name].title if name in METHODS else name
