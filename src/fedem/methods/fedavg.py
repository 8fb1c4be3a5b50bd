"""FedAvg: one model for all clients, averaged after local training.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017. With the mixer that lets nobody talk it is Local: each client trains a model of its own. With other
mixers it is Clustered FL, L2SGD, FedU and pFedHN.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from fedem.methods.base import Method, register
from fedem.methods.mixer import Alone, Star
from fedem.methods.steps import SingleModel


@final
@dataclass(frozen=True, eq=False)
class FedAvg(SingleModel):
    """One shared model; nothing personal."""

    takes_label_shares: ClassVar[bool] = True
    minimises_likelihood: ClassVar[bool] = True


register(
    Method("local", FedAvg, Alone, title="Local", summary="a model for each client, trained alone", personal="a model",
           sent="nothing", unseen="refused", position=40),
    Method("fedavg", FedAvg, Star, title="FedAvg", summary="one model for all, averaged each round",
           paper="McMahan et al. 2017", position=50),
    Method("fedavg+", FedAvg, Star, title="FedAvg+",
           summary="FedAvg, fine-tuned by each client for one epoch before it predicts", paper="Jiang et al. 2019",
           unseen="fine-tunes the shared model", position=70),
)  # fmt: skip
