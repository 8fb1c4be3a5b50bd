"""FedAvg: one model for all clients, averaged after local training.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017. With the mixer that lets nobody talk it is Local: each client trains a model of its own. With other
mixers it is Clustered FL, L2SGD, FedU and pFedHN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedem.methods.steps import SingleModel


@final
@dataclass(frozen=True, eq=False)
class FedAvg(SingleModel):
    """One shared model; nothing personal."""
