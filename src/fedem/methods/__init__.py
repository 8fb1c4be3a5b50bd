"""The only table of names: a method is an algorithm and a mixer."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedem.core.errors import unknown
from fedem.core.settings import names_of
from fedem.methods.afl import AFL, Agnostic
from fedem.methods.apfl import APFL
from fedem.methods.base import Algorithm
from fedem.methods.clustered import Clusters
from fedem.methods.decentralised import Graph
from fedem.methods.ditto import Ditto
from fedem.methods.fedavg import FedAvg
from fedem.methods.fedem import BalancedFedEM, FedEM
from fedem.methods.fedfomo import Candidates, FedFOMO
from fedem.methods.fedprox import FedProx
from fedem.methods.ifca import IFCA
from fedem.methods.mixer import Alone, Mixer, Star
from fedem.methods.mocha import Mocha, Relations
from fedem.methods.perfedavg import PerFedAvg
from fedem.methods.pfedhn import Hypernetwork
from fedem.methods.pfedme import PFedMe
from fedem.methods.pulls import Laplacian, Loopless
from fedem.methods.qffl import QFFL
from fedem.methods.scaffold import Scaffold
from fedem.models.base import Model
from fedem.solvers import Solver


class Method(NamedTuple):
    """A row of the table."""

    algorithm: type[Algorithm]
    mixer: type[Mixer]
    title: str
    summary: str
    paper: str
    personal: str
    """what a client keeps to itself"""
    sent: str
    """what goes up and down in a round"""
    unseen: str
    """what a client unseen in training does"""

    def build(self, model: Model, solver: Solver, settings: dict[str, Any]) -> tuple[Algorithm, Mixer]:
        """Build the two from a user's checked settings."""
        own = names_of(self.mixer)
        mine = {key: value for key, value in settings.items() if key not in own}
        return self.algorithm(model, solver, **mine), self.mixer(
            **{key: value for key, value in settings.items() if key in own}
        )


_AS_IS = "takes the shared model"
_TUNE = "fine-tunes the mean of all models"

METHODS: dict[str, Method] = {
    "fedem": Method(
        FedEM,
        Star,
        "FedEM",
        "M shared components, private mixture weights",
        "Marfoq et al. 2021",
        "mixture weights",
        "M models",
        "fits its mixture weights",
    ),
    "dfedem": Method(
        FedEM,
        Graph,
        "D-FedEM",
        "FedEM without a server: components averaged with neighbours in a graph",
        "Marfoq et al. 2021",
        "mixture weights",
        "M models to and from each neighbour",
        "fits its mixture weights",
    ),
    "dsgd": Method(
        FedAvg,
        Graph,
        "D-SGD",
        "FedAvg without a server: models averaged with neighbours in a graph",
        "Lian et al. 2017",
        "nothing",
        "a model to and from each neighbour",
        "takes the mean of all models",
    ),
    "local": Method(
        FedAvg, Alone, "Local", "a model for each client, trained alone", "", "a model", "nothing", "refused"
    ),
    "fedavg": Method(
        FedAvg,
        Star,
        "FedAvg",
        "one model for all, averaged each round",
        "McMahan et al. 2017",
        "nothing",
        "a model",
        _AS_IS,
    ),
    "fedprox": Method(
        FedProx,
        Star,
        "FedProx",
        "FedAvg, each client held near the model it received",
        "Li et al. 2020",
        "nothing",
        "a model",
        _AS_IS,
    ),
    "fedavg+": Method(
        FedAvg,
        Star,
        "FedAvg+",
        "FedAvg, fine-tuned by each client for one epoch before it predicts",
        "Jiang et al. 2019",
        "nothing",
        "a model",
        "fine-tunes the shared model",
    ),
    "clustered": Method(
        FedAvg,
        Clusters,
        "Clustered FL",
        "FedAvg in clusters that split where updates disagree",
        "Sattler et al. 2020",
        "nothing",
        "a model",
        "joins the cluster with the least loss",
    ),
    "pfedme": Method(
        PFedMe,
        Star,
        "pFedMe",
        "own models as proximal points of the shared one",
        "Dinh et al. 2020",
        "a model",
        "a model",
        "finds its proximal point",
    ),
    "apfl": Method(
        APFL,
        Star,
        "APFL",
        "a blend of the shared model and an own one",
        "Deng et al. 2020",
        "a model, its share",
        "a model",
        "trains its own model and share",
    ),
    "mocha": Method(
        Mocha,
        Relations,
        "MOCHA",
        "linear models tied by a learnt matrix of relations",
        "Smith et al. 2017",
        "a dual vector (sent)",
        "a model down, a dual vector up",
        _TUNE,
    ),
    "l2sgd": Method(
        FedAvg,
        Loopless,
        "L2SGD",
        "own models, pulled towards their mean at random times",
        "Hanzely, Richtarik 2020",
        "a model (sent)",
        "a model",
        _TUNE,
    ),
    "afl": Method(
        AFL,
        Agnostic,
        "AFL",
        "one model for the worst mixture of the clients",
        "Mohri et al. 2019",
        "nothing",
        "a model; a loss up",
        _AS_IS,
    ),
    "qffl": Method(
        QFFL,
        Star,
        "q-FFL",
        "one model, clients with larger losses weigh more",
        "Li et al. 2020",
        "nothing",
        "a model; a number up",
        _AS_IS,
    ),
    "scaffold": Method(
        Scaffold,
        Star,
        "SCAFFOLD",
        "FedAvg, the clients' drift corrected by control variates",
        "Karimireddy et al. 2020",
        "a control",
        "a model and a control",
        _AS_IS,
    ),
    "ifca": Method(
        IFCA,
        Star,
        "IFCA",
        "K models, each client trains the one that fits it best",
        "Ghosh et al. 2020",
        "its choice (sent)",
        "K models down, one up",
        "joins the cluster with the least loss",
    ),
    "ditto": Method(
        Ditto,
        Star,
        "Ditto",
        "FedAvg, and own models pulled towards its model",
        "Li et al. 2021",
        "a model",
        "a model",
        "trains its own model",
    ),
    "perfedavg": Method(
        PerFedAvg,
        Star,
        "Per-FedAvg",
        "a start from which an epoch of fine-tuning fits each client",
        "Fallah et al. 2020",
        "nothing",
        "a model",
        "fine-tunes the shared model",
    ),
    "fedfomo": Method(
        FedFOMO,
        Candidates,
        "FedFOMO",
        "own models that move towards others that help",
        "Zhang et al. 2021",
        "which samples are held out",
        "a model up, P and its own down",
        "moves the mean model towards those that help, and fine-tunes",
    ),
    "fedu": Method(
        FedAvg,
        Laplacian,
        "FedU",
        "own models under Laplacian regularisation",
        "Dinh et al. 2021",
        "a model (sent)",
        "a model",
        _TUNE,
    ),
    "pfedhn": Method(
        FedAvg,
        Hypernetwork,
        "pFedHN",
        "a server's network makes each client's model from an embedding",
        "Shamsian et al. 2021",
        "nothing",
        "a model",
        "learns an embedding, the network fixed",
    ),
    "bfedem": Method(
        BalancedFedEM,
        Star,
        "Balanced FedEM",
        "FedEM whose components train at full speed, however few samples they are responsible for",
        "",
        "mixture weights, which the server sees",
        "M models, and M mixture weights up",
        "fits its mixture weights",
    ),
}
ALIASES = {"hypcluster": "ifca"}


def resolve_method(name: str) -> str:
    """Return the name in the table that ``name`` stands for."""
    found = ALIASES.get(name, name)
    find_method(found)
    return found


def title_of(name: str) -> str:
    """Return a method's title; of one that is not here, such as the row of another program, its name."""
    return METHODS[name].title if name in METHODS else name


def find_method(name: str) -> Method:
    """Return the row called ``name``."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
